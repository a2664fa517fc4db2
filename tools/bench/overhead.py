"""What megarl's loop costs over its parts: a step of `task: rl` against generation alone and
training alone, with the same model, prompts, tokens, samples and threads, on two CPU cores.

    python tools/bench/overhead.py [--json] [--rounds 3] [--steps 4] [--limits 64,480]
                                   [--groups 32,8] [--kinds synchronous,overlapped]

    synchronous  rollout.max_staleness 0; engine and trainer have two threads each and take turns.
                 Compared with the sum of the parts, each with two threads.
    overlapped   rollout.max_staleness 1; engine and trainer have a thread each and run at the same
                 time. Compared with the longer of the parts, each with one thread.

A step is `--groups` prompts x 8 samples of exactly `limit` new tokens at temperature 1: the model
is that of tools/bench/e2e.py, changed so that it never ends a response. Rewards, advantages, one
AdamW step in float32, the publication of the weights and its checks follow. Metrics, TensorBoard,
transcripts and activity are recorded as by default, and each batch besides. The clock runs from the
begin of a step to the begin of the next one.

The parts, each in a process of its own, on the batches that the run has recorded:

    generation   vllm.LLM.generate on a step's prompts, with the engine options, environment and
                 sampling of megarl: a seed for each request, log-probs of the sampled tokens
    training     a loop over the same micro-batches: forward, loss, backward and optimizer step of
                 megarl's role, and nothing else. Losses and gradient norms must be the run's.

The first two steps of each are not counted. In every round a run and its parts follow each other;
rounds alternate in the order of kinds and of parts. Ratios are of means over a round's steps.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from against_trl import run_megarl
from common import Args, run_tool, spread, table
from e2e import RECIPE, settings_of
from e2e_task import EOS, MAX_PROMPT_TOKENS, MODEL, PAD, SAMPLES, VOCABULARY, Setting, write_task
from processes import child_environment, run

SKIPPED = 2
"""Steps at the start of a run, and calls at the start of a part, that are not timed."""
BAR = 1.10
"""Largest ratio of a step to its parts that is aimed at."""
EOS_ID = [PAD, EOS].index(EOS)
ALWAYS, EOS_WEIGHT = 1.0, -10.0
"""Value of the first hidden dimension before the last norm, and the weight by which the
end-of-sequence token's logit takes it."""
PHASES = ("time/wait_s", "time/train_s", "time/publish_s", "time/rollout_s", "time/step_s")
"""Metrics of a step that are shown."""
AGREE = 1e-3
"""By how much losses and gradient norms of run and bare loop may differ, relative to the larger."""


KINDS = {"synchronous": 2, "overlapped": 1}
"""{kind of run: threads of the engine, and of the trainer}"""
OPTIONS = {
    "--rounds": (3, "runs of each kind at each limit"),
    "--steps": (4, "timed steps of a run"),
    "--kinds": (list(KINDS), "of runs", tuple(KINDS)),
    "--limits": ([64, 480], "new tokens of a sample"),
    "--groups": ([32, 8], "prompts of a step, one number for each limit"),
}


def write_endless_task(folder: Path, vocabulary: int = VOCABULARY) -> int:
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


# --------------------------------------------------------------------------------------- arithmetic


def compared(
    step_s: Sequence[float], parts: Mapping[str, Sequence[float]], staleness: int
) -> dict[str, float]:
    """One round: means over its steps, and the ratio to a step that costs no more than its parts:
    their sum where they take turns, the longer one where they overlap.
    """
    mean = {name: statistics.fmean(found) for name, found in parts.items()}
    step, least = statistics.fmean(step_s), (max if staleness else sum)(mean.values())
    found = {"step_s": step, **{f"{name}_s": value for name, value in mean.items()}}
    return found | {"bound_s": least, "overhead_s": step - least, "ratio": step / least}


def causes(row: Mapping[str, float], phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step beyond its parts, by where a synchronous run spends them; they add up to
    `overhead_s`. `row`: of `compared`. `phases`: the run's metrics.
    """
    wait, train, publish = (phases[f"time/{name}_s"] for name in ("wait", "train", "publish"))
    return {
        "rollouts beyond generation": wait - row["generation_s"],
        "training beyond the bare loop": train - row["training_s"],
        "publication": publish,
        "recording the batch, release": phases["time/step_s"] - wait - train - publish,
        "metrics, between steps": row["step_s"] - phases["time/step_s"],
    }


def refuse_other_training(made: list[list[float]], records: list[dict[str, Any]]) -> None:
    """Raise `RuntimeError` unless the (loss, gradient norm) of each step that the bare loop `made`
    are those of the run's metrics.
    """
    for record, found in zip(records, made, strict=False):  # one step more was run
        for name, own in zip(("loss", "grad_norm"), found, strict=True):
            if abs(record[name] - own) > AGREE * max(abs(record[name]), abs(own), 1e-3):
                where = f"{name} of step {record['step']} is {own}, and {record[name]} in the run"
                raise RuntimeError(f"the bare loop trains otherwise: {where}")


# -------------------------------------------------------------------------------------- measurement


def run_loop(args: Args, kind: str, limit: int, groups: int) -> dict[str, Any]:
    """Run megarl in `args.work`/run, with `groups` prompts a step and `limit` new tokens a sample.
    `kind`: of `KINDS`. Returns {"step_s": seconds of each counted step, "phases": the means of its
    phases' metrics, "records": the metrics of every step}. One more step follows the counted ones,
    since a step ends where the next one begins.
    """
    from megarl.system.spans import FOLDER
    from megarl.system.trace_files import read_traces

    work, setting = args.work, Setting(1, KINDS[kind], 1, KINDS[kind])
    sizes = {"steps": SKIPPED + args.steps + 1, "limit": limit, "groups": groups}
    settings = settings_of(work / "task", setting, staleness=int(kind == "overlapped"), **sizes)
    recipe = RECIPE.partition("observe:")[0] + "observe: {batches: true}"
    records, _ = run_megarl(recipe, work, setting, args.deadline, settings)
    tokens = groups * SAMPLES * limit
    for record in records:
        if (record["tokens/generated"], record["tokens/trained"]) != (tokens, tokens):
            raise RuntimeError(f"a step did not train on {tokens} tokens: {record}")
    traces = read_traces(work / "run" / FOLDER)
    (rank,) = (trace for trace in traces if trace.name == "rank0")
    begins = [step["ts"] / 1e6 for step in rank.steps]
    if len(begins) != sizes["steps"]:
        raise RuntimeError(f"the run has recorded the begin of {len(begins)} steps")
    counted = records[SKIPPED : SKIPPED + args.steps]
    names = sorted({name for one in counted for name in one if name.startswith("publish/")})
    return {
        "step_s": [end - begin for begin, end in itertools.pairwise(begins[SKIPPED:])],
        "phases": {n: statistics.fmean(one[n] for one in counted) for n in (*PHASES, *names)},
        "records": records,
    }


def run_part(args: Args, kind: str, records: Any, name: str) -> list[float]:
    """Seconds of each counted call of a part, which runs in a process of its own. Raises
    `RuntimeError` where it did not train as the run did.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=args.work) as aside:
        task = {
            "part": name,
            "run": str(args.work / "run"),
            "folder": f"{aside}/run",
            "stops": [EOS_ID],
            "skipped": SKIPPED,
            "steps": args.steps,
        }
        path = Path(aside) / "task.json"
        path.write_text(json.dumps(task))
        script = str(Path(__file__).with_name("overhead_part.py"))
        environment = child_environment(args.work, KINDS[kind])
        run([sys.executable, script, str(path)], path.parent / "log", args.deadline, environment)
        found = json.loads(path.with_suffix(".answer").read_text())
    refuse_other_training(found.get("losses_and_norms", []), records)
    return found["seconds"]


def one_round(
    args: Args, kind: str, limit: int, groups: int, *, is_reversed: bool
) -> dict[str, Any]:
    """A run and its parts: what `compared` returns, with the run's `phases` and, of a synchronous
    run, the `causes` of its overhead.
    """
    made, names = run_loop(args, kind, limit, groups), ("generation", "training")
    order = reversed(names) if is_reversed else names
    parts = {name: run_part(args, kind, made["records"], name) for name in order}
    overlaps = kind == "overlapped"
    found: dict[str, Any] = compared(made["step_s"], parts, overlaps)
    found["causes"] = {} if overlaps else causes(found, made["phases"])
    return found | {"phases": made["phases"]}


def measure(args: Args) -> dict[str, Any]:
    """All kinds at all limits, in turns."""
    if len(args.groups) != len(args.limits):
        raise ValueError("--groups needs one number for each of --limits")
    if max(args.limits) > MODEL["max_position_embeddings"] - MAX_PROMPT_TOKENS:
        raise ValueError(f"--limits has {max(args.limits)}, more than the model's positions")
    sizes = zip(args.limits, args.groups, strict=True)
    rows: list[dict[str, Any]] = [
        {"kind": kind, "limit": limit, "groups": groups, "samples": groups * SAMPLES, "rounds": []}
        for (limit, groups), kind in itertools.product(sizes, args.kinds)
    ]
    parameters = write_endless_task(args.work / "task")
    for number in range(args.rounds):
        is_reversed = number % 2 == 1
        for row in reversed(rows) if is_reversed else rows:
            case = row["kind"], row["limit"], row["groups"]
            row["rounds"].append(one_round(args, *case, is_reversed=is_reversed))
    return {"parameters": parameters, "rows": rows}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Format what `measure` returns as lines of text: a table for each kind of load."""
    titles = {
        "step_s": "step",
        "generation_s": "generation alone",
        "training_s": "training alone",
        "bound_s": "the longer part, or the sum of the parts",
        "overhead_s": "overhead",
        "ratio": f"ratio (bar {BAR:.2f})",
    }
    for row in result["rows"]:
        rounds = row["rounds"]
        yield f"{row['kind']}, {row['samples']} samples x {row['limit']} new tokens"
        lines = {title: [one[key] for one in rounds] for key, title in titles.items()}
        for group in ("causes", "phases"):
            lines |= {name: [one[group][name] for one in rounds] for name in rounds[0][group]}
        yield from table(({"what": k, "s": spread(v)} for k, v in lines.items()), "what; s ,.3f")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
