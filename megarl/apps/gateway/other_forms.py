"""Two further forms of APIs: Anthropic's messages and OpenAI's responses. vLLM's own conversions
make chat requests of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from megarl.apps.gateway.calls import AgentCall, ApiError, Choice
from megarl.apps.gateway.forms import Asked, Event, OpenAIForm, chat_asked, new_id, token_counts


def _dict(value: Any) -> dict[str, Any]:
    """A message or tool of vLLM's conversions as a dict."""
    return dict(value) if isinstance(value, dict) else value.model_dump(exclude_none=True)


class Messages:
    """Anthropic's /v1/messages."""

    path = "/v1/messages"
    STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def read(self, body: Any) -> Asked:
        request = AnthropicMessagesRequest.model_validate(body)
        made = AnthropicServingMessages.to_chat_completion_request(request)
        chosen = (body.get("tool_choice") or {}).get("type")
        told = {"auto": None, None: None, "none": "none"}.get(chosen, chosen)
        made.tool_choice = None  # as `told` says
        chat = {
            "messages": [_dict(one) for one in made.messages],
            "tools": [_dict(one) for one in made.tools or ()],
            "tool_choice": told,
        }
        return chat_asked(made, chat)

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
        found: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            found.append({"type": "text", "text": choice.text})
        for made in choice.calls:
            function = made["function"]
            given = json.loads(function["arguments"] or "{}")
            about = {"type": "tool_use", "id": made["id"], "name": function["name"]}
            found.append(about | {"input": given})
        return found

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reason = "stop_sequence" if choice.stop else self.STOPS[choice.finish]
        return {"stop_reason": reason, "stop_sequence": choice.stop or None}

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        found, choice = self._message(asked, call), choices[0]
        found["usage"]["output_tokens"] = choice.tokens
        return found | self._stop(choice) | {"content": self._blocks(choice)}

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
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


class Responses(OpenAIForm):
    """OpenAI's /v1/responses, for conversations that the agent sends whole."""

    path = "/v1/responses"

    def read(self, body: Any) -> Asked:
        request = ResponsesRequest.model_validate(body)
        if request.previous_response_id or request.background:
            name = "previous_response_id" if request.previous_response_id else "background"
            raise ApiError(
                f"`{name}` is not supported: no response is stored; send the whole conversation"
                " as `input`",
                code="unsupported",
                param=name,
            )
        if request.text is not None and request.text.format is not None:
            form = request.text.format.type
            if form != "text":
                raise ApiError(
                    f"`text.format` is {form}; a constrained answer is not sampled from the model"
                    " that is trained; leave it out",
                    code="unsupported",
                    param="text",
                )
        messages = construct_input_messages(
            request_instructions=request.instructions, request_input=request.input
        )
        tools = construct_tool_dicts(request.tools, request.tool_choice) or []
        chosen = body.get("tool_choice")
        chat: dict[str, Any] = {
            "messages": [_dict(one) for one in messages],
            "tools": tools,
            "tool_choice": chosen,
        }
        made = ChatCompletionRequest(
            messages=chat["messages"],
            model=request.model,
            max_completion_tokens=request.max_output_tokens,
            stream=request.stream,
            seed=None,
            logprobs=None,
            top_logprobs=request.top_logprobs,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            logit_bias=request.logit_bias,
        )
        return chat_asked(made, chat)

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
            "output": [] if choice is None else self._items(choice),
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
        }

    def _items(self, choice: Choice) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
            about = {"type": "message", "id": new_id("msg"), "role": "assistant"}
            found.append(about | {"status": "completed", "content": [part]})
        for made in choice.calls:
            called = {"call_id": made["id"], **made["function"]}
            found.append(
                {"type": "function_call", "id": new_id("fc"), "status": "completed"} | called
            )
        return found

    def answer(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._response(asked, call, choices[0])

    def events(self, asked: Asked, call: AgentCall, choices: Sequence[Choice]) -> Iterator[Event]:
        number = 0

        def event(kind: str, **more: Any) -> Event:
            nonlocal number
            found = {"type": f"response.{kind}", "sequence_number": number, **more}
            number += 1
            return found["type"], found

        done = self._response(asked, call, choices[0])
        yield event("created", response=self._response(asked, call, None) | {"id": done["id"]})
        for index, item in enumerate(done["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                part = item["content"][0]
                empty, where = item | {"content": []}, place | {"content_index": 0}
                yield event("output_item.added", output_index=index, item=empty)
                yield event("content_part.added", **where, part=part | {"text": ""})
                yield event("output_text.delta", **where, delta=part["text"], logprobs=[])
                yield event("output_text.done", **where, text=part["text"], logprobs=[])
                yield event("content_part.done", **where, part=part)
            else:
                given = item["arguments"]
                yield event("output_item.added", output_index=index, item=item | {"arguments": ""})
                yield event("function_call_arguments.delta", **place, delta=given)
                yield event(
                    "function_call_arguments.done", **place, name=item["name"], arguments=given
                )
            yield event("output_item.done", output_index=index, item=item)
        yield event("incomplete" if done["status"] == "incomplete" else "completed", response=done)
