"""The model proxy: a harness talks to it as to its provider, and what comes out are the exact tokens to train on."""

from vime.agents.gateway.command import opened
from vime.agents.gateway.record import Asked, Refused, Session, Trajectory, Turn
from vime.agents.gateway.server import Gateway

__all__ = ["Asked", "Gateway", "Refused", "Session", "Trajectory", "Turn", "opened"]
