"""A user's Python file that a recipe names: found by name, read once, and run from what was read.

    "file.py:name" --split_name--> (path, name)      sources --load_by_path--> the function

A worker process that replaces another runs the text that the first one ran: editing the file in the
middle of a run changes nothing, and a mistake in it ends nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megarl.settings.schema import require

Sources = dict[str, bytes]
"""{absolute path of a Python file: its content}"""


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


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read Python files. Returns {absolute path: content as bytes}. Raises `ValueError` for a file
    that cannot be read.
    """
    found: Sources = {}
    for path in paths:
        try:
            found[str(path.resolve())] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; set another file") from None
    return found


class UserFiles:
    """The Python files at `files` that a recipe names (rewards, sessions, tools), with the content
    that they had when this object was made, at the start of the run. Worker processes run that
    content (`current`): editing a file has no effect on the run. Raises `ValueError` for a file
    that cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises `ValueError` for a file that cannot be read."""
        self.sources = read_sources(files)
        self._knows_neighbours = self._said_changed = False
        self._warning = ""

    def current(self) -> Sources:
        """The files' content at the start of the run, {absolute path: bytes}, for a new worker
        process to run. If a file was edited or removed since, that is noted once as a warning,
        which `take_warning` returns.
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
        """Also keep the content of the files `imported` (absolute paths): modules beside the user's
        files that the first worker process has imported. Later processes then run the same content.
        Only the first call counts. Raises `ValueError` for a file that cannot be read.
        """
        if not self._knows_neighbours:
            self._knows_neighbours = True
            self.sources = read_sources([Path(file) for file in imported]) | self.sources

    def warn(self, warning: str) -> None:
        """Keep a warning for the user, which the next call of `take_warning` returns."""
        self._warning = "; ".join(filter(None, [self._warning, warning]))

    def take_warning(self) -> str:
        """The warnings since the last call, separated by semicolons; empty without one."""
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
    """An importer for `sys.meta_path`: modules whose file is in `sources`, {absolute path: content
    as bytes}, are imported from that content and not from the disk; other modules are imported as
    usual. Importing a module that exists in two of `folders`, those of the user's files, raises
    `ImportError`.
    """

    def __init__(self, sources: Sources, folders: Sequence[str] = ()) -> None:
        """`sources`: {absolute path of a Python file: its content as bytes}. `folders`: absolute
        paths of the folders of the user's files; if two of them have a module of the same name,
        its import raises `ImportError`, because a process can hold only one.
        """
        self.sources, self.folders = sources, folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python's import system: the spec of module `name`, which imports it from
        memory, if its file is in `sources` ({absolute path: content}), otherwise None. Raises
        `ImportError` if two of the folders of the user's files have a top-level module of that
        name.
        """
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
    """Called once in a worker process: put the folders of the files at `paths` on `sys.path`, so
    that the files can import the modules beside them, as a script may. Modules whose file is in
    `sources`, {absolute path: content}, are imported from that content. From now on, importing a
    module that lies beside two of the files, in different folders, raises `ImportError`.
    """
    folders = list(dict.fromkeys(str(path.resolve().parent) for path in paths))
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    sys.meta_path.insert(0, PinnedFinder(sources, folders))  # type: ignore[arg-type]


def neighbours(paths: Sequence[Path]) -> list[str]:
    """Absolute paths, sorted, of the Python files that this process has imported so far from the
    folders of `paths`, the user's files, or below them, without site-packages: these files are part
    of the user's code too.
    """
    folders = {path.resolve().parent for path in paths}
    found = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return sorted(
        file
        for file in found
        if file.endswith(".py") and "site-packages" not in file and folders & {*Path(file).parents}
    )


def load_by_path(
    path: Path,
    name: str,
    setting: str,
    kind: str,
    fits: Callable[[Any], bool],
    sources: Sources | None = None,
) -> Any:
    """Import the Python file at `path` and return its attribute `name`. If `sources`, {absolute
    path: content}, has the file, that content is run; otherwise the file is read. A process runs
    the same content once, so that all functions of a file share its globals. `kind`:
    "function" or "class"; `fits`: whether a value of the file is one, for listing what the file
    has. Raises `ValueError` that names `setting`, the recipe's key, if the file does not import,
    lacks the attribute, or has another kind of value there.
    """
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


def own_function(
    name: str, setting: str, others: str = "", sources: Sources | None = None
) -> Callable[..., Any]:
    """Load a user's function, given as `path/to/file.py:function`. If `sources`, {absolute path:
    content}, has the file, that content is run. For messages: `setting` is the recipe's key with
    that value, and `others` what to propose before a file, such as "one of math, code, or to ".
    Raises `ValueError` if the file or the function is not there, does not import, or is a generator
    function.
    """
    path, attribute = split_name(name, setting, others)
    found = load_by_path(path, attribute, setting, "function", inspect.isfunction, sources)
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
