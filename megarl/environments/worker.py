"""The program of a worker process: it loads the verifier, session class or tools of a recipe, and
answers the requests that `megarl.environments.workers.Worker` sends over a socket.

    (number, command, arguments) --Host--> {score, ...} | {observation, reward} | {failure, detail}

A plain verifier is called in the main thread, outside of the event loop, one call at a time.
`async` verifiers run concurrently in the event loop. Sessions run concurrently too; their plain
functions run on threads.
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
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from megarl.environments.user_calls import LimitExceeded, UserCalls, ending_forks, within
from megarl.environments.user_code import Sources
from megarl.settings.environments import EnvironmentConfig
from megarl.system.lookup import of_app
from megarl.system.signals import die_with_parent

BUILT_IN_MEMORY_MIB = 512
"""Memory limit of a process that runs a built-in verifier, if the recipe sets none."""
ROOM_LEFT = 0.25
"""The process of a verifier is replaced before its next request once less than this fraction is
left of the memory that it could still allocate when its limit was set."""
BEAT_S = 0.5
OUT_OF_MEMORY = "the verifier's process ran out of memory"
MOST_STOPPED = 64
"""Calls that exceeded their limit before the process is replaced: each may go on, or have left a
thread behind."""
MOST_CHARACTERS = 4_000_000
"""Characters of an observation. More cannot be read by a model, and tokenising takes seconds."""


class WorkerChannel:
    """Receives requests and sends replies over the socket that connects a worker process with the
    process that started it; this is the worker's side. A request is the length of its body (8
    bytes, big-endian) and the body, a pickle. A reply is a line of JSON, [number, reply]: the
    worker runs code that is not trusted, so that the other side must not unpickle what it sends.
    In a process that the worker forks, the socket's file descriptor becomes /dev/null.
    """

    def __init__(self, descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
        """`descriptor`: of the socket, which belongs to this object from now on."""
        self._descriptor, self._process = descriptor, os.getpid()
        self._file = _identity(descriptor)
        opened = asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=2**20)
        self._reader, self._writer = loop.run_until_complete(opened)
        os.register_at_fork(after_in_child=self._let_go)

    async def receive(self) -> tuple[Any, ...] | None:
        """Wait for the next request and return it: (number of the request, name of a method of
        `Host`, its arguments ...). None once the other side has closed the socket.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(8))
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return pickle.loads(body)  # noqa: S301 - from the pool

    def send(self, number: int, reply: Reply) -> None:
        """Send `reply`, a dict of JSON data, to request `number`; returns at once. A reply that is
        no JSON is sent as {failure, detail}. Ends the process if it is a fork of the worker
        process, or if the user's code has closed the socket's descriptor.
        """
        if os.getpid() != self._process:
            os._exit(0)
        if _identity(self._descriptor) != self._file:
            said = "megarl: the user's code closed the descriptor of the worker's channel"
            print(said, file=sys.stderr, flush=True)
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
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class MemoryLimit:
    """Limits what this process may allocate from now on (RLIMIT_DATA), so that it holds at most
    `limit_mib` MiB in memory; None: no limit. An allocation beyond raises `MemoryError`. The limit
    holds from the construction to the end of the process.
    """

    def __init__(self, limit_mib: int | None) -> None:
        """`limit_mib`: MiB; None is no limit. Raises `ValueError` if the process holds that much
        already.
        """
        self.limit_mib = limit_mib
        if limit_mib is None:
            return
        used = psutil.Process().memory_info()
        self._room = limit_mib * 2**20 - used.rss
        if self._room <= 0:
            raise ValueError(
                f"environment.memory_limit_mib is {limit_mib}, but the verifier's process"
                f" holds {used.rss / 2**20:.0f} MiB once it has loaded; raise it"
            )
        # Not the address space: libraries reserve much more of that than they use. What is
        # reserved already is not used again, so the limit counts from here.
        self._most = used.data + self._room
        resource.setrlimit(resource.RLIMIT_DATA, (self._most, self._most))

    def is_tight(self) -> bool:
        """Whether earlier requests have left less than a quarter (`ROOM_LEFT`) of the memory that
        was still free to allocate when the limit was set. False without a limit.
        """
        if self.limit_mib is None:
            return False
        return self._most - psutil.Process().memory_info().data < ROOM_LEFT * self._room


class Host:
    """Runs the user's or built-in verifier, session class or tools inside a worker process. A
    request from `channel`, a socket to the run's process, names a method of this class and holds
    its arguments and a number; the host calls the method and sends its reply under that number. The
    first request must be `load`. Replies are dicts of JSON data; an error of the user's code
    becomes {failure, detail}.
    """

    _config: EnvironmentConfig
    _codec: Any
    """A `Codec`, or None where all responses are texts."""
    _verifier: Any = None
    """A `megarl.environments.verifiers.Verifier`; None where the process runs sessions."""
    _is_own = True
    """Whether the process runs code of the user's."""

    def __init__(self, channel: WorkerChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._loop = channel, loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._overlaps = False
        """Whether the process makes several calls at the same time."""
        self._limit = MemoryLimit(None)
        self._num_late = 0
        """Number of calls that exceeded their time limit."""
        self._open: dict[str, Any] = {}
        """{key of a rollout: its session}, of sessions that are in no call."""
        self._in_call: set[str] = set()
        """Keys of the rollouts whose session is in a call."""
        self._encoding = ThreadPoolExecutor(1)
        """A tokenizer is used by one thread at a time, and other sessions do not wait for it."""

    def serve(self) -> None:
        """Receive requests, run the method that each one names and reply, until the process that
        started this one closes its end of the socket; blocks until then.
        """
        # The loop stops with each request, so that a plain function can be called outside of it:
        # such a function may run a loop of its own, and a thread can have only one.
        while (request := self._loop.run_until_complete(self._channel.receive())) is not None:
            number, command, *arguments = request
            reply: Reply = {}
            with self._failing(reply):
                made = getattr(self, command)(*arguments)
                if inspect.isawaitable(made):
                    self._begin_task(self._answer(number, made))
                    continue
                reply |= made
            self._send(number, reply)

    def _begin_task(self, made: Any) -> None:
        task = self._loop.create_task(made)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, awaited: Awaitable[Reply]) -> None:
        reply: Reply = {}
        with self._failing(reply):
            reply |= await awaited
        self._send(number, reply)

    def _send(self, number: int, reply: Reply) -> None:
        """Send a reply, which says whether the process should begin nothing further."""
        if not self._overlaps:
            # A timer that the call has set would go off in the next call.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)  # the first is that of `signal.alarm` too
        retires = self._num_late >= MOST_STOPPED
        if self._verifier is not None:
            full = OUT_OF_MEMORY in reply.get("detail", "") or self._limit.is_tight()
            retires = retires or full or "again" in reply
        if retires:
            reply["retire"] = True
        self._channel.send(number, reply)

    @contextlib.contextmanager
    def _failing(self, reply: Reply) -> Iterator[None]:
        """A context manager that catches an error of the user's code in its block, and adds to the
        dict `reply` what the rollout service is told of it: `failure`, its kind, and `detail`, the
        message.
        """
        try:
            yield
        except BadScore as error:
            reply |= {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
        except LimitExceeded as error:
            self._num_late += 1
            kind = "response_limit" if error.computed else "timeout"
            reply |= {"failure": kind, "detail": str(error)}
        except MemoryError:
            limit = self._limit.limit_mib
            advice = f"; raise environment.memory_limit_mib = {limit}" if limit else ""
            # What is built in keeps nothing between two calls.
            kind = "error" if self._is_own else "response_limit"
            reply |= {"failure": kind, "detail": f"{OUT_OF_MEMORY}{advice}"}
        except BaseException as error:  # SystemExit and such must not end the process either
            reply |= {"failure": "error", "detail": _said(error)[:DETAIL_CHARACTERS]}
            # A thread that an earlier call has left behind may have interrupted this one.
            is_interrupted = KeyboardInterrupt in (type(error), type(error.__cause__))
            if self._verifier is not None and is_interrupted:
                reply["again"] = True

    # Loading

    def load(self, config: EnvironmentConfig, codec: Codec | None, sources: Sources) -> Reply:
        """Load the verifier, session class or tools that the recipe names. `codec`: decodes and
        encodes token ids; None if all responses are texts. `sources`: {absolute path: content} of
        the user's files, used in place of what is on the disk. Returns {refused: message} if
        loading fails; otherwise {imported: paths of files imported from the folders of the user's
        files, tools: schemas of the tools in OpenAI's format, forms: {name of a reward function:
        its form, where that is TRL's or verl's}, beats: bool}. `beats`: the process may run several
        calls at the same time, and therefore reports every 0.5 s that it is alive.
        """
        self._config, self._codec = config, codec
        limit_mib, functions = config.memory_limit_mib, dict[str, RewardFunction]()
        about: Reply = {"tools": []}
        try:
            # Before the user's files are on the path, where one may hide a library.
            kind = (
                "ToolKit" if config.tools.are_used else "AgentKit" if config.agent.is_used else ""
            )
            if kind:
                of_app(kind)
            verifiers.import_built_in(config)
            own = verifiers.own_files(config)
            if config.isolate and (config.has_sessions or own):
                enter_own_domain(mounts=bool(config.programs))
            self._is_own = bool(own) or config.has_sessions
            with ending_forks():
                user_code.prepare_imports(own, sources)
                if kind:
                    kit = of_app(kind)(config, codec, sources)
                    self._loop.run_until_complete(kit.start())
                    about["tools"], self._make = kit.schemas, kit.session
                elif config.has_sessions:
                    self._make = verifiers.load_session(config, sources)
                else:
                    functions = verifiers.load_functions(config, sources)
                    self._verifier = verifiers.load_verifier(config, functions)
                    limit_mib = limit_mib or (None if own else BUILT_IN_MEMORY_MIB)
            self._limit = MemoryLimit(limit_mib)
        except BaseException as error:
            return {"refused": str(error) if isinstance(error, ValueError) else _said(error)}
        gc.collect()
        gc.freeze()  # what is imported stays, and would be searched again and again
        self._calls = UserCalls(config.threads)
        self._overlaps = config.has_sessions or verifiers.may_overlap(config, functions)
        if self._overlaps:
            self._begin_task(self._beat())
        about["forms"] = {name: one.form for name, one in functions.items() if one.form}
        return about | {"imported": user_code.neighbours(own), "beats": self._overlaps}

    async def _beat(self) -> None:
        """Send a sign of life, the number 0, again and again. Without it the pool knows that a call
        keeps the whole process.
        """
        while True:
            self._channel.send(0, {})
            await asyncio.sleep(BEAT_S)

    def decode(self, token_ids: Any) -> Reply:
        """{text: the text of these token ids, without special tokens}."""
        return {"text": self._codec.decode(token_ids)}

    # Verifiers

    def judge(self, prompt: Any, response: Any, num_tokens: int | None) -> Any:
        """Call the verifier on a response, given as text or as token ids [T]. Returns {score,
        correct, metrics} or {failure, detail}; of an `async` verifier, an awaitable of that.
        `num_tokens`: tokens that the model generated; None to count the token ids or, with a codec,
        the tokens of the text.
        """
        if not isinstance(response, str):
            num_tokens = len(response) if num_tokens is None else num_tokens
            response = self._codec.decode(response)
        elif num_tokens is None and self._codec is not None:
            num_tokens = len(self._codec.encode(response))
        if num_tokens is not None:
            response = Counted.of(response, num_tokens)
        with ending_forks():
            made = self._verifier(prompt, response)
        return self._judged(made) if inspect.isawaitable(made) else self._score(made)

    async def _judged(self, made: Awaitable[Any]) -> Reply:
        limit_s = self._config.time_limit_s
        return self._score(await within(limit_s, made, late_verdict(limit_s)))

    def _score(self, answer: Any) -> Reply:
        return score_reply(answer, maps_scores=not self._config.maps_no_scores)

    # Sessions

    async def begin(self, key: str, prompt: Any) -> Reply:
        """Make the session of rollout `key` (a unique text) and call its `start(prompt)`. Returns
        {observation: token ids that the model reads after the prompt, may be empty, reward: 0.0}.
        Raises what the session raises, also `LimitExceeded` after `environment.start_limit_s`,
        unless the session limits its calls itself.
        """
        session, goes_on = None, False
        self._in_call.add(key)
        try:
            session = await self._call(self._make, setting="start_limit_s")
            if getattr(session, "limits_its_calls", False):
                found = await session.start(prompt)
            else:
                found = await self._call(session.start, prompt, setting="start_limit_s")
            if not isinstance(found, Observation):
                said = f"the session's start returned {found!r:.200}, not an Observation"
                raise TypeError(said)
            if found.reward != 0.0:
                raise ValueError("the session's start returned a reward, but no turn was taken yet")
            if found.follows not in (None, -1) or (found.max_tokens and not found.text):
                raise ValueError(
                    "the session's start returned an observation that follows a segment, or an"
                    " empty one with max_tokens; leave both out"
                )
            if found.role:
                raise ValueError(
                    "the session's start returned an observation with a role, but the prompt has"
                    " begun the model's turn; leave role out"
                )
            reply = await self._observation(found)
            goes_on = True
        finally:
            await self._leave(key, session, goes_on=goes_on)
        return reply

    async def step(self, key: str, token_ids: Any) -> Reply:
        """Pass the token ids of the model's latest turn, [T], to the session of rollout `key`.
        Returns {observation: token ids, reward} if the rollout goes on. At its end the session is
        closed and the reply is {answer: text for the verifier, metrics}, or {score, correct,
        metrics}, or {failure, detail}. Raises what the session raises.
        """
        session = self._open.pop(key, None)
        if session is None:
            detail = "the session ended with the process it ran in, which another session broke"
            return {"failure": "error", "detail": detail}
        reply: Reply = {}
        with self._failing(reply):
            reply |= await self._step(session, key, token_ids)
        told = {} if "observation" in reply else getattr(session, "told_at_end", dict)()
        return reply | told

    async def _step(self, session: Any, key: str, token_ids: Any) -> Reply:
        goes_on = False
        self._in_call.add(key)
        try:
            text = self._codec.decode(token_ids)
            if getattr(session, "limits_its_calls", False):
                found = await session.step(text, token_ids)
            else:
                found = await self._call(session.step, text, token_ids)
            if isinstance(found, Answer):
                if not isinstance(found.text, str):
                    raise TypeError(f"the session's answer is {found.text!r:.200}, not a text")
                metrics = read_score({"reward": 0.0, **found.metrics}).metrics
                return {"answer": found.text, "metrics": metrics}
            if not isinstance(found, Observation):
                return self._score(found)
            last = int(token_ids[-1]) if found.follows is None and len(token_ids) else None
            reply = await self._observation(found, last)
            if not reply["observation"] and found.follows in (None, -1):
                raise ValueError(
                    f"the session's step returned the observation {found.text!r:.80}, which has no"
                    " tokens in the model's tokenizer"
                )
            goes_on = True
        finally:
            await self._leave(key, session, goes_on=goes_on)
        return reply

    async def cut_off(self, key: str, token_ids: Any) -> Reply:
        """Close and forget the session of rollout `key`, which is cut off by a limit. Returns
        {finish: "tool_call"} if the session has a method `cut_off_inside` and says that
        `token_ids`, the last turn [T], end inside a tool call; otherwise {finish: ""}. `token_ids`
        None: do not ask.
        """
        self._in_call.discard(key)  # one in a call is closed after it
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
        if goes_on and key in self._in_call:
            self._open[key] = session
        else:
            await self._close(session)
        self._in_call.discard(key)

    async def _close(self, session: Any) -> None:
        """Call the session's method `close`, if it has one. The rollout has ended, so that an error
        there is only printed.
        """
        if hasattr(session, "close"):
            try:
                await self._call(session.close)
            except BaseException as error:
                print(f"a session's close failed: {_said(error)}", file=sys.stderr)

    async def _call(
        self, function: Callable[..., Any], *arguments: Any, setting: str = "time_limit_s"
    ) -> Any:
        """What a function of the user returns within the limit of `environment.<setting>`."""
        limit_s = getattr(self._config, setting)
        late = f"no reply within environment.{setting} = {limit_s:g} s"
        return await self._calls.run(function, arguments, limit_s, late)

    async def _observation(self, found: Observation, last: int | None = None) -> Reply:
        text = found.text
        if not isinstance(text, str):
            raise TypeError(f"the session's observation is {text!r:.200}, not a text")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"the session's observation has {len(text):,} characters, more than"
                f" {MOST_CHARACTERS:,}; shorten it"
            )
        if found.max_tokens < 0:
            raise ValueError(f"the session's observation has max_tokens = {found.max_tokens}")
        reward = as_reward(found.reward)
        if found.role:
            text = self._codec.reply(text, last)
        place = {"follows": found.follows, "max_tokens": found.max_tokens}
        if isinstance(found, AgentObservation):
            return {"observation": found.token_ids, "stop": found.stop} | place
        ids = await self._loop.run_in_executor(self._encoding, self._codec.encode, text)
        return {"observation": ids, "reward": reward} | place


def _said(error: BaseException) -> str:
    """An error of the user's code in one line; its own text may fail to be made."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


def main(parent: int) -> None:
    """Run the worker process: answer requests on the socket that is standard input until the parent
    process (pid `parent`) closes its end or dies, then exit by `os._exit`. Never returns. Standard
    output is redirected to standard error.
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
