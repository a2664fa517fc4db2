"""The forms of the APIs that the gateway speaks: how a request becomes an `AgentCall`, and how the
answers become a response, or the events of a streamed one.

To add one: write a class with the methods of `Form`, and put an object of it into `server.FORMS`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.utils import (
    decode_custom_tool_input,
    encode_custom_tool_input,
)

from megarl.apps.gateway.calls import AgentCall, ApiError, Choice, stops_of
from megarl.apps.gateway.conversations import RAW, plain
from megarl.apps.gateway.tool_types import Names, ToolName, split_tools, text_function

Event = tuple[str, dict[str, Any] | str]
"""(name, or "" for none; data as JSON or text) of a server-sent event."""
MOST_CHOICES = 128

NOT_GIVEN = (None, False, 0, [], {}, "", "auto", {"type": "text"})
"""Values of settings that ask for nothing."""
REFUSED = {
    "logprobs": "the log-probs are recorded with the rollout, and not given to the agent",
    "top_logprobs": "the log-probs are recorded with the rollout, and not given to the agent",
    "response_format": "a constrained answer is not sampled from the model that is trained",
    "structured_outputs": "a constrained answer is not sampled from the model that is trained",
    "frequency_penalty": "it would change what is sampled from the model that is trained",
    "presence_penalty": "it would change what is sampled from the model that is trained",
    "logit_bias": "it would change what is sampled from the model that is trained",
    "repetition_penalty": "it would change what is sampled from the model that is trained",
    "bad_words": "it would change what is sampled from the model that is trained",
    "min_tokens": "it would change what is sampled from the model that is trained",
    "stop_token_ids": "where the model stops is the run's",
    "continue_final_message": "the model's turns are its own",
    "echo": "the prompt is not repeated",
    "return_token_ids": "they are recorded with the rollout, and not given to the agent",
    "include_stop_str_in_output": "an answer ends before its stop text",
    "suffix": "the model writes from left to right",
    "functions": "`tools` is its newer form",
    "function_call": "`tool_choice` is its newer form",
    "web_search_options": "the model calls the agent's own tools",
    "prompt_logprobs": "the log-probs are recorded with the rollout, and not given to the agent",
    "allowed_token_ids": "it would change what is sampled from the model that is trained",
    "use_beam_search": "it would change what is sampled from the model that is trained",
    "ignore_eos": "where the model stops is the run's",
    "chat_template": "the chat template is the run's (prompts.template_variables)",
    "chat_template_kwargs": "the chat template is the run's (prompts.template_variables)",
    "documents": "the chat template is the run's; a message may hold them",
}
"""{setting of a request that must not be set: why}"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: the call, the model's name, and how to answer."""

    call: AgentCall
    model: str
    is_stream: bool
    has_usage: bool = False
    """Whether a streamed answer ends with the numbers of tokens, where the API leaves it open."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the request that the response repeats."""
    is_count: bool = False
    """Whether only the tokens of the conversation are asked for."""
    names: Names = field(default_factory=dict)
    """Tools whose calls the response names otherwise than the model."""
    left_out: Sequence[str] = ()
    """Types of the tools that the model is not shown."""


class Form(Protocol):
    """One API: its path, how to read its requests and how to answer."""

    path: str

    def read(self, body: Any) -> Asked:
        """The request of JSON data `body`. Raises `ApiError`, or `ValueError` for what is no
        request of this API.
        """
        ...

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        """The response as JSON data."""
        ...

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        """The events of a streamed response."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """The response to a call that is refused."""
        ...


def unsupported(name: str, why: str = "") -> ApiError:
    """The error for a setting that must not be set. `why`: in place of that of `REFUSED`."""
    message = f"`{name}` is not supported: {why or REFUSED[name]}; leave it out"
    return ApiError(message, code="unsupported", param=name)


def refuse_settings(request: Any) -> None:
    """Raise `ApiError` for a setting of the request that a run of training cannot have."""
    for name in REFUSED:
        value = getattr(request, name, None)
        value = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
        if value not in NOT_GIVEN and (name, value) != ("repetition_penalty", 1.0):
            raise unsupported(name)
    count = getattr(request, "n", None)
    if count is not None and not 1 <= count <= MOST_CHOICES:
        raise ApiError(f"`n` is {count}; set it to 1 to {MOST_CHOICES}", param="n")


def new_id(kind: str) -> str:
    """A new id of a response."""
    return f"{kind}-{secrets.token_hex(12)}"


def token_counts(call: AgentCall, choices: Sequence[Choice]) -> dict[str, int]:
    """The numbers of tokens of a call, as OpenAI's APIs tell them."""
    sampled = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": call.prompt_tokens + sampled,
    }


class OpenAIForm:
    """What OpenAI's APIs have in common."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """The response to a call that is refused."""
        body = {"message": str(error), "type": error.kind, "param": error.param}
        return {"error": body | {"code": error.code or None}}


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of a chat request as the model reads it."""
    if tool["type"] == "function":
        return tool
    return {"type": "function", "function": text_function(tool.get("custom") or {})}


def _with_functions(message: Any) -> Any:
    """A message whose calls are all of functions, which is how the model has made them."""
    if not isinstance(message, dict) or not isinstance(calls := message.get("tool_calls"), list):
        return message
    return message | {"tool_calls": [_as_function_call(call) for call in calls]}


def _as_function_call(call: Any) -> Any:
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    own = call.get("custom") or {}
    arguments = encode_custom_tool_input(own.get("input") or "")
    function = {"name": own.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _as_own_call(call: dict[str, Any], names: Names) -> dict[str, Any]:
    """A call of the model as the agent names it."""
    function = call["function"]
    if function["name"] not in names:
        return call
    text = decode_custom_tool_input(function["arguments"])
    return {"id": call["id"], "type": "custom", "custom": {"name": function["name"], "input": text}}


class ChatCompletions(OpenAIForm):
    """OpenAI's /v1/chat/completions."""

    path = "/v1/chat/completions"

    def read(self, body: Any) -> Asked:
        if not isinstance(body.get("messages", []), list):
            raise ApiError("`messages` is no list; send a list of messages", param="messages")
        kept, left_out = split_tools(body.get("tools"), ("function", "custom"))
        texts = [tool.get("custom") or {} for tool in kept if tool["type"] == "custom"]
        names = {str(tool["name"]): ToolName("", tool["name"], True) for tool in texts}
        body = body | {"tools": [_as_function(tool) for tool in kept]}
        if not body["tools"]:  # frameworks may say auto all the same
            idle = (("tool_choice", "auto"), ("tool_choice", "none"))
            body = {k: v for k, v in body.items() if k != "tools" and (k, v) not in idle}
        # vLLM writes into the messages that it checks: it renames `reasoning_content`.
        body["messages"] = [_with_functions(item) for item in body.get("messages", [])]
        messages = [dict(item) if isinstance(item, dict) else item for item in body["messages"]]
        checked = body | {"messages": messages}
        if isinstance(body.get("tool_choice"), dict):  # `chat_asked` refuses it
            checked.pop("tool_choice")
        request = ChatCompletionRequest.model_validate(checked)
        asked = replace(chat_asked(request, body), names=names, left_out=left_out)
        asked.call.sends_back = lambda call: _as_function_call(_as_own_call(call, names))
        return asked

    def _head(self, asked: Asked, kind: str) -> dict[str, Any]:
        return {
            "id": new_id("chatcmpl"),
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
        }

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        rows = []
        for number, choice in enumerate(choices):
            message = dict(choice.message)
            if choice.calls:
                message["tool_calls"] = [_as_own_call(item, asked.names) for item in choice.calls]
            rows.append({"index": number, "message": message, "finish_reason": choice.finish})
        head = self._head(asked, "chat.completion")
        return head | {"choices": rows, "usage": token_counts(call, choices)}

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        head = self._head(asked, "chat.completion.chunk")

        def chunk(number: int, delta: dict[str, Any], finish: str | None = None) -> Event:
            choice = {"index": number, "delta": delta, "finish_reason": finish}
            return "", head | {"choices": [choice]}

        for number, item in enumerate(choices):
            yield chunk(number, {"role": "assistant", "content": None if item.calls else ""})
            if item.text:
                yield chunk(number, {"content": item.text})
            for index, tool_call in enumerate(item.calls):
                numbered_call = {"index": index} | _as_own_call(tool_call, asked.names)
                yield chunk(number, {"tool_calls": [numbered_call]})
            yield chunk(number, {}, item.finish)
        if asked.has_usage:
            yield "", head | {"choices": [], "usage": token_counts(call, choices)}
        yield "", "[DONE]"


def chat_asked(request: ChatCompletionRequest, body: dict[str, Any]) -> Asked:
    """What a chat request asks for; `body` is its JSON, whose messages are used. Raises `ApiError`
    for what cannot be done.
    """
    refuse_settings(request)
    chosen = body.get("tool_choice")
    if chosen not in (None, "auto", "none"):
        raise ApiError(
            f"`tool_choice` is {chosen!r:.80}; a call that is forced is not sampled from the model"
            " that is trained; set it to auto",
            code="unsupported",
            param="tool_choice",
        )
    tools = body.get("tools") or []
    try:
        chat = [plain(message) for message in body["messages"]]
    except ValueError as error:
        raise ApiError(str(error), param="messages") from None
    except (AttributeError, TypeError):
        reason = "a message has a content part that is not {type: text, text: a text}"
        raise ApiError(reason, param="messages") from None
    if not chat:
        raise ApiError("`messages` is empty; send at least one", param="messages")
    limits = [limit_of(body, name) for name in ("max_completion_tokens", "max_tokens")]
    call = AgentCall(
        chat=chat,
        tools=[] if chosen == "none" else tools,
        max_tokens=limits[0] or limits[1],
        count=request.n or 1,
        calls_once=body.get("parallel_tool_calls") is False,
        stop=stops_of(request.stop),
    )
    return asked_of(request, call)


def asked_of(request: ChatCompletionRequest | CompletionRequest, call: AgentCall) -> Asked:
    """The call of a request, with the way to answer it."""
    options = request.stream_options
    return Asked(
        call,
        request.model or "",
        is_stream=bool(request.stream),
        has_usage=bool(options and options.include_usage),
    )


def limit_of(request: dict[str, Any], name: str) -> int:
    """The limit of an answer in tokens, setting `name` of the request; 0 for none. Raises
    `ApiError` for a number below 1.
    """
    tokens = request.get(name)
    if tokens is not None and int(tokens) < 1:
        raise ApiError(f"`{name}` is {tokens}; set it to at least 1", param=name)
    return int(tokens or 0)


class Completions(OpenAIForm):
    """OpenAI's older /v1/completions: one text, without a chat template."""

    path = "/v1/completions"

    def read(self, body: Any) -> Asked:
        request = CompletionRequest.model_validate(body)
        refuse_settings(request)
        if request.logprobs is not None:  # 0 asks for those of the sampled tokens
            raise unsupported("logprobs")
        if body.get("best_of") not in (None, 1):
            raise unsupported("best_of", "no answers are compared; `n` gives several")
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt:
            raise ApiError("`prompt` must be one text that is not empty", param="prompt")
        call = AgentCall(
            chat=[{"role": RAW, "content": prompt}],
            tools=[],
            max_tokens=limit_of(body, "max_tokens"),
            count=request.n or 1,
            stop=stops_of(request.stop),
        )
        return asked_of(request, call)

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._head(asked) | {
            "choices": [self._choice(*pair) for pair in enumerate(choices)],
            "usage": token_counts(call, choices),
        }

    def _head(self, asked: Asked) -> dict[str, Any]:
        created = int(time.time())
        return {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": created,
            "model": asked.model,
        }

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        about = {"index": number, "text": choice.text, "logprobs": None}
        return about | {"finish_reason": choice.finish}

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        head = self._head(asked)
        for pair in enumerate(choices):
            yield "", head | {"choices": [self._choice(*pair)]}
        if asked.has_usage:
            yield "", head | {"choices": [], "usage": token_counts(call, choices)}
        yield "", "[DONE]"
