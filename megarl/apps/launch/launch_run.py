"""Starts the processes of a launch, waits for the trainer ranks, and ends what it started.

Each process runs below the program `megarl.apps.launch.node_process` on its node: on this one as a
child process, on another node of a Slurm allocation as a step of `srun`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.apps.launch.launch_plan import Addresses, Process
from megarl.apps.launch.node_process import END, KILL, MARGIN_S
from megarl.apps.launch.slurm import srun
from megarl.settings.config import HANDED
from megarl.settings.limits import POLL_S
from megarl.system.console import printable
from megarl.system.private_folder import PrivateFolder, kill_marked, refuse_open
from megarl.system.signals import SHUTDOWN_S, ignore_while_closing

READY_WITHIN_S = 240.0
"""Seconds after its start within which Ray must run on all nodes."""
READY = "Ray runtime started."
"""What `ray start` writes to its log once the node has joined the cluster."""


@dataclass(frozen=True)
class RunningProcess:
    """A started process of a run. `popen` is the launcher's child that runs it: the program
    `node_process`, which ends it when told to on standard input, or, in a run on several nodes, the
    `srun` that runs `node_process` on the host.
    """

    process: Process
    host: str
    popen: subprocess.Popen[bytes]
    log: Path | None
    """File with its standard output and error; None where they go to those of the launcher."""

    @property
    def code(self) -> int | None:
        """The exit code, 128 + the signal's number for a signal; None while the process runs."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def output(self) -> str:
        """The text of the log file; empty where there is none."""
        return self.log.read_text(errors="replace") if self.log is not None else ""


@dataclass
class Launcher:
    """Starts the processes of one run on all its nodes (Ray, then torchrun), waits for its trainer
    ranks and ends everything. `run` does all of it and is called once, in the main thread.
    """

    processes: Sequence[Process]
    """The processes in the order of their start, as `launch_plan.processes` returns them."""
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
        code = None
        try:
            code = self._run()
            return code
        finally:
            ignore_while_closing()
            self.end(is_signalled=code is None)
            ray_logs = self._state / "0" / "session_latest" / "logs"
            if code is not None and code not in (0, 2) and code < 128 and ray_logs.is_dir():
                with contextlib.suppress(OSError, shutil.Error):
                    shutil.copytree(ray_logs, self.logs / "ray", dirs_exist_ok=True)
                announce(f"Ray's logs are in {self.logs / 'ray'}")
            folder.remove()

    def _run(self) -> int:
        rays = [child for child in self.processes if child.kind == "ray"]
        for group in (rays[:1], rays[1:]):  # the head first
            for process in group:
                self.start(process)
            if not self._wait_for_ray():
                return 1
        refuse_open(self._state)
        for process in self.processes:
            if process.kind == "ranks":
                self.start(process)
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
            # The recipe goes by the environment: all users of a node can read a command.
            environment = environment | {HANDED: settings.get(HANDED, "")}
            added = [f"{name}={value}" for name, value in settings.items() if name != HANDED]
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
        while waiting := [process for process in waiting if READY not in process.output]:
            ended = [process for process in started if process.code is not None]
            if ended or time.monotonic() > deadline:
                self._show_end([*ended, *waiting][0])
                announce(
                    f"error: Ray was not ready within {READY_WITHIN_S:g} s on"
                    f" {len(waiting)} of {len(started)} nodes (the last lines of one are above); is"
                    f" port {self.addresses.ray_port} taken (--port), or /tmp full?"
                )
                return False
            time.sleep(POLL_S)
        return True

    def _wait_for_ranks(self) -> int:
        """Wait until the ranks of all nodes have ended; returns the exit code of those that failed
        first, 0 if none did, or 1 if Ray ended before.
        """
        ranks = self._of_kind("ranks")
        while not (failed := [rank for rank in ranks if rank.code]):
            if all(rank.code == 0 for rank in ranks):
                return 0
            if lost := [process for process in self._of_kind("ray") if process.code is not None]:
                self._show_end(lost[0])
                announce(
                    f"error: Ray on {lost[0].host} ended with exit code {lost[0].code} while the"
                    " trainers were running (its last lines are above); ending them"
                )
                return 1
            time.sleep(POLL_S)
        self._settle(ranks, MARGIN_S + self.more_s)  # the others notice it, and end
        if failed[0].log is not None:
            self._show_end(failed[0])
            announce(f"the ranks on {failed[0].host} failed first (their last lines are above)")
        return failed[0].code or 1

    def _of_kind(self, kind: str) -> list[RunningProcess]:
        return [one for one in self.running if one.process.kind == kind]

    def _show_end(self, one: RunningProcess) -> None:
        """Print the last lines of a process's log on standard error."""
        print(printable("\n".join(one.output.splitlines()[-20:])), file=sys.stderr)

    def end(self, *, is_signalled: bool) -> None:
        """End the run; blocks. After a signal (`is_signalled`) the ranks are told to save a
        checkpoint and end, and have their shutdown time for it. Then every process of the run that
        still runs is killed, on every node. Puts the names of the hosts on which processes do not
        end into `silent`.
        """
        if is_signalled:
            ranks = self._of_kind("ranks")
            self.order(ranks, END)
            self._settle(ranks, SHUTDOWN_S + MARGIN_S + self.more_s)
        self.order(self.running, KILL)
        self._settle(self.running, MARGIN_S)
        self.silent = sorted({process.host for process in self.running if process.code is None})
        kill_marked(str(self._state))  # first: it finds unmarked ones by their living parents
        for process in self.running:
            process.popen.kill()  # `srun` is not marked

    def order(self, which: Sequence[RunningProcess], order: bytes) -> None:
        """Tell the processes `which` to end, through their standard input. `order`: `b"end\\n"`,
        which sends SIGTERM to the program, or `b"kill\\n"`, which kills it. Processes that have
        ended are left out silently.
        """
        for process in which:
            with contextlib.suppress(OSError):
                assert process.popen.stdin is not None
                process.popen.stdin.write(order)
                process.popen.stdin.flush()

    def _settle(self, which: Sequence[RunningProcess], patience_s: float) -> None:
        """Wait until processes have ended, at most `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while any(process.code is None for process in which) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)


def announce(text: str) -> None:
    """Print `text` as one line on standard error, after "megarl run: "."""
    print(printable(f"megarl run: {text}"), file=sys.stderr, flush=True)
