"""What each `training.precision` learns of a published model: SmolLM2-135M-Instruct on sums and
differences that are asked in words.

    python tools/study_precision.py FOLDER                              SFT, three seeds
    python tools/study_precision.py FOLDER --kinds grpo --steps 60      hours on two cores
    python tools/study_precision.py FOLDER --kinds grpo --engines float32,bfloat16
    python tools/study_precision.py FOLDER --show                       the table of what is there

SFT takes 16 rows a step at a learning rate of 1e-5, GRPO 8 prompts x 8 samples at 1e-6, with
synchronous engines of each dtype of `--engines` ("same": the trainer's dtype). A run's result is a
line of FOLDER/results.jsonl, and a run that is there is not repeated.

    learnt    SFT: loss of the first step less that of the last, which is of the weights after all
              steps but the last. GRPO: accuracy of the rollouts, last quarter of the steps less the
              first
    ratio     the same over that of float32, with the same seed and, in GRPO, engines of float32
    mismatch  GRPO: mean difference of the log-probs of trainer and engine
    changed   share of the weights that differ from the published ones after the last step
    s a step  mean over the steps but the first
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies import RECIPES, ROOT, mean_and_deviation, megarl, results, run_missing

PRECISIONS = ("float32", "bfloat16", "float16", "bfloat16x2")
IN_16_BIT = ("bfloat16", "float16")
SFT = """\
model: {path: ""}
demonstrations: {source: "", template: chat, max_tokens: 128}
samples_per_step: 16
training: {micro_batch_tokens: 2048, optimizer: {learning_rate: 1.0e-5}}
"""


@dataclass(frozen=True)
class Case:
    """One run of the study."""

    kind: str
    precision: str
    engine: str
    """dtype of the engine; "" without one."""
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Name of the run folder."""
        words = (self.kind, self.precision, self.engine, f"seed{self.seed}", f"{self.steps}steps")
        return "-".join(filter(None, words))


@dataclass(frozen=True)
class Result:
    """What one run has found."""

    case: Case
    learnt: float
    mismatch: float
    changed: float
    step_s: float


def cases(args: argparse.Namespace) -> list[Case]:
    """The runs of a study; those of one seed follow each other."""
    found = dict[Case, None]()
    for seed in args.seeds:
        for kind in args.kinds:
            for precision in args.precisions:
                own = precision if precision in IN_16_BIT else "float32"
                for engine in args.engines if kind == "grpo" else [""]:
                    engine = own if engine == "same" else engine
                    found[Case(kind, precision, engine, seed, args.steps)] = None
    return list(found)


def settings_of(case: Case, folder: Path, model: Path) -> dict[str, object]:
    """{setting: value} of a run, on top of its recipe."""
    options: dict[str, object] = {
        "folder": folder / case.name,
        "seed": case.seed,
        "steps": case.steps,
        "model.path": model,
        "training.precision": case.precision,
        "training.zero_stage": int(case.precision in IN_16_BIT),
    }
    if case.kind == "sft":
        return options | {"demonstrations.source": folder / "sft.jsonl"}
    return options | {
        "prompts.source": folder / "data" / "train.jsonl",
        "evaluation.prompts.source": "",
        "rollout.groups_per_step": 8,
        "rollout.engine.dtype": case.engine,
        "algorithm.correction.kind": "tis",  # the trainer's dtype may be another
        "training.optimizer.learning_rate": 1e-6,
        "training.schedule.kind": "constant",
    }


def run(case: Case, folder: Path, model: Path) -> Result:
    """Do one run of the study."""
    place = folder / case.name
    shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
    recipe, command = RECIPES / "smollm2_arithmetic.yaml", "train"
    if case.kind == "sft":
        recipe, command = folder / "sft.yaml", "sft"
        recipe.write_text(SFT)
    options = settings_of(case, folder, model)
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    megarl(command, str(recipe), *words)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    quarter = max(1, case.steps // 4)
    if case.kind == "sft":
        learnt = rows[0]["loss"] - rows[-1]["loss"]
    else:
        accuracy = [row["accuracy"] for row in rows]
        learnt = statistics.mean(accuracy[-quarter:]) - statistics.mean(accuracy[:quarter])
    (saved,) = (place / "checkpoints").glob(f"step_{case.steps:06d}")
    changed = share_changed(model, saved / "model")
    shutil.rmtree(place / "checkpoints")  # 2 GB
    return Result(
        case,
        learnt,
        statistics.mean(row.get("mismatch/mean_abs", 0.0) for row in rows),
        changed,
        statistics.mean(row["time/step_s"] for row in rows[1:]),
    )


def share_changed(before: Path, after: Path) -> float:
    """Share of the weights of two model folders that differ."""
    from safetensors.torch import load_file

    old, new = dict[str, Any](), dict[str, Any]()
    for folder, weights in ((before, old), (after, new)):
        for path in folder.glob("*.safetensors"):
            weights |= load_file(path)
    differ = sum(int((new[name].float() != old[name].float()).sum()) for name in new)
    return differ / sum(part.numel() for part in new.values())


def table(found: Sequence[Result]) -> Iterator[str]:
    """Lines of the table: mean and standard deviation over seeds."""
    base = {
        (one.case.kind, one.case.steps, one.case.seed): one.learnt
        for one in found
        if one.case.precision == "float32" and one.case.engine in ("", "float32")
    }
    yield (
        f"{'kind':5} {'steps':>5} {'precision':11} {'engine':9} {'runs':>4}  {'learnt':16}"
        f" {'ratio':16} {'mismatch':16} {'changed':16} {'s a step':16}"
    )
    rows = dict[tuple[str, int, str, str], list[Result]]()
    for one in found:
        case = one.case
        rows.setdefault((case.kind, case.steps, case.precision, case.engine), []).append(one)
    for (kind, steps, precision, engine), same in rows.items():
        keys = [(kind, steps, one.case.seed) for one in same]
        columns = [
            [one.learnt for one in same],
            [one.learnt / base[key] for one, key in zip(same, keys, strict=True) if key in base],
            [one.mismatch for one in same if kind == "grpo"],
            [one.changed for one in same],
            [one.step_s for one in same],
        ]
        yield f"{kind:5} {steps:5} {precision:11} {engine:9} {len(same):4}  " + " ".join(
            f"{mean_and_deviation(one):16}" for one in columns
        )


def make_data(folder: Path, model: Path) -> None:
    """The model and the problems, where they are missing, and the problems as demonstrations."""
    for command in (
        ["real_model.py", "smollm2", "--folder", str(model)],
        ["make_arithmetic.py", str(folder / "data")],
    ):
        subprocess.run([sys.executable, str(ROOT / "tools" / command[0]), *command[1:]], check=True)
    rows = map(json.loads, (folder / "data" / "train.jsonl").read_text().splitlines())
    pairs = ({"prompt": row["prompt"], "response": row["answer"]} for row in rows)
    (folder / "sft.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the study")
    parser.add_argument("--kinds", default="sft", help="sft, grpo")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--engines", default="same", help="same, float32, bfloat16, float16")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=9, help="4 or more")
    parser.add_argument("--model", type=Path, default=Path.home() / ".cache" / "megarl" / "smollm2")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)
    allowed = {
        "kinds": ("sft", "grpo"),
        "precisions": PRECISIONS,
        "engines": ("same", "float32", "bfloat16", "float16"),
    }
    for name, known in allowed.items():
        words = getattr(args, name).split(",")
        if unknown := set(words) - set(known):
            parser.error(f"--{name} has {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
        setattr(args, name, words)
    try:
        args.seeds = [int(word) for word in args.seeds.split(",")]
    except ValueError:
        parser.error("--seeds is numbers such as 1,2,3")
    if args.steps < 4:
        parser.error(f"--steps is {args.steps}; set it to 4 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that are missing, and print the table. Returns the exit code."""
    args = arguments(argv)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not args.show:
        make_data(folder, args.model)
    wanted = [] if args.show else cases(args)
    done = [one.case for one in results(folder, Case, Result)]
    try:
        run_missing(folder, wanted, done, lambda case: run(case, folder, args.model))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"study_precision: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(results(folder, Case, Result))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
