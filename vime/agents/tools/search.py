"""Search over documents: a BM25 server for a file of them, and the tools that ask it.

`python -m vime.agents.tools.search docs.jsonl --port 8123` serves JSONL rows of id, title (may be missing) and text.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, Field

from vime.agents.tools import Context, Observation, Tool, clipped
from vime.errors import VimeError

SNIPPET = 200  # characters of a document in a list of results


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


async def serve(documents: list[dict[str, str]], port: int = 0) -> tuple[web.AppRunner, str]:
    """Serve /search?q=...&k=... and /open?id=... on 127.0.0.1 until the runner's cleanup(). Returns: it, and the URL."""
    from rank_bm25 import BM25Okapi

    index = BM25Okapi([words(f"{d.get('title', '')} {d['text']}") for d in documents])
    by_id = {str(d["id"]): d for d in documents}

    async def search(request: web.Request) -> web.Response:
        asked = set(words(request.query.get("q", "")))
        scores = index.get_scores(sorted(asked))
        best = sorted(range(len(documents)), key=lambda i: (-scores[i], i))[: int(request.query.get("k", 5))]
        hit = [documents[i] for i in best if asked & index.doc_freqs[i].keys()]  # a word of half the documents scores below zero
        return web.json_response([{"id": str(d["id"]), "title": d.get("title", ""), "text": d["text"][:SNIPPET]} for d in hit])

    async def document(request: web.Request) -> web.Response:
        found = by_id.get(request.query.get("id", ""))
        return web.json_response(found or {"error": "no such document"}, status=200 if found else 404)

    app = web.Application()
    app.add_routes([web.get("/search", search), web.get("/open", document)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


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
            ctx.state["http"] = await ctx.closing.enter_async_context(aiohttp.ClientSession())
        try:
            async with ctx.state["http"].get(f"{self.url}/{path}", params=query) as answer:
                if 400 <= answer.status < 500:
                    raise ValueError((await answer.json())["error"])
                answer.raise_for_status()
                return await answer.json()
        except aiohttp.ClientError as e:
            raise VimeError(f"search server {self.url}: {e}", "is it running? python -m vime.agents.tools.search") from e


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


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("documents", type=Path)
    p.add_argument("--port", type=int, default=8123)
    given = p.parse_args()

    async def forever() -> None:
        _, url = await serve([json.loads(line) for line in given.documents.read_text().splitlines()], given.port)
        print(url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(forever())
