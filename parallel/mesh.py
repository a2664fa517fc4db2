"""The process groups of a layout, named by their use, and starting and ending torch.distributed."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from megarl.parallel.layout import Layout


@dataclass(frozen=True)
class Axis:
    """A group of ranks that communicate, seen from one of them."""

    name: str
    """Name of the axis, for error messages."""
    size: int
    """Number of ranks."""
    rank: int
    """This process's number on the axis, from 0."""
    ranks: tuple[int, ...]
    """Global ranks, in the axis's order."""
    group: dist.ProcessGroup | None
    """The process group; None if and only if `size` is 1, because torch takes None for all
    ranks."""


class ProcessMesh:
    """The axes of a layout for this process.

    As a context manager it destroys its groups at the end.

    * `data`: ranks with different samples
    * `sequence`: ranks that share packed sequences, split by token (context parallel)
    * `tensor`: ranks that share tokens, split by width of the layers
    * `gradient` = data x sequence: ranks with the same weights, for ZeRO, gradient and loss sums
    * `sample` = sequence x tensor: ranks that get the same micro-batch
    * `world`: all ranks
    * `ulysses` and `ring`: `sequence` = ring x ulysses; neighbours exchange tokens for heads
    (Ulysses), and keys and values travel around the ring
    * `ring_back`: the ranks of `ring` with a process group of their own, so that gradients do not
    queue behind keys
    """

    USES = {
        "data": ("data",),
        "sequence": ("sequence",),
        "tensor": ("tensor",),
        "gradient": ("data", "sequence"),
        "sample": ("sequence", "tensor"),
        "world": ("data", "sequence", "tensor"),
    }
    """{axis of the mesh: axes of the layout along which its ranks differ}"""

    data: Axis
    sequence: Axis
    tensor: Axis
    gradient: Axis
    sample: Axis
    world: Axis
    ring: Axis
    ring_back: Axis
    ulysses: Axis

    def __init__(self, layout: Layout, *, ulysses: int = 1, timeout_s: float = 600.0) -> None:
        """Make all process groups; every rank must call it with the same arguments.

        Args:
            layout: degrees of parallelism, for as many ranks as this run has.
            ulysses: ranks of a Ulysses group; divides the sequence axis.
            timeout_s: deadline of every collective in seconds.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: the layout has another number of ranks, or `ulysses` does not divide it.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "ProcessMesh needs an initialised torch.distributed; call"
                " megarl.parallel.mesh.initialise first"
            )
        if dist.get_world_size() != layout.size:
            raise ValueError(
                f"layout {layout} has {layout.size} ranks, but this run has {dist.get_world_size()}"
            )
        if layout.sequence % ulysses:
            raise ValueError(f"ulysses {ulysses} does not divide the sequence axis of {layout}")
        self.layout = layout
        self.rank = dist.get_rank()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: list[dist.ProcessGroup] = []
        self._alone: dist.ProcessGroup | None = None
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, axes in self.USES.items():
            setattr(self, name, self.axis(name, layout.groups(*axes)))
        shared = layout.groups("sequence")
        circles = [ranks[i::ulysses] for ranks in shared for i in range(ulysses)]
        self.ulysses = self.axis(
            "ulysses",
            [ranks[i : i + ulysses] for ranks in shared for i in range(0, len(ranks), ulysses)],
        )
        self.ring = self.axis("ring", circles)
        self.ring_back = self.axis("ring_back", circles, own=True)

    def axis(self, name: str, groups: Sequence[tuple[int, ...]], *, own: bool = False) -> Axis:
        """This rank's axis among `groups`, which are a partition of all ranks.

        Every rank must make the same call. Axes with the same ranks share a process group, unless
        `own` asks for a separate one.
        """
        made = {} if own else self._made
        for ranks in groups:
            if len(ranks) > 1 and ranks not in made:
                # torch requires that all ranks, members or not, make all groups in one order.
                made[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
                if self.rank in ranks:
                    self._groups.append(made[ranks])
        mine = next(ranks for ranks in groups if self.rank in ranks)
        return Axis(name, len(mine), mine.index(self.rank), mine, made.get(mine))

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The axis's process group, also for one rank: for libraries that cannot do without."""
        if axis.group is not None:
            return axis.group
        if self._alone is None:
            self._alone = dist.new_group([self.rank], use_local_synchronization=True)
            self._groups.append(self._alone)
        return self._alone

    def destroy(self) -> None:
        """Destroy the process groups; a second call does nothing."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())
        self._alone = None

    def __enter__(self) -> ProcessMesh:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def num_ranks() -> int:
    """Number of ranks of this run, from the launcher's WORLD_SIZE; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's rank, from the launcher's RANK; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_device() -> torch.device:
    """This rank's device: the GPU of the launcher's LOCAL_RANK, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def initialise(*, timeout_s: float = 600.0) -> torch.device:
    """Initialise torch.distributed (gloo on CPU, NCCL on GPUs); returns this rank's device.

    `timeout_s` is the deadline of collectives in seconds. A single rank needs no launcher. Raises
    `RuntimeError` where the ranks cannot connect.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it even for one rank
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            try:
                dist.init_process_group(backend, timeout=timeout)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                where = f"{os.environ['MASTER_ADDR']} port {os.environ.get('MASTER_PORT')}"
                raise RuntimeError(
                    f"the ranks could not connect at {where}: {str(error).splitlines()[0]}; set"
                    " MASTER_PORT (torchrun --master-port) to a free port, and see that every rank"
                    " was started"
                ) from error
        else:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    return device


def finalise() -> None:
    """Shut torch.distributed down; the counterpart of `initialise`."""
    if dist.is_initialized():
        dist.destroy_process_group()
