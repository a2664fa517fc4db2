"""Heads: what a model of a run computes from its backbone's last hidden states.

    name       computes                                       for
    logprobs   log-prob and entropy of each trained token     policy, reference
    value      one number for each trained token              critic: value of the state before it
    scalar     one number for each sample, at its last token  reward model
    states     last hidden state of each trained token        teacher, see `trainer/teacher.py`

A score head is stored as `score.weight`, as in Hugging Face's sequence classifiers, so that each
reads the other's reward models.

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
    """Raise `ValueError` if the output head (unembedding) of a causal language model is not a
    linear layer without bias. A model with a `score`, as sequence classifiers have, is let through.
    `model` may be on the meta device.
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
    """A teacher's next-token distributions at M tokens, from which a student learns. The teacher's
    logits [M, V] are states @ weight.T; only these two factors are stored. G is the teacher's
    hidden size and V the size of the vocabulary.

    `states` [M, G] are the teacher's last hidden states, and `weight` [V, G] is its output head.
    Under tensor parallelism `weight` has the rows of the student's vocabulary shard. `divergence`
    has the settings of the divergence between student and teacher, such as its kind and
    temperature. `LogProbHead` computes that divergence.
    """

    states: torch.Tensor
    """[M, G] the teacher's last hidden states."""
    weight: torch.Tensor
    """[V, G] the teacher's output head; under tensor parallelism the rows of the student's
    shard."""
    divergence: Divergence


class LogProbHead(nn.Linear):
    """The output head (unembedding) of a model, an `nn.Linear` that does not return logits. It is
    called with hidden states [M, H] of M tokens, the ids of target tokens [M] and a temperature,
    and returns log-probs of the targets and entropies. If it also gets a teacher's distributions
    (`SoftTargets`), it returns the divergence from them too.

    The weight [V, H] keeps the name of the Hugging Face head that it replaces; under tensor
    parallelism it has the rows of this rank's part of the vocabulary.
    """

    shard: VocabularyShard | None = None
    """Under tensor parallelism, which rows of the vocabulary `weight` holds; None if it holds
    all."""
    backend = "chunked"
    transform = LogitTransform()
    """What the model does to its logits: a soft cap, a factor, or nothing."""

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        soft_targets: SoftTargets | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-probs and entropies at M tokens and, with `soft_targets`, the divergence from a
        teacher.

        `hidden` [M, H] has the dtype of the weight. `targets` [M] are int64 token ids.
        `temperature` is the divisor of the logits; with `soft_targets` it is not used.

        Without `soft_targets`, returns (log-probs of the targets, entropies), [M] each. Both have
        gradients by `hidden` and the head's weight.

        With `soft_targets`, whose tensors have the dtype of `hidden`, returns (divergences,
        entropies, log-probs of the targets, the teacher's log-probs of the targets), [M] each. The
        field `soft_targets.divergence` is a `Divergence`. Its `kind` is "forward_kl", KL(teacher ||
        student), "reverse_kl", KL(student || teacher), or "jensen_shannon", the generalised
        Jensen-Shannon divergence with its `beta`. Its `top_k`, if above 0, compares all but the
        teacher's likeliest `top_k` tokens as one. Its `temperature` is the divisor of both models'
        logits for all four results. Entropies are of the student's distributions. Only the
        divergences have gradients, by `hidden` and the head's weight; the teacher's tensors get
        none. A model that caps or scales its logits (`transform`) raises `AssertionError` here.

        Results are float32, or float64 for float64 inputs. All tensor-parallel ranks call it
        together and get the same results. Their arguments are the same but for
        `soft_targets.weight`, of which each rank has its own rows.
        """
        if soft_targets is None:
            return linear_logprobs(
                *(hidden, self.weight, targets, temperature / self.transform.factor),
                *(self.shard, self.backend, self.transform.cap),
            )
        assert self.transform.is_identity, "distillation knows plain logits only"
        found = linear_divergence(
            hidden,
            self.weight,
            soft_targets.states,
            soft_targets.weight,
            targets,
            soft_targets.divergence,
            self.shard,
        )
        # A tuple of tensors, in which ZeRO 3 finds what to hook.
        return found.divergence, found.entropy, found.logprobs, found.teacher_logprobs


class ScoreHead(nn.Linear):
    """A linear head with one output for each hidden state, for values or rewards: called with
    hidden states [M, H], it returns [M] float32. It is initialised to 0, so a new critic predicts
    0.

    Every tensor-parallel rank holds the whole weight [1, H] and computes the same output.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] of any dtype -> [M] float32, computed in float32."""
        # In float32 also where the model is in bfloat16, whose steps near 1 are 1/256.
        return nn.functional.linear(hidden.float(), self.weight.float())[:, 0]


def drop_output_head(model: PreTrainedModel) -> None:
    """Remove the output head (unembedding) of a causal language model, in place, for a model of
    which only the hidden states are wanted. If the head's weight is tied to the input embedding,
    the embedding stays.
    """
    output = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer is output:
                setattr(parent, name, None)


def use_score_head(model: PreTrainedModel) -> None:
    """Replace the output head (unembedding) of a causal language model, in place, by a `ScoreHead`
    of 0 named `score`. If the head's weight is tied to the input embedding, the embedding stays.
    `model.config` becomes that of a sequence classifier with one label, if transformers has such a
    class for the model's family.
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
