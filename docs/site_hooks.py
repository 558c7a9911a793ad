"""mkdocs: links that leave docs/ lead into the source tree, which the site doesn't have: their text stays."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **kw: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def inside(m: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, m[2])).startswith("..")
        return m[1] if outside else m[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^):#]+)(?:#[^)]*)?\)", inside, markdown)
