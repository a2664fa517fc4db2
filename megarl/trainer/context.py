"""What every training loop needs on a rank: process groups, run folder, checkpoints, observer;
and what it says at the start: settings that changed, weights that rounding keeps.

    with open_run(config, inputs) as run:       # joins the ranks, makes the mesh and the run folder
        ...build the loop's roles...
        checkpoints = run.checkpoints(engine)   # save and resume
        first_step = run.resume(checkpoints)    # progress of the checkpoint, or None
        observer = run.observe(first_step)      # metrics, TensorBoard, report; on rank 0

A loop adds what it alone needs (engines, a second model) and closes it through `run.stack`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from megarl import console, signals
from megarl.activity.recording import Recording
from megarl.checkpoints.adapter_files import adapter_digest
from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.checkpoint_files import remove_unfinished
from megarl.checkpoints.lease import Claim, Lease
from megarl.checkpoints.progress import Progress, read_progress, written_under
from megarl.config import AnyConfig, RunConfig, dump, with_steps
from megarl.data.demonstrations import DemonstrationList
from megarl.data.preferences import PreferenceList
from megarl.data.source import PromptList
from megarl.host_memory import keep_freed_memory
from megarl.kernels.linear import use_bfloat16x2
from megarl.observe.observer import Observer
from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects, on_first
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.recipe_file import read_tree
from megarl.schema import leaves, shortened
from megarl.trainer.attention import attention_line
from megarl.trainer.config import CriticConfig, ModelConfig, TrainingConfig
from megarl.trainer.loading import generation_config
from megarl.trainer.places import RolePlace, reference_adapter, role_training
from megarl.trainer.precision import refuse_different, slow_line
from megarl.trainer.threads import trainer_threads
from megarl.trainer.weights import base_digest
from megarl.weight_sync.families import parameter_table

if TYPE_CHECKING:
    from megarl.trainer.heads import HeadName
    from megarl.trainer.role import Role
    from megarl.trainer.zero import TrainEngine


DataRows = DemonstrationList | PreferenceList
"""The data set of a run that is not reinforcement learning."""


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
    rows: DataRows | None = None
    """On rank 0: the demonstrations or preferences to train on. Rank 0 sends each step's rows to
    the others."""
    held_out_rows: DataRows | None = None
    """On rank 0: the demonstrations or preferences that are evaluated on."""
    resume_from: Path | None = None
    """On rank 0: the checkpoint to resume from."""
    ranks: tuple[int, ...] | None = None
    """Ranks that the policy uses; None: all ranks of the job."""
    roles: dict[str, RolePlace] = field(default_factory=dict)
    """{name: ranks and layout} of the roles beside the policy, such as `reference`."""
    owner: Lease | None = None
    """On rank 0: the lease of this run on its run folder; None where the folder is not checked."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that prompts show, as `megarl.apps.tools.tool.Schema`."""

    @property
    def num_rows(self) -> int:
        """On rank 0: number of prompts, demonstrations or preferences to train on; 0 on the
        others.
        """
        return len(self.prompts or ()) + len(self.rows or ())

    def __str__(self) -> str:
        counts = {"prompts": self.prompts, "rows": self.rows}
        found = [f"{len(rows)} {name}" for name, rows in counts.items() if rows is not None]
        if self.resume_from is not None:
            found.append(f"resumes from {self.resume_from}")
        return ", ".join([str(self.layout), *found])


@dataclass
class RunContext:
    """What a run has opened on this rank: mesh, run folder, inputs. Created by `open_context`."""

    config: AnyConfig
    inputs: RunInputs
    mesh: ProcessMesh
    device: torch.device
    run_id: str
    """Random id of the run, the same on every rank; "" where nobody owns the run folder."""
    stack: ExitStack
    """Exit stack for what the training loop opens; closed in reverse order, also after an error."""
    saved_at: float = field(default_factory=time.monotonic)
    """Time of the last checkpoint that was due, at first of the start, by `time.monotonic`."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes metrics and prints messages."""
        return self.mesh.rank == 0

    @property
    def folder(self) -> Path:
        """Path of the run folder."""
        return Path(self.config.folder)

    @property
    def recording(self) -> Recording | None:
        """Where the processes of the run record what they do; None where they do not."""
        return Recording.of(self.folder, self.run_id, enabled=self.config.observe.activity)

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
        from megarl.trainer.compilation import announced
        from megarl.trainer.role import Role

        with announced() if self.is_main else nullcontext():
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
        is_trained = optimizer_steps is not None
        if self.is_main and is_trained and (trained := role.engine.module.share_trained()):
            console.say(f"{name}: LoRA trains {trained}")
        elif (
            self.is_main
            and is_trained
            and role.training.dtype != "float32"
            and self.inputs.resume_from is None  # whose master weights have left that grid
        ):
            # Without adapters `owned` needs no other rank.
            rate = role.training.optimizer.learning_rate
            console.say(rounding_line(name, role.owned().values(), rate))
        return role

    def checkpoints(
        self,
        engine: TrainEngine | None,
        others: Mapping[str, TrainEngine] | None = None,
        *,
        roles: Mapping[str, str] | None = None,
        everyone: Axis | None = None,
    ) -> Checkpoints:
        """The object that saves and restores the trained model `engine` in `folder/checkpoints`.
        The other arguments are those of `Checkpoints`.
        """
        model: Any = engine.module.model if engine is not None else None
        if model is not None and model.generation_config is not None:
            # What ends a response here ends it wherever the saved model is served.
            model.generation_config.eos_token_id = self.inputs.stop_token_ids
        made = Checkpoints(
            self.folder / "checkpoints",
            keep=self.config.training.checkpoint.keep,
            engine=engine,
            tokenizer=self.inputs.tokenizer,
            mesh=self.mesh,
            seed=self.config.seed,
            data=self.inputs.data,
            others=others,
            roles=roles,
            everyone=everyone,
            base_digest=base_digest(self.config.model.path) if self.is_adapted else "",
            reference=adapter_digest(reference_adapter(self.config) or ""),
            owner=self.inputs.owner,
            run_id=self.run_id,
            in_background=self.config.training.checkpoint.background,
            generation=generation_config(self.config.model) if self.is_main else None,
        )
        self.stack.callback(made.close)
        return made

    def lost_folder(self) -> str:
        """Why this run must write nothing more to its folder, "" while it owns the folder; the same
        on every rank of the run's mesh. All of them call it together.
        """
        owner = self.inputs.owner
        lost = owner.problem() if self.is_main and owner is not None else ""
        return broadcast_object(lost, self.mesh.world)

    def claim(self) -> Claim | None:
        """What this run says of itself as its folder's owner, on every rank of its mesh, which call
        it together; None where nobody owns the folder."""
        owner = self.inputs.owner
        return broadcast_object(owner.claim if owner is not None else None, self.mesh.world)

    @property
    def is_adapted(self) -> bool:
        """Whether LoRA adapters are trained instead of the model's own weights."""
        return self.config.training.lora.is_on

    def is_finished(self) -> bool:
        """Whether the checkpoint to resume from is of the last step already; rank 0 says so then.
        All ranks call it together.
        """
        finished = False
        if self.is_main and (done := self._steps_done()) is not None:
            finished = done >= self.config.steps
            if finished:
                console.say(
                    f"the run is finished: {self.inputs.resume_from} is of step {done}, and steps"
                    f" is {self.config.steps}; raise steps to go on"
                )
        return bool(broadcast_object(finished, mesh_module.all_ranks()))

    def _steps_done(self) -> int | None:
        """Steps of the checkpoint to resume from; None for a new run, and on other ranks than 0."""
        chosen = self.inputs.resume_from
        return read_progress(chosen).step if chosen is not None else None

    def write_recipe(self) -> None:
        """On rank 0, write the settings to the run folder's `recipe.yaml`, and say which of a run
        that goes on are not those it began with. A finished run, which is not trained further,
        keeps its recipe: `megarl replay` trains again by it.
        """
        recipe, config, done = self.folder / "recipe.yaml", self.config, self._steps_done()
        if done is not None and done >= config.steps and recipe.exists():
            return
        if done is not None and (changed := changed_settings(recipe, config)):
            console.say(f"the run goes on with other settings: {', '.join(changed)}")
            if isinstance(config, RunConfig) and config.algorithm.kl.target is not None:
                console.say("algorithm.kl.coefficient goes on as the checkpoint has it")
        if done is not None and (foreign := unknown_settings(recipe, config)):
            console.say(
                f"{recipe} has settings that this run goes on without: {', '.join(foreign)}"
                " (of another version of megarl, or no longer in the recipe)"
            )
        recipe.write_text(dump(config))

    def resume(self, checkpoints: Checkpoints) -> Progress | None:
        """Load the checkpoint that rank 0 chose and return its progress; None for a new run. A
        checkpoint of another layout is converted first, beside the others, and the converted copy
        is removed once it is loaded. All ranks call it together.
        """
        world = checkpoints.everyone
        chosen = broadcast_object(self.inputs.resume_from, world)
        if chosen is None:
            return None
        wanted = written_under(self.inputs.layout, self.config.training)
        found = read_progress(chosen)
        if found.layout == wanted:
            return checkpoints.load(chosen)
        converted = chosen.parent / f".converted_{chosen.name}"
        if problem := on_first(lambda: self._convert(chosen, converted, found.layout), world):
            raise RuntimeError(
                f"{chosen} was written under {found.layout}, this run is {wanted}, and converting"
                f" it failed: {problem}"
            )
        progress = checkpoints.load(converted)
        barrier(world)
        if self.is_main:
            shutil.rmtree(converted)
        return progress

    def _convert(self, source: Path, target: Path, written: str) -> None:
        """Write the checkpoint `source`, which was `written` under another layout, to `target`
        under the layout of this run.
        """
        from megarl.checkpoints.deepspeed_files import reshard_checkpoint

        layout, stage = self.inputs.layout, self.config.training.zero_stage
        console.say(f"converting {source} from {written} to {layout}, ZeRO {stage}")
        shutil.rmtree(target, ignore_errors=True)  # an earlier attempt's
        target.mkdir()
        table = parameter_table(json.loads((source / "model" / "config.json").read_text()))
        reshard_checkpoint(source, target, table, layout, stage)

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
                resolved=self.config.model_dump(),
            )
        )


def trained_roles(config: RunConfig, places: Mapping[str, RolePlace]) -> dict[str, str]:
    """{name: layout, as `written_under` says it} of the roles beside the policy that are
    trained, which a checkpoint holds.
    """
    return {
        name: written_under(places[name].layout, role_training(config, name))
        for name, role in config.other_roles.items()
        if isinstance(role, CriticConfig)
    }


@contextmanager
def open_context(config: AnyConfig, inputs: RunInputs) -> Iterator[RunContext]:
    """A context manager that sets up a rank for a run and gives its `RunContext`: it initialises
    torch.distributed and creates the process mesh and the run folder. All ranks enter it together.
    On exit it closes what it has opened. An error in the block is printed first, and goes on.

    The `config` of the context always has `steps`: where `config.epochs` is set, the number of
    steps in so many passes over the prompts.
    """
    training = config.training
    torch.set_num_threads(trainer_threads(config))
    signals.save_within(training.checkpoint.save_within_s)
    with ExitStack() as stack:
        device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
        if device.type == "cpu":
            keep_freed_memory()
        stack.callback(mesh_module.finalise)
        refuse_different(gather_objects(training.precision, mesh_module.all_ranks()))
        use_bfloat16x2(training.precision == "bfloat16x2")
        num_rows = broadcast_object(inputs.num_rows, mesh_module.all_ranks())
        config = with_steps(config, num_rows)
        mesh = stack.enter_context(
            ProcessMesh(
                inputs.layout,
                ranks=inputs.ranks,
                ulysses=training.sequence.ulysses,
                timeout_s=training.collective_timeout_s,
            )
        )
        run_id = inputs.owner.run_id if inputs.owner is not None else ""
        run_id = broadcast_object(run_id, mesh_module.all_ranks())
        run = RunContext(config, inputs, mesh, device, run_id, stack)
        if run.is_main:
            if run_id:
                remove_unfinished(run.folder / "checkpoints")
            console.open_log(run.folder)
            stack.callback(console.hold(run.folder))
            run.write_recipe()
            console.say(f"run folder {run.folder}; what libraries print is in its {console.LOG}")
            if recording := run.recording:
                recording.make(keep=inputs.resume_from is not None)
            if device.type == "cpu" and (slow := slow_line(training.precision)):
                console.say(slow)
            if device.type == "cuda" and training.attention == "auto":
                console.say(attention_line(training.dtype, device))
        broadcast_object(None, mesh_module.all_ranks())  # the folder is there
        if not run.is_main:
            console.open_log(run.folder)
        if recording := run.recording:
            stack.callback(recording.open(f"rank{mesh_module.all_ranks().rank}"))
        with console.first_word():
            yield run


OF_THE_CHECKPOINT = ("folder", "resume", "training.lora.adapter")
"""Settings of a resumed run whose change is no news: what they say counts for a new run only."""


def changed_settings(recipe: Path, config: AnyConfig) -> list[str]:
    """The settings of `config` that are not those of the run folder's file `recipe`, each as
    "section.key (old -> new)"; none where that file cannot be read.
    """
    before, now = _settings(recipe), dict(leaves(config.model_dump(mode="json")))
    return [
        f"{name} ({shortened(str(before[name]))} -> {shortened(str(value))})"
        for name, value in now.items()
        if name in before and before[name] != value and name not in OF_THE_CHECKPOINT
    ]


def unknown_settings(recipe: Path, config: AnyConfig) -> list[str]:
    """Names of the settings in the run folder's file `recipe` that `config` has no place for; none
    where that file cannot be read.
    """
    now = {name for name, _ in leaves(config.model_dump(mode="json"))}
    return [name for name in _settings(recipe) if name not in now]


def _settings(recipe: Path) -> dict[str, object]:
    """{dotted name: value} of the file `recipe`; empty where it cannot be read, which
    `megarl.checks.run_files` tells.
    """
    try:
        return dict(leaves(read_tree(recipe)))
    except ValueError:
        return {}


LOOKED_AT = 4096
"""Elements of a tensor that are looked at, evenly spread."""


def steps_until_half_change(parts: Iterable[torch.Tensor], learning_rate: float) -> float:
    """Optimizer steps at `learning_rate` before which less than half of the weights can change; 0
    without weights. `parts`: tensors of one 16-bit dtype and any shape; elements of 0 do not count.
    """
    parts = list(parts)
    chosen = [part.view(-1)[:: max(1, part.numel() // LOOKED_AT)] for part in parts]
    values = torch.cat([part.float().cpu() for part in chosen]) if chosen else torch.zeros(0)
    values = values[values != 0]
    if not len(values):
        return 0.0
    grid = torch.finfo(parts[0].dtype)
    size = torch.ldexp(torch.ones(len(values)), torch.frexp(values).exponent - 1)
    # Below the smallest normal number the distances are those above it.
    half_steps = size.clamp(min=grid.smallest_normal) * (grid.eps / 2)
    return float(half_steps.median()) / learning_rate


def rounding_line(name: str, parts: Iterable[torch.Tensor], learning_rate: float) -> str:
    """The line about a role `name` in 16 bit at the start of a run."""
    parts = list(parts)
    dtype = str(parts[0].dtype).removeprefix("torch.") if parts else "16-bit"
    steps = steps_until_half_change(parts, learning_rate)
    return (
        f"{name}: at learning rate {learning_rate:g}, half of the {dtype} weights cannot change"
        f" before optimizer step {max(1, round(steps)):,}; smaller updates add up in float32 and do"
        " not reach the model until then; training.precision float32 has no such delay"
    )
