"""A run under the care of tools/chaos.py: its command, its processes, where it is, what it says."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from common import ROOT
from processes import MARK, is_running, marked

from megarl.system.spans import FOLDER
from megarl.system.trace_files import ProcessTrace, newest_traces, read_traces

PHASES = (
    *("evaluate", "checkpoint", "probe", "publish", "train", "start"),
    *("generate", "score", "take"),
)
"""What a run can be doing; of several, the first counts. `take`: rank 0 asks for a batch."""
SPANS = {
    "train": "train",
    "logprobs": "train",
    "optimizer": "train",
    "publish probe": "probe",
    "publish": "publish",
    "wait rollouts": "take",
    "wait start": "start",
    "load": "start",
    "checkpoint": "checkpoint",
    "evaluate": "evaluate",
}
"""{beginning of kind and name of a span of rank 0: the phase that it means}; the first counts."""
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

    def __post_init__(self) -> None:
        self.environment = {**os.environ, MARK: self.mark}
        """The environment variables of the run's processes."""

    def start(self) -> None:
        """Start the run, or start it again."""
        self.starts += 1
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment,
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
        below = {one.pid for one in self.below()}
        for trace in newest_traces(read_traces(self.folder / FOLDER)):
            if trace.name == "rank0" and trace.steps and trace.pid in below:
                return trace.pid, trace.steps[-1]["args"]["step"]
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
        assert self.process is not None

        def is_mine(one: psutil.Process) -> bool:
            return not (is_over and title(one).split(" ", 1)[1].startswith(SLOW))

        is_over = self.code is not None
        if is_over:
            psutil.wait_procs(filter(is_mine, self.below()), timeout=20)
        time.sleep(1.0)  # some are just ending
        titles = _kill([*filter(is_mine, [*self.below(), *marked(self.mark)])])
        self.process.wait(10)
        return titles if is_over else []

    def lingered(self) -> list[str]:
        """The command lines of Ray's agents that are still there `SLOW_S` seconds after the run."""
        return _kill(psutil.wait_procs(self.below(), timeout=SLOW_S)[1])

    # --------------------------------------------------------------------------------------- phases

    def wait_for_phase(self, phase: str, timeout_s: float) -> bool:
        """Wait until the run is in `phase`, as the newest lines of its files say: right almost
        always. False if it is not within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.code is None:
            traces = newest_traces(read_traces(self.folder / FOLDER))
            if phase in phases_of(traces, time.time()):
                return True
            time.sleep(0.002)
        return False

    def phase_at(self, wall: float) -> str:
        """The phase in which the run was at a time, in seconds since the epoch, from what its
        processes have recorded.
        """
        traces = read_traces(self.folder / FOLDER)
        found = phases_of(traces, wall)
        ranks = (trace for trace in traces if trace.name == "rank0")
        stepped = any(step["ts"] <= 1e6 * wall for trace in ranks for step in trace.steps)
        return next((one for one in PHASES if one in found), "between" if stepped else "start")

    def name_of(self, pid: int) -> str:
        """Name of the process in the run's records, such as "engine 0"; "" for one without any."""
        for trace in read_traces(self.folder / FOLDER):
            if trace.pid == pid:
                return re.sub(r"(\d+)$", r" \1", trace.name.partition("-")[0])
        return ""


def _kill(processes: list[psutil.Process]) -> list[str]:
    """End processes; returns the command lines of those that were alive."""
    titles = sorted({title(one) for one in processes if is_running(one)})
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(processes, timeout=10)
    return titles


def phases_of(traces: Iterable[ProcessTrace], wall: float) -> set[str]:
    """The phases in which a run's processes were at a time, in seconds since the epoch."""
    found = set[str]()
    for trace in traces:
        name = trace.name.rstrip("0123456789")
        if trace.begin > wall or (trace.last < wall and trace.is_alive is False):
            continue
        for span in trace.spans.values():
            if not span["ts"] <= 1e6 * wall < span.get("end", 1e6 * wall + 1):
                continue
            kind = span["cat"]
            if name == "rank":
                text = f"{kind} {span['name']}"
                found |= {next((SPANS[one] for one in SPANS if text.startswith(one)), "")}
            elif (name, kind) in (("engine", "generate"), ("service", "score")):
                found.add(kind)
    return found


def outside() -> set[str]:
    """What is in the folders of temporary files and of shared memory."""
    places = {"/tmp", "/dev/shm", tempfile.gettempdir()}
    return {os.path.join(place, name) for place in places for name in os.listdir(place)}


def megarl(*words: object) -> list[str]:
    """A command of megarl."""
    return [sys.executable, "-m", "megarl", *map(str, words)]


def title(process: psutil.Process) -> str:
    """Process id and the beginning of the command line."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:60]}"
    except psutil.Error:
        return f"{process.pid} (gone)"
