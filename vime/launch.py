"""`vime launch`: the job script of a run on several nodes, printed to be read and submitted by its owner. docs/multi-node.md."""

import json
import re
import shlex
import sys
from pathlib import Path

from vime.config import load
from vime.conflicts import one_host
from vime.errors import VimeError

TEMPLATES = {"slurm": "slurm.sh", "ssh": "ssh.sh", "kuberay": "kuberay.yaml"}
# Ray kills a server's guard before its server, unless told not to.
SETUP = "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_kill_child_processes_on_worker_exit=false"
# Kubernetes's name of what each vendor's device plugin offers
ACCELERATORS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "ascend": "huawei.com/Ascend910"}
COUNT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); sys.exit(sum(n['Alive'] for n in ray.nodes()) < {})"


def script(kind: str, config: str, overrides: list[str], nodes: int, gpus: int, accelerator: str = "nvidia") -> str:
    """The script for `nodes` hosts with `gpus` accelerators each, of a vendor of ACCELERATORS. Raises: VimeError where the run is not one for several hosts."""
    cfg = load(config, overrides)
    if nodes > 1 and (wrong := one_host(cfg)):
        raise VimeError(f"{config} is for one host:\n  " + "\n  ".join(wrong))
    python, name = ("python", config) if kind == "kuberay" else (shlex.quote(sys.executable), str(Path(config).resolve()))
    values = {
        "name": re.sub("[^a-z0-9]+", "-", cfg.name.lower()).strip("-")[:50] or "vime", "nodes": nodes, "workers": nodes - 1, "gpus": gpus,
        "folder": str(Path.cwd()) if kind == "kuberay" else shlex.quote(str(Path.cwd())), "python": python, "setup": SETUP,
        "train": f"{python} -m vime.cli train {shlex.join([name, *overrides])}", "count": COUNT.format(nodes), "up": COUNT.format(1),
        "resource": ACCELERATORS[accelerator], "gres": "gres=npu:" if accelerator == "ascend" else "gpus-per-node=",
    }  # fmt: skip
    values["train"] = json.dumps(f"{values['train']} ray.address=auto") if kind == "kuberay" else values["train"]
    text = (Path(__file__).parent / "templates" / TEMPLATES[kind]).read_text()
    return re.sub("@([a-z]+)@", lambda m: str(values[m[1]]), text)
