"""The store in TransferQueue, by its KV calls only: a group is one key whose one column `bytes` (uint8, jagged) is the packed object, the same bytes
as in every other backend. Its samplers mix prompts and count a sample as consumed before it is read, so who trains what is decided elsewhere."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from vime.data.plane import DuplicateKey, Ref, Spec, Store, StoreFull, key_of, ray, sized, within
from vime.errors import VimeError, blamed, said

ACTOR = {"name": "TransferQueueController", "namespace": "transfer_queue"}  # TransferQueue's own, one in a Ray cluster
ATTEMPTS = 3


def queue(timeout: float) -> Any:
    """The library, told before its import how long it may wait for one answer."""
    patience = {"TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": max(1, int(timeout / ATTEMPTS)), "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": ATTEMPTS}
    for name, value in (patience | {"TQ_LOGGING_LEVEL": "CRITICAL", "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": 1}).items():
        os.environ.setdefault(name, str(value))
    import transfer_queue

    return transfer_queue


def running() -> bool:
    try:
        return bool(ray().get_actor(**ACTOR))
    except ValueError:
        return False


def start(spec: Spec, host: str) -> None:
    """Start TransferQueue in this Ray cluster; the process that did ends it with `stop`. Raises: VimeError where there is one already."""
    if running():
        raise VimeError("this Ray cluster has a TransferQueue already: another run's?", "end that, or give this run a Ray cluster of its own")
    m, own = spec.settings.mooncake, spec.settings.mooncake.storage == "own"
    simple = {"num_data_storage_units": spec.settings.transferqueue.units}
    store = {"auto_init": False, "metadata_server": "P2PHANDSHAKE", "master_server_address": spec.master, "local_hostname": host}
    store |= {"global_segment_size": m.segment_bytes if own else 0, "local_buffer_size": 16 << 20, "protocol": m.protocol, "device_name": m.device}
    kind = "SimpleStorage" if spec.settings.transferqueue.storage == "simple" else "MooncakeStore"
    backend = {"storage_backend": kind, kind: simple if kind == "SimpleStorage" else store}
    try:
        within(120, queue(spec.settings.timeout).init, {"controller": {"polling_mode": True}, "backend": backend})
    except Exception as e:
        stop()
        raise VimeError(f"TransferQueue did not start: {said(e)}", "see data_plane.transferqueue") from e


def stop() -> None:
    import transfer_queue

    transfer_queue.close()


class Queue(Store):
    def __init__(self, spec: Spec, owner: str):
        super().__init__(spec, owner)
        self.tq = queue(self.timeout)
        if not running():
            raise VimeError("this Ray cluster has no TransferQueue", "its Plane starts one, and ends it")
        self.ask(self.tq.init)

    def ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        with blamed("TransferQueue", ValueError, RuntimeError, OSError, fix="see data_plane.timeout"):
            return within(self.timeout, lambda: call(*args, **kwargs))

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        import torch
        from tensordict import TensorDict

        held = self.ask(self.tq.kv_list, self.spec.run).get(self.spec.run, {})
        if taken := held.keys() & set(keys):
            raise DuplicateKey(f"group {min(taken)} is stored already, in TransferQueue")
        # a key whose put is under way has no tag yet
        need, used = sum(map(len, objects)), sum((tag or {}).get("nbytes", 0) for tag in held.values())
        if used + need > self.spec.budget:
            raise StoreFull(f"TransferQueue: {need} bytes do not fit, {used} of {self.spec.budget} are taken", "raise data_plane.budget_bytes")
        column = torch.nested.as_nested_tensor([torch.from_numpy(o) for o in objects], layout=torch.jagged)
        try:
            tags = [{"nbytes": len(o)} for o in objects]
            self.ask(self.tq.kv_batch_put, keys, self.spec.run, TensorDict({"bytes": column}, batch_size=len(keys)), tags)
        except VimeError:
            with suppress(VimeError):
                self.free(keys)  # a put that fails leaves its keys behind
            raise
        return [("", None)] * len(keys)

    def read(self, refs: Sequence[Ref], whole: bool) -> list[Any]:
        end = time.monotonic() + self.timeout
        try:
            return self.some(refs)
        except VimeError as e:
            why = str(e)
        out: list[Any] = []
        for ref in refs:  # one by one, to see which are lost
            try:
                out += self.some([ref]) if len(refs) > 1 and time.monotonic() < end else [why]
            except VimeError as e:
                out.append(str(e))
        return out

    def some(self, refs: Sequence[Ref]) -> list[Any]:
        if not refs:
            return []
        rows = self.ask(self.tq.kv_batch_get, [r.key for r in refs], self.spec.run)["bytes"].unbind()
        if len(rows) < len(refs):  # keys that are gone are left out
            raise VimeError(f"{len(refs) - len(rows)} of {len(refs)} are not there")
        return [sized(r, row.numpy()) for r, row in zip(refs, rows, strict=True)]

    def free(self, refs: Iterable[Ref | str]) -> None:
        if there := self.ask(self.tq.kv_list, self.spec.run).get(self.spec.run, {}).keys() & {key_of(r) for r in refs}:
            self.ask(self.tq.kv_clear, sorted(there), self.spec.run)
