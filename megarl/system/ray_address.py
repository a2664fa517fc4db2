"""The address of a running Ray cluster in RAY_ADDRESS, tried by a plain connection before Ray uses
it: Ray waits for minutes, without a word, for a cluster that is gone.
"""

from __future__ import annotations

import os
import socket

CONNECT_TIMEOUT_S = 5.0
"""Seconds that the head of a Ray cluster has to accept a connection."""


def ray_address() -> str:
    """Value of the environment variable RAY_ADDRESS, the Ray cluster to join: "host:port", "auto",
    or "" to start Ray on this machine. A host:port is tried by a connection, which may take
    `CONNECT_TIMEOUT_S` (5) seconds.

    Raises `ValueError` if nothing answers there, or if the value has another form.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):  # for auto, Ray looks for a running head itself
        return address
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"RAY_ADDRESS is {address}, which is not the host:port of a Ray cluster's head; set it"
            " to that (`ray start --head` prints it), or unset RAY_ADDRESS to start Ray here"
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS is {address}: nothing answers there ({error.strerror or error}); unset"
            " RAY_ADDRESS to start Ray here, or start Ray there"
        ) from None
    return address
