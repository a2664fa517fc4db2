"""Heads: what a model of a run computes from its backbone's last hidden states.

    name       computes                                       for
    logprobs   log-prob and entropy of each trained token     policy, reference
    value      one number for each trained token              critic: value of the state before it
    scalar     one number for each sample, at its last token  reward model
    states     last hidden state of each trained token        teacher, see `trainer/teacher.py`

A score head is stored as `score.weight`, as in Hugging Face's sequence classifiers.

To add one, write a module, add its name to `HeadName` and a branch to `RoleModel.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from megarl.kernels.divergence import Divergence, linear_divergence
from megarl.kernels.logprobs import VocabularyShard, linear_logprobs
from megarl.trainer.logits import LogitTransform

HeadName = Literal["logprobs", "value", "scalar", "states"]
SCORING: tuple[HeadName, ...] = ("value", "scalar")
"""Heads that are a `ScoreHead`."""


def refuse_head(model: PreTrainedModel) -> None:
    """Raise `ValueError` for an output head other than a linear layer without bias, or a
    `score`.
    """
    output = model.get_output_embeddings()
    if hasattr(model, "score") or (isinstance(output, nn.Linear) and output.bias is None):
        return
    raise ValueError(
        f"model {model.name_or_path} has an output head other than a linear layer without bias;"
        " choose another model"
    )


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's next-token distributions at M tokens, as factors of its logits, states @
    weight.T.
    """

    states: torch.Tensor
    """[M, G] the teacher's last hidden states."""
    weight: torch.Tensor
    """[V, G] the teacher's output head; under tensor parallelism the rows of the student's
    shard."""
    divergence: Divergence


class LogProbHead(nn.Linear):
    """An output head that returns log-probs instead of logits. Its weight [V, H] keeps its name;
    under tensor parallelism it has this rank's rows.
    """

    shard: VocabularyShard | None = None
    """Which rows of the vocabulary `weight` has; None for all."""
    backend = "chunked"
    transform = LogitTransform()

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """From `hidden` [M, H] and `targets` [M] int64 to (log-probs, entropies), [M] each, of
        logits divided by `temperature`. Collective over tensor-parallel ranks.

        With `soft_targets` to (divergences, entropies, log-probs, the teacher's log-probs), [M]
        each, at the divergence's temperature, where only divergences have gradients. Raises
        `AssertionError` if the model caps or scales its logits. Results are float32, or float64 for
        float64 inputs.
        """
        if soft_targets is None:
            return linear_logprobs(
                *(hidden, self.weight, targets, temperature / self.transform.factor),
                *(self.shard, self.backend, self.transform.cap),
            )
        assert self.transform.is_identity, "distillation knows plain logits only"
        result = linear_divergence(
            hidden,
            self.weight,
            soft_targets.states,
            soft_targets.weight,
            targets,
            soft_targets.divergence,
            self.shard,
        )
        # A tuple of tensors, in which ZeRO 3 finds what to hook.
        return result.divergence, result.entropy, result.logprobs, result.teacher_logprobs


class ScoreHead(nn.Linear):
    """A linear head with one output, initialised to 0. Every tensor-parallel rank holds the whole
    weight [1, H].
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] of any dtype -> [M] float32."""
        # In float32 also where the model is in bfloat16, whose steps near 1 are 1/256.
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]


def drop_output_head(model: PreTrainedModel) -> None:
    """Remove the output head, in place. A tied embedding stays."""
    output = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer is output:
                setattr(parent, name, None)


def use_score_head(model: PreTrainedModel) -> None:
    """Replace the output head, in place, by a `ScoreHead` named `score`; a tied embedding stays.
    `model.config` becomes that of a classifier with one label, where transformers has one.
    """
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Module) and isinstance(embedding.weight, torch.Tensor)
    with torch.device(embedding.weight.device):
        head = ScoreHead(model.config.get_text_config().hidden_size, embedding.weight.dtype)
    drop_output_head(model)
    model.add_module("score", head)
    # A classifier writes nothing.
    model.generation_config = None  # pyright: ignore[reportAttributeAccessIssue]
    model.config.num_labels = 1
    classifier: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    if classifier is not None:
        model.config.architectures = [classifier.__name__]
