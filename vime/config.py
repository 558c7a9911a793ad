"""One configuration tree: a TOML file plus dotted overrides (train.lr=1e-6). All faults are reported at once, before anything starts."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from vime import sections
from vime.algo import AlgoConfig, LossConfig
from vime.conflicts import conflicts
from vime.errors import VimeError, nearest
from vime.sections import EngineTable, Section

AGENTS = "vime.agents.rollout:generate"  # the rollout.custom_generate of a run with an [agent]


class DataConfig(Section):
    """Prompts: JSONL or parquet; `path@[a:b]` takes rows a to b."""

    prompts: str = Field(description="training prompts, .jsonl or .parquet, optionally with a @[a:b] slice")
    input_key: str = Field("prompt", description="column of the prompt: a string or a list of chat messages")
    label_key: str = Field("label", description="column of the label given to the reward")
    response_key: str = Field("response", description='of train.objective = "sft": column of the answer; where a row has none, the prompt is a dialogue')
    chosen_key: str = Field("chosen", description='of train.objective = "dpo": column of the better answer')
    rejected_key: str = Field("rejected", description="and of the worse one")
    metadata_key: str = Field("metadata", description="column of a dict kept on the sample")
    image_key: str | None = Field(None, description="column of a row's image or list of images, see docs/multimodal.md; unset: image parts only")
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
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="stop strings; their tokens stay in the sample")
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = []
    concurrency: int = Field(64, ge=1, description="sequences in flight per engine at most (a request for n samples counts n)")
    max_context_len: int = Field(2048, ge=2, description="prompt + response tokens at most; becomes the server's max_model_len")
    request_timeout: float = Field(600, ge=1, le=1e8, description="seconds one group may take, restarts of engines included, before the run stops")
    over_sampling_batch_size: int | None = Field(None, ge=1, description="sync mode: groups in flight until batch_size valid ones exist; unset: batch_size")
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

    @field_validator("engines")
    @classmethod
    def _servers(cls, urls: list[str]) -> list[str]:
        found = [re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\])(:([1-9]\d*))?", u) for u in urls]
        wrong = [u for u, m in zip(urls, found) if not m or int(m[3] or 0) > 65535]
        faults = [f"{u!r} is not the URL of a server; write it as http://host:8000" for u in wrong]
        known = [u.lower() for u in urls]
        faults += [f"{u!r} is there {known.count(u)} times: one entry a server" for u in sorted(set(known)) if known.count(u) > 1]
        if faults:
            raise ValueError("\n".join(faults))
        return urls


class TrainConfig(Section):
    """Optimizer and the loop."""

    objective: Literal["rl", "sft", "dpo"] = Field("rl", description="rl: by reward; sft: the data's answers, dpo: the chosen ones, both without servers")
    mode: Literal["sync", "async"] = Field("sync", description="sync: servers and trainer take turns; async: generation never stops")
    max_staleness: int = Field(0, ge=0, description="weight versions that a trained token may be behind, with an algo.correction; async: 1 is one-step-off")
    stream: bool = Field(False, description="sync: train on groups as they finish, while the batch's others are still being generated")
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
    freeze_vision: bool = Field(False, description="leave the vision tower of a vision-language model as it is")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="on GPUs: optimizer: AdamW's moments lie in host memory but for the update itself; all: so do the shards of weights, "
        "gradients and moments, a layer's weights come when it computes, and the update is the CPU's",
    )  # fmt: skip
    skip_zero_advantage: bool = Field(True, description="samples without a gradient (advantage 0, no KL, no entropy bonus) skip the forward; loss stays exact")
    logprob_chunk: int = Field(1024, ge=1, description="tokens per chunk of the vocabulary projection")
    max_bad_steps: int = Field(3, ge=1, description="optimizer steps without a finite loss and gradient are skipped; this many in a row stop the run")
    step_timeout: float = Field(1800, gt=0, le=1e6, description="seconds a trainer rank may take for a step, publish or save; then the run stops, with its stack")


class ParallelConfig(Section):
    """Trainer ranks: fsdp x tp x pp x cp of them, see docs/parallel.md. `vime plan run.toml` says what the model allows."""

    fsdp: int = Field(1, ge=1, description="shards of the model, each with its share of the samples (the only axis that splits them)")
    tp: int = Field(1, ge=1, description="tensor parallelism: attention heads and columns of the layers")
    ep: int = Field(1, ge=1, description="expert parallelism: experts spread over this many of a stage's fsdp x cp x tp ranks")
    pp: int = Field(1, ge=1, description="pipeline parallelism: stages of consecutive layers (1F1B)")
    pp_interleave: int = Field(1, ge=1, description="stages on each pipeline rank (interleaved 1F1B)")
    cp: int = Field(1, ge=1, description="context parallelism: pieces of each packed row (Ulysses, a ring where heads run out)")

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

    transport: Literal["shm", "file", "nccl"] = Field("shm", description="shm: safetensors in /dev/shm; file: in the run folder; nccl: never run yet")
    in_flight: Literal["keep", "abort"] = Field("keep", description="requests that run during an update: keep them, or abort and continue them, token-exact")
    delta: bool = Field(False, description="publish only the elements that changed; servers keep a copy and check the result's checksum")
    delta_full_every: int | None = Field(None, ge=2, description="with delta: every how many versions one is published whole; unset: 20")
    buffer_size: int = Field(512 << 20, ge=1, description="bytes of weights that are gathered and sent at once (a larger tensor goes alone)")
    post_write: str | None = Field(None, description="plug-in: called when new weights are written, before the servers load them")
    canary: bool = Field(True, description="after each publish compare the servers' logprobs of a fixed prompt with the trainer's")
    canary_tol: float | None = Field(None, gt=0, description="largest mean |difference| accepted; unset: 1e-3 in float32, 0.25 in bfloat16")


class CheckpointConfig(Section):
    interval: int = Field(10, ge=1, description="steps between checkpoints (also after the last step)")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    async_save: bool = Field(False, description="copy to host memory and write while training goes on; the next save waits, see docs/trainer.md")


class Config(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="the run's folder is <run_dir>/<name>")
    run_dir: str = "runs"
    seed: int = Field(42, ge=0, lt=2**31)
    model: str = Field(description="folder of a Hugging Face model (config, safetensors, tokenizer)")
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: list[EngineTable] = []
    reward: sections.RewardConfig = sections.RewardConfig()
    agent: sections.AgentConfig = sections.AgentConfig()
    algo: AlgoConfig = AlgoConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    lora: sections.LoraConfig = sections.LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    weights: WeightsConfig = WeightsConfig()
    data_plane: sections.DataPlaneConfig = sections.DataPlaneConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    gateway: sections.GatewayConfig = sections.GatewayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: sections.LogConfig = sections.LogConfig()
    trace: sections.TraceConfig = sections.TraceConfig()
    debug: sections.DebugConfig = sections.DebugConfig()
    ray: sections.RayConfig = sections.RayConfig()
    vllm: dict[str, Any] = Field({}, description="any vLLM server argument: max_num_seqs = 64 becomes --max-num-seqs 64")
    args: dict[str, Any] = Field({}, description="settings of your own plug-ins: max_turns = 4 becomes args.max_turns")
    router: dict[str, Any] = Field({}, description='any vllm-router argument: policy = "round_robin" becomes --policy round_robin')

    @field_validator("vllm", "router")
    @classmethod
    def _port(cls, args: dict[str, Any]) -> dict[str, Any]:
        port = args.get("port")
        if port is not None and not (type(port) is int and 1 <= port <= 65535):
            raise ValueError(f"port = {port!r} is no TCP port, a number from 1 to 65535; leave it out to get a free one")
        return args

    @property
    def folder(self) -> Path:
        return Path(self.run_dir) / self.name

    @property
    def offline(self) -> bool:
        """Whether samples come from the file, answers and all, rather than from servers."""
        return self.train.objective != "rl"

    @property
    def served(self) -> bool:
        """Whether there are servers."""
        return not (self.offline or self.debug.train_only)

    @property
    def needs_reference(self) -> bool:
        return self.algo.needs_reference or self.train.objective == "dpo"

    @property
    def worlds(self) -> list[Config]:
        """What the trainer's ranks run on: all of them, or the model's and the critic's own, which have `parallel` for themselves and no reference."""
        own = {"parallel": ParallelConfig(fsdp=self.algo.critic_ranks or 1), "algo": self.algo.model_copy(update={"kl_loss_coef": 0.0})}
        return [self, self.model_copy(update=own)] if self.algo.critic_ranks else [self]

    @property
    def ranks(self) -> int:
        """The trainer's processes."""
        return self.parallel.ranks + self.algo.critic_ranks

    @property
    def samples_per_step(self) -> int:
        """Rollouts, in the sense of train.global_batch_size: offline a dialogue or a pair is one."""
        return self.rollout.batch_size * (1 if self.offline else self.rollout.n_samples_per_prompt)

    @property
    def servers(self) -> list[EngineTable]:
        """One table for each server that this run starts, with all of its vLLM arguments (underscores in their names)."""
        if not self.served:
            return []
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
        if self.agent.task and self.rollout.custom_generate is None:
            self.rollout = self.rollout.model_copy(update={"custom_generate": AGENTS})
        if faults := conflicts(self):
            raise ValueError("\n".join(faults))
        return self


def parse_override(text: str) -> tuple[list[str], Any]:
    """'train.lr=1e-6' -> (["train", "lr"], 1e-06); the value is read as TOML, and as a bare string where it isn't TOML."""
    key, eq, raw = text.partition("=")
    if not eq or not key.strip():
        raise VimeError(f"override {text!r} is not of the form section.key=value")
    try:
        value: Any = tomllib.loads(f"v = {raw}")["v"]
    except (ValueError, RecursionError):
        value = raw
    return key.strip().split("."), value


def load(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a run's TOML file, apply overrides, validate. Raises: VimeError that lists every fault at once, unknown keys with the nearest name."""
    cfg: Config = validate(tree_of(path, overrides), str(path))
    return cfg


def tree_of(path: str | os.PathLike[str], overrides: list[str] | None = None) -> dict[str, Any]:
    """The file with its overrides, not validated. Raises: VimeError."""
    try:
        tree = tomllib.loads(Path(path).read_text())
    except FileNotFoundError as e:
        raise VimeError(f"no such configuration file: {path}") from e
    except (ValueError, OSError, RecursionError) as e:
        raise VimeError(f"{path}: {e}", "it must be a readable TOML file") from e
    for text in overrides or []:
        keys, value = parse_override(text)
        node = tree
        for k in keys[:-1]:
            node = node.setdefault(k, {})
            if not isinstance(node, dict):
                raise VimeError(f"override {text!r}: {k} is not a section")
        node[keys[-1]] = value
    return tree


def validate(tree: dict[str, Any], source: str, kind: Any = Config) -> Any:
    """Build a Config, or another Section, from a plain dict; `source` names it in errors. Raises VimeError with all faults."""
    try:
        return kind.model_validate(tree)
    except ValidationError as e:
        lines: list[str] = []
        for fault in e.errors():
            loc = [str(p) for p in fault["loc"]]
            inner = next((i for i, p in enumerate(loc) if "[" in p), len(loc))  # pydantic's name of one of several types that a key may have
            if inner < len(loc) and any(line.startswith(".".join(loc[:inner]) + ": ") for line in lines):
                continue
            key = ".".join(loc[:inner])
            if fault["type"] == "extra_forbidden":
                lines.append(f"{key}: unknown key; {nearest(loc[-1], _names(loc[:-1], kind))}")
            elif fault["type"] == "missing":
                lines.append(f"{key}: missing")
            else:
                got = "" if isinstance(fault["input"], (dict, list, BaseModel)) else f" (got {fault['input']!r:.80})"
                said = fault["msg"].removeprefix("Value error, ").splitlines()
                if fault["type"] == "literal_error" and isinstance(fault["input"], str):
                    valid = re.findall("'(.*?)'", fault["ctx"]["expected"])
                    said = [f"{said[0]}; {nearest(fault['input'], valid)}"]
                lines += [f"{key + ': ' if key else ''}{line}{got}" for line in said]
        raise VimeError(f"{source}: {len(lines)} fault{'s' if len(lines) > 1 else ''}\n  " + "\n  ".join(lines)) from e


def _names(path: list[str], node: type[BaseModel]) -> list[str]:
    """Valid keys of the section at `path` below `node`; the path may hold positions in a list of tables."""
    for p in path:
        node = node if p.isdecimal() else _section(node.model_fields[p].annotation) or node
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
                dotted = name if model is Config else f"{title.strip('[]')}.{name}"
                tables.append((f"[{dotted}]" if section is kind else f"[[{dotted}]]", section))
                continue
            shown = kind.__name__ if type(kind) is type else re.sub(r"Annotated\[(\w+), .*\]\]", r"\1]", str(kind).replace("typing.", ""))
            default = "required" if f.is_required() else "unset" if f.default is None else f"`{f.default!r}`"
            cells = (cell.replace("|", "\\|") for cell in (shown, default, f.description or ""))
            out += f"| `{name}` | {' | '.join(cells)} |\n"
    return out
