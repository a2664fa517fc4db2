"""The session of a recipe with tools: the model calls, reads the results, and at last answers.

ToolKit(config, codec, sources).start() -> kit.session() for each rollout
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.apps.tools.functions import FUNCTIONS, FunctionTool
from megarl.apps.tools.markup import TurnMarkup
from megarl.apps.tools.parsers import Call, CallReader
from megarl.apps.tools.tool import CallError, Schema, Tool, tool_name
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.session import Answer, Observation
from megarl.environments.user_calls import UserCalls
from megarl.environments.user_code import Sources, own_function
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.apps.tools.servers import ToolServer


class ToolKit:
    """The tools of a recipe in one worker process."""

    def __init__(self, config: EnvironmentConfig, codec: Codec | None, sources: Sources) -> None:
        """`sources`: content of the files of the functions. Without `codec` only the list of tools
        is made, for the check before a run.
        """
        self._config, self._codec, self._sources = config, codec, sources
        self._tools: dict[str, Tool] = {}
        self._servers: list[ToolServer] = []

    @property
    def schemas(self) -> list[Schema]:
        """The tools as the chat template is given them."""
        return [tool.schema for tool in self._tools.values()]

    async def start(self) -> None:
        """Load the functions and start the servers. Raises `ValueError` for a tool that does not
        load or cannot be shown to the model, and for two tools of one name.
        """
        settings = self._config.tools
        calls = UserCalls(self._config.threads)
        found: list[tuple[str, Tool]] = []
        for where in settings.functions:
            function = own_function(where, FUNCTIONS, sources=self._sources)
            found.append((where, FunctionTool(function, where, calls)))
        self._servers = self._make_servers() if settings.servers else []
        await asyncio.gather(*(server.start() for server in self._servers))
        for server in self._servers:
            found += [(f"the server '{server.name}'", tool) for tool in server.tools]
        names = Counter(tool_name(tool) for _, tool in found)
        for where, tool in found:
            if names[tool_name(tool)] > 1:
                others = [other for other, one in found if tool_name(one) == tool_name(tool)]
                raise ValueError(
                    f"environment.tools has {len(others)} tools named '{tool_name(tool)}':"
                    f" {', '.join(others)}; rename or remove one"
                )
            self._tools[tool_name(tool)] = tool
        if not self._tools:
            raise ValueError("environment.tools: the servers offer no tool; set others")
        if self._codec is not None:
            self.markup = TurnMarkup(self._codec.tokenizer, self.schemas, self._codec.variables)
            self.reader = CallReader(settings.parser, self._codec.tokenizer, self.schemas)

    def _make_servers(self) -> list[ToolServer]:
        from megarl.apps.tools.servers import ToolServer  # imports for a second

        settings = self._config.tools
        kept = self._config.pass_variables if self._config.isolate else os.environ
        variables = {name: os.environ[name] for name in kept}
        return [
            ToolServer(
                *one, variables, settings.server_tokens.get(one[0], ""), settings.time_limit_s
            )
            for one in settings.servers.items()
        ]

    def session(self) -> ToolSession:
        """A session of one rollout."""
        return ToolSession(self)

    def said(self, token_ids: np.ndarray) -> str:
        """What the model wrote, special tokens included."""
        assert self._codec is not None
        return self._codec.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    async def call(self, call: Call) -> tuple[str, bool]:
        """(the result of a call as the model reads it, whether the call failed)."""
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
    """One rollout with tools. See `megarl.environments.session.Session`."""

    limits_its_calls = True
    """Each call of a tool has a time limit of its own, which leaves out the wait for a thread; a
    limit of the whole step would count it."""

    def __init__(self, kit: ToolKit) -> None:
        self._kit, self._calls, self._failed = kit, 0, 0

    async def start(self, prompt: Prompt) -> Observation:
        """The prompt shows the tools already."""
        return Observation("")

    async def step(self, text: str, token_ids: np.ndarray) -> Observation | Answer:
        """Make the calls of a response, all at the same time, and return their results; a response
        without calls is the answer.
        """
        kit, said = self._kit, self._kit.said(token_ids)
        try:
            calls = kit.reader.read(kit.markup.without_closing(said))
        except CallError as error:
            # Told as the result of a call, for which templates have a place.
            name = kit.schemas[0]["function"]["name"]
            self._calls, self._failed = self._calls + 1, self._failed + 1
            return Observation(kit.markup.results(said, [name], [f"error: {error}"]))
        if not calls:
            metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._failed)}
            return Answer(text, metrics)
        if len(calls) > 1 and not kit.markup.takes_several:
            self._calls, self._failed = self._calls + 1, self._failed + 1
            said_so = "error: make one call at a time"
            return Observation(kit.markup.results(said, [calls[0].name], [said_so]))
        made = await asyncio.gather(*map(kit.call, calls))
        self._calls += len(made)
        self._failed += sum(failed for _, failed in made)
        names = [call.name for call in calls]
        return Observation(kit.markup.results(said, names, [result for result, _ in made]))

    def cut_off_inside(self, token_ids: Any) -> str:
        """`tool_call` if a response that was cut off ends inside a call, else an empty text."""
        return "tool_call" if self._kit.reader.is_open(self._kit.said(token_ids)) else ""
