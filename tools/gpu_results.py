"""What became of the steps of gpu_steps.toml: results.json, results.md and results.tar.gz of a
folder, which several runs fill. Starts nothing.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BEGUN = ("ok", "failed", "timed out")
"""Statuses of steps that have run."""
KEPT = ("output.txt", "result.txt", "junit.xml")
"""Files of a step that go into the archive."""
KEPT_BYTES = 2**20
"""Of a longer file only so many bytes go into the archive, its last."""


@dataclass
class Result:
    """What became of a step."""

    step: str
    tells: str
    command: str
    status: str
    """ok, failed, timed out, skipped, no time, or not rehearsed."""
    seconds: float = 0.0
    note: str = ""
    """One line: counts of tests, or the reason."""
    found: Any = None
    """The JSON object that the step printed, or {test: numbers that it recorded}."""
    made_with: str = ""
    """GPU, commit and versions."""


@dataclass
class Report:
    """All results, and what the last run of them was made with."""

    rehearsal: bool
    minutes: float
    commit: str
    machine: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Take a result in the place of an earlier one of the same step; what has not run does not
        replace what has.
        """
        known = {one.step: one for one in self.results}
        if result.status in BEGUN or known.get(result.step, result).status not in BEGUN:
            known[result.step] = result
        self.results = list(known.values())

    def made_with(self) -> str:
        """One line: GPU or CPU, commit, and versions."""
        here = self.machine
        chip = here.get("gpu", here.get("cpu", "?"))
        return f"{chip}, commit {self.commit}, torch {here.get('torch', '?')}"

    def write(self, folder: Path) -> None:
        """results.json, results.md and results.tar.gz; each replaces the one before whole."""
        for name, make in (
            ("results.json", lambda: json.dumps(asdict(self), indent=1).encode()),
            ("results.md", lambda: ("\n".join(self.table()) + "\n").encode()),
            ("results.tar.gz", lambda: archive(folder)),
        ):
            aside = folder / f".{name}"
            aside.write_bytes(make())
            aside.replace(folder / name)

    def table(self) -> Iterator[str]:
        """Markdown: the machine, then a line for each step."""
        how = "rehearsal on CPU" if self.rehearsal else f"{self.machine.get('gpus', 1)} GPU(s)"
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        yield f"`bash tests/run_gpu.sh --minutes {self.minutes:g}`, {how}, commit {self.commit};"
        yield f"{facts}."
        others = {one.made_with for one in self.results if one.status in BEGUN} - {""}
        if others - {self.made_with()}:
            yield f"Made with: {'; '.join(sorted(others))}."
        yield from ("", "| step | tells | result | seconds | |", "|---|---|---|---|---|")
        for one in self.results:
            yield f"| {one.step} | {one.tells} | {one.status} | {one.seconds:.0f} | {one.note} |"


def archive(folder: Path) -> bytes:
    """A tar.gz of the results and of what each step printed; long files are cut to their end."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        steps = [path for path in sorted(folder.glob("*/*")) if path.name in KEPT]
        for path in (folder / "results.json", folder / "results.md", *steps):
            content = path.read_bytes()[-KEPT_BYTES if path.parent != folder else 0 :]
            about = tarfile.TarInfo(f"results/{path.relative_to(folder)}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return made.getvalue()


def earlier(folder: Path, rehearsal: bool, order: Sequence[str]) -> list[Result]:
    """Results that are in a folder, in the order of the steps' names. Raises `ValueError` where
    they are a rehearsal's and these are not, or the other way round, and where the file is not
    results.json of this version."""
    path = folder / "results.json"
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_bytes())
        results = [Result(**one) for one in found["results"]]
        was_rehearsal = found["rehearsal"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has not the form of this version; set --out: {error}") from None
    if was_rehearsal != rehearsal:
        kind = "a rehearsal on the CPU" if was_rehearsal else "a GPU"
        raise ValueError(f"{path} has the results of {kind}; set --out to another folder")
    return sorted(results, key=lambda one: [*order, one.step].index(one.step))
