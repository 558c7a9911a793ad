"""Multi-turn search: ask the index for the reversed word, read what it finds, answer with the document's word reversed.

The search server is a real one, BM25 over HTTP; each rollout worker starts its own, for the documents in [args] documents.
"""

import asyncio
import json
from pathlib import Path

from examples.search.server import serve
from vime.agents.tools.search import Search


class SearchTask:
    def __init__(self, args):
        self.documents = [json.loads(line) for line in Path(args.documents).read_text().splitlines()]
        self.server = asyncio.ensure_future(serve(self.documents))

    async def setup(self, sample):
        _, url = await self.server
        return None, [{"role": "user", "content": sample.prompt}], [Search(url, k=1)]

    async def grade(self, sample, sandbox, episode):
        """Half for a query that finds something, half for the answer."""
        found = any(c.metadata.get("results") for c in episode.calls)
        return 0.5 * found + 0.5 * (episode.status == "answered" and episode.answer.strip() == sample.label)
