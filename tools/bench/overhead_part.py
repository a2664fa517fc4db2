"""A part of a step without megarl's loop: generation alone, or training alone. Started by
tools/bench/overhead.py as `python overhead_part.py TASK.json`; writes its answer beside the task.

Both read the batches that a run has recorded (`observe.batches`): generation takes their prompts,
training their tokens. Each step is one call, of which the first `skipped` are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def prompts_of(batch: Any) -> list[list[list[int]]]:
    """The prompts of a recorded step: [group][sample] lists of token ids. All samples of a group
    have the same prompt. `batch`: a `StepBatch`, whose `mask` is true for tokens of responses.
    """
    found: dict[int, list[list[int]]] = {}
    for samples in batch.samples:
        for row, name in enumerate(samples.ids.tolist()):
            begin, end = samples.offsets[row : row + 2].tolist()
            length = int(samples.mask[begin:end].argmax())
            tokens = samples.token_ids[begin : begin + length].tolist()
            found.setdefault(int(batch.groups[name]), []).append(tokens)
    return [found[group] for group in sorted(found)]


def timed(task: dict[str, Any], call: Callable[[int], None]) -> list[float]:
    """Call `call(step)` for each step; the seconds of each call but the first `skipped`."""
    seconds = list[float]()
    for step in range(task["skipped"] + task["steps"]):
        begin = time.monotonic()
        call(step)
        seconds.append(time.monotonic() - begin)
    return seconds[task["skipped"] :]


def generate(task: dict[str, Any]) -> dict[str, Any]:
    """Time plain vLLM on the prompts that a run has recorded: each call is one `LLM.generate` on
    the prompts of one step, with the engine options, threads, environment and sampling that megarl
    gives its engines. Returns {"seconds": those of each counted call}.
    """
    from megarl.engines.vllm_arguments import engine_arguments
    from megarl.engines.vllm_core import preload_openmp
    from megarl.rollout.batch_files import batch_of
    from megarl.settings.config import RunConfig, read
    from megarl.settings.rl import longest_request
    from megarl.system.process_env import engine_environment

    run = Path(task["run"])
    config = read(RunConfig, str(run / "recipe.yaml"), [])
    engine = config.rollout.engine
    os.environ |= engine_environment(
        on_cpu=True, num_threads=engine.num_threads, kv_cache_gib=engine.kv_cache_gib
    )
    preload_openmp()
    if "started_again" not in sys.argv:  # libraries are preloaded when a process starts
        os.execv(sys.executable, [sys.executable, *sys.argv, "started_again"])  # noqa: S606 - it is this script
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = engine_arguments(
        engine,
        model=config.model.path,
        max_tokens=longest_request(config),
        trust_remote_code=False,
        seed=config.seed,
        on_cpu=True,
    )
    llm = LLM(**arguments, generation_config="vllm", logprobs_mode="processed_logprobs")
    limit = config.rollout.max_new_tokens
    batches = [batch_of(run, step, 0, 1) for step in range(task["skipped"] + task["steps"])]
    prompts = [[ids for group in prompts_of(one) for ids in group] for one in batches]

    def call(step: int) -> None:
        settings = [
            SamplingParams(
                max_tokens=limit,
                temperature=config.rollout.temperature,
                detokenize=False,
                stop_token_ids=task["stops"],
                output_kind=RequestOutputKind.FINAL_ONLY,
                seed=step * len(prompts[step]) + row,
                logprobs=0,
                flat_logprobs=True,
            )
            for row in range(len(prompts[step]))
        ]
        given: Any = [{"prompt_token_ids": tokens} for tokens in prompts[step]]
        outputs = llm.generate(given, settings, use_tqdm=False)
        lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
        if lengths != [limit] * len(given):
            raise RuntimeError(f"vLLM generated {sum(lengths)} tokens, of {limit * len(given)}")
        llm.reset_prefix_cache()  # as a publication does

    return {"seconds": timed(task, call)}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Time training alone on the batches that a run has recorded: each call is forward, loss,
    backward and optimizer step of one step's batch, with megarl's model and without its loop.
    Returns {"seconds": those of each counted call, "losses_and_norms": (loss, gradient norm) of
    each step}.
    """
    from megarl.settings.config import RunConfig, read
    from megarl.system.process_env import prepare_environment

    run = Path(task["run"])
    settings = [f"--replay.run={run}", f"--folder={task['folder']}", "--resume=false"]
    config = read(RunConfig, str(run / "recipe.yaml"), settings)
    prepare_environment(config.training.num_threads)
    from megarl.apps.runs.command_checks import check_replay
    from megarl.rollout.batch_files import batch_of
    from megarl.trainer.context import open_context

    Path(config.folder).mkdir()
    with ExitStack() as stack:
        context = stack.enter_context(open_context(config, check_replay(config)))
        role = context.role("policy", config.model, optimizer_steps=config.steps)
        batches = [batch_of(run, step, 0, 1) for step in range(task["skipped"] + task["steps"])]
        made: list[tuple[float, float]] = []
        seconds = timed(task, lambda step: made.append(train_step(role, batches[step], config)))
        return {"seconds": seconds, "losses_and_norms": made}


def train_step(role: Any, batch: Any, config: Any) -> tuple[float, float]:
    """One optimizer step on a batch of one mini-batch; returns (loss, gradient norm)."""
    from megarl.objectives.corrections import CORRECTIONS
    from megarl.objectives.losses import LOSSES
    from megarl.trainer.packing import SequenceMean
    from megarl.trainer.step import token_weights
    from megarl.trainer.step_advantages import step_advantages

    algorithm, mesh = config.algorithm, role.mesh
    packed = role.pack_step(batch)[0]
    advantages = step_advantages(
        batch, {}, algorithm, kl_coefficient=0.0, data=mesh.data, device=role.device
    )["advantages"][0]
    weights = token_weights(batch, 0, algorithm.aggregation, role.device, algorithm)
    total = 0.0
    for index, micro in enumerate(packed):
        logprobs, _ = role.engine(micro, config.rollout.temperature)
        samples, current = micro.sample_ids[micro.mask], logprobs.detach()
        mean = SequenceMean(samples, micro.members, mesh.sequence)
        chosen = advantages[micro.places[micro.mask]]
        terms = LOSSES[algorithm.loss](logprobs, current, chosen, mean, algorithm)
        correction = CORRECTIONS[algorithm.correction.kind](
            current, micro.engine_logprobs[micro.mask], mean.sum, algorithm.correction
        )
        loss = (weights[samples] * correction * terms.per_token).sum()
        total += float(loss.detach())
        role.engine.backward(loss, last=index == len(packed) - 1)
    return total, role.engine.step()[0]


def main(path: Path) -> None:
    """Do what the task in the file `path` says."""
    task = json.loads(path.read_text())
    found = {"generation": generate, "training": train}[task["part"]](task)
    path.with_suffix(".answer").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
