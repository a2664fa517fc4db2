"""The settings of a recipe as a list, for the pages of `--help` and for completion."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.schema import Range, as_plain


@dataclass(frozen=True)
class Setting:
    """A key of a recipe, or a section of keys."""

    key: str
    """Dotted path, as in "rollout.engine.tensor"; in a table of the user's own names NAME stands
    for the name, and in a list of sections N for the number."""
    kind: Any
    """The type, as the configuration class declares it."""
    default: Any
    """The value without the recipe, as plain data; None for a section."""
    meaning: str
    """The docstring, on one line."""
    is_section: bool

    @property
    def values(self) -> str:
        """The values that the setting may have, in words."""
        return _values(self.kind)

    @property
    def choices(self) -> list[str]:
        """The values as YAML writes them, if they are known; otherwise empty."""
        return [as_yaml(value) for value in _choices(self.kind)]


def settings(kind: Any, prefix: str = "", made: Any = None) -> Iterator[Setting]:
    """The settings of configuration class `kind` in their order, each section before its keys.

    Args:
        kind: a configuration class.
        prefix: dotted path of the class in the recipe, with a dot at the end.
        made: an object of the class with the defaults; None for those that the class declares.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = getattr(made, field.name) if made is not None else _default(field)
        inner, part, key = hints[field.name], default, f"{prefix}{field.name}"
        for mark, origin, position in ((".NAME", dict, 1), (".N", tuple, 0)):
            arguments = typing.get_args(inner)
            if typing.get_origin(inner) is origin and dataclasses.is_dataclass(arguments[position]):
                inner, part, key = arguments[position], None, f"{key}{mark}"
        if dataclasses.is_dataclass(inner):
            meaning = meanings(kind).get(field.name) or " ".join((inner.__doc__ or "").split())
            yield Setting(key, inner, None, meaning, is_section=True)
            yield from settings(inner, f"{key}.", part)
        else:
            meaning = meanings(kind).get(field.name, "")
            yield Setting(key, hints[field.name], as_plain(default), meaning, is_section=False)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """{field: the text below its declaration} of a class and those that it inherits from. Python
    keeps no docstrings of fields, so that these are read from the source.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        tree = _source(one.__module__)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        body = next((node.body for node in classes if node.name == one.__name__), [])
        for field, text in zip(body, body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(said))),
                ):
                    found[name] = " ".join(inspect.cleandoc(said).split())
    return found


@functools.cache
def _source(module: str) -> ast.Module:
    file = sys.modules[module].__file__
    assert file is not None, module
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def as_yaml(value: Any) -> str:
    """A plain value as a recipe writes it, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value) or "''"


def _values(kind: Any) -> str:
    """The values of a type, in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        ranges = [mark for mark in inner[1:] if isinstance(mark, Range) and mark.high < 8e307]
        said = "".join(f" from {one.low:.10g} to {one.high:.10g}" for one in ranges)
        zero = "0, or " if any(one.or_zero for one in ranges) else ""
        return f"{zero}{'path' if inner[0] is str else _values(inner[0])}{said}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_values, sorted(inner, key=lambda one: one is not type(None))))
    if origin in (tuple, dict):
        return f"list of {_values(inner[0])}" if origin is tuple else f"NAME: {_values(inner[1])}"
    if choices := _choices(kind):
        return " | ".join(map(as_yaml, choices))
    return {int: "whole number", float: "number", str: "text"}.get(kind, "null")


def _choices(kind: Any) -> list[Any]:
    """The values of a truth value or a `Literal`, also of one that may be null."""
    found = [[True, False] if kind is bool else []]
    if typing.get_origin(kind) is typing.Literal:
        found = [list(typing.get_args(kind))]
    elif type(None) in typing.get_args(kind):
        found = [_choices(one) for one in typing.get_args(kind)]
    return [value for values in found for value in values]
