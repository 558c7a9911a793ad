"""Forward and backward of a model over the stages of its pipeline; of a model that isn't cut, on its one stage."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from vime.errors import VimeError
from vime.trainer.context import own_rows, whole_weight
from vime.trainer.faults import alone, named
from vime.trainer.layout import Layout
from vime.trainer.packing import Pack, Sealed
from vime.trainer.vision import Vision


class Job(NamedTuple):
    """What becomes of hidden states and head: run(hidden (M, D), head weight (V, D)), of trained tokens, or of all positions."""

    run: Callable[[Tensor, Tensor], Tensor]
    everything: bool = False


class Pipeline:
    """A loaded model's stages on this rank. Inside the model's own forward, where FSDP has gathered it, the head's weight and the hidden states go
    to the micro-batch's job in place of the vocabulary projection."""

    def __init__(self, model: PreTrainedModel, path: str):
        self.model, self.base, self.decoder = model, model.base_model, model.get_decoder()
        self.layout: Layout = model.layout
        self.layers, self.norm = self.decoder.layers, getattr(self.decoder, "norm", None)
        self.vision: Vision | None = None
        skipped = PipelineIdentityLayer()
        self.parts = []  # of each stage here: all layers, those of other stages replaced
        for stage in self.layout.stages:
            own = self.layout.layers(stage, len(self.layers))
            self.parts.append(torch.nn.ModuleList(x if i in own else skipped for i, x in enumerate(self.layers)))
        self.last = self.layout.count - 1
        if self.layout.last:
            self.head = model.get_output_embeddings()
            if not isinstance(self.head, torch.nn.Linear) or self.head.bias is not None:
                raise VimeError(f"model {path}: its output layer is not a linear layer without bias, which is not supported yet")
            self.head.forward = self.project  # type: ignore[assignment]
        model.forward = self.stage

    def project(self, hidden: Tensor, batch: Pack, job: Job) -> Tensor:
        rows = own_rows(hidden[0], batch.everything if job.everything else batch.trained, self.layout)
        return job.run(rows, whole_weight(self.head.weight, self.layout))

    def stage(self, x: Tensor | None, part: int, sealed: Sealed, job: Job) -> Tensor:
        """The forward of this rank's stage number `part`: hidden states (1, T, D), of the last stage what the job returns."""
        stage, batch = self.layout.stages[part], sealed.pack
        feed = {"position_ids": batch.positions} | ({"input_ids": batch.ids} if stage == 0 else {"inputs_embeds": x})
        feed = self.vision.arguments(batch) if self.vision else feed
        if self.layout.count > 1:  # the other stages' modules are hidden from the model's forward
            self.decoder.layers, self.decoder.norm = self.parts[part], self.norm if stage == self.last else PipelineIdentityLayer()
        try:
            hidden = self.base(**feed, use_cache=False, packing=sealed).last_hidden_state
        finally:
            if self.layout.count > 1:
                self.decoder.layers, self.decoder.norm = self.layers, self.norm
        out = self.head(hidden, batch, job) if stage == self.last else hidden
        shared = self.vision and self.layout.world > 1 and torch.is_grad_enabled()
        return out + self.vision.untouched() if self.vision and shared else out

    def like(self, batch: Pack) -> Tensor:
        """Hidden states between stages, without data."""
        shape = (*batch.ids.shape, self.model.config.get_text_config().hidden_size)
        return torch.empty(shape, dtype=self.model.hidden_dtype, device="meta", requires_grad=True)

    @torch.no_grad()
    def forward(self, batch: Pack, job: Job) -> Tensor:
        """What the job returns, where this rank holds the last stage; elsewhere nothing, (0,)."""
        out, pp, group = None, self.layout.p.pp, self.layout.pp_group
        for part, stage in enumerate(self.layout.stages):
            x = None
            if stage:
                x = torch.empty_like(self.like(batch), device=self.layout.device, requires_grad=False)
                dist.recv(x, group=group, group_src=(stage - 1) % pp)
            out = self.model(x, part, Sealed(batch), job)
            if stage < self.last:
                dist.send(out.contiguous(), group=group, group_dst=(stage + 1) % pp)
        return out if out is not None and self.layout.last else torch.empty(0, device=self.layout.device)

    def backward(self, batches: Sequence[Pack], jobs: Sequence[Job], what: str) -> None:
        """Forward and backward of an optimizer step's micro-batches, whose jobs return losses: 1F1B, interleaved with several stages here."""
        if self.layout.p.pp == 1:
            for k, (batch, job) in enumerate(zip(batches, jobs, strict=True)):
                with alone(f"{what}, {named(batches, k)}"):
                    self.model(None, 0, Sealed(batch), job).backward()
            return
        if not batches:  # nothing to train
            return
        at, like = torch.arange(len(batches), device=self.layout.device), self.like(batches[0])
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for part, s in enumerate(self.layout.stages):
            ends = {"input_args": like if s else at[:1], "output_args": like if s < self.last else loss}
            one = _Stage(self, part, batches, jobs, what)
            stages.append(PipelineStage(one, s, self.layout.count, self.layout.device, group=self.layout.pp_group, **ends))
        how: dict[str, Any] = {"n_microbatches": len(batches), "loss_fn": lambda loss, _: loss, "scale_grads": False}
        schedule = Schedule1F1B(stages[0], **how) if len(stages) == 1 else ScheduleInterleaved1F1B(stages, **how)
        try:
            schedule.step(*([at] if self.layout.first else []), target=at if self.layout.last else None, return_outputs=False, at=at)
        except Exception as e:
            cause = e.__cause__ or e  # torch wraps what a stage raised
            if isinstance(cause, VimeError):  # which names its micro-batch
                raise cause from None
            with alone(f"{what}, rank {dist.get_rank()}"):
                raise cause from None


class _Stage(torch.nn.Module):
    """A stage as torch's schedules call it. Its model is no submodule: FSDP then reduces gradients in each micro-batch, as without stages."""

    def __init__(self, pipeline: Pipeline, part: int, batches: Sequence[Pack], jobs: Sequence[Job], what: str):
        super().__init__()
        self.pipeline, self.part, self.batches, self.jobs, self.what = pipeline, part, batches, jobs, what

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        i = int(at)
        with alone(f"{self.what}, {named(self.batches, i)}"):
            return self.pipeline.model(x, self.part, Sealed(self.batches[i]), self.jobs[i])
