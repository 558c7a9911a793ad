"""A model on the ranks: process group, loading of each rank's part, packed attention, and whole tensors out of parts."""

import os
import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification, PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from vime import accel
from vime.errors import ELSEWHERE, VimeError
from vime.trainer import vision
from vime.trainer.context import to_heads, to_sequence
from vime.trainer.layout import Layout, local
from vime.trainer.packing import Sealed
from vime.trainer.ring import ring_attention

FACTORS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale", "index_topk")


def init(rank: int, world: int, addr: str, port: int, timeout: float, offload: bool = False, first: int = 0) -> torch.device:
    """Join the process group, over the device's own collectives, with `offload` over gloo's for tensors in host memory. One fails after `timeout`
    seconds. `first`: ranks of another group whose devices come before this one's. Returns this rank's device."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    device, url = accel.claim(first + rank), f"tcp://{addr}:{port}"
    backend = accel.BACKENDS[device.type]
    if offload and device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    return device


def packed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, packing: Sealed | None = None, **kw: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sample of a packed row to itself and to the prompt it shares. query/key/value: (1, heads, T, dim)."""
    assert packing is not None, "models loaded by vime run on packed micro-batches only"
    if kw.get("s_aux") is not None:
        raise VimeError(f"{type(module).__name__}: attention sinks are not supported")
    batch = packing.pack
    deal, ring = batch.cp[query.shape[1]] if batch.cp else (None, None)
    if deal:
        query, key, value = (to_heads(t, deal) for t in (query, key, value))
    if ring:
        out = ring_attention(query, key, value, batch.segments, kw.get("scaling"), ring)
        return to_sequence(out, deal) if deal else out, None
    q, k, v = (t[0].transpose(0, 1).flatten(1) for t in (query, key, value))  # (T, heads * dim)
    dim, window, outs = query.shape[-1], kw.get("sliding_window"), []
    for b in batch.buckets:
        if window and b.keys.shape[1] > window:
            raise VimeError(f"samples of {b.keys.shape[1]} tokens exceed the model's sliding attention window of {window}")
        parts = ((b.queries, q, dim), (b.keys, k, dim), (b.keys, v, value.shape[-1]))  # latent attention's values are of another size
        qb, kb, vb = (F.embedding(i, t).unflatten(-1, (-1, d)).transpose(1, 2) for i, t, d in parts)
        gqa, scale = qb.shape[1] != kb.shape[1], kw.get("scaling")
        o = F.scaled_dot_product_attention(qb, kb, vb, b.mask, is_causal=b.mask is None, scale=scale, enable_gqa=gqa)
        outs.append(o.transpose(1, 2).flatten(0, 1).flatten(1))
    out = F.embedding(batch.scatter, torch.cat(outs) if len(outs) > 1 else outs[0])
    out = out.view(1, out.shape[0], -1, value.shape[-1])
    return to_sequence(out, deal) if deal else out, None


ALL_ATTENTION_FUNCTIONS.register("vime_packed", packed_attention)


def class_of(path: str | Path, critic: bool) -> tuple[Any, Any]:
    """The configuration in a model folder, and its class. Raises: VimeError where there is none of a causal LM, or for a critic of its layers."""
    try:
        config = AutoConfig.from_pretrained(path, **({"num_labels": 1} if critic else {}))
        seeing: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        return config, (AutoModelForTokenClassification if critic else seeing)._model_mapping[type(config)]
    except (OSError, ValueError, KeyError) as e:
        said = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        fix = "a critic needs an architecture with a token classifier in transformers" if critic else "it must hold a causal LM that transformers knows"
        raise VimeError(f"model {path}: {said}", fix) from e


def load_model(
    path: str | Path, dtype: str, layout: Layout, checkpointing: bool = False, freeze_vision: bool = False, critic: bool = False
) -> PreTrainedModel:
    """A causal LM, which may take images, with float32 weights, cut as `layout` says, computing in `dtype`; each rank reads only its part. As
    a critic it has one output, `score`, in place of the vocabulary's. Gradients are summed over ranks: loss weights are global. Raises:
    VimeError for a folder that does not load or an architecture whose logits are not hidden @ weight."""
    config, base = class_of(path, critic)
    sees = hasattr(config, "vision_config")
    if sees:
        vision.check(config, path)
    text = config.get_text_config()
    for name in FACTORS:
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise VimeError(f"model {path}: {name} = {getattr(text, name)} is not supported yet")
    half = dtype == "bfloat16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()

    class Sharded(base):  # type: ignore[valid-type, misc]
        """The model's class with its two distribution hooks: our sharding in place of the one that transformers would choose."""

        @classmethod
        def prepare_distribute_model(cls, distributed: Any, device_map: Any = None) -> Any:
            return distributed, layout.device, layout.meshes

        @classmethod
        def maybe_distribute_model(cls, model: Any, distributed: Any, mesh_manager: Any) -> Any:
            model._mesh_manager, model._device_mesh, model._fsdp_size = layout.meshes, layout.dense, layout.world
            model._is_distributed_loading_by_transformers = True
            model.hidden_dtype = getattr(torch, dtype)
            layout.distribute(model, policy)
            return model

    Sharded.__name__, Sharded.__module__ = base.__name__, base.__module__  # transformers converts the weights of its own classes only
    disable_progress_bar()
    try:
        attention = {"text_config": "vime_packed", "vision_config": "sdpa"} if sees else "vime_packed"
        model, info = Sharded.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=attention,
            distributed_config=DistributedConfig(fsdp_size=layout.world), output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise VimeError(f"model {path}: {type(e).__name__}: {str(e)[:500]}") from e
    new = {"score.weight", "score.bias"} if critic else set()
    layout.to_host(model)
    if missing := sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys or {}) - new):  # from_pretrained would leave them random
        raise VimeError(f"model {path}: its files lack {len(missing)} of the model's weights, {missing[0]} first", "get the folder anew")
    for p in model.parameters():
        own = local(p.detach())
        if own.untyped_storage().nbytes() > own.nbytes:  # a view into the whole tensor of the file, which it would keep in memory
            getattr(p, "_local_tensor", p).data = own.clone()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # logprobs must be those that the servers compute
    if sees and freeze_vision:
        vision.freeze(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def whole_parts(
    model: PreTrainedModel, dtype: torch.dtype, limit: int, device: torch.device | str = "cpu", takers: Collection[int] = (0,)
) -> tuple[dict[str, torch.Tensor], Iterator[dict[str, torch.Tensor]]]:
    """Every weight, whole, under its Hugging Face name, tied copies left out, adapters added in, in parts of a decoder layer's, `limit` bytes at
    most (but for a larger tensor, or a layer of an architecture that makes one weight of several), no two whole at once, gathered once, in `dtype`;
    other stages' come through the first, whose ranks `takers` are. Returns: all tensors without data, and the parts, on `device` of the takers,
    empty elsewhere. Call and iteration are collectives."""
    layout, tied = model.layout, dict(model.all_tied_weights_keys or {})
    left_out = {*tied, *(tied.values() if layout.pp else ())}  # a tied embedding lies at both ends of a pipeline
    conversions = getattr(model, "_weight_conversions", None) or ()
    together = any(isinstance(c, WeightConverter) and len(c.target_patterns) > 1 for c in conversions)
    adapted = {f"{name}.base_layer.weight": m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}  # by peft
    parts, unit, room = list[dict[str, tuple[torch.Tensor, torch.dtype, Any]]](), "", 0
    for name, value in model.state_dict().items():
        if name not in left_out and ".lora_" not in name:
            layer, kind = re.match(r".*?\.layers\.\d+\.", name), dtype if value.is_floating_point() else value.dtype
            before, unit, size = unit, layer[0] if layer else name, value.numel() * kind.itemsize
            if unit != before or (size > room and not together):
                parts.append({})
                room = limit
            parts[-1][name.replace(".base_layer.", ".")], room = (value, kind, adapted.get(name)), room - size
    empty = ({n: torch.empty(v.shape, dtype=kind, device="meta") for n, (v, kind, _) in part.items()} for part in parts)
    own = [[(n, t.shape, t.dtype) for n, t in revert_weight_conversion(model, part).items()] for part in empty]
    stages: list[Any] = [own] * layout.p.pp
    if layout.p.pp > 1:
        dist.all_gather_object(stages, own, group=layout.pp_group)
    takes = dist.get_rank() % (layout.world // layout.p.pp) in takers  # or what it sends goes to a rank that does

    def stream() -> Iterator[dict[str, torch.Tensor]]:
        for stage, forms in enumerate(stages):
            for i, form in enumerate(forms if stage == layout.pp or (takes and layout.first) else ()):
                part = {}
                for name, (value, kind, adapter) in parts[i].items() if stage == layout.pp else ():
                    cut = value.to(layout.device, value.dtype if adapter else kind)
                    full = cut.full_tensor() if isinstance(cut, DTensor) else cut
                    if adapter and takes:
                        full = (full + adapter.get_delta_weight("default").detach()).to(kind)
                    if takes:
                        part[name] = full.to(device if layout.first else layout.device)
                    del cut, full
                part = revert_weight_conversion(model, part) if part else part
                for name, shape, kind in form if takes and stage else ():
                    if layout.first:
                        dist.recv(t := torch.empty(shape, dtype=kind, device=layout.device), group=layout.pp_group, group_src=stage)
                        part[name] = t.to(device)
                    else:
                        dist.send(part.pop(name).contiguous(), group=layout.pp_group, group_dst=0)
                yield part

    return {name: torch.empty(shape, dtype=kind, device="meta") for forms in stages for form in forms for name, shape, kind in form}, stream()


def agree(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank where any rank failed; a collective. The failing rank raises its own error."""
    failed = torch.tensor([0.0 if error is None else 1.0], device=accel.of_group(group))
    dist.all_reduce(failed, group=group)
    if error is not None:
        raise error
    if failed.item():
        raise VimeError(ELSEWHERE, "see its error")
