"""A policy, its reference where the algorithm needs one, and its learner, as the loop makes them."""

from __future__ import annotations

from typing import Any

from megarl.objectives.config import AlgorithmConfig
from megarl.trainer.config import ModelConfig, TrainingConfig
from megarl.trainer.policy import PolicyGradient
from megarl.trainer.role import Role
from megarl.types import Samples, StepBatch, StepReport


class Policy:
    """What `megarl.loops.rl` does with a batch, without rollouts."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        mesh: Any,
        device: Any,
        total_steps: int,
        seed: int,
    ) -> None:
        common: dict[str, Any] = dict(
            model=model, training=training, mesh=mesh, device=device, seed=seed
        )
        updates = total_steps * training.num_mini_batches
        self.temperature = temperature
        self.role = Role("policy", optimizer_steps=updates, **common)
        self.learner = PolicyGradient(self.role, algorithm, temperature=temperature)
        self.reference = Role("reference", **common) if self.learner.needs_reference else None
        self.engine = self.role.engine

    def train(self, batch: StepBatch) -> StepReport:
        packed, columns = self.role.pack_step(batch), {}
        if self.reference is not None:
            columns["reference_logprobs"] = self.reference.score(
                batch, packed, temperature=self.temperature
            )
        columns = self.learner.prepare(batch, packed, columns)
        return self.learner.train(batch, packed, columns)

    def token_statistics(self, samples: Samples) -> Any:
        return self.role.token_statistics(samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)
