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

from megarl.cluster.engines import ActorHandle, EngineGroup, ask, end
from megarl.cluster.mailbox import fetch
from megarl.cluster.placement import Seat
from megarl.cluster.process_env import use_cluster_token, without_variable
from megarl.cluster.ray_address import ray_address
from megarl.cluster.remote import EngineActor
from megarl.cluster.service_process import ServiceActor
from megarl.console import say
from megarl.errors import UserError
from megarl.rollout.batch import assemble
from megarl.rollout.evaluation import Evaluated
from megarl.signals import Stop
from megarl.types import Prompt, StepBatch

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


RAY_ATTEMPTS = 3
"""Times that Ray is started before its failure ends the run."""


def start_ray(**options: Any) -> None:
    """Start a Ray of its own on this machine with the options of `ray.init`. Ray gives itself 30 s,
    which cannot be set and which a busy machine exceeds: then it is started again.
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        try:
            # Without "local", Ray joins whatever `ray start` last started on this machine.
            ray.init(address="local", **options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == RAY_ATTEMPTS:
                raise
            say("megarl: warning: Ray did not start within 30 s; starting it again")
            ray.shutdown()


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
        self._service_ready: Any = None
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
                start_ray(
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
        with contextlib.suppress(Exception):
            ray.shutdown()
        end([process for group in self._groups for process in group.processes()], patience_s=1.0)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(stop_timeout_s=STOP_TIMEOUT_S if kind is None else IMPATIENT_STOP_TIMEOUT_S)


class RolloutClient:
    """A trainer rank's interface to the rollout service. Every call has a timeout.

    Once `stop` is set, the service is told to give out no further work, and `take` and `evaluate`
    return None, on all ranks after the same step.
    """

    def __init__(self, data_rank: int, *, deadline_s: float) -> None:
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._deadline_s = data_rank, deadline_s
        self.deadline_s = deadline_s
        self.stop = Stop()
        """Set by a signal that ends the run."""

    def start(self) -> None:
        """Have the rollout service start to generate."""
        self._ask(self._service.start.remote(), "starting rollouts")

    def take(self, step: int) -> StepBatch | None:
        """The samples of this rank for `step`; the token arrays are read from Ray's object
        store. None if the run is to end before that step.
        """
        plan = self._ask_unless_stopped(
            lambda: self._service.take.remote(step, self._data_rank),
            f"waiting for the rollouts of step {step + 1}",
        )
        if plan is None:
            return None
        return assemble(plan, partial(fetch, timeout_s=self._deadline_s))

    def release(self, step: int) -> None:
        """Tell the service that `step` is trained and weight version `step + 1` is on the
        engines.
        """
        self._ask(self._service.release.remote(step + 1), f"releasing step {step + 1}")

    def cursor(self, step: int) -> int:
        """Ordinal of the first prompt not used by the first `step` steps."""
        return self._ask(
            self._service.cursor.remote(step), f"reading the prompt cursor after {step} steps"
        )

    def evaluate(self, temperature: float, name: str) -> Evaluated | None:
        """Generate and score one response to each held-out problem: (metrics, transcripts). None if
        the run is to end.
        """
        return self._ask_unless_stopped(
            lambda: self._service.evaluate.remote(temperature, name), "evaluating"
        )

    def stop_early(self) -> None:
        """End the run on all ranks after the present step: its metric is good enough."""
        self._ask(self._service.interrupt.remote(True), "stopping early")

    def is_early_stop(self) -> bool:
        """Whether `stop_early`, and no signal, has ended the run."""
        return self._ask(self._service.is_early_stop.remote(), "asking why the run ended")

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
            yield self._ask(reference, "evaluating")

    def _ask_unless_stopped(self, call: Callable[[], Any], doing: str) -> Any:
        """The answer to `call`; before and while waiting, tells the service if the run is to
        end.
        """
        deadline, told = time.monotonic() + self._deadline_s, False
        reference = None
        while True:
            if self.stop and not told:
                self._ask(self._service.interrupt.remote(False), "ending the run")
                told = True
            reference = reference or call()
            if ray.wait([reference], timeout=STOP_POLL_S)[0]:
                return self._ask(reference, doing)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the rollout service did not answer within {self._deadline_s:g} s ({doing})"
                )

    def _ask(self, reference: Any, doing: str) -> Any:
        return ask({"the rollout service": reference}, self._deadline_s, doing)[0]
