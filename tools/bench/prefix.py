"""A training step with every prompt computed once for its group, against one that repeats it.

    python tools/bench/prefix.py [--cases 512:8x64,256:8x128,64:8x64] [--groups 8] [--rounds 3]
        [--steps 3] [--threads 2] [--model FOLDER | --size tiny] [--device cpu]
        [--profile] [--json]

A case is `prompt tokens : samples of a group x response tokens`. A step is `--groups` groups of
random tokens: advantages, packing, forward and backward passes and one AdamW step of the policy
alone, by DAPO's loss; nothing is generated. Both ways train from the same weights on the same
samples, in turns, in one process; the first step of each is not counted.

    speed-up     time of a step with repeated prompts over that with shared ones
    bound        the same ratio of the work that is computed, from the shapes: matrix products of
                 the layers for every token, of the output head for trained tokens, of attention
                 for every pair of query and key
    tokens       tokens that pass through the layers
    memory       peak of a step above what is there before it, over the same of repeated prompts
    difference   of the loss of the first step

With `--profile` nothing is compared: the table says where the time of one step with shared prompts
goes, on the CPU (step_profile.py).

Without `--model` the weights are random. `--size tiny` is the model of e2e.py with 2.4 million
parameters, whose steps a GPU spends on starting kernels; `--size 0.5b` has 0.5 billion.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from common import (
    Others,
    command_line,
    require_positive,
    run_tool,
    warn_if_not_quiet,
    write_qwen2_config,
)
from e2e_task import MODEL

SEED = 1
SIZES: dict[str, dict[str, Any]] = {
    "tiny": MODEL | {"vocab_size": 512},
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
}
"""{size of the model: settings of its config.json}"""
WAYS: dict[str, Literal["auto", "off"]] = {"repeated": "off", "shared": "auto"}
"""{way to pack: `training.share_prefix`}"""


def case(text: str) -> tuple[int, int, int]:
    """(prompt tokens, samples of a group, response tokens) of "512:8x64". Raises `ValueError`."""
    prompt, _, rest = text.partition(":")
    samples, _, response = rest.partition("x")
    found = int(prompt), int(samples), int(response)
    if min(found) < 1:
        raise ValueError(text)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "--cases": {
        "type": lambda text: [case(one) for one in text.split(",")],
        "default": [(512, 8, 64), (256, 8, 128), (64, 8, 64)],
        "help": "prompt tokens : samples of a group x response tokens, separated by commas",
    },
    "--groups": {"type": int, "default": 8, "help": "groups of a step"},
    "--rounds": {"type": int, "default": 3, "help": "turns of each way"},
    "--steps": {"type": int, "default": 3, "help": "counted steps of a turn"},
    "--threads": {"type": int, "default": 2, "help": "torch threads, on the CPU"},
    "--tokens": {"type": int, "default": 8192, "help": "most tokens of a micro-batch"},
    "--model": {"default": "", "help": "folder of a Hugging Face model; weights are random"},
    "--size": {"choices": tuple(SIZES), "default": "tiny", "help": "of the model without --model"},
    "--profile": {"action": "store_true", "help": "the parts of a step with shared prompts"},
    "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "where to train"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    if args.profile and args.device != "cpu":
        parser.error("--profile needs --device cpu")
    require_positive(parser, args, ("groups", "rounds", "steps", "threads", "tokens"))
    return args


def groups_of(shape: tuple[int, int, int], count: int, step: int, vocabulary: int) -> list[Any]:
    """`count` groups of random tokens, with rewards that differ within a group."""
    import numpy as np

    from megarl.types import Group, Prompt, Rollout, Segment, TokenArrays, Verdict

    prompt, samples, response = shape
    draw = random.Random(f"{shape} {step}")

    def tokens(number: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(number)]

    def rollout(sample: int) -> Any:
        ids = np.array(tokens(response), dtype=np.int32)
        arrays = TokenArrays(ids, np.full(response, -8.0, dtype=np.float32))
        segment = Segment("model", response, arrays, [(step, response)], "stop")
        return Rollout(sample, sample, [segment], Verdict(float(sample % 2), correct=False), step)

    return [
        Group(
            ordinal, Prompt(ordinal, "", tokens(prompt), ""), [rollout(n) for n in range(samples)]
        )
        for ordinal in range(count)
    ]


class Trainer:
    """The policy with one way to pack, which trains a step at a time."""

    def __init__(self, way: str, args: argparse.Namespace, mesh: Any, device: Any, model: str):
        from megarl.objectives.config import AlgorithmConfig
        from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig
        from megarl.trainer.policy import PolicyGradient
        from megarl.trainer.prefixes import must_save
        from megarl.trainer.role import Role

        on_gpu = args.device == "cuda"
        training = TrainingConfig(
            share_prefix=WAYS[way],
            micro_batch_tokens=args.tokens,
            num_threads=args.threads,
            precision="bfloat16" if on_gpu else "float32",
            zero_stage=1 if on_gpu else 0,
            optimizer=OptimizerConfig(learning_rate=1e-6),
        )
        self.role = Role(
            "policy",
            model=ModelConfig(path=model, from_scratch=True),
            training=training,
            mesh=mesh,
            device=device,
            seed=SEED,
            optimizer_steps=1000,
        )
        self.learner = PolicyGradient(self.role, AlgorithmConfig(), temperature=1.0)
        self.budget, self.saves = args.tokens, must_save(training.share_prefix)

    def step(self, groups: list[Any]) -> dict[str, float]:
        """One step; its metrics."""
        from megarl.rollout.batch import shares

        batch = shares(
            step=0,
            drawn=groups,
            accepted=groups,
            seconds=1.0,
            num_data_ranks=1,
            num_mini_batches=1,
            micro_batch_tokens=self.budget,
            transcripts=0,
            prefix_saves=self.saves,
        ).share(0)
        packed = self.role.pack_step(batch)
        columns = self.learner.prepare(batch, packed, {})
        return self.learner.train(batch, packed, columns).metrics


def work_ratio(model: Any, shape: tuple[int, int, int]) -> float:
    """Multiplications of repeated prompts over those of shared ones, for one group."""
    prompt, samples, response = shape
    text = model.config.get_text_config()
    layers = text.num_hidden_layers
    body = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    )
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair = 2 * layers * text.num_attention_heads * head_width
    output = text.vocab_size * text.hidden_size * samples * response

    def work(tokens: int, pairs: int) -> int:
        return body * tokens + pair * pairs + output

    def seen(first: int, last: int) -> int:
        return sum(range(first + 1, last + 1))

    whole, common = prompt + response, prompt - 1
    repeated = work(samples * whole, samples * seen(0, whole))
    shared = work(
        common + samples * (whole - common), seen(0, common) + samples * seen(common, whole)
    )
    return repeated / shared


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every case in turn, with both ways in turns."""
    import peak_memory
    import torch

    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh

    found = []
    with ExitStack() as stack, Others(time.process_time) as others:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        torch.set_num_threads(args.threads)
        device = mesh_module.initialise(timeout_s=600)
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(ProcessMesh(Layout(), timeout_s=600))
        model = args.model or write_qwen2_config(folder, **SIZES[args.size])
        ways = ["shared"] if args.profile else list(WAYS)
        trainers = {way: Trainer(way, args, mesh, device, model) for way in ways}
        vocabulary = trainers["shared"].role.engine.module.model.config.vocab_size
        for shape in args.cases:
            made = [
                groups_of(shape, args.groups, step, vocabulary) for step in range(args.steps + 1)
            ]
            metrics = {way: one.step(made[0]) for way, one in trainers.items()}
            if args.profile:
                parts = _profile(trainers["shared"], made[1])
                found.append({"case": "{}:{}x{}".format(*shape), "profile": parts})
                continue
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(args.rounds):
                for way in list(WAYS) if turn % 2 == 0 else reversed(list(WAYS)):
                    trainers[way].step(made[0])
                    for groups in made[1:]:
                        _wait(device)
                        began = time.perf_counter()
                        trainers[way].step(groups)
                        _wait(device)
                        seconds[way].append(time.perf_counter() - began)
            peaks = {
                way: peak_memory.peak_of(partial(one.step, made[0]), device)[0].allocated
                for way, one in trainers.items()
            }
            ratio = work_ratio(trainers["shared"].role.engine.module.model, shape)
            found.append(_case(shape, args, metrics, seconds, peaks) | {"bound": ratio})
    return {"cases": found, "others": others.share}


def _profile(trainer: Trainer, groups: list[Any]) -> dict[str, Any]:
    """The parts of a step of `trainer`; see `step_profile`."""
    import step_profile

    from megarl.rollout import batch

    functions = [
        (trainer.role.engine, "step", "optimizer, clipping"),
        (trainer.role, "pack_step", "packing"),
        (batch, "shares", "packing"),
        (trainer.learner, "prepare", "loss"),
        (trainer.learner, "_loss", "loss"),
    ]
    model = trainer.role.engine.module
    return step_profile.profile_of(lambda: trainer.step(groups), model, functions)


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _case(
    shape: tuple[int, int, int],
    args: argparse.Namespace,
    metrics: dict[str, dict[str, float]],
    seconds: dict[str, list[float]],
    peaks: dict[str, int],
) -> dict[str, Any]:
    """The results of a case. Speed-ups are by turn."""
    turns = [slice(n * args.steps, (n + 1) * args.steps) for n in range(args.rounds)]
    ratios = [
        statistics.mean(seconds["repeated"][turn]) / statistics.mean(seconds["shared"][turn])
        for turn in turns
    ]
    return {
        "case": "{}:{}x{}".format(*shape),
        "speed_up": ratios,
        "seconds": {way: statistics.mean(times) for way, times in seconds.items()},
        "tokens": {way: metrics[way]["tokens/computed"] for way in WAYS},
        "memory": peaks["shared"] / peaks["repeated"],
        "difference": abs(metrics["shared"]["loss"] - metrics["repeated"]["loss"]),
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    import step_profile

    if result["task"]["profile"]:
        for one in result["cases"]:
            yield f"{one['case']}:"
            yield from step_profile.show(one["profile"])
        yield from warn_if_not_quiet(result["others"])
        return
    names = ("repeated", "shared", "speed-up (lowest-highest)", "bound", "of it", "tokens")
    yield f"{'case':12} {'  '.join(names)}  memory  difference"
    for one in result["cases"]:
        speed = statistics.mean(one["speed_up"])
        tokens, seconds = one["tokens"], one["seconds"]
        yield (
            f"{one['case']:12} {seconds['repeated']:6.3f} s {seconds['shared']:6.3f} s"
            f" {speed:5.2f} ({min(one['speed_up']):.2f}-{max(one['speed_up']):.2f})"
            f" {one['bound']:6.2f} {speed / one['bound']:6.0%}"
            f" {tokens['repeated']:7,.0f} -> {tokens['shared']:,.0f}"
            f" {one['memory']:6.2f} {one['difference']:10.1e}"
        )
    yield from warn_if_not_quiet(result["others"])


if __name__ == "__main__":
    sys.exit(run_tool("prefix", arguments=arguments, measure=measure, show=show))
