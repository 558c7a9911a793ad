"""What Python code would do to files: constants are folded, so that a path put together from pieces is a path."""

import ast
import base64
import posixpath
import re
import shlex
import warnings
from contextlib import suppress
from typing import Any

from vime.agents.guard.shell import TABLE, Reader, U

CALLS: dict[str, Any] = TABLE["python"]


def program(r: Reader, words: list[str], stdin: str, line: str) -> str:
    """`python ...`: -c, -m, a file that the episode wrote, or what is piped in. What it prints (of a module's file it may be known)."""
    from vime.agents.guard import commands

    flags, given = commands.options(words, "-[a-zA-Z]*[cm]|-[WXQ]", stop=True)
    option = {f[-1]: v for f, v in flags}
    if "m" in option:
        return commands.simple(r, [option["m"], *given], stdin) if option["m"] != "python" else U
    if "c" not in option and given and given[0] not in ("-", "/dev/stdin"):
        return read(r, r.world.texts.get(r.act("python", line, paths={"reads": given[:1]}).of("reads")[0], ""), line)
    return read(r, option.get("c", stdin), line)


def read(r: Reader, source: str, line: str = "python") -> str:
    act = r.act("python", line, source, unknown="what Python code does" if U in source else "")
    reader = Code(r, source)
    try:
        with warnings.catch_warnings(action="ignore"):  # of the code that is read
            reader.visit(ast.parse(source.replace(U, "_")))
    except (SyntaxError, ValueError, RecursionError):
        act.unknown = act.unknown or "what Python code does that does not parse"
    return reader.printed


class Code(ast.NodeVisitor):
    """Visits statements in order with the names that are constant so far. A value is a str, a list of them, or U; a path is its text, a glob the
    paths that it names."""

    def __init__(self, r: Reader, source: str):
        self.r, self.source, self.names, self.modules, self.printed = r, source, dict[str, Any](), dict[str, str](), U

    def value(self, node: Any) -> Any:
        text = self.text
        match node:
            case ast.Constant(value=v):
                return v.decode("latin-1") if isinstance(v, bytes) else str(v)
            case ast.Name(id=name):
                return self.names.get(name, U)
            case ast.JoinedStr(values=parts):
                return "".join(text(p.value if isinstance(p, ast.FormattedValue) else p) for p in parts)
            case ast.BinOp(left=a, op=op, right=b):
                if isinstance(op, ast.Mod):
                    given = [text(e) for e in (b.elts if isinstance(b, ast.Tuple) else [b])]
                    return re.sub(r"%[sdr]", lambda m: given.pop(0) if given else U, text(a))
                return posixpath.join(text(a), text(b)) if isinstance(op, ast.Div) else text(a) + text(b) if isinstance(op, ast.Add) else U
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return [text(e) for e in elts]
            case ast.Subscript(value=v, slice=s):
                return text(v)[::-1] if isinstance(s, ast.Slice) and s.step is not None else self.value(v)
            case ast.Attribute(value=v, attr="__file__"):
                return "/site-packages/" + self.dotted(v).replace(".", "/") + ".py"
            case ast.Attribute(value=v, attr="parent"):
                return posixpath.dirname(text(v))
            case ast.Call(func=func, args=args):
                return self.called(self.dotted(func), func, args)
        return U

    def text(self, node: Any) -> str:
        v = self.value(node)
        return v if isinstance(v, str) else " ".join(v)

    def called(self, name: str, func: Any, args: list[Any]) -> Any:
        given = [self.text(a) for a in args]
        if name in CALLS["paths"]:
            return self.value(args[0]) if len(args) == 1 else posixpath.join("", *given)
        if name == "chr" or name.endswith(("b64decode", "fromhex", "unhexlify")):
            with suppress(ValueError):
                data = chr(int(given[0])) if name == "chr" else base64.b64decode(given[0]) if "64" in name else bytes.fromhex(given[0])
                return data if isinstance(data, str) else data.decode("latin-1")
            return U
        if not isinstance(func, ast.Attribute):
            return U
        base, method = self.value(func.value), func.attr
        if method in ("joinpath", "glob", "rglob"):
            return posixpath.join(self.text(func.value), *["**"] * (method == "rglob"), *given)
        if method in CALLS["text"] and isinstance(base, str) and U not in "".join([base, *given]):
            with suppress(ValueError, TypeError, IndexError):
                return base.join(self.value(args[0])) if method == "join" else getattr(base, method)(*given)
        return base if method in CALLS["same"] else U

    def dotted(self, node: Any) -> str:
        """The full name of what is called: `import os as o`, `__import__("os")` and getattr are seen through."""
        match node:
            case ast.Name(id=name):
                return self.modules.get(name, name)
            case ast.Attribute(value=v, attr=attr):
                return f"{self.dotted(v)}.{attr}"
            case ast.Call(func=f, args=[a, *rest]) if (name := self.dotted(f)) in ("__import__", "importlib.import_module", "getattr"):
                return f"{self.dotted(a)}.{self.text(rest[0])}" if name == "getattr" and rest else self.text(a)
        return "?"

    def visit_Import(self, node: ast.Import) -> None:
        self.modules |= {a.asname: a.name for a in node.names if a.asname}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts) if both else [(target, node.value)]:  # type: ignore[attr-defined]
                if isinstance(name, ast.Name):
                    self.names[name.id] = self.value(value)
                    self.modules[name.id] = self.dotted(value)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        items = self.value(node.iter)
        for item in (items if isinstance(items, list) else [items])[:64]:
            if isinstance(node.target, ast.Name):
                self.names[node.target.id] = item
            for s in node.body:
                self.visit(s)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name, owner = self.dotted(node.func), node.func.value if isinstance(node.func, ast.Attribute) else None
        args = [*node.args, *(k.value for k in node.keywords if k.arg in ("file", "path", "src", "dst", "args", "files"))]
        first = self.value(args[0]) if args else U
        if name.endswith("open") and name not in ("subprocess.Popen", "os.popen", "urllib.request.urlopen", "urlopen", "webbrowser.open"):
            of_path = owner is not None and name not in ("io.open", "os.open", "codecs.open", "gzip.open", "builtins.open")
            mode = "".join(ast.unparse(a) for a in [*node.args[0 if of_path else 1 :][:1], *(k.value for k in node.keywords if k.arg == "mode")])
            kind = "adds" if re.search("['\"]a", mode) else "writes" if re.search(r"[wx+]|O_(?:WRONLY|RDWR|TRUNC|CREAT)", mode) else "reads"
            self.effect(kind, self.value(owner) if of_path else first)
        elif name in CALLS["shell"]:
            self.r.shell(first if isinstance(first, str) else shlex.join(first))
        elif name in ("exec", "eval", "compile"):
            read(self.r, first if isinstance(first, str) else U)
        elif re.fullmatch(CALLS["network"], name):
            self.r.act("network", f"{name} {self.text(args[0]) if args else ''}")
        elif name == "print":
            self.printed = f"{first}\n" if self.printed == U and len(args) == 1 else U
        else:
            key = "." + node.func.attr if isinstance(node.func, ast.Attribute) else ""
            row = CALLS["effects"].get(name) or ({} if key == ".replace" and len(args) != 1 else CALLS["effects"].get(key, {}))
            for kind, where in row.items():
                self.effect(kind, self.value(owner) if where < 0 else self.value(args[where]) if where < len(args) else U)

    def effect(self, kind: str, paths: Any) -> None:
        self.r.act("python", text=self.source if kind != "reads" else "", paths={kind: [paths] if isinstance(paths, str) else paths})
