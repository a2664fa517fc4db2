"""The errors that callers tell apart, and what their messages are made with."""

from __future__ import annotations

import errno
import os


class UserError(Exception):
    """Raised for what the user can correct: a mistake in recipe or data, or a run that cannot go
    on, such as one whose loss is NaN. The message, one line, says what was found and what to set;
    the command prints it without a traceback.
    """


class ProcessLost(RuntimeError):
    """Raised if a process of the run has died, as one that somebody killed. The message, one line,
    says which and how to go on; the command prints it without a traceback.
    """


class EngineLost(RuntimeError):
    """Raised if inference engines died or stopped answering; new engines can be started in their
    places. `engines`: their numbers, as far as they are known.
    """

    def __init__(self, reason: str, engines: tuple[int, ...] = ()) -> None:
        """`engines`: the numbers of the lost engines, as far as they are known."""
        super().__init__(reason)
        self.engines = engines


class EngineUnreachable(RuntimeError):
    """Raised if an inference engine could not be reached for a moment, but may be alive: the
    request to the engine can be sent again.
    """


def disk_advice(error: BaseException | str) -> str:
    """What the user should do about a file that could not be written, as the last part of a
    message: "free some space on its disk" if `error`, an exception or its text, says that the disk
    or quota is full; otherwise "correct that".
    """
    codes = (errno.ENOSPC, errno.EDQUOT)
    full = getattr(error, "errno", None) in codes
    full = full or any(os.strerror(code) in str(error) for code in codes)
    return "free some space on its disk" if full else "correct that"


def shortened(text: str, limit: int = 80) -> str:
    """`text` on one line, with all white space as single spaces, cut to `limit` characters, of
    which the last three are then dots.
    """
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def require(condition: object, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` is true.

    Messages say what was found and what to set.
    """
    if not condition:
        raise ValueError(message)
