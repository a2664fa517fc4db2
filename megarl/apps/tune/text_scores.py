"""Scores of texts by a reward model in this process, with torch, for `megarl sample`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from megarl.apps.tune.pairs import sums_of_responses
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer.role import Role
from megarl.types import Samples

AT_ONCE = 1024
"""Number of texts that are packed together."""


def token_scores(
    model: ModelConfig, training: TrainingConfig, texts: Sequence[list[int]], *, seed: int = 0
) -> list[float]:
    """The score of each text, given as token ids of prompt and response, in their order (higher is
    better; may be NaN or infinite). Loads the reward model, scores and releases it. Of `training`,
    the precision, `micro_batch_tokens`, ZeRO stage and time limits are used. `seed`: for weights
    that are random.
    """
    device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
    with ExitStack() as stack:
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(ProcessMesh(Layout(1, 1, 1)))
        role = Role(
            "reward model",
            model=model,
            training=training,
            mesh=mesh,
            device=device,
            seed=seed,
            head="scalar",
        )
        stack.callback(role.destroy)
        scores: list[float] = []
        for first in range(0, len(texts), AT_ONCE):
            # The score is at the last token alone, so that texts share all before where they agree.
            samples = [
                Samples.one(number, ids, mask=[False] * (len(ids) - 1) + [True])
                for number, ids in enumerate(texts[first : first + AT_ONCE])
            ]
            scores += sums_of_responses(role, Samples.concatenate(samples)).tolist()
    return scores
