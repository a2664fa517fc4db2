"""Worker processes as a pool calls them: requests by number, and another process for one that ends.

    Workers.at(place) -> Worker      Worker.ask(command, arguments, limit_s) -> reply

Requests of one process wait beside one another. A reply counts only under the number of a request
that waits for it. A process is ended, and every request to it fails, if it ends by itself, closes
its channel, sends anything but such replies, or keeps still for too long. The next request starts
another process. If that fails, requests fail, and the start is tried again later: the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any, Literal

from megarl.environments.channel import BadReply, read_reply, request
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import named, own_files, setting_of
from megarl.environments.worker_handle import UserFiles, WorkerHandle

START_WITHIN_S = 120.0  # a verifier of one's own may import much
GRACE_S = 5.0
"""Seconds without a sign of life, beyond the time limit of a call, after which a process is
killed: an `async` function keeps it by computing, or code in C keeps Python's lock."""
LOOK_S = 0.5
END_WITHIN_S = 1.0
"""Seconds that a process has to end once its channel is closed, so that its exit code is known."""
READ_WITHIN_S = 0.1
"""Seconds in which what a process has sent before its end is read. Usually the channel is closed
before, but a child of the process may hold it open."""
TRIES, FIRST_PAUSE_S = 3, 1.0
"""How often a process is started that does not, and the pause after the first try, which doubles.
"""
PAUSE_S = 30.0
"""Seconds for which the calls of a process that did not start fail before it is tried again."""


class WorkerLost(Exception):
    """Raised if a worker process ended, or was ended, before it replied. The message continues a
    sentence about the process.
    """

    def __init__(self, failure: Literal["error", "timeout"], message: str, calls: int = 1) -> None:
        """`calls`: number of requests that waited for a reply."""
        super().__init__(message)
        self.failure: Literal["error", "timeout"] = failure
        self.calls = calls
        self.by_itself = False
        """Whether the process ended, closed its channel or sent no reply by itself: through the
        call that waits, or through what an earlier one has left behind."""


class Worker:
    """A process that runs the user's verifier or sessions, and the requests for whose replies the
    pool waits. All methods are called in one event loop.
    """

    tools: list[dict[str, Any]]
    """The recipe's tools, as `megarl.apps.tools.tool.Schema`."""
    forms: dict[str, str]
    """{name of a reward function: its form}, where that is not megarl's own."""
    beats = False
    """Whether the process sends a message now and then that it is alive, which it does for `async`
    functions and sessions. Then it gets many requests at once. Without such messages it gets one
    request at a time, and is killed when the request takes longer than its time limit."""

    def __init__(self, handle: WorkerHandle, config: EnvironmentConfig) -> None:
        self.handle, self._config = handle, config
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any] | WorkerLost], float]] = {}
        """{number of a request: (its reply, its time limit)}"""
        self._last = secrets.randbits(62)
        """Number of the last request. The user's code in the process should not guess one."""
        self.lost: WorkerLost | None = None
        """Why the process is gone; None while it runs."""
        self.retires = False
        """Whether the process asked to be replaced: it begins nothing further."""
        self.sessions: set[str] = set()
        """Keys of the rollouts whose sessions it runs."""

    async def connect(self) -> None:
        """Begin to read the process's replies and to wait for its end."""
        self._reader, self._writer = await asyncio.open_connection(
            sock=self.handle.channel, limit=2**20
        )
        self._heard_at = time.monotonic()
        self.end = asyncio.create_task(self._wait_for_end())
        self._tasks = [self.end]

    async def load(
        self, codec: Codec | None, sources: Sources, within_s: float | None
    ) -> list[str]:
        """Have the process load the verifier or session, from `sources` where they hold its files.
        Returns the files beside the user's own that it imported. Raises `ValueError`, with advice,
        if that does not succeed within `within_s` seconds.
        """
        config = self._config
        # In a run the engines may start at the same time and take every core.
        limit_s = max(START_WITHIN_S, config.load_limit_s) if within_s is None else within_s
        code = config.session or ", ".join(config.tools.functions or named(config))
        told = f"{setting_of(config)} '{code}'"
        try:
            reply = await self.ask(config, codec, sources, limit_s=limit_s)
        except WorkerLost as lost:
            if lost.failure == "error":
                raise ValueError(f"{told}: its process {lost} at start") from None
            raise ValueError(
                f"{told} did not load within {limit_s:g} s; move what takes long out of its file's"
                " top level, or raise environment.load_limit_s"
            ) from None
        if "refused" in reply:
            raise ValueError(reply["refused"])
        self.tools, self.forms, self.beats = reply["tools"], reply["forms"], reply["beats"]
        if self.beats:
            self._tasks.append(asyncio.create_task(self._watch()))
        return reply["imported"]

    async def ask(self, *message: Any, limit_s: float) -> dict[str, Any]:
        """The reply to a request; {failure, detail} for one that cannot be pickled. Raises
        `WorkerLost` if the process is gone before the reply comes.
        """
        if self.lost:
            raise self.lost
        self._last += 1
        try:
            body = request(self._last, message)
        except Exception as error:
            return {"failure": "error", "detail": f"{type(error).__name__}: {error}"}
        future = asyncio.get_running_loop().create_future()
        # It stays there if the caller is cancelled: the process replies all the same.
        self._waiting[self._last] = future, limit_s
        self._writer.write(body)
        await asyncio.wait({future}, timeout=None if self.beats else limit_s)
        if not future.done():
            self._lose(WorkerLost("timeout", "gave no reply and was ended"))
        found = future.result()
        if isinstance(found, WorkerLost):
            raise found
        return found

    @property
    def is_idle(self) -> bool:
        """Whether it runs no session and no request waits for it."""
        return not self._waiting and not self.sessions

    async def _read(self) -> WorkerLost | None:
        """Read replies until the channel is closed, or holds something else: then returns what."""
        try:
            while True:
                number, reply = await read_reply(self._reader)
                self._heard_at = time.monotonic()
                if number == 0:
                    continue
                if number not in self._waiting:
                    return WorkerLost("error", "sent a reply to no request")
                future, _ = self._waiting.pop(number)
                self.retires = self.retires or reply.pop("retire", False)
                future.set_result(reply)
        except BadReply as error:
            return WorkerLost("error", f"sent no reply but {error}")
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def _wait_for_end(self) -> None:
        """Wait until the process ends, or its channel does."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.handle.ending, ended.set)
        reading, ending = asyncio.create_task(self._read()), asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({reading, ending}, return_when="FIRST_COMPLETED")
            within_s = READ_WITHIN_S if ending.done() else END_WITHIN_S
            await asyncio.wait({reading, ending}, timeout=within_s)
            why = reading.result() if reading.done() else None
            if why is None and ending.done():
                why = WorkerLost("error", f"ended {self.handle.how_it_ended()}")
            why = why or WorkerLost("error", "closed the channel that it replies through")
            why.by_itself = True
            self._lose(why)
        finally:
            loop.remove_reader(self.handle.ending)
            reading.cancel()
            ending.cancel()

    async def _watch(self) -> None:
        """End the process if it gives no sign of life."""
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - looked_at > LOOK_S + GRACE_S / 2:
                # This process stood still itself, and has not read what came meanwhile.
                self._heard_at = time.monotonic()
            silent_s = time.monotonic() - self._heard_at
            limits_s = (limit_s for _, limit_s in self._waiting.values())
            if silent_s > max(limits_s, default=self._config.time_limit_s) + GRACE_S:
                said = f"was kept from answering by a call for {silent_s:.0f} s"
                advice = "an async function must wait, not compute"
                self._lose(WorkerLost("timeout", f"{said}; {advice}"))
                return

    def _lose(self, why: WorkerLost) -> None:
        """End the process; every request that waits fails, without waiting for its end."""
        if self.lost is not None:
            return
        why.calls = len(self._waiting)
        self.lost = why
        self.handle.signal()
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_result(why)
        self._waiting.clear()

    async def close(self) -> None:
        """End the process and close its channel. A process with much memory can take a second."""
        self._lose(WorkerLost("error", "was ended with its pool"))
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._writer.close()
        await asyncio.to_thread(self.handle.discard)


class Workers:
    """A fixed number of places for worker processes. The process of a place starts with the first
    request to the place, and another one follows where a process ended.
    """

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None, known: Sources | None, places: int
    ) -> None:
        """`codec` decodes responses and encodes observations. `known`: see `UserFiles`. Raises
        `ValueError` if a file of the user's is missing.
        """
        self._config, self._codec = config, codec
        self.files = UserFiles(own_files(config), known)
        self.places: list[Worker | None] = [None] * places
        self._starting = [asyncio.Lock() for _ in self.places]
        self._failed: list[tuple[float, str]] = [(-PAUSE_S, "") for _ in self.places]
        """Of each place: when its process last did not start, and why."""
        self._has_loaded = False
        self._open: set[Worker] = set()
        """The processes that were started and not yet closed."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def has(self, place: int) -> bool:
        """Whether there is a process in the place."""
        return self.places[place] is not None

    async def at(self, place: int, within_s: float | None = None) -> Worker:
        """The process in a place, started if none runs there. Raises `WorkerLost` if none starts;
        `ValueError` instead if no process has started before, since the user's code is then wrong.
        """
        async with self._starting[place]:
            worker = self.places[place]
            if worker is not None and not worker.lost and worker.handle.ended():
                await worker.end  # which sets `lost`
            lost = worker.lost if worker is not None and not worker.retires else None
            if lost and lost.calls == 0:
                self.files.warn(f"a worker process {lost} between two calls, and is replaced")
            if worker is not None and (worker.lost or worker.retires):
                self.places[place] = worker = None
            if worker is None:
                self.places[place] = worker = await self._started(place, within_s)
                self._has_loaded = True
            return worker

    async def _started(self, place: int, within_s: float | None) -> Worker:
        """A new process for a place; see `at`."""
        failed_at, why = self._failed[place]
        if time.monotonic() - failed_at < PAUSE_S:
            raise WorkerLost("error", why)
        for left in reversed(range(TRIES)):
            if self._closed:
                raise RuntimeError("the environment's pool is closed")
            try:
                return await self._start(within_s)
            except ValueError as error:
                if not self._has_loaded and not self._closed:
                    raise
                if not left:
                    why = f"did not start again: {error}"
                    self._failed[place] = (time.monotonic(), why)
                    raise WorkerLost("error", why) from None
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (TRIES - 1 - left))
        raise AssertionError("every try returns or raises")

    async def _start(self, within_s: float | None) -> Worker:
        sources = self.files.current()
        worker = Worker(WorkerHandle(self._config), self._config)
        self._open.add(worker)
        try:
            await worker.connect()
            self.files.loaded(await worker.load(self._codec, sources, within_s))
        except BaseException:
            self._close(worker)
            raise
        return worker

    def settle(self, worker: Worker) -> None:
        """Close a process that is lost, or that retires and has nothing to do. To be called after
        each request.
        """
        if worker.lost or (worker.retires and worker.is_idle):
            self._close(worker)

    def _close(self, worker: Worker) -> None:
        if worker not in self._open:
            return
        self._open.discard(worker)
        task = asyncio.create_task(worker.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all processes. May be called twice."""
        self._closed = True
        for worker in list(self._open):
            self._close(worker)
        with contextlib.suppress(OSError):
            await asyncio.gather(*self._closing)
