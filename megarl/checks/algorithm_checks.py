"""Settings of the algorithm that are allowed and hardly ever meant."""

from __future__ import annotations

from megarl.objectives.config import AlgorithmConfig

WIDEST_SEQUENCE_CLIP = 0.05
"""Clip width above which the ratio of a whole sequence, a mean over tokens, is hardly ever
clipped. The paper's widths are 3e-4 and 4e-4."""


def algorithm_warning(algorithm: AlgorithmConfig, num_updates: int) -> str:
    """What the user should know about the algorithm's settings; empty if nothing. `num_updates`:
    optimizer steps for each step's batch.
    """
    if algorithm.loss == "reinforce" and num_updates > 1:
        return (
            f"algorithm.loss is 'reinforce', which has no ratio and no clipping, with {num_updates}"
            " updates in a step (training.num_mini_batches x epochs_per_step): all but the first"
            " train on samples of an older policy as if they were the present one's"
        )
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.loss == "gspo" and widest > WIDEST_SEQUENCE_CLIP:
        return (
            f"algorithm.loss is 'gspo' with algorithm.clip_low {algorithm.clip_low:g} and clip_high"
            f" {algorithm.clip_high:g}, the widths for a token's ratio: the ratio of a sequence is"
            " a mean over its tokens, and such widths hardly ever clip it; the paper has 3e-4 and"
            " 4e-4"
        )
    return ""
