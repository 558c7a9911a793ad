"""`vime eval FILE.toml`: an agent on a task, against any OpenAI-compatible endpoint; each episode is a line of a report that is resumed."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from pydantic import Field

from vime import hooks
from vime.agents import harness
from vime.agents.endpoint import ask
from vime.agents.gateway import Gateway
from vime.agents.interaction import Episode, Message
from vime.agents.rollout import black_box, react, run_episode
from vime.agents.tools import Context, Tool, make
from vime.config import DataConfig, tree_of, validate
from vime.errors import VimeError, blamed, nearest, said
from vime.hooks import Args
from vime.observe.evals import standard_error
from vime.sample import Sample
from vime.sections import AgentConfig, EndpointConfig, GatewayConfig, Section

BAD = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a file of another form may raise
SILENT = ("gold", "noop")  # agents that do nothing: what is graded is the task's own answer, or none


class EvalFile(Section):
    """What the TOML file holds; agent, data and [args] as in a run's."""

    name: str = "eval"
    out: str = Field("evals", description="the report is <out>/<name>.jsonl")
    model: EndpointConfig
    data: DataConfig
    agent: AgentConfig
    gateway: GatewayConfig = GatewayConfig()
    n_samples: int = Field(1, ge=1, description="episodes of each row")
    parallel: int = Field(8, ge=1, description="episodes at once")
    solved: float = Field(1.0, description="reward from which on an episode counts as solved")
    reward_key: str | None = Field(None, description="which entry of a dict reward counts")
    args: dict[str, Any] = {}


def command(path: str, overrides: list[str], agent: str | None = None) -> int:
    """Run what the report lacks, print its summary. Exit code 1 where an episode could not be run: the next call makes it up."""
    tree = tree_of(path, overrides)
    if agent:  # each agent has a report of its own
        tree.setdefault("agent", {})["agent"] = agent
        tree["name"] = f"{tree.get('name', 'eval')}-{agent}"
    cfg: EvalFile = validate(tree, path, EvalFile)
    if cfg.agent.agent not in (own := ("react", *SILENT)):
        if cfg.agent.agent not in harness.table():
            raise VimeError(f"vime eval does not know the agent {cfg.agent.agent!r}", nearest(cfg.agent.agent, [*own, *harness.table()]))
        harness.program(cfg.agent.agent)
        if not cfg.model.folder:
            why = "a gateway translates for it, and renders prompts with the model's tokenizer"
            raise VimeError(f"agent {cfg.agent.agent!r} needs model.folder", why)
    report = Path(cfg.out) / f"{cfg.name}.jsonl"
    with blamed(f"{report}", *BAD, fix="is it a report of vime eval? move it away, or give another name or out"):
        report.parent.mkdir(parents=True, exist_ok=True)
        samples, done = episodes(cfg), read(report)
    left = [s for s in samples if s.index not in done]
    print(f"{len(samples)} episodes, {len(samples) - len(left)} of them in {report} already", flush=True)
    failed = asyncio.run(_run(cfg, left, report))
    done = read(report)
    ended = [done[s.index] for s in samples if s.index in done]
    print("\n".join(summary(cfg, ended) + failed[:10]))
    if lines := instances(ended):
        report.with_suffix(".md").write_text(lines)
        print(f"each instance: {report.with_suffix('.md')}")
    return 1 if failed else 0


def episodes(cfg: EvalFile) -> list[Sample]:
    """One for each episode; `n_samples` for each row of data.prompts. Raises: VimeError."""
    d, n = cfg.data, cfg.n_samples
    with blamed(f"data.prompts = {d.prompts!r} cannot be read", *BAD, fix=f"each line is a JSON object with {d.input_key!r} (data.input_key)"):
        if (file := Path(d.prompts)).suffix == ".parquet":
            from pyarrow.parquet import read_table

            rows = read_table(file).to_pylist()
        else:
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        made = [{"prompt": r[d.input_key], "label": r.get(d.label_key), "metadata": r.get(d.metadata_key) or {}} for r in rows]
    return [Sample(group_index=i, index=i * n + k, rollout_id=i * n + k, **m) for i, m in enumerate(made) for k in range(n)]


def read(report: Path) -> dict[int, dict[str, Any]]:
    """Finished episodes by number; a last line that was cut off is removed from the file."""
    whole = report.read_text().rpartition("\n")[0] if report.exists() else ""
    report.write_text(whole + "\n" * bool(whole))
    return {row["index"]: row for row in map(json.loads, whole.splitlines())}


async def silent(messages: list[Message], tools: list[Tool], ctx: Context) -> Episode:
    return Episode(messages, status="answered")


@asynccontextmanager
async def player(cfg: EvalFile) -> AsyncIterator[Callable[[Any, list[Tool], Sample], Awaitable[tuple[Episode, Any]]]]:
    """What plays an episode of a task: the loop on the endpoint, a harness on a gateway in front of it, or nothing."""
    a, m = cfg.agent, cfg.model
    if a.agent in ("react", *SILENT):
        async with aiohttp.ClientSession() as http:
            act = silent if a.agent in SILENT else react(partial(ask, http, m), a)
            yield lambda task, tools, s: run_episode(act, task, tools, s, a)
        return
    gateway = await Gateway.open(m.url.rstrip("/").removesuffix("/v1"), str(m.folder), cfg.gateway, timeout=m.timeout)
    await gateway.start()

    async def play(task: Any, tools: list[Tool], s: Sample) -> tuple[Episode, Any]:
        session = gateway.session(sampling=m.sampling, limits={"max_requests": a.max_turns})
        try:
            fit = partial(harness.fitted, name=a.agent, port=gateway.port)
            return await run_episode(partial(black_box, a, gateway.model, session.token), task, tools, s, a, fit)
        finally:
            session.finish()

    try:
        yield play
    finally:
        await gateway.close()


async def _run(cfg: EvalFile, samples: list[Sample], report: Path) -> list[str]:
    """Run the episodes, write each as it ends. Returns: what went wrong, of those that have no line."""
    tools, turns, failed = make(cfg.agent.tools, cfg.agent.tool_args), asyncio.Semaphore(cfg.parallel), list[str]()
    task = hooks.load(str(cfg.agent.task), "agent.task")(Args(**{k: getattr(cfg, k) for k in EvalFile.model_fields} | cfg.args))
    async with player(cfg) as play:

        async def one(s: Sample) -> None:
            async with turns:
                try:
                    episode, reward = await play(task, tools, s)
                except Exception as e:  # a task may fail in any way
                    failed.append(f"episode {s.index}: {e if isinstance(e, VimeError) else said(e)}")
                    return
            row = {"index": s.index, "row": s.group_index, "reward": reward, "hacked": episode.hacked, "messages": episode.messages}
            out.write(json.dumps(row | episode.record()) + "\n")

        with open(report, "a", buffering=1) as out:
            await asyncio.gather(*map(one, samples))
    return failed


def summary(cfg: EvalFile, done: list[dict[str, Any]]) -> list[str]:
    """Lines for a person."""
    if not done:
        return ["no episode was finished"]
    rewards = [Sample(index=r["index"], reward=r["reward"]).reward_value(cfg.reward_key) for r in done]
    by_row: dict[int, list[float]] = {}
    for r, value in zip(done, rewards):
        by_row.setdefault(r["row"], []).append(value)
    ended, calls = Counter(r["status"] for r in done), Counter(c["status"] for r in done for s in r["steps"] for c in s["calls"])
    counts = {"ended": ended, "calls": calls, "hacked": Counter(r["hacked"] for r in done)}
    return [
        f"reward  {fmean(rewards):.3f} +- {standard_error(list(by_row.values())):.3f}, {sum(v >= cfg.solved for v in rewards)} of {len(done)} solved",
        f"turns   {fmean(len(r['steps']) for r in done):.1f}, tokens {fmean(sum(s['tokens'] for s in r['steps']) for r in done):.0f} an episode",
        *(f"{name:7} {', '.join(f'{k} {n}' for k, n in sorted(c.items()))}" for name, c in counts.items()),
    ]


def instances(done: list[dict[str, Any]]) -> str:
    """A Markdown table of the episodes whose task left notes on an instance (vime/agents/tasks/swe.py)."""
    out = ["| instance | resolved | why not | dropped | flags | turns | swebench |", "|---|---|---|---|---|---|---|"]
    for r in sorted(done, key=lambda r: int(r["index"])):
        if n := r["notes"]:
            first = next(iter(n["failed"].items()), ("", ""))
            why = n["fault"] or (f"{len(n['failed'])} ids, `{first[0]}`: {first[1]}" if n["failed"] else "")
            said_too = ("yes" if n["swebench"] else "no") + ", disagrees" * (n["swebench"] != n["resolved"]) if "swebench" in n else ""
            cells = [n["instance_id"], "yes" if n["resolved"] else "no", why, *(", ".join(n[k]) for k in ("dropped", "flags")), len(r["steps"])]
            out.append(f"| {' | '.join(map(str, [*cells, said_too]))} |")
    return "\n".join(out) + "\n" if len(out) > 2 else ""
