"""The sandboxes: what can be done in them, what can't, and that nothing is left of them."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import uvloop

from tests.unit.sandbox_kit import ATTEMPTS, CONTROLS
from vime.agents.sandbox import SandboxSpec, local, open_sandbox
from vime.errors import VimeError

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
ROOT = os.geteuid() == 0


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    for name, text in {"a.py": "x = 1\n", "b": "b\n", "kept/a": "kept\n", "deep/in/er/a": "kept\n", "folder/one": "1", "folder/two": "2"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link").symlink_to("a.py")
    return folder


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What there is to reach on the host."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "bind").mkdir(mode=0o755)
    for name in ("canary", "bind/file"):
        (folder / name).write_text("canary")
    name = f"vime-test-{os.getpid()}"
    process = subprocess.Popen(["sleep", "98765"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen(64)
        yield {"port": server.getsockname()[1], "name": name, "canary": folder / "canary", "pid": process.pid, "bind": folder / "bind"}
    process.kill()
    process.wait()


def left(number: str) -> list[str]:
    """What is on this machine of the sandboxes whose name begins with `number`."""
    there = [*Path("/tmp").glob(f"vime-sandboxes-*/{number}-*"), *Path("/sys/fs/cgroup").rglob(f"vime-{number}-*")]
    return [str(p) for p in there] + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "vime-sandboxes" in line]


def test_commands_files_and_changes(base, tmp_path):
    async def main():
        async with await open_sandbox(SandboxSpec(base=str(base), env={"A": "1"})) as box:
            done = await box.exec(["bash", "-c", "echo $A $B; pwd; cat; echo wrong >&2; exit 3"], env={"B": "2"}, stdin=b"given")
            assert (done.code, done.stdout, done.stderr, done.timed_out) == (3, b"1 2\n/work\ngiven", b"wrong\n", False)
            assert sorted(done.output.split()) == ["/work", "1", "2", "givenwrong"] or "given" in done.output
            done = await box.exec(["sh", "-c", "seq 100000"], max_output=100)
            assert done.truncated and len(done.stdout) == 100
            assert (await box.exec(["no-such-program"])).code == 127
            assert (await box.exec(["pwd"], cwd="/tmp")).stdout == b"/tmp\n"
            script = "echo 2 >>a.py; rm b link; mkdir new; echo n >new/n; rm -r folder; mkdir folder; echo 1 >folder/three; touch kept/a; ln -s x l"
            assert (await box.exec(["bash", "-c", script])).code == 0
            expected = {"a.py": "modified", "b": "deleted", "link": "deleted", "new/n": "added", "folder/one": "deleted", "folder/two": "deleted"}
            assert await box.changes() == expected | {"folder/three": "added", "l": "added"}
            await box.write("/work/sub/data", bytes(range(256)), 0o750)
            assert await box.read("sub/data") == bytes(range(256))
            assert (await box.exec(["stat", "-c", "%a", "sub/data"])).stdout == b"750\n"
            await box.upload(str(base), "/work/copy")
            await box.download("/work/copy", str(tmp_path / "copy"))
            assert (tmp_path / "copy/deep/in/er/a").read_text() == "kept\n" and os.readlink(tmp_path / "copy/link") == "a.py"
            await box.download("a.py", str(tmp_path / "one"))
            assert (tmp_path / "one").read_text() == "x = 1\n2\n"
            with pytest.raises(VimeError, match=r"cannot read /nothing: .*No such file"):
                await box.read("/nothing")
            again = await box.snapshot(str(tmp_path / "snapshot"))
        async with await open_sandbox(SandboxSpec(base=again)) as box:
            assert await box.read("new/n") == b"n\n" and await box.changes() == {}
        with pytest.raises(VimeError, match="it has ended"):
            await box.exec(["true"])

    run(main)
    assert sorted(p.name for p in base.iterdir()) == ["a.py", "b", "deep", "folder", "kept", "link"], "the base is never written"
    assert (base / "a.py").read_text() == "x = 1\n"


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_sandbox_takes_its_descriptors_along(runner):
    """Also those of shells that nobody closed. One that is left to the garbage collector is closed late, in whichever thread that runs, under
    a number that another connection may have by then: which so hung for ever, or was cut. Nor is any number closed twice."""

    def pipes() -> int:
        found = 0
        for n in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # listdir's own
                found += "pipe:" in os.readlink(f"/proc/self/fd/{n}")
        return found

    async def main():
        counts = []
        for _ in range(3):
            async with await open_sandbox(SandboxSpec()) as box:
                for _ in range(4):
                    assert (await (await box.shell()).run("echo hi")).output == "hi\n"
                assert (await box.exec(["true"])).code == 0
                pipe = (await box.start(["true"], "/", {})).stdin.get_extra_info("pipe")
                assert pipe.closefd == (runner is asyncio.run), "uvloop closes the number itself"
            await asyncio.sleep(0.05)
            counts.append(pipes())
        assert len({*counts}) == 1

    gc.disable()
    try:
        runner(main())
    finally:
        gc.enable()


def test_a_command_can_be_interrupted_where_signals_are_ignored():
    """As in a job that a script has put into the background."""
    code = """import asyncio
from vime.agents.sandbox import SandboxSpec, open_sandbox
async def main():
    async with await open_sandbox(SandboxSpec()) as box:
        shell = await box.shell()
        print((await shell.run("echo begun; sleep 100; echo not", timeout=1)).output)
        print((await shell.run("grep Sig[BI] /proc/self/status")).output)
asyncio.run(main())"""
    done = subprocess.run(["env", "--ignore-signal", "--block-signal", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = done.stdout.split()
    assert said[0] == "begun" and "not" not in said and said[-4::2] == ["SigBlk:", "SigIgn:"], done
    assert [int(x, 16) % 2**31 for x in said[-3::2]] == [0, 0], done  # 32 and 33 are the C library's own


def test_shell_keeps_its_state_and_survives_what_is_run_in_it():
    async def main():
        async with await open_sandbox(SandboxSpec()) as box:
            shell = await box.shell()
            assert (await shell.run("cd /tmp; export X=3; f() { echo f$X; }")).output == ""
            done = await shell.run("pwd; f; echo wrong >&2; false")
            assert (done.code, done.output) == (1, "/tmp\nf3\nwrong\n")
            assert (await shell.run("echo 'unfinished")).code != 0
            assert (await shell.run("cat; read x")).code is not None, "stdin is empty"
            await shell.run("for i in 1 2 3 4 5 6 7 8; do (true); done")  # process 10 is listed before 2, the shell
            done = await shell.run("echo begun; sleep 100; echo not", timeout=0.5)
            assert done.timed_out and done.code is None and "begun" in done.output and "not" not in done.output
            assert (await shell.run("trap '' INT; bash -c 'trap \"\" INT; while :; do :; done'", timeout=0.5)).timed_out
            assert (await shell.run("pwd; f")).output == "/tmp\nf3\n", "state outlives both"
            assert (await shell.run("seq 1000000", max_output=1000)).truncated
            assert "has ended" in (await shell.run("exit 4")).output
            assert (await shell.run("pwd")).output == "/work\n"

    run(main)


def test_time_runs_out_for_all_that_a_command_started():
    async def main():
        async with await open_sandbox(SandboxSpec()) as box:
            done = await box.exec(["bash", "-c", "echo begun; (setsid sleep 4321 & sleep 4321) & sleep 4321"], timeout=0.4)
            assert done.timed_out and done.code is None and done.output == "begun\n"
            await box.exec(["bash", "-c", "setsid nohup sleep 4322 >/dev/null 2>&1 &"])
            assert "4322" in (await box.exec(["ps", "ax"])).output
            await box.killall()
            listed = (await box.exec(["ps", "ax"])).output
            assert "sleep" not in listed, listed
            done = await box.exec(["bash", "-c", "sleep 77 & echo fine"])
            assert done.output == "fine\n" and done.seconds < 60, "a daemon that holds the pipes is not waited for"

    run(main)


async def attempts(base, host):
    """{attempt: what it printed}, of those that got out."""
    got = {}
    spec = SandboxSpec(base=str(base), binds={str(host["bind"]): str(host["bind"])}, protected=["kept/**", "deep/*/er"])
    async with await open_sandbox(spec) as box:
        for name, script in ATTEMPTS.items():
            done = await box.exec(["bash", "-c", script.format(**host)], timeout=20)
            if done.timed_out or "ESCAPED" in done.output:
                got[name] = done.output[-200:]
        assert (await box.exec(["echo", "alive"])).output == "alive\n"
        assert not {"kept/a", "deep/in/er/a"} & set(await box.changes())
    return got


def test_no_attempt_gets_out(base, host):
    assert len(ATTEMPTS) >= 25
    own = set() if ROOT else {"/proc/1/mem", "ptrace of process 1, then its memory"}  # without root process 1 has just the agent's rights
    assert set(run(lambda: attempts(base, host))) - own == set()
    assert (host["bind"] / "file").read_text() == "canary" and (base / "kept/a").read_text() == "kept\n"
    assert not list(Path("/").glob(".vime-attempt")) and not list(Path("/usr/bin").glob(".vime-attempt"))


@pytest.mark.skipif(not ROOT, reason="the controls are root's")
def test_the_attempts_would_work_outside(host):
    """What says ESCAPED outside shows that the test above can fail."""
    script = "unshare -m --propagation private bash -c "
    dead = [
        n for n in CONTROLS if b"ESCAPED" not in subprocess.run([*script.split(), ATTEMPTS[n].format(**host)], capture_output=True, timeout=60).stdout
    ]
    assert not dead, f"no longer attempts: {dead}"


def test_limits_hold():
    """Processes, memory and disk run out inside, and the sandbox goes on."""
    forks = "import os, time\nn = 0\ntry:\n  while n < 600:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nexcept OSError: pass\nprint(n)"

    async def main():
        async with await open_sandbox(SandboxSpec(memory_mb=200, pids=64, disk_mb=48)) as box:
            done = await box.exec(["python3", "-c", forks], timeout=60)
            assert 1 < int(done.output) < 70
            await box.killall()
            bomb = await box.exec(["bash", "-c", ":(){ :|:& };:; sleep 0.5"], timeout=20)
            assert "Resource temporarily unavailable" in bomb.output or bomb.timed_out
            await box.killall()
            done = await box.exec(["python3", "-c", "x = b'x' * (600 << 20); print(len(x))"])
            assert done.code != 0 and str(600 << 20) not in done.output
            for folder in ("/tmp", "/work", "/dev/shm", "/home/agent"):
                done = await box.exec(["bash", "-c", f"head -c 100M /dev/zero >{folder}/full; stat -c %s {folder}/full; rm {folder}/full"])
                assert "No space left" in done.output and int(done.stdout) <= 48 << 20, folder
            assert (await box.exec(["echo", "alive"])).output == "alive\n"

    run(main)


def test_what_an_agent_links_is_not_followed_on_the_host(host, tmp_path):
    async def main():
        async with await open_sandbox(SandboxSpec()) as box:
            await box.exec(["bash", "-c", f"ln -s {host['canary']} file; ln -s /tmp up; ln -s {tmp_path} away; mkdir d; echo 1 >d/x"])
            with pytest.raises(VimeError, match="cannot read"):
                await box.read("file")
            with pytest.raises(VimeError, match="cannot write"):
                await box.write(f"away/{'x'}", b"out")
            await box.snapshot(str(tmp_path / "to"))

    run(main)
    assert (tmp_path / "to/file").is_symlink() and [p.name for p in tmp_path.iterdir()] == ["to"]


@pytest.mark.parametrize("network", [False, True])
def test_the_relay_reaches_one_port_of_the_host(network):
    async def main():
        async def answer(reader, writer):
            writer.write((await reader.read()) * 3)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\ns.sendall(b'x' * 300000)\ns.shutdown(1)\n"
        code += "n = 0\nwhile d := s.recv(65536): n += len(d)\nprint(n)"
        near = port if network else 8399
        async with await open_sandbox(SandboxSpec(sockets={} if network else {8399: port}, network=network)) as box:
            got = await asyncio.gather(*(box.exec(["python3", "-c", code, str(near)]) for _ in range(4)))
            assert [g.output for g in got] == ["900000\n"] * 4

    run(main)


def test_a_hundred_at_once():
    async def one(n):
        async with await open_sandbox(SandboxSpec(memory_mb=256)) as box:
            return (await box.exec(["bash", "-c", f"echo {n} >n; sleep 0.5; cat n"])).output

    async def main():
        return await asyncio.gather(*(one(n) for n in range(100)))

    assert run(main) == [f"{n}\n" for n in range(100)]
    assert left(f"{os.getpid()}-*") == []


DIES = """
import asyncio, os, sys
from vime.agents.sandbox import SandboxSpec, local, open_sandbox
async def main():
    box = await open_sandbox(SandboxSpec())
    await box.exec(["bash", "-c", "setsid nohup sleep 76543 >/dev/null 2>&1 &"])
    running = asyncio.ensure_future(box.exec(["sleep", "76543"]))
    await asyncio.sleep(0.2)
    print("there", flush=True)
    await running
asyncio.run(main())
"""


def test_who_leaves_early_ends_nothing_else(capfd):
    """Whatever is given up, at whatever moment: the sandbox stays, and nothing of the command does."""

    async def main():
        async def gone(what, seconds):
            task = asyncio.create_task(what)
            await asyncio.sleep(seconds)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await task

        for after in (0, 0.001, 0.01, 0.03):
            if box := await gone(open_sandbox(SandboxSpec()), after):
                await box.stop()
        async with await open_sandbox(SandboxSpec()) as box:
            shell = await box.shell()
            for after in (0, 0.0005, 0.002, 0.01):
                await gone(box.exec(["sh", "-c", "sleep 77 & sleep 77"]), after)
                await gone(box.changes(), after)
                await gone(shell.run("sleep 66"), after)
            line = socket.socket(socket.AF_UNIX)  # no request at all
            line.connect(f"{box.state}.sock")
            line.close()
            assert (await shell.run("echo here")).stdout.endswith(b"here\n") and await box.changes() == {}
            seen = "sleep"
            while "sleep" in seen:  # `run` has a limit of time
                seen = (await box.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])).output.replace("cat /proc", "")

    run(main)
    assert left(f"{os.getpid()}-*") == [] and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("left_over", ["yes", "while :; do echo x; sleep 0.05; done"])
def test_what_a_command_leaves_running_holds_nobody_up(left_over, monkeypatch):
    monkeypatch.setattr("vime.agents.sandbox.GRACE", 0.1)

    async def main():
        async with await open_sandbox(SandboxSpec()) as box:
            done = await box.exec(["sh", "-c", f"setsid sh -c '{left_over}' & echo first; sleep 0.1"], max_output=1 << 16)
            assert done.code == 0 and len(done.stdout) <= 1 << 16
            await box.killall()
            done = await box.exec(["sh", "-c", "head -c 3000000 /dev/zero"], max_output=1 << 24)
            assert len(done.stdout) == 3_000_000 and not done.truncated

    run(main)


@pytest.mark.parametrize("also_keepers", [False, True])
def test_nothing_is_left_when_the_parent_is_killed(also_keepers):
    process = subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"there\n"
    mine = [p.name for p in Path("/proc").glob("[0-9]*") if _said(p, "cmdline").split(b"\0")[:2] == [b"sleep", b"76543"]]
    assert len(mine) == 2
    if also_keepers:
        for path in Path("/proc").glob("[0-9]*"):
            if b"keeper.py" in _said(path, "cmdline") and _parent(path) in (process.pid, *(int(p.name) for p in _children(process.pid))):
                os.kill(int(path.name), signal.SIGKILL)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (any(Path(f"/proc/{p}").exists() for p in mine) or (not also_keepers and left(str(process.pid)))):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{p}").exists() for p in mine)
    if also_keepers:  # what they leave is empty, and the next process that opens one sweeps it
        subprocess.run([sys.executable, "-c", "from vime.agents.sandbox.local import zygote; zygote()"], check=True)
    assert left(str(process.pid)) == []


def _said(path, name):
    try:
        return (path / name).read_bytes()
    except OSError:
        return b""


def _parent(path):
    return int((_said(path, "stat").rpartition(b")")[2].split() or [0, 0])[1])


def _children(pid):
    return [p for p in Path("/proc").glob("[0-9]*") if _parent(p) == pid]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A small image of this machine's own programs; skips where there is no podman that works with runc."""
    if not ROOT or not shutil.which("podman") or not shutil.which("runc") or not Path("/usr/bin/python3.11").exists():
        pytest.skip("needs podman, runc and Debian's python3.11")
    root = tmp_path_factory.mktemp("root")
    programs = [
        f"/usr/bin/{p}"
        for p in ("sh", "bash", "tar", "find", "sha256sum", "cat", "grep", "sleep", "env", "mkdir", "readlink", "dirname", "chmod", "python3.11")
    ]
    libraries = {w for p in programs for w in subprocess.run(["ldd", p], capture_output=True, text=True).stdout.split() if w.startswith("/")}
    for path in (*programs, *libraries):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    shutil.copytree(
        "/usr/lib/python3.11", root / "usr/lib/python3.11", ignore=shutil.ignore_patterns("test*", "*dist*", "idlelib", "tkinter"), symlinks=True
    )
    (root / "usr/bin/python3").symlink_to("python3.11")
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").mkdir(mode=0o1777)
    tar = subprocess.run(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE, check=True)
    done = subprocess.run(["podman", "import", "-", "vime-test"], input=tar.stdout, capture_output=True)
    if done.returncode:
        pytest.skip(f"podman: {done.stderr.decode()[-200:]}")
    yield "podman:localhost/vime-test"
    subprocess.run(["podman", "rmi", "-f", "vime-test"], capture_output=True)


def test_a_container_is_the_same_sandbox(image, base):
    options = ["--runtime", shutil.which("runc"), "--ulimit", "nofile=1024:4096", "--ulimit", "nproc=4096:4096"]

    async def main():
        async def answer(reader, writer):
            writer.write(b"answer " + await reader.read(5))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        sockets = {8399: server.sockets[0].getsockname()[1]}
        async with await open_sandbox(SandboxSpec(kind=image, base=str(base), sockets=sockets, options=options, prepare="echo 1 >made")) as box:
            assert await box.read("made") == b"1\n" and await box.changes() == {}
            done = await box.exec(["bash", "-c", "pwd; cat; echo wrong >&2; echo 2 >>a.py; exit 3"], stdin=b"given")
            assert (done.code, done.stdout, done.stderr) == (3, b"/work\ngiven", b"wrong\n")
            await box.write("new/n", b"\0\1")
            assert await box.read("new/n") == b"\0\1" and await box.changes() == {"a.py": "modified", "new/n": "added"}
            code = "import socket; s = socket.create_connection(('127.0.0.1', 8399)); s.sendall(b'hello'); print(s.recv(99))"
            assert (await box.exec(["python3", "-c", code])).output == "b'answer hello'\n"
            assert (await box.exec(["python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 9), 1)"])).code == 1
            shell = await box.shell()
            await shell.run("cd /tmp; X=3")
            assert (await shell.run("sleep 60", timeout=0.5)).timed_out and (await shell.run("echo $X $PWD")).output == "3 /tmp\n"
            assert (await box.exec(["bash", "-c", "sleep 61 & sleep 61"], timeout=0.5)).timed_out
            assert "61" not in (await box.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline"])).output.replace("bash", "")

    run(main)
    assert subprocess.run(["podman", "ps", "-aq"], capture_output=True).stdout == b""


@pytest.mark.skipif(not ROOT or not shutil.which("setpriv"), reason="is what the other tests do")
def test_a_user_without_rights_has_the_same(tmp_path):
    """The commands, the changes and all attempts once more as nobody, with this interpreter where it can be reached."""
    prefix, own = sys.base_prefix, f"{tmp_path}/r"
    reach = f"mkdir {own} && mount --bind {prefix} {own} && mount -t tmpfs -o mode=755 x /root && mkdir -p {prefix} && mount --move {own} {prefix}"
    words = [reach if prefix.startswith("/root/") else "true", "mount -t tmpfs -o mode=1777 x /var/tmp", "export TMPDIR=/var/tmp HOME=/var/tmp"]
    chosen = "changes or gets_out or shell or relay"
    drop = "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all"
    words += [f"exec {drop} {sys.executable} -m pytest -q -x -p no:cacheprovider -k '{chosen}' tests/unit/test_sandbox.py"]
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", " && ".join(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def test_faults_are_told_in_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "out").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/gone").symlink_to("nowhere")

    async def main():
        for spec, said in (
            (SandboxSpec(base=str(tmp_path / "none")), "is not a folder"),
            (SandboxSpec(kind="lokal"), "there is no kind 'lokal'"),
            (SandboxSpec(kind="no.such:thing"), "cannot import no.such"),
            (SandboxSpec(binds={str(tmp_path / "none"): "/x"}), "bwrap: .*none"),
            (SandboxSpec(workdir="work"), "absolute path"),
            (SandboxSpec(workdir="//"), "absolute path"),
            (SandboxSpec(disk_mb=0), "must be positive"),  # of a tmpfs that would be no limit
            (SandboxSpec(sockets={99999: 1}), "cannot listen on port 99999"),
            *(
                (SandboxSpec(base=str(tmp_path), protected=[p]), "leads out of the work folder, or nowhere")
                for p in ("o*", "loop", "../*", "/etc/host*")
            ),
        ):
            with pytest.raises(VimeError, match=said):
                await open_sandbox(spec)
        async with await open_sandbox(SandboxSpec(base=str(tmp_path), protected=["kept/**"])) as box:
            for argv in ([], ["a\0b"], ["\ud800"], [3]):
                done = await box.exec(argv)
                assert done.code == 127 and done.output.count("\n") == 1 and "cannot start" in done.output
            assert (await box.exec(["echo", "still there"])).output == "still there\n"
            with pytest.raises(VimeError, match="cannot read"):
                await box.read("gone")
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        monkeypatch.setattr(local, "_zygote", {})
        with pytest.raises(VimeError, match="set TMPDIR"):
            await open_sandbox(SandboxSpec())

    run(main)
    assert left(f"{os.getpid()}-*") == []
    assert "Traceback" not in capfd.readouterr().err
