"""The gateway of agents: the official clients against the real server, whose model is a list of
texts; the real engine is in tests/system/test_agents.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from support.agents import codec_of_characters

from megarl.apps.gateway.agent_kit import AgentKit
from megarl.apps.tools import forked
from megarl.apps.tools.markup import TurnMarkup
from megarl.apps.tools.parsers import CallReader
from megarl.apps.tools.tool import CallError
from megarl.environments.codec import Codec
from megarl.environments.scores import BadScore
from megarl.environments.scoring import Environment
from megarl.environments.session import Answer, Observation
from megarl.rollout.attempts import trained_part
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt, Segment, Verdict

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASKED: list[Any] = [{"role": "user", "content": "1+2"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
END = "<|im_end|>"
NONE = {"unread": 0.0, "left_out": 0.0}
Talk = Callable[[str, str], Awaitable[Any]]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return codec_of_characters(tmp_path_factory.mktemp("calculator"))


@dataclass
class Played:
    """What came of a rollout."""

    answer: Any = None
    read: list[str] = field(default_factory=list)
    """What the model had read, for each of its turns, its own earlier turns included."""
    parts: list[tuple[int | None, str]] = field(default_factory=list)
    """(segment that it follows, text) of all segments."""
    stops: list[tuple[str, ...]] = field(default_factory=list)
    """Texts at which each turn of the model was to end."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the session tells at the end of the rollout."""
    error: BaseException | None = None


async def play(
    codec: Codec, talk: Talk, says: list[str], folder: Path, slow_s: float = 0.0, **agent: Any
) -> Played:
    """A rollout of an agent, `talk(url, key)`, with a model that says one text after the other, the
    first after `slow_s` seconds.
    """
    (folder / "agent.py").write_text("async def run(prompt, client): ...\n")
    settings: Any = {"function": f"{folder}/agent.py:run", "context_tokens": 400} | agent
    kit = AgentKit(EnvironmentConfig(agent=settings), codec, {})
    await kit.start()
    found, session = Played(), kit.session()

    async def run(prompt: Prompt, client: openai.AsyncOpenAI) -> Any:
        return await talk(kit.url, client.api_key)

    kit.function = run
    try:
        made: Any = await session.start(Prompt(0, "1+2", [], "3"))
        for said in says:
            found.parts.append((made.follows, made.text))
            found.stops.append(getattr(made, "stop", ()))
            context, number = "", len(found.parts) - 1
            while number >= 0:
                follows, text = found.parts[number]
                context, number = text + context, number - 1 if follows is None else follows
            found.read.append(context)
            ids = np.array(codec.encode(said), np.int32)
            found.parts.append((None, said))
            await asyncio.sleep(0.0 if len(found.parts) > 2 else slow_s)
            made = await session.step(codec.decode(ids), ids)
            if not isinstance(made, Observation):
                break
        found.answer, found.told = made, session.told_at_end()
    except BaseException as error:
        found.error = error
    finally:
        await session.close()
        assert kit.serving is not None
        kit.serving.cancel()
    return found


def played(codec: Codec, folder: Path, says: list[str], talk: Talk, **agent: Any) -> Played:
    found = asyncio.run(play(codec, talk, says, folder, **agent))
    if found.error is not None:
        raise found.error
    return found


def client(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_turns_continue_what_was_sampled(codec: Codec, tmp_path: Path) -> None:
    """A call, its result, an answer: the model reads its own tokens, also odd ones."""

    async def talk(url: str, key: str) -> str:
        chat = list(ASKED)
        async with client(url, key) as api:
            made = await api.chat.completions.create(model="policy", messages=chat, tools=[TOOL])
            message = made.choices[0].message
            assert made.choices[0].finish_reason == "tool_calls" and message.tool_calls
            (call,) = message.tool_calls
            assert call.type == "function" and call.function.arguments == '{"a": 3}'
            assert made.usage is not None and made.usage.completion_tokens > 5
            chat += [
                message.model_dump(),
                {"role": "tool", "tool_call_id": call.id, "content": "3"},
            ]
            last = await api.chat.completions.create(model="policy", messages=chat, tools=[TOOL])
            assert last.choices[0].finish_reason == "stop"
            return f"so {last.choices[0].message.content}"

    odd = f"  {CALL}"  # what a template would write without the spaces
    found = played(codec, tmp_path, [odd + END, "3" + END], talk)
    assert found.answer == Answer("so 3", {"calls": 2.0, "conversations": 1.0} | NONE)
    first = "<|im_start|>system add<|im_end|><|im_start|>user1+2<|im_end|><|im_start|>assistant"
    assert found.read == [
        first,
        f"{first}{odd}{END}<tool_response>3</tool_response><|im_start|>assistant",
    ]
    assert [follows for follows, _ in found.parts] == [-1, None, 1, None]


def test_histories_that_are_changed(codec: Codec, tmp_path: Path) -> None:
    """A retry, a second answer, a shortened history and a second agent: branches of one tree."""

    async def talk(url: str, key: str) -> dict[str, float]:
        async with client(url, key) as api:

            async def ask(chat: list[Any], **more: Any) -> list[str]:
                made = await api.chat.completions.create(model="policy", messages=chat, **more)
                return [str(one.message.content) for one in made.choices]

            (one,) = await ask(ASKED)
            # White space and a name of its own are no change.
            turn = {"role": "assistant", "content": f" {one}\n", "name": "agent"}
            (two,) = await ask([*ASKED, turn, {"role": "user", "content": "and"}])
            assert await ask([*ASKED, turn, {"role": "user", "content": "or"}]) == ["three"]
            assert await ask(ASKED, n=2, max_tokens=4) == ["four", "five"]
            edited = {"role": "assistant", "content": "eins"}
            assert await ask([*ASKED, edited, {"role": "user", "content": "and"}]) == ["six"]
            assert await ask([{"role": "user", "content": "sum"}]) == ["seven"]
            assert await ask([{"role": "user", "content": "1+2 "}]) == ["eight"]  # here it is one
            return {"reward": 0.5, "turns": 2 * float((one, two) == ("one", "two"))}

    says = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    found = played(codec, tmp_path, [f"{one}{END}" for one in says], talk, trains="all")
    assert found.answer == {"reward": 0.5, "turns": 2.0, "calls": 8.0, "conversations": 4.0} | NONE
    user, begin = "<|im_start|>user", "<|im_end|><|im_start|>assistant"
    first = f"{user}1+2{begin}"
    assert found.read == [
        first,
        f"{first}one{END}{user}and{begin}",
        f"{first}one{END}{user}or{begin}",
        first,
        first,
        f"{first}eins{END}{user}and{begin}",
        f"{user}sum{begin}",
        f"{user}1+2 {begin}",
    ]
    assert [follows for follows, _ in found.parts[::2]] == [-1, 1, 1, 0, 0, -1, -1, -1]


def test_anthropic(codec: Codec, tmp_path: Path) -> None:
    tool: Any = {"name": "add", "input_schema": TOOL["function"]["parameters"]}

    async def talk(url: str, key: str) -> float:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as api:
            settings: Any = {"model": "policy", "max_tokens": 99, "tools": [tool]}
            chat: list[Any] = [{"role": "user", "content": "1+2"}]
            made = await api.messages.create(messages=chat, **settings)
            assert made.stop_reason == "tool_use" and made.usage.output_tokens > 5
            (use,) = [one for one in made.content if one.type == "tool_use"]
            assert use.input == {"a": 3}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
            chat += [
                {"role": "assistant", "content": [one.model_dump() for one in made.content]},
                {"role": "user", "content": [result]},
            ]
            async with api.messages.stream(messages=chat, **settings) as events:
                text = "".join([piece async for piece in events.text_stream])
                final = await events.get_final_message()
            assert text == "three" and final.stop_reason == "end_turn"
            with pytest.raises(anthropic.NotFoundError, match="ask for `policy`"):
                await api.messages.create(model="claude", max_tokens=9, messages=chat)
            stops: Any = {"messages": chat, "stop_sequences": ["x", "-"], **settings}
            made = await api.messages.create(**stops)
            assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "-")
            assert [one.text for one in made.content if one.type == "text"] == ["four "]
            async with api.messages.stream(**stops) as events:
                final = await events.get_final_message()
            assert (final.stop_reason, final.stop_sequence) == ("end_turn", None)
        return 1.0

    said = [CALL + END, "three" + END, "four -", "five" + END]
    found = played(codec, tmp_path, said, talk)
    assert found.answer["reward"] == 1.0 and found.read[1].startswith(found.read[0] + CALL + END)


def test_stop_texts(codec: Codec, tmp_path: Path) -> None:
    """The model writes them, and the agent does not read them; its next call continues the tokens
    that were sampled.
    """

    async def talk(url: str, key: str) -> str:
        async with client(url, key) as api:

            async def ask(chat: list[Any], **more: Any) -> list[str]:
                made = await api.chat.completions.create(model="policy", messages=chat, **more)
                return [f"{one.message.content} {one.finish_reason}" for one in made.choices]

            stops: Any = {"stop": ["tion: ", "Observation:"], "max_tokens": 30}
            assert await ask(ASKED, n=2, **stops) == ["add \n stop", "sum stop"]
            chat = [*ASKED, {"role": "assistant", "content": "add"}, *ASKED]
            assert await ask(chat, tools=[TOOL], stop="!") == ['<tool_call>{"name": "a stop']
            assert await ask(chat, stop="!", max_tokens=2) == ["ab length"]
            assert await ask(chat, stop="c", max_tokens=2) == ["b stop"]
            assert await ask(chat, stop=END) == ["d stop"]
            made = await api.chat.completions.create(
                model="policy", messages=chat, tools=[TOOL], stop="x"
            )
            (call,) = made.choices[0].message.tool_calls or ()
            assert made.choices[0].finish_reason == "tool_calls" and call.type == "function"
            return str(made.choices[0].message.content).strip()

    add = "add \nObservation: "
    says = [
        add,
        f"sum{END}",
        CALL.replace("dd", "!dd"),
        "ab",
        "bc",
        f"d{END}",
        f"so {CALL}x{END}",
    ]
    found = played(codec, tmp_path, says, talk)
    begin = f"{END}<|im_start|>assistant"
    assert found.answer.text == "so"
    assert found.read[1] == found.read[0] == f"<|im_start|>user1+2{begin}"
    assert found.read[3] == f"{found.read[0]}{add}{END}<|im_start|>user1+2{begin}"
    stops = [("tion: ", "Observation:")] * 2 + [("!",)] * 2 + [("c",), (END,), ("x",)]
    assert found.stops == stops


def test_the_model_answers_its_own_turn(codec: Codec, tmp_path: Path) -> None:
    """An agent that sends the conversation back with nothing new: the turn is ended, and the model
    has another.
    """

    async def talk(url: str, key: str) -> str:
        chat = list(ASKED)
        async with client(url, key) as api:
            for _ in range(3):
                made = await api.chat.completions.create(model="policy", messages=chat)
                chat.append({"role": "assistant", "content": made.choices[0].message.content})
        return "".join(str(turn["content"]) for turn in chat[1:])

    found = played(codec, tmp_path, [f"{one}{END}" for one in "abc"], talk)
    begin = "<|im_start|>assistant"
    first = f"<|im_start|>user1+2{END}{begin}"
    assert found.answer.text == "abc"
    assert found.read == [first, f"{first}a{END}{begin}", f"{first}a{END}{begin}b{END}{begin}"]
    assert [follows for follows, _ in found.parts[::2]] == [-1, 1, 3]


def test_a_rollout_has_so_many_tokens(codec: Codec, tmp_path: Path) -> None:
    """Of all conversations together; the agent is told the numbers."""

    async def talk(url: str, key: str) -> str:
        async with client(url, key) as api:
            for number in range(100):
                chat: list[Any] = [{"role": "user", "content": f"{number}" * 9}]
                try:
                    await api.chat.completions.create(model="policy", messages=chat)
                except openai.BadRequestError as error:
                    return f"{number} {error.code}"
        return "never"

    found = played(codec, tmp_path, [f"a{END}"] * 100, talk, rollout_tokens=60)
    number, code = found.answer.text.split()
    tokens = sum(len(codec.encode(text)) for _, text in found.parts)
    assert code == "rollout_tokens" and int(number) > 2 and 40 < tokens <= 60


def test_agents_that_fail(codec: Codec, tmp_path: Path) -> None:
    async def raises(url: str, key: str) -> None:
        async with client(url, key) as api:
            await api.chat.completions.create(model="policy", messages=ASKED)
        raise KeyError("of its own")

    async def hangs(url: str, key: str) -> None:
        async with client(url, key) as api:
            await api.chat.completions.create(model="policy", messages=ASKED)
        await asyncio.sleep(60)

    async def is_silent(url: str, key: str) -> str:
        return "3"

    async def thinks(url: str, key: str) -> None:
        await asyncio.sleep(60)

    with pytest.raises(KeyError, match="of its own"):
        played(codec, tmp_path, ["3" + END], raises)
    with pytest.raises(Exception, match=r"longer than environment\.agent\.time_limit_s = 0\.5 s"):
        played(codec, tmp_path, ["3" + END], hangs, time_limit_s=0.5)
    with pytest.raises(BadScore, match=r"environment\.agent\.time_limit_s = 0\.5 s"):
        played(codec, tmp_path, ["3" + END], thinks, time_limit_s=0.5)
    with pytest.raises(Exception, match="the agent made no call"):
        played(codec, tmp_path, ["3" + END], is_silent)


def test_a_function_harms_nobody_else(codec: Codec, tmp_path: Path) -> None:
    """It exits, and it closes its client; the worker process and others' calls go on."""
    (tmp_path / "own.py").write_text(
        "import sys\nasync def run(prompt, client):\n"
        "    async with client:\n"
        "        made = await client.chat.completions.create(model='policy', messages=[\n"
        "            {'role': 'user', 'content': prompt.text}])\n"
        "    if prompt.answer == 'exit':\n        sys.exit(3)\n"
        "    return made.choices[0].message.content\n"
    )

    async def run() -> list[Any]:
        agent: Any = {"function": f"{tmp_path}/own.py:run"}
        kit = AgentKit(EnvironmentConfig(agent=agent), codec, {})
        await kit.start()
        found: list[Any] = []
        for answer in ("exit", "3"):
            session = kit.session()
            await session.start(Prompt(0, "1+2", [], answer))
            ids = np.array(codec.encode(f"3{END}"), np.int32)
            try:
                found.append(await session.step("3", ids))
            except Exception as error:
                found.append(str(error))
            await session.close()
        assert kit.serving is not None and not kit.sessions
        kit.serving.cancel()
        return found

    first, second = asyncio.run(run())
    assert first == "the agent raised SystemExit(3)" and second.text == "3"


async def sdk(url: str, key: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=0.3) as api:
        made = await api.chat.completions.create(model="policy", messages=ASKED)
        return str(made.choices[0].message.content)


async def post(web: httpx.AsyncClient, url: str, key: str, **more: Any) -> str:
    head = {"authorization": f"Bearer {key}"}
    body = {"model": "policy", "messages": ASKED} | more
    made = await web.post(f"{url}/v1/chat/completions", json=body, headers=head)
    return made.json()["choices"][0]["message"]["content"]


async def by_hand(url: str, key: str) -> str:
    async with httpx.AsyncClient(timeout=0.2) as web:
        for wait_s in (0.0, 0.4):  # once while the model is at work, and once when it is done
            with pytest.raises(httpx.ReadTimeout):
                await post(web, url, key)
            await asyncio.sleep(wait_s)
        return await post(web, url, key, temperature=0.5)


async def stream_fails(url: str, key: str) -> str:
    async with httpx.AsyncClient(timeout=0.05) as web:
        with pytest.raises(httpx.ReadTimeout):
            await post(web, url, key, stream=True)
    async with httpx.AsyncClient(timeout=9) as web:
        return await post(web, url, key)


async def streams(url: str, key: str) -> str:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, timeout=0.6, max_retries=0
    ) as api:
        made = await api.chat.completions.create(model="policy", messages=ASKED, stream=True)
        texts = [part.choices[0].delta.content or "" async for part in made]
        return "".join(texts)


async def at_once(url: str, key: str) -> str:
    async with httpx.AsyncClient() as web:
        return " ".join(sorted(await asyncio.gather(*(post(web, url, key) for _ in "ab"))))


async def gives_up(url: str, key: str) -> str:
    with pytest.raises(openai.APITimeoutError):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, timeout=0.2, max_retries=0
        ) as api:
            await api.chat.completions.create(model="policy", messages=ASKED)
    return "?"


async def closes_unread(url: str, key: str) -> str:
    """The answer is in the client's memory when it closes the connection."""
    body = b'{"model":"policy","messages":[{"role":"user","content":"1+2"}]}'
    head = f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw:
        raw.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}".encode() + body)
        await asyncio.sleep(0.9)
    await asyncio.sleep(0)
    return "?"


@pytest.mark.parametrize(("talk", "answer", "calls", "untrained"), [
    (sdk, "one", 1, []),
    (by_hand, "one", 1, []),
    (stream_fails, "one", 1, []),
    (streams, "one", 1, []),
    (at_once, "one two", 2, []),
    (gives_up, "?", 1, [1]),
    (closes_unread, "?", 1, [1]),
])  # fmt: skip
def test_each_call_is_answered_once(
    codec: Codec, tmp_path: Path, talk: Talk, answer: str, calls: int, untrained: list[int]
) -> None:
    """Also if its client leaves and calls again; and what no client has read is not trained."""
    says = [f"one{END}", f"two{END}", f"three{END}"]
    found = played(codec, tmp_path, says, talk, slow_s=0.7, trains="all")
    assert (found.answer.text, found.answer.metrics["calls"]) == (answer, calls)
    assert found.told["untrained"] == untrained
    assert found.answer.metrics["unread"] == len(untrained)


@pytest.mark.parametrize(("chats", "answer", "untrained"), [
    (["1+2", "1+2", "1+2"], "three", [1, 3]),  # asked again
    (["1+2", "title: 1+2"], "so one", [3]),  # a side call, which ends last
    (["title: 1+2", "1+2"], 0.5, [1]),
    (["1+2", "+", "3"], "three", []),  # one conversation
])  # fmt: skip
def test_what_is_trained_of_an_agent(
    codec: Codec, tmp_path: Path, chats: list[str], answer: Any, untrained: list[int]
) -> None:
    async def talk(url: str, key: str) -> Any:
        chat: list[Any] = []
        async with client(url, key) as api:
            for asked in chats:
                before = chat if "+" in chats else []
                chat = [*before, {"role": "user", "content": asked}]
                made = await api.chat.completions.create(model="policy", messages=chat)
                chat.append(made.choices[0].message.model_dump())
        return answer

    says = [f"one{END}", f"two{END}", f"three{END}"]
    for trains, left in (("last", untrained), ("all", [])):
        found = played(codec, tmp_path, says, talk, trains=trains)
        assert found.told["untrained"] == left
        told = found.answer if isinstance(found.answer, dict) else found.answer.metrics
        assert told["left_out"] == len(left)


@pytest.mark.parametrize(("arguments", "conversations"), [
    ('{"a": 3.0}', 1.0),
    ('{"b": null, "a": 3}', 1.0),
    ('{"a":3e0,"c":null}', 1.0),
    ('{"a": 3, "b": 0}', 2.0),
    ('{"a": "3"}', 2.0),
])  # fmt: skip
def test_arguments_are_compared_by_value(
    codec: Codec, tmp_path: Path, arguments: str, conversations: float
) -> None:
    async def talk(url: str, key: str) -> float:
        async with client(url, key) as api:
            made = await api.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])
            turn: Any = made.choices[0].message.model_dump()
            turn["tool_calls"][0]["function"]["arguments"] = arguments
            result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "3"}
            chat: list[Any] = [*ASKED, turn, result]
            await api.chat.completions.create(model="policy", messages=chat, tools=[TOOL])
        return 1.0

    found = played(codec, tmp_path, [CALL + END, "3" + END], talk)
    assert found.answer["conversations"] == conversations


WRONG: list[tuple[str, Any, int]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": 5}] * 2000}, 400),
    ("responses", {"input": [{"role": 5, "content": 5}] * 60}, 400),
    ("messages", {"messages": [{"role": 5}] * 2000, "max_tokens": 9}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": "1 " * 10**6}]}, 400),
    ("chat/completions", {"messages": ASKED, "x": [[]] * 300_000}, 413),
]


def test_the_loop_goes_on_while_bodies_are_read(codec: Codec, tmp_path: Path) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    async def talk(url: str, key: str) -> float:
        beating = asyncio.create_task(beat())
        head = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=head, timeout=60) as web:
            for path, body, status in WRONG:
                data = json.dumps({"model": "policy"} | body).encode()
                before = beats
                made = await web.post(f"{url}/v1/{path}", content=data)
                assert made.status_code == status, (path, made.text)
                assert beats > before + 5, path
        async with client(url, key) as api:
            await api.chat.completions.create(model="policy", messages=ASKED)
        beating.cancel()
        return 1.0

    assert played(codec, tmp_path, ["3" + END], talk).answer["reward"] == 1.0


def test_what_takes_too_long_is_ended(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MOST_S", 0.3)
    reader = CallReader("qwen3_coder", codec.tokenizer, [TOOL])
    text = "<tool_call><function=add><parameter=" * 1000
    with pytest.raises(CallError, match=r"took longer than 0\.3 s; write it shorter"):
        asyncio.run(reader.read(text))
    beside, (call,) = asyncio.run(
        reader.read(f"{'so ' * 400}<tool_call><function=add></tool_call>")
    )
    assert len(beside) > 1000 and call.name == "add"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(forked.in_copy(lambda: 1 / 0))


@pytest.mark.parametrize(("untrained", "kept"), [
    ([1, 5], [-1, None, None, None, None]),
    ([1, 3, 7], [-1, None]),
    ([5], [-1, None, 0, None, None, None]),
    ([], [-1, None, 0, None, -1, None, 3, None]),
])  # fmt: skip
def test_the_part_that_is_trained(untrained: list[int], kept: list[int | None]) -> None:
    """Two answers to one call, a conversation of its own, and one that goes on behind segment 3."""
    segments = [
        Segment("model" if number % 2 else "environment", 1, None, follows=follows)
        for number, follows in enumerate([-1, None, 0, None, -1, None, 3, None])
    ]
    found, verdict = trained_part(segments, Verdict(1.0, True, untrained=untrained))
    assert [part.follows for part in found] == kept and not verdict.left_out
    assert trained_part(segments, Verdict(1.0, True, untrained=[1, 3, 5, 7]))[1].left_out


def test_programs_at_once_are_limited(codec: Codec) -> None:
    """Two of five in this worker, which has half of `at_once`."""

    async def run() -> list[int]:
        agent: Any = {"command": ["python", "-c", "1"], "at_once": 5}
        kit = AgentKit(EnvironmentConfig(agent=agent, num_workers=2), codec, {})
        kit.markup = TurnMarkup(codec.tokenizer, ())
        running, most = 0, list[int]()

        async def program(prompt: Prompt, key: str) -> float:
            nonlocal running
            running += 1
            most.append(running)
            await asyncio.sleep(0.05)
            running -= 1
            return 1.0

        kit.run = program
        sessions = [kit.session() for _ in range(5)]
        cut = asyncio.ensure_future(sessions[-1].start(Prompt(0, "1", [], "")))
        await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(*(one.start(Prompt(0, "1", [], "")) for one in sessions[:4]))
        return most

    assert max(asyncio.run(run())) == 2


PLACED = """
import sys, time
from pathlib import Path
with open(Path(sys.argv[1], "began"), "a") as file:
    file.write("x")
while not Path(sys.argv[1], "goes").exists():
    time.sleep(0.02)
"""


async def test_a_rollout_cut_off_before_it_has_a_place_starts_no_program(
    codec: Codec, tmp_path: Path
) -> None:
    """Nor does it keep the place from the next one."""
    (tmp_path / "agent.py").write_text(PLACED)
    began, prompt = tmp_path / "began", Prompt(0, "1", [], "")
    agent: Any = {"command": ["python", f"{tmp_path}/agent.py", str(tmp_path)], "at_once": 1}
    config = EnvironmentConfig(agent=agent, isolate=False, num_workers=1)
    environment = Environment(config, codec)
    await environment.start()
    first = asyncio.create_task(environment.begin("first", prompt))
    while not began.exists():
        await asyncio.sleep(0.02)
    second = asyncio.create_task(environment.begin("second", prompt))
    await asyncio.sleep(0.2)
    second.cancel()
    await environment.cut_off("second", 0)
    (tmp_path / "goes").touch()
    await first
    await environment.begin("third", prompt)
    await environment.close()
    assert began.read_text() == "xx"
