"""A user's Python file that a recipe names: read once, and run from what was read, also by later
worker processes. So editing it during a run changes nothing.

    "file.py:name" --split_name--> (path, name)      sources --load_by_path--> the function
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megarl.settings.schema import require

Sources = dict[str, bytes]
"""{absolute path of a Python file: its content}"""
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
CLASSES = ("environment.session", "rollout.engine.kind", "training.sequence.block")
"""Settings that name a class; others name a function."""


def split_name(name: str, setting: str, others: str = "") -> tuple[Path, str]:
    """Split `path/to/file.py:attribute`, the value of the recipe's key `setting`. Raises
    `ValueError` for another form, or if there is no such file. `others`: what the message proposes
    before a file, such as "one of math, code, or to ".
    """
    form = "Class" if setting in CLASSES else "function"
    file, colon, attribute = name.rpartition(":")
    require(
        bool(colon) and file.endswith(".py") and attribute.isidentifier(),
        f"{setting} is '{name}'; set it to {others}path/to/file.py:{form}",
    )
    path = Path(file)
    require(
        path.is_file(),
        f"{setting} is '{name}', but there is no file {path}; set the path of one there is",
    )
    return path, attribute


def read_sources(paths: Sequence[Path]) -> Sources:
    """{absolute path: content}. Raises `ValueError` for a file that cannot be read."""
    sources: Sources = {}
    for path in paths:
        try:
            sources[str(path.resolve())] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; set another file") from None
    return sources


class UserFiles:
    """The Python files that a recipe names, with their content at the start of the run, which
    worker processes run.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises `ValueError` for a file that cannot be read."""
        self.sources = read_sources(files)
        self._knows_neighbours = self._said_changed = False
        self._warning = ""

    def current(self) -> Sources:
        """The content for a new process. A file that was edited or removed since gives one
        warning.
        """
        edited = [] if self._said_changed else list(filter(self._is_edited, self.sources))
        if edited:
            self._said_changed = True
            self.warn(
                f"{', '.join(edited)} changed after the run started; the run goes on with what it"
                " was then"
            )
        return self.sources

    def _is_edited(self, path: str) -> bool:
        try:
            return Path(path).read_bytes() != self.sources[path]
        except OSError:
            return True

    def loaded(self, imported: Sequence[str]) -> None:
        """Also keep the content of `imported`, files that the first process has imported from
        beside the user's; only the first call counts. Raises `ValueError` for a file that cannot be
        read.
        """
        if not self._knows_neighbours:
            self._knows_neighbours = True
            self.sources = read_sources([Path(file) for file in imported]) | self.sources

    def warn(self, warning: str) -> None:
        """Keep a warning for the next `take_warning`."""
        self._warning = "; ".join(filter(None, [self._warning, warning]))

    def take_warning(self) -> str:
        """The warnings since the last call, separated by semicolons."""
        warning, self._warning = self._warning, ""
        return warning


class _PinnedLoader(SourceFileLoader):
    """Imports a module from text that was read before; ignores file and bytecode cache."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self.content = content

    def get_data(self, path: str) -> bytes:
        return self.content

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.content, self.path, "exec", dont_inherit=True)


class PinnedFinder:
    """An importer for `sys.meta_path` of modules whose file is in `sources`. Importing a module
    that lies in two of `folders`, those of the user's files, raises `ImportError`: a process can
    hold only one.
    """

    def __init__(self, sources: Sources, folders: Sequence[str] = ()) -> None:
        self.sources, self.folders = sources, folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python's import system."""
        if path is None and len(self.folders) > 1:
            specs = [PathFinder.find_spec(name, [folder]) for folder in self.folders]
            files = sorted({spec.origin for spec in specs if spec is not None and spec.origin})
            if len(files) > 1:
                raise ImportError(
                    f"the module '{name}' is found in {' and in '.join(files)}, and a process keeps"
                    " one of them; give each a name of its own"
                )
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self.sources:
            return None
        spec.loader = _PinnedLoader(name, spec.origin, self.sources[spec.origin])
        return spec


def prepare_imports(paths: Sequence[Path], sources: Sources) -> None:
    """Let this worker process import the neighbours of the files at `paths`, and from `sources`
    what is there.
    """
    folders = list(dict.fromkeys(str(path.resolve().parent) for path in paths))
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    sys.meta_path.insert(0, PinnedFinder(sources, folders))  # type: ignore[arg-type]


def neighbours(paths: Sequence[Path]) -> list[str]:
    """Absolute paths, sorted, of the Python files that this process has imported from the folders
    of `paths` or below, without site-packages.
    """
    folders = {path.resolve().parent for path in paths}
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return sorted(
        file
        for file in files
        if file.endswith(".py") and "site-packages" not in file and folders & {*Path(file).parents}
    )


def load_by_path(path: Path, name: str, setting: str, sources: Sources | None = None) -> Any:
    """Import the Python file at `path`, once in a process, and return its function `name` (a class
    for a setting in `CLASSES`). `sources`: what to run in place of the file. Raises `ValueError`,
    which names the recipe's key `setting`, if the import fails or `name` is missing.
    """
    noun, fits = "function", inspect.isfunction
    if setting in CLASSES:
        noun, fits = "class", inspect.isclass
    where = str(path.resolve())
    held = sources if sources is not None and where in sources else read_sources([path])
    content = held[where]
    # Files of the same name in two folders are two modules.
    module_name = f"megarl_verifier_{path.stem}_{zlib.crc32(where.encode()):08x}"
    module = sys.modules.get(module_name)
    if module is None or getattr(module.__loader__, "content", None) != content:
        loader = _PinnedLoader(module_name, where, content)
        spec = importlib.util.spec_from_file_location(module_name, where, loader=loader)
        assert spec is not None, path  # the suffix is .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where dataclasses look up the types of their fields
        try:
            loader.exec_module(module)
        except BaseException as error:  # SystemExit too, which would end the process without a word
            del sys.modules[module_name]
            text = " ".join(described(error, [path]).split())
            raise ValueError(f"{setting}: {path} does not import: {text}; mend the file") from error
    target = getattr(module, name, None)
    public = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
    listed = ", ".join(public) or "(none)"
    require(target is not None, f"{setting}: {path} has no {noun} '{name}'; set one of: {listed}")
    require(
        callable(target) if noun == "function" else fits(target),
        f"{setting}: '{name}' of {path} is {type(target).__name__}, not a {noun}; set"
        f" one of: {listed}",
    )
    return target


def described(error: BaseException, files: Sequence[Path]) -> str:
    """An error as `Type (file, line): message`, with the innermost line of the user's code: in
    `files` or beside them, also of a cause. Reads no source: the memory may be full.
    """
    name, place, cause = type(error).__name__, "", error
    with suppress(BaseException):
        own = {str(path.resolve()) for path in files}
        folders = tuple(f"{os.path.dirname(path)}{os.sep}" for path in own)
        while cause is not None and not place:
            for frame, line in traceback.walk_tb(cause.__traceback__):
                path = frame.f_code.co_filename
                is_beside = path.startswith(folders) and not path.startswith(PACKAGE)
                if path in own or (is_beside and f"-packages{os.sep}" not in path):
                    place = f" ({os.path.basename(path)}, line {line})"
            cause = cause.__cause__
    with suppress(BaseException):
        return f"{name}{place}: {error}"
    return name


def check_function(function: Callable[..., Any], name: str, setting: str) -> None:
    """Raise `ValueError` if `function`, called `name`, is a class or a generator function, or looks
    its arguments up in a cache.
    """
    problem = ""
    if inspect.isclass(function):
        problem = "is a class; write a function that makes an instance and calls it"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        problem = "is a generator function, since it has `yield`; return one result"
    elif hasattr(function, "cache_info"):
        problem = (
            "is wrapped by functools.cache, whose keys cannot be prompts, lists or dicts; take the"
            " decorator off, and cache a function of texts and numbers that it calls"
        )
    require(not problem, f"{setting}: {name} {problem}")


def own_function(
    name: str, setting: str, others: str = "", sources: Sources | None = None
) -> Callable[..., Any]:
    """Load a user's function, or class where `setting` names one; raises as `split_name`,
    `load_by_path` and `check_function` do.
    """
    path, attribute = split_name(name, setting, others)
    function = load_by_path(path, attribute, setting, sources)
    if setting not in CLASSES:
        check_function(function, name, setting)
    return function


@functools.cache
def _loaded(name: str, setting: str) -> Callable[..., Any]:
    """What `name` stands for; its file may import its neighbours meanwhile."""
    folder = str(split_name(name, setting)[0].resolve().parent)
    sys.path.insert(0, folder)
    try:
        return own_function(name, setting)
    finally:
        sys.path.remove(folder)


def function_of(
    name: str, table: Mapping[str, Callable[..., Any]], setting: str
) -> Callable[..., Any]:
    """The function, or class, of a recipe's `setting`: `table[name]`, or the user's
    path/to/file.py:function. Raises `ValueError` that names `setting`.
    """
    return table[name] if name in table else _loaded(name, setting)
