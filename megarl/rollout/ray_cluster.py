"""Ray, the engines and the rollout service: rank 0 starts them and ends them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import node as ray_node
from ray._private import ray_constants, worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.engines.pool import ActorHandle
from megarl.errors import UserError
from megarl.rollout.client import SERVICE
from megarl.rollout.service_process import ServiceActor
from megarl.settings.rollout import RolloutConfig
from megarl.system.console import say
from megarl.system.private_folder import refuse_open, run_folder
from megarl.system.process_env import use_cluster_token, without_variable
from megarl.system.processes import Process, end, with_descendants
from megarl.system.ray_address import ray_address
from megarl.system.ray_calls import KILL_S, THE_SERVICE, ask, done_within
from megarl.system.signals import SIGNALS, ignore_while_closing

RAY_ATTEMPTS = 3
"""How often Ray is started where it is late."""

_leaves_group = False
"""Whether a process that is forked now leaves this one's process group."""


def _leave() -> None:
    if _leaves_group:
        os.setpgid(0, 0)


# Runs in processes that subprocess starts with a preexec_fn, as Ray starts its own.
os.register_at_fork(after_in_child=_leave)


class SmallNode(ray_node.Node):
    """Ray's node without the autoscaler, and without the dashboard's server, for which `ray.init`
    waits.
    """

    def start_monitor(self) -> None:
        """Start no autoscaler."""

    def start_api_server(self, **_: object) -> None:
        """Start no server of the dashboard."""

    def start_ray_processes(self) -> None:
        """Also waits until Ray's head knows this node: `ray.init` looks for it only once a
        second.
        """
        super().start_ray_processes()
        # As long as `ray.init` itself waits for the node.
        head, deadline = self.get_gcs_client(), time.monotonic() + 10.0
        assert head is not None
        while not head.get_all_node_info() and time.monotonic() < deadline:
            time.sleep(0.02)


def start_ray(folder: Path, **options: Any) -> None:
    """Start a Ray cluster here and connect to it; a start that is late is repeated.

    `folder`: absolute, mode 700. `options`: of `ray.init`. Ray's processes leave the process group,
    to which torchrun sends SIGTERM: engines outlive the rank's last checkpoint. Raises `UserError`
    if `folder` is open to others, or Ray's error.
    """
    global _leaves_group
    ray_node.Node = SmallNode
    for attempt in range(1, RAY_ATTEMPTS + 1):
        _leaves_group = True
        try:
            # Without "local", Ray joins whatever `ray start` last started on this machine.
            ray.init(address="local", _temp_dir=f"{folder}/ray", **options)
            refuse_open(folder)
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == RAY_ATTEMPTS:
                raise
            say("megarl: warning: Ray did not start within 30 s; starting it again")
        finally:
            _leaves_group = False


MIN_OBJECT_STORE_BYTES = 512 * 2**20
"""Memory is used only as objects are stored."""

BYTES_PER_TOKEN = 8
"""Of `TokenArrays` without experts: int32 and float32."""

SHARED_MEMORY = Path("/dev/shm")


def object_store_bytes(rollout: RolloutConfig, expert_bytes: int = 0) -> int:
    """Bytes for the token arrays of all rollouts kept at the same time: at most a third of the free
    shared memory, at least `MIN_OBJECT_STORE_BYTES`. `expert_bytes`: of a token's experts.
    """
    draws = rollout.dynamic_sampling.max_draws if rollout.dynamic_sampling.enabled else 1.0
    groups = draws * max(
        rollout.most_open_groups, (1 + rollout.max_staleness) * rollout.groups_per_step
    )
    tokens = groups * rollout.group_size * rollout.max_new_tokens
    needed = int(tokens * (BYTES_PER_TOKEN + expert_bytes))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return max(MIN_OBJECT_STORE_BYTES, min(needed, free // 3))


class Cluster:
    """This process's connection to a run's Ray cluster. Rank 0 starts Ray or joins a cluster, and
    starts actors; the others join. On exit, what it started ends.
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
        """Join the cluster at `address` (or RAY_ADDRESS), or start Ray here.

        `namespace`: in which actors are found by name. `token`: Ray's, the same in all processes.
        `hidden`: an environment variable that Ray does not inherit. Raises `UserError` if
        RAY_ADDRESS names no cluster.
        """
        try:
            address = address or ray_address()
        except ValueError as error:
            raise UserError(str(error)) from None
        use_cluster_token(token)
        self.namespace = namespace
        self._owned: list[ActorHandle] = []
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

    def start_service(self, arguments: Callable[[], dict[str, Any]]) -> ActorHandle:
        """Start the service on this node, whose disk has the ledger; returns at once. `arguments`
        is pickled and called there.
        """
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        handle = (
            ray.remote(ServiceActor)
            .options(name=SERVICE, num_cpus=0, max_concurrency=100_000, scheduling_strategy=node)
            .remote(arguments)
        )
        self._owned.insert(0, handle)
        self._service_ready = handle.build.remote()
        return handle

    def wait_for_service(self, timeout_s: float) -> None:
        """Raises `RuntimeError` if the start fails or takes longer."""
        fix = "raise rollout.engine.start_timeout_s"
        ask(THE_SERVICE, self._service_ready, timeout_s, "starting", fix)

    def close(self, *, stop_timeout_s: float = 5.0) -> None:
        """Stop the service with its engines, then end Ray. `stop_timeout_s`: until they are
        killed.
        """
        done_within(stop_timeout_s + KILL_S, lambda: self._stop_actors(stop_timeout_s))
        self._owned = []
        shut_down()
        self._stack.close()

    def _stop_actors(self, stop_timeout_s: float) -> None:
        with contextlib.suppress(Exception):
            stops = [handle.stop.remote() for handle in self._owned]
            ray.wait(stops, num_returns=len(stops), timeout=stop_timeout_s)
        for handle in self._owned:
            with contextlib.suppress(Exception):
                ray.kill(handle)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, exc: type[BaseException] | None, *error: object) -> None:
        if exc is not None:
            # The other ranks fail once the service is gone, and torchrun then sends SIGTERM here.
            ignore_while_closing()
        self.close(stop_timeout_s=5.0 if exc is None else 0.5)


def started_processes() -> list[Process]:
    """The Ray processes that this process has started, with all descendants."""
    node = worker._global_node
    processes: list[Process] = []
    for infos in list(node.all_processes.values()) if node is not None else ():
        for info in infos:
            with contextlib.suppress(psutil.Error):
                born = psutil.Process(info.process.pid).create_time()
                processes += with_descendants((socket.gethostname(), info.process.pid, born))
    return processes


def shut_down(timeout_s: float = 15.0) -> None:
    """End Ray in this process, and kill what is left of the processes it has started."""
    processes = started_processes()
    if not done_within(timeout_s, ray.shutdown):
        say(f"megarl: Ray has not shut down within {timeout_s:g} s; its processes are killed")
        end(processes, patience_s=0.0)
    end(processes, patience_s=1.0)
