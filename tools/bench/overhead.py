"""What megarl's loop costs over its parts: a step of `megarl train` against generation alone and
training alone, with the same model, prompts, tokens, samples and threads, on two CPU cores.

    python tools/bench/overhead.py [--json] [--rounds 3] [--steps 4] [--limits 64,480]
                                   [--groups 32,8] [--kinds synchronous,overlapped]

    synchronous  rollout.max_staleness 0; engine and trainer have two threads each and take turns.
                 Compared with the sum of the parts, each with two threads.
    one_thread   the same with one thread each; not by default
    overlapped   rollout.max_staleness 1; the engine has one thread on the first core, the trainer
                 one on the second. Compared with the longer of the parts, each on its core.

A step is `--groups` prompts x 8 samples of exactly `limit` new tokens at temperature 1: the model
is that of tools/bench/e2e.py, changed so that it never ends a response. Rewards, advantages, one
AdamW step in float32, the publication of the weights and its checks follow. Metrics, TensorBoard,
transcripts and activity are recorded as by default, and each batch besides. The clock runs from the
begin of a step to the begin of the next one.

The parts, each in a process of its own, on the batches that the run has recorded:

    generation   vllm.LLM.generate on a step's prompts, with the engine options, environment and
                 sampling of megarl: a seed for each request, log-probs of the sampled tokens
    plain        the same without seeds and log-probs
    training     a loop over the same micro-batches: forward, loss, backward and optimizer step of
                 megarl's role, and nothing else. Losses and gradient norms must be the run's.
    side by side generation and training at the same time, each on its core (`overlapped` only):
                 what two busy cores cost each other on this machine, without megarl

The first two steps of each are not counted. In every round a run and its parts follow each other;
rounds alternate in the order of kinds and of parts. Ratios are of means over a round's steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import command_line, numbers, require_positive, run_tool, warn_if_not_quiet
from e2e_task import MAX_PROMPT_TOKENS, MODEL, SAMPLES
from overhead_run import Bench, Kind, write_endless_task

SKIPPED = 2
"""Steps at the start of a run, and calls at the start of a part, that are not timed."""
BAR = 1.10
"""Largest ratio of a step to its parts that is aimed at."""
NAMES, BY_DEFAULT = ("synchronous", "one_thread", "overlapped"), "synchronous,overlapped"
VOCABULARY = 512
OPTIONS: dict[str, dict[str, Any]] = {
    "--rounds": {"type": int, "default": 3, "help": "runs of each kind at each limit"},
    "--steps": {"type": int, "default": 4, "help": "timed steps of a run"},
    "--kinds": {"default": BY_DEFAULT, "help": f"of {', '.join(NAMES)}"},
    "--limits": {"default": "64,480", "help": "new tokens of a sample, separated by commas"},
    "--groups": {"default": "32,8", "help": "prompts of a step, one number for each limit"},
    "--deadline": {"type": float, "default": 1200.0, "help": "seconds a single run may take"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds", "steps"])
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(NAMES):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; choose of {', '.join(NAMES)}")
    for name in ("limits", "groups"):
        try:
            setattr(args, name, numbers(getattr(args, name)))
        except ValueError:
            parser.error(f"--{name} is {getattr(args, name)!r}; set it to whole numbers")
    if len(args.groups) != len(args.limits):
        parser.error("--groups needs one number for each of --limits")
    most = MODEL["max_position_embeddings"] - MAX_PROMPT_TOKENS
    if max(args.limits) > most:
        parser.error(f"--limits must lie between 1 and {most}")
    return args


def kinds() -> dict[str, Kind]:
    """The kinds of runs on the cores of this machine. Raises `ValueError` if there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError("this process may use one core only, and two are needed")
    return {
        "synchronous": Kind(staleness=0, threads=2),
        "one_thread": Kind(staleness=0, threads=1),
        "overlapped": Kind(1, 1, engine_cores=(cores[0],), trainer_cores=(cores[1],)),
    }


# --------------------------------------------------------------------------------------- arithmetic


def bound(parts: Mapping[str, float], staleness: int, generation: str = "generation") -> float:
    """Seconds of a step that costs no more than its parts: their sum where they take turns, the
    longer one where they overlap. `generation`: which measurement of generation counts.
    """
    both = (parts[generation], parts["training"])
    return max(both) if staleness else sum(both)


def compared(
    step_s: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    beside: Mapping[str, Sequence[float]],
    staleness: int,
) -> dict[str, float]:
    """One round: means over its steps, and ratios of these. `beside`: seconds of the parts side by
    side, empty where that was not measured.
    """
    mean = {name: statistics.fmean(found) for name, found in parts.items()}
    step, least = statistics.fmean(step_s), bound(mean, staleness)
    found = {"step_s": step, **{f"{name}_s": value for name, value in mean.items()}}
    found |= {"bound_s": least, "overhead_s": step - least, "ratio": step / least}
    found["ratio_to_plain"] = step / bound(mean, staleness, "plain")
    if beside:
        longer = max(statistics.fmean(one) for one in beside.values())
        found |= {"side_by_side_s": longer, "ratio_to_side_by_side": step / longer}
    return found


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


# -------------------------------------------------------------------------------------- measurement


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All kinds at all limits, in turns."""
    known = kinds()
    work = Path(tempfile.mkdtemp(prefix="over-"))
    try:
        (work / "task").mkdir()
        parameters = write_endless_task(work / "task", VOCABULARY)
        bench = Bench(work, skipped=SKIPPED, steps=args.steps, deadline_s=args.deadline)
        cases = [
            (name, limit, groups)
            for limit, groups in zip(args.limits, args.groups, strict=True)
            for name in args.kinds
        ]
        rows: dict[tuple[str, int], list[dict[str, Any]]] = {case[:2]: [] for case in cases}
        for number in range(args.rounds):
            for name, limit, groups in cases if number % 2 == 0 else reversed(cases):
                found = one_round(bench, known[name], limit, groups, is_reversed=number % 2 == 1)
                rows[name, limit].append(found)
                print(f"round {number + 1} {name} {limit}: {found}", file=sys.stderr, flush=True)
        return {
            "parameters": parameters,
            "rows": [
                {"kind": name, "limit": limit, "samples": groups * SAMPLES, "rounds": found}
                for (name, limit, groups), found in zip(cases, rows.values(), strict=True)
            ],
            "others": bench.others,
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def one_round(
    bench: Bench, kind: Kind, limit: int, groups: int, *, is_reversed: bool
) -> dict[str, Any]:
    """A run and its parts: what `compared` returns, with the run's `phases` and, of a synchronous
    run, the `causes` of its overhead.
    """
    folder, run = bench.run(kind, limit, groups)
    parts = bench.parts(kind, folder, is_reversed=is_reversed)
    beside = bench.side_by_side(kind, folder) if kind.staleness else {}
    shutil.rmtree(folder.parent)
    found: dict[str, Any] = compared(run["step_s"], parts, beside, kind.staleness)
    found["causes"] = {} if kind.staleness else causes(found, run["phases"])
    return found | {"phases": run["phases"]}


# -------------------------------------------------------------------------------------------- table


def over_rounds(rounds: Sequence[Mapping[str, float]], name: str, form: str = ".3f") -> str:
    """Mean over the rounds, with the smallest and the largest."""
    values = [one[name] for one in rounds]
    mean, least, most = statistics.fmean(values), min(values), max(values)
    return f"{mean:{form}} ({least:{form}} to {most:{form}})"


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of the table."""
    here, task = result["machine"], result["task"]
    yield f"{here['cpu']}, {here['cores']} cores; {result['parameters']:,} parameters"
    yield (
        f"{task['rounds']} rounds of {task['steps']} steps; mean over rounds (smallest to largest)"
    )
    for row in result["rows"]:
        rounds, is_overlapped = row["rounds"], row["kind"] == "overlapped"
        yield ""
        yield f"{row['kind']}, {row['samples']} samples x {row['limit']} new tokens"
        lines = {
            "step": ("step_s", " s"),
            "generation alone": ("generation_s", " s"),
            "training alone": ("training_s", " s"),
            "the longer part" if is_overlapped else "sum of the parts": ("bound_s", " s"),
            "overhead": ("overhead_s", " s"),
            f"ratio (bar {BAR:.2f})": ("ratio", ""),
            "generation, plain": ("plain_s", " s"),
            "ratio to plain": ("ratio_to_plain", ""),
        }
        if is_overlapped:
            lines["longer, side by side"] = ("side_by_side_s", " s")
            lines["ratio to that"] = ("ratio_to_side_by_side", "")
        for title, (name, unit) in lines.items():
            yield f"  {title:32} {over_rounds(rounds, name)}{unit}"
        for group in ("causes", "phases"):
            for name in rounds[0][group]:
                found = over_rounds([one[group] for one in rounds], name, ",.3f")
                yield f"    {name:30} {found}"
    yield from warn_if_not_quiet(result["others"])


if __name__ == "__main__":
    sys.exit(run_tool("overhead", arguments=arguments, measure=measure, show=show))
