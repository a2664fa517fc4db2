"""What a caller of `megarl.Trainer` gives as Python objects, as files of the run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.settings import recipe_paths
from megarl.settings.recipe_file import put
from megarl.settings.schema import require, shortened
from megarl.system.files import new_file

Rows = Iterable[Mapping[str, Any]]
"""A list of dicts, a `datasets.Dataset`, or anything else that yields dicts."""
INPUTS = "inputs"
"""Folder in the run folder."""
BY_VALUE = """# Written by megarl.Trainer: its arguments {names}, functions by value.
import pickle
import sys

sys.path += [path for path in {paths!r} if path not in sys.path]
({names},) = pickle.loads({pickled!r})
"""


class GivenObjects:
    """Names Python objects in the recipe's settings, and writes them to files named by their
    content: a file never changes, and a resumed run finds the same one.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        """`tree`: the recipe's settings, which this object changes."""
        self._tree, self._files = tree, dict[Path, bytes]()
        self.keys = set[str]()
        """Dotted settings that name what was given."""
        folder = str(tree.get("folder", ""))
        with contextlib.suppress(ValueError):  # which reading the recipe tells with its key
            folder = recipe_paths.expanded(folder)
        self._folder = Path(folder).absolute() / INPUTS

    def functions(self, given: dict[str, Callable[..., Any] | None], keys: dict[str, str]) -> None:
        """`given`: {argument of `Trainer`: function, or None to leave the setting}; `keys`:
        {argument: setting}. Copied functions share their globals.
        """
        copied: dict[str, Callable[..., Any]] = {}
        for name, function in given.items():
            if function is None:
                continue
            problem = f"{name} is {shortened(repr(function))}, which is no function"
            require(callable(function), f"{problem}; set {keys[name]} for a name")
            self.keys.add(keys[name])
            if path := _importable(function):
                put(self._tree, keys[name].split("."), path)
            else:
                copied[name] = function
        if copied:
            names, pickled = ", ".join(copied), _pickled(copied)
            content = BY_VALUE.format(names=names, paths=_folders(), pickled=pickled)
            file = self._add("-".join([*copied, "{}.py"]), content.encode())
            for name in copied:
                put(self._tree, keys[name].split("."), f"{file}:{name}")

    def rows(self, name: str, given: Rows | None, key: str) -> None:
        """`name`: argument of `Trainer`; `key`: the setting."""
        if given is not None:
            lines = [_json_line(row, f"{name}[{n}]") for n, row in enumerate(given)]
            self.keys.add(key)
            put(self._tree, key.split("."), self._add(f"{name}-{{}}.jsonl", b"".join(lines)))

    def _add(self, name: str, content: bytes) -> str:
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        path = self._folder / name.format(digest)
        self._files[path] = content
        return str(path)

    def write(self) -> None:
        """Write the files that are missing. Raises `ValueError` if that is impossible."""
        try:
            for path, content in self._files.items():
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with new_file(path) as file:
                        os.fchmod(file.fileno(), 0o600)  # a function may use a password
                        file.write(content)
        except OSError as error:
            raise ValueError(
                f"{self._folder} cannot be written ({error.strerror}); set folder to a folder of"
                " your own"
            ) from None


def _importable(function: Any) -> str:
    """`path/to/file.py:name` of a function at the top of a file of its own; "" for any other: of
    `__main__`, of a package, inside of another function.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    file, name = getattr(module, "__file__", None) or "", getattr(function, "__qualname__", "")
    # A file of a package may import its neighbours by a dot, which needs the package.
    is_alone = module is not sys.modules["__main__"] and getattr(module, "__package__", None) == ""
    is_there = name.isidentifier() and getattr(module, name, None) is function
    path = os.path.abspath(file)
    return f"{path}:{name}" if is_alone and is_there and file.endswith(".py") else ""


def _pickled(functions: dict[str, Callable[..., Any]]) -> bytes:
    """Raises `ValueError` for what cloudpickle cannot take."""
    import cloudpickle

    try:
        return cloudpickle.dumps([*functions.values()])
    except Exception as error:
        reason = shortened(f"{type(error).__name__}: {error}", 300)
        names = ", ".join(getattr(f, "__qualname__", str(f)) for f in functions.values())
        raise ValueError(
            f"{', '.join(functions)}: {names} cannot be sent to the processes of a run ({reason});"
            " make what it uses inside of it, or import it from a .py file"
        ) from None


def _folders() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


def _json_line(row: Any, name: str) -> bytes:
    """`name`: of the row, in messages."""
    fix = "give a list of dicts of texts, numbers and lists"
    require(isinstance(row, Mapping), f"{name} is {type(row).__name__}, not a dict; {fix}")
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON ({error}); {fix}") from None
