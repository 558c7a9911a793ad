"""Where a rank stands on the five axes, and how a model is cut along them: docs/parallel.md says what each axis does."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.distributed.utils import TransformersDeviceMesh

from vime.config import ParallelConfig
from vime.trainer.axes import DISPATCH, PARTIAL


class Layout:
    """A rank's place. Ranks count as in the mesh (pp, fsdp, cp, tp), the last axis fastest. FSDP shards over fsdp x cp; experts lie on
    the same ranks of a stage in another order, (efsdp, ep)."""

    def __init__(self, parallel: ParallelConfig, device: torch.device, offload: bool = False):
        """`offload`: shards of weights and gradients lie in host memory, and a layer's come to the device while it computes."""
        p, kind = parallel, device.type
        self.p, self.device, self.world, self.offload = p, device, p.ranks, offload
        shards = p.fsdp * p.cp
        place = init_device_mesh(kind, (p.pp, p.fsdp, p.cp, p.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
        self.dense = init_device_mesh(kind, (p.pp, shards, p.tp), mesh_dim_names=("pp", "fsdp", "tp"))
        self.expert = init_device_mesh(kind, (p.pp, shards * p.tp // p.ep, p.ep), mesh_dim_names=("pp", "efsdp", "ep"))
        self.meshes = TransformersDeviceMesh(self.dense, self.expert)
        self.pp, self.dp, self.cp, self.tp = place.get_coordinate()
        self.pp_group, self.cp_group, self.tp_group = (place.get_group(axis) for axis in ("pp", "cp", "tp"))
        self.cp_groups: dict[int, tuple[Any, Any]] = {}  # by heads (of a TP rank): who deals them out, and the ring, or None
        self.count = p.pp * p.pp_interleave
        self.stages = range(self.pp, self.count, p.pp)  # of the pipeline, that this rank holds
        self.first, self.last = self.pp == 0, self.pp == p.pp - 1

    def layers(self, stage: int, total: int) -> range:
        return range(stage * total // self.count, (stage + 1) * total // self.count)

    def meet(self, heads: int) -> None:
        """Make the groups for attention with that many heads on a TP rank: they are dealt out as far as they go, over the rest there is a ring."""
        p, deal = self.p, math.gcd(self.p.cp, heads)
        if heads in self.cp_groups:
            return
        groups: tuple[Any, Any] = (self.cp_group, None) if deal == p.cp else (None, self.cp_group)
        if 1 < deal < p.cp:
            mesh = init_device_mesh(self.device.type, (p.pp * p.fsdp, p.cp // deal, deal, p.tp), mesh_dim_names=("rest", "ring", "deal", "tp"))
            groups = mesh.get_group("deal"), mesh.get_group("ring")
        if groups[1]:  # NCCL wants all of a group in its first operation, and in the ring some pairs have nothing to say
            dist.all_reduce(torch.zeros(1, device=self.device), group=groups[1])
        self.cp_groups[heads] = groups

    def distribute(self, model: PreTrainedModel, policy: MixedPrecisionPolicy) -> None:
        """Cut a model whose weights are not there yet (transformers then reads each rank's part only): stages, TP and EP, then FSDP."""
        base: Any = model.get_decoder()
        if self.p.cp > 1:
            self.meet(model.config.get_text_config().num_attention_heads // self.p.tp)
        model.layout, model.partial_gradients = self, set[str]()
        tied = bool(model.all_tied_weights_keys)
        model.tie_weights()  # before FSDP sees the model: it must treat tied layers' weight as one
        if self.p.pp > 1:
            model._keys_to_ignore_on_load_unexpected = {".*"}  # other stages' weights
            total = len(base.layers)
            own = {i for s in self.stages for i in self.layers(s, total)}
            for i in set(range(total)) - own:
                base.layers[i] = PipelineIdentityLayer()
            if not (self.first or (self.last and tied)):  # a tied head needs the embedding's weight at its own end
                base.embed_tokens = PipelineIdentityLayer()
            if not self.last:
                base.norm, model.lm_head = PipelineIdentityLayer(), PipelineIdentityLayer()
                model.all_tied_weights_keys = {}
        plan, experts = tensor_parallel.resolve_parallel_plans(model, SimpleNamespace(tp_size=self.p.tp, ep_size=self.p.ep, tp_plan=None, ep_plan=None))
        # The embedding stays whole on every TP rank, and so does what is tied to it. (transformers cuts it by rows where it is tied.)
        whole = ("embed_tokens", "lm_head") if tied else ("embed_tokens",)
        plan = {name: style for name, style in plan.items() if name.rpartition(".")[2] not in whole}
        # Their hook sums what p.grad has piled up anew in every micro-batch: sum_partial does it once instead.
        model.partial_gradients = {name for name, style in plan.items() if style == PARTIAL}
        plan = {name: style for name, style in plan.items() if style != PARTIAL}
        if plan:
            tensor_parallel.apply_tensor_parallelism(model, self.dense["tp"], plan)
        if experts:
            tensor_parallel.apply_expert_parallelism(model, self.expert["ep"], self.dense["tp"], experts)
        if self.world > 1 or policy.param_dtype or self.offload:
            place = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.offload else OffloadPolicy()

            def shard(module: Any, mesh: Any, keep: bool = False, **kw: Any) -> None:
                alone = mesh.size() == 1  # nothing to shard: FSDP is what keeps master weights beside those that compute
                reshard = not keep and (self.offload or not alone)
                fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=reshard, **kw)
                module.set_force_sum_reduction_for_comms(True)  # a plain sum
                if not alone:  # where torch would divide for itself, and copy all gradients to do so
                    module.set_gradient_divide_factor(1.0)

            for name, module in model.named_modules():
                if experts.get(tensor_parallel.replace_layer_number_by_wildcard(name)) == DISPATCH:
                    shard(module, self.expert["efsdp"], shard_placement_fn=self.expert_placement)
            for layer in base.layers:
                if not isinstance(layer, PipelineIdentityLayer):
                    shard(layer, self.dense["fsdp"])
            shard(model, self.dense["fsdp"], keep=True)

    def to_host(self, model: PreTrainedModel) -> None:
        """With offload move what is sharded, which loads on the device, to where FSDP wants it; buffers stay."""
        if self.offload:
            model.cpu()
            for module in model.modules():
                module._buffers.update({k: b if b is None else b.to(self.device) for k, b in module._buffers.items()})

    def expert_placement(self, param: torch.nn.Parameter) -> Shard:
        """FSDP's cut of experts: between experts, or through them where each rank has too few."""
        local = param.shape[0] // self.p.ep
        return Shard(1 if local % self.expert["efsdp"].size() else 0)

    def sum_partial(self, model: PreTrainedModel) -> None:
        """Complete gradients that autograd leaves as parts, once all micro-batches are done: of norms that see a TP rank's heads only,
        of tied embeddings, which lie at both ends of a pipeline, and of adapters, which FSDP does not know."""
        if self.world > 1 and (own := [p.grad for n, p in model.named_parameters() if ".lora_" in n]):
            total = torch.cat([g.flatten() for g in own])
            dist.all_reduce(total)
            for g, part in zip(own, total.split([g.numel() for g in own])):
                g.copy_(part.view_as(g))
        for name, p in model.named_parameters():
            layer = tensor_parallel.replace_layer_number_by_wildcard(name.rpartition(".")[0])
            if self.p.tp > 1 and layer in model.partial_gradients:
                dist.all_reduce(local(p.grad), group=self.tp_group)
        if self.p.pp > 1 and model.config.get_text_config().tie_word_embeddings and (self.first or self.last):
            grad = local(model.get_input_embeddings().weight.grad)
            other, peer = torch.empty_like(grad), dist.get_global_rank(self.pp_group, self.p.pp - 1 if self.first else 0)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, grad.clone(), peer), dist.P2POp(dist.irecv, other, peer)]):
                work.wait()
            grad.add_(other)

    def gradient_norm(self, model: PreTrainedModel) -> float:
        """The norm over all ranks, every weight counted once: of each mesh, then of all, since a norm over several meshes isn't defined."""
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for name, p in model.named_parameters():
            if p.grad is not None and not (self.p.pp > 1 and self.last and name.endswith("embed_tokens.weight")):  # a tied copy: the first stage counts it
                by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p.grad)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for grads in by_mesh.values():
            norm = torch.nn.utils.get_total_norm(grads, foreach=False)
            total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
        if self.p.pp > 1:
            dist.all_reduce(total, group=self.pp_group)
        return float(total.sqrt())


def reshard(model: torch.nn.Module) -> None:
    """Give back what a forward without a backward has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(t: torch.Tensor) -> torch.Tensor:
    """A rank's own part, sharing its memory."""
    return t.to_local() if isinstance(t, DTensor) else t
