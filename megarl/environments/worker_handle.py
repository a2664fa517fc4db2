"""A worker process of an environment: started as a program, spoken to through a socket.

    WorkerHandle(config, codec, sources).ask(message, limit_s) -> reply

A process is started afresh as a program (never forked: the parent has threads) and ends with its
parent, even one killed by force. `megarl.environments.pool` runs verifiers in such processes,
`megarl.environments.session_pool` sessions.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megarl.environments import user_code
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import named, setting_of
from megarl.environments.worker import LENGTH, receive
from megarl.private_folder import MARK, kill_marked

END_WITHIN_S = 1.0
START_WITHIN_S = 120.0  # a verifier of one's own may import much
ROOT = Path(__file__).resolve().parents[2]  # where the package megarl lies
# Not `-m`, which would need PYTHONPATH, and that every process a verifier starts would inherit.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.worker_main import main
main(int(sys.argv[2]))"""


class WorkerEnded(Exception):
    """Raised if the worker process ended before it replied."""


class WorkerHandle:
    """One worker process and the socket to it. Only one thread sends requests to it."""

    imported: list[str]
    """Files beside the user's own that it imported while it loaded."""
    tools: list[dict[str, Any]]
    """The recipe's tools, as `megarl.environments.tools.tool.Schema`."""

    def __init__(
        self,
        config: EnvironmentConfig,
        codec: Codec | None,
        sources: Sources,
        within_s: float | None = None,
    ) -> None:
        """Start the process and wait until it has loaded the verifier, from `sources` where they
        hold its files. Raises `ValueError`, with advice, if the verifier does not load within
        `within_s` seconds.
        """
        # In a run the engines may start at the same time and take every core.
        limit_s = max(START_WITHIN_S, config.load_limit_s) if within_s is None else within_s
        code = config.session or ", ".join(config.tools.functions or named(config))
        told = f"{setting_of(config)} '{code}'"
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
        try:
            reply = self.ask((config, codec, sources), limit_s)
        except WorkerEnded as error:
            self.discard()
            raise ValueError(f"{told}: its process ended at start, {error}") from None
        except TimeoutError:
            self.discard()
            raise ValueError(
                f"{told} did not load within {limit_s:g} s; move what takes long out of its file's"
                " top level, or raise environment.load_limit_s"
            ) from None
        if "refused" in reply:
            self.discard()
            raise ValueError(reply["refused"])
        self.imported, self.tools = reply["imported"], reply.get("tools", [])

    def ask(self, message: Any, limit_s: float) -> dict[str, Any]:
        """Send `message` and wait for the reply. Raises `TimeoutError` after `limit_s`, and
        `WorkerEnded` if the process has ended.
        """
        body = pickle.dumps(message)
        deadline = time.monotonic() + limit_s
        try:
            self.channel.settimeout(limit_s)
            self.channel.sendall(LENGTH.pack(len(body)) + body)
            reply = receive(self.channel, deadline)
        except TimeoutError:
            raise
        except OSError:
            reply = None
        if reply is None:
            self.let_end()
            self.kill()
            raise WorkerEnded(how_it_ended(self.process.returncode))
        return json.loads(reply)

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

    def let_end(self) -> None:
        """Wait briefly until a process that closed its socket has ended, so that the error can
        state its exit code.
        """
        deadline = time.monotonic() + END_WITHIN_S
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)

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
        """Kill the process and close the socket. Call it only when no thread waits for a reply."""
        self.kill()
        self.channel.close()


def how_it_ended(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class UserFiles:
    """The user's files as the run first read them. Every worker process runs that content, so that
    an edit during the run changes nothing. May be used from several threads.
    """

    def __init__(self, files: Sequence[Path], known: Sources | None = None) -> None:
        """`known`: what the run has read before, with the files imported from beside the user's
        own; None at its start. Raises `ValueError` for a file that cannot be read.
        """
        self.sources = user_code.read(files) if known is None else known
        self._lock = threading.Lock()
        self._knows_neighbours = known is not None
        self._said_changed, self._warning = False, ""

    def start_worker(
        self, config: EnvironmentConfig, codec: Codec | None, within_s: float | None = None
    ) -> WorkerHandle:
        """Start a worker process; see `WorkerHandle`. The files that the first process imported
        from beside the user's own are kept for the later ones.
        """
        with self._lock:
            edited = [] if self._said_changed else user_code.changed(self.sources)
            if edited:
                self._said_changed = True
                changed = (
                    f"{', '.join(edited)} changed after the run started; the run goes on with what"
                    " it was then"
                )
                self._warning = "; ".join(filter(None, [self._warning, changed]))
            sources = self.sources
        worker = WorkerHandle(config, codec, sources, within_s)
        with self._lock:
            if not self._knows_neighbours:
                self._knows_neighbours = True
                beside = [Path(file) for file in worker.imported]
                self.sources = user_code.read(beside) | self.sources
        return worker

    def warn(self, warning: str) -> None:
        """Have the user told of something with the next verdict."""
        with self._lock:
            self._warning = "; ".join(filter(None, [self._warning, warning]))

    def take_warning(self) -> str:
        """What the user is to be told, once, such as that a file was edited or removed after the
        run had read it; or empty.
        """
        with self._lock:
            warning, self._warning = self._warning, ""
        return warning
