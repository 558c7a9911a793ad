"""A search server for a file of documents, by BM25: what Search and Open of vime/agents/tools/search.py ask.

`python examples/search/server.py docs.jsonl --port 8123` serves JSONL rows of id, title (may be missing) and text.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path

from aiohttp import web
from rank_bm25 import BM25Okapi

SNIPPET = 200  # characters of a document in a list of results


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


async def serve(documents: list[dict[str, str]], port: int = 0) -> tuple[web.AppRunner, str]:
    """Serve /search?q=...&k=... and /open?id=... on 127.0.0.1 until the runner's cleanup(). Returns: it, and the URL."""
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
