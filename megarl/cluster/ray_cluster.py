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
from ray._private import ray_constants
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.asking import KILL_S, ask, within
from megarl.cluster.engines import ActorHandle, EngineGroup
from megarl.cluster.placement import Seat
from megarl.cluster.private_ray import start_ray
from megarl.cluster.process_env import use_cluster_token, without_variable
from megarl.cluster.processes import end
from megarl.cluster.ray_address import ray_address
from megarl.cluster.ray_shutdown import shut_down
from megarl.cluster.remote import EngineActor
from megarl.cluster.rollout_client import SERVICE
from megarl.cluster.service_process import ServiceActor
from megarl.cluster.supervisor import EngineSupervisor
from megarl.errors import UserError
from megarl.private_folder import run_folder
from megarl.rollout.config import RolloutConfig
from megarl.signals import SIGNALS, ignore_while_closing
from megarl.types import Prompt

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
        self._stack = contextlib.ExitStack()
        # Ray puts handlers of its own in place, which end the process on the spot.
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        options: dict[str, Any] = {
            "namespace": namespace,
            "log_to_driver": True,
            "logging_level": "ERROR",
        }
        # Where Ray is told that there are no other hosts, it listens on loopback only, and takes
        # 127.0.0.1 for what it is: a Ray started here, by this process, rank 0 or the launcher.
        ray_constants.ENABLE_RAY_CLUSTER = bool(address) and not address.startswith("127.0.0.1:")
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
            with contextlib.ExitStack() as stack, without_variable(hidden):
                start_ray(
                    stack.enter_context(run_folder()),
                    include_dashboard=False,
                    num_cpus=max(4, os.cpu_count() or 1),
                    object_store_memory=object_store_bytes,
                    **options,
                )
                self._stack = stack.pop_all()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.address: str = ray.get_runtime_context().gcs_address

    def start_engines(
        self,
        seats: Sequence[Seat],
        *,
        timeout_s: float,
        environment: dict[str, str],
        fewest: int | None = None,
        **arguments: Any,
    ) -> EngineGroup:
        """Start an engine on every seat, in parallel, without waiting; call `.wait()` on the result
        before use. `fewest`: see `EngineGroup`.
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

        self._groups.append(EngineGroup(len(seats), start, timeout_s, fewest=fewest))
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
        within(stop_timeout_s + KILL_S, lambda: self._stop_actors(stop_timeout_s))
        self._owned = []
        shut_down()
        end([process for group in self._groups for process in group.processes()], patience_s=1.0)
        self._stack.close()

    def _stop_actors(self, stop_timeout_s: float) -> None:
        owned, stops = self._owned, []
        for handle in owned:
            with contextlib.suppress(Exception):
                stops.append(handle.stop.remote())
        if stops:
            with contextlib.suppress(Exception):
                ray.wait(stops, num_returns=len(stops), timeout=stop_timeout_s)
        for handle in owned:
            with contextlib.suppress(Exception):
                ray.kill(handle)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            # The other ranks fail once the service is gone, and torchrun then sends SIGTERM here.
            ignore_while_closing()
        self.close(stop_timeout_s=STOP_TIMEOUT_S if kind is None else IMPATIENT_STOP_TIMEOUT_S)
