"""Code that is named by "module:function" and imported at its first use.

The core imports no app (`megarl.apps`). What it asks of one is named here, or in another table: the
commands in `command_line/table.py`, the verifiers in `environments/verifiers.py`. So a run needs
only the apps that its recipe uses, and `megarl.apps.runs`, which writes its report.

To add an environment of another library, write an adapter in `megarl/apps/adapters` and name it in
`SOURCES`, and in `SESSIONS`, in `AGENTS` or in the verifiers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megarl.errors import UserError

OF_APPS = {
    "write_report": "megarl.apps.runs.report:write_report",
    "ToolKit": "megarl.apps.tools.tool_kit:ToolKit",
    "AgentKit": "megarl.apps.gateway.agent_kit:AgentKit",
    "say_protection": "megarl.apps.verifiers.code.code_verifier:say_protection",
    "check_rows": "megarl.apps.verifiers.code.code_verifier:check_rows",
    "final_expression": "megarl.apps.verifiers.mathematics:final_expression",
    "plain_number": "megarl.apps.verifiers.notation:plain_number",
}
"""{function or class: where it is} of what the core uses of apps."""

SOURCES = {
    "reasoning_gym": "megarl.apps.adapters.reasoning:reasoning_rows",
    "gymnasium": "megarl.apps.adapters.gym:gym_rows",
    "textarena": "megarl.apps.adapters.arena:arena_rows",
    "openenv": "megarl.apps.adapters.openenv:openenv_rows",
    "verifiers": "megarl.apps.adapters.verifiers_agent:verifiers_rows",
}
"""{what stands before the colon of `prompts.source: reasoning_gym:NAME`: function (NAME,
`prompts.arguments`, most rows or None) -> rows, dicts with `prompt` and `answer`}. It raises
`ValueError` that says what to set."""
SESSIONS = {
    "gymnasium": "megarl.apps.adapters.gym:gym_sessions",
    "textarena": "megarl.apps.adapters.arena:arena_sessions",
    "openenv": "megarl.apps.adapters.openenv:openenv_sessions",
}
"""{built-in name of `environment.session`: function () -> the session's class}. It raises
`ValueError` if a package is missing."""
AGENTS = {"verifiers": "megarl.apps.adapters.verifiers_agent:play_episode"}
"""{built-in name of `environment.agent.function`: the async function (prompt, client)}"""


def load(place: str) -> Callable[..., Any]:
    """Import the function or class that `place`, a text "module:function", names, and return it.
    Raises `UserError` if the module belongs to an app, an optional part of megarl in `megarl.apps`
    such as the tools or the report, that is not installed.
    """
    module, _, function = place.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megarl.apps"):
            raise
        raise UserError(
            f"{error.name} is not installed, and {place} is in it; install the whole of megarl:"
            " bash launch/env.sh, or pip install ."
        ) from None


def of_app(name: str) -> Callable[..., Any]:
    """Import a function or class of an app, an optional part of megarl in `megarl.apps`, and return
    it. `name`: its key in the table `OF_APPS`, such as "write_report". Raises `UserError` if the
    app is not installed.
    """
    return load(OF_APPS[name])
