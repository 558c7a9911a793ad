"""LoRA in the real trainer: equal to a plain peft loop, published merged, continued bit for bit, refused where it is not shown to be right."""

import zlib

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.test_trainer import close, plain_log_probs
from tests.integration.test_trainer_checkpoint import timeless, train
from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once
from vime.cli import main
from vime.errors import VimeError
from vime.sample import meta_of
from vime.trainer import adapters
from vime.trainer.advantage import estimate
from vime.trainer.batch import plan
from vime.trainer.parallel import whole_parts

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALGO = {"kl_loss_coef": 0.3, "kl_loss_type": "k3"}


def own(model):
    """The adapters' parameters by name."""
    return {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if ".lora_" in n}


def fill(model):
    """Adapters that do something: B is zero at the start."""
    with torch.no_grad():
        for name, p in own(model).items():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2)


def plain_adapted(folder, names):
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora)
    fill(model)
    return model


def plain_loop(folder, cfg, seeds):
    """(loss, gradients) of each step and the adapters after them: peft and torch alone, a forward for each sample."""
    model, out = plain_adapted(folder, cfg.lora.target_modules), []
    optimizer = torch.optim.AdamW(own(model).values(), lr=cfg.train.lr, betas=(0.9, 0.98), weight_decay=0.0)
    for batch in map(make_batch, seeds):
        samples, total = {s.index: s for g in batch for s in g}, torch.zeros(())
        for i in plan(*estimate([meta_of(s) for g in batch for s in g], cfg), cfg, 1)[0].minibatches[0]:
            keep = torch.tensor(samples[i.index].loss_mask) > 0
            lp = plain_log_probs(model, samples[i.index], 0.8)[0][keep]
            with torch.no_grad(), model.disable_adapter():
                d = lp - plain_log_probs(model, samples[i.index], 0.8)[0][keep]
            d = lp - (lp.detach() - d)
            total = total + i.weight * (-i.advantage * (lp - lp.detach()).exp() + 0.3 * ((-d).exp() - 1 + d)).sum()
        optimizer.zero_grad()
        total.backward()
        out.append((total.item(), {n: p.grad.clone() for n, p in own(model).items()}))
        optimizer.step()
    return out, {n: p.detach() for n, p in own(model).items()}, model


def steps(trainer, cfg, seeds):
    """The same in the trainer; also what the optimizer has, and the frozen weights."""
    trainer.setup()
    fill(trainer.model)
    assert trainer.reference is trainer.model
    step, grads, out = trainer.optimizer.step, [], []
    trainer.optimizer.step = lambda: (grads.append({n: p.grad.clone() for n, p in own(trainer.model).items()}), step())
    for k, s in enumerate(seeds):
        out.append((train_once(trainer, cfg, k + 1, make_batch(s))["train/loss"], grads[k]))
    trained = {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
    assert trained == {id(p) for p in own(trainer.model).values()}
    published, canary = trainer.publish(2)
    return out, {n: p.detach().clone() for n, p in own(trainer.model).items()}, published and load_file(published.path), canary.log_probs


@pytest.mark.parametrize(("fsdp", "kind", "more"), [
    (1, "llama", {"max_tokens_per_gpu": 64}), (2, "llama", {"max_tokens_per_gpu": 64}),
    (2, "llama", {"gradient_checkpointing": True}), (2, "qwen3_moe", {}),
])  # fmt: skip
def test_equals_a_plain_peft_loop(tmp_path, two_ranks, fsdp, kind, more):
    """Loss, every gradient and the updated A and B of two steps, KL to the model without adapters; then the merged weights that are published."""
    experts = EXPERTS if kind == "qwen3_moe" else {}
    folder = make_model(tmp_path / "m", kind, **experts)
    lora = LORA | ({"target_modules": ["q_proj", "v_proj"]} if experts else {})
    cfg = make_cfg(folder, tmp_path, lora=lora, algo=ALGO, train={"lr": 1e-4, "clip_grad": 1e9, "logprob_chunk": 7} | more, parallel={"fsdp": fsdp})
    if fsdp == 1:
        with one_rank(cfg) as t:
            t.setup, results = lambda: None, []
            results = [steps(t, cfg, [3, 4])]
    else:
        results = two_ranks(steps, cfg, [3, 4])
    want, final, model = plain_loop(folder, cfg, [3, 4])
    assert all(g.abs().max() > 1e-3 for _, grads in want for g in grads.values())
    for got, ended, _, _ in results:
        for (loss, grads), (plain, plain_grads) in zip(got, want, strict=True):
            assert loss == pytest.approx(plain, abs=1e-5)
            close(grads, plain_grads)
        close(ended, final)
    weights, lps = results[0][2:]
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    close(weights, load_file(tmp_path / "merged" / "model.safetensors"), 1e-6)
    before = load_file(folder / "model.safetensors")
    moved = {k for k in weights if not torch.equal(weights[k], before[k])}
    assert moved == {k for k in weights if k.endswith(tuple(f"{t}.weight" for t in lora["target_modules"]))}
    ids = [(7919 * i + 11) % 61 for i in range(24)]
    with torch.no_grad():
        logp = torch.log_softmax(merged(torch.tensor([ids])).logits[0], -1)
    assert lps == pytest.approx([float(logp[i, t]) for i, t in enumerate(ids[1:])], abs=1e-4)


def test_bfloat16_is_what_the_model_computes_in_and_not_the_adapters(tmp_path):
    """A and B stay float32, and are added up in it before the sum is rounded for the servers."""
    folder = make_model(tmp_path / "m")
    cfg = make_cfg(folder, tmp_path, lora=LORA, algo=ALGO, train={"lr": 1e-3, "dtype": "bfloat16"})
    with one_rank(cfg) as t:
        fill(t.model)
        before = {n: p.detach().clone() for n, p in own(t.model).items()}
        assert train_once(t, cfg, 1, make_batch(3))["train/grad_norm"] > 0.1
        after, weights = own(t.model), load_file(t.publish(1)[0].path)
        assert all(p.dtype == torch.float32 and not torch.equal(p, before[n]) for n, p in after.items())
        start = load_file(folder / "model.safetensors")
        for name in (n for n in weights if n.endswith("q_proj.weight")):
            a, b = (after[f"{name.removesuffix('.weight')}.lora_{x}.default.weight"] for x in "AB")
            assert torch.equal(weights[name], (start[name] + 2.0 * (b @ a)).bfloat16())


def resumed(trainer, cfg, folder, numbers):
    trainer.setup(str(folder))
    out = train(trainer, cfg, numbers)
    return timeless(out), {n: p.detach().clone() for n, p in own(trainer.model).items()}


def test_resumes_bit_for_bit_and_on_other_ranks(tmp_path, two_ranks):
    """Dropout included, whose masks come from the saved random state. A checkpoint holds the adapters alone, and the merged model for others."""
    folder = make_model(tmp_path / "m")
    cfg = make_cfg(folder, tmp_path, lora=LORA | {"dropout": 0.2}, algo=ALGO, train={"lr": 1e-3, "global_batch_size": 8})
    (tmp_path / "c").mkdir()
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        t.save(str(tmp_path / "c"))
        merged = {n: w for part in whole_parts(t.model, torch.float32, 1 << 30)[1] for n, w in part.items()}
        rest = timeless(train(t, cfg, [3, 4]))
        final = {n: p.detach().clone() for n, p in own(t.model).items()}
    with one_rank(cfg, tmp_path / "c") as t:
        again = timeless(train(t, cfg, [3, 4]))
        assert again == rest
        assert all(torch.equal(p, final[n]) for n, p in own(t.model).items())
    held = dcp.FileSystemReader(tmp_path / "c" / "trainer").read_metadata().state_dict_metadata
    assert held and all(".lora_" in k for k in held)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "hf", dtype=torch.float32)
    close({k: exported.state_dict()[k] for k in merged}, merged, 0)
    cfg.lora.dropout = 0.0
    pair = cfg.model_copy(deep=True)
    pair.parallel.fsdp = 2
    with one_rank(cfg, tmp_path / "c") as t:
        train(t, cfg, [3, 4])
        alone = {n: p.detach().clone() for n, p in own(t.model).items()}
    for _, got in two_ranks(resumed, pair, tmp_path / "c", [3, 4]):
        close(got, alone)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    folder = make_model(tmp_path / "m")
    for names, said in ((["q_prj"], r"lora\.target_modules: .*'q_prj'.*did you mean 'q_proj'"), (["lm_head"], r"'lm_head' before its head")):
        with pytest.raises(VimeError, match=said):
            adapters.check(make_cfg(folder, tmp_path, lora={"rank": 2, "target_modules": names}))
    adapters.check(cfg := make_cfg(folder, tmp_path, lora={"rank": 2}))
    experts = make_model(tmp_path / "e", "qwen3_moe", **EXPERTS, mlp_only_layers=[0])
    for names in ("all-linear", ["up_proj"]):
        with pytest.raises(VimeError, match=r"lora\.target_modules of .*leave experts out"):
            adapters.check(make_cfg(experts, tmp_path, lora={"rank": 2, "target_modules": names}))
    (tmp_path / "c").mkdir()
    with one_rank(make_cfg(folder, tmp_path)) as t:
        t.save(str(tmp_path / "c"))
    with pytest.raises(VimeError, match=r"it lacks model\..*lora_A.*\[lora\]"), one_rank(cfg, tmp_path / "c"):
        pass
    (tmp_path / "d").mkdir()
    with one_rank(cfg) as t:
        assert sum(p.numel() for p in own(t.model).values()) == sum(p.numel() for p in t.model.parameters() if p.requires_grad)
        t.save(str(tmp_path / "d"))
    with pytest.raises(VimeError, match=r"lora_A.* is \(2, .*\) in it, \(4, .*\) in the model"), one_rank(make_cfg(folder, tmp_path, lora={"rank": 4}), tmp_path / "d"):
        pass


def test_plan_says_what_is_trained(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(f'model = "{make_model(tmp_path / "m")}"\n[data]\nprompts = "p.jsonl"\n[lora]\nrank = 4\n')
    assert main(["plan", str(path)]) == 0 and "adapters of rank 4" in capsys.readouterr().out
    assert main(["plan", str(path), "parallel.tp=2"]) == 1 and "lora.rank does not go with parallel, tp 2" in capsys.readouterr().err


