"""Program that runs one process of a launch on its node, under the orders of `megarl run`:

    python -m megarl.apps.launch.node_process ray|ranks PROGRAM [ARGUMENT ...]

Standard input carries the orders, from the launcher on the same machine or through `srun`: a line
`end` sends SIGTERM to the program, a line `kill` kills it. The end of the input, which also comes
when the launcher is killed or its node dies, kills the program too. Once the program has ended, all
its descendants are killed, also those whose parents have ended. The exit code is the program's, or
128 + the number of the signal that ended it.

Slurm sends the SIGTERM of `scancel` to every process of a job, and `srun` then takes no orders, but
closes the input: the program has some time to end. Ray must outlive the trainer ranks, which need
it for their last checkpoint, so its processes start with the signal blocked, and inherit that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.settings.limits import POLL_S
from megarl.system.private_folder import MARK, PrivateFolder, use
from megarl.system.signals import SHUTDOWN, SHUTDOWN_S, die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MARGIN_S = 15.0
"""Seconds that processes have to end once they have been told to, beyond the seconds that torchrun
waits for its ranks."""
END, KILL = b"end\n", b"kill\n"
RAY_STARTS, RAY_STARTS_WITHIN_S = 3, 60.0
"""Number of times that Ray is started where it fails, and seconds after which a Ray that ends
counts as one that had started. Ray gives its own processes 30 s to start, which cannot be set and
which a busy machine exceeds."""


def main(kind: str, words: Sequence[str]) -> int:
    """Run the program `words` (Ray or torchrun) on its node until it ends, obeying orders on
    standard input, a line `end` (SIGTERM) or `kill`, and kill its descendants. `kind`: "ray" or
    "ranks"; Ray is started again if it fails at once. Returns the exit code, 128 + the signal's
    number for a signal. Call it once, in the main thread of a process of its own: it sets signal
    handlers.
    """
    if sys.platform == "linux":  # be the parent of each descendant whose own parent ends
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    told_at: list[float] = []  # when the program was told to end

    def hear(number: int, frame: object) -> None:
        # Who signals this process signals its group, and so the program.
        told_at.append(time.monotonic())

    for number in SIGNALS:
        signal.signal(number, hear)
    pid, folder_made = os.getpid(), None
    if MARK in os.environ:
        folder = Path(os.environ[MARK])
        if not folder.exists():  # not on the launcher's node
            folder_made = PrivateFolder(folder)
        use(folder)

    def prepare() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if kind == "ray":
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        die_with_parent(pid)

    try:
        for attempt in range(RAY_STARTS if kind == "ray" else 1):
            if attempt:
                print("megarl: Ray did not start; starting it again", flush=True)
            began = time.monotonic()
            program = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                preexec_fn=prepare,  # safe: this process has one thread
            )
            try:
                obey(program, told_at)
            finally:
                kill_descendants()
            code = program.returncode
            if code <= 0 or told_at or time.monotonic() > began + RAY_STARTS_WITHIN_S:
                break
    finally:
        if folder_made is not None:
            folder_made.remove()
    return code if code >= 0 else 128 - code


def obey(program: subprocess.Popen[bytes], told_at: list[float]) -> None:
    """Block until `program` ends, and carry out the orders on standard input meanwhile: a line
    `end` sends SIGTERM, a line `kill` kills the program. If the input is closed, the program is
    killed 3 seconds later or, if it was told to end, after the time that ranks have to save a
    checkpoint. `told_at`: the times (time.monotonic) at which the program was told to end; this
    function and a signal handler append to the list.
    """
    orders, closed_at = b"", 0.0
    while program.poll() is None:
        if closed_at:
            ends_within_s = MARGIN_S + float(os.environ.get(SHUTDOWN, SHUTDOWN_S))
            # Slurm's SIGTERM follows the end of the input that it has caused.
            patience_s = ends_within_s if told_at else 3.0
            if time.monotonic() > closed_at + patience_s:
                program.kill()
            time.sleep(POLL_S)
        elif select.select([sys.stdin.fileno()], [], [], POLL_S)[0]:
            data = os.read(sys.stdin.fileno(), 4096)
            orders += data
            if not data:
                closed_at = time.monotonic()
            elif KILL in orders:
                program.kill()
            elif END in orders and not told_at:
                told_at.append(time.monotonic())
                program.terminate()


def kill_descendants() -> None:
    """Kill all descendants of this process (SIGKILL) and wait for their end, half a second at most;
    those that cannot end yet, because a driver holds them, are then left.
    """
    import psutil

    for _ in range(10):
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):  # no child is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(POLL_S / 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
