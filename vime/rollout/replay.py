"""`vime replay RUN --sample UID --engine URL`: what a server makes of one recorded sample now."""

import asyncio
from pathlib import Path

from vime import config
from vime.data import tokenizer
from vime.errors import VimeError
from vime.observe import diff
from vime.rollout.generate import sampling_params, seed_of
from vime.rollout.http import EngineClient
from vime.sample import Sample


def command(run: str, uid: int, url: str, step: int | None = None) -> int:
    """Score the recorded tokens on the server, then send the prompt again with the run's sampling parameters; prints both differences.
    Returns 1 where the mean |logprob difference| is above weights.canary_tol, as after a publish. Raises: VimeError where there is no such sample."""
    folder = Path(run)
    cfg = config.load(folder / "config.toml")
    files = sorted((folder / "samples").glob("step_??????.jsonl"), reverse=True)
    numbers = [step] if step is not None else [int(f.stem[5:]) for f in files]
    at, row = next(((n, found[uid]) for n in numbers if uid in (found := diff.samples(folder, n))), (0, None))
    if not row or "prompt_tokens" not in row:
        what = "was written before prompts' tokens were" if row else "is not in its samples/"
        raise VimeError(f"{folder}: sample {uid} {what}", "`vime dash` lists them; log.samples = true writes them")
    prompt, tokens, old = row["prompt_tokens"], row["tokens"], row["log_probs"]
    seed = {"seed": seed_of(Sample(index=row["index"], group_index=row["group_index"]), cfg.seed)} if cfg.debug.deterministic else {}
    params = sampling_params(cfg) | {"max_tokens": max(1, len(tokens))} | seed

    async def ask() -> tuple[list[float], list[int], int]:
        client = EngineClient(url)
        try:
            scored = (await client.prompt_logprobs(prompt + tokens))[len(prompt) - 1 :]
            (again,) = await client.generate(prompt, params)
            return scored, again.token_ids, await client.weight_version()
        finally:
            await client.close()

    scored, again, version = asyncio.run(ask())
    trained = [i for i, m in enumerate(row["loss_mask"]) if m]
    gaps = {i: abs(scored[i] - old[i]) for i in trained}
    mean, worst = sum(gaps.values()) / max(1, len(gaps)), max(gaps, key=lambda i: gaps[i], default=0)
    parted = next((i for i, (x, y) in enumerate(zip(tokens, again)) if x != y), min(len(tokens), len(again)))
    print(
        f"sample {uid} of step {at}: {len(prompt)} prompt tokens, {len(tokens)} of the response; weights {row['weight_versions']} then, {version} now"
    )
    if cfg.rollout.temperature != 1 or cfg.rollout.truncated:
        print("the server scores at temperature 1 over the whole vocabulary, the run sampled otherwise: logprobs differ for that alone")
    print(f"logprobs of the recorded tokens: mean |difference| {mean:.2e}, largest {gaps.get(worst, 0.0):.2e} at token {worst}")
    text = tokenizer.load(cfg.model).decode
    same = "the same response" if again == tokens else f"parts at token {parted}"
    print(f"sampled again: {same}\n  then {text(tokens[parted:])[:200]!r}\n  now  {text(again[parted:])[:200]!r}")
    return int(mean > (cfg.weights.canary_tol or (1e-3 if cfg.train.dtype == "float32" else 0.25)))
