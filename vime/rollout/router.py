"""vllm-router as a subprocess: one address in front of all servers, with session affinity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.config import Config
from vime.procs import free_port
from vime.rollout.engine import Served, answers


class Router(Served):
    """Passes generation requests to `engine_urls`. Control calls must not go through it: it would send them to one server only."""

    module, health, name, key = "vllm_router.launch_router", "/liveness", "vllm-router", "router.port"
    timeout = 120

    def __init__(self, cfg: Config, engine_urls: list[str], folder: str):
        super().__init__(Path(folder) / "logs" / "router.log", cfg.router.get("port"))
        self.cfg, self.engine_urls = cfg, engine_urls

    def alive(self) -> bool:
        """Whether the process runs and answers."""
        return super().alive() and answers(self.url + self.health)

    def arguments(self, port: int) -> dict[str, Any]:
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
