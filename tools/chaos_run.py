"""A run under the care of tools/chaos.py: its command, its processes, where it is, what it says."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megarl.activity.files import FOLDER, content_of, events, read
from megarl.activity.spans import Event

ROOT = Path(__file__).resolve().parents[1]
MARK = "MEGARL_CHAOS"
"""Name of an environment variable of every process of the run, by which it is found again."""
PHASES = (
    "start",
    "generate",
    "score",
    "take",
    "train",
    "publish",
    "probe",
    "checkpoint",
    "evaluate",
)
"""What a run can be doing. `take`: rank 0 asks for a batch, and nothing is generated or scored."""
TAIL_BYTES = 4096
SLOW = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
SLOW_S = 100.0
"""Ray's processes that try for a minute to tell Ray's head, which is gone too, that their raylet
was killed; seconds given to them to end."""


@dataclass
class Run:
    """A run of `command`, which writes to `folder`, over all its starts."""

    command: list[str]
    folder: Path
    log: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(seconds since the epoch, what the run said then on standard output or error)."""
    seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)
    """Every process that was ever seen below the run."""
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> None:
        """Start the run, or start it again."""
        self.starts += 1
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def environment(self) -> dict[str, str]:
        """The environment variables of the run's processes."""
        return {**os.environ, MARK: self.mark}

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.log.open("a") as to:
            for line in process.stdout:
                to.write(f"{time.time():.2f} {line}")
                to.flush()
                self.lines.append((time.time(), line.rstrip()))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while the run goes on."""
        assert self.process is not None
        return self.process.poll()

    @property
    def place(self) -> tuple[int, int]:
        """(process id of rank 0, step that it is in, from 1); zeros before the first step of this
        start.
        """
        for event in reversed(tail(self.folder / FOLDER / "rank0.json")):
            if event["ph"] == "M":
                break
            if "step" in event["args"]:
                pid = int(event["pid"])
                here = any(one.pid == pid for one in self.below())
                return (pid, int(event["args"]["step"])) if here else (0, 0)
        return 0, 0

    def below(self) -> list[psutil.Process]:
        """The living processes of the run, itself included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            for one in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self.seen[one.pid, one.create_time()] = one
        return [one for one in self.seen.values() if is_running(one)]

    def wait_for_steps(self, count: int, timeout_s: float) -> bool:
        """Wait until rank 0 has begun `count` further steps, or the run has ended. False if a step
        takes `timeout_s` seconds.
        """
        at, deadline = self.place, time.monotonic() + timeout_s
        while count > 0 and self.code is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
            if (now := self.place) != at and now[0]:
                # A step before the last one is of a run that was started again.
                count -= max(1, now[1] - at[1]) if now[0] == at[0] else 1
                at, deadline = now, time.monotonic() + timeout_s
        return True

    def end(self) -> list[str]:
        """Kill what is left, by process id; returns the command lines that were left although the
        run had ended. Ray's agents are left for `lingered` to look at.
        """
        is_over = self.code is not None
        if is_over:
            own = [one for one in self.below() if not title(one).partition(" ")[2].startswith(SLOW)]
            psutil.wait_procs(own, timeout=20)
        time.sleep(1.0)  # some are just ending
        left = [*self.below(), *self._marked()]
        if is_over:
            left = [one for one in left if not title(one).partition(" ")[2].startswith(SLOW)]
        titles = sorted({title(one) for one in left if is_running(one)})
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=10)
        assert self.process is not None
        self.process.wait(10)
        return titles if is_over else []

    def lingered(self) -> list[str]:
        """The command lines of Ray's agents that are still there `SLOW_S` seconds after the run."""
        _, left = psutil.wait_procs(self.below(), timeout=SLOW_S)
        titles = [title(one) for one in left if is_running(one)]
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        return titles

    def marked(self) -> list[str]:
        """The command lines of the run's processes, whoever is above them."""
        return sorted(map(title, self._marked()))

    def _marked(self) -> Iterator[psutil.Process]:
        """Processes that have the run's mark, though nobody of the run is above them any more."""
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get(MARK) == self.mark and is_running(one):
                    yield one

    # --------------------------------------------------------------------------------------- phases

    def wait_for_phase(self, phase: str, timeout_s: float) -> bool:
        """Wait until the run is in `phase`; False if it is not within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.code is None:
            if self._is_in(phase):
                return True
            time.sleep(0.002)
        return False

    def _is_in(self, phase: str) -> bool:
        """Whether the newest lines of the files say so: quick, and right almost always."""
        folder = self.folder / FOLDER
        if phase in ("generate", "score"):
            paths = [folder / "environment.json"]
            if phase == "generate":
                paths = [path for path in folder.glob("engine*.json") if "-" not in path.stem]
            return any(one["cat"] == phase for path in paths for one in open_of(tail(path)))
        found = open_of(tail(folder / "rank0.json"))
        return phase in {phase_of_rank(one["cat"], one["name"]) for one in found}

    def phase_at(self, wall: float) -> str:
        """The phase in which the run was at a time, in seconds since the epoch, from what its
        processes have recorded.
        """
        now: dict[str, list[Event]] = {}
        stepped, micros = False, 1e6 * wall
        for life in read(self.folder / FOLDER):
            if life.begin > wall or (life.last < wall and life.is_alive is False):
                continue
            name = life.process.rstrip("0123456789")
            spans = life.spans.values()
            now.setdefault(name, []).extend(
                one for one in spans if one["ts"] <= micros < one.get("end", micros + 1)
            )
            stepped |= life.process == "rank0" and any(one["ts"] <= micros for one in life.steps)
        phases = {phase_of_rank(one["cat"], one["name"]) for one in now.get("rank", [])} - {""}
        for phase in ("evaluate", "checkpoint", "probe", "publish", "train", "start"):
            if phase in phases:
                return phase
        if any(one["cat"] == "generate" for one in now.get("engine", [])):
            return "generate"
        if any(one["cat"] == "score" for one in now.get("environment", [])):
            return "score"
        return "take" if "take" in phases else "between" if stepped else "start"

    def name_of(self, pid: int) -> str:
        """Name of the process in the run's records, such as "engine 0"; "" for one without any."""
        for path in (self.folder / FOLDER).glob("*.json"):
            if any(event["pid"] == pid for event in events(content_of(path))):
                return re.sub(r"(\d+)$", r" \1", path.stem.partition("-")[0])
        return ""


def phase_of_rank(kind: str, what: str) -> str:
    """The phase that a span of rank 0 means; "" for none."""
    if kind in ("train", "logprobs", "optimizer"):
        return "train"
    if kind == "publish":
        return "probe" if what.startswith("probe") else "publish"
    if kind == "wait":
        starts = {"rollouts": "take", "start": "start"}
        return starts.get(what.partition(" ")[0], "")
    return {"load": "start", "checkpoint": "checkpoint", "evaluate": "evaluate"}.get(kind, "")


def tail(path: Path) -> list[Event]:
    """The last events in a file of `megarl.activity`."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        return list(events(file.read()))
    return []


def open_of(found: list[Event]) -> list[Event]:
    """The spans among the events `found` that have not ended."""
    spans: dict[int, Event] = {}
    for event in found:
        if event["ph"] == "M" or event.get("name") == "closed":
            spans.clear()
        elif event["ph"] == "B":
            spans[event["span"]] = event
        elif event["ph"] == "E":
            spans.pop(event["span"], None)
    return list(spans.values())


def outside() -> set[str]:
    """What is in the folders of temporary files and of shared memory."""
    places = {"/tmp", "/dev/shm", tempfile.gettempdir()}
    return {os.path.join(place, name) for place in places for name in os.listdir(place)}


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def title(process: psutil.Process) -> str:
    """Process id and the beginning of the command line."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:60]}"
    except psutil.Error:
        return f"{process.pid} (gone)"
