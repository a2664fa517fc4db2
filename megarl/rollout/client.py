"""The rollout service as a trainer rank sees it. Waits last as long as there is progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray

from megarl.checkpoints.group_files import segments_of, with_arrays
from megarl.errors import ActorUnreachable, ProcessLost
from megarl.rollout.batch import assemble
from megarl.rollout.evaluation import Evaluated
from megarl.rollout.stored_arrays import StoredArrays, fetch
from megarl.settings.limits import POLL_S
from megarl.system.ray_calls import SERVICE_TIMEOUT_S, THE_SERVICE, ask, ask_service
from megarl.system.signals import Stop
from megarl.system.spans import activity
from megarl.types import Cursor, Group, Prompt, StepBatch, TokenArrays

SERVICE = "rollouts"
"""Name of the service's actor."""

PROGRESS_POLL_S, POLL_SHARE = 5.0, 1 / 60
"""Between two questions of data rank 0 for progress. Other ranks ask as often only if this is more
than `POLL_SHARE` of the silence that they allow.
"""


class RolloutClient:
    """A trainer rank's interface to the rollout service. Step k trains weights of version k, from
    0.

    `take`, `evaluate` and `collect` wait while rollouts make progress, and raise `RuntimeError`
    after `silence_s` seconds without. Other calls wait at most 120 seconds. If the service has
    died, a call raises `ProcessLost`, a `RuntimeError`.

    `stop` is true once a signal asked this process to end; one such rank is enough. Then `take` and
    `evaluate` return None, but what one rank has got is still given to the others, so that all end
    after the same step.
    """

    def __init__(self, data_rank: int, *, silence_s: float) -> None:
        """`data_rank`: this rank's number on the data axis."""
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._silence_s = data_rank, silence_s
        self._poll_s = max(PROGRESS_POLL_S, POLL_SHARE * silence_s if data_rank else 0.0)
        self.stop, self._is_told = Stop(), False
        """A flag, true once a signal asks the run to end; whether the service was told of it."""

    def start(self, receipts: Sequence[str] = ()) -> None:
        """Start to generate; one rank calls it, once the engines have the first weights.
        `receipts`: of these, one of which each response must carry; empty to check nothing.
        """
        # Not asked twice: a service starts once.
        started = self._service.start.remote(receipts)
        ask(THE_SERVICE, started, SERVICE_TIMEOUT_S, "starting rollouts")

    def take(self, step: int) -> StepBatch | None:
        """This rank's samples of `step`, or None if the run is to end before it. Raises
        `RuntimeError` if generation failed or stands still, `UserError` if the verifier failed
        for too many responses.
        """
        plan = self._await(
            lambda: self._service.take.remote(step, self._data_rank),
            f"rollouts of step {step + 1}",
        )
        if plan is None:
            return None
        return assemble(plan, partial(self._fetch, f"segments of step {step + 1}"))

    def release(self, step: int, receipts: Sequence[str] = ()) -> None:
        """`step` is trained and the engines have version `step + 1`. Any rank calls it; `receipts`
        as in `start`.
        """
        release = self._service.release.remote
        self._ask(lambda: release(step + 1, receipts), f"releasing step {step + 1}")

    def cursor(self, step: int) -> Cursor:
        """The position in the data after the first `step` steps, for the checkpoint."""
        doing = f"reading the prompt cursor after {step} steps"
        return self._ask(lambda: self._service.cursor.remote(step), doing)

    def unused(self, step: int) -> list[Group]:
        """The finished groups that this data rank checkpoints after `step` steps, with token
        arrays.
        """
        doing = f"reading the finished groups after {step} steps"
        groups = self._ask(lambda: self._service.unused.remote(step, self._data_rank), doing)
        stored = [segment.arrays for segment in segments_of(groups)]
        arrays = f"segments of {len(groups)} finished groups that step {step} has not used"
        return with_arrays(groups, self._fetch(arrays, stored)) if stored else []

    def evaluate(self, temperature: float, name: str) -> Evaluated | None:
        """One scored response to each held-out problem, with one result for all ranks; raises as
        `take`.

        `name`: of the evaluation, which decides the seeds. None if the run is to end.
        """
        return self._await(
            lambda: self._service.evaluate.remote(temperature, name),
            f"responses of evaluation '{name}'",
        )

    def stop_early(self) -> None:
        """End the run after this step; one rank calls it."""
        self._ask(lambda: self._service.interrupt.remote(True), "stopping early")

    def is_early_stop(self) -> bool:
        """Whether `stop_early` ends the run, and not a signal."""
        try:
            return self._ask(self._service.is_early_stop.remote, "asking why the run ended")
        except ProcessLost:
            if self.stop:  # see `_await`
                return False
            raise

    def answers(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        name: str,
        *,
        inspects: bool = False,
    ) -> Any:
        """Ask for one scored response to each prompt; returns at once what `collect` waits for.

        With `inspects`, failed verifiers raise no error, and records also have "segments".
        """
        return self._service.answers.remote(list(prompts), temperature, name, inspects)

    def collect(self, pending: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
        """For each call of `answers` a list of records, one a prompt. Raises as `take`."""
        for reference in pending:
            self._wait_for([reference], "responses")
            yield ask(THE_SERVICE, reference, SERVICE_TIMEOUT_S, "collecting responses")

    def _fetch(self, what: str, arrays: Sequence[StoredArrays]) -> list[TokenArrays]:
        """As `fetch`, but a signal is told to the service meanwhile, and this step is still
        trained.
        """
        deadline = time.monotonic() + self._silence_s
        refs = list({reference.ref: None for reference in arrays})
        # Ray may have taken the service for dead meanwhile.
        self._wait_for(refs, f"token arrays of {what}", self._silence_s)
        return fetch(arrays, max(POLL_S, deadline - time.monotonic()), what)

    def _tell_stop(self) -> None:
        if self.stop and not self._is_told:
            self._ask(lambda: self._service.interrupt.remote(False), "ending the run")
            self._is_told = True

    def _await(self, call: Callable[[], Any], what: str) -> Any:
        """The answer to `call`, or None if the service died at a stop: torchrun passes a signal on
        to Ray's processes too.
        """
        doing = f"waiting for {what}"
        try:
            while True:
                self._tell_stop()
                reference = call()
                self._wait_for([reference], what)
                try:
                    return ask(THE_SERVICE, reference, SERVICE_TIMEOUT_S, doing)
                except ActorUnreachable:  # asked again, unless it stays away
                    self._ask(self._service.silent_s.remote, doing)
        except ProcessLost:
            if self.stop:
                return None
            raise

    def _wait_for(self, references: list[Any], what: str, within_s: float = math.inf) -> None:
        """Block until Ray has all `references`, for at most `within_s`, as long as there is
        progress. A signal is told to the service.
        """
        deadline = time.monotonic() + within_s
        with activity(what, kind="wait", of="service", deadline_s=self._silence_s):
            watch = self._progress_watch(what)
            while references and time.monotonic() < deadline:
                self._tell_stop()
                if not ray.wait(references, num_returns=len(references), timeout=POLL_S)[1]:
                    return
                watch()

    def _progress_watch(self, what: str) -> Callable[[], None]:
        """A function that raises `RuntimeError` once there was no progress for `silence_s`
        seconds.
        """
        began = time.monotonic()
        asks_at = began + min(self._poll_s, self._silence_s)

        def watch() -> None:
            nonlocal asks_at
            if time.monotonic() < asks_at:
                return
            silent_s = self._ask(self._service.silent_s.remote, f"waiting for {what}")
            now = time.monotonic()
            silent_s = min(silent_s, now - began)
            left_s = self._silence_s - silent_s
            asks_at = now + min(self._poll_s, left_s)
            if left_s <= 0:
                raise RuntimeError(
                    f"no engine has made a step and no response was judged for {self._silence_s:g}"
                    f" s, while this rank waited for {what}; look at run.log for what engines"
                    " and environment printed last"
                )

        return watch

    def _ask(self, call: Callable[[], Any], doing: str) -> Any:
        with activity(doing, kind="wait", of="service", deadline_s=SERVICE_TIMEOUT_S, quiet=True):
            return ask_service(call, doing)
