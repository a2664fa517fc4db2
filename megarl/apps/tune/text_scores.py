"""Scores of texts by a reward model in one process, with torch: for `megarl sample`, or behind a
reward server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from megarl.apps.tune.pairs import sums_of_responses
from megarl.data.chat_template import end_of_turn
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokens import scored_tokens
from megarl.errors import UserError
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.config import RunConfig
from megarl.settings.data import TemplateName
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer.role import Role
from megarl.types import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1024
"""Number of texts that are packed together."""


class Text(NamedTuple):
    """A prompt with a response to score, both as text."""

    prompt: str
    response: str
    ends: bool = True
    """Whether the token that ends a turn is added; False for a response that was cut off."""


class TextScorer:
    """A reward model, loaded into this process with torch, that scores prompts with responses:
    `scores` takes text, `token_scores` token ids. A process may have one `TextScorer` at a time,
    which only one thread may call; call `close` at the end.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        template: TemplateName,
        seed: int,
    ) -> None:
        """Load the model. `template`: how a prompt and a response become the text that is scored
        (`prompts.template`). Of `training`, the precision, `micro_batch_tokens`, ZeRO stage and
        time limits are used. `seed`: for weights that are random.
        """
        self._tokenizer = tokenizer
        self._template: TemplateName = template
        self._end = end_of_turn(tokenizer, template, is_last=True)
        device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
        self._stack = ExitStack()
        self._stack.callback(mesh_module.finalise)
        mesh = self._stack.enter_context(ProcessMesh(Layout(1, 1, 1)))
        self._role = Role(
            "reward model",
            model=model,
            training=training,
            mesh=mesh,
            device=device,
            seed=seed,
            head="scalar",
        )

    def scores(self, texts: Sequence[Text]) -> list[float]:
        """The score of each text (higher is better; may be NaN or infinite), in their order. Prompt
        and response are tokenised apart, as `task: reward_model` does it with its data.
        """
        prompts, replies = [text.prompt for text in texts], [text.response for text in texts]
        found = scored_tokens(self._tokenizer, prompts, replies, self._template, self._end)
        return self.token_scores(
            [ids[: None if text.ends else -1] for ids, text in zip(found, texts, strict=True)]
        )

    def token_scores(self, texts: Sequence[list[int]]) -> list[float]:
        """The score of each text, given as token ids of prompt and response, in their order (higher
        is better; may be NaN or infinite). Blocks until all are computed, in batches.
        """
        found: list[float] = []
        for first in range(0, len(texts), AT_ONCE):
            part = texts[first : first + AT_ONCE]
            # The score is at the last token alone, so that texts share all before where they agree.
            samples = Samples.concatenate(
                [
                    Samples.one(n, ids, mask=[False] * (len(ids) - 1) + [True])
                    for n, ids in enumerate(part)
                ]
            )
            found += sums_of_responses(self._role, samples).tolist()
        return found

    def close(self) -> None:
        """Release the model and its process group."""
        self._role.destroy()
        self._stack.close()


def score_texts(config: RunConfig, model: ModelConfig, texts: Sequence[Text]) -> list[float]:
    """The score of each text by the reward model `model`, with the tokenizer of the policy
    `config.model`: loads the model, scores and releases it. Raises `UserError` if a score is not
    finite.
    """
    same = {"zero_stage", "precision", "micro_batch_tokens", "collective_timeout_s"}
    training = TrainingConfig(**config.training.model_dump(include=same))
    tokenizer = load_tokenizer(
        config.model.tokenizer or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    template = config.prompts.template
    scorer = TextScorer(model, training, tokenizer=tokenizer, template=template, seed=config.seed)
    found = scorer.scores(texts)
    scorer.close()
    if not all(map(math.isfinite, found)):
        raise UserError(
            f"the reward model {model.path} scores a response with a number that is not finite; set"
            " another model"
        )
    return found
