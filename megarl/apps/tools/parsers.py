"""Reading of tool calls with vLLM's tool-call parsers, by name: from the text that the model wrote
to the calls in it.

await CallReader("hermes", tokenizer, schemas).read(text) -> (text beside them, [Call])
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.apps.tools.forked import in_copy
from megarl.apps.tools.tool import CallError, Schema

SHORT = 1000
"""Characters of a text that is parsed in this process. `qwen3_coder` takes 15 ms for the worst of
them, four times as much for twice as many, and keeps Python's lock."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model has written: name of the tool, and arguments as JSON text."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it; not checked yet."""


class CallReader:
    """Finds the tool calls in a response of the model, decoded with special tokens, by one of
    vLLM's tool-call parsers: `read` returns the calls, `is_open` tells whether the text ends inside
    one.
    """

    def __init__(
        self,
        parser: str,
        tokenizer: Any,
        schemas: Sequence[Schema],
        setting: str = "environment.tools.parser",
    ) -> None:
        """`parser`: name of a tool-call parser of vLLM, such as "hermes". `tokenizer`: of
        transformers. `schemas`: the tools, as dicts in OpenAI's format. `setting`: the recipe's key
        of `parser`, for messages. Raises `ValueError` for a parser that is unknown or does not fit
        the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        # A call that cannot be read is the model's mistake, which vLLM logs with its traceback.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
        if parser not in known:
            raise ValueError(f"{setting} is '{parser}'; set one of {', '.join(sorted(known))}")
        self._request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}],
            tools=list(schemas),  # type: ignore[arg-type]
        )
        parser_class: Any = ToolParserManager.get_tool_parser(parser)
        try:
            self._parser = parser_class(tokenizer, self._request.tools)
        except Exception as error:
            raise ValueError(
                f"{setting} is '{parser}', which does not fit the model's tokenizer: {error}; set"
                " the parser of this family of models"
            ) from None
        # Where vLLM's parsers keep the texts around a call, such as <tool_call>; some have none.
        names = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "tool_start_token")
        starts = [getattr(self._parser, name, None) for name in names]
        self._starts = [mark for mark in starts if isinstance(mark, str) and mark]
        ends = (getattr(self._parser, name.replace("start", "end"), None) for name in names)
        self._ends = [mark for mark in ends if isinstance(mark, str) and mark]

    async def read(self, text: str) -> tuple[str, list[Call]]:
        """(what stands beside the calls, the calls) in `text`, a response decoded with special
        tokens. Raises `CallError` if there is a call that cannot be read, or not in time.
        """
        if len(text) <= SHORT:
            return self._parse(text)
        try:
            return await in_copy(self._parse, text)
        except TimeoutError as error:
            raise CallError(f"the tool call could not be read: {error}; write it shorter") from None

    def _parse(self, text: str) -> tuple[str, list[Call]]:
        found = self._parser.extract_tool_calls(text, self._request)
        calls = [Call(one.function.name, one.function.arguments) for one in found.tool_calls or ()]
        if not calls and any(mark in text for mark in self._starts):
            raise CallError("the tool call could not be read; write it as one JSON object")
        return found.content or "", calls

    def is_open(self, text: str) -> bool:
        """Whether `text`, a response decoded with special tokens, ends inside a tool call. Always
        false for parsers without marks around calls.
        """
        start = max((text.rfind(mark) for mark in self._starts), default=-1)
        end = max((text.rfind(mark) for mark in self._ends if mark not in self._starts), default=-1)
        return start > end
