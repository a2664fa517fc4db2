"""How many bytes a rank sends, by kind of collective: every one that goes through torch, whoever
calls it.

    with MessageCount() as count: step()
    count.sent       {"all_reduce": bytes, ...}

Counted where torch.distributed hands a collective to its process group (the operators `c10d::...`),
so ours and DeepSpeed's, plain, coalesced and inside autograd, are counted once each, by the bytes a
ring of n ranks sends:

    all_reduce       2 (n - 1) / n of the tensor
    all_gather         (n - 1) / n of what it makes
    reduce_scatter     (n - 1) / n of what goes in
    all_to_all         exactly the pieces for others
    send               the tensor; receiving counts nothing, so over all ranks each message counts
                       once
    broadcast          (n - 1) / n of the tensor, the mean over ranks; so reduce, gather and
                       scatter, which count as `other`

DeepSpeed's own all-reduce through shared memory (`deepspeed::inference_all_reduce_`, for inference)
is an operator as well and counts as all_reduce. An operator that is not known here is an error:
nothing is left out in silence. Counting makes every operator pass through Python, so steps that are
timed should not be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast", "other")


def _bytes(tensors: Any) -> int:
    """Of a tensor, or of all in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_bytes(x) for x in tensors) if isinstance(tensors, Iterable) else 0


def _for_others(arguments: dict[str, Any], group: dist.ProcessGroup) -> float:
    """Bytes of an all-to-all that do not stay here."""
    size, rank = group.size(), group.rank()
    if "input_tensors" in arguments:
        return sum(x.nbytes for other, x in enumerate(arguments["input_tensors"]) if other != rank)
    whole, splits = arguments["input"], arguments["input_split_sizes"]
    rows = whole.shape[0] if whole.dim() else 1
    return whole.nbytes * (
        1 - (splits[rank] / max(sum(splits), 1) if splits else (rows // size) / max(rows, 1))
    )


def _share(name: str, times: int = 1) -> Callable[[dict[str, Any], dist.ProcessGroup], float]:
    """`times` (n - 1) / n of the argument `name`."""
    return lambda arguments, group: (
        times * _bytes(arguments[name]) * (group.size() - 1) / group.size()
    )


OPERATORS: dict[str, tuple[str, Callable[[dict[str, Any], dist.ProcessGroup], float]]] = {
    "allreduce_": ("all_reduce", _share("tensors", 2)),
    "allreduce_coalesced_": ("all_reduce", _share("tensors", 2)),
    "_allgather_base_": ("all_gather", _share("output_tensor")),
    "allgather_": ("all_gather", _share("output_tensors")),
    "allgather_coalesced_": ("all_gather", _share("output_lists")),
    "allgather_into_tensor_coalesced_": ("all_gather", _share("outputs")),
    "_reduce_scatter_base_": ("reduce_scatter", _share("input_tensor")),
    "reduce_scatter_": ("reduce_scatter", _share("input_tensors")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _share("inputs")),
    "alltoall_base_": ("all_to_all", _for_others),
    "alltoall_": ("all_to_all", _for_others),
    "send": ("send", lambda arguments, group: _bytes(arguments["tensors"])),
    "broadcast_": ("broadcast", _share("tensors")),
    "reduce_": ("other", _share("tensors")),
    "gather_": ("other", _share("input_tensors")),
    "scatter_": ("other", _share("output_tensors")),
}
SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_", "check_for_nan")


class MessageCount(TorchDispatchMode):
    """Counts what this rank sends while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = dict.fromkeys(KINDS, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func, args, kwargs or {})
        elif (
            func.namespace in ("_c10d_functional", "c10d_functional") and "wait" not in func.name()
        ):
            raise RuntimeError(
                f"{func.name()} is a functional collective, which tools/bench/count_messages.py"
                " does not count yet"
            )
        elif func.name().startswith("deepspeed::inference_all_reduce"):
            group = dist.group.WORLD
            assert group is not None
            self.sent["all_reduce"] += 2 * _bytes(args[0]) * (group.size() - 1) / group.size()
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func.name().removeprefix("c10d::").split(".")[0]
        if name in SILENT:
            return
        if name not in OPERATORS:
            raise RuntimeError(
                f"c10d::{name} is not known; say in tools/bench/count_messages.py what it sends"
            )
        names = (argument.name for argument in func._schema.arguments)
        named = dict(zip(names, args, strict=False)) | kwargs
        kind, formula = OPERATORS[name]
        group = named["process_group"]
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        self.sent[kind] += formula(named, group)
