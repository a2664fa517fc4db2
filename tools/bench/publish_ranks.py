"""The processes of tools/bench/publish.py: trainer ranks with every way to send their weights, and
engine ranks, which are processes with buffers in the place of an engine's weights, or real vLLM
engines. `work` runs one process of a case.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peak_memory
import torch
import torch.distributed as dist
from common import engine_arguments

from megarl.engines.vllm_engine import Engine
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.parallel.launcher import rank
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, finalise, initialise
from megarl.parallel.reshard.boxes import ZEROS, empty_buffers, matrix
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.rollout import EngineConfig
from megarl.settings.training import ModelConfig
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.trainer.memory import sized_parameters
from megarl.weights import bucket_receiver as receive
from megarl.weights import checksums
from megarl.weights import publisher as wire
from megarl.weights.checksums import signed
from megarl.weights.parameters import engine_owned
from megarl.weights.probe import Probe
from megarl.weights.recorded_table import recorded_table
from megarl.weights.transports.base import wait_until
from megarl.weights.transports.shared_memory import SharedCounters

DTYPE, ITEMSIZE = torch.bfloat16, 2
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GPU_COPY_BYTES = 2**31
"""Bytes of the two tensors between which a GPU's copy is timed, again and again."""
LONGEST_PAUSE_S = 5e-5
"""Between two looks, of which every parameter needs several."""


class Case:
    """Who is who: trainer ranks first, then readers, one for each engine rank, or for each engine
    where they are real.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.rank = task, rank()
        self.layout = Layout(task["data"], task["sequence"], task["tensor"])
        self.device = torch.device(task["device"])
        """Where weights are, a trainer rank's and a reader's."""
        config = json.loads((Path(task["model"]) / "config.json").read_text())
        size, on_cpu = self.layout.size, self.device.type == "cpu"
        self.table = recorded_table(task["model"], config, task["engine_tensor"], on_cpu=on_cpu)
        self.shapes = {row.name: row.shape for row in self.table}
        sized = sized_parameters(ModelConfig(path=task["model"]), task["tensor"])
        self.shards = {
            parameter.name: parameter.shard for parameter in sized if parameter.shard is not None
        }
        self.owned = training_owned(self.shapes, self.shards, self.layout, task["zero"])
        self.engine = engine_owned(self.table, task["engine_tensor"])
        self.engine_bytes = sum(sum(owned.sizes.values()) for owned in self.engine) * ITEMSIZE
        # Collectives pad shares to equal ones.
        self.largest = max(math.prod(shape) + size * max(shape) for shape in self.shapes.values())
        everybody = tuple(range(dist.get_world_size()))
        self.everybody, self.trainers = self._axis([everybody]), self._axis([everybody[:size]])
        self.replicas = self._axis(self.layout.groups("data", "sequence"))
        self.tensor = self._axis(self.layout.groups("tensor"))
        self.wire = self._axis([(0, *everybody[size:])])
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
                takes_part = self.trainers or turn["way"] != "memcpy"
                act = partial(do if takes_part else lambda *_, **__: {}, turn)
                peak_memory.return_freed_memory(number == -2)
                barrier(self.everybody)
                if number == -2:
                    body = partial(act, is_first=True)
                    peak, kept["first"] = peak_memory.peak_of(body, self.device)
                    kept |= {"allocated": peak.allocated, "resident": peak.resident}
                    continue
                started_at = time.monotonic()
                told = act(is_first=False)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if number >= 0:
                    kept["spans"].append((started_at, time.monotonic()))
                    kept["told"].append(told)
        return found


# ------------------------------------------- the naive ways: each parameter whole, one at a time


class Gloo:
    """A broadcast of each parameter from rank 0, and a word from each reader when it is used."""

    def __init__(self, case: Case) -> None:
        self.axis, self.word = case.wire, torch.zeros(1)
        self.whole = torch.zeros(case.largest, dtype=DTYPE)

    def send(self, whole: torch.Tensor) -> None:
        dist.broadcast(whole, 0, group=self.axis.group)
        for reader in self.axis.ranks[1:]:
            dist.recv(self.word, reader, group=self.axis.group)

    def receive(self, numel: int) -> torch.Tensor:
        dist.broadcast(self.whole[:numel], 0, group=self.axis.group)
        return self.whole[:numel]

    def used(self) -> None:
        dist.send(self.word, 0, group=self.axis.group)


class Shared:
    """Memory for one whole parameter, which every reader sees."""

    def __init__(self, case: Case) -> None:
        readers, self.number, self.count = case.wire.size - 1, case.wire.rank - 1, 0
        mine = SharedCounters(1, readers, case.largest * ITEMSIZE) if case.rank == 0 else None
        path = broadcast_object(mine.path if mine else "", case.wire)
        self.board = mine or SharedCounters(1, readers, case.largest * ITEMSIZE, path)
        self.whole = self.board.memory().view(DTYPE)

    def send(self, whole: torch.Tensor) -> None:
        if whole.data_ptr() != self.whole.data_ptr():
            self.whole[: whole.numel()].copy_(whole)
        self.count += 1
        self.board.write(0, self.count)
        self._until(lambda: self.board.all_read() >= self.count)

    def receive(self, numel: int) -> torch.Tensor:
        self.count += 1
        self._until(lambda: self.board.written() >= self.count)
        return self.whole[:numel]

    def used(self) -> None:
        self.board.read(self.number, self.count)

    def _until(self, ready: Callable[[], bool]) -> None:
        wait_until(ready, lambda: False, lambda: None, longest_pause_s=LONGEST_PAUSE_S)
        self.board.until(ready, lambda: None)


def gather(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> None:
    """All-gather: writes the `part` of every rank of `axis` into `whole`, in the order of ranks.
    All parts have the same size.

    It uses isend and irecv, because gloo's all-gather allocates a second buffer for all parts in
    every call.
    """
    places = whole.view(axis.size, -1)
    others = [(place, other) for place, other in enumerate(axis.ranks) if place != axis.rank]
    work = [dist.irecv(places[place], other, group=axis.group) for place, other in others]
    work += [dist.isend(part, other, group=axis.group) for _, other in others]
    places[axis.rank].copy_(part)
    for one in work:
        assert one is not None
        one.wait()


THROUGH = {"gloo": Gloo, "shared memory": Shared}


# ------------------------------------------------------------------------------- trainer ranks


class Readers:
    """Stands in for the inference engines in rank 0's `Publisher`: passes its calls over gloo to
    this tool's receiver processes and collects their results.
    """

    def __init__(self, case: Case) -> None:
        self.axis, self.tensor = case.wire, case.task["engine_tensor"]
        self.engines = case.task["engines"]

    def is_one_host(self) -> bool:
        return True

    def connect(self, infos: Mapping[int, dict[str, Any]], *, timeout_s: float) -> None:
        broadcast_object([*infos.values()], self.axis)

    def hold(self, lost: Sequence[int]) -> tuple[list[int], bool]:
        return list(range(self.engines)), False

    def admit(self) -> dict[str, float]:
        return {}

    def update(self, version: int, *, timeout_s: float) -> Any:
        broadcast_object(version, self.axis)
        return self

    def result(self, *, timeout_s: float) -> list[list[dict[str, Any]]]:
        ranks = [owned for told in gather_objects([], self.axis) for owned in told]
        return [ranks[first : first + self.tensor] for first in range(0, len(ranks), self.tensor)]

    def poll(self, **_: Any) -> int:
        return 0

    settle = poll


class Trainer:
    """Its weights, and every way to send them."""

    def __init__(self, case: Case) -> None:
        self.case, self.version, self.publishers, self.naive = case, 0, {}, {}
        owned = case.owned[case.rank]
        # Room for the longest share of any rank: collectives want equal ones.
        room = {name: max(each.sizes[name] for each in case.owned) for name in owned.sizes}
        zeros = partial(torch.zeros, dtype=DTYPE, device=case.device)
        self.weights = {name: zeros(size) for name, size in room.items()}
        for seed, (name, shape) in enumerate(case.shapes.items()):
            draw, size = torch.Generator(case.device).manual_seed(seed), matrix(shape)
            settings: Any = {"generator": draw, "dtype": torch.int16, "device": case.device}
            bits = torch.randint(-(2**15), 2**15, (size.rows, size.columns), **settings)
            for piece in (piece for piece in owned.pieces if piece.tensor == name):
                top, bottom, left, right = piece.box
                piece.view(self.weights[name]).copy_(bits[top:bottom, left:right].view(DTYPE))
        share = case.engine_bytes if case.rank == 0 else case.engine_bytes // case.layout.size
        if case.device.type == "cuda":  # which has weights twice, and not room for two copies more
            share = min(share, GPU_COPY_BYTES)
        ones = torch.ones(share, dtype=torch.uint8, device=case.device)
        self.pair = ones, ones + 1

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            takes_part = self.case.rank < turn["processes"]
            share = self.case.engine_bytes // turn["processes"] if takes_part else 0
            for first in range(0, share, max(1, len(self.pair[0]))):
                count = min(len(self.pair[0]), share - first)
                self.pair[1][:count].copy_(self.pair[0][:count])
            return {}
        if turn["way"] != "per parameter":
            return self._publish(turn, is_first)
        self._per_parameter(turn["through"])
        if is_first:
            self.naive.clear()
        return {}

    def _publish(self, turn: dict[str, Any], is_first: bool) -> dict[str, Any]:
        way = turn["transport"], turn["bucket_mib"]
        self.version, written, carry = self.version + 1, 0, checksums.carry

        def counted(source: torch.Tensor, target: torch.Tensor, box: Any) -> checksums.Digest:
            nonlocal written
            written += target.nbytes
            return carry(source, target, box)

        if way not in self.publishers:
            self.publishers[way] = self._publisher(*way)
        with patch.object(checksums, "carry", counted if is_first else carry):
            found = self.publishers[way].publish(self.version)
        route = self.publishers[way].route
        if is_first:
            self.publishers.pop(way).close()
        if self.case.device.type == "cuda":  # whose copies to the host are not made by `carry`
            written = route.written
        return found | {"written": written, "planned": route.written, "buckets": len(route.buckets)}

    def _publisher(self, transport: Any, bucket_mib: int) -> wire.Publisher:
        case, task = self.case, self.case.task
        shared = {"shapes": case.shapes, "shards": case.shards, "fused": {}}
        shared["owned"] = lambda: self.weights
        policy = SimpleNamespace(zero_stage=task["zero"], **shared)
        limits: Any = {"bucket_mib": bucket_mib, "timeout_s": task["deadline"]}
        text: Any = {"vocab_size": 2, "max_tokens": 2, "seed": 0, "tolerance": 0.0}
        return wire.Publisher(
            WeightSyncConfig(transport=transport, probe_every=0, replacements=0, **limits),
            table=case.table,
            policy=policy,  # type: ignore[arg-type]
            engines=Readers(case) if case.rank == 0 else None,  # type: ignore[arg-type]
            num_engines=task["engines"],
            engine_tensor=task["engine_tensor"],
            mesh=SimpleNamespace(layout=case.layout, world=case.trainers),  # type: ignore[arg-type]
            dtype="bfloat16",
            probe=Probe.random(dtypes=["bfloat16"], **text),
        )

    def _per_parameter(self, through: str) -> None:
        case = self.case
        if through not in self.naive:
            post = THROUGH[through](case) if case.rank == 0 else None
            needed = (post is None, case.is_sliced and case.shards, case.shards)
            made = [torch.zeros(case.largest if need else 0, dtype=DTYPE) for need in needed]
            self.naive[through] = post, post.whole if post else made[0], made[1], made[2]
        post, *room = self.naive[through]
        for name, shape in case.shapes.items():
            whole = self._gather(name, shape, *room)
            if post is not None:
                post.send(whole)

    def _gather(
        self, name: str, shape: tuple[int, ...], last: Any, slices: Any, parts: Any
    ) -> torch.Tensor:
        """Gather parameter `name` of `shape` from the shares of all ranks; returns it flat.

        `last`, `slices` and `parts` are buffers for gathered shares, each as long as the largest
        parameter: the result is in `last`, unless nothing had to be gathered, then it is the
        rank's own weight; `slices` is for ZeRO slices, `parts` for tensor-parallel parts that
        still have to be put in order.
        """
        case, owned, shard = self.case, self.weights[name], self.case.shards.get(name)
        if case.is_sliced:
            length = max(case.owned[rank].sizes[name] for rank in case.replicas.ranks)
            found = last if shard is None else slices
            gather(found[: length * case.replicas.size], owned[:length], case.replicas)
            owned = found
        if shard is None:
            return owned[: math.prod(shape)]
        length = max(shard.lengths) * math.prod(shape) // shard.whole
        even_rows = shard.dim == 0 and len(set(shard.lengths)) == 1
        found = (last if even_rows else parts)[: length * case.tensor.size]
        gather(found, owned[:length], case.tensor)
        whole = last[: math.prod(shape)]
        for number, count in enumerate(shard.lengths if not even_rows else ()):
            target = whole.view(shape).narrow(shard.dim, shard.edges[number], count)
            target.copy_(found[number * length :][: target.numel()].view(target.shape))
        return whole


# -------------------------------------------------------------------------------- engine ranks


class Reader:
    """A process in the place of an engine rank, with buffers in the place of its weights."""

    def __init__(self, case: Case) -> None:
        self.case, self.ends, self.naive = case, {}, {}
        self.engine, self.part = divmod(case.wire.rank - 1, case.task["engine_tensor"])
        self.owned = case.engine[self.part]
        empty = empty_buffers(self.owned, DTYPE)
        self.buffers = {name: buffer.to(case.device) for name, buffer in empty.items()}
        padding = (piece.box.area for piece in self.owned.pieces if piece.tensor == ZEROS)
        self.padding = sum(padding) * ITEMSIZE

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        for buffer in self.buffers.values() if is_first else ():
            buffer.zero_()
        naive = turn["way"] == "per parameter"
        received = self._per_parameter(turn["through"]) if naive else self._publish(turn)
        told: dict[str, Any] = {"received": received}
        if is_first:
            self.ends.clear()
            self.naive.clear()
        if is_first and turn["way"] != "publish":
            told["content"] = [
                signed(receive.digest(buffer[:, None], matrix(buffer.shape)))
                for buffer in self.buffers.values()
            ]
        return told

    def _publish(self, turn: dict[str, Any]) -> int:
        way, received = (turn["transport"], turn["bucket_mib"]), -self.padding
        if way not in self.ends:
            info = broadcast_object([], self.case.wire)[self.engine]
            made = receive.InitInfo(**info)
            self.ends[way] = receive.BucketReceiver(made, self.part)
        intake = self.ends[way]
        version = broadcast_object(0, self.case.wire)
        for bucket, buffers in intake.buckets(self.case.task["deadline"]):
            intake.digest(bucket, buffers)
            started_at = time.perf_counter()
            received += sum(buffer.nbytes for buffer in buffers.values())
            for name, buffer in buffers.items() if turn["way"] == "publish + copy" else ():
                start = bucket.starts[name]
                # As an engine: the transport waits for copies that were only started.
                running = self.buffers[name][start : start + len(buffer)]
                running.copy_(buffer, non_blocking=True)
            intake.seconds["install"] += time.perf_counter() - started_at
        gather_objects([intake.status(version)], self.case.wire)
        return received

    def _per_parameter(self, through: str) -> int:
        if through not in self.naive:
            self.naive[through] = THROUGH[through](self.case)
        post, received = self.naive[through], 0
        wanted: dict[str, list[Any]] = {}
        for piece in self.owned.pieces:
            wanted.setdefault(piece.tensor, []).append(piece)
        for name, shape in self.case.shapes.items():
            whole, size = post.receive(math.prod(shape)), matrix(shape)
            received += whole.nbytes
            for piece in wanted.get(name, ()):
                top, bottom, left, right = piece.box
                part = whole.view(size.rows, size.columns)[top:bottom, left:right]
                piece.view(self.buffers[piece.buffer]).copy_(part)
            post.used()
        return received


class RealEngine:
    """A process with a vLLM engine, of random weights at first."""

    def __init__(self, case: Case) -> None:
        for name in LAUNCHER:  # vLLM launches its own
            os.environ.pop(name)
        task = case.task
        self.case, self.is_connected, self.number = case, False, case.wire.rank - 1
        on_cpu = task["device"] == "cpu"
        # On a GPU beside the trainer's weights, and eager, which starts sooner.
        config = EngineConfig(
            tensor=task["engine_tensor"],
            dtype="bfloat16",
            gpu_memory_utilization=0.35,
            compile=False,
        )
        arguments = engine_arguments(
            on_cpu=on_cpu, model=task["model"], config=config, max_tokens=64
        )
        self.engine = Engine(**arguments | {"number": self.number})
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if not self.is_connected:
            info = broadcast_object([], self.case.wire)[self.number]
            self.loop.run_until_complete(self.engine.connect(info))
        self.is_connected = not is_first  # the trainer begins anew after the first round
        version = broadcast_object(0, self.case.wire)
        update = self.engine.update(version, self.case.task["deadline"])
        gather_objects(self.loop.run_until_complete(update), self.case.wire)
        return {}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Run one process of a benchmark's case: a training rank or a reader of weights. Returns its
    times and counts.
    """
    torch.set_num_threads(1)
    peak_memory.return_freed_memory(True)
    if task["device"] == "cpu":
        initialise(timeout_s=task["deadline"])
        peak_memory.check()
    else:
        # As a colocated engine, the reader shares the trainer rank's GPU, and NCCL refuses two
        # ranks on one. Between the two go small objects alone; weights take the transport.
        torch.cuda.set_device(0)
        dist.init_process_group("gloo", timeout=timedelta(seconds=task["deadline"]))
    case = Case(task)
    role = (Trainer if case.trainers else RealEngine if task["with_engine"] else Reader)(case)
    found = {
        "turns": case.rounds(role.do),
        "engine_bytes": case.engine_bytes,
        "is_trainer": bool(case.trainers),
        "parameters": sum(map(math.prod, case.shapes.values())),
    }
    if isinstance(role, RealEngine):
        role.loop.run_until_complete(role.engine.stop())
    dist.barrier()  # gloo's threads do not like peers that leave first
    finalise()
    return found
