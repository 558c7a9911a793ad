"""What several hosts need of the parts: addresses, a server that comes back elsewhere, stores that reach all."""

from pathlib import Path
from typing import Any

import pytest

from vime.config import validate
from vime.conflicts import one_host
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.router import Router


def run(**sections: Any) -> Any:
    return validate({"model": "m", "data": {"prompts": "p"}} | sections, "test")


def test_servers_listen_where_others_reach_them(tmp_path: Path) -> None:
    for host, more in (("127.0.0.1", {}), ("10.0.0.7", {"VLLM_HOST_IP": "10.0.0.7"})):
        engine, router = Engine(run(), 0, str(tmp_path), host=lambda host=host: host), Router(run(), ["http://a:1"], str(tmp_path), host)
        assert engine.arguments(1)["host"] == router.arguments(1)["host"] == host
        assert router.arguments(1)["prometheus_host"] == "127.0.0.1"
        assert {k: v for k, v in engine.environment().items() if k == "VLLM_HOST_IP"} == more


def test_a_server_that_moved_is_spoken_to_at_its_new_address() -> None:
    fleet = Fleet(["http://10.0.0.1:8000", "http://10.0.0.2:8000"], None, None)
    try:
        fleet.moved(1, "http://10.0.0.2:8000")  # the same
        fleet.moved(0, "http://10.0.0.3:9000")
        assert fleet.urls == ["http://10.0.0.3:9000", "http://10.0.0.2:8000"]
        assert [c.url for c in fleet._clients] == fleet.urls
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({}, ["data_plane.backend", "weights.transport"]),
        ({"data_plane": {"backend": "ray"}}, ["weights.transport"]),
        ({"data_plane": {"backend": "ray"}, "weights": {"transport": "file"}}, []),
        ({"train": {"objective": "sft"}}, ["data_plane.backend"]),
        ({"data_plane": {"backend": "ray"}, "weights": {"transport": "file"}, "rollout": {"colocate": True}}, ["rollout.colocate"]),
    ],
)
def test_memory_of_one_host_is_named(sections: dict[str, Any], keys: list[str]) -> None:
    assert [line.split(" = ")[0].split(" shares")[0] for line in one_host(run(**sections))] == keys
