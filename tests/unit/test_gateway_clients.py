"""The calls that clients and agent frameworks make: streamed answers are those that are not
streamed, settings without effect are taken, and whatever is wrong gets one error of the API's form.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from pydantic import ValidationError
from support.agents import codec_of_characters

from megarl.apps.gateway.agent_kit import AgentKit
from megarl.apps.gateway.other_forms import Responses
from megarl.environments.codec import Codec
from megarl.environments.session import Observation
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

FUNCTION: Any = {
    "name": "add",
    "description": "The sum.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOL: Any = {"type": "function", "function": FUNCTION}
CHAT: list[Any] = [{"role": "user", "content": "1+2"}]
BARE: Any = {"type": "object"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return codec_of_characters(tmp_path_factory.mktemp("calculator"))


class Gateway:
    """A gateway with one rollout, whose model says `says` each time."""

    def __init__(self, kit: AgentKit, key: str) -> None:
        self.kit, self.key, self.says = kit, key, "3" + END
        self.asked: list[Observation] = []
        """What the model was asked."""
        self.openai = openai.AsyncOpenAI(base_url=f"{kit.url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=kit.url, api_key=key, max_retries=0)

    async def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        """A request of `body`, JSON data or bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"authorization": f"Bearer {self.key if key is None else key}"}
        async with httpx.AsyncClient(base_url=self.kit.url) as web:
            return await web.post(path, content=content, headers=head)


@asynccontextmanager
async def gateway(codec: Codec, folder: Path, **agent: Any) -> AsyncIterator[Gateway]:
    (folder / "agent.py").write_text("async def run(prompt, client): ...\n")
    settings: Any = {"function": f"{folder}/agent.py:run", "context_tokens": 400} | agent
    kit = AgentKit(EnvironmentConfig(agent=settings), codec, {})
    await kit.start()
    session, is_over = kit.session(), asyncio.Event()
    found = Gateway(kit, session.key)

    async def run(prompt: Prompt, client: openai.AsyncOpenAI) -> float:
        await is_over.wait()
        return 1.0

    async def model() -> None:
        made: Any = await session.start(Prompt(0, "1+2", [], "3"))
        while isinstance(made, Observation):
            found.asked.append(made)
            ids = np.array(codec.encode(found.says), np.int32)[: made.max_tokens or None]
            made = await session.step(codec.decode(ids), ids)

    kit.function = run
    answering = asyncio.create_task(model())
    try:
        yield found
        assert not answering.done(), answering.exception()
    finally:
        is_over.set()
        await asyncio.gather(answering, return_exceptions=True)
        await session.close()
        assert kit.serving is not None
        kit.serving.cancel()


WRITES = '<tool_call>{"name": "write", "arguments": {"input": "a"}}</tool_call>'
ANSWERS = ["3" + END, f"so {CALL}{CALL}{END}", WRITES + END, END, '<tool_call>{"name": "add"' + END]
NEW = {"id", "created", "created_at", "item_id", "index", "completed_at"}


def fixed(found: Any) -> Any:
    """A response of a client as JSON data, without what is new in each response."""
    if isinstance(found, dict):
        empty = (None, [], {})
        pairs = ((key, fixed(value)) for key, value in found.items() if key not in NEW)
        return {k: v for k, v in pairs if v not in empty and not (k == "call_id" and len(v) == 9)}
    return [fixed(one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("says", ANSWERS)
async def test_streams_are_the_answers(codec: Codec, tmp_path: Path, says: str) -> None:
    """What the clients' helpers make of a stream is what they get without one."""
    flat: Any = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "write"}]
    own = {"name": "add", "input_schema": {}}
    async with gateway(codec, tmp_path) as found:
        found.says = says
        chats, responses = found.openai.chat.completions, found.openai.responses
        given: Any = {"model": "policy", "messages": CHAT, "tools": [TOOL], "n": 2}
        usage: Any = {"include_usage": True}
        async with chats.stream(**given, stream_options=usage) as events:
            kinds = {event.type async for event in events}
            made = await events.get_final_completion()
        plain = await chats.create(**given)
        assert fixed(made.to_dict()) == fixed(plain.to_dict()) and "chunk" in kinds
        assert plain.usage is not None and plain.usage.completion_tokens > 0
        asked: Any = {"model": "policy", "input": "1+2", "tools": flat, "instructions": "sum"}
        async with responses.stream(**asked, metadata={"a": "b"}) as events:
            kinds = {event.type async for event in events}
            response = await events.get_final_response()
        same = await responses.create(**asked, metadata={"a": "b"})
        assert fixed(response.to_dict()) == fixed(same.to_dict()) and "response.created" in kinds
        assert any(" sum" in one.text for one in found.asked), "the instructions"
        assert same.instructions == "sum" and same.metadata == {"a": "b"} and len(same.tools) == 2
        sent: Any = {"model": "policy", "messages": CHAT, "tools": [own], "max_tokens": 99}
        async with found.anthropic.messages.stream(**sent) as events:
            kinds = {event.type async for event in events}
            message = await events.get_final_message()
        whole = await found.anthropic.messages.create(**sent)
        assert fixed(message.to_dict()) == fixed(whole.to_dict()) and "message_stop" in kinds


CACHED: Any = {"cache_control": {"type": "ephemeral"}}
PARTS: Any = [{"type": "output_text", "text": one} for one in "ab"]
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {
        "messages": CHAT, "metadata": {"a": "b"}, "store": False, "user": "u", "top_k": 5,
        "service_tier": "auto", "parallel_tool_calls": False, "reasoning_effort": "low",
        "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}],
        "max_tokens": 32000, "max_completion_tokens": 32000, "prompt_cache_key": "x",
        "verbosity": "low", "tool_choice": "auto", "logit_bias": None,
    }),
    ("chat/completions", {"messages": CHAT, "tools": [], "tool_choice": "auto"}),
    ("responses", {
        "input": "1+2", "include": ["reasoning.encrypted_content"], "truncation": "auto",
        "store": True, "reasoning": {"effort": "low"}, "service_tier": "auto",
        "max_output_tokens": 32000, "text": {"format": {"type": "text"}}, "tools": [],
    }),
    ("responses", {
        "input": "1+2", "include": ["web_search_call.results"], "reasoning": {"effort": "most"},
        "service_tier": "fast", "client_metadata": {"x": "y"}, "tools": [{"type": "web_search"}],
    }),
    ("messages?beta=true", {
        "messages": CHAT, "max_tokens": 32000, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "sum"} | CACHED], "context_management": {},
        "tools": [{"name": "add", "input_schema": {}} | CACHED],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }),
    ("messages", {
        "messages": [*CHAT, {"role": "system", "content": "sum"}], "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 10}, "output_config": {"effort": "high"},
    }),
    ("responses", {"input": [{"role": "assistant", "content": PARTS}, *CHAT]}),
    ("messages/count_tokens", {"messages": CHAT, "system": "sum"}),
]  # fmt: skip


async def test_settings_without_effect(codec: Codec, tmp_path: Path) -> None:
    """What frameworks send by default is taken; a long limit is cut to the room that is left."""
    async with gateway(codec, tmp_path) as found:
        for path, body in WITHOUT_EFFECT:
            answer = await found.post(f"/v1/{path}", {"model": "policy"} | body)
            assert answer.status_code == 200, (path, answer.text)
            if body.get("input") == "1+2":
                alone = answer.json()["usage"]["input_tokens"]
            elif path == "responses":  # all parts of an earlier answer are read
                more = len(codec.encode(f"<|im_start|>assistantab{END}"))
                assert answer.json()["usage"]["input_tokens"] == alone + more
        more = len(codec.encode(f"<|im_start|>system sum{END}"))
        assert answer.json() == {"input_tokens": alone + more}
        found.says = "1" * 500
        made = await found.openai.chat.completions.create(
            model="policy", messages=CHAT, max_tokens=9999
        )
        assert made.usage is not None and made.usage.total_tokens == 400
        assert made.choices[0].finish_reason == "length"
        assert (await found.openai.models.retrieve("policy")).id == "policy"
        listed = [one async for one in found.anthropic.models.list()]
        assert [one.id for one in listed] == ["policy"]
        with pytest.raises(openai.NotFoundError, match="ask for `policy`"):
            await found.openai.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
            await found.openai.embeddings.create(model="policy", input="x")
        async with httpx.AsyncClient(base_url=found.kit.url) as web:
            assert (await web.head("/")).status_code == (await web.get("/")).status_code == 200


SHELL: Any = {"type": "custom", "name": "shell", "description": "Runs it."}
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
FLAT: Any = {"type": "function", **FUNCTION}
OWN_TOOLS: list[Any] = [
    # path, tools, tools that the model reads, (name, arguments) of its call, the agent's call
    ("responses", [{"type": "namespace", "name": "n", "description": "", "tools": [FLAT, SHELL]}],
     "n__add n__shell", ("n__add", {"a": 3}),
     {"type": "function_call", "namespace": "n", "name": "add", "arguments": '{"a": 3}'}),
    ("responses", [{"type": "namespace", "name": "n", "description": "", "tools": [FLAT, SHELL]}],
     "n__add n__shell", ("n__shell", {"input": "ls"}),
     {"type": "custom_tool_call", "namespace": "n", "name": "shell", "input": "ls"}),
    ("responses", [SHELL | {"format": GRAMMAR}, FLAT], "shell add", ("shell", {"input": "a"}),
     {"type": "custom_tool_call", "name": "shell", "input": "a"}),
    ("responses", [{"type": "local_shell"}, {"type": "mcp", "server_label": "x"}, SHELL], "shell",
     ("shell", {"cmd": ["ls"]}),
     {"type": "custom_tool_call", "name": "shell", "input": '{"cmd": ["ls"]}'}),
    ("chat/completions", [{"type": "web_search_preview"}, TOOL], "add", ("add", {"a": 3}),
     {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}),
    ("messages", [{"type": "web_search_20250305", "name": "web_search"},
     {"type": "text_editor_20250728", "name": "edit"}, {"name": "add", "input_schema": {}}], "add",
     ("add", [3]), {"type": "tool_use", "name": "add", "input": {"arguments": [3]}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "tools", "names", "called", "call"), OWN_TOOLS)
async def test_tools_that_are_no_functions(
    codec: Codec, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    path: str, tools: Any, names: str, called: Any, call: Any,
) -> None:  # fmt: skip
    """The model reads functions, or is not shown them, which is told once; the agent reads calls of
    its own tools, and its next request continues the conversation, whatever the arguments were.
    """
    field = FIELD.get(path, "messages")
    body: Any = {"model": "policy", "max_tokens": 99, "tools": tools, field: CHAT}
    async with gateway(codec, tmp_path) as found:
        name, arguments = called
        told = json.dumps({"name": name, "arguments": arguments})
        found.says = f"<tool_call>{told}</tool_call>{END}"
        for turn in range(2):
            answer = await found.post(f"/v1/{path}", body)
            assert answer.status_code == 200, answer.text
            if path == "responses":
                said = answer.json()["output"]
                (made,) = said
                kind = made["type"].removesuffix("_call") + "_call_output"
                result = {"type": kind, "call_id": made["call_id"], "output": "3"}
            elif path == "messages":
                said = [{"role": "assistant", "content": answer.json()["content"]}]
                (made,) = said[0]["content"]
                result = {"type": "tool_result", "tool_use_id": made["id"], "content": "3"}
                result = {"role": "user", "content": [result]}
            else:
                said = [answer.json()["choices"][0]["message"]]
                (made,) = said[0]["tool_calls"]
                result = {"role": "tool", "tool_call_id": made["id"], "content": "3"}
            assert made | call == made, turn
            body[field] = [*body[field], *said, result]
        first, second = found.asked
        assert f"system {names}{END}" in first.text
        assert (first.follows, second.follows) == (-1, 1)
    shown = capsys.readouterr().err
    others = {one.get("type") for one in tools} - {"namespace", "custom", "function", None}
    assert all(shown.count(one) == 1 for one in others), shown


PATHS = ("chat/completions", "responses", "messages")
FIELD = {"chat/completions": "messages", "responses": "input"}
PART = {"type": "text", "text": "1"}
MALFORMED = [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 10**5]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": 5}, "`messages` is no list"),
    ("chat/completions", {"messages": [{"role": "user", "content": ["text"]}]}, "content part"),
    ("chat/completions", {"messages": [{"role": "user", "content": PART}]}, "no text and no list"),
    ("chat/completions", {"messages": [0] * 5_001}, "more than 5,000 items"),
    ("responses", {"input": [{"role": "user", "content": [0] * 5_000}]}, "more than 5,000"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
    ("chat/completions", {"tool_choice": "required"}, "`tools` must be set"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "`stream=True`"),
    ("chat/completions", {"max_completion_tokens": 0}, "`max_completion_tokens` is 0"),
    ("chat/completions", {"functions": [FUNCTION]}, "`functions` is not supported"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, "set it to auto"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "set it to"),
    ("chat/completions", {"model": "gpt"}, "does not exist; ask for `policy`"),
    ("chat/completions", {"messages": []}, "`messages` is empty"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ""),
    ("chat/completions", {"stop": ["x", ""]}, "`stop` has 2 texts, 1 of them empty"),
    ("chat/completions", {"logprobs": True}, "`logprobs` is not supported"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "`response_format` is not supp"),
    ("chat/completions", {"frequency_penalty": 0.5}, "`frequency_penalty` is not supported"),
    ("chat/completions", {"n": 1000}, "`n` is 1000"),
    ("chat/completions", {"max_tokens": 0}, "`max_tokens` is 0"),
    ("responses", {"input": []}, "`input` is empty"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "Unsupported input item"),
    ("responses", {"previous_response_id": "x"}, "send the whole conversation as `input`"),
    ("responses", {"tools": [FUNCTION]}, "`tools.0` is no tool with a `type`"),
    ("responses", {"tools": [{"type": "namespace", "tools": [SHELL]}]}, "namespace of tools, has no"),
    ("responses", {"tools": [SHELL], "tool_choice": {"type": "local_shell"}}, "set it to auto"),
    ("responses", {"tools": 5}, "`tools` is no list"),
    ("responses", {"max_output_tokens": 0}, "`max_output_tokens` is 0"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "not given to the agent"),
    ("messages", {"max_tokens": "x"}, "max_tokens: Input should be a valid integer"),
    ("messages", {"tools": [{"type": 5, "name": "bash"}]}, "`tools.0` is no tool with a `type`"),
    ("messages", {"tool_choice": {"type": "any"}}, "`tool_choice` is 'any'"),
    ("messages", {"output_config": {"format": {"schema": BARE}}}, "`output_config.format` is"),
    ("messages", {"messages": [*CHAT, {"role": "assistant", "content": "{"}]}, "end `messages`"),
    ("messages", {"system": [{"type": "document"}]}, "system.0.type: Input should be 'text'"),
]  # fmt: skip


def told(answer: httpx.Response, path: str) -> str:
    """The message of an error, whose form is checked."""
    found = answer.json()
    error = found["error"]
    assert 400 <= answer.status_code < 500 and error["message"] and error["type"], answer.text
    if path == "messages":
        assert found.keys() == {"type", "error"} and error.keys() == {"type", "message"}
    else:
        assert found.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    return error["message"]


async def test_one_error_of_the_form(codec: Codec, tmp_path: Path) -> None:
    """Of each API, for what is wrong with a request, its key or its length."""
    async with gateway(codec, tmp_path) as found:
        ended = found.kit.session()
        await ended.close()
        for path in PATHS:
            field = FIELD.get(path, "messages")
            for body in MALFORMED:
                answer = await found.post(f"/v1/{path}", body)
                assert answer.status_code == 400 and told(answer, path), body[:20]
            for key in ("none", "sk-1", "megarl-" + "x" * 32, ended.key):
                answer = await found.post(f"/v1/{path}", {}, key)
                assert answer.status_code == 401 and "API key" in told(answer, path)
            text: Any = "1" * 500
            whole = [{"role": "user", "content": text}] if field == "messages" else text
            asked = {"model": "policy", "max_tokens": 9, field: whole}
            answer = await found.post(f"/v1/{path}", asked)
            assert "length is 400 tokens, and the messages have 50" in told(answer, path)
            code = "too long" if path == "messages" else "context_length_exceeded"
            assert code in answer.text
        for path, change, said in WRONG:
            field = FIELD.get(path, "messages")
            good = {"model": "policy", "max_tokens": 9, field: CHAT if field == "messages" else "1"}
            answer = await found.post(f"/v1/{path}", good | change)
            assert said in told(answer, path), (change, answer.text)
            status = 413 if "more than 5,000" in said else 404 if "model" in change else 400
            assert answer.status_code == status, change
        answer = await found.post("/v1/chat/completions", b"x" * (5 * 2**20))
        assert answer.status_code == 413


def test_a_request_is_read_up_to_its_first_wrong_item() -> None:
    """Each has hundreds of errors; to tell them all for 800 items would take seconds, in which the
    calls of all other agents wait.
    """

    def errors(count: int) -> int:
        with pytest.raises(ValidationError) as found:
            Responses().read({"model": "policy", "input": [{}] * count})
        return found.value.error_count()

    assert errors(1) == errors(100) > 100


async def test_a_template_without_tools(codec: Codec, tmp_path: Path) -> None:
    """The model would not be told of them."""
    plain = copy.deepcopy(codec.tokenizer)
    plain.chat_template = plain.chat_template.replace("if tools", "if false")
    async with gateway(Codec.of(plain, whole=True), tmp_path) as found:
        ask = found.openai.chat.completions.create
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="does not show them to the model"):
                await ask(model="policy", messages=CHAT, tools=[TOOL])
        assert (await ask(model="policy", messages=CHAT)).choices[0].message.content == "3"


async def test_one_call_at_a_time(codec: Codec, tmp_path: Path) -> None:
    """The agent reads the first of two calls, and what it sends back is the same conversation."""
    made = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    async with gateway(codec, tmp_path) as found:
        found.says = f"{made}{made}{END}"
        asked: Any = {"model": "policy", "tools": [TOOL], "parallel_tool_calls": False}
        chat: list[Any] = list(CHAT)
        for _ in range(2):
            (one,) = (await found.openai.chat.completions.create(messages=chat, **asked)).choices
            (call,) = one.message.tool_calls or ()
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            chat += [one.message.model_dump(exclude_none=True), result]
        tool: Any = {"name": "add", "input_schema": BARE}
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await found.anthropic.messages.create(
            model="policy", messages=CHAT, max_tokens=99, tools=[tool], tool_choice=choice
        )
        assert [one.type for one in answer.content] == ["tool_use"]
        response = await found.openai.responses.create(
            model="policy",
            input="1",
            tools=[{"type": "function", **FUNCTION}],
            parallel_tool_calls=False,
        )
        assert [one.type for one in response.output] == ["function_call"]


async def test_thoughts_in_messages_keep_their_name(codec: Codec, tmp_path: Path) -> None:
    thinks = copy.deepcopy(codec.tokenizer)
    thinks.chat_template += "{% for one in messages %}{{ one.reasoning_content }}{% endfor %}"
    async with gateway(Codec.of(thinks, whole=True), tmp_path) as found:
        sizes = []
        for thought in ("1", "123"):
            turn = {"role": "assistant", "content": "2", "reasoning_content": thought}
            body = {"model": "policy", "messages": [*CHAT, turn, *CHAT]}
            answer = await found.post("/v1/chat/completions", body)
            sizes.append(answer.json()["usage"]["prompt_tokens"])
        assert sizes[1] == sizes[0] + 2
