"""The verifier `code`: does a program that the model wrote pass the tests of its row?

response --extract--> program --Sandbox.run--> outputs --compare, here--> share of tests passed
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from megarl.apps.verifiers.code.code_tests import (
    BadTests,
    Tests,
    extract,
    read_tests,
    same_output,
    same_value,
)
from megarl.apps.verifiers.code.program_server import decode
from megarl.apps.verifiers.code.sandbox import Sandbox
from megarl.environments.code_config import CodeConfig
from megarl.environments.scores import BadScore, Score
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.environments.config import EnvironmentConfig

SHARE_OF_LIMIT = 0.9
"""Share of `environment.time_limit_s` that all tests of a response have together."""
FIRST_TESTS = 4
"""Tests of the first round; each further round has twice as many. A wrong program ends with the
round in which it fails."""


def code(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[Score]]:
    """A verifier that runs the program of a response in a sandbox on the tests of the prompt's row.

    It returns 1.0 if all tests pass, else 0.0 (`environment.code.partial`: the share that pass),
    with the metrics `tests_passed` (share) and `timed_out` (0 or 1). A row without tests is a
    failure, a `BadScore`. Raises `ValueError` if the sandbox does not start.
    """
    settings, sandbox = config.code, Sandbox(config.code)
    limit_s = SHARE_OF_LIMIT * config.time_limit_s

    async def verify(prompt: Prompt, response: str) -> Score:
        try:
            tests = read_tests(prompt.fields, settings.tests_column, settings.max_tests)
        except BadTests as error:
            raise BadScore("error", str(error)) from None
        program = extract(response, fence_required=settings.fence_required)
        if not program:
            return Score(0.0, False, {"tests_passed": 0.0, "timed_out": 0.0})
        passed, timed_out = _run(sandbox, settings, tests, tests.whole(program), limit_s)
        share = passed / len(tests.tests)
        reward = share if settings.partial else float(share == 1.0)
        metrics = {"tests_passed": share, "timed_out": float(timed_out)}
        return Score(reward, share == 1.0, metrics)

    return verify


def _run(
    sandbox: Sandbox, settings: CodeConfig, tests: Tests, program: str, limit_s: float
) -> tuple[int, bool]:
    """(number of tests passed, whether time ran out in one of them), within `limit_s` seconds.
    Without `settings.partial` it stops soon after the first test that fails.
    """
    until = time.monotonic() + limit_s
    begin, passed, timed_out = 0, 0, False
    size = len(tests.tests) if settings.partial else FIRST_TESTS
    while begin < len(tests.tests):
        part = tests.tests[begin : begin + size]
        results = sandbox.run(
            tests.kind,
            program,
            part,
            total_s=max(0.0, until - time.monotonic()),
            go_on=settings.partial,
            **tests.more,
        )
        expected = tests.expected[begin : begin + size] or [None] * len(part)
        right = [
            _passes(result, wanted, tests, settings.tolerance)
            for result, wanted in zip(results, expected, strict=False)
        ]
        passed, begin = passed + sum(right), begin + len(results)
        timed_out |= any(result["status"] == "time" for result in results)
        if time.monotonic() >= until and begin < len(tests.tests):
            return passed, True
        if not settings.partial and passed < begin:
            break
        size = 2 * size
    return passed, timed_out


def _passes(result: dict[str, Any], expected: Any, tests: Tests, tolerance: float) -> bool:
    """Whether what a program has said is what was expected."""
    if result["status"] != "ok":
        return False
    if tests.kind == "asserts":
        return True
    try:
        if tests.kind == "stdin":
            output = base64.b64decode(result["output"]).decode("utf-8", "replace")
            return same_output(output, expected, tolerance)
        reply = json.loads(result["reply"])
        if "value" not in reply:
            return False
        found = decode(reply["value"], lambda index: object())
        return same_value(found, expected, tolerance, wrapped=tests.wrapped)
    except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError, RecursionError):
        return False  # a program may write anything in place of a reply
