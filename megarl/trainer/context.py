"""What every training loop needs on a rank: process groups, run folder, checkpoints, observer.

    with open_context(config, inputs) as run:   # joins the ranks, makes the mesh and the run folder
        ...build the loop's models...
        checkpoints = run.checkpoints(engine)   # save and resume
        progress = run.resume(checkpoints)      # progress of the checkpoint, or None
        observer = run.observe(first_step)      # metrics, TensorBoard, report; on rank 0

A loop closes what it adds (engines, a second model) through `run.stack`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from pydantic_core import to_jsonable_python
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.adapter_files import adapter_digest
from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.lease import Claim, Lease
from megarl.checkpoints.manifest import remove_unfinished
from megarl.checkpoints.progress import Progress, read_progress, written_under
from megarl.data.demonstrations import DemonstrationList
from megarl.data.preferences import PreferenceList
from megarl.data.source import PromptList
from megarl.engines.plan import head_width
from megarl.kernels.linear import use_bfloat16x2
from megarl.observe.observer import EVALUATIONS, Observer
from megarl.observe.sinks import read_records
from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.settings.config import AnyConfig, RunConfig, dump, with_steps
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import Config, defaults, is_own, leaves, shortened
from megarl.settings.training import CriticConfig, ModelConfig, TrainingConfig
from megarl.system import console, signals
from megarl.system.host_memory import keep_freed_memory
from megarl.system.spans import Recording
from megarl.trainer.attention import attention_line
from megarl.trainer.loading import generation_config
from megarl.trainer.precision import refuse_different, slow_precision_warning
from megarl.trainer.role_placement import RolePlace, reference_adapter, role_training
from megarl.trainer.threads import trainer_threads
from megarl.trainer.weights import base_digest
from megarl.weights.parameters import ParameterSpec
from megarl.weights.published import exported_names

if TYPE_CHECKING:
    from megarl.trainer.heads import HeadName
    from megarl.trainer.role import Role
    from megarl.trainer.zero import TrainEngine


DataRows = DemonstrationList | PreferenceList
"""The data set of a run that is not reinforcement learning."""


@dataclass(frozen=True)
class RunInputs:
    """What `megarl.run.plan` has loaded, on every rank. Data, checkpoint and lease are on
    rank 0 only.
    """

    layout: Layout
    tokenizer: PreTrainedTokenizerBase
    hf: transformers.PretrainedConfig
    """The model's config.json."""
    stop_token_ids: list[int]
    data: str
    """Digest of the data and their order, which a checkpoint stores."""
    prompts: PromptList | None = None
    held_out: PromptList | None = None
    """For evaluation."""
    rows: DataRows | None = None
    """Rank 0 sends each step's rows to the others."""
    held_out_rows: DataRows | None = None
    resume_from: Path | None = None
    """None for a new run."""
    ranks: tuple[int, ...] | None = None
    """The policy's; None: all ranks of the job."""
    roles: dict[str, RolePlace] = field(default_factory=dict)
    """Models beside the policy, such as `reference`."""
    owner: Lease | None = None
    """By which this run owns its folder; None where nobody does."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that prompts show, in OpenAI's format; on rank 0."""
    table: list[ParameterSpec] | None = None
    """On the policy's first rank: how engines store each tensor of the model, if weights are
    sent."""

    @property
    def num_rows(self) -> int:
        """Prompts or rows to train on; 0 on ranks without data."""
        return len(self.prompts or ()) + len(self.rows or ())

    def __str__(self) -> str:
        counts = {"prompts": self.prompts, "rows": self.rows}
        texts = [f"{len(rows)} {name}" for name, rows in counts.items() if rows is not None]
        if self.resume_from is not None:
            texts.append(f"resumes from {self.resume_from}")
        return ", ".join([str(self.layout), *texts])


@dataclass
class RunContext:
    """What a run has opened on this rank, made by `open_context`. Models, checkpoints and observer
    are closed at the end of the run.
    """

    config: AnyConfig
    inputs: RunInputs
    mesh: ProcessMesh
    device: torch.device
    run_id: str
    """Random, in hexadecimal, the same on every rank; "" where nobody owns the folder."""
    stack: ExitStack
    """Closes what the loop opens, in reverse order, also after an error."""
    saved_at: float = field(default_factory=time.monotonic)
    """`time.monotonic` of the last due checkpoint, at first of the start."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes metrics and prints messages: the first of the run's mesh."""
        return self.mesh.rank == 0

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    @property
    def recording(self) -> Recording | None:
        """Where each process records its spans; None if `observe.activity` is off."""
        return Recording.of(self.folder, self.run_id, enabled=self.config.observe.activity)

    def make_mesh(self, place: RolePlace) -> ProcessMesh:
        """Process groups for one more model, until the end of the run. Collective over all ranks of
        the job.
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
        """Create one of the run's models, such as "policy", under DeepSpeed. Collective over
        `mesh`. Precision, ZeRO stage and optimizer (`training`) and `mesh` default to the run's;
        for `head` and `optimizer_steps` see `Role`. Raises `UserError` on every rank if a weight is
        not finite.
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
        if self.is_main and optimizer_steps is not None:
            if trained := role.engine.module.share_trained():
                console.say(f"{name}: LoRA trains {trained}")
            # Master weights of a checkpoint have left the 16-bit grid.
            elif role.training.dtype != "float32" and self.inputs.resume_from is None:
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
        """Saves the trained model `engine` (None outside the policy) and restores it. Collective
        over `everyone`, all ranks that train a model; by default the run's mesh. `others`: {name:
        model} of further trained models on this rank. `roles`: `trained_roles` of those of all
        ranks.
        """
        training, source = self.config.training, self.config.model
        keeps_generation = self.is_main and not source.from_scratch
        model: Any = engine.module.model if engine is not None else None
        if model is not None and model.generation_config is not None:
            # What ends a response here ends it wherever the saved model is served.
            model.generation_config.eos_token_id = self.inputs.stop_token_ids
        checkpoints = Checkpoints(
            self.folder / "checkpoints",
            keep=training.checkpoint.keep,
            best=training.checkpoint.best,
            engine=engine,
            tokenizer=self.inputs.tokenizer,
            mesh=self.mesh,
            seed=self.config.seed,
            data=self.inputs.data,
            others=others or {},
            roles=roles or {},
            everyone=everyone,
            base_digest=base_digest(source.path) if training.lora.is_on else "",
            reference=adapter_digest(reference_adapter(self.config) or ""),
            owner=self.inputs.owner,
            run_id=self.run_id,
            in_background=training.checkpoint.background,
            generation=generation_config(source) if keeps_generation else None,
            names=exported_names(model) if model is not None else {},
        )
        self.stack.callback(checkpoints.close)
        return checkpoints

    def lost_folder(self) -> str:
        """A sentence on why this run must write nothing more to its folder, or "". Collective."""
        owner = self.inputs.owner
        lost = owner.problem() if self.is_main and owner is not None else ""
        return broadcast_object(lost, self.mesh.world)

    def claim(self) -> Claim | None:
        """By which any process, also on another host, can ask whether this run owns its folder;
        None if it never did. Collective.
        """
        owner = self.inputs.owner
        return broadcast_object(owner.claim if owner is not None else None, self.mesh.world)

    def is_finished(self) -> bool:
        """Whether the checkpoint to resume from, and its evaluation, are of the last step; rank 0
        then says so. Collective.
        """
        done = self._steps_done() if self.is_main else None
        finished = done is not None and done >= self.config.steps
        if finished and done == self.config.steps and not self._is_evaluated():
            finished = False
            console.say(f"the evaluation after step {done}, the last, is missing; it is made now")
        elif finished:
            console.say(
                f"the run is finished: {self.inputs.resume_from} is of step {done}, and steps"
                f" is {self.config.steps}; raise steps to go on"
            )
        return bool(broadcast_object(finished, mesh_module.all_ranks()))

    def _is_evaluated(self) -> bool:
        """Whether the evaluations after the last step that the recipe asks for are in the run
        folder.
        """
        asked, config = list[str](), self.config
        if self.inputs.held_out is not None or self.inputs.held_out_rows is not None:
            asked = ["eval/"]
            if isinstance(config, RunConfig) and config.evaluation.sampled_too:
                asked.append("eval_sampled/")
        written = [
            name
            for record in read_records(self.folder / EVALUATIONS)
            if record["step"] == config.steps
            for name in record
        ]
        return all(any(name.startswith(prefix) for name in written) for prefix in asked)

    def _steps_done(self) -> int | None:
        """Steps of the checkpoint to resume from, if this is rank 0 and there is one."""
        chosen = self.inputs.resume_from
        return read_progress(chosen).step if chosen is not None else None

    def write_recipe(self) -> None:
        """Write the settings to `recipe.yaml`, on rank 0, and say which ones a resumed run has
        changed. A finished run keeps its file, for `megarl replay`.
        """
        recipe, config, done = self.folder / "recipe.yaml", self.config, self._steps_done()
        if done is not None and done >= config.steps and recipe.exists():
            return
        changed, unknown = changed_settings(recipe, config) if done is not None else ([], [])
        if changed:
            console.say(f"the run goes on with other settings: {', '.join(changed)}")
            if isinstance(config, RunConfig) and config.algorithm.kl.target is not None:
                console.say("algorithm.kl.coefficient goes on as the checkpoint has it")
        if unknown:
            console.say(
                f"{recipe} has settings that this run goes on without: {', '.join(unknown)}"
                " (this version of megarl does not have them)"
            )
        recipe.write_text(dump(config))

    def resume(self, checkpoints: Checkpoints) -> Progress | None:
        """Load the checkpoint `inputs.resume_from` and return its progress; None for a new run.
        Collective.
        """
        world = checkpoints.world
        chosen = broadcast_object(self.inputs.resume_from, world)
        if chosen is None:
            return None
        progress = checkpoints.load(chosen)
        layout = written_under(self.inputs.layout, self.config.training)
        if self.is_main:
            console.say(f"the run resumes after step {progress.step}, from {chosen}")
        if self.is_main and progress.layout != layout:
            console.say(f"{chosen} was written under {progress.layout}; it goes on under {layout}")
        return progress

    def observe(self, first_step: int) -> Observer | None:
        """Metrics, TensorBoard and report, on rank 0; None on others. `first_step`: steps already
        done; records of later ones, which a killed process left, are dropped.
        """
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
    """{critic's name: layout, ZeRO stage and precision} for checkpoints, such as "data 2 x sequence
    1 x tensor 1, ZeRO 1, bfloat16". `places`: of models beside the policy.
    """
    return {
        name: written_under(places[name].layout, role_training(config, name))
        for name, role in config.other_roles.items()
        if isinstance(role, CriticConfig)
    }


@contextmanager
def open_context(config: AnyConfig, inputs: RunInputs) -> Iterator[RunContext]:
    """Set up this rank for a run: torch.distributed, process mesh, run folder with its run.log;
    `steps` also where the recipe has `epochs`. Raises `UserError` if ranks have different
    precisions. Collective.
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
            if device.type == "cpu" and (slow := slow_precision_warning(training.precision)):
                console.say(slow)
            if is_own(training.sequence.block):
                console.say(f"all attention in training is computed by {training.sequence.block}")
            elif device.type == "cuda" and training.attention == "auto":
                console.say(attention_line(training.dtype, device, head_width(inputs.hf)))
        broadcast_object(None, mesh_module.all_ranks())  # the folder is there
        if not run.is_main:
            console.open_log(run.folder)
        if recording := run.recording:
            stack.callback(recording.open(f"rank{mesh_module.all_ranks().rank}"))
        with console.first_word():
            yield run


OF_THE_CHECKPOINT = ("folder", "resume", "training.lora.adapter")
"""Settings that count for a new run only."""


def changed_settings(recipe: Path, config: AnyConfig) -> tuple[list[str], list[str]]:
    """What differs between `config` and recipe.yaml of the run folder: (changes, each as
    "section.key (old -> new)"; dotted names of settings that only the file has). A setting that the
    file lacks had its default. Both are empty for a file that cannot be read.
    """
    try:
        before = read_tree(recipe)
    except ValueError:
        return [], []
    changed, unknown = list[str](), list[str]()
    for name, old, new in _differences(before, config, ""):
        if new is _UNKNOWN:
            unknown += [key for key, _ in leaves(old, name)]
        elif name not in OF_THE_CHECKPOINT:
            changed.append(f"{name} ({shortened(str(old))} -> {shortened(str(new))})")
    return changed, unknown


_UNKNOWN = object()
"""Stands for the value of a setting that a configuration class does not have."""


def _differences(old: Any, new: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) where `new`, a configuration or a value in one, differs
    from `old`, plain data. "none" stands for an entry that one side lacks, `_UNKNOWN` for an
    unknown setting.
    """
    plain = to_jsonable_python(new, fallback=lambda _: "none")
    if isinstance(new, Config) and isinstance(old, dict):
        usual = to_jsonable_python(defaults(type(new)), fallback=lambda _: "none")
        pairs = {key: (old.get(key, usual[key]), value) for key, value in new}
        pairs |= {key: (value, _UNKNOWN) for key, value in old.items() if key not in pairs}
    elif isinstance(new, dict) and isinstance(old, dict):
        pairs = {key: (old.get(key, "none"), new.get(key, "none")) for key in {**old, **new}}
    elif isinstance(old, list) and any(isinstance(item, dict) for item in [*old, *(plain or ())]):
        pairs = dict(enumerate(itertools.zip_longest(old, new or (), fillvalue="none")))
    else:
        if new is _UNKNOWN or old != plain:
            yield name, old, new if new is _UNKNOWN else plain
        return
    for key, (before, now) in pairs.items():
        mark = f"[{key}]" if isinstance(old, list) else f".{key}"
        yield from _differences(before, now, f"{name}{mark}".removeprefix("."))


LOOKED_AT = 4096
"""Elements of a tensor that are sampled, evenly spread."""


def steps_until_half_change(parts: Iterable[torch.Tensor], learning_rate: float) -> float:
    """After how many optimizer steps half of the 16-bit weights, all of one dtype, can have
    changed; 0 without weights. AdamW moves a master weight by about the learning rate; the 16-bit
    weight changes once moves add up to half its spacing. Weights of 0 do not count.
    """
    parts = list(parts)
    chosen = [tensor.view(-1)[:: max(1, tensor.numel() // LOOKED_AT)] for tensor in parts]
    values = torch.cat([torch.zeros(0), *(tensor.float().cpu() for tensor in chosen)])
    values = values[values != 0]
    if not len(values):
        return 0.0
    grid = torch.finfo(parts[0].dtype)
    size = torch.ldexp(torch.ones(len(values)), torch.frexp(values).exponent - 1)
    # Below the smallest normal number the distances are those above it.
    half_steps = size.clamp(min=grid.smallest_normal) * (grid.eps / 2)
    return float(half_steps.median()) / learning_rate


def rounding_line(name: str, parts: Iterable[torch.Tensor], learning_rate: float) -> str:
    """A line for the log on how long 16-bit rounding keeps weights from changing."""
    parts = list(parts)
    dtype = str(parts[0].dtype).removeprefix("torch.") if parts else "16-bit"
    steps = steps_until_half_change(parts, learning_rate)
    return (
        f"{name}: at learning rate {learning_rate:g}, half of the {dtype} weights cannot change"
        f" before optimizer step {max(1, round(steps)):,}; smaller updates add up in float32 and do"
        " not reach the model until then; training.precision float32 has no such delay"
    )
