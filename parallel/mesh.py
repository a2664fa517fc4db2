"""Process groups of a layout by their use, and the start and end of torch.distributed."""

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
"""Environment variable with the path of a file, instead of a TCP port, where ranks of a host
meet.
"""


@dataclass(frozen=True)
class Axis:
    """A group of ranks that communicate, seen from one of them."""

    name: str
    """For error messages."""
    size: int
    rank: int
    """This process's number on the axis, from 0."""
    ranks: tuple[int, ...]
    """Numbers in the whole job; `ranks[rank]` is this process."""
    group: dist.ProcessGroup | None
    """None if and only if `size` is 1, because torch takes None for all ranks."""
    timeout_s: float = 0.0
    """Of collectives; 0 for none, or not known."""


class ProcessMesh:
    """The process groups of a layout, as one `Axis` for each use; a context manager.

    * `data`: ranks with different samples
    * `sequence`: ranks that share packed sequences, split by token (context parallel)
    * `tensor`: ranks that share tokens, split by width of the layers
    * `gradient` = data x sequence: ranks with the same weights, for ZeRO, gradient and loss sums
    * `sample` = sequence x tensor: ranks that get the same micro-batch
    * `world`: all ranks
    * `ring` x `ulysses` = sequence: keys and values travel around the ring
    * `expert`: ranks among which tokens travel to experts, neighbours along `gradient`
    * `experts` = expert x tensor: ranks that divide each layer's experts
    * `expert_gradient`: ranks with the same experts; `gradient` is expert x expert_gradient
    * `ring_back`: `ring` with its own process group, so that gradients do not queue behind keys
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
    expert: Axis
    experts: Axis
    expert_gradient: Axis
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
        """Collective over the whole job; outside the mesh `is_member` is False and axes have size
        0.

        Args:
            layout: degrees of parallelism.
            ranks: the ranks of the job that the layout is laid over, ascending; default all.
            ulysses: ranks of a Ulysses group; divides the sequence axis.
            timeout_s: deadline of every collective.
        """
        self.layout = layout
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        sizes = f"{layout}, {len(self.ranks)} ranks, ulysses {ulysses}"
        assert len(self.ranks) == layout.size and layout.sequence % ulysses == 0, sizes
        # torch orders the ranks of a process group by number, whatever order it is given.
        assert list(self.ranks) == sorted(set(self.ranks) & set(range(dist.get_world_size())))
        self.is_member = dist.get_rank() in self.ranks
        self.rank = self.ranks.index(dist.get_rank()) if self.is_member else -1
        """Within the layout; -1 where this process is no member."""
        self.timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: list[dist.ProcessGroup] = []
        self._alone: dist.ProcessGroup | None = None
        self._by_members: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, axes in self.USES.items():
            setattr(self, name, self.axis(name, layout.groups(*axes)))
        self.expert = self.axis("expert", layout.expert_groups_by(replicas=False))
        self.experts = self.axis("experts", layout.expert_groups())
        self.expert_gradient = self.axis("expert_gradient", layout.expert_groups_by(replicas=True))
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
        """Make a process group for each of `groups`, a partition of indices into the mesh's ranks;
        returns this rank's. Collective over the whole job. Axes with the same ranks share one,
        unless `own` asks for another.
        """
        by_members = {} if own else self._by_members
        for members in groups:
            if len(members) > 1 and members not in by_members:
                # Every rank of the job makes every group, in this order: torch requires it.
                ranks = [self.ranks[index] for index in members]
                by_members[members] = dist.new_group(ranks, timeout=self._timeout)
                if self.rank in members:
                    self._groups.append(by_members[members])
        if not self.is_member:
            return Axis(name, 0, -1, (), None)
        own_members = next(members for members in groups if self.rank in members)
        job_ranks = tuple(self.ranks[index] for index in own_members)
        index, group = own_members.index(self.rank), by_members.get(own_members)
        return Axis(name, len(own_members), index, job_ranks, group, self.timeout_s)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The axis's process group; for one rank, one of that rank alone."""
        if axis.group is not None:
            return axis.group
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._groups.append(self._alone)
        return self._alone

    def destroy(self) -> None:
        while self._groups:
            dist.destroy_process_group(self._groups.pop())
        self._alone = None

    def __enter__(self) -> ProcessMesh:
        return self

    def __exit__(
        self, error_type: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def _connect(axis: Axis) -> None:
    """Have NCCL connect all ranks: the first `batch_isend_irecv` must not come from some alone, as
    under a sliding window.
    """
    if axis.group is not None and dist.get_backend(axis.group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=local_device()), group=axis.group)


def all_ranks(*, timeout_s: float | None = None) -> Axis:
    """An axis of every rank of the job. Collective with `timeout_s`, which makes a process
    group.
    """
    size = dist.get_world_size()
    group = dist.group.WORLD if size > 1 else None
    if timeout_s is not None and size > 1:
        group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    return Axis("all", size, dist.get_rank(), tuple(range(size)), group, _timeout_s(group))


def _timeout_s(group: dist.ProcessGroup | None) -> float:
    if group is None:
        return 0.0
    options = getattr(group._get_backend(local_device()), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 0.0


def local_device() -> torch.device:
    """The GPU of LOCAL_RANK, or the CPU where there is none or it is hidden. Raises `UserError`
    where torch sees fewer GPUs than nvidia-smi or the launcher.
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
    """Returns this rank's device. Collective; without torchrun's variables the job has one rank.
    Raises `RuntimeError` where ranks cannot connect, `UserError` where this rank's GPU is missing.
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
    if dist.is_initialized():
        dist.destroy_process_group()


class DeepSpeedView:
    """A `ProcessMesh` as DeepSpeed's `mpu`, whose data-parallel ranks are data x sequence."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._gradient, self._tensor = mesh.gradient, mesh.tensor
        self._gradient_group, self._tensor_group = (
            mesh.group(mesh.gradient),
            mesh.group(mesh.tensor),
        )

    def use(self) -> None:
        """Make DeepSpeed use this mesh's groups: before each step, where layouts differ. It has
        those of the engine made last, and asks them at each gradient reduction without ZeRO.
        """
        from deepspeed.utils import groups

        groups.mpu = self

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._gradient_group

    def get_data_parallel_world_size(self) -> int:
        return self._gradient.size

    def get_data_parallel_rank(self) -> int:
        return self._gradient.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor_group

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
