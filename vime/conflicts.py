"""Settings that don't go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime import rules

if TYPE_CHECKING:
    from vime.config import Config


def conflicts(cfg: Config) -> list[str]:
    """Every pair of settings that cannot hold at once, each with what to do; [] where there is none."""
    faults: list[str] = []
    total = cfg.samples_per_step
    gbs = cfg.train.global_batch_size
    if gbs and total % gbs:
        faults.append(f"train.global_batch_size {gbs} does not divide rollout.batch_size x n_samples_per_prompt = {total}")
    if (gbs or total) % cfg.parallel.fsdp:
        faults.append(f"parallel.fsdp {cfg.parallel.fsdp} does not divide the {gbs or total} samples of an optimizer step")
    faults += rules.algo(cfg) + rules.objective(cfg)
    r, t = cfg.rollout, cfg.train
    if (r.over_sampling_batch_size or r.batch_size) < r.batch_size:
        faults.append(f"rollout.over_sampling_batch_size {r.over_sampling_batch_size} is less than rollout.batch_size {r.batch_size}")
    if r.function and t.mode == "async":
        faults.append('rollout.function generates a whole step: it needs train.mode = "sync"')
    if t.mode == "async" and t.max_staleness == 0:
        faults.append('train.mode = "async" needs train.max_staleness >= 1 (1: one-step-off)')
    if t.mode == "async" and (r.partial_rollout or r.over_sampling_batch_size or r.mask_offpolicy_prefix):
        faults.append("rollout.partial_rollout, over_sampling_batch_size and mask_offpolicy_prefix are for sync mode: async never interrupts")
    if r.partial_rollout and not (t.max_staleness or r.mask_offpolicy_prefix):
        faults.append("rollout.partial_rollout trains tokens of older weights: set train.max_staleness >= 1, or rollout.mask_offpolicy_prefix")
    corrected = cfg.algo.correction != "none" or cfg.algo.custom_tis
    if t.max_staleness and not (corrected or cfg.loss.custom):
        stale = f"train.max_staleness {t.max_staleness} trains on samples of older weights"
        faults.append(f'{stale}: set algo.correction = "tis", "icepop" or "rollout_logprobs", or algo.custom_tis')
    if cfg.weights.delta_full_every and not cfg.weights.delta:
        faults.append("weights.delta_full_every has no meaning without weights.delta: every version is published whole")
    if cfg.engine and r.num_engines > 1:
        faults.append(f"rollout.num_engines = {r.num_engines} and {len(cfg.engine)} [[engine]] tables: leave one of them out")
    for i, table in enumerate(cfg.engine):
        if shared := sorted({"model", "dtype", "logprobs_mode", "weight_transfer_config"} & {k.replace("-", "_") for k in table.vllm}):
            faults.append(f"engine.{i}.vllm.{shared[0]}: all servers take the same weights and give comparable logprobs: set it for all, or not")
    if r.colocate and t.mode == "async":
        faults.append('rollout.colocate: servers that sleep while the trainer trains need train.mode = "sync"')
    first, n = cfg.vllm.get("port"), len(cfg.servers)
    if first and first + n - 1 > 65535:
        faults.append(f"vllm.port {first}: {n} servers take as many ports from there on, and 65535 is the last; lower it")
    if first and cfg.router.get("port") in range(first, first + n):
        faults.append(f"router.port {cfg.router['port']} is one of the ports {first} to {first + n - 1} of the servers (vllm.port)")
    return faults
