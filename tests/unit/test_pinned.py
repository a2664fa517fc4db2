"""The transport `shared_memory` on a GPU machine: registration with CUDA and the waits for copies, in
their order.

CUDA's calls are stand-ins that write down when they happen, and torch's copies are the real ones
of the CPU, which are done at once. The real CUDA is in test_carriers.py (`test_memory_of_gpus`).
Its counters in shared memory: only the memory that was meant is ever opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine_ranks import Case, regions, spec_of, table, weights, whole_plan

from megarl.errors import UserError
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import Box, scatter
from megarl.trainer.memory_lending import HostMemory
from megarl.weights import checksums
from megarl.weights.checksums import carried, carry, digest, signed
from megarl.weights.route import Route
from megarl.weights.transports import shared_memory
from megarl.weights.transports.shared_memory import Receiver, Sender, SharedCounters

ALONE = Case(1, 1, 1, 1, 1)
SUCCESS, REFUSED = "cudaError.success", "cudaError.???"
"""Answers of the driver, as torch's `cudaError` shows them: it has a name for success alone."""
OUT_OF_MEMORY = "out of memory"


class Machine:
    """A GPU machine of stand-ins. `happened`: what was called, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, *, answer: str = SUCCESS) -> None:
        self.happened, self.said, self.registered = list[str](), list[str](), dict[int, int]()
        self.answer, self.is_broken = answer, False
        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self.register,
                cudaHostUnregister=self.unregister,
                cudaError=SimpleNamespace(success=SUCCESS),
                cudaGetErrorString={REFUSED: OUT_OF_MEMORY}.__getitem__,
            ),
            "current_stream": lambda device: SimpleNamespace(synchronize=self.synchronize),
        }
        for name, function in cuda.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(shared_memory, "say", self.said.append)
        patch.setattr(torch, "ones", lambda *size, device: self.happened.append("kernel"))
        for name, called in (("write", "commit"), ("read", "was read"), ("close", "unmap")):
            patch.setattr(SharedCounters, name, self.noted(getattr(SharedCounters, name), called))

    def noted(self, function: Any, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.happened.append(name)
            return function(*arguments, **named)

        return call

    def register(self, address: int, size: int, flags: int) -> str:
        self.happened.append("register")
        if self.answer == SUCCESS:
            self.registered[address] = size
        return self.answer

    def unregister(self, address: int) -> None:
        self.happened.append("unregister")
        del self.registered[address]

    def synchronize(self) -> None:
        self.happened.append("wait")
        if self.is_broken:
            raise RuntimeError("an illegal memory access was encountered")

    def take(self) -> list[str]:
        """What happened since the last call, repeats left out."""
        found = self.happened
        self.happened = []
        return [one for number, one in enumerate(found) if found[number - 1 : number] != [one]]


def both_ends() -> tuple[Sender, Receiver]:
    spec = spec_of(ALONE, "shared_memory")
    sender = Sender(
        Route.of_source(spec, table(spec.engine_tensor), 0), Axis("world", 1, 0, (0,), None)
    )
    route = Route.of_destination(spec, table(spec.engine_tensor), spec.destination(0, 0))
    return sender, Receiver(route, 0, 0, sender.init_info())


def on_a_gpu(patch: pytest.MonkeyPatch, sources: dict[str, torch.Tensor]) -> None:
    """Take `sources` for tensors on a GPU."""
    there = {one.untyped_storage().data_ptr() for one in sources.values()}
    patch.setattr(checksums, "_on_gpu", lambda t: t.untyped_storage().data_ptr() in there)


def never() -> None:
    pass


@pytest.mark.parametrize("answer", [SUCCESS, REFUSED])
def test_copies_are_waited_for_before_a_bucket_counts(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver refuses the registration: that costs one warning at each end."""
    machine = Machine(monkeypatch, answer=answer)
    sender, receiver = both_ends()
    at_start = ["register"] if answer == SUCCESS else ["register", "kernel"] * 2
    assert machine.take() == at_start
    assert len(machine.said) == (0 if answer == SUCCESS else 2)
    sizes = {len(end._counters.memory()) for end in (sender, receiver)}
    assert set(machine.registered.values()) == (sizes if answer == SUCCESS else set())
    route = sender._route
    sources = scatter(
        whole_plan(route.spec, table(route.spec.engine_tensor)).sources[0], weights(1)
    )
    on_a_gpu(monkeypatch, sources)
    monkeypatch.setattr(
        torch.Tensor, "copy_", machine.noted(torch.Tensor.copy_, "copy"), raising=True
    )
    sender.begin(1)
    arriving = receiver.receive(never)
    for bucket in route.buckets:
        placed = regions(sources, sender.reserve(bucket, never))
        found = [value for _, value in carried(placed)]
        # Twice: for the digest of what has arrived, and for the bucket.
        assert machine.take() == ["copy", "wait"], bucket.number
        sender.commit(bucket, never)
        assert machine.take() == ["wait", "commit"]
        for value, (_, source, target, box) in zip(found, placed, strict=True):
            wanted = carry(source.bfloat16(), torch.empty_like(target), box)
            assert signed(value) == signed(wanted) == signed(digest(target, box))
        machine.take()
        next(arriving)
        assert machine.take() == (["wait", "was read"] if bucket.number else [])
    assert next(arriving, None) is None
    assert machine.take() == ["wait", "was read"]
    for end in (receiver, sender):
        end.close()
        end.close()
        released = ["wait", "unregister", "unmap"] if answer == SUCCESS else ["unmap"]
        assert machine.take() == released
    assert not machine.registered


def test_a_refusal_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, answer=REFUSED)
    memory = shared_memory.Pinned(torch.zeros(3 * 2**20, dtype=torch.uint8))
    memory.release()
    assert machine.take() == ["register", "kernel"]
    (said,) = machine.said
    assert "does not pin the 3 MiB" in said and f"({OUT_OF_MEMORY})" in said
    assert "ulimit -l" in said
    with pytest.raises(UserError, match=rf"\(cudaHostRegister: {OUT_OF_MEMORY}\)"):
        HostMemory(8, registered=True)


def test_memory_is_unregistered_after_an_error_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error comes with the next wait, which is the one of `close`."""
    machine = Machine(monkeypatch)
    ends = both_ends()
    machine.take()
    machine.is_broken = True
    for end in ends:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            end.close()
        assert machine.take() == ["wait", "unregister", "unmap"]
        end.close()
        assert machine.take() == ["unmap"]
    assert not machine.registered


def test_a_process_without_a_gpu_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for name in ("is_available", "is_initialized"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, name, lambda: False)
            memory = shared_memory.Pinned(torch.zeros(8, dtype=torch.uint8))
            memory.wait()
            memory.release()
    nothing = torch.zeros(0, dtype=torch.uint8)  # of `cuda_ipc`, which has none
    shared_memory.Pinned(nothing).release()
    assert machine.take() == []


def test_a_strided_target_is_not_copied_to_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    source, whole = torch.randn(4, 6), torch.zeros(4, 12)
    on_a_gpu(monkeypatch, {"source": source})
    box = Box(0, 4, 0, 6)
    ((key, value),) = carried([("a", source, whole[:, 3:9], box)])
    assert key == "a" and machine.take() == []
    assert torch.equal(whole[:, 3:9], source) and value == carry(source, torch.zeros(4, 6), box)


def test_other_memory_at_the_same_place_is_refused(tmp_path: Path) -> None:
    mine = SharedCounters(1, 1, 100)
    with pytest.raises(RuntimeError, match=r"not the trainer's memory.*'point_to_point'"):
        SharedCounters(1, 1, 100_000, mine.path)
    with pytest.raises(RuntimeError, match=r"cannot be opened.*'point_to_point'"):
        SharedCounters(1, 1, 100, f"/proc/{os.getpid()}/fd/99999")
    mine.close()
