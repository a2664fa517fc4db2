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
import threading
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
from megarl.checkpoints.background import Digests, Writing, reports_of
from megarl.checkpoints.export import WeightExport, write_description
from megarl.checkpoints.group_files import FOLDER, write_groups
from megarl.checkpoints.lease import Lease
from megarl.checkpoints.listing import (
    best_of,
    evaluated_scores,
    newest_first,
    score_of,
    step_of,
)
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
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.reshard.owned import training_owned
from megarl.system.files import sync
from megarl.system.spans import activity
from megarl.types import Group

if TYPE_CHECKING:
    from megarl.trainer.zero import TrainEngine


@dataclass(kw_only=True, eq=False)
class Checkpoints:
    """Writes and restores the checkpoints of one run folder. `save` begins a checkpoint, which
    threads write while training goes on; `finish` waits until it is complete; `load` restores one.
    All ranks with a part of a trained model create the object and call these methods together;
    `close` is called by each rank alone.
    """

    folder: Path = field(kw_only=False)
    keep: int
    """How many checkpoints stay; older ones are removed."""
    best: str = ""
    """`training.checkpoint.best`: the metric by which one more stays; empty for none."""
    engine: TrainEngine | None
    """The model that is exported, trained on `mesh`; None on ranks outside it."""
    tokenizer: PreTrainedTokenizerBase
    mesh: ProcessMesh
    seed: int
    data: str
    others: Mapping[str, TrainEngine] = field(default_factory=dict)
    """{name: model} of further roles that are trained on this rank; their state is saved and
    restored beside that of `engine`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """{name: text with layout, ZeRO stage, precision and optimizer} of all models in `others` on
    any rank, the same on every rank."""
    everyone: Axis | None = None
    """All ranks with a part of a trained model; None for the ranks of `mesh`."""
    base_digest: str = ""
    """With LoRA, the digest of the base model's weights, which is written beside the adapters."""
    reference: str = ""
    """Digest of the adapter with which the reference model computes; "" without one."""
    owner: Lease | None = None
    """On rank 0, the lease of this run on its folder; None where the folder has no other user."""
    run_id: str = ""
    """Id of the run, the same on every rank, which is in the name of its temporary folders."""
    in_background: bool = False
    """Have `save` return once the state is copied; else it calls `finish` itself."""
    generation: bytes | None = None
    """Content of the model's generation_config.json, for the saved model; None for what
    transformers makes of its config."""

    names: Mapping[str, str] = field(default_factory=dict)
    """{name of a parameter: its name in the saved model}, of those with another one there."""

    def __post_init__(self) -> None:
        self._writing: Writing | None = None
        self._times = dict[str, float]()
        self._scores: dict[int, float] | None = None
        self._reading = threading.Lock()

    @property
    def world(self) -> Axis:
        """The process group (`Axis`) of all ranks with a part of a trained model, which call the
        methods together.
        """
        return self.everyone or self.mesh.world

    @property
    def _engines(self) -> dict[str, TrainEngine]:
        """{folder in a checkpoint: model} of the models on this rank."""
        places = {"state": self.engine} if self.engine is not None else {}
        return places | {f"roles/{name}": engine for name, engine in self.others.items()}

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
        """Begin the checkpoint of `step` (number of finished steps), once the one before is
        finished; returns the path that it will have, FOLDER/step_NNNNNN. If the field
        `in_background` is True, it returns when the state is copied to host memory, else when the
        checkpoint is complete. At most `keep` (a field) checkpoints remain, and the best one. All
        ranks with a part of a trained model call it together.

        `next_ordinal`: position, in the training order, of the first prompt not yet trained on.
        `used`: later positions whose prompts have been trained on already. `algorithm`: {name:
        number} that the algorithm has adapted. `groups`: finished rollouts not trained on yet that
        this rank is to write, grouped by prompt; `made_with`: digest of the settings that they
        depend on.

        Raises on every rank `OSError`, with what to do, if a rank cannot write, and `UserError` if
        a weight is not finite or another run owns the run folder. The path appears only when the
        files of all ranks and their digests are on the disk.
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
        """Wait until the checkpoint that was begun last is complete; does nothing if none is being
        written. Raises on every rank `OSError` where a rank cannot write, and `UserError` if
        another run owns the run folder. All ranks with a part of a trained model call it together.
        """
        if (writing := self._writing) is None:
            return
        # Less than the collectives' own time, in which the other ranks wait for this one.
        timeout_s, step = self.mesh.timeout_s / 2, writing.step
        with activity(f"writing the checkpoint of step {step}", kind="checkpoint"):
            self._everybody(writing.wait_written(timeout_s), step, writing)
            reported = gather_objects(dict(writing.digests), self.world)
            is_main = self.world.rank == 0
            problem = writing.wait_committed(reported, timeout_s) if is_main else ""
            self._everybody(problem, step, writing)
        self._writing = None
        self._times["time/checkpoint_written_s"] = writing.committed_s

    def close(self) -> None:
        """At the end of a run, after an error too, wait until the checkpoint that is being written
        is complete or has failed, for at most the time-out of a collective; raises nothing if it is
        not complete. Each rank calls it alone.
        """
        if self._writing is not None:
            self._writing.linger(self.mesh.timeout_s)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """On rank 0, learn the `metrics` of an evaluation after `step` steps, which is in the run
        folder: the best checkpoint is kept. Raises `UserError` if no evaluation so far has had the
        metric `best`, though these are of its kind ("eval" or "eval_sampled").
        """
        name = self.best.removeprefix("min:")
        scores = self._known_scores()
        if not name or not any(one.startswith(name.split("/")[0] + "/") for one in metrics):
            return
        if name not in metrics and not scores:
            raise UserError(
                f"training.checkpoint.best is {self.best!r}, which the evaluation does not have;"
                f" set it to one of {', '.join(sorted(metrics))}"
            )
        if (score := score_of(self.best, metrics)) is not None:
            scores[step] = score

    def _known_scores(self) -> dict[int, float]:
        """{step: score} of the evaluations of the run by the metric `best`, from the run folder
        at first, as after a resume.
        """
        with self._reading:  # the thread that writes checkpoints asks too
            if self._scores is None:
                self._scores = evaluated_scores(self.folder.parent, self.best)
            return self._scores

    def take_times(self) -> dict[str, float]:
        """Metrics of rank 0 since the last call: {"time/checkpoint_copy_s": seconds for which the
        newest save has held up training, "time/checkpoint_written_s": seconds from the copy of the
        state until the newest checkpoint was on the disk}; without the keys of what has not
        happened.
        """
        found, self._times = self._times, {}
        return found

    def _begin(
        self, step: int, progress: Progress | None, groups: Sequence[Group], made_with: str
    ) -> Writing:
        """Take this rank's state and begin to write it, with the finished groups of this rank."""
        if found := self._broken_weight():
            raise UserError(
                f"no checkpoint of step {step} is written: the weight {found} is not finite; go on"
                " from an earlier checkpoint with a lower learning rate"
            )
        final, aside = self.folder / f"step_{step:06d}", self._aside(step)
        self._refuse_lost(step)
        main = self.world.rank == 0
        self._everybody(attempt(lambda: self._make_room(aside)) if main else "", step)
        files = RankFiles(aside, in_background=self.in_background)
        if groups:
            place = aside / FOLDER / self._file_of_rank
            files.add_later(lambda: [write_groups(place, groups, made_with)])
        for take in (self._take_state, self._take_model):
            problem = attempt(lambda take=take: take(aside, files, progress))
            self._everybody(problem or files.problem, step)
        return Writing(
            step,
            folder=aside,
            rank=self.world.rank,
            num_ranks=self.world.size,
            write=files.finish,
            commit=lambda digests: self._commit(aside, final, digests),
        )

    def _aside(self, step: int) -> Path:
        """Path of the temporary folder in which the checkpoint of `step` is written before it is
        renamed. The name contains the run's id: two runs never write to the same checkpoint.
        """
        return self.folder / f"{ASIDE}{step:06d}{'.' * bool(self.run_id)}{self.run_id}"

    def _refuse_lost(self, step: int) -> None:
        """Raise `UserError` on every rank if another run has taken over the run folder since this
        run started. Rank 0 first deletes the unfinished checkpoint of `step`. All ranks call this
        method together.
        """
        main = self.world.rank == 0
        lost = self.owner.problem() if main and self.owner is not None else ""
        if lost := broadcast_object(lost, self.world):
            if main:
                shutil.rmtree(self._aside(step), ignore_errors=True)
            raise UserError(lost)

    def _broken_weight(self) -> str:
        """Name of the first weight, of any role on any rank, that is not finite; "" if all are.
        All ranks call it together.
        """
        found = ""
        for place, engine in self._engines.items():
            weight = engine.broken_weight()  # collective over the ranks of the role
            of_role = f" of the {place.removeprefix('roles/')}" if place != "state" else ""
            found = found or (weight and weight + of_role)
        return next(filter(None, gather_objects(found, self.world)), "")

    def _make_room(self, aside: Path) -> None:
        """Create an empty temporary folder next to the final one; removes what an interrupted save
        left, of this run or of an earlier one.
        """
        remove_unfinished(self.folder)
        for part in ("state", "random", "model"):
            (aside / part).mkdir(parents=True)
        reports_of(aside).mkdir()

    def _take_state(self, aside: Path, files: RankFiles, progress: Progress | None) -> None:
        """Add this rank's part of the optimizer state and its random-generator state to `files`."""
        for place, engine in self._engines.items():
            engine.save(aside / place, files)
        if self.engine is not None:
            files.create(aside / "random" / self._file_of_rank).write(random_states())

    def _take_model(self, aside: Path, files: RankFiles, progress: Progress | None) -> None:
        """Add this rank's files of the model in Hugging Face format, for `from_pretrained` and
        vLLM, to `files`. Rank 0 also adds the adapters, the config, the generation config, the
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
            made = adapter_bytes(adapters, lora, base=base, base_digest=self.base_digest)
            for name, content in made.items():
                files.create(aside / "adapter" / name).write(content)
        files.add_later(
            lambda: [
                *write_description(folder, model, self.tokenizer, self.generation),
                write_progress(aside, progress),
            ]
        )

    @cached_property
    def _weights(self) -> WeightExport:
        """The plan by which ranks write the model's weights: which elements each rank owns. It is
        the same for every checkpoint of the run, so it is made once.
        """
        assert self.engine is not None
        module, mesh, names = self.engine.module, self.mesh, self.names
        shapes, stage = module.shapes(), self.engine.config.zero_stage
        owned = training_owned(shapes, module.shards, mesh.layout, stage)
        for one in owned:  # the buffers keep their names
            one.pieces = [p._replace(tensor=names.get(p.tensor, p.tensor)) for p in one.pieces]
        shapes = {names.get(name, name): shape for name, shape in shapes.items()}
        dtype = next(module.model.parameters()).dtype
        return WeightExport(owned, shapes, dtype)

    def _commit(self, aside: Path, final: Path, digests: Digests) -> None:
        """On rank 0, once all ranks have synced their files: write the manifest, rename the folder
        to its final name, then remove older checkpoints. A thread calls this method. Raises
        `OSError` if another run owns the run folder.
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
        best = best_of(known, self._known_scores())
        removed += [set_aside(old) for old in known[self.keep :] if old != best]
        for path in removed:
            shutil.rmtree(path, ignore_errors=True)

    def _everybody(self, problem: str, step: int, writing: Writing | None = None) -> None:
        """Raise `OSError` on every rank if any rank reports a problem while the checkpoint of
        `step` is written; `problem` is this rank's message, or "". The unfinished folder is removed
        first, once `writing` does not write into it any more, and earlier checkpoints stay. All
        ranks call this method together.
        """
        found = [
            f"rank {rank}: {said}"
            for rank, said in enumerate(gather_objects(problem, self.world))
            if said
        ]
        if not found:
            return
        self._writing = None
        hangs = writing is not None and not writing.give_up(self.mesh.timeout_s / 4)
        self._refuse_lost(step)  # then nothing that failed is the disk's fault
        if self.world.rank == 0 and not hangs:
            shutil.rmtree(self._aside(step), ignore_errors=True)
            shutil.rmtree(reports_of(self._aside(step)), ignore_errors=True)
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        raise OSError(
            errno.EIO,
            f"the checkpoint of step {step} could not be written to {self.folder} ({free:.2f} GiB"
            f" free): {'; '.join(found)}; earlier checkpoints are whole:"
            f" {disk_advice('; '.join(found))} and go on with --resume True",
        )

    def load(self, path: Path) -> Progress:
        """Restore the trained models and the random-number generators from the checkpoint in folder
        `path`, whose files must be undamaged; returns where its run stood: step, position in the
        data, seed. All ranks with a part of a trained model call it together. Raises `UserError` on
        every rank if a weight is not finite, or if the checkpoint lacks a model that this run
        trains.
        """
        progress = read_progress(path)
        for place, engine in self._engines.items():
            if not (path / place).is_dir():
                raise UserError(
                    f"checkpoint {path} has no {place}; resume with the recipe that wrote it, or"
                    " set folder to a new one"
                )
            engine.load(path / place)
        if broken := self._broken_weight():
            raise UserError(
                f"the weight {broken} of checkpoint {path} is not finite; remove the checkpoint, so"
                " that the one before is used"
            )
        if self.engine is not None:
            # Ranks that the writing run did not have take the states of its ranks in turn.
            found = sorted((path / "random").iterdir())
            restore_random_states(found[self.mesh.rank % len(found)])
        return progress

    def _progress(
        self, step: int, next_ordinal: int, used: Sequence[int], algorithm: Mapping[str, float]
    ) -> Progress | None:
        """What `run.json` is to hold; None on ranks without a part of the exported model."""
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
    """Call `work` and turn an error of disk, memory or torch (`OSError`, `MemoryError`,
    `RuntimeError`, `SafetensorError`) into the return value: its message, or "" if `work` succeeds.
    So all ranks can exchange messages before any raises. Other exceptions pass through.
    """
    try:
        work()
    except (OSError, RuntimeError, SafetensorError, MemoryError) as error:
        return str(error) or repr(error)
    return ""


def random_states() -> bytes:
    """Content of a safetensors file with the states of torch's generators of the CPU and, where
    there is one, of this rank's GPU; `restore_random_states` reads it.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return save(states)


def restore_random_states(path: Path) -> None:
    """Set torch's generators to the states in the file `path`, which has the content that
    `random_states` returned. A GPU's state is left out where there is no GPU, and a GPU keeps its
    own where the file has none.
    """
    states = load_file(str(path))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
