"""The receiving side of weight updates, inside the vLLM server (entry point vllm.general_plugins). An update names a .safetensors file with
the whole model, and deltas to lay over it. Also after a delta the whole model is loaded, out of memory: vLLM fuses and packs weights, so a
few elements of a tensor have no place of their own in it."""

import json
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from vime.weights import UNTOUCHED
from vime.weights.delta import Held

ADAPTER = 1  # vLLM's number of the only adapter


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Files need no rendezvous. nccl: what vLLM's own engine wants to know of one."""

    nccl: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str = ""
    deltas: list[str] = field(default_factory=list)
    nccl: dict[str, Any] | None = None


class FileWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a whole model from files through vLLM's layerwise reload, and mends what its CPU build leaves stale; over NCCL vLLM's own engine does."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _begun = False
    _nccl: Any = None

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, **kw)
        self._held = Held()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.nccl:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            self.shutdown()
            self._nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)
            self._nccl.init_transfer_engine(self._nccl.parse_init_info(init_info.nccl))

    def start_weight_update(self) -> None:
        self._begun = False

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError beginning with UNTOUCHED for files that can't be read or taken, without it where the model is half loaded."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if update_info.nccl:
            initialize_layerwise_reload(self.model)
            self._begun = True
            return self._nccl.receive_weights(self._nccl.parse_update_info(update_info.nccl))
        try:  # a missing, cut or foreign file is found before the model is touched
            with safe_open(update_info.path, framework="pt") as f:
                if "lora" in (f.metadata() or {}):
                    return self._adapter(f)
            weights = self._held.read(update_info.path, update_info.deltas)
        except (OSError, SafetensorError, ValueError) as e:
            raise ValueError(f"{UNTOUCHED}: {type(e).__name__}: {e}") from e
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        self._begun = True
        loaded = self.model.load_weights(weights)  # type: ignore[operator]
        if loaded is not None and (missing := sorted(expected - set(loaded))):
            raise ValueError(f"no weights for {len(missing)} parameters: {', '.join(missing[:5])}")

    def _adapter(self, file: Any) -> None:
        """Put the adapter in a file (metadata "lora": peft's r and lora_alpha) into the one slot. Raises: ValueError where this server has none."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager: Any = getattr(self.model, "lora_manager", None)
        if manager is None:
            raise ValueError("an adapter, for a server that was started without --enable-lora")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        helper = PEFTHelper(**json.loads(file.metadata()["lora"]), target_modules=[])
        mapper: Any = getattr(self.model, "hf_to_vllm_mapper", None)  # of which adapters take what renames layers, not what joins them
        mapper, dtype = mapper and mapper.get_rename_mapper(), manager.lora_config.lora_dtype
        adapter = LoRAModel.from_lora_tensors(ADAPTER, tensors, helper, "cpu", dtype, weights_mapper=mapper)
        places = set(manager.modules) | {part for parts in manager.packed_modules.values() for part in parts}
        if unknown := sorted(adapter.loras.keys() - places):
            raise ValueError(f"vLLM has no adapters for {len(unknown)} of these layers, {unknown[0]} first")
        manager.remove_adapter(ADAPTER)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._begun:
            finalize_layerwise_reload(self.model, self.model_config)
            self._begun = False
            _repack(self.model)

    def shutdown(self) -> None:
        if self._nccl:
            self._nccl.shutdown()


def _repack(model: torch.nn.Module) -> None:
    """On the CPU every linear layer runs on a packed copy of its weight. The reload packs layers that got a tensor; an lm_head tied to
    the embedding gets none and would keep the packed OLD embedding, so pack again whatever still has its weight."""
    from vllm.model_executor.layers import utils

    for m in model.modules():
        weight = getattr(m, "weight", None)
        if "cpu_linear" in vars(m) and isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.numel():
            utils.dispatch_cpu_unquantized_gemm(m, remove_weight=False)


def _fix_moe_reload() -> None:
    """On the CPU an update copies plain expert weights into storage that the kernel reads as packed: pack them again after each one."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    original = Method._setup_kernel

    def setup(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    Method._setup_kernel = setup  # type: ignore[method-assign]


def _return_sampling_masks() -> None:
    """vLLM fills `sampling_mask` (--return-sampling-mask) in its V2 runner only, which needs Triton. On a CPU without it, fill the same
    field from the V1 runner: a token's support is where its processed logprobs, from which it is drawn, are finite."""
    from vllm.config import VllmConfig
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    verify, sample, sample_tokens = VllmConfig._verify_sampling_replay_config, Sampler.sample, Runner.sample_tokens

    def checked(self: Any) -> None:
        model = self.model_config
        if model is None or not model.return_sampling_mask or self.use_v2_model_runner:
            return verify(self)
        if model.logprobs_mode != "processed_logprobs" or self.speculative_config is not None:
            raise ValueError("return_sampling_mask on a CPU needs logprobs_mode processed_logprobs and no speculative decoding")

    def kept(self: Any, *args: Any, **kw: Any) -> Any:
        self.last = sample(self, *args, **kw)
        return self.last

    def with_masks(self: Any, grammar_output: Any) -> Any:
        self.sampler.last = None
        out = sample_tokens(self, grammar_output)
        if self.model_config.return_sampling_mask and self.sampler.last is not None:
            support = self.sampler.last[1] > -torch.inf  # (requests, vocabulary)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), support.sum(1).cumsum(0)])
            masks = SamplingMaskLists(support.nonzero()[:, 1].int().numpy(), offsets.numpy())
            getattr(out, "_model_runner_output", out).sampling_masks = masks  # asynchronous scheduling wraps the output
        self.sampler.last = None
        return out

    VllmConfig._verify_sampling_replay_config, Sampler.sample, Runner.sample_tokens = checked, kept, with_masks  # type: ignore[method-assign]


def _fix_speculation() -> None:
    """On the CPU vLLM spreads the requests' temperature, top_k and top_p over their draft tokens with a kernel that takes int64 only: other
    types are converted to a copy, which gets the result. The sampler then works with uninitialized memory: wrong tokens, wrong logprobs."""
    from vllm.v1.sample import rejection_sampler

    def expand(x: torch.Tensor, ends: torch.Tensor, n: int, replace_from: float = 0, replace_to: float = 0) -> torch.Tensor:
        """(requests,) values -> (n,), one for each draft token; `ends`: (requests,) running sums of the numbers of draft tokens."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=n)

    constrain = rejection_sampler.apply_sampling_constraints

    def constrained(logits: torch.Tensor, *args: Any) -> torch.Tensor:  # a step in which nothing was drafted: top_k fails on no rows
        return constrain(logits, *args) if logits.numel() else logits

    rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_sampling_constraints = expand, constrained


def _return_routed_experts() -> None:
    """vLLM fills `routed_experts` in its V2 runner only, which needs Triton. All but the runner's four calls works without: the routers'
    capture, the store that keeps routing by KV-cache block (so prompts that come from the cache have theirs), the scheduler, the field in
    the answer. So on a CPU the V1 runner makes these calls, and the check that refuses it is told to leave the runner to us."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    verify, initialize = VllmConfig._verify_aux_output_compatibility, Runner.initialize_kv_cache
    execute, sample = Runner.execute_model, Runner.sample_tokens

    def checked(self: Any) -> None:
        with patch.object(type(current_platform), "is_out_of_tree", lambda _: True):  # such platforms bring their own runner, as we do
            verify(self)

    def with_store(self: Any, kv_cache_config: Any, is_profiling: bool = False, **kw: Any) -> None:
        initialize(self, kv_cache_config, is_profiling, **kw)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.aux_output = get_aux_output_connector(self.model, self.vllm_config, self.kv_cache_config)

    def announced(self: Any, scheduler_output: Any, *args: Any, **kw: Any) -> Any:
        self.aux_output.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args, **kw)

    def with_routing(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is None:  # there was nothing to forward
            return sample(self, grammar_output)
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        batch, n = self.input_batch, self.input_batch.num_reqs
        starts, computed = self.query_start_loc.np[: n + 1].copy(), batch.num_computed_tokens_cpu[:n].copy()
        pending = self.aux_output.prepare_output(SimpleNamespace(req_ids=list(batch.req_ids), query_start_loc_np=starts, num_computed_tokens_np=computed))
        out = sample(self, grammar_output)  # the platform turns asynchronous scheduling off: tokens are there
        if pending is not None:
            sampled = np.array([len(ids) for ids in out.sampled_token_ids])
            proposed = np.array([len(drafts.get(r, ())) for r in pending.request_ids])
            pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, proposed + 1 - sampled, 0))
            out.aux_output_connector_output = pending.process_output()
        return out

    VllmConfig._verify_aux_output_compatibility = checked
    Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens = with_store, announced, with_routing


def _serve_adapter() -> None:
    """With --enable-lora every token of every request is of the adapter that came last. Requests name none, so those that are held over an
    update go on with the new one, as with whole weights. (vLLM's own requests keep the adapter that they named when they came.)"""
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA as Head
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as Mixin

    activate = Mixin._set_active_loras

    def everywhere(self: Any, prompts: tuple[int, ...], tokens: tuple[int, ...], requests: Any, *rest: Any) -> None:
        if not requests and ADAPTER in self.lora_manager.list_adapters():  # not while vLLM warms up
            prompts, tokens = (ADAPTER,) * len(prompts), (ADAPTER,) * len(tokens)
        activate(self, prompts, tokens, requests, *rest)

    Mixin._set_active_loras, Mixin.reset_lora_state = everywhere, lambda self: None  # type: ignore[method-assign]
    # The head has none. vLLM's way of asking that takes the logprobs of a prompt for those of sampled tokens, and fails by their number.
    Head.forward = lambda self, head, *args, **kw: self.base_layer(getattr(head, "base_layer", head), *args, **kw)  # type: ignore[method-assign]


def _asked(flag: str) -> bool:
    """Whether this server was started with `flag`."""
    return any(a.replace("_", "-").startswith(flag) for a in sys.argv)


def register() -> None:
    """Called in every vLLM process, maybe twice. A server is spared the imports for what it was not started with."""
    from vllm.platforms import current_platform

    if "vime" in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine("vime", FileWeightTransferEngine)
    if current_platform.is_cpu():
        _fix_moe_reload()
        if _asked("--return-sampling-mask"):
            _return_sampling_masks()
        if _asked("--enable-return-routed-experts"):
            _return_routed_experts()
        if _asked("--speculative-config"):
            _fix_speculation()
    if _asked("--enable-lora"):
        _serve_adapter()
