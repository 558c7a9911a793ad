"""One trainer rank: load, optimizer steps, publish, save. Every rank runs this same program (SPMD over torch.distributed)."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from vime import accel, hooks
from vime.config import Config, TrainConfig
from vime.errors import VimeError
from vime.sample import Sample
from vime.trainer import adapters, axes, checkpoint, custom, state
from vime.trainer import critic as critics
from vime.trainer.batch import Item, RankPlan
from vime.trainer.context import lay_out
from vime.trainer.faults import alone, named, not_finite, together
from vime.trainer.layout import Layout, reshard
from vime.trainer.loss import HeadLoss, dpo_loss, head_log_probs, importance_weights, kl, opsm_mask, policy_loss, rejection_mask
from vime.trainer.packing import Pack, pack
from vime.trainer.parallel import agree, init, load_model
from vime.trainer.pipeline import Job, Pipeline
from vime.trainer.returns import per_token
from vime.trainer.routing import Replay
from vime.trainer.vision import Vision
from vime.weights import Canary, Published, Receiver, location
from vime.weights.publish import Publisher, canary_tokens


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The rate of rollout step `step` (from 1): linear warm-up, constant until `lr_decay_start`, then down to `min_lr`, linear or half a cosine."""
    warm = min(1.0, step / cfg.lr_warmup_iters) if cfg.lr_warmup_iters else 1.0
    start = max(cfg.lr_decay_start * cfg.steps, cfg.lr_warmup_iters)
    if cfg.lr_decay_style == "constant" or step <= start:
        return cfg.lr * warm
    done = min(1.0, (step - start) / max(cfg.steps - start, 1e-9))
    left = 1 - done if cfg.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


def adamw(model: PreTrainedModel, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of what isn't frozen of a model; norms and biases don't decay."""
    groups: dict[Any, dict[str, Any]] = {}  # one operation takes tensors of one mesh only
    for p in (p for p in model.parameters() if p.requires_grad):
        decay = cfg.weight_decay if p.ndim > 1 else 0.0
        groups.setdefault((decay, getattr(p, "device_mesh", None)), {"params": [], "weight_decay": decay})["params"].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=cfg.lr, betas=(cfg.adam_beta1, cfg.adam_beta2), fused=True)


# Sums over trained tokens that loss_of() collects; all but the last two are weighted with the loss weights.
CORRECTION = ("tis", "tis_clipfrac", "tis_abs")
SUMS = (
    *("weight", "loss", "pg_loss", "pg_clipfrac", "ppo_kl", "ppo_abs_kl", "entropy", "kl_loss"),
    *CORRECTION,
    *("opsm_clipfrac", "rejected", "tokens", "logprob_abs_diff"),
)


@dataclass
class Begun:
    """The parts that have come of an optimizer step: what their losses and tokens sum up to on this rank. See RankPlan.factor."""

    sums: torch.Tensor
    counts: torch.Tensor
    worst: torch.Tensor
    own: Counter[str]
    seconds: float


class Trainer:
    """Rank `rank` of `world`. Methods are collectives, in the same order on every rank. Raises (any): VimeError for what a person can act on.
    Faults in a rank's input fail all ranks at once; where a rank dies, fails by itself or hangs, its peers wait until the controller ends them."""

    def __init__(self, cfg: Config, rank: int, world: int, master_addr: str = "", master_port: int = 0):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.address = (master_addr, master_port)
        self.reference: PreTrainedModel | None = None
        self.critic: critics.Critic | None = None
        self.custom: dict[str, Callable[..., Any]] = {}
        self.own: Counter[str] = Counter()  # metrics of these functions of the user's, summed over the batch
        self.bad_steps = 0  # optimizer steps in a row that had no finite loss and gradient
        self.begun: list[Begun] = []  # at most one
        self.seen: dict[int, list[float]] = {}  # with log.samples: logprobs of trained tokens, by uid, until they are taken
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None  # the newest checkpoint.async_save

    def join(self, folder: str | None, first: int = 0) -> None:
        """Meet the other ranks. `first`: see `init`."""
        cfg = self.cfg
        self.device = init(self.rank, self.world, *self.address, cfg.train.step_timeout + 60, cfg.train.offload == "all", first)
        self.side = dist.new_group(backend="gloo") if cfg.checkpoint.async_save else None  # a thread's collectives need a group of their own
        if cfg.train.offload != "none" and self.device.type == "cpu":
            raise VimeError(f'train.offload = "{cfg.train.offload}": this trainer runs on the CPU, whose memory that is', "leave it out")
        torch.manual_seed(cfg.seed + self.rank)
        torch.use_deterministic_algorithms(cfg.debug.deterministic)
        self.source = Path(cfg.model) if Path(cfg.model).is_dir() or not folder else Path(folder) / "hf"
        axes.check(cfg)
        self.layout = Layout(cfg.parallel, self.device, cfg.train.offload == "all")

    def setup(self, folder: str | None = None) -> None:
        """Join the other ranks, load the model; with the folder of a checkpoint, continue from it exactly."""
        cfg, train = self.cfg, self.cfg.train
        self.custom, self.args = hooks.loss_side(cfg), hooks.plugin_args(cfg)
        self.join(folder)
        start = Path(folder) / "hf" if folder and not cfg.lora.rank else self.source
        self.model = load_model(start, train.dtype, self.layout, train.gradient_checkpointing, train.freeze_vision)
        if cfg.lora.rank:
            adapters.add(self.model, cfg)
        self.pipelines = {self.model: Pipeline(self.model, cfg.model)}
        if cfg.needs_reference and cfg.lora.rank and cfg.algo.ref_model in (None, cfg.model):
            self.reference = self.model  # without its adapters
        elif cfg.needs_reference:
            path = cfg.algo.ref_model or cfg.model
            self.reference = load_model(path, train.dtype, self.layout).requires_grad_(False)
            self.pipelines[self.reference] = Pipeline(self.reference, path)
        self.replays = {m: Replay(m) for m in self.pipelines} if cfg.rollout.routing_replay else {}
        options = cfg.vllm.get("mm_processor_kwargs") or {}
        self.vision = {m: Vision(m, start, options) for m in self.pipelines if hasattr(m.config, "vision_config")}
        for m, vision in self.vision.items():
            self.pipelines[m].vision = vision
        self.optimizer = adamw(self.model, train)
        self.parts = {"": (self.model, self.optimizer)}  # what a checkpoint holds, by the prefix of the names there
        if cfg.algo.advantage_estimator == "gae" and not cfg.algo.critic_ranks:
            self.critic = critics.Critic(cfg, cfg.algo.critic_model or self.source, self.layout)
            self.parts["critic."] = (self.critic.model, adamw(self.critic.model, train))
        self.restore(folder)
        self.publisher = Publisher(cfg, self.rank)
        if self.rank == 0:
            shutil.rmtree(location(cfg), ignore_errors=True)  # left by a run that was killed

    def restore(self, folder: str | None, at: str = "trainer") -> None:
        if folder:
            state.load_rank(Path(folder), self.parts, at)
            for _, optimizer in self.parts.values():
                self.offload(optimizer, "cpu")

    def train(self, step: int, plan: RankPlan, *groups: list[Sample], advantages: dict[int, np.ndarray] | None = None) -> dict[str, float]:
        """The optimizer steps of rollout step `step` (from 1) on this rank's plan. Returns: metrics, the same on every rank; of a part, none.
        `advantages`: by uid, of a sample's trained tokens, from the critic's own ranks."""
        start = accel.clock(self.device)
        samples = {s.uid: s for g in groups for s in g}
        steps: list[list[Pack]] = []
        stale = np.zeros(0)  # weight versions that each trained token is behind
        pairs = self.cfg.train.objective == "dpo"
        if self.writing:
            agree(self.writing.exception() if self.writing.done() else None)
        with together(f"step {step}, trainer rank {self.rank}"):
            steps = [lay_out([pack(items, samples) for items in mini], self.layout, pairs) for mini in plan.steps]
            if self.cfg.rollout.truncated and any(b.samples and b.support is None for mini in steps for b in mini):
                raise ValueError("with rollout.top_p or top_k every sample needs its sampling_mask (see Sample.append_tokens)")
            for replay in self.replays.values():
                replay.check([b for mini in steps for b in mini])
            trained = [s for mini in steps for b in mini for s in b.samples]
            if not self.vision and any(s.images for s in trained):
                raise ValueError(f"samples with images for {self.cfg.model}, which is a text model")
            for vision in self.vision.values():
                vision.process(trained)
            stale = np.array([step - 1 - v for s in trained for v, m in zip(s.token_versions, s.loss_mask) if m])
            if stale.max(initial=0) > (bound := self.cfg.train.max_staleness):
                raise ValueError(f"a token's weights are {stale.max()} versions old, train.max_staleness is {bound}")
            if stale.min(initial=0) < 0:
                raise ValueError(f"a token's weights are version {step - 1 - stale.min()}, not published yet: does another run use these servers?")
        batches, self.own = [b for mini in steps for b in mini], Counter()
        # Later steps are off-policy: what they started from must be known before the first update, unless the sampled logprobs stand for it.
        algo, sampled = self.cfg.algo, self.cfg.algo.correction == "rollout_logprobs"
        compared = algo.kl_coef > 0 or algo.advantage_estimator == "on_policy_distillation"  # with the reference, so these must be exact
        recompute = not self.cfg.offline and ("algo.custom_advantage" in self.custom or (not sampled and (len(steps) > 1 or compared)))
        for k, batch in enumerate(batches):
            with alone(f"step {step}, {named(batches, k)}, before the update"):
                if self.reference is not None:
                    with adapters.off(self.model) if self.reference is self.model else nullcontext():
                        batch.ref = self.log_probs(self.reference, batch)
                if recompute:
                    batch.old = self.log_probs(self.model, batch)
                if self.critic:
                    batch.values = self.critic.values(batch)
        if fn := self.custom.get("algo.custom_advantage"):
            with together(f"step {step}, trainer rank {self.rank}"):
                custom.advantages(fn, self.args, batches, {i.index: i.advantage for mini in plan.minibatches for i in mini})
        shaped = {}
        with alone(f"step {step}, rank {self.rank}, advantages per token"):
            if advantages is not None:  # which the critic's ranks made
                for batch in batches:
                    found = np.concatenate([np.zeros(0), *(advantages[s.uid] for s in batch.samples)])
                    batch.advantages = torch.from_numpy(found).to(batch.advantages)
            elif algo.per_token:
                policy = [b.rollout_log_probs if sampled or b.old is None else b.old for b in batches]
                shaped = per_token(algo, batches, policy, self.device)
        rate = self.set_rates(step)
        shaped |= self.train_critic(step, steps) if self.critic else {}
        frozen = step <= algo.num_critic_only_steps
        sums = torch.zeros(len(steps), len(SUMS), dtype=torch.float64, device=self.device)
        worst = torch.tensor([0.0, stale.max(initial=0)], dtype=torch.float32, device=self.device)
        norms: list[float] = []  # of the steps that were taken
        for batch in batches if self.cfg.log.samples else ():
            batch.seen = torch.full_like(batch.rollout_log_probs, math.nan)
        skipped = 0  # trained tokens of this rank in the others
        for mini, total, scale in () if frozen else zip(steps, sums, plan.scales, strict=True):
            before, rows = (worst.clone(), Counter(self.own)), sums.new_zeros(len(mini), len(SUMS))
            jobs = [self.loss_job(batch, row, worst[0], scale) for batch, row in zip(mini, rows, strict=True)]
            self.pipelines[self.model].backward(mini, jobs, f"step {step}")
            rows = torch.cat([*(b.sums for b in self.begun), rows])
            if plan.factor is None:
                total += rows.sum(0)
                continue
            if plan.factor != 1:
                rows[:, : SUMS.index("tokens")] *= plan.factor
                for p in self.model.parameters():
                    if p.grad is not None:
                        p.grad *= plan.factor
            norm = self.norm(self.model)
            if bad := not_finite(self.model, mini, rows[:, SUMS.index("loss")], norm):
                self.optimizer.zero_grad()
                worst[:], self.own = before
                skipped += sum(len(b.labels) for b in mini)
                self.bad_steps += 1
                if self.bad_steps >= self.cfg.train.max_bad_steps:
                    what = f"step {step}: {self.bad_steps} optimizer step(s) in a row without a finite loss and gradient (train.max_bad_steps)"
                    raise VimeError(f"{what}: {bad}; weights are unchanged", "lower train.lr; look at these samples")
                continue
            self.bad_steps = 0
            total += rows.sum(0)
            self.update(norm, self.model, self.optimizer)
            norms.append(norm)
        for batch in (b for b in batches if b.seen is not None):
            parts = batch.seen.cpu().split([sum(s.loss_mask) for s in batch.samples])  # type: ignore[union-attr]
            self.seen |= {s.uid: part.tolist() for s, part in zip(batch.samples, parts) if not part.isnan().all()}
        mine = sum(b.ids.numel() for b in batches) if self.layout.last and self.layout.tp == 0 else 0
        counted = [mine, sum(len(b.labels) for b in batches), skipped, stale.sum(), 0, 0]
        counts = torch.tensor(counted, dtype=torch.float64, device=self.device)
        if self.replays:
            counts[4:] = self.replays[self.model].take()
        for b in self.begun:
            counts += b.counts
            worst = torch.maximum(worst, b.worst)
            self.own.update(b.own)
            start -= b.seconds
        self.begun = [Begun(sums, counts, worst, self.own, accel.clock(self.device) - start)] if plan.factor is None else []
        if self.begun:
            return {}
        for t, op in ((sums, dist.ReduceOp.SUM), (worst, dist.ReduceOp.MAX), (counts, dist.ReduceOp.SUM)):
            dist.all_reduce(t, op)
        forwarded, tokens, left_out, lag, flips, routed = counts.tolist()
        seconds = accel.clock(self.device) - start
        out = ({} if frozen else self.summary(sums, norms)) | shaped | {"train/trained_tokens": tokens - left_out}
        if tokens:
            out |= {"train/staleness_mean": lag / tokens, "train/staleness_max": float(worst[1])}
        out |= {"train/routing_flips": flips / routed} if routed else {}
        out |= self.own_metrics(float(sums[:, 0].sum()) or len(steps))
        out |= {} if frozen or self.cfg.offline else {"train/logprob_abs_diff_max": float(worst[0])}
        return out | {
            "train/lr": rate,
            "train/skipped_samples": float(plan.skipped),
            "train/optimizer_steps": float(len(norms)),
            "train/skipped_steps": 0.0 if frozen else float(len(steps) - len(norms)),
            "perf/train_s": seconds,
            "perf/train_tokens": forwarded,
            "perf/train_tokens_per_s": forwarded / seconds,
            **accel.memory(self.device),
        }

    def set_rates(self, step: int) -> float:
        """Learning rates of rollout step `step`; returns the model's."""
        train, rate = self.cfg.train, learning_rate(step, self.cfg.train)
        for prefix, (_, optimizer) in self.parts.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * ((self.cfg.algo.critic_lr or train.lr) / train.lr if prefix else 1)
        return rate

    def train_critic(self, step: int, steps: list[list[Pack]]) -> dict[str, float]:
        """Its optimizer steps on the same micro-batches; a collective. Returns: metrics, the same on every rank."""
        assert self.critic
        sums, norms = torch.zeros(len(critics.SUMS), dtype=torch.float64, device=self.device), []
        for mini in steps:
            for k, batch in enumerate(mini):
                with alone(f"step {step}, {named(mini, k)}, critic"):
                    self.critic.backward(batch, sums)
            norm = self.norm(self.critic.model)
            if not math.isfinite(norm):
                what = f"step {step}: the norm of the critic's gradient is {norm}; its weights are unchanged"
                raise VimeError(what, "lower algo.critic_lr; look at the last samples")
            self.update(norm, *self.parts["critic."])
            norms.append(norm)
        dist.all_reduce(sums)
        return critics.summary(sums, norms)

    def own_metrics(self, weight: float) -> dict[str, float]:
        """Metrics of the user's functions, and of pairs, summed over ranks, by the sum of loss weights. A collective where there are such."""
        if not self.custom and self.cfg.train.objective != "dpo":
            return {}
        ranks: list[Counter[str]] = [Counter()] * self.world
        dist.all_gather_object(ranks, self.own)
        return {f"train/{k}": float(sum(r[k] for r in ranks)) / weight for k in sorted({k for r in ranks for k in r})}

    def summary(self, sums: torch.Tensor, norms: list[float]) -> dict[str, float]:
        """Metrics of the batch from the (optimizer steps, SUMS) table, summed over ranks; means over no token are left out."""
        row, first = (dict(zip(SUMS, x.tolist())) for x in (sums.sum(0), sums[0]))
        if not norms:  # every step was skipped
            return {}
        out = {"train/loss": row["loss"] / len(norms), "train/grad_norm": sum(norms) / len(norms)}
        if "loss.custom" in self.custom:  # which has metrics of its own
            return out
        if self.cfg.offline:
            return out | ({"train/entropy": row["entropy"] / row["weight"]} if row["entropy"] else {})
        out["train/pg_loss"] = row["pg_loss"] / len(norms)
        if row["tokens"]:
            algo = self.cfg.algo
            shown = ["pg_clipfrac", "ppo_kl", "entropy", "kl_loss"]
            shown += CORRECTION if algo.correction in ("tis", "icepop") else ()
            shown += ["opsm_clipfrac"] * algo.use_opsm + ["rejected"] * bool(algo.rejection)
            out |= {f"train/{k}": row[k] / (row["weight"] or 1.0) for k in shown}
            out["train/logprob_abs_diff"] = row["logprob_abs_diff"] / row["tokens"]
        if first["tokens"]:
            out["train/ppo_kl_first"] = first["ppo_abs_kl"] / (first["weight"] or 1.0)
        return out

    @torch.no_grad()
    def log_probs(self, model: PreTrainedModel, batch: Pack, temperature: float | None = None) -> torch.Tensor:
        """Logprobs (M,) of the trained tokens of this rank's samples, at the sampling temperature unless another is given."""
        t, chunk = temperature or self.cfg.rollout.temperature, self.cfg.train.logprob_chunk
        model.train(not self.cfg.lora.dropout)  # of the policy that is served
        out = self.pipelines[model].forward(batch, Job(lambda h, w: head_log_probs(h, w, batch.labels, t, chunk, batch.support)))
        reshard(model)
        model.train()
        return out

    def loss_job(self, batch: Pack, total: torch.Tensor, worst: torch.Tensor, scale: float) -> Job:
        """The loss of one micro-batch; adds its sums to `total`, its largest logprob difference to `worst`. `scale`: RankPlan.scales of its step."""
        cfg, algo, own = self.cfg, self.cfg.algo, self.custom
        high = algo.eps_clip if algo.eps_clip_high is None else algo.eps_clip_high
        lengths = [sum(s.loss_mask) for s in batch.samples]  # for what sees samples, not tokens: then loss_of gets all of them at once

        def loss_of(lp: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            rollout, weight, advantages = batch.rollout_log_probs[part], batch.weights[part], batch.advantages[part]
            train = lp.detach() if batch.old is None else batch.old[part]
            if batch.seen is not None:
                batch.seen[part] = train
            old = rollout if algo.correction == "rollout_logprobs" else train
            pg, clipped = policy_loss(lp, old, advantages, algo.eps_clip, high, algo.eps_clip_c, algo.policy_loss, lengths)
            one = torch.ones_like(rollout)
            ratio = corrected = kept = near = one
            if algo.rejection:
                near = rejection_mask(train, rollout, lengths, algo.rejection, *algo.rejection_bounds)
            if algo.use_opsm:
                kept = opsm_mask(lp, old, advantages, lengths, algo.opsm_delta)
                pg = pg * kept
            if algo.correction in ("tis", "icepop"):
                corrected, ratio = importance_weights(train, rollout, algo.correction, algo.tis_low, algo.tis_clip)
                pg = pg * corrected
            left = near
            if fn := own.get("algo.custom_tis"):
                pg, masks, metrics = custom.tis(fn, self.args, batch, pg, train)
                self.own.update({k: float((v * weight).sum()) for k, v in metrics.items()})
                left = left * masks
            weight = weight * left
            kl_loss = torch.zeros_like(pg) if batch.ref is None else kl(lp, batch.ref[part], algo.kl_loss_type)
            rest = algo.kl_loss_coef * kl_loss - algo.entropy_coef * entropy
            if fn := own.get("loss.custom_reducer"):
                pg_loss = custom.reduce(fn, self.args, batch, pg, left) * scale
            else:
                pg_loss = (pg * weight).sum()
            loss, off = pg_loss + (rest * weight).sum(), old - lp
            with torch.no_grad():
                diff = ((lp if algo.correction == "rollout_logprobs" else train) - rollout).abs()
                total[0] += batch.weights[part].sum()
                each = [clipped, off, off.abs(), entropy, kl_loss, ratio, (corrected != ratio).float(), (ratio - 1).abs(), 1 - kept]
                means = torch.stack(each).double() @ weight.double()
                rest_of = [((1 - near) * batch.weights[part]).sum(), (weight >= 0).sum(), diff.sum()]
                total[1:] += torch.cat([torch.stack([loss, pg_loss]), means, torch.stack(rest_of)])
                worst.copy_(torch.maximum(worst, diff.max()))
            return loss

        def loss_of_examples(lp: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            weight = batch.weights[part]
            if cfg.train.objective == "sft":
                loss = -(lp * weight).sum()
                total[SUMS.index("entropy")] += (entropy.detach().double() * weight).sum()
                total[0] += weight.sum()
            else:
                assert batch.ref is not None
                gains = torch.stack([x.sum() for x in (lp - batch.ref).split(lengths)])
                order = sorted(range(len(lengths)), key=lambda i: batch.samples[i].index)  # pairs, the chosen one first
                chosen, rejected = gains[order].view(-1, 2).T
                loss = dpo_loss(chosen, rejected, algo.dpo_beta).sum() * scale
                with torch.no_grad():
                    found = {"dpo_chosen_reward": chosen, "dpo_rejected_reward": rejected, "dpo_margin": chosen - rejected}
                    means = {k: float(algo.dpo_beta * v.sum()) * scale for k, v in found.items()}
                    self.own.update(means | {"dpo_accuracy": float((chosen > rejected).sum()) * scale})
                total[0] += len(chosen) * scale
            total[1] += loss.detach()
            total[SUMS.index("tokens")] += len(weight)
            return loss

        whole = algo.use_opsm or algo.policy_loss == "gspo" or bool(algo.rejection or own) or cfg.train.objective == "dpo"

        loss_fn = loss_of_examples if cfg.offline else loss_of

        def job(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            args = (hidden, weight, batch.labels, cfg.rollout.temperature, cfg.train.logprob_chunk, loss_fn, algo.entropy_coef != 0)
            return HeadLoss.apply(*args, batch.support, whole)

        def own_job(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            loss, metrics = custom.loss(own["loss.custom"], self.args, batch, hidden, weight, scale)
            self.own.update(metrics)
            total[SUMS.index("loss")] += loss.detach()
            total[SUMS.index("tokens")] += len(batch.labels)
            return loss

        return Job(own_job, everything=True) if "loss.custom" in own else Job(job)

    def norm(self, model: PreTrainedModel) -> float:
        """The gradient's norm over all ranks, where each gets the same."""
        params = [p for p in model.parameters() if p.requires_grad]
        for p in params:
            if p.grad is None:  # nothing to train on any rank: AdamW's moments still decay, as with any zero gradient
                p.grad = torch.zeros_like(p)
        self.layout.sum_partial(model)
        return self.layout.gradient_norm(model)

    def update(self, norm: float, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        if norm > self.cfg.train.clip_grad:
            for p in model.parameters():
                if p.grad is not None:  # frozen ones have none
                    p.grad.mul_(self.cfg.train.clip_grad / norm)
        self.offload(optimizer, self.device)
        optimizer.step()
        optimizer.zero_grad()
        self.offload(optimizer, "cpu")

    def offload(self, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        """With train.offload move the moments to `device`; their numbers stay what they are."""
        for moments in optimizer.state.values() if self.cfg.train.offload == "optimizer" else ():
            moments |= {k: moments[k].to(device) for k in ("exp_avg", "exp_avg_sq") if k in moments}

    def publish(self, version: int, receivers: list[Receiver] | None = None) -> tuple[Published | None, Canary]:
        """Write weights `version` for the servers, or send them. Returns the files, on rank 0, and the canary that proves that they took."""
        published = self.publisher.publish(self.model, version, receivers)
        tokens = canary_tokens(self.model.config.get_text_config().vocab_size, getattr(self.model.config, "image_token_id", None))
        n = len(tokens) - 1
        probe = Sample(tokens=tokens, response_length=n, loss_mask=[1] * n, rollout_log_probs=[0.0] * n)
        (batch,) = lay_out([pack([Item(0, 0, 0.0, 0.0)], {0: probe})], self.layout)
        found, log_probs = torch.zeros(n, device=self.device), self.log_probs(self.model, batch, 1.0)
        if batch.samples and self.layout.dp == 0:  # on one rank
            found.copy_(log_probs)
        dist.all_reduce(found)
        return published, Canary(tokens, found.tolist())

    def whole(self, version: int) -> str:
        """See Publisher.whole. Not a collective: for rank 0."""
        return self.publisher.whole(version)

    def save(self, folder: str, keep: int | None = None) -> None:
        """Write this rank's part of a checkpoint into an existing folder. With `keep` only copy it, and write and commit it in the background; what
        fails there is raised by `train` or `flush`."""
        self.flush()
        share = state.share(self.parts, getattr(torch, self.cfg.train.dtype), copied=keep is not None)
        if keep is None:
            return state.save_share(Path(folder), share, self.source)
        self.writing = self.writer.submit(self.write_behind, Path(folder), share, keep)

    def write_behind(self, folder: Path, share: state.Share, keep: int) -> None:
        with checkpoint.whole(folder) if self.rank == 0 else nullcontext():
            state.save_share(folder, share, self.source, self.side)
            if self.rank == 0:
                checkpoint.commit(folder, keep)

    def flush(self) -> None:
        """Wait for the checkpoint that is being written. Raises: VimeError where it could not be."""
        writing, self.writing = self.writing, None
        agree(writing.exception() if writing else None)
