"""Every recipe of an algorithm passes the checks, and the Python interface reads and runs recipes."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, python, tiny_run, write_recipe, write_rows
from support.reward_servers import Scripted, serving
from support.tiny import write_classifier, write_model

import megarl
from megarl import DistillConfig, PreferenceConfig, RewardModelConfig, RunConfig, SftConfig
from megarl.apps.serve.serve_reward import check_serve_reward
from megarl.apps.tune.tune_checks import (
    check_preference,
    check_reward_model,
    check_sample,
    check_sft,
)
from megarl.run.plan import check_eval, plan_run
from megarl.settings import config
from megarl.settings.config import PreferenceEvaluationConfig
from megarl.settings.data import PreferencesConfig
from megarl.settings.schema import replace
from megarl.settings.serve import ServeRewardConfig

EXAMPLES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.advantage": "grpo", "algorithm.loss": "ppo_clip"},
    "dr_grpo": {"algorithm.advantage": "dr_grpo", "algorithm.aggregation": "constant"},
    "rloo": {"algorithm.advantage": "rloo"}, "ppo": {"algorithm.advantage": "gae"},
    "gspo": {"algorithm.loss": "gspo"}, "kl": {"algorithm.kl.where": "loss"},
    "reinforce_plus_plus": {"algorithm.advantage": "reinforce_plus_plus", "rollout.group_size": 1},
    "cosine": {"training.schedule.kind": "cosine"}, "checkpointing": {"resume": "auto"},
    "wandb": {"observe.wandb_project": "megarl"},
}  # fmt: skip
"""{recipe: what it must be an example of}"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_recipe(folder / "recipe.yaml", tiny_run(folder, write_model(folder / "model"), 3))
    return folder


def recipe(kind: Any, name: str) -> Any:
    return config.read(kind, ROOT / "launch" / "recipes" / f"{name}.yaml")


def small(found: Any, place: Path, name: str, **changes: Any) -> Any:
    """A recipe with the quick start's model and data replaced by small ones."""
    data, held_out = str(place / "prompts.jsonl"), found.evaluation.prompts
    if held_out.source:
        held_out = replace(held_out, source=data)
    usual = {
        "folder": str(place / name),
        "model": replace(found.model, path=str(place / "model")),
        "prompts": replace(found.prompts, source=data),
        "evaluation": replace(found.evaluation, prompts=held_out),
        "observe": replace(found.observe, wandb_project=""),  # the package is not installed
    }
    return replace(found, **usual | changes)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_passes_the_checks(name: str, place: Path) -> None:
    found = recipe(RunConfig, name)
    for key, value in EXAMPLES[name].items():
        assert attrgetter(key)(found) == value
    assert plan_run(small(found, place, name)).prompts is not None


PREFERENCES: dict[str, Any] = {
    "dpo": (PreferenceConfig, check_preference),
    "reward_model": (RewardModelConfig, check_reward_model),
    "best_of_n": (SftConfig, check_sft),
}
"""{recipe of docs/preferences.md: (its configuration, its check)}"""


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_recipe_on_a_data_set_passes_the_checks(name: str, place: Path) -> None:
    kind, check = PREFERENCES[name]
    found = recipe(kind, name)
    rows = [{"prompt": f"{n}=", "chosen": "1", "rejected": "2", "response": "1"} for n in range(5)]
    data = write_rows(place / "rows.jsonl", rows)
    section = "demonstrations" if kind is SftConfig else "preferences"
    changes = {section: replace(getattr(found, section), source=data)}
    if kind is not SftConfig:
        held_out = replace(found.evaluation.preferences, source=data)
        changes["evaluation"] = replace(found.evaluation, preferences=held_out)
    model = replace(found.model, path=str(place / "model"))
    changed = replace(found, folder=str(place / name), model=model, **changes)
    assert len(check(changed).rows) == 5


def test_held_out_preferences_are_turned_off_by_an_empty_source() -> None:
    for shuffle in (True, False):
        PreferenceEvaluationConfig(preferences=PreferencesConfig(shuffle=shuffle))
    with pytest.raises(ValueError, match="preferences has settings, but no source"):
        PreferenceEvaluationConfig(preferences=PreferencesConfig(max_tokens=64))


def distilled(place: Path, **changes: Any) -> Any:
    """`distill.yaml` with small models and data, and `changes` by key as in `load_recipe`."""
    data, model = str(place / "prompts.jsonl"), str(place / "model")
    settings = {
        "folder": str(place / "distill"), "model__path": model, "teacher__model__path": model,
        "prompts__source": data, "evaluation__prompts__source": data,
    }  # fmt: skip
    file = ROOT / "launch" / "recipes" / "distill.yaml"
    return megarl.load_recipe(DistillConfig, file, **settings | changes)


def test_distillation_passes_the_checks(place: Path) -> None:
    found = plan_run(distilled(place))
    assert found.prompts is not None and list(found.roles) == ["teacher"]
    wide = str(write_model(place / "wide", seed=1, vocab_size=48, hidden_size=128))
    blind = {"environment__verifier": "none", "environment__answer_after": ""}
    apart = {"teacher__ranks": [1, 2], "teacher__layout__data": 2}
    for changes, ranks in (
        ({"teacher__model__path": wide, "distillation__top_k": 40}, 1),
        (blind | {"prompts__answer_column": "", "evaluation__prompts__answer_column": ""}, 1),
        ({"rollout__top_p": 0.9}, 1),  # no probability of sampling is used
        (apart, 3),
    ):
        plan_run(distilled(place, **changes), ranks)


@pytest.mark.parametrize(("changes", "said"), [
    ({"teacher__model__path": ""}, "teacher.model.path is empty; set it to a model"),
    ({"teacher__model__from_scratch": True}, "random weights teach nothing"),
    ({"teacher__model__path": "{place}/narrow"}, "has a vocabulary of 39 tokens and"),
    ({"teacher__model__path": "{place}/stranger"}, "has another tokenizer than model.path"),
    ({"teacher__model__tokenizer": "{place}/model"}, "the tokens are the policy's"),
    ({"distillation__top_k": 41}, "top_k is 41, but model.path has 40 tokens"),
    ({"distillation__divergence": "jensen_shannon", "distillation__beta": 1.0}, "beta is 1"),
    ({"distillation__beta": 0.1}, "distillation.divergence is 'reverse_kl', which does not use it"),
    ({"distillation__temperature": 0.0}, "distillation.temperature is 0"),
    ({"algorithm__clip_low": 0.1}, "algorithm has settings, which task: distill does not"),
    ({"reference__model__path": "x"}, "reference has settings, which task: distill"),
    ({"critic__warmup_steps": 1}, "critic has settings, which task: distill does not use"),
    ({"reward_models": {"a": {"model": {"path": "x"}}}}, "reward_models has settings"),
    ({"training__logprobs": "liger"}, "'liger', which computes no divergences"),
    ({"teacher__ranks": [0]}, "rank 0 is the policy's"),
    ({"early_stop": {"metric": "kl", "at_most": 0}}, "early_stop.metric is 'kl'"),
])  # fmt: skip
def test_distillation_refuses(changes: dict[str, Any], said: str, place: Path) -> None:
    if not (place / "narrow").exists():
        write_model(place / "narrow", vocab_size=39)
        write_model(place / "stranger")
        tokenizer = json.loads((place / "stranger" / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        words["0"], words["1"] = words["1"], words["0"]
        (place / "stranger" / "tokenizer.json").write_text(json.dumps(tokenizer))
    given = {
        key: value.replace("{place}", str(place)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(ValueError, match=re.escape(said)):
        plan_run(distilled(place, **given))


def test_a_metric_of_distillation_ends_no_other_run(place: Path) -> None:
    stop = {"metric": "divergence", "at_most": 0.1}
    assert distilled(place, early_stop=stop).early_stop.metric == "divergence"
    with pytest.raises(ValueError, match="does not have while there is no teacher"):
        megarl.load_recipe(RunConfig, place / "recipe.yaml", early_stop=stop)


def test_rewards_by_a_model_pass_the_checks(place: Path) -> None:
    judge = write_classifier(place / "judge")
    for name, check in (("ppo_reward_model", plan_run), ("sample", check_sample)):
        found = recipe(RunConfig, name)
        judged = {
            key: replace(one, model=replace(one.model, path=str(judge)))
            for key, one in found.reward_models.items()
        }
        assert bool(judged) == (name == "ppo_reward_model")
        assert check(small(found, place, name, reward_models=judged)) is not None


def test_a_run_asks_the_server_that_is_served(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two recipes name one address and one token, and pass the checks together."""
    served = recipe(ServeRewardConfig, "serve_reward")
    found = recipe(RunConfig, "remote_reward")
    address = f"http://{served.server.host}:{served.server.port}/v1/score"
    assert found.environment.verifier == address
    assert found.environment.remote.token_variable == served.server.token_variable
    monkeypatch.setenv(served.server.token_variable, "hush")
    here = replace(served, folder=str(place / "serve"))
    assert str(check_serve_reward(here)) == "exact_match, with a token"
    app = Scripted(score=lambda sample: float(sample["response"] == sample["prompt"]["answer"]))
    with serving(app) as url:
        environment = replace(found.environment, verifier=url)
        remote = small(found, place, "remote", environment=environment)
        assert plan_run(remote).prompts is not None
    assert {headers["authorization"] for headers in app.headers} == {"Bearer hush"}


def test_importing_megarl_is_light() -> None:
    heavy = "[m for m in ('torch', 'ray', 'numpy', 'yaml', 'pydantic') if m in sys.modules]"
    code = f"import sys, megarl; print({heavy}); from megarl import train, RunConfig; {heavy}"
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
    assert set(megarl.__all__) == {name for name in megarl.__all__ if getattr(megarl, name)}
    with pytest.raises(AttributeError, match="nothing"):
        _ = megarl.nothing


def test_a_recipe_is_read_with_changes(place: Path) -> None:
    found = megarl.load_recipe(
        RunConfig, place / "recipe.yaml", steps=7, training__optimizer__learning_rate=1e-5
    )
    assert (found.steps, found.training.optimizer.learning_rate) == (7, 1e-5)
    plain = config.read(RunConfig, place / "recipe.yaml")
    assert replace(found, steps=plain.steps, training=plain.training) == plain
    with pytest.raises(ValueError, match=r"training\.optimiser: unknown key"):
        megarl.load_recipe(RunConfig, place / "recipe.yaml", training__optimiser=1)
    with pytest.raises(ValueError, match="steps"):
        megarl.load_recipe(RunConfig, place / "recipe.yaml", steps="many")


def test_a_mistake_is_raised_with_the_commands_line(place: Path) -> None:
    wrong = megarl.load_recipe(RunConfig, place / "recipe.yaml", model__path=str(place / "none"))
    with pytest.raises(ValueError, match=r"model\.path.*none"):
        megarl.train(wrong)
    with pytest.raises(ValueError, match="needs a SftConfig, found RunConfig"):
        megarl.sft(wrong)  # pyright: ignore[reportArgumentType]


def test_results_of_a_folder(tmp_path: Path) -> None:
    rows = [{"step": 1, "accuracy": 0.0}, {"step": 2, "accuracy": 1.0}]
    write_rows(tmp_path / "metrics.jsonl", rows)
    found = megarl.open_run(tmp_path)
    assert found.metrics == rows and found.evaluations == [] and found.model is None
    assert found.summary["steps"] == 2
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "model").mkdir(parents=True)
    assert found.model == tmp_path / "checkpoints" / "step_000010" / "model"
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        megarl.open_run(tmp_path / "none")
    assert SftConfig is config.SftConfig


def test_evaluation_checks_every_model_and_data_set(place: Path) -> None:
    again = write_model(place / "again", seed=1)
    more = place / "more.csv"
    more.write_text("prompt,answer\n1+1=,2\n")
    changes: dict[str, Any] = {"evaluation__models": [str(place / "model"), str(again)]}
    changes["evaluation__sources"] = [str(more)]
    found = check_eval(megarl.load_recipe(RunConfig, place / "recipe.yaml", **changes))
    assert [case.config.model.path for case in found.cases] == [str(place / "model"), str(again)]
    source = str(place / "prompts.jsonl")
    for case in found.cases:
        assert {name: len(rows) for name, rows in case.sets.items()} == {source: 20, str(more): 1}
    assert str(found) == f"2 models, 20 problems of {source}, 1 problems of {more}"
    for wrong, says in (
        ({"evaluation__models": [str(place / "none")]}, "none"),
        ({"evaluation__sources": [str(place / "none.csv")]}, r"none\.csv"),
    ):
        with pytest.raises(ValueError, match=says):
            check_eval(megarl.load_recipe(RunConfig, place / "recipe.yaml", **wrong))


@pytest.mark.parametrize(("changes", "says"), [
    ({"early_stop__metric": "eval/acuracy"}, "did you mean 'eval/accuracy'"),
    ({"early_stop__metric": "no/such"}, r"set one of reward/mean.*'environment/<name>'"),
    ({"early_stop__metric": "kl"}, r"algorithm\.kl\.coefficient is 0"),
    ({"early_stop__metric": "kl_coefficient"}, r"algorithm\.kl\.target is null"),
    ({"early_stop__metric": "correction/mean"}, r"algorithm\.correction\.kind is 'none'"),
    ({"early_stop__metric": "accuracy_greedy"}, r"algorithm\.advantage is 'grpo'"),
    ({"early_stop__metric": "eval_sampled/accuracy"}, r"evaluation\.sampled_too is off"),
    ({"early_stop__metric": "eval/environment/turns"}, r"evaluation\.every"),
    ({"early_stop__metric": "eval/accuracy"}, r"early_stop\.metric.*evaluation\.every"),
    ({"early_stop__metric": "critic/loss"}, r"algorithm\.advantage is not 'gae'"),
])  # fmt: skip
def test_an_early_stop_that_cannot_be(place: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        megarl.load_recipe(RunConfig, place / "recipe.yaml", early_stop__at_least=0.5, **changes)
