"""Host memory that a GPU copies to and from directly, while this process goes on.

    pinned = Pinned(memory)      # registered with CUDA, if this process uses a GPU
    ...                          # copies with `non_blocking=True`
    pinned.wait()                # they are done
    pinned.release()             # before the memory is unmapped

Copies between a GPU and other, pageable, memory go through a buffer of the driver, and the process
waits for them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megarl.console import say


class Pinned:
    """The registration of a tensor's memory with CUDA, and the wait for copies. In a process that
    does not use a GPU nothing is registered, and there is nothing to wait for.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 on the host. If the driver refuses, one warning is written, and
        the memory stays pageable: all that works, and is slower.
        """
        self._memory, self.is_registered = memory, False
        # Asking for the device of a process that has no use for it would cost memory there.
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else None
        if self._device is None or not memory.numel():
            return
        cuda: Any = torch.cuda.cudart()
        problem = cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        self.is_registered = problem == cuda.cudaError.success
        if not self.is_registered:
            self._forget_refusal()
            why = cuda.cudaGetErrorString(problem)  # torch names no error but success
            say(
                "megarl: warning: weight_sync.transport shared_memory: the driver does not pin the"
                f" {memory.numel() / 2**20:.0f} MiB of weights on their way ({why}), so that"
                " copies between them and the GPU are slower; raise the job's limit of locked"
                " memory (ulimit -l)"
            )

    def wait(self) -> None:
        """Return once the GPU has done what this thread has asked it for on the current stream."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Wait, and undo the registration; a second call does nothing. Raises what the GPU's last
        work has failed with, after the registration is undone.
        """
        if not self.is_registered:
            return
        self.is_registered = False
        try:
            self.wait()
        finally:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._memory.data_ptr())

    def _forget_refusal(self) -> None:
        """Clear the error that CUDA keeps of a refused call: the next kernel would be blamed."""
        with contextlib.suppress(RuntimeError):  # torch reads the error, and CUDA forgets it
            torch.ones(1, device=self._device)
