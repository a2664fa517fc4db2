"""A worker process of an environment: started as a program, ended with all that it has started.

A process is started afresh as a program (never forked: the parent has threads) and ends with its
parent, even one killed by force. `megarl.environments.workers` speaks to it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from megarl.environments import user_code
from megarl.environments.config import EnvironmentConfig
from megarl.environments.user_code import Sources
from megarl.private_folder import MARK, kill_marked

ROOT = Path(__file__).resolve().parents[2]  # where the package megarl lies
# Not `-m`, which would need PYTHONPATH, and that every process a verifier starts would inherit.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.worker_main import main
main(int(sys.argv[2]))"""


class WorkerHandle:
    """One worker process and the socket to it."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process."""
        self._mark = f"{os.environ.get(MARK, '')}/{secrets.token_hex(8)}"
        self.channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the working folder stays off the path, where a file of the user's may hide a
                # library.
                [sys.executable, "-P", "-c", PROGRAM, str(ROOT), str(os.getpid())],
                stdin=theirs.fileno(),
                # A verifier is code nobody vouches for, and what it says ends up in transcripts.
                # What the verifier starts, in whatever session, is known and killed by the mark.
                env=config.variables(os.environ) | {MARK: self._mark},
                # Ctrl-C is the parent's affair
                start_new_session=True,
            )
        self.ending = os.pidfd_open(self.process.pid)
        """Descriptor that is readable once the process has ended."""

    def ended(self) -> bool:
        """Whether the process has ended. The process is not reaped, so that its id is not reused
        before `kill`.
        """
        with self._lock:
            if self.process.returncode is not None:
                return True
            return (
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is not None
            )

    def signal(self) -> None:
        """Send SIGKILL to the process, its descendants and its process group without waiting for
        their end. May be called from any thread.
        """
        with self._lock:
            if self.process.returncode is None:  # not reaped yet, so its number is still its own
                with contextlib.suppress(psutil.Error):
                    for one in psutil.Process(self.process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.Error):
                            one.kill()
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and all that it has started, and wait for its end. May be called from
        any thread.
        """
        self.signal()
        with self._lock:
            self.process.wait()
        kill_marked(self._mark)

    def discard(self) -> None:
        """Kill the process, wait for its end, and close the descriptors."""
        self.kill()
        self.channel.close()
        os.close(self.ending)

    def how_it_ended(self) -> str:
        """How the process has ended, for messages."""
        self.kill()
        code = self.process.returncode
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class UserFiles:
    """The user's files as the run first read them. Every worker process runs that content, so that
    an edit during the run changes nothing.
    """

    def __init__(self, files: Sequence[Path], known: Sources | None = None) -> None:
        """`known`: what the run has read before, with the files imported from beside the user's
        own; None at its start. Raises `ValueError` for a file that cannot be read.
        """
        self.sources = user_code.read(files) if known is None else known
        self._knows_neighbours = known is not None
        self._said_changed, self._warning = False, ""

    def current(self) -> Sources:
        """The files for a process that is to be started. The user is told once of those that were
        edited or removed since the run started.
        """
        edited = [] if self._said_changed else user_code.changed(self.sources)
        if edited:
            self._said_changed = True
            self.warn(
                f"{', '.join(edited)} changed after the run started; the run goes on with what it"
                " was then"
            )
        return self.sources

    def loaded(self, imported: Sequence[str]) -> None:
        """Note what a process has imported from beside the user's own files. What the first one did
        is kept for the later ones.
        """
        if not self._knows_neighbours:
            self._knows_neighbours = True
            self.sources = user_code.read([Path(file) for file in imported]) | self.sources

    def warn(self, warning: str) -> None:
        """Have the user told of something with the next verdict."""
        self._warning = "; ".join(filter(None, [self._warning, warning]))

    def take_warning(self) -> str:
        """What the user is to be told, once, such as that a file was edited or removed after the
        run had read it; or empty.
        """
        warning, self._warning = self._warning, ""
        return warning
