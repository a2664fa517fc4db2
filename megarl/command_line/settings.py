"""The settings of a recipe as a list, for the pages of `--help` and the site."""

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
    """One key of a recipe, or a section of keys, as `--help` lists it: its name, type, default and
    meaning. Made by `settings`.
    """

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
        """The values that the setting may have, in words, such as "whole number from 1 to 4096"."""
        return _values(self.kind)

    @property
    def choices(self) -> list[str]:
        """The values that the setting may have, as YAML writes them, if there is a list of them (a
        truth value, or fixed names); otherwise empty.
        """
        return [as_yaml(value) for value in _choices(self.kind)]


def settings(kind: type[Config], prefix: str = "", made: Any = None) -> Iterator[Setting]:
    """Iterate over the settings of configuration class `kind`, each as a `Setting` (name, type,
    default, meaning), in their order, each section before its keys, all levels deep.

    Args:
        kind: a configuration class.
        prefix: dotted path of the class in the recipe, with a dot at the end; ""
            for the whole recipe.
        made: an object of the class with the defaults; None for those that the class declares.
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
    """{field: its docstring, the text below its declaration, on one line} of a configuration class
    and its base classes. Read from the source code, since Python keeps no docstrings of fields.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[: kind.__mro__.index(Config)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(said))),
                ):
                    found[name] = " ".join(said.split())
    return found


def as_yaml(value: Any) -> str:
    """A value (number, text, truth value, None, tuple or dict) as a recipe writes it in YAML, on
    one line.
    """
    if isinstance(value, tuple):
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
        if any(isinstance(mark, IsPath) for mark in inner[1:]):
            return " | ".join(map(as_yaml, [*_choices(kind), FILE])) if _choices(kind) else "path"
        return f"{zero}{_values(inner[0])}{said}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_values, sorted(inner, key=lambda one: one is not type(None))))
    if origin in (tuple, dict):
        return f"list of {_values(inner[0])}" if origin is tuple else f"NAME: {_values(inner[1])}"
    if choices := _choices(kind):
        return " | ".join(map(as_yaml, choices))
    return {int: "whole number", float: "number", str: "text"}.get(kind, "null")


def _choices(kind: Any) -> list[Any]:
    """The values of a truth value or a `Literal`, also of one that may be null; of a setting that
    may name a file's function, the names of the house.
    """
    found = []
    if typing.get_origin(kind) is typing.Annotated:
        kind, *marks = typing.get_args(kind)
        found = [mark.names for mark in marks if isinstance(mark, IsPath)]
    found += [[True, False] if kind is bool else []]
    if typing.get_origin(kind) is typing.Literal:
        found = [list(typing.get_args(kind))]
    elif type(None) in typing.get_args(kind):
        found = [_choices(one) for one in typing.get_args(kind)]
    return [value for values in found for value in values]
