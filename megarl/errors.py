"""The errors that callers tell apart, and what their messages are made with."""

from __future__ import annotations

import errno
import os


class UserError(Exception):
    """What the user can correct: a mistake in recipe or data, or a run that cannot go on. One line
    says what was found and what to set; no traceback is shown.
    """


class ProcessLost(RuntimeError):
    """A process that the run needs is gone. One line says which and how to go on; no traceback is
    shown. `engines`: numbers of the lost engines, where new ones can take their places.
    """

    def __init__(self, reason: str, engines: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.engines = engines


class ActorUnreachable(ProcessLost):
    """The actor may be alive, and may have received the call."""


def disk_advice(error: BaseException | str) -> str:
    """What to do about a file that could not be written, the end of a message: "free some space on
    its disk" or "correct that".
    """
    codes = (errno.ENOSPC, errno.EDQUOT)
    full = getattr(error, "errno", None) in codes
    full = full or any(os.strerror(code) in str(error) for code in codes)
    return "free some space on its disk" if full else "correct that"


def shortened(text: str, limit: int = 80) -> str:
    """On one line, cut to `limit` characters, of which the last three are then dots."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def require(condition: object, message: str) -> None:
    """Raise `ValueError(message)`, which says what was found and what to set, unless
    `condition`.
    """
    if not condition:
        raise ValueError(message)
