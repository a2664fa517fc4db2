"""A tool that a model may call in its response: what the model is shown of it, and how to call it.

Tool.schema {"type": "function", "function": {name, description, parameters}}
await Tool.call(arguments as JSON text) -> text that the model reads
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from pydantic_core import to_json

Schema = dict[str, Any]
"""A tool in OpenAI's format: {"type": "function", "function": {name, description, parameters}},
with `parameters` a JSON schema."""


class CallError(Exception):
    """Raised if a tool call fails for a reason that the model is told as the call's result, such as
    an argument of the wrong type. The rollout goes on.
    """


class ToolUnavailable(Exception):
    """Raised if a tool cannot be called at all, such as where its server is gone; the rollout then
    fails.
    """


class Tool(Protocol):
    """One tool that the model may call: `schema`, a dict in OpenAI's format, is shown to the model
    by the chat template, and `call` runs the tool.
    """

    schema: Schema

    async def call(self, arguments: str, limit_s: float) -> str:
        """Call the tool with `arguments`, JSON text of an object as the model wrote it, and return
        the text that the model reads. Raises `CallError` for what the model is to be told, also
        after `limit_s` seconds, and `ToolUnavailable` if the tool is gone.
        """
        ...


def function_schema(name: str, description: str | None, parameters: Schema) -> Schema:
    """The schema of a tool as a dict in OpenAI's format. `parameters`: a JSON schema of an object,
    as a dict.
    """
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def tool_name(tool: Tool) -> str:
    """Name under which the model calls the tool: schema["function"]["name"]."""
    return tool.schema["function"]["name"]


def read_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, JSON text, as a dict. Raises `CallError` if the text is not JSON of
    an object, or holds what cannot be sent to a server.
    """
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
    """The result of a call as text for the model: a string as it is, anything else as JSON. Raises
    `CallError` for a result that JSON cannot hold.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise CallError(
            f"the tool returned {type(result).__name__}, which is neither a text nor JSON"
        ) from None
