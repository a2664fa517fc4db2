"""Tools: what the model is shown, how its calls are read and made, what it reads next."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import string
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from make_calculator import write_model as write_calculator
from support.rollouts import segment

from megarl.apps.tools.functions import FunctionTool
from megarl.apps.tools.markup import TurnMarkup
from megarl.apps.tools.tool import CallError
from megarl.apps.tools.tool_kit import ToolKit
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.environments.user_calls import UserCalls
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.tools import ToolsConfig
from megarl.types import Prompt, Segment, Verdict

ROOT = Path(__file__).resolve().parents[2]
CALCULATOR = str(ROOT / "launch" / "environments" / "calculator.py")


class Place(BaseModel):
    city: str
    floor: int = 0


def weather(place: Place, unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> dict:
    """The weather of a place."""
    return {"city": place.city, "unit": unit, "days": days}


def call(function: Callable[..., Any], arguments: str, limit_s: float = 5.0) -> str:
    async def go() -> str:
        return await FunctionTool(function, "own.py:f", UserCalls(1)).call(arguments, limit_s)

    return asyncio.run(go())


def schema(function: Callable[..., Any]) -> Any:
    async def go() -> Any:
        return FunctionTool(function, "own.py:f", UserCalls(1)).schema

    return asyncio.run(go())


def test_the_schema_is_the_signatures() -> None:
    shown = schema(weather)
    assert shown["type"] == "function"
    about = shown["function"]
    assert (about["name"], about["description"]) == ("weather", "The weather of a place.")
    parameters = about["parameters"]
    assert parameters["required"] == ["place"] and parameters["additionalProperties"] is False
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    json.dumps(shown)


def test_a_call_is_checked_and_made() -> None:
    arguments = '{"place": {"city": "Ulm"}, "days": [1, 2]}'
    assert json.loads(call(weather, arguments)) == {"city": "Ulm", "unit": "C", "days": [1, 2]}

    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    assert call(slow, '{"seconds": 0}') == "done"
    with pytest.raises(CallError, match=r"did not answer within 0.2 s"):
        call(slow, '{"seconds": 60}', 0.2)

    released, ended = threading.Event(), list[float]()

    def plain(seconds: float) -> str:
        released.wait(seconds)
        ended.append(seconds)
        return "done"

    with pytest.raises(CallError, match=r"did not answer within 0.2 s"):
        call(plain, '{"seconds": 60}', 0.2)
    assert not ended, "the call goes on by itself"
    released.set()


@pytest.mark.parametrize(("arguments", "said"), [
    ("{", "JSON"),
    ("[1]", "object"),
    ('{"place": 3}', "place: Input should be"),
    ('{"place": {"city": "Ulm"}, "unit": "K"}', "unit: Input should be 'C' or 'F'"),
    ('{"place": {"city": "Ulm"}, "colour": 1}', "colour: Extra inputs are not permitted"),
    ("{}", "place: Field required"),
])  # fmt: skip
def test_a_wrong_call_is_told_to_the_model(arguments: str, said: str) -> None:
    with pytest.raises(CallError) as told:
        call(weather, arguments)
    assert said in str(told.value)


def raises(a: int) -> int:
    raise KeyError(a)


def leaves(a: int) -> int:
    sys.exit(a)


def strange(a: int) -> object:
    return object()


@pytest.mark.parametrize(
    ("function", "said"),
    [(raises, "KeyError: 1"), (leaves, "SystemExit: 1"), (strange, "neither a text nor JSON")],
)
def test_a_tool_that_fails_is_told_to_the_model(function: Any, said: str) -> None:
    with pytest.raises(CallError, match=said):
        call(function, '{"a": 1}')


def untyped(a: int, b) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return a + b


def starred(*numbers: int) -> int:
    return sum(numbers)


def positional(a: int, /) -> int:
    return a


def foreign(a: socket) -> int:  # type: ignore[name-defined]  # noqa: F821
    return a


def unshown(a: threading_lock) -> int:  # type: ignore[valid-type]  # noqa: F821
    return 0


def yields(a: int):  # noqa: ANN201
    yield a


async def yields_later(a: int):  # noqa: ANN201
    yield a


class Called:
    def __call__(self, a: int) -> int:
        return a


unshown.__annotations__["a"] = type(os.scandir(os.curdir))


@pytest.mark.parametrize(("function", "said"), [
    (untyped, "parameter 'b' has no type; write it as 'b: int'"),
    (starred, "'numbers' has a star"),
    (positional, "'a' is positional only"),
    (foreign, "a type is unknown"),
    (unshown, "cannot be written as JSON"),
    (Place, "is a class; write a function that makes an instance and calls it"),
    (yields, "is a generator function"),
    (yields_later, "is a generator function"),
    (lambda a: a, "is a lambda, without a name"),
    (functools.partial(strange, 1), "is a partial, without a name"),
    (Called(), "is a Called, without a name"),
])  # fmt: skip
def test_a_function_that_is_no_tool_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schema(function)


# ------------------------------------------------------------------------------------- the template

CHATML = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TURNS = """{{ "<s>" }}{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}<|end|>
{%- if m.role == "tool" %}{{ m.name }} {{ m.tool_call_id }} gives {{ m.content }}
{%- elif m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}({{ c.function.arguments }})]{% endfor %}
{%- else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"""


def tokenizer(folder: Path, template: str) -> Any:
    if not (folder / "model").exists():
        write_calculator(folder / "model")
    made = load_tokenizer(str(folder / "model"))
    made.chat_template = template
    return made


# Writes an empty thought before the model's turn while no other follows it.
THINKS = CHATML.replace(
    "{{ m.content }}{% for c",
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% for c",
)


def test_a_turn_that_is_written_otherwise_once_results_follow(tmp_path: Path) -> None:
    markup = TurnMarkup(tokenizer(tmp_path, THINKS), [schema(weather)])
    assert "<think>" in markup._render([{"role": "assistant", "content": "a"}])
    follows = markup.results("abc<|im_end|>", ["weather"], ["wet"])
    # Templates are rendered without the line break after a `{% ... %}`.
    begins = "\n<|im_start|>user<tool_response>\nwet\n</tool_response><|im_end|>\n"
    assert follows == begins + "<|im_start|>assistant\n"


def test_a_part_of_the_mark_of_an_end_is_text(tmp_path: Path) -> None:
    """A `<` that the model wrote itself is no beginning of `<|im_end|>`."""
    markup = TurnMarkup(tokenizer(tmp_path, CHATML), [schema(weather)])
    assert markup.results("a <", ["weather"], ["wet"]).startswith("<|im_end|>\n<|im_start|>user")
    assert markup.without_closing("a <") == "a <"


def test_a_template_of_one_call(tmp_path: Path) -> None:
    one = CHATML.replace(
        "{%- if m.role",
        "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}{%- if m.role",
        1,
    )
    assert one != CHATML
    assert not TurnMarkup(tokenizer(tmp_path, one), [schema(weather)]).takes_several
    assert TurnMarkup(tokenizer(tmp_path, CHATML), [schema(weather)]).takes_several


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("template", [CHATML, TURNS], ids=["chatml", "turns"])
def test_observations_are_what_the_template_writes(
    tmp_path: Path, template: str, ended: bool
) -> None:
    """The prompt, the model's turns and the observations after them make the same text as the whole
    conversation, rendered at once; whether or not the model ended its turn itself.
    """
    made = tokenizer(tmp_path, template)
    schemas = [schema(weather)]
    markup = TurnMarkup(made, schemas)
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "weather", "arguments": {}}}
        for n in range(2)
    ]
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Rain?"}]

    def rendered(*, asks: bool) -> str:
        return made.apply_chat_template(
            chat, tools=schemas, tokenize=False, add_generation_prompt=asks
        )

    text = rendered(asks=True)
    for count, results in ((1, ["wet <x>"]), (2, ["a\nb", "c"])):
        chat.append({"role": "assistant", "content": "", "tool_calls": calls[:count]})
        said = rendered(asks=False)[len(text) :]
        close = "<|im_end|>\n" if template == CHATML else "<|eot|>"
        assert said.endswith(close)
        said = said.removesuffix("\n") if ended else said.removesuffix(close)
        chat += [
            {"role": "tool", "name": "weather", "tool_call_id": one["id"], "content": result}
            for one, result in zip(calls, results, strict=False)
        ]
        text += said + markup.results(said, ["weather"] * count, results)
        assert text == rendered(asks=True)
    assert markup.without_closing("abc" + close.rstrip("\n")) == "abc"
    assert markup.without_closing("abc") == "abc"


@pytest.mark.parametrize(("template", "said"), [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show the model its tools"),
    (
        "{{ tools }}{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
        "{% endfor %}",
        "does not show the model the result of a call",
    ),
    ("{{ raise_exception('no tools here') }}", "refuses a conversation with tool calls"),
])  # fmt: skip
def test_a_template_without_tools_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TurnMarkup(tokenizer(tmp_path, template), [schema(weather)])


# -------------------------------------------------------------------------------------- the session

MORE_TOOLS = """
import time

def fails(a: int) -> int:
    raise ValueError("no such number")

def slow(a: int) -> int:
    time.sleep(30)
    return a

def naps(a: int) -> int:
    time.sleep(0.3)
    return a
"""


async def test_a_session_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real worker process with vLLM's parser: right, wrong and unreadable calls, several
    at once, and the answer, which the recipe's verifier scores.
    """
    monkeypatch.setattr("make_calculator.CHARACTERS", string.printable)
    write_calculator(tmp_path / "model")
    codec = Codec.of(load_tokenizer(str(tmp_path / "model")), whole=True)
    (tmp_path / "more.py").write_text(MORE_TOOLS)
    functions = (f"{CALCULATOR}:multiply", f"{CALCULATOR}:add")
    more = tuple(f"{tmp_path}/more.py:{name}" for name in ("fails", "slow", "naps"))
    tools = ToolsConfig(functions=functions + more, time_limit_s=0.5, result_characters=60)
    config = EnvironmentConfig(tools=tools, wrong=-1.0, time_limit_s=0.8)

    def said(text: str, *, cut: bool = False) -> Segment:
        token_ids = codec.tokenizer.encode(text, add_special_tokens=False)
        token_ids += [] if cut else [codec.tokenizer.eos_token_id]
        return segment(token_ids, finish="length" if cut else "stop")

    def calls(*made: str) -> str:
        return "".join(f"<tool_call>{one}</tool_call>" for one in made)

    def to(name: str, **arguments: Any) -> str:
        return json.dumps({"name": name, "arguments": arguments})

    environment = Environment(config, codec)
    prompt = Prompt(0, "", [3, 4], "42")

    async def step(segment: Segment) -> Any:
        answer = await environment.step("a", prompt, segment, num_tokens=9)
        if isinstance(answer, Verdict):
            return answer
        text = codec.tokenizer.decode(answer.arrays.token_ids.tolist())
        head, _, rest = text.partition("<tool_response>")
        assert head == "" and rest.endswith("</tool_response><|im_start|>assistant"), text
        return rest.removesuffix("</tool_response><|im_start|>assistant")

    try:
        await environment.start()
        assert [tool["function"]["name"] for tool in environment.tools] == [
            *("multiply", "add", "fails", "slow", "naps")
        ]
        assert await environment.begin("a", prompt) is None
        assert await step(said(calls(to("multiply", a=6, b=7)))) == "42"
        both = await step(said(calls(to("add", a=1, b=2), to("multiply", a=3, b=4))))
        assert both == "3</tool_response><tool_response>12"
        wrong = await step(said(calls(to("add", a="one", b=2))))
        assert wrong.startswith("error: a: Input should be a valid integer"), wrong
        assert "no tool 'divide'" in await step(said(calls(to("divide", a=1, b=2))))
        assert "could not be read" in await step(said("<tool_call>{add 1 2}</tool_call>"))
        assert await step(said(calls(to("fails", a=1)))) == "error: ValueError: no such number"
        assert "did not answer within 0.5 s" in await step(said(calls(to("slow", a=1))))
        # Each has its own limit, and waits for the only thread without one.
        several = await step(said(calls(*(to("naps", a=n) for n in range(4)))))
        assert several == "</tool_response><tool_response>".join("0123")
        long = await step(said(calls(to("multiply", a=10**70, b=1))))
        assert long == "1" + "0" * 59, "a long result is cut"
        verdict = await step(said("42"))
        assert (verdict.reward, verdict.correct) == (1.0, True)
        assert verdict.metrics == {"tool_calls": 13.0, "tool_errors": 5.0}
        for text, finish in (("<tool_call>{", "tool_call"), ("4", "")):
            await environment.begin("a", prompt)
            verdict = await step(said(text, cut=True))
            assert (verdict.finish, verdict.reward, verdict.judged) == (finish, -1.0, False)
    finally:
        await environment.close()


def kit(folder: Path, **settings: Any) -> ToolKit:
    """A started kit of tools with the calculator's tokenizer."""
    if not (folder / "model").exists():
        write_calculator(folder / "model")
    codec = Codec.of(load_tokenizer(str(folder / "model")), whole=True)
    config = EnvironmentConfig(tools=ToolsConfig(**settings))

    async def go() -> ToolKit:
        made = ToolKit(config, codec, {})
        await made.start()
        return made

    return asyncio.run(asyncio.wait_for(go(), 60))


def test_kits_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def add(a: int) -> int:\n    return a\n")
    functions = (f"{CALCULATOR}:add", f"{tmp_path}/more.py:add")
    with pytest.raises(ValueError, match=r"2 tools named 'add'.*calculator.*more"):
        kit(tmp_path, functions=functions)
    with pytest.raises(ValueError, match=r"parser is 'hermas'; set one of .*hermes"):
        kit(tmp_path, functions=(f"{CALCULATOR}:add",), parser="hermas")
