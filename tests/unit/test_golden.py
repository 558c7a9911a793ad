"""Our advantages, losses and KLs against numbers that other projects' own code computed (tests/golden/README.md).

Runs every *.json of $VIME_GOLDEN, else of ../shared/golden where there is one, and always those of tests/golden. Every entry is computed
here; a name that is not fails.
"""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from vime.trainer.advantage import gae, grpo, opo, returns, rloo, whiten
from vime.trainer.batch import token_weights
from vime.trainer.loss import importance_weights, kl, opsm_mask, policy_loss, value_loss

ROOT = Path(__file__).resolve().parents[2]
ATOL = 1e-5
CLIP = r"clip=([\d.e-]+)/([\d.e-]+)(?:,(?:c|dual)=([\d.]+))?"
TIS = r"weight=clamp\(exp\(old-rollout\),max=2\)"
AGGREGATES = {"seq-mean-token-mean": "sample-mean"}  # verl's name -> ours, where they differ

def files() -> list[Path]:
    given = os.environ.get("VIME_GOLDEN")
    outside = Path(given) if given else ROOT.parent / "shared" / "golden"
    found = sorted(outside.glob("*.json"))
    if not found:
        assert not given, f"VIME_GOLDEN={given} holds no *.json"
        warnings.warn(f"{outside} holds no vectors: only the copies in tests/golden run", stacklevel=1)
    copies = [p for p in sorted((ROOT / "tests" / "golden").glob("*.json")) if p.name not in {f.name for f in found}]
    return found + copies


CASES = [(p, name) for p in files() for name in json.loads(p.read_text())["expected"]]


def whitened(rows: list[np.ndarray], mask: torch.Tensor) -> torch.Tensor:
    """Rows (T,) whitened over all masked tokens."""
    x = np.stack(rows)
    seen = x[mask.numpy() > 0]
    return torch.tensor(whiten(x, len(seen), seen.sum(), (seen**2).sum()))


def padded(rows: list[list[float]], width: int) -> torch.Tensor:
    return torch.tensor([list(r) + [0.0] * (width - len(r)) for r in rows], dtype=torch.float32)


def close(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    np.testing.assert_allclose(got[mask > 0].numpy(), expected[mask > 0].numpy(), rtol=0, atol=ATOL)


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{p.stem}-{n}" for p, n in CASES])
def test_golden(path: Path, name: str):
    data = json.loads(path.read_text())
    x, want = data["inputs"], data["expected"][name]
    mask = torch.tensor(x["mask"], dtype=torch.float32)
    width = mask.shape[1]
    project, _, call = name.partition(".")

    rows = range(len(mask))
    if m := re.fullmatch(r"grpo\(norm_std=(True|False)\)|rloo|opo|reinforce\+\+baseline\(whitened\)", call):
        scalars = (x["reward"], x["group"], rows)
        if call.startswith("re"):
            got = whitened(list(np.repeat(grpo(*scalars, False)[:, None], width, 1)), mask)
        else:
            each = grpo(*scalars, m[1] == "True") if m[1] else rloo(*scalars) if call == "rloo" else opo(*scalars, mask.sum(1).numpy())
            got = torch.tensor(each)[:, None].expand(-1, width)
        close(got, padded(want["adv"], width), mask)
    elif m := re.fullmatch(r"reinforce\+\+\(gamma=([\d.]+),whitened\)", call):
        found = []
        for k in rows:  # verl starts its sum anew after each hole, where ours goes on
            at = np.flatnonzero(x["mask"][k])
            row, end = np.zeros(width), np.zeros(len(at))
            end[-1] = x["reward"][k]
            for piece in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) > 1) + 1):
                row[at[piece]] = returns(end[piece], float(m[1]))
            found.append(row)
        close(torch.tensor(np.stack(found)), padded(want["ret"], width), mask)
        close(whitened(found, mask), padded(want["adv"], width), mask)
    elif m := re.fullmatch(r"reinforce\+\+(?:returns\(kl=k1,|baseline\()kl_coef=([\d.]+),(?:gamma=([\d.]+)|unwhitened),ragged\)", call):
        cost = float(m[1]) * kl(torch.tensor(x["old_logp"]), torch.tensor(x["ref_logp"]), "k1").numpy()
        for k, row in enumerate(want["ret" if m[2] else "adv"]):
            r = -cost[k][: len(row)]
            if m[2]:
                r = r * x["mask"][k][: len(row)]
                r[np.flatnonzero(x["mask"][k])[-1]] += x["reward"][k]
                r = returns(r, float(m[2]))
            else:
                r = x["reward"][k] + r  # given as a number that has its baseline already
            np.testing.assert_allclose(r, row, rtol=0, atol=ATOL)
    elif m := re.fullmatch(r"(vanilla_)?gae\(gamma=([\d.]+),lam=([\d.]+)(,no mask)?\)", call):
        advantages, ret = [], []
        for k in rows:
            at = np.arange(len(want["adv"][k])) if m[1] else np.flatnonzero(x["mask"][k])
            r = np.where(at == np.flatnonzero(x["mask"][k])[-1], x["reward"][k], 0.0)
            both = np.zeros((2, width))
            both[:, at] = gae(r, np.array(x["values"][k])[at], float(m[2]), float(m[3]))
            advantages.append(both[0])
            ret.append(both[1])
        adv = torch.tensor(np.stack(advantages)) if m[1] else whitened(advantages, mask)
        close(adv, padded(want["adv"], width), mask)
        close(torch.tensor(np.stack(ret)), padded(want["ret"], width), mask)
    elif call == "value_loss(clip=0.2,agg=token-mean,returns=verl.gae ret)":
        target = padded(data["expected"]["verl.gae(gamma=0.99,lam=0.95)"]["ret"], width)
        loss, larger = value_loss(torch.tensor(x["value_pred"]), torch.tensor(x["values"]), target, 0.2)
        assert ((loss * mask).sum() / mask.sum()).item() == pytest.approx(want["loss"], rel=0, abs=ATOL)
        assert ((larger * mask).sum() / mask.sum()).item() == pytest.approx(want["clipfrac"], rel=0, abs=ATOL)
    elif m := re.fullmatch(r"(kl|kl_penalty)\.(\w+)\(new\|\|ref\)", call):
        kind = {"kl": "k1", "mse": "k2"}.get(m[2], m[2]) if project == "verl" else m[2]
        close(kl(torch.tensor(x["new_logp"]), torch.tensor(x["ref_logp"]), kind), padded(want["kl"], width), mask)
    elif m := re.fullmatch(rf"(ppo|gspo|cispo|gpg)\((?:{CLIP},)?agg=([\w-]+)\)|ppo\+tis\({TIS},agg=([\w-]+)\)", call):
        low, high, dual = (float(m[2]), float(m[3]), float(m[4]) if m[4] else None) if m[2] else (0.2, 0.28, 3.0)
        new, kept = torch.tensor(x["new_logp"], requires_grad=True), mask > 0
        old, rollout = torch.tensor(x["old_logp"]), torch.tensor(x["rollout_logp"])
        sizes = [int(n) for n in mask.sum(1)]
        packed, _ = policy_loss(new[kept], old[kept], torch.tensor(x["policy_adv"])[kept], low, high, dual, m[1] or "ppo", sizes)
        loss = torch.zeros_like(new).masked_scatter(kept, packed)
        if not m[1]:
            loss = loss * importance_weights(old, rollout, "tis", 0.0, 2.0)[0]
        trained = [int(n) for n in mask.sum(1)]
        weights = torch.tensor(token_weights(trained, range(len(trained)), AGGREGATES.get(m[5] or m[6], m[5] or m[6]), width), dtype=torch.float32)
        total = (loss * mask * weights[:, None]).sum()
        total.backward()
        assert total.item() == pytest.approx(want["loss"], rel=0, abs=ATOL)
        assert new.grad is not None
        close(new.grad, padded(want["grad"], width), mask)
        assert new.grad[mask == 0].abs().max() == 0
    elif m := re.fullmatch(r"icepop_weight\(low=([\d.]+),high=([\d.]+)\)", call):
        old, rollout = torch.tensor(x["old_logp"]), torch.tensor(x["rollout_logp"])
        close(importance_weights(old, rollout, "icepop", float(m[1]), float(m[2]))[0], padded(want["w"], width), mask)
    elif m := re.fullmatch(r"opsm_mask\(delta=([\d.]+)\)", call):
        new, old, adv = (torch.tensor(x[k])[mask > 0] for k in ("new_logp", "old_logp", "policy_adv"))
        kept = opsm_mask(new, old, adv, [int(n) for n in mask.sum(1)], float(m[1]))
        assert torch.equal(kept, padded(want["mask"], width)[mask > 0])
        assert 0 < kept.sum() < len(kept)
        # its clipfrac: per dropped row the padded width over the number of trained tokens
        assert (((1 - kept) / mask.sum(1).repeat_interleave(mask.sum(1).long()) ** 2).sum() * width).item() == pytest.approx(want["clipfrac"])
    else:
        pytest.fail(f"{path.name}: entry {name!r} is neither tested here nor listed in NOT_YET")


def test_vectors_cover_what_vime_has():
    """The clone's own vectors hold every family: an empty folder can't pass."""
    names = set(json.loads((ROOT / "tests" / "golden" / "algos_seed1.json").read_text())["expected"])
    assert sum("grpo" in n for n in names) == 2 and sum("reinforce++" in n for n in names) == 4 and sum("gae" in n for n in names) == 3
    assert sum("slime.kl." in n for n in names) == 4 and sum("verl.kl_penalty." in n for n in names) == 4
    assert len({n.rsplit("agg=")[1] for n in names if "ppo" in n}) == 5  # four, one of them under two names
    assert sum("tis" in n or "icepop" in n or "opsm" in n for n in names) == 3
    assert {n.partition("(")[0] for n in names} >= {f"{p}.{n}" for p in ("verl", "slime") for n in ("gspo", "cispo", "ppo")}
    assert {n.partition("(")[0] for n in names} >= {"verl.rloo", "verl.opo", "verl.gpg", "verl.value_loss"}
    assert any("dual=" in n for n in names) and any("clip=0.2/0.28,agg" in n for n in names)


def test_dual_clip_changes_something():
    """The golden batches stay inside the dual clip, so prove that ours acts: value and gradient by hand."""
    new = torch.tensor([2.0, 0.5, 2.0], requires_grad=True)
    loss, clipped = policy_loss(new, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), 0.2, 0.28, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, float(np.exp(0.5)), -1.28]))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([0.0, float(np.exp(0.5)), 0.0]))
    assert clipped.tolist() == [0.0, 0.0, 1.0]
