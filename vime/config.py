"""One configuration tree: a TOML file plus dotted overrides (train.lr=1e-6). All faults are reported at once, before anything starts."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from vime.errors import VimeError, nearest


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any, info: ValidationInfo) -> Any:
        """An override without a value (rollout.custom_generate=) takes away what the file says, of keys that may be unset."""
        may_be = NoneType in get_args(cls.model_fields[info.field_name or ""].annotation)
        return None if value == "" and may_be else value


class DataConfig(Section):
    """Prompts: JSONL or parquet; `path@[a:b]` takes rows a to b."""

    prompts: str = Field(description="training prompts, .jsonl or .parquet, optionally with a @[a:b] slice")
    input_key: str = Field("prompt", description="column of the prompt: a string or a list of chat messages")
    label_key: str = Field("label", description="column of the label given to the reward")
    metadata_key: str = Field("metadata", description="column of a dict kept on the sample")
    apply_chat_template: bool = Field(True, description="render with the tokenizer's chat template (a string becomes one user message)")
    chat_template: str | None = Field(None, description="a Jinja chat template that replaces the tokenizer's own")
    shuffle: bool = Field(True, description="a new permutation each epoch, drawn from (seed, epoch); false keeps file order")
    source: str | None = Field(None, description="plug-in: a data source class in place of the prompt file's reader, see docs/plugins.md")


class RolloutConfig(Section):
    """Rollout: vLLM servers behind one vllm-router, and the workers that talk to them."""

    num_engines: int = Field(1, ge=1, description="vLLM servers to start, all alike; [[engine]] tables start different ones")
    engines: list[str] = Field([], description="URLs of vLLM servers started elsewhere; then only [[engine]] tables start more")
    colocate: bool = Field(False, description="sync mode, servers on the trainer's GPUs: they sleep while it trains (vLLM's /sleep, not on a CPU)")
    sleep_level: Literal[1, 2] = Field(1, description="of colocate: 1 keeps weights in host memory; 2 drops them, each publish brings them anew")
    num_workers: int = Field(1, ge=1, description="rollout workers (Ray actors)")
    batch_size: int = Field(8, ge=1, description="prompts (groups) per step")
    n_samples_per_prompt: int = Field(8, ge=1, description="samples per prompt: the group size of GRPO")
    max_response_len: int = Field(256, ge=1, description="new tokens per sample at most")
    temperature: float = Field(1.0, gt=0, le=2, description="sampling temperature; the trainer divides logits by it too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; the trainer's logprobs are over the tokens that could be sampled")
    top_k: int = Field(-1, ge=-1, description="-1: off; else as top_p")
    stop: list[str] = Field([], description="stop strings; their tokens stay in the sample")
    stop_token_ids: list[int] = []
    concurrency: int = Field(64, ge=1, description="sequences in flight per engine at most (a request for n samples counts n)")
    max_context_len: int = Field(2048, ge=2, description="prompt + response tokens at most; becomes the server's max_model_len")
    request_timeout: float = Field(600, gt=0, description="seconds one group may take, restarts of engines included, before the run stops")
    over_sampling_batch_size: int | None = Field(
        None, ge=1, description="sync mode: groups kept in flight until batch_size valid ones exist; unset: batch_size"
    )
    dynamic_filter: str | None = Field(None, description="nonzero_std, or a plug-in: whether a finished group is trained on")
    partial_rollout: bool = Field(False, description="sync mode: what is unfinished when the batch is full goes on in the next step, token-exact")
    mask_offpolicy_prefix: bool = Field(False, description="tokens of an interrupted sample that older weights sampled are not trained")
    abort_timeout: float = Field(10, ge=0, description="seconds that running reward calls get when the batch is full; then they are cancelled")
    routing_replay: bool = Field(False, description="mixture of experts: the trainer sends each token to the experts it had, see docs/moe.md")
    custom_generate: str | None = Field(None, description="plug-in, see docs/plugins.md: generates one rollout, in any number of turns")
    sample_hook: list[str] = Field([], description="plug-ins: see or replace each finished sample before it is scored")
    buffer_filter: str | None = Field(None, description="plug-in: which buffered groups are continued")
    sample_filter: str | None = Field(None, description="plug-in: sets remove_sample on samples that stay in the baseline, untrained")
    all_samples_process: str | None = Field(None, description="plug-in: sees every group of a step's batch")
    data_postprocess: str | None = Field(None, description="plug-in: changes a step's samples before they are trained on")
    function: str | None = Field(None, description="plug-in: the whole rollout of a step")
    eval_function: str | None = Field(None, description="plug-in: the whole evaluation")

    @property
    def truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary only, which then comes with each token."""
        return self.top_p < 1 or self.top_k > 0

    @model_validator(mode="after")
    def _fits(self) -> RolloutConfig:
        given, room = self.max_response_len, self.max_context_len
        if given >= room:
            raise ValueError(f"max_response_len {given} leaves no room for a prompt in max_context_len {room}")
        return self


class EngineTable(Section):
    """A group of vLLM servers that differs from others. The tables take the place of `rollout.num_engines`: docs/engines.md."""

    count: int = Field(1, ge=1, description="servers of this kind")
    vllm: dict[str, Any] = Field({}, description="vLLM server arguments of this group, laid over [vllm]; the k-th server takes port + k")
    env: dict[str, str] = Field({}, description="environment variables of these servers, as CUDA_VISIBLE_DEVICES")


class RewardConfig(Section):
    """Reward: a built-in name (math, exact, regex) or a dotted path (args, sample) -> float | dict, sync or async."""

    function: str = Field("math", description="math | exact | regex | package.module:function")
    pattern: str | None = Field(None, description="for regex: the answer is the last match's first group (or the whole match)")
    key: str | None = Field(None, description="which entry of a dict reward is trained on")
    group: bool = Field(False, description="the function gets a group's list of samples at once and returns a list of rewards")
    post_process: str | None = Field(None, description="plug-in: a step's rewards -> (raw rewards, advantages), in place of the estimator")
    on_error: Literal["raise", "skip"] = Field("raise", description="skip: drop and count a group with a failing reward, take another")
    timeout: float = Field(60, gt=0, description="seconds a reward call may take")

    @model_validator(mode="after")
    def _pattern(self) -> RewardConfig:
        if self.function == "regex" and not self.pattern:
            raise ValueError('function = "regex" needs reward.pattern')
        return self


class AlgoConfig(Section):
    """Advantage and policy loss (names of slime)."""

    advantage_estimator: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(True, description="divide by the group's standard deviation (ddof 1, eps 1e-6); false: Dr.GRPO")
    eps_clip: float = Field(0.2, ge=0, description="PPO clip, lower side")
    eps_clip_high: float | None = Field(None, ge=0, description="upper side; unset: the same as eps_clip")
    eps_clip_c: float | None = Field(None, gt=1, description="dual clip for negative advantages; unset: off")
    kl_loss_coef: float = Field(0.0, ge=0, description="KL to the reference in the loss; 0 loads no reference")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coef: float = Field(0.0, description="entropy bonus")
    ref_model: str | None = Field(None, description="reference model folder; unset: model")
    correction: Literal["none", "tis", "icepop", "rollout_logprobs"] = Field(
        "none",
        description="off-policy correction: loss x exp(old - sampled logprob), clamped (tis) or 0 outside the bounds (icepop); or old = sampled",
    )
    tis_clip: float = Field(2.0, gt=0, description="upper bound of that weight")
    tis_clip_low: float | None = Field(None, ge=0, description="lower bound; unset: 0 for tis, 0.5 for icepop")
    custom_tis: str | None = Field(
        None, description="dotted path of a correction: (args, *, pg_loss, train_log_probs, ...) -> (pg_loss, masks, metrics)"
    )
    use_opsm: bool = Field(False, description="off-policy sequence masking: drop samples with a negative advantage that have drifted")
    opsm_delta: float = Field(1e-4, ge=0, description="mean old - new logprob from which such a sample is dropped")
    custom_advantage: str | None = Field(None, description="dotted path: (args, rollout_data) -> None, fills in advantages per token")

    @model_validator(mode="after")
    def _one_correction(self) -> AlgoConfig:
        if self.custom_tis and self.correction != "none":
            raise ValueError(f"custom_tis takes the place of correction = {self.correction!r}: set one of them")
        if (low := self.tis_low) > self.tis_clip:
            raise ValueError(f"tis_clip_low {low} is above tis_clip {self.tis_clip}")
        return self

    @property
    def tis_low(self) -> float:
        """The lower bound in force."""
        return self.tis_clip_low if self.tis_clip_low is not None else 0.5 if self.correction == "icepop" else 0.0


class LossConfig(Section):
    """How token losses become one number, or a loss of your own."""

    aggregate: Literal["sample-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "sample-mean", description="sample-mean (slime's default): mean over samples of each one's token mean; token-mean: of all tokens"
    )
    custom: str | None = Field(
        None, description="dotted path: (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), in place of the policy loss"
    )
    custom_reducer: str | None = Field(
        None, description="dotted path: (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> function of the token losses"
    )


class TrainConfig(Section):
    """Optimizer and the loop."""

    mode: Literal["sync", "async"] = Field("sync", description="sync: servers and trainer take turns; async: generation never stops")
    max_staleness: int = Field(
        0,
        ge=0,
        description="how many weight versions a trained token may be older than the newest, with an algo.correction; async: 1 is one-step-off",
    )
    steps: int = Field(100, ge=1, description="rollout steps in the whole run")
    global_batch_size: int | None = Field(None, ge=1, description="samples per optimizer step; unset: the whole rollout batch, one step")
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: int = Field(0, ge=0, description="rollout steps of linear warm-up")
    lr_decay_start: float = Field(0.0, ge=0, lt=1, description="share of the run after which the decay begins")
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    clip_grad: float = Field(1.0, gt=0, description="gradient norm at most")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="compute type; master weights and optimizer are always fp32")
    max_tokens_per_gpu: int = Field(4096, ge=1, description="token budget of one packed micro-batch on one rank")
    gradient_checkpointing: bool = False
    skip_zero_advantage: bool = Field(
        True, description="leave samples without a gradient (advantage 0, no KL, no entropy bonus) out of the forward; loss stays exact"
    )
    logprob_chunk: int = Field(1024, ge=1, description="tokens per chunk of the vocabulary projection")


class ParallelConfig(Section):
    """Trainer ranks: fsdp x tp x pp x cp of them, see docs/parallel.md. `vime plan run.toml` says what the model allows."""

    fsdp: int = Field(1, ge=1, description="shards of the model, each with its share of the samples (the only axis that splits them)")
    tp: int = Field(1, ge=1, description="tensor parallelism: attention heads and columns of the layers")
    ep: int = Field(1, ge=1, description="expert parallelism: experts spread over this many of a stage's fsdp x cp x tp ranks")
    pp: int = Field(1, ge=1, description="pipeline parallelism: stages of consecutive layers (1F1B)")
    pp_interleave: int = Field(1, ge=1, description="stages on each pipeline rank (interleaved 1F1B)")
    cp: int = Field(1, ge=1, description="context parallelism: pieces of each packed row (Ulysses)")

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp * self.pp * self.cp

    def shard(self, rank: int) -> int:
        """Which of the fsdp shares of the samples a rank trains. The order of ranks is Layout's."""
        return rank // (self.cp * self.tp) % self.fsdp

    def __str__(self) -> str:
        return " x ".join(f"{k} {v}" for k, v in self.model_dump().items() if v > 1) or "one rank"


class WeightsConfig(Section):
    """Weights from trainer to servers, see docs/weights.md."""

    transport: Literal["shm", "file"] = Field("shm", description="shm: safetensors in /dev/shm; file: in the run folder (several hosts)")
    in_flight: Literal["keep", "abort"] = Field(
        "keep", description="requests that run during an update: keep them in the server, or abort and continue them, token-exact"
    )
    delta: bool = Field(False, description="publish only the elements that changed; servers keep a copy and check the result's checksum")
    delta_full_every: int | None = Field(None, ge=2, description="with delta: every how many versions one is published whole; unset: 20")
    post_write: str | None = Field(None, description="plug-in: called when new weights are written, before the servers load them")
    canary: bool = Field(True, description="after each publish compare the servers' logprobs of a fixed prompt with the trainer's")
    canary_tol: float | None = Field(None, gt=0, description="largest mean |difference| accepted; unset: 1e-3 in float32, 0.25 in bfloat16")


class EvalSampling(Section):
    n_samples_per_prompt: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0: greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="unset: as in rollout")
    top_k: int | None = Field(None, ge=-1, description="-1: off; unset: as in rollout")
    max_response_len: int | None = Field(None, ge=1, description="unset: as in rollout")
    solved: float | None = Field(None, description="reward from which on a sample counts as solved, for pass@k")


class EvalDataset(EvalSampling):
    """One held-out file. What is unset is as in [eval], [data] and [reward]."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="its metrics are eval/<name>/...")
    prompts: str = Field(description="path, as data.prompts")
    input_key: str | None = None
    label_key: str | None = None
    reward: str | None = Field(None, description="as reward.function")
    custom_generate: str | None = Field(None, description="as rollout.custom_generate")


class EvalConfig(EvalSampling):
    """Evaluation on held-out prompts; none without datasets."""

    interval: int = Field(10, ge=1, description="steps between evaluations (also before the first step and after the last)")
    n_samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, description="0: greedy")
    solved: float = Field(1.0, description="reward from which on a sample counts as solved, for pass@k")
    datasets: list[EvalDataset] = []

    @model_validator(mode="after")
    def _inherit(self) -> EvalConfig:
        for d in self.datasets:
            for name in EvalSampling.model_fields:
                if getattr(d, name) is None:
                    setattr(d, name, getattr(self, name))
        names = [d.name for d in self.datasets]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"several datasets are named {', '.join(twice)}")
        return self


class CheckpointConfig(Section):
    interval: int = Field(10, ge=1, description="steps between checkpoints (also after the last step)")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")


class LogConfig(Section):
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    project: str = "vime"
    samples: bool = Field(True, description="write samples/step_N.jsonl")
    rollout_hook: str | None = Field(None, description="plug-in: logs a step's samples; true in return leaves out the rollout/ metrics")
    eval_hook: str | None = Field(None, description="plug-in: logs an evaluation; true in return leaves out the eval/ metrics")


class RayConfig(Section):
    address: str | None = Field(None, description="a running Ray cluster; unset: a local one for this run")


class Config(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="the run's folder is <run_dir>/<name>")
    run_dir: str = "runs"
    seed: int = 42
    model: str = Field(description="folder of a Hugging Face model (config, safetensors, tokenizer)")
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: list[EngineTable] = []
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    ray: RayConfig = RayConfig()
    vllm: dict[str, Any] = Field({}, description="any vLLM server argument: max_num_seqs = 64 becomes --max-num-seqs 64")
    args: dict[str, Any] = Field({}, description="settings of your own plug-ins: max_turns = 4 becomes args.max_turns")
    router: dict[str, Any] = Field({}, description='any vllm-router argument: policy = "round_robin" becomes --policy round_robin')

    @property
    def folder(self) -> Path:
        return Path(self.run_dir) / self.name

    @property
    def samples_per_step(self) -> int:
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def servers(self) -> list[EngineTable]:
        """One table for each server that this run starts, with all of its vLLM arguments (underscores in their names)."""
        tables = self.engine or ([] if self.rollout.engines else [EngineTable(count=self.rollout.num_engines)])
        out: list[EngineTable] = []
        for t in tables:
            for k in range(t.count):
                own, base = ({key.replace("-", "_"): v for key, v in d.items()} for d in (t.vllm, self.vllm))
                args = base | own
                if args.get("port") is not None:
                    args["port"] = int(args["port"]) + (k if "port" in own else len(out))
                out.append(EngineTable(vllm=args, env=t.env))
        return out

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        faults, total = [], self.samples_per_step
        gbs = self.train.global_batch_size
        if gbs and total % gbs:
            faults.append(f"train.global_batch_size {gbs} does not divide rollout.batch_size x n_samples_per_prompt = {total}")
        if (gbs or total) % self.parallel.fsdp:
            faults.append(f"parallel.fsdp {self.parallel.fsdp} does not divide the {gbs or total} samples of an optimizer step")
        if self.algo.advantage_estimator == "grpo" and self.rollout.n_samples_per_prompt == 1:
            faults.append("GRPO needs rollout.n_samples_per_prompt >= 2: the advantage of a group of one is always 0")
        r, t = self.rollout, self.train
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
        corrected = self.algo.correction != "none" or self.algo.custom_tis
        if t.max_staleness and not (corrected or self.loss.custom):
            stale = f"train.max_staleness {t.max_staleness} trains on samples of older weights"
            faults.append(f'{stale}: set algo.correction = "tis", "icepop" or "rollout_logprobs", or algo.custom_tis')
        if self.weights.delta_full_every and not self.weights.delta:
            faults.append("weights.delta_full_every has no meaning without weights.delta: every version is published whole")
        if self.loss.custom and (corrected or self.algo.use_opsm or self.loss.custom_reducer):
            faults.append("loss.custom takes the place of the policy loss: leave out algo.correction, custom_tis, use_opsm and loss.custom_reducer")
        if self.engine and r.num_engines > 1:
            faults.append(f"rollout.num_engines = {r.num_engines} and {len(self.engine)} [[engine]] tables: leave one of them out")
        for i, table in enumerate(self.engine):
            if shared := sorted({"model", "dtype", "logprobs_mode", "weight_transfer_config"} & {k.replace("-", "_") for k in table.vllm}):
                faults.append(f"engine.{i}.vllm.{shared[0]}: all servers take the same weights and give comparable logprobs: set it for all, or not")
        if r.colocate and t.mode == "async":
            faults.append('rollout.colocate: servers that sleep while the trainer trains need train.mode = "sync"')
        if faults:
            raise ValueError("; ".join(faults))
        return self


def parse_override(text: str) -> tuple[list[str], Any]:
    """'train.lr=1e-6' -> (["train", "lr"], 1e-06); the value is read as TOML, and as a bare string where it isn't TOML."""
    key, eq, raw = text.partition("=")
    if not eq or not key.strip():
        raise VimeError(f"override {text!r} is not of the form section.key=value")
    try:
        value: Any = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def load(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a run's TOML file, apply overrides, validate.

    Raises: VimeError that lists every fault at once, with the nearest valid name for each unknown key.
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except FileNotFoundError as e:
        raise VimeError(f"no such configuration file: {path}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as e:
        raise VimeError(f"{path}: {e}", "it must be a readable TOML file") from e
    for text in overrides or []:
        keys, value = parse_override(text)
        node = tree
        for k in keys[:-1]:
            node = node.setdefault(k, {})
            if not isinstance(node, dict):
                raise VimeError(f"override {text!r}: {k} is not a section")
        node[keys[-1]] = value
    return validate(tree, str(path))


def validate(tree: dict[str, Any], source: str) -> Config:
    """Build a Config from a plain dict; `source` names it in errors. Raises VimeError with all faults."""
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        lines = []
        for fault in e.errors():
            loc = [str(p) for p in fault["loc"]]
            key = ".".join(loc)
            if fault["type"] == "extra_forbidden":
                lines.append(f"{key}: unknown key; {nearest(loc[-1], _names(loc[:-1]))}")
            elif fault["type"] == "missing":
                lines.append(f"{key}: missing")
            else:
                got = "" if isinstance(fault["input"], (dict, BaseModel)) else f" (got {fault['input']!r})"
                lines.append(f"{key + ': ' if key else ''}{fault['msg'].removeprefix('Value error, ')}{got}")
        raise VimeError(f"{source}: {len(lines)} fault{'s' if len(lines) > 1 else ''}\n  " + "\n  ".join(lines)) from e


def _names(path: list[str]) -> list[str]:
    """Valid keys of the section at `path`, which may hold positions in a list of tables."""
    node: type[BaseModel] = Config
    for p in path:
        node = node if p.isdecimal() else _section(node.model_fields[p].annotation) or Config
    return list(node.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a key of this type is, or holds a list of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def dump(cfg: Config) -> str:
    """The resolved configuration as TOML; unset (None) keys are left out. `load` of it gives the same Config."""
    return tomli_w.dumps(cfg.model_dump(exclude_none=True))


def reference() -> str:
    """docs/config.md: every key with type, default and meaning, generated from the tree."""
    out = "# Configuration\n\nGenerated by `make docs`; do not edit. "
    out += "Every key can be overridden on the command line: `vime train run.toml train.lr=1e-6`; "
    out += "without a value, `rollout.custom_generate=`, a key that is unset by default is unset again (an empty string in the file means the same).\n"
    tables: list[tuple[str, type[BaseModel]]] = [("Top level", Config)]
    for title, model in tables:  # grows while it is walked
        out += f"\n## {title}\n\n{model.__doc__ or ''}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, f in model.model_fields.items():
            kind = f.annotation
            if section := _section(kind):
                tables.append((f"[{name}]" if section is kind else f"[[{title.strip('[]') + '.' if model is not Config else ''}{name}]]", section))
                continue
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            default = "required" if f.is_required() else "unset" if f.default is None else f"`{f.default!r}`"
            cells = (cell.replace("|", "\\|") for cell in (shown, default, f.description or ""))
            out += f"| `{name}` | {' | '.join(cells)} |\n"
    return out
