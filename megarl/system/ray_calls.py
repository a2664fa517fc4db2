"""Waiting for the answers of Ray actors, and other calls of Ray, each with a deadline; errors name
the actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from megarl.errors import ProcessLost, UserError
from megarl.system.deaths import DEATHS, why_dead
from megarl.system.files import in_thread

THE_SERVICE = "the rollout service"
"""Its name in messages."""

SERVICE_TIMEOUT_S = 120.0
"""Seconds the rollout service has to answer a call that does not wait for rollouts."""

UNREACHABLE_S = 15.0
"""Seconds for which a call to the rollout service is repeated while the service cannot be reached.
"""

POLL_S = 0.5
"""Seconds between two looks at what is waited for: an engine that starts, a service that is away.
"""

GOES_ON = "`--resume auto` goes on from the newest checkpoint"
"""What the user does after an error that ends a run."""

KILL_S = 5.0
"""Seconds that Ray gets to kill an actor. On a node whose raylet hangs, `ray.kill` may never
return."""


def done_within(seconds: float, work: Callable[[], object]) -> bool:
    """Call `work` in a thread and wait for it at most `seconds`: for calls of Ray that have no
    deadline of their own. Returns whether `work` has ended; otherwise its thread goes on. Result
    and exceptions of `work` are dropped.
    """
    return not wait([in_thread("call of Ray", work)], seconds).not_done


class ActorDied(ProcessLost):
    """Error of a call to a Ray actor that died before it answered; the message names the actor."""


class ActorUnreachable(ActorDied):
    """Error of a call to a Ray actor that could not be reached. The actor may be alive, and may
    have received the call.
    """


def ask(which: str, reference: Any, timeout_s: float, doing: str, fix: str = "") -> Any:
    """Wait at most `timeout_s` seconds for the result of a call to a Ray actor, and return the
    result. `reference`: Ray object reference of the call. Only for messages: `which`, the actor's
    name; `doing`, what the call does; `fix`, advice for a late actor.

    Raises `RuntimeError` with the actor's name and the reason if the call failed or is late,
    `ActorDied` if the actor died, `ActorUnreachable` if it may be alive, and `UserError` or
    `ProcessLost` unchanged if the call raised one.
    """
    try:
        return ray.get(reference, timeout=max(0.0, timeout_s))
    except (TimeoutError, RayTaskError, *DEATHS) as error:
        raise explained(error, which, timeout_s, doing, fix) from error


async def await_answer(
    which: str, reference: Any, timeout_s: float, doing: str, fix: str = ""
) -> Any:
    """As `ask`, as a coroutine in an event loop."""
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancellation
            return await reference
    except (TimeoutError, RayTaskError, *DEATHS) as error:
        raise explained(error, which, timeout_s, doing, fix) from error


def explained(
    error: Exception, which: str, timeout_s: float, doing: str, fix: str = ""
) -> Exception:
    """The exception that `ask` raises for one of Ray."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, UserError | ProcessLost):
            return type(error.cause)(str(error.cause))
        return RuntimeError(f"{which} failed ({doing}): {error.cause}")
    if isinstance(error, TimeoutError):
        fix = fix and f"; {fix}"
        return RuntimeError(f"{which} did not answer within {timeout_s:g} s ({doing}{fix})")
    is_away = isinstance(error, ActorUnavailableError)
    return (ActorUnreachable if is_away else ActorDied)(
        f"{which} {'cannot be reached' if is_away else 'died'} ({doing}):"
        f" {why_dead(error)} See run.log for what it printed last; {GOES_ON}"
    )


def ask_service(call: Callable[[], Any], doing: str) -> Any:
    """Call the rollout service and return its answer, after at most 120 seconds. `call`: a function
    that makes the Ray call and returns its object reference. It is called again, for 15 seconds,
    while the service cannot be reached, so a second call must do no harm. `doing`: what the call
    does, for messages.

    Raises `RuntimeError` if the call failed or is late, `ActorDied` if the service died,
    `ActorUnreachable` if the service cannot be reached after that, and `UserError` if the call
    raised one.
    """
    deadline = time.monotonic() + UNREACHABLE_S
    while True:
        try:
            return ask(THE_SERVICE, call(), SERVICE_TIMEOUT_S, doing)
        except ActorUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
