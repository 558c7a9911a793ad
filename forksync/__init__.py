"""Keep a fork aligned with its upstream: translate, compare, merge, fix, measure, until nothing unexplained differs (docs/forksync.md).

Nothing here knows vime: the package stands on Python, git, pydantic and tomli-w, and works for any pair of repositories.
"""
