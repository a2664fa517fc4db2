"""What stale rollouts cost and bring, on the quick start's task: throughput, and accuracy at equal
steps and at equal time, by bound of staleness and by correction.

    python tools/study_staleness.py FOLDER                              a few hours on two cores
    python tools/study_staleness.py FOLDER --bounds 0,1,4 --corrections tis --seeds 1,2,3
    python tools/study_staleness.py FOLDER --show                       the table of what is there

For every seed one model is made by supervised fine-tuning, and trained from there by
launch/recipes/quickstart.yaml with each bound (`rollout.max_staleness`) and each correction
(`algorithm.correction.kind`); a bound of 0 has no correction. A run's result is a line of
FOLDER/results.jsonl, and a run that is there is not repeated: the study may be ended at any time
and gone on with, on a machine that is as idle as before.

    throughput   tokens trained over the time of the steps but the first three, over that of bound 0
                 with the same seed
    age          mean age in versions of the rollouts trained on
    greedy       accuracy on 500 held-out problems after the last step
    equal steps  accuracy of the training rollouts, mean of the last quarter of the steps
    equal time   the same over the last quarter of the time that the seed's fastest run took
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

from studies import RECIPES, ROOT, mean_and_deviation, megarl, results, run_missing

CORRECTIONS = ("none", "tis", "icepop", "decoupled", "sequence_mask", "geometric_mask")
SKIPPED = 3
"""Steps at the start of a run that are not timed."""


@dataclass(frozen=True)
class Case:
    """One run of the study."""

    bound: int
    correction: str
    dispatch: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return f"{self.dispatch}-{self.bound}-{self.correction}-seed{self.seed}"


@dataclass(frozen=True)
class Result:
    """What one run has found."""

    case: Case
    step_s: list[float]
    """[steps] seconds of each step."""
    tokens: list[float]
    """[steps] tokens trained in each step."""
    accuracy: list[float]
    """[steps] share of right answers among each step's rollouts."""
    age: float
    """Mean age in versions of the rollouts trained on."""
    greedy: float
    """Accuracy on the held-out problems after the last step."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained in a second, without the first steps."""
        return sum(self.tokens[SKIPPED:]) / sum(self.step_s[SKIPPED:])

    @property
    def at_equal_steps(self) -> float:
        """Mean accuracy of the last quarter of the steps."""
        return statistics.mean(self.accuracy[-max(1, len(self.accuracy) // 4) :])

    def at_equal_time(self, seconds: float) -> float:
        """Mean accuracy of the steps that ended in the last quarter of the first `seconds`; of the
        last step before that if none did.
        """
        ended, total = list[tuple[float, float]](), 0.0
        for step_s, accuracy in zip(self.step_s, self.accuracy, strict=True):
            total += step_s
            ended.append((total, accuracy))
        before = [one for one in ended if one[0] <= seconds + 1e-6] or ended[:1]
        found = [accuracy for at, accuracy in before if at > 0.75 * seconds]
        return statistics.mean(found or [before[-1][1]])


def cases(args: argparse.Namespace) -> list[Case]:
    """The runs of a study; those of one seed follow each other, so that they are done in turns."""
    return [
        Case(bound, correction, args.dispatch, seed)
        for seed in args.seeds
        for bound in args.bounds
        for correction in (args.corrections if bound else ["none"])
    ]


def model_of(folder: Path, seed: int) -> Path:
    """The fine-tuned model of a seed, which is made if it is not there."""
    if not (folder / "data" / "train.jsonl").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / "make_addition.py"), str(folder / "data")],
            check=True,
        )
    run = folder / f"sft-seed{seed}"
    if not list((run / "checkpoints").glob("step_*")):
        options = {
            "folder": run,
            "seed": seed,
            "model.path": folder / "data" / "model",
            "demonstrations.source": folder / "data" / "sft.jsonl",
            "resume": "auto",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        megarl("sft", str(RECIPES / "quickstart_sft.yaml"), *words)
    return max((run / "checkpoints").glob("step_*")) / "model"


def settings_of(case: Case) -> dict[str, object]:
    """{setting: value} by which the runs of a study differ."""
    return {
        "rollout.max_staleness": case.bound,
        "rollout.dispatch": case.dispatch,
        "algorithm.correction.kind": case.correction,
        # Refused where rollouts are never old, or are corrected.
        "algorithm.correction.allow_uncorrected": case.bound > 0 and case.correction == "none",
    }


def run(case: Case, folder: Path, steps: int) -> Result:
    """Do one run of the study."""
    place = folder / case.name
    shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
    options = {
        "folder": place,
        "seed": case.seed,
        "steps": steps,
        "model.path": model_of(folder, case.seed),
        "prompts.source": folder / "data" / "train.jsonl",
        "evaluation.prompts.source": folder / "data" / "held_out.jsonl",
        **settings_of(case),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    megarl("train", str(RECIPES / "quickstart.yaml"), *words)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    lines = (place / "evaluations.jsonl").read_text().splitlines()
    return Result(
        case,
        [row["time/step_s"] for row in rows],
        [row["tokens/trained"] for row in rows],
        [row["accuracy"] for row in rows],
        statistics.mean(row.get("staleness/mean", 0.0) for row in rows),
        [one["eval/accuracy"] for one in map(json.loads, lines) if "eval/accuracy" in one][-1],
    )


def table(found: Sequence[Result]) -> Iterator[str]:
    """Lines of the table: mean and standard deviation over seeds."""
    fastest = {
        seed: min(sum(one.step_s) for one in found if one.case.seed == seed)
        for seed in {one.case.seed for one in found}
    }
    base = {one.case.seed: one.tokens_per_s for one in found if one.case.bound == 0}
    yield (
        f"{'dispatch':9} {'bound':>5} {'correction':15} {'runs':>4}  {'throughput':13} {'age':13}"
        f" {'greedy':13} {'equal steps':13} {'equal time':13}"
    )
    kinds = dict.fromkeys((one.case.dispatch, one.case.bound, one.case.correction) for one in found)
    for dispatch, bound, correction in kinds:
        same = [
            one
            for one in found
            if (one.case.dispatch, one.case.bound, one.case.correction)
            == (dispatch, bound, correction)
        ]
        ratios = [one.tokens_per_s / base[one.case.seed] for one in same if one.case.seed in base]
        columns = [
            ratios,
            [one.age for one in same],
            [one.greedy for one in same],
            [one.at_equal_steps for one in same],
            [one.at_equal_time(fastest[one.case.seed]) for one in same],
        ]
        yield (
            f"{dispatch:9} {bound:5} {correction:15} {len(same):4}  "
            + " ".join(f"{mean_and_deviation(one):13}" for one in columns)
        )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the study")
    parser.add_argument("--bounds", default="0,1,2,4,8", help="rollout.max_staleness")
    parser.add_argument("--corrections", default="none,tis,decoupled", help=", ".join(CORRECTIONS))
    parser.add_argument("--dispatch", default="ordered", choices=["ordered", "windowed"])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--show", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)
    try:
        args.bounds, args.seeds = (
            [int(word) for word in text.split(",")] for text in (args.bounds, args.seeds)
        )
    except ValueError:
        parser.error("--bounds and --seeds are numbers such as 0,1,2")
    args.corrections = args.corrections.split(",")
    if unknown := set(args.corrections) - set(CORRECTIONS):
        parser.error(f"--corrections has {', '.join(sorted(unknown))}; choose of {CORRECTIONS}")
    if args.steps <= SKIPPED:
        parser.error(f"--steps is {args.steps}; set it to {SKIPPED + 1} or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs that are missing, and print the table. Returns the exit code."""
    args = arguments(argv)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if args.show else cases(args)
    done = [one.case for one in results(folder, Case, Result)]
    try:
        run_missing(folder, wanted, done, lambda case: run(case, folder, args.steps))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"study_staleness: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(results(folder, Case, Result))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
