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
"""Data: a list of dicts, a `datasets.Dataset`, or anything else that yields a dict for each row."""
INPUTS = "inputs"
"""Folder in the run folder with what the caller of `Trainer` has given as Python objects."""
BY_VALUE = """# Written by megarl.Trainer: its arguments {names}, functions by value.
import pickle
import sys

sys.path += [path for path in {paths!r} if path not in sys.path]
({names},) = pickle.loads({pickled!r})
"""


class GivenObjects:
    """What the caller of `Trainer` gives as Python objects: named in the settings of the recipe,
    and written to files of the run folder that are named by their content. So a file never changes,
    and a resumed run knows by the name whether it has the same one.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        """`tree`: the settings of the recipe as nested dicts, which this object changes."""
        self._tree, self._files = tree, dict[Path, bytes]()
        self.keys = set[str]()
        """The dotted settings that name what was given."""
        folder = str(tree.get("folder", ""))
        with contextlib.suppress(ValueError):  # which reading the recipe tells with its key
            folder = recipe_paths.expanded(folder)
        self._folder = Path(folder).absolute() / INPUTS

    def functions(self, given: dict[str, Callable[..., Any] | None], keys: dict[str, str]) -> None:
        """Set settings to functions that run in one process, where those that are copied share
        their globals. `given`: {argument of `Trainer`: function, or None to leave the setting};
        `keys`: {argument: key of the setting}.
        """
        copied: dict[str, Callable[..., Any]] = {}
        for name, function in given.items():
            if function is None:
                continue
            said = f"{name} is {shortened(repr(function))}, which is no function"
            require(callable(function), f"{said}; set {keys[name]} for a name")
            self.keys.add(keys[name])
            if found := _importable(function):
                put(self._tree, keys[name].split("."), found)
            else:
                copied[name] = function
        if copied:
            names, pickled = ", ".join(copied), _pickled(copied)
            content = BY_VALUE.format(names=names, paths=_folders(), pickled=pickled)
            file = self._add("-".join([*copied, "{}.py"]), content.encode())
            for name in copied:
                put(self._tree, keys[name].split("."), f"{file}:{name}")

    def rows(self, name: str, given: Rows | None, key: str) -> None:
        """Set the setting `key` to a file of rows, the argument `name` of `Trainer`; None: leave
        it.
        """
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
        """Write the files that are not there. Raises `ValueError` if that is not possible."""
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
    """`path/to/file.py:name`, under which other processes find a function that stands at the top of
    a file of its own; "" for any other: of `__main__`, of a package, inside of another function.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    file, name = getattr(module, "__file__", None) or "", getattr(function, "__qualname__", "")
    # A file of a package may import its neighbours by a dot, which needs the package.
    is_alone = module is not sys.modules["__main__"] and getattr(module, "__package__", None) == ""
    is_there = name.isidentifier() and getattr(module, name, None) is function
    path = os.path.abspath(file)
    return f"{path}:{name}" if is_alone and is_there and file.endswith(".py") else ""


def _pickled(functions: dict[str, Callable[..., Any]]) -> bytes:
    """cloudpickle's bytes of the list of `functions`. Raises `ValueError` if that is impossible."""
    import cloudpickle

    try:
        return cloudpickle.dumps([*functions.values()])
    except Exception as error:
        said = shortened(f"{type(error).__name__}: {error}", 300)
        found = ", ".join(getattr(one, "__qualname__", str(one)) for one in functions.values())
        raise ValueError(
            f"{', '.join(functions)}: {found} cannot be sent to the processes of a run ({said});"
            " make what it uses inside of it, or import it from a .py file"
        ) from None


def _folders() -> list[str]:
    """The folders from which this process imports, as absolute paths."""
    return [os.path.abspath(path) for path in sys.path]


def _json_line(row: Any, name: str) -> bytes:
    """A row of data as a line of JSON; `name` is what messages call it."""
    fix = "give a list of dicts of texts, numbers and lists"
    require(isinstance(row, Mapping), f"{name} is {type(row).__name__}, not a dict; {fix}")
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON ({error}); {fix}") from None
