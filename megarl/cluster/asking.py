"""Waiting for the answers of Ray actors, and ending actors, each with a deadline; errors name the
actor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayTaskError,
)

from megarl.cluster.deaths import DEATHS, why_dead
from megarl.errors import UserError

UNREACHABLE_S = 15.0
"""Seconds for which a call to the rollout service is repeated while the service cannot be reached.
"""
ASK_AGAIN_S = 0.5

KILL_S = 5.0
"""Seconds that Ray gets to kill an actor. On a node whose raylet hangs, `ray.kill` may never
return."""


def done_within(seconds: float, work: Callable[[], object]) -> bool:
    """Call `work` in a thread and wait for it at most `seconds`: for calls of Ray that have no
    deadline of their own. Returns whether `work` has ended; otherwise its thread goes on. Result
    and exceptions of `work` are dropped.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, name="call of Ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def kill_actor(handle: Any) -> None:
    """Have Ray kill the actor of the Ray handle `handle`; returns after at most 5 seconds,
    without an error if that fails.
    """
    done_within(KILL_S, lambda: ray.kill(handle))


class ActorDied(RuntimeError):
    """Error of a call to a Ray actor that died before it answered; the message names the actor."""


class ActorUnreachable(ActorDied):
    """Error of a call to a Ray actor that could not be reached. The actor may be alive, and may
    have received the call.
    """


def ask(references: Mapping[str, Any], timeout_s: float, doing: str, fix: str = "") -> list[Any]:
    """Wait for the results of calls to Ray actors, together at most `timeout_s` seconds, and return
    them in order. `references`: {name of the actor, for messages: Ray object reference}. `doing`:
    what the calls do, and `fix`: advice if an actor is late, both for messages.

    Raises `RuntimeError` with the actor's name and the reason if a call failed or is late,
    `ActorDied` if the actor died, `ActorUnreachable` if it may be alive, and `UserError` unchanged
    if the call raised one.
    """
    deadline = time.monotonic() + timeout_s
    answers = []
    for which, reference in references.items():
        try:
            answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise RuntimeError(
                f"{which} did not answer within {timeout_s:g} s ({doing}{fix and '; '}{fix})"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise RuntimeError(f"{which} failed ({doing}): {error.cause}") from error
        except DEATHS as error:
            is_away = isinstance(error, ActorUnavailableError)
            raise (ActorUnreachable if is_away else ActorDied)(
                f"{which} {'cannot be reached' if is_away else 'died'} ({doing}):"
                f" {why_dead(error)} See run.log for what it printed last;"
                " `--resume auto` goes on from the newest checkpoint"
            ) from error
    return answers


def ask_service(call: Callable[[], Any], timeout_s: float, doing: str) -> Any:
    """Call the rollout service and wait for its answer, which is returned. `call`: makes the Ray
    call and returns its object reference; it is made again, for 15 seconds, while the
    service cannot be reached, so a second call must do no harm. `timeout_s`: seconds that the
    service has for an answer. `doing`: what the call does, for messages.

    Raises `RuntimeError` if the call failed or is late, `ActorDied` if the service died,
    `ActorUnreachable` if it stays away, and `UserError` if the call raised one.
    """
    deadline = time.monotonic() + UNREACHABLE_S
    while True:
        try:
            return ask({"the rollout service": call()}, timeout_s, doing)[0]
        except ActorUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(ASK_AGAIN_S)
