"""Sections of the configuration that depend on no other one, and what all sections share."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _of_any_key(cls, value: Any, info: ValidationInfo) -> Any:
        """An override without a value (rollout.custom_generate=) takes away what the file says, of keys that may be unset."""
        if type(value) is int and abs(value) >= 2**63:
            raise ValueError("a number of more than 64 bits")
        kind = cls.model_fields[info.field_name or ""].annotation
        if type(value) is bool and {int, float} & {kind, *get_args(kind)} and bool not in get_args(kind):
            raise ValueError("a number is wanted, not true or false")
        return None if value == "" and NoneType in get_args(kind) else value


class EngineTable(Section):
    """A group of vLLM servers that differs from others. The tables take the place of `rollout.num_engines`: docs/engines.md."""

    count: int = Field(1, ge=1, description="servers of this kind")
    vllm: dict[str, Any] = Field({}, description="vLLM server arguments of this group, laid over [vllm]; the k-th server takes port + k")
    env: dict[str, str] = Field({}, description="environment variables of these servers, as CUDA_VISIBLE_DEVICES")


class LoraConfig(Section):
    """Low-rank adapters (peft), trained in place of the model's weights: docs/trainer.md."""

    rank: int | None = Field(None, ge=1, description="peft's r; unset: no adapters, the model itself is trained")
    alpha: int = Field(32, ge=1, description="what an adapter adds is scaled by alpha / rank")
    target_modules: list[str] | Literal["all-linear"] = Field("all-linear", min_length=1, description="names of linear layers; all-linear: all but the head")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into an adapter, in the training forward only")
    publish: Literal["merged", "adapter"] = Field("merged", description="merged: servers get whole weights, adapters added in; adapter is refused")


class RewardConfig(Section):
    """Reward: a built-in name (math, exact, regex) or a dotted path (args, sample) -> float | dict, sync or async."""

    function: str = Field("math", description="math | exact | regex | package.module:function")
    pattern: str | None = Field(None, description="for regex: the answer is the last match's first group (or the whole match)")
    key: str | None = Field(None, description="which entry of a dict reward is trained on")
    group: bool = Field(False, description="the function gets a group's list of samples at once and returns a list of rewards")
    post_process: str | None = Field(None, description="plug-in: a step's rewards -> (raw rewards, advantages), in place of the estimator")
    on_error: Literal["raise", "skip"] = Field("raise", description="skip: drop and count a group with a failing reward, take another")
    timeout: float = Field(60, gt=0, description="seconds a reward call may take")
    overlong_buffer_len: int = Field(0, ge=0, description="DAPO: over the last so many tokens below rollout.max_response_len the reward falls; 0: off")
    overlong_penalty_factor: float = Field(1.0, gt=0, description="by how much it has fallen at the limit")


class AgentConfig(Section):
    """Agents: each sample is one episode of a task, by the loop of vime/agents/interaction.py or by a harness: docs/agents.md."""

    task: str | None = Field(None, description="package.module:Name, called with args: an object with setup and grade; unset: no agents")
    agent: str = Field("react", description="react: the loop, in this process; or the name of a harness, as claude_code")
    tools: list[str] = Field([], description="names of vime/agents/tools, or package.module:Class, in this order; then those of the task")
    tool_args: dict[str, dict[str, Any]] = Field({}, description="what to make a tool with: tool_args.shell.timeout_s = 30")
    mcp: dict[str, str] = Field({}, description="MCP servers, name to URL or command line: their tools come last, as name_tool")
    max_turns: int = Field(30, ge=1, description="turns of the model in one episode")
    max_turn_len: int | None = Field(None, ge=1, description="tokens of one turn; unset: rollout.max_response_len, which is of the whole response")
    wall_s: float = Field(600, gt=0, description="seconds of one episode")
    on_hack: Literal["zero", "mask", "penalty"] = Field("zero", description="of an episode the guard objected to: reward 0; that, untrained; -hack_penalty")
    hack_penalty: float = Field(1.0, ge=0)
    sandbox: dict[str, Any] = Field({}, description="laid over the task's SandboxSpec: memory_mb, pids, network, ...")


class EndpointConfig(Section):
    """An OpenAI-compatible endpoint, of `vime eval`."""

    url: str = Field(pattern="^https?://", description="as http://host:8000/v1")
    name: str = Field(description="the model's name there")
    key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    sampling: dict[str, Any] = Field({}, description="into every request: temperature, max_tokens, ...")
    timeout: float = Field(600, gt=0)
    retries: int = Field(5, ge=0, description="of 429, 5xx and lost connections")


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


class GatewayConfig(Section):
    """The model proxy of agents, see docs/gateway.md. Caps are of one session, which is one rollout."""

    parser: Literal["server", "hermes", "qwen_xml", "text"] = Field(
        "server", description="of tool calls and reasoning: server, by those that vLLM was started with; text: none; else a small one of our own"
    )
    train_kinds: list[Literal["main", "subagent", "compaction", "title"]] = Field(
        ["main", "subagent", "compaction"], description="turns that are trained; the others' tokens are counted as agent/masked_tokens"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="variables of the chat template, as enable_thinking = false")
    max_requests: int = Field(200, ge=1, description="turns; then the client gets a 400, which ends it")
    max_concurrency: int = Field(8, ge=1, description="turns at once; more wait")
    max_tokens: int = Field(1_000_000, ge=1, description="sampled tokens; then the client gets a 400")
    retry_window: float = Field(60, ge=0, description="seconds in which the same request again gets the same answer")
    ping: float = Field(10, gt=0, description="seconds of a generation after which a streaming client is told to wait, again and again")
    max_body: int = Field(64 << 20, ge=1024, description="bytes of a request, unpacked")


class LogConfig(Section):
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    project: str = "vime"
    samples: bool = Field(True, description="write samples/step_N.jsonl")
    rollout_hook: str | None = Field(None, description="plug-in: logs a step's samples; true in return leaves out the rollout/ metrics")
    eval_hook: str | None = Field(None, description="plug-in: logs an evaluation; true in return leaves out the eval/ metrics")


class MooncakeConfig(Section):
    """Mooncake Store, of data_plane.backend = "mooncake" and of transferqueue.storage = "mooncake"."""

    master: str | None = Field(None, description="host:port of a mooncake_master; unset: one is started for this run, with eviction off")
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = Field("", description="RDMA devices, as mlx5_0,mlx5_1")
    segment_bytes: int = Field(1 << 30, ge=1 << 24, description="memory that each worker, or each storage process, gives to the store")
    storage: Literal["own", "processes"] = Field("own", description="own: in the worker that made them, and lost with it; processes: in storage processes")
    processes: int = Field(1, ge=1, description="of storage = \"processes\": how many are started on this host; 'python -m vime.data.mooncake' adds more")
    replicas: int = Field(1, ge=1, description="copies of each group, each in another segment; 2 survive the death of one")


class TransferQueueConfig(Section):
    """TransferQueue (its KV calls only), of data_plane.backend = "transferqueue"."""

    storage: Literal["simple", "mooncake"] = Field("simple", description="simple: its own storage units; mooncake: see [data_plane.mooncake]")
    units: int = Field(2, ge=1, description="of simple: storage units (Ray actors)")


class DataPlaneConfig(Section):
    """Samples from rollout workers to trainer ranks, past the controller, see docs/data-plane.md."""

    backend: Literal["shm", "ray", "controller", "mooncake", "transferqueue"] = Field("shm", description="the store; shm: one host")
    budget_bytes: int | None = Field(None, ge=1 << 20, description="bytes of samples that may wait; unset: 70 % of what the store can hold")
    timeout: float = Field(60, ge=1, le=3600, description="seconds that one read or write may take")
    mooncake: MooncakeConfig = MooncakeConfig()
    transferqueue: TransferQueueConfig = TransferQueueConfig()

    @property
    def on_mooncake(self) -> bool:
        return self.backend == "mooncake" or (self.backend == "transferqueue" and self.transferqueue.storage == "mooncake")


class RayConfig(Section):
    address: str | None = Field(None, description="a running Ray cluster; unset: a local one for this run")
