"""The tools that ask a search server, as that of examples/search/server.py: GET /search?q=...&k=... and /open?id=..."""

from typing import Any

import aiohttp
from pydantic import BaseModel, Field

from vime.agents.tools import Context, Observation, Tool, clipped
from vime.errors import VimeError


class Search(Tool):
    name, description = "search", "Search the documents; gives ids, titles and beginnings of the best ones."

    def __init__(self, url: str, k: int = 5):
        self.url, self.k = url.rstrip("/"), k

    class Args(BaseModel):
        query: str

    async def run(self, args: Args, ctx: Context) -> Observation:
        found = await self.get(ctx, "search", q=args.query, k=str(self.k))
        lines = (f"[{d['id']}] {d['title']}: {d['text']}" for d in found) if found else ["nothing found"]
        return Observation("\n".join(lines), metadata={"results": len(found)})

    async def get(self, ctx: Context, path: str, **query: str) -> Any:
        """The server's answer. Raises: ValueError for a 4xx, VimeError where it is not there."""
        if "http" not in ctx.state:
            ctx.state["http"] = await ctx.enter_async_context(aiohttp.ClientSession())
        try:
            async with ctx.state["http"].get(f"{self.url}/{path}", params=query) as answer:
                if 400 <= answer.status < 500:
                    raise ValueError((await answer.json())["error"])
                answer.raise_for_status()
                return await answer.json()
        except aiohttp.ClientError as e:
            raise VimeError(f"search server {self.url}: {e}", "is it running? examples/search/server.py is one") from e


class Open(Search):
    name, description = "open", "Read a document by the id that a search gave."

    def __init__(self, url: str, max_chars: int = 16_000):
        super().__init__(url)
        self.max_chars = max_chars

    class Args(BaseModel):
        id: str = Field(description="as in the search results")

    async def run(self, args: Args, ctx: Context) -> Observation:  # type: ignore[override]
        text, cut = clipped((await self.get(ctx, "open", id=args.id))["text"], self.max_chars)
        return Observation(text, truncated=cut)
