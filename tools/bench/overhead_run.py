"""The runs and the parts of tools/bench/overhead.py: writes the task, runs `megarl train`, reads
what it recorded, and runs the parts on its batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT
from e2e_megarl import recipe
from e2e_processes import child_environment, run
from e2e_task import EOS, PAD, SAMPLES, Setting, write_task
from overhead_part import answer_path

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

EOS_ID = [PAD, EOS].index(EOS)
ALWAYS, EOS_WEIGHT = 1.0, -10.0
"""Value of the first hidden dimension before the last norm, and the weight by which the
end-of-sequence token's logit takes it."""
PHASES = ("time/wait_s", "time/train_s", "time/publish_s", "time/rollout_s", "time/step_s")
"""Metrics of a step that are shown."""
PIN_EVERY_S = 0.2
AGREE = 1e-3
"""By how much losses and gradient norms of run and bare loop may differ, relative to the larger."""


@dataclass(frozen=True)
class Kind:
    """How a run uses the cores."""

    staleness: int
    threads: int
    """Of the engine, and of the trainer."""
    engine_cores: tuple[int, ...] = ()
    """Cores of the engine's processes; all if empty."""
    trainer_cores: tuple[int, ...] = ()


def write_endless_task(folder: Path, vocabulary: int) -> int:
    """The task of tools/bench/e2e.py with a model that never ends a response; returns the model's
    number of parameters.

    No family that megarl publishes has a bias in its output head. So the first hidden dimension is
    `ALWAYS` for every token: the embedding sets it and no layer adds to it. The end-of-sequence
    token's logit is a negative multiple of it, about -50 where the others are about 0.
    """
    from safetensors.torch import load_file, save_file

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed, if it is imported, says so
        parameters = write_task(folder, vocabulary)
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = ALWAYS
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    weights["lm_head.weight"][EOS_ID] = 0
    weights["lm_head.weight"][EOS_ID, 0] = EOS_WEIGHT
    save_file(weights, file, metadata={"format": "pt"})
    return parameters


class Bench:
    """Runs megarl, and the parts of its steps, in the folder `work`."""

    def __init__(self, work: Path, *, skipped: int, steps: int, deadline_s: float) -> None:
        """`skipped`: steps of each run that are not counted. `steps`: those that are."""
        self.work, self.skipped, self.steps, self.deadline_s = work, skipped, steps, deadline_s
        self.others = 0.0
        """Largest share of the CPU that other processes took in a run."""

    def run(self, kind: Kind, limit: int, groups: int) -> tuple[Path, dict[str, Any]]:
        """A run of megarl: (run folder, {"step_s": seconds of each counted step, "phases"}). One
        further step follows the counted ones, since a step ends where the next one begins.
        """
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.work)) / "run"
        setting = Setting(1, kind.threads, 1, kind.threads)
        total = self.skipped + self.steps + 1
        tree = recipe(
            self.work / "task",
            folder,
            setting,
            steps=total,
            limit=limit,
            staleness=kind.staleness,
        )
        tree["rollout"]["groups_per_step"] = groups
        tree["observe"] = {"batches": True}
        file = folder.parent / "recipe.yaml"
        file.write_text(json.dumps(tree))  # JSON is YAML
        pins = Pins(folder, kind)
        with pins:
            self._run([sys.executable, "-m", "megarl", "train", str(file)], kind, folder.parent)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tokens = groups * SAMPLES * limit
        for record in records:
            if (record["tokens/generated"], record["tokens/trained"]) != (tokens, tokens):
                raise RuntimeError(f"a step did not train on {tokens} tokens: {record}")
        begins = [at for at, *_ in steps_begun(folder)]
        if len(begins) != total:
            raise RuntimeError(f"{folder} has recorded the begin of {len(begins)} steps of {total}")
        pins.check(begins[self.skipped])
        counted = records[self.skipped : self.skipped + self.steps]
        names = sorted({name for one in counted for name in one if name.startswith("publish/")})
        phases = {
            name: sum(one[name] for one in counted) / len(counted) for name in (*PHASES, *names)
        }
        return folder, {"step_s": intervals(begins[self.skipped :]), "phases": phases}

    def parts(self, kind: Kind, folder: Path, *, is_reversed: bool) -> dict[str, list[float]]:
        """{part: seconds of each counted call} of the run `folder`'s batches: `generation`, `plain`
        (generation without seeds and log-probs) and `training`, one after the other.
        """
        found = {}
        for name in ("training", "generation") if is_reversed else ("generation", "training"):
            answer = self._part(name, kind, folder)
            for part, calls in (("plain", answer.get("plain")), (name, answer["calls"])):
                if calls:
                    found[part] = [end - begin for begin, end in calls]
        return found

    def side_by_side(self, kind: Kind, folder: Path) -> dict[str, list[float]]:
        """The two parts at the same time, each on its cores: what the machine alone costs."""
        meeting = tempfile.mkdtemp(prefix="meet-", dir=self.work)
        names = ("generation", "training")
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(self._part, name, kind, folder, meeting) for name in names]
            calls = [one.result()["calls"] for one in running]
        return dict(zip(names, together(*calls), strict=True))

    def _part(self, name: str, kind: Kind, folder: Path, meeting: str = "") -> dict[str, Any]:
        """Run a part in a process of its own; returns its answer. Raises `RuntimeError` where it
        did not train as the run did.
        """
        aside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))
        cores = kind.engine_cores if name == "generation" else kind.trainer_cores
        task = {
            "part": name,
            "run": str(folder),
            "folder": str(aside / "run"),
            "cores": cores,
            "stops": [EOS_ID],
            "available": self.skipped + self.steps,
            "plain": not meeting,
            "calls": {"skipped": self.skipped, "steps": self.steps, "meeting": meeting},
        }
        path = aside / "task.json"
        path.write_text(json.dumps(task))
        script = str(Path(__file__).with_name("overhead_part.py"))
        # Two parts at the same time see each other as others.
        self._run([sys.executable, script, str(path)], kind, aside, counts=not meeting)
        found = json.loads(answer_path(path).read_text())
        if name == "training":
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            refuse_other_training(found["losses_and_norms"], [json.loads(line) for line in lines])
        return found

    def _run(self, command: list[str], kind: Kind, aside: Path, *, counts: bool = True) -> None:
        environment = child_environment(self.work, kind.threads)
        others, _ = run(command, environment, aside / "log", self.deadline_s)
        self.others = max(self.others, others if counts else 0.0)


class Pins:
    """Context manager: binds the processes of the run `folder` to the cores of `kind` as soon as
    they have recorded that they live. megarl itself binds no process.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder, self._kind = folder, kind
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._watch)
        self.done: dict[str, float] = {}
        """{process: when it was bound, in seconds since the epoch}"""

    def __enter__(self) -> Pins:
        if self._kind.engine_cores:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._kind.engine_cores:
            self._thread.join()

    def check(self, deadline: float) -> None:
        """Raise `RuntimeError` unless engine and trainer were bound before `deadline`."""
        late = [at for at in self.done.values() if at > deadline]
        if self._kind.engine_cores and (len(self.done) != 3 or late):
            raise RuntimeError(f"not all processes were bound to their cores in time: {self.done}")

    def _watch(self) -> None:
        from megarl.activity.files import FOLDER, read

        cores = {
            "rank0": self._kind.trainer_cores,
            "engine0": self._kind.engine_cores,
            "engine0-core": self._kind.engine_cores,
        }
        while len(self.done) < len(cores) and not self._ended.wait(PIN_EVERY_S):
            # Threads that start later have the affinity of the thread that starts them.
            is_whole = any(life.steps for life in read(self._folder / FOLDER, only_last=True))
            for life in read(self._folder / FOLDER, only_last=True) if is_whole else ():
                if life.process in cores:
                    bind(life.pid, cores[life.process])
                    self.done[life.process] = time.time()


def bind(pid: int, cores: tuple[int, ...]) -> None:
    """Bind all threads of a process to `cores`."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def steps_begun(folder: Path) -> list[tuple[float, int, int]]:
    """(seconds since the epoch, step from 1, weights version) of each step that rank 0 began."""
    from megarl.activity.files import FOLDER, read

    steps = next(life.steps for life in read(folder / FOLDER) if life.process == "rank0")
    return [(one["ts"] / 1e6, one["args"]["step"], one["args"]["version"]) for one in steps]


def intervals(times: list[float]) -> list[float]:
    """Seconds from each time to the next."""
    return [end - begin for begin, end in zip(times[:-1], times[1:], strict=True)]


def together(*calls: list[list[float]]) -> list[list[float]]:
    """Of each part's (begin, end) of its calls, the seconds of those that ended while all parts
    were under way.
    """
    until = min(part[-1][1] for part in calls)
    return [[end - begin for begin, end in part if end <= until] for part in calls]


def refuse_other_training(made: list[list[float]], records: list[dict[str, Any]]) -> None:
    """Raise `RuntimeError` unless the (loss, gradient norm) of each step that the bare loop `made`
    are those of the run's metrics. Steps that the loop has repeated are not compared.
    """
    for record, found in zip(records, made, strict=False):
        for name, own in zip(("loss", "grad_norm"), found, strict=True):
            if abs(record[name] - own) > AGREE * max(abs(record[name]), abs(own), 1e-3):
                raise RuntimeError(
                    f"the bare loop trains otherwise: {name} of step {record['step']} is {own}, and"
                    f" {record[name]} in the run"
                )
