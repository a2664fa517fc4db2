"""Real trainer ranks, real engines: whatever the layouts, after each publish engines compute what a
fresh model does.

Four ranks train (data 2 x tensor 2) under ZeRO 3 and 1; an engine of tensor 2 and two engines of
tensor 1, or one of tensor 4, take their weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

from support.engine_ranks import whole_plan
from support.mixtures import FAMILIES
from support.ranks import run_ranks
from support.tiny import VOCABULARY, groups, write_model

BOUND = 1e-4
PUBLISHES = 5
TOPOLOGIES = ((1, 2), (2, 1))
"""(engines, tensor ranks of each)."""


def publishes(
    folder: str, topologies: tuple[tuple[int, int], ...], transports: list[str], zero_stage: int
) -> list[dict[str, Any]]:
    """Train and publish in turns, on every rank; rank 0 returns what engines and a fresh model
    compute after each publish.
    """
    from contextlib import ExitStack
    from unittest.mock import patch

    import torch
    from support.engine_side import PlainPolicy, engines_in
    from support.policy import Policy
    from support.rollouts import dealt
    from transformers import AutoConfig

    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.rollout.ray_cluster import Cluster
    from megarl.settings.objectives import AlgorithmConfig
    from megarl.settings.rollout import EngineConfig
    from megarl.settings.training import (
        ExpertsConfig,
        ModelConfig,
        OptimizerConfig,
        TrainingConfig,
    )
    from megarl.settings.weight_sync import WeightSyncConfig
    from megarl.system.process_env import own_cluster_token, prepare_environment
    from megarl.types import Samples
    from megarl.weights.probe import Probe
    from megarl.weights.published import kept_buffers
    from megarl.weights.publisher import Publisher
    from megarl.weights.recorded_table import recorded_table

    prepare_environment(1)
    torch.set_num_threads(1)
    config, found, publishers = AutoConfig.from_pretrained(folder), [], []
    with ExitStack() as stack:
        # Many buckets, and layers that are cut.
        stack.enter_context(patch.object(WeightSyncConfig, "bucket_bytes", 2**12))
        device = mesh_module.initialise(timeout_s=400)
        layout = Layout(data=2, tensor=2)
        if config.model_type in MIXTURES:
            layout = Layout(data=2, tensor=2, expert=2)
        mesh = stack.enter_context(ProcessMesh(layout, timeout_s=400))
        engines: list[Any] = [None] * len(topologies)
        if mesh.rank == 0:
            cluster = stack.enter_context(
                Cluster(namespace=f"test-{os.getpid()}", token=own_cluster_token())
            )
            engines = [
                engines_in(
                    cluster,
                    Path(folder),
                    EngineConfig(tensor=tensor, start_timeout_s=360.0),
                    64,
                    count=count,
                )
                for count, tensor in topologies
            ]
        policy = Policy(
            model=ModelConfig(path=folder),
            training=TrainingConfig(
                zero_stage=zero_stage,
                optimizer=OptimizerConfig(learning_rate=3e-2),
                experts=ExpertsConfig(bias_rate=0.1 * (config.model_type == "glm4_moe")),
            ),
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            mesh=mesh,
            device=device,
            total_steps=PUBLISHES,
            seed=1,
        )
        stack.callback(policy.engine.destroy)
        for (count, tensor), group, transport in zip(topologies, engines, transports, strict=True):
            if group is not None:
                group.wait()
            table = recorded_table(folder, config.to_dict(), tensor, on_cpu=True)
            publisher = Publisher(
                WeightSyncConfig(
                    transport=transport,
                    probe_tolerance=BOUND,
                ),
                table=table,
                policy=policy,
                engines=group,
                num_engines=count,
                engine_tensor=tensor,
                mesh=mesh,
                dtype="float32",
                probe=Probe.random(
                    dtypes=("float32",),
                    vocab_size=VOCABULARY,
                    max_tokens=64,
                    seed=0,
                    tolerance=BOUND,
                ),
            )
            stack.callback(publisher.close)
            publishers.append(publisher)
        tokens = torch.randint(
            0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        for version in range(PUBLISHES):
            made = groups(8, 4, seed=version)
            batch = dealt(made, step=version, num_data_ranks=2, micro_batch_tokens=200)
            policy.train(batch.share(mesh.data.rank))
            for publisher in publishers:
                publisher.publish(version)
            whole = {name: tensor.clone() for name, tensor in policy.engine.weights()}
            whole |= kept_buffers(policy.engine.module.model)  # routers' biases
            if mesh.rank == 0:
                # The other way round: every tensor gathered whole, put into a model that
                # transformers makes.
                fresh = PlainPolicy(Path(folder), device)
                missing, unexpected = fresh.model.load_state_dict(whole, strict=False)
                kept = {name for name, _ in fresh.model.named_buffers()} - whole.keys()
                assert not unexpected and set(missing) <= {"lm_head.weight"} | kept
                expected = fresh.logprobs(Samples.one(0, tokens)).tolist()
                scores = [score for group in engines for score in group.score(tokens, timeout_s=60)]
                found.append({"expected": expected, "scores": scores})
        if mesh.rank == 0:
            for publisher in publishers:
                spec = publisher.route.spec
                assert publisher.route.written == whole_plan(spec, publisher._table).minimum(4)
    mesh_module.finalise()
    return found


# vLLM's CPU build packs experts in 32 columns.
WIDE: Any = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=70)
MIXTURES: dict[str, dict[str, Any]] = {
    kind: dict(kind=kind, num_experts_per_tok=2, **WIDE | FAMILIES[kind] | {width: 64})
    for kind, width in (
        ("qwen3_moe", "moe_intermediate_size"),
        ("glm4_moe", "moe_intermediate_size"),
        ("mixtral", "intermediate_size"),
    )
}
OF_TENSOR_4 = MIXTURES["qwen3_moe"] | {"moe_intermediate_size": 128}
CASES = {
    "qwen2, tied": (
        dict(kind="qwen2", tied=True, biases=True),
        ["shared_memory", "point_to_point"],
        3,
    ),
    "qwen3, untied, 4 heads": (
        dict(
            kind="qwen3",
            tied=False,
            vocab_size=70,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ),
        ["point_to_point", "shared_memory"],
        1,
    ),
    "qwen3_moe": (MIXTURES["qwen3_moe"], ["shared_memory", "point_to_point"], 3),
    "glm4_moe": (MIXTURES["glm4_moe"], ["point_to_point", "shared_memory"], 2),
    "mixtral": (MIXTURES["mixtral"], ["shared_memory", "point_to_point"], 1),
    "qwen3_moe, tensor 4": (OF_TENSOR_4, ["shared_memory"], 3),
}
TIED, UNTIED, *MIXED = CASES


@pytest.mark.parametrize(
    "case",
    [TIED, *(pytest.param(name, marks=pytest.mark.nightly) for name in (UNTIED, *MIXED))],
)
def test_engines_compute_with_the_weights_of_every_version(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from megarl.weights.recorded_table import recorded_table

    kind, transports, zero_stage = CASES[case]
    folder = write_model(tmp_path / "model", **kind)
    topologies = ((1, 4),) if case.endswith("tensor 4") else TOPOLOGIES
    for _, tensor in topologies:  # here, so that the ranks find the tables in the cache
        config = AutoConfig.from_pretrained(folder).to_dict()
        recorded_table(str(folder), config, tensor, on_cpu=True)
    answers = run_ranks(
        4, __file__, "publishes", str(folder), topologies, transports, zero_stage, timeout_s=560
    )[0]
    assert len(answers) == PUBLISHES
    before: list[float] = [0.0] * len(answers[0]["expected"])
    for answer in answers:
        assert len(answer["scores"]) == sum(count for count, _ in topologies)
        for score in answer["scores"]:
            gap = max(abs(a - b) for a, b in zip(score, answer["expected"], strict=True))
            print(f"{case}: largest difference {gap:.1e}")
            assert gap < BOUND
        change = max(abs(a - b) for a, b in zip(before, answer["expected"], strict=True))
        assert change > 0.01, "training changed nothing: this test would prove nothing"
        before = answer["expected"]
