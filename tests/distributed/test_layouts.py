"""The matrix: every layout of 1, 2 and 4 ranks under every ZeRO stage trains exactly as one rank
does, and computing prompts once for their group, and the parts of rollouts that are trees once for
their branches, exactly as repeating them.

One launch a number of ranks: a start costs more than a case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import training_cases
from support.ranks import run_ranks
from support.training_cases import Case, assert_bitwise, assert_equal, layouts, write

from megarl.settings.objectives import CorrectionConfig, KLConfig

REPEATED: Case = {"training": {"share_prefix": "off"}, "prompts": (1, 24)}
SHARED: Case = {"training": {"share_prefix": "on"}, "prompts": (1, 24)}
TREES: Case = {"trees": "once"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four query heads, two key heads (fewer than four ranks), 41 words (which neither 2 nor 4
    divides).
    """
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: str) -> Any:
    case = {"layout": (1, 1, 1), "stage": 0, "model": model, **REPEATED}
    cases = [case, case | {"trees": "repeated"}]
    return run_ranks(1, training_cases.__file__, "run_cases", cases)[0]


def trees(model: str, size: int, stages: tuple[int, ...]) -> list[Case]:
    """Some stages of every layout, with every Ulysses degree; prompts of a group are computed once
    or, under stage 0, repeated.
    """
    return [
        {"layout": layout, "stage": stage, "model": model, "sequence": {"ulysses": ulysses}}
        | TREES
        | (SHARED if stage else REPEATED)
        for layout in layouts(size)
        for stage in stages
        for ulysses in {1, 2, layout[1]}
        if layout[1] % ulysses == 0
    ]


@pytest.mark.parametrize(("size", "is_whole"), [
    (1, True), (4, False), *(pytest.param(n, True, marks=pytest.mark.nightly) for n in (2, 4)),
])  # fmt: skip
def test_the_matrix(model: str, alone: Any, size: int, is_whole: bool) -> None:
    """Not whole: one stage of each layout, another than that of the next; half of the trees."""
    cases = [
        {"layout": layout, "stage": stage, "model": model, **SHARED}
        for number, layout in enumerate(layouts(size))
        for stage in range(4)
        if is_whole or stage == 3 * number % 4
    ]
    again = [case for number, case in enumerate(cases) if number % 5 == 0]
    oracles = [alone[0]] * len(cases)
    cases += trees(model, size, (0, 3)) if is_whole else trees(model, size, (3,))[::2]
    oracles += [alone[1]] * (len(cases) - len(oracles))
    file, options = training_cases.__file__, {"timeout_s": 900, "is_last_fresh": size > 1}
    found = run_ranks(size, file, "run_cases", cases + again, **options)
    assert_equal(oracles, cases, [results[: len(cases)] for results in found])
    for results in found:
        for case, repeated in zip(again, results[len(cases) :], strict=True):
            assert_bitwise(results[cases.index(case)], repeated)
        for case, oracle, (reports, *_) in zip(cases, oracles, results, strict=False):
            saved = reports[0]["tokens/shared_saved"]
            assert saved > 0 or case["layout"][0] > 1, "prompts were repeated"
            if saved:
                computed = reports[0]["tokens/computed"]
                # 2 of padding for each data rank that has a packed sequence less than the others.
                padding = computed + saved - oracle[0][0]["tokens/computed"]
                most = 2 * (case["layout"][0] - 1) if "trees" in case else 0
                assert padding in range(0, most + 1, 2)


GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0
)
CAPS = dict(
    head_dim=16, query_pre_attn_scalar=16, sliding_window=12, attn_logit_softcapping=2.0,
    final_logit_softcapping=4.0, tied=True,
)  # fmt: skip


ZIGZAG = {"ulysses": 2, "cut": "zigzag", "transport": "ring"}


def at(base: Case, *layout: int, stage: int, **more: Any) -> Case:
    return base | {"layout": layout, "stage": stage} | more


def variants(folder: Path) -> list[Case]:
    """Models, schedules and settings, each under the layouts where it could go wrong; without
    `layout` for the oracle.
    """
    qwen3 = {"model": write(folder / "qwen3", kind="qwen3")}
    tied = {"model": write(folder / "tied", tied=True)}
    llama = {"model": write(folder / "llama", kind="llama", attention_bias=True, mlp_bias=True)}
    mistral = {"model": write(folder / "mistral", kind="mistral", head_dim=24)}
    wide = {"model": write(folder / "wide", num_attention_heads=8, num_key_value_heads=4)}
    recomputed = {"gradient_checkpointing": True}
    in_reward = KLConfig(coefficient=0.05, where="reward")
    per_token = {"advantage": "reinforce_plus_plus_tokens", "kl": in_reward}
    gspo = {"loss": "gspo", "aggregation": "sequence"}
    # Bounds with which about half of the samples are dropped, whose tokens several ranks share.
    dropping = {
        "loss": "reinforce",
        "correction": CorrectionConfig(kind="geometric_mask", low=0.17, high=1e4),
        "kl": KLConfig(coefficient=0.05, target=0.1),
    }
    weighing = {"correction": CorrectionConfig(kind="sequence_mask", low=1e-6, high=1e4)}
    entropy = {"entropy_coefficient": 0.01}
    ring, copies, every = {"transport": "ring"}, {"ulysses": 4}, {"transport": "all_gather"}
    full = tied | {"groups": (1, 1), "prompts": (90, 95), "algorithm": gspo | entropy}
    one = llama | {"groups": (1, 1), "algorithm": entropy}
    two = llama | {"groups": (1, 2), "training": {"attention": "reference"}}
    return [
        at(qwen3, 1, 1, 4, stage=3, training={"norms": "torch"}),
        at(qwen3, 1, 2, 2, stage=2, training=recomputed),
        at(tied, 2, 1, 2, stage=3, training=recomputed),
        at(tied, 1, 4, 1, stage=1, algorithm=gspo),
        at(llama, 1, 2, 2, stage=3, algorithm=gspo),
        at(mistral, 1, 2, 2, stage=0, sequence=ring),
        at(wide, 1, 4, 1, stage=3, sequence=copies),
        at(wide, 1, 4, 1, stage=2, training=recomputed, sequence=ZIGZAG),
        at(wide, 1, 4, 1, stage=1, sequence=every | {"cut": "zigzag_document"}),
        at(wide, 1, 4, 1, stage=3, sequence=every | {"ulysses": 2, "cut": "striped"}),
        at(wide, 1, 2, 2, stage=1, sequence={"ulysses": 2, "cut": "contiguous"}),
        # More key heads wanted than there are: neighbours get copies of one.
        at(qwen3, 1, 4, 1, stage=3, sequence=copies | {"cut": "zigzag"}, algorithm=gspo),
        # A prompt that fills the first ranks: they have no response tokens.
        at(full, 1, 4, 1, stage=3, sequence={"cut": "contiguous"}),
        # Advantages per token, from samples that sequence ranks share.
        at(tied, 2, 2, 1, stage=2, algorithm=per_token, num_mini_batches=2),
        at(tied, 1, 2, 2, stage=3, algorithm=per_token),
        at(tied, 1, 4, 1, stage=1, algorithm=dropping),
        at(tied, 2, 2, 1, stage=3, algorithm=weighing),
        # Fewer samples than data ranks: some have nothing at all.
        at(two, 4, 1, 1, stage=2),
        at(one, 2, 2, 1, stage=3),
    ]


def families(folder: Path) -> list[Case]:
    """Models with windows, soft caps, sinks and factors, each with prompts computed once that are
    longer than a window.
    """
    mixed = ["sliding_attention", "full_attention"]
    window: dict[str, Any] = {"sliding_window": 12}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn |= {"original_max_position_embeddings": 64}
    made = {
        "granite": GRANITE,
        "gemma2": CAPS,
        "gemma3_text": window | {"query_pre_attn_scalar": 16, "layer_types": mixed, "tied": True},
        "mistral": window,
        "phi3": window | {"partial_rotary_factor": 0.5},
        "olmo2": {},
        "granite_swa": window | {"layer_types": mixed, "attention_multiplier": 0.2},
        "llama": {"rope_parameters": yarn},
    }
    cases = {
        kind: {"model": write(folder / kind, kind=kind, **changes), "prompts": (1, 24)}
        for kind, changes in made.items()
    }
    # AdamW's first step amplifies rounding where capped logits are steep: with longer prompts one
    # token of gemma2 has log-probs that differ by 1e-5 between two packings on one rank. In float64
    # they do not: see test_families.py.
    cases["gemma2"]["prompts"] = (1, 7)
    gemma2 = cases["gemma2"]
    return [
        at(cases["granite"], 1, 2, 2, stage=1),
        at(gemma2, 1, 2, 2, stage=3, training={"norms": "torch"}),
        at(gemma2, 1, 4, 1, stage=2, training={"gradient_checkpointing": True}, sequence=ZIGZAG),
        at(cases["gemma3_text"], 1, 2, 2, stage=2, sequence={"transport": "all_gather"}),
        at(cases["mistral"], 1, 4, 1, stage=1, sequence={"cut": "contiguous"}),
        at(cases["phi3"], 2, 2, 1, stage=3, sequence={"transport": "ring"}),
        at(cases["olmo2"], 1, 4, 1, stage=3, sequence={"ulysses": 4}),
        at(cases["granite_swa"], 1, 2, 2, stage=0),
        at(cases["llama"], 1, 2, 2, stage=3),
    ]


def _sharing(case: Case, share: str) -> Case:
    """The case, with prompts computed once or repeated."""
    return case | {"training": case.get("training", {}) | {"share_prefix": share}}


def _oracle(case: Case) -> Case:
    """The case on one rank, with the model's own norms and torch's attention."""
    kernels = ("norms", "attention")
    chosen = {name: one for name, one in case.get("training", {}).items() if name not in kernels}
    return case | {"layout": (1, 1, 1), "stage": 0, "sequence": {}, "training": chosen}


@pytest.mark.parametrize(("make", "first"), [
    (variants, 0),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((variants, 1), (families, 0))),
])  # fmt: skip
def test_schedules_settings_and_families(
    make: Callable[[Path], list[Case]], first: int, tmp_path: Path
) -> None:
    """Of the variants every second one, from the first or from the next."""
    plain = make(tmp_path)[first :: 2 if make is variants else 1]
    oracles, file = [_sharing(_oracle(case), "off") for case in plain], training_cases.__file__
    oracle = run_ranks(1, file, "run_cases", oracles)
    cases = [
        _sharing(case, "off" if number % 4 == 3 and make is variants else "on")
        for number, case in enumerate(plain)
    ]
    found = run_ranks(4, file, "run_cases", cases, timeout_s=900)
    assert_equal(oracle[0], cases, found)
