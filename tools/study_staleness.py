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

import itertools
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import make_addition
from common import Args, Lines, run_tool, spread, table
from processes import lines_of, megarl
from studies import RECIPES, grouped, last_quarter, newest_model, run_missing

CORRECTIONS = ("none", "tis", "icepop", "decoupled", "sequence_mask", "geometric_mask")
SKIPPED = 3
"""Steps at the start of a run that are not timed."""
OPTIONS = {
    "folder": (Path, "folder of the study"),
    "--bounds": ([0, 1, 2, 4, 8], "rollout.max_staleness"),
    "--corrections": (["none", "tis", "decoupled"], "of bounds above 0", CORRECTIONS),
    "--seeds": ([1, 2, 3], "seeds"),
    "--steps": (40, "steps of a run"),
    "--show": (False, "run nothing, print the table"),
}


def tokens_per_s(one: dict[str, Any]) -> float:
    """Tokens trained in a second, without the first steps."""
    return sum(one["tokens"][SKIPPED:]) / sum(one["step_s"][SKIPPED:])


def at_equal_time(one: dict[str, Any], seconds: float) -> float:
    """Mean accuracy of the steps that ended in the last quarter of the first `seconds`; of the last
    step before that if none did.
    """
    ended = list(zip(itertools.accumulate(one["step_s"]), one["accuracy"], strict=True))
    before = [pair for pair in ended if pair[0] <= seconds + 1e-6] or ended[:1]
    found = [accuracy for at, accuracy in before if at > 0.75 * seconds]
    return statistics.mean(found or [before[-1][1]])


def cases(args: Args) -> list[dict[str, Any]]:
    """The runs of a study; those of one seed follow each other, so that they are done in turns."""
    return [
        {"bound": bound, "correction": correction, "dispatch": "ordered", "seed": seed}
        for seed in args.seeds
        for bound in args.bounds
        for correction in (args.corrections if bound else ["none"])
    ]


def settings_of(case: dict[str, Any]) -> dict[str, object]:
    """{setting: value} by which the runs of a study differ."""
    return {
        "rollout.max_staleness": case["bound"],
        "algorithm.correction.kind": case["correction"],
        # Refused where rollouts are never old, or are corrected.
        "algorithm.correction.allow_uncorrected": case["bound"] > 0
        and case["correction"] == "none",
    }


def run(case: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """Do one run of the study, from the fine-tuned model of its seed, which is made if it is not
    there.
    """
    data, tuned = folder / "data", folder / f"sft-seed{case['seed']}"
    make_addition.main([str(data)])
    if not list((tuned / "checkpoints").glob("step_*")):
        options = {"seed": case["seed"], "model.path": data / "model", "resume": "auto"}
        options["demonstrations.source"] = data / "sft.jsonl"
        megarl(RECIPES / "quickstart_sft.yaml", tuned, options)
    place = folder / "{bound}-{correction}-seed{seed}".format(**case)
    shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
    options = {
        "seed": case["seed"],
        "steps": steps,
        "model.path": newest_model(tuned),
        "prompts.source": data / "train.jsonl",
        "evaluation.prompts.source": data / "held_out.jsonl",
        **settings_of(case),
    }
    rows, _ = megarl(RECIPES / "quickstart.yaml", place, options)
    evaluated = lines_of(place / "evaluations.jsonl")
    return {
        "step_s": [row["time/step_s"] for row in rows],
        "tokens": [row["tokens/trained"] for row in rows],
        "accuracy": [row["accuracy"] for row in rows],
        "age": statistics.mean(row.get("staleness/mean", 0.0) for row in rows),
        "greedy": [one["eval/accuracy"] for one in evaluated if "eval/accuracy" in one][-1],
    }


def measure(args: Args) -> dict[str, Any]:
    """Do the runs that are missing."""
    if args.steps <= SKIPPED:
        raise ValueError(f"--steps is {args.steps}; set it to {SKIPPED + 1} or more")
    folder = args.folder.resolve()
    wanted = [] if args.show else cases(args)
    return {"results": run_missing(folder, wanted, partial(run, folder=folder, steps=args.steps))}


def show(result: dict[str, Any]) -> Lines:
    """Format the result as the lines of a table: mean and standard deviation over seeds."""
    found = result["results"]
    fastest = {
        row["seed"]: min(sum(one["step_s"]) for one in same)
        for row, same in grouped(found, ["seed"])
    }
    base = {one["seed"]: tokens_per_s(one) for one in found if one["bound"] == 0}
    rows = []
    for row, same in grouped(found, ("bound", "correction")):
        columns = {
            "throughput": [tokens_per_s(o) / base[o["seed"]] for o in same if o["seed"] in base],
            "age": [one["age"] for one in same],
            "greedy": [one["greedy"] for one in same],
            "equal_steps": [last_quarter(one["accuracy"]) for one in same],
            "equal_time": [at_equal_time(one, fastest[one["seed"]]) for one in same],
        }
        row |= {name: spread(values) for name, values in columns.items() if values}
        rows.append(row | {"runs": len(same)})
    columns = "bound d; correction; runs d; throughput .3f; age .3f; greedy .3f"
    columns += "; equal steps=equal_steps .3f; equal time=equal_time .3f"
    yield from table(rows, columns, middle="mean")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
