"""`task: sft`, supervised fine-tuning: demonstrations in, with the same policy network, engine and
packing as reinforcement learning.

Demonstration -> Samples -> MicroBatch -> -log-prob of the response, one mean over the step's
response tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from megarl.apps.tune.supervised import (
    StepLoss,
    Task,
    all_batches,
    run_supervised,
    supervised_step,
)
from megarl.data.demonstrations import DemonstrationList
from megarl.settings.config import SftConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.types import Demonstration, MicroBatch, Samples, StepReport


def to_sample(sample_id: int, demonstration: Demonstration) -> Samples:
    """Concatenate the token ids of prompt and response of `demonstration` into a batch of one
    sequence with the id `sample_id`. `mask` is True for the tokens to train on: the response or, if
    the demonstration is a conversation, the assistant's turns.
    """
    prompt, response = demonstration.prompt_ids, demonstration.response_ids
    chosen = demonstration.response_mask or [1] * len(response)
    mask = np.array([0] * len(prompt) + chosen, dtype=bool)
    return Samples.one(sample_id, prompt + response, mask=mask)


class SftTask(Task):
    """Fine-tunes a policy on demonstrations. It supplies the training loop `run_supervised` with
    the policy, its batches and its loss. All ranks create the object and call every method
    together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config, rows = cast("SftConfig", context.config), inputs.held_out_rows
        role = context.role("policy", config.model, optimizer_steps=config.steps)
        super().__init__(role, inputs.rows, config.training.max_skipped_steps)
        self._held_out = all_batches(
            rows, DemonstrationList.at, config.samples_per_step, context.mesh, self.batch
        )
        """The held-out rows in batches of about a step's size, since the micro-batches of a whole
        batch are on the device at once."""

    def batch(self, rows: Sequence[Any]) -> Samples:
        """On rank 0: a batch with one token sequence for each of `rows`, tokenised demonstrations;
        it takes about 13 bytes a token.
        """
        return Samples.concatenate([to_sample(number, row) for number, row in enumerate(rows)])

    def begin(self, batch: Samples) -> StepLoss:
        return SftStep(self.role, batch)

    def evaluate(self) -> dict[str, float]:
        """{"eval/loss": mean of -log-prob over the response tokens of all held-out demonstrations,
        "eval/tokens": number of these tokens}; {} without held-out demonstrations.
        """
        if not self._held_out:
            return {}
        loss, tokens = 0.0, 0.0
        for batch in self._held_out:
            metrics = self.evaluated(batch)
            loss += metrics["loss"] * metrics["tokens/trained"]
            tokens += metrics["tokens/trained"]
        return {"eval/loss": loss / max(1.0, tokens), "eval/tokens": tokens}


def main(config: SftConfig, inputs: RunInputs) -> int:
    """Run `task: sft`: fine-tune a policy on demonstrations until `config.steps`. Every trainer
    rank calls it; rank 0 prints a summary as one JSON object on standard output. `inputs`:
    tokenizer, data set and so on, as `check_sft` returns them. Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: SftTask(context, inputs))


class SftStep(StepLoss):
    """The loss of a policy on one batch of demonstrations, computed micro-batch by micro-batch: the
    mean of -log-prob over the batch's response tokens.
    """

    def __init__(self, role: Role, samples: Samples) -> None:
        """`samples`: the batch, the same on every rank."""
        super().__init__(role, samples, ("loss", "tokens"))
        # Nothing predicts the first token of a sample.
        trained = samples.mask.sum() - samples.mask[samples.offsets[:-1]].sum()
        self._num_trained = max(1, int(trained))

    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        logprobs, _ = self.role.engine(micro, 1.0)
        if guard is not None:
            guard.watch("policy's log-probs", logprobs)
        loss = -logprobs.sum() / self._num_trained
        self.metrics.add(loss=loss.detach().double(), tokens=len(logprobs))
        return loss

    def reduced(self) -> dict[str, float]:
        """{"loss": mean of -log-prob, "tokens/trained": number of response tokens}, over all ranks,
        on every rank. The number is 0 if the optimizer step was skipped because of values that are
        not finite.
        """
        sums = self.metrics.reduce(self.role.mesh.gradient)
        return {"loss": sums["loss"], "tokens/trained": sums["tokens"]}


def sft_step(role: Role, samples: Samples, step: int, guard: StepGuard) -> StepReport:
    """Take one optimizer step of the policy `role` on the token sequences `samples`, which are the
    same on every rank; returns the step's number and metrics. `step` counts from 0. `guard` skips a
    step whose values are not finite. Raises `UserError` if it has skipped too many, or if a weight
    is not finite afterwards. All ranks call it together.
    """
    return supervised_step(role, lambda: SftStep(role, samples), step, guard)
