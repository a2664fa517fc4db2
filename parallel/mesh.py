"""The process groups of a layout, named by their use, and starting and ending torch.distributed;
the same groups in the form that DeepSpeed expects (`DeepSpeedView`)."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from megarl.errors import UserError
from megarl.parallel import devices, launcher
from megarl.parallel.layout import Layout

STORE = "MEGARL_STORE"
"""Name of an environment variable with the path of a file at which the ranks of one host meet,
instead of a TCP port. `megarl run` sets it; at a restart the restart's number is appended."""


@dataclass(frozen=True)
class Axis:
    """A group of ranks that communicate, seen from one of them: its torch process group (`group`;
    None if `size` is 1), the number of ranks (`size`), this process's number among them (`rank`,
    from 0), and their numbers in the whole job (`ranks`). Functions of `parallel.collectives` take
    it; `ProcessMesh` makes it.
    """

    name: str
    """Name of the axis, for error messages."""
    size: int
    """Number of ranks."""
    rank: int
    """This process's number on the axis, from 0."""
    ranks: tuple[int, ...]
    """The group's ranks, numbered in the whole job; `ranks[rank]` is this process."""
    group: dist.ProcessGroup | None
    """The process group; None if and only if `size` is 1, because torch takes None for all
    ranks."""
    timeout_s: float = 0.0
    """Deadline of the group's collectives in seconds; 0 where they have none or it is not known."""


class ProcessMesh:
    """The process groups of a layout (degrees of data, sequence and tensor parallelism) as `Axis`
    objects of this process, one attribute for each use. All ranks of the job make it together, as
    `ProcessMesh(layout)`, also ranks outside of the mesh. As a context manager it destroys its
    process groups at the end.

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

    def __init__(
        self,
        layout: Layout,
        *,
        ranks: Sequence[int] | None = None,
        ulysses: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        """Make all process groups. Every rank of the job must call it with the same arguments, also
        ranks that are not in the mesh, since torch makes process groups on all ranks together. On a
        rank that is not in the mesh, `is_member` is False and every axis has size 0.

        Args:
            layout: degrees of parallelism.
            ranks: the ranks of the job that the layout is laid over, ascending; default all.
            ulysses: ranks of a Ulysses group; divides the sequence axis.
            timeout_s: deadline of every collective in seconds.
        """
        self.layout = layout
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        found = f"{layout}, {len(self.ranks)} ranks, ulysses {ulysses}"
        assert len(self.ranks) == layout.size and layout.sequence % ulysses == 0, found
        # torch orders the ranks of a process group by number, whatever order it is given.
        assert list(self.ranks) == sorted(set(self.ranks) & set(range(dist.get_world_size())))
        self.is_member = dist.get_rank() in self.ranks
        """Whether this process is one of the mesh's ranks."""
        self.rank = self.ranks.index(dist.get_rank()) if self.is_member else -1
        """This process's place in the layout; -1 where it is no member."""
        self.timeout_s = timeout_s
        """Deadline of every collective in seconds, also where this process is no member."""
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
        for axis in (self.ring, self.ring_back):
            _connect(axis)

    def axis(self, name: str, groups: Sequence[tuple[int, ...]], *, own: bool = False) -> Axis:
        """Make a torch process group for each of `groups`, and return the one that this rank is in
        as an `Axis`, called `name` in error messages. `groups` are tuples of indices into the
        mesh's list of ranks, from 0, and each index is in exactly one of them.

        Every rank of the job must make the same call. Axes with the same ranks share a process
        group, unless `own` asks for a separate one. On a rank outside the mesh the axis has size 0.
        """
        made = {} if own else self._made
        for places in groups:
            if len(places) > 1 and places not in made:
                # Every rank of the job makes every group, in this order: torch requires it.
                members = [self.ranks[place] for place in places]
                made[places] = dist.new_group(members, timeout=self._timeout)
                if self.rank in places:
                    self._groups.append(made[places])
        if not self.is_member:
            return Axis(name, 0, -1, (), None)
        mine = next(places for places in groups if self.rank in places)
        ranks = tuple(self.ranks[place] for place in mine)
        place, group = mine.index(self.rank), made.get(mine)
        return Axis(name, len(mine), place, ranks, group, self.timeout_s)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The axis's process group. For an axis of one rank, whose `group` is None, it makes a
        process group of this rank alone, for libraries that need one.
        """
        if axis.group is not None:
            return axis.group
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._groups.append(self._alone)
        return self._alone

    def destroy(self) -> None:
        """Destroy all process groups of the mesh in this process; a second call does nothing."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())
        self._alone = None

    def __enter__(self) -> ProcessMesh:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def _connect(axis: Axis) -> None:
    """Have NCCL connect all ranks of an axis on which ranks send to single others. The first such
    message must not come from some ranks alone (`torch.distributed.batch_isend_irecv`), as it does
    where a sliding window leaves others nothing to send.
    """
    if axis.group is not None and dist.get_backend(axis.group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=local_device()), group=axis.group)


def all_ranks(*, timeout_s: float | None = None) -> Axis:
    """An axis of every rank of the job, whatever meshes there are; call it after `initialise`.

    With `timeout_s`, collectives of the axis have that deadline in seconds instead of the job's;
    every rank must then call it together, since it makes a process group.
    """
    size = dist.get_world_size()
    group = dist.group.WORLD if size > 1 else None
    if timeout_s is not None and size > 1:
        group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    return Axis("all", size, dist.get_rank(), tuple(range(size)), group, _timeout_s(group))


def _timeout_s(group: dist.ProcessGroup | None) -> float:
    """Deadline of the collectives of a group, 0 for none; torch has no public name for it."""
    if group is None:
        return 0.0
    options = getattr(group._get_backend(local_device()), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 0.0


def local_device() -> torch.device:
    """This rank's device: the GPU of the launcher's LOCAL_RANK, or the CPU where there is no GPU or
    the user has hidden them (empty CUDA_VISIBLE_DEVICES, MEGARL_DEVICE=cpu).

    Raises `UserError` where torch does not see the GPUs that nvidia-smi lists, or sees fewer than
    the launcher has started ranks on this host.
    """
    if torch.cuda.is_available():
        index = launcher.local_rank()
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(number) for number in range(count if index else 1)]
        if problem := devices.beyond(index, names):
            raise UserError(problem)
        return torch.device("cuda", index)
    if problem := devices.why_unseen(torch.version.cuda):
        raise UserError(problem)
    return torch.device("cpu")


def initialise(*, timeout_s: float = 600.0) -> torch.device:
    """Initialise torch.distributed (gloo on CPU, NCCL on GPUs) and make this rank's GPU the current
    device; returns this rank's device. Every rank calls it once; blocks until all are connected.

    `timeout_s` is the deadline of collectives in seconds. Rank and address come from the variables
    that torchrun sets; without them the job has one rank. Raises `RuntimeError` where the ranks
    cannot connect, and `UserError` where this rank's GPU is missing.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it even for one rank
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # No `device_id`, with which torch makes every group's NCCL communicator at once, by a split
        # of the one of all ranks. All ranks must join in a split, and `ProcessMesh.group` makes
        # groups on one rank. NCCL takes the current device, which is set.
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        if path := os.environ.get(STORE):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            size, restart = launcher.num_ranks(), launcher.number("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.FileStore(f"{path}-{restart}", size)
            store.set_timeout(timeout)
            dist.init_process_group(
                backend, store=store, rank=launcher.rank(), world_size=size, timeout=timeout
            )
        elif "RANK" in os.environ and "MASTER_ADDR" in os.environ:
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
    """Shut torch.distributed down, at the end of a process that called `initialise`; nothing if it
    is not initialised.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


class DeepSpeedView:
    """A `ProcessMesh` with the interface that DeepSpeed expects of its `mpu` (model-parallel unit)
    argument: its data-parallel ranks are those with the same weights (data x sequence).
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._gradient, self._tensor = mesh.gradient, mesh.tensor
        self._gradient_group, self._tensor_group = (
            mesh.group(mesh.gradient),
            mesh.group(mesh.tensor),
        )

    def use(self) -> None:
        """Make this mesh's groups those that DeepSpeed uses in this process. Call it before every
        step of an engine, where models in this process have different layouts.

        DeepSpeed keeps one `mpu` for the process, that of the engine made last, and asks it at each
        gradient reduction of an engine without ZeRO. Another model's engine would reduce over the
        wrong ranks.
        """
        from deepspeed.utils import groups

        groups.mpu = self

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that have the same weights as this rank, also if it is this
        rank alone: data x sequence of the layout, over which DeepSpeed reduces gradients.
        """
        return self._gradient_group

    def get_data_parallel_world_size(self) -> int:
        return self._gradient.size

    def get_data_parallel_rank(self) -> int:
        return self._gradient.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Process group of this rank's tensor-parallel ranks, also if it is this rank alone."""
        return self._tensor_group

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
