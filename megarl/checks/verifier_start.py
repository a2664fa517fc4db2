"""The verifier's file is loaded in a worker process before a run starts."""

from __future__ import annotations

import asyncio

from megarl.environments.config import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import own_files


def check_verifier(config: EnvironmentConfig) -> None:
    """Raise `ValueError` unless the environment's verifier can be loaded in a worker process."""

    async def load_once() -> None:
        environment = Environment(config)
        try:
            # What is built in ends; how long a user's file takes, only the user knows.
            await environment.start(within_s=config.load_limit_s if own_files(config) else None)
        finally:
            await environment.close()

    asyncio.run(load_once())
