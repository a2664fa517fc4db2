"""Processes that are not trainer ranks: Ray, the engines and the rollout service. Rank 0 starts
them and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
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
"""Patience with an engine or service that is asked to stop, before it is killed."""

MIN_OBJECT_STORE_BYTES = 512 * 2**20
"""Memory is taken as it is used."""

IMPATIENT_STOP_TIMEOUT_S = 0.5
"""The same when the run ends by a signal or an error."""


class Cluster:
    """Ray and what runs on it. A context manager: on leaving, everything it started has ended."""

    def __init__(
        self,
        *,
        namespace: str,
        token: str,
        address: str = "",
        object_store_bytes: int = MIN_OBJECT_STORE_BYTES,
    ) -> None:
        """Start Ray on this machine with an object store of `object_store_bytes`, or join the
        cluster at `address` (or in RAY_ADDRESS) that knows `token`. What does not fit into the
        object store Ray writes to the disk.
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
        """An engine on every seat, starting side by side; `.wait()` for them before use."""

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
        """The rollout service, starting: made by `build` inside an actor of its own that every rank
        can find by name. It evaluates on the `held_out` problems. `wait_for_service` waits for it.
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
        """Wait until the rollout service is ready. Raises `RuntimeError` after `timeout_s`, and
        where it failed.
        """
        starting = {"the rollout service": self._service_ready}
        ask(starting, timeout_s, "starting", "raise rollout.engine.start_timeout_s")

    def close(self, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the actors, then Ray, then whatever of vLLM's processes is still there."""
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
    """One rank's end of the rollout service; every call has a deadline."""

    def __init__(self, data_rank: int, *, deadline_s: float) -> None:
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._deadline_s = data_rank, deadline_s

    def start(self) -> None:
        """Let the service begin."""
        self._ask(self._service.start.remote(), "starting rollouts")

    def take(self, step: int) -> StepBatch:
        """This rank's share of step `step`; its tokens are read from where they were generated."""
        plan = self._ask(
            self._service.take.remote(step, self._data_rank),
            f"waiting for the rollouts of step {step}",
        )
        return assemble(plan, fetch)

    def release(self, step: int) -> None:
        """Step `step` is trained and version `step + 1` is on the engines."""
        self._ask(self._service.release.remote(step + 1), f"releasing step {step}")

    def cursor(self, step: int) -> int:
        """First ordinal not yet trained after `step` steps."""
        return self._ask(
            self._service.cursor.remote(step), f"reading the prompt cursor of step {step}"
        )

    def evaluate(self, temperature: float, name: str) -> Evaluated:
        """One scored answer to each held-out problem: (metrics, transcripts)."""
        return self._ask(self._service.evaluate.remote(temperature, name), "evaluating")

    def _ask(self, reference: Any, doing: str) -> Any:
        return ask({"the rollout service": reference}, self._deadline_s, doing)[0]
