"""What a judge reads and how its verdict is read, and what recipes of reward engines are refused.
The engines themselves: tests/system/test_reward_engines.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documented import block
from support.environments import PROMPT
from support.reward_servers import serving
from support.tiny import write_classifier, write_model, write_tokenizer

from megarl.apps.serve.judge import (
    JudgePrompt,
    ServedJudge,
    VerdictReader,
    field_values,
    judge_response,
    parse_template,
)
from megarl.apps.serve.reward_server import Backend, RewardServer
from megarl.apps.serve.serve_reward import check_serve_reward
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.scores import BadScore, Outcome
from megarl.errors import ProcessLost
from megarl.settings.config import from_tree
from megarl.settings.environments import RewardServerConfig
from megarl.settings.serve import JudgeConfig, ServeRewardConfig
from megarl.settings.training import ModelConfig
from megarl.types import Prompt

# What the judge writes

YES_NO = {"yes": 1.0, "No": 0.0, "not sure": 0.5}


@pytest.mark.parametrize(("pattern", "choices", "text", "score"), [
    (r"Score: (\d+)", {}, "Score: 3, no. Score: 8", 8.0),
    (r"Score: (-?\d+(?:\.\d+)?)", {}, "Score: -2.5", -2.5),
    (r"\[\[(\w+)\]\]", {"A": 1.0, "B": -1.0}, "[[a]] or rather [[ B ]] [[b]]", -1.0),
    ("", YES_NO, "No... yes, YES.", 1.0),
    ("", YES_NO, "yes or no", 0.0),
    ("", YES_NO, "Yes! I am not\n sure", 0.5),
    ("", YES_NO, "know yesterday no1", None),
    ("", {"correct": 1.0, "incorrect": 0.0}, "It is incorrect.", 0.0),
    ("", {"sure": 1.0, "sure not": 0.0}, "sure not", 0.0),
    ("", {"a.c": 1.0}, "abc", None),
    (r"Score: (\w+)", {}, "Score: nan", None),
    (r"Score: (\d+)?", {}, "Score: 3, Score: ", None),
    (r"\[\[(\w+)\]\]", {"A": 1.0}, "[[A]] [[C]]", None),
    ("", YES_NO, "", None),
])  # fmt: skip
def test_the_last_verdict_counts(
    pattern: str, choices: dict[str, float], text: str, score: float | None
) -> None:
    reader = VerdictReader(JudgeConfig(verdict=pattern, choices=choices))
    if score is None:
        with pytest.raises(BadScore, match="the judge"):
            reader.read(text)
    else:
        assert reader.read(text) == score


def test_numbers_are_scaled_and_none_is_cut_to_the_range() -> None:
    reader = VerdictReader(JudgeConfig(verdict=r"(-?\d+)", lowest=1.0, highest=5.0))
    assert [reader.read(text) for text in ("1", "2", "5")] == [0.0, 0.25, 1.0]
    for text in ("0", "6", "-3"):
        with pytest.raises(BadScore, match=rf"is {text}, not from judge.lowest 1 to judge.highest"):
            reader.read(text)


@pytest.mark.parametrize(("pattern", "says"), [
    ("yes|no", "has 0 groups; set one with exactly one group"),
    ("(a)(b)", "has 2 groups"),
    ("(a", "is no regular expression"),
])  # fmt: skip
def test_patterns_that_are_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"judge\.verdict") as told:
        VerdictReader(JudgeConfig(verdict=pattern))
    assert says in str(told.value)


# What the judge reads


@pytest.mark.parametrize(("template", "says"), [
    ("{prompt}", "has no field {response}, so that the judge would not see"),
    ("{response} {question}", "has '{question}', which is none of the fields {prompt}, {response},"),
    ("{response} {fields.}", "has '{fields.}', which is none"),
    ("{response:>9}", "has '{response:>9}', which is none"),
    ('{response} {"score": 1}', "write {{ and }} for braces that are no field"),
    ("{response} }", "has a single brace"),
    ("{response} {prompt", "has a single brace"),
])  # fmt: skip
def test_templates_that_are_refused(template: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^judge\.template has") as told:
        parse_template(template, "judge.template")
    assert says in str(told.value)


def test_a_template_is_cut_at_its_fields() -> None:
    parts = parse_template('{prompt}: {response}{fields.a.b} {{"score": 1}}', "x")
    assert [field for _, field in parts if field] == ["prompt", "response", "fields.a.b"]
    whole = "".join(text + (field and f"<{field}>") for text, field in parts)
    assert whole == '<prompt>: <response><fields.a.b> {"score": 1}'


def test_values_of_a_row() -> None:
    prompt = replace(PROMPT, answer="", fields={"a": {"b": 1.5}, "list": ["é"], "none": None})
    found = field_values(["fields.a.b", "fields.list", "prompt"], prompt, "r")
    assert found["fields.a.b"] == "1.5" and found["fields.list"] == '["é"]'
    for field, says in (
        ("answer", "no reference answer"),
        ("fields.c", "no column 'c'"),
        ("fields.none", "'none' is null"),
    ):
        with pytest.raises(ValueError, match=says):
            field_values([field], prompt, "r")


PLAIN = JudgeConfig(chat=False)
CHAT = "{% for m in messages %}<eos>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}<eos>a:"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    found = load_tokenizer(str(folder))
    found.chat_template = CHAT
    return found


def test_a_filled_in_text_is_not_expanded_again(tokenizer: Any) -> None:
    made = JudgePrompt(tokenizer, PLAIN, "{response}+{answer}+{response}")
    filled = {"response": "{answer}{{", "answer": "{response}"}
    text = "{answer}{{+{response}+{answer}{{"
    assert made.ids(filled) == tokenizer(text).input_ids


def test_plain_text_is_tokenised_as_a_whole(tokenizer: Any) -> None:
    made = JudgePrompt(tokenizer, JudgeConfig(system="b a"), "1+{response}")
    turns = [{"role": "system", "content": "b a"}, {"role": "user", "content": "1+12"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert made.ids({"response": "12"}) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE with merges, as most models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>", "<|judge|>"],
    )
    plain.train_from_iterator(["Score: 7 the answer is seven <think> hmm </think>"] * 9, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|end|>", pad_token="<|end|>", unk_token=None
    )
    found.add_tokens(["<think>", "</think>", "<tool>"])  # not special
    found.chat_template = (
        "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|judge|><think>"
    )
    return found


ADDED = ("<|end|>", "<|user|>", "<|judge|>", "<think>", "</think>", "<tool>")
PARTS = (*ADDED, "Score", ": 7", " the ", "{response}", "<|", "end|>", "</", "think>", "\n")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.booleans())
def test_the_text_of_a_judge_is_the_templates_with_the_response_as_text(
    words: Any, response: str, chat: bool
) -> None:
    """For responses of the pieces of which added tokens are made, special or not."""
    made = JudgePrompt(words, JudgeConfig(chat=chat), "Score {response} the answer<|end|> is")
    ids = made.ids({"response": response})
    whole = f"Score {response} the answer<|end|> is"
    if chat:
        turns = [{"role": "user", "content": whole}]
        whole = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert words.decode(ids) == whole
    control = set(words.convert_tokens_to_ids(list(ADDED)))
    assert sum(one in control for one in ids) == (5 if chat else 1)
    if not any(part in response for part in ADDED):
        assert ids == words(whole, add_special_tokens=False).input_ids


# The verdicts of a response


def ruled(
    tokenizer: Any, texts: Sequence[str], response: str = "7", **changes: Any
) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a judge that writes `texts`, and what vLLM was asked. A text that ends with
    "..." is cut off.
    """
    settings: dict[str, Any] = {"template": "{response}", "verdict": "([0-9])", "chat": False}
    config = JudgeConfig(model=ModelConfig(path="x"), **settings | changes)
    requested: dict[str, Any] = {}

    async def ask(route: str, request: dict[str, Any]) -> dict[str, Any]:
        requested.update(request)
        assert (route, request["n"]) == ("/v1/completions", len(texts))
        return {
            "choices": [
                {"text": text, "finish_reason": "length" if text.endswith("...") else "stop"}
                for text in texts
            ]
        }

    judge = ServedJudge(
        config,
        max_tokens=600,
        prompt=JudgePrompt(tokenizer, config, config.template),
        reader=VerdictReader(config),
        stop_token_ids=[5],
    )
    try:
        return asyncio.run(judge_response(judge, ask, PROMPT, response)), requested
    except BadScore as error:
        return Outcome(failure=error.failure, detail=str(error)), requested


def test_a_verdict_in_the_response_counts_for_nothing(tokenizer: Any) -> None:
    outcome, request = ruled(tokenizer, ["a b"], response="9 9<eos>9")
    assert outcome.failure == "error" and "wrote no verdict: 'a b'" in outcome.detail
    assert request["prompt"].count(tokenizer.eos_token_id) == 0
    assert ruled(tokenizer, ["3"], response="9 9")[0].score == 3.0


def test_a_text_that_was_cut_off_has_no_verdict(tokenizer: Any) -> None:
    found, _ = ruled(tokenizer, ["3 but..."])
    assert found.failure == "error" and "cut off at judge.max_new_tokens 512" in found.detail
    assert ruled(tokenizer, ["3 but..."], require_stop=False)[0].score == 3.0


def test_several_verdicts_are_averaged(tokenizer: Any) -> None:
    many = {"samples": 4, "temperature": 0.7}
    outcome, request = ruled(tokenizer, ["3", "a", "6", "9..."], **many)
    assert (outcome.score, outcome.metrics, outcome.failure) == (4.5, {"unread": 0.5}, "")
    assert (request["temperature"], request["max_tokens"]) == (0.7, 512)
    assert request["stop_token_ids"] == [5]
    assert ruled(tokenizer, ["a"] * 4, **many)[0].failure == "error"
    unbounded, _ = ruled(tokenizer, ["1" + "0" * 12], verdict="([0-9]+)")
    assert unbounded.failure == "error"


# The server


def test_a_lost_engine_is_503_and_ends_the_server() -> None:
    async def score(prompt: Prompt, response: str) -> Outcome:
        raise ProcessLost("vLLM's process has died")

    server, told = RewardServer(Backend(score, 1), RewardServerConfig(), None), list[bool]()
    server.on_lost = lambda: told.append(True)
    body = {"samples": [{"prompt": {}, "response": "7"}] * 3}
    with serving(server) as url:
        assert requests.post(url, json=body, timeout=10).status_code == 503
        assert server.lost == "vLLM's process has died" and told


def test_a_call_that_nobody_waits_for_is_cancelled() -> None:
    ended: list[str] = []

    async def score(prompt: Prompt, text: str) -> Outcome:
        try:
            await asyncio.sleep(0 if text == "quick" else 60)
        except asyncio.CancelledError:
            ended.append(text)
            raise
        return Outcome(1.0)

    server = RewardServer(Backend(score, 1), RewardServerConfig(), None)

    def ask(text: str, timeout: float) -> requests.Response:
        body = {"samples": [{"prompt": {}, "response": text}]}
        return requests.post(url, json=body, timeout=timeout)

    with serving(server) as url:
        with pytest.raises(requests.Timeout):
            ask("slow", 0.3)
        assert ask("quick", 10).json() == {"scores": [{"reward": 1.0, "correct": None}]}
    assert ended == ["slow"]


# Recipes

JUDGE = {"model": {"path": "JUDGE"}, "template": "{response}", "verdict": "(1)", "chat": False,
         "max_new_tokens": 8}  # fmt: skip
MODEL = {"model": {"path": "MODEL"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "JUDGE")
    write_classifier(folder / "MODEL")
    write_classifier(folder / "WIDE", head_dim=48)
    two = write_classifier(folder / "TWO")
    settings = json.loads((two / "config.json").read_text())
    settings["id2label"], settings["label2id"] = {"0": "a", "1": "b"}, {"a": 0, "b": 1}
    (two / "config.json").write_text(json.dumps(settings))
    from safetensors.torch import load_file, save_file

    weights = load_file(two / "model.safetensors")
    head = weights.pop("score.weight")
    save_file(weights, write_classifier(folder / "HEADLESS") / "model.safetensors")
    save_file(weights | {"score.weight": head.repeat(2, 1)}, two / "model.safetensors")
    (folder / "judge.txt").write_text("{response} {question}")
    return folder


def checked(place: Path, tree: dict[str, Any]) -> str:
    """What the checks say of a recipe, in which capitals are folders of `place`."""
    text = re.sub(r'"([A-Z]{3,}|judge\.txt)"', rf'"{place}/\1"', json.dumps(tree))
    tree = {"folder": str(place / "run")} | json.loads(text)
    return str(check_serve_reward(from_tree(ServeRewardConfig, tree, where="recipe")))


def test_recipes_that_pass(place: Path) -> None:
    assert checked(place, {"judge": JUDGE}) == f"judge {place}/JUDGE, without a token"
    found = checked(place, {"reward_model": MODEL})
    assert found == f"reward model {place}/MODEL, without a token"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"judge": JUDGE, "reward_model": MODEL}, "reward_model and judge are both set"),
    "judge and verifier": ({"judge": JUDGE, "environment": {"verifier": "math"}},
                           "judge and environment are both set"),
    "no judge": ({"judge": {"template": "{response}"}}, "judge has settings, but no model.path"),
    "no template": ({"judge": JUDGE | {"template": ""}}, "judge.template_file are both empty"),
    "two templates": ({"judge": JUDGE | {"template_file": "judge.txt"}}, "judge.txt' beside judge.template; set one"),
    "template": ({"judge": JUDGE | {"template": "{prompt}"}}, "judge.template has no field"),
    "file": ({"judge": JUDGE | {"template": "", "template_file": "judge.txt"}},
             "judge.txt' has '{question}', which is none"),
    "no file": ({"judge": JUDGE | {"template": "", "template_file": "no.txt"}},
                "judge.template_file 'no.txt' cannot be read"),
    "chat": ({"judge": JUDGE | {"chat": True}}, "judge.chat is true, but the judge's tokenizer has"),
    "system": ({"judge": JUDGE | {"system": "x"}}, "judge.system is 'x', but judge.chat is false"),
    "no verdict": ({"judge": JUDGE | {"verdict": ""}}, "judge.verdict and judge.choices are both"),
    "groups": ({"judge": JUDGE | {"verdict": "1"}}, "judge.verdict '1' has 0 groups"),
    "choices": ({"judge": JUDGE | {"choices": {"a": 1.0, "A ": 0.0}}}, "judge.choices has an empty"),
    "lowest": ({"judge": JUDGE | {"lowest": 1.0}}, "one is set without the other"),
    "range": ({"judge": JUDGE | {"lowest": 2.0, "highest": 2.0}}, "set highest above lowest"),
    "choices in a range": ({"judge": JUDGE | {"choices": {"1": 1.0}, "lowest": 0.0, "highest": 1.0}},
                           "judge.choices has settings beside judge.lowest; set one"),
    "samples": ({"judge": JUDGE | {"samples": 2}}, "judge.samples is 2, but judge.temperature is 0"),
    "positions": ({"judge": JUDGE | {"max_tokens": 257}}, "judge.max_tokens is 257, but the model's"),
    "room": ({"judge": JUDGE | {"max_tokens": 8}}, "judge.max_tokens is 8, but the template has 0"),
    "classifier": ({"judge": JUDGE | {"model": {"path": "MODEL"}}}, "config.json of judge.model.path"
                   " has architectures ['Qwen2ForSequenceClassification']"),
    "random": ({"judge": JUDGE | {"model": {"path": "JUDGE", "from_scratch": True}}},
               "judge.model.from_scratch is true"),
    "language model": ({"reward_model": MODEL | {"model": {"path": "JUDGE"}}},
                       "config.json of reward_model.model.path has architectures"),
    "two labels": ({"reward_model": MODEL | {"model": {"path": "TWO"}}},
                   "is a classifier with 2 labels, but a reward model has one"),
    "no head": ({"reward_model": MODEL | {"model": {"path": "HEADLESS"}}},
                "has none of the tensors score.weight"),
    "no model": ({"reward_model": MODEL | {"model": {"path": "NOWHERE"}}}, "reward_model.model.path"),
    "heads": ({"reward_model": MODEL | {"engine": {"tensor": 4}}}, "reward_model.engine.tensor is 4"),
    "head width": ({"reward_model": MODEL | {"model": {"path": "WIDE"}}}, "heads are 48 wide"),
    "backend": ({"reward_model": MODEL | {"backend": "torch"}}, "now needless, as vLLM runs"),
    "seed": ({"judge": JUDGE | {"seed": 1}}, "now needless, as verdicts have no seeds"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_recipes_that_are_refused(case: str, place: Path) -> None:
    tree, says = WRONG[case]
    with pytest.raises(ValueError) as told:  # noqa: PT011 - the message is compared below
        checked(place, tree)
    assert says in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("head", ["yaml reward_engine", "yaml judge"])
def test_the_recipes_of_the_documentation(head: str) -> None:
    tree = {"folder": "x"} | yaml.safe_load(block(head))
    config = from_tree(ServeRewardConfig, tree, where="the page")
    if (judge := config.judge).model.path:
        fields = [field for _, field in parse_template(judge.template, "judge.template")]
        assert fields == ["fields.question", "answer", "response", ""]
        reader = VerdictReader(judge)
        assert reader.read("Sound. Score: 7") == 0.7
    else:
        assert config.reward_model.engine.dtype == "float32"
