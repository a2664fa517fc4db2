"""What every training loop needs on a rank: process groups, run folder, checkpoints, observer.

    with open_run(config, inputs) as run:       # joins the ranks, makes the mesh and the run folder
        ...build the loop's roles...
        checkpoints = run.checkpoints(engine)   # save and resume
        first_step = run.resume(checkpoints)    # progress of the checkpoint, or None
        observer = run.observe(first_step)      # metrics, TensorBoard, report; on rank 0

A loop adds what it alone needs (engines, a second model) and closes it through `run.stack`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.progress import Progress
from megarl.config import RunConfig, SftConfig, as_plain, dump
from megarl.data.demonstrations import DemonstrationList
from megarl.data.source import PromptList
from megarl.observe.observer import Observer
from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.config import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from megarl.trainer.heads import HeadName
    from megarl.trainer.role import Role
    from megarl.trainer.zero import TrainEngine


@dataclass(frozen=True)
class RolePlace:
    """The ranks that a role runs on, and its parallel layout there."""

    ranks: tuple[int, ...]
    """Ranks of the job that the role uses, in the order of its layout."""
    layout: Layout


@dataclass(frozen=True)
class RunInputs:
    """What the checks before a run have loaded, such as prompts and tokenizer; see
    `megarl.checks.preflight`.
    """

    layout: Layout
    tokenizer: PreTrainedTokenizerBase
    hf: transformers.PretrainedConfig
    """Hugging Face configuration of the model (config.json)."""
    stop_token_ids: list[int]
    data: str
    """On rank 0: fingerprint of the prompts or demonstrations, and of their order."""
    prompts: PromptList | None = None
    """On rank 0: the training prompts, which rank 0 passes to the rollout service."""
    held_out: PromptList | None = None
    """On rank 0: the problems for evaluation, which rank 0 passes to the rollout service."""
    demonstrations: DemonstrationList | None = None
    """On rank 0: the samples for supervised fine-tuning. Rank 0 sends each step's samples to the
    others."""
    resume_from: Path | None = None
    """On rank 0: the checkpoint to resume from."""
    ranks: tuple[int, ...] | None = None
    """Ranks that the policy uses; None: all ranks of the job."""
    reference: RolePlace | None = None
    """Ranks and layout of the reference model; None: those of the policy."""

    def __str__(self) -> str:
        counts = {"prompts": self.prompts, "demonstrations": self.demonstrations}
        found = [f"{len(rows)} {name}" for name, rows in counts.items() if rows is not None]
        return ", ".join([str(self.layout), *found])


@dataclass
class RunContext:
    """What a run has opened on this rank: mesh, run folder and inputs. Created by `open_run`."""

    config: RunConfig | SftConfig
    inputs: RunInputs
    mesh: ProcessMesh
    device: torch.device
    stack: ExitStack
    """Exit stack for what the training loop opens; closed in reverse order, also after an error."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes metrics and prints messages."""
        return self.mesh.rank == 0

    @property
    def folder(self) -> Path:
        """Path of the run folder."""
        return Path(self.config.folder)

    def make_mesh(self, place: RolePlace) -> ProcessMesh:
        """Create a further mesh over some ranks of the job. All ranks of the job call it
        together.
        """
        mesh = ProcessMesh(
            place.layout, ranks=place.ranks, timeout_s=self.config.training.collective_timeout_s
        )
        return self.stack.enter_context(mesh)

    def role(
        self,
        name: str,
        model: ModelConfig,
        *,
        head: HeadName = "logprobs",
        optimizer_steps: int | None = None,
        training: TrainingConfig | None = None,
        mesh: ProcessMesh | None = None,
    ) -> Role:
        """Create a role, which is destroyed at the end of the run; see `megarl.trainer.role.Role`.
        `training` and `mesh` default to those of the run.
        """
        # Imported here: a recipe is checked without DeepSpeed, which takes seconds to import.
        from megarl.trainer.role import Role

        role = Role(
            name,
            model=model,
            training=training or self.config.training,
            mesh=mesh or self.mesh,
            device=self.device,
            seed=self.config.seed,
            head=head,
            optimizer_steps=optimizer_steps,
        )
        self.stack.callback(role.destroy)
        return role

    def checkpoints(self, engine: TrainEngine) -> Checkpoints:
        """The object that saves and restores the trained model `engine` in `folder/checkpoints`."""
        return Checkpoints(
            self.folder / "checkpoints",
            keep=self.config.training.checkpoint.keep,
            engine=engine,
            tokenizer=self.inputs.tokenizer,
            mesh=self.mesh,
            seed=self.config.seed,
            data=self.inputs.data,
        )

    def resume(self, checkpoints: Checkpoints) -> Progress | None:
        """Load the checkpoint that rank 0 chose and return its progress; None for a new run. All
        ranks call it together.
        """
        chosen = broadcast_object(self.inputs.resume_from, self.mesh.world)
        return checkpoints.load(chosen) if chosen is not None else None

    def observe(self, first_step: int) -> Observer | None:
        """The object that writes metrics, on rank 0; None on the other ranks."""
        if not self.is_main:
            return None
        return self.stack.enter_context(
            Observer(
                self.config.observe,
                self.folder,
                total_steps=self.config.steps,
                first_step=first_step,
                resolved=as_plain(self.config),
            )
        )


@contextmanager
def open_run(config: RunConfig | SftConfig, inputs: RunInputs) -> Iterator[RunContext]:
    """A context manager that initialises torch.distributed and creates the mesh and the run folder.
    On exit, also after an error, it closes all of them.
    """
    training = config.training
    torch.set_num_threads(training.num_threads)
    with ExitStack() as stack:
        device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(
            ProcessMesh(
                inputs.layout,
                ranks=inputs.ranks,
                ulysses=training.sequence.ulysses,
                timeout_s=training.collective_timeout_s,
            )
        )
        run = RunContext(config, inputs, mesh, device, stack)
        if run.is_main:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "recipe.yaml").write_text(dump(config))
        yield run
