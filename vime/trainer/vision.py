"""Images on a trainer rank: pixels from references, checks against the tokens, and what a vision-language model's forward takes besides ids."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, PreTrainedModel

from vime.data.images import read
from vime.errors import VimeError
from vime.sample import Sample
from vime.trainer.packing import Pack

# model_type -> dimension in which the features of several images are joined. Attention among an image's tokens must be causal, as among
# text, and the placeholders' id config.image_token_id.
FAMILIES = {"qwen2_vl": 0, "qwen2_5_vl": 0, "qwen3_vl": 0, "idefics3": 1}


def check(config: Any, path: str | Path) -> None:
    """Raises VimeError unless vime can train models of this configuration on images."""
    if config.model_type not in FAMILIES:
        raise VimeError(f"model {path}: models of type {config.model_type} are not supported", f"with images: {', '.join(FAMILIES)}")


class Vision:
    """The images of a rank's samples for one model: each is read and processed once a step, whatever number of samples shows it."""

    def __init__(self, model: PreTrainedModel, path: str | Path, options: dict[str, Any]):
        self.path, self.options, self.cache = path, options, dict[str, dict[str, torch.Tensor]]()
        self.model, self.image_token = model, model.config.image_token_id
        self.dim = FAMILIES[model.config.model_type]
        self.ids: torch.Tensor | None = None  # of the current forward, where they are not those that the model is given
        text = {id(m) for part in (model.get_decoder(), model.get_output_embeddings()) for m in part.modules()}
        self.seeing = [m for m in model.modules() if id(m) not in text]  # what only images run through
        try:
            self.processor = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, ImportError) as e:
            raise VimeError(f"model {path}: its image processor does not load: {str(e).splitlines()[0]}", "see docs/multimodal.md") from e
        model.get_input_embeddings().register_forward_pre_hook(self._true_ids)

    def _true_ids(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self.ids is None else (self.ids,)

    def count(self, features: dict[str, torch.Tensor]) -> int:
        """Tokens of an image: of the Qwen-VL families its patches, merged 2 x 2; of Idefics3 as many for each of its tiles."""
        c = self.model.config
        if "image_grid_thw" in features:
            return int(features["image_grid_thw"].prod()) // c.vision_config.spatial_merge_size**2
        return int(features["pixel_values"].shape[1]) * (c.vision_config.image_size // c.vision_config.patch_size) ** 2 // c.scale_factor**2

    def process(self, samples: list[Sample]) -> None:
        """Read the images of these samples, and forget all others. Raises: ValueError naming a sample whose tokens don't fit its images."""
        refs = {i["sha256"]: i for s in samples for i in s.images}
        self.cache = {k: v for k, v in self.cache.items() if k in refs}
        for key in refs.keys() - self.cache.keys():
            self.cache[key] = dict(self.processor(images=[read(refs[key])[1]], return_tensors="pt", **self.options))
        for s in samples:
            have = Counter(s.tokens[: s.prompt_length])[self.image_token] if s.images else 0
            if have != (want := sum(self.count(self.cache[i["sha256"]]) for i in s.images)):
                what = f"sample {s.index} has {have} image tokens in its prompt, its {len(s.images)} images make {want}"
                raise ValueError(f"{what}: do server and trainer process images alike ([vllm] mm_processor_kwargs holds for both)?")

    def arguments(self, batch: Pack) -> dict[str, torch.Tensor]:
        """The model's ids, positions and, where a micro-batch has images, their features in token order. Image tokens that the policy sampled
        itself are no placeholders: the model gets another id for them, and the embedding the true one."""
        device, ids, positions = batch.ids.device, batch.ids.clone(), batch.positions
        self.ids = None
        shown: dict[int, Sample] = {}  # by the position of its first token: samples that share a prompt share its images
        real = torch.zeros_like(ids, dtype=torch.bool)
        for s, where in zip(batch.samples, batch.where):
            real[0, where[: s.prompt_length]] |= bool(s.images)
            first = shown.setdefault(int(where[0]), s)
            if [i["sha256"] for i in first.images] != [i["sha256"] for i in s.images]:
                raise ValueError(f"samples {first.index} and {s.index} of one group have the same tokens and other images")
        refs = [i["sha256"] for at in sorted(shown) for i in shown[at].images]
        if not refs:
            return {"input_ids": ids, "position_ids": positions}
        sampled = (ids == self.image_token) & ~real
        if sampled.any():
            self.ids = batch.ids
            ids[sampled] = 0 if self.image_token else 1
        features = [self.cache[r] for r in refs]
        joined = {k: torch.cat([f[k] for f in features], self.dim).to(device) for k in features[0]}
        if hasattr(self.model.base_model, "get_rope_index"):
            positions = positions.repeat(3, 1, 1)  # time, height and width; alike for text
            for s, where in zip(batch.samples, batch.where):
                if s.images:
                    positions[:, 0, where] = self._rope(s)[:, 0, :-1].to(device)
        return {"input_ids": ids, "position_ids": positions, **joined}

    def _rope(self, sample: Sample) -> torch.Tensor:
        """Positions (3, 1, tokens) of one sample, as the model itself counts them."""
        ids = torch.tensor([sample.tokens])
        kind = (ids == self.image_token).int()
        kind[0, sample.prompt_length :] = 0
        grids = torch.cat([self.cache[i["sha256"]]["image_grid_thw"] for i in sample.images])
        return self.model.base_model.get_rope_index(input_ids=ids, mm_token_type_ids=kind, image_grid_thw=grids)[0]

    def untouched(self) -> torch.Tensor | float:
        """0, with a zero gradient for every weight that only images run through: then all ranks reduce the same gradients. Call it in the forward."""
        weights = [p for m in self.seeing for p in m.parameters(recurse=False) if p.requires_grad]
        return sum(p.flatten()[:1].sum() for p in weights) * 0.0 if weights else 0.0


def freeze(model: PreTrainedModel) -> None:
    """No gradient for the vision tower; what projects its output to the text model goes on learning where it is a part of its own."""
    for name in ("visual", "vision_tower", "vision_model"):
        if tower := getattr(model.base_model, name, None):
            tower.requires_grad_(False)
