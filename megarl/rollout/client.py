"""The rollout service as a trainer rank sees it: batches, evaluations, and waits that last as long
as there is progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray

from megarl.checkpoints.group_files import segments_of, with_arrays
from megarl.rollout.batch import assemble
from megarl.rollout.evaluation import Evaluated
from megarl.rollout.stored_arrays import StoredArrays, fetch
from megarl.system.ray_calls import (
    SERVICE_TIMEOUT_S,
    THE_SERVICE,
    ActorDied,
    ActorUnreachable,
    ask,
    ask_service,
)
from megarl.system.signals import Stop
from megarl.system.spans import Span, activity
from megarl.types import Cursor, Group, Prompt, StepBatch, TokenArrays

SERVICE = "rollouts"
"""Name of the rollout service's actor."""

STOP_POLL_S = 0.2
"""Seconds between two checks for a stop signal while waiting for the rollout service. An answer
of the service ends the wait at once."""

PROGRESS_POLL_S, POLL_SHARE = 5.0, 1 / 60
"""Seconds between two questions of data rank 0 whether the rollouts that it waits for make
progress. The other ranks ask as often only if this is more than `POLL_SHARE` of the time that they
allow without progress: the questions of hundreds of ranks would take much of the service's time."""


class RolloutClient:
    """A trainer rank's interface to the rollout service. The service is a Ray actor: it has engines
    generate responses and the environment score them, and deals the results out to trainer ranks.

    `take` waits for the samples of one training step that this rank trains on. `evaluate` waits for
    the metrics of the responses to the held-out problems. `answers` asks for responses to given
    prompts and returns at once; `collect` waits for them. Steps and weight versions count from 0;
    step k trains weights of version k.

    These three waits last as long as there is progress. They end with `RuntimeError` after
    `silence_s` seconds, an argument of the constructor, in which no engine made a step and neither
    engines nor environment gave an answer. All other calls but `answers` wait at most 120 seconds
    for the service's answer, and then raise `RuntimeError`. If the service has died, a call raises
    `ActorDied`, a `RuntimeError`.

    The attribute `stop` is a `Stop`, a flag that is true once this rank's process has got SIGTERM,
    SIGINT (Ctrl-C) or SIGHUP. The training loop sets the attribute to the flag of
    `megarl.system.signals.graceful`. `take` and `evaluate` look at it while they wait. A rank
    whose flag is true tells the service, and one such rank is enough. The service then gives out
    no further batch and no further evaluation: `take` and `evaluate` return None. A result
    that one rank has got is still given to the others, so that all ranks end after the same step.
    If the service dies while `take` or `evaluate` waits for it and `stop` is true, they return None
    too.
    """

    def __init__(self, data_rank: int, *, silence_s: float) -> None:
        """Find the rollout service in the Ray cluster that this process has joined. `data_rank`:
        this rank's number on the data axis, whose samples `take` returns. `silence_s`: seconds
        without progress of the rollouts, after which a wait for them ends with `RuntimeError`
        (`megarl.settings.config.silence_s`).
        """
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._silence_s = data_rank, silence_s
        self._poll_s = max(PROGRESS_POLL_S, POLL_SHARE * silence_s if data_rank else 0.0)
        self.stop, self._is_told = Stop(), False
        """A flag, true once a signal asks the run to end; whether the service was told of it."""

    def start(self, receipts: Sequence[str] = ()) -> None:
        """Have the rollout service start to generate; one rank calls it, once the engines have the
        weights of the run's first step. `receipts`: digests of those weights, one of which each
        response must carry; empty to check nothing.
        """
        # Not asked twice: a service starts once.
        started = self._service.start.remote(receipts)
        ask(THE_SERVICE, started, SERVICE_TIMEOUT_S, "starting rollouts")

    def take(self, step: int) -> StepBatch | None:
        """Wait until the batch of `step` is complete, and return the samples that this rank trains
        on: a `StepBatch`, with token ids, log-probs and rewards for each mini-batch. None if the
        run is to end before that step, by a signal (`stop`) or by `stop_early`.

        Raises `RuntimeError` if generation has failed, if there is no progress for `silence_s`
        seconds, if the token arrays of the samples do not arrive within that time, or if the
        service died and `stop` is false. Raises `UserError` if the verifier failed for too many
        responses.
        """
        plan = self._await(
            lambda: self._service.take.remote(step, self._data_rank),
            f"rollouts of step {step + 1}",
        )
        if plan is None:
            return None
        return assemble(plan, partial(self._fetch, f"segments of step {step + 1}"))

    def release(self, step: int, receipts: Sequence[str] = ()) -> None:
        """Tell the service that `step` is trained and that the engines have the weights of version
        `step + 1`, so that it may start the next prompts' rollouts. One rank or all ranks call it.
        `receipts`: digests of those weights, one of which each response of that version must carry;
        empty to check nothing.
        """
        release = self._service.release.remote
        self._ask(lambda: release(step + 1, receipts), f"releasing step {step + 1}")

    def cursor(self, step: int) -> Cursor:
        """The position in the data, for the checkpoint after the first `step` steps: which groups
        (prompts with their rollouts) these steps have used. A `Cursor` names groups by their
        positions in the training order: all below `first`, and those in `beyond`.
        """
        doing = f"reading the prompt cursor after {step} steps"
        return self._ask(lambda: self._service.cursor.remote(step), doing)

    def unused(self, step: int) -> list[Group]:
        """The finished groups (all rollouts of a prompt) that the first `step` steps have not used
        and that this data rank is to write into a checkpoint, with their token arrays in this
        process. Raises `RuntimeError` if the service does not answer within 120 seconds, or if the
        token arrays do not arrive within `silence_s` seconds.
        """
        doing = f"reading the finished groups after {step} steps"
        groups = self._ask(lambda: self._service.unused.remote(step, self._data_rank), doing)
        stored = [part.arrays for part in segments_of(groups)]
        what = f"segments of {len(groups)} finished groups that step {step} has not used"
        return with_arrays(groups, self._fetch(what, stored)) if stored else []

    def evaluate(self, temperature: float, name: str) -> Evaluated | None:
        """Have one response to each held-out problem generated and scored, and wait for the result.
        All ranks may call it and get the same result, (metrics, transcripts). Metrics are {name:
        value}. Transcripts are a list with a dict for each of the first 128 problems: "prompt",
        "response", "reward", "correct", "tokens" (generated) and others. None if the run is to end,
        by a signal (`stop`) or by `stop_early`.

        `name`: of the evaluation, which decides the sampling seeds.

        Raises `RuntimeError` if generation has failed, if there is no progress for `silence_s`
        seconds, or if the service died and `stop` is false. Raises `UserError` if the verifier
        failed for too many responses.
        """
        return self._await(
            lambda: self._service.evaluate.remote(temperature, name),
            f"responses of evaluation '{name}'",
        )

    def stop_early(self) -> None:
        """End the run on all ranks after the present step, because its metric is good enough; one
        rank calls it.
        """
        self._ask(lambda: self._service.interrupt.remote(True), "stopping early")

    def is_early_stop(self) -> bool:
        """Whether the run ends because `stop_early` was called, and not by a signal. False if the
        service has died after a signal has set `stop`.
        """
        try:
            return self._ask(self._service.is_early_stop.remote, "asking why the run ended")
        except ActorDied:
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
        """Ask for one scored response to each of `prompts`, and return without waiting: a Ray
        object reference to give to `collect`. `temperature` 0 is greedy. `name`: decides the
        sampling seeds together with the prompt. If the verifier fails for too many responses,
        `collect` raises an error. With `inspects` it does not, and each dict of `collect` also has
        "segments", the response's `Segment` objects (token ids, log-probs, weight versions).
        """
        return self._service.answers.remote(list(prompts), temperature, name, inspects)

    def collect(self, pending: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
        """Wait for the results of calls of `answers`, whose return values are `pending`. Does not
        look at `stop`.

        Yields one list for each call, in the order of `pending`, with a dict for each prompt:
        "prompt", "response" (text), "reward", "correct" (the verifier's verdict), "tokens" (number
        generated) and others. Raises `RuntimeError` if a call failed, if there is no progress for
        `silence_s` seconds, or if the service died. Raises `UserError` if the verifier failed for
        too many responses.
        """
        for reference in pending:
            with self._wait("responses"):
                watch = self._progress_watch("responses")
                while not ray.wait([reference], timeout=STOP_POLL_S)[0]:
                    watch()
            yield ask(THE_SERVICE, reference, SERVICE_TIMEOUT_S, "collecting responses")

    def _fetch(self, what: str, arrays: Sequence[StoredArrays]) -> list[TokenArrays]:
        """As `fetch`, in pieces, between which signals are seen. A signal is told to the service,
        so that the run ends after this step, which other ranks train as well.
        """
        refs = list({one.ref: None for one in arrays})
        deadline = time.monotonic() + self._silence_s
        with self._wait(f"token arrays of {what}"):
            watch = self._progress_watch(f"token arrays of {what}")
            while refs and time.monotonic() < deadline:
                self._tell_stop()
                if not ray.wait(refs, num_returns=len(refs), timeout=STOP_POLL_S)[1]:
                    break
                watch()  # Ray may have taken the service for dead meanwhile
            return fetch(arrays, max(STOP_POLL_S, deadline - time.monotonic()), what)

    def _tell_stop(self) -> None:
        """Tell the service, once, if the run is to end."""
        if self.stop and not self._is_told:
            self._ask(lambda: self._service.interrupt.remote(False), "ending the run")
            self._is_told = True

    def _await(self, call: Callable[[], Any], what: str) -> Any:
        """The answer to `call`; before and while waiting, tells the service if the run is to end.
        None if the service is dead by then: torchrun passes a signal on to Ray's processes too,
        which may end before this one.
        """
        reference, doing = None, f"waiting for {what}"
        try:
            with self._wait(what):
                watch = self._progress_watch(what)
                while True:
                    self._tell_stop()
                    reference = reference or call()
                    if not ray.wait([reference], timeout=STOP_POLL_S)[0]:
                        watch()
                        continue
                    try:
                        return ask(THE_SERVICE, reference, SERVICE_TIMEOUT_S, doing)
                    except ActorUnreachable:  # asked again, unless it stays away
                        self._ask(self._service.silent_s.remote, doing)
                        reference = None
        except ActorDied:
            if self.stop:
                return None
            raise

    def _wait(self, what: str) -> Span:
        """A context manager that records a wait for the rollout service."""
        return activity(what, kind="wait", of="service", deadline_s=self._silence_s)

    def _progress_watch(self, what: str) -> Callable[[], None]:
        """A function to call in a wait for `what`: raises `RuntimeError` once rollouts have made no
        progress for `silence_s` seconds.
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
        """The service's answer to `call`, which may be made twice; see `ask_service`."""
        with activity(doing, kind="wait", of="service", deadline_s=SERVICE_TIMEOUT_S, quiet=True):
            return ask_service(call, doing)
