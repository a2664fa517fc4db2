"""Worker processes, in which verifiers and sessions run, each call under an enforced time limit.

    Workers.judge(prompt, response) -> Outcome                              in any process
    Workers.begin(key, prompt), .step(key, token_ids) -> Outcome            always in the same one

A process that ends, sends anything but replies, or does not answer in time is killed with all that
it has started, and replaced; if that fails, the run ends.

A process calls one plain verifier at a time; one that hangs, even in C code, costs its process and
its own sample. A call during which its process ends is repeated once in a new one: an earlier call
may have left behind what ended it. Of `async` verifiers a process runs up to
`environment.concurrency` calls; if it ends, all are repeated, one at a time in a process of their
own, so that only the call that ends it fails.

Sessions run concurrently. A late call costs its own rollout, a process that one call keeps from
answering those of all its sessions. So does one that ends, but these can be made again
(`Outcome.lost`).
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megarl.environments.codec import Codec
from megarl.environments.scores import Outcome, Reply, late_verdict
from megarl.environments.user_calls import COMPUTES, computed_s
from megarl.environments.user_code import Sources, UserFiles
from megarl.environments.verifiers import named, own_files, setting_of
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.limits import POLL_S
from megarl.system.private_folder import MARK, kill_marked
from megarl.types import Failure, Prompt

ROOT = Path(__file__).resolve().parents[2]  # where the package megarl lies
# Not `-m`, which would need PYTHONPATH, and that every process a verifier starts would inherit.
PROGRAM = """import sys
sys.path[:0] = [path for path in sys.argv[1:2] if path not in sys.path]
from megarl.environments.worker import main
main(int(sys.argv[2]))"""
MOST_BYTES = 2**30
"""Longest reply."""
GRACE_S = 5.0
"""Seconds without a sign of life, beyond a call's time limit, until a process is killed."""
DECODE_TRIES = 3


class Worker:
    """One worker process and its open requests; for one event loop."""

    beats = False
    """Whether the process sends a sign of life every 0.5 s, as for `async` functions and sessions,
    and gets many requests at once. Others get one, and are killed when it exceeds its limit."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process afresh (never forked: this process has threads). It ends with its
        parent.
        """
        self._config, self._has_user_files = config, bool(own_files(config))
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
        self._pidfd = os.pidfd_open(self.process.pid)
        """Readable once the process has ended."""
        self._has_ended = asyncio.Event()
        """Set once the process has ended, or is to end."""
        self._writer: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()
        self.waiting: dict[int, tuple[asyncio.Future[Reply], float]] = {}
        """{number of a request: (future of its reply, its limit in seconds)}"""
        self._last_number = secrets.randbits(62)
        """Number of the last request. User code should not guess one."""
        self.lost: Reply | None = None
        """Reply to open and later requests once the process is given up: {failure; lost: what it
        did; by_itself; calls: number then open}."""
        self.retires = False
        """Whether the process asked to be replaced."""
        self._heard_at = time.monotonic()
        self.life = asyncio.create_task(self._live(ours))

    async def load(self, codec: Codec | None, sources: Sources, within_s: float | None) -> Reply:
        """Make the process load the recipe's code; returns as
        `megarl.environments.worker.Host.load`. Raises `ValueError`, with advice, after an error or
        `within_s` seconds; None: two minutes, or a longer `environment.load_limit_s`.
        """
        config = self._config
        # A verifier of one's own may import much, while the engines start and take every core.
        limit_s = max(120.0, config.load_limit_s) if within_s is None else within_s
        code = config.session or ", ".join(config.tools.functions or named(config))
        verifier = f"{setting_of(config)} '{code}'"
        reply = await self.ask("load", config, codec, sources, limit_s=limit_s)
        if lost := reply.get("lost"):
            if reply["failure"] == "error":
                raise ValueError(f"{verifier}: its process {lost} at start")
            raise ValueError(
                f"{verifier} did not load within {limit_s:g} s; move what takes long out of its"
                " file's top level, or raise environment.load_limit_s"
            )
        if "imported" not in reply:
            raise ValueError(reply.get("refused") or reply.get("detail"))
        self.beats = reply["beats"]
        return reply

    async def ask(self, *message: Any, limit_s: float) -> Reply:
        """Send a request (method of `megarl.environments.worker.Host`, its arguments) and wait for
        the reply: `lost` if the process ends, or gives none within `limit_s` seconds.
        One that `beats` enforces the limit itself, and is lost if silent for 5 s longer than its
        largest limit.
        """
        if self.lost:
            return self.lost
        self._last_number += 1
        try:
            body = pickle.dumps((self._last_number, *message))
        except Exception as error:
            return {"failure": "error", "detail": f"{type(error).__name__}: {error}"}
        future = asyncio.get_running_loop().create_future()
        # It stays there if the caller is cancelled: the process replies all the same.
        self.waiting[self._last_number] = future, limit_s
        (await self._writer).write(len(body).to_bytes(8) + body)
        # Most replies come at once; to see what processes compute takes milliseconds for each call.
        await asyncio.wait({future}, timeout=None if self.beats else limit_s / 10)
        if not future.done():
            before_s, rest_s = computed_s(self.process.pid), 0.9 * limit_s
            await asyncio.wait({future}, timeout=rest_s)
            if not future.done():
                used_s = computed_s(self.process.pid) - before_s
                is_busy = used_s > COMPUTES * rest_s or not self._has_user_files
                self.lose("response_limit" if is_busy else "timeout", "gave no reply and was ended")
        return future.result()

    def lose(self, failure: Failure, how: str, *, by_itself: bool = False) -> None:
        """Stop using this process: open and later requests get the reply `self.lost`, and it is
        killed in the background. `failure`, `how`: for that reply. `by_itself`: whether it died.
        """
        if self.lost is None:
            calls = len(self.waiting)
            self.lost = {"failure": failure, "lost": how, "by_itself": by_itself, "calls": calls}
            self._has_ended.set()
            for future, _ in self.waiting.values():
                future.set_result(self.lost)
            self.waiting.clear()

    async def _live(self, channel: socket.socket) -> None:
        """Read replies until the process ends or is given up; then kill what is left."""
        reader, writer = await asyncio.open_connection(sock=channel, limit=MOST_BYTES)
        self._writer.set_result(writer)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._note_end)
        reading = asyncio.create_task(self._read(reader))
        ended = asyncio.create_task(self._has_ended.wait())
        try:
            while not (reading.done() or ended.done()):
                looked_at = time.monotonic()
                await asyncio.wait({reading, ended}, timeout=POLL_S, return_when="FIRST_COMPLETED")
                self._look(time.monotonic() - looked_at)
            if self.lost is None:
                # Its socket is closed: a second to end, and to read what it sent before.
                await asyncio.wait({reading, ended}, timeout=1.0)
                how = reading.result() if reading.done() else ""
                how = how or self.how_it_ended() or "closed the channel that it replies through"
                self.lose("error", how, by_itself=True)
        finally:
            self.lose("error", "was ended with its pool")
            loop.remove_reader(self._pidfd)
            reading.cancel()
            ended.cancel()
            # A process with much memory can take a second to end.
            await asyncio.to_thread(self.kill)
            writer.close()
            os.close(self._pidfd)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)  # it is readable from now on
        self._has_ended.set()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Read replies until something else comes; returns what the process did."""
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
                for name in ("lost", "by_itself", "calls"):  # of `lose` alone
                    reply.pop(name, None)
                self.waiting.pop(number)[0].set_result(reply)
                if self.retires and not self.waiting:
                    self.lose("error", "has retired")
        except (ValueError, TypeError, AttributeError, RecursionError):
            return f"sent no reply but {line[:40]!r}"
        except OSError:
            pass
        return ""

    def _look(self, waited_s: float) -> None:
        """End the process if it owes a sign of life. `waited_s`: since the last look."""
        if waited_s > POLL_S + GRACE_S / 2:
            # This process stood still itself, and has not read what came meanwhile.
            self._heard_at = time.monotonic()
        silent_s = time.monotonic() - self._heard_at
        limits_s = (limit_s for _, limit_s in self.waiting.values())
        most_s = max(limits_s, default=self._config.time_limit_s) + GRACE_S
        if self.beats and silent_s > most_s:
            cause = f"was kept from answering by a call for {silent_s:.0f} s"
            self.lose("timeout", f"{cause}; an async function must wait, not compute")

    def how_it_ended(self) -> str:
        """ "ended with exit code 1"; "" while it runs. Not reaped: its id is not used again before
        `kill`.
        """
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return ""
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit code {status.si_status}"
        return f"ended by signal {signal.Signals(status.si_status).name}"

    def kill(self) -> None:
        """Kill the process and all that it has started, and wait for its end. For any thread."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_marked(self._mark)


class Workers:
    """Scores responses, or runs sessions, in `config.num_workers` processes and one more for
    repeated calls. Each starts with its first request. For one event loop.
    """

    def __init__(self, config: EnvironmentConfig, codec: Codec | None) -> None:
        """Raises `ValueError` if a file of the user's is missing."""
        self._config, self._codec = config, codec
        self.files = UserFiles(own_files(config))
        self.places: list[Worker | None] = [None] * (config.num_workers + 1)
        self._starting = [asyncio.Lock() for _ in self.places]
        self._busy = [0] * config.num_workers
        """Requests under way in each process but the last."""
        self._room = asyncio.Semaphore(config.num_workers)
        self._alone = asyncio.Lock()
        self._overlaps: bool | None = None
        """Whether a process makes several calls at a time; None before one has loaded."""
        self.tools: list[dict[str, Any]] = []
        """In OpenAI's format; empty before a process has loaded."""
        self.forms: dict[str, str] = {}
        """{reward function in TRL's or verl's form: that form in words}"""
        self._homes: dict[str, Worker] = {}
        """{rollout: the process that runs its session}"""
        self._alive: set[Worker] = set()
        self._asked: set[asyncio.Task[Reply]] = set()
        self._closed = False

    async def start(self, within_s: float | None = None) -> None:
        """Start the first process, to find mistakes in the user's code. Raises as `Worker.load`."""
        await self._at(0, within_s)

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score one response, a text or token ids [T] int32. Raises `ValueError` if the verifier
        cannot be loaded, `RuntimeError` after `close`. `num_tokens`: generated; None: they are
        counted.
        """
        limit_s = self._config.time_limit_s
        call = self._anywhere("judge", prompt, response, num_tokens, limit_s=limit_s)
        return await self._outcome(call)

    async def begin(self, key: str, prompt: Prompt) -> Outcome:
        """Start the session of rollout `key`, which no other open rollout has."""
        return await self._outcome(self._at_home("begin", key, prompt))

    async def step(self, key: str, token_ids: np.ndarray) -> Outcome:
        """Pass the model's turn, [T] int32, to the session: an `observation`, or what ends the
        rollout.
        """
        return await self._outcome(self._at_home("step", key, token_ids))

    async def cut_off(self, key: str, token_ids: np.ndarray | None = None) -> Outcome:
        """Close and forget the session. `token_ids`: the model's turn, if it was cut off; `finish`
        is "tool_call" if it ends inside a tool call.
        """
        return await self._outcome(self._at_home("cut_off", key, token_ids))

    async def decode(self, token_ids: np.ndarray) -> str:
        """The text of one response, [T]. Raises `RuntimeError` if three attempts fail."""
        reply: Reply = {}
        for _ in range(DECODE_TRIES):
            call = self._anywhere("decode", token_ids, limit_s=60.0)
            reply = await self._shielded(call)
            if "text" in reply:
                return reply["text"]
        why = f"the worker process {reply['lost']}" if "lost" in reply else reply.get("detail")
        raise RuntimeError(f"decoding a response failed: {why}")

    async def _outcome(self, call: Coroutine[Any, Any, Reply]) -> Outcome:
        reply = await self._shielded(call)
        if lost := reply.get("lost"):
            is_session, failure = self._config.has_sessions, reply["failure"]
            detail = f"the process of the session {lost}"
            if not is_session:
                detail = f"the verifier's process {lost}"
                if failure != "error":
                    detail = f"{late_verdict(self._config.time_limit_s)}: {detail}"
            has_ended = is_session and reply["by_itself"]
            outcome = Outcome(failure=failure, detail=detail, lost=has_ended)
        else:
            outcome = Outcome.of(reply)
        if outcome.observation is not None:
            return outcome
        warning = "; ".join(filter(None, [outcome.warning, self.files.take_warning()]))
        return replace(outcome, warning=warning)

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

    async def _anywhere(self, *message: Any, limit_s: float) -> Reply:
        """The reply of any process; repeated, once, where another call may be why it failed."""
        async with self._room:
            places = range(len(self._busy))
            slot = min(places, key=lambda slot: (self._busy[slot], self.places[slot] is None))
            self._busy[slot] += 1
            try:
                reply = await self._first_reply(slot, message, limit_s)
                if reply is None and not self._overlaps:
                    # The next process of the place has made no call before this one.
                    reply = await self._in(slot, message, limit_s)
            finally:
                self._busy[slot] -= 1
        if reply is None:
            async with self._alone:
                reply = await self._in(len(places), message, limit_s)
        reply.pop("again", None)
        return reply

    async def _first_reply(self, slot: int, message: Sequence[Any], limit_s: float) -> Reply | None:
        """None if the request is to be repeated."""
        reply = await self._in(slot, message, limit_s)
        by_another = reply.get("calls", 1) != 1 or reply.get("by_itself", False)
        return None if by_another or "again" in reply else reply

    async def _in(self, slot: int, message: Sequence[Any], limit_s: float) -> Reply:
        worker = await self._at(slot)
        return await worker.ask(*message, limit_s=limit_s)

    async def _at(self, slot: int, within_s: float | None = None) -> Worker:
        """The process of a slot, started if none runs there. Raises `ValueError` if that fails."""
        async with self._starting[slot]:
            worker = self.places[slot]
            if worker is not None and not worker.retires:
                if not worker.lost and worker.how_it_ended():
                    await asyncio.wait({worker.life})  # which sets `lost`
                if (lost := worker.lost) and self._config.has_sessions and lost["by_itself"]:
                    again = "the rollouts whose sessions it ran begin again, once"
                    self.files.warn(f"a worker process {lost['lost']}, and is replaced; {again}")
                elif lost and lost["calls"] == 0:
                    how = f"{lost['lost']} between two calls"
                    self.files.warn(f"a worker process {how}, and is replaced")
            if worker is None or worker.lost or worker.retires:
                self.places[slot] = None
                worker = self.places[slot] = await self._start(within_s)
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
            worker.lose("error", "was not loaded")
            raise
        if self._overlaps is None:
            self._overlaps, self.tools, self.forms = worker.beats, loaded["tools"], loaded["forms"]
            for _ in range((self._config.concurrency - 1) * len(self._busy) * worker.beats):
                self._room.release()
        return worker

    async def close(self) -> None:
        """End all processes: requests under way fail, and waiting ones raise `RuntimeError`."""
        self._closed = True
        for worker in self._alive:
            worker.lose("error", "was ended with its pool")
        lives = [worker.life for worker in self._alive]
        await asyncio.gather(*lives, *self._asked, return_exceptions=True)
