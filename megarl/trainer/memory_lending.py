"""A trained model's GPU memory, lent to the colocated inference engines while they generate.

    lending = MemoryLending(device)
    lending.offload(optimizer, module)      # master weights and moments: to the host; rest: freed
    lending.reload()                        # the same tensors, on the device again

Storages are set to 0 bytes and later back to their size, as FSDP does, so every view that DeepSpeed
keeps stays valid. Its own `offload_states` works with ZeRO 2 only: bf16 ZeRO 1 has no such method,
and ZeRO 3 refuses every optimizer but `FusedAdam`.

Gradients and reduction buffers are freed without a copy: between two optimizer steps they hold
nothing.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megarl.errors import UserError
from megarl.trainer.gradient_sums import sums_of

ALIGNMENT = 512
"""Bytes to which the parts of the host's memory are aligned."""

SMALLEST_BYTES = 1024
"""Smaller storages stay on the device: AdamW's step counters."""


class HostMemory:
    """Host memory of exactly `num_bytes`, `registered` with CUDA for fast copies; torch would round
    pinned memory up to a power of two. Raises `UserError` if that fails.
    """

    def __init__(self, num_bytes: int, *, registered: bool) -> None:
        try:
            self._mapping = mmap.mmap(-1, num_bytes)
        except (OSError, ValueError) as error:
            raise UserError(_no_memory(num_bytes, str(error))) from None
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        """The memory as a flat uint8 tensor."""
        self._is_registered = registered
        if registered:
            cuda: Any = torch.cuda.cudart()
            problem = cuda.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
            if problem != cuda.cudaError.success:
                self._is_registered = False
                why = cuda.cudaGetErrorString(problem)  # torch names no error but success
                raise UserError(_no_memory(num_bytes, f"cudaHostRegister: {why}"))

    def release(self) -> None:
        """Undo the registration. The memory is freed with the last tensor that views it."""
        if self._is_registered:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self.bytes.data_ptr())
        self._is_registered = False


class MemoryLending:
    """Frees a DeepSpeed optimizer's GPU memory on this rank (`offload`) and takes it back
    (`reload`). On the CPU it works too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: HostMemory | None = None
        self._moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """(optimizer's tensor, its data on the device, its data on the host)."""
        self._copied: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """(storage that is empty now, its content on the host as bytes)."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        """(storage that is empty now, its size in bytes)."""
        self.is_away = False

    def offload(self, optimizer: Any, module: torch.nn.Module, *, on_host: bool = False) -> None:
        """Copy master weights and moments to the host, and free their memory and that of gradients
        and reduction buffers, between two optimizer steps. Blocks. Until `reload` the optimizer's
        tensors are those on the host, for checkpoints.

        `module`: its weights stay. `on_host`: the optimizer state is there anyway. Raises
        `UserError` if the host has too little memory.
        """
        if self.is_away:
            return
        self.is_away = True
        if hasattr(optimizer, "empty_partition_cache"):
            optimizer.empty_partition_cache()  # parameters that ZeRO 3 has gathered
        weights = {_storage(weight).data_ptr() for weight in weights_of(module)}

        def lent(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            return [
                tensor
                for tensor in tensors
                if tensor.device.type == self._device.type
                and _storage(tensor).nbytes() >= SMALLEST_BYTES
                and _storage(tensor).data_ptr() not in weights
            ]

        empty = lent(sums_of(optimizer) if on_host else gradient_memory(optimizer))
        if not on_host:
            self._copy(lent(optimizer_state(optimizer)))
        for parameter in module.parameters():
            parameter.grad = None
        for tensor in [*empty, *lent(buckets(optimizer))]:
            storage = _storage(tensor)
            if storage.nbytes():  # it may be a view of another one's
                self._dropped.append((storage, storage.nbytes()))
                storage.resize_(0)
        gc.collect()
        free_cache(self._device)

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        """Move the storages of `tensors` to the host."""
        for tensor in tensors:
            if not _storage(tensor).resizable():  # on the CPU: it maps a checkpoint's file
                tensor.data = tensor.data.clone()
        storages = {_storage(tensor).data_ptr(): _storage(tensor) for tensor in tensors}
        begins, end = dict[int, int](), 0
        for pointer, storage in storages.items():
            begins[pointer] = end
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if not end:
            return
        if self._host is None or len(self._host.bytes) != end:
            self.release()
            self._host = HostMemory(end, registered=self._device.type == "cuda")
        memory = self._host.bytes
        for pointer, storage in storages.items():
            content = memory[begins[pointer] : begins[pointer] + storage.nbytes()]
            content.copy_(_bytes_of(storage), non_blocking=True)
            self._copied.append((storage, content))
        for tensor in tensors:
            begin = begins[_storage(tensor).data_ptr()] // tensor.itemsize + tensor.storage_offset()
            on_host = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), begin)
            self._moved.append((tensor, tensor.data, on_host))
        synchronize(self._device)
        for tensor, _, on_host in self._moved:
            tensor.data = on_host
        for storage, _ in self._copied:
            storage.resize_(0)

    def reload(self) -> None:
        """Undo `offload`; gradients and buffers are then 0. Blocks until the copies are done."""
        for storage, content in self._copied:
            storage.resize_(content.numel())
            _bytes_of(storage).copy_(content, non_blocking=True)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        synchronize(self._device)
        for tensor, on_device, _ in self._moved:
            tensor.data = on_device
        self._moved, self._copied, self._dropped = [], [], []
        self.is_away = False

    def release(self) -> None:
        """Free the host's memory, which all calls of `offload` share. Call it after `reload`."""
        if self._host is not None:
            self._host.release()
        self._host = None


def optimizer_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Each tensor of master weights and moments once. In float32 without ZeRO, the parameters are
    the master weights.
    """
    seen: set[int] = set()
    inner = _inner(optimizer)
    tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
    # ZeRO 3 shows them to the inner optimizer only while it steps.
    tensors += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    for parameter, state in inner.state.items():
        tensors += [parameter, *filter(torch.is_tensor, state.values())]
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def gradient_memory(optimizer: Any) -> Iterator[torch.Tensor]:
    """Tensors of accumulated gradients on this rank."""
    for tensor in optimizer_state(optimizer):
        if tensor.grad is not None:
            yield tensor.grad
    yield from getattr(optimizer, "fp32_groups_gradients_flat", [])  # bf16 ZeRO 1
    yield from sums_of(optimizer)


def buckets(optimizer: Any) -> Iterator[torch.Tensor]:
    """Buffers in which gradients are reduced, and through which they go to the host."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        yield from (buffer for buffer in buffers if buffer is not None)
    if hasattr(optimizer, "temp_grad_buffer_for_gpu_offload"):  # ZeRO 1 and 2
        yield optimizer.temp_grad_buffer_for_gpu_offload


def weights_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, under ZeRO 3 their slices too, and buffers."""
    for parameter in module.parameters():
        yield getattr(parameter, "ds_tensor", parameter)
        yield parameter
    yield from module.buffers()


def free_cache(device: torch.device) -> None:
    """Return GPU memory that torch's allocator keeps unused to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inner(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else _inner(inner)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's memory as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _no_memory(num_bytes: int, why: str) -> str:
    return (
        f"the optimizer state of this rank, {num_bytes / 2**30:.1f} GiB, does not fit into the"
        f" host's memory while colocated engines generate ({why}); free memory, raise the limit of"
        " the job, or use more GPUs"
    )
