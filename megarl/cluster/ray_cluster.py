"""Processes that are not trainer ranks: Ray, the engines and the rollout service. Rank 0 starts
them and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.activity.spans import Span, activity
from megarl.checkpoints.group_files import segments_of, with_arrays
from megarl.cluster.engines import ActorDied, ActorHandle, EngineGroup, ask
from megarl.cluster.mailbox import fetch
from megarl.cluster.placement import Seat
from megarl.cluster.private_ray import PrivateFolder, start_ray
from megarl.cluster.process_env import SOCKETS, use_cluster_token, without_variable
from megarl.cluster.processes import end
from megarl.cluster.ray_address import ray_address
from megarl.cluster.ray_shutdown import shut_down
from megarl.cluster.remote import EngineActor
from megarl.cluster.service_process import ServiceActor
from megarl.cluster.supervisor import EngineSupervisor
from megarl.errors import UserError
from megarl.rollout.batch import assemble
from megarl.rollout.config import RolloutConfig
from megarl.rollout.evaluation import Evaluated
from megarl.rollout.waits import PublishAgain
from megarl.signals import Stop
from megarl.types import Cursor, Group, Prompt, StepBatch

SERVICE = "rollouts"
STOP_TIMEOUT_S = 5.0
"""Seconds an engine or service has to stop before it is killed."""

MIN_OBJECT_STORE_BYTES = 512 * 2**20
"""Minimum size of Ray's object store. Memory is only used as objects are stored."""

STOP_POLL_S = 0.2
"""Seconds between two checks for a stop signal while waiting for the rollout service. An answer
of the service ends the wait at once."""

IMPATIENT_STOP_TIMEOUT_S = 0.5
"""As `STOP_TIMEOUT_S`, for a run that ends by a signal or an error."""

SERVICE_TIMEOUT_S = 120.0
"""Seconds the rollout service has to answer a call that waits for nothing."""

PROGRESS_POLL_S = 5.0
"""Seconds between two questions whether the rollouts that a rank waits for make progress."""


class Cluster:
    """A Ray cluster and the actors of a run. As a context manager it ends, on exit, all processes
    it started.
    """

    def __init__(
        self,
        *,
        namespace: str,
        token: str,
        address: str = "",
        object_store_bytes: int = MIN_OBJECT_STORE_BYTES,
        hidden: str = "",
    ) -> None:
        """Start Ray on this machine with an object store of `object_store_bytes`, or join the
        cluster at `address` (or RAY_ADDRESS), authenticated by `token`. Ray spills to disk what
        exceeds the object store. `hidden`: name of an environment variable that a Ray started here
        does not get. Raises `UserError` if RAY_ADDRESS names no cluster.
        """
        try:
            address = address or ray_address()
        except ValueError as error:
            raise UserError(str(error)) from None
        use_cluster_token(token)
        self.namespace = namespace
        self._owned: list[ActorHandle] = []
        self._groups: list[EngineGroup] = []
        self._supervisors: list[EngineSupervisor] = []
        self._service_ready: Any = None
        self._folder: PrivateFolder | None = None
        # Ray puts handlers of its own in place, which end the process on the spot.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        options: dict[str, Any] = {
            "namespace": namespace,
            "log_to_driver": True,
            "logging_level": "ERROR",
        }
        if address:
            try:
                ray.init(address=address, **options)
            except ConnectionError as error:
                if address != "auto":
                    raise
                raise UserError(
                    f"RAY_ADDRESS is auto: no Ray cluster runs here ({str(error).splitlines()[0]});"
                    " unset RAY_ADDRESS to start Ray here, or set it to a head's host:port"
                ) from error
        else:
            with without_variable(hidden):
                self._folder = start_ray(
                    include_dashboard=False,
                    num_cpus=max(4, os.cpu_count() or 1),
                    object_store_memory=object_store_bytes,
                    **options,
                )
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.address: str = ray.get_runtime_context().gcs_address

    def start_engines(
        self,
        seats: Sequence[Seat],
        *,
        timeout_s: float,
        environment: dict[str, str],
        **arguments: Any,
    ) -> EngineGroup:
        """Start an engine on every seat, in parallel, without waiting; call `.wait()` on the result
        before use.
        """
        if self._folder is not None:
            environment = environment | {SOCKETS: str(self._folder.path)}

        def start(number: int) -> ActorHandle:
            actor = ray.remote(EngineActor).options(
                max_concurrency=100_000, **seats[number].options
            )
            handle = actor.remote(
                number=number, environment=environment | seats[number].environment, **arguments
            )
            self._owned.append(handle)
            return handle

        self._groups.append(EngineGroup(len(seats), start, timeout_s))
        return self._groups[-1]

    def supervise(self, engines: EngineGroup, config: RolloutConfig, *, loads: bool) -> None:
        """Watch started engines from now on, and replace those that die or hang. `loads`: the
        engines read their weights from disk, and nothing is published to them.
        """
        supervisor = EngineSupervisor(
            engines,
            stall_s=config.engine.stall_timeout_s,
            start_s=config.engine.start_timeout_s,
            loads=loads,
        )
        self._supervisors.append(supervisor)

    def start_service(self, build: Callable[[], Any], *, held_out: list[Prompt]) -> ActorHandle:
        """Start the rollout service in a named actor that every rank can look up; `build`
        constructs it there. Call `wait_for_service` before use. `held_out`: the problems it
        evaluates on. It runs on this process's node, where the run folder is, since it writes the
        ledger there.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        handle = (
            ray.remote(ServiceActor)
            .options(name=SERVICE, num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
            .remote(build, held_out)
        )
        self._owned.insert(0, handle)
        self._service_ready = handle.build.remote()
        return handle

    def wait_for_service(self, timeout_s: float) -> None:
        """Wait until the rollout service is ready. Raises `RuntimeError` if it fails or is not
        ready within `timeout_s`.
        """
        starting = {"the rollout service": self._service_ready}
        ask(starting, timeout_s, "starting", "raise rollout.engine.start_timeout_s")

    def close(self, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the actors, then Ray, then kill the processes of vLLM that still run."""
        for supervisor in self._supervisors:
            supervisor.close(stop_timeout_s)
        stops = []
        for handle in self._owned:
            with contextlib.suppress(Exception):
                stops.append(handle.stop.remote())
        if stops:
            with contextlib.suppress(Exception):
                ray.wait(stops, num_returns=len(stops), timeout=stop_timeout_s)
        for handle in self._owned:
            with contextlib.suppress(Exception):
                ray.kill(handle)
        self._owned = []
        shut_down()
        end([process for group in self._groups for process in group.processes()], patience_s=1.0)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(stop_timeout_s=STOP_TIMEOUT_S if kind is None else IMPATIENT_STOP_TIMEOUT_S)


class RolloutClient:
    """A trainer rank's interface to the rollout service. Every call has a timeout; a call that
    waits for rollouts has one for the time without progress.

    Once `stop` is set, the service is told to give out no further work, and `take` and `evaluate`
    return None, on all ranks after the same step.
    """

    def __init__(self, data_rank: int, *, silence_s: float) -> None:
        """Find the rollout service in the Ray cluster that this process has joined. `data_rank`:
        this rank's number on the data axis, whose samples `take` returns. `silence_s`: seconds
        without progress of the rollouts, after which a wait for them ends with an error
        (`megarl.config.silence_s`).
        """
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._silence_s = data_rank, silence_s
        self.stop = Stop()
        """Set by a signal that ends the run."""

    def start(self, receipts: Sequence[str] = ()) -> None:
        """Have the rollout service start to generate, with the weights of these `receipts`."""
        self._ask(self._service.start.remote(receipts), "starting rollouts")

    def take(self, step: int, publish_again: Callable[[], object]) -> StepBatch | None:
        """The samples of this rank for `step`; the token arrays are read from Ray's object
        store. None if the run is to end before that step. `publish_again` publishes the present
        weights; it is called, on all ranks alike, whenever an engine was replaced meanwhile.
        """
        plan = self._ask_unless_stopped(
            lambda count: self._service.take.remote(step, self._data_rank, count),
            f"rollouts of step {step + 1}",
            publish_again,
        )
        if plan is None:
            return None
        return assemble(plan, partial(fetch, timeout_s=self._silence_s))

    def release(self, step: int, receipts: Sequence[str] = ()) -> None:
        """Tell the service that `step` is trained and weight version `step + 1`, which has these
        `receipts`, is on the engines.
        """
        self._ask(self._service.release.remote(step + 1, receipts), f"releasing step {step + 1}")

    def cursor(self, step: int) -> Cursor:
        """The groups that the first `step` steps have used."""
        return self._ask(
            self._service.cursor.remote(step), f"reading the prompt cursor after {step} steps"
        )

    def unused(self, step: int) -> list[Group]:
        """The finished groups that the first `step` steps have not used and that this data rank is
        to write into a checkpoint, with their token arrays.
        """
        doing = f"reading the finished groups after {step} steps"
        groups = self._ask(self._service.unused.remote(step, self._data_rank), doing)
        stored = [part.arrays for part in segments_of(groups)]
        return with_arrays(groups, fetch(stored, self._silence_s)) if stored else []

    def evaluate(
        self, temperature: float, name: str, publish_again: Callable[[], object]
    ) -> Evaluated | None:
        """Generate and score one response to each held-out problem: (metrics, transcripts). None if
        the run is to end. `publish_again`: see `take`.
        """
        return self._ask_unless_stopped(
            lambda count: self._service.evaluate.remote(temperature, name, count),
            f"responses of evaluation '{name}'",
            publish_again,
        )

    def stop_early(self) -> None:
        """End the run on all ranks after the present step: its metric is good enough."""
        self._ask(self._service.interrupt.remote(True), "stopping early")

    def is_early_stop(self) -> bool:
        """Whether `stop_early`, and no signal, has ended the run."""
        try:
            return self._ask(self._service.is_early_stop.remote(), "asking why the run ended")
        except ActorDied:
            if self.stop:  # see `_ask_unless_stopped`
                return False
            raise

    def answers(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        name: str,
        *,
        takes_failures: bool = False,
    ) -> Any:
        """Ask for one scored response to each problem, without waiting; see `collect`.
        `takes_failures`: failed verdicts are returned, however many.
        """
        return self._service.answers.remote(list(prompts), temperature, name, takes_failures)

    def collect(self, pending: Sequence[Any]) -> Iterator[list[dict[str, Any]]]:
        """Wait for evaluation results. `pending` are what calls of `answers` returned.

        Yields one list of records per call, in the order of the calls.
        """
        for reference in pending:
            with self._wait("responses") as span:
                watch = self._progress_watch(span)
                while not ray.wait([reference], timeout=STOP_POLL_S)[0]:
                    watch()
            yield self._ask(reference, "collecting responses")

    def _ask_unless_stopped(
        self, call: Callable[[int], Any], what: str, publish_again: Callable[[], object]
    ) -> Any:
        """The answer to `call`, which gets the number of publications so far; before and while
        waiting, tells the service if the run is to end. None if the service is dead by then:
        torchrun passes a signal on to Ray's processes too, which may end before this one.
        """
        try:
            return self._answer(call, what, publish_again)
        except ActorDied:
            if self.stop:
                return None
            raise

    def _answer(
        self, call: Callable[[int], Any], what: str, publish_again: Callable[[], object]
    ) -> Any:
        """As `_ask_unless_stopped`; raises `ActorDied` if the service is dead."""
        told, count, reference = False, 0, None
        with self._wait(what) as span:
            watch = self._progress_watch(span)
            while True:
                if self.stop and not told:
                    self._ask(self._service.interrupt.remote(False), "ending the run")
                    told = True
                reference = reference or call(count)
                if not ray.wait([reference], timeout=STOP_POLL_S)[0]:
                    watch()
                    continue
                answer = self._ask(reference, f"waiting for {what}")
                if not isinstance(answer, PublishAgain):
                    return answer
                publish_again()
                reference, count, watch = None, count + 1, self._progress_watch(span)

    def _wait(self, what: str) -> Span:
        """A context manager that records a wait for the rollout service."""
        return activity(what, kind="wait", of="service", deadline_s=self._silence_s)

    def _progress_watch(self, span: Span) -> Callable[[], None]:
        """A function to call in the wait `span` for rollouts: raises `RuntimeError` once they have
        made no progress for `silence_s` seconds.
        """
        span.moved()
        progress, moved_at = -1, time.monotonic()
        asked_at = moved_at

        def watch() -> None:
            nonlocal progress, moved_at, asked_at
            if time.monotonic() < asked_at + PROGRESS_POLL_S:
                return
            found = self._ask(self._service.progress.remote(), f"waiting for {span.what}")
            asked_at = time.monotonic()
            if found != progress:
                progress, moved_at = found, asked_at
                span.moved()
            elif asked_at - moved_at > self._silence_s:
                raise RuntimeError(
                    f"no engine has made a step and no response was judged for {self._silence_s:g}"
                    f" s, while this rank waited for {span.what}; look at run.log for what engines"
                    " and environment printed last"
                )

        return watch

    def _ask(self, reference: Any, doing: str) -> Any:
        with activity(doing, kind="wait", of="service", deadline_s=SERVICE_TIMEOUT_S, quiet=True):
            return ask({"the rollout service": reference}, SERVICE_TIMEOUT_S, doing)[0]
