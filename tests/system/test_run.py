"""Whole runs on the real vLLM, Ray and DeepSpeed: train, resume after damage, evaluate what was
saved.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import PROBE_BOUND, Done, ledger, megarl, records, tiny_run, write_recipe
from support.tiny import write_model

from megarl.ledger.journal import FILE

STEPS = 4
TIMES = ("time/", "tokens/generated_per_s", "tokens/trained_per_s", "publish/")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


# As several published models have it: transformers reads these settings, and refuses to save them.
GENERATION = '{"do_sample": false, "temperature": 0.6,  "our_own": [1]}\n'


@pytest.fixture(scope="module")
def done(place: Path) -> Done:
    """One run, looked at by several tests."""
    model = write_model(place / "model")
    (model / "generation_config.json").write_text(GENERATION)
    finished = megarl("run", write_recipe(place / "recipe.yaml", tiny_run(place, model, STEPS)))
    assert finished.code == 0, finished.err[-4000:]
    return finished


def test_standard_output_is_one_json_object(done: Done) -> None:
    found = json.loads(done.out)  # nothing else is on standard output
    assert found["steps"] == STEPS and found["seed"] == 5
    for name in ("accuracy", "length"):
        assert found[f"{name}_before"] is not None and found[f"{name}_after"] is not None
    for name in ("seconds", "generated_tokens_per_s", "trained_tokens_per_s"):
        assert found[name] > 0


def test_standard_error_has_our_lines_only(done: Done, place: Path) -> None:
    """What libraries say is in the log, with our lines; the start-up has a line a phase."""
    phases = ("checks: ", "Ray: ", "model and optimizer: ", "engines, beside the model: ")
    phases += ("first publish of the weights: ", "first evaluation: ")
    ours = (*phases, "run folder ", "step ", "evaluation after ")
    lines = done.err.splitlines()
    assert [line for line in lines if not line.startswith(ours)] == []
    assert all(any(line.startswith(phase) for line in lines) for phase in phases)
    log = (place / "run" / "run.log").read_text()
    # Ray names the actor, or its raylet if the actor's name is not known yet.
    assert re.search(r"\((EngineActor|raylet)", log) and all(line in log for line in lines)
    assert "not writable" not in log


def test_every_version_reached_the_engine_unchanged(done: Done, place: Path) -> None:
    """Digest equal at every publish (else the run stops), and the engine scores a fixed text as the
    trainer does.
    """
    rows = records(place / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["probe/max_abs"] < PROBE_BOUND for row in rows)
    # Synchronous: what is trained was sampled by the weights that train.
    assert all(row["staleness/max"] == 0 for row in rows)
    assert all(row["mismatch/max_abs"] < PROBE_BOUND for row in rows)
    assert all(row["mismatch/outside_share"] == 0 < row["grad_norm"] for row in rows)


def test_the_run_folder_holds_what_it_should(done: Done, place: Path) -> None:
    run = place / "run"
    records_of = ("metrics", "evaluations", "transcripts")
    for name in ("recipe.yaml", "report.html", *(f"{one}.jsonl" for one in records_of)):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").glob("events*"))
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000004"]
    rollout = records(run / "transcripts.jsonl")[0]["rollouts"][0]
    assert set(rollout) >= {"response", "reward", "correct", "tokens", "versions"}
    found = ledger(run)
    assert found["steps"] == STEPS and found["ended"] and found["age_max"] == 0
    assert found["void"] == 0 and found["in_flight"] == [] and found["trained"] > 0
    drawn = sum(row["groups/drawn"] for row in records(run / "metrics.jsonl"))
    assert found["dispatched"] == found["cursor"] == drawn


def test_the_checkpoint_is_a_hugging_face_model(done: Done, place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = place / "run" / "checkpoints" / "step_000004" / "model"
    saved, first = map(AutoModelForCausalLM.from_pretrained, (folder, place / "model"))
    assert AutoTokenizer.from_pretrained(folder).encode("1+1=")
    assert (folder / "generation_config.json").read_text() == GENERATION
    changed = [
        float((a - b).abs().max().detach())
        for a, b in zip(saved.parameters(), first.parameters(), strict=True)
    ]
    assert min(changed) > 0, "some weights never moved"


def test_evaluating_the_checkpoint_repeats_the_runs_own_evaluation(done: Done, place: Path) -> None:
    """vLLM loads the saved model by itself and answers greedily as the published weights did. Two
    samples of each problem and a second data set are evaluated too, and every generation is kept.
    """
    model = place / "run" / "checkpoints" / "step_000004" / "model"
    (place / "more.csv").write_text("prompt,answer\n1+1=,2\n2+2=,4\n")
    arguments = ["--model.path", str(model), "--evaluation.samples", "2"]
    arguments += ["--evaluation.sources", str(place / "more.csv")]
    finished = megarl("eval", str(place / "recipe.yaml"), *arguments)
    assert finished.code == 0, finished.err[-4000:]
    found = json.loads(finished.out)
    folder = place / "run" / "eval" / "000001"
    assert found == json.loads((folder / "results.json").read_text())
    assert [one["problems"] for one in found["results"]] == [20, 2]
    last = records(place / "run" / "evaluations.jsonl")[-1]
    for name in ("accuracy", "reward/mean", "length/mean"):
        assert found["results"][0][name] == last[f"eval/{name}"]
    sampled = found["results"][0]["sampled"]
    assert sampled["samples"] == 2 and sampled["maj@2"] is None  # a verifier of the user's own
    assert sampled["pass@2"] >= sampled["pass@1"] == sampled["avg@2"] == sampled["accuracy"]
    rows = records(folder / "generations.jsonl")
    assert len(rows) == 3 * 22 and {row["model"] for row in rows} == {str(model)}
    assert [row["kind"] for row in rows[:60]] == ["greedy"] * 20 + ["sampled"] * 40
    assert sum(row["correct"] for row in rows[20:60]) == 40 * sampled["avg@2"]
    assert len({row["response"] for row in rows[20:60]}) > 20  # samples have seeds of their own


def test_resuming_a_finished_run_says_so_and_starts_nothing(done: Done, place: Path) -> None:
    finished = megarl("run", str(place / "recipe.yaml"), "--resume", "True")
    assert finished.code == 0, finished.err[-4000:]
    assert "the run is finished" in finished.err and "raise steps" in finished.err
    assert "Ray:" not in finished.err and "engines" not in finished.err
    assert json.loads(finished.out)["steps"] == STEPS
    checked = megarl("run", str(place / "recipe.yaml"), "--resume", "True", "--check")
    assert checked.code == 0
    assert f"a run that is finished, at step {STEPS} of {STEPS}" in checked.err.splitlines()[-1]
    assert f"{STEPS} of {STEPS} steps trained: finished" in megarl("status", str(place / "run")).out


WRONG = {
    "ledger": (FILE, lambda lines: lines[:30] + lines[31:], "is damaged", "move the file away"),
    "metrics": (
        "metrics.jsonl",
        lambda lines: [lines[0], lines[1][:30] + b"\n", *lines[2:]],
        "line 2 is not JSON",
        "delete the line: sed -i 2d ",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_resume_with_a_wrong_file_is_refused_before_engines_start(
    done: Done, place: Path, kind: str
) -> None:
    """By `--check` too. What else may be wrong with them is in tests/unit/test_run_files.py."""
    name, change, wanted, fix = WRONG[kind]
    shutil.copytree(place / "run", folder := place / f"wrong {kind}")
    path = folder / name
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    arguments = ["--folder", str(folder), "--steps", str(STEPS + 2), "--resume", "auto"]
    arguments += ["--check"] if kind == "metrics" else []
    finished = megarl("run", str(place / "recipe.yaml"), *arguments)
    assert finished.code == 2 and finished.out == ""
    (said,) = [line for line in finished.err.splitlines() if name in line]
    assert wanted in said and str(path) in said and fix in said
    assert not re.search("Traceback|Ray|engine", finished.err)
    assert path.read_bytes() == before, "a run that is refused leaves the file as it is"


def assert_same_steps(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Equal metrics, but for those of times."""
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in found]
        for found in (before, after)
    ]
    assert rows[0] == rows[1]


def test_resume_passes_over_damage_and_repeats_the_run_bit_by_bit(done: Done, place: Path) -> None:
    """The newest checkpoint is truncated: the run goes on from the one before, and its steps come
    out the same.
    """
    again = place / "again"
    shutil.copytree(place / "run", again)
    newest = again / "checkpoints" / "step_000004"
    victim = newest / "model" / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    finished = megarl("run", str(place / "recipe.yaml"), "--folder", str(again), "--resume", "True")
    assert finished.code == 0, finished.err[-4000:]
    assert "passing over checkpoint" in finished.err
    assert "model.safetensors is damaged" in finished.err
    before, after = (records(folder / "metrics.jsonl") for folder in (place / "run", again))
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    one, other = ledger(place / "run"), ledger(again)
    assert (other["restores"], other["steps"], other["cursor"]) == (1, STEPS, one["cursor"])
    assert other["void"] == sum(row["groups/drawn"] for row in before[2:])
    assert other["trained"] == one["trained"] and other["run"] == one["run"]
    assert_same_steps(before, after)
    one, other = (records(folder / "evaluations.jsonl") for folder in (place / "run", again))
    assert one == other, "neither one more nor one less"
    from safetensors.torch import load_file

    one, other = (
        load_file(folder / "checkpoints/step_000004/model/model.safetensors")
        for folder in (place / "run", again)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
def test_colocated_engines_that_take_turns_change_nothing(done: Done, place: Path) -> None:
    arguments = ["--folder", str(place / "turns"), "--rollout.placement", "colocated"]
    finished = megarl("run", str(place / "recipe.yaml"), *arguments)
    assert finished.code == 0, finished.err[-4000:]
    assert_same_steps(*(records(place / name / "metrics.jsonl") for name in ("run", "turns")))


@pytest.mark.nightly
def test_a_run_goes_on_under_another_layout(done: Done, place: Path) -> None:
    """One rank's step 2 on two tensor ranks under ZeRO 1: the state is read there, and steps 3
    and 4 are what one rank made of them.
    """
    moved = place / "moved" / "checkpoints"
    moved.mkdir(parents=True)
    shutil.copytree(place / "run" / "checkpoints" / "step_000002", moved / "step_000002")
    arguments = ["--folder", str(moved.parent), "--resume", "auto"]
    arguments += ["--training.layout.tensor", "2", "--training.zero_stage", "1"]
    finished = megarl("run", str(place / "recipe.yaml"), *arguments, ranks=2)
    assert finished.code == 0, finished.err[-4000:]
    assert finished.err.count("was written under") == 1
    assert sorted(path.name for path in moved.iterdir()) == ["step_000002", "step_000004"]
    before = records(place / "run" / "metrics.jsonl")[2:]
    after = records(moved.parent / "metrics.jsonl")
    assert [row["step"] for row in after] == [3, 4]
    for one, other in zip(before, after, strict=True):
        assert one["tokens/trained"] == other["tokens/trained"]
        for name in ("loss", "grad_norm", "entropy", "reward/mean"):
            assert abs(one[name] - other[name]) < 1e-4 * max(1.0, abs(one[name])), name


def test_resuming_another_model_is_refused_with_the_reason(done: Done, place: Path) -> None:
    other = write_model(place / "other", intermediate_size=64)
    finished = megarl(
        "run", str(place / "recipe.yaml"), "--model.path", str(other), "--resume", "True"
    )
    assert finished.code == 2 and "of another model" in finished.err
    assert "Traceback" not in finished.err
