"""Worker processes, in which verifiers and sessions run, each call under a time limit that is
enforced.

    Workers.judge(prompt, response) -> Outcome                              in any process
    Workers.begin(key, prompt), .step(key, token_ids) -> Outcome            always in the same one

A process that ends, closes its socket, sends anything but replies, or does not answer in time is
killed with all that it has started, and another process takes its place.

A process calls one plain verifier at a time. A verifier that hangs, even in C code, costs its
process and its own sample. Where the process ends during a call, the call is repeated once, in a
new process: an earlier call may have left behind what ended it. Of `async` verifiers a process has
up to `environment.concurrency` calls under way; where one of these calls ends the process, all of
them are repeated, one at a time in a process of their own, so that only the call that ends its
process fails.

Thousands of sessions are open at once; the calls of one process run concurrently. A call that
exceeds its time limit costs its own rollout. A process that one call keeps from answering anything
costs the rollouts whose sessions it ran. So does one that ends, but these can be made again
(`Outcome.lost`). If no process starts in its place, the run ends with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from megarl.environments.codec import Codec
from megarl.environments.scores import Outcome, Reply, late_verdict
from megarl.environments.user_calls import COMPUTES
from megarl.environments.user_code import Sources, UserFiles
from megarl.environments.verifiers import named, own_files, setting_of
from megarl.settings.environments import EnvironmentConfig
from megarl.system.private_folder import MARK, kill_marked
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]  # where the package megarl lies
# Not `-m`, which would need PYTHONPATH, and that every process a verifier starts would inherit.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.worker import main
main(int(sys.argv[2]))"""
MOST_BYTES = 2**30
"""Longest reply. A longer one was not written by `megarl.environments.worker.WorkerChannel`."""
START_WITHIN_S = 120.0  # a verifier of one's own may import much
GRACE_S = 5.0
"""Seconds without a sign of life, beyond the time limit of a call, after which a process is
killed: an `async` function keeps it by computing, or code in C keeps Python's lock."""
LOOK_S = 0.5
END_WITHIN_S = 1.0
"""Seconds that a process has to end by itself once its socket is closed, so that its exit code is
known. Replies that a process sent before it ended are read for as long, since a child process may
hold the socket open."""
DECODE_WITHIN_S = 60.0
DECODE_TRIES = 3
"""How often a request to decode a response is made, if it is not answered."""


@dataclass(eq=False)
class WorkerLost(Exception):
    """Raised to the caller of a request if the worker process ended, or was killed, before it
    replied. `failure`: its kind; `message`: what happened, as the rest of a sentence about the
    process.
    """

    failure: Literal["error", "timeout", "response_limit"]
    message: str
    """Continues a sentence about the process."""
    calls: int = 1
    """Number of requests that waited for a reply."""
    by_itself: bool = False
    """Whether the process ended, closed its channel or sent no reply: through the call that waits,
    or through what an earlier one has left behind."""

    def __str__(self) -> str:
        return self.message


class Worker:
    """One worker process, which runs a verifier, session class or tools of the section
    `environment` of a recipe (`config`), and the requests to it that are not yet answered.
    `Worker(config)` starts the process; then `await load(...)` once and `await ask(...)` for each
    request. All methods but `kill` are called in one event loop.
    """

    beats = False
    """Whether the process sends a message every 0.5 s that it is alive, which it does for `async`
    functions and sessions. Such a process gets many requests at once. A process without these
    messages gets one request at a time, and is killed when the request takes longer than its time
    limit."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process: afresh as a program (never forked: this process has threads). It ends
        with its parent, even one killed by force.
        """
        self._config, self._is_own = config, bool(own_files(config))
        self._mark = f"{os.environ.get(MARK, '')}/{secrets.token_hex(8)}"
        ours, theirs = socket.socketpair()
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
        self._ending = os.pidfd_open(self.process.pid)
        """Descriptor that is readable once the process has ended."""
        self._has_ended = asyncio.Event()
        """Set once the process has ended, or is to be ended."""
        self._writer: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()
        self.waiting: dict[int, tuple[asyncio.Future[Reply | WorkerLost], float]] = {}
        """{number of a request: (future of its reply, its time limit in seconds)}"""
        self._last = secrets.randbits(62)
        """Number of the last request. The user's code in the process should not guess one."""
        self.lost: WorkerLost | None = None
        """Why the process is gone; None while it runs."""
        self.retires = False
        """Whether the process asked to be replaced: it begins nothing further."""
        self._heard_at = time.monotonic()
        self.life = asyncio.create_task(self._live(ours))

    async def load(self, codec: Codec | None, sources: Sources, within_s: float | None) -> Reply:
        """Make the process load the verifier, session class or tools of the recipe; user files are
        taken from `sources`, {absolute path: content}, if they are there. `codec`: decodes and
        encodes token ids; None if all responses are texts. Returns {imported: paths of files
        imported from the folders of the user's files, tools: schemas of the tools in OpenAI's
        format, forms: {name of a reward function: its form, where that is TRL's or verl's}, beats:
        whether the process reports every 0.5 s that it is alive}. Raises `ValueError`, with advice,
        if loading fails or takes more than `within_s` seconds; None: two minutes, or
        `environment.load_limit_s` if that is longer.
        """
        config = self._config
        # In a run the engines may start at the same time and take every core.
        limit_s = max(START_WITHIN_S, config.load_limit_s) if within_s is None else within_s
        code = config.session or ", ".join(config.tools.functions or named(config))
        told = f"{setting_of(config)} '{code}'"
        try:
            reply = await self.ask("load", config, codec, sources, limit_s=limit_s)
        except WorkerLost as lost:
            if lost.failure == "error":
                raise ValueError(f"{told}: its process {lost} at start") from None
            raise ValueError(
                f"{told} did not load within {limit_s:g} s; move what takes long out of its file's"
                " top level, or raise environment.load_limit_s"
            ) from None
        if "imported" not in reply:
            raise ValueError(reply.get("refused") or reply.get("detail"))
        self.beats = reply["beats"]
        return reply

    async def ask(self, *message: Any, limit_s: float) -> Reply:
        """Send a request to this worker process (name of a method of
        `megarl.environments.worker.Host`, such as "judge", then its arguments) and wait for the
        reply, a dict: {score, correct, metrics}, {observation, reward}, {failure, detail} and so
        on. A request that cannot be pickled is answered {failure, detail} at once. Raises
        `WorkerLost` if the process ends or gives no reply within `limit_s` seconds. A process with
        `beats` true, which reports every 0.5 s that it is alive, enforces the time limit itself:
        such a process is lost if silent for 5 s longer than the largest `limit_s` of its open
        requests.
        """
        if self.lost:
            raise self.lost
        self._last += 1
        try:
            body = pickle.dumps((self._last, *message))
        except Exception as error:
            return {"failure": "error", "detail": f"{type(error).__name__}: {error}"}
        future = asyncio.get_running_loop().create_future()
        # It stays there if the caller is cancelled: the process replies all the same.
        self.waiting[self._last] = future, limit_s
        before_s = self._computed_s()
        (await self._writer).write(len(body).to_bytes(8) + body)
        await asyncio.wait({future}, timeout=None if self.beats else limit_s)
        if not future.done():
            computed = self._computed_s() - before_s > COMPUTES * limit_s or not self._is_own
            kind = "response_limit" if computed else "timeout"
            self.lose(WorkerLost(kind, "gave no reply and was ended"))
        found = future.result()
        if isinstance(found, WorkerLost):
            raise found
        return found

    def _computed_s(self) -> float:
        """Seconds of CPU time that the process and those that it has started have used."""
        used = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    used += sum(one.cpu_times()[:4])
        return used

    def lose(self, why: WorkerLost) -> None:
        """Give up this worker process for the reason `why`: awaiting any of its unanswered requests
        raises that `WorkerLost` at once, and the process is killed in the background. Nothing
        happens if it was given up before.
        """
        if self.lost is None:
            self.lost, why.calls = why, len(self.waiting)
            self._has_ended.set()
            for future, _ in self.waiting.values():
                future.set_result(why)
            self.waiting.clear()

    async def _live(self, channel: socket.socket) -> None:
        """The process's life: read its replies until it ends, is to be ended, or gives no sign of
        life; then kill all that is left of it.
        """
        reader, writer = await asyncio.open_connection(sock=channel, limit=MOST_BYTES)
        self._writer.set_result(writer)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._ending, self._note_end)
        reading = asyncio.create_task(self._read(reader))
        ended = asyncio.create_task(self._has_ended.wait())
        try:
            while not (reading.done() or ended.done()):
                looked_at = time.monotonic()
                await asyncio.wait({reading, ended}, timeout=LOOK_S, return_when="FIRST_COMPLETED")
                self._look(time.monotonic() - looked_at)
            if self.lost is None:
                await asyncio.wait({reading, ended}, timeout=END_WITHIN_S)
                said = reading.result() if reading.done() else ""
                said = said or self.how_it_ended() or "closed the channel that it replies through"
                self.lose(WorkerLost("error", said, by_itself=True))
        finally:
            self.lose(WorkerLost("error", "was ended with its pool"))
            loop.remove_reader(self._ending)
            reading.cancel()
            ended.cancel()
            # A process with much memory can take a second to end.
            await asyncio.to_thread(self.kill)
            writer.close()
            os.close(self._ending)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ending)  # it is readable from now on
        self._has_ended.set()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Read replies until the channel is closed, or until something else comes: returns what
        the process did. A reply counts only under the number of a request that waits for it.
        """
        line = b""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                number, reply = json.loads(line)
                self._heard_at = time.monotonic()
                if number == 0:
                    continue
                if number not in self.waiting:
                    return "sent a reply to no request"
                self.retires = reply.pop("retire", False) or self.retires
                self.waiting.pop(number)[0].set_result(reply)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return f"sent no reply but {line[:40]!r}"
        except OSError:
            pass
        return ""

    def _look(self, waited_s: float) -> None:
        """End the process if it should give signs of life and does not. `waited_s`: since the last
        look.
        """
        if waited_s > LOOK_S + GRACE_S / 2:
            # This process stood still itself, and has not read what came meanwhile.
            self._heard_at = time.monotonic()
        silent_s = time.monotonic() - self._heard_at
        limits_s = (limit_s for _, limit_s in self.waiting.values())
        most_s = max(limits_s, default=self._config.time_limit_s) + GRACE_S
        if self.beats and silent_s > most_s:
            said = f"was kept from answering by a call for {silent_s:.0f} s"
            self.lose(WorkerLost("timeout", f"{said}; an async function must wait, not compute"))

    def how_it_ended(self) -> str:
        """How the process has ended, as the rest of a sentence ("ended with exit code 1"); "" while
        it runs. The process is not reaped, so that its id is not used again before `kill`.
        """
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return ""
        if found.si_code == os.CLD_EXITED:
            return f"ended with exit code {found.si_status}"
        return f"ended by signal {signal.Signals(found.si_status).name}"

    def kill(self) -> None:
        """Kill the process and every process that it has started, and wait for its end. May be
        called in any thread; blocks.
        """
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    one.kill()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_marked(self._mark)


class Workers:
    """Scores responses with the recipe's verifier, or runs the recipe's sessions (multi-turn
    environments), in `config.num_workers` worker processes. One more process repeats calls, one at
    a time, that another call may have made fail, as by ending the process of both. Each process
    starts with the first request for it. All methods are called in one event loop; `close` ends the
    processes. `codec` decodes and encodes token ids; None if all responses are texts.
    """

    def __init__(self, config: EnvironmentConfig, codec: Codec | None) -> None:
        """`codec` decodes responses given as token ids, and encodes observations. Raises
        `ValueError` if a file of the user's is missing.
        """
        self._config, self._codec = config, codec
        self.files = UserFiles(own_files(config))
        self.places: list[Worker | None] = [None] * (config.num_workers + 1)
        self._starting = [asyncio.Lock() for _ in self.places]
        self._busy = [0] * config.num_workers
        """Requests under way in each process but the one for calls that are repeated."""
        self._room = asyncio.Semaphore(config.num_workers)
        self._alone = asyncio.Lock()
        self._overlaps: bool | None = None
        """Whether a process makes several calls at the same time; None before one has loaded."""
        self.tools: list[dict[str, Any]] = []
        """The recipe's tools, as {"type": "function", "function": {name, description, parameters}};
        empty before a process has loaded."""
        self.forms: dict[str, str] = {}
        """{name of a reward function: its form in words}, of functions in TRL's or verl's form;
        empty before a process has loaded."""
        self._homes: dict[str, Worker] = {}
        """{key of a rollout: the process that runs its session}."""
        self._alive: set[Worker] = set()
        self._asked: set[asyncio.Task[Reply]] = set()
        self._closed = False

    async def start(self, within_s: float | None = None) -> None:
        """Start the first process and load the user's code there, so that its mistakes are found
        before the first rollout. Raises `ValueError` if it does not load within `within_s` seconds;
        None: two minutes, or `environment.load_limit_s` if that is longer.
        """
        await self._at(0, within_s)

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score one response to `prompt`, a text or token ids [T] int32, with the verifier, in any
        worker process. Returns an `Outcome`: `score` (higher is better), `correct` and `metrics`,
        or, after an error or time-out, `failure` and `detail`. Raises `ValueError` if the verifier
        cannot be loaded, `RuntimeError` if `close` was called. `num_tokens`: tokens that the model
        generated; None to count them in the response.
        """
        limit_s = self._config.time_limit_s
        call = self._anywhere("judge", prompt, response, num_tokens, limit_s=limit_s)
        return await self._outcome(call)

    async def begin(self, key: str, prompt: Prompt) -> Outcome:
        """Make and start the session of rollout `key`, a text that no other open rollout has. The
        outcome's `observation` holds the token ids that the model reads after the prompt (maybe
        none), or `failure` says why the session did not start.
        """
        return await self._outcome(self._at_home("begin", key, prompt))

    async def step(self, key: str, token_ids: np.ndarray) -> Outcome:
        """Pass the token ids of the model's latest turn, [T] int32, to the session of rollout
        `key`. The outcome holds an `observation`, after which the model goes on, or what ends the
        rollout: `answer`, a text for the verifier, `score`, or `failure`.
        """
        return await self._outcome(self._at_home("step", key, token_ids))

    async def cut_off(self, key: str, token_ids: np.ndarray | None = None) -> Outcome:
        """Close and forget the session of rollout `key`. `token_ids`: the model's latest turn, [T]
        int32, if it was cut off at the token limit; the outcome's `finish` is then "tool_call" if
        it ends inside a tool call.
        """
        return await self._outcome(self._at_home("cut_off", key, token_ids))

    async def decode(self, token_ids: np.ndarray) -> str:
        """The text of the token ids of one response, [T], decoded in a worker process, without
        special tokens. Raises `RuntimeError` if three attempts (`DECODE_TRIES`) fail.
        """
        reply: Reply = {}
        for _ in range(DECODE_TRIES):
            try:
                call = self._anywhere("decode", token_ids, limit_s=DECODE_WITHIN_S)
                reply = await self._shielded(call)
                if "text" in reply:
                    return reply["text"]
            except WorkerLost as lost:
                reply = {"detail": f"the worker process {lost}"}
        raise RuntimeError(f"decoding a response failed: {reply.get('detail')}")

    async def _outcome(self, call: Coroutine[Any, Any, Reply]) -> Outcome:
        try:
            found = Outcome.of(await self._shielded(call))
        except WorkerLost as lost:
            is_session = self._config.has_sessions
            said = f"the process of the session {lost}"
            if not is_session:
                said = f"the verifier's process {lost}"
                if lost.failure != "error":
                    said = f"{late_verdict(self._config.time_limit_s)}: {said}"
            has_ended = is_session and lost.by_itself
            found = Outcome(failure=lost.failure, detail=said, lost=has_ended)
        if found.observation is not None:
            return found
        warning = "; ".join(filter(None, [found.warning, self.files.take_warning()]))
        return replace(found, warning=warning)

    async def _shielded(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        """The reply to a call, which goes on if the caller is cancelled: the process is busy."""
        task = asyncio.create_task(call)
        self._asked.add(task)
        task.add_done_callback(self._has_ended)
        return await asyncio.shield(task)

    def _has_ended(self, task: asyncio.Task[Reply]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # or Python complains of one that nobody awaits any more

    async def _at_home(self, command: str, key: str, argument: Any) -> Reply:
        """The reply of the process that runs the session of rollout `key`."""
        config, reply = self._config, dict[str, Any]()
        limit_s = config.start_limit_s if command == "begin" else config.time_limit_s
        worker = self._homes.get(key)
        try:
            worker = worker or await self._at(zlib.crc32(key.encode()) % config.num_workers)
            if command == "begin":
                self._homes[key] = worker
            reply = await worker.ask(command, key, argument, limit_s=limit_s)
            return reply
        finally:
            if command == "cut_off" or "observation" not in reply:
                self._homes.pop(key, None)
            if worker is not None:
                self._settle(worker)

    async def _anywhere(self, *message: Any, limit_s: float) -> Reply:
        """The reply to a request that every process can answer. It is made again, once, where
        another call may be why it failed.
        """
        async with self._room:
            places = range(len(self._busy))
            place = min(places, key=lambda one: (self._busy[one], self.places[one] is None))
            self._busy[place] += 1
            try:
                reply = await self._first_reply(place, message, limit_s)
                if reply is None and not self._overlaps:
                    # The next process of the place has made no call before this one.
                    reply = await self._in(place, message, limit_s)
            finally:
                self._busy[place] -= 1
        if reply is None:
            async with self._alone:
                reply = await self._in(len(places), message, limit_s)
        reply.pop("again", None)
        return reply

    async def _first_reply(
        self, place: int, message: Sequence[Any], limit_s: float
    ) -> Reply | None:
        """The reply of the process in a place; None if the call is to be made again."""
        try:
            reply = await self._in(place, message, limit_s)
        except WorkerLost as lost:
            if lost.calls == 1 and not lost.by_itself:
                raise
            return None
        return None if "again" in reply else reply

    async def _in(self, place: int, message: Sequence[Any], limit_s: float) -> Reply:
        worker = await self._at(place)
        try:
            return await worker.ask(*message, limit_s=limit_s)
        finally:
            self._settle(worker)

    def _settle(self, worker: Worker) -> None:
        """End a process that retires and has nothing to do. To be called after each request."""
        if worker.retires and not worker.waiting and worker not in self._homes.values():
            worker.lose(WorkerLost("error", "has retired"))

    async def _at(self, place: int, within_s: float | None = None) -> Worker:
        """The process in a place, which is started if none runs there. Raises `ValueError` if that
        fails.
        """
        async with self._starting[place]:
            worker = self.places[place]
            if worker is not None and not worker.retires:
                if not worker.lost and worker.how_it_ended():
                    await asyncio.wait({worker.life})  # which sets `lost`
                if (lost := worker.lost) and self._config.has_sessions and lost.by_itself:
                    again = "the rollouts whose sessions it ran begin again, once"
                    self.files.warn(f"a worker process {lost}, and is replaced; {again}")
                elif lost and lost.calls == 0:
                    self.files.warn(f"a worker process {lost} between two calls, and is replaced")
            if worker is None or worker.lost or worker.retires:
                self.places[place] = None
                worker = self.places[place] = await self._start(within_s)
            return worker

    async def _start(self, within_s: float | None) -> Worker:
        if self._closed:
            raise RuntimeError("the environment's pool is closed")
        sources = self.files.current()
        worker = Worker(self._config)
        self._alive.add(worker)
        worker.life.add_done_callback(lambda _: self._alive.discard(worker))
        try:
            loaded = await worker.load(self._codec, sources, within_s)
            self.files.loaded(loaded["imported"])
        except BaseException:
            worker.lose(WorkerLost("error", "was not loaded"))
            raise
        if self._overlaps is None:
            self._overlaps, self.tools, self.forms = worker.beats, loaded["tools"], loaded["forms"]
            for _ in range((self._config.concurrency - 1) * len(self._busy) * worker.beats):
                self._room.release()
        return worker

    async def close(self) -> None:
        """End all worker processes: requests under way get an outcome with a failure, and requests
        that wait for a process raise `RuntimeError`. A second call does nothing more.
        """
        self._closed = True
        for worker in self._alive:
            worker.lose(WorkerLost("error", "was ended with its pool"))
        lives = [worker.life for worker in self._alive]
        await asyncio.gather(*lives, *self._asked, return_exceptions=True)
