"""A desktop: programs on an X server without a screen (Xvfb), moved by xdotool, seen by screenshot."""

import asyncio
import io
import os
from typing import Literal

from PIL import ImageGrab
from pydantic import BaseModel, Field

from vime.agents.tools import Context, Observation, Tool
from vime.errors import VimeError


class Desktop(Tool):
    """`command` is what runs on the screen, started with the episode's first call; `settle_s`: seconds from an action to its screenshot."""

    name, description = "desktop", "Look at the screen, and use mouse and keyboard. Gives a screenshot."
    needs = ("Xvfb", "xdotool")

    def __init__(self, command: list[str], width: int = 1024, height: int = 768, settle_s: float = 0.3):
        self.command, self.size, self.settle_s = command, (width, height), settle_s

    class Args(BaseModel):
        action: Literal["look", "click", "move", "type", "key", "scroll"]
        x: int = 0
        y: int = 0
        text: str = Field("", description="of type: what to write; of key: keys, as ctrl+s")
        button: Literal[1, 2, 3] = 1
        clicks: int = Field(3, description="of scroll: how far, down where it is positive")

    async def run(self, args: Args, ctx: Context) -> Observation:
        display = ctx.state.get("display") or await self._open(ctx)
        at = ["mousemove", str(args.x), str(args.y)]
        wheel = ["click", "--repeat", str(abs(args.clicks)), "5" if args.clicks > 0 else "4"]
        does = {"look": [], "move": at, "click": [*at, "click", str(args.button)], "scroll": [*at, *wheel]}
        does |= {"type": ["type", "--delay", "5", "--", args.text], "key": ["key", "--", args.text]}
        if command := does[args.action]:
            process = await self._start(ctx, "xdotool", *command, display=display)
            if await process.wait():
                raise ValueError(f"{args.action} {args.text!r} was refused")
            await asyncio.sleep(self.settle_s)
        png = io.BytesIO()
        (await asyncio.to_thread(ImageGrab.grab, xdisplay=display)).save(png, "PNG")
        return Observation(f"the screen, {self.size[0]} x {self.size[1]}", [png.getvalue()])

    async def _open(self, ctx: Context) -> str:
        reads, writes = os.pipe()
        size = f"{self.size[0]}x{self.size[1]}x24"
        await self._start(ctx, "Xvfb", "-displayfd", str(writes), "-screen", "0", size, "-nolisten", "tcp", keep=(writes,))
        os.close(writes)
        with open(reads) as number:
            display = f":{(await asyncio.to_thread(number.readline)).strip()}"
        if display == ":":
            raise VimeError("desktop: Xvfb did not start")
        await self._start(ctx, *self.command, display=display)
        await asyncio.sleep(self.settle_s)
        ctx.state["display"] = display
        return display

    async def _start(self, ctx: Context, *argv: str, display: str = "", keep: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
        """A process that ends with the episode."""
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*argv, stdout=quiet, stderr=quiet, env=os.environ | {"DISPLAY": display}, pass_fds=keep)

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        ctx.push_async_callback(end)
        return process
