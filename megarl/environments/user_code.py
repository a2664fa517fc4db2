"""A user's Python file that a recipe names: found by name, and run.

    "file.py:name" --split_name--> (path, name) --load_by_path--> the function

A worker process that replaces another reads the file again, as it is then.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.schema import require


def split_name(name: str, setting: str, others: str = "") -> tuple[Path, str]:
    """Split `path/to/file.py:attribute`, by which the recipe's setting `setting` names a user's
    function or class, into (path as it is written, attribute). Raises `ValueError` for a text of
    another form, or if there is no such file. `others`: what the message proposes before a file,
    such as "one of math, code, or to "; "" for nothing.
    """
    is_class = setting in ("environment.session", "rollout.engine.kind")
    kind = "Class" if is_class else "function"
    file, colon, attribute = name.rpartition(":")
    require(
        bool(colon) and file.endswith(".py") and attribute.isidentifier(),
        f"{setting} is '{name}'; set it to {others}path/to/file.py:{kind}",
    )
    path = Path(file)
    require(
        path.is_file(),
        f"{setting} is '{name}', but there is no file {path}; set the path of one there is",
    )
    return path, attribute


class OneOfEach:
    """An importer for `sys.meta_path` that raises `ImportError` for a module that two of `folders`,
    absolute paths, have, because a process can hold only one; other modules are left to the next
    importer.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python's import system."""
        specs = [PathFinder.find_spec(name, [folder]) for folder in self.folders if path is None]
        files = sorted({spec.origin for spec in specs if spec is not None and spec.origin})
        if len(files) > 1:
            raise ImportError(
                f"the module '{name}' is found in {' and in '.join(files)}, and a process keeps"
                " one of them; give each a name of its own"
            )
        return None


def prepare_imports(paths: Sequence[Path]) -> None:
    """Called once in a worker process: the files at `paths` can import the modules beside them, as
    a script may, but not one that lies beside two of them in different folders.
    """
    folders = list(dict.fromkeys(str(path.resolve().parent) for path in paths))
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if len(folders) > 1:
        sys.meta_path.insert(0, OneOfEach(folders))  # type: ignore[arg-type]


def load_by_path(
    path: Path,
    name: str,
    setting: str,
    kind: str,
    fits: Callable[[Any], bool],
) -> Any:
    """Import the Python file at `path` and return its attribute `name`. A process runs the same
    content once, so that all functions of a file share its globals. `kind`: "function" or "class";
    `fits`: whether a value of the file is one, for listing what the file has. Raises `ValueError`
    that names `setting`, the recipe's key, if the file does not import, lacks the attribute, or has
    another kind of value there.
    """
    where = str(path.resolve())
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; set another file") from None
    # Files of the same name in two folders are two modules.
    module_name = f"megarl_verifier_{path.stem}_{zlib.crc32(where.encode()):08x}"
    module = sys.modules.get(module_name)
    if module is None or module.__dict__.get("__megarl_content__") != content:
        spec = importlib.util.spec_from_file_location(module_name, where)
        assert spec is not None, path  # the suffix is .py
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__megarl_content__"] = content
        sys.modules[module_name] = module  # where dataclasses look up the types of their fields
        try:
            exec(compile(content, where, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        except BaseException as error:  # SystemExit too, which would end the process without a word
            del sys.modules[module_name]
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{setting}: {path} does not import: {said}; mend the file") from error
    found = getattr(module, name, None)
    public = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
    listed = ", ".join(public) or "(none)"
    require(
        found is not None,
        f"{setting}: {path} has no {kind} '{name}'; set one of: {listed}",
    )
    require(
        callable(found) if kind == "function" else fits(found),
        f"{setting}: '{name}' of {path} is {type(found).__name__}, not a {kind}; set"
        f" one of: {listed}",
    )
    return found


def check_function(found: Callable[..., Any], name: str, setting: str) -> None:
    """Raise `ValueError` if `found` is a class or a generator function, whose call returns no
    result, or a function that looks its arguments up in a cache. For the message: `name` is the
    function as the recipe writes it, `setting` the recipe's key.
    """
    what = ""
    if inspect.isclass(found):
        what = "is a class; write a function that makes an instance and calls it"
    elif inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        what = "is a generator function, since it has `yield`; return one result"
    elif hasattr(found, "cache_info"):
        what = (
            "is wrapped by functools.cache, whose keys cannot be prompts, lists or dicts; take the"
            " decorator off, and cache a function of texts and numbers that it calls"
        )
    require(not what, f"{setting}: {name} {what}")


def own_function(name: str, setting: str, others: str = "") -> Callable[..., Any]:
    """Load a user's function, given as `path/to/file.py:function`. For messages: `setting` is the
    recipe's key with that value, and `others` what to propose before a file, such as "one of math,
    code, or to ". Raises `ValueError` if the file or the function is not there, does not import, or
    is a generator function.
    """
    path, attribute = split_name(name, setting, others)
    found = load_by_path(path, attribute, setting, "function", inspect.isfunction)
    check_function(found, name, setting)
    return found


@functools.cache
def _loaded(name: str, setting: str, is_class: bool) -> Callable[..., Any]:
    """The function or class that `name` stands for; its file may import its neighbours meanwhile,
    as a script may.
    """
    path, attribute = split_name(name, setting)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        if is_class:
            return load_by_path(path, attribute, setting, "class", inspect.isclass)
        return own_function(name, setting)
    finally:
        sys.path.remove(folder)


def function_of(
    name: str, table: Mapping[str, Callable[..., Any]], setting: str, *, is_class: bool = False
) -> Callable[..., Any]:
    """The function, or with `is_class` the class, that the value `name` of a recipe's setting
    stands for: a built-in one, `table[name]`, or the user's own, if `name` has the form
    path/to/file.py:function. A process imports the user's file once. Raises `ValueError` that names
    `setting`, the recipe's key, if there is no such function or class.
    """
    return table[name] if name in table else _loaded(name, setting, is_class)
