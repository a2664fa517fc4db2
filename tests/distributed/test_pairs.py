"""Preference methods and reward models learn under every layout what one rank learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.tiny import write_model

METHODS = ("dpo", "orpo", "kto", "reward-model")
STEPS = 3
# Degrees (data, sequence, tensor) and ZeRO stage.
PLACES = [(4, 1, 1, 3), (1, 4, 1, 1), (2, 1, 2, 2), (1, 2, 2, 0)]


def pairs(step: int) -> Any:
    """Seven ragged pairs, another batch for each step; one is longer than a packed row."""
    import numpy as np

    from megarl.apps.tune.pairs import pair_batch
    from megarl.types import Preference

    random = np.random.default_rng(step)
    made = []
    for number in range(7):
        lengths = [5, *random.integers(1, 9, 2)] if number else [5, 40, 3]
        asked, *replies = (random.integers(3, 40, length).tolist() for length in lengths)
        made.append(
            Preference(
                number,
                asked,
                (replies[0], replies[1]),
                margin=number / 5 - 0.3,
                is_desirable=number % 3 == 0,
            )
        )
    return pair_batch(made, -random.random((7, 2)) * 20)


def learn_everywhere(folder: str, places: Any) -> list[Any]:
    """[place][method] -> (metrics of each step, of an evaluation, scores of the data)."""
    import torch

    from megarl.parallel import mesh as mesh_module

    torch.set_num_threads(1)
    device = mesh_module.initialise(timeout_s=120)
    found = [[learn(folder, place, name, device) for name in METHODS] for place in places]
    mesh_module.finalise()
    return found


def learn(folder: str, place: Any, name: str, device: Any) -> Any:
    from megarl.apps.tune.pairs import merged
    from megarl.apps.tune.preference import KtoStep, PreferenceStep, RewardModelStep
    from megarl.apps.tune.supervised import Task
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.settings.objectives import PreferenceLossConfig, RewardLossConfig
    from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig
    from megarl.trainer.role import Role

    *degrees, stage = place
    mesh = ProcessMesh(Layout(*degrees))
    is_policy = name != "reward-model"
    role = Role(
        "policy",
        model=ModelConfig(path=folder),
        training=TrainingConfig(
            zero_stage=stage,
            micro_batch_tokens=30,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        mesh=mesh,
        device=device,
        seed=0,
        head="logprobs" if is_policy else "scalar",
        optimizer_steps=STEPS,
    )

    class Pairs(Task):
        def __init__(self) -> None:
            super().__init__(role, None, 0)
            self._held_out = merged([pairs(100), pairs(101)])

        def batch(self, rows: Any) -> Any:
            raise NotImplementedError

        def begin(self, batch: Any) -> Any:
            if is_policy:
                step = KtoStep if name == "kto" else PreferenceStep
                return step(role, batch, PreferenceLossConfig(method=name))
            return RewardModelStep(role, batch, RewardLossConfig(centering=0.01))

    task, metrics = Pairs(), []
    for step in range(STEPS):
        batch = pairs(step)
        found = task.train(batch, step).metrics
        trained = batch.side(0) if name == "kto" else batch.samples
        computed, saved = found["tokens/computed"], found["tokens/shared_saved"]
        # Pairs share their prompts. A rank without samples computes two tokens of padding.
        assert saved > 0 or name == "kto" or mesh.world.size > 1
        padding = computed + saved - len(trained.token_ids)
        assert padding == 0 or (padding > 0 and mesh.world.size > 1)
        metrics.append({key: found[key] for key in found if not key.startswith(("time", "tokens"))})
    evaluated = task.evaluate()
    role.destroy()
    mesh.destroy()
    return metrics, evaluated


def by_formula(folder: str, name: str) -> float:
    """The loss of the first step by transformers' own model and the papers' formulae."""
    import math

    import torch
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), pairs(0)

    def logprobs(number: int) -> tuple[float, int]:
        """(sum of the response's log-probs, its tokens) of sample `number`."""
        first, end = batch.samples.offsets[number], batch.samples.offsets[number + 1]
        ids = torch.from_numpy(batch.samples.token_ids[first:end]).long()
        chosen = batch.samples.mask[first:end]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        each = logits.gather(1, ids[1:, None])[:, 0]
        return float(each[torch.from_numpy(chosen[1:])].sum()), int(chosen.sum())

    def minus_log_sigmoid(x: float) -> float:
        return math.log1p(math.exp(-x))

    found = [logprobs(number) for number in range(14)]
    ratios = [sums - ref for (sums, _), ref in zip(found, batch.reference.ravel(), strict=True)]
    z = max(0.0, sum(ratios[1::2]) / 7)
    losses = []
    for n in range(7):
        (good, tokens), (bad, others) = found[2 * n], found[2 * n + 1]
        if name == "reward-model":  # a new score is 0
            losses.append(minus_log_sigmoid(-batch.margins[n]))
        elif name == "dpo":
            losses.append(minus_log_sigmoid(0.1 * (ratios[2 * n] - ratios[2 * n + 1])))
        elif name == "kto":
            x = 0.1 * (ratios[2 * n] - z) * (1 if batch.is_desirable[n] else -1)
            losses.append(1 - 1 / (1 + math.exp(-x)))
        else:
            means = [good / tokens, bad / others]
            odds = [m - math.log1p(-math.exp(m)) for m in means]
            losses.append(-means[0] + 0.1 * minus_log_sigmoid(odds[0] - odds[1]))
    return sum(losses) / 7


def test_pairs_teach_alike_under_every_layout(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", biases=True))
    ((alone,),) = run_ranks(1, __file__, "learn_everywhere", folder, [(1, 1, 1, 0)])
    for name, (metrics, evaluated) in zip(METHODS, alone, strict=True):
        assert all(one["grad_norm"] > 1e-3 for one in metrics), name
        assert metrics[0]["loss"] != metrics[2]["loss"], name
        assert 0 < evaluated["eval/accuracy"] < 1, name
    assert alone[2][0][0]["kl"] != 0 and "kl" not in alone[0][0][0]
    for name, (metrics, _) in zip(METHODS, alone, strict=True):
        assert metrics[0]["loss"] == pytest.approx(by_formula(folder, name), rel=1e-5), name
    for rank in run_ranks(4, __file__, "learn_everywhere", folder, PLACES):
        for place, everything in zip(PLACES, rank, strict=True):
            for name, found, wanted in zip(METHODS, everything, alone, strict=True):
                for theirs, ours in zip(found[0], wanted[0], strict=True):
                    assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-5), (name, place)
                assert found[1] == pytest.approx(wanted[1], rel=1e-5, abs=1e-5), (name, place)
