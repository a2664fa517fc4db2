"""The agent of clients.py: `calls` uses one feature of the official clients, and checks what comes
back. `FEATURES` has them by name; each returns the number of conversations that it has led.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
from pydantic import BaseModel

CHAT: Any = [{"role": "user", "content": "12*3"}]
NEXT: Any = {"role": "user", "content": "and 4"}
BOTH: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTIONS: Any = [
    {"name": name, "description": f"To {name}.", "parameters": BOTH} for name in ("multiply", "add")
]
TOOLS: Any = [{"type": "function", "function": one} for one in FUNCTIONS]
FLAT: Any = [{"type": "function", "strict": False, **one} for one in FUNCTIONS]
OWN: Any = [{"name": one["name"], "input_schema": BOTH} for one in FUNCTIONS]


class Add(BaseModel):
    """Arguments of a tool, and a form of an answer."""

    a: int
    b: int = 0


class Clients:
    """OpenAI's and Anthropic's client, sync or async."""

    def __init__(self, client: openai.AsyncOpenAI, is_async: bool) -> None:
        url, key = str(client.base_url), client.api_key
        given: Any = {"api_key": key, "max_retries": 0, "timeout": 120.0}
        self.is_async, self._given = is_async, given
        self.url = url.removesuffix("/v1/")
        self.openai: Any = client if is_async else openai.OpenAI(base_url=url, **given)

    @property
    def anthropic(self) -> Any:
        kind = anthropic.AsyncAnthropic if self.is_async else anthropic.Anthropic
        return kind(base_url=self.url, **self._given)

    async def get(self, method: Any, **asked: Any) -> Any:
        """The response to a call of `method` of a client; of a stream, the list of its parts."""
        if self.is_async:
            found = await method(model="policy", **asked)
            return [part async for part in found] if asked.get("stream") else found
        found = await asyncio.to_thread(method, model="policy", **asked)
        return await asyncio.to_thread(list, found) if asked.get("stream") else found

    async def stream(self, method: Any, final: str, **asked: Any) -> Any:
        """What a helper of a client has made of a stream at its end."""
        if self.is_async:
            async with method(model="policy", **asked) as events:
                assert [one async for one in events]
                return await getattr(events, final)()

        def run() -> Any:
            with method(model="policy", **asked) as events:
                assert list(events)
                return getattr(events, final)()

        return await asyncio.to_thread(run)

    async def chat(self, is_stream: bool = False, **asked: Any) -> Any:
        """A chat completion, which is checked."""
        api = self.openai.chat.completions
        if is_stream:
            asked["stream_options"] = {"include_usage": True}
            try:
                made = await self.stream(api.stream, "get_final_completion", **asked)
            except openai.LengthFinishReasonError as error:  # the helper's way for a cut answer
                made = error.completion
        else:
            made = await self.get(api.create, **asked)
        assert len(made.choices) == asked.get("n", 1) and made.model == "policy"
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
        for number, one in enumerate(made.choices):
            assert one.index == number and (one.message.content or one.message.tool_calls)
            assert (one.finish_reason == "tool_calls") == bool(one.message.tool_calls)
            for call in one.message.tool_calls or ():
                assert call.id and json.loads(call.function.arguments)["a"] > 0
        return made


Feature = Callable[[Clients], Awaitable[int]]


def chats(first: Any = CHAT, turns: int = 1, stream: bool = False, **asked: Any) -> Feature:
    """Chat completions, the answers sent back with the results of their calls."""

    async def run(api: Clients) -> int:
        chat, read = list(first), 0
        for _ in range(turns):
            made = await api.chat(stream, messages=chat, **asked)
            one, usage = made.choices[0], made.usage
            assert usage.prompt_tokens >= read  # what was sampled is kept
            if most := asked.get("max_tokens") or asked.get("max_completion_tokens"):
                assert usage.completion_tokens <= most
                assert one.finish_reason != "length" or usage.completion_tokens == most
            if asked.get("logprobs"):
                assert one.logprobs.content
            if asked.get("tool_choice") not in (None, "auto"):
                assert bool(one.message.tool_calls) == (asked["tool_choice"] != "none")
            if asked.get("response_format"):
                assert json.loads(one.message.content)
            if asked.get("stop"):
                assert not any(word in str(one.message.content) for word in asked["stop"])
            read = usage.total_tokens if asked.get("n", 1) == 1 else 0
            chat.append(one.message.model_dump(exclude_none=True))
            calls = one.message.tool_calls or ()
            chat += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
            chat += [] if calls else [NEXT]
        return 1

    return run


async def parses(api: Clients, **asked: Any) -> int:
    """The helper that reads an answer, or the arguments of a call, into a class."""
    method = api.openai.chat.completions.parse
    asked = asked or {"tools": [openai.pydantic_function_tool(Add, name="add")]}
    message = (await api.get(method, messages=CHAT, **asked)).choices[0].message
    for call in message.tool_calls or ():
        assert call.function.name != "add" or isinstance(call.function.parsed_arguments, Add)
    assert "response_format" not in asked or isinstance(message.parsed, Add)
    return 1


async def chunks(api: Clients) -> int:
    """The bare parts of a stream."""
    asked: Any = {"messages": CHAT, "tools": TOOLS, "stream": True, "n": 2}
    parts = await api.get(api.openai.chat.completions.create, **asked)
    ends = [one.finish_reason for part in parts for one in part.choices if one.finish_reason]
    assert len(ends) == 2 and all(part.usage is None for part in parts)
    return 1


def completes(stream: bool = False, **asked: Any) -> Feature:
    """Completions of a bare text."""

    async def run(api: Clients) -> int:
        usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        made = await api.get(api.openai.completions.create, prompt="1+2", **asked, **usage)
        parts = made if stream else [made]
        found = [one for part in parts for one in part.choices]
        assert len(found) == asked.get("n", 1) and all(one.text for one in found)
        assert parts[-1].usage.completion_tokens > 0
        return 1

    return run


def responds(turns: int = 1, stream: bool = False, **asked: Any) -> Feature:
    """Responses, whose items are sent back with the results of their calls."""

    async def run(api: Clients) -> int:
        chat, method = list(CHAT), api.openai.responses
        for _ in range(turns):
            if stream:
                made = await api.stream(method.stream, "get_final_response", input=chat, **asked)
            else:
                made = await api.get(method.create, input=chat, **asked)
            calls = [one for one in made.output if one.type == "function_call"]
            assert made.status == "completed" and (made.output_text or calls)
            chat += [one.model_dump(exclude_none=True) for one in made.output]
            about = {"type": "function_call_output", "output": "3"}
            chat += [about | {"call_id": call.call_id} for call in calls] or [NEXT]
            assert all(call.name and json.loads(call.arguments)["a"] > 0 for call in calls)
        return 1

    return run


def messages(turns: int = 1, stream: bool = False, **asked: Any) -> Feature:
    """Anthropic's messages, whose blocks are sent back with the results of their calls."""

    async def run(api: Clients) -> int:
        chat, method = list(CHAT), api.anthropic.messages
        settings = {"max_tokens": 32000} | asked
        for _ in range(turns):
            if stream:
                made = await api.stream(
                    method.stream, "get_final_message", messages=chat, **settings
                )
            else:
                made = await api.get(method.create, messages=chat, timeout=120.0, **settings)
            uses = [one for one in made.content if one.type == "tool_use"]
            assert made.usage.input_tokens > 0 and made.usage.output_tokens > 0 and made.content
            assert (made.stop_reason == "tool_use") == bool(uses)
            assert asked.get("tool_choice", {}).get("type") not in ("any", "tool") or uses
            chat.append(
                {"role": "assistant", "content": [one.model_dump() for one in made.content]}
            )
            about = {"type": "tool_result", "content": "3"}
            told = [about | {"tool_use_id": one.id} for one in uses]
            chat.append({"role": "user", "content": told} if told else NEXT)
            assert all(one.input["a"] > 0 for one in uses)
        return 1

    return run


async def counts(api: Clients) -> int:
    """The count of tokens is that of the answer, and there is one model."""
    asked: Any = {"messages": CHAT, "tools": OWN, "system": "sum"}
    told = await api.get(api.anthropic.messages.count_tokens, **asked)
    made = await api.get(api.anthropic.messages.create, max_tokens=99, **asked)
    assert told.input_tokens == made.usage.input_tokens
    return 1


async def models(api: Clients) -> int:
    """Both clients list the model."""
    for client in (api.openai, api.anthropic):
        if api.is_async:
            found = [one async for one in client.models.list()]
        else:
            found = await asyncio.to_thread(list, await asyncio.to_thread(client.models.list))
        assert [one.id for one in found] == ["policy"]
    await api.chat(messages=CHAT)
    return 1


async def unknown(api: Clients) -> int:
    """A model that there is not."""
    asked: Any = {"messages": CHAT, "max_tokens": 9}
    create = api.anthropic.messages.create
    made = create(model="gpt", **asked) if api.is_async else None
    await (made or asyncio.to_thread(create, model="gpt", **asked))
    raise AssertionError("there is no such model")


LONG: Any = [{"role": "user", "content": "1" * 3000}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOTH}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
PARTS: Any = [
    {"role": "developer", "content": [{"type": "text", "text": "sum"}]},
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]},
]
SUM: Any = {"type": "text", "text": "sum"}
NO_EFFECT: Any = {
    "store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto",
    "reasoning_effort": "low", "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 32000,
}  # fmt: skip
EACH: dict[str, tuple[Callable[..., Feature], dict[str, Any]]] = {
    "chat": (chats, {"turns": 4}),
    "system message": (chats, {"first": [{"role": "system", "content": "sum"}, *CHAT]}),
    "developer message, content parts": (chats, {"first": PARTS, "turns": 2}),
    "tools and results": (chats, {"turns": 4, "tools": TOOLS}),
    "tool_choice auto": (chats, {"tools": TOOLS, "tool_choice": "auto"}),
    "tool_choice none": (chats, {"turns": 2, "tools": TOOLS, "tool_choice": "none"}),
    "tool_choice required": (chats, {"tools": TOOLS, "tool_choice": "required"}),
    "tool_choice named": (chats, {"tools": TOOLS, "tool_choice": NAMED}),
    **{f"n = {n}": (chats, {"n": n, "turns": 2, "tools": TOOLS}) for n in (2, 3, 4)},
    "max_tokens": (chats, {"max_tokens": 3}),
    "max_completion_tokens": (chats, {"max_completion_tokens": 3}),
    "seed, temperature, top_p": (chats, {"seed": 1, "temperature": 0.0, "top_p": 0.5}),
    "settings without effect": (chats, NO_EFFECT),
    "logprobs": (chats, {"logprobs": True, "top_logprobs": 2}),
    "response_format": (chats, {"response_format": SCHEMA}),
    "stop": (chats, {"stop": ["b"]}),
    "conversation too long": (chats, {"first": LONG}),
    "completions": (completes, {}),
    "completions, n = 2": (completes, {"n": 2}),
    "responses, instructions": (responds, {"turns": 3, "instructions": "sum"}),
    "responses, tools": (responds, {"turns": 4, "tools": FLAT}),
    "responses, previous_response_id": (responds, {"previous_response_id": "resp_1"}),
    "messages, system": (messages, {"turns": 3, "system": [SUM]}),
    "messages, tools": (messages, {"turns": 4, "tools": OWN, "tool_choice": {"type": "auto"}}),
    "messages, tool_choice none": (messages, {"tools": OWN, "tool_choice": {"type": "none"}}),
    "messages, tool_choice any": (messages, {"tools": OWN, "tool_choice": {"type": "any"}}),
    "messages, stop_sequences": (messages, {"stop_sequences": ["b"]}),
    "messages, thinking": (messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
}
FEATURES: dict[str, Feature] = {
    f"{name}{', streamed' if is_stream else ''}": make(stream=is_stream, **asked)
    for name, (make, asked) in EACH.items()
    for is_stream in (False, True)
} | {
    "bare chunks, n = 2": chunks,
    ".parse(), tools": parses,
    ".parse(), response_format": lambda api: parses(api, response_format=Add),
    "count_tokens": counts,
    "models": models,
    "unknown model": unknown,
}
CLEAR = ("not supported", "set it to", "does not exist; ask for", "maximum context length is")


async def calls(prompt: Any, client: Any) -> dict[str, float]:
    """Use the feature that the prompt's text names: {"reward": 1 if right, 0 if refused clearly,
    "expected": conversations}. Every other rollout uses the sync clients.
    """
    feature = FEATURES[prompt.text]
    try:
        expected = await feature(Clients(client, is_async=prompt.index % 2 == 0))
        return {"reward": 1.0, "expected": float(expected)}
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        if error.status_code >= 500 or not any(word in error.message for word in CLEAR):
            raise
    await client.completions.create(model="policy", prompt="1")  # a rollout has at least one call
    return {"reward": 0.0, "expected": 1.0}
