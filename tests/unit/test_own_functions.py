"""Functions of a user's own file in the place of those of the house, and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documented import block

from megarl.environments.user_code import function_of
from megarl.objectives.advantages import ADVANTAGES
from megarl.settings.config import RunConfig, from_tree, read
from megarl.settings.schema import replace
from megarl.trainer.own_functions import Trial, try_filter, try_objectives
from megarl.types import Prompt

RIGHT = """
import torch
from megarl.objectives.losses import LossTerms

def advantage(rewards_N, groups_N, tokens_N):
    return rewards_N - rewards_N.mean()

def by_token(step, config):
    return step.rewards * step.mask

def loss(logp_T, old_T, advantages_T, sequence_mean, config):
    return -(logp_T - old_T).exp() * advantages_T

def of_terms(logp_T, old_T, advantages_T, sequence_mean, config):
    return LossTerms(-sequence_mean(logp_T) * advantages_T, logp_T > 0, logp_T.exp().detach())

def reporting(logp_T, old_T, advantages_T, sequence_mean, config):
    return loss(logp_T, old_T, advantages_T, sequence_mean, config), {"gap": logp_T - old_T}

def correction(trainer_logp_T, engine_logp_T, sequence_sum, config):
    return sequence_sum(trainer_logp_T - engine_logp_T).exp().clamp(max=config.upper)

def keep(group):
    return max(one.reward for one in group.rollouts) > 0.5

def method(parts, batch):
    return None
"""

KEYS = {
    "algorithm.advantage": "advantage",
    "algorithm.loss": "loss",
    "algorithm.correction.kind": "correction",
    "rollout.filter": "keep",
    "algorithm.method": "method",
}
"""{key: function of `RIGHT`}"""


class Prompts(list[Prompt]):
    def at(self, ordinal: int) -> Prompt:
        return self[ordinal]


def recipe(key: str, value: str) -> RunConfig:
    section, _, rest = key.partition(".")
    inner: Any = value
    for part in reversed(rest.split(".")):
        inner = {part: inner}
    tree = {"folder": "run", "model": {"path": "m"}, "prompts": {"source": "p.jsonl"}}
    return from_tree(RunConfig, tree | {section: inner}, where="recipe")


def attempt(key: str, value: str) -> None:
    config = recipe(key, value)
    try_objectives(config, torch.device("cpu"), has_empty_ranks=True)
    try_filter(config, Prompts([Prompt(0, "1+1=", [4, 5], "2")]))  # pyright: ignore[reportArgumentType]


def test_a_setting_of_ones_own_needs_a_function_of_ones_own() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.own is for functions of your own, but"):
        recipe("algorithm.own.beta", "5")


def test_functions_of_one_file_share_its_globals(tmp_path: Path) -> None:
    file = tmp_path / "shared.py"
    file.write_text(
        "seen = []\n\ndef loss():\n    seen.append(1)\n\ndef count():\n    return len(seen)\n"
    )
    loss = function_of(f"{file}:loss", {}, "algorithm.loss")
    count = function_of(f"{file}:count", {}, "algorithm.method")
    loss()
    assert count() == 1
    # Another content, as a test or a notebook writes it, is another module.
    file.write_text(file.read_text().replace("len(seen)", "len(seen) + 5"))
    assert function_of(f"{file}:count", {}, "rollout.filter")() == 5


@pytest.mark.parametrize(("key", "function"), [
    *KEYS.items(),
    ("algorithm.advantage", "by_token"),
    ("algorithm.loss", "of_terms"),
    ("algorithm.loss", "reporting"),
])  # fmt: skip
def test_a_function_of_a_file_passes(key: str, function: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(RIGHT)
    attempt(key, f"{tmp_path}/own.py:{function}")


@pytest.mark.parametrize("key", KEYS)
def test_the_example_of_the_page_passes(key: str, tmp_path: Path) -> None:
    name = key.removesuffix(".kind").partition(".")[2]
    text = block(f"python own_{name}")
    assert len(text.splitlines()) <= 15, "short enough to be read"
    (tmp_path / "own.py").write_text(text)
    (function,) = re.findall(r"^def (\w+)", text, re.M)
    attempt(key, f"{tmp_path}/own.py:{function}")


def test_an_advantage_of_critics(tmp_path: Path) -> None:
    """What it gets of them in the trial, what is refused, and what a run may stop by."""
    own = "def f(step, config):\n    return step.critics['a'] - step.critics['b']\n\n"
    (tmp_path / "own.py").write_text(own + RIGHT)
    tree = recipe("algorithm.advantage", f"{tmp_path}/own.py:f").model_dump()

    def read_with(**sections: Any) -> RunConfig:
        return from_tree(
            RunConfig, tree | {"critics": {"a": {}, "b": {}}} | sections, where="recipe"
        )

    try_objectives(read_with(), torch.device("cpu"), has_empty_ranks=True)
    of_two = read_with(critics={"a": {"warmup_steps": 3}, "b": {}}).all_critics
    assert list(of_two) == ["critics.a", "critics.b"]
    of_samples = {"advantage": f"{tmp_path}/own.py:advantage"}
    wrong, alone = read_with(algorithm=of_samples), read_with(critics={"a": {}})
    with pytest.raises(ValueError, match="of each sample, without critics"):
        try_objectives(wrong, torch.device("cpu"), has_empty_ranks=False)
    with pytest.raises(ValueError, match="KeyError"):
        try_objectives(alone, torch.device("cpu"), has_empty_ranks=False)
    read_with(early_stop={"metric": "critics.b/loss", "at_most": 0.1})
    with pytest.raises(ValueError, match=r"no step .* has; did you mean 'critics.b/loss'"):
        read_with(early_stop={"metric": "critics.c/loss", "at_most": 0.1})
    with pytest.raises(ValueError, match=r"critics.a.warmup_steps is 9999 and steps"):
        read_with(critics={"a": {"warmup_steps": 9999}})
    with pytest.raises(ValueError, match="at most 64 letters"):
        read_with(critics={"a" * 65: {}})


ADVANTAGE = "def f(rewards_N, groups_N, tokens_N):\n    return "
LOSS = "def f(logp_T, old_T, advantages_T, sequence_mean, config):\n    return "
CORRECTION = "def f(trainer_logp_T, engine_logp_T, sequence_sum, config):\n    return "
WRONG: dict[str, tuple[str, str, list[str]]] = {
    "advantage raises": ("advantage", ADVANTAGE + "nothing", ["line 2", "NameError", "mend"]),
    "advantage has one argument": (
        "advantage", "x = 1\ndef f(rewards):\n    return rewards",
        ["line 2", "TypeError", "(rewards_N, groups_N, tokens_N)"]),
    "advantage of a group": ("advantage", ADVANTAGE + "rewards_N[:2]", ["[2]", "[N]", "[8]"]),
    "advantage is no tensor": ("advantage", ADVANTAGE + "[0.0]", ["list", "[N]"]),
    "advantage divides by 0": (
        "advantage", ADVANTAGE + "(rewards_N - 0.5) / (rewards_N - 0.5).abs()",
        ["NaN", "equal rewards"]),
    "advantage of int": ("advantage", ADVANTAGE + "groups_N", ["int64", "float64"]),
    "token advantage of samples": (
        "advantage", "def f(step, config):\n    return step.rewards[:3]", ["shape [3]", "[T]"]),
    "loss has no gradient": (
        "loss", LOSS + "-logp_T.detach() * advantages_T", ["no gradient", "detach"]),
    "loss of another tensor": (
        "loss", LOSS + "advantages_T.clone().requires_grad_()", ["no gradient"]),
    "loss is a sum": ("loss", LOSS + "(-logp_T * advantages_T).sum()", ["shape []", "[T]"]),
    "loss has NaN gradient": (
        "loss", LOSS + "(logp_T - logp_T.detach()).abs().sqrt()", ["gradient of NaN"]),
    "loss is empty on a rank": (
        "loss", LOSS + "-logp_T * advantages_T / logp_T.abs().max()", ["line 2", "RuntimeError"]),
    "loss reports a mean": (
        "loss", LOSS + "(-logp_T * advantages_T, {'m': logp_T.mean()})", ["metric 'm'", "[T]"]),
    "loss returns two tensors": (
        "loss", LOSS + "-logp_T * advantages_T, logp_T", ["tuple", "{name: [T]}"]),
    "loss is a class": ("loss", "class f:\n    pass", ["is a class"]),
    "loss is a generator": ("loss", "def f(*_):\n    yield 1", ["generator"]),
    "loss is no function": ("loss", "f = 3\ndef g():\n    pass", ["is int", "g"]),
    "no such function": ("loss", "def g():\n    pass", ["no function 'f'", "g"]),
    "file is no Python": ("loss", "def f(:", ["does not import", "SyntaxError", "line 1"]),
    "correction raises": ("correction", CORRECTION + "1 / 0", ["line 2", "ZeroDivision"]),
    "correction of samples": (
        "correction", CORRECTION + "trainer_logp_T.new_ones(8)", ["shape [8]", "[18]"]),
    "filter returns a number": ("keep", "def f(group):\n    return 1", ["int", "True"]),
    "filter reads tokens": (
        "keep", "def f(group):\n    return group.rollouts[0].segments[0].arrays.tokens > 1",
        ["line 2", "AttributeError"]),
    "filter has two arguments": ("keep", "def f(a, b):\n    pass", ["TypeError", "(group)"]),
    "method has one argument": (
        "method", "def f(parts):\n    pass", ["TypeError", "(parts, batch)"]),
}  # fmt: skip
"""{what is wrong: (function of `RIGHT` in the place of which it is, the file, words of the error)}"""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_function_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    function, text, words = WRONG[case]
    key = next(key for key, name in KEYS.items() if name == function)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        attempt(key, f"{tmp_path}/own.py:f")
    said = str(caught.value)
    assert said.startswith(f"{key}: ") and "own.py" in said and "\n" not in said, said
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("key", KEYS)
def test_another_name_and_a_missing_file_are_told(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        recipe(key, "no_such")
    said = str(caught.value)
    assert f"{key} is 'no_such'" in said and "path/to/file.py:function" in said, said
    assert {"algorithm.loss": "ppo_clip", "rollout.filter": "differing"}.get(key, "") in said
    with pytest.raises(ValueError, match=rf"{key} is '.*none.py:f', but there is no file"):
        attempt(key, f"{tmp_path}/none.py:f")


def test_a_file_lies_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(RIGHT)
    (tmp_path / "recipe.yaml").write_text(
        "folder: run\nmodel: {path: m}\nprompts: {source: p.jsonl}\n"
        "algorithm: {loss: own.py:loss, clip_high: 0.4, sapo_positive: 2.0}\n"
    )
    found = read(RunConfig, tmp_path / "recipe.yaml").algorithm
    assert found.loss == f"{tmp_path}/own.py:loss"
    assert (found.clip_high, found.sapo_positive) == (0.4, 2.0), "a function may use any setting"


def test_a_file_may_import_its_neighbour_and_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "names_beside.py").write_text("def f(*_):\n    return 7\n")
    (tmp_path / "own.py").write_text("from names_beside import f\n")
    name = f"{tmp_path}/own.py:f"
    assert function_of(name, ADVANTAGES, "algorithm.advantage")() == 7
    (tmp_path / "own.py").write_text("syntax error")
    assert Trial("algorithm.advantage", name, "").function() == 7
    assert function_of("grpo", ADVANTAGES, "algorithm.advantage") is ADVANTAGES["grpo"]


def test_what_is_known_of_a_function_of_the_house_is_not_taken_for_granted(tmp_path: Path) -> None:
    """Groups of equal rewards are computed and kept, unless the recipe says otherwise."""
    (tmp_path / "own.py").write_text(RIGHT)
    plain, own = recipe("algorithm.loss", "ppo_clip"), f"{tmp_path}/own.py:f"
    assert (plain.skips_equal_groups, plain.group_filter) == (True, "differing")
    assert not recipe("algorithm.loss", own).skips_equal_groups
    assert not recipe("algorithm.method", own).skips_equal_groups
    mine = recipe("algorithm.advantage", own)
    assert (mine.skips_equal_groups, mine.group_filter) == (False, "all")
    rollout = replace(mine.rollout, filter="differing")
    assert replace(mine, rollout=rollout).group_filter == "differing"


def test_a_filter_without_dynamic_sampling_is_refused() -> None:
    rollout = recipe("rollout.filter", "all").rollout
    with pytest.raises(ValueError, match=r"filter is 'all', but .*dynamic_sampling.enabled is fal"):
        replace(rollout, dynamic_sampling=replace(rollout.dynamic_sampling, enabled=False))
