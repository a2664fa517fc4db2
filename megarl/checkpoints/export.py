"""Weights that ranks own in parts, written as a Hugging Face checkpoint: no rank gathers a model.

Each file of the checkpoint has one writing rank. A tensor is written band of rows by band, and what
the writer lacks of a band comes from the ranks that own it, as a `Plan` says. In memory, besides a
rank's own part: one band on its writer, and one region of a band on either side of a transfer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megarl.checkpoints.rank_files import RankFile, RankFiles
from megarl.checkpoints.store import DTYPES, INDEX, WHOLE
from megarl.data.tokenizer import source_files
from megarl.parallel.collectives import receive, send
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.reshard.owned import whole_owned
from megarl.parallel.reshard.plan import Copy, make_plan

FILE_BYTES = 5 * 10**9
"""Maximum size of a safetensors file in bytes, as in Hugging Face's own exports. A larger tensor
gets a file of its own."""
BAND_BYTES = 32 * 2**20


CONFIG, GENERATION = "config.json", "generation_config.json"


def write_description(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation: bytes | None = None,
) -> list[Path]:
    """Write into `folder` what a Hugging Face model has beside its weights: config.json,
    generation_config.json and the tokenizer's files, byte by byte those that it was loaded from
    unless it was changed, or only transformers 5 knows their class. Returns the paths of all files
    in the folder that hold no weights. `generation`: content of generation_config.json; None for
    what transformers makes of the config.
    """
    model.config.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text())
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    (folder / CONFIG).write_text(json.dumps(with_older_keys(config), indent=2, sort_keys=True))
    if model.generation_config is not None:  # a classifier has none
        # Unchecked: many published files have settings that transformers calls a contradiction.
        if generation is None:
            model.generation_config.to_json_file(folder / GENERATION)
        else:
            (folder / GENERATION).write_bytes(generation)
    files = source_files(tokenizer)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if not files:
        tokenizer.save_pretrained(str(folder))
    _name_for_older(folder / "tokenizer_config.json")
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != INDEX and path.suffix != ".safetensors"
    ]


def with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content `config` of a config.json that transformers 5 wrote, and beside it the same under
    the names that transformers 4, and programs built on it, read: without these they take a
    `rope_theta` of 10,000 and no scaling, and say nothing.
    """
    made: dict[str, Any] = {
        key: with_older_keys(value)
        if key.endswith("_config") and isinstance(value, dict)
        else value
        for key, value in config.items()
    }
    if "dtype" in made:
        made["torch_dtype"] = made["dtype"]
    parameters = made.get("rope_parameters") or {}
    rope = parameters.get("full_attention", parameters)
    if "rope_theta" not in rope:
        return made
    made["rope_theta"] = rope["rope_theta"]
    if "sliding_attention" in parameters:  # in Gemma 3
        made["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in rope:
        made["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if made.get("model_type", "").startswith("gpt_neox"):
        made |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    scaling = {key: rope[key] for key in rope.keys() - {"rope_theta", "partial_rotary_factor"}}
    made["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    return made


def _name_for_older(file: Path) -> None:
    """Change the tokenizer_config.json `file` so that transformers 4 can read it too, if
    transformers 5 wrote it.
    """
    described = json.loads(file.read_text()) if file.is_file() else {}
    if described.get("tokenizer_class") != "TokenizersBackend":
        return
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(described.get("extra_special_tokens"), list):
        described["additional_special_tokens"] = described.pop("extra_special_tokens")
    file.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Output:
    """One safetensors file to be written. `owned` lists, for each tensor of the file, the
    rectangles (ranges of rows and columns) of the model's tensors that fill it; `shapes` is {tensor
    of the file: shape}. A tensor that `shapes` lacks is stored flat.
    """

    path: Path
    owned: Owned
    shapes: Mapping[str, tuple[int, ...]]

    def shape(self, buffer: str) -> tuple[int, ...]:
        return self.shapes.get(buffer, (self.owned.sizes[buffer],))

    def order(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """Names of the file's tensors in the order of their data in the file: larger element size
        first, which keeps every tensor aligned. `dtypes`: {name of the file's tensor: dtype}.
        """
        return sorted(self.owned.sizes, key=lambda name: -dtypes[name].itemsize)


def safetensors_header(
    output: Output, dtypes: Mapping[str, torch.dtype], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data in a safetensors file: 8 bytes with the length of the header, then
    the header as JSON text. `output`: names, sizes and shapes of the file's tensors; `dtypes`:
    {name: dtype}; `metadata`: further {key: text} for `__metadata__`.
    """
    names_of = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    filled = 0
    for name in output.order(dtypes):
        end = filled + output.owned.sizes[name] * dtypes[name].itemsize
        header[name] = {
            "dtype": names_of[dtypes[name]],
            "shape": output.shape(name),
            "data_offsets": (filled, end),
        }
        filled = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def split_outputs(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int,
) -> tuple[list[Output], dict[str, Any] | None]:
    """Divide the tensors of a model over the safetensors files of a Hugging Face checkpoint in
    `folder`. Returns (one `Output` for each file, with its path and tensors; the content of
    model.safetensors.index.json as a dict, or None for a single file). `shapes`: {tensor name:
    whole shape}; `dtypes`: {tensor name: dtype}. Files have at most `limit_bytes` bytes of tensors,
    unless a single tensor is larger. Nothing is written.
    """
    sizes = {
        name: torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items()
    }
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if groups[-1] and filled + sizes[name] > limit_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += sizes[name]
    many = len(groups) > 1
    outputs, where = [], {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else WHOLE
        outputs.append(Output(folder / file, whole_owned(group)[0], group))
        where |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    return outputs, index if many else None


class _Band(NamedTuple):
    """A block of consecutive rows of one tensor, written at once."""

    file: int
    buffer: str
    size: int
    """Number of elements."""
    copies: list[Copy]


class WeightExport:
    """Writes a model whose weights are spread over ranks as a Hugging Face checkpoint, without
    gathering it on any rank. `owned`: for each rank, which rectangles of the tensors it has, and
    where in its flat buffers. `shapes`: {name: whole shape}. The constructor computes which rank
    sends what to which writer; `write` may then be called for every checkpoint.
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
        """The rank that writes file number `file`, counted from 0."""
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
        """Add this rank's safetensors files, at paths in `folder`, to `out`, the collected files of
        a checkpoint on this rank. All ranks of `axis`, which is the whole job, call it together.

        `own`: {tensor name: flat buffer} of this rank's parts; those that other ranks write are
        sent to them. An error of the disk is not raised but kept in `out.problem`: other ranks wait
        for the transfers.
        """
        for start in range(0, len(self.outputs), self.num_ranks):
            group = range(start, min(start + self.num_ranks, len(self.outputs)))
            mine = None
            if (own_file := start + axis.rank) in group:
                mine = out.create(folder / self.outputs[own_file].path)
                mine.write(safetensors_header(self.outputs[own_file], self._dtypes))
            # Bands of different files take turns, so that their writers work at the same time. All
            # ranks go through the transfers in one order, so that no two wait for each other.
            for number in range(max(len(self.bands[file]) for file in group)):
                for file in group:
                    if number < len(self.bands[file]):
                        self._write_band(self.bands[file][number], mine, own, axis)
        if self.index is not None and axis.rank == 0:
            out.create(folder / INDEX).write(json.dumps(self.index, indent=2).encode())

    def _write_band(
        self, band: _Band, file: RankFile | None, own: Mapping[str, torch.Tensor], axis: Axis
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
            assert file is not None
            file.write(whole.cpu().view(torch.uint8).numpy().data)
