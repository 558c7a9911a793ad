"""`vime eval FILE.toml`: an agent on a task, against any OpenAI-compatible endpoint; each episode is a line of a report that is resumed."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from vime import hooks
from vime.agents.endpoint import Endpoint, Said
from vime.agents.interaction import Message
from vime.agents.rollout import run_episode
from vime.agents.tools import make
from vime.config import DataConfig, tree_of, validate
from vime.errors import VimeError, nearest, said
from vime.hooks import Args
from vime.observe.evals import standard_error
from vime.sample import Sample
from vime.sections import AgentConfig, EndpointConfig, Section

SILENT = ("gold", "noop")


class EvalFile(Section):
    """What the TOML file holds; agent, data and [args] as in a run's."""

    name: str = "eval"
    out: str = Field("evals", description="the report is <out>/<name>.jsonl")
    model: EndpointConfig
    data: DataConfig
    agent: AgentConfig
    n_samples: int = Field(1, ge=1, description="episodes of each row")
    parallel: int = Field(8, ge=1, description="episodes at once")
    solved: float = Field(1.0, description="reward from which on an episode counts as solved")
    reward_key: str | None = Field(None, description="which entry of a dict reward counts")
    args: dict[str, Any] = {}


def command(path: str, overrides: list[str], agent: str | None = None) -> int:
    """Run what the report lacks, print the table. Exit code 1 where an episode could not be run: again makes it up."""
    tree = tree_of(path, overrides)
    if agent:  # each agent has a report of its own
        tree.setdefault("agent", {})["agent"] = agent
        tree["name"] = f"{tree.get('name', 'eval')}-{agent}"
    cfg: EvalFile = validate(tree, path, EvalFile)
    if cfg.agent.agent not in ("react", *SILENT):
        raise VimeError(f"vime eval does not know the agent {cfg.agent.agent!r}", nearest(cfg.agent.agent, ["react", *SILENT]))
    report = Path(cfg.out) / f"{cfg.name}.jsonl"
    task = hooks.load(str(cfg.agent.task), "agent.task")(Args(**{k: getattr(cfg, k) for k in EvalFile.model_fields} | cfg.args))
    samples = [s for i, row in enumerate(rows(cfg.data)) for s in of_row(cfg, row, i)]
    done = read(report)
    left = [s for s in samples if s.index not in done]
    print(f"{len(samples)} episodes, {len(samples) - len(left)} of them in {report} already", flush=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    failed = asyncio.run(_run(cfg, task, left, report))
    done = read(report)
    ended = [done[s.index] for s in samples if s.index in done]
    Console().print(table(cfg, ended))
    if lines := instances(ended):
        report.with_suffix(".md").write_text(lines)
        print(f"each instance: {report.with_suffix('.md')}")
    for line in failed[:10]:
        print(line)
    return 1 if failed else 0


def rows(data: DataConfig) -> list[dict[str, Any]]:
    """The rows of data.prompts. Raises: VimeError."""
    try:
        return [json.loads(line) for line in Path(data.prompts).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise VimeError(f"data.prompts = {data.prompts!r} cannot be read: {said(e)}", "it must be JSONL") from e


def of_row(cfg: EvalFile, row: dict[str, Any], i: int) -> list[Sample]:
    d, n = cfg.data, cfg.n_samples
    try:
        made = {"prompt": row[d.input_key], "label": row.get(d.label_key), "metadata": row.get(d.metadata_key) or {}}
    except KeyError:
        raise VimeError(f"{d.prompts}: row {i} has no {d.input_key!r} (data.input_key)", nearest(d.input_key, list(row))) from None
    return [Sample(group_index=i, index=i * n + k, rollout_id=i * n + k, **made) for k in range(n)]


def read(report: Path) -> dict[int, dict[str, Any]]:
    """Finished episodes by number; a line that was cut off is none."""
    out = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        try:
            row = json.loads(line)
            out[int(row["index"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return out


async def silent(messages: list[Message], tools: list[dict[str, Any]]) -> Said:
    """The model of an agent that does nothing itself: what is graded is the task's own answer (gold), or none (noop)."""
    return Said("", {"role": "assistant", "content": ""}, range(0), "stop", 0.0)


async def _run(cfg: EvalFile, task: Any, samples: list[Sample], report: Path) -> list[str]:
    """Run the episodes, write each as it ends. Returns: what went wrong, of those that have no line."""
    tools, turns, failed = make(cfg.agent.tools, cfg.agent.tool_args), asyncio.Semaphore(cfg.parallel), list[str]()

    async def one(s: Sample, model: Endpoint) -> None:
        async with turns:
            try:
                episode, reward = await run_episode(model if cfg.agent.agent not in SILENT else silent, task, tools, s, cfg.agent)
            except Exception as e:  # a task may fail in any way
                failed.append(f"episode {s.index}: {e if isinstance(e, VimeError) else said(e)}")
                return
        row = {"index": s.index, "row": s.group_index, "reward": reward, "hacked": episode.hacked} | episode.record() | {"messages": episode.messages}
        out.write(json.dumps(row) + "\n")

    with open(report, "a", buffering=1) as out:
        if report.stat().st_size and not report.read_bytes().endswith(b"\n"):
            out.write("\n")
        async with Endpoint(cfg.model) as model:
            await asyncio.gather(*(one(s, model) for s in samples))
    return failed


def table(cfg: EvalFile, done: list[dict[str, Any]]) -> Table:
    """The report's summary."""
    out = Table("", "", title=f"{cfg.name}: {cfg.model.name}, {len(done)} episodes")
    if not done:
        return out
    rewards = [Sample(index=r["index"], reward=r["reward"]).reward_value(cfg.reward_key) for r in done]
    by_row: dict[int, list[float]] = {}
    for r, value in zip(done, rewards):
        by_row.setdefault(r["row"], []).append(value)
    calls = [c for r in done for s in r["steps"] for c in s["calls"]]
    out.add_row("reward", f"{fmean(rewards):.3f} ± {standard_error(list(by_row.values())):.3f}")
    out.add_row("solved", f"{sum(v >= cfg.solved for v in rewards)} of {len(rewards)}")
    out.add_row("turns", f"{fmean(len(r['steps']) for r in done):.1f}")
    for status in sorted({r["status"] for r in done}):
        out.add_row(f"ended: {status}", str(sum(r["status"] == status for r in done)))
    for status in sorted({c["status"] for c in calls}):
        out.add_row(f"calls: {status}", str(sum(c["status"] == status for c in calls)))
    return out


def instances(done: list[dict[str, Any]]) -> str:
    """A Markdown table of the episodes whose task left notes on an instance (vime/agents/tasks/swe.py)."""
    out = ["| instance | resolved | why not | dropped | flags | turns |", "|---|---|---|---|---|---|"]
    for r in sorted(done, key=lambda r: int(r["index"])):
        if n := r["notes"]:
            first = next(iter(n["failed"].items()), ("", ""))
            why = n["fault"] or (f"{len(n['failed'])} ids, `{first[0]}`: {first[1]}" if n["failed"] else "")
            out.append(
                f"| {n['instance_id']} | {'yes' if n['resolved'] else 'no'} | {why} | {', '.join(n['dropped'])} | {', '.join(n['flags'])} | {len(r['steps'])} |"
            )
    return "\n".join(out) + "\n" if len(out) > 2 else ""
