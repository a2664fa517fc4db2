"""RAY_ADDRESS, tried before Ray waits minutes for a cluster that is gone."""

from __future__ import annotations

import os
import socket


def ray_address() -> str:
    """ "host:port", "auto", or "" to start Ray here. Raises `ValueError` if nothing answers, or for
    another form.
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
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS is {address}: nothing answers there ({error.strerror or error}); unset"
            " RAY_ADDRESS to start Ray here, or start Ray there"
        ) from None
    return address
