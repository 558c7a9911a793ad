"""Tool use: the model writes `<calc>12*7=`, a calculator goes on with `84</calc>`, the model ends its sentence."""

import ast
import operator
import re

from vime.data import tokenizer
from vime.rollout.generate import generate as turn
from vime.sample import Status

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression):
    """The value of a sum, difference or product of integers; ValueError for anything else: nothing is executed."""

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
            return node.value
        raise ValueError(f"not arithmetic: {expression!r}")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as e:
        raise ValueError(f"not arithmetic: {expression!r}") from e


async def generate(args, sample, sampling_params):
    text = tokenizer.load(args.model)
    sample.metadata.setdefault("calls", 0)  # an interrupted sample comes back with its metadata
    while True:
        start = sample.metadata.setdefault("start", len(sample.tokens))
        sample = await turn(args, sample, sampling_params | {"stop": ["=", "\n"]})
        said = text.decode(sample.tokens[start:])
        call = re.search(r"<calc>([^=]*)=$", said)
        if not call or sample.status is not Status.COMPLETED or sample.metadata["calls"] == args.max_calls:
            break  # after the last result the model still has the last word
        try:
            result = calculate(call[1])
        except ValueError:
            result = "error"
        sample.metadata["calls"] += 1
        sample.append_tokens(text.encode([f"{result}</calc>"], special_tokens=False)[0], trainable=False)
        sample.metadata["start"] = len(sample.tokens)
    sample.metadata["answer"] = (re.findall(r"-?\d+", said) or [None])[-1]
    return sample


def reward(args, sample):
    """The last number of the model's own last words, and a bonus for having asked."""
    return float(sample.metadata["answer"] == sample.label) + 0.1 * (sample.metadata["calls"] > 0)
