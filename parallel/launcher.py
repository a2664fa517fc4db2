"""What the launcher of a run's ranks (torchrun, srun) says in environment variables, and a free
port for a server that another process will start."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

LARGEST = 2**20


def number(name: str, default: int, *, low: int = 0, high: int = LARGEST) -> int:
    """The environment variable `name` as an int from `low` to `high` (both allowed); `default` if
    it is not set.

    Raises `ValueError` for any other value, an empty one too.
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
    """Number of ranks of this run, from the environment variable WORLD_SIZE; 1 if it is not set.
    Raises `ValueError` if it is no number above 0.
    """
    return number("WORLD_SIZE", 1, low=1)


def rank() -> int:
    """This process's rank in the run, from the environment variable RANK; 0 if it is not set.
    Raises `ValueError` if it is no number.
    """
    return number("RANK", 0)


def local_rank() -> int:
    """This process's number on its host, from the environment variable LOCAL_RANK; 0 if it is not
    set. Raises `ValueError` if it is no number.
    """
    return number("LOCAL_RANK", 0)


def ranks_per_host() -> int:
    """Number of ranks on this host, from the environment variable LOCAL_WORLD_SIZE; the number of
    all ranks if it is not set. Raises `ValueError` if it is no number above 0.
    """
    return number("LOCAL_WORLD_SIZE", num_ranks(), low=1)


def refuse_wrong() -> None:
    """Check the environment variables that a launcher sets (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Raises `ValueError`, with what to do, for a value
    that is no number in its range, if WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE, or if RANK,
    MASTER_ADDR or MASTER_PORT is missing with several ranks. Without a launcher nothing is set,
    which is allowed.
    """
    size, here = num_ranks(), ranks_per_host()
    number("RANK", 0, high=size - 1)
    if here > size or size % here:
        raise ValueError(
            f"the environment variable LOCAL_WORLD_SIZE is {here} and WORLD_SIZE {size}, of which"
            " every host has an equal share; start the ranks with torchrun"
        )
    number("LOCAL_RANK", 0, high=here - 1)
    number("MASTER_PORT", 0, low=1, high=65535)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        raise ValueError(
            f"the environment variable WORLD_SIZE is {size}, but {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not set; start the ranks with torchrun"
        )


FIRST = 20_000
"""First port that `free_port` chooses from. Ray's workers use 10,002 to 19,999 unless told
otherwise."""
KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 50


def free_port() -> int:
    """A TCP port of this host on which no process listens. The port is not reserved.

    The server often starts seconds later. The kernel gives ports of its own range (32,768 and up by
    default) to connections and to servers that name no port; one of those could be taken by then.
    So the port is drawn at random from 20,000 to the beginning of that range; after 50 draws
    without a free one, the kernel chooses the port.
    """
    try:
        below = int(KERNELS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        below = 2**15
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
