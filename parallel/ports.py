"""Chooses a TCP port for a server that another process will start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 20_000
"""Ray's workers use 10,002 to 19,999 unless told otherwise."""
KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 50


def free_port() -> int:
    """A TCP port of this host on which no process listens.

    The server often starts seconds later. The kernel gives ports of its own range (32,768 and up
    by default) to connections and to servers that name no port; one of those could be taken by
    then. So the port is drawn at random from below that range.
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
