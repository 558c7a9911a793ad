"""What a shell command would do, read off its parsed text: the files it reads, writes and deletes, the programs it runs.

Not a matcher of strings but a small abstract interpreter over tree-sitter's tree: variables, cd, functions, loops, pipes, here-documents,
`sh -c`, eval, xargs, find -exec (commands.py), Python code (code.py) and scripts that the episode itself has written are followed as far as they
can be decided without running anything. What cannot be decided is part of the answer (`Act.unknown`): the state of the files has the last word.
"""

import fnmatch
import posixpath
import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vime.errors import VimeError

U = "\0"  # stands for a piece of text that is not known
DEEP, WIDE, LONG, STEPS = 12, 64, 1 << 16, 5_000  # how far interpreters in interpreters, loops, texts and whole commands are followed
TABLE = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
ESCAPES = dict(zip("abefnrtv\\'\"", "\a\b\x1b\f\n\r\t\v\\'\""))


@dataclass
class Act:
    """One thing that a command does. `paths`: absolute, links and globs resolved, under "reads", "writes", "deletes", "adds" (appended to) and
    "maybe" (some of these are written or deleted)."""

    program: str  # with its subcommand
    words: str = ""  # the whole command, expanded
    text: str = ""  # what is written, or the program text that writes it, where it is known
    pipe: str = ""  # the programs that feed it
    unknown: str = ""  # what could not be decided
    paths: dict[str, list[str]] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[str]:
        return [p for k in kinds for p in self.paths.get(k, [])]


@dataclass
class World:
    """What is known of the files: `files` there at the start (absolute; None: not known, so that any may be), `links`, symbolic and hard, and the
    `texts` that the episode has written."""

    root: str
    files: set[str] | None = None
    links: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    @cached_property
    def ordered(self) -> list[str]:
        return sorted(self.files or ())

    @cached_property
    def folders(self) -> set[str]:
        return {f[:i] for f in self.files or () for i in range(len(self.root) + 1, len(f)) if f[i] == "/"}

    def under(self, start: str) -> list[str]:
        """Files whose path starts so."""
        return self.ordered[bisect_left(self.ordered, start) : bisect_left(self.ordered, start + "\U0010ffff")]


@cache
def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as e:
        raise VimeError("the guard reads shell commands with tree-sitter, which is not installed", "pip install vime[agents]") from e
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def plain(data: bytes) -> str:
    """The text of a piece of the tree. It was encoded twice: the grammar's scanner reads past its tables at characters beyond U+00FF, and crashes."""
    return data.decode("utf-8", "replace").encode("latin-1", "replace").decode("utf-8", "replace")


class Reader:
    """Reads commands in one World; `acts` is what it found. cwd, variables and functions last as long as it does, as in one shell."""

    def __init__(self, world: World, cwd: str, after: "Reader | None" = None):
        """`after`: the same shell, before."""
        self.world, self.cwd, self.acts, self.depth, self.pipe = world, cwd, list[Act](), 0, ""
        self.vars: dict[str, str] = {"HOME": "/root", "PWD": cwd}
        self.functions: dict[str, Any] = {}
        self.left = STEPS
        if after:
            self.cwd, self.vars, self.functions = after.cwd, after.vars, after.functions

    def paths(self, word: str) -> list[str]:
        """Absolute paths that a word stands for: braces, ~, `..`, links and globs resolved; one with U in it is not known."""
        if word.count("{") < 6 and (m := re.search(r"\{([^{}]*,[^{}]*)\}", word)):
            return [p for part in m[1].split(",") for p in self.paths(word[: m.start()] + part + word[m.end() :])]
        path = posixpath.normpath(posixpath.join(self.cwd, re.sub(r"^~(?=/|$)", self.vars["HOME"], word)))
        for _ in range(DEEP):
            link = next((k for k in self.world.links if path == k or path.startswith(k + "/")), None)
            if link is None:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(link), self.world.links[link]) + path[len(link) :])
        if re.search(r"[*?\[]", path) and self.world.files:
            pattern = re.compile(globbed(path.replace("{", "[{]")))
            return [f for f in self.world.under(re.split(r"[*?\[{]", path)[0]) if pattern.fullmatch(f)] or [path]
        return [path]

    def act(self, program: str, words: str = "", text: str = "", unknown: str = "", paths: Mapping[str, list[str]] | None = None) -> Act:
        """Records an Act; `paths`: its paths by kind, as words."""
        found = {kind: [p for w in given for p in self.paths(w)] for kind, given in (paths or {}).items() if given}
        self.acts.append(Act(program, words, text, self.pipe, unknown, found))
        for path in self.acts[-1].of("writes", "deletes", "adds"):
            self.world.texts.pop(path, None)
            self.acts[-1].unknown = "which file it writes" if U in path else unknown
        return self.acts[-1]

    def shell(self, source: str, stdin: str = "") -> str:
        """Reads one command line or script. What it prints, as far as that is known."""
        if self.depth >= DEEP or U in source:
            self.act("sh", source, unknown="what a script does whose text is not known")
        if self.depth >= DEEP:
            return U
        whole = re.sub(r"(?<=[\w/}.-])\$([A-Za-z_]\w*)", r"${\1}", source)  # the grammar cuts `$A/$B.py` in two
        root = _parser().parse(whole.encode("utf-8", "replace").decode("latin-1").encode()).root_node
        if root.has_error:
            self.act("sh", source, unknown="what a command does that does not parse")
        self.depth += 1
        out = self.run(root, stdin)
        self.depth -= 1
        return out

    def spent(self, steps: int) -> bool:
        """Whether a command has been followed for long enough; that is said once."""
        over, self.left = self.left < steps, self.left - steps
        if over and self.left + steps >= 0:
            self.act("sh", unknown="what a command does that takes so many steps")
        return over

    def run(self, node: Any, stdin: str) -> str:
        """One node of the tree. What it prints."""
        field_of = node.child_by_field_name
        if self.spent(1):
            return U
        match node.type:
            case "command" | "redirected_statement":
                return self._redirected(node, stdin)
            case "pipeline":
                kept, since = self.pipe, len(self.acts)
                for child in node.named_children:
                    stdin = self.run(child, stdin)
                    self.pipe = " ".join(a.program for a in self.acts[since:])
                self.pipe = kept
                return stdin
            case "subshell":
                kept_cwd, kept_vars = self.cwd, dict(self.vars)
                out = "".join(self.run(c, stdin) for c in node.named_children)
                self.cwd, self.vars = kept_cwd, kept_vars
                return out
            case "variable_assignment":
                name, value = plain(field_of("name").text), field_of("value")
                words = [] if value is None else value.named_children if value.type == "array" else [value]
                text = " ".join(map(self.word, words))
                self.vars[name] = text if len(text) < LONG else U
                self.act("=", f"{name}={self.vars[name]}")
                return ""
            case "function_definition":
                self.functions[plain(field_of("name").text)] = field_of("body")
                return ""
            case "for_statement" | "while_statement":
                asked = field_of("condition")
                names = re.search(r"\bread\s+(?:-\w+\s+)*(\w+)", plain(asked.text) if asked is not None else "")
                if asked is None or names:  # once for each value, or for each line that `read` is given
                    name = names[1] if names else plain(field_of("variable").text)
                    values = stdin.splitlines() if names else [w for c in node.children_by_field_name("value") for w in self.split(c)]
                    values = [p for v in values for p in (self.paths(v) if re.search(r"[*?\[]", v) else [v])]
                    out = ""
                    for self.vars[name] in values[:WIDE]:
                        out += self.run(field_of("body"), "")
                    return out
            case "word" | "string" | "raw_string" | "concatenation" | "simple_expansion" | "expansion" | "number":
                self.word(node)  # of a test or a case: what a substitution in it runs
                return ""
        return "".join(self.run(c, stdin) for c in node.named_children)

    def _redirected(self, node: Any, stdin: str) -> str:
        """A here-document's own node holds what follows its opening word: more redirections, a pipe, an `&&`."""
        redirects = [r for r in node.named_children if r.type.endswith("_redirect")]
        redirects += [r for h in redirects if h.type == "heredoc_redirect" for r in h.named_children if not r.type.startswith("heredoc")]
        body, outputs, after = node.child_by_field_name("body"), list[tuple[str, str]](), []
        for r in redirects:
            target, sign = r.child_by_field_name("destination"), re.match(r"\d*[<>&|]*", plain(r.text))[0]  # type: ignore[index]
            if r.type == "heredoc_redirect":
                text = next((c for c in r.named_children if c.type == "heredoc_body"), None)
                quoted = r.named_children[0].text[:1] in b"'\"\\"
                stdin = "" if text is None else plain(text.text) if quoted else self.word(text)
            elif r.type == "herestring_redirect" or (sign == "<" and (r.prev_sibling or r).text == b"<<"):  # which the grammar reads so after a `>`
                stdin = self.word(r.named_children[-1]) + "\n"
            elif r.type != "file_redirect":
                after.append(r)
            elif target is not None and "<" in sign:
                stdin = self.world.texts.get(self.act("<", paths={"reads": [self.word(target)]}).of("reads")[0], U)
            elif target is not None and not re.fullmatch(rb"[\d-]+", target.text):
                outputs.append((self.word(target), sign))
        out = self._command(node, stdin) if node.type == "command" else self.run(body, stdin) if body is not None else ""
        for word, sign in outputs:
            self.write(word, "" if sign.startswith("2") else out, ">>" in sign)
            out = out if sign.startswith("2") else ""
        for r in after:
            out = self.run(r, out)
        return out

    def write(self, word: str, text: str, append: bool = False) -> None:
        before = self.world.texts.get(self.paths(word)[0], "") if append else ""
        for path in self.act(">", f"> {word}", text, paths={"adds" if append else "writes": [word]}).of("writes", "adds"):
            self.world.texts[path] = before + text

    def _command(self, node: Any, stdin: str) -> str:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.run(child, "")
            elif not child.type.endswith("_redirect"):
                words += self.split(child.named_children[0] if child.type == "command_name" else child)
        from vime.agents.guard import commands  # which reads more shell in turn

        return commands.simple(self, words, stdin)

    def split(self, node: Any) -> list[str]:
        """One or more words: an expansion outside quotes is split at blanks."""
        value = self.word(node)
        pieces = (node, *(node.named_children if node.type == "concatenation" else ()))
        return value.split() if any(c.type.endswith(("expansion", "command_substitution")) for c in pieces) else [value]

    def word(self, node: Any) -> str:
        """The text of a word, quotes and escapes resolved, U where it is not known."""
        text = plain(node.text)
        match node.type:
            case "word" | "extglob_pattern":
                return re.sub(r"\\\n|\\(.)", r"\1", text)
            case "raw_string":
                return text[1:-1]
            case "ansi_c_string":
                return escaped(text[2:-1])
            case "simple_expansion" | "expansion":
                name = re.match(r"\$\{?(\w+|[@*])(?:\[\d*[@*]?\])?(?::?[-=]([^}]*))?\}?$", text)
                return self.vars.get(name[1], name[2] or U) if name else U
            case "command_substitution":
                return "".join(self.run(c, "") for c in node.named_children).rstrip("\n")
            case "process_substitution":
                self.world.texts["/dev/fd/63"] = "".join(self.run(c, "") for c in node.named_children)
                return "/dev/fd/63"
            case "string" | "concatenation" | "heredoc_body" | "translated_string":
                at, end = (node.start_byte, node.end_byte) if node.type != "string" else (node.start_byte + 1, node.end_byte - 1)
                text, low = "", node.start_byte
                for c in node.named_children:  # the children in place, and the text between them as it stands
                    known = plain(c.text) if c.type in ("string_content", "heredoc_content") else self.word(c)
                    text, at = text + plain(node.text[at - low : c.start_byte - low]) + known, c.end_byte
                text += plain(node.text[at - low : end - low])
                return re.sub(r'\\\n|\\(["$`\\])', r"\1", text) if node.type == "string" else text
        return text


def escaped(text: str) -> str:
    """Backslash escapes of printf, echo -e and $'...' resolved."""
    text = re.sub(r"\\0?([0-7]{1,3})", lambda m: chr(int(m[1], 8) & 255), text)
    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|[abefnrtv\\'\"])", lambda m: ESCAPES.get(m[1]) or chr(int(m[1][1:], 16)), text)


def globbed(pattern: str) -> str:
    """A glob as a regular expression: `*` and `?` stay in one folder, `**/` is any depth, `{a|b}` one of these."""
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|\{[^}]*\})", pattern)
    kinds = {"[": lambda p: fnmatch.translate(p)[4:-3], "{": lambda p: f"(?:{p[1:-1]})"}
    return "".join(signs.get(p) or (kinds.get(p[:1], re.escape) if p[-1:] in "]}" else re.escape)(p) for p in parts)
