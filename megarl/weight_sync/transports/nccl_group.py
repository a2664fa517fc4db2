"""Makes the NCCL group of the transport `point_to_point`. Not yet run on a GPU.

Two habits of torch's NCCL groups would break what the transport promises:

* a communicator is made at the first message of a pair of ranks, in the thread that sends it, which
  then waits for the other rank without a limit. Here one communicator for all ranks is made at
  once, in the thread that makes the group, and messages use it;
* a watchdog ends the process when a peer has died. An engine that dies must not end the trainer,
  which replaces it: without error handling the message fails instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""What a group's constructor reads. It must not hold for the trainer's own groups, whose watchdog
ends a rank that waits for a dead one."""

ENVIRONMENT = threading.Lock()
"""Held while the environment is changed: several threads of a process make groups at once."""


def nccl_group(
    store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float
) -> Any:
    """Make the group of `size` ranks and its communicator; blocks until all ranks take part.

    `timeout_s`: of a message. Call it in a thread that nobody waits for without a deadline.
    """
    torch.cuda.set_device(device)  # the current device is per thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with ENVIRONMENT, environment(WATCHDOG_OFF):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables until the end of the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
