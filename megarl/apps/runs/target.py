"""The command line `RUN [--out FILE]` of commands that make a file of a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.errors import UserError


def run_and_target(command: str, arguments: Sequence[str], name: str) -> tuple[Path, Path]:
    """(run folder, file to write) of the command line of `megarl command`. `name`: the file in the
    run folder that is written without `--out`. Raises `UserError` for other words.
    """
    words, target = [], None
    rest = iter(arguments)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--out":
            target = value if equals else next(rest, "")
        else:
            words.append(word)
    if len(words) != 1 or words[0].startswith("-") or target == "":
        raise UserError(f"megarl {command} needs one run folder: megarl {command} RUN [--out FILE]")
    file = Path(words[0], name) if target is None else Path(target)
    return Path(words[0]), file / name if file.is_dir() else file


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """A block that writes `file` aside, under a hidden name, and renames it. Raises `UserError`
    that names the file where that fails, or the other file that cannot be read.
    """
    try:
        yield
    except OSError as error:
        found = Path(error.filename or file)
        if error.filename and not found.name.startswith("."):
            raise UserError(f"{found} cannot be read: {error.strerror}") from None
        raise UserError(
            f"{file} cannot be written: {error.strerror}; name another file with --out FILE"
        ) from None
