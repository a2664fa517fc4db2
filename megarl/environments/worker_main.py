"""The program of a worker process: what `megarl.environments.worker_handle` starts.

The first request is (configuration, codec, content of the user's files) and is answered with
{imported, tools, forms, beats}, or with {refused}; `megarl.environments.worker.Host` answers the
others. The process is spoken to through its standard input, a socket.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from megarl.environments import user_code
from megarl.environments.channel import WorkerChannel
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.isolation import enter_own_domain
from megarl.environments.plain_calls import ending_forks
from megarl.environments.session_worker import SessionHost
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import (
    import_built_in,
    load_functions,
    load_session,
    load_verifier,
    may_overlap,
    own_files,
)
from megarl.environments.worker import Host, MemoryLimit, VerifierHost
from megarl.lookup import of_app
from megarl.signals import die_with_parent

BUILT_IN_MEMORY_MIB = 512
"""Memory limit of a process that runs a built-in verifier, if the recipe sets none."""


def main(parent: int) -> None:
    """Entry point of a worker process: load the verifier or session class and answer requests on
    the socket at standard input until the parent process (pid `parent`) closes its end.
    """
    die_with_parent(parent)
    # The channel moves away from standard input, so that a verifier may read without breaking it;
    # what one prints goes to standard error, because the parent's standard output may be read by
    # a program.
    channel = WorkerChannel(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(channel.connect())
    first = loop.run_until_complete(channel.receive())
    if first is None:
        return
    number, (config, codec, sources) = first
    try:
        # Before the user's files are on the path, where one may hide a library.
        if config.tools.are_used:
            of_app("ToolKit")
        import_built_in(config)
        if config.isolate and (config.has_sessions or own_files(config)):
            enter_own_domain(mounts=bool(config.programs))
        with ending_forks():
            host, about = _load(loop, config, codec, sources)
    except BaseException as error:
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        channel.send(number, {"refused": told})
        loop.run_until_complete(channel.receive())  # until the pool has read that
        return
    channel.send(number, about)
    host.serve(channel, loop, beats=about["beats"])
    # Not an ordinary exit, which waits for threads that a user's call keeps.
    os._exit(0)


def _load(
    loop: asyncio.AbstractEventLoop,
    config: EnvironmentConfig,
    codec: Codec | None,
    sources: Sources,
) -> tuple[Host, dict[str, Any]]:
    """The host of the verifier, the session class or the tools, and what the pool is told of it."""
    own = own_files(config)
    user_code.prepare_imports(own, sources)
    about: dict[str, Any] = {"tools": [], "forms": {}, "beats": config.has_sessions}
    host: Host
    if config.tools.are_used:
        kit = of_app("ToolKit")(config, codec, sources)
        loop.run_until_complete(kit.start())
        about["tools"] = kit.schemas
        host = SessionHost(kit.session, codec, MemoryLimit(config.memory_limit_mib), config)
    elif config.has_sessions:
        make = load_session(config, sources)
        host = SessionHost(make, codec, MemoryLimit(config.memory_limit_mib), config)
    else:
        functions = load_functions(config, sources)
        about["beats"] = may_overlap(config, functions)
        about["forms"] = {name: one.form for name, one in functions.items() if one.form}
        verifier = load_verifier(config, functions)
        limit = MemoryLimit(config.memory_limit_mib or (None if own else BUILT_IN_MEMORY_MIB))
        host = VerifierHost(verifier, codec, limit, config)
    about["imported"] = user_code.neighbours(own)
    return host, about
