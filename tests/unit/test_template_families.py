"""Templates that end turns, or write earlier ones, in ways of their own: what is trained on, and what
the model reads after its turns, is token for token what the template writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import FAMILIES, GLM, HARMONY, LATE_TOOLS, OTHERS, PHI, tokenizer_of
from support.commands import write_rows

from megarl.apps.tools.markup import TurnMarkup
from megarl.data.chat_template import ChatTemplate, end_of_turn, ends_of_turns
from megarl.data.control_tokens import unmarked
from megarl.data.demonstrations import load_demonstrations
from megarl.environments.codec import Codec
from megarl.settings.data import DemonstrationsConfig

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "7"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


FOUR = [user("1+2"), model("3"), user("4+5"), model("9")]
SIX = [user("1+2"), CALLS, RESULT, model("7"), user("4+5"), model("9")]


def rows(folder: Path, tokenizer: Any, chat: Any) -> Any:
    source = write_rows(folder / "rows.jsonl", [{"messages": chat, "tools": [TOOL]}])
    settings: Any = {"template": "chat", "messages_column": "messages", "shuffle": False}
    settings["tools_column"] = "tools" if chat == SIX else ""
    return load_demonstrations(DemonstrationsConfig(source=source, **settings), tokenizer, seed=1)


def trained(tokenizer: Any, found: Any) -> list[list[str]]:
    """The stretches of each row that are trained on."""
    texts = []
    for row in map(found.at, range(len(found))):
        text, stretches = "", []
        for token, chosen in zip(row.response_ids, row.response_mask, strict=True):
            text += tokenizer.decode([token]) if chosen else ""
            if text and not chosen:
                stretches, text = [*stretches, text], ""
        texts.append([*stretches, text])
    return texts


CALLED = "<call>add</call>"
TRAINED = {  # {family: (of four messages, of six with a call)}
    "olmo": ([["3<|im_end|>", "9<|endoftext|>"]],
             [[f"{CALLED}<|im_end|>", "7<|im_end|>", "9<|endoftext|>"]]),
    "harmony": ([["<|channel|>final<|message|>3<|end|>", "<|channel|>final<|message|>9<|return|>"]],
                [[' to=add<|message|>{"a": 3}<|call|>', "<|channel|>final<|message|>7<|end|>",
                  "<|channel|>final<|message|>9<|return|>"]]),
    "glm": ([["3<|user|>", "9<|user|>"]],
            [[f"{CALLED}<|observation|>", "7<|user|>", "9<|user|>"]]),
    "cohere": ([["3<|RESPONDED|><|END|>", "9<|RESPONDED|><|END|>"]],
               [[f"{CALLED}<|RESPONDED|><|END|>", "7<|RESPONDED|><|END|>",
                 "9<|RESPONDED|><|END|>"]]),
    "late tools": ([[" 3</s>", " 9</s>"]], [[f" {CALLED}</s>", " 7</s>"], [" 9</s>"]]),
    "thinks": ([["<think>\n\n</think>\n3<|im_end|>"], ["<think>\n\n</think>\n9<|im_end|>"]],
               [[f"<think>\n\n</think>\n{CALLED}<|im_end|>", "<think>\n\n</think>\n7<|im_end|>"],
                ["<think>\n\n</think>\n9<|im_end|>"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_each_turn_is_trained_as_the_template_writes_it(name: str, tmp_path: Path) -> None:
    tokenizer: Any = tokenizer_of(OTHERS[name])
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer, "chat"))
    assert end == OTHERS[name].end
    for chat, want in zip((FOUR, SIX), TRAINED[name], strict=True):
        found = rows(tmp_path, tokenizer, chat)
        assert trained(tokenizer, found) == want
        said = f"1 conversations of demonstrations become {len(want)} rows"
        assert (said in found.warning) == (len(want) > 1)
        # The last row is the whole conversation, as the template writes it.
        template, tools = ChatTemplate(tokenizer), [TOOL] if chat == SIX else []
        whole = template.text(chat, "", asks=False, tools=tools)
        last = found.at(len(found) - 1)
        text = tokenizer.decode([*last.prompt_ids, *last.response_ids])
        assert text.removesuffix(OTHERS[name].end) == whole.rstrip().removesuffix(OTHERS[name].end)


@pytest.mark.parametrize(("name", "want"), [
    ("olmo", ["<|im_end|>", "<|endoftext|>"]), ("harmony", ["<|call|>", "<|return|>"]),
    ("glm", ["<|user|>", "<|observation|>"]), ("cohere", ["<|END|>"]), ("late tools", ["</s>"]),
])  # fmt: skip
def test_engines_stop_at_every_end(name: str, want: list[str]) -> None:
    """But not at one that is also written inside a turn, behind its thoughts."""
    tokenizer: Any = tokenizer_of(OTHERS[name])
    assert tokenizer.convert_ids_to_tokens(ends_of_turns(tokenizer, "chat")) == want


FOLLOWS = {  # {what follows the model's turn: (chat, number of the turn, whether tools are shown)}
    "a result": ([user("1+2"), CALLS, RESULT], 1, True),
    "a question": (FOUR[:3], 1, False),
    "a question after calls": (SIX[:5], 3, True),
}


@pytest.mark.parametrize("kind", FOLLOWS)
@pytest.mark.parametrize("name", [*OTHERS, *FAMILIES])
def test_the_model_reads_what_the_template_writes(name: str, kind: str) -> None:
    """In tools, agents and sessions; its own turn stays as it was written."""
    family = (OTHERS | FAMILIES)[name]
    chat, number, shows = FOLLOWS[kind]
    if name in FAMILIES and name != "chatml" and shows:
        return  # without tools
    tokenizer: Any = tokenizer_of(family)
    template, tools = ChatTemplate(tokenizer), [TOOL] if shows else []
    said = str(template.reply(chat[: number + 1], "", tools)[1])
    whole = template.text(chat, "", asks=True, tools=tools)
    texts = [TurnMarkup(tokenizer, []).following(said, chat[number], chat[number + 1 :], tools)]
    if kind == "a result":
        texts.append(TurnMarkup(tokenizer, [TOOL]).results(said, ["add"], ["7"]))
    if kind == "a question":
        codec = Codec.of(tokenizer, chats=True)
        texts.append(codec.reply("4+5", codec.encode(said)[-1]))
    if family is LATE_TOOLS and kind == "a question after calls":
        before, _, after = whole.partition("[TOOLS]")
        whole = before + after.partition("[/TOOLS]")[2]  # they were read before the first question
    for text in texts:
        assert text and unmarked(whole).endswith(unmarked(text))
        turn = whole.removesuffix(text)
        assert (
            turn.endswith(said)
            or said.endswith(("<|return|>", "<|endoftext|>"))
            or ("<think>" in said)
        )


@pytest.mark.parametrize("name", ["olmo", "glm", "harmony", "chatml"])
def test_a_turn_that_was_cut_off_or_ended_otherwise(name: str) -> None:
    family = (OTHERS | FAMILIES)[name]
    tokenizer: Any = tokenizer_of(family)
    markup, codec = TurnMarkup(tokenizer, []), Codec.of(tokenizer, chats=True)
    after = markup.following(f"3{family.end}", FOUR[1], [FOUR[2]], [])
    assert markup.following("3", FOUR[1], [FOUR[2]], []) == f"{family.end}{after}"
    assert codec.reply("4+5", codec.encode("3")[-1]) == f"{family.end}{after}"
    role = family.end if family is GLM else ""  # which the user's turn needs
    assert markup.following(f"3{family.eos}", FOUR[1], [FOUR[2]], []) == f"{role}{after}"
    assert codec.reply("4+5", tokenizer.eos_token_id) == f"{role}{after}"
    assert markup.without_closing(f"3{family.eos}") == markup.without_closing("3") == "3"


PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADDS = PHI.template.replace("{{ m.content }}", "{{ m.content + '' }}{% for c in m.tool_calls or [] %}"
                            "{{ c.function.name + c.function.arguments }}{% endfor %}")  # fmt: skip
FORMS = {  # {form: (template, chat, what is trained on)}
    "parts": (PARTS, FOUR[:2], "3<|end|>"),
    "null and objects": (ADDS, [user("1+2"), CALLS], 'add{"a": 3}<|end|>'),
    "null written": (PHI.template.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}"),
                     [user("1+2"), CALLS | {"tool_calls": [{"name": "f", "arguments": {}}]}],
                     "[{'name': 'f', 'arguments': {}}]<|end|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_chat_in_the_form_that_the_template_reads(name: str, tmp_path: Path) -> None:
    template, chat, want = FORMS[name]
    tokenizer: Any = tokenizer_of(PHI, template)
    assert trained(tokenizer, rows(tmp_path, tokenizer, chat)) == [[want]]


def test_a_session_trims_as_the_template_does() -> None:
    codec = Codec.of(tokenizer_of(FAMILIES["llama"]), chats=True)
    assert "\n\na<|eot_id|>" in codec.reply(" a \n")
    kept = Codec.of(tokenizer_of(HARMONY), chats=True)
    assert "<|message|> a \n<|end|>" in kept.reply(" a \n")
