"""The ways of bringing weights to engine ranks that tools/bench_publish.py compares: what each
process does in its turn.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peak_memory
import torch
import torch.distributed as dist
from naive_publish import DTYPE, ITEMSIZE, THROUGH, gather

from megarl.cluster.process_env import engine_environment
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, finalise, initialise, rank
from megarl.parallel.reshard.boxes import ZEROS, empty_buffers, matrix
from megarl.parallel.reshard.owned import training_owned
from megarl.rollout.config import EngineConfig
from megarl.rollout.engine import Engine
from megarl.weight_sync import bucket_receiver as receive
from megarl.weight_sync import publisher as wire
from megarl.weight_sync.checksums import signed
from megarl.weight_sync.config import WeightSyncConfig
from megarl.weight_sync.families import parameter_table, refuse_engine_tensor
from megarl.weight_sync.parameters import engine_owned, training_shards
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports.registry import RECEIVERS

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DIGESTS = {
    "on": (wire.carry, receive.digest),
    "off": (lambda source, target, box: 0 * len(target.copy_(source)), lambda owned, box: 0),
}
"""What trainer ranks and engine ranks do with each region."""


# -------------------------------------------------------------------------- all processes of a case


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
                wire.carry, receive.digest = DIGESTS[turn["digest"]]
                peak_memory.return_freed_memory(number == -2)
                barrier(self.everybody)
                if number == -2:
                    peak, kept["first"] = peak_memory.peak_of(partial(do, turn, is_first=True))
                    kept |= {"allocated": peak.allocated, "resident": peak.resident}
                    continue
                started_at = time.monotonic()
                told = do(turn, is_first=False)
                if number >= 0:
                    kept["spans"].append((started_at, time.monotonic()))
                    kept["told"].append(told)
        return found


# ----------------------------------------------------------------------------------- a trainer rank


class Readers:
    """Rank 0's engines, as `Publisher` knows them, and their answer: processes of this tool, asked
    over gloo.
    """

    def __init__(self, case: Case) -> None:
        self.axis, self.engines, self.tensor = (
            case.wire,
            case.task["engines"],
            case.task["engine_tensor"],
        )

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        broadcast_object([info(number) for number in range(self.engines)], self.axis)

    def update(self, version: int, *, timeout_s: float) -> Any:
        broadcast_object(version, self.axis)
        return self

    def result(self, *, timeout_s: float) -> list[list[dict[str, Any]]]:
        ranks = [owned for told in gather_objects([], self.axis) for owned in told]
        return [ranks[first : first + self.tensor] for first in range(0, len(ranks), self.tensor)]

    def _nothing(self, **_: Any) -> None:
        pass

    poll = settle = admit = _nothing


class Trainer:
    """Its weights, and every way to send them."""

    def __init__(self, case: Case) -> None:
        self.case, self.version, self.publishers, self.naive = case, 0, {}, {}
        owned = case.owned[case.rank]
        # Room for the longest share of any rank: collectives want equal ones.
        self.weights = {
            name: torch.zeros(max(each.sizes[name] for each in case.owned), dtype=DTYPE)
            for name in owned.sizes
        }
        for seed, (name, shape) in enumerate(case.shapes.items()):
            draw, size = torch.Generator().manual_seed(seed), matrix(shape)
            bits = torch.randint(
                -(2**15), 2**15, (size.rows, size.columns), generator=draw, dtype=torch.int16
            )
            for piece in (piece for piece in owned.pieces if piece.tensor == name):
                top, bottom, left, right = piece.box
                piece.view(self.weights[name]).copy_(bits[top:bottom, left:right].view(DTYPE))
        share = case.engine_bytes if case.rank == 0 else case.engine_bytes // case.layout.size
        self.pair = [torch.zeros(share, dtype=torch.uint8) + value for value in (1, 2)]

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            share = (
                self.case.engine_bytes // turn["processes"]
                if self.case.rank < turn["processes"]
                else 0
            )
            self.pair[1][:share].copy_(self.pair[0][:share])
            return {}
        if turn["way"] != "per parameter":
            return self._publish(turn, is_first)
        self._per_parameter(turn["through"])
        if is_first:
            self.naive.clear()
        return {}

    def _publish(self, turn: dict[str, Any], is_first: bool) -> dict[str, Any]:
        mib, self.version, written, carry = turn["bucket_mib"], self.version + 1, 0, wire.carry

        def counted(source: torch.Tensor, target: torch.Tensor, box: Any) -> int:
            nonlocal written
            written += target.nbytes
            return carry(source, target, box)

        if mib not in self.publishers:
            self.publishers[mib] = self._publisher(mib)
        if is_first:
            wire.carry = counted
        found = self.publishers[mib].publish(self.version)
        route = self.publishers[mib].route
        if is_first:
            self.publishers.pop(mib).close()
        return found | {"written": written, "planned": route.written, "buckets": len(route.buckets)}

    def _publisher(self, bucket_mib: int) -> wire.Publisher:
        case, task = self.case, self.case.task
        policy = {
            "zero_stage": task["zero"],
            "shapes": case.shapes,
            "shards": case.shards,
            "owned": lambda: self.weights,
        }
        settings: Any = {
            "table": case.table,
            "policy": SimpleNamespace(**policy),
            "engines": Readers(case) if case.rank == 0 else None,
            "num_engines": task["engines"],
            "engine_tensor": task["engine_tensor"],
            "mesh": SimpleNamespace(layout=case.layout, world=case.trainers),
            "dtype": "bfloat16",
            "precision": "bfloat16",
            "vocabulary": 2,
            "max_tokens": 2,
            "seed": 0,
        }
        publish = WeightSyncConfig(
            bucket_mib=bucket_mib, probe_every=0, replacements=0, timeout_s=task["deadline"]
        )
        return wire.Publisher(publish, **settings)

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
        """A parameter from all ranks' shares, flat; in `last`, if anything was to be gathered."""
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


# ----------------------------------------------------------------------------------- an engine rank


class Reader:
    """A process in the place of an engine rank, with buffers in the place of its weights."""

    def __init__(self, case: Case) -> None:
        self.case, self.ends, self.naive = case, {}, {}
        self.engine, self.part = divmod(case.wire.rank - 1, case.task["engine_tensor"])
        self.owned = case.engine[self.part]
        self.buffers = empty_buffers(self.owned, DTYPE)
        self.padding = (
            sum(piece.box.area for piece in self.owned.pieces if piece.tensor == ZEROS) * ITEMSIZE
        )

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            return {}
        for buffer in self.buffers.values() if is_first else ():
            buffer.zero_()
        if turn["way"] == "per parameter":
            told: dict[str, Any] = {"received": self._per_parameter(turn["through"])}
        else:
            told = self._publish(turn)
        if is_first:
            self.ends.clear()
            self.naive.clear()
        if is_first and turn["way"] != "publish":
            told["content"] = [
                DIGESTS["on"][1](buffer[:, None], matrix(buffer.shape))
                for buffer in self.buffers.values()
            ]
        return told

    def _publish(self, turn: dict[str, Any]) -> dict[str, Any]:
        mib, received = turn["bucket_mib"], -self.padding
        if mib not in self.ends:
            info = broadcast_object([], self.case.wire)[self.engine]
            spec = RouteSpec(**info["spec"])
            route, destination = (
                Route.of(spec, self.case.table),
                spec.destination(self.engine, self.part),
            )
            receiver = RECEIVERS[info["transport"]](
                route, self.engine, self.part, info["init_info"]
            )
            self.ends[mib] = receiver, receive.BucketReceiver(route, receiver, destination)
        _, intake = self.ends[mib]
        digests, seconds = (
            [0] * len(intake.route.tensors),
            {"wait": 0.0, "digest": 0.0, "install": 0.0},
        )
        version, watch = (
            broadcast_object(0, self.case.wire),
            receive.deadline_watch(self.case.task["deadline"]),
        )
        for bucket, buffers in intake.buckets(version, watch, seconds):
            intake.digest(bucket, buffers, digests, seconds)
            started_at = time.perf_counter()
            received += sum(buffer.nbytes for buffer in buffers.values())
            for name, buffer in buffers.items() if turn["way"] == "publish + copy" else ():
                start = bucket.starts[name]
                self.buffers[name][start : start + len(buffer)] = buffer
            seconds["install"] += time.perf_counter() - started_at
        owned = {
            "version": version,
            "digests": [signed(value) for value in digests],
            "seconds": seconds,
        }
        gather_objects([owned], self.case.wire)
        return {"received": received}

    def _per_parameter(self, through: str) -> int:
        if through not in self.naive:
            self.naive[through] = THROUGH[through](self.case)
        post, received, pieces = self.naive[through], 0, iter(self.owned.pieces)
        wanted: dict[str, list[Any]] = {}
        for piece in pieces:
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
        self.engine = Engine(
            number=self.number,
            model=task["model"],
            config=EngineConfig(tensor=task["engine_tensor"], dtype="bfloat16"),
            max_tokens=64,
            stop_token_ids=[],
            trust_remote_code=False,
            seed=0,
            environment=engine_environment(on_cpu=True, num_threads=1, kv_cache_gib=1),
        )
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            return {}
        if not self.is_connected:
            info = broadcast_object([], self.case.wire)[self.number]
            self.loop.run_until_complete(self.engine.connect(info))
        self.is_connected = not is_first  # the trainer begins anew after the first round
        version = broadcast_object(0, self.case.wire)
        owned = self.loop.run_until_complete(
            self.engine.update(version, self.case.task["deadline"])
        )
        gather_objects(owned, self.case.wire)
        return {}

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One process of a case."""
    torch.set_num_threads(1)
    initialise(timeout_s=task["deadline"])
    peak_memory.return_freed_memory(True)
    peak_memory.check()
    case = Case(task)
    role = (
        Trainer(case)
        if case.trainers
        else RealEngine(case)
        if task["with_engine"]
        else Reader(case)
    )
    found = {
        "turns": case.rounds(role.do),
        "engine_bytes": case.engine_bytes,
        "is_trainer": bool(case.trainers),
    }
    found |= {
        "parameters": sum(map(math.prod, case.shapes.values())),
        "rank_bytes": [sum(h.sizes.values()) for h in case.engine],
    }
    if isinstance(role, RealEngine):
        role.close()
    dist.barrier()  # gloo's threads do not like peers that leave first
    finalise()
    return found
