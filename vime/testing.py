"""Contract tests of plug-ins, without servers: `python -m vime.testing rollout.custom_generate my.agent:generate [run.toml]`, or in
pytest `vime.testing.check("rollout.custom_generate", "my.agent:generate")`. With a run file the model's tokenizer, [args] and the first prompts are
those of the run; without one, a character-level tokenizer and two made-up prompts."""

import asyncio
import copy
import math
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime import config, hooks, rewards
from vime.config import Config
from vime.data.prompts import Prompts
from vime.data.tokenizer import load
from vime.errors import VimeError, said
from vime.rollout.generate import Link, link
from vime.rollout.http import Choice, EngineClient
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, Status

URL = "http://127.0.0.1:9"


class RandomPolicy(EngineClient):
    """A policy of its own, without a server: it says random words and remembers every (token, logprob) it sampled."""

    def __init__(self, words: list[list[int]]):
        super().__init__(URL)
        self.words, self.random, self.sampled = words, random.Random(0), set[tuple[int, float]]()

    async def generate(
        self, token_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None, timeout: float = 600,
        content_parts: list[dict[str, str]] | None = None,
    ) -> list[Choice]:  # fmt: skip
        out = []
        for _ in range(sampling_params.get("n", 1)):
            limit = sampling_params.get("max_tokens", 16)
            ids = [t for _ in range(1 + self.random.randrange(4)) for t in self.random.choice(self.words)][:limit]
            log_probs = [-self.random.expovariate(1.0) for _ in ids]
            self.sampled |= set(zip(ids, log_probs))
            out.append(Choice(ids, log_probs, [0] * len(ids), "length" if len(ids) == limit else "stop", None))
        return out


def demand(ok: Any, what: str) -> None:
    if not ok:
        raise VimeError(what)


def finished(cfg: Config, n: int = 4) -> list[list[Sample]]:
    """Two finished groups of n, the first with unlike rewards, the second with equal ones."""
    out = []
    for g in range(2):
        group = [Sample(group_index=g, index=g * n + i, rollout_id=g * n + i, prompt="3 + 4", label="7", tokens=[5, 6]) for i in range(n)]
        for i, s in enumerate(group):
            s.append_tokens([7, 8], [-0.5, -1.0], versions=0)
            value = float(g or i % 2)
            s.response, s.status, s.reward = "7", Status.COMPLETED, {cfg.reward.key: value} if cfg.reward.key else value
        out.append(group)
    return out


def _generate(path: str, cfg: Config, prompts: list[Sample], words: list[list[int]]) -> None:
    worker, policy = RolloutWorker(cfg, URL, 0), RandomPolicy(words)

    async def run() -> list[list[Sample]]:  # at once, as a worker does, one of them for an evaluation
        link.set(Link(policy, worker.slots, asyncio.Event()))
        calls = [(copy.deepcopy(s), evaluation) for s, evaluation in zip(prompts, ("", "eval"))]
        return await asyncio.gather(*(worker._custom(path, s, {"temperature": 1.0, "max_tokens": 16}, e) for s, e in calls))

    done = asyncio.run(run())
    lists = [id(x) for out in done for s in out for x in (s.tokens, s.loss_mask, s.rollout_log_probs, s.metadata)]
    demand(len(set(lists)) == len(lists), "samples share a list or dict: what one rollout appends, another gets")
    for prompt, s in ((p, s) for p, out in zip(prompts, done) for s in out):
        trained = [(t, lp) for t, lp, m in zip(s.tokens[s.prompt_length :], s.rollout_log_probs, s.loss_mask) if m]
        foreign = [t for t, lp in trained if (t, lp) not in policy.sampled]
        why = "were not sampled with their logprobs: text tokenized anew, or misaligned"
        demand(not foreign, f"sample {s.index}: trained tokens {foreign[:5]} {why}")
        demand(trained or s.remove_sample, f"sample {s.index}: no token is trained, and remove_sample is not set")
        demand(s.label == prompt.label, f"sample {s.index}: its label became {s.label!r}")
        demand(s.prompt_length > 0, f"sample {s.index}: no prompt is left in its tokens")


def _reward(fn: Callable[..., Any], cfg: Config, group: list[Sample], prompts: list[Sample]) -> None:
    for s, p in zip(group, prompts * len(group)):
        s.prompt, s.label, s.metadata, s.reward = p.prompt, p.label, dict(p.metadata), None
    before, args, limit = copy.deepcopy(group), hooks.plugin_args(cfg, URL), cfg.reward.timeout
    if cfg.reward.group:
        got = asyncio.run(rewards.score_group(fn, args, group, limit))
    else:
        got = [asyncio.run(rewards.score(fn, args, s, limit)) for s in group]
    for s, value in zip(group, got):
        Sample(index=s.index, reward=value).reward_value(cfg.reward.key)
    _unchanged(before, group)


def _source(fn: Callable[..., Any], cfg: Config) -> None:
    source = fn(hooks.plugin_args(cfg, URL))
    groups, n = source.get_samples(2), cfg.rollout.n_samples_per_prompt
    demand([len(g) for g in groups] == [n, n], f"get_samples(2) gave groups of {[len(g) for g in groups]}, not 2 of {n} (n_samples_per_prompt)")
    demand(all(isinstance(s, Sample) and s.prompt for g in groups for s in g), "get_samples gave something other than Samples with a prompt")
    demand(isinstance(len(source), int), "len() of it is not a number")
    source.save(0)
    (first,) = source.get_samples(1)
    source.load(0)
    (again,) = source.get_samples(1)
    demand([s.prompt for s in first] == [s.prompt for s in again], "after save and load it goes on with another prompt")
    source.add_samples(groups)


def _once(key: str, fn: Callable[..., Any], cfg: Config, groups: list[list[Sample]]) -> None:
    """A plug-in that is called once, with groups or samples, and leaves them as they are but for what it is there to change."""
    args, flat = hooks.plugin_args(cfg, URL), [s for g in groups for s in g]
    before = copy.deepcopy(flat)
    if key == "rollout.dynamic_filter":
        for g in groups:
            hooks.keeps(fn(args, g))
    elif key == "rollout.buffer_filter":
        buffer = list(groups)
        got = fn(args, 0, buffer, 1)
        demand(isinstance(got, list) and len(got) <= 1, f"asked for 1 group it returned {got!r:.80}")
        demand(all(any(x is g for g in groups) for x in got), "it returned a group that was not in the buffer")
        demand(not any(x is b for x in got for b in buffer), "a returned group is still in the buffer: it would be trained twice")
    elif key == "reward.post_process":
        got = fn(args, flat)
        demand(len(got) == 2 and all(len(x) == len(flat) for x in got), f"it must return (raw_rewards, rewards), {len(flat)} numbers each")
        demand(all(math.isfinite(float(v)) for x in got for v in x), "a reward is not finite")
    elif key == "log.rollout_hook":
        demand((got := fn(0, args, flat, {}, 1.0)) in (None, True, False), f"it returned {got!r}, not a bool")
    elif key == "log.eval_hook":
        data = {"test": {"rewards": [s.reward_value(cfg.reward.key) for s in flat], "truncated": [False] * len(flat), "samples": flat}}
        demand((got := fn(0, args, data, {})) in (None, True, False), f"it returned {got!r}, not a bool")
    elif key == "weights.post_write":
        with tempfile.TemporaryDirectory() as folder:
            fn(args, folder, [URL])
    else:  # those that change samples in place
        demand(fn(args, groups if key == "rollout.sample_filter" else flat) is None, "it returned something: samples are changed in place")
        for s in flat:
            s.check()
    _unchanged(before, flat, {"rollout.sample_filter": "remove_sample", "rollout.data_postprocess": "loss_mask"}.get(key, ""))


def _unchanged(before: list[Sample], after: list[Sample], but: str = "") -> None:
    for a, b in zip(before, after):
        changed = [k for k, v in a.to_dict().items() if k not in ("metadata", but) and v != b.to_dict()[k]]
        demand(not changed, f"it changed {', '.join(changed)} of sample {b.index}")


def check(key: str, path: str, cfg: Config | None = None, **sections: Any) -> None:
    """Check the plug-in at `path` against the contract of the point `key`: signature, what it returns, what it leaves alone.

    `cfg` is a run's configuration; without one, `sections` say what it would: args={"max_turns": 2}, reward={"key": "score"}.
    Of what needs a whole run (rollout.function, rollout.eval_function, rollout.all_samples_process, algo.*, loss.*) only the signature
    is checked. Raises: VimeError that says what is wrong.
    """
    if key not in hooks.POINTS:
        raise VimeError(f"no such point: {key!r}", f"one of: {', '.join(hooks.POINTS)}")
    fn = hooks.load(path, key)
    if key in ("rollout.function", "rollout.eval_function", "rollout.all_samples_process", *hooks.LOSS_SIDE):
        return
    with tempfile.TemporaryDirectory() as folder:
        if cfg is None:
            from vime.model import _char_tokenizer

            _char_tokenizer().save_pretrained(folder)
            cfg = config.validate({"model": folder, "data": {"prompts": "-"}, **sections}, "vime.testing")
            tokenizer, texts = load(folder), ["3 + 4", "2 + 5"]
            ids = tokenizer.encode(texts, special_tokens=False)
            prompts = [Sample(index=i, prompt=t, label="7", tokens=x) for i, (t, x) in enumerate(zip(texts, ids))]
        else:
            tokenizer = load(cfg.model)
            prompts = [g[0] for g in Prompts(cfg.data, cfg.data.prompts, tokenizer, 1, cfg.seed, cfg.rollout.max_context_len).next(2)]
        words = tokenizer.encode(["7", "3 + 4", "search", "a", "the answer is 7"], special_tokens=False)
        groups = finished(cfg)
        try:
            if key == "rollout.custom_generate":
                _generate(path, cfg, prompts, words)
            elif key == "rollout.sample_hook":
                alone = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"sample_hook": [path]})})
                asyncio.run(RolloutWorker(alone, URL, 0)._hooked(groups[0][0], 0, "")).check()
            elif key == "reward.function":
                _reward(fn, cfg, groups[0], prompts)
            elif key == "data.source":
                _source(fn, cfg)
            else:
                _once(key, fn, cfg, groups)
        except VimeError as e:
            raise VimeError(f"{key} = {path!r}: {e.what}", e.fix) from e
        except (Exception, SystemExit) as e:  # the plug-in's own
            raise VimeError(f"{key} = {path!r} failed: {said(e)}") from e


if __name__ == "__main__":
    try:
        if len(sys.argv) not in (3, 4):
            raise VimeError("usage: python -m vime.testing KEY MODULE:FUNCTION [RUN.TOML]", f"keys: {', '.join(hooks.POINTS)}")
        sys.path.insert(0, str(Path.cwd()))
        check(sys.argv[1], sys.argv[2], config.load(sys.argv[3]) if len(sys.argv) == 4 else None)
    except VimeError as e:
        sys.exit(f"vime.testing: {e}")
    print(f"{sys.argv[1]} = {sys.argv[2]}: fits")
