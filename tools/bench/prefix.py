"""A training step with every prompt computed once for its group, against one that repeats it.

    python tools/bench/prefix.py [--cases 512:8x64,256:8x128,64:8x64] [--groups 8] [--rounds 3]
        [--steps 3] [--threads 2] [--size tiny] [--device cpu] [--json]

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

The weights are random. `--size tiny` is the model of e2e.py with 2.4 million parameters, whose
steps a GPU spends on starting kernels; `--size 0.5b` has 0.5 billion.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from common import Args, Lines, group_shape, in_turns, qwen2, ratios, run_tool, table, write_config
from e2e_task import VOCABULARY
from launch_ranks import make_role, ready, share_of

SIZES = {
    "tiny": qwen2(VOCABULARY, 192, 480, 6, 6, 2, max_position_embeddings=4096),
    "0.5b": qwen2(151936, 1024, 4096, 16, 8, 4, max_position_embeddings=32768),
}
"""{size of the model: settings of its config.json}"""
WAYS: dict[str, Literal["auto", "off"]] = {"repeated": "off", "shared": "auto"}
"""{way to pack: `training.share_prefix`}"""
OPTIONS = {
    "--cases": (
        "512:8x64,256:8x128,64:8x64",
        "prompt tokens : samples of a group x response tokens, separated by commas",
        lambda text: [group_shape(one) for one in text.split(",")],
    ),
    "--groups": (8, "groups of a step"),
    "--rounds": (3, "turns of each way"),
    "--steps": (3, "counted steps of a turn"),
    "--threads": (2, "torch threads, on the CPU"),
    "--tokens": (8192, "most tokens of a micro-batch"),
    "--size": ("tiny", "of the model", tuple(SIZES)),
    "--device": ("cpu", "where to train", ("cpu", "cuda")),
}


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
        Group(n, Prompt(n, "", tokens(prompt), ""), [rollout(sample) for sample in range(samples)])
        for n in range(count)
    ]


class Trainer:
    """A policy, which trains a step at a time."""

    def __init__(self, role: Any) -> None:
        from megarl.settings.objectives import AlgorithmConfig
        from megarl.trainer.policy import PolicyGradient
        from megarl.trainer.prefixes import must_save

        self.role, self.budget = role, role.training.micro_batch_tokens
        self.learner = PolicyGradient(role, AlgorithmConfig(), temperature=1.0)
        self.saves = must_save(role.training.share_prefix)

    def step(self, groups: list[Any]) -> dict[str, float]:
        """One step; its metrics."""
        batch = share_of(groups, self.budget, prefix_saves=self.saves)
        packed = self.role.pack_step(batch)
        columns = self.learner.prepare(batch, packed, {})
        return self.learner.train(batch, packed, columns).metrics


def work_ratio(model: Any, shape: tuple[int, int, int]) -> float:
    """Multiplications of repeated prompts over those of shared ones, for one group."""
    prompt, samples, response = shape
    text = model.config.get_text_config()
    named = ((name, p) for name, p in model.named_parameters() if p.dim() == 2)
    body = sum(p.numel() for name, p in named if not re.search("embed|lm_head", name))
    pair = 2 * text.num_hidden_layers * text.hidden_size
    output = text.vocab_size * text.hidden_size * samples * response

    def work(tokens: int, pairs: int) -> int:
        return body * tokens + pair * pairs + output

    def seen(first: int, last: int) -> int:
        return sum(range(first + 1, last + 1))

    whole, common = prompt + response, prompt - 1
    tokens = common + samples * (whole - common)
    shared = work(tokens, seen(0, common) + samples * seen(common, whole))
    return work(samples * whole, samples * seen(0, whole)) / shared


def measure(args: Args) -> dict[str, Any]:
    """Every case in turn, with both ways in turns."""
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.settings.training import OptimizerConfig

    settings = {
        "micro_batch_tokens": args.tokens,
        "num_threads": args.threads,
        "precision": "bfloat16" if args.device == "cuda" else "float32",
        "zero_stage": int(args.device == "cuda"),
        "optimizer": OptimizerConfig(learning_rate=1e-6),
    }
    with ExitStack() as stack:
        device = stack.enter_context(ready(600, threads=args.threads))
        mesh = stack.enter_context(ProcessMesh(Layout(), timeout_s=600))
        model = write_config(args.work, SIZES[args.size])
        trainers = {
            way: Trainer(make_role(model, mesh, device, share_prefix=share, **settings))
            for way, share in WAYS.items()
        }
        cases = [
            {"case": "{}:{}x{}".format(*shape), **_compare(shape, args, trainers, device)}
            for shape in args.cases
        ]
    return {"cases": cases}


def _compare(
    shape: tuple[int, int, int], args: Args, trainers: dict[str, Trainer], device: Any
) -> dict[str, Any]:
    """The results of a case."""
    import peak_memory
    import torch

    vocabulary = SIZES[args.size]["vocab_size"]
    made = [groups_of(shape, args.groups, step, vocabulary) for step in range(args.steps + 1)]
    metrics = {way: one.step(made[0]) for way, one in trainers.items()}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def turn(trainer: Trainer) -> float:
        """Seconds of a counted step, mean over the turn."""
        trainer.step(made[0])
        synchronize()
        began = time.perf_counter()
        for groups in made[1:]:
            trainer.step(groups)
        synchronize()
        return (time.perf_counter() - began) / args.steps

    seconds = in_turns(args.rounds, {way: partial(turn, one) for way, one in trainers.items()})
    peaks = {
        way: peak_memory.peak_of(partial(one.step, made[0]), device)[0].allocated
        for way, one in trainers.items()
    }
    return {
        "bound": work_ratio(trainers["shared"].role.engine.module.model, shape),
        "speed_up": ratios(seconds["repeated"], seconds["shared"]),
        "seconds": {way: statistics.mean(times) for way, times in seconds.items()},
        "tokens": {way: metrics[way]["tokens/computed"] for way in WAYS},
        "memory": peaks["shared"] / peaks["repeated"],
        "difference": abs(metrics["shared"]["loss"] - metrics["repeated"]["loss"]),
    }


def show(result: dict[str, Any]) -> Lines:
    """Lines of a table."""
    columns = (
        "case; repeated s=seconds.repeated .3f; shared s=seconds.shared .3f;"
        " speed-up=speed_up .2f; bound .2f; tokens repeated=tokens.repeated ,.0f;"
        " shared=tokens.shared ,.0f; memory .2f; difference .1e"
    )
    yield from table(result["cases"], columns)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
