"""Checkpoints that are whole or absent: written aside, digested, synced, renamed; older ones
removed only after that.

`save` copies the state to the host's memory, and training goes on while a thread of each rank
writes the copy; `finish` waits for the threads.

runs/x/checkpoints/step_000010/
    run.json      step, prompt cursor, layout, what the model looks like
    state/        float32 weights and optimizer state, one file a rank (megarl.trainer.zero_state)
    roles/critic/ the same for every further role that is trained, such as a critic
    random/       random states, one file a rank
    groups/       finished groups of rollouts that are not trained yet
    model/        the weights as a Hugging Face model, with its tokenizer; with LoRA the frozen
                  weights with the adapters added to them
    adapter/      with LoRA, the adapters alone, in PEFT's format
    digests.json  XXH3-128 of every file above
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.adapter_files import adapter_bytes
from megarl.checkpoints.background import Digests, Writing
from megarl.checkpoints.export import WeightExport, write_configs_and_tokenizer
from megarl.checkpoints.group_files import FOLDER, write_groups
from megarl.checkpoints.lease import Lease
from megarl.checkpoints.listing import best_of, evaluated_scores, newest_first, score_of, step_of
from megarl.checkpoints.manifest import (
    ASIDE,
    put_in_place,
    remove_unfinished,
    set_aside,
    write_manifest,
)
from megarl.checkpoints.progress import (
    Progress,
    read_progress,
    shapes_fingerprint,
    write_progress,
    written_under,
)
from megarl.checkpoints.rank_files import RankFiles
from megarl.errors import UserError, disk_advice
from megarl.ledger.journal import FILE as LEDGER
from megarl.ledger.journal import position
from megarl.parallel.collectives import broadcast_object, empty_store, gather_objects
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.reshard.owned import training_owned
from megarl.system.files import sync
from megarl.system.spans import activity
from megarl.types import Group
from megarl.weights.published import kept_buffers

if TYPE_CHECKING:
    from megarl.trainer.zero import TrainEngine


@dataclass(kw_only=True, eq=False)
class Checkpoints:
    """Writes and restores the checkpoints of one run folder. All ranks with a part of a trained
    model create it, and call `save`, `finish` and `load` together.
    """

    folder: Path = field(kw_only=False)
    keep: int
    """How many checkpoints stay."""
    best: str = ""
    """`training.checkpoint.best`: the metric by which one more stays; empty for none."""
    engine: TrainEngine | None
    """The model that is exported, trained on `mesh`; None on ranks outside it."""
    tokenizer: PreTrainedTokenizerBase
    mesh: ProcessMesh
    seed: int
    data: str
    others: Mapping[str, TrainEngine] = field(default_factory=dict)
    """{role: model} of further roles that are trained on this rank."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """{role: `written_under`} of `others` on any rank, the same on every rank."""
    everyone: Axis | None = None
    """All ranks with a part of a trained model; None for those of `mesh`."""
    base_digest: str = ""
    """With LoRA, of the base model's weights; written beside the adapters."""
    reference: str = ""
    """Digest of the reference model's adapter; "" without one."""
    owner: Lease | None = None
    """On rank 0, the lease on the run folder; None where it has no other user."""
    run_id: str = ""
    """The same on every rank, in the name of temporary folders."""
    in_background: bool = False
    """Whether `save` returns once the state is copied, without `finish`."""
    generation: bytes | None = None
    """The model's generation_config.json; None for what transformers makes of its config."""

    names: Mapping[str, str] = field(default_factory=dict)
    """{parameter: its name in the saved model, where that is another}"""

    def __post_init__(self) -> None:
        self._writing: Writing | None = None
        self._times = dict[str, float]()
        self._scores = evaluated_scores(self.folder.parent, self.best)
        """{step: score} of the run's evaluations by `best`."""

    @property
    def world(self) -> Axis:
        return self.everyone or self.mesh.world

    @property
    def _engines(self) -> dict[str, TrainEngine]:
        """{folder in a checkpoint: model} on this rank."""
        engines = {"state": self.engine} if self.engine is not None else {}
        return engines | {f"roles/{name}": engine for name, engine in self.others.items()}

    @property
    def _file_of_rank(self) -> str:
        return f"rank_{self.mesh.rank:05d}.safetensors"

    def save(
        self,
        *,
        step: int,
        next_ordinal: int,
        used: Sequence[int] = (),
        algorithm: Mapping[str, float] | None = None,
        groups: Sequence[Group] = (),
        made_with: str = "",
    ) -> Path:
        """Begin the checkpoint of `step` (finished steps), once the one before is finished; returns
        its path FOLDER/step_NNNNNN. Collective.

        Args:
            step: finished steps.
            next_ordinal: position of the first prompt not yet trained on.
            used: later positions that have been trained on.
            algorithm: {name: number} that the algorithm has adapted.
            groups: finished rollouts, not trained on yet, that this rank writes.
            made_with: digest of the settings that they depend on.

        Raises on every rank `OSError`, with what to do, if a rank cannot write, and `UserError` if
        a weight is not finite or another run owns the folder.
        """
        self.finish()
        progress = self._progress(step, next_ordinal, used, algorithm or {})
        started_at = time.monotonic()
        with activity(f"checkpoint of step {step}", kind="checkpoint"):
            self._writing = self._begin(step, progress, groups, made_with)
        self._times["time/checkpoint_copy_s"] = time.monotonic() - started_at
        if not self.in_background:
            self.finish()
        return self.folder / f"step_{step:06d}"

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises as `save`. Collective."""
        if (writing := self._writing) is None:
            return
        # Less than the collectives' own time, in which the other ranks wait for this one.
        timeout_s, step = self.mesh.timeout_s / 2, writing.step
        with activity(f"writing the checkpoint of step {step}", kind="checkpoint"):
            self._everybody(writing.wait_written(timeout_s), step, writing)
            problem = writing.wait_committed(timeout_s) if self.world.rank == 0 else ""
            self._everybody(problem, step, writing)
        self._writing = None
        self._times["time/checkpoint_written_s"] = writing.committed_s

    def close(self) -> None:
        """At the end, after an error too, wait until the checkpoint is complete or has failed."""
        if self._writing is not None:
            self._writing.linger(self.mesh.timeout_s)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """On rank 0, take in an evaluation after `step` steps. Raises `UserError` if none has had
        the metric `best`, though these are of its kind ("eval" or "eval_sampled").
        """
        name = self.best.removeprefix("min:")
        if not name or not any(key.startswith(name.split("/")[0] + "/") for key in metrics):
            return
        if name not in metrics and not self._scores:
            raise UserError(
                f"training.checkpoint.best is {self.best!r}, which the evaluation does not have;"
                f" set it to one of {', '.join(sorted(metrics))}"
            )
        if (score := score_of(self.best, metrics)) is not None:
            self._scores[step] = score

    def take_times(self) -> dict[str, float]:
        """Metrics of saves since the last call, in seconds: "time/checkpoint_copy_s", how long
        training waited for the copy, and "time/checkpoint_written_s", from then until it was on
        the disk.
        """
        times, self._times = self._times, {}
        return times

    def _begin(
        self, step: int, progress: Progress | None, groups: Sequence[Group], made_with: str
    ) -> Writing:
        if weight := self._broken_weight():
            raise UserError(
                f"no checkpoint of step {step} is written: the weight {weight} is not finite; go on"
                " from an earlier checkpoint with a lower learning rate"
            )
        final, aside = self.folder / f"step_{step:06d}", self._aside(step)
        self._refuse_lost(step)
        main = self.world.rank == 0
        self._everybody(attempt(lambda: self._make_room(aside)) if main else "", step)
        files = RankFiles(aside, in_background=self.in_background)
        if groups:
            path = aside / FOLDER / self._file_of_rank
            files.add_later(lambda: [write_groups(path, groups, made_with)])
        for take in (self._take_state, self._take_model):
            problem = attempt(lambda take=take: take(aside, files, progress))
            self._everybody(problem or files.problem, step)
        return Writing(
            step,
            store=empty_store(self.world),
            rank=self.world.rank,
            num_ranks=self.world.size,
            write=files.finish,
            commit=lambda digests: self._commit(aside, final, digests),
        )

    def _aside(self, step: int) -> Path:
        """With the run's id in its name: two runs never write to the same checkpoint."""
        return self.folder / f"{ASIDE}{step:06d}{'.' * bool(self.run_id)}{self.run_id}"

    def _refuse_lost(self, step: int) -> None:
        """Raise `UserError` if another run has taken over the folder; rank 0 first deletes the
        unfinished checkpoint. Collective.
        """
        main = self.world.rank == 0
        lost = self.owner.problem() if main and self.owner is not None else ""
        if lost := broadcast_object(lost, self.world):
            if main:
                shutil.rmtree(self._aside(step), ignore_errors=True)
            raise UserError(lost)

    def _broken_weight(self) -> str:
        """The first weight, of any role on any rank, that is not finite; "" if all are.
        Collective.
        """
        first = ""
        for folder, engine in self._engines.items():
            weight = engine.broken_weight()  # collective over the ranks of the role
            of_role = f" of the {folder.removeprefix('roles/')}" if folder != "state" else ""
            first = first or (weight and weight + of_role)
        return next(filter(None, gather_objects(first, self.world)), "")

    def _make_room(self, aside: Path) -> None:
        remove_unfinished(self.folder)
        for name in ("state", "random", "model"):
            (aside / name).mkdir(parents=True)

    def _take_state(self, aside: Path, files: RankFiles, progress: Progress | None) -> None:
        for folder, engine in self._engines.items():
            engine.save(aside / folder, files)
        if self.engine is not None:
            files.create(aside / "random" / self._file_of_rank).write(random_states())

    def _take_model(self, aside: Path, files: RankFiles, progress: Progress | None) -> None:
        """This rank's files of the Hugging Face model; rank 0 also adds the adapters, configs,
        tokenizer and `run.json`.
        """
        if self.engine is None or progress is None:
            return
        folder, model, engine = aside / "model", self.engine.module.model, self.engine
        self._weights.write(folder, engine.owned(), self.mesh.world, files)
        adapters = engine.whole_adapters()  # collective
        if self.mesh.world.rank > 0:
            return
        if adapters:
            (aside / "adapter").mkdir()
            lora, base = engine.config.lora, model.name_or_path
            contents = adapter_bytes(adapters, lora, base=base, base_digest=self.base_digest)
            for name, content in contents.items():
                files.create(aside / "adapter" / name).write(content)
        files.add_later(
            lambda: [
                *write_configs_and_tokenizer(folder, model, self.tokenizer, self.generation),
                write_progress(aside, progress),
            ]
        )

    @cached_property
    def _weights(self) -> WeightExport:
        """The plan by which ranks write the weights, the same for every checkpoint."""
        assert self.engine is not None
        module, mesh, names = self.engine.module, self.mesh, self.names
        shapes, stage = module.shapes(), self.engine.config.zero_stage
        owned = training_owned(shapes, module.shards, mesh.layout, stage, module.fused)
        for rank in owned:  # the buffers keep their names
            rank.pieces = [p._replace(tensor=names.get(p.tensor, p.tensor)) for p in rank.pieces]
        shapes = {names.get(name, name): shape for name, shape in shapes.items()}
        dtype = next(module.model.parameters()).dtype
        buffers = kept_buffers(module.model).items()
        others = {names.get(name, name): value.dtype for name, value in buffers}
        return WeightExport(owned, shapes, dtype, others=others)

    def _commit(self, aside: Path, final: Path, digests: Digests) -> None:
        """On rank 0, in a thread, once all ranks have synced their files. Raises `OSError` if
        another run owns the folder.
        """
        write_manifest(aside, digests)
        # The last moment: a new owner has removed `aside`, or is about to.
        if self.owner is not None:
            self.owner.require()
        removed = put_in_place(aside, final)
        sync(self.folder)
        if self.owner is not None:
            self.owner.require()
        known = [path for path in newest_first(self.folder) if step_of(path) <= step_of(final)]
        best = best_of(known, self._scores)
        removed += [set_aside(old) for old in known[self.keep :] if old != best]
        for path in removed:
            shutil.rmtree(path, ignore_errors=True)

    def _everybody(self, problem: str, step: int, writing: Writing | None = None) -> None:
        """Raise `OSError` on every rank if any reports a `problem`, once `writing` has stopped and
        the unfinished folder is removed. Collective.
        """
        problems = [
            f"rank {rank}: {message}"
            for rank, message in enumerate(gather_objects(problem, self.world))
            if message
        ]
        if not problems:
            return
        self._writing = None
        hangs = writing is not None and not writing.give_up(self.mesh.timeout_s / 4)
        self._refuse_lost(step)  # then nothing that failed is the disk's fault
        if self.world.rank == 0 and not hangs:
            shutil.rmtree(self._aside(step), ignore_errors=True)
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        raise OSError(
            errno.EIO,
            f"the checkpoint of step {step} could not be written to {self.folder} ({free:.2f} GiB"
            f" free): {'; '.join(problems)}; earlier checkpoints are whole:"
            f" {disk_advice('; '.join(problems))} and go on with --resume True",
        )

    def load(self, path: Path) -> Progress:
        """Restore models and generators from an undamaged checkpoint. Collective. Raises
        `UserError` if a weight is not finite, or a model is missing that this run trains.
        """
        progress = read_progress(path)
        # Later evaluations are void: the best checkpoint would be removed for one of them.
        self._scores = {
            step: score for step, score in self._scores.items() if step <= progress.step
        }
        for folder, engine in self._engines.items():
            if not (path / folder).is_dir():
                raise UserError(
                    f"checkpoint {path} has no {folder}; resume with the recipe that wrote it, or"
                    " set folder to a new one"
                )
            engine.load(path / folder)
        if weight := self._broken_weight():
            raise UserError(
                f"the weight {weight} of checkpoint {path} is not finite; remove the checkpoint, so"
                " that the one before is used"
            )
        if self.engine is not None:
            # Ranks that the writing run did not have take the states of its ranks in turn.
            states = sorted((path / "random").iterdir())
            restore_random_states(states[self.mesh.rank % len(states)])
        return progress

    def _progress(
        self, step: int, next_ordinal: int, used: Sequence[int], algorithm: Mapping[str, float]
    ) -> Progress | None:
        """None on ranks without a part of the exported model."""
        if self.engine is None:
            return None
        layout = written_under(self.mesh.layout, self.engine.config)
        return Progress(
            step,
            next_ordinal,
            self.seed,
            layout,
            shapes_fingerprint(self.engine.module.shapes()),
            self.data,
            dict(self.roles),
            dict(algorithm),
            list(used),
            position(self.folder.parent / LEDGER) if self.world.rank == 0 else {},
            self.reference,
        )


def attempt(work: Callable[[], object]) -> str:
    """The message of an error of disk, memory or torch that `work` raises, "" without one, so that
    ranks can exchange messages before any raises.
    """
    try:
        work()
    except (OSError, RuntimeError, SafetensorError, MemoryError) as error:
        return str(error) or repr(error)
    return ""


def random_states() -> bytes:
    """A safetensors file with the states of torch's generators of the CPU and, where there is one,
    of this rank's GPU.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return save(states)


def restore_random_states(path: Path) -> None:
    """A GPU's state is left out where there is no GPU, and a GPU keeps its own where the file has
    none.
    """
    states = load_file(str(path))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
