"""The CPU part of tools/bench/attention.py: schedules on gloo ranks, beside one rank."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_inputs import Alone, documents, layer, make_tensors, repeated, trees
from common import cell, machine_busy_s, spread, warn_if_not_quiet

from megarl.kernels.sequence_attention import AttentionPlan
from megarl.parallel.sequence import cut

AGREES = 1e-5
SCHEDULES: dict[str, tuple[str, str, bool]] = {
    # name: cut, transport, whether all ranks are one Ulysses group
    "contiguous ring": ("contiguous", "ring", False),
    "zigzag ring": ("zigzag", "ring", False),
    "zigzag lean ring": ("zigzag", "ring_lean", False),
    "all-gather, zigzag": ("zigzag", "all_gather", False),
    "Ulysses": ("contiguous", "ring", True),
}


class Ranks:
    """The meshes of this rank, and every schedule ready to run."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from megarl.parallel.layout import Layout
        from megarl.parallel.mesh import ProcessMesh

        self.args, self.device = args, device
        self.ring_mesh, self.ulysses_mesh = (
            ProcessMesh(Layout(sequence=args.ranks), ulysses=u) for u in (1, args.ranks)
        )
        self.parents: list[int] = []
        self.starts = documents(args.tokens, args.documents)
        if args.group:
            self.starts, self.parents = trees(args.tokens, args.group)
        self.whole = self._tensors(self.starts)
        self.window: int | None = args.window or None
        self.plan = self._plan([torch.arange(len(self.whole[0]))])

    def _tensors(self, starts: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output, for the documents that begin at `starts`."""
        return make_tensors(self.args, int(starts[-1]), torch.float32, self.device)

    def _plan(self, indices: list[torch.Tensor], ulysses: int = 1) -> AttentionPlan:
        """The plan of ranks that have the tokens `indices`."""
        starts, parents = self.starts, self.parents
        return AttentionPlan.of(indices, starts, self.device, parents=parents, ulysses=ulysses)

    def alone(self) -> dict[str, AttentionPlan]:
        """{name: plan of one rank that has all tokens}: with all that the command line asks for,
        then without the window, and with repeated prompts.
        """
        plans = {"one rank": self.plan.within(self.window)}
        if plans["one rank"] is not self.plan:
            plans["one rank, no window"] = self.plan
        if self.args.group:
            starts = repeated(self.args.tokens, self.args.group)
            indices = [torch.arange(int(starts[-1]))]
            whole = AttentionPlan.of(indices, starts, self.device)
            plans["one rank, repeated"] = whole.within(self.window)
        return plans

    def runs(self) -> dict[str, Callable[[], list[torch.Tensor]]]:
        """Forward and backward of each schedule by name, "one rank" first.

        Raises `RuntimeError` if a schedule's output or gradients differ from those of one rank.
        """
        args = self.args
        runs: dict[str, Callable[[], list[torch.Tensor]]] = {}
        for name, plan in self.alone().items():
            tokens = plan.lengths[0]
            same = tokens == len(self.whole[0])
            tensors = self.whole if same else self._tensors(torch.tensor([0, tokens]))
            runs[name] = partial(layer, tensors, plan, Alone(), Alone(), "ring")
        results = {name: run() for name, run in runs.items()}  # so that none is timed cold
        expected = results["one rank"]
        shares_heads = args.heads % args.ranks == 0 and (
            args.kv_heads % args.ranks == 0 or args.ranks % args.kv_heads == 0
        )
        for name, (_, _, is_ulysses) in SCHEDULES.items():
            if is_ulysses and not shares_heads:
                continue
            mine, runs[name] = self._schedule(name)
            for found, whole in zip(runs[name](), expected, strict=True):
                error = float((found - whole[mine]).norm() / whole[mine].norm())
                if error > AGREES:
                    raise RuntimeError(
                        f"{name} differs from one rank by {error:.1e}, more than {AGREES:.0e}"
                    )
        return runs

    def _schedule(self, name: str) -> tuple[torch.Tensor, Callable[[], list[torch.Tensor]]]:
        """(indices of this rank's tokens, forward and backward on them)."""
        from megarl.parallel.exchange import RingExchange

        how, transport, is_ulysses = SCHEDULES[name]
        mesh = self.ulysses_mesh if is_ulysses else self.ring_mesh
        indices = cut(self.starts, self.args.ranks, how)
        plan = self._plan(indices, mesh.ulysses.size).within(self.window)
        mine = indices[mesh.sequence.rank]
        inner, outer = RingExchange(mesh.ulysses), RingExchange(mesh.ring, mesh.ring_back)
        tensors = [x[mine] for x in self.whole]
        return mine, lambda: layer(tensors, plan, inner, outer, transport)

    def close(self) -> None:
        for mesh in (self.ring_mesh, self.ulysses_mesh):
            mesh.destroy()


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One gloo rank: every schedule in turn, `rounds` times."""
    from megarl.parallel.collectives import barrier, gather_objects
    from megarl.parallel.mesh import finalise, initialise

    args = argparse.Namespace(**task)
    torch.set_num_threads(1)
    ranks = Ranks(args, initialise(timeout_s=args.deadline))
    runs, everybody = ranks.runs(), ranks.ring_mesh.sequence
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    busiest: dict[str, list[float]] = {name: [] for name in runs}
    others = []
    for _ in range(args.rounds):
        worked, began, round_cpu_s = machine_busy_s(), time.perf_counter(), time.process_time()
        for name, run in runs.items():
            barrier(everybody)
            start, start_cpu_s = time.perf_counter(), time.process_time()
            if everybody.rank == 0 or not name.startswith("one rank"):
                run()
            cpu_s = time.process_time() - start_cpu_s
            barrier(everybody)
            seconds[name].append(time.perf_counter() - start)
            busiest[name].append(max(gather_objects(cpu_s, everybody)))
        ours_s = sum(gather_objects(time.process_time() - round_cpu_s, everybody))
        wall_s = (time.perf_counter() - began) * (os.cpu_count() or 1)
        others.append(max(0.0, machine_busy_s() - worked - ours_s) / wall_s)
    pairs = {name: _pairs(plan) for name, plan in ranks.alone().items()}
    tokens = {name: plan.lengths[0] for name, plan in ranks.alone().items()}
    ranks.close()
    finalise()
    return {
        "seconds": seconds,
        "busiest": busiest,
        "others": others,
        "pairs": pairs,
        "tokens": tokens,
    }


def _pairs(plan: AttentionPlan) -> int:
    """(query, key) pairs that attention computes."""
    views = [view for own in plan.positions for view in own.views(plan.window)]
    return sum(int((view.index - view.first + 1).clamp_min(0).sum()) for view in views)


def table_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Times and ratios of each schedule, from what rank 0 measured."""
    seconds = measured["seconds"]
    table = {}
    for name, values in seconds.items():
        table[name] = {
            "seconds": spread(values),
            "busiest_cpu_s": spread(measured["busiest"][name]),
        }
        for key, base in (("x_one_rank", "one rank"), ("x_contiguous_ring", "contiguous ring")):
            table[name][key] = spread([b / a for a, b in zip(values, seconds[base], strict=True)])
    return {
        "schedules": table,
        "others": spread(measured["others"]),
        "pairs": measured["pairs"],
        "tokens": measured["tokens"],
    }


def show(result: dict[str, Any]) -> list[str]:
    """The schedules as lines of a table."""
    lines = [
        f"{'schedule':20} {'s forward + backward':>24} {'busiest, CPU s':>24} {'x one rank':>22}"
        f" {'x contiguous ring':>22}"
    ]
    for name, row in result["schedules"].items():
        keys = ("seconds", "busiest_cpu_s", "x_one_rank", "x_contiguous_ring")
        cells = [cell(row[key], ".2f") for key in keys]
        lines.append(f"{name:20} {cells[0]:>24} {cells[1]:>24} {cells[2]:>22} {cells[3]:>22}")
    pairs, tokens = result["pairs"], result["tokens"]
    for name in pairs:
        lines.append(f"{name}: {tokens[name]:,} tokens, {pairs[name]:,} pairs of query and key")
    lines.append(f"others: {cell(result['others'], '.0%')} of the CPU")
    return [*lines, *warn_if_not_quiet(result["others"]["max"])]
