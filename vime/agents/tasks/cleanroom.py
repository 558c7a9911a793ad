# mypy: ignore-errors
"""The part of the grader that runs inside the sandbox: a supervisor, and the pytest process that it does not trust.

A file of its own (standard library only, Python >= 3.8), because it is copied next to the tree, never imported from it. Two roles:

*supervisor*: gets the job and a key on stdin, starts pytest with stdout and stderr in a log, takes records from a pipe, and prints one line:
the records with a MAC. It imports nothing of the repository and is not dumpable, so a test (same user) can neither read its memory nor
open its stdout through /proc.

*pytest*: the code under test shares this process with pytest, so everything it could reach is suspect. What stands against it:

- pytest, pluggy and all plugins of the environment are loaded before the repository is on sys.path: nothing in it can shadow them;
- results are signed in an audit hook. Python keeps audit hooks where no Python code can list, read or remove them, and tells them of
  gc.get_objects and the like *before* these answer: the hook reports that at once and a report cannot be taken back;
- a result counts only if every frame on the stack is code that was loaded before the repository (a caller from it, a thread of it or an
  exit handler is refused), and only while no function of pytest, pluggy, unittest and builtins has been replaced;
- a passed test, and each hook around it, must have run code that was loaded before the repository or stands in a file that the agent did not
  write;
- each test's result comes from the exception that left the test, not from the report made of it.

What is left to an attacker who knows all this: memory writes by native code, frames forged with a false file name. Source of the threats:
swebench issues 538, 601, 631.
"""

import contextlib
import ctypes
import dis
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import types

# of the environment; the standard library's (bdb, trace, threading) would trace with a function that it is given
TRACERS = ("hypothesis", "coverage")
# what would show or change the grader's state: told at once, unless it is a tracer that asks, and not on behalf of a file that the agent wrote
DENIED = ["gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys.settrace", "sys.setprofile"]
DENIED += ["sys.monitoring.register_callback", "ctypes.string_at", "ctypes.wstring_at", "ctypes.cdata", "code.__new__"]
GUARDED = ("_pytest", "pytest", "pluggy", "unittest", "builtins", "inspect", "types", "dis", "functools", "__main__")
# pytest's item of a function, pluggy's callers of hooks: bound once pytest runs
Function = Caller = Subset = Case = AsyncCase = run_case = run_async = None


def mac(key, text):
    return hashlib.blake2b(text.encode(), key=key, digest_size=32).hexdigest()


def supervise():
    """Run the job on stdin ({"key", "root", "paths", "files", "mine", "env", "timeout"}; mine: files that the agent wrote).
    Prints `MAC {"records": [[kind, status, id]], "fault", "log"}`."""
    job = json.loads(sys.stdin.buffer.read())
    host, key = bytes.fromhex(job.pop("key")), secrets.token_bytes(32)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/PID/{mem,fd} of this process are closed to its own user
    (given, give), (results, out) = os.pipe(), os.pipe()
    threading.Thread(target=lambda: open(give, "wb").write(key + json.dumps(job).encode())).start()  # noqa: SIM115
    raw, fault = [b""], None
    with tempfile.TemporaryFile() as log:
        cmd = [sys.executable, "-I", __file__, str(given), str(out), job["root"], *job["files"]]
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": (given, out), "start_new_session": True}
        child = subprocess.Popen(cmd, cwd=job["root"], env=job["env"], **how)
        os.close(given)
        os.close(out)
        reader = threading.Thread(target=lambda: raw.append(open(results, "rb").read()), daemon=True)  # noqa: SIM115
        reader.start()
        try:
            fault = f"the tests' process ended (code {child.wait(job['timeout'])}) before its last result"
        except subprocess.TimeoutExpired:
            fault = f"the tests took longer than {job['timeout']} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        reader.join(5)  # what has left the session may hold the pipe: then there is no result
        log.seek(max(0, os.fstat(log.fileno()).st_size - 6000))
        tail = log.read().decode(errors="replace")
    records = []
    for n, line in enumerate(raw[-1].decode(errors="replace").split("\n")[:-1]):
        sign, _, body = line.partition(" ")
        seq, kind, status, name = [*body.split(" "), "", "", "", ""][:4]
        if not secrets.compare_digest(sign.encode(), mac(key, body).encode()) or seq != str(n):
            fault = "the results' channel holds what the grader did not write"
            break
        records.append([kind, status, bytes.fromhex(name).decode()])
        if kind in ("fault", "end"):
            fault = records[-1][2] or None
            if fault:
                break
    text = json.dumps({"records": records, "fault": fault, "log": tail})
    os.write(1, (mac(host, text) + " " + text + "\n").encode())


def codes(code):
    """A code object and all that are compiled inside it."""
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from codes(c)


def functions(space, module):
    """(namespace, name, value, function or None) of what a module defines or holds, with the methods of its own classes."""
    for name, value in list(vars(space).items()):
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value.fget if isinstance(value, property) else value
        yield vars(space), name, value, inner if isinstance(inner, types.FunctionType) else None
        below = isinstance(value, type) and (not isinstance(space, type) or value.__qualname__.startswith(space.__qualname__ + "."))
        if below and value.__module__ == module:
            yield from functions(value, module)


def arm(given, out):
    """Read key and job, remember what is loaded by now, install the audit hook. Returns the job, and the name of the event that makes a record."""
    with open(given, "rb") as f:
        blob = f.read()
    key, job, mark, prefix = blob[:32], json.loads(blob[32:]), secrets.token_hex(16), (sys.prefix + os.sep, sys.base_prefix + os.sep)
    fixed, known, frame = [], {}, sys._getframe()
    for name, module in list(sys.modules.items()):
        for space, attr, value, f in functions(module, name) if isinstance(module, types.ModuleType) else ():
            if name.split(".")[0] in GUARDED and (callable(value) or hasattr(value, "__get__")):
                fixed.append((space, attr, value, f, f and f.__code__))
            known.update((id(c), c) for c in (codes(f.__code__) if f else ()))
    while frame:
        known[id(frame.f_code)] = frame.f_code
        frame = frame.f_back
    spaces = list({id(space): space for space, *_ in fixed}.values())
    # names of builtins and of this module can be shadowed: what the hook calls is bound here
    blake, write, getframe, getpid, ident, kind_of, text, prop = hashlib.blake2b, os.write, sys._getframe, os.getpid, id, type, str, property
    ours, tracers = (job["root"], *prefix), tuple(os.path.dirname(s.origin) + os.sep for s in map(importlib.util.find_spec, TRACERS) if s)
    denied, read, built, every, group, code_type = frozenset(DENIED), open, compile, codes, set, types.CodeType
    pid, seq, busy, held = os.getpid(), 0, False, {}
    current, at, signers = "", None, {id(Reporter.call.__code__), id(Reporter.pytest_runtest_call.__code__)}

    def send(kind, status, name):
        nonlocal seq
        body = f"{seq} {kind} {status} {name.encode('utf-8', 'backslashreplace').hex()}"
        seq += 1
        try:
            write(out, f"{blake(body.encode(), key=key, digest_size=32).hexdigest()} {body}\n".encode())
        except:  # noqa: E722 - the channel was closed, which the supervisor sees
            return

    def in_file(code):
        """Whether a code object is what its file holds: a file name alone can be made up."""
        path = code.co_filename
        if path not in held:
            with read(path, "rb") as source:
                held[path] = group(every(built(source.read(), path, "exec", dont_inherit=True)))
        return code in held[path]

    def wrong():
        for space in spaces:
            for name in space:
                if kind_of(name) is not text:  # to look a name up would call its __eq__
                    return "a name of the test runner was replaced"
        for space, name, value, f, code in fixed:
            now = space.get(name)
            if (now is not value and (kind_of(now) is not prop or f is None or now.fget is not f)) or (f is not None and f.__code__ is not code):
                return f"{name} of the test runner was replaced"
        return None

    def result(kind, status, name, made):
        """Send it. Returns why it can't be taken, or None."""
        nonlocal current, at
        if kind == "part":  # it can only make the test that runs fail: anyone may say it
            return send("part", "failed", current)
        frame = caller = getframe(2)
        if kind in ("begin", "call") and (ident(caller.f_code) not in signers or (kind == "call" and status == "passed" and caller is not at)):
            return f"a result was forged: {kind} of {name}"  # by what is no frame: a thread or a hook that is sys.audit itself
        at = caller if kind == "begin" else None
        while frame is not None:
            if ident(frame.f_code) not in known:
                return f"a result was forged from {frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        fault = wrong()
        if fault and kind in ("begin", "call"):
            fault, status = None, "foreign"  # a test may patch what it likes, but not pass by it, and it must clean up
        for code in made if status == "passed" else ():
            path = code.co_filename if kind_of(code) is code_type else ""
            if not path or (ident(code) not in known and (not path.startswith(ours) or path in job["mine"] or not in_file(code))):
                status = "foreign"
        if not fault:
            current = name
            send(kind, status, name)
        return fault

    def hook(event, args):
        # It must never raise, nor call what the repository could have made: either would hand this frame, and with it the key, to it.
        nonlocal busy
        if busy or getpid() != pid:
            return
        busy, fault = True, None
        try:
            if event == mark:
                fault = result(*args)
            elif event in denied:
                asks = frame = getframe(1)
                while frame is not None and frame.f_code.co_filename not in job["mine"]:
                    frame = frame.f_back
                if frame is not None or wrong() or not (asks.f_code.co_filename.startswith(tracers) and in_file(asks.f_code)):
                    fault = f"{event} was called from {(frame or asks).f_code.co_filename}"
            elif event == "open" and kind_of(args[0]) is text and args[0].startswith("/proc/") and args[0].endswith("/mem"):
                fault = f"{args[0]} was opened"
        except:  # noqa: E722
            fault = f"the grader could not look at {event}"
        if fault:
            send("fault", "-", fault)
        busy = False

    sys.addaudithook(hook)
    return job, mark


def status_of(item, exc):
    """How a phase ended, by the exception that left it; of a unittest case by the one that it kept."""
    kept = getattr(item, "_excinfo", None)
    exc = exc[1] if exc else kept[0].value if kept else None
    if exc is None:
        return "passed"
    if type(exc).__name__ in ("Skipped", "SkipTest"):
        return "skipped"
    return "xfailed" if type(exc).__name__ == "XFailed" or item.get_closest_marker("xfail") else "failed"


def reach(f, seen):
    """The code objects that calling `f` can run, of itself and of all functions that it wraps or encloses; "" for what can't be named."""
    f = getattr(f, "__func__", f)
    while type(f) is functools.partial:
        f = f.func
    if id(f) in seen:
        return
    seen.append(id(f))
    if type(f) is not types.FunctionType:
        yield ""
        return
    cells = [c.cell_contents for c in f.__closure__ or () if c != types.CellType()]  # an empty one has no contents
    made = "hypothesis" in f.__dict__ and f.__code__.co_freevars == ("f",) and not f.__code__.co_names and f.__code__.co_consts == (None,)
    if not (made and any("CALL" in i.opname for i in dis.get_instructions(f.__code__))):  # else hypothesis made it: it calls what it encloses
        yield f.__code__
    for g in [f.__dict__.get("__wrapped__"), getattr(f.__dict__.get("hypothesis"), "inner_test", None), *cells]:
        if type(g) in (types.FunctionType, types.MethodType, functools.partial):
            yield from reach(g, seen)


def test_code(f, name):
    """All that `f` runs, if one of it has the test's name."""
    found = tuple(reach(f, []))
    return found if any(c and c.co_name == name for c in found) else ("",)


def around(item):
    """The code objects of every hook there is, and of the item's kind; "" where the machinery was replaced on the instance."""
    impls = [i.function for h in vars(item.config.hook).values() for i in h.get_hookimpls()]
    hooks = [type(h) for h in vars(item.ihook).values() if callable(h)]
    odd = type(type(item)) is not type(Function) or any(callable(getattr(type(item), n, None)) for n in vars(item))
    odd = odd or not set(hooks) <= {Caller, Subset}
    impls += [f for c in type.mro(type(item)) for f in vars(c).values() if type(f) is types.FunctionType]  # a kind of item of the agent's own
    return tuple(f.__code__ if type(f) in (types.FunctionType, types.MethodType) else "" for f in impls) + ("",) * odd


class Reporter:
    """The pytest plugin. Each test gives three records, `begin`, `call` and `test`; it passed if all say so."""

    def __init__(self, given, out, wrap, first, unittest):
        self.given, self.out, self.ids, self.bad = given, out, {}, set()
        # globals, since these are looked after: a default or a closure's cell can be written to
        globals().update(AsyncCase=unittest.IsolatedAsyncioTestCase, Case=unittest.TestCase)
        globals().update(run_case=Case._callTestMethod, run_async=AsyncCase._callTestMethod)
        Case._callTestMethod = AsyncCase._callTestMethod = lambda own, method: self.call(method, own._testMethodName, {}, own)
        sub, part = unittest.TestCase.subTest, contextlib.contextmanager(self.part)
        unittest.TestCase.subTest = lambda own, *a, **k: part(sub(own, *a, **k))
        for name in ("load_initial_conftests", "runtest_setup", "runtest_call", "runtest_teardown", "runtest_protocol"):
            wrap(getattr(type(self), "pytest_" + name))
        first(type(self).pytest_pyfunc_call)

    def pytest_load_initial_conftests(self, early_config):
        pm = early_config.pluginmanager
        legacy = pm.getplugin("legacypath")  # it replaces methods of pytest, which must be done by the time that these are remembered
        if hasattr(legacy, "pytest_load_initial_conftests"):
            legacy.pytest_load_initial_conftests(early_config)
        call = "pytest_runtest_call"
        found = {"Caller": type(getattr(pm.hook, call)), "Subset": type(pm.subset_hook_caller(call, [self]))}
        globals().update(found, Function=sys.modules["pytest"].Function)
        job, self.mark = arm(self.given, self.out)
        sys.path[:0] = [os.path.join(job["root"], p) for p in job["paths"]]
        yield

    def note(self, item, outcome):
        """Remember what made a phase other than the call end badly, and that the setup did not."""
        status = status_of(item, outcome.excinfo)
        if status != "passed" or item.nodeid not in self.ids:
            self.ids[item.nodeid] = "error" if status == "failed" else status

    def pytest_runtest_setup(self, item):
        self.note(item, (yield))

    def call(self, f, name, given, case=None):
        """Run a test's function. Its two records are signed in this very frame: between here and the hook are lists and attributes that it can write."""
        item, self.item = self.item, None
        sys.audit(self.mark, "begin", "passed", item.nodeid, test_code(f, name))
        try:
            if case is None:
                f(**given)
            elif isinstance(case, AsyncCase):
                run_async(case, f)
            else:
                run_case(case, f)
        except BaseException as e:
            expected = getattr(f, "__unittest_expecting_failure__", False) or getattr(case, "__unittest_expecting_failure__", False)
            sys.audit(self.mark, "call", "xfailed" if expected else status_of(item, (type(e), e)), item.nodeid, ())
            raise
        own = [v for n, v in getattr(case, "__dict__", {}).items() if callable(getattr(Case, n, None))]  # assertions of the case's own
        odd = [getattr(getattr(v, "__func__", v), "__code__", "") for v in own] + [""] * (case is not None and type(case) is not item.cls)
        sys.audit(self.mark, "call", status_of(item, None), item.nodeid, (*around(item), *odd))

    def part(self, real):
        """A subTest, which may keep the exception to itself."""
        with real:
            try:
                yield
            except BaseException as e:
                if type(e).__name__ != "SkipTest":
                    sys.audit(self.mark, "part", "failed", "", ())
                raise

    def pytest_runtest_call(self, item):
        self.item, f = item, getattr(item, "obj", None)
        if not isinstance(item, Function) or (inspect.iscoroutinefunction(f) and not isinstance(item.instance, Case)):
            sys.audit(self.mark, "begin", "passed", item.nodeid, test_code(f, f.__name__) if isinstance(item, Function) else ("",))
        outcome = yield
        status = status_of(item, outcome.excinfo)
        if self.item is not None:
            sys.audit(self.mark, "call", status, item.nodeid, around(item))
        elif status == "failed":  # after the test's function: a tearDown, a plugin
            self.ids[item.nodeid] = status

    def pytest_pyfunc_call(self, pyfuncitem):
        """What pytest does, but the function that is looked at is the very one that is called."""
        f = pyfuncitem.obj
        if inspect.iscoroutinefunction(f):
            return None
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        self.call(f, pyfuncitem.nodeid.split("::")[-1].split("[")[0], given)
        return True

    def pytest_runtest_teardown(self, item):
        item.__dict__.pop("_excinfo", None)  # the call's, of a unittest case
        self.note(item, (yield))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.bad.add(report.nodeid)

    def pytest_runtest_protocol(self, item):
        yield
        status = self.ids.get(item.nodeid, "error")
        sys.audit(self.mark, "test", "failed" if status == "passed" and item.nodeid in self.bad else status, item.nodeid, ())

    def pytest_sessionfinish(self):
        sys.audit(self.mark, "end", "passed", "", ())


def main(given, out, root, *files):
    pytest = importlib.import_module("pytest")  # of the instance's environment, as all that is loaded here
    for name in ("unittest.mock", "_pytest.doctest"):  # before the repository can
        importlib.import_module(name)
    wrap, first = pytest.hookimpl(hookwrapper=True, tryfirst=True), pytest.hookimpl(tryfirst=True)
    os.set_inheritable(int(given), False)
    os.set_inheritable(int(out), False)
    args = ["--assert=plain", "--continue-on-collection-errors", "-q", "--rootdir", root, "-o", "addopts=", *files]
    args += [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "randomly", "rerunfailures")]
    sys.exit(pytest.main(args, plugins=[Reporter(int(given), int(out), wrap, first, sys.modules["unittest"])]))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else supervise()
