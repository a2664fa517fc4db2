"""The results of one call to all inference engines, and which engines are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from megarl.cluster.deaths import DEATHS, ENGINE_DEAD, why_dead
from megarl.errors import EngineLost
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted


class Answers:
    """Waits for the results of one Ray call that was made to several inference engines at once,
    such as the call to receive new weights. The constructor takes the Ray object reference of each
    engine's call; engines are numbered by their positions in that list, also in
    `EngineLost.engines`.
    """

    def __init__(self, references: list[Any]) -> None:
        self._references = references

    def poll(self) -> None:
        """Check the results that are there, without waiting. Raises `EngineLost` if an engine is
        dead or its call failed, and `Aborted` if an engine only stopped because another process
        gave the transfer up.
        """
        self._check(self._done(0.0))

    def result(self, *, timeout_s: float) -> list[Any]:
        """Wait until the Ray call has ended on all engines, and return its results in the order of
        the engines. Raises `EngineLost` if an engine is dead, its call failed, or it has no result
        within `timeout_s` seconds; raises `Aborted` if an engine only stopped because another
        process gave the transfer of weights up.
        """
        self._done(timeout_s)
        return self._check(range(len(self._references)))

    def refused(self, *, timeout_s: float) -> dict[int, str]:
        """Wait for all engines, at most `timeout_s` seconds. Returns {engine number: error message}
        of the engines that are alive but whose call failed; empty if all succeeded.

        Raises `EngineLost` if an engine is dead, or has no result within `timeout_s`.
        """
        self._done(timeout_s)
        found = self._outcomes()
        self._raise({number: why for number, (_, why, is_lost) in found.items() if is_lost})
        return {number: why for number, (_, why, _) in found.items() if why}

    def settle(self, *, timeout_s: float) -> list[int]:
        """After a transfer was aborted, wait at most `timeout_s` seconds until the call has ended
        on every engine. Returns the numbers of the engines where it still runs, or failed by an
        error of its own and not because of the abort.
        """
        self._done(timeout_s)
        found = self._outcomes()
        return [number for number, (_, why, _) in found.items() if why and GIVEN_UP not in why]

    def _outcomes(self) -> dict[int, tuple[Any, str, bool]]:
        return {number: self._outcome(number) for number in range(len(self._references))}

    def _done(self, timeout_s: float) -> list[int]:
        done, _ = ray.wait(self._references, num_returns=len(self._references), timeout=timeout_s)
        return [self._references.index(reference) for reference in done]

    def _check(self, numbers: Sequence[int]) -> list[Any]:
        found = {number: self._outcome(number) for number in numbers}
        self._raise(
            {number: why for number, (_, why, _) in found.items() if why and GIVEN_UP not in why}
        )
        if any(why for _, why, _ in found.values()):
            raise Aborted(GIVEN_UP)
        return [answer for answer, _, _ in found.values()]

    def _raise(self, lost: dict[int, str]) -> None:
        if lost:
            raise EngineLost("; ".join(dict.fromkeys(lost.values())), tuple(lost))

    def _outcome(self, number: int) -> tuple[Any, str, bool]:
        """(result, error message or "", whether the engine is dead or late) of engine `number`."""
        try:
            return ray.get(self._references[number], timeout=0), "", False
        except GetTimeoutError:
            return None, "it did not answer in time; raise weight_sync.timeout_s", True
        except RayTaskError as error:
            is_dead = type(error.cause).__name__ == ENGINE_DEAD
            return None, str(error.cause) or repr(error.cause), is_dead
        except DEATHS as error:
            return None, f"its process died ({why_dead(error)})", True
