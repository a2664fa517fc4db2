"""The session of a recipe with tools: in turns the model writes calls and reads their results, and
at last it answers.

await ToolKit(config, codec, sources).start(), then kit.session() for each rollout
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.apps.tools.functions import FUNCTIONS, FunctionTool
from megarl.apps.tools.markup import TurnMarkup
from megarl.apps.tools.parsers import Call, CallReader
from megarl.apps.tools.tool import CallError, Schema, Tool, tool_name
from megarl.environments.codec import Codec
from megarl.environments.session import Answer, Observation
from megarl.environments.user_calls import UserCalls
from megarl.environments.user_code import Sources, own_function
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.apps.tools.servers import ToolServer


class ToolKit:
    """The tools of a recipe in one worker process of the environment: `start` loads them once, and
    `session` makes the environment of one rollout, in which the model calls them.
    """

    def __init__(self, config: EnvironmentConfig, codec: Codec | None, sources: Sources) -> None:
        """`sources`: {absolute path of a Python file: its content} for the recipe's functions.
        `codec`: holds the model's tokenizer; with None only the list of tools is made, for the
        check before a run.
        """
        self._config, self._codec, self._sources = config, codec, sources
        self._tools: dict[str, Tool] = {}
        self._servers: list[ToolServer] = []

    @property
    def schemas(self) -> list[Schema]:
        """The tools, as dicts in OpenAI's format, which the chat template shows to the model; empty
        before `start`.
        """
        return [tool.schema for tool in self._tools.values()]

    async def start(self) -> None:
        """Load the recipe's functions and start its MCP servers. Raises `ValueError` for a tool
        that does not load or cannot be shown to the model, and for two tools of one name.
        """
        settings = self._config.tools
        calls = UserCalls(self._config.threads)
        tools: list[tuple[str, Tool]] = []
        for where in settings.functions:
            function = own_function(where, FUNCTIONS, sources=self._sources)
            tools.append((where, FunctionTool(function, where, calls)))
        if settings.servers:
            from megarl.apps.tools.servers import ToolServer  # imports for a second

            kept = self._config.pass_variables if self._config.isolate else os.environ
            variables = {name: os.environ[name] for name in kept}
            for name, command in settings.servers.items():
                token = settings.server_tokens.get(name, "")
                limit_s = settings.time_limit_s
                self._servers.append(ToolServer(name, command, variables, token, limit_s))
        await asyncio.gather(*(server.start() for server in self._servers))
        for server in self._servers:
            tools += [(f"the server '{server.name}'", tool) for tool in server.tools]
        for where, tool in tools:
            name = tool_name(tool)
            others = [other for other, namesake in tools if tool_name(namesake) == name]
            require(
                len(others) == 1,
                f"environment.tools has {len(others)} tools named '{name}': {', '.join(others)};"
                " rename or remove one",
            )
            self._tools[name] = tool
        require(self._tools, "environment.tools: the servers offer no tool; set others")
        if self._codec is not None:
            codec = self._codec
            self.markup = TurnMarkup(
                *(codec.tokenizer, self.schemas, codec.variables),
                control_tokens=codec.allows_control,
            )
            self.reader = CallReader(settings.parser, codec.tokenizer, self.schemas)

    def session(self) -> ToolSession:
        """A new session: the environment of one rollout, which makes the tool calls in the model's
        turns.
        """
        return ToolSession(self)

    def said(self, token_ids: np.ndarray) -> str:
        """Decode what the model wrote in one turn to text, special tokens included. `token_ids`:
        [T] ids of the turn. Only for a kit that was made with a `codec`, which holds the tokenizer.
        """
        assert self._codec is not None
        return self._codec.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    async def call(self, call: Call) -> tuple[str, bool]:
        """Make the tool call `call` (name of the tool, arguments as JSON text). Returns (text of
        the result or of the error, as the model reads it and cut to
        `environment.tools.result_characters`; whether the call failed). Raises `ConnectionError` if
        the tool's server is gone.
        """
        settings = self._config.tools
        tool = self._tools.get(call.name)
        try:
            if tool is None:
                raise CallError(f"there is no tool '{call.name}', only {', '.join(self._tools)}")
            text = await tool.call(call.arguments, settings.time_limit_s)
        except CallError as error:
            return f"error: {error}"[: settings.result_characters], True
        return text[: settings.result_characters], False


class ToolSession:
    """The environment of one rollout with tools: `step` makes the calls in a turn of the model and
    returns their results, until the model answers without a call.
    """

    limits_its_calls = True
    """True: each call of a tool has a time limit of its own, which leaves out the time in which the
    call waits for a thread; a limit of the whole step would count that time."""

    def __init__(self, kit: ToolKit) -> None:
        self._kit, self._calls, self._failed = kit, 0, 0

    async def start(self, prompt: Prompt) -> Observation:
        """Begin the rollout of `prompt`: returns an empty observation (no text to append), as the
        prompt shows the tools already.
        """
        return Observation("")

    async def step(self, text: str, token_ids: np.ndarray) -> Observation | Answer:
        """Make the calls in a turn of the model, all at the same time, and return the text for the
        model to read next: their results in the chat template's markup. For a turn without calls,
        returns the final answer instead: `text`, the turn without special tokens, and the metrics
        `tool_calls` and `tool_errors`. `token_ids`: [T] int32 ids of the turn. Raises
        `ConnectionError` if a tool's server is gone.
        """
        kit, turn = self._kit, self._kit.said(token_ids)
        calls: list[Call] = []
        try:
            _, calls = await kit.reader.read(kit.markup.without_closing(turn))
            if len(calls) > 1 and not kit.markup.takes_several:
                raise CallError("make one call at a time")
        except CallError as error:
            # Told as the result of a call, for which templates have a place.
            name = calls[0].name if calls else kit.schemas[0]["function"]["name"]
            names, ran = [name], [(f"error: {error}", True)]
        else:
            if not calls:
                metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._failed)}
                return Answer(text, metrics)
            names, ran = [call.name for call in calls], await asyncio.gather(*map(kit.call, calls))
        self._calls += len(ran)
        self._failed += sum(failed for _, failed in ran)
        return Observation(kit.markup.results(turn, names, [result for result, _ in ran]))

    def cut_off_inside(self, token_ids: Any) -> str:
        """Returns "tool_call" if a response that was cut off ends inside a tool call, otherwise "".
        `token_ids`: [T] ids of the model's last turn.
        """
        return "tool_call" if self._kit.reader.is_open(self._kit.said(token_ids)) else ""
