"""The sending side over NCCL: vLLM's own trainer engine on a trainer rank, for the servers of its route. Not run on GPUs yet."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.utils.network_utils import get_ip

from vime import accel
from vime.errors import VimeError
from vime.procs import free_port
from vime.weights import Receiver, Route

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # proxies of the environment are not for our own servers


class Sender:
    """A trainer rank's end of a group; to vLLM's engine both the source of the weights and the client of the group's servers. Raises
    (constructor and send): VimeError, one line, as soon as a server fails, after `timeout` seconds at the latest."""

    def __init__(self, route: Route, device: torch.device, buffer: int, timeout: float):
        self.route, self.timeout, self.version = route, timeout, ""
        self.forms: dict[str, torch.Tensor] = {}
        self.pairs: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.failed: Future[None] = Future()
        self.pool = ThreadPoolExecutor(2 + len(route.receivers), initializer=accel.use, initargs=(device,))
        info = NCCLTrainerInitInfo(get_ip(), free_port(), route.size, packed_buffer_size_bytes=buffer, rank=0)
        self.engine: Any = None
        self.engine = self.within("joining", lambda: NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=cast(Any, self)))

    def send(self, version: int, forms: dict[str, torch.Tensor], pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Weights `version` to every server of the route; they are paused, and stay so. `forms`: without data, in the order of `pairs`."""
        self.version, self.forms, self.pairs = str(version), forms, pairs
        self.within(f"sending weights v{version} to", self.engine.send_weights)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.forms.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.pairs

    def close(self) -> None:
        if self.engine:
            self.engine.shutdown()

    def within(self, doing: str, call: Callable[[], Any]) -> Any:
        job = self.pool.submit(call)  # while a peer is missing it hangs in NCCL
        wait([job, self.failed], self.timeout, FIRST_COMPLETED)
        try:
            return self.failed.result() if self.failed.done() else job.result(0)
        except Exception as e:
            self.close()
            at = ", ".join(f"engine {r.engine} ({r.url})" for r, _ in self.route.receivers)
            why = f"not done after {self.timeout:g} s (train.step_timeout)" if isinstance(e, TimeoutError) else f"{type(e).__name__}: {e}"
            raise VimeError(f"NCCL, {doing} {at}: {e.what if isinstance(e, VimeError) else why}", "rerun with --resume") from e

    def post(self, path: str, body: Callable[[int], dict[str, Any]]) -> None:
        """The same call to every server, with the `body` for its offset."""

        def one(r: Receiver, offset: int) -> None:
            request = urllib.request.Request(r.url + path, json.dumps(body(offset)).encode(), {"Content-Type": "application/json"})
            try:
                DIRECT.open(request, timeout=self.timeout).close()
            except OSError as e:  # HTTPError is one
                said = e.read().decode(errors="replace")[:500] if isinstance(e, urllib.error.HTTPError) else ""
                raise VimeError(" ".join(f"engine {r.engine}: POST {path}: {e} {said}".split())) from e

        for job in wait([self.pool.submit(one, *r) for r in self.route.receivers], return_when=FIRST_EXCEPTION).done:
            if (e := job.exception()) and not self.failed.done():
                self.failed.set_exception(e)
            job.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", lambda offset: {"init_info": {"nccl": init_info | {"rank_offset": offset}}})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update", lambda _: {})

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", lambda _: {"update_info": {"nccl": update_info}})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update", lambda _: {"weight_version": self.version})
