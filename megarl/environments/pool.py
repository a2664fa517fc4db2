"""A pool of processes in which verifiers run, each call under a hard time limit.

    WorkerPool.judge(prompt, response) -> Outcome

A verifier that hangs, even in C code, costs its process and its own sample: the process is killed
and the next request of that thread starts another. One thread of this process speaks to one worker
process. For sessions see `megarl.environments.session_pool`.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.outcome import Outcome
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import own_files
from megarl.environments.worker_handle import UserFiles, WorkerEnded, WorkerHandle
from megarl.types import Prompt

DECODE_WITHIN_S = 60.0
DECODE_TRIES = 3
"""Processes that are asked to decode a response, each if the one before ended or did not answer."""


class WorkerPool:
    """Scores responses in `config.num_workers` worker processes."""

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None, known: Sources | None = None
    ) -> None:
        """`codec` is required for responses given as token ids. `known`: see `UserFiles`."""
        self._config, self._codec = config, codec
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="environment")
        self._own = threading.local()  # each thread's worker
        self._workers: set[WorkerHandle] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._files = UserFiles(own_files(config), known)
        self._ending: set[threading.Thread] = set()
        """Threads that wait for killed processes to end."""

    async def start(self, within_s: float | None = None) -> None:
        """Start a first process and load the verifier there; raises `ValueError` if the verifier
        does not load within `within_s` seconds.
        """
        await asyncio.wrap_future(self._threads.submit(self._worker, within_s))

    @property
    def sources(self) -> Sources:
        """The user's files as the run first read them, by path."""
        return self._files.sources

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score a response with the verifier. Failures are part of the outcome; `ValueError` is
        raised only if the verifier cannot be loaded. `num_tokens`: see `Judge.judge`.
        """
        made = self._threads.submit(self._outcome, prompt, response, num_tokens)
        return await asyncio.wrap_future(made)

    async def decode(self, token_ids: np.ndarray) -> str:
        """Decode `token_ids` to text in a worker process. Raises `RuntimeError` if that fails, in
        `DECODE_TRIES` processes where they end or do not answer.
        """
        made = self._threads.submit(self._decode, token_ids)
        return await asyncio.wrap_future(made)

    async def close(self) -> None:
        """Kill all processes and cancel waiting requests. May be called twice."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            self._workers.clear()
        # First, or a thread that loses its worker goes on with the next request.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()  # a thread that waits on it sees it end
        await asyncio.to_thread(self._threads.shutdown)
        for worker in workers:
            worker.discard()
        for thread in list(self._ending):
            await asyncio.to_thread(thread.join)

    def _worker(self, within_s: float | None = None) -> WorkerHandle:
        """The worker process of the calling thread, started if the thread has none."""
        worker: WorkerHandle | None = getattr(self._own, "worker", None)
        if (
            worker is not None and worker.ended()
        ):  # killed from outside, for memory perhaps, while it waited
            self._drop(worker)
            self._files.warn("a process of the verifier was ended from outside, and is replaced")
            worker = None
        if worker is None:
            if self._closed:
                raise RuntimeError("the environment's pool is closed")
            worker = self._files.start_worker(self._config, self._codec, within_s)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._workers.add(worker)
            if closed:
                worker.discard()
                raise RuntimeError("the environment's pool is closed")
            self._own.worker = worker
        return worker

    def _drop(self, worker: WorkerHandle) -> None:
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
        problem: Exception | None = None
        for _ in range(DECODE_TRIES):
            worker = self._worker()
            try:
                return worker.ask(("decode", token_ids), DECODE_WITHIN_S)["text"]
            except (TimeoutError, WorkerEnded) as error:
                self._drop(worker)
                self._files.warn("a process of the verifier was lost while it decoded a response")
                problem = error
            except Exception as error:
                self._drop(worker)
                problem = error
                break
        raise RuntimeError(f"decoding a response failed: {problem}") from problem

    def _outcome(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None
    ) -> Outcome:
        worker, limit_s = self._worker(), self._config.time_limit_s
        try:
            reply = worker.ask(("judge", prompt, response, num_tokens), limit_s)
            if reply.pop("retire", False):
                self._drop(worker)
            return replace(Outcome(**reply), warning=self._files.take_warning())
        except TimeoutError:
            self._drop(worker)
            said = f"no verdict within environment.time_limit_s = {limit_s:g} s"
            return Outcome(failure="timeout", detail=said)
        except WorkerEnded as error:
            self._drop(worker)
            return Outcome(failure="error", detail=f"the verifier's process ended {error}")
        except (
            Exception
        ) as error:  # a prompt that cannot be pickled, a reply that a verifier forged
            self._drop(worker)
            return Outcome(failure="error", detail=f"{type(error).__name__}: {error}")
