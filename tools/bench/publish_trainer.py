"""The trainer ranks of tools/bench/publish.py: their weights, and every way to send them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from naive_publish import DTYPE, THROUGH, gather
from publish_case import Case

from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.reshard.boxes import matrix
from megarl.weight_sync import checksums
from megarl.weight_sync import publisher as wire
from megarl.weight_sync.config import WeightSyncConfig

GPU_COPY_BYTES = 2**31
"""Bytes of the two tensors between which a GPU's copy is timed, again and again."""


class Readers:
    """Stands in for the inference engines in rank 0's `Publisher`: passes its calls over gloo to
    this tool's receiver processes and collects their results.
    """

    def __init__(self, case: Case) -> None:
        self.axis, self.engines, self.tensor = (
            case.wire,
            case.task["engines"],
            case.task["engine_tensor"],
        )
        self.members, self.missing = list(range(self.engines)), 0

    def is_one_host(self) -> bool:
        return True

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        broadcast_object([info(number) for number in range(self.engines)], self.axis)

    def update(self, version: int, *, timeout_s: float) -> Any:
        broadcast_object(version, self.axis)
        return self

    def result(self, *, timeout_s: float) -> list[list[dict[str, Any]]]:
        ranks = [owned for told in gather_objects([], self.axis) for owned in told]
        return [ranks[first : first + self.tensor] for first in range(0, len(ranks), self.tensor)]

    def _nothing(self, **_: Any) -> int:
        return 0

    poll = settle = admit = hold = let_go = _nothing


class Trainer:
    """Its weights, and every way to send them."""

    def __init__(self, case: Case) -> None:
        self.case, self.version, self.publishers, self.naive = case, 0, {}, {}
        owned = case.owned[case.rank]
        # Room for the longest share of any rank: collectives want equal ones.
        self.weights = {
            name: torch.zeros(
                max(each.sizes[name] for each in case.owned), dtype=DTYPE, device=case.device
            )
            for name in owned.sizes
        }
        for seed, (name, shape) in enumerate(case.shapes.items()):
            draw, size = torch.Generator(case.device).manual_seed(seed), matrix(shape)
            bits = torch.randint(
                *(-(2**15), 2**15, (size.rows, size.columns)),
                generator=draw,
                dtype=torch.int16,
                device=case.device,
            )
            for piece in (piece for piece in owned.pieces if piece.tensor == name):
                top, bottom, left, right = piece.box
                piece.view(self.weights[name]).copy_(bits[top:bottom, left:right].view(DTYPE))
        share = case.engine_bytes if case.rank == 0 else case.engine_bytes // case.layout.size
        if case.device.type == "cuda":  # which has weights twice, and not room for two copies more
            share = min(share, GPU_COPY_BYTES)
        self.pair = [
            torch.full((share,), value, dtype=torch.uint8, device=case.device) for value in (1, 2)
        ]

    def do(self, turn: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        if turn["way"] == "memcpy":
            share = (
                self.case.engine_bytes // turn["processes"]
                if self.case.rank < turn["processes"]
                else 0
            )
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
        if is_first:
            checksums.carry = counted
        found = self.publishers[way].publish(self.version)
        route = self.publishers[way].route
        if is_first:
            self.publishers.pop(way).close()
        if self.case.device.type == "cuda":  # whose copies to the host are not made by `carry`
            written = route.written
        return found | {"written": written, "planned": route.written, "buckets": len(route.buckets)}

    def _publisher(self, transport: Any, bucket_mib: int) -> wire.Publisher:
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
            transport=transport,
            bucket_mib=bucket_mib,
            probe_every=0,
            replacements=0,
            timeout_s=task["deadline"],
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
