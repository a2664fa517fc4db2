"""What tests on ranks begin with: the job joined, roles on a mesh, and a policy with its learner as
the loop makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.rank_files import RankFiles
from megarl.data.tokenizer import load_tokenizer
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer.policy import PolicyGradient
from megarl.trainer.role import Role
from megarl.types import StepBatch, StepReport


@contextmanager
def joined(timeout_s: float = 120.0) -> Iterator[torch.device]:
    """This rank as a part of its job, with one thread: gives its device."""
    torch.set_num_threads(1)
    yield mesh_module.initialise(timeout_s=timeout_s)
    mesh_module.finalise()


@contextmanager
def on_mesh(*degrees: int, timeout_s: float = 120.0) -> Iterator[tuple[ProcessMesh, torch.device]]:
    """`joined`, and a mesh of all ranks with the degrees (data, sequence, tensor)."""
    with joined(timeout_s) as device, ProcessMesh(Layout(*degrees), timeout_s=timeout_s) as mesh:
        yield mesh, device


def over_meshes(
    layouts: Iterable[tuple[int, int, int]],
) -> Iterator[tuple[tuple[int, int, int], ProcessMesh, torch.device]]:
    """`joined`, and one mesh after the other with the degrees of each of `layouts`."""
    with joined() as device:
        for degrees in layouts:
            with ProcessMesh(Layout(*degrees), timeout_s=60) as mesh:
                yield degrees, mesh, device


def make_role(
    model: str | Path | ModelConfig,
    mesh: ProcessMesh,
    device: torch.device,
    *,
    name: str = "policy",
    steps: int | None = None,
    seed: int = 1,
    head: Any = "logprobs",
    training: TrainingConfig | None = None,
    **settings: Any,
) -> Role:
    """A role, frozen without `steps`. `settings`: those of its training."""
    return Role(
        name,
        model=model if isinstance(model, ModelConfig) else ModelConfig(path=str(model)),
        training=training or TrainingConfig(**settings),
        mesh=mesh,
        device=device,
        seed=seed,
        head=head,
        optimizer_steps=steps,
    )


def save_state(engine: Any, folder: str | Path) -> None:
    """Write the state of a trained engine as a checkpoint does."""
    files = RankFiles(Path(folder))
    engine.save(Path(folder), files)
    files.finish()


def make_checkpoints(
    folder: Path, engine: Any, model: str, mesh: ProcessMesh, **settings: Any
) -> Checkpoints:
    usual: dict[str, Any] = dict(keep=2, seed=0, data="d") | settings
    return Checkpoints(folder, engine=engine, tokenizer=load_tokenizer(model), mesh=mesh, **usual)


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights in float64 on the CPU, whole on every rank."""
    return {name: one.detach().double().clone().cpu() for name, one in engine.weights()}


class Policy:
    """What `megarl.run.loop` does with a batch, without rollouts."""

    def __init__(
        self,
        *,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_steps: int,
        **common: Any,
    ) -> None:
        """`common`: model, mesh, device and seed."""
        self.temperature, common["training"] = temperature, training
        updates = total_steps * training.num_mini_batches
        self.role = Role("policy", optimizer_steps=updates, **common)
        self.learner = PolicyGradient(self.role, algorithm, temperature=temperature)
        self.reference = Role("reference", **common) if self.learner.needs_reference else None
        self.engine = self.role.engine

    def train(self, batch: StepBatch) -> StepReport:
        self.learner.guard.begin(f"step {batch.step + 1}")
        self.learner.empty_steps.count(batch.step, len(batch.rewards), batch.metrics)
        packed, columns = self.role.pack_step(batch), {}
        if self.reference is not None:
            columns["reference_logprobs"] = self.reference.score(
                batch, packed, temperature=self.temperature
            )
        columns = self.learner.prepare(batch, packed, columns)
        return self.learner.train(batch, packed, columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)
