"""The three kinds of tests, run from the first process of a sandbox.

    stdin     input of a program -> its standard output
    calls     arguments of a function -> its value, as JSON
    asserts   Python statements that call the program's functions -> whether they hold

Expected outputs and values never come here: the verifier compares outside. Asserts run in a process
of their own (the checker), which the program cannot read or write, and in which the program's
functions are stand-ins that ask the program's process.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import importlib
import json
import os
import symtable
import sys
import time
from collections.abc import Callable
from typing import Any

from megarl.apps.verifiers.code import sandbox_kernel as kernel
from megarl.apps.verifiers.code.program_server import decode, encode
from megarl.apps.verifiers.code.sandbox_programs import Programs, Running

PROGRAM = "program"
"""Name of the program's file in its folder."""
CLEANLY = 0
ENOUGH_BYTES = 2**24
"""Output of all tests of a job after which no further one is begun; the rest is another job's."""
ONE_LINE: Callable[[bytearray], bool] = lambda received: b"\n" in received  # noqa: E731


def run_job(programs: Programs, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the tests of a job until the first that fails by itself, or all of them with `go_on`.

    job: {"kind", "command", "program", "tests", "limit_s", "total_s", "go_on", "server"}, and for
    asserts {"setup", "names"}. Returns a dict for each test that was run, which are the first ones,
    with "status": "ok" with its "output" (base64) or "reply"; "failed" (exit code, exception or
    assertion); "time", "output" or "memory" (a limit). Fewer tests than given are run if time is
    over or there is much output.
    """
    until = time.monotonic() + job["total_s"]
    try:
        return KINDS[job["kind"]](programs, job, until)
    finally:
        programs.end_all()


def run_stdin(programs: Programs, job: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Run the program once for each input, in an empty folder."""
    results: list[dict[str, Any]] = []
    size = 0
    null = os.open(os.devnull, os.O_RDWR)
    for test in job["tests"]:
        if time.monotonic() >= until:
            break
        programs.fresh({PROGRAM: job["program"]})
        theirs_in, into = os.pipe()
        out, theirs_out = os.pipe()
        command = [*job["command"], os.path.join(programs.folder, PROGRAM)]
        process = programs.start(command, job["limit_s"], theirs_in, theirs_out, null)
        running = _connected(process, into, out, (theirs_in, theirs_out))
        running.waiting, running.closes = memoryview(test.encode("utf-8", "replace")), True
        status = programs.exchange(running, min(until, time.monotonic() + job["limit_s"]))
        if status == "ended":
            ended = os.waitid(os.P_PIDFD, running.handle, os.WEXITED)
            is_clean = ended is not None and (ended.si_code, ended.si_status) == (
                os.CLD_EXITED,
                CLEANLY,
            )
            status = "ok" if is_clean else "failed"
        result = {"status": status}
        if status == "ok":
            result["output"] = base64.b64encode(running.received).decode()
        running.close()
        results.append(result)
        size += len(running.received)
        if (status != "ok" and not job["go_on"]) or size > ENOUGH_BYTES:
            break
    return results


def run_calls(programs: Programs, job: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Call a function of the program with each list of arguments, in one process as long as that
    lives.
    """
    results: list[dict[str, Any]] = []
    running: Running | None = None
    size = 0
    for request in job["tests"]:
        if time.monotonic() >= until:
            break
        if running is None:
            programs.fresh({PROGRAM: job["program"]})
            theirs_in, into = os.pipe()
            out, theirs_out = os.pipe()
            process = _serve(programs, job, theirs_in, theirs_out)
            running = _connected(process, into, out, (theirs_in, theirs_out))
        running.received = bytearray()
        running.waiting = memoryview(literal(request))
        limit = min(until, time.monotonic() + job["limit_s"])
        status = programs.exchange(running, limit, ONE_LINE)
        result: dict[str, Any] = {"status": "failed" if status == "ended" else status}
        if status == "ok":
            result["reply"] = running.received.partition(b"\n")[0].decode("utf-8", "replace")
        else:
            running.close()
            running = None
        results.append(result)
        size += len(running.received) if running is not None else 0
        if (status != "ok" and not job["go_on"]) or size > ENOUGH_BYTES:
            break
    return results


def run_asserts(programs: Programs, job: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Run the statements of each test in a checker process beside the program's."""
    results: list[dict[str, Any]] = []
    null = os.open(os.devnull, os.O_RDWR)
    while len(results) < len(job["tests"]) and time.monotonic() < until:
        programs.fresh({PROGRAM: job["program"]})
        asked, ask = os.pipe()
        reply, replied = os.pipe()
        out, said = os.pipe()
        _serve(programs, job, asked, replied)
        tests = job["tests"][len(results) :]

        def check(tests: list[str] = tests) -> None:
            _check(tests, job["setup"], job["names"], job["program"])

        process = programs.start(check, job["total_s"], null, null, null, reply, ask, said)
        running = _connected(process, -1, out, (asked, ask, reply, replied, said))
        status = "ok"
        while status == "ok" and len(results) < len(job["tests"]):
            limit = min(until, time.monotonic() + job["limit_s"])
            status = programs.exchange(running, limit, ONE_LINE)
            line, _, running.received = running.received.partition(b"\n")
            said = json.loads(line) if status == "ok" else {"passed": False, "gone": False}
            passed, ended = said["passed"], "failed" if status in ("ok", "ended") else status
            if said["gone"]:
                status = "ended"
            results.append({"status": "ok" if passed else ended})
            if not (passed or job["go_on"]):
                running.close()
                return results
        running.close()
    return results


KINDS: dict[str, Callable[[Programs, dict[str, Any], float], list[dict[str, Any]]]] = {
    "stdin": run_stdin,
    "calls": run_calls,
    "asserts": run_asserts,
}


def literal(request: dict[str, Any]) -> bytes:
    """A request for `program_server.main`."""
    return ascii(request).encode() + b"\n"


def _connected(process: int, into: int, out: int, theirs: tuple[int, ...]) -> Running:
    """The program of the handle `process`, after closing the program's ends of its pipes."""
    for descriptor in theirs:
        os.close(descriptor)
    for descriptor in (into, out):
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
    return Running(process, into, out)


def _serve(programs: Programs, job: dict[str, Any], requests: int, replies: int) -> int:
    """Start the program as a server of its functions. Returns its handle."""
    null = os.open(os.devnull, os.O_RDWR)
    path = os.path.join(programs.folder, PROGRAM)
    command = [*job["server"], path]
    handle = programs.start(command, job["total_s"], null, null, null, requests, replies)
    os.close(null)
    return handle


class _Kept:
    """Stands for an object of the program that cannot travel; it can be handed back to it."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Program:
    """The checker's end of the conversation with the program's process."""

    def __init__(self, replies: int, requests: int) -> None:
        self._replies, self._requests = os.fdopen(replies, "rb"), os.fdopen(requests, "wb")
        self.gone = False
        """Whether the program's process has ended."""

    def function(self, name: str) -> Callable[..., Any]:
        """A stand-in for the program's function `name`."""

        def ask(*arguments: Any, **named: Any) -> Any:
            request = {
                "call": name,
                "args": [self._told(one) for one in arguments],
                "named": {key: self._told(one) for key, one in named.items()},
            }
            line = b""
            with contextlib.suppress(BrokenPipeError):
                self._requests.write(literal(request))
                self._requests.flush()
                line = self._replies.readline()
            if not line:
                self.gone = True
                raise RuntimeError("the program has ended")
            reply = json.loads(line)
            if "value" in reply:
                return decode(reply["value"], _Kept)
            kind = getattr(builtins, str(reply["raised"]), RuntimeError)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            if is_error and issubclass(kind, StopIteration):
                kind = RuntimeError  # the other would end a `map` of the tests early
            raise (kind if is_error else RuntimeError)(reply["text"])

        ask.__name__ = name
        return ask

    def _told(self, value: Any) -> Any:
        if isinstance(value, _Kept):
            return {"t": "kept", "v": value.index}
        kept: list[Any] = []
        made = encode(value, kept)
        if not kept:
            return made
        if isinstance(value, list | tuple) and all(isinstance(one, _Kept) for one in kept):
            inner = [self._told(one) for one in value]
            return inner if isinstance(value, list) else {"t": "tuple", "v": inner}
        raise TypeError(f"a value of type {type(kept[0]).__name__} cannot be handed to a program")


def _check(tests: list[str], setup: str, names: list[str], text: str) -> None:
    """Run tests in this process, the checker, and write a line for each to descriptor 5.

    `setup` is run first; `names`, and names that the tests use and nobody defines, are functions of
    the program, or modules of Python's library where the tests use their attributes. So is a
    builtin that `_replaced` names. `text`: the program, which is only read.
    """
    kernel.prctl(kernel.SET_DUMPABLE, 0)  # the program may not open this process's memory
    program = _Program(3, 4)
    namespace: dict[str, Any] = {"__name__": "tests"}
    _prepare(setup, namespace)
    namespace |= {name: program.function(name) for name in names}
    if names:
        namespace["candidate"] = namespace[names[0]]
    own = {*names, "candidate"} if names else set[str]()
    defined = _defined(text)
    with os.fdopen(5, "wb") as results:
        for test in tests:
            passed, replaced = True, ""
            try:
                unknown = _unknown(test, namespace)
                modules = unknown & with_attributes(test) & sys.stdlib_module_names
                namespace |= {name: importlib.import_module(name) for name in modules}
                unknown -= modules
                own |= unknown
                namespace |= {name: program.function(name) for name in unknown}
                if replaced := _replaced(test, own, namespace, defined):
                    namespace[replaced] = program.function(replaced)
                exec(test, namespace)  # noqa: S102
            except BaseException:
                passed = False
            if replaced:  # other tests may call Python's own
                namespace.pop(replaced, None)
            results.write(json.dumps({"passed": passed, "gone": program.gone}).encode() + b"\n")
            results.flush()
            if program.gone:
                break


def _prepare(setup: str, namespace: dict[str, Any]) -> None:
    """Run what stands before the tests. A function without a body, whose body is the response, gets
    one.
    """
    try:
        compiled = compile(setup, "setup", "exec")
    except SyntaxError:
        compiled = compile(f"{setup}\n    pass\n", "setup", "exec")
    exec(compiled, namespace)  # noqa: S102 - code of the data set, in the sandbox


def _unknown(test: str, namespace: dict[str, Any]) -> set[str]:
    """Names that a test reads and that neither it, `namespace` nor Python defines."""
    read, made = set(), set()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    return {name for name in read - made if name not in namespace and not hasattr(builtins, name)}


def with_attributes(test: str) -> set[str]:
    """Names of which a test uses an attribute, as `math` in `math.pi`."""
    tree = list(ast.walk(ast.parse(test)))
    found = (node.value for node in tree if isinstance(node, ast.Attribute))
    return {value.id for value in found if isinstance(value, ast.Name)}


def without_module(tests: list[str], setup: str, names: list[str]) -> set[str]:
    """Names of which the tests use an attribute, and which only a program could define: a module
    that it imports, for example. Tests see functions of a program alone, so that none passes.
    """
    found, known = set[str](), dict.fromkeys([*names, "candidate"])
    for test in tests:
        for body in ("", "    pass\n"):  # the last function of a setup may lack one
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                unknown = _unknown(f"{setup}\n{body}{test}", known)
                found |= unknown & with_attributes(test)
                break
    return set() if "import *" in setup else found - sys.stdlib_module_names


def _defined(program: str) -> set[str]:
    """Names that a program defines for all of its text, or as methods of its class `Solution`."""
    try:
        table = symtable.symtable(program, PROGRAM, "exec")
    except Exception:  # it does not run either, or only in another version of Python
        return set()
    solutions = [one for one in table.get_children() if one.get_name() == "Solution"]
    symbols = [one for part in (table, *solutions) for one in part.get_symbols()]
    return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}


def _replaced(test: str, own: set[str], namespace: dict[str, Any], defined: set[str]) -> str:
    """The builtin that a test calls as a function of the program, as `sum` may be; "" if none.

    It is the only builtin that the test calls and the program defines. A test that uses `own`,
    other functions of the program, calls none: the program could give it another `all`.
    """
    tree = list(ast.walk(ast.parse(test)))
    if own & {node.id for node in tree if isinstance(node, ast.Name)}:
        return ""
    called = {
        node.func.id
        for node in tree
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    found = {name for name in called & defined if hasattr(builtins, name) and name not in namespace}
    return found.pop() if len(found) == 1 else ""
