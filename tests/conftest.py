"""Fixtures shared by all tests: one tiny model and one real vLLM server per session, since either takes its time to make."""

from __future__ import annotations

import copy
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from vime.config import Config, validate

# No property has a time limit: on a busy machine that is no failure.
hypothesis.settings.register_profile("vime", deadline=None)
hypothesis.settings.load_profile("vime")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the char-level model (fp32, tied lm_head, chat template), warm-started on noisy "reverse the word".

    Made once for all workers of a session. VIME_TINY_MODEL names a folder that outlives the session.
    """
    from vime.model import tiny

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "tiny.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return tiny(os.environ.get("VIME_TINY_MODEL") or shared / "tiny")


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` laid over `tree`, section by section; neither is changed."""
    out = copy.deepcopy(tree)
    for k, v in changes.items():
        out[k] = merged(out.get(k, {}), v) if isinstance(v, dict) else v
    return out


@pytest.fixture(scope="session")
def make_config(tiny_model: Path) -> Callable[..., Config]:
    """make_config(rollout={...}, ...) -> a Config for the tiny model in which prefixes are cached in blocks of 32 tokens."""
    base = {
        "model": str(tiny_model),
        "data": {"prompts": "unused.jsonl"},
        "rollout": {"max_context_len": 128, "max_response_len": 16, "concurrency": 512},
        "reward": {"function": "exact"},
        "vllm": {"block_size": 32},
    }
    return lambda **changes: validate(merged(base, changes), "test")


@dataclass
class Server:
    """The session's vLLM server; tests may kill it, and restart it through `engine.restart()`."""

    engine: Any
    url: str
    cfg: Config


@pytest.fixture(scope="session")
def server(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real vLLM server over the tiny model. A test that kills it brings it back before it ends."""
    from vime.rollout.engine import Engine

    cfg = make_config()
    engine = Engine(cfg, 0, str(tmp_path_factory.mktemp("server")))
    try:
        yield Server(engine, engine.start(), cfg)
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def tiny_server(server: Server) -> str:
    """URL of `server`, for runs with rollout.engines = [tiny_server]."""
    return server.url
