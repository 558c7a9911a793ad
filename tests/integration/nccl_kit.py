"""vLLM's NCCL weight transfer without a GPU: its own code on both sides, over gloo; and a server of which only that side is there."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from vime.weights import delta


class Gloo:
    """In the place of vLLM's PyNcclCommunicator. It waits for a missing peer longer than any deadline of the tests."""

    largest = 0

    def __init__(self, address: str, port: int, rank: int, size: int, device: Any):
        store = dist.TCPStore(address, port, size, rank == 0, timedelta(seconds=20), use_libuv=False)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("w", store), rank, size, timedelta(seconds=20))
        self.store = store

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        Gloo.largest = max(Gloo.largest, tensor.nbytes)
        self.group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        pass


def over_gloo(patch: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Take the GPU out of vLLM's transfer: the communicator, streams, and the layer-wise reload of a model that isn't there."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    from vllm.model_executor.model_loader import reload

    patch(nccl_common, "stateless_init_process_group", Gloo)
    patch(packed_tensor, "_get_streams", lambda _, n: [SimpleNamespace(synchronize=lambda: None)] * n)
    patch(torch.cuda, "stream", nullcontext)
    patch(torch.cuda, "set_device", lambda _: None)
    patch(torch.accelerator, "current_device_index", lambda: 0)
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        patch(reload, name, lambda *_: None)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        for name, t in weights:
            assert name not in self.got, f"{name} came twice"
            self.got[name] = t.clone()


def serve(pipe: Connection, workers: int, fault: str) -> None:
    """A vLLM server's endpoints of a weight update, with vime's plugin in as many workers. GET: what it has. With `fault` it goes down in
    the middle of an update ("dies"), never takes part in one ("deaf"), or refuses it ("refuses")."""
    over_gloo()
    from vime.weights.vllm_plugin import FileWeightTransferEngine

    parallel = [SimpleNamespace(data_parallel_index=0, world_size=workers, rank=w) for w in range(workers)]
    config = [SimpleNamespace(parallel_config=p, model_config=None) for p in parallel]
    engines = [FileWeightTransferEngine(None, c, torch.device("cpu"), Model()) for c in config]  # type: ignore[arg-type]
    told: dict[str, Any] = {"joined": 0, "updates": [], "version": ""}

    def all_workers(call: Callable[[Any], None]) -> None:
        faults: list[BaseException] = []

        def one(e: Any) -> None:
            try:
                call(e)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=one, args=(e,)) for e in engines]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if faults:
            raise faults[0]

    def init(body: Any) -> None:
        told["joined"] += 1
        all_workers(lambda e: e.init_transfer_engine(e.parse_init_info(body["init_info"])))

    def start(body: Any) -> None:
        for e in engines:
            e.model.got.clear()
            e.start_weight_update()

    def update(body: Any) -> None:
        if fault == "deaf":
            time.sleep(600)
        if fault == "refuses":
            raise ValueError("no room for these weights")
        if fault == "dies":
            threading.Timer(0.5, os._exit, (1,)).start()
            time.sleep(600)
        began = time.monotonic()
        all_workers(lambda e: e.receive_weights(e.parse_update_info(body["update_info"])))
        told["updates"].append([began, time.monotonic()])

    def finish(body: Any) -> None:
        for e in engines:
            e.finish_weight_update()
        told["version"] = body["weight_version"]

    paths = {"init_weight_transfer_engine": init, "start_weight_update": start, "update_weights": update, "finish_weight_update": finish}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, what: Any) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(what).encode())

        def do_POST(self) -> None:
            try:
                paths[self.path[1:]](json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer(200, {})
            except Exception as e:
                self.answer(500, {"error": {"message": f"{type(e).__name__}: {e}"}})

        def do_GET(self) -> None:
            sums = [delta.checksum(e.model.got) for e in engines]
            self.answer(200, told | {"sums": sums, "order": list(engines[0].model.got), "largest": Gloo.largest})

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
