"""Settings that don't go together."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.config import Config


Pairs = list[tuple[object, str]]  # whether something is wrong, and what


def found(pairs: Pairs) -> list[str]:
    return [what for wrong, what in pairs if wrong]


def conflicts(cfg: Config) -> list[str]:
    """Every pair of settings that cannot hold at once, each with what to do; [] where there is none."""
    total, gbs = cfg.samples_per_step, cfg.train.global_batch_size
    faults = found([
        (gbs and total % gbs, f"train.global_batch_size {gbs} does not divide rollout.batch_size x n_samples_per_prompt = {total}"),
        ((gbs or total) % cfg.parallel.fsdp, f"parallel.fsdp {cfg.parallel.fsdp} does not divide the {gbs or total} samples of an optimizer step"),
    ])  # fmt: skip
    faults += algo(cfg) + objective(cfg) + lora(cfg) + data_plane(cfg) + debug(cfg) + unread(cfg) + agents(cfg)
    r, t = cfg.rollout, cfg.train
    corrected = cfg.algo.correction != "none" or cfg.algo.custom_tis
    stale = f"train.max_staleness {t.max_staleness} trains on samples of older weights"
    only_sync = t.mode == "async" and (r.partial_rollout or r.over_sampling_batch_size or r.mask_offpolicy_prefix)
    faults += found([
        (r.max_response_len >= r.max_context_len, f"rollout.max_response_len {r.max_response_len} leaves no room for a prompt in max_context_len {r.max_context_len}"),
        ((r.over_sampling_batch_size or r.batch_size) < r.batch_size,
         f"rollout.over_sampling_batch_size {r.over_sampling_batch_size} is less than rollout.batch_size {r.batch_size}"),
        (r.function and t.mode == "async", 'rollout.function generates a whole step: it needs train.mode = "sync"'),
        (t.mode == "async" and t.max_staleness == 0, 'train.mode = "async" needs train.max_staleness >= 1 (1: one-step-off)'),
        (only_sync, "rollout.partial_rollout, over_sampling_batch_size and mask_offpolicy_prefix are for sync mode: async never interrupts"),
        (r.partial_rollout and not (t.max_staleness or r.mask_offpolicy_prefix),
         "rollout.partial_rollout trains tokens of older weights: set train.max_staleness >= 1, or rollout.mask_offpolicy_prefix"),
        (t.max_staleness and not (corrected or cfg.loss.custom), f'{stale}: set algo.correction = "tis", "icepop" or "rollout_logprobs", or algo.custom_tis'),
        (cfg.engine and r.num_engines > 1, f"rollout.num_engines = {r.num_engines} and {len(cfg.engine)} [[engine]] tables: leave one of them out"),
        (r.colocate and t.mode == "async", 'rollout.colocate: servers that sleep while the trainer trains need train.mode = "sync"'),
    ])  # fmt: skip
    if t.stream:
        unfit: dict[str, object] = {"train.mode": t.mode == "async", "train.global_batch_size": gbs not in (None, total), "rollout.colocate": r.colocate}
        unfit |= {"algo.advantage_estimator, kl_coef or gamma, which look at all tokens of the step": cfg.algo.per_token, "train.objective": cfg.offline}
        of_whole_steps = ["algo.custom_advantage", "loss.custom", "loss.custom_reducer", "reward.post_process"]
        of_whole_steps += [f"rollout.{name}" for name in ("function", "sample_filter", "all_samples_process", "data_postprocess")]
        unfit |= {key: attrgetter(key)(cfg) for key in of_whole_steps}
        faults += [f"train.stream trains on parts of a step, which does not go with this {k}" for k, v in unfit.items() if v]
    if cfg.weights.transport == "nccl":
        unfit = {"weights.delta": cfg.weights.delta, "weights.post_write": cfg.weights.post_write, "rollout.colocate": r.colocate}
        unfit["vllm.speculative_config"] = any("speculative_config" in s.vllm for s in cfg.servers)
        faults += [f'weights.transport = "nccl" does not go with {k}: set it to "shm" or "file"' for k, v in unfit.items() if v]
    for i, table in enumerate(cfg.engine):
        if shared := sorted({"model", "dtype", "logprobs_mode", "weight_transfer_config"} & {k.replace("-", "_") for k in table.vllm}):
            faults.append(f"engine.{i}.vllm.{shared[0]}: all servers take the same weights and give comparable logprobs: set it for all, or not")
    if first := cfg.vllm.get("port"):
        n, last, router = len(cfg.servers), first + len(cfg.servers) - 1, cfg.router.get("port")
        faults += found([
            (last > 65535, f"vllm.port {first}: {n} servers take as many ports from there on, and 65535 is the last; lower it"),
            (router in range(first, first + n), f"router.port {router} is one of the ports {first} to {last} of the servers (vllm.port)"),
        ])  # fmt: skip
    return faults


def agents(cfg: Config) -> list[str]:
    """What [agent] does not go with."""
    r, own = cfg.rollout, str(cfg.rollout.custom_generate).startswith("vime.agents.")
    if not cfg.agent.task:
        what = "agent.task is unset, so there is no agent: set it, or leave out [agent], and rollout.custom_generate = vime.agents..."
        return [what] if own or cfg.agent != type(cfg.agent)() else []
    silent = any(not {"tool_call_parser", "reasoning_parser"} & s.vllm.keys() for s in cfg.servers)
    return found([
        (r.function or not own, "agent.task generates every sample: leave out rollout.custom_generate and rollout.function"),
        (cfg.data.apply_chat_template, "agent.task makes the messages from each row's prompt: set data.apply_chat_template = false"),
        (cfg.gateway.parser == "server" and silent,
         'gateway.parser = "server" needs servers that parse: set vllm.enable_auto_tool_choice and vllm.tool_call_parser, or another parser'),
        (r.routing_replay, "agent.task does not go with rollout.routing_replay: the gateway keeps no experts"),
    ])  # fmt: skip


def one_host(cfg: Config) -> list[str]:
    """What of the run is of one host only, for those that have several."""
    on_shm, by_shm = cfg.data_plane.backend == "shm", cfg.weights.transport == "shm" and not cfg.offline
    return found([
        (on_shm, 'data_plane.backend = "shm" is the memory of one host: "ray", "mooncake" or "transferqueue" reach all of them'),
        (by_shm, 'weights.transport = "shm" is the memory of one host: "file" on a shared file system, or "nccl" between GPUs'),
        (cfg.rollout.colocate, "rollout.colocate shares the accelerators of one host: give servers some of their own, or start them by hand (rollout.engines)"),
    ])  # fmt: skip


def algo(cfg: Config) -> list[str]:
    """What is wrong with advantages, policy loss and correction: one line per fault."""
    a, r, reward, loss = cfg.algo, cfg.rollout, cfg.reward, cfg.loss
    kind = a.advantage_estimator
    critic, teacher = kind == "gae", kind == "on_policy_distillation"
    own = a.correction != "none" or a.custom_tis or a.use_opsm or a.rejection or a.policy_loss != "ppo" or loss.custom_reducer
    raw = kind in ("rloo", "opo", "remax") or reward.overlong_buffer_len or a.overlong_filter
    (low, high), bounded = a.rejection_bounds, a.rejection and a.rejection.endswith("k1") and a.rejection_high is not None
    return found([
        (kind not in ("reinforce_plus_plus", "remax", "gae", "on_policy_distillation") and r.n_samples_per_prompt == 1,
         f"{kind} needs rollout.n_samples_per_prompt >= 2: the advantage of a group of one is always 0"),
        (a.custom_tis and a.correction != "none", f"algo.custom_tis takes the place of correction = {a.correction!r}: set one of them"),
        (a.tis_low > a.tis_clip, f"algo.tis_clip_low {a.tis_low} is above tis_clip {a.tis_clip}"),
        (a.kl_coef and a.kl_loss_coef, "algo.kl_coef and algo.kl_loss_coef would charge the KL twice: set one of them"),
        (a.gamma != 1 and kind not in ("reinforce_plus_plus", "gae"), f"algo.gamma {a.gamma} discounts along the tokens, where {kind} compares whole responses: leave it at 1"),
        (a.critic_ranks and a.kl_coef, "algo.critic_ranks does not go with algo.kl_coef: the critic's ranks have no logprobs to take a KL of; use algo.kl_loss_coef"),
        (critic and not a.critic_ranks and (cfg.parallel.ranks > cfg.parallel.fsdp or cfg.parallel.ep > 1),
         f"parallel: {cfg.parallel}: a critic is trained on fsdp ranks only: leave out tp, pp, cp and ep, or set algo.critic_ranks"),
        (critic and a.num_critic_only_steps >= cfg.train.steps,
         f"algo.num_critic_only_steps {a.num_critic_only_steps} leaves none of train.steps = {cfg.train.steps} to train the model in"),
        (teacher and not a.ref_model, "on_policy_distillation needs algo.ref_model, the teacher: without one the model would be its own"),
        (teacher and (a.kl_coef or a.kl_loss_coef or reward.post_process or reward.overlong_buffer_len),
         "on_policy_distillation takes nothing but the KL to the teacher for an advantage: "
         "leave out algo.kl_coef, kl_loss_coef, reward.post_process and overlong_buffer_len"),
        (a.policy_loss == "gpg" and a.correction == "rollout_logprobs",
         'algo.policy_loss = "gpg" has no ratio, so nothing corrects for old = the sampled logprobs: use correction = "tis" or "icepop"'),
        (a.custom_advantage and (kind != "grpo" or a.per_token),
         "algo.custom_advantage sets every token's advantage: leave out advantage_estimator, kl_coef and normalize_advantages"),
        (a.rejection and a.rejection_high is None, f"algo.rejection = {a.rejection!r} needs rejection_high, beyond which samples are dropped"),
        (bounded and low > high,
         f"algo.rejection_low {low:g} is above rejection_high {high:g}: every sample would be dropped"),
        (reward.function == "regex" and not reward.pattern, 'reward.function = "regex" needs reward.pattern'),
        (reward.post_process and raw, "reward.post_process turns rewards into numbers itself: "
         f"leave out advantage_estimator = {kind!r}, overlong_filter and reward.overlong_buffer_len"),
        (kind == "remax" and r.function, "remax: rollout.function generates every sample itself, so nothing samples the greedy ones"),
        (reward.overlong_buffer_len > r.max_response_len, f"reward.overlong_buffer_len {reward.overlong_buffer_len} is longer than "
         f"rollout.max_response_len {r.max_response_len}: every response would be punished"),
        (loss.custom and own, "loss.custom takes the place of the policy loss: "
         "leave out algo.policy_loss, correction, custom_tis, rejection, use_opsm and loss.custom_reducer"),
    ])  # fmt: skip


def lora(cfg: Config) -> list[str]:
    """What adapters are not shown to be right with."""
    given, p = cfg.lora, cfg.parallel
    if given.rank is None:
        return ["lora.rank is unset, so there are no adapters: set it, or leave [lora] out"] if given != type(given)() else []
    wrong = {
        f"parallel, {p}: adapters are trained on fsdp ranks only, without tp, pp, cp and ep": p.ranks > p.fsdp or p.ep > 1,
        'algo.advantage_estimator = "gae": a critic has no adapters': cfg.algo.advantage_estimator == "gae",
        "rollout.routing_replay: not shown to be right with adapters": cfg.rollout.routing_replay,
    }
    if given.adapter:
        only = 'lora.publish = "adapter", which servers read from a file and add to the model they began with:'
        wrong |= {f"{only} leave out weights.delta": cfg.weights.delta, f'{only} set weights.transport to "shm" or "file"': cfg.weights.transport == "nccl"}
        wrong |= {f"{only} leave out vllm.speculative_config": any("speculative_config" in s.vllm for s in cfg.servers)}
        wrong |= {f"{only} leave out vllm.pipeline_parallel_size": any(s.vllm.get("pipeline_parallel_size", 1) != 1 for s in cfg.servers)}
        wrong |= {f"{only} set rollout.sleep_level to 1": cfg.rollout.colocate and cfg.rollout.sleep_level == 2}
        wrong |= {f"{only} {given.rank} is more than vLLM's 512": given.rank > 512}
    return [f"lora.rank does not go with {what}" for what, found in wrong.items() if found]


def objective(cfg: Config) -> list[str]:
    """What a run without servers has no use for: every such key that is not at its default."""
    kind, kept = cfg.train.objective, {"rollout.batch_size", "rollout.max_context_len", "rollout.max_response_len", "weights.transport"}
    if kind == "rl":
        return []
    kept |= {"algo.dpo_beta", "algo.ref_model"} if kind == "dpo" else {"loss.aggregate"}
    unused = [k for k in ("engine", "vllm", "router", "args") if getattr(cfg, k)]
    for name in ("rollout", "reward", "algo", "loss", "eval", "weights"):
        section = getattr(cfg, name)
        plain = type(section)()
        unused += [f"{name}.{k}" for k in type(section).model_fields if getattr(section, k) != getattr(plain, k) and f"{name}.{k}" not in kept]
    others = {"data.source": cfg.data.source, "log.rollout_hook": cfg.log.rollout_hook, "log.eval_hook": cfg.log.eval_hook}
    unused += [k for k, v in others.items() if v] + ["train.mode"] * (cfg.train.mode != "sync") + ["train.max_staleness"] * bool(cfg.train.max_staleness)
    what = f"train.objective = {kind!r} reads its samples from the file, and trains on them as they are"
    return [f"{what}: leave out {', '.join(unused)}"] if unused else []


def debug(cfg: Config) -> list[str]:
    """What the modes of [debug] and [trace] don't go with."""
    d, r, t, faults = cfg.debug, cfg.rollout, cfg.train, []
    halves = {"debug.rollout_only": d.rollout_only, "debug.train_only": d.train_only}
    plain = t.mode == "sync" and not (t.max_staleness or t.stream or cfg.offline or r.partial_rollout)
    for key in (k for k, on in halves.items() if on and not plain):
        faults.append(f'{key} takes whole steps of the newest weights: train.mode = "sync", objective = "rl", no max_staleness, stream, partial_rollout')
    if all(halves.values()):
        faults.append("debug.rollout_only and debug.train_only leave nothing to run: set one of them")
    if d.deterministic and (t.mode == "async" or t.stream or r.partial_rollout or r.over_sampling_batch_size):
        faults.append("debug.deterministic: async mode, train.stream, partial_rollout and over-sampling depend on who is first: leave them out")
    package = "opentelemetry.exporter" if cfg.trace.otlp else "opentelemetry"
    if (cfg.trace.file or cfg.trace.otlp) and not (find_spec("opentelemetry") and find_spec(package) and find_spec("opentelemetry.sdk")):
        faults.append('[trace] needs OpenTelemetry: pip install "vime[observe]"')
    return faults


def unread(cfg: Config) -> list[str]:
    """Keys that are not at their default, and that nothing reads with the other settings. (A plug-in for the loss may read any of [algo].)"""
    a, own = cfg.algo, cfg.loss.custom or cfg.algo.custom_tis
    of_gae = " ".join(f"algo.{k}" for k in ("critic_model", "critic_lr", "critic_ranks", "value_clip", "lambd", "num_critic_only_steps"))
    readers = {
        'algo.advantage_estimator = "gae"': (a.advantage_estimator == "gae", of_gae),
        'train.objective = "dpo"': (False, "algo.dpo_beta"),
        'algo.policy_loss = "ppo" or "gspo"': (own or a.policy_loss in ("ppo", "gspo"), "algo.eps_clip_c"),
        'algo.correction = "tis" or "icepop"': (own or a.correction in ("tis", "icepop"), "algo.tis_clip algo.tis_clip_low"),
        "algo.use_opsm": (own or a.use_opsm, "algo.opsm_delta"),
        "algo.rejection": (own or a.rejection, "algo.rejection_high algo.rejection_low"),
        "a KL (kl_coef or kl_loss_coef)": (own or a.needs_reference, "algo.kl_loss_type"),
        'servers (train.objective = "rl")': (not cfg.offline, "lora.publish"),
        "weights.delta": (cfg.weights.delta, "weights.delta_full_every"),
        "rollout.colocate": (cfg.rollout.colocate, "rollout.sleep_level"),
        'reward.function = "regex"': (cfg.reward.function == "regex", "reward.pattern"),
        "reward.overlong_buffer_len": (cfg.reward.overlong_buffer_len, "reward.overlong_penalty_factor"),
        'train.lr_decay_style = "linear" or "cosine"': (cfg.train.lr_decay_style != "constant", "train.min_lr train.lr_decay_start"),
    }
    out = []
    for reader, (there, keys) in readers.items():
        for section, key in (k.split(".") for k in keys.split() if not there and (k.startswith(("train.", "lora.")) or not cfg.offline)):
            given = getattr(cfg, section)
            if getattr(given, key) != type(given).model_fields[key].default:
                out.append(f"{section}.{key} has no effect without {reader}: leave it out")
    return out


def data_plane(cfg: Config) -> list[str]:
    """What the store of samples lacks here, or cannot do."""
    d, faults = cfg.data_plane, []
    m = d.mooncake
    for module in ["mooncake"] * d.on_mooncake + ["transfer_queue"] * (d.backend == "transferqueue"):
        if not find_spec(module):
            faults.append(f'data_plane.backend = {d.backend!r} needs the package {module}: pip install "vime[dataplane]"')
    if d.on_mooncake:
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            faults.append("data_plane: Mooncake needs libibverbs.so.1, also over TCP: apt-get install libibverbs1")
    for name, used in (("mooncake", d.on_mooncake), ("transferqueue", d.backend == "transferqueue")):
        if not used and getattr(d, name) != type(getattr(d, name))():
            faults.append(f"[data_plane.{name}] has no meaning with data_plane.backend = {d.backend!r}: leave it out")
    if m.device and m.protocol == "tcp":
        faults.append(f'data_plane.mooncake.device {m.device!r} is of protocol = "rdma"')
    if m.master and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", m.master):
        faults.append(f'data_plane.mooncake.master {m.master!r} is not of the form host:port, as "10.0.0.1:50051"')
    segments = cfg.rollout.num_workers if m.storage == "own" else m.processes
    if d.backend == "mooncake" and m.replicas > segments and not m.master:
        faults.append(f"data_plane.mooncake.replicas {m.replicas} copies need as many segments, and {m.storage!r} storage has {segments}")
    if m.replicas > 1 and d.backend == "transferqueue":
        faults.append("data_plane.mooncake.replicas: TransferQueue keeps one copy of everything: leave it out")
    return faults
