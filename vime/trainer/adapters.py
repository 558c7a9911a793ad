"""LoRA (Hu et al. 2021) by peft: adapters beside a frozen model's linear layers, whole on each rank in float32, unknown to FSDP."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from vime.config import Config
from vime.errors import VimeError, nearest, said
from vime.trainer.parallel import class_of


def add(model: PreTrainedModel, cfg: Config) -> None:
    """Put the adapters of [lora] into a model, alike on all ranks, and freeze all else. Raises: VimeError where it can't have them."""
    try:
        import peft
    except ImportError as e:
        raise VimeError(f"lora.rank: peft does not load: {said(e)}", "pip install 'vime[lora]'") from e
    if hasattr(model.config, "vision_config"):
        raise VimeError(f"lora.rank: adapters are not shown to be right in models that take images, as {cfg.model}")
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    known = sorted({name.rpartition(".")[2] for name, m in linear if m is not model.get_output_embeddings()})
    wanted = known if cfg.lora.target_modules == "all-linear" else cfg.lora.target_modules
    if lacks := [name for name in wanted if name not in known]:
        raise VimeError(f"lora.target_modules: {cfg.model} has no linear layer {lacks[0]!r} before its head", nearest(lacks[0], known))
    lora = peft.LoraConfig(r=cfg.lora.rank or 0, lora_alpha=cfg.lora.alpha, lora_dropout=cfg.lora.dropout, target_modules=list(wanted))
    try:
        with torch.random.fork_rng():
            torch.manual_seed(cfg.seed)
            model.add_adapter(lora)
        for name, p in model.named_parameters() if hasattr(model, "layout") else ():  # not where an offloaded weight lies
            if ".lora_" in name:
                p.data = p.data.to(model.layout.device)
        if lora.target_parameters:  # names that experts had before transformers joined them
            raise ValueError(f"peft takes {', '.join(wanted)} for weights of experts, too")
    except ValueError as e:
        raise VimeError(f"lora.target_modules of {cfg.model}: {e}", "leave experts out: name layers of the attention") from e


def check(cfg: Config) -> None:
    """`add`, tried without weights. Raises: as it does."""
    config, kind = class_of(cfg.model, False)
    with torch.device("meta"):
        add(kind(config), cfg)


@contextmanager
def off(model: PreTrainedModel) -> Iterator[None]:
    """In the block the model is what it was without adapters: the reference policy, which takes no memory of its own."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
