"""The job scripts that `vime launch` prints."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from vime import cli, launch
from vime.errors import VimeError

MANY = ["data_plane.backend=ray", "weights.transport=file", 'reward.function="it\'s:$HOME"']


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "my run.toml"
    path.write_text('name = "My_Run"\nmodel = "m"\n[data]\nprompts = "p"\n')
    return str(path)


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_shell_scripts_are_shell(kind: str, nodes: int, config: str, tmp_path: Path) -> None:
    out = tmp_path / "job.sh"
    assert cli.main(["launch", kind, config, *MANY, "--nodes", str(nodes), "--gpus-per-node", "8", "--out", str(out)]) == 0
    text = out.read_text()
    done = subprocess.run(["bash", "-n", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"'{config}'" in text and "RAY_AUTH_MODE=token" in text and not re.search("@[a-z]+@", text)
    assert "pkill" not in text and "ray stop" not in text, "other people's Ray may run there"


def test_ssh_wants_as_many_hosts_as_nodes(config: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(launch.script("ssh", config, MANY, 3, 8))
    done = subprocess.run(["bash", str(script), "one"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "(3 in all)" in done.stderr


def test_kuberay_is_a_ray_job(config: str) -> None:
    job = yaml.safe_load(launch.script("kuberay", config, MANY, 4, 8))
    assert (job["kind"], job["metadata"]["name"]) == ("RayJob", "my-run")
    head, workers = job["spec"]["rayClusterSpec"]["headGroupSpec"], job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == 3
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        token = next(e for e in container["env"] if e["name"] == "RAY_AUTH_TOKEN")
        assert "value" not in token, "a secret is not in the file"
    assert shlex.split(job["spec"]["entrypoint"])[-2:] == [MANY[-1], "ray.address=auto"]


@pytest.mark.parametrize(
    ("vendor", "resource", "asked"),
    [
        ("nvidia", "nvidia.com/gpu", "--gpus-per-node=8"),
        ("amd", "amd.com/gpu", "--gpus-per-node=8"),
        ("ascend", "huawei.com/Ascend910", "--gres=npu:8"),
    ],
)
def test_what_is_asked_for_is_the_vendors(vendor: str, resource: str, asked: str, config: str, tmp_path: Path) -> None:
    for kind in ("kuberay", "slurm"):
        out = tmp_path / kind
        given = ["--nodes", "2", "--gpus-per-node", "8", "--accelerator", vendor, "--out", str(out)]
        assert cli.main(["launch", kind, config, *MANY, *given]) == 0
    cluster = yaml.safe_load((tmp_path / "kuberay").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {resource: 8}
    lines = (tmp_path / "slurm").read_text().splitlines()
    assert [line for line in lines if line.startswith("#SBATCH") and ("gpu" in line or "gres" in line)] == [f"#SBATCH {asked}"]
    assert set(launch.ACCELERATORS) == {"nvidia", "amd", "ascend"}


def test_a_run_of_one_host_is_not_launched_on_several(config: str) -> None:
    with pytest.raises(VimeError, match=r'data_plane.backend = "shm" is the memory of one host(.|\n)*weights.transport = "shm"'):
        launch.script("slurm", config, [], 2, 8)
    assert "--nodes=1" in launch.script("slurm", config, [], 1, 8)
