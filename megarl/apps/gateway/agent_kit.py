"""Runs agents, programs or async functions that call the model by HTTP, as sessions of the
environment: what the agent asks becomes an observation, what the model answers goes back to it.

    await AgentKit(config, codec, sources).start(), then kit.session() for each rollout
"""

from __future__ import annotations

import asyncio
import inspect
import resource
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megarl.apps.gateway.agent_program import (
    check_command,
    run_agent_program,
)
from megarl.apps.gateway.calls import AgentCall, ApiError, Choice, call_id
from megarl.apps.gateway.conversations import Conversations, Place, plain
from megarl.apps.tools.markup import TurnMarkup
from megarl.apps.tools.parsers import CallReader
from megarl.apps.tools.tool import Schema
from megarl.environments.codec import Codec
from megarl.environments.scores import BadScore
from megarl.environments.session import AgentObservation, Answer, Observation
from megarl.environments.user_calls import outcome_of
from megarl.environments.user_code import Sources, own_function
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.system.files import canonical_json
from megarl.system.lookup import AGENTS, load
from megarl.types import Prompt

FUNCTION = "environment.agent.function"
MOST_FILES = 65_536
"""Open files that a worker process asks for."""
MOST_BODIES = 2
"""Calls of one rollout whose bodies are held and read at the same time."""
ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
"""A tool with which the parser of tool calls is tried."""


def _ended() -> ApiError:
    """The error of a call that has no answer when its rollout ends."""
    return ApiError("the rollout has ended, at a limit of the run", code="ended")


def _shared_client() -> Any:
    """An HTTP client for the calls of many agents, which an agent cannot close for the others."""
    from httpx2 import Limits  # openai's own
    from openai import DefaultAsyncHttpxClient

    class Shared(DefaultAsyncHttpxClient):
        async def aclose(self) -> None:
            pass

    return Shared(limits=Limits(), verify=False, trust_env=False, timeout=None)


class AgentKit:
    """The agent of a recipe in one worker process of the environment: `start` loads it and opens
    the HTTP server that its rollouts share, `session` makes the environment of one rollout.
    """

    schemas: list[Schema] = []
    """Empty: an agent brings its tools with its calls."""

    def __init__(self, config: EnvironmentConfig, codec: Codec | None, sources: Sources) -> None:
        """`codec`: holds the model's tokenizer; with None the agent is only loaded, for the check
        before a run. `sources`: {absolute path of a Python file: its content}.
        """
        self.config, self.settings, self._sources = config, config.agent, sources
        self._codec = codec
        at_once = self.settings.at_once if self.settings.command else sys.maxsize
        self.slots = asyncio.Semaphore(max(1, at_once // config.num_workers))
        """Programs that this worker may start beside those that run."""
        self.sessions: dict[str, AgentSession] = {}
        """{key of a rollout's calls: its session}"""
        self._readers: dict[str, CallReader] = {}
        self._web: Any = None
        """The HTTP client of all function agents; made with the first call."""
        self._thread = ThreadPoolExecutor(1)
        """A tokenizer is used by one thread at a time, and other rollouts do not wait for it."""
        self.serving: asyncio.Task[None] | None = None
        """The task of the server, which would end without a reference to it."""

    async def start(self) -> None:
        """Load the agent and, with a codec, open the server on a free port of this machine. Raises
        `ValueError` for an agent that cannot be run, or a tokenizer without a chat template.
        """
        settings = self.settings
        if settings.command:
            isolate = self.config.isolate
            self.command = check_command(
                settings.command, network=settings.network, isolate=isolate
            )
        else:
            name = settings.function
            self.function = (
                load(AGENTS[name])
                if name in AGENTS
                else own_function(name, FUNCTION, sources=self._sources)
            )
            require(
                inspect.iscoroutinefunction(self.function),
                f"{FUNCTION} is '{settings.function}', which is no async function; write it as"
                " `async def name(prompt, client)`",
            )
        if self._codec is None:
            return
        # A program, and the connection of a call, take some each.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
        require(
            self.codec.tokenizer.chat_template,
            "environment.agent needs a model whose tokenizer has a chat template; put one beside"
            " the tokenizer (chat_template.jinja)",
        )
        tokenizer = self.codec.tokenizer
        CallReader(settings.parser, tokenizer, [ANY_TOOL], "environment.agent.parser")
        allowed = self.codec.allows_control
        self.markup = TurnMarkup(tokenizer, (), self.codec.variables, control_tokens=allowed)
        from megarl.apps.gateway.server import serve_agents  # imports vLLM's protocol, for seconds

        self.port, self.serving = await serve_agents(self)

    @property
    def codec(self) -> Codec:
        """The codec with the model's tokenizer."""
        assert self._codec is not None
        return self._codec

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def session(self) -> AgentSession:
        """A new session: one rollout, which runs the agent once."""
        return AgentSession(self)

    def run(self, prompt: Prompt, key: str) -> Awaitable[Any]:
        """Run the agent on `prompt`, with `key` for its calls: its answer or score. Ends it when
        cancelled.
        """
        settings = self.settings
        if not settings.command:
            return self._call(prompt, key)
        variables = {
            settings.url_variable: f"{self.url}/v1",
            settings.key_variable: key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": key,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        port = str(self.port) if settings.network == "gateway" else "0"
        port = port if self.config.isolate else "none"
        return run_agent_program(
            *(self.command, prompt, settings.columns, variables, port),
            scores=settings.scores_itself,
            hidden=settings.hidden,
        )

    async def _call(self, prompt: Prompt, key: str) -> Any:
        from openai import AsyncOpenAI

        if self._web is None:  # one for all agents: to make one takes tens of milliseconds
            self._web = _shared_client()
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            http_client=self._web,
            timeout=None,  # the run has limits of its own
            max_retries=0,
        )
        answer, error = await outcome_of(self.function(prompt, client))
        if isinstance(error, Exception | asyncio.CancelledError):
            raise error
        if error is not None:  # SystemExit and such would end the worker process
            raise RuntimeError(f"the agent raised {error!r}") from error
        return Answer(answer) if isinstance(answer, str) else answer

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns, which runs beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def read(
        self, text: str, token_ids: np.ndarray, call: AgentCall, room: int
    ) -> tuple[str, Choice]:
        """(the model's turn with special tokens, the same as the agent reads it). `text`: the turn
        without them. `token_ids`: [T] its ids. `call`: what it answers. `room`: most tokens that it
        could have; 0 for no limit.
        """
        turn = self.codec.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        calls: list[dict[str, Any]] = []
        whole, stop = turn, stop_in(turn, call.stop)
        if stop:
            whole, text = turn.partition(stop)[0], text.partition(stop)[0]
        if call.tools:
            try:
                reader = await self.beside(self._reader, call.tools)
                beside, parsed = await reader.read(self.markup.without_closing(whole))
            except Exception:
                parsed = []  # what vLLM's parser cannot read is text, as other servers have it
            if parsed:
                text, parsed = beside, parsed[:1] if call.calls_once else parsed
                calls = [
                    {
                        "id": call_id(),
                        "type": "function",
                        "function": {"name": item.name, "arguments": item.arguments},
                    }
                    for item in parsed
                ]
        is_cut = not stop and len(token_ids) == room and int(token_ids[-1]) not in self.codec.ends
        finish = "tool_calls" if calls else "length" if is_cut else "stop"
        return turn, Choice(text, calls, finish, len(token_ids), "" if calls else stop)

    def _reader(self, tools: list[Schema]) -> CallReader:
        key = canonical_json(tools)
        if key not in self._readers:
            reader = CallReader(self.settings.parser, self.codec.tokenizer, tools)
            self._readers = dict(list(self._readers.items())[-63:]) | {key: reader}
        return self._readers[key]


def stop_in(said: str, stops: Sequence[str]) -> str:
    """Which of the texts `stops` has ended the model's turn `said`: the one whose end comes first;
    "" for none.
    """
    places = {stop: said.find(stop) for stop in stops}
    hits = [stop for stop in stops if places[stop] >= 0]
    return min(hits, key=lambda stop: places[stop] + len(stop), default="")


class AgentSession:
    """One rollout: one run of the agent. Its calls wait in a queue, and the model answers one after
    the other.
    """

    limits_its_calls = True
    """True: `environment.time_limit_s` does not hold for `step`; the agent has its own limit."""

    def __init__(self, kit: AgentKit) -> None:
        self.kit, self.key = kit, f"megarl-{secrets.token_urlsafe(24)}"
        self.open, self.reading = 0, asyncio.Semaphore(MOST_BODIES)
        """Calls that the server has not yet answered; of these, those whose bodies it reads."""
        self._waiting: asyncio.Queue[AgentCall | None] = asyncio.Queue()
        """Calls that wait to be answered, and None once the agent has ended."""
        self._calls: dict[bytes, list[AgentCall]] = {}
        """{digest: the calls that ask the same}, of all calls"""
        self._conversations = Conversations(kit.markup)
        self._agent: asyncio.Future[Any] | None = None
        self._call: AgentCall | None = None
        """The call that the model answers at present."""
        self._place: Place
        """Where that call continues the rollout."""
        self._context, self._asked_at = 0, 0
        """Tokens of the call's conversation before the answer, and its last segment."""
        self._given = 0
        """Most tokens of the model's present turn."""
        self._parents: list[int] = []
        """Of each segment of the rollout so far, the one that it continues, or -1."""
        self._answers: dict[int, AgentCall] = {}
        """{number of a segment of the model: the call that it answers}"""
        self._tokens = 0
        """Of all conversations so far, each counted once."""
        self._said = ""
        """The text that the agent ended with."""
        self._left_s = kit.settings.time_limit_s
        kit.sessions[self.key] = self

    def submit(self, call: AgentCall, is_retry: bool) -> AgentCall:
        """Queue a call that has come in. Returns it, or in its place an earlier one that asks the
        same and has lost its client before the answer was read. `is_retry`: the client says that it
        has sent the call before, so that it has thrown away an answer that it seems to have read.
        """
        same = self._calls.setdefault(call.digest, [])
        waiting = [item for item in same if item.connection is None and item.error is None]
        unread = [item for item in waiting if not item.read_at] or (
            waiting[-1:] if is_retry else []
        )
        if unread:
            return unread[0]
        same.append(call)
        self._waiting.put_nowait(call)
        return call

    async def start(self, prompt: Prompt) -> Observation:
        """Start the agent and wait for its first call. Returns what the model reads; if the agent
        ends without a call, the prompt's text, so that the rollout has something to end with.
        """
        await self.kit.slots.acquire()
        self._agent = asyncio.ensure_future(self.kit.run(prompt, self.key))
        self._agent.add_done_callback(lambda _: self.kit.slots.release())
        self._agent.add_done_callback(lambda _: self._waiting.put_nowait(None))
        return await self._observation() or Observation(prompt.text or "?", max_tokens=1)

    async def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Give the model's turn to the agent, and wait for its next call. Returns what the model
        reads next or, if the agent has ended, its answer or score. `text`: the turn without special
        tokens. `token_ids`: [T] int32, the same.
        """
        if self._call is None:
            self._result()
            raise RuntimeError("the agent made no call; see that it asks the server at its URL")
        await self._record(text, token_ids)
        reply = await self._observation()
        return self._result() if reply is None else reply

    async def _record(self, text: str, token_ids: np.ndarray) -> None:
        """Note the model's turn, and answer the call with it if it is the last asked for."""
        assert self._call is not None
        whole, choice = await self.kit.read(text, token_ids, self._call, self._given)
        number = self._add_segment(len(self._parents) - 1)
        self._answers[number] = self._call
        self._tokens += len(token_ids)
        tokens = self._context + len(token_ids)
        turn = plain(self._call.returned(choice))
        self._conversations.answered(self._place, number, tokens, turn, whole)
        self._call.add(choice)

    def _add_segment(self, follows: int) -> int:
        """Note a segment of the rollout and return its number."""
        self._parents.append(follows)
        return len(self._parents) - 1

    async def _observation(self) -> Observation | None:
        """What the model reads to answer the next call; None if the agent has ended."""
        call = self._call
        if call is not None and not call.ended.is_set():  # another answer to the same call
            try:
                self._given = self._room(call)
                self._add_segment(self._asked_at)
                return self._asks(call, "", [], self._asked_at)
            except ApiError as error:
                call.fail(error)
        while True:
            call = self._call = await self._next()
            if call is None:
                return None
            if call.connection is None:
                call.fail(_ended())  # nobody waits for it any more
                continue
            beside = self.kit.beside
            try:
                node = await beside(self._conversations.place, call.chat, call.tools)
                self._context, self._place = node.tokens, node
                ids = await beside(self.kit.codec.encode, node.text)
                self._context = call.prompt_tokens = node.tokens + len(ids)
                self._given = self._room(call, len(ids))
            except Exception as error:  # also what the template and the tokenizer raise
                call.fail(error if isinstance(error, ApiError) else ApiError(str(error)))
                continue
            call.chat = []  # a rollout may have many long ones
            if (before := self._answers.get(node.follows)) is not None:
                before.read_at = before.read_at or time.monotonic()  # since the agent has its text
            self._asked_at = self._add_segment(node.follows)
            if not node.text:
                self._asked_at = node.follows
            self._conversations.asked(node, self._asked_at, self._context)
            self._tokens += len(ids)
            return self._asks(call, node.text, ids, node.follows)

    def _asks(
        self, call: AgentCall, text: str, ids: list[int], follows: int | None
    ) -> AgentObservation:
        return AgentObservation(
            text, follows=follows, max_tokens=self._given, token_ids=ids, stop=call.stop
        )

    def _room(self, call: AgentCall, read: int = 0) -> int:
        """Most tokens of the model's answer to `call`, for which it reads `read` more; 0 for no
        limit. Raises `ApiError` if there is no room.
        """
        limits = [limit for limit in (self._left(read), call.max_tokens) if limit]
        return min(limits, default=0)

    def _left(self, read: int = 0) -> int:
        """Most tokens that the present conversation may still have, after `read` more that are
        counted in `_context`; 0 for no limit. Raises `ApiError` if there are none.
        """
        longest, together = self.kit.settings.context_tokens, self.kit.settings.rollout_tokens
        left = together - self._tokens - read
        if together and left < 1:
            raise ApiError(
                f"the conversations of this rollout have {self._tokens} tokens, and this call would"
                f" add {read}: more than {together} (environment.agent.rollout_tokens)",
                code="rollout_tokens",
            )
        if longest and self._context >= longest:
            raise ApiError(
                f"This model's maximum context length is {longest} tokens, and the messages have"
                f" {self._context}; shorten them",
                code="context_length_exceeded",
                param="messages",
            )
        limits = [longest and longest - self._context, together and left]
        return min([limit for limit in limits if limit], default=0)

    async def _next(self) -> AgentCall | None:
        """The next call; None once the agent has ended. Raises `BadScore` if the agent takes
        too long.
        """
        assert self._agent is not None
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                call = await self._waiting.get()
        except TimeoutError:
            limit_s = self.kit.settings.time_limit_s
            late = f"the agent took longer than environment.agent.time_limit_s = {limit_s:g} s"
            raise BadScore("timeout", late) from None
        finally:
            self._left_s -= time.monotonic() - began
        if call is not None and self._agent.done():
            call.fail(_ended())
            return None
        return call

    def _result(self) -> Any:
        """What the agent, which has ended, has answered; raises what it has raised."""
        assert self._agent is not None
        answer = self._agent.result()
        self._said = answer.text if isinstance(answer, Answer) else ""
        unread = [number for number, call in self._answers.items() if not call.read_at]
        metrics = {
            "calls": float(len(self._answers)),
            "conversations": float(self._conversations.started),
            "unread": float(len(unread)),
            "left_out": float(len(set(self.untrained) - set(unread))),
        }
        if isinstance(answer, Answer):
            return Answer(answer.text, metrics | answer.metrics)
        return metrics | (answer if isinstance(answer, dict) else {"reward": answer})

    @property
    def untrained(self) -> list[int]:
        """Numbers of the model's segments that are not trained: answers that no client has read and
        with `environment.agent.trains: last` all but the agent's last and those before it in the
        same conversation.
        """
        trained = [number for number, call in self._answers.items() if call.read_at]
        if self.kit.settings.trains == "last":
            last = self._last(trained)
            trained = [number for number in trained if self._answers[number] is last]
        kept = set[int]()
        for number in trained:
            while number >= 0 and number not in kept:
                kept.add(number)
                number = self._parents[number]
        return [number for number in self._answers if number not in kept]

    def _last(self, numbers: Sequence[int]) -> AgentCall | None:
        """Of the calls that the segments `numbers` answer, the one that was read last, or the last
        of those whose text is in the agent's answer, or has it in itself.
        """
        calls = sorted({self._answers[number] for number in numbers}, key=lambda call: call.read_at)
        for call in reversed(calls):
            texts = [choice.text.strip() for choice in call.choices]
            if any(
                text and self._said and (text in self._said or self._said in text) for text in texts
            ):
                return call
        return calls[-1] if calls else None

    def told_at_end(self) -> dict[str, Any]:
        """What the worker process replies besides at the end of the rollout."""
        return {"untrained": self.untrained}

    async def close(self) -> None:
        """End the agent, and refuse its calls from now on."""
        self.kit.sessions.pop(self.key, None)
        for same in self._calls.values():
            for call in same:
                call.fail(_ended())
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.wait([self._agent])
