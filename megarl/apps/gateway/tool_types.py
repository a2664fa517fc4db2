"""The tools of a request that are no functions: the functions that the model reads in their place,
and the way back from its calls to the agent's own tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.tool_parsers.utils import custom_tool_parameters, flat_namespace_tool_name

from megarl.apps.gateway.calls import ApiError


class ToolName(NamedTuple):
    """A tool of the agent that the model reads under another name, or in another form."""

    namespace: str
    """"" for none."""
    name: str
    takes_text: bool
    """Whether it takes a text (OpenAI's type custom), and no object of arguments."""


Names = Mapping[str, ToolName]
"""{name of a function that the model reads: the agent's tool}"""


def split_tools(tools: Any, types: Sequence[str | None]) -> tuple[list[dict[str, Any]], list[str]]:
    """(the tools whose `type` is one of `types`, the types of the others). The others are a
    provider's own, such as a search of the web, which no chat template has words for. Raises
    `ApiError` for what is no tool.
    """
    if not isinstance(tools, list | None):
        raise ApiError("`tools` is no list; send a list of tools", param="tools")
    kept, others = [], []
    for number, tool in enumerate(tools or ()):
        name = tool.get("type") if isinstance(tool, dict) else 0
        if name in types:
            kept.append(tool)
        elif isinstance(name, str):
            others.append(name)
        else:
            asked = f"send an object of the type {' or '.join(filter(None, types))!r}"
            raise ApiError(f"`tools.{number}` is no tool with a `type`; {asked}", param="tools")
    return kept, others


def text_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that the model reads in place of a tool that takes any text: its one argument is
    the text. A grammar of the text is shown, and not enforced.
    """
    text, grammar = tool.get("description") or "", tool.get("format")
    if isinstance(grammar, dict) and (rules := grammar.get("definition")):
        text = f"{text}\n\nGrammar of the input ({grammar.get('syntax')}):\n{rules}".strip()
    return {"name": tool.get("name"), "description": text, "parameters": custom_tool_parameters()}


class Shown(NamedTuple):
    """The tools of a request as the model reads them."""

    functions: list[dict[str, Any]]
    names: Names
    """Tools that the agent names otherwise."""
    left_out: list[str]
    """Types of the tools that the model does not read."""


def flat_functions(tools: Any) -> Shown:
    """The tools of a response: a function of a namespace becomes `namespace__name`, as in vLLM.
    Raises `ApiError` for what is no tool.
    """
    functions, names = list[dict[str, Any]](), dict[str, ToolName]()
    kept, left_out = split_tools(tools, ("function", "custom", "namespace"))
    groups = [(item.get("name"), item.get("tools")) for item in kept if item["type"] == "namespace"]
    for namespace, inner in [("", [item for item in kept if item["type"] != "namespace"]), *groups]:
        known, others = split_tools(inner, ("function", "custom"))
        left_out += others
        for tool in known:
            name, takes_text = tool.get("name"), tool["type"] == "custom"
            if not isinstance(name, str) or not isinstance(namespace, str):
                raise ApiError("a tool, or a namespace of tools, has no `name`", param="tools")
            flat = flat_namespace_tool_name(namespace, name) if namespace else name
            if namespace or takes_text:
                names[flat] = ToolName(namespace, name, takes_text)
            function = text_function(tool) if takes_text else tool
            functions.append(function | {"type": "function", "name": flat})
    return Shown(functions, names, left_out)
