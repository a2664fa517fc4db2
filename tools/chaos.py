"""Faults at random moments of a real run: does it go on, and is its ledger exact afterwards?

    python tools/chaos.py RECIPE.yaml [--faults 20] [--seed 1] [--kinds engine,core,...]
        [--ranks 1,2] [--pause 5] [--hang 240] [--disk MIB] [--only SIGKILL] [--then 30]

Runs `megarl run RECIPE.yaml --resume auto` and, again and again, does it a harm: kills (SIGKILL)
or stops (SIGSTOP) one of its processes, tears or alters its files between two starts, fills its
disk, or makes its verifier raise, hang or return NaN. The moments are random, one of them in each
phase of the run (generate, score, take, train, ...) before the next is in a phase for the second
time. A run that ends is started again, as a scheduler does. The recipe needs enough steps to last:
a finished run gets no further faults. With `--then` the run is killed once more after the last
fault and finishes so many steps later.

`--ranks` counts the training ranks of each start in turn: `1,2` starts with one and resumes with
two. `--disk` mounts a file system of so many MiB on the run folder, which needs root; without it
the disk is never full.

Prints what became of the run after each fault: `goes on` (the same run, lost processes replaced),
`resumes` (the run ended and was started again) or `HANGS` (no step for `--hang` seconds); the phase
that it was in; and the line by which the run told of the fault, with the seconds until then. Then
the verdict of `megarl ledger`, and what was left behind: processes, and files in /tmp, TMPDIR and
/dev/shm, of which other programs must make none meanwhile. Exit code 1 if a run hangs, the ledger
is not exact, a process is left, or a fault is not told.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from chaos_faults import KINDS, Fault, every, wait, write_verifier
from chaos_run import PHASES, ROOT, Run, megarl, outside
from common import command_line

from megarl.observe.sinks import read_records

OPTIONS = {
    "recipe": (Path, "with enough steps to last"),
    "--faults": (20, "faults in all"),
    "--seed": (1, "of faults and moments"),
    "--kinds": (list(KINDS), "of faults", KINDS),
    "--only": ("", "such as SIGKILL: no other way to do harm"),
    "--ranks": ([1], "training ranks of each start in turn, such as 1,2"),
    "--pause": (5.0, "longest pause after a step [s]"),
    "--hang": (240.0, "a run or a start without a step hangs [s]"),
    "--disk": (0, "MiB of a disk for the run folder"),
    "--then": (0, "steps to finish in after all faults"),
}
PHASE_S = 8.0
"""Seconds to wait for the phase in which a fault is to fall."""
COUNTED = ("verifier", "judgement")
FAILURES = ("verifier/errors", "verifier/timeouts", "verifier/nans")
COUNTED_STEPS = 30
"""Faults that cost verdicts, the metrics that count these, and the steps in which they must."""
VAIN_STARTS = 5
"""Starts in a row that may end, after a fault, without a further one."""
TELLS_S = 90.0
"""Seconds after a fault in which the run must tell of it."""


@dataclass
class Struck:
    """A fault that has happened."""

    fault: Fault
    at: float
    """Seconds since the epoch."""
    what: str
    """What was hit."""
    phase: str
    step: int
    """Step that the run was in, from 1."""
    outcome: str = ""
    took_s: float = 0.0
    """Seconds until the run went on, or had ended."""

    def told(self, run: Run) -> tuple[float, str] | None:
        """(seconds after the fault, line) by which the run told of it; None if it did not. Failed
        verdicts may be told by their count in the metrics only, without a time.
        """
        number = re.search(r"engine (\d+)", self.what)
        name = rf"engines? \[?(?:\d, )*{number[1]}" if number else "engine"
        says = re.compile(self.fault.says.replace("{name}", name), re.IGNORECASE)
        for at, line in list(run.lines):
            if self.at <= at <= self.at + self.took_s + TELLS_S and says.search(line):
                return at - self.at, line
        if self.fault.kind in COUNTED:
            for row in read_records(run.folder / "metrics.jsonl"):
                failed = {name: row.get(name, 0) for name in FAILURES if row.get(name, 0)}
                if failed and 0 <= row["step"] - self.step <= COUNTED_STEPS:
                    return math.nan, f"step {row['step']}: {failed}"
        return None


def again_and_again(draw: random.Random, items: Iterable[Any]) -> Iterator[Any]:
    """Every item once in random order, and again."""
    found = list(items)
    while True:
        draw.shuffle(found)
        yield from found


class Torment:
    """Lets a run suffer `args.faults` faults and finish."""

    def __init__(self, run: Run, args: argparse.Namespace, commands: list[list[str]]) -> None:
        """`commands`: those of the first start, the second start, ..., and again."""
        self.run, self.args, self.commands = run, args, commands
        self.draw = random.Random(args.seed)
        self.struck: list[Struck] = []
        self.left: list[str] = []
        """Processes, and in the end files, that a run which had ended left behind."""

    def start(self) -> None:
        """Start the run, again if it has ended; what it left behind is noted, and ended."""
        if self.run.process is not None:
            for left in self.run.end():
                self.left.append(left)
                print(f"    left behind: {left}", flush=True)
        self.run.command = self.commands[self.run.starts % len(self.commands)]
        self.run.start()

    def wait_for_steps(self, count: int, when: str) -> None:
        """Raises `RuntimeError` where the run hangs."""
        if not self.run.wait_for_steps(count, self.args.hang):
            raise RuntimeError(f"no step within {self.args.hang:g} s {when}")

    def suffer(self) -> None:
        """All of it. Raises `RuntimeError` where the run hangs or does not start again."""
        only, when = self.args.only, again_and_again(self.draw, PHASES)
        faults = [one for one in every(self.args.kinds) if not only or one.how == only]
        todo = again_and_again(self.draw, faults)
        self.start()
        misses = vain = 0
        while len(self.struck) < self.args.faults and misses < 20 * len(self.args.kinds):
            if self.run.code is not None:
                if self.run.code == 0:
                    break
                self.start()
                vain += 1
            if vain > VAIN_STARTS:
                said = [line for _, line in self.run.lines if "megarl: error" in line][-1:]
                raise RuntimeError(f"{vain} starts in a row ended without a fault: {said}")
            phase = next(when)
            if phase != "start":
                self.wait_for_steps(1, "of a start")
                time.sleep(self.draw.uniform(0.0, self.args.pause))
            self.run.wait_for_phase(phase, PHASE_S)
            time.sleep(self.draw.uniform(0.0, 0.01))
            if self.run.code is None:
                misses, vain = (0, 0) if self.strike(next(todo)) else (misses + 1, vain)
        self.finish()

    def strike(self, fault: Fault) -> bool:
        """Let one fault happen and wait for its outcome; False if it cannot happen now."""
        run, at = self.run, time.time()
        if fault.is_offline:
            run.end()
        step = run.place[1]
        what = fault.strike(run, self.draw)
        if not what:
            if fault.is_offline:
                self.start()
            return False
        one = Struck(fault, at, what, "between two starts" if fault.is_offline else "", step)
        self.struck.append(one)
        began = time.monotonic()
        if fault.is_offline:
            self.start()
        wait(fault, run)
        one.outcome = "goes on" if run.wait_for_steps(2, self.args.hang) else "HANGS"
        if run.code not in (None, 0):
            one.outcome = "resumes"
        one.took_s = time.monotonic() - began
        one.phase = one.phase or run.phase_at(at)
        told = one.told(run)
        where = f"{len(self.struck):3} {fault.name} {what} in {one.phase}"
        said = f"({told[0]:.1f} s: {told[1][:200]})" if told else ""
        print(f"{where}: {one.outcome} after {one.took_s:.0f} s", said, flush=True)
        if one.outcome == "HANGS":
            subprocess.run(megarl("status", run.folder), cwd=ROOT)
            run.end()
            self.start()
        return True

    def finish(self) -> None:
        """Let the run come to its end, started again where it must; `args.then` steps from now."""
        if self.run.code not in (None, 0):
            self.start()
        if self.args.then and self.run.wait_for_steps(1, self.args.hang) and self.run.code is None:
            steps = str(self.run.place[1] + self.args.then)
            self.commands = [[*one, "--steps", steps] for one in self.commands]
            self.run.end()
            self.start()
        for _ in range(5):
            self.wait_for_steps(10**9, "after all faults")
            if self.run.code == 0:
                return
            self.start()
        raise RuntimeError("it did not finish in 5 starts, without a fault")


def command(recipe: Path, ranks: int, *further: str) -> list[str]:
    """The command line of the run with a number of training ranks."""
    torchrun = ["megarl.parallel.torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = [*(torchrun if ranks > 1 else []), "megarl", "run", str(recipe), *further]
    return [sys.executable, "-m", *words]


def table(struck: list[Struck], run: Run) -> list[str]:
    """Prints the outcomes by fault; returns the faults of which the run did not tell."""
    untold = []
    for name in sorted({one.fault.name for one in struck}):
        ones = [one for one in struck if one.fault.name == name]
        found = [one.told(run) for one in ones]
        noticed = [at for at, _ in filter(None, found) if at == at]
        within = f"told after {min(noticed):.1f} to {max(noticed):.1f} s" if noticed else ""
        outcomes = collections.Counter(one.outcome for one in ones)
        shown = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
        where = ", ".join(sorted({one.phase for one in ones}))
        print(f"{name:22} {shown:24} {within:28} in {where}")
        pairs = zip(ones, found, strict=True)
        untold += [f"{name} {o.what}" for o, told in pairs if o.fault.says and told is None]
    return untold


def main() -> int:
    args = command_line(__doc__, OPTIONS).parse_args()
    if args.disk and os.geteuid() != 0:
        print("--disk needs root to mount a file system: the disk will never be full")
        args.disk = 0
    recipe = yaml.safe_load(args.recipe.read_text())
    folder = Path(recipe["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if args.disk:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={args.disk}m", "tmpfs", str(folder)]
        subprocess.run(mount, check=True)
    run = Run([], folder, Path(f"{folder}_chaos.log"))
    further = ["--resume", "auto"]
    verifier = recipe.get("environment", {}).get("verifier", "")
    if "judgement" in args.kinds and ".py:" in verifier:
        further += ["--environment.verifier", write_verifier(run, verifier)]
    torment = Torment(run, args, [command(args.recipe, n, *further) for n in args.ranks])
    began, before, problem = time.monotonic(), outside(), ""
    try:
        torment.suffer()
    except RuntimeError as error:
        problem = str(error)
    finally:
        if run.process is not None:
            torment.left += [*run.end(), *run.lingered(), *sorted(outside() - before)]
    audit = subprocess.run(megarl("ledger", folder), cwd=ROOT, capture_output=True, text=True)
    untold = table(torment.struck, run)
    print(audit.stdout.strip() or audit.stderr.strip())
    print(*(f"not told: {one}" for one in untold), problem, sep="\n")
    if args.disk:
        kept = Path(f"{folder}_kept")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, symlinks=True)
        subprocess.run(["umount", str(folder)], check=True)
        print(f"the run folder was on a disk of its own; a copy is {kept}")
    hangs = sum(one.outcome == "HANGS" for one in torment.struck)
    result = {
        "faults": len(torment.struck),
        "hangs": hangs,
        "starts": run.starts,
        "finished": not problem,
        "ledger is exact": audit.returncode == 0,
        "left behind": torment.left,
        "not told": len(untold),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return int(any((hangs, audit.returncode, torment.left, untold, problem)))


if __name__ == "__main__":
    sys.exit(main())
