"""A command of megarl in a process of its own, as its caller sees it, and run files that grow
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from megarl.settings import config as configs
from megarl.settings.config import AnyConfig
from megarl.system.files import ROOT

# A run whose caller is gone (a notebook's kernel, or the thread that has started the run) gets
# SIGTERM, on which it saves a checkpoint and ends.
PROGRAM = """import signal, sys
sys.path.append(sys.argv[1])
from megarl.system.signals import become
become(int(sys.argv[2]), sys.argv[3:], signal.SIGTERM)"""


def last_start(folder: Path) -> bytes:
    """The newest line of provenance.jsonl, JSON with `step`, the steps done at a start; or b""."""
    from megarl.observe.observer import PROVENANCE

    with contextlib.suppress(FileNotFoundError):
        return b"".join((folder / PROVENANCE).read_bytes().split(b"\n")[-2:-1])
    return b""


class GrowingFile:
    """A JSON-lines file that a run is about to write."""

    def __init__(self, path: Path, told: dict[str, int]) -> None:
        """`told`: {file name: lines that the caller has been told}; a missing file gets those that
        the run keeps.
        """
        from megarl.observe.sinks import read_records

        self._path, self._told, self._at = path, told, 0
        self._old = [row["step"] for row in read_records(path)]

    def read(self, done: float) -> list[dict[str, Any]]:
        """The new lines. `done`: steps that the run had done at its start, whose lines it kept;
        infinity for all.
        """
        lines, known = list[bytes](), 0
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            lines = [line for line in file if line.endswith(b"\n")]
        if self._at == 0:
            # A run that has done no step makes the evaluation before training again.
            kept = sum(step <= (done or -1) for step in self._old)
            known = min(kept, self._told.get(self._path.name, kept))
            self._told[self._path.name] = known
        self._at += sum(map(len, lines))
        return [json.loads(line) for line in lines[known:]]


class RunProcess:
    """A command in a process of its own. Standard error is passed on. At the end of the block it is
    told to save and end.
    """

    def __init__(
        self,
        command: str,
        config: AnyConfig,
        *,
        ranks: int = 1,
        environment: Mapping[str, str] = MappingProxyType({}),
        module: str = "megarl",
    ) -> None:
        """Start `python -m MODULE COMMAND RECIPE`. `ranks`: training processes; `environment`:
        variables to set.
        """
        self._command, self._said = command, ""
        self._said_last: bytes | None = None
        """What the process has printed, once it has ended."""
        self._place = tempfile.TemporaryDirectory(prefix="megarl-")
        names = "recipe.yaml", "printed"
        recipe, self._printed = (Path(self._place.name, name) for name in names)
        recipe.write_text(configs.dump(config), encoding="utf-8")
        launcher = ["megarl.parallel.torchrun", "--nproc-per-node", str(ranks), "-m"]
        words = [*(launcher if ranks > 1 else []), module, command, str(recipe)]
        # -P: a file beside the caller's must not hide a library.
        before = ["-P", "-c", PROGRAM, str(ROOT), str(os.getpid()), sys.executable, "-m"]
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, *before, *words],
                stdout=printed,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # In a rank `megarl run` starts no others.
                env=os.environ | environment | ({"RANK": "0"} if ranks == 1 else {}),
                # A notebook or terminal interrupts its whole group; the caller passes that on once.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        for line in self._process.stderr or ():
            sys.stderr.write(line)
            self._said = line.strip() if line.startswith("megarl: error") else self._said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell a process that still runs to save and end, and wait."""
        if self._said_last is not None:
            return
        while self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):  # once more: the run ends at once
                self._process.wait()
        self._reader.join()
        self._said_last = self.printed()
        self._place.cleanup()

    def printed(self) -> bytes:
        """Standard output so far, in the block."""
        return self._printed.read_bytes()

    def is_over(self, within_s: float | None) -> bool:
        """Waits `within_s` at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def summary(self) -> Any:
        """The JSON that the command has printed, after the block. Raises `ValueError` for a mistake
        of the user, `RuntimeError` for any other failure.
        """
        code = self._process.returncode
        if code == 2:
            message = self._said.removeprefix("megarl: error: ")
            raise ValueError(message.replace("(--ranks)", "(the argument ranks)"))
        if code != 0:
            raise RuntimeError(self._said or f"megarl {self._command} ended with exit code {code}")
        return json.loads(self._said_last or b"")
