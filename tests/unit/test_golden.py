"""Our advantages, losses and KLs against numbers that other projects' own code computed (tests/golden/README.md).

Runs every *.json of $VIME_GOLDEN, else of ../shared/golden where there is one, and always those of tests/golden. Each entry is
either computed here or listed below with the reason why not; a name that is neither fails.
"""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from vime.trainer.advantage import grpo
from vime.trainer.batch import token_weights
from vime.trainer.loss import importance_weights, kl, opsm_mask, policy_loss

ROOT = Path(__file__).resolve().parents[2]
ATOL = 1e-5
CLIP = r"clip=([\d.]+)/([\d.]+)(?:,(?:c|dual)=([\d.]+))?"
TIS = r"weight=clamp\(exp\(old-rollout\),max=2\)"
AGGREGATES = {"seq-mean-token-mean": "sample-mean"}  # verl's name -> ours, where they differ

# Algorithms that vime does not have: pattern of the entry's name -> why.
NOT_YET = {
    r"verl\.gae|slime\.vanilla_gae|verl\.value_loss": "no critic yet",
    r"verl\.rloo|verl\.opo": "grpo is the only advantage estimator yet",
    r"(verl|slime)\.reinforce\+\+": "grpo is the only advantage estimator yet",
    r"(verl|slime)\.(gspo|cispo)|verl\.gpg": "the PPO surrogate is the only policy loss yet",
    r"verl\.kl_penalty\.abs": "|log-ratio| is not among the four kinds of KL",
}


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


def padded(rows: list[list[float]], width: int) -> torch.Tensor:
    return torch.tensor([list(r) + [0.0] * (width - len(r)) for r in rows], dtype=torch.float32)


def close(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    np.testing.assert_allclose(got[mask > 0].numpy(), expected[mask > 0].numpy(), rtol=0, atol=ATOL)


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{p.stem}-{n}" for p, n in CASES])
def test_golden(path: Path, name: str):
    for pattern, why in NOT_YET.items():
        if re.match(pattern, name):
            pytest.skip(why)
    data = json.loads(path.read_text())
    x, want = data["inputs"], data["expected"][name]
    mask = torch.tensor(x["mask"], dtype=torch.float32)
    width = mask.shape[1]
    project, _, call = name.partition(".")

    if m := re.fullmatch(r"grpo\(norm_std=(True|False)\)", call):
        advantages = grpo(x["reward"], x["group"], range(len(x["reward"])), m[1] == "True")
        close(torch.tensor(advantages, dtype=torch.float32)[:, None].expand(-1, width), padded(want["adv"], width), mask)
    elif m := re.fullmatch(r"(kl|kl_penalty)\.(\w+)\(new\|\|ref\)", call):
        kind = {"kl": "k1", "mse": "k2"}.get(m[2], m[2]) if project == "verl" else m[2]
        close(kl(torch.tensor(x["new_logp"]), torch.tensor(x["ref_logp"]), kind), padded(want["kl"], width), mask)
    elif m := re.fullmatch(rf"ppo(?:\({CLIP}|\+tis\({TIS}),agg=([\w-]+)\)", call):
        low, high, dual = (float(m[1]), float(m[2]), float(m[3]) if m[3] else None) if m[1] else (0.2, 0.28, 3.0)
        new = torch.tensor(x["new_logp"], requires_grad=True)
        old, rollout = torch.tensor(x["old_logp"]), torch.tensor(x["rollout_logp"])
        loss, _ = policy_loss(new, old, torch.tensor(x["policy_adv"]), low, high, dual)
        if not m[1]:
            loss = loss * importance_weights(old, rollout, "tis", 0.0, 2.0)[0]
        trained = [int(n) for n in mask.sum(1)]
        weights = torch.tensor(token_weights(trained, range(len(trained)), AGGREGATES.get(m[4], m[4]), width), dtype=torch.float32)
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
    """The clone's own vectors hold both GRPO variants, both clips, four KLs and four aggregations: an empty folder can't pass."""
    names = set(json.loads((ROOT / "tests" / "golden" / "algos_seed1.json").read_text())["expected"])
    ran = {n for n in names if not any(re.match(p, n) for p in NOT_YET)}
    assert sum("grpo" in n for n in ran) == 2
    assert sum("slime.kl." in n for n in ran) == 4 and sum("verl.kl_penalty." in n for n in ran) == 3
    assert len({n.rsplit("agg=")[1] for n in ran if "ppo" in n}) == 5  # four, one of them under two names
    assert sum("tis" in n or "icepop" in n or "opsm" in n for n in ran) == 3
    assert any("dual=" in n for n in ran) and any("clip=0.2/0.28,agg" in n for n in ran)


def test_dual_clip_changes_something():
    """The golden batches stay inside the dual clip, so prove that ours acts: value and gradient by hand."""
    new = torch.tensor([2.0, 0.5, 2.0], requires_grad=True)
    loss, clipped = policy_loss(new, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), 0.2, 0.28, 3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, float(np.exp(0.5)), -1.28]))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([0.0, float(np.exp(0.5)), 0.0]))
    assert clipped.tolist() == [0.0, 0.0, 1.0]
