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
import sys
from collections.abc import Callable, Container
from typing import Any

from megarl.apps.verifiers.code import sandbox_kernel as kernel
from megarl.apps.verifiers.code.program_server import decode, encode


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
                "named": {key: encode(one, _index) for key, one in named.items()},
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
            kind = getattr(builtins, str(reply["raised"]), RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            # A StopIteration would end a `map` of the tests early
            raise (RuntimeError if kind is StopIteration else kind)(reply["text"])

        ask.__name__ = name
        return ask


def check_asserts(tests: list[str], setup: str, names: list[str], text: str) -> None:
    """Run `tests`, texts of Python statements, in this process, the checker, and write a line of
    JSON for each, {"passed": bool, "gone": whether the program has ended}, to descriptor 5. Stops
    after a test in which the program has ended.

    The program runs in another process. Calls of its functions go there through descriptors 4
    (requests) and 3 (replies). `setup`: statements that run first. `names`: functions of the
    program. A name that a test uses and nothing defines is taken for a module of Python's library
    if the test uses an attribute of it, otherwise for a function of the program. A builtin, such as
    `sum`, that the program defines is also a function of the program. `text`: the program, which is
    only parsed.
    """
    kernel.prctl(kernel.SET_DUMPABLE, 0)  # the program may not open this process's memory
    program = _Program(3, 4)
    namespace: dict[str, Any] = {"__name__": "tests"}
    _prepare(setup, namespace)
    namespace |= {name: program.function(name) for name in names}
    own = set(names)
    if names:
        namespace["candidate"] = namespace[names[0]]
        own.add("candidate")
    with os.fdopen(5, "wb") as results:
        for test in tests:
            passed, replaced = True, ""
            try:
                read, made, owners, called = _names(test)
                unknown = _undefined(read - made, namespace)
                modules = unknown & owners & sys.stdlib_module_names
                namespace |= {name: importlib.import_module(name) for name in modules}
                own |= unknown - modules
                namespace |= {name: program.function(name) for name in unknown - modules}
                replaced = _replaced(read | made, called - namespace.keys(), own, text)
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


def _names(text: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """Names in statements: (those read, those made, those of which an attribute is used, as `math`
    in `math.pi`, those called).
    """
    read, made, owners, called = set[str](), set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name):
                (read if isinstance(node.ctx, ast.Load) else made).add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                made.add(name)
            case ast.alias():
                made.add((node.asname or node.name).partition(".")[0])
            case ast.Attribute(value=ast.Name(id=name)):
                owners.add(name)
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
            case _:
                pass
    return read, made, owners, called


def _undefined(names: set[str], known: Container[str]) -> set[str]:
    return {name for name in names if name not in known and not hasattr(builtins, name)}


def without_module(tests: list[str], setup: str, names: list[str]) -> set[str]:
    """Names of modules, such as `np`, that the tests need and do not have: the tests use an
    attribute of the name, neither the tests nor `setup` define it, and Python's library has no such
    module. Tests cannot use the program's own imports, so every program fails tests with such a
    name. `names`: functions of the program. Empty if nothing is missing.
    """
    found = set[str]()
    for test in tests:
        for body in ("", "    pass\n"):  # the last function of a setup may lack one
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                read, made, *_ = _names(f"{setup}\n{body}{test}")
                found |= _undefined(read - made, [*names, "candidate"]) & _names(test)[2]
                break
    return set() if "import *" in setup else found - sys.stdlib_module_names


def _replaced(names: set[str], called: set[str], own: set[str], program: str) -> str:
    """The builtin that a test calls as a function of the program, as `sum` may be; "" if none.

    It is the only builtin of those `called` that the program defines for all of its text, or as a
    method of its class `Solution`. A test among whose `names` are `own`, other functions of the
    program, calls none: the program could give it another `all`.
    """
    try:
        table = symtable.symtable(program, "program", "exec")
    except Exception:  # it does not run either, or only in another version of Python
        return ""
    solutions = [one for one in table.get_children() if one.get_name() == "Solution"]
    symbols = [one for part in (table, *solutions) for one in part.get_symbols()]
    defined = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    found = [name for name in called & defined if hasattr(builtins, name)]
    return found[0] if len(found) == 1 and not own & names else ""
