"""A coding agent in a sandbox: op.py adds two numbers, and is to do something else with them ("make it minus").

Graded as all such tasks should be: not in the agent's sandbox, but in a fresh one that gets nothing of it but the file.
"""

import tempfile
from pathlib import Path

from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.errors import VimeError

PROGRAM = """\
import sys
a, b = (int(x) for x in sys.argv[1:])
print(a + b)
"""
HELD_OUT = [(12, 7), (3, 50)]
DOES = {"minus": lambda a, b: a - b, "times": lambda a, b: a * b}


class Repair:
    def __init__(self, args):
        base = Path(tempfile.mkdtemp(prefix="coding-"))
        base.chmod(0o755)  # the agent is another user
        (base / "op.py").write_text(PROGRAM)
        self.spec = SandboxSpec(base=str(base), memory_mb=256, timeout_s=10)

    async def setup(self, sample):
        return self.spec, [{"role": "user", "content": sample.prompt}], []

    async def grade(self, sample, sandbox, episode):
        try:
            program = await sandbox.read("/work/op.py")
        except VimeError:  # it removed the file
            return 0.0
        async with await open_sandbox(SandboxSpec(memory_mb=256, timeout_s=10)) as clean:
            await clean.write("/work/op.py", program)
            for a, b in HELD_OUT:
                got = await clean.exec(["python3", "op.py", str(a), str(b)])
                if got.output.strip() != str(DOES[sample.label](a, b)):
                    return 0.0
        return 1.0
