"""Plug-ins: the points where a user's function takes part, what it gets as `args`, and the check of its signature before the start.

A plug-in is a dotted path, "package.module:function" or "package.module.function". Shapes are slime's, so that its users' files run here.
"""

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vime.config import Config
from vime.errors import ANY, VimeError, blamed, nearest, said
from vime.sample import Sample


@dataclass
class DynamicFilterOutput:
    """Of rollout.dynamic_filter; `reason` is counted as rollout/dropped_<reason>. A plain bool stands for `keep` alone."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False  # slime's; not heeded, a dropped group is replaced by the next prompt


@dataclass
class RolloutFnTrainOutput:
    """Of rollout.function: groups of samples, rewards set, and metrics to log with the step's."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutFnEvalOutput:
    """Of rollout.eval_function: {dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}, the last optional."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)


class Point(NamedTuple):
    """One point: slime's flag; parameters (`name=` is passed by keyword); what it returns; keywords passed only to those that take them."""

    flag: str
    takes: str
    returns: str
    offers: tuple[str, ...] = ()
    kind: str = "sync"  # sync | async | either | class

    def __str__(self) -> str:
        offers = "".join(f"[, {k}]" for k in self.offers)
        return f"{'async ' if self.kind == 'async' else ''}({self.takes}{offers}) -> {self.returns}"


SOURCE = ("get_samples", "add_samples", "save", "load", "__len__")  # (n) -> groups, (groups), (rollout_id), (rollout_id=None), ()
POINTS = {
    "rollout.function": Point("rollout-function-path", "args, rollout_id, data_source, evaluation=", "RolloutFnTrainOutput"),
    "rollout.eval_function": Point("eval-function-path", "args, rollout_id, data_source, evaluation=", "RolloutFnEvalOutput"),
    "rollout.custom_generate": Point("custom-generate-function-path", "args, sample, sampling_params", "Sample | list[Sample]", ("evaluation",), "async"),
    "rollout.sample_hook": Point("rollout-sample-hook-path", "args, sample", "Sample | None", ("rollout_id", "evaluation"), "either"),
    "rollout.dynamic_filter": Point("dynamic-sampling-filter-path", "args, samples", "DynamicFilterOutput | bool"),
    "rollout.buffer_filter": Point("buffer-filter-path", "args, rollout_id, buffer, num_samples", "list[list[Sample]]"),
    "rollout.sample_filter": Point("rollout-sample-filter-path", "args, groups", "None"),
    "rollout.all_samples_process": Point("rollout-all-samples-process-path", "args, groups, data_source", "None"),
    "rollout.data_postprocess": Point("rollout-data-postprocess-path", "args, samples", "None"),
    "reward.function": Point("custom-rm-path", "args, sample", "float | dict, or a list of them for a list of samples", (), "either"),
    "reward.post_process": Point("custom-reward-post-process-path", "args, samples", "(raw_rewards, rewards)"),
    "data.source": Point("data-source-path", "args", f"an object with {', '.join(SOURCE)}", (), "class"),
    "log.rollout_hook": Point("custom-rollout-log-function-path", "rollout_id, args, samples, extra_metrics, rollout_time", "bool"),
    "log.eval_hook": Point("custom-eval-rollout-log-function-path", "rollout_id, args, data, extra_metrics", "bool"),
    "algo.custom_tis": Point(
        "custom-tis-function-path",
        "args, pg_loss=, train_log_probs=, rollout_log_probs=, loss_masks=, total_lengths=, response_lengths=",
        "(pg_loss, masks, metrics)",
    ),
    "algo.custom_advantage": Point("custom-advantage-function-path", "args, rollout_data", "None"),
    "loss.custom": Point("custom-loss-function-path", "args, batch, logits, sum_of_sample_mean", "(loss, metrics)"),
    "loss.custom_reducer": Point(
        "custom-pg-loss-reducer-function-path", "total_lengths, response_lengths, loss_masks, calculate_per_token_loss", "a function of pg_loss"
    ),
    "weights.post_write": Point("custom-update-weight-post-write-path", "args, version_dir, rollout_engines", "None"),
}
LOSS_SIDE = ("algo.custom_tis", "algo.custom_advantage", "loss.custom", "loss.custom_reducer")


def load(path: str, key: str) -> Callable[..., Any]:
    """Import the function at `path`, which the configuration names under `key`; for a key of POINTS the signature is checked against its shape.
    Raises: VimeError naming key and path where the module, the function or the signature does not fit."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module:
        raise VimeError(f"{key} = {path!r} is not a dotted path", "write it as package.module:function")
    try:
        mod = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a user's module may fail in any way while it is imported, sys.exit() included
        missing = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        fix = "is it on PYTHONPATH?" if missing else f"python -c 'import {module}' shows where"
        raise VimeError(f"{key} = {path!r}: cannot import {module}: {said(e)}", fix) from e
    fn = getattr(mod, name, None)
    if fn is None:
        functions = [n for n, v in vars(mod).items() if callable(v) and not n.startswith("_")]
        raise VimeError(f"{key} = {path!r}: {module} has no {name!r}", nearest(name, functions) if functions else "it has no function at all")
    if not callable(fn):
        raise VimeError(f"{key} = {path!r}: {name!r} of {module} is of type {type(fn).__name__}, not a function")
    point = POINTS.get(key)
    if point is None:
        return fn
    names, shown = point.takes.split(", "), name
    try:
        signature = inspect.signature(fn)
        shown = f"{name}{str(signature)[:200]}"
        by_name = dict.fromkeys(n.rstrip("=") for n in names if n.endswith("=")) | accepted(fn, **dict.fromkeys(point.offers))
        signature.bind(*(n for n in names if not n.endswith("=")), **by_name)
    except (TypeError, ValueError) as e:  # some builtins have no signature
        raise VimeError(f"{key} = {path!r}: expected {point}, found {shown}: {e}") from e
    if point.kind == "sync" and inspect.iscoroutinefunction(fn):
        raise VimeError(f"{key} = {path!r}: expected {point}, found async {shown}", "nothing awaits it here: make it a plain def")
    if point.kind == "class" and (lacks := [m for m in SOURCE if not hasattr(fn, m)]):
        raise VimeError(f"{key} = {path!r}: {name} has no {', '.join(lacks)}", f"a data source is {point.returns}")
    return fn


def paths(cfg: Config, key: str) -> list[str]:
    """The dotted paths set under `key`: none, one, or several."""
    value = attrgetter(key)(cfg)
    return value if isinstance(value, list) else [value] if value else []


def call(cfg: Config, key: str, *args: Any) -> Any:
    """Call the one plug-in set under `key`. Raises: VimeError naming key and path, whatever it raises."""
    (path,) = paths(cfg, key)
    fn = load(path, key)
    with blamed(f"{key} = {path!r} failed", *ANY):
        return fn(*args, **({"evaluation": key == "rollout.eval_function"} if "evaluation=" in POINTS[key].takes else {}))


def loss_side(cfg: Config) -> dict[str, Callable[..., Any]]:
    """The functions of LOSS_SIDE that this run names, by key. Raises: VimeError as load."""
    return {key: load(path, key) for key in LOSS_SIDE for path in paths(cfg, key)}


def accepted(fn: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the offered keywords that `fn` takes."""
    parameters = inspect.signature(fn).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in offered.items() if everything or k in parameters}


def keeps(got: Any) -> DynamicFilterOutput:
    """A dynamic filter's answer in its full form, `keep` a bool (slime's own filters give a tensor). Raises: TypeError for no answer."""
    if got is None or inspect.isawaitable(got):
        raise TypeError(f"it returned {got!r}, neither a DynamicFilterOutput nor a bool")
    out = got if isinstance(got, DynamicFilterOutput) else DynamicFilterOutput(keep=got)
    return replace(out, keep=bool(out.keep))


# slime's name of an argument -> our key; here the same in both, as train.lr
SAME = {
    "data": "input_key label_key metadata_key apply_chat_template",
    "rollout": "n_samples_per_prompt",
    "train": "lr min_lr lr_decay_style lr_warmup_iters weight_decay adam_beta1 adam_beta2 clip_grad max_tokens_per_gpu",
    "algo": "advantage_estimator eps_clip eps_clip_c kl_loss_coef kl_coef gamma kl_loss_type tis_clip use_opsm opsm_delta entropy_coef",
}
FLAT = {name: f"{section}.{name}" for section, names in SAME.items() for name in names.split()} | {
    f"rollout_{name}": f"rollout.{name}"
    for name in ["batch_size", "max_response_len", "max_context_len", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "num_engines"]
} | {f"eval_{name}": f"eval.{name}" for name in ["interval", "temperature", "top_p", "top_k", "max_response_len", "datasets"]} | {
    "hf_checkpoint": "model", "rollout_seed": "seed", "wandb_group": "name", "wandb_project": "log.project", "use_wandb": "log.wandb",
    "use_tensorboard": "log.tensorboard", "prompt_data": "data.prompts", "rollout_shuffle": "data.shuffle", "data_source_path": "data.source",
    "mask_offpolicy_in_partial_rollout": "rollout.mask_offpolicy_prefix", "sglang_server_concurrency": "rollout.concurrency",
    "vllm_server_concurrency": "rollout.concurrency", "reward_key": "reward.key", "eval_reward_key": "reward.key", "group_rm": "reward.group",
    "n_samples_per_eval_prompt": "eval.n_samples_per_prompt", "num_rollout": "train.steps", "grpo_std_normalization": "algo.normalize_std",
    "normalize_advantages": "algo.whitened", "tis_clip_low": "algo.tis_low", "ref_load": "algo.ref_model", "save_interval": "checkpoint.interval",
}  # fmt: skip


class Args(Namespace):
    """What every plug-in gets as `args`: the configuration's sections (args.rollout.batch_size), slime's flat names
    (args.rollout_batch_size) and the run's own [args] table (args.anything). Plain attributes: a plug-in may copy it and set more."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name!r}; {nearest(name, list(vars(self)))}")


def plugin_args(cfg: Config, router_url: str | None = None) -> Args:
    """The `args` of this run; addresses of the router are there once it has one. Raises: VimeError where [args] hides a section."""
    sections = {name: getattr(cfg, name) for name in Config.model_fields}
    if hidden := sorted(set(sections) & set(cfg.args)):
        raise VimeError(f"[args] {', '.join(hidden)}: the configuration has a section of that name", "rename it")
    args = Args(**sections)
    for name, key in FLAT.items():
        setattr(args, name, attrgetter(key)(cfg))
    for key, point in POINTS.items():
        found = paths(cfg, key)
        setattr(args, point.flag.replace("-", "_"), found if key == "rollout.sample_hook" else found[0] if found else None)
    built_in = not {":", "."} & set(cfg.reward.function)
    args.rm_type, args.custom_rm_path = (cfg.reward.function, None) if built_in else (None, cfg.reward.function)
    args.global_batch_size = cfg.train.global_batch_size or cfg.samples_per_step
    args.over_sampling_batch_size = cfg.rollout.over_sampling_batch_size or cfg.rollout.batch_size
    # whether a sample may come back to be continued from the tokens it has
    args.partial_rollout = cfg.rollout.partial_rollout or (cfg.train.mode == "async" and cfg.weights.in_flight == "abort")
    args.eps_clip_high = cfg.algo.eps_clip if cfg.algo.eps_clip_high is None else cfg.algo.eps_clip_high
    args.use_tis = cfg.algo.custom_tis is not None or cfg.algo.correction in ("tis", "icepop")
    args.use_rollout_logprobs = cfg.algo.correction == "rollout_logprobs"
    args.calculate_per_token_loss = cfg.loss.aggregate == "token-mean"
    args.use_kl_loss, args.save = cfg.algo.kl_loss_coef > 0, str(cfg.folder / "checkpoints")
    # what vime has no key for, as slime's default is
    args.rollout_skip_special_tokens = args.ci_test = args.debug_rollout_only = False
    args.context_parallel_size = args.tensor_model_parallel_size = 1
    if router_url:
        at = urlsplit(router_url)
        args.sglang_router_ip = args.vllm_router_ip = at.hostname
        args.sglang_router_port = args.vllm_router_port = at.port
        args.router_policy = cfg.router.get("policy", "consistent_hash")
    vars(args).update(cfg.args)
    return args
