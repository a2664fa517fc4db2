"""Paths of a recipe: `~` and `$VARIABLE` are expanded, and a relative path that is not where the
command runs is looked for beside the recipe.

    {"prompts": {"source": "$DATA/a.jsonl"}} --with_paths--> {"prompts": {"source": "/d/a.jsonl"}}
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from megarl.schema import IsPath

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


Say = Callable[[str], object]
"""Tells the user a line."""


def with_paths(tree: Any, kind: Any, beside: Path | None, say: Say) -> Any:
    """The tree of a recipe of configuration class `kind`, with its paths as they are used.
    `beside`: folder of the recipe; None: relative paths are only those of the working folder.
    `say` is told which paths were found beside the recipe.

    Folders that a run writes are always those of the working folder. Raises `ValueError` that names
    the setting of an unset variable.
    """

    def place(text: str, mark: IsPath, key: str) -> str:
        try:
            found = expanded(text)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
        other = _beside(found, mark, beside) if beside is not None else found
        if other != found:
            say(f"{key}: {found} is not in the working folder; {other} is taken")
        return other

    return _walked(tree, kind, "", place)


def expanded(path: str) -> str:
    """`path` with `~`, `~user`, `$VARIABLE` and `${VARIABLE}` replaced; addresses (`http://...`)
    stay. Raises `ValueError` for a variable that is not set or empty, and for an unknown user.
    """
    if "://" in path:
        return path

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise ValueError(f"is '{path}', but the variable {name} is not set; export {name}")
        return os.environ[name]

    found = os.path.expanduser(VARIABLE.sub(value, path))
    if found.startswith("~"):
        raise ValueError(f"is '{path}', which begins with no user's name; write ./{found}")
    return found


def typed(word: str) -> str:
    """A word of a command line with the home folder in place of `~/` at its beginning or behind
    `--option=`, where shells leave it.
    """
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    is_home = value == "~" or value.startswith("~/")
    return name + equals + (os.path.expanduser(value) if is_home else value)


def _walked(node: Any, hint: Any, key: str, place: Callable[[str, IsPath, str], str]) -> Any:
    """`node` of a tree with `place(text, mark, key)` for every text that `hint`, the type of the
    setting `key`, marks as a path. What does not fit its type is left to the checks of the type.
    """
    if typing.get_origin(hint) is Annotated:
        inner, *marks = typing.get_args(hint)
        mark = next((one for one in marks if isinstance(one, IsPath)), None)
        if mark is None or not isinstance(node, str):
            return _walked(node, inner, key, place)
        return place(node, mark, key)
    parts = typing.get_args(hint)
    if isinstance(node, list) and typing.get_origin(hint) is tuple:
        return [_walked(item, parts[0], f"{key}[{n}]", place) for n, item in enumerate(node)]
    if isinstance(node, dict) and typing.get_origin(hint) is dict:
        return {
            _walked(name, parts[0], key, place): _walked(item, parts[1], f"{key}.{name}", place)
            for name, item in node.items()
        }
    if isinstance(node, dict) and dataclasses.is_dataclass(hint):
        inside, before = _hints(hint), f"{key}." if key else ""
        return {
            name: _walked(item, inside.get(name), f"{before}{name}", place)
            for name, item in node.items()
        }
    return node


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _beside(text: str, mark: IsPath, folder: Path) -> str:
    """A path as it is, or the one in `folder` if only that is there."""
    head, colon, function = text.rpartition(":")
    file, rest = (head, colon + function) if head.endswith(".py") else (text, "")
    other = os.path.normpath(folder / file)
    if not mark.is_looked_for(file) or _is_there(file) or not _is_there(other):
        return text
    return other + rest


def _is_there(path: str) -> bool:
    return os.path.lexists(path) or bool(glob.has_magic(path) and glob.glob(path))
