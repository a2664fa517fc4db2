"""What runs leave behind, whatever ends them: processes, and files outside of the run folder.

    python tools/leftovers.py RECIPE.yaml [--runs 30] [--seed 1] [--kinds core,rank,...]

Starts `megarl run RECIPE.yaml` again and again, each time in a new run folder, and ends each run
in another way: it finishes, fails, gets SIGTERM or SIGHUP, or one of its processes gets SIGKILL, a
process of each kind in turn. All runs but those that finish or fail are ended at a random moment,
some while they start. The recipe's verifier is replaced by one that also starts processes in
sessions of their own and makes temporary files. Then `megarl run RECIPE.yaml --check` is the next
start, and nothing may be left: no process that the runs have started, and no new file in /tmp,
TMPDIR or /dev/shm. Where other programs work there too, give the tool folders of its own:

    unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && python ...'

Prints how each run ended and what it left until the next start, and in the end what is left then.
Exit code 1 if something is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import yaml
from chaos_faults import PROCESSES
from chaos_run import Run, megarl, outside, title
from common import command_line
from processes import marked

KILLED = ("engine", "core", "service", "environment", "verifier", "raylet", "gcs", "rank")
"""Kinds of processes, as tools/chaos.py names them, that a run with one engine has."""
ENDINGS = ("finishes", "fails", "SIGTERM", "SIGHUP", *KILLED)
OPTIONS = {
    "recipe": (Path, "of a short run with one engine"),
    "--runs": (30, "runs in all"),
    "--seed": (1, "of the moments"),
    "--kinds": (list(ENDINGS), "of endings, in turn", ENDINGS),
}
LONGEST_S, ENDS_WITHIN_S = 300.0, 120.0
"""Seconds until a run makes steps or is over, and until it is over once it is struck. A run that
goes on without the killed process gets SIGTERM then."""
VERIFIER = """
import subprocess, tempfile

def score(prompt, response, started=[]):
    if not started:
        started += [
            tempfile.mkdtemp(),
            subprocess.Popen(["sleep", "10000"], start_new_session=True),
            subprocess.Popen(["sh", "-c", "setsid sleep 10000 &"]),
        ]
    {fails}
    return (len(response) % 3) / 2
"""


def command(recipe: dict[str, object], place: Path, number: int, ending: str) -> list[str]:
    """The command of a run that is to end so; writes its recipe and its verifier to `place`."""
    verifier, path = place / f"verifier{number}.py", place / f"recipe{number}.yaml"
    fails = 'raise RuntimeError("fails")' if ending == "fails" else ""
    verifier.write_text(VERIFIER.format(fails=fails))
    own = recipe | {
        "folder": str(place / f"run{number}"),
        "steps": 2 if ending in ("finishes", "fails") else 100_000,
        "environment": {"verifier": f"{verifier}:score", "require_stop": False},
    }
    path.write_text(yaml.safe_dump(own))
    return megarl("run", path)


def strike(run: Run, ending: str, draw: random.Random) -> str:
    """End a run so, at a random moment; returns what was struck."""
    late = draw.random() < 0.7
    if late:
        run.wait_for_steps(draw.randrange(1, 4), LONGEST_S)
    deadline, moment = time.monotonic() + LONGEST_S, "after a step" if late else "while it starts"
    while run.code is None and time.monotonic() < deadline:
        time.sleep(draw.uniform(0.0, 5.0))
        if ending.startswith("SIG"):
            os.kill(run.pid, signal.Signals[ending])
            return f"{ending} {moment}"
        for one in run.below():
            with contextlib.suppress(psutil.Error):
                if PROCESSES[ending][0](one):
                    one.kill()
                    return f"SIGKILL {ending} {moment}"
    return "nothing to strike"


def one(run: Run, ending: str, draw: random.Random) -> str:
    """Start a run and end it; returns what happened."""
    run.start()
    said = "" if ending in ("finishes", "fails") else strike(run, ending, draw)
    patience_s = LONGEST_S if not said else 10.0 if ending in KILLED else ENDS_WITHIN_S
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None and run.code is None:
            said += f", then {number.name}"
            os.kill(run.pid, number)
        try:
            assert run.process is not None
            run.process.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            patience_s = ENDS_WITHIN_S
    return f"{said or ending}: exit code {run.code}"


def left(run: Run) -> list[str]:
    """The command lines of a run's processes, whoever is above them."""
    return sorted(map(title, marked(run.mark)))


def main() -> int:
    args = command_line(__doc__, OPTIONS).parse_args()
    draw = random.Random(args.seed)
    recipe = yaml.safe_load(args.recipe.read_text())
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="leftovers-") as name:
        place, before = Path(name), outside()
        run = Run([], place, place / "log")
        for number in range(args.runs):
            ending = args.kinds[number % len(args.kinds)]
            run.command = command(recipe, place, number, ending)
            run.folder = place / f"run{number}"
            said = one(run, ending, draw)
            files, processes = sorted(outside() - before), left(run)
            ended[ending] += 1
            print(f"{number + 1:3} {said}; until the next start: {processes} {files}", flush=True)
        check = command(recipe, place, args.runs, "finishes")
        subprocess.run([*check, "--check"], check=True, capture_output=True, env=run.environment)
        processes, files = left(run), sorted(outside() - before)
    print(*processes, *files, sep="\n")
    result = {"runs": args.runs, "processes": len(processes), "files": len(files), **ended}
    print(json.dumps(result))
    return 1 if processes or files else 0


if __name__ == "__main__":
    sys.exit(main())
