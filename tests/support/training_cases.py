"""Training cases: a layout, a ZeRO stage and settings; three steps of each on every rank, and the
comparison of their results.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.objectives import AlgorithmConfig, KLConfig
from megarl.settings.training import ModelConfig, OptimizerConfig, SequenceConfig, TrainingConfig
from megarl.trainer.prefixes import must_save
from megarl.types import Samples
from support.policy import Policy, joined, whole_weights
from support.rollouts import dealt
from support.tiny import groups, write_model
from support.trees import branched, lineages, repeated

STEPS = 3
RATE = 1e-3

Case = dict[str, Any]
"""layout, stage, and optionally model, sequence, training, optimizer, algorithm, groups, prompts:
see `three_steps`. `equal`: every second group has equal rewards, and is "sent" to the ranks or
"skipped". `experts`: what engines report, arguments of `with_experts`. `trees`: rollouts are trees, which are computed "once" or as sequences from the root to
each leaf, "repeated".
"""


def layouts(size: int) -> list[tuple[int, int, int]]:
    """Every (data, sequence, tensor) of `size` ranks."""
    return [
        (data, sequence, size // (data * sequence))
        for data in range(1, size + 1)
        for sequence in range(1, size + 1)
        if size % (data * sequence) == 0
    ]


def run_cases(cases: list[Case]) -> list[Any]:
    """Per case: metrics, log-probs, entropies and weights. Runs on every rank."""
    found = []
    with joined() as device:
        for case in cases:
            sequence = SequenceConfig(**case.get("sequence", {}))
            layout, ulysses = Layout(*case["layout"]), sequence.ulysses
            with ProcessMesh(layout, ulysses=ulysses, timeout_s=60) as mesh:
                found.append(three_steps(case, mesh, device, sequence))
    return found


def three_steps(case: Case, mesh: Any, device: Any, sequence: Any) -> Any:
    """Three clipped optimizer steps of reinforcement learning on uneven packed documents."""
    # Clipping makes a wrong scale of the gradient visible, which AdamW alone would hide.
    optimizer: Any = dict(learning_rate=RATE, clip_norm=0.5, eps=1e-6) | case.get("optimizer", {})
    algorithm = {"kl": KLConfig(coefficient=0.05)} | case.get("algorithm", {})
    policy = Policy(
        model=ModelConfig(path=case["model"]),
        training=TrainingConfig(
            zero_stage=case["stage"],
            sequence=sequence,
            optimizer=OptimizerConfig(**optimizer),
            **case.get("training", {}),
        ),
        algorithm=AlgorithmConfig(**algorithm),
        temperature=0.8,
        mesh=mesh,
        device=device,
        total_steps=STEPS,
        seed=1,
    )
    reports, logprobs, entropies, met = [], [], [], []
    first_layer = policy.engine.module.model.base_model.layers[0]
    first_layer.register_forward_pre_hook(lambda _, inputs: met.append(inputs[0].shape[1]))
    for step in range(STEPS):
        made = groups(*case.get("groups", (3, 3)), seed=step, prompts=case.get("prompts", (1, 7)))
        for group in made[::2] if "equal" in case else ():
            group.rollouts[:] = [
                replace(one, verdict=replace(one.verdict, reward=0.25)) for one in group.rollouts
            ]
        draw = random.Random(step)
        for group in made if "trees" in case else ():
            group.rollouts[:] = [branched(draw, one) for one in group.rollouts]
        plan = dealt(
            made,
            step=step,
            skips_equal=case.get("equal") == "skipped",
            num_data_ranks=mesh.data.size,
            num_mini_batches=case.get("num_mini_batches", 1),
            micro_batch_tokens=case.get("tokens", 70) * mesh.sequence.size,
            prefix_saves=must_save(policy.training.share_prefix),
        )
        everything = Samples.concatenate(
            [part for rank in range(mesh.data.size) for part in plan.share(rank).samples]
        )
        everything = everything.select(everything.ids.argsort())
        batch = plan.share(mesh.data.rank)
        if "experts" in case:
            told = [with_experts(part, **case["experts"]) for part in batch.samples]
            batch = replace(batch, samples=told)
        if case.get("trees") == "repeated":
            everything, places, _ = lineages(everything)
            order, batch = torch.from_numpy(places[everything.mask]).argsort(), repeated(batch)
        else:
            order = torch.arange(everything.mask.sum())
        ours, theirs = policy.token_statistics(everything)
        logprobs.append(ours.double().cpu()[order])
        entropies.append(theirs.double().cpu()[order])
        met.clear()
        reports.append(policy.train(batch).metrics)
        # Some algorithms, and later mini-batches, are scored before they are trained.
        passes_once = not case.keys() & {"algorithm", "num_mini_batches"}
        training = policy.training
        recomputes = training.gradient_checkpointing or training.experts.balance_coefficient > 0
        if mesh.world.size == 1 and passes_once and not recomputes:
            assert sum(met) == reports[-1]["tokens/computed"]
    weights = whole_weights(policy.engine)
    policy.engine.destroy()
    return reports, logprobs, entropies, weights


def with_experts(samples: Samples, *, layers: int, count: int, chosen: int) -> Samples:
    """Samples of which engines report `chosen` of `count` experts, by token and layer, but for every
    fifth token.
    """
    starts = samples.token_ids.astype(int)[:, None, None] * 3 + np.arange(layers)[:, None] * 2
    experts = ((starts + np.arange(chosen)) % count).astype(np.uint8)
    experts[samples.token_ids % 5 == 0] = 255
    return replace(samples, experts=experts)


def differences(one: Any, other: Any) -> dict[str, float]:
    """Largest relative differences. The policy loss cancels, so it is compared at the scale of its
    terms: 1.
    """
    scales = {
        "loss": 1.0,
        "grad_norm": 1e-3,
        "entropy": 1e-3,
        "mismatch/mean_abs": 1e-3,
        "tokens/trained": 1.0,
        "staleness/token_mean": 1e-3,
        "staleness/token_max": 1.0,
    }
    scales |= {name: 1e-3 for name in one[0][0] if name.startswith("experts/")}
    if "correction/mean" in one[0][0]:
        shares = ("dropped_share", "clipped_share")
        names = ("mean", "effective_samples", *shares)
        scales |= {f"correction/{name}": 1e-3 for name in names}
        # Bounds that keep, drop or clip everything would compare nothing.
        assert 0 < sum(one[0][0][f"correction/{name}"] for name in shares) < 1
    numbers = {
        name: max(
            abs(a[name] - b[name]) / max(abs(a[name]), scale)
            for a, b in zip(one[0], other[0], strict=True)
        )
        for name, scale in scales.items()
    }
    if "kl" in one[0][0]:
        # About half the mean square of differences of log-probs of some 4 nats, with their
        # rounding: compared in nats.
        numbers["kl"] = max(
            abs((2 * a["kl"]) ** 0.5 - (2 * b["kl"]) ** 0.5)
            for a, b in zip(one[0], other[0], strict=True)
        )
    for name, number in (("logprobs", 1), ("entropies", 2)):
        pairs = zip(one[number], other[number], strict=True)
        numbers[name] = max((float((a - b).norm() / a.norm()) for a, b in pairs), default=0.0)
    weights, others = one[3], other[3]
    assert weights.keys() == others.keys()
    numbers["weights"] = max(
        float((weights[n] - others[n]).norm() / weights[n].norm()) for n in weights
    )
    return numbers


def assert_equal(oracle: list[Any], cases: list[Case], found: list[list[Any]]) -> None:
    """Every rank's result of every case is the oracle's, and that of every other rank to the last
    bit. Where data ranks divide experts, a token's log-prob is rounded otherwise in each rank's copy,
    since AVX-512 kernels round by a row's position in the product that has the copies of all ranks.
    """
    worst: dict[str, float] = {}
    for rank, results in enumerate(found):
        for case, expected, result in zip(cases, oracle, results, strict=True):
            numbers = differences(expected, result)
            assert max(numbers.values()) < 1e-5, (rank, case, numbers)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in numbers.items()}
    for results in found[1:]:
        for case, first, result in zip(cases, found[0], results, strict=True):
            layout = case.get("layout", ())
            divided = len(layout) == 4 and min(layout[0], layout[3]) > 1
            assert_bitwise(first, result, statistics=not divided)
    print(f"{len(found)} ranks, {len(cases)} cases, worst {worst}")


def assert_bitwise(one: Any, other: Any, statistics: bool = True) -> None:
    """Metrics, weights and, with `statistics`, log-probs and entropies are the same bits."""
    timeless = [
        [{k: v for k, v in report.items() if not k.startswith("time/")} for report in found[0]]
        for found in (one, other)
    ]
    assert timeless[0] == timeless[1]
    assert not statistics or all(
        torch.equal(a, b)
        for number in (1, 2)
        for a, b in zip(one[number], other[number], strict=True)
    )
    assert all(torch.equal(one[3][name], other[3][name]) for name in one[3])


def write(folder: Path, **changes: Any) -> str:
    """A random model with fewer KV heads than four ranks, and 41 tokens, which neither 2 nor 4 divides."""
    sizes = dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=41, biases=True
    )
    return str(write_model(folder, **sizes | changes))
