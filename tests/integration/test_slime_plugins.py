"""Three plug-ins of slime, from a checkout of its public repository (VIME_SLIME), run against a real server of SmolLM2 with their imports changed
and nothing else: multi-turn search, tool use with a Python sandbox, a reward model behind HTTP. Their sources are not part of this repository."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vime.config import Config, validate
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, Status
from vime.testing import check

ROOT = Path(__file__).parents[2]
SLIME = os.environ.get("VIME_SLIME", "")
pytestmark = pytest.mark.skipif(not SLIME, reason="VIME_SLIME names no checkout of slime (git clone https://github.com/THUDM/slime)")

FILES = {
    "search": ["examples/search-r1/generate_with_search.py", "examples/search-r1/qa_em_format.py", "examples/search-r1/local_search_server.py"],
    "retool": ["examples/retool/generate_with_retool.py", "examples/retool/tool_sandbox.py", "slime/rollout/rm_hub/math_dapo_utils.py"],
    "filters": ["slime/rollout/filter_hub/dynamic_sampling_filters.py"],
    "rm": ["slime/rollout/rm_hub"],
}
CHANGED = {"search": 3, "retool": 4, "filters": 2, "rm": 2}  # lines
FACTS = {"france": "Paris is the capital of France.", "italy": "Rome is the capital of Italy.", "japan": "Tokyo is the capital of Japan."}
SHOTS = "".join(
    f"Question: what is the capital of {land}?\n<search>capital of {land}</search>\n\n<information>Doc 1(Title: {land}) {FACTS[land]}"
    f"</information>\n\n<answer>{FACTS[land].split()[0]}</answer>\n\n"
    for land in ("france", "italy")
)


def imports_changed(text: str) -> tuple[str, int]:
    """The source with slime's imports led to vime.slime, and how many lines that were; files of rm_hub are imported from beside it."""
    lines = text.splitlines(keepends=True)
    new = [re.sub(r"^(\s*)from slime\.rollout\.rm_hub\.(\w+) import ", r"\1from \2 import ", x) for x in lines]
    new = [re.sub(r"^(\s*)from slime\.[\w.]+ import ", r"\1from vime.slime import ", x) for x in new]
    return "".join(new), sum(a != b for a, b in zip(lines, new))


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on sys.path with the plug-ins."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, files in FILES.items():
        changed = 0
        for file in (f for entry in files for f in sorted((Path(SLIME) / entry).glob("*.py")) or [Path(SLIME) / entry]):
            text, n = imports_changed(file.read_text())
            target = folder / "rm_hub" / file.name if file.parent.name == "rm_hub" and name == "rm" else folder / file.name
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
            changed += n
        assert changed == CHANGED[name], f"{name}: {changed} lines changed"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


class Backend(BaseHTTPRequestHandler):
    """A retriever over FACTS (POST /retrieve) and a reward model (POST /rm) that remember what they were asked."""

    asked: list[dict] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.path == "/retrieve":
            found = [{"contents": f'"{k}"\n{v}'} for q in body["queries"] for k, v in FACTS.items() if k in q.lower()]
            answer: object = {"result": [found[: body["topk"]]]}
        else:
            answer = float(str(body["label"]) in body["response"])
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()


class Served:
    """SmolLM2 on a real vLLM server, weights published as version 1, and transformers' copy to compare with."""

    def __init__(self, folder: Path):
        from vime.model import get

        made = ROOT / "models/smollm2-135m"
        self.path = get("smollm2-135m", made if made.exists() else folder / "smollm2-135m")
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        tree = {"model": str(self.path), "data": {"prompts": "-"}, "rollout": {"max_context_len": 1024, "max_response_len": 64}}
        self.tree: dict = tree | {"reward": {"function": "exact"}}
        self.engine = Engine(validate(self.tree, "t"), 0, str(folder))
        self.url = self.engine.start()
        weights = str(folder / "v1.safetensors")
        save_file({k: t.contiguous() for k, t in self.model.state_dict().items() if k != "lm_head.weight"}, weights)
        fleet = Fleet([self.url], None, None)
        fleet.publish(1, weights, None)
        fleet.close()

    def run(self, prompt: str, label: object, n: int = 8, **sections: dict) -> list[Sample]:
        """One group through a worker, every promise of a sample checked."""
        cfg: Config = validate(
            {k: {**self.tree.get(k, {}), **v} for k, v in sections.items()} | {k: v for k, v in self.tree.items() if k not in sections}, "t"
        )
        tokens = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        group = [Sample(index=i, rollout_id=i, prompt=prompt, label=label, tokens=list(tokens)) for i in range(n)]

        async def go() -> tuple:
            worker = RolloutWorker(cfg, self.url, 0)
            try:
                return await worker.run_group(group, 1)
            finally:
                await worker.close()

        report, samples = asyncio.run(go())
        assert len(report.metas) == n and report.fenced == 0
        for s in samples:
            assert s.weight_versions == [1] and s.status in (Status.COMPLETED, Status.TRUNCATED) and sum(s.loss_mask) > 0
        return samples

    def worst(self, s: Sample) -> float:
        """Largest difference of a trained token's logprob to transformers', on the tokens that will be trained."""
        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([s.tokens])).logits[0].float(), -1)
        at = range(s.prompt_length, len(s.tokens))
        return max(abs(float(rows[i - 1, s.tokens[i]]) - lp) for i, lp, m in zip(at, s.rollout_log_probs, s.loss_mask) if m)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    s = Served(tmp_path_factory.mktemp("smollm2"))
    yield s
    s.engine.stop()


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_search_r1(plugin: Path, backend: str, served: Served) -> None:
    """Turns with a real retriever between them; the plug-in's own reward, whose label is a dict."""
    load("generate_with_search").SEARCH_R1_CONFIGS["local"]["search_url"] = f"{backend}/retrieve"
    Backend.asked.clear()
    samples = served.run(
        SHOTS + "Question: what is the capital of japan?\n", {"ground_truth": {"target": ["Tokyo"]}},
        rollout={"custom_generate": "generate_with_search.generate"}, reward={"function": "generate_with_search.reward_func"},
    )  # fmt: skip
    searched = [s for s in samples if "<information>" in s.response]
    assert searched and len(Backend.asked) >= len(searched) and any("Tokyo is the capital" in s.response for s in searched)
    for s in searched:
        first = s.loss_mask.index(0)
        assert first > 0 and s.token_versions[first] == -1 and 1 in s.loss_mask[:first]
    assert all(0 <= s.reward <= 1 for s in samples)
    # It sends text, which is tokenized anew for each turn; where that gives the tokens it recorded, the logprobs are those of its tokens.
    same = [s for s in samples if served.tokenizer(s.prompt + s.response, add_special_tokens=False)["input_ids"] == s.tokens]
    assert same and max(map(served.worst, same)) < 1e-3


def test_retool(plugin: Path, served: Served) -> None:
    """Python that the model writes, run by the plug-in's sandbox; token ids all the way, so every logprob is right; reward and extra attributes."""
    load("generate_with_retool").TOOL_CONFIGS["max_turns"] = 3
    samples = served.run(
        "Write one python code block that prints 12 * 7, like this:\n```python\nprint(3 * 5)\n```", "84",
        rollout={"custom_generate": "generate_with_retool.generate", "max_response_len": 96},
        reward={"function": "generate_with_retool.reward_func", "key": "score"},
    )  # fmt: skip
    ran = [s for s in samples if "<interpreter>" in s.response]
    assert any(re.search(r"<interpreter>\s*Output:\s*\d+", s.response) for s in ran) and any(s.tool_call_count > 0 for s in samples)  # type: ignore[attr-defined]
    assert max(map(served.worst, samples)) < 1e-3
    assert all(set(s.reward) == {"score", "acc", "pred"} for s in samples)  # type: ignore[arg-type]


def test_reward_model_behind_http(plugin: Path, backend: str, served: Served) -> None:
    """slime's remote_rm, which asks args.rm_url."""
    pytest.importorskip("pylatexenc", reason="rm_hub needs pylatexenc")
    Backend.asked.clear()
    samples = served.run("The capital of France is", "Paris", reward={"function": "rm_hub.remote_rm"}, args={"rm_url": f"{backend}/rm"})
    assert [s.reward for s in samples] == [float("Paris" in s.response) for s in samples] and len(Backend.asked) == len(samples)
    assert set(Backend.asked[0]) == {"prompt", "response", "label"}


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("rollout.dynamic_filter", "dynamic_sampling_filters.check_reward_nonzero_std"), ("rollout.custom_generate", "generate_with_retool.generate"),
        ("rollout.custom_generate", "generate_with_search.generate"),
    ],
)  # fmt: skip
def test_they_keep_the_contract(plugin: Path, key: str, path: str) -> None:
    check(key, path)
