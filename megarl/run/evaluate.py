"""`megarl eval`: held-out problems, answered by models as they are.

Responses at `evaluation.temperature`, with `evaluation.samples` or `sampled_too` also those at
`rollout.temperature`, go to FOLDER/eval/NUMBER/generations.jsonl, results to results.json there.
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

from megarl.data.chat_template import tags_of
from megarl.environments.response_text import answer_part, with_tags
from megarl.errors import UserError
from megarl.observe.sinks import finite
from megarl.parallel import mesh
from megarl.rollout.client import RolloutClient
from megarl.rollout.evaluation import repeated_metrics, summarise_records
from megarl.rollout.ray_cluster import Cluster
from megarl.run.plan import EvalCase, EvalInputs
from megarl.run.rollouts import start_engines, start_service
from megarl.settings.config import RunConfig, silence_s
from megarl.settings.environments import EnvironmentConfig
from megarl.system import console
from megarl.system.lookup import of_app
from megarl.system.process_env import own_cluster_token
from megarl.trainer.context import RunInputs
from megarl.types import Prompt

PROBLEMS_PER_CALL = 256
"""Problems in one request to the rollout service, which bounds its answer."""


def main(config: RunConfig, inputs: EvalInputs) -> int:
    """Evaluate every model on every data set, in one process; prints the results as one JSON
    object. Returns the exit code.
    """
    folder = make_folder(Path(config.folder) / "eval")
    console.open_log(folder)
    console.say(f"generations and results are written to {folder}")
    with (folder / "generations.jsonl").open(
        "w", encoding="utf-8", errors="backslashreplace"
    ) as generations:
        results = [row for case in inputs.cases for row in evaluate_case(case, generations)]
    result = {"folder": str(folder), "seed": config.seed, "results": results}
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    console.result(json.dumps(result))
    return 0


def make_folder(parent: Path) -> Path:
    """The next numbered folder in `parent`, 000001 at first; two processes get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max(
        (int(path.name) for path in parent.iterdir() if path.name.isdecimal()), default=0
    )
    while True:
        folder = parent / f"{number:06d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # another command has just made it
            number += 1


def evaluate_case(case: EvalCase, generations: IO[str]) -> Iterator[dict[str, Any]]:
    """Start the engines of one model. Yields per data set {"model", "data", metrics, "sampled" if
    asked for}. Generations go to `generations`, one JSON object a line.
    """
    tags = tags_of(case.inputs.tokenizer.chat_template)
    config, evaluation = case.config, case.config.evaluation
    with answering(config, case.inputs, next(iter(case.sets.values()))[0]):
        for source, prompts in case.sets.items():
            num_samples = max(evaluation.samples, int(evaluation.sampled_too))
            client = RolloutClient(0, silence_s=silence_s(config))
            labels = {"model": config.model.path, "data": source}
            first = list(generate(client, prompts, evaluation.temperature, ["eval"]))
            add_rows(generations, labels, decoding(evaluation.temperature), first)
            result: dict[str, Any] = labels | summarise_records(first)
            if evaluation.samples > 1 or evaluation.sampled_too:
                names = ["eval_sampled", *(f"eval_sampled/{k}" for k in range(1, num_samples))]
                sampled = list(generate(client, prompts, config.rollout.temperature, names))
                add_rows(generations, labels, "sampled", sampled)
                result["sampled"] = {
                    "samples": num_samples,
                    "temperature": config.rollout.temperature,
                    **summarise_records(sampled),
                    **over_samples(sampled, len(prompts), with_tags(config.environment, tags)),
                }
            console.say(f"{config.model.path} on {source}: {shown(result, evaluation.temperature)}")
            yield result


@contextlib.contextmanager
def answering(config: RunConfig, inputs: RunInputs, prompt: Prompt) -> Iterator[None]:
    """In this block, engines of `config.model.path` answer a `RolloutClient`. They have scored
    `prompt` as a test: raises `UserError` if log-probs are not finite.
    """
    on_cpu = mesh.local_device().type == "cpu"
    with Cluster(
        namespace=f"megarl-{os.getpid()}",
        token=own_cluster_token(),
        hidden=config.environment.remote.token_variable,
    ) as cluster:
        with console.phase(f"engines of {config.model.path}"):
            stops = inputs.stop_token_ids
            starts = start_engines(config, stops, on_cpu=on_cpu)
            engines = start_service(config, cluster, starts, inputs)
            cluster.wait_for_service(config.rollout.engine.start_timeout_s)
            engines.wait()
        probe = 2 * prompt.token_ids[:24]
        scores = engines.score(probe, timeout_s=config.rollout.request_timeout_s)
        refuse_nonfinite(scores, config.model.path)
        yield


def decoding(temperature: float) -> str:
    """How responses of a temperature are chosen, in words."""
    return "greedy" if temperature == 0 else f"sampled at {temperature:g}"


def shown(result: Mapping[str, Any], temperature: float) -> str:
    """The accuracies of one data set as a line of text."""
    parts = {decoding(temperature): result}
    if sampled := result.get("sampled"):
        parts[f"{sampled['samples']} sampled at {sampled['temperature']:g}"] = sampled

    def numbers(metrics: Mapping[str, Any]) -> Iterator[str]:
        for name, value in metrics.items():
            if value is not None and (name == "accuracy" or "@" in name):
                yield f"{name} {value:.4g}"

    return "; ".join(f"{how}: {'  '.join(numbers(metrics))}" for how, metrics in parts.items())


def refuse_nonfinite(logprobs: Sequence[Sequence[float]], model: str) -> None:
    """Raise `UserError` if a log-prob of the probe prompt, [engines][tokens], is not finite."""
    if not all(math.isfinite(logprob) for engine in logprobs for logprob in engine):
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
    """Have the service answer each prompt for each of `names`, which tell samples apart
    ("eval_sampled/1"), in this order; yields records.

    A seed depends on problem and name alone. Raises `UserError` if the verifier failed too often;
    not with `inspects`, which adds "segments".
    """
    parts = [
        prompts[first : first + PROBLEMS_PER_CALL]
        for first in range(0, len(prompts), PROBLEMS_PER_CALL)
    ]
    pending = [
        client.answers(chunk, temperature, name, inspects=inspects)
        for name in names
        for chunk in parts
    ]
    yield from itertools.chain.from_iterable(client.collect(pending))


def add_rows(file: IO[str], labels: dict[str, str], kind: str, rows: list[dict[str, Any]]) -> None:
    """Append the rows to `file`, one JSON object a line; NaN and infinity become null."""
    for row in rows:
        file.write(json.dumps(finite(labels | {"kind": kind} | row), ensure_ascii=False) + "\n")
    file.flush()


def over_samples(
    records: list[dict[str, Any]], num_problems: int, environment: EnvironmentConfig
) -> dict[str, float | None]:
    """avg@n, pass@k and maj@n of n responses to each problem. `records`: first one of each problem,
    then the next of each. maj@n is None where the verifier does not tell which answers are
    equal.
    """
    by_problem = [
        [record for record in records[number::num_problems] if not record.get("left_out")]
        for number in range(num_problems)
    ]
    correct = [[record["correct"] for record in rows] for rows in by_problem]
    answers, parts = None, environment.named_parts or {"": environment}
    # Of an agent, a record has all conversations, and not what was scored.
    is_whole = environment.may_score_itself or environment.agent.is_used
    if not is_whole and all(
        section.verifier in ("exact_match", "math")
        and not (environment.mixture and section.rewards)
        for section in parts.values()
    ):

        def answer(record: Mapping[str, Any]) -> str | None:
            section = parts[record.get("environment", "")]
            return final_answer(record["response"], section, record.get("prompt", ""))

        answers = [list(map(answer, rows)) for rows in by_problem]
    return repeated_metrics(correct, answers, len(records) // num_problems)


def final_answer(response: str, environment: EnvironmentConfig, question: str = "") -> str | None:
    """The answer by which maj@n counts, or None: with the verifier `math` the final expression, a
    plain number by its value; else what `exact_match` compares. `question`: its end may open the
    response's thinking.
    """
    response = answer_part(response, environment.thinking, question)
    if environment.verifier == "math":
        expression = of_app("final_expression")(response)
        number = of_app("plain_number")(expression) if expression is not None else None
        return expression if number is None else str(number)
    marker = environment.answer_after
    if marker and marker not in response:
        return None
    return (response.rpartition(marker)[2] if marker else response).strip()
