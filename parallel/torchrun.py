"""torchrun whose last words are those of the rank that failed.

    python -m megarl.parallel.torchrun --nproc-per-node 2 -m megarl train recipe.yaml
    megarl torchrun --nproc-per-node 2 train recipe.yaml                    the same

torchrun itself ends with exit code 1 whatever happened, below 50 lines of its own traceback. Here
the exit code is that of the rank that failed first, and a rank's one line of error stands alone.
With --max-restarts, ranks are not started again after a mistake of the user.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import main

from megarl.parallel.node_watch import NodeWatch
from megarl.signals import AGENT, SHUTDOWN, SHUTDOWN_S

SAID = 2
"""Exit code of a rank that has printed the user's mistake in one line."""

TRAINS = ("train", "distill", "sft", "preference", "reward-model", "replay")
"""Commands that run on several ranks."""


class NodeLost(Exception):
    """Another node of the job is gone; the text names it."""


class Agent(LocalElasticAgent):
    """torchrun's agent, for which a mistake that a rank has said is final: another attempt would
    only say it again. On several nodes it ends its ranks once another node is gone.
    """

    _watch: NodeWatch | None = None
    _is_node_lost = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] - its decorator
        codes = [failure.exitcode for failure in result.failures.values()]
        if result.state == WorkerState.FAILED and SAID in codes:
            self._remaining_restarts = 0
        if result.state == WorkerState.HEALTHY and (problem := self._lost_nodes(worker_group)):
            self._is_node_lost = True
            raise NodeLost(problem)
        if result.state == WorkerState.SUCCEEDED and self._watch is not None:
            self._watch.leave()
        return result

    def _lost_nodes(self, group: WorkerGroup) -> str:
        """Which other nodes are gone; empty if none is."""
        num_nodes, port = group.group_world_size or 1, group.master_port
        if num_nodes == 1 or not group.spec.rdzv_handler.use_agent_store:
            return ""
        if self._watch is None:
            assert group.master_addr and port and group.group_rank is not None, "no rendezvous"
            self._watch = NodeWatch(group.master_addr, port, group.group_rank, num_nodes)
        return self._watch.problem()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_S
    ) -> None:
        """End the ranks. Without those of a lost node they can save nothing: they are killed."""
        super()._shutdown(signal.SIGKILL if self._is_node_lost else death_sig, timeout)


@contextmanager
def own_agent() -> Iterator[None]:
    """A context manager in which torchrun uses `Agent`: it takes its agent from this name, and has
    no option for one.
    """
    with patch.object(api, LocalElasticAgent.__name__, Agent):
        yield


def run(arguments: list[str]) -> int:
    """Start the ranks and wait for them; returns their exit code. If a signal ended a rank or this
    process, returns 128 + the signal's number.
    """
    # torchrun's own words about ranks that end: the first rank's are printed, or named below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, with a warning
    os.environ[AGENT] = str(os.getpid())
    if waits := shutdown_timeout(arguments):
        os.environ[SHUTDOWN] = waits  # the ranks compare it with what they need
    try:
        with own_agent():
            main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != SAID:
            how = f"exit code {failure.exitcode}"
            if failure.exitcode < 0:
                how = f"signal {-failure.exitcode}"
            print(f"megarl: rank {rank} ended first, with {how}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except NodeLost as error:
        print(f"megarl: {error}; the ranks of this node are ended", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def shutdown_timeout(arguments: list[str]) -> str:
    """The value of torchrun's option --shutdown-timeout, which stands before the program; "" if it
    is not among the arguments.
    """
    for index, word in enumerate(arguments):
        if word == "-m" or not word.startswith("-"):
            continue
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--shutdown-timeout":
            return value or "".join(arguments[index + 1 : index + 2])
    return ""


def command(arguments: list[str]) -> int:
    """`megarl torchrun OPTIONS COMMAND ...`: run `megarl COMMAND ...` on the ranks that torchrun's
    OPTIONS ask for. Returns the exit code.
    """
    commands = [index for index, word in enumerate(arguments) if word in TRAINS]
    if not commands:
        names = "|".join(name for name in TRAINS if name != "replay")
        print(
            f"usage: megarl torchrun --nproc-per-node N {names} RECIPE.yaml, or N replay RUN",
            file=sys.stderr,
        )
        return SAID
    start = commands[0]
    return run([*arguments[:start], "-m", "megarl", *arguments[start:]])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
