"""Settings of a run that depend on each other: sampling, answers, epochs."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.apps.tune.supervised import chunks
from megarl.settings.config import RunConfig, SftConfig, from_tree, made_with, with_steps

BASE: dict[str, Any] = {
    "folder": "runs/x",
    "model": {"path": "m"},
    "prompts": {"source": "a.jsonl"},
}


def run(**changes: Any) -> RunConfig:
    tree = {name: BASE.get(name, {}) | part for name, part in changes.items()}
    return from_tree(RunConfig, BASE | tree, where="recipe.yaml")


def steps(kind: str, epochs: float | None, num_rows: int, per_step: int) -> int:
    if kind == "rl":
        tree = BASE | {"epochs": epochs, "rollout": {"groups_per_step": per_step}}
        return with_steps(from_tree(RunConfig, tree, where=""), num_rows).steps
    tree = {name: BASE[name] for name in ("folder", "model")} | {
        "demonstrations": {"source": "a.jsonl"},
        "samples_per_step": per_step,
        "epochs": epochs,
    }
    return with_steps(from_tree(SftConfig, tree, where=""), num_rows).steps


@pytest.mark.parametrize(("changed", "matters"), [
    ({"num_engines": 4}, False),
    ({"request_timeout_s": 500.0}, False),
    ({"group_size": 4}, True),
    ({"max_new_tokens": 77}, True),
])  # fmt: skip
def test_finished_rollouts_are_kept_if_they_do_not_depend_on_a_change(
    changed: dict[str, Any], matters: bool
) -> None:
    before, after = made_with(run()), made_with(run(rollout=changed))
    assert (before != after) is matters


def test_finished_rollouts_do_not_depend_on_how_many_agents_run_at_once() -> None:
    agent = {"command": ["python", "agent.py"]}
    few, many = (run(environment={"agent": agent | {"at_once": count}}) for count in (1, 256))
    assert made_with(few) == made_with(many)
    slow = run(environment={"agent": agent | {"time_limit_s": 1.0}})
    assert made_with(slow) != made_with(many)


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_epochs_become_steps(kind: str) -> None:
    assert steps(kind, None, 100, 10) == 100
    assert steps(kind, 1, 100, 10) == 10
    assert steps(kind, 2.5, 100, 10) == 25
    assert steps(kind, 0.3, 100, 10) == 3, "0.3 x 100 / 10 is a little more than 3 in floats"
    assert steps(kind, 1, 101, 10) == 11
    assert steps(kind, 1e-3, 100, 10) == 1
    with pytest.raises(ValueError, match=r"epochs is 1e\+06, which is 100000000 steps for 1000"):
        steps(kind, 1e6, 1000, 10)


TRUNCATED = {"top_p": 0.9, "top_k": 20, "min_p": 0.05}


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_truncated_law_needs_the_engines_logprobs(name: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.{name} is .*set algorithm\.old_logprobs to"):
        run(rollout={name: TRUNCATED[name]})
    found = run(rollout={name: TRUNCATED[name]}, algorithm={"old_logprobs": "engine"})
    assert found.rollout.sampling.truncation == {name: TRUNCATED[name]}
    assert run().rollout.sampling.truncation == {}


@pytest.mark.parametrize(("staleness", "algorithm", "said"), [
    (0, {}, "rollout.max_staleness is 0, .* raise max_staleness"),
    (1, {"old_logprobs": "engine"}, "old_logprobs is 'engine', .* to 'trainer'"),
])  # fmt: skip
def test_leave_to_use_old_rollouts_that_allows_nothing_is_refused(
    staleness: int, algorithm: dict[str, Any], said: str
) -> None:
    uncorrected = {"correction": {"allow_uncorrected": True}}
    with pytest.raises(ValueError, match=rf"correction.* but .*{said}"):
        run(rollout={"max_staleness": staleness}, algorithm=algorithm | uncorrected)
    assert run(rollout={"max_staleness": 1}, algorithm=uncorrected).rollout.max_staleness == 1


def test_stop_texts() -> None:
    assert run(rollout={"stop": ["\n\n", "END"]}).rollout.sampling.stop == ("\n\n", "END")
    for stop in ([""], ["a"] * 17):
        with pytest.raises(ValueError, match=r"set at most 16, none empty"):
            run(rollout={"stop": stop})


@pytest.mark.parametrize("environment", [{"verifier": "math"}, {}, {"rewards": {"math": 1.0}}])
def test_a_verifier_that_compares_needs_answers(environment: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"answer_column is empty, but the verifier .* compares"):
        run(prompts={"answer_column": ""}, environment=environment)
    run(prompts={"answer_column": ""}, environment={"verifier": "own.py:score"})
    run(prompts={"answer_column": ""}, environment={"session": "own.py:Game"})


@pytest.mark.parametrize(("num_rows", "at_least"), [(0, 4), (3, 4), (4, 4), (11, 4), (64, 64)])
def test_held_out_rows_are_used_once_in_chunks(num_rows: int, at_least: int) -> None:
    found = chunks(num_rows, at_least)
    assert [row for bounds in found for row in range(*bounds)] == list(range(num_rows))
    assert all(last - first >= min(num_rows, at_least) for first, last in found)
