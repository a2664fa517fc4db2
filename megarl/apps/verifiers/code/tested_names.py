"""Which names in tests that are Python statements belong to the tested program.

A program answers for every name that is its own. If it could answer for a helper that the tests
call and nobody imports, such as `isclose`, it would judge itself.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import re
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DECLARED = ("entry_point", "fn_name", "func_name")
"""Columns of a row that name functions of the program."""
REFERENCE = "code"
"""Column with a right program, as MBPP has it: what it defines, a program may define."""


@dataclass
class NamesOfTests:
    """Names that tests use and do not define."""

    program: list[str] = field(default_factory=list)
    """Of the program."""
    modules: list[str] = field(default_factory=list)
    """Of Python's library, of which only attributes are used, as `math` in `math.pi`."""


def names_of_tests(
    tests: Sequence[str], setup: str, row: Mapping[str, Any], own: Sequence[str] = ()
) -> NamesOfTests:
    """The names that `tests` and `setup`, texts of Python statements, use and do not define. `own`:
    functions of the program besides those that the columns `DECLARED` and `REFERENCE` of `row`
    name; without any, the only name that nothing defines is the program's. Raises `ValueError` if
    it is not clear which names are the program's.
    """
    texts = [text for text in map(_parsable, (setup, *tests)) if text]
    tables = [symtable.symtable(text, "tests", "exec") for text in texts]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    defined = {name for table in tables for name in _defined(table)} | _starred(nodes)
    unknown = {name for table in tables for name in _read(table)} - defined - set(dir(builtins))
    named = {id(node): node.id for node in nodes if isinstance(node, ast.Name)}
    of_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    owners = {named[key] for key in of_attributes & named.keys()} & unknown
    of_library = owners & sys.stdlib_module_names
    without = owners - of_library - {named[key] for key in named.keys() - of_attributes}
    early = set[str]()
    if _parsable(setup):
        early = {item.get_name() for item in tables[0].get_symbols() if item.is_referenced()}
        early = (early & unknown) - of_library - without
    unknown -= of_library | without | early
    known = {*own, *(word for name in DECLARED for word in _words(row.get(name)))}
    known |= _top_names(row.get(REFERENCE)) & unknown
    objects = set() if known else _arguments(nodes, unknown)
    unclear = unknown - known if known else unknown - objects
    if unclear and (known or len(unclear) > 1):
        raise ValueError(_what(sorted(unclear), sorted(known)))
    program = known & unknown or unknown or known & set(dir(builtins))
    return NamesOfTests([*own, *sorted(program - set(own))], sorted(of_library))


def _what(unclear: list[str], known: list[str]) -> str:
    names = ", ".join(unclear)
    if known:
        return (
            f"its tests use {names}, which nothing defines or imports and which is not the tested"
            f" {', '.join(known)}: a program could answer for it; define or import it beside the"
            " tests, or add it to column entry_point if the program has to define it"
        )
    return (
        f"its tests use {names}, and nothing says which of them the program has to define: it could"
        " answer for the others; list those of the program in column entry_point, and define or"
        " import the others beside the tests"
    )


def _parsable(text: str) -> str:
    """`text`, if it needs it with a body for its last function; "" if it is no Python."""
    for body in ("", "\n    pass\n"):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            symtable.symtable(text + body, "tests", "exec")
            return text + body
    return ""


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for below in table.get_children():
        yield from _tables(below)


def _defined(table: symtable.SymbolTable) -> Iterator[str]:
    """Global names that a module defines, also in functions."""
    for scope in _tables(table):
        for symbol in scope.get_symbols():
            is_global = scope is table or symbol.is_declared_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                yield symbol.get_name()


def _read(table: symtable.SymbolTable) -> Iterator[str]:
    """Global names that a module uses."""
    for scope in _tables(table):
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (scope is table or symbol.is_global()):
                yield symbol.get_name()


def _starred(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that `from ... import *` defines, of modules of Python's library."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            name = node.module or ""
            if name.partition(".")[0] in sys.stdlib_module_names:
                module = importlib.import_module(name)
                names |= set(getattr(module, "__all__", dir(module)))
    return names


def _words(value: Any) -> list[str]:
    """The names in a column: a text with one or several, or a list."""
    texts = value if isinstance(value, list) else [value]
    return [word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)]


def _top_names(source: Any) -> set[str]:
    """Names that a program defines; none if it is not Python."""
    text = _parsable(source) if isinstance(source, str) else ""
    return set(_defined(symtable.symtable(text, "code", "exec"))) if text else set()


def _arguments(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """Classes, by their capital, whose objects are only handed to one other of `names`, as `Pair`
    in `f([Pair(1, 2)])`: they decide nothing.
    """
    classes = {name for name in names if name[0].isupper()}
    within = set[int]()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in names - classes:
            parts = [*call.args, *(item.value for item in call.keywords)]
            within |= {id(node) for tree in parts for node in ast.walk(tree)}
    outside = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in within}
    return classes - outside
