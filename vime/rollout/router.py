"""vllm-router as a subprocess: one address in front of all servers, with session affinity."""

import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.errors import VimeError
from vime.procs import free_port
from vime.rollout.engine import Served, answers


class Router(Served):
    """Passes generation requests to `engine_urls`. Control calls must not go through it: it would send them to one server only."""

    module, health, name, key = "vllm_router.launch_router", "/liveness", "vllm-router", "router.port"
    timeout = 120

    def __init__(self, cfg: Config, engine_urls: list[str], folder: str, host: str = "127.0.0.1"):
        super().__init__(Path(folder) / "logs" / "router.log", cfg.router.get("port"), host)
        self.cfg, self.engine_urls = cfg, list(engine_urls)

    def alive(self) -> bool:
        return super().alive() and answers(self.url + self.health)

    def add(self, url: str) -> None:
        """Pass requests to this server, too; a restart keeps it. Raises: VimeError where the router will not."""
        self._tell("add", url, [*self.engine_urls, url])

    def remove(self, url: str) -> None:
        """No new requests to this server; those it has go on. Raises: VimeError where the router will not."""
        self._tell("remove", url, [u for u in self.engine_urls if u != url])

    def _tell(self, verb: str, url: str, urls: list[str]) -> None:
        if url not in self.engine_urls if verb == "remove" else url in self.engine_urls:
            return
        before, self.engine_urls = self.engine_urls, urls
        if not self.alive():
            return  # whoever restarts it starts it with the new list
        where = f"{self.url}/{verb}_worker?" + urllib.parse.urlencode({"url": url})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(urllib.request.Request(where, method="POST"), timeout=60):
                pass
        except (OSError, ValueError) as e:
            self.engine_urls = before
            said = e.read().decode(errors="replace")[:300] if isinstance(e, urllib.error.HTTPError) else str(e)
            raise VimeError(f"vllm-router would not {verb} {url}: {said}", f"see {self.log}") from e

    def arguments(self, port: int) -> dict[str, Any]:
        args: dict[str, Any] = {
            "worker_urls": self.engine_urls,
            "host": self.host,
            "policy": "consistent_hash",  # sticks on x-session-id
            "prometheus_port": free_port(),
            "prometheus_host": "127.0.0.1",  # unset it would be every address
            # A request that the router retries is sampled twice, and its breaker would shut out a server that we heal.
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "request_timeout_secs": int(self.cfg.rollout.request_timeout),
            "max_concurrent_requests": 65536,  # the workers' limits apply, not the router's
            "health_check_interval_secs": 2,
            "health_success_threshold": 1,
            "log_level": "warning",
        }
        args |= {k.replace("-", "_"): v for k, v in self.cfg.router.items()} | {"port": port}
        return {k: v for k, v in args.items() if v is not False}  # its switches have no --no- form
