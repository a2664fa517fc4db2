"""Runs the steps of tools/gpu_steps.py on one GPU; `bash tests/run_gpu.sh` starts it.

    python tools/run_gpu.py [--minutes 30] [--only kernels,zero] [--out runs/gpu/DATE]
    python tools/run_gpu.py --rehearse            the same on the CPU, where a step can be
    python tools/run_gpu.py --list                which steps fit, in their order
    python tools/run_gpu.py --cluster             commands for eight GPUs and two nodes; runs none

One line for each step, whatever became of those before. A step is skipped where a package that the
step needs is not installed. OUT/results.json, OUT/results.md and OUT/results.tar.gz are written
after every step, OUT/NUMBER-NAME/output.txt has what a step printed. Steps that have run in the
same OUT before are passed over, unless --only names them, and their results stay: several short
runs add up. The exit status is 0 if every step that was begun ended well, 1 if one did not, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cluster_steps
from gpu_results import BEGUN, Report, Result, earlier
from gpu_steps import EVERY, STEPS, Step, fits, missing, plan, words

ROOT = Path(__file__).resolve().parents[1]
ENDED_WITHIN_S = 10.0
"""Seconds that a step's processes have between SIGTERM and SIGKILL."""
MARK = "MEGARL_GPU_STEP"
"""Environment variable by which all processes of a step are found, also those of other sessions."""


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


def json_of(out: str) -> Any:
    """The JSON object that a step printed; libraries may have printed lines before it, and then it
    is the last line. Raises `ValueError` where there is none."""
    try:
        return json.loads(out)
    except ValueError:
        return json.loads(out.rstrip().rpartition("\n")[2])


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
            result.found = json_of(out)
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
        process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdout=out, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            if code:
                result.status, result.note = "failed", f"exit code {code}"
        except subprocess.TimeoutExpired:
            result.status, result.note = "timed out", f"ended after {limit_s:.0f} s"
        finally:  # also after Ctrl-C and SIGTERM, which do not reach the step's session
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


def go(
    steps: Sequence[Step],
    folder: Path,
    minutes: float,
    rehearsal: bool,
    results: Sequence[Result] = (),
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
        elif absent := missing(step):
            told(step, "skipped", f"not installed here: {', '.join(absent)}")
        else:
            pending.append(step)
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
        raise ValueError(
            f"--only {text!r} names no step; the steps are: {', '.join(s.name for s in STEPS)}"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where a step can be")
    parser.add_argument("--only", default="", help="words of names of steps, with commas between")
    parser.add_argument("--out", type=Path, help="folder of the results; default runs/gpu/DATE")
    parser.add_argument("--list", action="store_true", help="say which steps fit, and run none")
    parser.add_argument("--cluster", action="store_true", help="list commands for several GPUs")
    args = parser.parse_args(argv)
    if args.cluster:
        print("\n".join(cluster_steps.listed(cluster_steps.STEPS)))
        return 0
    folder = args.out or ROOT / "runs" / "gpu" / time.strftime("%Y%m%d-%H%M%S")
    try:
        steps, results = chosen(args.only), []
        if not args.list:
            results = earlier(folder, args.rehearse, [step.name for step in STEPS])
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        listed(steps, args.minutes)
        return 0
    if absent := [name for name in EVERY if importlib.util.find_spec(name) is None]:
        print(f"run_gpu: {sys.executable} has no {', '.join(absent)}, which every step needs")
        return 2
    if not args.rehearse and "gpu" not in machine():
        print("run_gpu: torch sees no GPU here; --rehearse walks the steps on the CPU")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ran = {one.step for one in results if one.status in BEGUN and not args.only}
    left = [step for step in steps if step.name not in ran]
    report = go(left, folder.resolve(), args.minutes, args.rehearse, results)
    print(f"results: {folder}/results.json, results.md and results.tar.gz")
    bad = [one for one in report.results if one.status in ("failed", "timed out")]
    return 1 if bad else 0


def listed(steps: Sequence[Step], minutes: float) -> None:
    """Print the steps in their order: seconds, what each tells, and why one will not run."""
    fitting, _ = plan([step for step in steps if not missing(step)], minutes)
    for step in steps:
        absent = missing(step)
        note = "" if step in fitting else "  does not fit"
        note = f"  not installed here: {', '.join(absent)}" if absent else note
        print(f"{step.expected_s:5.0f} s  {step.name}: {step.tells}{note}")


if __name__ == "__main__":
    sys.exit(main())
