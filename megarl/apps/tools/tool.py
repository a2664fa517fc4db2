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
    an argument of the wrong type. The model reads "error: " and the message. The rollout goes on.
    """


class Tool(Protocol):
    """One tool that the model may call; the interface of a function of the user's or a tool of an
    MCP server. `schema`, a dict in OpenAI's format, is shown to the model by the chat template.

    `await tool.call(arguments, limit_s)` runs the tool; `call` is a coroutine function. `arguments`
    is the JSON text of an object, as the model wrote it, and `limit_s` the time limit in seconds.
    The result is the text that the model reads. `CallError` is raised for an error that the model
    is told, such as wrong arguments or an exceeded limit, and `ConnectionError` if the tool is
    gone.
    """

    schema: Schema

    async def call(self, arguments: str, limit_s: float) -> str:
        """Coroutine: run the tool and return its result, the text that the model reads.
        `arguments`: JSON text of an object, as the model wrote it and not checked yet. `limit_s`:
        seconds that the tool has to answer.

        Raises `CallError` if the arguments are wrong, the tool fails, or it does not answer within
        `limit_s` seconds; the model is told the message, and the rollout goes on. Raises
        `ConnectionError` if the tool is gone; the rollout then fails.
        """
        ...


def function_schema(name: str, description: str | None, parameters: Schema) -> Schema:
    """The schema of a tool as a dict in OpenAI's format: {"type": "function", "function": {"name",
    "description", "parameters"}}. `description`: None for an empty one. `parameters`: a JSON schema
    of an object, as a dict.
    """
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def tool_name(tool: Tool) -> str:
    """Name under which the model calls the tool: schema["function"]["name"]."""
    return tool.schema["function"]["name"]


def read_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, JSON text, as a dict. Raises `CallError` if the text is not JSON, if
    it is JSON of another type than an object, or if it holds what cannot be sent to a server, such
    as half of a surrogate pair.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the arguments are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CallError(f"the arguments are {type(value).__name__}, not an object")
    try:
        to_json(value)  # as the client does, which would end the session of all calls
    except ValueError as error:
        raise CallError(f"the arguments cannot be sent: {error}") from None
    return value


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
