"""Sending side: weights as safetensors files that servers read, in shared memory or in the run's folder; whole, or as deltas."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from transformers import PreTrainedModel

from vime.config import Config
from vime.errors import VimeError
from vime.trainer.parallel import agree, whole_parts
from vime.weights import Published, Receiver, delta, location, routes, server_dtype

FULL_EVERY = 20
CANARY_LENGTH = 24
DTYPES = {dtype: name for name, dtype in _TYPES.items()}


class Publisher:
    """Writes the versions of one run's weights; with weights.delta rank 0 keeps the last. Files stay until the version after the next one."""

    def __init__(self, cfg: Config, rank: int):
        self.cfg, self.rank, self.folder = cfg, rank, location(cfg)
        self.chain: list[Path] = []  # of the newest version: a whole file, then deltas
        self.version = -1
        self.last: delta.State = {}
        self.sender: Any = None  # of this rank, over NCCL
        self.head: dict[str, str] = {}  # of a file of `last`

    def publish(self, model: PreTrainedModel, version: int, receivers: list[Receiver] | None = None) -> Published | None:
        """Write weights `version` under Hugging Face names, or send them to `receivers`; the files, on rank 0. A collective, all or nothing."""
        dtype, parts, head, out, error = getattr(torch, server_dtype(self.cfg)), None, None, None, None
        if self.cfg.lora.adapter:  # these alone, under peft's names: every rank has them
            own = {n.replace(".default.", "."): p.detach().cpu() for n, p in model.named_parameters() if ".lora_" in n}
            tensors = {f"base_model.model.{n}": p for n, p in own.items()}
            head = {"lora": json.dumps({"r": self.cfg.lora.rank, "lora_alpha": self.cfg.lora.alpha})}
        elif receivers:
            return self.send(model, dtype, version, receivers)
        else:
            tensors, parts = whole_parts(model, dtype, self.cfg.weights.buffer_size)
        if parts and self.cfg.weights.delta:  # rank 0 keeps all of them anyway
            tensors, parts = {name: t for part in parts for name, t in part.items()}, None
        if self.rank == 0:
            try:
                out = self.write({k: v.contiguous() for k, v in tensors.items()}, version, parts, head)
            except VimeError as e:
                error = e
        for _ in parts or ():  # the other ranks, and rank 0 after an error: gathering is collective
            pass
        agree(error)
        return out

    def send(self, model: PreTrainedModel, dtype: torch.dtype, version: int, receivers: list[Receiver]) -> Published | None:
        """Over NCCL, by several ranks at once for several servers. Rank 0 keeps a copy in host memory, for servers that start later."""
        from vime.weights.vllm_nccl import Sender  # importing vLLM takes seconds

        device, size = model.layout.device, self.cfg.weights.buffer_size
        plan = routes(receivers, model.layout.world // model.layout.p.pp)
        forms, parts = whole_parts(model, dtype, size, device, {r.sender for r in plan})
        self.version = -1  # until all of them are there

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for part in parts:
                for name in list(part):
                    if self.rank == 0:
                        self.last[name] = part[name].to("cpu", copy=True)
                    yield name, part.pop(name)

        for route in (r for r in plan if r.sender == self.rank):
            if not self.sender or self.sender.route != route:
                if self.sender:
                    self.sender.close()
                self.sender = Sender(route, device, size, self.cfg.train.step_timeout)
            self.sender.send(version, forms, pairs())
        for _ in pairs():  # on the other ranks: gathering is collective
            pass
        if self.rank:
            return None
        for path in self.folder.glob("v*.safetensors"):  # of an older version
            path.unlink()
        self.version, sent = version, float(delta.size(forms))
        return Published("", (), {"weights/bytes": sent, "weights/full_bytes": sent, "weights/senders": float(len(plan))})

    def write(self, tensors: delta.State, version: int, parts: Iterable[delta.State] | None = None, head: dict[str, str] | None = None) -> Published:
        """As publish, for weights that are whole and on the CPU; with `parts`, where `tensors` are without data, those that come one by one."""
        before, full = self.chain, delta.size(tensors)
        metrics = {"weights/full_bytes": float(full)}
        if not self.cfg.weights.delta:
            self.chain = [self.save(version, tensors, head or {}, parts=parts or ())]
        else:
            base, change = self.head.get("checksum", ""), None
            if delta.same_form(self.last, tensors):
                change = delta.make(self.last, tensors)
                delta.apply(self.last, change.tensors)
                metrics["weights/changed_fraction"] = change.changed / max(1, sum(t.numel() for t in tensors.values()))
                metrics["weights/delta_whole_tensors"] = float(len(change.whole))
            else:
                self.last = {k: t.clone() for k, t in tensors.items()}
            self.version, self.head = version, {"checksum": delta.checksum(self.last), "version": str(version)}
            try:
                # A server that starts anew reads the whole chain, so the deltas in it together stay smaller than whole weights.
                if change and len(before) < (self.cfg.weights.delta_full_every or FULL_EVERY) and change.size + on_disk(before[1:]) < full:
                    self.chain = [*before, self.save(version, change.tensors, self.head | {"base": base}, "-delta")]
                else:
                    self.chain = [self.save(version, self.last, self.head)]
            except VimeError:
                self.last = {}  # no server has seen these: the next version must be whole
                raise
        for old in self.folder.glob("v*.safetensors"):
            if old not in self.chain and old not in before:
                old.unlink()
        sent = on_disk(self.chain[-1:])
        metrics |= {"weights/bytes": float(sent), "weights/delta_fraction": sent / max(1, full)}
        return Published(str(self.chain[0]), tuple(str(p) for p in self.chain[1:]), metrics)

    def whole(self, version: int) -> str:
        """Weights `version`, the newest, as one file on rank 0 alone, for servers that refuse their deltas or missed what was sent; its path."""
        path = self.folder / f"v{version}.safetensors"
        if not path.exists():
            if version != self.version or not self.last:
                raise VimeError(f"weights v{version} are wanted whole, but the trainer holds v{self.version}")
            self.chain = [self.save(version, self.last, self.head)]
        return str(path)

    def save(self, version: int, tensors: delta.State, head: dict[str, str], kind: str = "", parts: Iterable[delta.State] = ()) -> Path:
        path = self.folder / f"v{version}{kind}.safetensors"
        partial = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(partial, tensors, {"format": "pt"} | head, parts or [dict(tensors)])
            os.replace(partial, path)
        except OSError as e:
            partial.unlink(missing_ok=True)
            fix = 'free some, or set weights.transport = "file"' if self.cfg.weights.transport == "shm" else "free some space"
            raise VimeError(f"weights v{version} could not be written to {self.folder}: {e}", fix) from e
        return path


def write_file(path: Path, forms: delta.State, metadata: dict[str, str], parts: Iterable[delta.State]) -> None:
    """A safetensors file of tensors that come in `parts`, in any order, each as `forms` announces it (tensors whose data don't matter)."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at: dict[str, int] = {}
    end = 0
    for name, t in sorted(forms.items(), key=lambda x: (-x[1].element_size(), x[0])):  # wide elements first, so that all lie aligned
        at[name], end = end, end + t.numel() * t.element_size()
        entries[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at[name], end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for part in parts:
            while part:
                name, t = part.popitem()
                f.seek(8 + len(head) + at.pop(name))
                f.write(memoryview(t.contiguous().view(-1).view(torch.uint8).numpy()))
                del t  # while the next part is gathered
    if at:
        raise VimeError(f"weights for {path.name}: {min(at)} and {len(at) - 1} more did not come")


def on_disk(files: list[Path]) -> int:
    return sum(f.stat().st_size for f in files)


def canary_tokens(vocab_size: int, but: int | None = None) -> list[int]:
    """A fixed prompt spread over the vocabulary: unlikely tokens, whose logprobs move with any change of the weights. `but`: not this one."""
    return [t if t != but else 1 for t in ((7919 * i + 11) % vocab_size for i in range(CANARY_LENGTH))]
