"""Calls of Ray with deadlines; errors name the actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from megarl.errors import ActorUnreachable, ProcessLost, UserError
from megarl.system.deaths import DEATHS, ENGINE_DEAD, why_dead
from megarl.system.files import in_thread

THE_SERVICE = "the rollout service"
"""Its name in messages."""

SERVICE_TIMEOUT_S = 120.0
"""For a call that does not wait for rollouts."""


UNREACHABLE_S = 15.0
"""A call is repeated for so long while the service cannot be reached."""

GOES_ON = "`--resume auto` goes on from the newest checkpoint"

KILL_S = 5.0
"""Ray's time to kill an actor: where a raylet hangs, `ray.kill` may never return."""


def done_within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether `work` ended in time, in a thread, which else goes on: for calls of Ray without a
    deadline. Result and errors are dropped.
    """
    return not wait([in_thread("call of Ray", work)], seconds).not_done


def ask(which: str, reference: Any, timeout_s: float, doing: str, fix: str = "") -> Any:
    """The result of a call to a Ray actor. `which`, `doing`, `fix`: for messages.

    Raises `RuntimeError` if the call failed or is late, `ProcessLost`, `ActorUnreachable`, and the
    call's `UserError` or `ProcessLost` unchanged.
    """
    try:
        return ray.get(reference, timeout=max(0.0, timeout_s))
    except (TimeoutError, RayTaskError, *DEATHS) as error:
        raise explained(error, which, timeout_s, doing, fix) from error


async def await_answer(
    which: str, reference: Any, timeout_s: float, doing: str, fix: str = ""
) -> Any:
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancellation
            return await reference
    except (TimeoutError, RayTaskError, *DEATHS) as error:
        raise explained(error, which, timeout_s, doing, fix) from error


def explained(
    error: Exception, which: str, timeout_s: float, doing: str, fix: str = ""
) -> Exception:
    """What `ask` raises for an exception of Ray."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, UserError | ProcessLost):
            return type(error.cause)(str(error.cause))
        return RuntimeError(f"{which} failed ({doing}): {error.cause}")
    if isinstance(error, TimeoutError):
        fix = fix and f"; {fix}"
        return RuntimeError(f"{which} did not answer within {timeout_s:g} s ({doing}{fix})")
    is_away = isinstance(error, ActorUnavailableError)
    return (ActorUnreachable if is_away else ProcessLost)(
        f"{which} {'cannot be reached' if is_away else 'died'} ({doing}):"
        f" {why_dead(error)} See run.log for what it printed last; {GOES_ON}"
    )


@dataclass
class CallOutcome:
    """What a call to one of several engines came to."""

    answer: Any = None
    problem: str = ""
    """The error's message; "late" without an answer in time."""
    is_lost: bool = False
    """Whether the engine is dead or late."""

    @staticmethod
    def of(call: asyncio.Future[Any]) -> CallOutcome:
        """Of a Ray call, which may still run."""
        if not call.done():
            return CallOutcome(None, "late", is_lost=True)
        error = call.exception()
        if error is None:
            return CallOutcome(call.result())
        if isinstance(error, DEATHS):
            return CallOutcome(None, f"its process died ({why_dead(error)})", is_lost=True)
        cause = getattr(error, "cause", error)
        if type(cause).__name__ == ENGINE_DEAD:
            return CallOutcome(None, "one of its processes died", is_lost=True)
        return CallOutcome(None, str(cause) or repr(cause))


def ask_service(call: Callable[[], Any], doing: str) -> Any:
    """The service's answer to `call()`, which is made again for 15 seconds while the service is out
    of reach, so that a second call must do no harm. Raises as `ask`.
    """
    deadline = time.monotonic() + UNREACHABLE_S
    while True:
        try:
            return ask(THE_SERVICE, call(), SERVICE_TIMEOUT_S, doing)
        except ActorUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
