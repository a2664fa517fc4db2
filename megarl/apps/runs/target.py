"""The command line `RUN [--out FILE]` of commands that make one file from a run folder, such as
`megarl report`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.errors import UserError


def run_and_target(command: str, arguments: Sequence[str], name: str) -> tuple[Path, Path]:
    """(path of the run folder, path of the file to write) from the words `arguments`, RUN [--out
    FILE], of the command `megarl COMMAND`. Without `--out` the file is `name` in the run folder; if
    FILE is a folder, it is `name` in that. Raises `UserError` for other words.
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
    """Context manager around code that writes `file` under a hidden name beside it and then renames
    it. Turns an `OSError` in the block into a `UserError` that names `file`, or the other file that
    could not be read.
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
