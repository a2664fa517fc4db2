"""`megarl eval`: held-out problems, answered by models as they are.

For each model and data set: one greedy response to each problem, and with `evaluation.samples` or
`evaluation.sampled_too` also sampled ones. Every generation is written to
FOLDER/eval/NUMBER/generations.jsonl, the results to results.json beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megarl.checks.preflight import EvalCase, EvalInputs
from megarl.data.chat_template import tags_of
from megarl.environments.response_text import answer_part, with_tags
from megarl.errors import UserError
from megarl.observe.sinks import finite
from megarl.parallel import mesh
from megarl.rollout.client import RolloutClient
from megarl.rollout.evaluation import repeated_metrics, summarise_records
from megarl.rollout.ray_cluster import Cluster
from megarl.run.rollouts import start_engines, start_service
from megarl.settings.config import RunConfig, silence_s
from megarl.settings.environments import EnvironmentConfig
from megarl.system import console
from megarl.system.lookup import of_app
from megarl.system.process_env import own_cluster_token
from megarl.trainer.context import RunInputs
from megarl.types import Prompt

PROBLEMS_PER_CALL = 256
"""Problems in one request to the rollout service; this bounds the size of its answer."""


def main(config: RunConfig, inputs: EvalInputs) -> int:
    """The command `megarl eval`, in one process: evaluate every model on every data set. `config`
    is the recipe; `inputs`, which the checks before the run have made, lists for each model its
    recipe, tokenizer and tokenised problems. Writes generations.jsonl and results.json in a new
    folder FOLDER/eval/NUMBER, where FOLDER is the recipe's `folder`, and prints the results as one
    JSON object on stdout. Returns the exit code, 0.
    """
    folder = make_folder(Path(config.folder) / "eval")
    console.open_log(folder)
    console.say(f"generations and results are written to {folder}")
    with (folder / "generations.jsonl").open(
        "w", encoding="utf-8", errors="backslashreplace"
    ) as to:
        results = [one for case in inputs.cases for one in evaluate_case(case, to)]
    found = {"folder": str(folder), "seed": config.seed, "results": results}
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    console.result(json.dumps(found))
    return 0


def make_folder(parent: Path) -> Path:
    """Make the next numbered folder in `parent`, 000001 at first, and return its path. `parent` is
    made if it does not exist. Two processes get different folders.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(one.name) for one in parent.iterdir() if one.name.isdecimal()), default=0)
    while True:
        folder = parent / f"{number:06d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # another command has just made it
            number += 1


def evaluate_case(case: EvalCase, to: IO[str]) -> Iterator[dict[str, Any]]:
    """Start the engines of one model and evaluate it: yields the results on one data set after
    another, each a dict of metrics with `model` and `data`, and with `sampled`, a dict of metrics
    of the sampled responses, if `evaluation.samples` is above 1 or `sampled_too` is set. `case`
    holds the recipe with this model, its tokenizer and the tokenised problems by data set. Every
    generation is written to the open text file `to`, one JSON object a line. The engines are closed
    with the iterator.
    """
    tags = tags_of(case.inputs.tokenizer.chat_template)
    config, evaluation = case.config, case.config.evaluation
    with answering(config, case.inputs, next(iter(case.sets.values()))[0]):
        for source, prompts in case.sets.items():
            count = max(evaluation.samples, int(evaluation.sampled_too))
            client = RolloutClient(0, silence_s=silence_s(config))
            about = {"model": config.model.path, "data": source}
            greedy = list(generate(client, prompts, evaluation.temperature, ["eval"]))
            add_records(to, about, "greedy", greedy)
            found: dict[str, Any] = about | summarise_records(greedy)
            if evaluation.samples > 1 or evaluation.sampled_too:
                names = ["eval_sampled", *(f"eval_sampled/{k}" for k in range(1, count))]
                drawn = list(generate(client, prompts, config.rollout.temperature, names))
                add_records(to, about, "sampled", drawn)
                found["sampled"] = {
                    "samples": count,
                    "temperature": config.rollout.temperature,
                    **summarise_records(drawn),
                    **over_samples(drawn, len(prompts), with_tags(config.environment, tags)),
                }
            console.say(f"{config.model.path} on {source}: {shown(found, evaluation.temperature)}")
            yield found


@contextlib.contextmanager
def answering(config: RunConfig, inputs: RunInputs, prompt: Prompt) -> Iterator[None]:
    """A context manager in which inference engines of the model `config.model.path`, behind a
    rollout service on a Ray cluster of their own, answer the requests of a `RolloutClient` in this
    process. `inputs`: the model's tokenizer and stop tokens. Entering blocks until the engines are
    ready and have scored the tokens of `prompt` as a test; raises `UserError` if the log-probs are
    not finite.
    """
    on_cpu = mesh.local_device().type == "cpu"
    with Cluster(
        namespace=f"megarl-{os.getpid()}",
        token=own_cluster_token(),
        hidden=config.environment.remote.token_variable,
    ) as cluster:
        with console.phase(f"engines of {config.model.path}"):
            stops = inputs.stop_token_ids
            starts = start_engines(config, stops, on_cpu=on_cpu, load=True)
            engines = start_service(config, cluster, starts, inputs)
            cluster.wait_for_service(config.rollout.engine.start_timeout_s)
            engines.wait()
        probe = 2 * prompt.token_ids[:24]
        scores = engines.score(probe, timeout_s=config.rollout.request_timeout_s)
        refuse_broken(scores, config.model.path)
        yield


def shown(found: Mapping[str, Any], temperature: float) -> str:
    """The accuracies in `found`, the results on one data set, as a line of text without newline:
    first of the one response to each problem, sampled at `temperature` ("greedy" for 0), then, if
    there are any, of several sampled responses to each problem.
    """
    first = "greedy" if temperature == 0 else f"sampled at {temperature:g}"
    parts = {first: found}
    if sampled := found.get("sampled"):
        parts[f"{sampled['samples']} sampled at {sampled['temperature']:g}"] = sampled

    def numbers(metrics: Mapping[str, Any]) -> Iterator[str]:
        for name, value in metrics.items():
            if value is not None and (name == "accuracy" or "@" in name):
                yield f"{name} {value:.4g}"

    return "; ".join(f"{how}: {'  '.join(numbers(metrics))}" for how, metrics in parts.items())


def refuse_broken(scores: Sequence[Sequence[float]], model: str) -> None:
    """Raise `UserError`, which names the model, if an engine has returned a log-prob that is NaN or
    infinite. `scores`: [engines][tokens] log-probs of the same text. `model`: path or name of the
    model.
    """
    if not all(math.isfinite(score) for engine in scores for score in engine):
        raise UserError(
            f"model.path {model!r} gives log-probs that are not finite: its weights hold NaN or"
            " infinite values, or overflow in rollout.engine.dtype; fetch it again, set"
            " rollout.engine.dtype to 'float32', or choose another model"
        )


def generate(
    client: RolloutClient,
    prompts: list[Any],
    temperature: float,
    names: list[str],
    *,
    inspects: bool = False,
) -> Iterator[dict[str, Any]]:
    """Have the rollout service generate and score one response to each of `prompts` (`Prompt`
    objects: tokenised problems with reference answers) for each of `names`, which tell repeated
    samples apart ("eval_sampled/1"). Yields a dict for each response: all problems for the first
    name, in their order, then for the next. Keys are, among others, `prompt`, `response` (text),
    `correct` (bool), `reward`, `tokens` (their number) and `finish`. A response's sampling seed
    depends on the problem and the name alone.

    `temperature`: 0 for greedy. Raises `UserError` if the verifier failed for too many responses;
    not with `inspects`, where each dict also has the response's token segments as `segments`.
    """
    parts = [
        prompts[first : first + PROBLEMS_PER_CALL]
        for first in range(0, len(prompts), PROBLEMS_PER_CALL)
    ]
    pending = [
        client.answers(part, temperature, name, inspects=inspects)
        for name in names
        for part in parts
    ]
    yield from itertools.chain.from_iterable(client.collect(pending))


def add_records(to: IO[str], about: dict[str, str], kind: str, rows: list[dict[str, Any]]) -> None:
    """Append the responses `rows` of one data set to the open text file `to`, one JSON object a
    line: first the entries of `about` (model and data set), then "kind": `kind` ("greedy" or
    "sampled"), then those of the row. NaN and infinity become null. The file is flushed.
    """
    for record in rows:
        to.write(json.dumps(finite(about | {"kind": kind} | record), ensure_ascii=False) + "\n")
    to.flush()


def over_samples(
    records: list[dict[str, Any]], num_problems: int, environment: EnvironmentConfig
) -> dict[str, float | None]:
    """avg@n, pass@k and maj@n, fractions 0 to 1 as {name: value}, of n responses to each of
    `num_problems` problems. `records`: dicts of the responses with `correct` and `response`, first
    one to each problem, then the next one to each. `environment`: the recipe's section, whose
    verifier tells which answers are equal; maj@n is None where it does not.
    """
    by_problem = [
        [one for one in records[number::num_problems] if not one.get("left_out")]
        for number in range(num_problems)
    ]
    correct = [[one["correct"] for one in rows] for rows in by_problem]
    answers, parts = None, environment.named_parts or {"": environment}
    # Of an agent, a record has all conversations, and not what was scored.
    is_whole = environment.may_score_itself or environment.agent.is_used
    if not is_whole and all(
        part.verifier in ("exact_match", "math") and not (environment.mixture and part.rewards)
        for part in parts.values()
    ):

        def answer(one: Mapping[str, Any]) -> str | None:
            part = parts[one.get("environment", "")]
            return final_answer(one["response"], part, one.get("prompt", ""))

        answers = [list(map(answer, rows)) for rows in by_problem]
    return repeated_metrics(correct, answers, len(records) // num_problems)


def final_answer(response: str, environment: EnvironmentConfig, question: str = "") -> str | None:
    """The answer in a response's text, by which maj@n counts equal answers; None if the response
    holds no answer. `environment`: the recipe's section. With its verifier `math` the answer is the
    final expression, a plain number by its value; with any other, what `exact_match` compares: the
    text after the last `answer_after` marker. `question`: the prompt's text, whose end may be the
    opening tag of the response's thinking.
    """
    response = answer_part(response, environment.thinking, question)
    if environment.verifier == "math":
        found = of_app("final_expression")(response)
        number = of_app("plain_number")(found) if found is not None else None
        return found if number is None else str(number)
    marker = environment.answer_after
    if marker and marker not in response:
        return None
    return (response.rpartition(marker)[2] if marker else response).strip()
