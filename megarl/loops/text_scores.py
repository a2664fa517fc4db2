"""Scores of texts by a reward model, in one process: for data sets, outside training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.config import RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokens import prompt_tokens, response_tokens
from megarl.errors import UserError
from megarl.loops.pairs import pack_pairs, totals
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.config import ModelConfig, TrainingConfig
from megarl.trainer.role import Role
from megarl.types import Samples

AT_ONCE = 1024
"""Texts that are packed together."""


class Text(NamedTuple):
    """A prompt with a response to score."""

    prompt: str
    response: str
    ends: bool = True
    """Whether an end-of-sequence token follows; not behind a response that was cut off."""


def score_texts(config: RunConfig, model: ModelConfig, texts: Sequence[Text]) -> list[float]:
    """The score of each text. Prompt and response are tokenised apart, as `megarl reward-model`
    does it with its data. Raises `UserError` if a score is not finite.
    """
    tokenizer = load_tokenizer(
        config.model.tokenizer or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    template = config.prompts.template
    asked = prompt_tokens(tokenizer, [text.prompt for text in texts], template)
    replies = response_tokens(tokenizer, [text.response for text in texts])
    training = TrainingConfig(
        zero_stage=config.training.zero_stage,
        precision=config.training.precision,
        micro_batch_tokens=config.training.micro_batch_tokens,
    )
    device = mesh_module.initialise(timeout_s=config.training.collective_timeout_s)
    found: list[float] = []
    with ProcessMesh(Layout(1, 1, 1)) as mesh:
        role = Role(
            "reward model",
            model=model,
            training=training,
            mesh=mesh,
            device=device,
            seed=config.seed,
            head="scalar",
        )
        for first in range(0, len(texts), AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, len(texts)))
            samples = Samples.concatenate(
                [
                    Samples.one(n - first, asked[n] + replies[n][: None if texts[n].ends else -1])
                    for n in numbers
                ]
            )
            found += _scores(role, samples).tolist()
        role.destroy()
    mesh_module.finalise()
    if not all(map(math.isfinite, found)):
        raise UserError(
            f"the reward model {model.path} scores a response with a number that is not finite; set"
            " another model"
        )
    return found


@torch.no_grad()
def _scores(role: Role, samples: Samples) -> np.ndarray:
    """[S] the score of each sample."""
    found = torch.zeros(len(samples), dtype=torch.float64, device=role.device)
    for micro in pack_pairs(samples, role, together=1):
        scores, ids = role.engine(micro, 1.0)
        sums, members = totals(scores, ids, micro)
        found[members] = sums
    return found.cpu().numpy()
