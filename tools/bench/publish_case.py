"""What every process of tools/bench/publish.py knows: the case's ranks, shapes and shards, and the
rounds in which all processes take turns.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import peak_memory
import torch
import torch.distributed as dist
from naive_publish import ITEMSIZE

from megarl.parallel.collectives import barrier
from megarl.parallel.launcher import rank
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, initialise
from megarl.parallel.reshard.owned import training_owned
from megarl.weight_sync import bucket_receiver as receive
from megarl.weight_sync import checksums
from megarl.weight_sync.families import parameter_table, refuse_engine_tensor
from megarl.weight_sync.parameters import engine_owned, training_shards

DIGESTS = {
    "on": (checksums.carry, receive.digest),
    "off": (lambda source, target, box: 0 * len(target.copy_(source)), lambda owned, box: 0),
}
"""What trainer ranks and engine ranks do with each region."""


def join(task: dict[str, Any]) -> None:
    """Connect the processes of a case, under gloo."""
    if task["device"] == "cpu":
        initialise(timeout_s=task["deadline"])
        return
    # As a colocated engine, the reader shares the trainer rank's GPU, and NCCL refuses two ranks on
    # one. Between the two go small objects alone; weights take the transport.
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task["deadline"]))


class Case:
    """Who is who: trainer ranks first, then readers, one for each engine rank, or for each engine
    where they are real.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.rank, self.layout = (
            task,
            rank(),
            Layout(task["data"], task["sequence"], task["tensor"]),
        )
        self.device = torch.device(task["device"])
        """Where weights are, a trainer rank's and a reader's."""
        config = json.loads((Path(task["model"]) / "config.json").read_text())
        refuse_engine_tensor(config, task["engine_tensor"])
        self.table, size = parameter_table(config), self.layout.size
        self.shapes, self.shards = (
            {row.name: row.shape for row in self.table},
            training_shards(self.table, task["tensor"]),
        )
        self.owned = training_owned(self.shapes, self.shards, self.layout, task["zero"])
        self.engine = engine_owned(self.table, task["engine_tensor"])
        self.engine_bytes = sum(sum(owned.sizes.values()) for owned in self.engine) * ITEMSIZE
        # Collectives pad shares to equal ones.
        self.largest = max(math.prod(shape) + size * max(shape) for shape in self.shapes.values())
        everybody = tuple(range(dist.get_world_size()))
        self.everybody, self.trainers = self._axis([everybody]), self._axis([everybody[:size]])
        self.replicas = self._axis(self.layout.groups("data", "sequence"))
        self.tensor, self.wire = (
            self._axis(self.layout.groups("tensor")),
            self._axis([(0, *everybody[size:])]),
        )
        self.is_sliced = task["zero"] == 3 and size > task["tensor"]

    def _axis(self, groups: list[tuple[int, ...]]) -> Any:
        """This process's axis among `groups`, which all make together; None where it is in none."""
        made: dict[Any, Any] = {
            ranks: dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in groups
        }
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        return Axis("", len(mine), mine.index(self.rank), mine, made[mine]) if mine else None

    def rounds(self, do: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """What this process did in each turn, by rounds: one for memory and contents, one to make
        what is kept, those timed.
        """
        found: list[dict[str, Any]] = [{"spans": [], "told": []} for _ in self.task["turns"]]
        for number in range(-2, self.task["rounds"]):
            for turn, kept in zip(self.task["turns"], found, strict=True):
                checksums.carry, receive.digest = DIGESTS[turn["digest"]]
                peak_memory.return_freed_memory(number == -2)
                barrier(self.everybody)
                if number == -2:
                    body = partial(do, turn, is_first=True)
                    peak, kept["first"] = peak_memory.peak_of(body, self.device)
                    kept |= {"allocated": peak.allocated, "resident": peak.resident}
                    continue
                started_at = time.monotonic()
                told = do(turn, is_first=False)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if number >= 0:
                    kept["spans"].append((started_at, time.monotonic()))
                    kept["told"].append(told)
        return found
