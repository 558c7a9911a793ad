"""Hosts that are network namespaces: joined by a bridge in a namespace of its own, their links limited by tc. This machine's own network isn't
touched, and nothing has a name that could stay behind: each namespace lives in a process that ends with the one that made it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from vime.errors import VimeError
from vime.procs import spawn

NET = "10.99.0."


class Hosts:
    """Host 0 is the controller's, then `producers` hosts, then `consumers` hosts; `rate` as tc writes it (1gbit), of each direction of a
    host's link; `delay` (2ms) is that of each direction, "" for none."""

    def __init__(self, stack: ExitStack, producers: int, consumers: int, rate: str, delay: str, folder: Path):
        """They are gone when `stack` is closed. Raises: VimeError where this machine can't have them."""
        self.producers, self.consumers, self.count, self.rate = producers, consumers, 1 + producers + consumers, rate
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]
        if os.geteuid() or missing:
            raise VimeError(f"hosts need {'root' if os.geteuid() else ' and '.join(missing)}", "network namespaces: root, iproute2 and util-linux")
        log = folder / "hosts.log"
        holders = [spawn(["unshare", "--net", "sleep", "infinity"], log, {}) for _ in range(self.count + 1)]
        for holder in holders:
            stack.callback(holder.stop)
        self.pids, self.switch = [h.pid for h in holders[:-1]], holders[-1].pid
        switch = self.switch
        mine = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{p}/ns/net") == mine for p in [*self.pids, switch]):
            time.sleep(0.01)
        at = self._run
        at(switch, "ip link add bridge type bridge", "ip link set bridge up")
        for i, pid in enumerate(self.pids):
            at(switch, f"ip link add port{i} type veth peer name eth0 netns {pid}", f"ip link set port{i} master bridge up")
            at(pid, f"ip addr add {self.address(i)}/24 dev eth0", "ip link set eth0 up", "ip link set lo up")
            for where, device in ((switch, f"port{i}"), (pid, "eth0")):
                at(where, f"tc qdisc add dev {device} root handle 1: tbf rate {rate} burst 1mb limit 32mb")
                if delay:
                    at(where, f"tc qdisc add dev {device} parent 1:1 netem delay {delay} limit 100000")

    def _run(self, pid: int, *commands: str) -> None:
        for c in commands:
            done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *c.split()], capture_output=True, text=True)
            if done.returncode:
                fix = "this kernel has no netem: leave --delay away" if "netem" in c else "network namespaces are not to be had here"
                raise VimeError(f"hosts: {c}: {done.stderr.strip()}", fix)

    def cut(self, i: int) -> None:
        """Host i is gone for all others, as when its cable is pulled: nothing answers, nothing says so. Its processes go on."""
        self._run(self.switch, f"ip link set port{i} down")

    def address(self, i: int) -> str:
        return f"{NET}{i + 1}"

    def of(self, name: str) -> int:
        """Number of the host of controller, producerI or consumerI."""
        role = name.rstrip("0123456789")
        i = int(name[len(role) :] or 0)
        return {"controller": 0, "producer": 1 + i % self.producers, "consumer": 1 + self.producers + i % self.consumers}[role]

    def inside(self, i: int) -> list[str]:
        """What to put before a command that is to run on host i."""
        return ["nsenter", f"--net=/proc/{self.pids[i]}/ns/net"]
