"""Processes that are not trainer ranks: Ray, the engines and the rollout service. Rank 0 starts
them and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

from megarl.cluster.engines import ActorHandle, EngineGroup, ask, end
from megarl.cluster.mailbox import fetch
from megarl.cluster.placement import Seat
from megarl.cluster.process_env import use_cluster_token
from megarl.cluster.remote import EngineActor
from megarl.cluster.service_process import ServiceActor
from megarl.rollout.batch import assemble
from megarl.rollout.evaluation import Evaluated
from megarl.types import Prompt, StepBatch

SERVICE = "rollouts"
STOP_TIMEOUT_S = 5.0
"""Seconds an engine or service has to stop before it is killed."""

MIN_OBJECT_STORE_BYTES = 512 * 2**20
"""Minimum size of Ray's object store. Memory is only used as objects are stored."""

IMPATIENT_STOP_TIMEOUT_S = 0.5
"""As `STOP_TIMEOUT_S`, for a run that ends by a signal or an error."""


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
    ) -> None:
        """Start Ray on this machine with an object store of `object_store_bytes`, or join the
        cluster at `address` (or RAY_ADDRESS), authenticated by `token`. Ray spills to disk what
        exceeds the object store.
        """
        use_cluster_token(token)
        self.namespace = namespace
        self._owned: list[ActorHandle] = []
        self._groups: list[EngineGroup] = []
        self._service_ready: Any = None
        address = address or os.environ.get("RAY_ADDRESS", "")
        # Ray puts handlers of its own in place, which end the process on the spot.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        options: dict[str, Any] = {
            "namespace": namespace,
            "log_to_driver": True,
            "logging_level": "ERROR",
        }
        if address:
            ray.init(address=address, **options)
        else:
            ray.init(
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
        evaluates on.
        """
        handle = (
            ray.remote(ServiceActor)
            .options(name=SERVICE, num_cpus=0, max_concurrency=100_000)
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
    """A trainer rank's interface to the rollout service. Every call has a timeout."""

    def __init__(self, data_rank: int, *, deadline_s: float) -> None:
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._deadline_s = data_rank, deadline_s

    def start(self) -> None:
        """Have the rollout service start to generate."""
        self._ask(self._service.start.remote(), "starting rollouts")

    def take(self, step: int) -> StepBatch:
        """The samples of this rank for `step`; the token arrays are read from Ray's object
        store.
        """
        plan = self._ask(
            self._service.take.remote(step, self._data_rank),
            f"waiting for the rollouts of step {step}",
        )
        return assemble(plan, partial(fetch, timeout_s=self._deadline_s))

    def release(self, step: int) -> None:
        """Tell the service that `step` is trained and weight version `step + 1` is on the
        engines.
        """
        self._ask(self._service.release.remote(step + 1), f"releasing step {step}")

    def cursor(self, step: int) -> int:
        """Ordinal of the first prompt not used by the first `step` steps."""
        return self._ask(
            self._service.cursor.remote(step), f"reading the prompt cursor of step {step}"
        )

    def evaluate(self, temperature: float, name: str) -> Evaluated:
        """Generate and score one response to each held-out problem: (metrics, transcripts)."""
        return self._ask(self._service.evaluate.remote(temperature, name), "evaluating")

    def _ask(self, reference: Any, doing: str) -> Any:
        return ask({"the rollout service": reference}, self._deadline_s, doing)[0]
