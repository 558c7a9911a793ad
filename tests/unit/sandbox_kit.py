"""Ways out of a sandbox: each a program that prints ESCAPED where it worked. Those of CONTROLS do work outside, which a test checks."""

import textwrap

SYSCALL = (
    "import ctypes, os, socket, signal; c = ctypes.CDLL(None, use_errno=True); out = lambda ok: print('ESCAPED' if ok else ctypes.get_errno())\n"
)


def python(code: str) -> str:
    return f"exec python3 - <<'PY' 2>&1\n{SYSCALL}{textwrap.dedent(code)}\nPY"


# {port} of a listener on the host's loopback, {name} of an abstract socket, {canary} a file, {pid} a process, {bind} a folder bound read-only
ATTEMPTS = {
    "network: the host's loopback": python("socket.create_connection(('127.0.0.1', {port}), 2); out(True)"),
    "network: other interfaces": python("out({{n for _, n in socket.if_nameindex()}} - {{'lo'}})"),
    "network: a route out": python("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9)); out(True)"),
    "network: raw packets": python("socket.socket(socket.AF_PACKET, socket.SOCK_RAW); out(True)"),
    "abstract unix socket": python("s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); out(True)"),
    "host file": "cat {canary} && echo ESCAPED",
    "host's /tmp": "ls /tmp | grep vime-sandboxes && echo ESCAPED",
    "host's home": "ls /root/.bashrc /root/.cache && echo ESCAPED",
    "passwords": "cat /etc/shadow && echo ESCAPED",
    "root-owned folders": "for d in / /usr /usr/bin /usr/lib /etc /dev /proc /home /bin; do touch $d/.vime-attempt && echo ESCAPED $d; done",
    "root-owned files": "for f in /etc/passwd /usr/bin/python3 /etc/ld.so.cache; do : >>$f && echo ESCAPED $f; done",
    "remount what is read-only": "mount -o remount,rw /usr; mount -o remount,rw /work/kept; : >>/work/kept/a && echo ESCAPED",
    "processes of the host": "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -a 'slee[p] 98765' && echo ESCAPED",
    "/proc/1/environ": "cat /proc/1/environ | grep -a -i -E 'token|home|vime' && echo ESCAPED",
    "/proc/1/root": "ls -d /proc/1/root{canary} && echo ESCAPED",
    "/proc/1/mem": python("f = os.open('/proc/1/mem', os.O_RDWR); out(True)"),
    "/proc/1/cwd and fd": "for f in /proc/1/fd/* /proc/1/cwd; do ls $f/ 2>/dev/null | grep -E 'vmlinuz|vime' && echo ESCAPED; done",
    "open descriptors": python(
        "out([f for f in os.listdir('/proc/self/fd') if int(f) > 2 and os.path.exists(f'/proc/self/fd/{{f}}') and '/proc/' not in os.readlink(f'/proc/self/fd/{{f}}')])"
    ),
    "setuid(0)": python("os.setuid(0); out(open('/proc/self/status').read().count('CapEff:\\t0000000000000000') == 0)"),
    "setuid program": "cp /bin/bash /work/sh && chmod 4755 /work/sh && /work/sh -p -c 'grep CapEff /proc/self/status' | grep -v 0000000000000000 && echo ESCAPED",
    "su and sudo": "for p in su sudo passwd newgrp; do echo | timeout 2 $p -c id 2>&1 </dev/null | grep uid=0.*root && echo ESCAPED; done",
    "signal to the host": python("os.kill({pid}, 0); out(True)"),
    "signal to process 1": "kill -9 1; kill -STOP 1; kill -TERM 1; sleep 0.1; grep -E 'State:.(T|Z)' /proc/1/status && echo ESCAPED",
    "ptrace of process 1, then its memory": python("""
        assert c.ptrace(16, 1, 0, 0) == 0; os.waitpid(1, 0x40000000)
        word = c.ptrace(1, 1, ctypes.c_void_p(int(open('/proc/1/maps').read().split('-')[0], 16)), 0); c.ptrace(17, 1, 0, 0); out(True)"""),
    "mount": python("out(c.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)"),
    "bind mount": python("out(c.mount(b'/usr/bin', b'/tmp', None, 4096, None) == 0)"),
    "unmount what is protected": python("out(c.umount2(b'/work/kept', 2) == 0)"),
    "the newer mount calls": python("out(c.syscall(428, -100, b'/', 1) >= 0 or c.syscall(430, b'tmpfs', 0) >= 0)"),
    "user namespace": python("out(c.unshare(0x10000000) == 0)"),
    "user namespace by clone": python("out(c.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0) >= 0); os._exit(0)"),
    "user namespace by clone3": python(
        "import struct; b = struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0); out(c.syscall(435, b, 88) >= 0); os._exit(0)"
    ),
    "network namespace": python("out(c.unshare(0x40000000) == 0)"),
    "namespaces of process 1": python("out([n for n in ('mnt', 'pid', 'net', 'user') if c.setns(os.open(f'/proc/1/ns/{{n}}', 0), 0) == 0])"),
    "cgroup": "find / -name cgroup.procs -not -path '/proc/*' 2>/dev/null | grep . && echo ESCAPED; mkdir -p /tmp/c && mount -t cgroup2 x /tmp/c && echo ESCAPED",
    "device nodes": "mknod /work/d b 254 0 && echo ESCAPED; mknod /tmp/k c 1 1 && echo ESCAPED",
    "devices": "for d in /dev/vda /dev/sda /dev/mem /dev/kmsg /dev/kvm /dev/fuse /dev/port; do head -c1 $d >/dev/null && echo ESCAPED; done; true",
    "core pattern": python("os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY); out(True)"),
    "sysrq": python("os.open('/proc/sysrq-trigger', os.O_WRONLY); out(True)"),
    "kernel settings": python("os.open('/proc/sys/vm/overcommit_memory', os.O_WRONLY); out(True)"),
    "kernel log": python("b = ctypes.create_string_buffer(4096); out(c.klogctl(3, b, 4096) >= 0)"),
    "keyrings": python("out(c.syscall(248 if os.uname().machine == 'x86_64' else 217, b'user', b'vime', b'x', 1, -3) >= 0)"),
    "chroot, and out of it": python("os.mkdir('/tmp/jail'); os.chroot('/tmp/jail'); [os.chdir('..') for _ in range(9)]; os.chroot('.'); out(True)"),
    "bpf": python(
        "out(c.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, struct.pack('4I', 2, 4, 4, 4) + bytes(100), 116) >= 0)".replace(
            "out", "import struct; out", 1
        )
    ),
    "io_uring": python("out(c.syscall(425, 8, bytes(120)) >= 0)"),
    "userfaultfd": python("out(c.syscall(323 if os.uname().machine == 'x86_64' else 282, 0) >= 0)"),
    "file handles": python(
        "out(c.syscall(304 if os.uname().machine == 'x86_64' else 265, os.open('/', 0), bytes([8,0,0,0,1,0,0,0,2,0,0,0,0,0,0,0]), 0) >= 0)"
    ),
    "kernel modules": python("c.syscall(313 if os.uname().machine == 'x86_64' else 273, 0, b'', 0); out(ctypes.get_errno() != 1)"),
    "hard link to a host file": "ln /usr/bin/passwd /work/p && echo ESCAPED; ln {bind}/file /work/f && echo ESCAPED",
    "write through a bind": "echo changed >{bind}/file && echo ESCAPED; rm -f {bind}/file; test -e {bind}/file || echo ESCAPED",
    "write what is protected": "echo changed >/work/kept/a; rm -f /work/kept/a; grep -q kept /work/kept/a || echo ESCAPED",
    "move what is protected away": "mv /work/deep /work/other && echo ESCAPED; mv /work/deep/in /work/other && echo ESCAPED; mv /work/kept /work/other && echo ESCAPED",
    "raise limits": python("import resource as r; r.setrlimit(r.RLIMIT_NPROC, (1 << 20, 1 << 20)); out(True)"),
    "priority": python("os.nice(-5); out(True)"),
    "host name": python("out(c.sethostname(b'vime', 4) == 0)"),
    "clock": python("import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); out(True)"),
}
CONTROLS = (  # harmless outside, and possible there for root
    "network: the host's loopback", "abstract unix socket", "host file", "host's /tmp", "passwords", "processes of the host", 
    "signal to the host", "user namespace", "user namespace by clone3", "core pattern", "kernel log", "priority", "mount",
)  # fmt: skip
