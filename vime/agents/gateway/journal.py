"""Turns on disk, so that a Gateway that starts anew has every one that a client has got. A turn is written before it is sent, and that it was
delivered after: of one without the second line a later request shows whether it arrived."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from vime.agents.gateway.record import Session, Turn
from vime.errors import VimeError, said

if TYPE_CHECKING:
    from vime.agents.gateway.server import Gateway

DAMAGED = "the journal is damaged: move it away to begin anew"


class Journal:
    """A file of JSON lines, readable by its owner only: it has the sessions' tokens. Brings back those that were open, and writes the file anew
    without the others; a torn last line is left out. Raises: VimeError where it can't be read or written."""

    def __init__(self, path: Path, gateway: Gateway):
        self.path = path
        open_: dict[str, list[dict[str, Any]]] = {}
        try:
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
            for n, line in enumerate(lines, start=1):
                try:
                    event = orjson.loads(line) if line else None
                    if event and event["e"] == "closed":
                        open_.pop(event["session"], None)
                    elif event:
                        open_.setdefault(event["session"], []).append(event)
                except (orjson.JSONDecodeError, KeyError, TypeError) as e:
                    if n >= len(lines) - 1:
                        break
                    raise VimeError(f"{self.path}:{n}: {said(e)}", DAMAGED) from e
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_name(self.path.name + ".new")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
                f.writelines(orjson.dumps(e) + b"\n" for events in open_.values() for e in events)
            os.replace(fresh, self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as e:
            raise VimeError(f"journal {self.path}: {said(e)}") from e
        try:
            for events in open_.values():
                _restore(gateway, events)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise VimeError(f"{self.path}, session {events[0].get('session')}: {said(e)}", DAMAGED) from e

    def write(self, event: dict[str, Any]) -> None:
        try:
            self._file.write(orjson.dumps(event) + b"\n")
        except OSError as e:
            raise VimeError(f"journal {self.path}: {said(e)}") from e

    def close(self) -> None:
        self._file.close()


def _restore(gateway: Gateway, events: list[dict[str, Any]]) -> None:
    first, *rest = events
    s = gateway.enrol(Session(gateway, first["session"], first["token"], first["sampling"], first["metadata"]), first["limits"])
    for e in rest:
        if e["e"] == "turn":
            turn = Turn(**(e["turn"] | {"parent": s.index.get(e["turn"]["parent"]), "delivered": False}))
            s.requests, s.sampled = s.requests + 1, s.sampled + len(turn.output_ids)
            s.adopt(turn)
            s.asked[turn.key or turn.id] = turn, (done := asyncio.get_running_loop().create_future())
            done.set_result(turn)
        elif e["e"] == "delivered":
            s.index[e["turn"]].delivered = True
            s.turns.append(s.index[e["turn"]])
        else:
            s.reward = e["reward"]
