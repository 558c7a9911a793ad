"""Keeps local sandboxes: this file runs as a script of its own (stdlib only), so that what needs rights and forks is small and quick.

One zygote for each process that opens sandboxes. It forks a keeper for each connection to its socket, which makes a private mount namespace,
in it a tmpfs of limited size and on that the overlay of the work folder; starts bubblewrap, which makes the other namespaces; and then, for
each connection to a socket of its own, forks a command that joins cgroups and namespaces, gives up its uid and its rights, and execs.
Mounts and processes hang on the keeper alone: when it ends, and it does when its first connection or its parent does, the kernel takes all
of them down. A keeper that is itself killed leaves an empty folder and an empty cgroup, which the next process to open a sandbox sweeps.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
# (audit arch, clone(), system calls that no agent needs and that have broken sandboxes before: the log, mount and swap, modules, kexec, keys, other
# namespaces, perf, handles, bpf, userfaultfd), and those that have one number everywhere: io_uring and the newer mount calls.
REFUSED = {
    "x86_64": (0xC000003E, 56, (103, 155, 161, 165, 166, 167, 168, 175, 176, 246, 248, 249, 250, 272, 298, 304, 308, 313, 320, 321, 323)),
    "aarch64": (0xC00000B7, 220, (116, 41, 51, 40, 39, 224, 225, 104, 105, 106, 217, 218, 219, 97, 241, 265, 268, 273, 280, 282, 294)),
}
NEWER = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)


def call(name: str, *args: Any) -> int:
    """A function of libc; raises OSError where it returns -1."""
    if (got := getattr(LIBC, name)(*(a.encode() if isinstance(a, str) else a for a in args))) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(got)


def cgroups(name: str, memory: int, pids: int) -> tuple[list[str], set[str]]:
    """New cgroups below this process's own, v1 or v2, as far as they can be written: folders, and what they limit."""
    made, limited, v1 = [], set(), {"memory": {"memory.limit_in_bytes": memory}, "pids": {"pids.max": pids}}
    for kinds, path in (line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()):
        wanted = {k: v for c in kinds.split(",") for k, v in v1.get(c, {}).items()} if kinds else {"memory.max": memory, "pids.max": pids}
        for parent in (f"/sys/fs/cgroup/{kinds}/{p}" for p in (path, os.path.dirname(path), "") if wanted):
            folder = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if not kinds and os.path.exists(f"{parent}/cgroup.procs"):  # v2 limits only what a group without processes hands on
                    Path(parent, "cgroup.subtree_control").write_text("+memory +pids")
                os.mkdir(folder)
                with contextlib.suppress(OSError):
                    for key, value in wanted.items():
                        os.write(os.open(f"{folder}/{key}", os.O_WRONLY), str(value).encode())
                    made.append(folder)
                    limited |= {key.partition(".")[0] for key in wanted}
                    break
                os.rmdir(folder)
    return made, limited


def mapped(source: str, to: str, uid: int) -> None:
    """Mount `source` on `to`, read-only, such that what its owner owns there belongs to `uid`: an idmapped mount (Linux >= 5.12)."""
    there, ready = os.pipe()
    if not (child := os.fork()):
        call("unshare", NEWUSER)
        os.write(ready, b".")
        signal.pause()
    os.read(there, 1)
    for kind, owner in (("uid_map", os.stat(source).st_uid), ("gid_map", os.stat(source).st_gid)):
        below = f"0 0 {owner}\n" if owner else ""
        Path(f"/proc/{child}/{kind}").write_text(f"{below}{owner} {uid} 1\n{owner + 1} {owner + 1} {uid - owner - 1}\n")
    user = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tree = call("syscall", 428, -100, source, 1 | os.O_CLOEXEC)  # open_tree, OPEN_TREE_CLONE
    call("syscall", 442, tree, "", 0x1000, struct.pack("QQQQ", 0x100000 | 1 | 2 | 4, 0, 0, user), 32)  # mount_setattr: IDMAP, ro, nosuid, nodev
    call("syscall", 429, tree, "", -100, to, 4)  # move_mount


def rules() -> bytes:
    """The seccomp program: EPERM for REFUSED and for clone() with CLONE_NEWUSER; ENOSYS for clone3(), whose flags can't be seen, so that libc
    takes clone(). Empty on a machine whose numbers aren't known."""
    arch, clone, calls = REFUSED.get(os.uname().machine, (0, 0, ()))
    allow, no, nosys = (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001), (6, 0, 0, 0x50026)
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), no, (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), no, (0x15, 0, 1, 435), nosys]
    code += [line for n in (*calls, *NEWER) for line in ((0x15, 0, 1, n), no)]
    code += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 0, 1, NEWUSER), no, allow]
    return b"".join(struct.pack("HBBI", *c) for c in code) if arch else b""


class Box:
    """One sandbox: its mounts, its cgroups, its bubblewrap."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.root, self.init = spec, os.geteuid() == 0, 0
        self.state, self.base = spec["state"], spec["base"]
        self.uid = spec["uid"] if self.root else 0
        self.groups, self.limited = cgroups("vime-" + os.path.basename(self.state), spec["memory"], spec["pids"])
        self.seccomp = ctypes.create_string_buffer(rules())

    def open(self) -> None:
        os.mkdir(self.state, 0o700)
        maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
        call("unshare", NEWNS if self.root else NEWNS | NEWUSER)
        for kind, text in maps.items() if not self.root else ():
            Path(f"/proc/self/{kind}").write_text(text)
        call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody inside may look into this process, or into a fork before it execs
        call("mount", "none", "/", None, 0x44000, None)  # private, all below it too
        call("mount", "tmpfs", self.state, "tmpfs", 2 | 4, f"size={self.spec['disk']},mode=755")
        for name in ("lower", "overlay", "up", "work", "home", "tmp", "shm"):
            os.mkdir(f"{self.state}/{name}")
            os.chown(f"{self.state}/{name}", *((0, 0) if name in ("lower", "overlay") else (self.uid, self.uid)))
        for name, text in self.spec["files"].items():
            Path(self.state, name).write_text(text)
        self.up, self.lower, self.mode = self.lay() if self.base else ("work", f"{self.state}/lower", "empty")
        program, filters, (here, there) = os.memfd_create("arguments"), os.memfd_create("seccomp"), os.pipe()
        words = [*self.spec["bwrap"], *(["--seccomp", str(filters)] if len(self.seccomp) > 1 else [])]
        for fd, data in ((program, "\0".join(words).encode()), (filters, self.seccomp.raw[:-1])):
            os.pwrite(fd, data, 0)
        # bash as process 1 reaps orphans, can't be killed from inside, and ends when this end of its stdin goes
        run = ["bwrap", "--args", str(program), "--info-fd", str(there), "--die-with-parent", "--", "/bin/bash", "--norc", "-c", "echo; read"]
        fds, pipe = (program, filters, there), subprocess.PIPE
        with open(f"{self.state}/said", "wb") as said:
            self.bwrap = subprocess.Popen(run, env={"PATH": os.environ["PATH"]}, cwd="/", pass_fds=fds, stdin=pipe, stdout=pipe, stderr=said)
        assert self.bwrap.stdout
        if not self.bwrap.stdout.readline():
            raise OSError("bwrap: " + Path(self.state, "said").read_text().strip()[-400:])
        self.init = int(os.read(here, 4096).split(b'"child-pid":')[1].split()[0].strip(b",}"))
        names = ["ipc", "uts", "mnt", *(["net"] if "--unshare-net" in self.spec["bwrap"] else [])]
        self.pids, *self.spaces = (os.open(f"/proc/{self.init}/ns/{n}", os.O_RDONLY) for n in ("pid", *names))

    def lay(self) -> tuple[str, str, str]:
        """The work folder over `base`: an overlay, or where the kernel can't a copy. Returns (folder of what has changed, what it was, mode)."""
        work, lower, how = f"{self.state}/work", f"{self.state}/lower", "redirect_dir=off,metacopy=off,index=off"
        try:
            if self.root:
                mapped(self.base, lower, self.uid)
            else:
                lower, how = self.base, "userxattr"
            os.chmod(f"{self.state}/up", os.stat(self.base).st_mode & 0o777)
            layers = f"lowerdir={lower},upperdir={self.state}/up,workdir={self.state}/overlay,{how}"
            call("mount", "overlay", work, "overlay", 2 | 4, layers)
            return "up", lower, "overlay"
        except OSError:
            shutil.copytree(self.base, work, symlinks=True, dirs_exist_ok=True)
            for folder, dirs, files in os.walk(work):
                for name in (".", *dirs, *files):
                    os.chown(os.path.join(folder, name), self.uid, self.uid, follow_symlinks=False)
            return "work", self.base, "copy"

    def relay(self, ports: dict[str, int]) -> None:
        """A process that listens on the sandbox's own loopback interface and connects to the host's."""
        servers: list[tuple[socket.socket, int]] = []

        def listen() -> None:
            with contextlib.suppress(OSError, OverflowError, ValueError):
                call("setns", self.spaces[-1], 0)
                servers.extend((socket.create_server(("127.0.0.1", int(near)), backlog=512), far) for near, far in ports.items())

        def copy(source: socket.socket, to: socket.socket) -> None:
            with contextlib.suppress(OSError):
                try:
                    while data := source.recv(1 << 16):
                        to.sendall(data)
                finally:
                    to.shutdown(socket.SHUT_WR)

        def serve(server: socket.socket, port: int) -> None:
            while True:
                near = server.accept()[0]
                with contextlib.suppress(OSError):
                    far = socket.create_connection(("127.0.0.1", port))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

        (thread := threading.Thread(target=listen)).start()  # a namespace is of a thread
        thread.join()
        if len(servers) != len(ports):
            raise OSError(f"cannot listen on port {' or '.join(ports)} inside")
        if not os.fork():
            call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            for server in servers:
                threading.Thread(target=serve, args=server).start()
            signal.pause()

    def become(self, argv: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> NoReturn:
        """A command of the agent's."""
        try:
            os.setsid()
            os.umask(0o022)
            for to, fd in enumerate(fds):
                os.dup2(fd, to)
            for group in self.groups:
                Path(group, "cgroup.procs").write_text("0")
            for space in self.spaces:
                call("setns", space, 0)
            os.closerange(3, 4096)
            for cap in range(41):
                call("prctl", 24, cap, 0, 0, 0)  # PR_CAPBSET_DROP
            limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: self.spec["pids"]}
            for what, most in (limits if "memory" in self.limited else limits | {resource.RLIMIT_AS: self.spec["memory"]}).items():
                resource.setrlimit(what, (most, most))
            if self.root:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
            call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            if (size := len(self.seccomp) // 8) > 0:
                call("prctl", 22, 2, struct.pack("HxxxxxxQ", size, ctypes.addressof(self.seccomp)), 0, 0)  # PR_SET_SECCOMP
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # what is ignored stays ignored: SIGINT, after `vime train &`
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_DFL)
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except BaseException as e:
            os.write(2, f"{' '.join(map(str, argv[:1]))}: cannot start: {e}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def answer(self, line: socket.socket) -> None:
        """One request, in a process of its own: a command, which is killed when the connection ends, or what has changed."""
        text, fds, _, _ = socket.recv_fds(line, 1 << 16, 3, socket.MSG_CMSG_CLOEXEC)
        while not text.endswith(b"\n"):
            text += line.recv(1 << 16) or b"\n"
        if not (body := json.loads(text)):
            return line.sendall(json.dumps(self.changes()).encode())
        call("setns", self.pids, NEWPID)  # of the children
        if not (child := os.fork()):
            self.become(body["argv"], body["cwd"], body["env"], fds)
        for fd in fds:
            os.close(fd)
        if line.fileno() in select.select([line.fileno(), os.pidfd_open(child)], [], [])[0]:
            for pid in (pid for _ in range(3) for pid in family(child)):  # one may have forked in the meantime
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        line.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())

    def changes(self) -> dict[str, str]:
        """What differs from `base`, looked for only in the folders that the upper layer holds."""
        out, up, now, was = {}, f"{self.state}/{self.up}", f"{self.state}/work", self.lower

        def same(path: str) -> bool:
            a, b = os.lstat(f"{was}/{path}"), os.lstat(f"{now}/{path}")
            if (a.st_mode, a.st_size) != (b.st_mode, b.st_size) or not stat.S_ISREG(a.st_mode):
                return stat.S_ISLNK(a.st_mode) and stat.S_ISLNK(b.st_mode) and os.readlink(f"{was}/{path}") == os.readlink(f"{now}/{path}")
            with open(f"{was}/{path}", "rb") as f, open(os.open(f"{now}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as g:
                return f.read() == g.read()

        for folder, dirs, files in os.walk(up):
            rel = os.path.relpath(folder, up)
            there, before = (set(os.listdir(d)) if os.path.isdir(d := f"{root}/{rel}") else set() for root in (now, was))
            for path in (os.path.normpath(f"{rel}/{n}") for n in before - there):
                below = [os.path.join(f, n) for f, _, names in os.walk(f"{was}/{path}") for n in names] or [f"{was}/{path}"]
                out.update({os.path.relpath(p, was): "deleted" for p in below})
            for name in there.intersection((*files, *(d for d in dirs if os.path.islink(f"{folder}/{d}")))):
                if name not in before or not same(f"{rel}/{name}"):
                    out[os.path.normpath(f"{rel}/{name}")] = "modified" if name in before else "added"
        return out

    def close(self) -> None:
        """Kills process 1 of the sandbox, with which the kernel kills all others, and takes down what it left."""
        for pid in filter(None, (self.init, self.bwrap.pid if hasattr(self, "bwrap") else 0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            call("umount2", self.state, 2)  # lazily: the last process may still be ending
        for folder in (*self.groups, self.state):
            for _ in range(400):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                if not os.path.exists(folder):
                    break
                time.sleep(0.005)


def family(root: int) -> set[int]:
    """A process, its descendants, and those of its session."""
    found, before, parents = {root}, 0, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            field = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry)] = {int(field[1]), int(field[3])}
    while len(found) > before:
        before, found = len(found), found | {pid for pid, above in parents.items() if above & found}
    return found


def keep(line: socket.socket) -> None:
    """Make the sandbox that the first line asks for, and serve it until that connection, the sandbox or the parent ends."""
    parent, box = os.getppid(), Box(json.loads(line.makefile().readline() or sys.exit()))
    path = f"{box.state}.sock"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # bubblewrap waits for one
    try:
        box.open()
        if box.spec["ports"] and "--unshare-net" in box.spec["bwrap"]:
            box.relay(box.spec["ports"])
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(512)
        line.sendall(json.dumps({"mode": box.mode, "limited": sorted(box.limited)}).encode() + b"\n")
        while os.getppid() == parent:
            ready = select.select([f.fileno() for f in (line, server, box.bwrap.stdout)], [], [], 2.0)[0]  # type: ignore[union-attr]
            if server.fileno() in ready:
                asked = server.accept()[0]
                if not os.fork():
                    try:
                        box.answer(asked)
                    finally:  # whoever asked may be gone: that ends no sandbox
                        os._exit(0)
                asked.close()
            elif ready:
                break
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    except (OSError, IndexError) as e:
        with contextlib.suppress(OSError):
            line.sendall(json.dumps({"error": str(e)[:4000]}).encode() + b"\n")
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        box.close()


def zygote(server: socket.socket) -> None:
    """Fork a keeper for each connection, until the parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of them is waited for
    while os.getppid() == parent:
        if 0 in (ready := select.select([server.fileno(), 0], [], [], 2.0)[0]):  # the parent's end of a pipe
            break
        if ready:
            line = server.accept()[0]
            if not os.fork():
                server.close()
                keep(line)
                os._exit(0)
            line.close()
    os.unlink(server.getsockname())


if __name__ == "__main__":
    zygote(socket.socket(fileno=int(sys.argv[1])))
