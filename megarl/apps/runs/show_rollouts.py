"""`megarl rollout`: a few rollouts of a recipe, printed turn by turn, without training.

    megarl rollout RECIPE.yaml --num 4

The first prompts in training order are answered by `model.path` at `rollout.temperature` and scored
by the environment. Prompts and turns are printed with all special tokens, also with those that the
environment is not given. Nothing is written but `run.log` in the folder FOLDER/rollout, where
FOLDER is the recipe's run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.rollout.client import RolloutClient
from megarl.run.evaluate import answering, generate
from megarl.settings.config import RunConfig, silence_s
from megarl.system import console
from megarl.trainer.context import RunInputs
from megarl.types import Prompt

COLOURS = {"model": 36, "environment": 33, "right": 32, "wrong": 31, "soft": 2}
"""{what a text is: number of its colour in a terminal (ANSI)}"""


def main(config: RunConfig, inputs: RunInputs) -> int:
    """Print rollouts of the recipe's first `sample.shown` prompts, of an inference engine without a
    trainer. `inputs`: of `check_rollout`. Returns the exit code 0.
    """
    console.open_log(Path(config.folder) / "rollout")
    asker = "agent" if config.environment.agent.is_used else "environment"
    for record in rollouts(config, inputs):
        shown = lines(record, in_colour=console.in_terminal(), environment=asker)
        console.result("\n".join(shown), colours=True)
    return 0


def rollouts(config: RunConfig, inputs: RunInputs) -> list[dict[str, Any]]:
    """One rollout for each of the first `sample.shown` prompts of `inputs`, as dicts with the keys
    of transcripts.jsonl, whose texts contain the special tokens.
    """
    assert inputs.prompts is not None
    prompts = [
        # A small source of a mixture comes round again within the first prompts, and seeds and
        # sessions go by the index.
        replace(inputs.prompts.at(ordinal), index=ordinal)
        for ordinal in range(min(config.sample.shown, len(inputs.prompts)))
    ]
    with answering(config, inputs, prompts[0]):
        client = RolloutClient(0, silence_s=silence_s(config))
        temperature = config.rollout.temperature
        # A failure is what somebody who writes an environment wants to see.
        records = list(generate(client, prompts, temperature, ["shown"], inspects=True))
        decode_whole(records, prompts, inputs.tokenizer)
        return records


def decode_whole(
    records: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Replace, in place, the texts of rollouts by texts with all special tokens, decoded from the
    token ids in `segments`, a key that is removed. Record n is a rollout of prompt n.
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    rollouts = [record.pop("segments") for record in records]
    for record, prompt, segments in zip(records, prompts, rollouts, strict=True):
        texts = [text_of(segment.arrays.token_ids.tolist()) for segment in segments]
        record |= {"prompt": text_of(prompt.token_ids), "response": "".join(texts)}
        for turn, text in zip(record.get("turns", ()), texts, strict=False):
            turn["text"] = text


def lines(
    record: dict[str, Any], *, in_colour: bool, environment: str = "environment"
) -> Iterator[str]:
    """The lines of one rollout: the prompt, each turn with its reward and, where it begins a branch
    of the tree, what it follows, and whether the answer is right. `record`: of `rollouts`;
    `environment`: what the turns that the model reads are by. Control characters are escaped.
    """

    def paint(what: str, text: str) -> str:
        return f"\x1b[{COLOURS[what]}m{text}\x1b[0m" if in_colour else text

    yield paint("soft", "--- prompt ---")
    yield console.printable(record["prompt"])
    whole = {"by": "model", "text": record["response"], "tokens": record["tokens"]}
    turns = record.get("turns") or [whole | {"finish": record["finish"]}]
    is_tree = any("follows" in turn for turn in turns)
    for number, turn in enumerate(turns):
        by = environment if turn["by"] == "environment" else turn["by"]
        heading = [f"{number} {by}" if is_tree else by, f"{turn['tokens']:,} tokens"]
        if "follows" in turn:
            follows = turn["follows"]
            heading.append("a new conversation" if follows < 0 else f"a branch behind {follows}")
        if turn.get("reward"):
            heading.append(f"reward {turn['reward']:+g}")
        if turn.get("finish", "stop") != "stop":
            heading.append(f"cut off: {turn['finish']}")
        yield paint("soft", f"--- {', '.join(heading)} ---")
        yield paint(turn["by"], console.printable(turn["text"]))
    mark = "right" if record["correct"] else "wrong"
    facts = [paint(mark, mark), f"reward {record['reward']:+g}"]
    if record.get("left_out"):
        facts = [paint("wrong", "not judged")]
    facts += [f"answer {console.printable(record['answer'])}"] if record["answer"] else []
    if record["failure"]:
        facts.append(f"failure {record['failure']}: {console.printable(record['detail'])}")
    facts += [f"{name} {value:g}" for name, value in record.get("metrics", {}).items()]
    yield f"{paint('soft', '---')} {', '.join(facts)}\n"
