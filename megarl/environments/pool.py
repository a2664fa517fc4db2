"""A pool of processes in which verifiers and sessions run, each call under a hard time limit.

    WorkerPool.judge(prompt, response) -> Outcome          a verifier: any process will do
    WorkerPool.begin(key, prompt), .step(key, response)    a session: always the same process

A verifier that hangs, even in C code, costs its process and its own sample: the process is killed
and the next request of that thread starts another. A session that hangs costs the other sessions
of its process as well. One thread of this process speaks to one worker process; a process is
started afresh as a program (never forked: the parent has threads) and ends with its parent, even
one killed by force.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megarl.environments import user_code
from megarl.environments.codec import Codec
from megarl.environments.config import SECRET, EnvironmentConfig
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import named, own_files, setting_of
from megarl.environments.worker import LENGTH, receive
from megarl.types import Prompt

END_WITHIN_S = 1.0
DECODE_WITHIN_S = 60.0
START_WITHIN_S = 120.0  # a verifier of one's own may import much
ROOT = Path(__file__).resolve().parents[2]  # where the package megarl lies
# Not `-m`, which would need PYTHONPATH, and that every process a verifier starts would inherit.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.worker import main
main(int(sys.argv[2]))"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker process of the environment replies to one request: the score of a response,
    the next observation of a session, or the failure of the user's code with its message.
    """

    score: float | None = None
    """What the verifier returned: from 0 (wrong) to 1 (right), or a reward of any range; None if
    there is no score."""
    correct: bool | None = None
    """Whether the response is correct; None if the verifier did not say."""
    metrics: dict[str, float] = field(default_factory=dict)
    """{name: value} of the verifier's own metrics."""
    failure: Literal["", "error", "timeout", "nan"] = ""
    detail: str = ""
    observation: list[int] | None = None
    """Token ids that the model reads next; None if the rollout has ended."""
    warning: str = ""
    """What the user should know of the environment; said once."""


class _Ended(Exception):
    """Raised if the worker process ended before it replied."""


class _Worker:
    """One worker process and the socket to it. Only one thread sends requests to it."""

    imported: list[str]
    """Files beside the user's own that it imported while it loaded."""

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
        code = config.session or ", ".join(named(config))
        told = f"{setting_of(config)} '{code}'"
        self._channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the working folder stays off the path, where a file of the user's may hide a
                # library.
                [sys.executable, "-P", "-c", PROGRAM, str(ROOT), str(os.getpid())],
                stdin=theirs.fileno(),
                # A verifier is code nobody vouches for, and what it says ends up in transcripts.
                env={name: value for name, value in os.environ.items() if not SECRET.search(name)},
                # what a verifier starts is killed with it, and Ctrl-C is the parent's affair
                start_new_session=True,
            )
        try:
            reply = self.ask((config, codec, sources), limit_s)
        except _Ended as error:
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
        self.imported = reply["imported"]

    def ask(self, message: Any, limit_s: float) -> dict[str, Any]:
        """Send `message` and wait for the reply. Raises `TimeoutError` after `limit_s`, and
        `_Ended` if the process has ended.
        """
        body = pickle.dumps(message)
        deadline = time.monotonic() + limit_s
        try:
            self._channel.settimeout(limit_s)
            self._channel.sendall(LENGTH.pack(len(body)) + body)
            reply = receive(self._channel, deadline)
        except TimeoutError:
            raise
        except OSError:
            reply = None
        if reply is None:
            self._let_end()
            self.kill()
            raise _Ended(_how_it_ended(self.process.returncode))
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

    def _let_end(self) -> None:
        """Wait briefly until a process that closed its socket has ended, so that the error can
        state its exit code.
        """
        deadline = time.monotonic() + END_WITHIN_S
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)

    def signal(self) -> None:
        """Send SIGKILL to the process and its process group without waiting for its end. May be
        called from any thread.
        """
        with self._lock:
            if self.process.returncode is None:  # not reaped yet, so its number is still its own
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its process group, and wait for its end. May be called from any
        thread.
        """
        self.signal()
        with self._lock:
            self.process.wait()

    def discard(self) -> None:
        """Kill the process and close the socket. Call it only when no thread waits for a reply."""
        self.kill()
        self._channel.close()


def _how_it_ended(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class WorkerPool:
    """Scores responses, or runs sessions, in `config.num_workers` worker processes."""

    def __init__(self, config: EnvironmentConfig, codec: Codec | None) -> None:
        """`codec` is required for sessions, and for responses given as token ids."""
        self._config, self._codec = config, codec
        # A session must find its own process again; for a verdict the first free one will do.
        lanes, threads = (config.num_workers, 1) if config.session else (1, config.num_workers)
        self._lanes = [
            ThreadPoolExecutor(threads, thread_name_prefix="environment") for _ in range(lanes)
        ]
        self._own = threading.local()  # each thread's worker
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._files = own_files(config)
        self._sources = user_code.read(self._files)
        self._knows_neighbours, self._said_changed, self._warning = False, False, ""
        self._ending: set[threading.Thread] = set()
        """Threads that wait for killed processes to end."""

    async def start(self, within_s: float | None = None) -> None:
        """Start a first process and load the verifier there; raises `ValueError` if the verifier
        does not load within `within_s` seconds.
        """
        await asyncio.wrap_future(self._lanes[0].submit(self._worker, within_s))

    async def judge(self, prompt: Prompt, response: str | np.ndarray) -> Outcome:
        """Score a response with the verifier. Failures are part of the outcome; `ValueError` is
        raised only if the verifier cannot be loaded.
        """
        return await self._run("", self._config.time_limit_s, "judge", prompt, response)

    async def begin(self, key: str, prompt: Prompt) -> Outcome:
        """Start the session of rollout `key`. The outcome holds its first observation, which may be
        empty.
        """
        return await self._run(key, self._config.start_limit_s, "begin", key, prompt)

    async def step(self, key: str, response: np.ndarray) -> Outcome:
        """Pass the model's response to the session of rollout `key`. The outcome holds an
        observation or a score.
        """
        return await self._run(key, self._config.time_limit_s, "step", key, response)

    async def end(self, key: str) -> None:
        """Discard the session of rollout `key`."""
        await self._run(key, self._config.time_limit_s, "end", key)

    async def decode(self, token_ids: np.ndarray) -> str:
        """Decode `token_ids` to text in a worker process; raises `RuntimeError` if that fails."""
        made = self._lane("").submit(self._decode, token_ids)
        return await asyncio.wrap_future(made)

    def _lane(self, key: str) -> ThreadPoolExecutor:
        """The single-thread executor for all requests of rollout `key`: each executor has one
        worker process, which holds the session.
        """
        return self._lanes[zlib.crc32(key.encode()) % len(self._lanes)]

    async def _run(self, key: str, limit_s: float, command: str, *arguments: Any) -> Outcome:
        made = self._lane(key).submit(self._outcome, limit_s, command, *arguments)
        return await asyncio.wrap_future(made)

    async def close(self) -> None:
        """Kill all processes and cancel waiting requests. May be called twice."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            self._workers.clear()
        # First, or a thread that loses its worker goes on with the next request.
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()  # a thread that waits on it sees it end
        for lane in self._lanes:
            await asyncio.to_thread(lane.shutdown)
        for worker in workers:
            worker.discard()
        for thread in list(self._ending):
            await asyncio.to_thread(thread.join)

    def _worker(self, within_s: float | None = None) -> _Worker:
        """The worker process of the calling thread, started if the thread has none."""
        worker: _Worker | None = getattr(self._own, "worker", None)
        if (
            worker is not None and worker.ended()
        ):  # killed from outside, for memory perhaps, while it waited
            self._drop(worker)
            worker = None
        if worker is None:
            if self._closed:
                raise RuntimeError("the environment's pool is closed")
            self._note_changed()
            worker = _Worker(self._config, self._codec, self._sources, within_s)
            with self._lock:
                if not self._knows_neighbours:  # those of the first process, for all later ones
                    self._knows_neighbours = True
                    beside = [Path(file) for file in worker.imported]
                    self._sources = user_code.read(beside) | self._sources
                closed = self._closed
                if not closed:
                    self._workers.add(worker)
            if closed:
                worker.discard()
                raise RuntimeError("the environment's pool is closed")
            self._own.worker = worker
        return worker

    def _note_changed(self) -> None:
        """Keep a warning for the next verdict, once, if a user's file was edited or removed after
        the run had read it; the run goes on with the old content.
        """
        edited = [] if self._said_changed else user_code.changed(self._sources)
        if edited:
            self._said_changed = True
            self._warning = (
                f"{', '.join(edited)} changed after the run started; the run goes on with what it"
                " was then"
            )

    def _drop(self, worker: _Worker) -> None:
        """Kill `worker`, the calling thread's worker process, without waiting for its end: a helper
        thread does that, since a process with much memory can take a second to end.
        """
        self._own.worker = None
        worker.signal()

        def end() -> None:
            worker.discard()
            with self._lock:
                self._workers.discard(worker)
                self._ending.discard(threading.current_thread())

        thread = threading.Thread(target=end, daemon=True, name="environment-end")
        with self._lock:
            self._ending.add(thread)
        thread.start()

    def _decode(self, token_ids: np.ndarray) -> str:
        worker = self._worker()
        try:
            return worker.ask(("decode", token_ids), DECODE_WITHIN_S)["text"]
        except Exception as error:
            self._drop(worker)
            raise RuntimeError(f"decoding a response failed: {error}") from error

    def _outcome(self, limit_s: float, command: str, *arguments: Any) -> Outcome:
        worker = self._worker()
        setting = "start_limit_s" if command == "begin" else "time_limit_s"
        try:
            reply = worker.ask((command, *arguments), limit_s)
            if reply.pop("retire", False):
                self._drop(worker)
            found = Outcome(**reply)
            if found.observation is None and self._warning:
                found, self._warning = replace(found, warning=self._warning), ""
            return found
        except TimeoutError:
            self._drop(worker)
            said = f"no verdict within environment.{setting} = {limit_s:g} s"
            return Outcome(failure="timeout", detail=said)
        except _Ended as error:
            self._drop(worker)
            return Outcome(failure="error", detail=f"the verifier's process ended {error}")
        except (
            Exception
        ) as error:  # a prompt that cannot be pickled, a reply that a verifier forged
            self._drop(worker)
            return Outcome(failure="error", detail=f"{type(error).__name__}: {error}")
