"""Keeps local sandboxes: this file runs as a script of its own (stdlib only), so that what needs rights and forks is small and quick.

One zygote for each process that opens sandboxes; it forks one keeper for each sandbox. The keeper makes a private mount namespace, in it a
tmpfs of limited size and, on that, the overlay of the work folder; starts bubblewrap, which makes the other namespaces; and then forks, for
every command, a child that joins cgroups and namespaces, gives up its uid and its rights, and execs. Mounts and processes hang on the
keeper alone: when it ends, and it ends when its parent does, the kernel takes all of them down. A keeper that is itself killed leaves an
empty folder and an empty cgroup, which the next `open_sandbox` on the machine sweeps.

On the line (SOCK_SEQPACKET) a request is a word, with a number; the rest of it is JSON in a memfd that goes with it.
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
import time
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
RDONLY_NOSUID_NODEV = 1 | 2 | 4
PRIVATE = 0x40000 | 0x4000  # MS_PRIVATE | MS_REC
DETACH = 2
# Numbers of system calls that no agent needs and that have broken sandboxes before: refused with EPERM. Beside them clone() with
# CLONE_NEWUSER; clone3() gets ENOSYS, as its flags lie in memory, and libc falls back to clone().
REFUSED = {
    "x86_64": (0xC000003E, 56, (155, 161, 165, 166, 167, 168, 175, 176, 246, 248, 249, 250, 272, 298, 304, 308, 313, 320, 321, 323)),
    "aarch64": (0xC00000B7, 220, (41, 51, 40, 39, 224, 225, 104, 105, 106, 217, 218, 219, 97, 241, 265, 268, 273, 280, 282, 294)),
}
NEWER = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)  # io_uring and the mount calls: one number on all machines


def call(name: str, *args: Any) -> int:
    """A function of libc; raises OSError where it returns -1."""
    args = tuple(a.encode() if isinstance(a, str) else a for a in args)
    if (got := getattr(LIBC, name)(*args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(got)


def receive(line: socket.socket) -> tuple[list[str], Any, list[int]]:
    """(words, what the memfd holds, the other descriptors); no words at the end."""
    text, fds, _, _ = socket.recv_fds(line, 4096, 16, socket.MSG_CMSG_CLOEXEC)
    body = None
    if fds:
        with open(fds.pop(0), "rb") as f:
            body = json.loads(os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) or b"null")
    return text.decode().split(), body, fds


def cgroups(name: str, memory: int, pids: int) -> tuple[list[str], set[str]]:
    """New cgroups below this process's own, v1 or v2, as far as they can be written: folders, and what they limit."""
    made, limited = [], set()
    v1 = {"memory": {"memory.limit_in_bytes": memory}, "pids": {"pids.max": pids}}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        wanted = {"memory.max": memory, "pids.max": pids} if not kinds else {k: v for c in kinds.split(",") for k, v in v1.get(c, {}).items()}
        for parent in (f"/sys/fs/cgroup/{kinds}/{p}" for p in (path, os.path.dirname(path), "") if wanted):
            folder = os.path.join(parent, name)
            try:
                if not os.path.exists(f"{parent}/cgroup.procs"):
                    continue
                if not kinds:  # v2 has limits only in the children of a group that hands them on, and that has no process itself
                    Path(parent, "cgroup.subtree_control").write_text("+memory +pids")
                os.mkdir(folder)
                for key, value in wanted.items():
                    Path(folder, key).write_text(str(value))
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                continue
            made.append(folder)
            limited |= {key.partition(".")[0] for key in wanted}
            break
    return made, limited


def mapped(source: str, to: str, uid: int) -> None:
    """Mount `source` on `to`, read-only, such that what its owner owns there belongs to `uid`: an idmapped mount (Linux >= 5.12)."""
    owned = os.stat(source)
    wait, go = os.pipe()
    if not (child := os.fork()):
        call("unshare", NEWUSER)
        os.write(go, b".")
        signal.pause()
    try:
        os.read(wait, 1)
        for kind, owner in (("uid_map", owned.st_uid), ("gid_map", owned.st_gid)):
            below = f"0 0 {owner}\n" if owner else ""
            Path(f"/proc/{child}/{kind}").write_text(f"{below}{owner} {uid} 1\n{owner + 1} {owner + 1} {uid - owner - 1}\n")
        user = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    tree = call("syscall", 428, -100, source, 1 | os.O_CLOEXEC)  # open_tree, OPEN_TREE_CLONE
    how = struct.pack("QQQQ", 0x100000 | RDONLY_NOSUID_NODEV, 0, 0, user)  # mount_setattr, MOUNT_ATTR_IDMAP
    call("syscall", 442, tree, "", 0x1000, how, len(how))
    call("syscall", 429, tree, "", -100, to, 4)  # move_mount


def filters() -> bytes | None:
    """The seccomp program that refuses REFUSED; None on a machine whose numbers aren't known."""
    arch, clone, calls = REFUSED.get(os.uname().machine, (0, 0, ()))
    allow, no, nosys = (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001), (6, 0, 0, 0x50026)
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), no, (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), no, (0x15, 0, 1, 435), nosys]
    for n in (*calls, *NEWER):
        code += [(0x15, 0, 1, n), no]
    code += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 0, 1, NEWUSER), no, allow]
    return b"".join(struct.pack("HBBI", *c) for c in code) if arch else None


class Box:
    """One sandbox: its mounts, its bubblewrap, its commands."""

    def __init__(self, line: socket.socket, spec: dict[str, Any]):
        self.line, self.spec, self.state, self.root = line, spec, spec["state"], os.geteuid() == 0
        self.commands: dict[int, str] = {}  # pid -> number of the request
        self.bwrap: subprocess.Popen[bytes] | None = None
        self.groups, self.limited = cgroups(spec["name"], spec["memory"], spec["pids"]) if self.root else ([], set())
        self.filter = filters()

    def open(self) -> None:
        spec, uid = self.spec, self.spec["uid"] if self.root else 0
        me, gid = os.getuid(), os.getgid()
        call("unshare", NEWNS if self.root else NEWNS | NEWUSER)
        if not self.root:
            for kind, text in {"setgroups": "deny", "uid_map": f"0 {me} 1", "gid_map": f"0 {gid} 1"}.items():
                Path(f"/proc/self/{kind}").write_text(text)
        call("mount", "none", "/", None, PRIVATE, None)
        call("mount", "tmpfs", self.state, "tmpfs", 2 | 4, f"size={spec['disk']},mode=755")
        for name in ("up", "overlay", "work", "home", "tmp", "shm", "lower"):
            os.mkdir(f"{self.state}/{name}")
            if name in ("up", "work", "home", "tmp", "shm"):
                os.chown(f"{self.state}/{name}", uid, uid)
        for name, text in spec["files"].items():
            Path(self.state, name).write_text(text)
        self.upper, self.lower, self.copied = f"{self.state}/work", f"{self.state}/lower", False
        if spec["base"]:
            self._lay(spec["base"], uid)
        program, rules, (information, told) = os.memfd_create("bwrap"), os.memfd_create("seccomp"), os.pipe()
        options = [*spec["bwrap"], *(["--seccomp", str(rules)] if self.filter else [])]
        for fd, data in ((program, "\0".join(options).encode()), (rules, self.filter or b"")):
            os.write(fd, data)
            os.lseek(fd, 0, os.SEEK_SET)
        # bash as process 1 reaps orphans, can't be killed from inside, and ends when the keeper's end of its stdin goes
        words = ["bwrap", "--args", str(program), "--info-fd", str(told), "--die-with-parent", "--", "/bin/bash", "--norc", "-c", "echo; read"]
        with open(f"{self.state}/said", "wb") as said:
            pipe, env, fds = subprocess.PIPE, {"PATH": os.environ["PATH"]}, (program, rules, told)
            self.bwrap = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=said, env=env, pass_fds=fds, cwd="/")
        os.close(told)
        text = b""
        while b"}" not in text and (more := os.read(information, 4096)):
            text += more
        assert self.bwrap.stdout
        if not self.bwrap.stdout.readline():
            raise OSError("bwrap: " + Path(self.state, "said").read_text().strip()[-400:])
        self.init = json.loads(text)["child-pid"]
        self.spaces = [os.open(f"/proc/{self.init}/ns/{n}", os.O_RDONLY) for n in ("net", "ipc", "uts", "mnt")]
        self._listen(spec["ports"])
        call("setns", os.open(f"/proc/{self.init}/ns/pid", os.O_RDONLY), NEWPID)  # of the children of this process

    def _lay(self, base: str, uid: int) -> None:
        """The work folder over `base`: an overlay, or where the kernel can't a copy."""
        lower, options = self.lower, "redirect_dir=off,metacopy=off,index=off"
        try:
            if self.root:
                mapped(base, lower, uid)
            else:
                lower, options = base, "userxattr"
            layers = f"lowerdir={lower.replace(':', chr(92) + ':')},upperdir={self.state}/up,workdir={self.state}/overlay,{options}"
            os.chmod(f"{self.state}/up", os.stat(base).st_mode & 0o7777)
            call("mount", "overlay", f"{self.state}/work", "overlay", 2 | 4, layers)
            self.upper, self.lower = f"{self.state}/up", lower
        except OSError:
            self.lower, self.copied = base, True
            shutil.copytree(base, self.upper, symlinks=True, dirs_exist_ok=True)
            for folder, dirs, files in os.walk(self.upper):
                for name in (".", *dirs, *files):
                    os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)

    def _listen(self, ports: list[int]) -> None:
        """Sockets that listen on the sandbox's own loopback interface go to the parent, which serves them from outside."""
        if not (child := os.fork()):
            try:
                call("setns", self.spaces[0], 0)
                socks = [socket.create_server(("127.0.0.1", p), backlog=512) for p in ports]
                words = f"open {'copy' if self.copied else 'overlay'} {','.join(sorted(self.limited)) or '-'}"
                socket.send_fds(self.line, [words.encode()], [s.fileno() for s in socks])
            except BaseException as e:
                self.line.send(f"failed {e}".encode())
            os._exit(0)
        os.waitpid(child, 0)

    def start(self, number: str, body: dict[str, Any], fds: list[int]) -> None:
        pid = os.fork()
        if not pid:
            self._become(body, fds)
        self.commands[pid] = number
        for fd in fds:
            os.close(fd)

    def _become(self, body: dict[str, Any], fds: list[int]) -> NoReturn:
        try:
            os.setsid()
            call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody inside may look into this process before it is one of them
            for to, fd in enumerate(fds):
                os.dup2(fd, to)
            for group in self.groups:
                Path(group, "cgroup.procs").write_text("0")
            for space in self.spaces:
                call("setns", space, 0)
            os.closerange(3, 4096)
            os.umask(0o022)
            for cap in range(41):
                call("prctl", 24, cap, 0, 0, 0)  # PR_CAPBSET_DROP
            call("prctl", 47, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
            limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: self.spec["pids"]}
            if "memory" not in self.limited:
                limits[resource.RLIMIT_AS] = self.spec["memory"]
            for what, most in limits.items():
                resource.setrlimit(what, (most, most))
            if self.root:
                os.setgroups([])
                os.setresgid(*[self.spec["uid"]] * 3)
                os.setresuid(*[self.spec["uid"]] * 3)
            call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            if self.filter:
                program = ctypes.create_string_buffer(self.filter)
                call("prctl", 22, 2, struct.pack("HxxxxxxQ", len(self.filter) // 8, ctypes.addressof(program)), 0, 0)  # PR_SET_SECCOMP
            for sig in (signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(sig, signal.SIG_DFL)
            os.chdir(body["cwd"])
            os.execvpe(body["argv"][0], body["argv"], body["env"])
        except BaseException as e:
            os.write(2, f"{body['argv'][0]}: cannot start: {e}\n".encode())
        os._exit(127)

    def kill(self, number: str) -> None:
        """End a command: its session and its descendants."""
        leader = next((p for p, n in self.commands.items() if n == number), None)
        doomed, grown = {leader} - {None}, True
        while grown:
            grown = False
            for entry in filter(str.isdigit, os.listdir("/proc")) if doomed else ():
                with contextlib.suppress(OSError):
                    field = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                    if int(entry) not in doomed and (int(field[1]) in doomed or int(field[3]) in doomed):
                        doomed.add(int(entry))
                        grown = True
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]

    def changes(self) -> dict[str, str]:
        """What the overlay's upper folder holds, against the folder below it; of a copy, all of it against the original."""
        out: dict[str, str] = {}
        up, lower = self.upper, self.lower

        def gone(rel: str) -> None:
            for folder, _, files in os.walk(f"{lower}/{rel}"):
                out.update({os.path.relpath(f"{folder}/{f}", lower): "deleted" for f in files})
            if not os.path.isdir(f"{lower}/{rel}") or os.path.islink(f"{lower}/{rel}"):
                out[rel] = "deleted"

        def same(rel: str, now: os.stat_result) -> bool:
            was = os.lstat(f"{lower}/{rel}")
            if (was.st_mode, was.st_size) != (now.st_mode, now.st_size):
                return False
            if stat.S_ISLNK(now.st_mode):
                return os.readlink(f"{lower}/{rel}") == os.readlink(f"{up}/{rel}")
            with open(f"{lower}/{rel}", "rb") as a, open(os.open(f"{up}/{rel}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as b:
                return a.read() == b.read()

        def walk(rel: str) -> None:
            for entry in os.scandir(f"{up}/{rel}"):
                path, now = os.path.normpath(f"{rel}/{entry.name}"), entry.stat(follow_symlinks=False)
                known = os.path.lexists(f"{lower}/{path}")
                if stat.S_ISCHR(now.st_mode) and now.st_rdev == 0:
                    gone(path)
                elif entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # an opaque folder hides all that lies below it
                        os.getxattr(f"{up}/{path}", f"{'trusted' if self.root else 'user'}.overlay.opaque")
                        gone(path)
                    if known and not os.path.isdir(f"{lower}/{path}"):
                        gone(path)
                    walk(path)
                elif not (known and not os.path.isdir(f"{lower}/{path}") and same(path, now)):
                    if known and os.path.isdir(f"{lower}/{path}"):
                        gone(path)
                    out[path] = "modified" if known else "added"

        walk(".")
        for folder, dirs, files in os.walk(lower) if self.copied else ():
            held = [os.path.relpath(f"{folder}/{f}", lower) for f in (*files, *(d for d in dirs if os.path.islink(f"{folder}/{d}")))]
            out.update({f: "deleted" for f in held if not os.path.lexists(f"{up}/{f}")})
        return out

    def close(self) -> None:
        """Kills process 1 of the sandbox, with which the kernel kills all others, and takes down what it left."""
        if self.bwrap:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(self.init, signal.SIGKILL)
            self.bwrap.kill()
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass
        for folder in self.groups:
            for _ in range(200):  # the last process of it may still be ending
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    break
                time.sleep(0.005)
        with contextlib.suppress(OSError):
            call("umount2", self.state, DETACH)
        with contextlib.suppress(OSError):
            os.rmdir(self.state)


def serve(box: Box) -> None:
    """Answer requests until the line, the sandbox or the parent ends."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    parent = os.getppid()
    while os.getppid() == parent:
        ready, _, _ = select.select([box.line, wake], [], [], 2.0)
        if wake in ready:
            os.read(wake, 4096)
            with contextlib.suppress(ChildProcessError):
                while (got := os.waitpid(-1, os.WNOHANG))[0]:
                    if number := box.commands.pop(got[0], None):
                        box.line.send(f"ended {number} {os.waitstatus_to_exitcode(got[1])}".encode())
                    elif box.bwrap and got[0] == box.bwrap.pid:
                        return
        if box.line in ready:
            words, body, fds = receive(box.line)
            if not words:
                return
            if words[0] == "start":
                box.start(words[1], body, fds)
            elif words[0] == "kill":
                box.kill(words[1])
            else:
                with open(fds[0], "w") as f:
                    json.dump(box.changes(), f)
                box.line.send(f"ended {words[1]} 0".encode())


def keep(line: socket.socket, spec: dict[str, Any]) -> None:
    box = Box(line, spec)
    try:
        box.open()
        serve(box)
    except BrokenPipeError:
        pass  # the parent is gone
    except OSError as e:
        with contextlib.suppress(OSError):
            line.send(f"failed {e}".encode())
    finally:
        box.close()


def zygote(line: socket.socket) -> None:
    """Fork a keeper for each request, until the line or the parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while os.getppid() == parent:
        if not select.select([line], [], [], 2.0)[0]:
            continue
        words, spec, fds = receive(line)
        if not words:
            return
        if not os.fork():
            line.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keep(socket.socket(fileno=fds[0]), spec)
            os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    zygote(socket.socket(fileno=int(sys.argv[1])))
