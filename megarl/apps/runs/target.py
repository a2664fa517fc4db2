"""The command line `RUN [--out FILE]` of commands that make one file from run folders, such as
`megarl report`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.console import Arguments
from megarl.errors import UserError
from megarl.files import UNFINISHED


def runs_and_target(command: str, arguments: Sequence[str], name: str) -> tuple[list[Path], Path]:
    """([path of the run folder], path of the file to write) from the words `arguments`, RUN [--out
    FILE], of the command `megarl COMMAND`. Without `--out` the file is `name` in the run folder; if
    FILE is a folder, it is `name` in that. Raises `UserError` for other words.
    """
    usage = f"it needs one run folder: megarl {command} RUN [--out FILE]"
    parser = Arguments(f"megarl {command}", usage)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out")
    options = parser.parse_intermixed_args(arguments)
    if options.out == "":
        parser.error("--out is empty")
    file = Path(options.out or options.run / name)
    return [options.run], file / name if file.is_dir() else file


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Context manager around code that reads files of a run and writes `file` by `new_file`, which
    replaces a file in one rename. Turns an `OSError` in the block into a `UserError` that names the
    file that could not be read or written.
    """
    try:
        yield
    except OSError as error:
        if error.filename and not str(error.filename).endswith(UNFINISHED):
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
        raise UserError(
            f"{file} cannot be written: {error.strerror}; name another file with --out FILE"
        ) from None
