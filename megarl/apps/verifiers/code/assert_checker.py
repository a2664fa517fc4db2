"""Runs tests that are Python statements, in a process of their own, the checker.

The tested program can neither read nor write that process. In it the program's functions are
stand-ins that send each call to the program's process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import symtable
from collections.abc import Callable, Container
from typing import Any

from megarl.apps.verifiers.code.program_server import decode, encode
from megarl.environments.isolation import call_libc

SET_DUMPABLE = 4


class _Kept:
    """Stands for an object of the program that cannot travel; it can be handed back to it."""

    def __init__(self, index: int) -> None:
        self.index = index


def _index(value: Any) -> int:
    if isinstance(value, _Kept):
        return value.index
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed to a program")


class _Program:
    """The checker's end of the conversation with the program's process."""

    def __init__(self, replies: int, requests: int) -> None:
        self._replies, self._requests = os.fdopen(replies, "rb"), os.fdopen(requests, "wb")
        self.gone = False
        """Whether the program's process has ended."""

    def function(self, name: str) -> Callable[..., Any]:
        """Make a stand-in for the function `name` of the tested program: it sends each call to the
        program's process, blocks for the reply, and returns the value or raises the exception in
        it.
        """

        def ask(*arguments: Any, **named: Any) -> Any:
            request = {
                "call": name,
                "args": encode(list(arguments), _index),
                "named": {key: encode(value, _index) for key, value in named.items()},
            }
            line = b""
            with contextlib.suppress(BrokenPipeError):
                self._requests.write(json.dumps(request).encode() + b"\n")
                self._requests.flush()
                line = self._replies.readline()
            if not line:
                self.gone = True
                raise RuntimeError("the program has ended")
            reply = json.loads(line)
            if "value" in reply:
                return decode(reply["value"], _Kept)
            error = getattr(builtins, str(reply["raised"]), RuntimeError)
            if not (isinstance(error, type) and issubclass(error, Exception)):
                error = RuntimeError
            # A StopIteration would end a `map` of the tests early
            raise (RuntimeError if error is StopIteration else error)(reply["text"])

        ask.__name__ = name
        return ask


def check_asserts(
    tests: list[str], setup: str, names: list[str], modules: list[str], text: str
) -> None:
    """Run `tests`, texts of Python statements, in this process, the checker, and write a line of
    JSON for each, {"passed": bool, "gone": whether the program has ended}, to descriptor 5. Stops
    after a test in which the program has ended.

    The program runs in another process. Calls of its functions go there through descriptors 4
    (requests) and 3 (replies). `setup`: statements that run first. `names`: functions of the
    program; without any, a builtin, such as `sum`, that the program defines is one. `modules`: of
    Python's library, which are imported. `text`: the program, which is only parsed.
    """
    call_libc("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # the program may not open this process's memory
    program = _Program(3, 4)
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace |= {name: importlib.import_module(name) for name in modules}
    _prepare(setup, namespace)
    namespace |= {name: program.function(name) for name in names}
    with os.fdopen(5, "wb") as results:
        for test in tests:
            passed, replaced = True, ""
            try:
                replaced = "" if names else _replaced(test, namespace, text)
                if replaced:
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


def _replaced(test: str, defined: Container[str], program: str) -> str:
    """The builtin that a test calls as a function of the program, as `sum` may be; "" if none. It
    is the only builtin of those called that the program defines for all of its text, or as a method
    of its class `Solution`, and none of those `defined` by the tests.
    """
    try:
        table = symtable.symtable(program, "program", "exec")
    except Exception:  # it does not run either, or only in another version of Python
        return ""
    solutions = [child for child in table.get_children() if child.get_name() == "Solution"]
    symbols = [symbol for scope in (table, *solutions) for symbol in scope.get_symbols()]
    own = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    calls = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    called = {node.id for node in calls if isinstance(node, ast.Name) and node.id not in defined}
    names = [name for name in called & own if hasattr(builtins, name)]
    return names[0] if len(names) == 1 else ""
