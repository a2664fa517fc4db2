"""Code named by "module:function" and imported at its first use.

The core imports no app: what it asks of one is named here, or in the tables of commands and
verifiers. To add an environment of another library, write an adapter in `megarl/apps/adapters` and
name it in `SOURCES`, and in `SESSIONS`, in `AGENTS` or in the verifiers.
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
"""{first part of `prompts.source: reasoning_gym:NAME`: function (NAME, `prompts.arguments`, most
rows or None) -> rows}. It raises `ValueError`.
"""
SESSIONS = {
    "gymnasium": "megarl.apps.adapters.gym:gym_sessions",
    "textarena": "megarl.apps.adapters.arena:arena_sessions",
    "openenv": "megarl.apps.adapters.openenv:openenv_sessions",
}
"""{`environment.session`: function () -> class}. It raises `ValueError` if a package is missing."""
AGENTS = {"verifiers": "megarl.apps.adapters.verifiers_agent:play_episode"}
"""{`environment.agent.function`: async function (prompt, client)}"""


def load(target: str) -> Callable[..., Any]:
    """Import "module:function". Raises `UserError` if its app is not installed."""
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megarl.apps"):
            raise
        raise UserError(
            f"{error.name} is not installed, and {target} is in it; install the whole of megarl:"
            " bash launch/env.sh, or pip install ."
        ) from None


def of_app(name: str) -> Callable[..., Any]:
    """`load` by a key of `OF_APPS`."""
    return load(OF_APPS[name])
