"""The settings of a recipe as a list, for `--help` and the site."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.settings.recipe_file import is_section
from megarl.settings.recipe_paths import IsPath
from megarl.settings.schema import FILE, Config, Range


@dataclass(frozen=True)
class Setting:
    """One key of a recipe, or a section of keys."""

    key: str
    """As "rollout.engine.tensor"; NAME stands for a name of the user's, N for a number in a
    list.
    """
    annotation: Any
    """The type, as the configuration class declares it."""
    default: Any
    """As plain data; None for a section."""
    meaning: str
    """The docstring, on one line."""
    is_section: bool

    @property
    def values(self) -> str:
        """In words, such as "whole number from 1 to 4096"."""
        return _values(self.annotation)

    @property
    def choices(self) -> list[str]:
        """Truth values or fixed names as YAML writes them; else empty."""
        return [as_yaml(value) for value in _choices(self.annotation)]


def settings(kind: type[Config], prefix: str = "", made: Any = None) -> Iterator[Setting]:
    """The settings of a configuration class in order, each section before its keys. `prefix`: its
    dotted path, with a dot at the end; `made`: an object with the defaults.
    """
    for name, field in kind.model_fields.items():
        usual = None if field.is_required() else field.get_default(call_default_factory=True)
        default = usual if made is None else getattr(made, name)
        inner, key, meaning = field.annotation, f"{prefix}{name}", meanings(kind).get(name, "")
        for mark, origin, position in ((".NAME", dict, 1), (".N", tuple, 0)):
            if typing.get_origin(inner) is origin and is_section(typing.get_args(inner)[position]):
                inner, default, key = typing.get_args(inner)[position], None, f"{key}{mark}"
        if is_section(inner):
            meaning = meaning or " ".join((inner.__doc__ or "").split())
            yield Setting(key, inner, None, meaning, is_section=True)
            yield from settings(inner, f"{key}.", default)
        else:
            yield Setting(key, field.rebuild_annotation(), default, meaning, is_section=False)


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """{field: its docstring} of a configuration class and its bases, from the source: Python keeps
    none of fields.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(Config)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    texts[name] = " ".join(docstring.split())
    return texts


def as_yaml(value: Any) -> str:
    """A value as YAML has it, on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value) or "''"


def _values(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        ranges = [mark for mark in inner[1:] if isinstance(mark, Range) and mark.high < 8e307]
        bounds = "".join(f" from {mark.low:.10g} to {mark.high:.10g}" for mark in ranges)
        zero = "0, or " if any(mark.or_zero for mark in ranges) else ""
        if any(isinstance(mark, IsPath) for mark in inner[1:]):
            return " | ".join(map(as_yaml, [*_choices(kind), FILE])) if _choices(kind) else "path"
        return f"{zero}{_values(inner[0])}{bounds}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_values, sorted(inner, key=lambda member: member is not type(None))))
    if origin in (tuple, dict):
        return f"list of {_values(inner[0])}" if origin is tuple else f"NAME: {_values(inner[1])}"
    if choices := _choices(kind):
        return " | ".join(map(as_yaml, choices))
    return {int: "whole number", float: "number", str: "text"}.get(kind, "null")


def _choices(annotation: Any) -> list[Any]:
    """Of a truth value or `Literal`, perhaps null; of a setting that may name a file's function,
    the built-in names.
    """
    choices = []
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *marks = typing.get_args(annotation)
        choices = [mark.names for mark in marks if isinstance(mark, IsPath)]
    choices += [[True, False] if annotation is bool else []]
    if typing.get_origin(annotation) is typing.Literal:
        choices = [list(typing.get_args(annotation))]
    elif type(None) in typing.get_args(annotation):
        choices = [_choices(member) for member in typing.get_args(annotation)]
    return [value for values in choices for value in values]
