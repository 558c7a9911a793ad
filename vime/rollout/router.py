"""vllm-router as a subprocess: one address in front of all servers, with session affinity."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.procs import Child, free_port, spawn
from vime.rollout.engine import answers, await_up, claim_port, flags


class Router:
    """Passes generation requests to `engine_urls`. Control calls must not go through it: it would send them to one server only."""

    def __init__(self, cfg: Config, engine_urls: list[str], folder: str):
        self.cfg, self.engine_urls = cfg, engine_urls
        self.log = Path(folder) / "logs" / "router.log"
        self.url = ""
        self._child: Child | None = None
        self._port: int | None = cfg.router.get("port")

    def start(self) -> str:
        """Start the router and wait until it answers; returns its URL. Raises VimeError with its last log lines where it exits."""
        self._port = claim_port(self._port, "router.port")
        skip = self.log.stat().st_size if self.log.exists() else 0
        args = self._args(self._port)
        self._child = spawn([sys.executable, "-m", "vllm_router.launch_router", *flags(args)], self.log, {})
        self.url = f"http://{args['host']}:{self._port}"
        await_up(self._child, f"{self.url}/liveness", "vllm-router", self.log, skip, timeout=120)
        return self.url

    def restart(self) -> str:
        """End what is left of the router and start it again on the same port."""
        self.stop()
        return self.start()

    def alive(self) -> bool:
        """Whether the process runs and answers."""
        return self._child is not None and self._child.alive() and answers(f"{self.url}/liveness")

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else -1

    def stop(self) -> None:
        if self._child:
            self._child.stop()

    def _args(self, port: int) -> dict[str, Any]:
        args: dict[str, Any] = {
            "worker_urls": self.engine_urls,
            "host": "127.0.0.1",
            "policy": "consistent_hash",  # sticks on x-session-id
            "prometheus_port": free_port(),
            # A request that the router retries is sampled twice, and its breaker would shut out a server that we heal.
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "request_timeout_secs": int(self.cfg.rollout.request_timeout),
            "max_concurrent_requests": 65536,  # the workers' limits apply, not the router's
            "health_check_interval_secs": 2,
            "health_success_threshold": 1,
            "log_level": "warning",
        }
        return args | {k.replace("-", "_"): v for k, v in self.cfg.router.items()} | {"port": port}
