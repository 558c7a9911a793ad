"""Prompts that come with their answers: one to learn (sft), or a better and a worse one (dpo)."""

import copy
from pathlib import Path
from typing import Any

from vime.config import Config, DataConfig
from vime.data.prompts import Parsed, Prompts, Row, render
from vime.data.tokenizer import Tokenizer
from vime.sample import Sample, Status

Turns = list[tuple[str, bool]]  # text after the prompt, in pieces; True: the model's own, trained


class Examples(Prompts):
    """Groups of one sample, or of the chosen (even index) and the rejected one; rows as Prompts reads them. A row's label holds its answers as
    pieces of (token ids, trained): the prompt and each turn are tokenized apart, as they are when the model generates.

    Raises: VimeError as Prompts.
    """

    def __init__(self, cfg: Config, tokenizer: Tokenizer):
        self.keys = [cfg.data.chosen_key, cfg.data.rejected_key] if cfg.train.objective == "dpo" else [cfg.data.response_key]
        self.longest = cfg.rollout.max_response_len
        super().__init__(cfg.data, cfg.data.prompts, tokenizer, len(self.keys), cfg.seed, cfg.rollout.max_context_len - self.longest)

    def parse(self, data: DataConfig, record: Any, tokenizer: Tokenizer, folder: Path) -> Parsed:
        prompt = record.get(data.input_key) if isinstance(record, dict) else None
        if len(self.keys) == 1 and isinstance(prompt, list) and self.keys[0] not in record:
            first = next((i for i, m in enumerate(prompt) if isinstance(m, dict) and m.get("role") == "assistant"), 0)
            if not first:
                raise ValueError(f"no {self.keys[0]!r} (data.response_key), and no assistant's turn after another in {data.input_key!r}")
            record = record | {data.input_key: prompt[:first], self.keys[0]: prompt[first:]}
        text, shown = render(data, record, tokenizer, folder)
        if shown:
            raise ValueError("it has images: examples are of text only, images are for train.objective = \"rl\"")
        label = []
        for key in self.keys:
            pieces = self.turns(data, record[data.input_key], record.get(key), text, key)
            ids = tokenizer.encode([piece for piece, _ in pieces], special_tokens=False)
            if (n := sum(map(len, ids))) > self.longest:
                raise ValueError(f"{key!r} has {n} tokens, longer than rollout.max_response_len {self.longest}")
            if not any(tokens for tokens, (_, trained) in zip(ids, pieces) if trained):
                raise ValueError(f"{key!r} has no token to train")
            label.append([[tokens, trained] for tokens, (_, trained) in zip(ids, pieces) if tokens])
        return text, shown, label

    def turns(self, data: DataConfig, prompt: Any, answer: Any, text: str, key: str) -> Turns:
        """What follows the prompt's `text`. An assistant's turn is trained up to its last <eos>, which the template sets; without a template
        one is added. Raises: ValueError."""
        eos = self.tokenizer.special.get("eos_token", "")
        if not data.apply_chat_template:
            if not (isinstance(answer, str) and answer):
                raise ValueError(f"{key!r} is {answer!r:.40}: without data.apply_chat_template it must be a text")
            return [(answer + eos, True)]
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) and answer else answer
        if isinstance(after, list) and after[: len(before)] == before:  # some data sets repeat the prompt
            after = after[len(before) :]
        if not (isinstance(after, list) and after and all(isinstance(m, dict) and "role" in m for m in after)) or after[-1]["role"] != "assistant":
            raise ValueError(f"{key!r} must be a text, or messages of which the assistant's is the last; it is {answer!r:.60}")
        out: Turns = []
        for i, m in enumerate(after):
            if m["role"] == "assistant":
                whole = [*before, *after[: i + 1]]
                start, end = (self.tokenizer.render(x, data.chat_template, answer) for x, answer in ((whole[:-1], True), (whole, False)))
                if not (start.startswith(text) and end.startswith(start) and len(end) > len(start)):
                    raise ValueError(f"{key!r}: the chat template does not render a turn as what came before and then the turn")
                said = end[len(start) :]
                said = said[: said.rindex(eos) + len(eos)] if eos and eos in said else said
                out += [(start[len(text) :], False), (said, True)]
                text = start + said
        return out

    def text(self, sample: Sample) -> str:
        return self.tokenizer.decode(sample.tokens, skip_special_tokens=False)

    def _group(self, g: int, row: Row, n: int, kind: str) -> list[Sample]:
        out = []
        for i, pieces in enumerate(row.label):
            s = Sample(group_index=g, index=g * self.n + i, rollout_id=g, prompt=row.text, tokens=row.tokens.tolist(), reward=1.0 - i)
            s.metadata, s.status = copy.deepcopy(row.metadata), Status.COMPLETED
            for tokens, trained in pieces:  # no policy sampled them: nothing reads these logprobs
                s.append_tokens(tokens, [0.0] * len(tokens) if trained else None, versions=0 if trained else None, trainable=trained)
            s.response = self.tokenizer.decode(s.tokens[s.prompt_length :])
            out.append(s)
        return out
