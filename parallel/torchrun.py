"""torchrun whose last words are those of the rank that failed.

    python -m megarl.parallel.torchrun --nproc-per-node 2 -m megarl run recipe.yaml
    megarl run recipe.yaml --ranks 2                                        the same

The exit code is that of the rank that failed first, whose one line of error stands alone instead of
above torchrun's traceback. With --max-restarts, a mistake of the user ends the job.

torch's stores listen on all addresses and serve whoever connects. On one host, ranks and agent meet
at files in the run's private folder instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes
from torch.distributed.run import run as start

from megarl.errors import UserError
from megarl.parallel.mesh import STORE
from megarl.parallel.node_watch import NodeWatch, lost_after_s
from megarl.system.private_folder import run_folder
from megarl.system.signals import AGENT, SHUTDOWN, SHUTDOWN_S, SIGNALS

SAID = 2
"""Exit code of a rank that has printed a `UserError`."""


class NodeLost(Exception):
    """Ends the agent, because another node is gone or failed; the reason is printed already."""


class Agent(LocalElasticAgent):
    """torchrun's agent, which does not start ranks again after a mistake of the user, and ends them
    where another node is gone.
    """

    shares_cores: ClassVar[bool] = False
    """Whether each rank chooses its threads itself, without torchrun's OMP_NUM_THREADS=1."""
    _watch: NodeWatch | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.shares_cores:
            os.environ.pop("OMP_NUM_THREADS", None)
        return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue] - its decorator

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # A static rendezvous gives every node the same number again, and its calls may wait for a
        # node that is gone: the watch goes on. Any other may leave nodes out, and has deadlines.
        is_static = worker_group.spec.rdzv_handler.get_backend() == "static"
        if self._watch is not None and not is_static:
            self._watch.close()
            self._watch = None
        super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue] - its decorator
        store, node = worker_group.store, worker_group.group_rank
        num_nodes = worker_group.group_world_size or 1
        if num_nodes > 1 and self._watch is None:
            assert store is not None and node is not None, "no rendezvous"
            patience_s = float(min(self._shutdown_timeout, SHUTDOWN_S))
            self._watch = NodeWatch(
                store.clone(), node, num_nodes, shutdown_s=patience_s, end=self._end_by_force
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] - its decorator
        codes = [failure.exitcode for failure in result.failures.values()]
        is_over = result.state == WorkerState.SUCCEEDED
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if SAID in codes:
                self._remaining_restarts = 0
            is_over = self._remaining_restarts == 0
        if self._watch is None:
            return result
        if is_over:
            self._watch.leave(exit_code(codes[0]) if codes else 0)
        elif problem := self._watch.problem():
            # As torch waits for the ranks beside one that has failed. Those that NCCL holds in a
            # collective do not end by themselves, and no checkpoint can be begun any more.
            self._shutdown_timeout = min(self._shutdown_timeout, SHUTDOWN_S)
            raise NodeLost(problem)
        return result

    def _end_by_force(self) -> NoReturn:
        """End this process, whatever it waits for. The ranks get SIGTERM and time to end; the
        kernel kills those that are left.
        """
        ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
        psutil.wait_procs(ranks, timeout=self._shutdown_timeout)
        os._exit(1)


def run_agent(arguments: list[str], environment: Mapping[str, str] | None = None) -> int:
    """Do what torchrun does with these `arguments`; the ranks get `environment` too. Returns the
    exit code: 0; that of the rank that failed first; 128 + a signal's number; 2 for a mistake of
    the user; 1 where a node is lost. Prints errors in one line.
    """
    os.environ.update(environment or {})
    Agent.shares_cores = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, with a warning
    # torchrun's own words about ranks that end: the first rank's are printed, or named below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[AGENT] = str(os.getpid())
    # It takes SIGHUP for a signal to end even where `nohup` has it ignored.
    os.environ.setdefault(
        "TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join([*(sig.name for sig in SIGNALS), "SIGQUIT"])
    )
    try:
        # torchrun has no option for the class of its agent.
        with run_folder() as folder, patch.object(api, LocalElasticAgent.__name__, Agent):
            lost_after_s()
            options = read_options(arguments)
            if options.shutdown_timeout is not None:  # the ranks compare it with what they need
                os.environ[SHUTDOWN] = str(options.shutdown_timeout)
            meet_at_files(options, folder)
            start(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != SAID:
            how = f"exit code {failure.exitcode}"
            if failure.exitcode < 0:
                how = f"signal {-failure.exitcode}"
            print(f"megarl: rank {rank} ended first, with {how}", file=sys.stderr)
        return exit_code(failure.exitcode)
    except UserError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return SAID
    except NodeLost:
        return 1
    except (dist.DistError, RendezvousError) as error:
        why = str(error).splitlines()[0]
        print(
            f"megarl: torchrun cannot reach node 0 ({why}); the ranks of this node are ended",
            file=sys.stderr,
        )
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def read_options(arguments: list[str]) -> Namespace:
    """torchrun's parsed options. Raises `UserError` for those that it refuses. torchrun makes a
    temporary folder as it reads them.
    """

    def error(message: str) -> NoReturn:
        raise ValueError(message)

    parser = get_args_parser()
    parser.error = error
    try:
        options = parser.parse_args(arguments)
        config_from_args(options)
        if getattr(options, "numa_binding", None) and not torch.cuda.is_available():
            raise ValueError(
                "--numa-binding binds a rank to the cores beside its GPU; there is none"
            )
    except (ValueError, OSError) as problem:
        raise UserError(
            f"torchrun refuses its options: {problem}; python -m torch.distributed.run --help lists"
            " them"
        ) from None
    return options


def meet_at_files(options: Namespace, folder: Path) -> None:
    """Change `options` of a job of one node in place, and the ranks' environment, so that agent and
    ranks meet at files in `folder` and open no TCP port.
    """
    if parse_min_max_nnodes(options.nnodes)[1] > 1:
        return
    options.standalone = False
    options.rdzv_backend, options.rdzv_conf = "c10d", "store_type=file"
    options.rdzv_endpoint = str(folder / f"agent-{os.getpid()}")
    options.rdzv_id = options.rdzv_id if options.rdzv_id != "none" else str(os.getpid())
    options.local_addr = options.local_addr or options.master_addr
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # one that the agent opens for the ranks
    os.environ[STORE] = str(folder / f"ranks-{os.getpid()}")


def exit_code(code: int) -> int:
    """The shell's code: -9, for signal 9, becomes 137."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_agent(sys.argv[1:]))
