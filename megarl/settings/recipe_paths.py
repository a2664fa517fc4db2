"""Paths in a recipe: `~` and `$VARIABLE` are expanded, and a relative path that does not exist in
the working folder is looked for in the recipe's folder.

    source: PathText = ""      reads "$DATA/a.jsonl" of a recipe as "/d/a.jsonl"
"""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ValidationInfo
from pydantic_core import core_schema

from megarl.settings.schema import FILE, is_own, refused, shortened
from megarl.system.files import RECIPES

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
LONGEST_PATH, LONGEST_NAME = 4095, 255
"""Limits of Linux in bytes."""


@dataclass
class Beside:
    """The folder of the recipe that is being read: pydantic's validation context."""

    folder: Path | None
    """None: paths are looked for in the working folder only."""
    paths: list[tuple[str | None, str, str]] = field(default_factory=list)
    """(name of the setting without its sections, path as it is used, what to tell the user) of each
    path that was found in the recipe's folder."""


@dataclass(frozen=True, slots=True)
class IsPath:
    """Marks a setting that names a file, a folder or code; its text is expanded and checked when a
    recipe is read.
    """

    use: Literal["read", "write", "code"] = "read"
    """`read`: looked for in the recipe's folder too. `write`: always in the working folder. `code`:
    like `read` where it ends in .py."""
    names: tuple[str, ...] = ()
    """Of `code`: the built-in names, beside which only `path/to/file.py:function` is allowed;
    empty: any."""
    what: Literal["function", "Class"] = "function"
    """Of `code`: what the user's file must have."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.with_info_after_validator_function(self.read, handler(source))

    def read(self, text: str, info: ValidationInfo) -> str:
        """The path that is used: expanded, and joined with the recipe's folder if it is only there.
        Raises pydantic's error for a text that is too long, has an unknown variable or user, or for
        code is no allowed name.
        """
        if "\0" in text:
            raise refused(f"is {text!r}, which holds the character NUL; remove it")
        longest = max(len(name.encode()) for name in text.split("/"))
        if len(text.encode()) > LONGEST_PATH:
            raise refused(
                f"has {len(text.encode()):,} bytes, too many for a path; set a shorter one"
            )
        if longest > LONGEST_NAME:
            raise refused(
                f"holds a name of {longest} bytes, longer than a file's; set a shorter one"
            )
        if self.names and not is_own(text):
            if text in self.names:
                return text
            known = ", ".join(filter(None, self.names))
            raise refused(
                f"is '{shortened(text)}'; set it to one of {known}, or to"
                f" {FILE.replace('function', self.what)}"
            )
        beside = info.context
        if not isinstance(beside, Beside):
            return text
        path = expanded(text)
        head, colon, function = path.rpartition(":")
        file, rest = (head, colon + function) if head.endswith(".py") else (path, "")
        is_read = self.use == "read" or (self.use == "code" and file.endswith(".py"))
        if not (file and is_read and beside.folder) or _is_there(file):
            return path
        beside_recipe = os.path.normpath(beside.folder / file)
        if not _is_there(beside_recipe):
            return path
        message = f"{path} is not in the working folder; {beside_recipe}{rest} is taken"
        beside.paths.append((info.field_name, beside_recipe + rest, message))
        return beside_recipe + rest


PathText = Annotated[str, IsPath()]
"""A file or folder that is read; also a hub name."""
OutputText = Annotated[str, IsPath("write")]
"""A folder that is written."""
CodeText = Annotated[str, IsPath("code")]
"""Code: `file.py:function`, an address, or a built-in name."""


def expanded(path: str) -> str:
    """`path` with `~`, `~user`, `$VARIABLE` and `${VARIABLE}` replaced; addresses (`http://...`)
    stay. Raises `ValueError`, for pydantic, for an unset variable or unknown user.
    """
    if "://" in path:
        return path

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            raise refused(f"is '{path}', but the variable {name} is not set; export {name}")
        return os.environ[name]

    result = os.path.expanduser(VARIABLE.sub(value, path))
    if result.startswith("~"):
        raise refused(f"is '{path}', which begins with no user's name; write ./{result}")
    return result


def recipe_path(file: str | Path, say: Callable[[str], object] = str) -> Path:
    """The path of the recipe `file`. A single word that the working folder has not is a recipe in
    `RECIPES`, which `say` is told. The path may not exist. Raises `ValueError` as `expanded` does.
    """
    path = expanded(str(file))
    ours = RECIPES / f"{path}.yaml"
    if "/" in path or os.path.lexists(path) or not os.path.isfile(ours):
        return Path(path)
    say(f"recipe {file}: {ours} is taken")
    return ours


def typed(word: str) -> str:
    """A word of a command line with the home folder in place of `~` at its beginning or behind
    `--option=`, where a shell does not expand it.
    """
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    is_home = value == "~" or value.startswith("~/")
    return name + equals + (os.path.expanduser(value) if is_home else value)


def _is_there(path: str) -> bool:
    return os.path.lexists(path) or bool(glob.has_magic(path) and glob.glob(path))
