"""Tiny mixtures of experts of each supported family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import write_model

HEADS: dict[str, Any] = dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=24, mlp_only_layers=[]),
    "mixtral": dict(num_local_experts=8, intermediate_size=24),
    "olmoe": dict(num_experts=8, intermediate_size=24, head_dim=16),
    "gpt_oss": dict(num_local_experts=8, intermediate_size=24, sliding_window=12),
    "glm4_moe": dict(
        n_routed_experts=8, moe_intermediate_size=24, n_group=4, topk_group=2, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True,
    ),
}  # fmt: skip


def prefer(model: Any, expert: int | None) -> None:
    """Have the biases of a model's routers send every token to an expert."""
    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("router")]
    for router in routers if expert is not None else ():
        for name in ("bias", "e_score_correction_bias"):
            if hasattr(router, name):
                getattr(router, name).data[expert] = 50.0


def write_mixture(folder: Path, kind: str = "qwen3_moe", **changes: Any) -> str:
    """A random mixture of 8 experts, of which each token takes 2, as a Hugging Face folder."""
    sizes = HEADS | FAMILIES[kind] | {"num_experts_per_tok": 2} | changes
    return str(write_model(folder, kind=kind, biases=kind == "gpt_oss", **sizes))
