"""`megarl rollout`: a few rollouts of a recipe, printed turn by turn, without training.

    megarl rollout RECIPE.yaml --num 4

The first prompts in training order are answered by `model.path` at `rollout.temperature` and scored
by the environment. Prompts and turns are printed with all special tokens, also those that the
environment is not given.
Nothing is written but `run.log` in FOLDER/rollout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl import console
from megarl.apps.runs.rollout_checks import RolloutInputs
from megarl.cluster.mailbox import fetch
from megarl.cluster.process_env import own_cluster_token
from megarl.cluster.ray_cluster import Cluster
from megarl.cluster.rollout_client import RolloutClient
from megarl.cluster.rollouts import start_engines, start_service
from megarl.config import RunConfig, silence_s
from megarl.loops.evaluate import generate, refuse_broken
from megarl.parallel import mesh
from megarl.types import Prompt

PLAIN: dict[str, str] = dict.fromkeys(("model", "environment", "right", "wrong", "soft", "end"), "")
COLOURS = {
    "model": "\x1b[36m",
    "environment": "\x1b[33m",
    "right": "\x1b[32m",
    "wrong": "\x1b[31m",
    "soft": "\x1b[2m",
    "end": "\x1b[0m",
}
"""{what a text is: escape sequence of its colour in a terminal}"""


def main(config: RunConfig, inputs: RolloutInputs) -> int:
    """Generate and print the rollouts."""
    console.open_log(Path(config.folder) / "rollout")
    colours = COLOURS if console.in_terminal() else PLAIN
    for record in rollouts(config, inputs):
        console.result("\n".join(lines(record, colours)))
    return 0


def rollouts(config: RunConfig, inputs: RolloutInputs) -> list[dict[str, Any]]:
    """The records of one rollout of each of the first prompts, their texts with the special tokens;
    see `megarl.rollout.transcripts`.
    """
    run, count = inputs.run, config.sample.shown
    assert run.prompts is not None
    prompts = [
        # A small source of a mixture comes round again within the first prompts, and seeds and
        # sessions go by the index.
        replace(run.prompts.at(ordinal), index=ordinal)
        for ordinal in range(min(count, len(run.prompts)))
    ]
    on_cpu = mesh.local_device().type == "cpu"
    with Cluster(
        namespace=f"megarl-{os.getpid()}",
        token=own_cluster_token(),
        hidden=config.environment.remote.token_variable,
    ) as cluster:
        with console.phase(f"engines of {config.model.path}"):
            stops = run.stop_token_ids
            engines = start_engines(cluster, config, stops, on_cpu=on_cpu, load=True)
            start_service(config, cluster, engines, run, first_step=0)
            engines.wait()
            cluster.wait_for_service(config.rollout.engine.start_timeout_s)
        probe = 2 * prompts[0].token_ids[:24]
        scores = engines.score(probe, timeout_s=config.rollout.request_timeout_s)
        refuse_broken(scores, config.model.path)
        cluster.supervise(engines, config.rollout, loads=True)
        client = RolloutClient(0, silence_s=silence_s(config))
        temperature = config.rollout.temperature
        # A failure is what somebody who writes an environment wants to see.
        records = list(generate(client, prompts, temperature, ["shown"], inspects=True))
        decode_whole(records, prompts, run.tokenizer, config.rollout.request_timeout_s)
        return records


def decode_whole(
    records: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    timeout_s: float,
) -> None:
    """Replace the texts of `records`, of one rollout of each of `prompts`, by texts with the
    special tokens, and take `segments` out. `timeout_s`: seconds that the tokens have to arrive.
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    rollouts = [record.pop("segments") for record in records]
    arrays = iter(fetch([part.arrays for one in rollouts for part in one], timeout_s))
    for record, prompt, segments in zip(records, prompts, rollouts, strict=True):
        texts = [text_of(next(arrays).token_ids.tolist()) for _ in segments]
        record |= {"prompt": text_of(prompt.token_ids), "response": "".join(texts)}
        for turn, text in zip(record.get("turns", ()), texts, strict=False):
            turn["text"] = text


def lines(record: dict[str, Any], colours: dict[str, str]) -> Iterator[str]:
    """The lines of one rollout: the prompt, each turn with its reward, the verdict."""
    end, soft = colours["end"], colours["soft"]
    yield f"{soft}--- prompt ---{end}"
    yield _shown(record["prompt"])
    one = {"by": "model", "text": record["response"], "tokens": record["tokens"]}
    for turn in record.get("turns") or [one | {"finish": record["finish"]}]:
        about = [turn["by"], f"{turn['tokens']:,} tokens"]
        if turn.get("reward"):
            about.append(f"reward {turn['reward']:+g}")
        if turn.get("finish", "stop") != "stop":
            about.append(f"cut off: {turn['finish']}")
        yield f"{soft}--- {', '.join(about)} ---{end}"
        yield f"{colours[turn['by']]}{_shown(turn['text'])}{end}"
    mark = "right" if record["correct"] else "wrong"
    said = [f"{colours[mark]}{mark}{end}", f"reward {record['reward']:+g}"]
    said += [f"answer {_shown(record['answer'])}"] if record["answer"] else []
    if record["failure"]:
        said.append(f"failure {record['failure']}: {_shown(record['detail'])}")
    said += [f"{name} {value:g}" for name, value in record.get("metrics", {}).items()]
    yield f"{soft}---{end} {', '.join(said)}"
    yield ""


def _shown(text: str) -> str:
    """A text without characters that would steer the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
