"""Arithmetic with a calculator: the prompt is "12 and 7", the label "84". What to do with the numbers only the reward says."""

import re

from pydantic import BaseModel

from vime.agents.tools import Observation, Tool


class Calculator(Tool):
    name = "calculator"
    description = "The value of one sum, difference or product of two whole numbers, as 12*7."

    class Args(BaseModel):
        expression: str

    async def run(self, args, ctx):
        m = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", args.expression.replace(" ", ""))
        if not m:
            raise ValueError(f"{args.expression!r} is not two whole numbers with + - or * between them")
        a, b = int(m[1]), int(m[3])
        return Observation(str({"+": a + b, "-": a - b, "*": a * b}[m[2]]))


class Arithmetic:
    def __init__(self, args):
        self.tools = [Calculator()]

    async def setup(self, sample):
        return None, [{"role": "user", "content": sample.prompt}], self.tools

    async def grade(self, sample, sandbox, episode):
        """1 for the right answer, half of it for having asked the calculator for it."""
        asked = any(c.status == "ok" for c in episode.calls)
        seen = [m["content"] for m in episode.messages if m["role"] == "tool"]
        return 0.5 * (asked and sample.label in seen) + 0.5 * (episode.status == "answered" and episode.answer.strip() == sample.label)
