"""The program of a worker process: answers the requests of `megarl.environments.workers.Worker`.

    (number, command, arguments) --Host--> {score, ...} | {observation, reward} | {failure, detail}

A plain verifier is called in the main thread, outside of the event loop, one call at a time.
`async` verifiers and sessions run concurrently; plain functions of sessions run on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from megarl.environments import user_code, verifiers
from megarl.environments.codec import Codec
from megarl.environments.isolation import enter_own_domain
from megarl.environments.response_text import Counted
from megarl.environments.scores import (
    DETAIL_CHARACTERS,
    BadScore,
    Reply,
    as_reward,
    late_verdict,
    read_score,
    score_reply,
)
from megarl.environments.session import AgentObservation, Answer, Observation
from megarl.environments.signatures import RewardFunction
from megarl.environments.user_calls import UserCalls, ending_forks, within
from megarl.environments.user_code import Sources
from megarl.settings.environments import EnvironmentConfig
from megarl.system.lookup import of_app
from megarl.system.signals import die_with_parent

BUILT_IN_MEMORY_MIB = 512
"""Of a built-in verifier's process, if the recipe sets none."""
OUT_OF_MEMORY = "the verifier's process ran out of memory"
MOST_CHARACTERS = 4_000_000
"""Of an observation. No model reads more, and tokenising takes seconds."""


class WorkerChannel:
    """The worker's side of the socket. A request is its length (8 bytes, big-endian) and a pickle;
    a reply is a line of JSON, [number, reply], as what untrusted code sends must not be unpickled.
    In a fork of the worker the descriptor becomes /dev/null.
    """

    def __init__(self, descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor, self._process = descriptor, os.getpid()
        self._file = _identity(descriptor)
        opened = asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=2**20)
        self._reader, self._writer = loop.run_until_complete(opened)
        os.register_at_fork(after_in_child=self._let_go)

    async def receive(self) -> tuple[Any, ...] | None:
        """(number of a request, method of `Host`, its arguments ...); None once the socket is
        closed.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(8))
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return pickle.loads(body)  # noqa: S301 - from the pool

    def send(self, number: int, reply: Reply) -> None:
        """Send `reply`; what is no JSON is sent as {failure, detail}. Ends the process if it is a
        fork of the worker, or the user's code has closed the descriptor.
        """
        if os.getpid() != self._process:
            os._exit(0)
        if _identity(self._descriptor) != self._file:
            message = "megarl: the user's code closed the descriptor of the worker's channel"
            print(message, file=sys.stderr, flush=True)
            os._exit(1)
        try:
            line = json.dumps([number, reply])
        except (TypeError, ValueError, RecursionError) as error:
            # The pool waits for a reply to this number.
            failed = {"failure": "error", "detail": f"the reply is no JSON: {error}"}
            line = json.dumps([number, failed])
        self._writer.write(line.encode() + b"\n")

    def _let_go(self) -> None:
        if _identity(self._descriptor) == self._file:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._descriptor, inheritable=False)
            os.close(nothing)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """What tells the open file of a descriptor from others; None if it is closed."""
    try:
        info = os.fstat(descriptor)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def limit_memory(limit_mib: int) -> None:
    """Limit what this process may allocate from now on (RLIMIT_DATA), to hold at most `limit_mib`
    MiB. Beyond, allocations raise `MemoryError`. Raises `ValueError` if it holds that much already.
    """
    used = psutil.Process().memory_info()
    room = limit_mib * 2**20 - used.rss
    if room <= 0:
        raise ValueError(
            f"environment.memory_limit_mib is {limit_mib}, but the verifier's process"
            f" holds {used.rss / 2**20:.0f} MiB once it has loaded; raise it"
        )
    # Not the address space: libraries reserve much more of that than they use. What is reserved
    # already is not used again, so the limit counts from here.
    resource.setrlimit(resource.RLIMIT_DATA, (used.data + room, used.data + room))


class Host:
    """Runs a recipe's verifier, session class or tools. A request names a method of this class; the
    first is `load`. Replies are JSON data; an error of the user's code becomes {failure, detail}.
    """

    _config: EnvironmentConfig
    _codec: Any
    """A `Codec`, or None where all responses are texts."""
    _verifier: Any = None
    """A `megarl.environments.verifiers.Verifier`; None where the process runs sessions."""
    _is_own = True
    """Whether the process runs the user's code."""
    _files: Sequence[Path] = ()
    """The user's, named by the recipe."""

    def __init__(self, channel: WorkerChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._overlaps = False
        self._limit_mib: int | None = None
        self._open: dict[str, Any] = {}
        """{key of a rollout: its session}, of those in no call."""
        self._in_call: dict[str, asyncio.Task[Any] | None] = {}
        """{rollout: task of the call that its session is in}."""
        self._encoding = ThreadPoolExecutor(1)
        """A tokenizer is used by one thread at a time; other sessions do not wait."""

    def serve(self) -> None:
        """Answer requests until the other side closes the socket; blocks."""
        # The loop stops with each request, so that a plain function can be called outside of it:
        # such a function may run a loop of its own, and a thread can have only one.
        while (request := self._loop.run_until_complete(self._channel.receive())) is not None:
            number, command, *arguments = request
            reply: Reply = {}
            with self._failing(reply):
                answer = getattr(self, command)(*arguments)
                if inspect.isawaitable(answer):
                    self._begin_task(self._answer(number, answer))
                    continue
                reply |= answer
            self._send(number, reply)

    def _begin_task(self, awaitable: Any) -> None:
        task = self._loop.create_task(awaitable)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, awaited: Awaitable[Reply]) -> None:
        reply: Reply = {}
        with self._failing(reply):
            reply |= await awaited
        self._send(number, reply)

    def _send(self, number: int, reply: Reply) -> None:
        """Send a reply, which says whether the process begins nothing further."""
        if not self._overlaps:
            # A timer that the call has set would go off in the next call.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)  # the first is that of `signal.alarm` too
        is_full = OUT_OF_MEMORY in reply.get("detail", "")
        if self._verifier is not None and (is_full or "again" in reply):
            reply["retire"] = True
        self._channel.send(number, reply)

    @contextlib.contextmanager
    def _failing(self, reply: Reply) -> Iterator[None]:
        """Catches errors of the user's code, and adds `failure` and `detail` to `reply`."""
        try:
            yield
        except BadScore as error:
            reply |= {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
        except MemoryError:
            limit = self._limit_mib
            advice = f"; raise environment.memory_limit_mib = {limit}" if limit else ""
            # What is built in keeps nothing between two calls.
            failure = "error" if self._is_own else "response_limit"
            reply |= {"failure": failure, "detail": f"{OUT_OF_MEMORY}{advice}"}
        except BaseException as error:  # SystemExit and such must not end the process either
            reply |= {"failure": "error", "detail": self._described(error)[:DETAIL_CHARACTERS]}
            # A thread that an earlier call has left behind may have interrupted this one.
            is_interrupted = KeyboardInterrupt in (type(error), type(error.__cause__))
            if self._verifier is not None and is_interrupted:
                reply["again"] = True

    def _described(self, error: BaseException) -> str:
        return user_code.described(error, self._files)

    # Loading

    def load(self, config: EnvironmentConfig, codec: Codec | None, sources: Sources) -> Reply:
        """Load what the recipe names. `codec`: None if all responses are texts. `sources`: used in
        place of the disk. Returns {refused: message} if that fails; otherwise {imported: the user's
        files, with neighbours, tools: schemas in OpenAI's format, forms: {reward function: TRL's or
        verl's form}, beats: whether the process may run several calls at once, and sends signs of
        life}.
        """
        self._config, self._codec = config, codec
        limit_mib, functions = config.memory_limit_mib, dict[str, RewardFunction]()
        reply: Reply = {"tools": []}
        try:
            # Before the user's files are on the path, where one may hide a library.
            kit_name = (
                "ToolKit" if config.tools.are_used else "AgentKit" if config.agent.is_used else ""
            )
            if kit_name:
                of_app(kit_name)
            verifiers.import_built_in(config)
            files = self._files = verifiers.own_files(config)
            if config.isolate and (config.has_sessions or files):
                enter_own_domain()
            self._is_own = bool(files) or config.has_sessions
            with ending_forks():
                user_code.prepare_imports(files, sources)
                if kit_name:
                    kit = of_app(kit_name)(config, codec, sources)
                    self._loop.run_until_complete(kit.start())
                    reply["tools"], self._make = kit.schemas, kit.session
                elif config.has_sessions:
                    self._make = verifiers.load_session(config, sources)
                else:
                    functions = verifiers.load_functions(config, sources)
                    self._verifier = verifiers.load_verifier(config, functions)
                    limit_mib = limit_mib or (None if files else BUILT_IN_MEMORY_MIB)
            self._limit_mib = limit_mib
            if limit_mib is not None:
                limit_memory(limit_mib)
        except BaseException as error:
            return {
                "refused": str(error) if isinstance(error, ValueError) else self._described(error)
            }
        gc.collect()
        gc.freeze()  # what is imported stays, and would be searched again and again
        self._calls = UserCalls(config.threads)
        # All functions are the user's and `async`, and `code`, which blocks, is not used.
        are_async = bool(functions) and all(f.is_async for f in functions.values())
        self._overlaps = config.has_sessions or (are_async and not config.programs)
        if self._overlaps:
            self._begin_task(self._beat())
        reply["forms"] = {name: f.form for name, f in functions.items() if f.form}
        return reply | {"imported": user_code.neighbours(files), "beats": self._overlaps}

    async def _beat(self) -> None:
        """Send a sign of life, the number 0, every 0.5 s; a call may keep the process from it."""
        while True:
            self._channel.send(0, {})
            await asyncio.sleep(0.5)

    def decode(self, token_ids: Any) -> Reply:
        return {"text": self._codec.decode(token_ids)}

    # Verifiers

    def judge(self, prompt: Any, response: Any, num_tokens: int | None) -> Any:
        """Score a response, a text or token ids [T]: {score, correct, metrics}, {failure, detail},
        or an awaitable of it. `num_tokens`: generated; None: count them, which of a text needs a
        codec.
        """
        if not isinstance(response, str):
            num_tokens = len(response) if num_tokens is None else num_tokens
            response = self._codec.decode(response)
        elif num_tokens is None and self._codec is not None:
            num_tokens = len(self._codec.encode(response))
        if num_tokens is not None:
            response = Counted.of(response, num_tokens)
        with ending_forks():
            answer = self._verifier(prompt, response)
        return self._judged(answer) if inspect.isawaitable(answer) else self._score(answer)

    async def _judged(self, awaitable: Awaitable[Any]) -> Reply:
        limit_s = self._config.time_limit_s
        return self._score(await within(limit_s, awaitable, late_verdict(limit_s)))

    def _score(self, answer: Any) -> Reply:
        return score_reply(answer, maps_scores=not self._config.maps_no_scores)

    # Sessions

    async def begin(self, key: str, prompt: Any) -> Reply:
        """Make and start the session of rollout `key`: {observation: token ids, maybe none, reward:
        0.0}. Raises what the session raises, and `BadScore`.
        """
        session, goes_on = None, False
        self._in_call[key] = asyncio.current_task()
        try:
            session = await self._call(self._make, setting="start_limit_s")
            if getattr(session, "limits_its_calls", False):
                start = await session.start(prompt)
            else:
                start = await self._call(session.start, prompt, setting="start_limit_s")
            if not isinstance(start, Observation):
                message = f"the session's start returned {start!r:.200}, not an Observation"
                raise TypeError(message)
            if start.reward != 0.0:
                raise ValueError("the session's start returned a reward, but no turn was taken yet")
            if start.follows not in (None, -1) or (start.max_tokens and not start.text):
                raise ValueError(
                    "the session's start returned an observation that follows a segment, or an"
                    " empty one with max_tokens; leave both out"
                )
            if start.role:
                raise ValueError(
                    "the session's start returned an observation with a role, but the prompt has"
                    " begun the model's turn; leave role out"
                )
            reply = await self._observation(start)
            goes_on = True
        finally:
            await self._leave(key, session, goes_on=goes_on)
        return reply

    async def step(self, key: str, token_ids: Any) -> Reply:
        """Give the model's turn, token ids [T], to the session. Returns {observation: token ids,
        reward}; at the end {answer, metrics}, {score, correct, metrics} or {failure, detail}.
        """
        session = self._open.pop(key, None)
        if session is None:
            detail = "the session ended with the process it ran in, which another session broke"
            return {"failure": "error", "detail": detail}
        reply: Reply = {}
        with self._failing(reply):
            reply |= await self._step(session, key, token_ids)
        more = {} if "observation" in reply else getattr(session, "told_at_end", dict)()
        return reply | more

    async def _step(self, session: Any, key: str, token_ids: Any) -> Reply:
        goes_on = False
        self._in_call[key] = asyncio.current_task()
        try:
            text = self._codec.decode(token_ids)
            if getattr(session, "limits_its_calls", False):
                answer = await session.step(text, token_ids)
            else:
                answer = await self._call(session.step, text, token_ids)
            if isinstance(answer, Answer):
                if not isinstance(answer.text, str):
                    raise TypeError(f"the session's answer is {answer.text!r:.200}, not a text")
                metrics = read_score({"reward": 0.0, **answer.metrics}).metrics
                return {"answer": answer.text, "metrics": metrics}
            if not isinstance(answer, Observation):
                return self._score(answer)
            last = int(token_ids[-1]) if answer.follows is None and len(token_ids) else None
            reply = await self._observation(answer, last)
            if not reply["observation"] and answer.follows in (None, -1):
                raise ValueError(
                    f"the session's step returned the observation {answer.text!r:.80}, which has no"
                    " tokens in the model's tokenizer"
                )
            goes_on = True
        finally:
            await self._leave(key, session, goes_on=goes_on)
        return reply

    async def cut_off(self, key: str, token_ids: Any) -> Reply:
        """Close a session whose rollout was cut off. `token_ids`: the last turn, [T], or None.
        Returns {finish: "tool_call"} if it ends inside a tool call, else {finish: ""}.
        """
        task = self._in_call.pop(key, None)  # a session in a call is closed after it
        if task is not None and self._config.agent.is_used:
            task.cancel()  # an agent may wait for long, also for its place, and then start
        session, finish = self._open.pop(key, None), ""
        try:
            if token_ids is not None and hasattr(session, "cut_off_inside"):
                finish = await self._call(session.cut_off_inside, token_ids)
                if finish not in ("", "tool_call"):
                    raise TypeError(
                        f"cut_off_inside returned {finish!r:.80}, not '' or 'tool_call'"
                    )
            return {"finish": finish} | getattr(session, "told_at_end", dict)()
        finally:
            await self._close(session)

    async def _leave(self, key: str, session: Any, *, goes_on: bool) -> None:
        """Leave a session open after its call, unless it has ended or was discarded meanwhile."""
        is_open = key in self._in_call
        self._in_call.pop(key, None)  # first: `cut_off` must not cancel the session's close
        if goes_on and is_open:
            self._open[key] = session
        else:
            await self._close(session)

    async def _close(self, session: Any) -> None:
        """Call the session's `close`, if it has one; the rollout has ended, so an error is only
        printed.
        """
        if hasattr(session, "close"):
            try:
                await self._call(session.close)
            except BaseException as error:
                print(f"a session's close failed: {self._described(error)}", file=sys.stderr)

    async def _call(
        self, function: Callable[..., Any], *arguments: Any, setting: str = "time_limit_s"
    ) -> Any:
        limit_s = getattr(self._config, setting)
        late = f"no reply within environment.{setting} = {limit_s:g} s"
        return await self._calls.run(function, arguments, limit_s, late)

    async def _observation(self, observation: Observation, last: int | None = None) -> Reply:
        text = observation.text
        if not isinstance(text, str):
            raise TypeError(f"the session's observation is {text!r:.200}, not a text")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"the session's observation has {len(text):,} characters, more than"
                f" {MOST_CHARACTERS:,}; shorten it"
            )
        if observation.max_tokens < 0:
            raise ValueError(f"the session's observation has max_tokens = {observation.max_tokens}")
        reward = as_reward(observation.reward)
        if observation.role:
            text = self._codec.reply(text, last)
        common = {"follows": observation.follows, "max_tokens": observation.max_tokens}
        if isinstance(observation, AgentObservation):
            return {"observation": observation.token_ids, "stop": observation.stop} | common
        ids = await self._loop.run_in_executor(self._encoding, self._codec.encode, text)
        return {"observation": ids, "reward": reward} | common


def main(parent: int) -> None:
    """Answer requests on standard input, a socket, until `parent` (a pid) closes its end or dies.
    Never returns. Standard output becomes standard error.
    """
    die_with_parent(parent)
    loop = asyncio.new_event_loop()
    # The channel moves away from standard input, so that a verifier may read without breaking it;
    # what one prints goes to standard error, because the parent's standard output may be read by
    # a program.
    channel = WorkerChannel(os.dup(0), loop)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    code = 0
    try:
        Host(channel, loop).serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not an ordinary exit, which waits for threads that a user's call keeps.
    os._exit(code)
