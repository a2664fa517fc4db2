"""Preferences: what becomes of the rows of a data set, and which rows are refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import write_tokenizer
from transformers import AutoTokenizer

from megarl.apps.tune.pairs import merged, pair_batch
from megarl.data.preferences import PreferenceList, load_preferences
from megarl.settings.config import PreferenceConfig, RewardModelConfig, from_tree
from megarl.settings.data import PreferencesConfig

CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}<eos>#"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
OTHER = {"prompt": "2+2=", "chosen": "4", "rejected": "3"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def load(
    tokenizer: Any, place: Path, rows: list[Any], *, single: bool = False, **settings: Any
) -> PreferenceList:
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.chat_template = CHAT if settings.get("template") == "chat" else None
    config = PreferencesConfig(source=str(file), **settings)
    return load_preferences(config, tokenizer, seed=1, single=single)


def texts(tokenizer: Any, rows: PreferenceList, index: int) -> tuple[str, ...]:
    one = rows.row(index)
    return tuple(tokenizer.decode(ids) for ids in (one.prompt_ids, *one.responses))


def test_texts(tokenizer: Any, tmp_path: Path) -> None:
    rows = load(tokenizer, tmp_path, [PAIR, OTHER], shuffle=False)
    assert len(rows) == 2
    assert texts(tokenizer, rows, 0) == ("1+2=", "3<eos>", "4<eos>")
    assert [rows.at(n).index for n in range(4)] == [0, 1, 0, 1]
    assert not rows.at(0).is_single and rows.at(0).is_desirable and rows.at(0).margin == 0.0
    assert rows.warning == ""


USER, TURN = [{"role": "user", "content": "1+2"}], {"role": "assistant", "content": "3"}
WORSE = {"role": "assistant", "content": "4"}


def test_margins(tokenizer: Any, tmp_path: Path) -> None:
    rows = [PAIR | {"by": 0.5}, OTHER | {"by": "2"}]  # a CSV file's numbers are texts
    found = load(tokenizer, tmp_path, rows, margin_column="by")
    assert [found.row(n).margin for n in range(2)] == [0.5, 2.0]


def test_pairs_become_single_responses(tokenizer: Any, tmp_path: Path) -> None:
    """The chosen, then the rejected one; each beside a response to another prompt."""
    third = {"prompt": "1+2=", "chosen": "03", "rejected": "5"}
    rows = load(tokenizer, tmp_path, [PAIR, third, OTHER], single=True)
    assert len(rows) == 6 and all(rows.row(n).is_single for n in range(6))
    assert [rows.row(n).is_desirable for n in range(6)] == [True, False] * 3
    assert [texts(tokenizer, rows, n) for n in range(6)] == [
        ("1+2=", "3<eos>", "4<eos>"),  # row 1 has the same prompt, so it is row 2's
        ("1+2=", "4<eos>", "3<eos>"),
        ("1+2=", "03<eos>", "4<eos>"),
        ("1+2=", "5<eos>", "3<eos>"),
        ("2+2=", "4<eos>", "3<eos>"),
        ("2+2=", "3<eos>", "4<eos>"),
    ]


def test_single_responses(tokenizer: Any, tmp_path: Path) -> None:
    labels: list[Any] = [True, "false", 1, "0"]
    rows = [{"prompt": f"{n}=", "text": str(n), "good": label} for n, label in enumerate(labels)]
    columns: dict[str, Any] = {"response_column": "text", "label_column": "good"}
    found = load(tokenizer, tmp_path, rows, single=True, **columns)
    assert [found.row(n).is_desirable for n in range(4)] == [True, False, True, False]
    assert texts(tokenizer, found, 3) == ("3=", "3<eos>", "0<eos>")


def test_the_fingerprint_covers_everything(tokenizer: Any, tmp_path: Path) -> None:
    rows = [PAIR | {"by": 1}, OTHER | {"by": 1}]
    changed = [
        load(tokenizer, tmp_path, rows),
        load(tokenizer, tmp_path, rows, shuffle=False),
        load(tokenizer, tmp_path, rows, single=True),
        load(tokenizer, tmp_path, rows, margin_column="by"),
        load(tokenizer, tmp_path, rows[::-1]),
        load(tokenizer, tmp_path, [PAIR | {"chosen": "03"}, OTHER]),
        load(tokenizer, tmp_path, [PAIR | {"rejected": "5"}, OTHER]),
    ]
    assert len({one.fingerprint for one in changed}) == len(changed)
    digests = [one.digest for one in changed]
    assert digests[0] == digests[1] == digests[3], "token ids alone decide"
    assert len(set(digests)) == len(changed) - 2


def test_a_batch(tokenizer: Any, tmp_path: Path) -> None:
    rows = load(tokenizer, tmp_path, [PAIR, OTHER | {"chosen": "04"}])
    batch = pair_batch([rows.row(1), rows.row(0)], np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert batch.reference.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert batch.samples.ids.tolist() == [0, 1, 2, 3]
    assert batch.num_tokens.tolist() == [[3, 2], [2, 2]]
    assert batch.side(1).ids.tolist() == [1, 3]
    assert batch.margins.tolist() == [0.0, 0.0] and batch.is_desirable.tolist() == [True, True]
    judged = load(tokenizer, tmp_path, [PAIR | {"by": 0.5}, OTHER | {"by": 2}], margin_column="by")
    assert pair_batch([judged.row(1), judged.row(0)], None).margins.tolist() == [2.0, 0.5]
    single = load(tokenizer, tmp_path, [PAIR, OTHER], single=True)
    rows = pair_batch([single.row(n) for n in (1, 2, 3)], None)
    assert rows.is_desirable.tolist() == [False, True, False] and not rows.reference.any()
    whole = merged([batch, batch])
    assert whole is not None and whole.samples.ids.tolist() == list(range(8))
    assert whole.reference.tolist() == 2 * batch.reference.tolist() and merged([]) is None
    assert batch.samples.mask.tolist()[:7] == [False] * 4 + [True] * 3


def test_rows_that_are_too_long(tokenizer: Any, tmp_path: Path) -> None:
    """The prompt is cut, as far as the longer of the two responses needs it; KTO's too."""
    long = {"prompt": "1+2+3=", "chosen": "345", "rejected": "4"}
    cut: dict[str, Any] = {"too_long": "truncate_left"}
    with pytest.raises(
        ValueError, match=r"^1 of 2 rows .*= 7 \(the longest 10\).*row 0.* with 10;"
    ):
        load(tokenizer, tmp_path, [long, PAIR], max_tokens=7)
    found = load(tokenizer, tmp_path, [long, PAIR], max_tokens=7, **cut)
    assert texts(tokenizer, found, 0) == ("+3=", "345<eos>", "4<eos>")
    found = load(tokenizer, tmp_path, [long, PAIR], max_tokens=7, too_long="drop")
    assert found.fingerprint == load(tokenizer, tmp_path, [PAIR]).fingerprint
    found = load(tokenizer, tmp_path, [long, PAIR], max_tokens=8, single=True, **cut)
    assert texts(tokenizer, found, 1) == ("2+3=", "4<eos>", "4<eos>")


@pytest.mark.parametrize("too_long", ["drop", "truncate_left"])
def test_a_response_to_another_prompt_that_is_too_long(
    too_long: str, tokenizer: Any, tmp_path: Path
) -> None:
    """KTO's estimate of the divergence reads the end of a prompt; what is trained on stays."""
    wide = {"prompt": "1+2+3=", "chosen": "6", "rejected": "5"}
    long = {"prompt": "2=", "chosen": "34567", "rejected": "4"}
    single: dict[str, Any] = {"single": True, "shuffle": False}
    with pytest.raises(ValueError, match=r"response to another prompt.* has 12 tokens.* is 8"):
        load(tokenizer, tmp_path, [wide, long], **single, max_tokens=8)
    found = load(tokenizer, tmp_path, [wide, long], **single, max_tokens=8, too_long=too_long)
    whole = load(tokenizer, tmp_path, [wide, long], **single)
    assert found.longest == 8 and "1 of 4 prompts" in found.warning
    for n in range(4):
        one, same = found.row(n), whole.row(n)
        assert (one.prompt_ids, one.responses[0]) == (same.prompt_ids, same.responses[0])
    assert found.fingerprint != whole.fingerprint and found.digest != whole.digest
    samples = pair_batch([found.row(n) for n in range(4)], None).samples
    shown = [tokenizer.decode(one) for one in np.split(samples.token_ids, samples.offsets[1:-1])]
    assert shown[:4] == ["1+2+3=6<eos>", "3=34567<eos>", "1+2+3=5<eos>", "1+2+3=4<eos>"]
    assert shown[4::2] == ["2=34567<eos>", "2=4<eos>"]


WRONG: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "no rejected side": ([{"prompt": "1", "chosen": "2"}], {}, r"no column 'rejected'.*rejected_c"),
    "equal sides": ([PAIR, PAIR | {"rejected": "3"}], {}, r"row 1.*are equal"),
    "equal but for ends": ([OTHER | {"rejected": "4<eos>\n <eos> "}], {}, r"row 0.*are equal"),
    "equal as written": ([{"prompt": "1+2", "chosen": "3", "rejected": "3<eos>"}],
     {"template": "chat"}, r"row 0.*are equal"),
    "equal tokens": ([PAIR | {"chosen": "3\u00e9", "rejected": "3\u00e8"}], {},
     r"row 0.*are equal"),
    "empty side": ([PAIR | {"rejected": " "}], {}, r"response \(column 'rejected'\) is empty"),
    "a list": ([PAIR | {"chosen": [TURN]}], {}, "template to 'chat'"),
    "too long": ([PAIR], {"max_tokens": 5},
     r"1 of 1 rows .*preferences\.max_tokens = 5 \(the longest 6"),
    "margin": ([PAIR | {"by": "much"}], {"margin_column": "by"}, "the margin .* is 'much'"),
    "label": ([{"prompt": "1", "r": "2", "label": "yes"}], {"response_column": "r", "single": True},
     "label .* is 'yes', not true or false"),
    "one label": ([{"prompt": "1", "r": "2", "label": True}, {"prompt": "2", "r": "2", "label": 1}],
     {"response_column": "r", "single": True}, "all responses are desirable"),
    "one prompt": ([PAIR, PAIR | {"chosen": "5"}], {"single": True}, "all rows have the same prom"),
    "other prompts": ([{"chosen": [*USER, TURN],
     "rejected": [{"role": "user", "content": "2"}, WORSE]}], {"template": "chat"},
     "differ before their last turn"),
    "ends with the user": ([{"chosen": [*USER, TURN, *USER], "rejected": [*USER, TURN, *USER]}],
     {"template": "chat"}, "ends with a turn of 'user'"),
    "a reply alone": ([{"chosen": [TURN], "rejected": [WORSE]}], {"template": "chat"}, "no column"),
    "no user": ([{"chosen": [{"role": "system", "content": "x"}, TURN],
     "rejected": [USER[0], WORSE]}], {"template": "chat"}, "system message only"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named(name: str, tokenizer: Any, tmp_path: Path) -> None:
    rows, settings, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        load(tokenizer, tmp_path, rows, **settings)


RECIPES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no data": (PreferenceConfig, {"preferences": {}}, r"preferences\.source is empty"),
    "single responses": (PreferenceConfig, {"preferences": {"source": "x", "response_column": "r"}},
     "'dpo' needs pairs"),
    "single responses for rewards": (RewardModelConfig,
     {"preferences": {"source": "x", "response_column": "r"}}, "learns from pairs"),
    "margins": (PreferenceConfig, {"preferences": {"source": "x", "margin_column": "m"}},
     "only task: reward_model uses"),
    "a reference without use": (PreferenceConfig,
     {"loss": {"method": "simpo"}, "reference": {"cache": "x"}},
     "reference has settings, but loss.method uses no reference"),
    "a reference without path": (PreferenceConfig, {"reference": {"model": {"tokenizer": "x"}}},
     "settings, but no path"),
    "mini-batches": (RewardModelConfig, {"training": {"num_mini_batches": 2}}, "leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_recipe_is_refused(name: str) -> None:
    kind, changes, said = RECIPES[name]
    tree = {"folder": "x", "model": {"path": "x"}, "preferences": {"source": "x"}} | changes
    with pytest.raises(ValueError, match=said):
        from_tree(kind, tree, where="recipe")


HH = "\n\nHuman: 1+2=\n\nAssistant: 3\n\nHuman: +1=\n\nAssistant: "
SHARED = [{"from": "human", "value": "1+2"}]
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "HH": ({"chosen": HH + "4", "rejected": HH + "3"},
     {side: [*({"role": role, "content": said} for role,
     said in (("user", "1+2="), ("assistant", "3"), ("user", "+1="),
     ("assistant", reply)))] for side, reply in (("chosen", "4"), ("rejected", "3"))}, "'Human:'"),
    "ShareGPT pairs": ({"conversations": SHARED, "chosen": {"from": "gpt", "value": "3"},
     "rejected": {"from": "gpt", "value": "4"}},
     {"chosen": [*USER, TURN], "rejected": [*USER, WORSE]}, "ShareGPT pairs"),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_pairs_of_others_are_recognised(
    form: str, tokenizer: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, ours, says = OTHERS[form]
    found = load(tokenizer, tmp_path, [theirs], template="chat")
    assert says in capfd.readouterr().err
    wanted = load(tokenizer, tmp_path, [ours], template="chat")
    assert found.row(0) == wanted.row(0) and found.fingerprint == wanted.fingerprint
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match=r"set preferences.template to 'chat'"):
        load(tokenizer, tmp_path, [theirs])
    if form == "HH":
        with pytest.raises(ValueError, match=r"row 1.*does not begin with a turn 'Human:'"):
            load(tokenizer, tmp_path, [theirs, theirs | {"chosen": "4"}], template="chat")


def test_a_prompt_is_not_read_twice(tokenizer: Any, tmp_path: Path) -> None:
    for asked in (HH, "1+2=", "q "):
        row = {"prompt": asked, "chosen": asked + "4", "rejected": asked + "3"}
        with pytest.raises(ValueError, match=r"begin with the text of 'prompt'.*drop the column"):
            load(tokenizer, tmp_path, [row, row])
        named: dict[str, Any] = {"prompt_column": "x.q", "chosen_column": "good"}
        row = {"x": {"q": asked}, "good": row["chosen"], "rejected": row["rejected"]}
        said = r"'good' and 'rejected' begin with the text of 'x\.q'"
        for settings in ({}, {"template": "chat"}):
            with pytest.raises(ValueError, match=said):
                load(tokenizer, tmp_path, [row, row], **named, **settings)
        single = [{"prompt": asked, "completion": f"{asked}{n}", "label": n > 1} for n in range(3)]
        for settings in ({}, {"response_column": "completion"}):
            with pytest.raises(ValueError, match="'completion' begin with the text of 'prompt'"):
                load(tokenizer, tmp_path, single, single=True, **settings)


def test_single_responses_need_no_names(
    tokenizer: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}=", "completion": str(n), "label": n % 2 == 0} for n in range(4)]
    found = load(tokenizer, tmp_path, rows, single=True)
    assert "with a label" in capfd.readouterr().err
    named = load(tokenizer, tmp_path, rows, single=True, response_column="completion")
    assert found.fingerprint == named.fingerprint and found.row(3) == named.row(3)
    with pytest.raises(ValueError, match=r"only KTO trains; set loss.method to 'kto'"):
        load(tokenizer, tmp_path, rows)
