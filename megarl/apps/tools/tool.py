"""A tool: what the model is shown of it, and how it is called.

Tool.schema {"type": "function", "function": {name, description, parameters}}
await Tool.call(arguments as JSON) -> text that the model reads
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from pydantic_core import to_json

Schema = dict[str, Any]
"""A tool in OpenAI's format: {"type": "function", "function": {name, description, parameters}},
with `parameters` a JSON schema."""


class CallError(Exception):
    """Raised if a call fails for a reason that the model is told, such as an argument of the wrong
    type.
    """


class ToolUnavailable(Exception):
    """Raised if a tool cannot be called at all; the rollout then fails."""


class Tool(Protocol):
    """One tool that the model may call."""

    schema: Schema

    async def call(self, arguments: str, limit_s: float) -> str:
        """Call the tool with `arguments`, a JSON object. Raises `CallError` for what the model is
        to be told, also after `limit_s` seconds, and `ToolUnavailable` if the tool is gone.
        """
        ...


def tool_name(tool: Tool) -> str:
    """Name under which the model calls the tool."""
    return tool.schema["function"]["name"]


def read_object(arguments: str) -> dict[str, Any]:
    """The JSON object of a call. Raises `CallError` if it is none."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the arguments are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CallError(f"the arguments are {type(found).__name__}, not an object")
    try:
        to_json(found)  # as the client does, which would end the session of all calls
    except ValueError as error:
        raise CallError(f"the arguments cannot be sent: {error}") from None
    return found


def as_text(result: Any) -> str:
    """The result of a call as the model reads it: a text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise CallError(
            f"the tool returned {type(result).__name__}, which is neither a text nor JSON"
        ) from None
