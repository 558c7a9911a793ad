"""The nodes of a Ray cluster: whether they can run this job together, and where its servers and trainer ranks go. docs/multi-node.md."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Within

from vime.config import Config
from vime.conflicts import one_host
from vime.errors import VimeError
from vime.procs import free_port

ROOM = 120.0  # seconds until a place must be found


def setup_hook() -> Callable[[], None]:
    """For each of Ray's processes, which begin elsewhere: relative paths of the configuration mean the driver's folder."""
    folder = os.getcwd()

    def at_home() -> None:
        if os.path.isdir(folder):  # `check` says where it is missing
            os.chdir(folder)

    return at_home


def address(local: bool) -> str:
    """Of this process's host, for other hosts."""
    return "127.0.0.1" if local else str(ray.util.get_node_ip_address())


def meeting(local: bool) -> tuple[str, int]:
    """Where trainer rank 0, whose process this is, can be met."""
    host = address(local)
    return host, free_port(host)


def check(cfg: Config, folder: Path) -> None:
    """Raises: VimeError with every reason why the nodes of the cluster cannot do this run together."""
    nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
    faults = one_host(cfg) if len(nodes) > 1 else []
    places = {"run_dir": str(folder / "config.toml"), "model": cfg.model}
    seen = [ray.remote(_look_at).options(num_cpus=0, scheduling_strategy=On(n, soft=False)).remote([*places.values()]) for n in nodes]
    _, late = ray.wait(seen, num_returns=len(seen), timeout=ROOM)
    for node, ref in zip(nodes.values(), seen):
        missing = {} if ref in late else {k: path for (k, path), there in zip(places.items(), ray.get(ref)) if not there}
        faults += [f"node {node} does not answer"] * (ref in late)
        faults += [f"node {node} does not see {k}, {os.path.abspath(p)}: it must be on a file system that all share" for k, p in missing.items()]
    if faults:
        raise VimeError(f"this Ray cluster of {len(nodes)} nodes cannot do the run:\n  " + "\n  ".join(faults))


def _look_at(paths: list[str]) -> list[bool]:
    return [os.path.exists(p) for p in paths]


def devices(n: int, cfg: Config) -> dict[str, Any]:
    """Ray's options for an actor with n accelerators, where the cluster has some and servers and trainer don't share them."""
    held = ray.cluster_resources()
    if cfg.rollout.colocate or not ({"GPU", "NPU"} & set(held)):
        return {}
    return {"num_gpus": n} if "GPU" in held else {"resources": {"NPU": n}}


def for_ranks(cfg: Config) -> list[dict[str, Any]]:
    """Options of each trainer rank, the critic's own last. Ranks on one node have neighbouring numbers, as tp and cp, the innermost axes, want. Raises: VimeError."""
    n, own = cfg.ranks, devices(1, cfg)
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if "num_gpus" in own else own.get("resources", {}))
    group = placement_group([bundle] * n, strategy=cfg.ray.placement.upper())
    if not ray.wait([group.ready()], timeout=ROOM)[0]:
        held = {k: v for k, v in ray.available_resources().items() if k in bundle}
        raise VimeError(f"{n} trainer ranks find no room: each takes {bundle}, free in the Ray cluster are {held}", "fewer ranks, or more nodes")
    at = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(n), key=lambda b: (at[b], b))
    return [own | {"scheduling_strategy": Within(group, placement_group_bundle_index=b)} for b in order]


def for_engine(args: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """Options of a server with these vLLM arguments."""
    n = math.prod(int(args.get(f"{axis}_parallel_size", 1)) for axis in ("tensor", "pipeline", "data"))
    return {"num_cpus": 1, "scheduling_strategy": "SPREAD"} | devices(n, cfg)
