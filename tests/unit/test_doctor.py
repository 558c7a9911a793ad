from pathlib import Path

import psutil
import pytest

from vime import doctor
from vime.doctor import GIB


def rows() -> dict[str, tuple[str, str]]:
    return {what: (state, found) for state, what, found in doctor.checks()}


def test_a_control_group_limits_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    total = doctor.memory()[1]
    assert total == psutil.virtual_memory().total, "no group: the machine's"
    (tmp_path / "memory.stat").write_text("cache 9\ninactive_file 100\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert doctor.memory() == (800, 1000)
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        (tmp_path / "memory.max").write_text(unlimited)
        assert doctor.memory()[1] == total


@pytest.mark.parametrize(("free", "state"), [(5.9, "warn"), (6.1, "ok")])
def test_little_memory_says_what_it_means(monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    monkeypatch.setattr(doctor, "memory", lambda: (int(free * GIB), 20 * GIB))
    got, found = rows()["memory"]
    assert got == state and f"{free} of 20.0 GiB free" in found
    assert ("at 95% use, 1.0 GiB free, Ray kills workers and trainer ranks" in found) == (state == "warn")
