"""MCP, both ways, by its official SDK: the tools of any server here, and any of our tools in a server, for an agent that is a black box."""

import asyncio
import base64
import json
import shlex
import tempfile
from typing import Any

from pydantic import BaseModel, ConfigDict

from vime.agents.interaction import Call, perform
from vime.agents.tools import Context, Observation, Tool, make
from vime.errors import VimeError, said

ANSWER = 60.0  # seconds that a server has to start and name its tools


class Remote(Tool):
    """A tool of an MCP server; its arguments are checked there."""

    def __init__(self, client: Any, about: Any, prefix: str, timeout_s: float = 60):
        self.client, self.about, self.timeout_s = client, about, timeout_s
        self.name, self.description = f"{prefix}_{about.name}", about.description or ""

    class Args(BaseModel):
        model_config = ConfigDict(extra="allow")

    def schema(self) -> dict[str, Any]:  # type: ignore[override]
        about = {"name": self.name, "description": self.description, "parameters": self.about.input_schema}
        return {"type": "function", "function": about}

    async def run(self, args: Args, ctx: Context) -> Observation:
        got = await self.client.call_tool(self.about.name, args.model_dump())
        text = "\n".join(part.text for part in got.content if part.type == "text")
        images = [base64.b64decode(part.data) for part in got.content if part.type == "image"]
        return Observation(text, images, status="error" if got.is_error else "ok")


async def connect(servers: dict[str, str], ctx: Context) -> list[Tool]:
    """The tools of MCP servers, {name: URL or command line}, named name_tool, until the context is closed. Raises: VimeError naming the server."""
    from mcp import Client, StdioServerParameters, stdio_client

    out: list[Tool] = []
    for name, at in servers.items():
        log = ctx.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  the context closes it
        try:
            command, *args = shlex.split(at)
            how = StdioServerParameters(command=command, args=args)
            to: Any = at if at.startswith(("http://", "https://")) else stdio_client(how, errlog=log)
            async with asyncio.timeout(ANSWER):
                client = await ctx.enter_async_context(Client(to))
                out += [Remote(client, about, name) for about in (await client.list_tools()).tools]
        except Exception as e:  # a server may fail in any way
            cause = e
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            log.seek(0)
            tail = log.read()[-2000:].strip()
            raise VimeError(f"MCP server {name!r} ({at}): {said(cause)}", f"it wrote:\n{tail}" if tail else "") from e
    return out


def server(tools: list[Tool], ctx: Context) -> Any:
    """An MCP server of these tools, all calls in one context; `.streamable_http_app()` makes an ASGI server of it."""
    from mcp import types
    from mcp.server.lowlevel import Server

    by_name = {t.name: t for t in tools}

    async def listed(_: Any, __: Any) -> Any:
        schemas = [t.schema()["function"] for t in tools]
        return types.ListToolsResult(tools=[types.Tool(name=s["name"], description=s["description"], input_schema=s["parameters"]) for s in schemas])

    async def called(_: Any, asked: Any) -> Any:
        seen = await perform(Call("", asked.name, asked.arguments or {}), by_name, ctx)
        images = [types.ImageContent(data=base64.b64encode(png).decode(), mime_type="image/png") for png in seen.images]
        return types.CallToolResult(content=[types.TextContent(text=seen.text), *images], is_error=seen.status != "ok")

    return Server("vime", on_list_tools=listed, on_call_tool=called)


def command(names: list[str], options: str, base: str | None) -> int:
    """`vime mcp`: serves until stdin is closed."""
    try:
        given = {str(k): dict(v) for k, v in json.loads(options).items()}
    except (ValueError, TypeError, AttributeError) as e:
        raise VimeError(f"--args {options!r} is not JSON of the form {{tool: {{option: value}}}}: {e}") from e
    tools = make(names, given)

    async def run() -> None:
        async with Context() as ctx:
            if base:
                from vime.agents.sandbox import SandboxSpec, open_sandbox

                ctx.sandbox = await ctx.enter_async_context(await open_sandbox(SandboxSpec(base=base)))
            from mcp import stdio_server

            made = server(tools, ctx)
            async with stdio_server() as (reads, writes):
                await made.run(reads, writes, made.create_initialization_options())

    asyncio.run(run())
    return 0
