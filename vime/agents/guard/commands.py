"""One command with its words expanded: what it prints, where that can be known, and its Act, after programs.toml."""

import base64
import fnmatch
import posixpath
import re
from contextlib import suppress
from typing import Any

from vime.agents.guard import code
from vime.agents.guard.shell import TABLE, Reader, U, escaped

PROGRAMS: dict[str, dict[str, Any]] = {name: row for row in TABLE["programs"] for name in row["names"]}
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash", "source", "."}
PATCHED = re.compile(r"^(?:\+\+\+ |--- |rename to |diff --git a/\S+ )(?:[ab]/)?(\S+)", re.M)  # paths that a patch names


def simple(r: Reader, words: list[str], stdin: str = "") -> str:
    """One program with its arguments. What it prints."""
    name, words = unwrapped(r, words)
    rest, line = words[1:], " ".join(words)
    if name in r.functions:
        return r.run(r.functions[name], stdin)
    if name in SHELLS:
        return script(r, rest, stdin, line)
    match name:
        case "":
            return ""
        case "python" | "pypy":
            return code.program(r, rest, stdin, line)
        case "cd" | "pushd":
            to = next((w for w in rest if w == "-" or not w.startswith("-")), "~")
            r.cwd, r.vars["OLDPWD"] = r.vars.get("OLDPWD", r.cwd) if to == "-" else r.paths(to)[0], r.cwd
            return ""
        case "eval":
            return r.shell(" ".join(rest), stdin)
        case "pwd":
            return r.cwd
        case "echo" | "printf":
            r.act(name, line)
            return printed(name, rest)
        case "base64" if any(re.fullmatch(r"-\w*[dD]\w*|--decode", w) for w in rest):
            given = [w for w in rest if not w.startswith("-")]
            with suppress(ValueError):
                return base64.b64decode(r.world.texts.get(r.paths(given[0])[0], U) if given else stdin, validate=False).decode()
            return U
        case "xargs" | "parallel":
            return xargs(r, rest, stdin)
        case "find":
            return find(r, rest, line)
    flags, given = options(rest, "-C|-c|--git-dir|--work-tree|--namespace|--cwd|--project|--directory") if name in TABLE["subcommands"] else ([], [])
    if name in ("uv", "poetry", "pdm", "conda") and given[:1] in (["run"], ["pip"]):
        return simple(r, given[given[0] == "run" :], stdin)
    where = next((v for f, v in flags if f in ("-C", "--work-tree")), ".")
    return tabled(r, " ".join([name, *given[:1]]), rest[rest.index(given[0]) + 1 :] if given else rest, line, stdin, where)


def unwrapped(r: Reader, words: list[str]) -> tuple[str, list[str]]:
    """The plain name of the program that really runs, and the words from there on; sudo, env, timeout and the like are looked through."""
    while words:
        name = re.sub(r"^(python|pypy|pip|ruby|perl)[\d.]*$", r"\1", posixpath.basename(words[0]))
        _, given = options(words[1:], TABLE["values"].get(name, "$"), stop=True)
        while name in ("env", "sudo") and given and re.match(r"^\w+=", given[0]):
            r.act("=", given.pop(0))
        given = given[TABLE["wrappers"].get(name, 0) :]
        if name not in TABLE["wrappers"] or not given or "-v" in words[1:2]:
            return name, words
        words = given
    return "", []


def options(words: list[str], values: str, stop: bool = False) -> tuple[list[tuple[str, str]], list[str]]:
    """([(option, its value)], positional words). `values`: which options take the next word; `stop`: at the first positional."""
    flags, given, left = list[tuple[str, str]](), list[str](), list(words)
    while left and not (stop and given):
        w = left.pop(0)
        if w == "--":
            break
        if m := re.match(r"(--[\w-]+|of|if|bs|count|conv|seek)=(.*)", w, re.S):
            flags.append((m[1], m[2]))
        elif not w.startswith("-") or w == "-":
            given.append(w)
        elif re.fullmatch(values, w) and left:
            flags.append((w, left.pop(0)))
        else:
            flags.append((w[:2], w[2:]) if len(w) > 2 and w[1] != "-" and re.fullmatch(values, w[:2]) else (w, ""))
    return flags, given + left


def printed(name: str, words: list[str]) -> str:
    """What echo and printf print; printf uses its format once for each of its arguments."""
    if name == "echo":
        special = [w for w in words[:1] if re.fullmatch(r"-[neE]+", w)]
        text = " ".join(words[len(special) :]) + "\n"
        return escaped(text) if "e" in "".join(special) else text
    form, *args = [w for w in words if w != "--"] or [""]
    hole, out = re.compile(r"%[-\d.]*[sbdqxc]"), ""
    while True:
        out += hole.sub(lambda m: args.pop(0) if args else "", escaped(form))
        if not args or not hole.search(form):
            return out.replace("%%", "%")


def script(r: Reader, words: list[str], stdin: str, line: str) -> str:
    """sh, bash, source: -c, a file that the episode wrote, or what is piped in. A file that was there from the start is what it was."""
    flags, given = options(words, r"-\w*c|-o|-O|--rcfile|--init-file", stop=True)
    source = next((v for f, v in flags if re.fullmatch(r"-\w*c", f)), None)
    kept = r.cwd, dict(r.vars)
    r.vars |= {str(i): g for i, g in enumerate(given)} | {"@": " ".join(given[1:])}
    if source is None and given and given[0] != "-":
        source = r.world.texts.get(r.act("sh", line, paths={"reads": given[:1]}).of("reads")[0], "")
    out = r.shell(stdin if source is None else source, stdin)
    if not line.startswith((".", "source")):
        r.cwd, r.vars = kept
    return out


def xargs(r: Reader, words: list[str], stdin: str) -> str:
    flags, given = options(words, "-[IinLPsdEa]|--(max-args|max-procs|replace|delimiter|arg-file)", stop=True)
    mark = next((v or "{}" for f, v in flags if f in ("-I", "-i", "--replace")), "{}" if "{}" in given else "")
    items = [U] if U in stdin else [s for s in re.split("\n", stdin) if s] if mark else stdin.split()
    for some in [[i] for i in items] if mark else [items]:
        simple(r, [w.replace(mark, some[0]) for w in given] if mark else [*given, *some])
    return U


def find(r: Reader, words: list[str], line: str) -> str:
    """-exec and -delete change some of the files that its -name and -path leave. It prints these."""
    cut = next((i for i, w in enumerate(words) if w.startswith(("-", "(", "!"))), len(words))
    tests = words[cut:]
    found = [f for w in words[:cut] or ["."] for p in r.paths(w) for f in ([p] if p in (r.world.files or ()) else r.world.under(p.rstrip("/") + "/"))]
    if "d" in tests and "-type" in tests:
        found = [f for w in words[:cut] or ["."] for p in r.paths(w) for f in r.world.folders if f.startswith(p)]
    for before, test, value in zip(["", *tests], tests, tests[1:]):
        if test in ("-name", "-iname", "-path", "-wholename") and before not in ("!", "-not", "-o", "-or"):
            shown = value if "name" in test[:6] or value.startswith(("*", "/")) else posixpath.normpath(posixpath.join(r.cwd, value))
            found = [f for f in found if fnmatch.fnmatch(posixpath.basename(f) if "name" in test[:6] else f, shown)]
    r.act("find", line, paths={"reads": words[:cut], "maybe": found if "-delete" in tests else []})
    for i, test in enumerate(tests):
        if test in ("-exec", "-execdir", "-ok"):
            since, run = len(r.acts), tests[i + 1 : next((j for j in range(i, len(tests)) if tests[j] in (";", "+")), len(tests))]
            simple(r, [p for w in run for p in ([w.replace("{}", f) for f in (found if r.world.files else [U])] if "{}" in w else [w])])
            for a in r.acts[since:]:
                a.paths["maybe"] = a.of("writes", "deletes", "maybe")
                a.paths.pop("writes", None), a.paths.pop("deletes", None)
    return "\n".join(found) or U


def tabled(r: Reader, name: str, words: list[str], line: str, stdin: str, where: str) -> str:
    """A program of programs.toml, or one that is not known there. `where`: the folder it runs in."""
    row = PROGRAMS.get(name, {})
    flags, given = options(words, row.get("values", "$"))
    kept, r.cwd = r.cwd, r.paths(where)[0]
    inert = "when" in row and not any(re.fullmatch(row["when"], f + v) for f, v in flags)
    positional = ["", *given] if "script" in row and any(re.fullmatch(row["script"], f) for f, _ in flags) else given
    kinds = [k for k in ("reads", "writes", "deletes") if k in row and not (inert and k == "writes")]
    found: dict[str, list[str]] = {k: positional[slice(*row[k])] for k in kinds}
    for flag, value in flags:
        for pattern, kind in row.get("options", {}).items():
            if value and re.fullmatch(pattern, flag):
                found[kind] = [*found.get(kind, []), value + "/**" if kind == "maybe" else value]
    sources, target = given[:-1], given[-1] if given else ""
    text, unknown, link = line + stdin if row.get("code") else stdin if name == "tee" else "", "", ("", "")
    if "into" in row and sources:  # a folder as the last argument takes files by their names
        if target.endswith("/") or r.paths(target)[0] == r.cwd or r.paths(target + "/**")[0] in (r.world.files or ()):
            found["writes"] = [posixpath.join(target, posixpath.basename(s if name == "rsync" else s.rstrip("/"))) for s in sources]
        if row["into"] == "link":
            link = r.paths(found["writes"][-1])[0], sources[0] if any("s" in f for f, _ in flags) else r.paths(sources[0])[0]
    elif name in ("patch", "git apply", "git am"):
        files = [v for f, v in flags if f in ("-i", "--input")] or (given if name != "patch" else [])
        text = "\n".join(r.world.texts.get(r.paths(f)[0], U) for f in files) if files else stdin
        found["writes"] = [p for p in PATCHED.findall(text) if p != "/dev/null"] + found.get("writes", [])
        unknown = "what a patch changes" if U in text or not text else ""
    elif name in ("git checkout", "git restore"):  # with a revision other than HEAD the paths are written
        files = words[words.index("--") + 1 :] if "--" in words else given[name == "git checkout" :]
        source = next((v for f, v in flags if f in ("-s", "--source")), given[0] if given and name == "git checkout" else "")
        if r.world.files and {r.paths(source)[0]} & (r.world.files | r.world.folders):  # no revision but a path
            source, files = "", []
        if source not in ("", "HEAD", "@", *files):
            found["writes" if files and files != ["."] else "maybe"] = files
    elif row.get("code") and not found.get("writes") and not row.get("when"):
        unknown = f"what {name} code does" if len(flags) else ""
    act = r.act(name, line, text, unknown, found)
    r.cwd = kept
    if link[0]:
        r.world.links[link[0]] = link[1]
    if name == "tee":
        r.world.texts |= dict.fromkeys(act.of("writes"), stdin)
    if name == "cat" and act.of("reads"):
        return "".join(r.world.texts.get(p, U) for p in act.of("reads"))
    return stdin if name in ("cat", "tee") else U
