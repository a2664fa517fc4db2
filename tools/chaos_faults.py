"""The faults of tools/chaos.py: signals, damaged files, a full disk, a bad verifier."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_run import Run

from megarl.ledger.journal import FILE as LEDGER

SUSPENDED_S = 12.0
"""Seconds for which a rank or its launcher is stopped; nobody can know that it is not to go on."""
FULL_S = 15.0
"""Seconds for which the disk is full, if the run does not end before."""
BAD_VERIFIER_S = 4.0
"""Seconds for which the verifier is bad."""
BAD_SHARE = 0.15
"""Share of the calls that go wrong meanwhile."""
LARGE_BYTES = 100 * 2**20
"""Every process of vLLM holds more, and no helper process of multiprocessing does."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    `strike(run, draw)` does it and returns what it did, such as "pid 17 (engine 0)"; "" if it
    cannot be done now. `is_offline`: the run is killed first, and started again afterwards.
    """

    kind: str
    how: str
    strike: Callable[[Run, random.Random], str]
    says: str
    """Regular expression of a line by which the run tells of the fault; `{name}` is the process."""
    relieve: Callable[[Run], None] | None = None
    """Ends a fault that would last, after `lasts_s` seconds or the end of the run."""
    lasts_s: float = 0.0
    is_offline: bool = False

    @property
    def name(self) -> str:
        return f"{self.how} {self.kind}"


# --------------------------------------------------------------------------------------- processes


def titled(*starts: str) -> Callable[[psutil.Process], bool]:
    """Whether a process's command line begins with one of `starts`, or its program ends so."""

    def matches(process: psutil.Process) -> bool:
        first = (process.cmdline() or [""])[0]
        return any(first.startswith(start) or first.endswith(f"/{start}") for start in starts)

    return matches


def below_engine(generations: int) -> Callable[[psutil.Process], bool]:
    """Whether a process is one of vLLM's, so many generations below an engine's actor: the core is
    a child of the actor, and the ranks of a tensor-parallel engine are children of the core. Not
    by title: setproctitle cannot write one where the first variable of the environment was set
    anew. The helper processes of Python's multiprocessing are small.
    """

    def matches(process: psutil.Process) -> bool:
        above = process.parents()[:generations]
        is_below = len(above) == generations and titled("ray::Engine")(above[-1])
        return is_below and process.memory_info().rss > LARGE_BYTES

    return matches


def is_verifier(process: psutil.Process) -> bool:
    """Whether a process is a worker of the environment."""
    return any(titled("ray::Service")(one) for one in process.parents()[:1])


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a training rank."""
    line = " ".join(process.cmdline())
    return "-m megarl" in line and "torchrun" not in line


ENGINE_SAYS = r"{name}\b.*(dead|lost|no step|not said|failed|not ready)"
PROCESSES: dict[str, tuple[Callable[[psutil.Process], bool], str]] = {
    "engine": (titled("ray::Engine"), ENGINE_SAYS),
    "core": (below_engine(1), ENGINE_SAYS),
    "tensor worker": (below_engine(2), ENGINE_SAYS),
    "service": (titled("ray::Service"), r"rollout service"),
    "verifier": (is_verifier, r"verifier|worker of the environment"),
    "raylet": (titled("raylet"), r"raylet|Ray"),
    "gcs": (titled("gcs_server"), r"GCS|Ray"),
    "rank": (is_rank, r"taken over|rank|collective"),
    "torchrun": (lambda process: "torchrun" in " ".join(process.cmdline()), r"taken over"),
}
"""{kind of process: (whether a process below the run is one, how the run tells of its loss)}."""
SUSPENDED = ("rank", "torchrun", "raylet", "gcs")
"""Processes that nobody replaces, so that stopping them means that the run is suspended."""


def on_process(kind: str, number: signal.Signals) -> Fault:
    """A signal to one process of a kind that is not stopped already."""
    matches, says = PROCESSES[kind]
    stopped: list[psutil.Process] = []

    def strike(run: Run, draw: random.Random) -> str:
        found = []
        for one in run.below():
            with contextlib.suppress(psutil.Error):
                if matches(one) and one.status() != psutil.STATUS_STOPPED:
                    found.append(one)
        if not found:
            return ""
        victim = draw.choice(sorted(found, key=lambda one: one.pid))
        with contextlib.suppress(psutil.Error):
            names = (run.name_of(one.pid) for one in (victim, *victim.parents()[:2]))
            name = next(filter(None, names), "")
            victim.send_signal(number)
            stopped.append(victim)
            return f"pid {victim.pid} ({name})" if name else f"pid {victim.pid}"
        return ""

    def proceed(run: Run) -> None:
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.resume()
        stopped.clear()

    if number == signal.SIGSTOP and kind in SUSPENDED:
        return Fault(kind, "SIGSTOP", strike, "", proceed, SUSPENDED_S)
    return Fault(kind, number.name, strike, says)


# ------------------------------------------------------------------------------------------- files


def newest(run: Run) -> Path | None:
    """The newest checkpoint, if there is an older one too."""
    found = sorted((run.folder / "checkpoints").glob("step_*"))
    return found[-1] if len(found) > 1 else None


def damage(how: Callable[[Path, random.Random], None]) -> Callable[[Run, random.Random], str]:
    """Damage a file of the newest checkpoint."""

    def strike(run: Run, draw: random.Random) -> str:
        folder = newest(run)
        if folder is None:
            return ""
        files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        path = draw.choice(sorted(files))
        how(path, draw)
        return str(path.relative_to(run.folder))

    return strike


def cut_off(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flip(path: Path, draw: random.Random) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


tear_checkpoint, flip_bit = damage(cut_off), damage(flip)


def tear(name: str) -> Callable[[Run, random.Random], str]:
    """Append the first half of the file's last line, or zeros, as a write that was cut short."""

    def strike(run: Run, draw: random.Random) -> str:
        path = run.folder / name
        if not path.exists():
            return ""
        last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        torn = draw.choice([last[: 1 + len(last) // 2], bytes(64)])
        with path.open("ab") as file:
            file.write(torn)
        return f"{len(torn)} {'zero bytes' if not torn[0] else 'bytes'}"

    return strike


# -------------------------------------------------------------------------------------------- disk


def fill(run: Run, draw: random.Random) -> str:
    """Fill the file system of the run folder, which must be one of its own."""
    if not os.path.ismount(run.folder):
        return ""
    filled = 0
    for size in (2**18, 2**9):
        with contextlib.suppress(OSError), (run.folder / ".filler").open("ab", buffering=0) as file:
            while True:
                filled += file.write(bytes(size))
    return f"{filled} bytes"


def empty(run: Run) -> None:
    (run.folder / ".filler").unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- verifier

VERIFIER = """
import functools, importlib.util, random, time
from pathlib import Path

spec = importlib.util.spec_from_file_location("verifier_itself", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
plain = getattr(module, {function!r})
CONTROL = Path({control!r})

@functools.wraps(plain)
def score(*arguments, **named):
    found = CONTROL.read_text() if CONTROL.exists() else ""
    if found and random.random() < {share}:
        if found == "raises":
            raise ValueError("the verifier of the user has failed")
        if found == "hangs":
            time.sleep(3600)
        return float("nan")
    return plain(*arguments, **named)
"""
"""A verifier that calls the recipe's own, and goes wrong where the file `CONTROL` says how."""


def control(run: Run) -> Path:
    """The file that says how the verifier goes wrong."""
    return run.log.with_name("chaos_verifier_says")


def write_verifier(run: Run, reference: str) -> str:
    """Write the verifier that stands for that of the recipe, `path.py:function`; returns its own
    reference.
    """
    path, _, function = reference.rpartition(":")
    own, says = run.log.with_name("chaos_verifier.py"), str(control(run))
    names = {"path": str(Path(path).resolve()), "function": function, "control": says}
    own.write_text(VERIFIER.format(share=BAD_SHARE, **names))
    control(run).unlink(missing_ok=True)
    return f"{own}:score"


def spoil(how: str) -> Callable[[Run, random.Random], str]:
    def strike(run: Run, draw: random.Random) -> str:
        if not run.log.with_name("chaos_verifier.py").exists():
            return ""
        aside = control(run).with_suffix(".aside")
        aside.write_text(how)
        aside.replace(control(run))
        return f"{BAD_SHARE:.0%} of the calls for {BAD_VERIFIER_S:g} s"

    return strike


def mend(run: Run) -> None:
    control(run).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------- all

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FILES = {
    "checkpoint": [
        Fault("checkpoint", "torn", tear_checkpoint, r"passing over checkpoint", is_offline=True),
        Fault("checkpoint", "flipped bit", flip_bit, r"passing over checkpoint", is_offline=True),
    ],
    "ledger": [Fault("ledger", "torn", tear(LEDGER), r"ledger.*(torn|cut)", is_offline=True)],
    "metrics": [Fault("metrics", "torn", tear("metrics.jsonl"), r"metrics.jsonl", is_offline=True)],
    "disk": [Fault("disk", "full", fill, r"No space left|full", empty, FULL_S)],
    "judgement": [
        Fault("judgement", how, spoil(how), r"verifier", mend, BAD_VERIFIER_S)
        for how in ("raises", "hangs", "nan")
    ],
}
KINDS = (*PROCESSES, *FILES)


def every(kinds: list[str]) -> list[Fault]:
    """The faults of these `KINDS`: for a process, SIGKILL and SIGSTOP; for others, those in
    `FILES`."""
    signals = {kind: [on_process(kind, number) for number in SIGNALS] for kind in PROCESSES}
    return [fault for kind in kinds for fault in (signals | FILES)[kind]]


def wait(fault: Fault, run: Run) -> None:
    """Wait `fault.lasts_s` seconds, or until the run has ended, and undo the fault, as by freeing
    the disk that it had filled. A fault that cannot be undone, such as a killed process, returns at
    once.
    """
    if fault.relieve is None:
        return
    deadline = time.monotonic() + fault.lasts_s
    while time.monotonic() < deadline and run.code is None:
        time.sleep(0.2)
    fault.relieve(run)
