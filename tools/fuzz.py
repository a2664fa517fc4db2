"""Thousands of wrong inputs, each of which must end in one clear line or a right pass.

    python tools/fuzz.py --cases 3000 --seed 7
    python tools/fuzz.py --seed 7 --only 1234        one case, with its files kept and its answer

Reports the cases that end in a traceback, take longer than 10 s, print more than one line, or pass
although they are wrong. Exit code 1 if there is any. The cases run in child processes, since a case
may hang or take the process with it.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import queue
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from common import command_line

OPTIONS = {
    "--cases": (500, "how many"),
    "--seed": (1, "of the cases"),
    "--only": (int, "number of the one case to run"),
    "--json": (False, "every case as a line of JSON"),
}
HANG_S = 25.0
"""A child that has not answered a case after this many seconds is killed."""
MEMORY_BYTES = 8 * 2**30
"""Address space of a child beyond what it uses after imports."""


def child(seed: int, numbers: Any, answers: Any, model: str) -> None:
    """Run the cases of queue `numbers`; puts (number, None) and (number, its record) on `answers`
    when a case begins and ends.
    """
    from support import fuzz

    from megarl.cluster.process_env import prepare_environment

    prepare_environment(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import psutil
    import torch  # noqa: F401  (its address space is no case's)
    import transformers  # noqa: F401

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    while (number := numbers.get()) is not None:
        answers.put((number, None))
        kind, case = fuzz.make(seed, number, Path(model))
        with tempfile.TemporaryDirectory() as folder:
            found = fuzz.run(case, Path(folder), Path(model))
        told = {"case": kind, "what": case.what, "outcome": found.kind}
        answers.put((number, told | {"said": found.said, "seconds": found.seconds}))


def run_all(seed: int, numbers: list[int], model: Path) -> list[dict[str, Any]]:
    """Outcomes of all cases, in order; children are replaced as they hang or die."""
    context = multiprocessing.get_context("spawn")
    waiting, answers = context.Queue(), context.Queue()
    found: list[dict[str, Any]] = []
    left = list(numbers)
    worker: Any = None
    ended = -2
    """Number of outcomes when a process last hung or ended."""
    while left:
        if worker is None:
            waiting, answers = context.Queue(), context.Queue()
            for number in [*left, None]:
                waiting.put(number)
            worker = context.Process(target=child, args=(seed, waiting, answers, str(model)))
            worker.start()
            limit = 90.0  # imports
        try:
            number, answer = next_answer(answers, worker, limit)
        except queue.Empty:
            outcome = "hang" if worker.is_alive() else f"the process ended ({worker.exitcode})"
            worker.kill()
            worker.join()
            worker = None
            found.append(row(seed, left.pop(0), model, outcome))
            if len(found) == ended + 1 and outcome != "hang":
                raise RuntimeError(f"two processes in turn ended: {outcome}") from None
            ended = len(found)
            continue
        limit = HANG_S
        if answer is None:
            continue
        left.remove(number)
        found.append({"number": number, **answer})
    if worker is not None:
        worker.join(10)
    return found


def next_answer(answers: Any, worker: Any, limit_s: float) -> Any:
    """The next item of a queue; raises `queue.Empty` after `limit_s`, or if `worker` has ended."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return answers.get(timeout=min(1.0, max(deadline - time.monotonic(), 0.01)))
        except queue.Empty:
            if time.monotonic() > deadline or not worker.is_alive():
                raise


def row(seed: int, number: int, model: Path, outcome: str) -> dict[str, Any]:
    """The record of a case that gave no answer."""
    from support import fuzz

    kind, case = fuzz.make(seed, number, model)
    record = {"number": number, "case": kind, "what": case.what, "outcome": outcome}
    return {**record, "said": f"no answer within {HANG_S:g} s", "seconds": HANG_S}


def main() -> int:
    """The command line; returns the exit code."""
    args = command_line(__doc__, OPTIONS).parse_args()
    from support.tiny import write_model

    numbers = list(range(args.cases)) if args.only is None else [args.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        found = run_all(args.seed, numbers, model)
    faults = [one for one in found if one["outcome"] not in ("refused", "passed")]
    for one in found if args.json else faults if args.only is None else found:
        if args.json:
            print(json.dumps(one))
        else:
            said = one["said"][-3000:]
            print(f"{one['number']}: {one['outcome']}: {one['case']}: {one['what']}\n    {said}\n")
    counts = collections.Counter(one["outcome"] for one in found)
    slowest = max(one["seconds"] for one in found)
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    took = time.monotonic() - started
    line = f"{len(found)} cases of seed {args.seed} in {took:.0f} s: {summary}"
    print(f"{line}; slowest {slowest:.1f} s", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
