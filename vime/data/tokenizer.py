"""Text to token ids and back, for a model folder. Reads its files itself: transformers' own way imports torch, eight seconds of a start."""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Rust

from vime.errors import VimeError, said


class Tokenizer:
    """tokenizer.json, the special tokens and the chat template of a Hugging Face folder; the same ids as AutoTokenizer gives.

    Raises: VimeError where tokenizer.json is missing, or a file is not readable or not what it should be.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        file = folder / "tokenizer.json"
        try:
            self._rust = Rust.from_file(str(file))
            file = folder / "tokenizer_config.json"
            config = json.loads(file.read_text("utf-8")) if file.exists() else {}
            named = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
            template = config.get("chat_template")
            if isinstance(template, list):  # several named ones
                template = {t["name"]: t["template"] for t in template}.get("default")
            if not isinstance(template, str | None):
                raise TypeError(f"its chat_template is of type {type(template).__name__}, not a string")
            file = folder / "chat_template.jinja"
            template = file.read_text("utf-8") if file.exists() else template
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # the Rust side raises plain Exception, or panics, which is none
            fix = "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes the files anew, tokenizer.json too where a model comes without"
            raise VimeError(f"{folder}: its tokenizer does not load: {file.name}: {said(e)}", fix) from e
        self._rust.no_truncation()
        self._rust.no_padding()
        self.size = 1 + max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1)  # beyond the last id
        self.special: dict[str, str] = {k: v for k, v in named.items() if isinstance(v, str)}
        self.chat_template: str | None = template
        model: Any = {}
        with suppress(OSError, ValueError, RecursionError):  # model.faults names what is wrong with it
            model = json.loads((folder / "config.json").read_text("utf-8"))
        image = model.get("image_token_id", model.get("image_token_index")) if isinstance(model, dict) else None
        self.image_token: int | None = image  # stands for an image; None: the model takes none

    def encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; special_tokens: with what the tokenizer puts around a text (<bos>, ...)."""
        if len(texts) == 1:  # a batch goes through a thread pool, which costs more than most texts
            return [self._rust.encode(texts[0], add_special_tokens=special_tokens).ids]
        return [e.ids for e in self._rust.encode_batch(texts, add_special_tokens=special_tokens)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))

    def render(self, messages: list[dict[str, Any]], template: str | None = None, answer: bool = True, **kw: Any) -> str:
        """The prompt's text: `messages` through the chat template (or `template`), up to where the model's answer begins if `answer`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        chosen = template or self.chat_template
        if not chosen:
            raise ValueError("the tokenizer has no chat template: set data.chat_template, or data.apply_chat_template = false")
        texts, _ = render_jinja_template([messages], chat_template=chosen, add_generation_prompt=answer, **self.special, **kw)
        return str(texts[0])


@lru_cache(maxsize=2)
def load(folder: str) -> Tokenizer:
    """The tokenizer of a folder, read once in a process."""
    return Tokenizer(folder)
