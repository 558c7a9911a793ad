"""Agents as a kind of rollout: loop, tools, sandboxes, the model proxy in front of a harness, and what keeps rewards honest."""
