"""Code that is named by "module:function" and imported at its first use.

The core imports no app (`megarl.apps`). What it asks of one is named here, or in another table: the
commands in `command_line/table.py`, the verifiers in `environments/verifiers.py`. So the core runs
without an app that a recipe does not use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

OF_APPS = {
    "write_report": "megarl.apps.runs.report:write_report",
    "ToolKit": "megarl.apps.tools.tool_kit:ToolKit",
    "say_protection": "megarl.apps.verifiers.code.code_checks:say_protection",
    "check_rows": "megarl.apps.verifiers.code.code_checks:check_rows",
    "final_expression": "megarl.apps.verifiers.mathematics:final_expression",
    "plain_number": "megarl.apps.verifiers.notation:plain_number",
}
"""{function or class: where it is} of what the core uses of apps."""


def load(place: str) -> Callable[..., Any]:
    """The function or class that "module:function" names."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def of_app(name: str) -> Callable[..., Any]:
    """The entry `name` of `OF_APPS`."""
    return load(OF_APPS[name])
