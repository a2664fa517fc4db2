"""Runs the steps of tools/gpu_steps.toml on GPUs; `bash tests/run_gpu.sh` starts it.

    python tools/run_gpu.py [--minutes 40] [--only kernels,zero] [--out runs/gpu/DATE]
    python tools/run_gpu.py --rehearse            the same on the CPU, where a step can be
    python tools/run_gpu.py --list                the plan: which steps fit, in their order
    python tools/run_gpu.py --cluster             commands for eight GPUs and two nodes; runs none

First the plan, then one line for each step, whatever became of those before. A step is skipped
where it needs a package or file that is not there, or more GPUs than there are. OUT/results.json,
OUT/results.md and OUT/results.tar.gz are written after every step, OUT/NUMBER-NAME/output.txt has
what a step printed.
Steps that have run in the same OUT before are passed over, unless --only names them, and their
results stay: several short runs add up. The exit status is 0 if every step that was begun ended
well, 1 if one did not, 2 without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gpu_results import BEGUN, Report, Result, earlier
from gpu_steps import CLUSTER, EVERY, STEPS, Step, fits, lacking, listed, planned, words

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

OPTIONS = {
    "--minutes": (40.0, "what is not expected to end in them does not begin"),
    "--rehearse": (False, "on the CPU, where a step can be"),
    "--only": ("", "words of names of steps, with commas between"),
    "--out": (Path, "folder of the results; default runs/gpu/DATE"),
    "--list": (False, "say which steps fit, and run none"),
    "--cluster": (False, "list commands for several GPUs"),
}
ROOT = Path(__file__).resolve().parents[1]


@cache
def machine() -> dict[str, Any]:
    """What runs the steps; asked in a process of its own, since CUDA holds memory where it is
    initialised.
    """
    code = (
        "import json, sys; sys.path.insert(0, 'tools/bench'); import common, torch;"
        "more = {'cuda': torch.version.cuda or 'none', 'gpus': torch.cuda.device_count()};"
        "print(json.dumps(common.machine() | more))"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return json.loads(told.stdout) if told.returncode == 0 else {"problem": told.stderr[-300:]}


def commit() -> str:
    """Short hash of the checkout, with + where files differ from it; ? without git."""
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    told = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "?"


def counts(path: Path) -> Counter[str]:
    """How many tests passed, failed and skipped, of a junit file of pytest."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():  # noqa: S314 - our own pytest wrote it
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        found["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
    return found


def numbers(path: Path) -> dict[str, Any]:
    """{test: the JSON value that it recorded as its property "numbers"}, of a junit file."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():  # noqa: S314 - our own pytest wrote it
        for one in case.iter("property"):
            if one.get("name") == "numbers":
                found[case.get("name", "")] = json.loads(one.get("value", "null"))
    return found


def json_of(out: str) -> Any:
    """The JSON value in `out`, the standard output of a step: the whole output, or, where libraries
    printed lines before it, the last line. Raises `ValueError` if neither is JSON.
    """
    try:
        return json.loads(out)
    except ValueError:
        return json.loads(out.rstrip().rpartition("\n")[2])


def judged(step: Step, result: Result, out: str, folder: Path) -> None:
    """Fill status, note and found of a step that ended by itself."""
    if step.reads == "tests":
        found = counts(folder / "junit.xml")
        names = ("passed", "failed", "skipped")
        told = ", ".join(f"{found[name]} {name}" for name in names if found[name])
        result.found = numbers(folder / "junit.xml") or None
        result.note = (told or "no test was run") + result.note.replace("exit code 1", "")
        # A run in which every test skips itself ends with 0 and has shown nothing.
        if found["failed"] or not found["passed"]:
            result.status = "failed"
    if step.reads == "json":
        try:
            result.found = json_of(out)
        except ValueError:
            result.status, result.note = "failed", "standard output is no JSON object"


def run(step: Step, limit_s: float, folder: Path, rehearsal: bool) -> Result:
    """Run one step; whatever it left behind is ended."""
    from processes import MARK, end_all

    folder.mkdir(parents=True)
    chosen = step.rehearsal if rehearsal else step.command
    command = words(chosen, python=sys.executable, out=str(folder))
    if step.reads == "tests":
        # The one family in which tests may record properties.
        command += ["-o", "junit_family=xunit1", f"--junit-xml={folder / 'junit.xml'}"]
    mark = uuid.uuid4().hex
    settings = {**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1", "MEGARL_PYTHON": sys.executable}
    # A Python without megarl finds it here, also from tools/bench.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings["PYTHONPATH"] = os.pathsep.join(paths)
    if rehearsal:
        settings |= {"MEGARL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    shown = " ".join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")
    result = Result(step.name, step.tells, shown, "ok")
    began = time.monotonic()
    with (folder / "output.txt").open("w") as said, (folder / "result.txt").open("w+") as out:
        streams: Any = {"stdout": out, "stderr": said, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=settings, **streams)
        try:
            code = process.wait(limit_s)
            if code:
                result.status, result.note = "failed", f"exit code {code}"
        except subprocess.TimeoutExpired:
            result.status, result.note = "timed out", f"ended after {limit_s:.0f} s"
        finally:  # also after Ctrl-C and SIGTERM, which do not reach the step's session
            result.seconds = round(time.monotonic() - began, 1)
            left = end_all(mark, process.pid)
            process.wait()
        out.seek(0)
        if result.status != "timed out":
            if left:
                result.note += f" {left} processes left behind"
            judged(step, result, out.read(), folder)
            result.note = result.note.strip()
    return result


def go(
    steps: Sequence[Step], folder: Path, minutes: float, rehearsal: bool, results: Any = ()
) -> Report:
    """Run what fits, in order, and say one line for each step; `results` are earlier ones."""
    report = Report(rehearsal, minutes, commit(), machine(), list(results))
    ends_at, pending = time.monotonic() + 60 * minutes, []
    number = max([int(path.name[:2]) for path in folder.glob("[0-9][0-9]-*")], default=0)

    def told(step: Step, status: str, note: str) -> None:
        report.add(result := Result(step.name, step.tells, "", status, note=note))
        say(result)

    for step in steps:
        if rehearsal and not step.rehearsal:
            told(step, "not rehearsed", step.no_rehearsal)
        elif absent := lacking(step, step.gpus if rehearsal else report.machine.get("gpus", 1)):
            told(step, "skipped", absent)
        else:
            pending.append(step)
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder)
    while (step := fits(pending, ends_at - time.monotonic())) is not None:
        pending.remove(step)
        number += 1
        where = folder / f"{number:02d}-{re.sub('[^a-z0-9]+', '-', step.name.lower())}"
        limit_s = min(step.limit_s, ends_at - time.monotonic())
        result = run(step, limit_s, where, rehearsal)
        result.made_with = report.made_with()
        report.add(result)
        report.write(folder)
        say(result)
    for step in pending:
        told(step, "no time", f"needs about {step.expected_s:.0f} s")
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
        names = ", ".join(step.name for step in STEPS)
        raise ValueError(f"--only {text!r} names no step; the steps are: {names}")
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from common import command_line

    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    if args.cluster:
        print("\n".join(listed(CLUSTER)))
        return 0
    folder = args.out or ROOT / "runs" / "gpu" / time.strftime("%Y%m%d-%H%M%S")
    try:
        steps, results = chosen(args.only), []
        if not args.list:
            results = earlier(folder, args.rehearse, [step.name for step in STEPS])
    except ValueError as error:
        parser.error(str(error))
    num_gpus = 8 if args.rehearse else max(1, machine().get("gpus", 1))
    ran = {one.step for one in results if one.status in BEGUN and not args.only}
    left = [step for step in steps if step.name not in ran]
    print("\n".join(planned(left, args.minutes, num_gpus)), flush=True)
    if args.list:
        return 0
    if absent := [name for name in EVERY if importlib.util.find_spec(name) is None]:
        print(f"run_gpu: {sys.executable} has no {', '.join(absent)}, which every step needs")
        return 2
    if not args.rehearse and "gpu" not in machine():
        print("run_gpu: torch sees no GPU here; --rehearse walks the steps on the CPU")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = go(left, folder.resolve(), args.minutes, args.rehearse, results)
    print(f"results: {folder}/results.json, results.md and results.tar.gz")
    return int(any(one.status in ("failed", "timed out") for one in report.results))


if __name__ == "__main__":
    sys.exit(main())
