"""The program of a worker process: what `megarl.environments.worker_handle` starts.

In: (configuration, codec, content of the user's files), then what `VerifierHost` or `SessionHost`
is asked. The process is spoken to through its standard input, a socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from typing import Any

from megarl.environments import user_code
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.die_with_parent import die_with_parent
from megarl.environments.isolation import enter_own_domain
from megarl.environments.memory import MemoryLimit
from megarl.environments.session_worker import SessionHost
from megarl.environments.tools.session import ToolKit
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import load_session, load_verifier, own_files
from megarl.environments.worker import LENGTH, VerifierHost, receive

BUILT_IN_MEMORY_MIB = 512
"""Memory limit of a process that runs a built-in verifier, if the recipe sets none."""


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def main(parent: int) -> None:
    """Entry point of a worker process: load the verifier or session class and answer requests on
    the socket at standard input until the parent process (pid `parent`) closes its end.
    """
    die_with_parent(parent)
    # The channel moves away from standard input, so that a verifier may read without breaking it;
    # what one prints goes to standard error, because the parent's standard output may be read by
    # a program.
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    first = receive(channel)
    if first is None:
        return
    config, codec, sources = pickle.loads(first)  # noqa: S301 - from the parent
    if config.isolate and (config.has_sessions or own_files(config)):
        enter_own_domain(mounts=bool(config.programs))
    if config.has_sessions:
        asyncio.run(_run_sessions(channel, config, codec, sources))
        # Not an ordinary exit, which waits for threads that a user's call keeps.
        os._exit(0)
    try:
        own = own_files(config)
        user_code.prepare_imports(own, sources)
        verifier = load_verifier(config, sources)
        limit = MemoryLimit(config.memory_limit_mib or (None if own else BUILT_IN_MEMORY_MIB))
    except BaseException as error:
        _refuse(channel, error)
        return
    _send(channel, {"imported": user_code.neighbours(own)})
    host = VerifierHost(verifier, codec, limit, maps_scores=not config.maps_no_scores)
    while (message := receive(channel)) is not None:
        command, argument, *more = pickle.loads(message)  # noqa: S301 - from the parent
        _send(channel, host.judge(argument, *more) if command == "judge" else host.decode(argument))


async def _run_sessions(
    channel: socket.socket, config: EnvironmentConfig, codec: Codec | None, sources: Sources
) -> None:
    """Load the session class or the tools, and run sessions until the parent closes its end."""
    schemas: list[Any] = []
    try:
        own = own_files(config)
        user_code.prepare_imports(own, sources)
        if config.tools.are_used:
            kit = ToolKit(config, codec, sources)
            await kit.start()
            make, schemas = kit.session, kit.schemas
        else:
            make = load_session(config, sources)
        limit = MemoryLimit(config.memory_limit_mib)
    except BaseException as error:
        _refuse(channel, error)
        return
    _send(channel, {"imported": user_code.neighbours(own), "tools": schemas})
    await SessionHost(make, codec, limit, config).serve(channel)


def _refuse(channel: socket.socket, error: BaseException) -> None:
    """Tell the parent why nothing was loaded."""
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    _send(channel, {"refused": said})
