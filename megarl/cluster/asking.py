"""Questions to Ray actors, and their end, each with a deadline, and errors that name the actor."""

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
"""Seconds for which the rollout service may be unreachable, while it is asked again."""
ASK_AGAIN_S = 0.5

KILL_S = 5.0
"""Seconds that Ray has to kill an actor. On a node whose raylet hangs, it may never return."""


def done_within(seconds: float, work: Callable[[], object]) -> bool:
    """Do `work` in a thread, for calls of Ray that have no deadline of their own; returns whether
    it has ended within `seconds`. Errors of `work` are dropped.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, name="call of Ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def kill_actor(handle: Any) -> None:
    """Have Ray kill an actor; returns after at most `KILL_S` seconds."""
    done_within(KILL_S, lambda: ray.kill(handle))


class ActorDied(RuntimeError):
    """A Ray actor died before it answered."""


class ActorUnreachable(ActorDied):
    """A Ray actor could not be reached. It may live, and may have heard the question."""


def ask(references: Mapping[str, Any], timeout_s: float, doing: str, fix: str = "") -> list[Any]:
    """`ray.get` of {name of the actor: object reference} with a deadline; returns the results in
    order.

    An error names the actor that failed, was late or died (`ActorDied`), and the reason; a
    `UserError` of an actor is raised as it is. `fix` is the advice given where an actor is late.
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
    """The answer of the rollout service. `call` asks, and returns the object reference; it is
    called again while the service cannot be reached, so the question must be one that may be asked
    twice. Raises like `ask`.
    """
    deadline = time.monotonic() + UNREACHABLE_S
    while True:
        try:
            return ask({"the rollout service": call()}, timeout_s, doing)[0]
        except ActorUnreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(ASK_AGAIN_S)
