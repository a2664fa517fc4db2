"""Starts the processes of a launch, waits for the trainer ranks, and ends what it started.

Each process runs below the program `megarl.apps.launch.node_process` on its node: on this one as a
child process, on another node of a Slurm allocation as a step of `srun`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.apps.launch.launch_processes import Addresses, Process
from megarl.apps.launch.node_process import END, KILL, MARGIN_S, POLL_S
from megarl.apps.launch.slurm import srun
from megarl.console import printable
from megarl.private_folder import PrivateFolder, kill_marked, refuse_open
from megarl.signals import SHUTDOWN_S, SIGNALS

READY_WITHIN_S = 240.0
"""Seconds after its start within which Ray must run on all nodes."""
READY = "Ray runtime started."
"""What `ray start` writes to its log once the node has joined the cluster."""


@dataclass
class RunningProcess:
    """A started process of a run, with its host, log file and exit code. `popen` is the launcher's
    child that runs the process: the program `node_process`, which ends the process when told to on
    standard input, or, in a run on several nodes, the `srun` that runs `node_process` on the host.
    """

    process: Process
    host: str
    popen: subprocess.Popen[bytes]
    log: Path | None
    """File with its standard output and error; None where they go to those of the launcher."""
    code: int | None = None
    """Exit code, 128 + the signal's number for a signal; None until `poll` has seen the end."""

    def poll(self) -> int | None:
        """The exit code of the process, 128 + the signal's number for a signal; None while the
        process runs. Does not block.
        """
        found = self.popen.poll()
        if found is not None:
            self.code = found if found >= 0 else 128 - found
        return self.code

    def told(self) -> str:
        """The whole text of the process's log file (standard output and error); empty where it has
        none.
        """
        return self.log.read_text(errors="replace") if self.log is not None else ""


@dataclass
class Launcher:
    """Starts the processes of one run on all its nodes (Ray, then torchrun), waits for its trainer
    ranks and ends everything. `run` does all of it and is called once, in the main thread.
    """

    processes: Sequence[Process]
    """The processes in the order of their start, as `launch_processes.processes` returns them."""
    hosts: Sequence[str]
    """Host name of each node, in the order of node numbers, for `srun`. With one name, processes
    are started on this machine without `srun`."""
    addresses: Addresses
    logs: Path
    """Folder for the log files of a run on several nodes, and for Ray's logs if a run has failed;
    created when needed."""
    more_s: float = 0.0
    """Seconds that the ranks have for a checkpoint after a signal, beyond the usual time."""
    running: list[RunningProcess] = field(default_factory=list)
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set by a signal while everything is being ended, or once ranks have failed: `end` then kills
    at once."""
    silent: list[str] = field(default_factory=list)
    """After `run`: names of the hosts on which processes did not end in time, probably dead nodes.
    """

    def __post_init__(self) -> None:
        self._state = Path(self.addresses.state)
        # DeepSpeed looks for ninja beside Python; ranks, Ray and its workers agree on the token.
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def run(self) -> int:
        """Start Ray, then the ranks, block until the ranks have ended, and end everything else.
        Returns the exit code: that of the ranks that failed first, 0 if none did, or 1 if Ray
        fails. A signal's exception (`EndedBySignal`) passes through after everything has ended.
        """
        folder = PrivateFolder(self._state)
        code = 143  # a signal's, unless the next line is passed
        try:
            code = self._run()
            return code
        finally:
            for number in SIGNALS:
                signal.signal(number, lambda *_: self.hurry.set())
            self.end()
            found = self._state / "0" / "session_latest" / "logs"
            if code not in (0, 2) and code < 128 and found.is_dir():
                with contextlib.suppress(OSError, shutil.Error):
                    shutil.copytree(found, self.logs / "ray", dirs_exist_ok=True)
                announce(f"Ray's logs are in {self.logs / 'ray'}")
            folder.remove()

    def _run(self) -> int:
        rays = [one for one in self.processes if one.kind == "ray"]
        for some in filter(None, (rays[:1], rays[1:])):  # the head first
            for one in some:
                self.start(one)
            if not self._wait_for_ray():
                return 1
        refuse_open(self._state)
        for one in self.processes:
            if one.kind == "ranks":
                self.start(one)
        return self._wait_for_ranks()

    def start(self, process: Process) -> None:
        """Start a process on its node, in a new session, without waiting for it, and add it to
        `running`. Its standard input is a pipe from this process; the program is killed when that
        pipe closes, also when this process dies.
        """
        host, environment = self.hosts[process.node], self._environment
        log, settings = None, process.command.environment
        words = [sys.executable, "-m", "megarl.apps.launch.node_process", process.kind]
        words += process.command.words
        if len(self.hosts) == 1:
            environment = environment | settings
            log = self._state / "ray.log" if process.kind == "ray" else None
        else:
            if process.kind == "ray" or process.node != 0:
                self.logs.mkdir(parents=True, exist_ok=True)
                log = self.logs / f"{host}-{process.kind}.log"
            # Slurm sets variables of its own in a step, CUDA_VISIBLE_DEVICES too.
            added = [f"{name}={value}" for name, value in settings.items()]
            words = srun(host, ["env", *added, *words])
        mode = "wb" if process.kind == "ray" else "ab"
        with log.open(mode) if log else contextlib.nullcontext() as out:
            popen = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out and subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(RunningProcess(process, host, popen, log))

    def _wait_for_ray(self) -> bool:
        """Whether Ray runs on all nodes on which it was started within `READY_WITHIN_S`; if not,
        says why.
        """
        started = waiting = self._of_kind("ray")
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and all(one.poll() is None for one in started):
            waiting = [one for one in waiting if READY not in one.told()]
            if not waiting:
                return True
            time.sleep(POLL_S)
        failed = next((one for one in started if one.poll() is not None), waiting[-1])
        self._show_end(failed)
        several = len(self.hosts) > 1
        where = f"on all {len(started)} nodes" if len(started) > 1 else ""
        where = where or f"on port {self.addresses.ray_port}"
        announce(
            f"error: Ray was not ready {where} within {READY_WITHIN_S:g} s (the last lines of"
            f" {failed.log if several else 'Ray'} are above); is the port taken (--port), or /tmp"
            " full?"
        )
        return False

    def _wait_for_ranks(self) -> int:
        """Wait until the ranks of all nodes have ended; returns the exit code of those that failed
        first, 0 if none did, or 1 if Ray ended before.
        """
        ranks = self._of_kind("ranks")
        while not (failed := [one for one in ranks if one.poll()]):
            if all(one.poll() == 0 for one in ranks):
                return 0
            if lost := next((one for one in self._of_kind("ray") if one.poll() is not None), None):
                self._show_end(lost)
                announce(
                    f"error: Ray{self._on_node(lost)} ended with exit code {lost.code} while the"
                    " trainers were running (its last lines are above); ending them"
                )
                return 1
            time.sleep(POLL_S)
        self._settle(ranks, MARGIN_S + self.more_s)  # the others notice it, and end
        self.hurry.set()
        if failed[0].log is not None:
            self._show_end(failed[0])
            where = self._on_node(failed[0])
            announce(f"the ranks{where} failed first (their last lines are above)")
        return failed[0].code or 1

    def _of_kind(self, kind: str) -> list[RunningProcess]:
        return [one for one in self.running if one.process.kind == kind]

    def _on_node(self, one: RunningProcess) -> str:
        return f" on {one.host}" if len(self.hosts) > 1 else ""

    def _show_end(self, one: RunningProcess) -> None:
        """Print the last lines of a process's log on standard error."""
        print(printable("\n".join(one.told().splitlines()[-20:])), file=sys.stderr)

    def end(self) -> None:
        """End the run; blocks. First the ranks are told to save a checkpoint and end. They have
        their shutdown time for it, or none once the event `hurry` is set, by a signal meanwhile or
        after ranks have failed. Then every process of the run that still runs is killed, on every
        node. Puts the names of the hosts on which processes do not end into `silent`.
        """
        ranks = self._of_kind("ranks")
        self.order(ranks, END)
        self._settle(ranks, SHUTDOWN_S + MARGIN_S + self.more_s, self.hurry.is_set)
        self.order(self.running, KILL)
        self._settle(self.running, MARGIN_S)
        self.silent = sorted({one.host for one in self.running if one.poll() is None})
        leaders = {one.popen.pid for one in self.running}
        if left := kill_marked(str(self._state), leaders):
            numbers = " ".join(map(str, left))
            announce(f"still running after SIGKILL (a driver holds them): {numbers}")

    def order(self, which: Sequence[RunningProcess], order: bytes) -> None:
        """Tell the processes `which` to end, through their standard input. `order`: `b"end\\n"`,
        which sends SIGTERM to the program, or `b"kill\\n"`, which kills it. Processes that have
        ended are left out silently.
        """
        for one in which:
            with contextlib.suppress(OSError):
                assert one.popen.stdin is not None
                one.popen.stdin.write(order)
                one.popen.stdin.flush()

    def _settle(
        self,
        which: Sequence[RunningProcess],
        patience_s: float,
        is_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until processes have ended, at most `patience_s` seconds, or until `is_off`."""
        deadline = time.monotonic() + patience_s
        while any(one.poll() is None for one in which) and time.monotonic() < deadline:
            if is_off():
                break
            time.sleep(POLL_S / 4)


def announce(text: str) -> None:
    """Print `text` as one line on standard error, after "megarl run: "."""
    print(printable(f"megarl run: {text}"), file=sys.stderr, flush=True)
