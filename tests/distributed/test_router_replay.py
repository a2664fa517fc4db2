"""Router replay trains alike in every layout, and with layers that are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import training_cases
from support.mixtures import write_mixture
from support.policy import Policy, on_mesh
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups
from support.training_cases import Case, assert_equal, differences

from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig

KINDS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"layers": 2, "count": 8, "chosen": 2},
    "gpt_oss": {"layers": 2, "count": 8, "chosen": 2},
    "glm4_moe": {"layers": 1, "count": 8, "chosen": 2},
}
"""What engines report, by family; the first layer of glm4_moe has no experts."""


def cases_of(kind: str, model: str, layouts: list[tuple[int, ...]]) -> list[Case]:
    """A case for each layout, every second one with gradient checkpointing, others with shared
    prefixes.
    """
    settings = [{"gradient_checkpointing": True}, {"share_prefix": "on"}]
    return [
        {
            "layout": layout,
            "stage": number % 4,
            "model": model,
            "experts": KINDS[kind],
            "algorithm": {"router_replay": "rollout"},
            "training": settings[number % 2],
            "prompts": (6, 9),
        }
        for number, layout in enumerate(layouts)
    ]


def test_every_layout_takes_the_same_experts(tmp_path: Path) -> None:
    models = {kind: write_mixture(tmp_path / kind, kind) for kind in KINDS}
    file, plain = training_cases.__file__, dict[str, Any]()
    alone = [case for kind in KINDS for case in cases_of(kind, models[kind], [(1, 1, 1)] * 2)]
    off = [case | {"algorithm": {}} for case in alone[::2]]
    found = run_ranks(1, file, "run_cases", [*alone, *off])[0]
    for kind, one, again, without in zip(KINDS, found[:6:2], found[1:6:2], found[6:], strict=True):
        plain[kind] = one
        numbers = differences(one, again)
        assert max(numbers.values()) < 1e-5, numbers
        assert differences(one, without)["weights"] > 1e-5, "no expert was replayed"
        assert one[0][0]["router_replay/unreported"] > 0
    layouts = [(2, 1, 1, 2), (1, 2, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)]
    cases = [
        case
        for kind in KINDS
        for case in cases_of(kind, models[kind], layouts[: 3 if kind == "gpt_oss" else 4])
    ]
    oracles = [plain[kind] for case in cases for kind in KINDS if models[kind] == case["model"]]
    ranks = run_ranks(2, file, "run_cases", cases, timeout_s=900)
    assert_equal(oracles, cases, ranks)
    for oracle, case, one in zip(oracles, cases, ranks[0], strict=True):
        for first, other in zip(oracle[0], one[0], strict=True):
            name = "router_replay/unreported"
            assert first[name] == other[name], case


def test_the_trainers_own_choices_are_taken_again_in_later_mini_batches(tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model")
    differing = {}
    with on_mesh() as (mesh, device):
        for replay in ("trainer", "off"):
            policy = Policy(
                model=ModelConfig(path=model),
                training=TrainingConfig(
                    num_mini_batches=2, optimizer=OptimizerConfig(learning_rate=3e-2)
                ),
                algorithm=AlgorithmConfig(router_replay=replay),  # pyright: ignore
                temperature=1.0,
                mesh=mesh,
                device=device,
                total_steps=1,
                seed=1,
            )
            routers, used = policy.engine.module.routers, list[list[torch.Tensor]]()
            forward = policy.engine.module.forward

            def recorded(
                *given: Any, routers: Any = routers, used: Any = used, forward: Any = forward
            ) -> Any:
                before, routers.used = routers.used, []
                output = forward(*given)
                used.append(routers.used)
                routers.used = None if before is None else routers.used
                return output

            policy.engine.module.forward = recorded
            made = groups(6, 3, prompts=(3, 7))
            batch = dealt(made, num_mini_batches=2, micro_batch_tokens=10**4).share(0)
            policy.train(batch)
            scored, _, trained = used  # the first mini-batch is not scored
            differing[replay] = [
                (one != two).any(-1).float().mean().item()
                for one, two in zip(scored, trained, strict=True)
            ]
            policy.engine.destroy()
    assert differing["trainer"] == [0.0, 0.0]
    assert min(differing["off"]) > 0.02, "no choice has changed: this test would prove nothing"
