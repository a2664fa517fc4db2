"""Two further forms of APIs: Anthropic's messages and OpenAI's responses. vLLM's own conversions
make chat requests of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast, get_args

from pydantic import FailFast, create_model
from typing_extensions import TypeAliasType
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    decode_custom_tool_input,
    encode_custom_tool_input,
)

from megarl.apps.gateway.calls import AgentCall, ApiError, Choice
from megarl.apps.gateway.conversations import plain
from megarl.apps.gateway.forms import (
    REFUSED,
    Asked,
    Event,
    OpenAIForm,
    chat_asked,
    limit_of,
    new_id,
    refuse_settings,
    token_counts,
    unsupported,
)
from megarl.apps.gateway.tool_types import Names, flat_functions, split_tools


def _dict(value: Any) -> dict[str, Any]:
    """A message or tool of vLLM's conversions as a dict."""
    return dict(value) if isinstance(value, dict) else value.model_dump(exclude_none=True)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which the model may have written as another JSON value."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _resent(call: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A tool call whose arguments are changed."""
    function = call["function"]
    return call | {"function": function | {"arguments": change(function["arguments"])}}


class Messages:
    """Anthropic's /v1/messages."""

    path = "/v1/messages"
    STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    IDLE = ("thinking", "metadata", "tools")
    """Settings of a request that are not read: what they say has no effect."""
    request_class: type[AnthropicMessagesRequest] | type[AnthropicCountTokensRequest]
    request_class = AnthropicMessagesRequest

    def read(self, body: Any) -> Asked:
        kept, left_out = split_tools(body.get("tools"), (None, "custom"))
        left_out += ["mcp_servers"] if body.get("mcp_servers") else []
        body = {k: v for k, v in body.items() if k not in self.IDLE} | {"tools": kept}
        request = self.request_class.model_validate(body)
        converted = AnthropicServingMessages.to_chat_completion_request(request)
        if converted.response_format is not None:
            raise unsupported("output_config.format", REFUSED["response_format"])
        if request.messages and request.messages[-1].role == "assistant":
            raise ApiError(
                "the last message is the assistant's, and the model's turns are its own; end"
                " `messages` with one of the user",
                code="unsupported",
                param="messages",
            )
        choice = body.get("tool_choice") or {}
        chosen = choice.get("type")
        mode = {"auto": None, None: None, "none": "none"}.get(chosen, chosen)
        converted.tool_choice = None  # as `mode` says
        chat = {
            "messages": [_dict(item) for item in converted.messages],
            "tools": [_dict(item) for item in converted.tools or ()],
            "tool_choice": mode,
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "max_tokens": converted.max_tokens,
        }
        asked = replace(chat_asked(converted, chat), left_out=left_out)
        asked.call.sends_back = lambda call: _resent(call, lambda value: json.dumps(_object(value)))
        return asked

    def _message(self, asked: Asked, call: AgentCall) -> dict[str, Any]:
        """A response without content."""
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": call.prompt_tokens, "output_tokens": 0},
        }

    def _blocks(self, choice: Choice) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            blocks.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            function = call["function"]
            arguments = _object(function["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            blocks.append(block | {"input": arguments})
        return blocks

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reason = "stop_sequence" if choice.stop else self.STOPS[choice.finish]
        return {"stop_reason": reason, "stop_sequence": choice.stop or None}

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        message, choice = self._message(asked, call), choices[0]
        message["usage"]["output_tokens"] = choice.tokens
        return message | self._stop(choice) | {"content": self._blocks(choice)}

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        def event(kind: str, **more: Any) -> Event:
            return kind, {"type": kind, **more}

        choice = choices[0]
        yield event("message_start", message=self._message(asked, call))
        for index, block in enumerate(self._blocks(choice)):
            if block["type"] == "text":
                empty = block | {"text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield event("content_block_start", index=index, content_block=empty)
            yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        stop = self._stop(choice)
        yield event("message_delta", delta=stop, usage={"output_tokens": choice.tokens})
        yield event("message_stop")

    def error(self, error: ApiError) -> dict[str, Any]:
        """The response to a call that is refused."""
        is_long = error.code == "context_length_exceeded"  # clients look for these words
        message = f"prompt is too long: {error}" if is_long else str(error)
        return {"type": "error", "error": {"type": error.kind, "message": message}}


class CountTokens(Messages):
    """Anthropic's /v1/messages/count_tokens."""

    path = "/v1/messages/count_tokens"
    request_class = AnthropicCountTokensRequest

    def read(self, body: Any) -> Asked:
        return replace(super().read(body), is_count=True)

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"input_tokens": call.prompt_tokens}


def _plain_item(item: Any) -> Any:
    """An item of a response's input as vLLM reads it: of a message of the assistant it reads the
    first part alone, so all parts become one text; calls are those of functions.
    """
    if not isinstance(item, dict):
        return item
    if item.get("role") == "assistant" and isinstance(item.get("content"), list):
        return {"role": "assistant", "content": plain(item)["content"]}
    if item.get("type") == "custom_tool_call":
        arguments = encode_custom_tool_input(item.get("input") or "")
        return item | {"type": "function_call", "arguments": arguments}
    return item


def _text_again(arguments: str) -> str:
    """The arguments of a call that the agent reads as a text, as they are when it comes back."""
    return encode_custom_tool_input(decode_custom_tool_input(arguments))


def _whole_conversation() -> Any:
    items: Any = get_args(ResponsesRequest.model_fields["input"].annotation)[1]
    annotated, alias = cast(Any, Annotated), cast(Any, TypeAliasType)
    either: Any = str | alias("Items", annotated[items, FailFast()])
    return create_model("WholeConversation", __base__=ResponsesRequest, input=(either, ...))


WholeConversation = _whole_conversation()
"""A request that is read up to its first wrong item. Each such item has hundreds of errors, for all
types that it might be."""


class Responses(OpenAIForm):
    """OpenAI's /v1/responses, for conversations that the agent sends whole."""

    path = "/v1/responses"

    REFUSED = {
        "previous_response_id": "no response is stored; send the whole conversation as `input`",
        "conversation": "no response is stored; send the whole conversation as `input`",
        "background": "no response is stored; wait for the answer",
        "prompt": "no prompt is stored; send it as `input`",
        "stop": "the API has no such setting",
    }
    REPEATED = ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls")
    """Settings of a request that its response repeats."""
    IDLE = ("include", "reasoning", "service_tier", "truncation", "metadata", "tool_choice")
    """Settings of a request that vLLM does not read: what they say has no effect, or is refused."""

    def read(self, body: Any) -> Asked:
        for name, why in self.REFUSED.items():
            if body.get(name):
                raise unsupported(name, why)
        if "message.output_text.logprobs" in (body.get("include") or ()):
            raise unsupported("include: message.output_text.logprobs", REFUSED["logprobs"])
        functions, names, left_out = flat_functions(body.get("tools"))
        known = {k: v for k, v in body.items() if k not in self.IDLE} | {"tools": functions}
        if isinstance(items := body.get("input"), list):
            known["input"] = [_plain_item(item) for item in items]
        request = WholeConversation.model_validate(known)
        refuse_settings(request)
        if request.text and request.text.format and request.text.format.type != "text":
            raise unsupported("text.format", REFUSED["response_format"])
        limit_of(body, "max_output_tokens")
        messages = construct_input_messages(
            request_instructions=request.instructions, request_input=request.input
        )
        if not messages:
            raise ApiError("`input` is empty; send a text or messages", param="input")
        chat: dict[str, Any] = {
            "messages": [_dict(message) for message in messages],
            "tools": construct_tool_dicts(request.tools, "auto"),
            "tool_choice": body.get("tool_choice"),
            "parallel_tool_calls": body.get("parallel_tool_calls"),
            "max_completion_tokens": request.max_output_tokens,
        }
        converted = ChatCompletionRequest(
            messages=chat["messages"], model=request.model, stream=request.stream, seed=None
        )
        settings = {name: body[name] for name in self.REPEATED if body.get(name) is not None}
        fields: Any = {"settings": settings, "names": names, "left_out": left_out}
        asked = replace(chat_asked(converted, chat), **fields)

        def resent(call: dict[str, Any]) -> dict[str, Any]:
            own = names.get(call["function"]["name"])
            return _resent(call, _text_again) if own and own.takes_text else call

        asked.call.sends_back = resent
        return asked

    def _response(self, asked: Asked, call: AgentCall, choice: Choice | None) -> dict[str, Any]:
        """The response object; without `choice`, one that is under way."""
        is_cut = choice is not None and choice.finish == "length"
        status = "in_progress" if choice is None else "incomplete" if is_cut else "completed"
        counts = token_counts(call, [choice] if choice else [])
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "model": asked.model,
            "output": [] if choice is None else self._items(choice, asked.names),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": None,
            "top_p": None,
            "usage": None
            if choice is None
            else {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            **asked.settings,
        }

    def _items(self, choice: Choice, names: Names) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            text = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "id": new_id("msg"), "role": "assistant"}
            items.append(item | {"status": "completed", "content": [text]})
        for call in choice.calls:
            called = {"call_id": call["id"], **call["function"]}
            tool = names.get(called["name"])
            if tool is not None:
                called |= {"name": tool.name} | (
                    {"namespace": tool.namespace} if tool.namespace else {}
                )
            item = {"type": "function_call", "id": new_id("fc"), "status": "completed"}
            if tool is not None and tool.takes_text:
                item |= {"type": "custom_tool_call", "id": new_id("ctc")}
                called["input"] = decode_custom_tool_input(called.pop("arguments"))
            items.append(item | called)
        return items

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._response(asked, call, choices[0])

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        number = 0

        def event(kind: str, **more: Any) -> Event:
            nonlocal number
            body = {"type": f"response.{kind}", "sequence_number": number, **more}
            number += 1
            return body["type"], body

        done = self._response(asked, call, choices[0])
        begun = self._response(asked, call, None) | {"id": done["id"]}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        for index, item in enumerate(done["output"]):
            position = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                content = item["content"][0]
                empty, where = item | {"content": []}, position | {"content_index": 0}
                yield event("output_item.added", output_index=index, item=empty)
                yield event("content_part.added", **where, part=content | {"text": ""})
                yield event("output_text.delta", **where, delta=content["text"], logprobs=[])
                yield event("output_text.done", **where, text=content["text"], logprobs=[])
                yield event("content_part.done", **where, part=content)
            else:
                field, name = ("arguments", "function_call_arguments")
                if "input" in item:
                    field, name = "input", "custom_tool_call_input"
                value = {field: item[field]}
                yield event("output_item.added", output_index=index, item=item | {field: ""})
                yield event(f"{name}.delta", **position, delta=item[field])
                yield event(f"{name}.done", **position, name=item["name"], **value)
            yield event("output_item.done", output_index=index, item=item)
        yield event("incomplete" if done["status"] == "incomplete" else "completed", response=done)
