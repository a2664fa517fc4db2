"""Checks of the verifier `code`: its sandbox, and the tests in the rows of the data."""

from __future__ import annotations

import time
from collections.abc import Iterable

from megarl import console
from megarl.apps.verifiers.code.code_tests import COLUMNS, SETUPS, BadTests, read_tests
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.apps.verifiers.code.sandbox_jobs import without_module
from megarl.environments.config import EnvironmentConfig
from megarl.parallel import launcher
from megarl.types import Prompt

READ_WITHIN_S = 5.0
"""Seconds in which tests of rows are read whole; of later rows only the columns are looked at."""
SHOWN_ROWS = 5
HOLDS = {
    "namespaces": "programs run in Linux namespaces: no network, a read-only view of the"
    " interpreter, no privileges, limits on time, memory, processes, files and output",
    "rlimits": "programs run under limits only: they can read files and use the network",
    "none": "programs run without protection but limits on time and output",
}


def say_protection(config: EnvironmentConfig) -> None:
    """Print, once for all ranks, under which protection the verifier `code` runs programs. Raises
    `ValueError` if this machine refuses the one that the recipe asks for.
    """
    for name, settings in config.programs.items():
        if launcher.rank() == 0:
            sandbox = Sandbox(settings)
            sandbox.close()
            kind, _, but = sandbox.protection.partition(", ")
            where = f"environment.mixture.{name}.code" if name else "environment.code"
            console.say(f"{where}: {HOLDS[kind]}{f'; {but}' if but else ''}")


def check_rows(config: EnvironmentConfig, prompts: Iterable[Prompt], setting: str) -> None:
    """Raise `ValueError`, naming the row, unless the verifier `code` finds tests in every row that
    it scores. Rows whose tests no program can pass, for want of a module, are named in a warning.
    `setting`: the section of the recipe that the prompts are read from.
    """
    programs, until = config.programs, time.monotonic() + READ_WITHIN_S
    unmet: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt.environment not in programs:  # scored by another verifier
            continue
        column = programs[prompt.environment].tests_column
        has_tests = any(prompt.fields.get(name) for name in ((column,) if column else COLUMNS))
        if has_tests and time.monotonic() > until:
            continue
        try:
            tests = read_tests(prompt.fields, column)
            if tests.kind == "asserts":
                for used in without_module(tests.tests, **tests.more):
                    unmet.setdefault(used, []).append(prompt.index)
        except BadTests as error:
            name = prompt.environment
            where = f"environment.mixture.{name}.code." if name else "environment.code."
            said = str(error).replace("environment.code.", where)
            raise ValueError(f"{setting}, verifier 'code', row {prompt.index}: {said}") from None
    for used, rows in sorted(unmet.items()) if launcher.rank() == 0 else ():
        more = f" and {len(rows) - SHOWN_ROWS:,} more" if len(rows) > SHOWN_ROWS else ""
        console.say(
            f"megarl: warning: {setting}, verifier 'code': the tests of row"
            f" {', '.join(map(str, rows[:SHOWN_ROWS]))}{more} use '{used}.', which neither they nor"
            f" the row's {' or '.join(SETUPS)} define: every program gets the score 0; import it"
            " there, or leave the rows out"
        )
