"""Verdicts a second of the verifier `code`, on each form of tests, half of the programs wrong.

Each thread has a verifier with a sandbox of its own, as the processes of `environment.num_workers`
have; the threads themselves only wait and compare.

    python tools/bench/code_verdicts.py --rounds 5 --json
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common import Args, Lines, in_turns, run_tool, spread, table

OPTIONS = {
    "--verdicts": (60, "responses of a form in a round"),
    "--tests": (3, "tests of a row"),
    "--rounds": (5, "rounds"),
}
THREADS = 2
"""Verifiers at the same time."""
FORMS = ("stdin", "calls", "asserts", "check")


def problem(form: str, tests: int, right: bool) -> tuple[dict[str, Any], str]:
    """(row, response): the sum of a list; a wrong program forgets the last number."""
    lists = [list(range(number, number + 20)) for number in range(1, tests + 1)]
    part = "" if right else "[:-1]"
    function = f"```python\ndef total(numbers):\n    return sum(numbers{part})\n```"
    if form == "stdin":
        inputs = [" ".join(map(str, one)) + "\n" for one in lists]
        row = {"input_output": {"inputs": inputs, "outputs": [str(sum(one)) for one in lists]}}
        return row, f"```python\nprint(sum(list(map(int, input().split())){part}))\n```"
    if form == "calls":
        data = {"fn_name": "total", "inputs": [[one] for one in lists]}
        return {"input_output": data | {"outputs": [sum(one) for one in lists]}}, function
    if form == "asserts":
        return {"test_list": [f"assert total({one}) == {sum(one)}" for one in lists]}, function
    lines = "".join(f"    assert candidate({one}) == {sum(one)}\n" for one in lists)
    starts = 'def total(numbers):\n    """The sum."""\n'
    check = f"def check(candidate):\n{lines}"
    return {"prompt": starts, "entry_point": "total", "test": check}, function


def verdicts_per_s(form: str, args: Args) -> float:
    """Verdicts a second of one round. Raises `RuntimeError` for a wrong verdict."""
    from megarl.apps.verifiers.code.code_verifier import code
    from megarl.settings.code import CodeConfig
    from megarl.settings.environments import EnvironmentConfig
    from megarl.types import Prompt

    settings = CodeConfig(time_limit_s=30.0)
    config = EnvironmentConfig(verifier="code", code=settings, time_limit_s=120.0)
    verifiers = [code(config) for _ in range(THREADS)]  # a sandbox ends with its thread

    def work(number: int) -> None:
        for index in range(number, args.verdicts, THREADS):
            right = index % 4 < 2
            row, response = problem(form, args.tests, right)
            prompt = Prompt(index=index, text="", token_ids=[1], answer="", fields=row)
            made: Any = verifiers[number](prompt, response)
            score = asyncio.run(made)
            if score.correct != right:
                raise RuntimeError(f"{form}: verdict {score}, but the program is right: {right}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))  # the first starts import, and fill caches
        began = time.perf_counter()
        list(pool.map(work, range(THREADS)))
        return args.verdicts / (time.perf_counter() - began)


def measure(args: Args) -> dict[str, Any]:
    """{"verdicts_per_s": {form: rates of the rounds}}"""
    ways = {form: partial(verdicts_per_s, form, args) for form in FORMS}
    found = in_turns(args.rounds, ways)
    return {"verdicts_per_s": {form: spread(values) for form, values in found.items()}}


def show(result: dict[str, Any]) -> Lines:
    """Format what `measure` returns as the lines of a table."""
    rows = ({"form": form, "rate": rate} for form, rate in result["verdicts_per_s"].items())
    yield from table(rows, "form; verdicts/s=rate .1f; mean=rate.mean .1f")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
