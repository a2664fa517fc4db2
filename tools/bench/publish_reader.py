"""The engine ranks of tools/bench/publish.py: processes with buffers in the place of an engine's
weights, or real vLLM engines; and `work`, which runs one process of a case.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

import peak_memory
import torch
import torch.distributed as dist
from naive_publish import DTYPE, ITEMSIZE, THROUGH
from publish_case import DIGESTS, Case, join
from publish_trainer import Trainer

from megarl.cluster.process_env import engine_environment
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.mesh import finalise
from megarl.parallel.reshard.boxes import ZEROS, empty_buffers, matrix
from megarl.rollout.config import EngineConfig
from megarl.rollout.engine import Engine
from megarl.weight_sync import bucket_receiver as receive
from megarl.weight_sync.checksums import signed
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports.transport_table import RECEIVERS

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Reader:
    """A process in the place of an engine rank, with buffers in the place of its weights."""

    def __init__(self, case: Case) -> None:
        self.case, self.ends, self.naive = case, {}, {}
        self.engine, self.part = divmod(case.wire.rank - 1, case.task["engine_tensor"])
        self.owned = case.engine[self.part]
        self.buffers = {
            name: buffer.to(case.device)
            for name, buffer in empty_buffers(self.owned, DTYPE).items()
        }
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
                signed(DIGESTS["on"][1](buffer[:, None], matrix(buffer.shape)))
                for buffer in self.buffers.values()
            ]
        return told

    def _publish(self, turn: dict[str, Any]) -> dict[str, Any]:
        way, received = (turn["transport"], turn["bucket_mib"]), -self.padding
        if way not in self.ends:
            info = broadcast_object([], self.case.wire)[self.engine]
            spec = RouteSpec(**info["spec"])
            place = spec.destination(self.engine, self.part)
            route = Route.of_destination(spec, self.case.table, place)
            receiver = RECEIVERS[info["transport"]](
                route, self.engine, self.part, info["init_info"]
            )
            self.ends[way] = receiver, receive.BucketReceiver(route, receiver)
        _, intake = self.ends[way]
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
                # As an engine: the transport waits for copies that were only started.
                running = self.buffers[name][start : start + len(buffer)]
                running.copy_(buffer, non_blocking=True)
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
    join(task)
    peak_memory.return_freed_memory(True)
    if task["device"] == "cpu":
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
