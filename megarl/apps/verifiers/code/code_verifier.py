"""The verifier `code`: does a program that the model wrote pass the tests of its row?

response --extract--> program --Sandbox.run--> outputs --compare, here--> fraction of tests passed

Before a run the sandbox is tried, and the tests in the rows of the data are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from megarl.apps.verifiers.code import code_tests
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.environments.scores import BadScore, Score
from megarl.parallel import launcher
from megarl.settings.code import CodeConfig
from megarl.system import console
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.settings.environments import EnvironmentConfig

SHARE_OF_LIMIT = 0.9
"""Fraction of `environment.time_limit_s` that all tests of a response have together."""
FIRST_TESTS = 4
"""Number of tests in the first round; each further round has twice as many. A wrong program ends
with the round in which it fails."""
HOLDS = {
    "auto": "programs run under Landlock and seccomp: no network, only the interpreter to read,"
    " limits on time, memory, processes, files and output",
    "rlimits": "programs run under limits only: they can read files and use the network",
    "none": "programs run without protection but limits on time and output",
}


def code(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[Score]]:
    """Make the verifier `code` from the recipe: starts a sandbox and returns an async function
    (prompt, response) that runs the program in the response on the tests of the prompt's row.

    The function never awaits: it blocks its event loop until the tests are done. It returns a score
    of 1.0 if all tests pass, else 0.0 (with `environment.code.partial`: the fraction that pass),
    with the metrics `tests_passed` (a fraction) and `timed_out` (0 or 1). It raises `BadScore` for
    a row without tests. Making the verifier raises `ValueError` if the sandbox does not start.
    """
    settings, sandbox = config.code, Sandbox(config.code)
    limit_s = SHARE_OF_LIMIT * config.time_limit_s

    async def verify(prompt: Prompt, response: str) -> Score:
        try:
            tests = code_tests.read_tests(prompt.fields, settings.tests_column, settings.max_tests)
        except ValueError as error:
            raise BadScore("error", str(error)) from None
        program = code_tests.extract(response, fence_required=settings.fence_required)
        if not program:
            return Score(0.0, False, {"tests_passed": 0.0, "timed_out": 0.0})
        passed, timed_out = _run(sandbox, settings, tests, tests.whole(program), limit_s)
        share = passed / len(tests.tests)
        reward = share if settings.partial else float(share == 1.0)
        metrics = {"tests_passed": share, "timed_out": float(timed_out)}
        return Score(reward, share == 1.0, metrics)

    return verify


def _run(
    sandbox: Sandbox, settings: CodeConfig, tests: code_tests.Tests, program: str, limit_s: float
) -> tuple[int, bool]:
    """(number of tests passed, whether time ran out in one of them), within `limit_s` seconds.
    Without `settings.partial` it stops soon after the first test that fails.
    """
    until = time.monotonic() + limit_s
    begin, passed, timed_out = 0, 0, False
    size = len(tests.tests) if settings.partial else FIRST_TESTS
    while begin < len(tests.tests):
        batch = tests.tests[begin : begin + size]
        results = sandbox.run(
            tests.kind,
            program,
            batch,
            total_s=max(0.0, until - time.monotonic()),
            go_on=settings.partial,
            **tests.more,
        )
        expected = tests.expected[begin : begin + size] or [None] * len(batch)
        right = [
            _passes(result, target, tests, settings.tolerance)
            for result, target in zip(results, expected, strict=False)
        ]
        passed, begin = passed + sum(right), begin + len(results)
        timed_out |= any(result["status"] == "time" for result in results)
        if time.monotonic() >= until and begin < len(tests.tests):
            return passed, True
        if not settings.partial and passed < begin:
            break
        size = 2 * size
    return passed, timed_out


def _passes(
    result: dict[str, Any], expected: Any, tests: code_tests.Tests, tolerance: float
) -> bool:
    """Whether what a program has said is what was expected."""
    if result["status"] != "ok":
        return False
    if tests.kind == "asserts":
        return True
    try:
        if tests.kind == "stdin":
            return code_tests.same_output(result["output"], expected, tolerance)
        reply = json.loads(result["output"])
        if "value" not in reply:
            return False
        value = code_tests.as_json(reply["value"])
        return code_tests.same_value(value, expected, tolerance, wrapped=tests.wrapped)
    except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError, RecursionError):
        return False  # a program may write anything in place of a reply


def say_protection(config: EnvironmentConfig) -> None:
    """Print on rank 0 how programs of the verifier `code` are isolated on this machine, for which a
    sandbox is started and ended. Raises `ValueError` if this machine refuses the isolation that the
    recipe asks for.
    """
    for name, settings in config.programs.items():
        if launcher.rank() == 0:
            Sandbox(settings).close()
            where = f"environment.mixture.{name}.code" if name else "environment.code"
            console.say(f"{where}: {HOLDS[settings.sandbox]}")


def check_rows(config: EnvironmentConfig, prompts: Iterable[Prompt], setting: str) -> None:
    """Raise `ValueError`, naming the row, unless the verifier `code` finds tests in the row of
    every prompt that it scores, and it is clear which names in them are the program's. Ends after
    5 s. `setting`: the recipe's section that the prompts are read from, for messages.
    """
    programs, until = config.programs, time.monotonic() + 5.0
    for prompt in prompts:
        name = prompt.environment
        if name not in programs or time.monotonic() > until:
            continue
        try:
            code_tests.read_tests(prompt.fields, programs[name].tests_column)
        except ValueError as error:
            where = f"environment.mixture.{name}.code." if name else "environment.code."
            message = str(error).replace("environment.code.", where)
            raise ValueError(f"{setting}, verifier 'code', row {prompt.index}: {message}") from None
