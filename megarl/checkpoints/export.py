"""Weights that ranks own in parts, written as a Hugging Face checkpoint: no rank gathers a model.

Each file has one writing rank. A tensor is written band of rows by band, and what the writer lacks
comes from the ranks that own it. In memory, besides a rank's own part: one band on its writer, and
one region of a band on either side of a transfer.
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
"""Largest safetensors file, as in Hugging Face's own exports. A larger tensor is alone."""
BAND_BYTES = 32 * 2**20


CONFIG, GENERATION = "config.json", "generation_config.json"


def write_configs_and_tokenizer(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation: bytes | None = None,
) -> list[Path]:
    """Write both configs and the tokenizer's files (loaded bytes, unless changed). `generation`:
    bytes of generation_config.json; None: `model`'s own. Returns all paths but weights and index.
    """
    model.config.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text())
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    # for transformers 4
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
    """`config` of transformers 5 with the names that transformers 4 reads too: without these it
    takes a `rope_theta` of 10,000 and no scaling.
    """
    full: dict[str, Any] = {
        key: with_older_keys(value)
        if key.endswith("_config") and isinstance(value, dict)
        else value
        for key, value in config.items()
    }
    if "dtype" in full:
        full["torch_dtype"] = full["dtype"]
    parameters = full.get("rope_parameters") or {}
    rope = parameters.get("full_attention", parameters)
    if "rope_theta" not in rope:
        return full
    full["rope_theta"] = rope["rope_theta"]
    if "sliding_attention" in parameters:  # in Gemma 3
        full["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in rope:
        full["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if full.get("model_type", "").startswith("gpt_neox"):
        full |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    scaling = {key: rope[key] for key in rope.keys() - {"rope_theta", "partial_rotary_factor"}}
    full["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    return full


def _name_for_older(file: Path) -> None:
    """Change a tokenizer_config.json of transformers 5 so that transformers 4 can read it."""
    described = json.loads(file.read_text()) if file.is_file() else {}
    if described.get("tokenizer_class") != "TokenizersBackend":
        return
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(described.get("extra_special_tokens"), list):
        described["additional_special_tokens"] = described.pop("extra_special_tokens")
    file.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Output:
    """A safetensors file to be written. `owned`: the boxes of the model's tensors that fill each of
    its tensors; one that `shapes` lacks is stored flat.
    """

    path: Path
    owned: Owned
    shapes: Mapping[str, tuple[int, ...]]

    def shape(self, buffer: str) -> tuple[int, ...]:
        return self.shapes.get(buffer, (self.owned.sizes[buffer],))

    def order(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """Larger elements first, which keeps every tensor aligned."""
        return sorted(self.owned.sizes, key=lambda name: -dtypes[name].itemsize)


def safetensors_header(
    output: Output, dtypes: Mapping[str, torch.dtype], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data: length of the header in 8 bytes, then its JSON text."""
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
    """(one `Output` for each file of at most `limit_bytes` of tensors, or with one larger tensor;
    content of model.safetensors.index.json, None for a single file). Nothing is written.
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
    tensor: str
    size: int
    """Number of elements."""
    copies: list[Copy]


class WeightExport:
    """The plan for a model whose weights are spread over ranks, for every checkpoint."""

    def __init__(
        self,
        owned: Sequence[Owned],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        others: Mapping[str, torch.dtype] | None = None,
        file_bytes: int = FILE_BYTES,
        band_bytes: int = BAND_BYTES,
    ) -> None:
        """`owned`: by rank, its parts of the tensors in `shapes`, one flat buffer for each
        tensor. `others`: tensors of another dtype than `dtype`.
        """
        self.num_ranks = len(owned)
        self._dtypes = dict.fromkeys(shapes, dtype) | dict(others or {})
        self.outputs, self.index = split_outputs(Path(), shapes, self._dtypes, file_bytes)
        blocks = [self._bands(output, band_bytes // dtype.itemsize) for output in self.outputs]
        writers = {file: self.writer(file) for file in range(len(self.outputs))}
        copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
        for copy in make_plan(owned, blocks, local=writers).copies:
            copies[copy.destination, copy.put.buffer].append(copy)
        self.bands = [
            [
                _Band(file, name.rpartition("/")[0], size, copies[file, name])
                for name, size in block.sizes.items()
            ]
            for file, block in enumerate(blocks)
        ]

    def writer(self, file: int) -> int:
        """Of file number `file`, from 0."""
        return file % self.num_ranks

    def _bands(self, output: Output, elements: int) -> Owned:
        """A file as blocks of rows of about `elements` elements."""
        bands = Owned()
        for name in output.order(self._dtypes):
            box = matrix(output.shapes[name])
            rows = max(1, elements // max(1, box.columns))
            for number, band in enumerate(box.bands(rows)):
                bands.add(name, band, f"{name}/{number}")
        return bands

    def write(
        self, folder: Path, buffers: Mapping[str, torch.Tensor], axis: Axis, out: RankFiles
    ) -> None:
        """Add this rank's safetensors files to `out`. Collective over the whole job.

        `buffers`: {tensor: flat buffer} of this rank's parts. An error of the disk is kept in
        `out.problem`: other ranks wait for the transfers.
        """
        for start in range(0, len(self.outputs), self.num_ranks):
            group = range(start, min(start + self.num_ranks, len(self.outputs)))
            sink = None
            if (own_file := start + axis.rank) in group:
                sink = out.create(folder / self.outputs[own_file].path)
                sink.write(safetensors_header(self.outputs[own_file], self._dtypes))
            # Bands of different files take turns, so that their writers work at the same time. All
            # ranks go through the transfers in one order, so that no two wait for each other.
            for number in range(max(len(self.bands[file]) for file in group)):
                for file in group:
                    if number < len(self.bands[file]):
                        self._write_band(self.bands[file][number], sink, buffers, axis)
        if self.index is not None and axis.rank == 0:
            out.create(folder / INDEX).write(json.dumps(self.index, indent=2).encode())

    def _write_band(
        self, band: _Band, file: RankFile | None, buffers: Mapping[str, torch.Tensor], axis: Axis
    ) -> None:
        writer, dtype = self.writer(band.file), self._dtypes[band.tensor]
        device = next(iter(buffers.values())).device
        whole = torch.empty(band.size if axis.rank == writer else 0, dtype=dtype, device=device)
        for copy in band.copies:
            if copy.source == axis.rank:
                region = copy.taken.view(buffers[copy.taken.buffer])
                if writer == axis.rank:
                    copy.put.view(whole).copy_(region)
                else:
                    send(region.contiguous(), axis, writer)
            elif writer == axis.rank:
                box = copy.put.box
                region = torch.empty(box.rows, box.columns, dtype=dtype, device=device)
                copy.put.view(whole).copy_(receive(region, axis, copy.source))
        if writer == axis.rank:
            assert file is not None
            file.write(whole.cpu().view(torch.uint8).numpy().data)
