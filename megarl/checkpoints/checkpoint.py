"""Checkpoints that are whole or absent: written aside, digested, synced, renamed; older ones
removed only after that.

`save` copies the state to the host's memory, and training goes on while a thread of each rank
writes the copy; `finish` waits for the threads.

runs/x/checkpoints/step_000010/
    run.json      step, prompt cursor, layout, what the model looks like
    state/        model, optimizer: DeepSpeed's files, one set a rank
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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerBase

from megarl.activity.spans import activity
from megarl.checkpoints.adapter_files import write_adapter
from megarl.checkpoints.background import Digests, Writing, reports_of
from megarl.checkpoints.checkpoint_files import (
    ASIDE,
    identity,
    put_in_place,
    remove_unfinished,
    set_aside,
)
from megarl.checkpoints.export import WeightExport, write_description
from megarl.checkpoints.group_files import FOLDER, write_groups
from megarl.checkpoints.lease import Lease
from megarl.checkpoints.manifest import sync, write_manifest
from megarl.checkpoints.progress import (
    Progress,
    newest_first,
    read_progress,
    shapes_fingerprint,
    step_of,
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
from megarl.types import Group

if TYPE_CHECKING:
    from megarl.trainer.zero import TrainEngine


class Checkpoints:
    """The checkpoints of one run folder. All ranks with a part of a trained model call every method
    together.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        engine: TrainEngine | None,
        tokenizer: PreTrainedTokenizerBase,
        mesh: ProcessMesh,
        seed: int,
        data: str,
        others: Mapping[str, TrainEngine] | None = None,
        roles: Mapping[str, str] | None = None,
        everyone: Axis | None = None,
        base_digest: str = "",
        reference: str = "",
        owner: Lease | None = None,
        run_id: str = "",
        in_background: bool = False,
        generation: bytes | None = None,
    ) -> None:
        """`engine`: the model that is exported, trained on `mesh`; None on ranks outside it.
        `others`: {name: model} of further roles that are trained on this rank; their state is saved
        and restored beside that of `engine`. `roles`: {name: layout, as `written_under` says it} of
        all such roles, the same on every rank. `everyone`: all ranks with a part of a trained
        model; None for the ranks of `mesh`. `base_digest`: with LoRA, the digest of the base
        model's weights, which is written beside the adapters. `reference`: that of `Progress`.
        `owner`: on rank 0, the lease of this run on its folder; None where the folder has no other
        user. `run_id`: id of the run, the same on every rank, which is in the name of its temporary
        folders. `in_background`: have `save` return once the state is copied; else it calls
        `finish` itself. `generation`: see `write_description`.
        """
        self.generation = generation
        self.in_background, self.base_digest = in_background, base_digest
        self._writing: Writing | None = None
        self._times = dict[str, float]()
        self.owner, self.run_id = owner, run_id
        self.others, self.roles = dict(others or {}), dict(roles or {})
        self.folder, self.keep, self.engine, self.tokenizer = folder, keep, engine, tokenizer
        self.mesh, self.seed, self.data, self.reference = mesh, seed, data, reference
        self.everyone = everyone or mesh.world

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
        """Begin the checkpoint of `step`, once the one before is finished; returns the path that it
        will have. Afterwards at most `keep` remain. `next_ordinal`, `used` and `algorithm` are
        those of `Progress`. `groups`: finished groups of rollouts, with their token arrays, that
        this rank is to write; `made_with`: see `write_groups`. Raises `OSError` on every rank, with
        the fix, where one cannot write, and `UserError` if a weight is not finite. All ranks call
        it together.

        The commit has two phases: every rank writes its files, brings them to the disk and reports
        their digests; then rank 0 writes the manifest and gives the folder its name. Until that
        name is there, no reader takes the folder for a checkpoint. Raises `UserError` on all ranks,
        before anything is removed or renamed, if another run owns the run folder.
        """
        self.finish()
        progress = self._progress(step, next_ordinal, used, algorithm or {})
        started_at = time.monotonic()

        def write_finished(aside: Path) -> list[Path]:
            path = aside / FOLDER / self._file_of_rank
            return [write_groups(path, groups, made_with)] if groups else []

        with activity(f"checkpoint of step {step}", kind="checkpoint"):
            self._writing = self._begin(step, progress, write_finished)
        self._times["time/checkpoint_copy_s"] = time.monotonic() - started_at
        if not self.in_background:
            self.finish()
        return self.folder / f"step_{step:06d}"

    def finish(self) -> None:
        """Wait until the newest checkpoint is committed, if one is being written. Raises `OSError`
        or `UserError` as `save` does. All ranks call it together.
        """
        if (writing := self._writing) is None:
            return
        # Less than the collectives' own time, in which the other ranks wait for this one.
        timeout_s, step = self.mesh.timeout_s / 2, writing.step
        with activity(f"writing the checkpoint of step {step}", kind="checkpoint"):
            self._everybody(writing.wait_written(timeout_s), step, writing)
            reported = gather_objects(dict(writing.digests), self.everyone)
            is_main = self.everyone.rank == 0
            problem = writing.wait_committed(reported, timeout_s) if is_main else ""
            self._everybody(problem, step, writing)
        self._writing = None
        self._times["time/checkpoint_written_s"] = writing.committed_s

    def close(self) -> None:
        """After an error, give the threads time to commit the checkpoint that is being written, as
        long as a collective may take. A rank calls this method alone.
        """
        if self._writing is not None:
            self._writing.linger(self.mesh.timeout_s)

    def take_times(self) -> dict[str, float]:
        """Metrics of rank 0 since the last call: seconds for which the newest save has held up
        training (`time/checkpoint_copy_s`), and seconds from the copy of the state until the newest
        checkpoint was on the disk (`time/checkpoint_written_s`).
        """
        found, self._times = self._times, {}
        return found

    def _begin(
        self, step: int, progress: Progress | None, write_finished: Callable[[Path], list[Path]]
    ) -> Writing:
        """Take this rank's state and begin to write it. `write_finished`: writes the finished
        groups of this rank into the checkpoint's folder, and returns the paths.
        """
        if found := self._broken_weight():
            raise UserError(
                f"no checkpoint of step {step} is written: the weight {found} is not finite; go on"
                " from an earlier checkpoint with a lower learning rate"
            )
        final, aside = self.folder / f"step_{step:06d}", self._aside(step)
        self._refuse_lost(step)
        main = self.everyone.rank == 0
        self._everybody(self._attempt(lambda: self._make_room(aside)) if main else "", step)
        files = RankFiles(aside, in_background=self.in_background)
        files.add_later(lambda: write_finished(aside))
        self._everybody(self._attempt(lambda: self._take_state(aside, files)), step)
        self._everybody(self._attempt(lambda: self._take_model(aside, files, progress)), step)
        return Writing(
            step,
            folder=aside,
            rank=self.everyone.rank,
            num_ranks=self.everyone.size,
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
        main = self.everyone.rank == 0
        lost = self.owner.problem() if main and self.owner is not None else ""
        if lost := broadcast_object(lost, self.everyone):
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
        return next(filter(None, gather_objects(found, self.everyone)), "")

    def _make_room(self, aside: Path) -> None:
        """Create an empty temporary folder next to the final one; removes what an interrupted save
        left, of this run or of an earlier one.
        """
        remove_unfinished(self.folder)
        for part in ("state", "random", "model"):
            (aside / part).mkdir(parents=True)
        reports_of(aside).mkdir()

    def _take_state(self, aside: Path, files: RankFiles) -> None:
        """Add this rank's part of the optimizer state and its random-generator state to `files`."""
        problems = list[str]()
        for place, engine in self._engines.items():
            # A rank that fails for one role still saves the next one: the save is collective.
            problems.append(self._attempt(lambda e=engine, p=place: e.save(str(aside / p), files)))
        if any(problems):
            raise OSError("; ".join(dict.fromkeys(filter(None, problems))))
        if self.engine is not None:
            files.add(aside / "random" / self._file_of_rank, random_states())

    def _take_model(self, aside: Path, files: RankFiles, progress: Progress | None) -> None:
        """Add this rank's files of the model in Hugging Face format, for `from_pretrained` and
        vLLM, to `files`. Rank 0 also adds the config, the generation config, the tokenizer and
        `run.json`.
        """
        if self.engine is None or progress is None:
            return
        folder, model, engine = aside / "model", self.engine.module.model, self.engine
        self._weights.write(folder, engine.owned(), self.mesh.world, files)
        adapters = engine.whole_adapters()  # collective
        if self.mesh.world.rank > 0:
            return
        # A copy: an adapter of a single rank is the trained tensor itself.
        adapters = {name: tensor.clone() for name, tensor in adapters.items()}

        def write_small_files() -> list[Path]:
            written = write_description(folder, model, self.tokenizer, self.generation)
            if adapters:
                written += write_adapter(
                    aside / "adapter",
                    adapters,
                    engine.config.lora,
                    base=model.name_or_path,
                    base_digest=self.base_digest,
                )
            return [*written, write_progress(aside, progress)]

        files.add_later(write_small_files)

    @cached_property
    def _weights(self) -> WeightExport:
        """The plan by which ranks write the model's weights: which elements each rank owns. It is
        the same for every checkpoint of the run, so it is made once.
        """
        assert self.engine is not None
        module, mesh = self.engine.module, self.mesh
        shapes = module.shapes()
        stage = self.engine.config.zero_stage
        owned = training_owned(shapes, module.shards, mesh.layout, stage)
        dtype = next(module.model.parameters()).dtype
        return WeightExport(owned, shapes, dtype)

    def _commit(self, aside: Path, final: Path, digests: Digests) -> None:
        """On rank 0, once all ranks have synced their files: write the manifest, rename the folder
        to its final name, then remove older checkpoints. A thread calls this method. Raises
        `OSError` if another run owns the run folder.
        """
        write_manifest(aside, digests)
        before = identity(final)
        # The last moment: a new owner has removed `aside`, or is about to.
        if self.owner is not None:
            self.owner.require()
        removed = put_in_place(aside, final, before)
        sync(self.folder)
        if self.owner is not None:
            self.owner.require()
        known = [path for path in newest_first(self.folder) if step_of(path) <= step_of(final)]
        removed += [set_aside(old) for old in known[self.keep :]]
        for path in removed:
            shutil.rmtree(path, ignore_errors=True)

    def _attempt(self, write: Callable[[], object]) -> str:
        """Call `write`; returns the error message if it failed, else an empty string. Nothing is
        raised here: all ranks must first learn of a failure such as a full disk.
        """
        try:
            write()
        except (OSError, RuntimeError, SafetensorError, MemoryError) as error:
            return str(error) or repr(error)
        return ""

    def _everybody(self, problem: str, step: int, writing: Writing | None = None) -> None:
        """Raise `OSError` on every rank if any rank reports a problem while the checkpoint of
        `step` is written; `problem` is this rank's message, or "". The unfinished folder is removed
        first, once `writing` does not write into it any more, and earlier checkpoints stay. All
        ranks call this method together.
        """
        found = [
            f"rank {rank}: {said}"
            for rank, said in enumerate(gather_objects(problem, self.everyone))
            if said
        ]
        if not found:
            return
        self._writing = None
        hangs = writing is not None and not writing.give_up(self.mesh.timeout_s / 4)
        self._refuse_lost(step)  # then nothing that failed is the disk's fault
        if self.everyone.rank == 0 and not hangs:
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
        """Restore the checkpoint in folder `path`, which `choose` has verified. Raises `UserError`
        on every rank if a weight is not finite, or if a role of this run is not there.
        """
        progress = read_progress(path)
        for place, engine in self._engines.items():
            if not (path / place).is_dir():
                raise UserError(
                    f"checkpoint {path} has no {place}; resume with the recipe that wrote it, or"
                    " set folder to a new one"
                )
            engine.load(str(path / place))
        if broken := self._broken_weight():
            raise UserError(
                f"the weight {broken} of checkpoint {path} is not finite; remove the checkpoint, so"
                " that the one before is used"
            )
        if self.engine is not None:
            restore_random_states(path / "random" / self._file_of_rank)
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
            self.roles,
            dict(algorithm),
            list(used),
            position(self.folder.parent / LEDGER) if self.everyone.rank == 0 else {},
            self.reference,
        )


def random_states() -> bytes:
    """Content of a file with the states of the generators of the CPU and, where there is one, of
    this rank's GPU.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return save(states)


def restore_random_states(path: Path) -> None:
    """Set the generators to the states of a file of `random_states`. A GPU's state is left
    out where there is no GPU, and a GPU keeps its own where the file has none.
    """
    states = load_file(str(path))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
