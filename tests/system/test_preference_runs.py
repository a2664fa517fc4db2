"""`task: preference` and `task: reward_model` as a user runs them: under a layout and resumed under
another one, with a cached reference; the reward model is one that transformers reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from support.commands import Done, megarl, records, tiny_run, write_recipe
from support.ranks import run_ranks
from support.tiny import random_adapter, write_classifier, write_model

from megarl import cli
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.settings.training import LoraConfig

TWO_RANKS = {"layout": {"data": 1, "sequence": 2}, "zero_stage": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_model(folder / "model", biases=True)
    draw = random.Random(0)
    for name, count in (("train", 40), ("held_out", 9)):
        sums = [(draw.randrange(50), draw.randrange(50)) for _ in range(count)]
        rows = [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a, b in sums
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def run(
    task: str, place: Path, name: str, steps: int, ranks: int = 1, **changes: Any
) -> tuple[Done, dict[str, Any]]:
    """A run on the place's preferences; returns how it ended, and what it printed."""
    tree: dict[str, Any] = {
        "task": task,
        "folder": str(place / name),
        "steps": steps,
        "resume": "auto",
        "samples_per_step": 8,
        "model": {"path": str(place / "model")},
        "preferences": {"source": str(place / "train.jsonl")},
        "evaluation": {"preferences": {"source": str(place / "held_out.jsonl"), "shuffle": False}},
        "training": {
            "micro_batch_tokens": 32,
            "optimizer": {"learning_rate": 1e-3},
            **(TWO_RANKS if ranks == 2 else {}),
        },
    }
    done = megarl("run", write_recipe(place / f"{name}.yaml", tree | changes), ranks=ranks)
    assert done.code == 0, done.err[-4000:]
    return done, json.loads(done.out)


def assert_alike(place: Path, one: str, other: str) -> None:
    runs = [records(place / name / "metrics.jsonl") for name in (one, other)]
    for a, b in zip(*runs, strict=True):
        for name in ("loss", "accuracy", "grad_norm", "reward/chosen", "reward/rejected"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-5), (a["step"], name)


def test_preferences_are_learnt_under_any_layout(place: Path) -> None:
    cache = {"reference": {"cache": str(place / "cache")}}
    done, found = run("preference", place, "alone", 6, **cache)
    assert done.err.count("the reference's log-probs of") == 2
    assert found["loss_last"] < found["loss_first"]
    files = sorted((place / "cache").iterdir())
    done, _ = run("preference", place, "moved", 3, ranks=2, **cache)
    assert "the reference's log-probs of" not in done.err, "they are in the cache"
    done, again = run("preference", place, "moved", 6, **cache)
    assert "was written under" in done.err
    assert_alike(place, "alone", "moved")
    for name in ("eval/accuracy", "eval/loss"):
        assert again[name] == pytest.approx(found[name], rel=1e-4)
    loss = {"loss": {"method": "kto"}}
    run("preference", place, "kto", 1, **cache, **loss)
    assert set(files) < set((place / "cache").iterdir()), "other pairs, other scores"
    # With an adapter to start from, the reference is that model, or by choice the base.
    training = {"micro_batch_tokens": 32, "lora": start(place)}
    reference = cache["reference"] | {"lora": "base"}
    done, _ = run("preference", place, "base", 1, training=training, reference=reference)
    assert "the reference's log-probs of" not in done.err, "those of the base are in the cache"
    assert abs(records(place / "base" / "metrics.jsonl")[0]["loss"] - math.log(2)) > 1e-3


def start(place: Path) -> dict[str, Any]:
    """Settings of LoRA that start from an adapter."""
    folder, model, lora = place / "start", str(place / "model"), LoraConfig(rank=2, alpha=8.0)
    return random_adapter(folder, model, lora).model_dump() | {"targets": []}


def scored(folder: str, texts: list[list[int]]) -> list[float]:
    """On a rank: the scores of texts, given as token ids, by the reward model in `folder`."""
    from megarl.apps.tune.sample import token_scores
    from megarl.settings.training import ModelConfig, TrainingConfig

    training = TrainingConfig(precision="float32", zero_stage=0)
    return token_scores(ModelConfig(path=folder), training, texts)


def test_a_reward_model_is_one_of_transformers(place: Path) -> None:
    """Its tokenizer pads with the end of sequence, as those of many base models do."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = write_model(place / "ends", biases=True, pad_token_id=1)
    tokenizer = load_tokenizer(str(base))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    ends = {"model": {"path": str(base)}}
    run("reward_model", place, "judge", 3, ranks=2, **ends)
    _, found = run("reward_model", place, "judge", 5, **ends)
    folder = place / "judge" / "checkpoints" / "step_000005" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and not (folder / "generation_config.json").exists()
    rows = [json.loads(line) for line in (place / "held_out.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + row[side] for row in rows for side in ("chosen", "rejected")]
    ended = [f"{text}<eos>" for text in [*texts, "1<eos>2<eos>", "?<eos>+<eos><eos>"]]
    [expected] = run_ranks(
        1, __file__, "scored", str(folder), [tokenizer(one).input_ids for one in ended]
    )
    options: Any = {"padding": True, "return_tensors": "pt"}
    with torch.no_grad():
        left, right = (
            model(**tokenizer(ended, padding_side=side, **options)).logits[:, 0]
            for side in ("left", "right")
        )
        alone = model(**tokenizer(ended[:1], **options)).logits[:, 0]
    assert left.tolist() == pytest.approx(expected, abs=1e-5)
    assert right.tolist() == pytest.approx(expected, abs=1e-5)
    assert alone.tolist() == pytest.approx(expected[:1], abs=1e-5)
    scores = right[: len(texts)].view(-1, 2)
    assert scores[:, 0].mean().item() == pytest.approx(found["eval/reward/chosen"], abs=1e-5)
    assert scores[:, 1].mean().item() == pytest.approx(found["eval/reward/rejected"], abs=1e-5)
    changes = {"model": {"path": str(folder)}}
    _, further = run("reward_model", place, "further", 1, **changes)
    first = records(place / "further" / "evaluations.jsonl")[0]
    assert first["eval/loss"] == pytest.approx(found["eval/loss"], abs=1e-6), "its score is used"
    assert further["steps"] == 1
    with pytest.raises(UserError, match="is a sequence classifier, such as a reward model"):
        cli.plan(["run", sft_of(place, folder), "--check"]).run()


def test_a_model_without_score_or_with_another_tokenizer_is_no_reward_model(place: Path) -> None:
    tree = tiny_run(place, place / "model", 1)
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    for name, folder, said in (
        ("model", "model", r"has no score\.weight: it is no sequence classifier"),
        ("other", "stranger", "has another tokenizer than model.path"),
    ):
        if folder == "stranger":
            write_classifier(place / folder)
            tokenizer = json.loads((place / folder / "tokenizer.json").read_text())
            words = tokenizer["model"]["vocab"]
            words["0"], words["1"] = words["1"], words["0"]
            (place / folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        tree["reward_models"] = {name: {"model": {"path": str(place / folder)}}}
        with pytest.raises(UserError, match=said):
            cli.plan(["run", write_recipe(place / "judged.yaml", tree), "--check"]).run()


def sft_of(place: Path, model: Path) -> str:
    """A recipe of fine-tuning that begins with `model`."""
    data = {"source": str(place / "train.jsonl"), "response_column": "chosen"}
    tree = {"folder": str(place / "sft"), "model": {"path": str(model)}, "demonstrations": data}
    return write_recipe(place / "sft.yaml", tree)


def test_samples_become_data_sets(place: Path) -> None:
    """Best of three by verifier and reward model, and pairs; both commands read what is written."""
    tree = tiny_run(place, place / "model", 1)
    tree["folder"] = str(place / "sampled")
    tree["prompts"]["limit"] = 12
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    write_classifier(place / "score", seed=3)
    tree["reward_models"] = {"judge": {"model": {"path": str(place / "score")}, "weight": 2.0}}
    tree["sample"] = {"samples": 3, "keep": "pairs"}
    done = megarl("sample", write_recipe(place / "sampled.yaml", tree))
    assert done.code == 0, done.err[-4000:]
    found = json.loads(done.out)
    rows, all_rows = records(Path(found["data"])), Path(found["data"]).parent / "records.jsonl"
    assert len(records(all_rows)) == 36 and 0 < len(rows) <= 12 and found["rows"] == len(rows)
    provenance = json.loads((all_rows.parent / "provenance.json").read_text())
    assert provenance["sha256"] == hashlib.sha256(Path(found["data"]).read_bytes()).hexdigest()
    assert provenance["recipe"]["sample"]["samples"] == 3
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(place / "score")
    tokenizer = load_tokenizer(str(place / "model"), trust_remote_code=False)

    def reward(one: dict[str, Any]) -> float:
        import torch

        end = [tokenizer.eos_token_id] if one["finish"] == "stop" else []
        ids = [*tokenizer(one["prompt"]).input_ids, *tokenizer(one["response"]).input_ids, *end]
        with torch.no_grad():
            score = model(input_ids=torch.tensor([ids])).logits.item()
        return len(one["response"]) % 3 / 2 + 2.0 * score

    expected = {}
    for one in records(all_rows):
        expected.setdefault(one["prompt"], []).append((reward(one), one))
    assert {one["finish"] for group in expected.values() for _, one in group} == {"stop", "length"}
    for row in rows:
        group = expected.pop(row["prompt"])
        ended = [pair for pair in group if pair[1]["finish"] == "stop" and pair[1]["response"]]
        most, best = max(ended, key=lambda pair: pair[0])
        least, worst = min(group, key=lambda pair: pair[0])
        assert (row["chosen"], row["rejected"]) == (best["response"], worst["response"])
        assert row["margin"] == pytest.approx(most - least, abs=1e-4)
    for group in expected.values():  # prompts without a pair
        tops = [value for value, one in group if one["finish"] == "stop" and one["response"]]
        assert not tops or max(tops) <= min(value for value, _ in group) + 1e-6
    source = {"preferences": {"source": found["data"], "margin_column": "margin"}}
    run("reward_model", place, "of_samples", 1, **source)


def test_adapters_of_other_commands_are_read_by_peft(place: Path) -> None:
    """LoRA in `preference` and `reward-model`, on two ranks: what a checkpoint's adapter makes of
    the base model is the model that the checkpoint holds.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    classes = {
        "preference": (AutoModelForCausalLM, {}),
        "reward_model": (AutoModelForSequenceClassification, {"num_labels": 1}),
    }
    training = {"micro_batch_tokens": 32, "lora": start(place)}
    training |= {"optimizer": {"learning_rate": 1e-2}}
    ids = torch.tensor([[5, 9, 13, 4, 7, 1]])
    for task, (kind, options) in classes.items():
        name = f"adapted_{task}"
        done, _ = run(task, place, name, 3, ranks=2, training=training | TWO_RANKS)
        assert "LoRA trains" in done.err
        # The reference is the model before training: with the adapter that it starts from.
        first = records(place / name / "metrics.jsonl")[0]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        saved = place / name / "checkpoints" / "step_000003"
        base = kind.from_pretrained(place / "model", **options)
        before = kind.from_pretrained(saved / "model")
        adapted = PeftModel.from_pretrained(base, str(saved / "adapter"))
        with torch.no_grad():
            one, other = (network(input_ids=ids).logits for network in (before, adapted))
            assert torch.allclose(one, other, atol=1e-5)
            with adapted.disable_adapter():
                assert (adapted(input_ids=ids).logits - one).abs().max() > 1e-3
