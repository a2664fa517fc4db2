"""Weights that ranks own in parts, written as a Hugging Face checkpoint: no rank gathers a model.

Each file of the checkpoint has one writing rank. A tensor is written band of rows by band, and what
the writer lacks of a band comes from the ranks that own it, as a `Plan` says. In memory, besides a
rank's own part: one band on its writer, and one region of a band on either side of a transfer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megarl.checkpoints.checkpoint_files import Output, safetensors_header, split_outputs
from megarl.checkpoints.rank_files import RankFile, RankFiles
from megarl.checkpoints.store import INDEX
from megarl.parallel.collectives import receive, send
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.reshard.plan import Copy, make_plan

FILE_BYTES = 5 * 10**9
"""Maximum size of a safetensors file in bytes, as in Hugging Face's own exports. A larger tensor
gets a file of its own."""
BAND_BYTES = 32 * 2**20


GENERATION = "generation_config.json"


def write_description(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation: bytes | None = None,
) -> list[Path]:
    """Write what a Hugging Face model has beside its weights: config, generation config and
    tokenizer; returns the paths. `generation`: content of the generation config; None for what
    transformers makes of the config.
    """
    model.config.save_pretrained(folder)
    if model.generation_config is not None:  # a classifier has none
        # Unchecked: many published files have settings that transformers calls a contradiction.
        if generation is None:
            model.generation_config.to_json_file(folder / GENERATION)
        else:
            (folder / GENERATION).write_bytes(generation)
    tokenizer.save_pretrained(str(folder))
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != INDEX and path.suffix != ".safetensors"
    ]


class _Band(NamedTuple):
    """A block of consecutive rows of one tensor, written at once."""

    file: int
    buffer: str
    size: int
    """Number of elements."""
    copies: list[Copy]


class WeightExport:
    """The plan by which the ranks of a layout write the model's weights in Hugging Face format. It
    is computed once and used for every checkpoint.
    """

    def __init__(
        self,
        owned: Sequence[Owned],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        file_bytes: int = FILE_BYTES,
        band_bytes: int = BAND_BYTES,
    ) -> None:
        """`owned`: for each rank of the job, the parts it owns of the tensors in `shapes`, one flat
        buffer for each tensor. All tensors have `dtype`.
        """
        self.dtype, self.num_ranks = dtype, len(owned)
        self._dtypes = dict.fromkeys(shapes, dtype)
        self.outputs, self.index = split_outputs(Path(), shapes, self._dtypes, file_bytes)
        wanted = [self._bands(output, band_bytes // dtype.itemsize) for output in self.outputs]
        writers = {file: self.writer(file) for file in range(len(self.outputs))}
        copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
        for copy in make_plan(owned, wanted, local=writers).copies:
            copies[copy.destination, copy.put.buffer].append(copy)
        self.bands = [
            [_Band(file, name, size, copies[file, name]) for name, size in one.sizes.items()]
            for file, one in enumerate(wanted)
        ]

    def writer(self, file: int) -> int:
        """The rank that writes file number `file`."""
        return file % self.num_ranks

    def _bands(self, output: Output, elements: int) -> Owned:
        """The content of a file as blocks of rows of about `elements` elements, in the order of the
        file.
        """
        wanted = Owned()
        for name in output.order(self._dtypes):
            box = matrix(output.shapes[name])
            rows = max(1, elements // max(1, box.columns))
            for number, band in enumerate(box.bands(rows)):
                wanted.add(name, band, f"{name}/{number}")
        return wanted

    def write(
        self, folder: Path, own: Mapping[str, torch.Tensor], axis: Axis, out: RankFiles
    ) -> None:
        """Add this rank's files, at paths in `folder`, to `out`. All ranks of `axis`, which is the
        whole job, call it together.

        `own`: this rank's flat buffers by tensor name; parts that other ranks write are sent to
        them. Raises `OSError` if a file could not be written, but only after all transfers: other
        ranks wait for them.
        """
        files = [_File(folder / output.path, out) for output in self.outputs]
        mine = [files[file] for file in range(len(files)) if self.writer(file) == axis.rank]
        for start in range(0, len(files), self.num_ranks):
            group = range(start, min(start + self.num_ranks, len(files)))
            for file in group:
                if files[file] in mine:
                    files[file].open(safetensors_header(self.outputs[file], self._dtypes))
            # Bands of different files take turns, so that their writers work at the same time. All
            # ranks go through the transfers in one order, so that no two wait for each other.
            for number in range(max(len(self.bands[file]) for file in group)):
                for file in group:
                    if number < len(self.bands[file]):
                        self._write_band(self.bands[file][number], files[file], own, axis)
        if problems := [file.problem for file in mine if file.problem]:
            raise OSError(problems[0])
        if self.index is not None and axis.rank == 0:
            out.add(folder / INDEX, json.dumps(self.index, indent=2).encode())

    def _write_band(
        self, band: _Band, file: _File, own: Mapping[str, torch.Tensor], axis: Axis
    ) -> None:
        writer = self.writer(band.file)
        device = next(iter(own.values())).device
        whole = torch.empty(
            band.size if axis.rank == writer else 0, dtype=self.dtype, device=device
        )
        for copy in band.copies:
            if copy.source == axis.rank:
                region = copy.taken.view(own[copy.taken.buffer])
                if writer == axis.rank:
                    copy.put.view(whole).copy_(region)
                else:
                    send(region.contiguous(), axis, writer)
            elif writer == axis.rank:
                box = copy.put.box
                region = torch.empty(box.rows, box.columns, dtype=self.dtype, device=device)
                copy.put.view(whole).copy_(receive(region, axis, copy.source))
        if writer == axis.rank:
            file.write(whole)


class _File:
    """A file written in several calls. The first error is kept in `problem` instead of being
    raised.
    """

    def __init__(self, path: Path, files: RankFiles) -> None:
        self.path, self.problem = path, ""
        self._files = files
        self._file: RankFile | None = None

    def open(self, header: bytes) -> None:
        try:
            self._file = self._files.create(self.path)
            self._file.write(header)
        except OSError as error:
            self.problem = str(error)

    def write(self, values: torch.Tensor) -> None:
        """Append the bytes of a flat tensor."""
        if self._file is None or self.problem:
            return
        try:
            self._file.write(values.cpu().view(torch.uint8).numpy().data)
        except (OSError, MemoryError) as error:
            self.problem = str(error) or repr(error)
