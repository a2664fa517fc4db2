"""Every transport between gloo trainer ranks and engine ranks that are processes of their own: what
arrives, and what is said if it does not.

One launch a layout brings versions across through every transport in turn, then kills a receiver,
gives up, and waits for nobody.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import astuple
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.engine_ranks import (
    DEADLINE_S,
    Case,
    Engines,
    regions,
    spec_of,
    table,
    weights,
    whole_plan,
)
from support.ranks import run_ranks

from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import all_reduce, barrier, broadcast_object, gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.reshard.boxes import scatter
from megarl.weights.checksums import carried, signed
from megarl.weights.route import Route
from megarl.weights.transports import cuda_ipc
from megarl.weights.transports.transport_table import TRANSPORTS

NEVER_S = 1.0
"""Patience with a receiver that does not come."""

DIE_AT, STOP_AT = 5, 4
"""Buckets in the middle of a version."""


SHARDED, CUT, ALONE = Case(2, 1, 3, 2, 1), Case(1, 2, 1, 1, 2), Case(1, 1, 2, 2, 2)
ON_CPU = ("shared_memory", "point_to_point")


def attempt(
    sender: Any,
    engines: Engines | None,
    axis: Any,
    transport: str,
    version: int,
    number: int,
    *,
    timeout_s: float = DEADLINE_S,
    stop_at: int = -1,
    die_at: int = -1,
    without: int = -1,
) -> dict[str, Any]:
    """Try number `number` at a version, as a publisher does it, the same on all ranks: what went
    wrong on each,
    and what was found.
    """
    route, started_at, problem, answers = sender._route, time.monotonic(), "", []
    sources = scatter(
        whole_plan(route.spec, table(route.spec.engine_tensor)).sources[axis.rank], weights(version)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = {name: value.to(device) for name, value in sources.items()}
    digests = torch.zeros(route.spec.num_destinations, len(route.tensors), dtype=torch.int64)
    place = {name: number for number, name in enumerate(route.tensors)}

    def watch() -> None:
        if time.monotonic() > started_at + timeout_s:
            raise RuntimeError("the deadline has passed")
        if engines is not None and transport != "point_to_point":  # which notices by itself
            engines.poll()

    sent: Counter[tuple[int, int]] = Counter()
    if transport == "point_to_point":
        send = type(sender._group).send

        def counted(messages: dict[int, Any], *rest: Any) -> Any:
            sent.update({(axis.rank, to - axis.size): one.nbytes for to, one in messages.items()})
            return send(sender._group, messages, *rest)

        sender._group.send = counted
    for first in (True, False):  # rank 0 before the others
        if first == (axis.rank == 0):
            sender.begin(number, anew=engines is not None and engines.connected != transport)
        barrier(axis)
    try:
        if engines is not None:
            engines.connect(
                transport, route.spec, sender.init_info() if engines.connected != transport else {}
            )
            engines.update(version, without, die_at)
        for bucket in route.buckets:
            for copy, value in carried(regions(sources, sender.reserve(bucket, watch))):
                digests[copy.destination, place[copy.tensor]] += signed(value)
            if bucket.number == stop_at and axis.rank == axis.size - 1:
                raise ValueError("stopped on purpose")
            sender.commit(bucket, watch)
        if engines is not None:
            answers = engines.answers(timeout_s)
            if without >= 0 or any("error" in answer for answer in answers):
                raise RuntimeError(
                    "the deadline has passed" if without >= 0 else f"engines failed: {answers}"
                )
    except Exception as error:
        problem, seconds = f"{type(error).__name__}: {error}", time.monotonic() - started_at
        sender.abort()
        victim = engines.victim if engines is not None else 0
        progress = sender.progress(victim) if axis.rank == 0 else 0
        if engines is not None:
            answers, engines.connected = answers or engines.answers(3.0), ""
        found = {"seconds": seconds, "progress": progress}
    else:
        found = {"seconds": time.monotonic() - started_at, "progress": len(route.buckets)}
    problems = gather_objects(problem, axis)
    found |= {
        "sent": sum(gather_objects(sent, axis), Counter()),
        "digests": all_reduce(digests, axis).tolist(),
    }
    found = broadcast_object(found | {"answers": answers}, axis)
    return found | {"problems": problems}


def through(
    transport: str, case: Case, axis: Any, engines: Engines | None, faults: bool
) -> dict[str, Any]:
    """What one transport did: the attempts by name, and what was planned."""
    route = Route.of_source(spec_of(case, transport), table(case.engine_tensor), axis.rank)
    sender = TRANSPORTS[transport].Sender(route, axis)
    found: dict[str, Any] = {}

    def bring(what: str, version: int, **options: Any) -> None:
        number = len(found) + 1
        found[what] = attempt(sender, engines, axis, transport, version, number, **options)

    for version in range(3):
        bring(f"version {version}", version)
    if faults:
        bring("killed", 3, die_at=DIE_AT)
        if engines is not None:
            engines.replace()
        bring("version 3", 3)
        bring("stopped", 4, stop_at=STOP_AT)
        bring("version 4", 4)
        bring("never", 5, without=case.engines * case.engine_tensor - 1, timeout_s=NEVER_S)
        bring("version 5", 5)
    destinations = [
        route.spec.destination(engine, rank)
        for engine in range(case.engines)
        for rank in range(case.engine_tensor)
    ]
    plan = whole_plan(route.spec, table(route.spec.engine_tensor))
    found |= {"links": plan.links(route.dtype.itemsize), "written": route.written}
    found |= {"buckets": len(route.buckets), "destinations": destinations}
    barrier(axis)
    found["registered"] = transport == "shared_memory" and sender._pinned.is_registered
    sender.close()
    return found


def drive(
    sizes: tuple[int, ...], transports: tuple[str, ...], faults: bool
) -> dict[str, dict[str, Any]]:
    """What each transport did, on one trainer rank."""
    case = Case(*sizes)
    mesh_module.initialise(timeout_s=60)
    found: dict[str, dict[str, Any]] = {}
    with ProcessMesh(Layout(case.data, 1, case.tensor), timeout_s=60) as mesh:
        axis = mesh.world
        engines = Engines(case, len(transports) if faults else 0) if axis.rank == 0 else None
        barrier(axis)
        try:
            for transport in transports:
                found[transport] = through(transport, case, axis, engines, faults)
        finally:
            if engines is not None:
                engines.close()
        gather_objects(None, axis)
    mesh_module.finalise()
    return found


@cache
def outcome(
    case: Case, transports: tuple[str, ...], faults: bool, gpu: bool = False
) -> dict[str, dict[str, Any]]:
    """What `drive` found on rank 0."""
    with patch.dict(os.environ, {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}):
        arguments = astuple(case), transports, faults
        return run_ranks(case.num_ranks, __file__, "drive", *arguments, timeout_s=120)[0]


def check_version(found: dict[str, Any], destinations: list[int]) -> None:
    assert not any(found["problems"]), found["problems"]
    for destination, answer in zip(destinations, found["answers"], strict=True):
        assert answer["wrong"] == []
        assert answer["digests"] == found["digests"][destination]


def check_versions(here: dict[str, Any], transport: str, case: Case) -> None:
    assert here["buckets"] > 10
    assert here["written"] == here["links"].total()
    versions = [name for name in here if name.startswith("version")]
    for name in versions:
        check_version(here[name], here["destinations"])
        if transport == "point_to_point":
            sent = {  # every engine gets what the plan has for one
                (source, to + engine * case.engine_tensor): size
                for (source, to), size in here["links"].items()
                for engine in range(case.engines)
            }
            assert here[name]["sent"] == sent
    assert len({str(here[name]["digests"]) for name in versions}) == len(versions)


@pytest.mark.parametrize("transport", ON_CPU)
@pytest.mark.parametrize("case", [SHARDED, CUT, ALONE], ids=str)
def test_every_version_arrives_whole(case: Case, transport: str) -> None:
    check_versions(outcome(case, ON_CPU, case == SHARDED)[transport], transport, case)


@pytest.mark.parametrize("transport", ON_CPU)
def test_a_killed_receiver_is_noticed_and_a_fresh_one_takes_its_place(
    transport: str,
) -> None:
    here = outcome(SHARDED, ON_CPU, True)[transport]
    killed = here["killed"]
    assert killed["seconds"] < DEADLINE_S, killed
    if transport == "point_to_point":
        # Who sees the connection break first names the engine, and the others give the version up.
        said = {problem.split(" is gone")[0].split(":")[0] for problem in killed["problems"]}
        assert said <= {"ProcessLost", "Aborted"} and "ProcessLost" in said, killed
        named = [problem for problem in killed["problems"] if problem.startswith("ProcessLost")]
        assert all(
            problem.startswith("ProcessLost: rank 0 of engine 0 is gone") for problem in named
        )
    else:
        assert any("died" in problem for problem in killed["problems"]), killed["problems"]
    assert killed["answers"][0] == {"error": "died"}
    assert killed["progress"] == DIE_AT
    check_version(here["version 3"], here["destinations"])


@pytest.mark.parametrize("transport", ON_CPU)
def test_receivers_of_a_version_given_up_are_told(transport: str) -> None:
    here = outcome(SHARDED, ON_CPU, True)[transport]
    stopped = here["stopped"]
    assert stopped["problems"][1] == "ValueError: stopped on purpose"
    assert stopped["problems"][0].startswith("Aborted"), stopped
    said = [answer["error"].split(":")[0] for answer in stopped["answers"]]
    assert said == ["Aborted", "Aborted"]
    assert stopped["seconds"] < DEADLINE_S
    check_version(here["version 4"], here["destinations"])


@pytest.mark.parametrize("transport", ON_CPU)
def test_a_receiver_that_never_comes_is_an_error_at_the_deadline(transport: str) -> None:
    here = outcome(SHARDED, ON_CPU, True)[transport]
    never = here["never"]
    assert any("the deadline has passed" in problem for problem in never["problems"])
    assert all(
        problem.startswith(("RuntimeError: the deadline has", "Aborted"))
        for problem in never["problems"]
        if problem
    )
    assert 0.9 * NEVER_S < never["seconds"] < DEADLINE_S
    check_version(here["version 5"], here["destinations"])


@pytest.mark.gpu
def test_memory_of_gpus() -> None:
    """Also host memory that is registered, and written again as soon as it counts as read."""
    transports = ("cuda_ipc", "shared_memory")
    found = outcome(ALONE, transports, False, gpu=True)
    for transport in transports:
        check_versions(found[transport], transport, ALONE)
    assert found["shared_memory"]["registered"]


# ---- what one process can find out


def alone(transport: str) -> Any:
    """The only trainer rank's sender."""
    return TRANSPORTS[transport].Sender(
        Route.of_source(spec_of(ALONE, transport), table(ALONE.engine_tensor), 0),
        Axis("world", 1, 0, (0,), None),
    )


def test_cuda_ipc_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs GPUs"):
        alone("cuda_ipc")
    with pytest.raises(ValueError, match="needs GPUs"):
        TRANSPORTS["cuda_ipc"].Receiver(None, 0, 0, {})


def test_cuda_ipc_opens_only_what_it_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each memory that is opened costs a CUDA context on another rank's GPU."""
    make, opened = torch.empty, list[Any]()
    replaced: dict[str, Any] = {
        "_export_handle": lambda memory: len(memory),
        "_open_handle": lambda exported: opened.append(exported) or make(8, dtype=torch.uint8),
        "gather_objects": lambda mine, axis: [{n: f"memory {n}" for n in range(4)}] * 4,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(cuda_ipc, name, function)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **named: make(*size, **named))
    sender: Any = object.__new__(cuda_ipc.Sender)
    sender._axis = SimpleNamespace(rank=1, size=4)
    copies = [[SimpleNamespace(destination=1)], [SimpleNamespace(destination=3)], []]
    spec = SimpleNamespace(num_destinations=4)
    sender._route = SimpleNamespace(spec=spec, copies=copies, largest_bytes=8)
    assert sender._open().keys() == {1, 3} and opened == ["memory 3"]
