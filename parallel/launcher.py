"""What the launcher of the ranks (torchrun, srun) sets in environment variables, and a free
port.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

from megarl.system.console import say
from megarl.system.signals import AGENT

LARGEST = 2**20


def number(name: str, default: int, *, low: int = 0, high: int = LARGEST) -> int:
    """The environment variable `name` from `low` to `high`, both allowed. Raises `ValueError` for
    any other value, an empty one too.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    plain = text.isascii() and text.isdecimal() and len(text) <= 9
    if not plain or not low <= int(text) <= high:
        raise ValueError(
            f"the environment variable {name} is {text[:40]!r}, which launchers set to a number"
            f" from {low} to {high}; unset it, or start the ranks with torchrun"
        )
    return int(text)


def num_ranks() -> int:
    return number("WORLD_SIZE", 1, low=1)


def rank() -> int:
    return number("RANK", 0)


def local_rank() -> int:
    return number("LOCAL_RANK", 0)


def ranks_per_host() -> int:
    return number("LOCAL_WORLD_SIZE", num_ranks(), low=1)


def ranks_option() -> str:
    """The option that sets the number of ranks: of `megarl run`, or of a plain torchrun."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and AGENT not in os.environ
    return "--nproc-per-node" if is_torchrun else "--ranks"


def refuse_wrong() -> None:
    """Raises `ValueError`, with what to do, for launchers' variables that are out of range,
    contradict each other or are missing. Without a launcher none is set, which is allowed.
    """
    size, local = num_ranks(), ranks_per_host()
    number("RANK", 0, high=size - 1)
    if local > size or size % local:
        raise ValueError(
            f"the environment variable LOCAL_WORLD_SIZE is {local} and WORLD_SIZE {size}, of which"
            " every host has an equal share; start the ranks with torchrun"
        )
    number("LOCAL_RANK", 0, high=local - 1)
    number("MASTER_PORT", 0, low=1, high=65535)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        raise ValueError(
            f"the environment variable WORLD_SIZE is {size}, but {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not set; start the ranks with torchrun"
        )


def count_ranks(ranks: int | None) -> int:
    """`ranks`, or else the launcher's number. Raises `ValueError` as `refuse_wrong`."""
    if ranks is None:
        refuse_wrong()
    return num_ranks() if ranks is None else ranks


def refuse_several(command: str, ranks: int | None) -> None:
    """Raise `ValueError` unless a `command` of one process has one; `ranks` as `count_ranks`."""
    if (size := count_ranks(ranks)) != 1:
        raise ValueError(f"megarl {command} runs as one process, but was started as {size} ranks")


def warn(message: str) -> None:
    """Print a warning on standard error, on rank 0, if there is a `message`."""
    if message and rank() == 0:
        say(f"megarl: warning: {message}")


FIRST = 20_000
"""First port that `free_port` chooses; Ray's workers use 10,002 to 19,999 by default."""
KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 50


def free_port() -> int:
    """A TCP port of this host on which no process listens; it is not reserved.

    Servers often start seconds later, and the kernel gives ports from 32,768 on (by default) to
    others meanwhile. The port is therefore drawn below that range; the kernel chooses one after
    `ATTEMPTS` draws.
    """
    below = int(KERNELS.read_text().split()[0])
    draw = random.Random()  # not the shared generator: a seeded one would repeat in each process
    for _ in range(ATTEMPTS if below > FIRST else 0):
        port = draw.randrange(FIRST, below)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
