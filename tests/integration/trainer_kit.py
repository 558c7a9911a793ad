"""What the trainer's tests share: small random models, random batches, and running a function on several real ranks."""

import io
import random
import shutil
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from vime import config
from vime.config import Config
from vime.procs import free_port
from vime.sample import Sample, meta_of
from vime.trainer.advantage import estimate
from vime.trainer.batch import plan
from vime.trainer.engine import Trainer
from vime.weights import location

VOCAB = 61
THREADS = 150  # gloo leaves a few behind with each process group, and each wakes up a hundred times a second


def make_model(folder: Path, kind: str = "llama", tied: bool = True, seed: int = 0, **shape: Any) -> Path:
    """A two-layer model with random weights, large enough that logprobs vary."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": tied, "max_position_embeddings": 256, "initializer_range": 0.2,
    } | shape  # fmt: skip
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
    AutoModelForCausalLM.from_config(kinds[kind](**shape)).save_pretrained(folder)
    return folder


def make_cfg(model: Path, run: Path, **changes: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": str(model), "run_dir": str(run), "data": {"prompts": "unused"}, "train": {"lr": 1e-3, "steps": 10},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "temperature": 0.8}, "weights": {"transport": "file"},
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return config.validate(tree, "test")


def make_batch(seed: int, groups: int = 4, n: int = 4) -> list[list[Sample]]:
    """Groups of unlike lengths, with holes in the mask, one removed sample, and one group whose rewards are all equal."""
    r = random.Random(seed)
    out = []
    for g in range(groups):
        prompt = [r.randrange(VOCAB) for _ in range(r.randint(1, 9))]
        members = []
        for i in range(n):
            s = Sample(group_index=g, index=g * n + i, tokens=list(prompt), reward=1.0 if g == 1 else float(r.random() < 0.5))
            for trainable in (True, False, True) if r.random() < 0.3 else (True,):
                tokens = [r.randrange(VOCAB) for _ in range(r.randint(1, 12))]
                lps = [-r.uniform(1, 5) for _ in tokens] if trainable else None
                s.append_tokens(tokens, lps, versions=0 if trainable else None, trainable=trainable)
            members.append(s)
        members[0].reward, members[1].reward = (1.0, 1.0) if g == 1 else (0.0, 1.0)
        out.append(members)
    out[-1][-1].remove_sample = True
    return out


def train_once(trainer: Trainer, cfg: Config, step: int, batch: list[list[Sample]]) -> dict[str, float]:
    """What the controller and one rank do in a step, with samples of the newest weights."""
    for s in (s for g in batch for s in g):
        s.token_versions = [step - 1 if v >= 0 else v for v in s.token_versions]
    metas, advantages = estimate([meta_of(s) for g in batch for s in g], cfg)
    return trainer.train(step, plan(metas, advantages, cfg, cfg.parallel.fsdp)[cfg.parallel.shard(trainer.rank)], *batch)


def leave(trainer: Trainer) -> None:
    """What a rank's process does by ending: leave the process group, remove the published files."""
    trainer.writer.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    if trainer.rank == 0:
        shutil.rmtree(location(trainer.cfg), ignore_errors=True)


@contextmanager
def one_rank(cfg: Config, checkpoint: Path | None = None) -> Any:
    """A Trainer of one rank in this process."""
    trainer = Trainer(cfg, 0, 1, "127.0.0.1", free_port())
    try:
        trainer.setup(str(checkpoint) if checkpoint else None)
        yield trainer
    finally:
        leave(trainer)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights by name; a collective."""
    out = {}
    for name, p in trainer.model.named_parameters():
        out[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return out


def _rank_main(rank: int, pipe: Connection) -> None:
    """One rank's process: runs function after function until its pipe closes (starting it costs seconds, a function little)."""
    torch.set_num_threads(1)
    while True:
        try:
            fn, cfg, args, port = pipe.recv()
        except EOFError:
            return
        trainer = Trainer(cfg, rank, cfg.parallel.ranks, "127.0.0.1", port)
        try:
            result: Any = fn(trainer, cfg, *args)
        except Exception as e:  # the test looks at it
            traceback.print_exc()
            result = RuntimeError(f"{type(e).__name__}: {e}")
        leave(trainer)
        # A mesh equals one of the same shape whose process groups are gone: results remembered for that one name groups that no longer exist.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
        buffer = io.BytesIO()  # plain bytes: tensors sent by handle would need this process to outlive them
        torch.save(result, buffer)
        pipe.send(buffer.getvalue())


class Ranks:
    """`world` processes over gloo. Call it: fn(trainer, cfg, *args) on as many as the layout has ranks; what each returned, or a
    RuntimeError that names its error."""

    def __init__(self, world: int):
        self.world = world
        self.start()

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_rank_main, args=(rank, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def __call__(self, fn: Callable[..., Any], cfg: Config, *args: Any, timeout: float = 240) -> list[Any]:
        if psutil.Process(self.processes[0].pid).num_threads() > THREADS:
            self.close()
            self.start()
        port, pipes = free_port(), self.pipes[: cfg.parallel.ranks]
        assert len(pipes) == cfg.parallel.ranks
        for pipe in pipes:
            pipe.send((fn, cfg, args, port))
        out: list[Any] = []
        late = taken = False
        for pipe in pipes:
            if late := not pipe.poll(timeout):
                break
            out.append(torch.load(io.BytesIO(pipe.recv()), weights_only=False))
            if taken := isinstance(out[0], RuntimeError) and "EADDRINUSE" in str(out[0]):  # by another process, since the port was free
                break
        if not late and not taken:
            return out
        self.close()  # what still waits for the others would not answer the next test either
        self.start()
        assert taken, "a rank did not answer in time"
        return self(fn, cfg, *args, timeout=timeout)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.close()
            process.join(10)
            process.kill()


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], by: float = 1e-5) -> float:
    """Share of the weights that differ by more than `by`, a tenth of lr. Adam divides by the gradient's size, so where a gradient is
    rounding only, as in a few places it is, two sums in another order part by up to lr a step."""
    assert a.keys() == b.keys()
    return float(torch.cat([((a[k] - b[k]).abs() > by).flatten() for k in a]).float().mean())
