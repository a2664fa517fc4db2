"""One rank of tools/bench/layouts.py: trains a few steps under each layout and measures time,
memory and bytes sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import time
from typing import Any

ROW = tuple[int, int, int]
SEED = 1


def make_samples(task: dict[str, Any]) -> Any:
    """Documents of uneven lengths, `tokens` in all; half of each is trained on."""
    import numpy as np

    from megarl.types import Samples

    draw, tokens, count = random.Random(SEED), task["tokens"], task["documents"]
    edges = [0, *sorted(draw.sample(range(1, tokens // 4), count - 1)), tokens // 4]
    samples = []
    for row, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        length = 4 * (b - a)
        ids = [draw.randrange(2, task["vocab"]) for _ in range(length)]
        samples.append(Samples.one(row, ids, mask=np.arange(length) >= length // 2))
    return Samples.concatenate(samples)


class Bench:
    """One rank's measurements."""

    def __init__(self, task: dict[str, Any], device: Any) -> None:
        import peak_memory

        self.task, self.device, self.memory = task, device, peak_memory
        self.samples = make_samples(task)
        self.permitted = device.type == "cuda" or peak_memory.reset_resident_peak()

    def settings(self, stage: int) -> Any:
        from megarl.trainer.config import OptimizerConfig, SequenceConfig, TrainingConfig

        task = self.task
        return TrainingConfig(
            zero_stage=stage,  # type: ignore[arg-type]
            precision=task["dtype"],
            micro_batch_tokens=task["micro_batch_tokens"],
            gradient_checkpointing=task["gradient_checkpointing"],
            sequence=SequenceConfig(transport=task["transport"], cut=task["cut"]),
            optimizer=OptimizerConfig(learning_rate=task["learning_rate"]),
        )

    def owned(self, *, reset: bool = False) -> int:
        """Bytes in use; with `reset`, the peak begins anew here."""
        import torch

        if self.device.type == "cuda":
            if reset:
                torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        if reset:
            self.memory.reset_resident_peak()
        return self.memory.resident()

    def peak(self) -> int:
        import torch

        return (
            torch.cuda.max_memory_allocated()
            if self.device.type == "cuda"
            else self.memory.resident("VmHWM")
        )

    def measure(self, row: ROW, stage: int, steps: int) -> dict[str, Any]:
        """Train `steps` optimizer steps under layout `row` (data, sequence and tensor degree) and
        ZeRO `stage`, after steps that are not counted. Returns losses, times and memory.
        """
        from count_messages import MessageCount

        from megarl.apps.tune.sft import train
        from megarl.parallel.collectives import barrier
        from megarl.parallel.layout import Layout
        from megarl.parallel.mesh import ProcessMesh
        from megarl.trainer.config import ModelConfig
        from megarl.trainer.finite import StepGuard
        from megarl.trainer.role import Role

        task, training = self.task, self.settings(stage)
        self._give_back(at_once=True)
        before, losses, seconds = self.owned(), [], []
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(ProcessMesh(Layout(*row), timeout_s=task["deadline"]))
            role = Role(
                "policy",
                model=ModelConfig(path=task["model"], from_scratch=True),
                training=training,
                mesh=mesh,
                device=self.device,
                seed=SEED,
                optimizer_steps=steps + 3,
            )
            stack.callback(role.destroy)
            guard = StepGuard(role, allowed=0)

            def step() -> None:
                barrier(mesh.world)
                started_at = time.perf_counter()
                losses.append(train(role, self.samples, len(losses), guard).metrics["loss"])
                seconds.append(time.perf_counter() - started_at)

            step()
            self.owned(reset=True)
            with MessageCount() as count:
                step()
            peak = self.peak() - before
            self._give_back(at_once=False)
            for _ in range(1 + steps):
                step()
        return {
            "losses": losses,
            "seconds": seconds[3:],
            "peak_bytes": peak if self.permitted else None,
            "sent_bytes": count.sent,
            "calls": count.calls,
        }

    def _give_back(self, *, at_once: bool) -> None:
        """Return freed memory to the system, and choose how malloc keeps it: see peak_memory.py."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self.memory.return_freed_memory(at_once)
            ctypes.CDLL(None).malloc_trim(0)


def work(task: dict[str, Any]) -> dict[str, Any]:
    """All layouts and stages, on this rank."""
    import torch

    from megarl.parallel.mesh import finalise, initialise
    from megarl.trainer.config import ModelConfig
    from megarl.trainer.model_config import load_model_config
    from megarl.trainer.sharding import refuse_tensor

    torch.set_num_threads(1)
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    if 0 < num_gpus < num_ranks:
        raise ValueError(
            f"--ranks is {num_ranks}, but there are {num_gpus} GPUs; set it to {num_gpus}, or hide"
            " them"
        )
    device = initialise(timeout_s=task["deadline"])
    bench, found = Bench(task, device), {}
    if device.type == "cpu":
        bench.memory.return_freed_memory(True)
        bench.memory.check()
    config, skipped, possible = load_model_config(ModelConfig(path=task["model"])), {}, []
    for row in task["layouts"]:
        try:
            refuse_tensor(config, row[2])
        except ValueError as error:
            if task["asked"]:
                raise
            skipped["x".join(map(str, row))] = str(error)
        else:
            possible.append(tuple(row))
    for row in possible[:1]:  # loads libraries, and what DeepSpeed keeps of its first model
        bench.measure(row, task["zero"][0], 0)
    for stage in task["zero"]:
        for row in possible:
            found[f"{'x'.join(map(str, row))} {stage}"] = bench.measure(row, stage, task["steps"])
    finalise()
    return {
        "found": found,
        "skipped": skipped,
        "backend": "nccl" if device.type == "cuda" else "gloo",
    }
