"""The verifier's file is loaded in a worker process before a run starts."""

from __future__ import annotations

import asyncio
from typing import Any

from megarl import console
from megarl.environments.config import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import own_files, setting_of
from megarl.lookup import of_app
from megarl.parallel import launcher


def check_verifier(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Raise `ValueError` unless the environment's verifier, session or tools can be loaded in a
    worker process. Returns the tools, as `megarl.apps.tools.tool.Schema`.
    """
    if config.programs:
        of_app("say_protection")(config)

    async def load_once() -> list[dict[str, Any]]:
        environment = Environment(config)
        try:
            # What is built in ends; how long a user's file takes, only the user knows.
            own = own_files(config) and not config.tools.servers
            await environment.start(within_s=config.load_limit_s if own else None)
            for name, form in environment.forms.items() if launcher.rank() == 0 else ():
                console.say(f"{setting_of(config)}: {name} is called in the form of {form}")
            return environment.tools
        finally:
            await environment.close()

    return asyncio.run(load_once())
