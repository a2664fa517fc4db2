"""`megarl sample`: responses of a model to its prompts, scored and written as a data set: for
supervised fine-tuning (the best of n), for preference training (the best and the worst), or all.

    prompts x n --engines--> records --environment, reward models--> rewards --keep--> data.jsonl

The folder FOLDER/sample/NUMBER/ holds `data.jsonl`, which `task: sft` or `task: preference`
reads, `provenance.json`, which says how the data were made, and `records.jsonl`: every response
with the environment's reward, written as it comes, so that an interrupted run leaves what it has.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import megarl
from megarl.apps.tune.pairs import sums_of_responses
from megarl.data.chat_template import end_of_turn
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokens import scored_tokens
from megarl.errors import UserError
from megarl.observe.sinks import finite
from megarl.parallel import mesh as mesh_module
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.rollout.client import RolloutClient
from megarl.run.evaluate import add_rows, answering, generate, make_folder
from megarl.settings.config import RunConfig, silence_s
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.system import console
from megarl.system.files import new_file
from megarl.trainer.context import RunInputs
from megarl.trainer.role import Role
from megarl.types import Samples

Record = dict[str, Any]
"""One scored response, a dict with `prompt`, `response`, `answer` (the reference answer), `reward`,
`correct`, `tokens`, `finish` ("stop", or how it was cut off) and more."""
AT_ONCE = 256
"""Number of prompts whose responses are asked for together."""
PACKED = 1024
"""Number of texts that a reward model is given together."""


def main(config: RunConfig, inputs: RunInputs) -> int:
    """Run `megarl sample`: sample responses, score them, and write those that `config.sample.keep`
    selects as a data set, `data.jsonl` (one JSON object a line), into a new numbered folder below
    `config.folder`/sample; prints a summary as one JSON object. Starts and ends the inference
    engines. `inputs`: prompts, tokenizer and so on, as `check_sample` returns them. Returns the
    exit code 0.
    """
    folder = make_folder(Path(config.folder) / "sample")
    console.open_log(folder)
    with (folder / "records.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as to:
        groups = sample_groups(config, inputs, to)
    if config.reward_models:
        with console.phase("scores of the reward models"):
            add_scores(config, groups)
    least = -math.inf if config.sample.min_reward is None else config.sample.min_reward
    rows = [row for group in groups for row in KEEP[config.sample.keep](group, least)]
    if not rows:
        console.say("megarl: warning: no response is to be kept; data.jsonl is empty")
    data = folder / "data.jsonl"
    write(data, "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows))
    summary = sample_summary(config, groups, rows)
    provenance = {
        "megarl": megarl.__version__,
        **summary,
        "recipe": config.model_dump(),
        "prompts": inputs.data,
        "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
    }
    write(folder / "provenance.json", json.dumps(provenance, indent=1) + "\n")
    console.say(f"{len(rows)} rows of {len(groups)} prompts are in {data}")
    console.result(json.dumps({"data": str(data), **summary}))
    return 0


def sample_groups(config: RunConfig, inputs: RunInputs, to: IO[str]) -> list[list[Record]]:
    """Generate `config.sample.samples` responses to each prompt of `inputs`, scored by the
    environment, and return them as [prompt][sample], each a dict with `prompt`, `response` (text),
    `reward`, `correct`, `finish` ("stop", or how it was cut off) and so on. Each is also written to
    the open file `to`, as a line of JSON, as it comes. Starts and ends the inference engines.
    """
    count = config.sample.samples
    assert inputs.prompts is not None
    prompts = list(inputs.prompts)
    names = [f"sample/{number}" for number in range(count)]
    groups: list[list[Record]] = []
    with answering(config, inputs, prompts[0]):
        for first in range(0, len(prompts), AT_ONCE):
            asked = prompts[first : first + AT_ONCE]
            client = RolloutClient(0, silence_s=silence_s(config))
            records = list(generate(client, asked, config.rollout.temperature, names))
            add_rows(to, {}, "sampled", records)
            groups += [
                [record for record in records[number :: len(asked)] if not record.get("left_out")]
                for number in range(len(asked))
            ]
            console.say(f"{len(groups):,} of {len(prompts):,} prompts")
    return groups


def add_scores(config: RunConfig, groups: Sequence[Sequence[Record]]) -> None:
    """Add weight x score of each model in `config.reward_models` to the `reward` of every response,
    in place; each score is kept as record["scores"][name of the model]. `groups`: [prompt][sample],
    dicts with `prompt`, `response`, `finish` and `reward`. Loads each model in this process. Raises
    `UserError` for a score that is not finite.
    """
    records = [record for group in groups for record in group]
    template, name = config.prompts.template, config.model.tokenizer or config.model.path
    tokenizer = load_tokenizer(name, trust_remote_code=config.model.trust_remote_code)
    # Tokenised apart, as `task: reward_model` does it with its data; a cut response has no end.
    texts = scored_tokens(
        tokenizer,
        [record["prompt"] for record in records],
        [record["response"] for record in records],
        template,
        end_of_turn(tokenizer, template, is_last=True),
    )
    for ids, record in zip(texts, records, strict=True):
        del ids[len(ids) - (record["finish"] != "stop") :]
    same = {"zero_stage", "precision", "micro_batch_tokens", "collective_timeout_s"}
    training = TrainingConfig(**config.training.model_dump(include=same))
    for name, model in config.reward_models.items():
        scores = token_scores(model.model, training, texts, seed=config.seed)
        if not all(map(math.isfinite, scores)):
            raise UserError(
                f"the reward model {model.model.path} scores a response with a number that is not"
                " finite; set another model"
            )
        for record, score in zip(records, scores, strict=True):
            record["reward"] += model.weight * score
            record.setdefault("scores", {})[name] = score


def token_scores(
    model: ModelConfig, training: TrainingConfig, texts: Sequence[list[int]], *, seed: int = 0
) -> list[float]:
    """The score of each text, given as token ids of prompt and response, in their order (higher is
    better; may be NaN or infinite). Loads the reward model, scores and releases it. Of `training`,
    the precision, `micro_batch_tokens`, ZeRO stage and time limits are used. `seed`: for weights
    that are random.
    """
    device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
    with ExitStack() as stack:
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(ProcessMesh(Layout(1, 1, 1)))
        role = Role(
            "reward model",
            model=model,
            training=training,
            mesh=mesh,
            device=device,
            seed=seed,
            head="scalar",
        )
        stack.callback(role.destroy)
        scores: list[float] = []
        for first in range(0, len(texts), PACKED):
            # The score is at the last token alone, so that texts share all before where they agree.
            samples = [
                Samples.one(number, ids, mask=[False] * (len(ids) - 1) + [True])
                for number, ids in enumerate(texts[first : first + PACKED])
            ]
            scores += sums_of_responses(role, Samples.concatenate(samples)).tolist()
    return scores


def good(group: Sequence[Record], least: float) -> list[Record]:
    """The responses to one prompt that are worth imitating, best first: not blank, not cut off,
    with a reward of at least `least`. `group`: all responses to the prompt, as dicts with
    `response` (text), `finish` ("stop" if not cut off) and `reward`.
    """
    records = [
        record
        for record in group
        if record["response"].strip() and record["finish"] == "stop" and record["reward"] >= least
    ]
    return sorted(records, key=lambda record: -record["reward"])


def best(group: Sequence[Record], least: float) -> Iterator[Record]:
    """Yield one row of the data set, {prompt, response, answer, reward, ...}: the response of
    `good(group, least)` with the highest reward, of equal ones the first. Nothing without one.
    """
    yield from map(_row, good(group, least)[:1])


def everything(group: Sequence[Record], least: float) -> Iterator[Record]:
    """Yield a row of the data set, {prompt, response, answer, reward, ...}, for each response of
    `good(group, least)`, best first.
    """
    yield from map(_row, good(group, least))


def best_and_worst(group: Sequence[Record], least: float) -> Iterator[Record]:
    """Yield one row of the data set, {prompt, chosen, rejected, margin, answer}: `chosen` is the
    best response of `good(group, least)`, `rejected` the one of `group` with the lowest reward that
    is not blank, `margin` the difference of their rewards. Nothing without two such responses of
    different rewards.
    """
    for top in good(group, least)[:1]:
        worse = [
            record
            for record in group
            if record["response"].strip()
            and record["response"] != top["response"]
            and record["reward"] < top["reward"]
        ]
        if worse:
            low = min(worse, key=lambda record: record["reward"])
            yield {
                "prompt": top["prompt"],
                "chosen": top["response"],
                "rejected": low["response"],
                "margin": top["reward"] - low["reward"],
                "answer": top["answer"],
            }


KEEP = {"best": best, "all": everything, "pairs": best_and_worst}
"""{`sample.keep`: function (records of a prompt's responses, least reward) to the rows of the data
set that are made of them}"""


def _row(record: Record) -> Record:
    kept = ("prompt", "response", "answer", "reward", "correct", "scores", "finish", "tokens")
    return {name: record[name] for name in kept if name in record}


def write(path: Path, text: str) -> None:
    """Write `text` atomically to the file `path` (UTF-8)."""
    with new_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def sample_summary(
    config: RunConfig, groups: Sequence[Sequence[Record]], rows: Sequence[Record]
) -> dict[str, Any]:
    """Summarise a sampling run for JSON: `accuracy` and `reward/mean` over all responses,
    `accuracy_of_best` and `reward/best` over the response with the highest reward of each prompt,
    numbers of prompts and rows, and settings. `groups`: [prompt][sample] responses, as dicts with
    `reward` and `correct`, at least one. `rows`: of the data set.
    """
    records = [record for group in groups for record in group]
    best_of = [max(group, key=lambda record: record["reward"]) for group in groups if group]
    return {
        "model": config.model.path,
        "prompts_asked": len(groups),
        "samples": config.sample.samples,
        "keep": config.sample.keep,
        "rows": len(rows),
        "accuracy": statistics.fmean(record["correct"] for record in records),
        "accuracy_of_best": statistics.fmean(record["correct"] for record in best_of),
        "reward/mean": statistics.fmean(record["reward"] for record in records),
        "reward/best": statistics.fmean(record["reward"] for record in best_of),
        "seed": config.seed,
    }
