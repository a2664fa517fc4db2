"""Faults at random moments of a real run: does it go on, and is its ledger exact afterwards?

    python tools/chaos.py RECIPE.yaml [--faults 20] [--seed 1] [--kinds engine,core,...] [--ranks 1]
                                      [--pause 5] [--hang 240] [--reference]

Runs `megarl train RECIPE.yaml --resume auto` and, again and again, kills (SIGKILL) or stops
(SIGSTOP) one of its processes at a random moment. A run that ends is started again, as a scheduler
does. The recipe needs enough steps to last: a finished run gets no further faults. `--reference`
runs the recipe once more without faults and compares the weights, which are to be equal bit by bit
if the recipe is synchronous (`rollout.max_staleness: 0`).

Prints what became of the run after each fault: `goes on` (the same run, lost processes replaced),
`resumes` (the run ended with an error and was started again) or `HANGS` (no step for `--hang`
seconds). Then the verdict of `megarl ledger`, and the processes that were left behind. Exit code 1
if a run hangs, the ledger is not exact, weights differ, or a process is left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0
"""Seconds a run may take from its start to its first step."""


def titled(*starts: str) -> Callable[[psutil.Process], bool]:
    """Whether a process's command line begins with one of `starts`, or its program ends so."""

    def matches(process: psutil.Process) -> bool:
        first = (process.cmdline() or [""])[0]
        return any(first.startswith(start) or first.endswith(f"/{start}") for start in starts)

    return matches


def is_core(process: psutil.Process) -> bool:
    """Whether a process is the core of an engine: vLLM's largest process below the engine's actor.
    On the CPU the core has no title of its own.
    """
    above = [one for one in process.parents() if titled("ray::Engine")(one)]
    if not above:
        return False
    below = above[0].children(recursive=True)
    return process == max(below, key=lambda one: one.memory_info().rss)


def is_verifier(process: psutil.Process) -> bool:
    """Whether a process is a worker of the environment."""
    return any(titled("ray::Environment")(one) for one in process.parents()[:1])


VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "engine": titled("ray::Engine"),
    "core": is_core,
    "tensor worker": titled("VLLM::Worker"),
    "service": titled("ray::Service"),
    "environment": titled("ray::Environment"),
    "verifier": is_verifier,
    "raylet": titled("raylet"),
    "gcs": titled("gcs_server"),
    "rank": lambda process: "-m megarl" in " ".join(process.cmdline()),
}
"""{kind of process: whether a process below the run is one}."""


@dataclass
class Run:
    """A run under the command line's care, with everything it has said."""

    command: list[str]
    log: Path
    lines: list[str] = field(default_factory=list)
    steps: int = 0
    """Steps that the run has reported, over all its starts."""
    seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)
    """Every process that was ever seen below the run."""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the run, or start it again."""
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.log.open("a") as to:
            for line in process.stdout:
                to.write(line)
                to.flush()
                self.lines.append(line.rstrip())
                self.steps += line.startswith("step ")

    def below(self) -> list[psutil.Process]:
        """The living processes of the run, itself included."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for one in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self.seen[one.pid, one.create_time()] = one
        return [one for one in self.seen.values() if is_running(one)]

    def is_over(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def wait_for_step(self, count: int, timeout_s: float) -> bool:
        """Wait until the run has reported `count` steps or ends; False after `timeout_s` seconds
        without a further step.
        """
        deadline = time.monotonic() + timeout_s
        while self.steps < count and not self.is_over():
            if time.monotonic() > deadline:
                return False
            self.below()
            time.sleep(0.3)
        return True

    def end(self) -> list[str]:
        """Kill what is left, by process id; returns the command lines that were left although the
        run had ended.
        """
        is_over = self.is_over()
        if is_over:
            psutil.wait_procs(self.below(), timeout=20)
        time.sleep(1.0)  # some are just ending
        left = self.below()
        titles = [title(one) for one in left if is_running(one)]
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=10)
        assert self.process is not None
        self.process.wait(10)
        return titles if is_over else []


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def title(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:60]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def faults(draw: random.Random, kinds: list[str]) -> Iterator[tuple[str, int]]:
    """(kind of process, signal), each combination once in random order, and again."""
    every = [(kind, number) for kind in kinds for number in (signal.SIGKILL, signal.SIGSTOP)]
    while True:
        draw.shuffle(every)
        yield from every


def hit(run: Run, kind: str, number: int, draw: random.Random) -> bool:
    """Send the signal to one process of the kind; False if there is none."""
    found = []
    for one in run.below():
        with contextlib.suppress(psutil.Error):
            if VICTIMS[kind](one):
                found.append(one)
    if not found:
        return False
    with contextlib.suppress(psutil.Error):
        draw.choice(sorted(found, key=lambda one: one.pid)).send_signal(number)
        return True
    return False


def torment(run: Run, args: argparse.Namespace) -> tuple[dict[tuple[str, str], list[str]], bool]:
    """Let the run suffer `args.faults` faults and finish: {(kind, signal): outcomes}, and whether
    it has finished.
    """
    draw = random.Random(args.seed)
    plan = faults(draw, args.kinds.split(","))
    outcomes: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    run.start()
    count, misses = 0, 0
    while count < args.faults and misses < 50:
        if not run.wait_for_step(run.steps + 1, START_S):
            print("no step within", START_S, "s of a start; see", run.log)
            return outcomes, False
        time.sleep(draw.uniform(0.0, args.pause))
        if run.is_over():
            if run.process is not None and run.process.returncode == 0:
                break
            run.end()
            run.start()
            continue
        kind, number = next(plan)
        before = run.steps
        if not hit(run, kind, number, draw):
            misses += 1
            continue
        count += 1
        began = time.monotonic()
        outcome = "goes on" if run.wait_for_step(before + 2, args.hang) else "HANGS"
        if run.is_over() and run.process is not None and run.process.returncode != 0:
            outcome = "resumes"
        seconds = time.monotonic() - began
        said = next((line for line in reversed(run.lines) if "error" in line), "")
        outcomes[kind, signal.Signals(number).name].append(outcome)
        print(
            f"{count:3} {signal.Signals(number).name} {kind}: {outcome} after {seconds:.0f} s",
            end="",
        )
        print(f"  ({said[:160]})" if outcome == "resumes" else "", flush=True)
        if outcome != "goes on":
            for left in run.end():
                outcomes["left behind", kind].append(left)
                print(f"    left behind: {left}")
            run.start()
    for _ in range(5):
        while not run.is_over():
            if not run.wait_for_step(run.steps + 1, START_S):
                return outcomes, False
        if run.process is not None and run.process.returncode == 0:
            return outcomes, True
        run.end()
        run.start()
    return outcomes, False


def weights(folder: Path) -> str:
    """Digest of the weights of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step_*/model"))
    found = hashlib.blake2b()
    for file in sorted(newest.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(VICTIMS), help=f"of {', '.join(VICTIMS)}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pause", type=float, default=5.0, help="longest pause after a step [s]")
    parser.add_argument("--hang", type=float, default=240.0, help="a run without a step hangs [s]")
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    unknown = set(args.kinds.split(",")) - set(VICTIMS)
    if unknown:
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; choose of {', '.join(VICTIMS)}")
    folder = Path(yaml.safe_load(args.recipe.read_text())["folder"])
    launcher = [sys.executable, "-m", "megarl"]
    if args.ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = [sys.executable, *torchrun, str(args.ranks), "-m", "megarl"]
    command = [*launcher, "train", str(args.recipe), "--resume", "auto"]
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(command, folder / "chaos.log")
    began = time.monotonic()
    try:
        outcomes, finished = torment(run, args)
    finally:
        left = run.end()
    audit = subprocess.run(
        [sys.executable, "-m", "megarl", "ledger", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for (kind, what), found in sorted(outcomes.items()):
        print(f"{what:8} {kind:14} {dict(collections.Counter(found))}")
    hangs = sum(found.count("HANGS") for found in outcomes.values())
    behind = [
        one for (kind, _), found in outcomes.items() if kind == "left behind" for one in found
    ]
    print(audit.stdout.strip() or audit.stderr.strip())
    is_same = True
    if args.reference and finished:
        reference = [*launcher, "train", str(args.recipe), "--folder", f"{folder}_reference"]
        subprocess.run(reference, cwd=ROOT, check=True, capture_output=True)
        pair = weights(folder), weights(Path(f"{folder}_reference"))
        is_same = pair[0] == pair[1]
        print(
            "weights equal to those of a run without faults"
            if is_same
            else f"weights differ {pair}"
        )
    result = {
        "faults": sum(len(found) for (kind, _), found in outcomes.items() if kind != "left behind"),
        "hangs": hangs,
        "finished": finished,
        "ledger is exact": audit.returncode == 0,
        "left behind": behind + left,
        "weights equal": is_same if args.reference else None,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return int(
        not finished or hangs > 0 or audit.returncode != 0 or not is_same or bool(behind + left)
    )


if __name__ == "__main__":
    sys.exit(main())
