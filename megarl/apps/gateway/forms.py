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

from megarl.apps.gateway.calls import AgentCall, ApiError, Choice, stops_of
from megarl.apps.gateway.conversations import plain
from megarl.apps.gateway.tool_types import Names, split_tools

Event = tuple[str, dict[str, Any] | str]
"""(name, or "" for none; data as JSON or text) of a server-sent event."""
MOST_CHOICES = 128

NOT_GIVEN = (None, False, 0, [], {}, "", "auto", {"type": "text"})
"""Values of settings that ask for nothing."""
_RECORDED = "the log-probs are recorded with the rollout, and not given to the agent"
_CONSTRAINED = "a constrained answer is not sampled from the model that is trained"
_CHANGED = "it would change what is sampled from the model that is trained"
_TEMPLATE = "the chat template is the run's (prompts.template_variables)"
REFUSED = (
    dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids"), _RECORDED)
    | dict.fromkeys(("response_format", "structured_outputs"), _CONSTRAINED)
    | dict.fromkeys(
        (
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
            *("bad_words", "min_tokens", "allowed_token_ids", "use_beam_search"),
        ),
        _CHANGED,
    )
    | dict.fromkeys(("stop_token_ids", "ignore_eos"), "where the model stops is the run's")
    | dict.fromkeys(("chat_template", "chat_template_kwargs", "documents"), _TEMPLATE)
    | {
        "continue_final_message": "the model's turns are its own",
        "echo": "the prompt is not repeated",
        "include_stop_str_in_output": "an answer ends before its stop text",
        "functions": "`tools` is its newer form",
        "function_call": "`tool_choice` is its newer form",
        "web_search_options": "the model calls the agent's own tools",
    }
)
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
    """A random id for a response or a part of it, such as "chatcmpl-" and 24 hexadecimal digits."""
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


class ChatCompletions(OpenAIForm):
    """OpenAI's /v1/chat/completions."""

    path = "/v1/chat/completions"

    def read(self, body: Any) -> Asked:
        if not isinstance(body.get("messages", []), list):
            raise ApiError("`messages` is no list; send a list of messages", param="messages")
        kept, left_out = split_tools(body.get("tools"), ("function",))
        body = {"messages": []} | body | {"tools": kept}
        if not kept:  # frameworks may say auto all the same
            idle = (("tool_choice", "auto"), ("tool_choice", "none"))
            body = {k: v for k, v in body.items() if k != "tools" and (k, v) not in idle}
        # vLLM writes into the messages that it checks: it renames `reasoning_content`.
        messages = [dict(item) if isinstance(item, dict) else item for item in body["messages"]]
        checked = body | {"messages": messages}
        if isinstance(body.get("tool_choice"), dict):  # `chat_asked` refuses it
            checked.pop("tool_choice")
        request = ChatCompletionRequest.model_validate(checked)
        return replace(chat_asked(request, body), left_out=left_out)

    def _head(self, asked: Asked, kind: str) -> dict[str, Any]:
        return {
            "id": new_id("chatcmpl"),
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
        }

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        rows = [
            {"index": number, "message": choice.message, "finish_reason": choice.finish}
            for number, choice in enumerate(choices)
        ]
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
                yield chunk(number, {"tool_calls": [{"index": index} | tool_call]})
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
