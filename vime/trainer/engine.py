"""One trainer rank: load, optimizer steps, publish, save. Every rank runs this same program (SPMD over torch.distributed)."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vime.config import Config, TrainConfig
from vime.errors import VimeError
from vime.sample import Sample
from vime.trainer import state
from vime.trainer.batch import Item, RankPlan
from vime.trainer.loss import HeadLoss, head_log_probs, kl, policy_loss
from vime.trainer.packing import Pack, pack
from vime.trainer.parallel import agree, init, load_model
from vime.weights import Canary, location
from vime.weights.publish import canary_tokens, publish


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """The rate of rollout step `step` (the first is 1): linear warm-up, then constant, or from `lr_decay_start` of the run
    down to `min_lr` at the last step, linear or as half a cosine."""
    warm = min(1.0, step / cfg.lr_warmup_iters) if cfg.lr_warmup_iters else 1.0
    start = max(cfg.lr_decay_start * cfg.steps, cfg.lr_warmup_iters)
    if cfg.lr_decay_style == "constant" or step <= start:
        return cfg.lr * warm
    done = min(1.0, (step - start) / max(cfg.steps - start, 1e-9))
    left = 1 - done if cfg.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


# Sums over trained tokens that loss_of() collects; all but the last two are weighted with the loss weights.
SUMS = ("weight", "loss", "pg_loss", "pg_clipfrac", "ppo_kl", "ppo_abs_kl", "entropy", "kl_loss", "tokens", "logprob_abs_diff")


class Head:
    """Stands in for lm_head.forward: hands hidden states and the head's weight to the job of the current forward. There, inside the
    model's own forward, the weight is whole, also where FSDP shards it."""

    def __init__(self, model: PreTrainedModel, path: str):
        self.layer = model.get_output_embeddings()
        if not isinstance(self.layer, torch.nn.Linear) or self.layer.bias is not None:
            raise VimeError(f"model {path}: its output layer is not a linear layer without bias, which is not supported yet")
        self.layer.forward = self  # type: ignore[assignment]
        self.job: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.job
        return self.job(hidden[0], self.layer.weight)


class Trainer:
    """Rank `rank` of `world`. Methods are collectives: call each on every rank, in the same order.

    Raises (any method): VimeError for what a person can act on. Faults in a rank's input fail all ranks at once; where a rank
    dies inside a collective its peers lose the connection, or at worst time out (parallel.COLLECTIVE_TIMEOUT).
    """

    def __init__(self, cfg: Config, rank: int, world: int, master_addr: str, master_port: int):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.address = (master_addr, master_port)
        self.reference: PreTrainedModel | None = None

    def setup(self, folder: str | None = None) -> None:
        """Join the other ranks, load the model; with the folder of a checkpoint, continue from it exactly."""
        cfg = self.cfg
        self.device = init(self.rank, self.world, *self.address)
        torch.manual_seed(cfg.seed + self.rank)
        self.source = Path(cfg.model) if Path(cfg.model).is_dir() or not folder else Path(folder) / "hf"
        train = cfg.train
        self.model = load_model(Path(folder) / "hf" if folder else self.source, train.dtype, self.device, train.gradient_checkpointing)
        self.heads = {self.model: Head(self.model, cfg.model)}
        if cfg.algo.kl_loss_coef > 0:
            path = cfg.algo.ref_model or cfg.model
            self.reference = load_model(path, train.dtype, self.device).requires_grad_(False)
            self.heads[self.reference] = Head(self.reference, path)
        params = list(self.model.parameters())
        decayed: dict[str, Any] = {"params": [p for p in params if p.ndim > 1]}
        plain: dict[str, Any] = {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0}  # norms and biases
        betas = (train.adam_beta1, train.adam_beta2)
        self.optimizer = torch.optim.AdamW([decayed, plain], lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=True)
        if folder:
            state.load_rank(Path(folder), self.model, self.optimizer)
        if self.rank == 0:
            shutil.rmtree(location(cfg), ignore_errors=True)  # left by a run that was killed

    def train(self, step: int, plan: RankPlan, *groups: list[Sample]) -> dict[str, float]:
        """The optimizer steps of rollout step `step` (the first is 1) on this rank's part of the batch: of the samples in `groups`
        those of the plan. Returns: metrics, the same on every rank."""
        start = time.monotonic()
        samples = {s.index: s for g in groups for s in g}
        steps: list[list[Pack]] = []
        error: Exception | None = None
        try:
            steps = [[pack(items, samples).to(self.device) for items in mini] for mini in plan.steps]
        except (KeyError, ValueError) as e:
            what = f"sample {e} did not arrive" if isinstance(e, KeyError) else str(e)
            error = VimeError(f"step {step}, trainer rank {self.rank}: {what}")
        agree(error)  # peers must not enter the first collective without this rank
        for batch in (b for mini in steps for b in mini):
            if self.reference is not None:
                batch.ref = self.log_probs(self.reference, batch)
            if len(steps) > 1:  # later steps are off-policy: what they started from must be known before the first update
                batch.old = self.log_probs(self.model, batch)
        rate = learning_rate(step, self.cfg.train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = torch.zeros(len(steps), len(SUMS), dtype=torch.float64, device=self.device)
        worst = torch.zeros((), device=self.device)
        norms = []
        for mini, total in zip(steps, sums):
            for batch in mini:
                self.backward(batch, total, worst)
            norms.append(self.update(step))
        forwarded = float(sum(b.ids.numel() for mini in steps for b in mini))
        counts = torch.tensor([forwarded], dtype=torch.float64, device=self.device)
        for t, op in ((sums, dist.ReduceOp.SUM), (worst, dist.ReduceOp.MAX), (counts, dist.ReduceOp.SUM)):
            dist.all_reduce(t, op)
        seconds = time.monotonic() - start
        return self.summary(sums, norms) | {
            "train/lr": rate,
            "train/logprob_abs_diff_max": float(worst),
            "train/skipped_samples": float(plan.skipped),
            "train/optimizer_steps": float(len(steps)),
            "perf/train_s": seconds,
            "perf/train_tokens": float(counts),
            "perf/train_tokens_per_s": float(counts) / seconds,
        }

    @staticmethod
    def summary(sums: torch.Tensor, norms: list[float]) -> dict[str, float]:
        """Metrics of the batch from the (optimizer steps, SUMS) table, summed over ranks; means over no token are left out."""
        row, first = (dict(zip(SUMS, x.tolist())) for x in (sums.sum(0), sums[0]))
        out = {"train/loss": row["loss"] / len(sums), "train/pg_loss": row["pg_loss"] / len(sums)}
        out |= {"train/grad_norm": sum(norms) / len(norms), "train/trained_tokens": row["tokens"]}
        if row["tokens"]:
            out |= {f"train/{k}": row[k] / (row["weight"] or 1.0) for k in ("pg_clipfrac", "ppo_kl", "entropy", "kl_loss")}
            out["train/logprob_abs_diff"] = row["logprob_abs_diff"] / row["tokens"]
        if first["tokens"]:
            out["train/ppo_kl_first"] = first["ppo_abs_kl"] / (first["weight"] or 1.0)
        return out

    def forward(self, model: PreTrainedModel, batch: Pack, job: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run the model on a micro-batch; `job(hidden (M, D), head weight (V, D))` replaces the vocabulary projection."""
        self.heads[model].job = job
        args = {"input_ids": batch.ids, "position_ids": batch.positions, "logits_to_keep": batch.rows}
        return model(**args, use_cache=False, packing=batch).logits

    @torch.no_grad()
    def log_probs(self, model: PreTrainedModel, batch: Pack, temperature: float | None = None) -> torch.Tensor:
        """Logprobs (M,) of a micro-batch's trained tokens, at the sampling temperature unless another is given."""
        t, chunk = temperature or self.cfg.rollout.temperature, self.cfg.train.logprob_chunk
        out = self.forward(model, batch, lambda h, w: head_log_probs(h, w, batch.labels, t, chunk))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return out

    def backward(self, batch: Pack, total: torch.Tensor, worst: torch.Tensor) -> None:
        """Forward and backward of one micro-batch; adds its sums to `total`, and its largest logprob difference to `worst`."""
        cfg, algo = self.cfg, self.cfg.algo
        high = algo.eps_clip if algo.eps_clip_high is None else algo.eps_clip_high

        def loss_of(lp: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
            old = lp.detach() if batch.old is None else batch.old[part]
            pg, clipped = policy_loss(lp, old, batch.advantages[part], algo.eps_clip, high, algo.eps_clip_c)
            kl_loss = torch.zeros_like(pg) if batch.ref is None else kl(lp, batch.ref[part], algo.kl_loss_type)
            loss = pg - algo.entropy_coef * entropy + algo.kl_loss_coef * kl_loss
            weight, off = batch.weights[part], old - lp
            with torch.no_grad():
                diff = (old - batch.rollout_log_probs[part]).abs()
                each = torch.stack([torch.ones_like(pg), loss, pg, clipped, off, off.abs(), entropy, kl_loss]).double()
                total.add_(torch.cat([each @ weight.double(), torch.stack([(weight >= 0).sum(), diff.sum()]).double()]))
                worst.copy_(torch.maximum(worst, diff.max()))
            return (loss * weight).sum()

        def job(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            args = (hidden, weight, batch.labels, cfg.rollout.temperature, cfg.train.logprob_chunk, loss_of, algo.entropy_coef != 0)
            return HeadLoss.apply(*args)

        self.forward(self.model, batch, job).backward()

    def update(self, step: int) -> float:
        """Clip the gradient and step the optimizer. Returns the norm before clipping; VimeError, and no step, where it isn't finite."""
        params = list(self.model.parameters())
        for p in params:
            if p.grad is None:  # nothing to train on any rank: AdamW's moments still decay, as with any zero gradient
                p.grad = torch.zeros_like(p)
        total = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            what = f"step {step}: the gradient's norm is {norm}; weights are unchanged"
            raise VimeError(what, "lower train.lr; look at the last samples")
        if norm > self.cfg.train.clip_grad:
            for p in params:
                assert p.grad is not None
                p.grad.mul_(self.cfg.train.clip_grad / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def publish(self, version: int) -> tuple[str, Canary]:
        """Write weights `version` for the servers. Returns the file and the canary that proves that they took."""
        path = publish(self.model, self.cfg, version, self.rank)
        tokens = canary_tokens(self.model.config.get_text_config().vocab_size)
        n = len(tokens) - 1
        probe = Sample(tokens=tokens, response_length=n, loss_mask=[1] * n, rollout_log_probs=[0.0] * n)
        batch = pack([Item(0, 0, 0.0, 0.0)], {0: probe}).to(self.device)
        return path, Canary(tokens, self.log_probs(self.model, batch, 1.0).tolist())

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint into an existing folder (see checkpoint.write)."""
        state.save_rank(Path(folder), self.model, self.optimizer, self.source, getattr(torch, self.cfg.train.dtype))

    def close(self) -> None:
        """Leave the process group and remove the published files."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.rank == 0:
            shutil.rmtree(location(self.cfg), ignore_errors=True)
