"""What each `training.precision` learns of a published model: SmolLM2-135M-Instruct on sums and
differences that are asked in words.

    python tools/study_precision.py FOLDER                              three seeds
    python tools/study_precision.py FOLDER --show                       the table of what is there

Supervised fine-tuning takes 16 rows a step at a learning rate of 1e-5. A run's result is a line of
FOLDER/results.jsonl, and a run that is there is not repeated.

    learnt    loss of the first step less that of the last, which is of the weights after all steps
              but the last
    ratio     the same over that of float32 with the same seed
    changed   share of the weights that differ from the published ones after the last step
    s a step  mean over the steps but the first
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import make_arithmetic
import real_model
from common import Args, Lines, run_tool, spread, table, weights_of
from processes import lines_of, megarl
from studies import grouped, newest_model, run_missing

PRECISIONS = ("float32", "bfloat16", "float16", "bfloat16x2")
RECIPE = """\
task: sft
model: {path: ""}
demonstrations: {source: "", template: chat, max_tokens: 128}
samples_per_step: 16
training: {micro_batch_tokens: 2048, optimizer: {learning_rate: 1.0e-5}}
"""
OPTIONS = {
    "folder": (Path, "folder of the study"),
    "--precisions": (list(PRECISIONS), "training.precision", PRECISIONS),
    "--seeds": ([1, 2, 3], "seeds"),
    "--steps": (9, "steps of a run"),
    "--model": (real_model.default_folder("smollm2"), "its folder, made where it is missing"),
    "--show": (False, "run nothing, print the table"),
}


def cases(args: Args) -> list[dict[str, Any]]:
    """The runs of a study; those of one seed follow each other."""
    return [
        {"precision": precision, "seed": seed, "steps": args.steps}
        for seed in args.seeds
        for precision in args.precisions
    ]


def settings_of(case: dict[str, Any], folder: Path, model: Path) -> dict[str, object]:
    """{setting: value} of a run, on top of its recipe."""
    return {
        "seed": case["seed"],
        "steps": case["steps"],
        "model.path": model,
        "demonstrations.source": folder / "sft.jsonl",
        "training.precision": case["precision"],
        "training.zero_stage": int(case["precision"] in ("bfloat16", "float16")),
    }


def run(case: dict[str, Any], folder: Path, model: Path) -> dict[str, Any]:
    """Do one run of the study."""
    place = folder / "sft-{precision}-seed{seed}-{steps}steps".format(**case)
    shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
    rows, _ = megarl(RECIPE, place, settings_of(case, folder, model))
    old, new = weights_of(model), weights_of(newest_model(place))
    shutil.rmtree(place / "checkpoints")
    differ = sum(int((new[name].float() != old[name].float()).sum()) for name in new)
    return {
        "learnt": rows[0]["loss"] - rows[-1]["loss"],
        "changed": differ / sum(part.numel() for part in new.values()),
        "step_s": statistics.mean(row["time/step_s"] for row in rows[1:]),
    }


def measure(args: Args) -> dict[str, Any]:
    """Do the runs that are missing. Makes the model and the problems where these are missing, and
    the problems as demonstrations.
    """
    folder, model = args.folder.resolve(), args.model.resolve()
    if args.show:
        return {"results": run_missing(folder, [], partial(run, folder=folder, model=model))}
    real_model.make("smollm2", model)
    make_arithmetic.main([str(folder / "data")])
    rows = lines_of(folder / "data" / "train.jsonl")
    pairs = ({"prompt": row["prompt"], "response": row["answer"]} for row in rows)
    (folder / "sft.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {"results": run_missing(folder, cases(args), partial(run, folder=folder, model=model))}


def show(result: dict[str, Any]) -> Lines:
    """Format the result as the lines of a table: mean and standard deviation over seeds."""
    found, rows = result["results"], []
    alone = {
        (one["steps"], one["seed"]): one["learnt"] for one in found if one["precision"] == "float32"
    }
    for row, same in grouped(found, ("steps", "precision")):
        for name in ("learnt", "changed", "step_s"):
            row[name] = spread([one[name] for one in same])
        pairs = [(one["learnt"], alone.get((one["steps"], one["seed"]))) for one in same]
        if known := [learnt / base for learnt, base in pairs if base]:
            row["ratio"] = spread(known)
        rows.append(row | {"runs": len(same)})
    columns = "steps d; precision; runs d; learnt .3f; ratio .3f; changed .3f; s a step=step_s .3f"
    yield from table(rows, columns, middle="mean")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
