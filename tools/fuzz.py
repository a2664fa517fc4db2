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
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
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
HANG_S, IMPORTS_S = 25.0, 90.0
"""Seconds after which a child that has not answered a case, or has not started, is killed."""
MEMORY_BYTES = 8 * 2**30
"""Address space of a child beyond what it uses after imports."""


def prepare() -> None:
    """What a child does once: imports, and a limit of its memory."""
    from megarl.system.process_env import prepare_environment

    prepare_environment(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import psutil
    import torch  # noqa: F401  (its address space is no case's)
    import transformers  # noqa: F401

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def run_case(seed: int, number: int, model: Path, *, makes_only: bool = False) -> dict[str, Any]:
    """The record of a case; without what became of it if it is only made."""
    from support import fuzz

    kind, case = fuzz.make(seed, number, model)
    record = {"number": number, "case": kind, "what": case.what}
    if makes_only:
        return record
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz.run(case, Path(folder), model)
    return record | {"outcome": found.kind, "said": found.said, "seconds": found.seconds}


def run_all(seed: int, numbers: list[int], model: Path) -> list[dict[str, Any]]:
    """Records of all cases, in order; the child is replaced when it hangs or dies. Raises
    `RuntimeError` where two die one after the other.
    """
    found: list[dict[str, Any]] = []
    pool: Any = None
    for number in numbers:
        try:
            if pool is None:
                pool = ProcessPoolExecutor(1, get_context("spawn"), prepare)
                pool.submit(int).result(IMPORTS_S)
            found.append(pool.submit(run_case, seed, number, model).result(HANG_S))
        except (TimeoutError, BrokenProcessPool) as error:
            outcome = "hang" if isinstance(error, TimeoutError) else "the process ended"
            if outcome != "hang" and found and found[-1]["outcome"] == outcome:
                raise RuntimeError(f"two processes in turn ended, the last at {number}") from None
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()
            pool, told = None, {"outcome": outcome, "said": f"no answer within {HANG_S:g} s"}
            record = run_case(seed, number, model, makes_only=True)
            found.append(record | told | {"seconds": HANG_S})
    if pool is not None:
        pool.shutdown()
    return found


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
