"""The errors that callers tell apart, and what their messages are made with."""

from __future__ import annotations

import errno
import os


class UserError(Exception):
    """What the user can correct: a mistake in recipe or data, or a run that cannot go on, such as
    one whose loss is NaN. The message says what was found and what to set.
    """


class EngineLost(RuntimeError):
    """Inference engines that died or stopped answering; fresh engines can take their places."""

    def __init__(self, reason: str, engines: tuple[int, ...] = ()) -> None:
        """`engines`: the numbers of the lost engines, as far as they are known."""
        super().__init__(reason)
        self.engines = engines


class EngineUnreachable(RuntimeError):
    """An inference engine that could not be reached for a moment, but may be alive: a request to it
    can be sent again.
    """


def disk_advice(error: Exception | str) -> str:
    """What to do about a file that could not be written, by the error or its text."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    full = getattr(error, "errno", None) in codes
    full = full or any(os.strerror(code) in str(error) for code in codes)
    return "free some space on its disk" if full else "correct that"


def shortened(text: str, limit: int = 80) -> str:
    """`text` on one line, cut to `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def require(condition: object, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds.

    Messages say what was found and what to set.
    """
    if not condition:
        raise ValueError(message)
