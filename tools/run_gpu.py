"""Runs the steps of tools/gpu_steps.py on one GPU; `bash tests/run_gpu.sh` starts it.

    python tools/run_gpu.py [--minutes 25] [--only kernels,zero] [--out runs/gpu]
    python tools/run_gpu.py --rehearse            the same on the CPU, where a step can be
    python tools/run_gpu.py --list                which steps fit, in their order

One line for each step, whatever became of those before; OUT/results.json and OUT/results.md are
written after every step, OUT/NUMBER-NAME/output.txt has what a step printed, and OUT.tar.gz has all
of it. A step whose packages are not installed is left out. The exit status is 0 if every step that
was begun ended well, 1 if one did not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_steps import STEPS, Step, fits, plan, words

ROOT = Path(__file__).resolve().parents[1]
ENDED_WITHIN_S = 10.0
"""Seconds that a step's processes have between SIGTERM and SIGKILL."""
MARK = "MEGARL_GPU_STEP"
"""Environment variable by which all processes of a step are found, also those of other sessions."""


@dataclass
class Result:
    """What became of a step."""

    step: str
    tells: str
    command: str
    status: str
    """ok, failed, timed out, no time, not rehearsed, or left out (packages are missing)."""
    seconds: float = 0.0
    note: str = ""
    """One line: counts of tests, or the reason."""
    found: Any = None
    """The JSON object that the step printed."""


@dataclass
class Report:
    """All results, and what they were made with."""

    rehearsal: bool
    minutes: float
    commit: str
    machine: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """results.json and results.md; each replaces the one before whole."""
        for name, text in (
            ("results.json", json.dumps(asdict(self), indent=1)),
            ("results.md", "\n".join(self.table()) + "\n"),
        ):
            aside = folder / f".{name}"
            aside.write_text(text)
            aside.replace(folder / name)

    def table(self) -> Iterator[str]:
        """Markdown: the machine, then a line for each step."""
        how = "rehearsal on CPU" if self.rehearsal else "on one GPU"
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        yield f"`bash tests/run_gpu.sh --minutes {self.minutes:g}`, {how}, commit {self.commit};"
        yield f"{facts}."
        yield ""
        yield "| step | tells | result | seconds | |"
        yield "|---|---|---|---|---|"
        for one in self.results:
            yield f"| {one.step} | {one.tells} | {one.status} | {one.seconds:.0f} | {one.note} |"


def machine() -> dict[str, Any]:
    """What runs the steps; asked in a process of its own, since CUDA holds memory where it is
    initialised."""
    code = (
        "import json, sys; sys.path.insert(0, 'tools/bench'); import common, torch;"
        "print(json.dumps(common.machine() | {'cuda': torch.version.cuda or 'none'}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return json.loads(told.stdout) if told.returncode == 0 else {"problem": told.stderr[-300:]}


def commit() -> str:
    """Short hash of the checkout, with + where files differ from it; ? without git."""
    told = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    ]
    if told[0].returncode:
        return "?"
    return told[0].stdout.strip() + ("+" if told[1].stdout.strip() else "")


def counts(path: Path) -> dict[str, int]:
    """{passed, failed, skipped} of a junit file of pytest."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    if not path.exists():
        return found
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314 - our own pytest wrote it
        kinds = {child.tag for child in case}
        name = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        found[name] += 1
    return found


def judged(step: Step, result: Result, out: str, folder: Path) -> None:
    """Fill status, note and found of a step that ended by itself."""
    if step.reads == "tests":
        found = counts(folder / "junit.xml")
        told = ", ".join(f"{number} {name}" for name, number in found.items() if number)
        result.note = (told or "no test was run") + result.note.replace("exit code 1", "")
        # A run in which every test skips itself ends with 0 and has shown nothing.
        if found["failed"] or not found["passed"]:
            result.status = "failed"
    if step.reads == "json":
        try:
            result.found = json.loads(out)
        except ValueError:
            result.status, result.note = "failed", "standard output is no JSON object"


def of_step(mark: str) -> list[Any]:
    """Living processes of a step."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_all(mark: str) -> int:
    """End every process of a step, by its id; returns how many there were."""
    import psutil

    left = of_step(mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in of_step(mark):
            try:
                process.send_signal(number)
            except psutil.Error:
                continue
        psutil.wait_procs(of_step(mark), timeout=ENDED_WITHIN_S)
    return len(left)


def run(step: Step, limit_s: float, folder: Path, rehearsal: bool) -> Result:
    """Run one step; whatever it left behind is ended."""
    folder.mkdir(parents=True)
    values = {
        "python": sys.executable,
        "out": str(folder),
        "device": "cpu" if rehearsal else "cuda",
    }
    command = words(step.rehearsal if rehearsal else step.command, **values)
    if step.reads == "tests":
        command.append(f"--junit-xml={folder / 'junit.xml'}")
    mark = f"{os.getpid()}-{folder.name}"
    settings = {**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1"}
    if rehearsal:
        settings |= {"MEGARL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    shown = " ".join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")
    result = Result(step.name, step.tells, shown, "ok")
    began = time.monotonic()
    with (folder / "output.txt").open("w") as said, (folder / "result.txt").open("w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdout=out, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            if code:
                result.status, result.note = "failed", f"exit code {code}"
        except subprocess.TimeoutExpired:
            result.status, result.note = "timed out", f"ended after {limit_s:.0f} s"
        result.seconds = round(time.monotonic() - began, 1)
        left = end_all(mark)
        process.wait()
        out.seek(0)
        if result.status != "timed out":
            if left:
                result.note += f" {left} processes left behind"
            judged(step, result, out.read(), folder)
            result.note = result.note.strip()
    return result


def go(steps: Sequence[Step], folder: Path, minutes: float, rehearsal: bool) -> Report:
    """Run what fits, in order, and say one line for each step."""
    report = Report(rehearsal, minutes, commit(), machine())
    ends_at, pending, number = time.monotonic() + 60 * minutes, list(steps), 0
    for step in list(pending):
        if missing := [name for name in step.needs if importlib.util.find_spec(name) is None]:
            pending.remove(step)
            result = Result(step.name, step.tells, "", "left out", note=f"no {', '.join(missing)}")
            report.results.append(result)
            say(result)
    if rehearsal:
        for step in [one for one in pending if not one.rehearsal]:
            pending.remove(step)
            result = Result(step.name, step.tells, "", "not rehearsed", note=step.no_rehearsal)
            report.results.append(result)
            say(result)
    while (step := fits(pending, ends_at - time.monotonic())) is not None:
        pending.remove(step)
        number += 1
        where = folder / f"{number:02d}-{re.sub('[^a-z0-9]+', '-', step.name.lower())}"
        limit_s = min(step.limit_s, ends_at - time.monotonic())
        result = run(step, limit_s, where, rehearsal)
        report.results.append(result)
        report.write(folder)
        say(result)
    for step in pending:
        note = f"needs about {step.expected_s:.0f} s"
        result = Result(step.name, step.tells, "", "no time", note=note)
        report.results.append(result)
        say(result)
    report.write(folder)
    return report


def say(result: Result) -> None:
    """One line of a step's result."""
    line = f"{result.status:14s} {result.seconds:6.0f} s  {result.step:34s} {result.note}"
    print(line.rstrip(), flush=True)


def chosen(text: str) -> list[Step]:
    """The steps whose names have one of the given words; all for none. Raises `ValueError`."""
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    found = [step for step in STEPS if not wanted or any(word in step.name for word in wanted)]
    if not found:
        raise ValueError(
            f"--only {text!r} names no step; the steps are: {', '.join(s.name for s in STEPS)}"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where a step can be")
    parser.add_argument("--only", default="", help="words of names of steps, with commas between")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--list", action="store_true", help="say which steps fit, and run none")
    args = parser.parse_args(argv)
    try:
        steps = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        fitting, rest = plan(steps, args.minutes)
        for step in [*fitting, *rest]:
            fit = "" if step in fitting else "  does not fit"
            print(f"{step.expected_s:5.0f} s  {step.name}: {step.tells}{fit}")
        return 0
    if not args.rehearse and "gpu" not in machine():
        print("run_gpu: torch sees no GPU here; --rehearse walks the steps on the CPU")
        return 2
    folder = args.out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = go(steps, folder, args.minutes, args.rehearse)
    archive = shutil.make_archive(str(folder), "gztar", folder)
    print(f"results: {folder}/results.json, {folder}/results.md; all of it: {archive}")
    bad = [one for one in report.results if one.status in ("failed", "timed out")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
