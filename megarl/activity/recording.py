"""Opens and closes the record of this process; see `megarl.activity.spans`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.activity import spans, stacks
from megarl.activity.files import FOLDER
from megarl.activity.watcher import Watcher
from megarl.console import say


@dataclass(frozen=True)
class Recording:
    """Where the processes of a run record what they do. It can be pickled, for Ray's actors."""

    folder: str
    """RUN/activity as an absolute path."""
    run: str
    """Id of the run."""

    @classmethod
    def of(cls, run_folder: str | Path, run: str, *, enabled: bool) -> Recording | None:
        """The place in a run folder; None where nothing is to be recorded."""
        return cls(str(Path(run_folder).absolute() / FOLDER), run) if enabled else None

    @classmethod
    def beside(cls, part: str) -> tuple[Recording, str] | None:
        """(where this process records, name of its child process `part`), for the child to open;
        None where this process does not record.
        """
        own = spans.recorder()
        return (cls(str(own.folder), own.run), f"{own.process}-{part}") if own else None

    def make(self, *, keep: bool) -> None:
        """Create the folders; rank 0 does it before another process opens its file. What an earlier
        run has recorded there is removed unless `keep`.
        """
        try:
            if not keep:
                shutil.rmtree(self.folder, ignore_errors=True)
            (Path(self.folder) / stacks.FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            say(f"megarl: what the processes do is not recorded: {error}")

    def open(self, process: str) -> Callable[[], None]:
        """From now on, record what this process does under the name `process`, until the function
        that is returned is called. A process that cannot write there says so and goes on.
        """
        folder = Path(self.folder)
        try:
            signal = stacks.answer_signal(folder / stacks.FOLDER, process)
            recorder = spans.Recorder(folder, process, self.run, signal=signal)
        except OSError as error:
            say(f"megarl: what {process} does is not recorded: {error}")
            return lambda: None
        watcher = Watcher(recorder)
        recorder.stop = watcher.stop
        spans.use(recorder)
        watcher.start()
        return close_recording


def close_recording() -> None:
    """End the record of this process in order; nothing if there is none."""
    if (recorder := spans.recorder()) is not None:
        recorder.stop()
        spans.use(None)
        recorder.close()
