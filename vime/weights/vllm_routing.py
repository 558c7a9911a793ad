"""Which experts each token was routed to, on a CPU: vLLM's own recorder (--enable-return-routed-experts) behind the V1 runner."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

FLAG = "--enable-return-routed-experts"


def return_routed_experts() -> None:
    """vLLM fills `routed_experts` in its V2 runner only, which needs Triton. All but the runner's four calls works without: the routers'
    capture, the store that keeps routing by KV-cache block (so prompts that come from the cache have theirs), the scheduler, the field in
    the answer. So on a CPU the V1 runner makes these calls, and the check that refuses it is told to leave the runner to us."""
    from vllm.platforms import current_platform

    if not any(a.replace("_", "-") == FLAG for a in sys.argv) or not current_platform.is_cpu():  # other servers are spared the imports below
        return
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    verify, initialize = VllmConfig._verify_aux_output_compatibility, Runner.initialize_kv_cache
    execute, sample = Runner.execute_model, Runner.sample_tokens
    if hasattr(verify, "__wrapped__"):
        return

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
        pending = self.aux_output.prepare_output(
            SimpleNamespace(req_ids=list(batch.req_ids), query_start_loc_np=starts, num_computed_tokens_np=computed)
        )
        out = sample(self, grammar_output)  # the platform turns asynchronous scheduling off: tokens are there
        if pending is not None:
            sampled = np.array([len(ids) for ids in out.sampled_token_ids])
            proposed = np.array([len(drafts.get(r, ())) for r in pending.request_ids])
            pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, proposed + 1 - sampled, 0))
            out.aux_output_connector_output = pending.process_output()
        return out

    checked.__wrapped__ = verify  # type: ignore[attr-defined]
    VllmConfig._verify_aux_output_compatibility = checked
    Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens = with_store, announced, with_routing
