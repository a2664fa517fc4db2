"""The writing of one checkpoint: a thread of each rank writes its files and reports their digests
in torch.distributed's store; once all ranks have reported, a thread of rank 0 commits it.

The threads need no collective, and so wait for nobody who trains.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from megarl.parallel.collectives import Store
from megarl.settings.limits import POLL_S
from megarl.system.console import say
from megarl.system.files import in_thread

PROBLEM, OVER = "problem", "over"
"""Key of a report that tells what went wrong, in the place of files; key of the store that says
that rank 0 has committed the checkpoint or given it up."""

Digests = Mapping[str, str]
"""{path within the checkpoint: xxh3-128 digest}"""


class Writing:
    """Writes one checkpoint while training goes on, in threads that the constructor starts."""

    def __init__(
        self,
        step: int,
        *,
        store: Store,
        rank: int,
        num_ranks: int,
        write: Callable[[], Digests],
        commit: Callable[[Digests], None],
    ) -> None:
        """Start the threads.

        Args:
            step: for messages.
            store: of all ranks that write, without keys.
            rank, num_ranks: of the ranks that write.
            write: writes and syncs this rank's files; may raise `OSError`.
            commit: on rank 0, gives the checkpoint its final name; may raise `OSError`.
        """
        self.step = step
        self.committed_s = 0.0
        """On rank 0, from the start."""
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._is_given_up = threading.Event()
        name = f"checkpoint of step {step}"
        self._written = in_thread(name, lambda: self._write(write))
        self._committed = in_thread(name, lambda: self._collect(commit)) if rank == 0 else None

    def wait_written(self, timeout_s: float) -> str:
        """Wait for this rank's files; returns what went wrong, a time-out too, or ""."""
        late = f"its files were not on the disk after {timeout_s:.0f} s"
        return _outcome(self._written, timeout_s, late)

    def wait_committed(self, timeout_s: float) -> str:
        """On rank 0, wait for the commit; returns as `wait_written`."""
        assert self._committed is not None
        return _outcome(self._committed, timeout_s, f"it was not committed after {timeout_s:.0f} s")

    def give_up(self, timeout_s: float) -> bool:
        """Keep this rank's threads from committing; returns whether they have ended in time."""
        self._is_given_up.set()
        threads: list[Future[Any]] = [self._written, self._committed or self._written]
        return not wait(threads, timeout_s).not_done

    def linger(self, timeout_s: float) -> None:
        """Before this process ends by an error, wait until the checkpoint is committed, or cannot
        be; rank 0 tells. The other ranks wait too: torchrun ends rank 0 soon after them.
        """
        if self._committed is None:
            with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
                self._is_over(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            if not self._is_over(1.0):
                say(f"writing the checkpoint of step {self.step} to the disk before the end")
                self._is_over(timeout_s)
        except KeyboardInterrupt:
            self._is_over(deadline - time.monotonic())
            raise
        finally:
            problem = _outcome(self._committed, 0, f"not on the disk after {timeout_s:.0f} s")
            outcome = f"is not saved: {problem}" if problem else "is saved"
            say(f"the checkpoint of step {self.step} {outcome}")

    def _is_over(self, timeout_s: float) -> bool:
        """Wait until rank 0 has committed the checkpoint or given up; returns whether it has."""
        if self._committed is not None:
            return not wait([self._committed], max(0.0, timeout_s)).not_done
        deadline = time.monotonic() + timeout_s
        while not (self._written.done() and self._store.check([OVER])):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _write(self, write: Callable[[], Digests]) -> None:
        """Tells rank 0, which waits for this thread, also of any error."""
        try:
            report = write()
        except Exception as error:
            self._store.set(str(self._rank), json.dumps({PROBLEM: str(error) or repr(error)}))
            raise
        self._store.set(str(self._rank), json.dumps(report))

    def _collect(self, commit: Callable[[Digests], None]) -> None:
        """On rank 0. Raises `OSError` if a rank reports a problem."""
        started_at, missing = time.monotonic(), set(range(self._num_ranks))
        digests: dict[str, str] = {}
        try:
            while missing:
                for rank in [rank for rank in missing if self._store.check([str(rank)])]:
                    report = json.loads(self._store.get(str(rank)))
                    if PROBLEM in report:
                        raise OSError(f"rank {rank}: {report[PROBLEM]}")
                    digests |= report
                    missing.remove(rank)
                if missing and self._is_given_up.wait(POLL_S):
                    return
            if not self._is_given_up.is_set():
                commit(digests)
        finally:
            self.committed_s = time.monotonic() - started_at
            self._store.set(OVER, "")


def _outcome(future: Future[Any], timeout_s: float, late: str) -> str:
    """What went wrong in a thread, "" if nothing did, or `late` after `timeout_s` seconds."""
    if wait([future], timeout_s).not_done:
        return late
    error = future.exception()
    return (str(error) or repr(error)) if error is not None else ""
