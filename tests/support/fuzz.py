"""Fuzz of everything a user hands to `megarl`: seeded cases, and the check called as a function.

    make(seed, number, model) -> Case        the same case for the same two numbers
    run(case, folder, model) -> Outcome      one clear line, or a pass; anything else is a fault

A case is a good run with something changed. `tools/fuzz.py` runs thousands with a deadline each.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megarl import cli
from megarl.errors import UserError
from megarl.settings import recipe_file
from support import fuzz_files, fuzz_values
from support.fuzz_case import Case, good_tree, write_rows

SLOW_S = 10.0
"""A check that takes longer is a fault."""
RECORDED_S = 60.0
"""The same where vLLM's loader is run, for a config.json that was not seen before."""
LONGEST_LINE = 2500

MAKERS = {
    "one setting": (40, fuzz_values.one_setting),
    "several settings": (8, fuzz_values.several_settings),
    "unknown key": (2, fuzz_values.unknown_key),
    "YAML": (8, fuzz_values.yaml_text),
    "command line": (6, fuzz_values.command_line),
    "config.json": (12, fuzz_files.model_config),
    "tokenizer": (7, fuzz_files.tokenizer),
    "generation_config.json": (4, fuzz_files.generation_config),
    "weights": (8, fuzz_files.weights),
    "data": (12, fuzz_files.data),
    "environment": (5, fuzz_files.environment),
    "verifier": (2, fuzz_files.verifier),
    "folder": (4, fuzz_files.run_folder),
}
"""{kind of case: (its share, function of (random numbers, good case, good model) -> case)}"""

OWN = (
    "prompts", "evaluation", "demonstrations", "preferences", "checked: ", "checks: ",
    "megarl: warning: ", "resume is auto, and ",
)  # fmt: skip
"""Beginnings of the lines that a check may print."""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How the check answered a case."""

    kind: str
    """refused, passed; or a fault: traceback, slow, several lines, noise, accepted, too strict."""
    said: str
    """The error line, or what is wrong with the answer."""
    seconds: float

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("refused", "passed")


def make(seed: int, number: int, model: Path) -> tuple[str, Case]:
    """(kind, case) number `number` of `seed`; `model`: a good model folder."""
    draw = random.Random(f"{seed}/{number}")
    kinds = list(MAKERS)
    kind = draw.choices(kinds, [MAKERS[name][0] for name in kinds])[0]
    return kind, MAKERS[kind][1](draw, Case(), model)


def prepare(case: Case, folder: Path, model: Path) -> list[str]:
    """Write the case's files; returns the command line."""
    write_rows(folder)
    fuzz_files.make_loop(folder)
    if case.own_model:
        shutil.copytree(model, folder / "model")
        model = folder / "model"
    path = folder / "recipe.yaml"
    if case.text is None:
        # The dump's own text for half a surrogate pair is what YAML reads back.
        text = recipe_file.dump_yaml(good_tree(case, folder, model))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        content = case.text.replace(b"{folder}", str(folder).encode())
        path.write_bytes(content.replace(b"{model}", str(model).encode()))
    if case.spoil is not None:
        case.spoil(folder)
    words = [word.replace("{folder}", str(folder)) for word in case.arguments]
    return ["eval" if case.task == "eval" else "run", str(path), *words, "--check"]


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """The lines that this process writes to file descriptors 1 and 2, whoever writes them."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield lines
        finally:
            for number, copy in enumerate(kept, start=1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def run(case: Case, folder: Path, model: Path) -> Outcome:
    """The check's answer to `case`, in this process; `folder` is an empty one for its files."""
    words = prepare(case, folder, model)
    settings = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    settings |= case.environment | {"HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, settings, clear=True))
        if not case.verifier:
            # A process a case is most of its time; the cases of verifiers start one.
            checks = "megarl.run.plan.check_verifier"
            stack.enter_context(mock.patch(checks, return_value=[]))
        printed = stack.enter_context(captured())
        started = time.monotonic()
        kind, said = "passed", ""
        try:
            cli.plan(words).run()
        except UserError as error:
            kind, said = "refused", str(error)
        except SystemExit as error:
            kind, said = "traceback", f"SystemExit {error.code}"
        except Exception:
            kind, said = "traceback", traceback.format_exc()
        seconds = time.monotonic() - started
    noise = [line for line in printed if line.strip() and not line.startswith(OWN)]
    if kind == "refused" and ("\n" in said or len(said) > LONGEST_LINE or not said.strip()):
        kind = "several lines"
    elif kind == "passed" and case.expect == "refuse":
        kind, said = "accepted", "the check passed"
    elif kind == "refused" and case.expect == "pass":
        kind = "too strict"
    elif kind in ("passed", "refused") and seconds > (
        RECORDED_S if case.what.startswith("config.json") else SLOW_S
    ):
        kind = "slow"
    elif kind in ("passed", "refused") and noise and not case.verifier:
        kind, said = "noise", f"{said} | {' | '.join(noise)[:600]}"
    return Outcome(kind, said, seconds)
