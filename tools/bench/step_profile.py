"""Where the time of a training step on the CPU goes, by torch.profiler: for tools/bench/prefix.py.

Modules and parts of a step are named ranges. What an operator took counts for the innermost range
around it. In the backward pass there are no ranges around operators: a node of the graph counts for
the range of the forward operator that made it, which has the same sequence number.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "part of a step: "
OTHERS, OUTSIDE = "others in the model", "outside of operators"
PARTS = (
    *("linear layers", "attention", "rotary embeddings, heads", "norms", "gated activations"),
    *("embedding", OTHERS, "loss head", "loss", "optimizer, clipping", "packing", OUTSIDE),
)
"""The rows of the table."""


def _part_of(module: nn.Module) -> str | None:
    """The part of a step that a module's forward pass is, if it has a row of its own."""
    name = type(module).__name__
    if name == "LogProbHead":
        return "loss head"
    if isinstance(module, nn.Linear):
        return "linear layers"
    if name.endswith("Norm"):
        return "norms"
    if name.endswith("Attention"):
        return "rotary embeddings, heads"
    if name.endswith("MLP"):
        return "gated activations"
    return "embedding" if isinstance(module, nn.Embedding) else None


@contextmanager
def _as_part(owner: Any, name: str, part: str) -> Iterator[None]:
    """While open, the function `owner.name` is the part `part` of a step."""
    whole = getattr(owner, name)

    def inside(*arguments: Any, **named: Any) -> Any:
        with record_function(PREFIX + part):
            return whole(*arguments, **named)

    setattr(owner, name, inside)
    try:
        yield
    finally:
        setattr(owner, name, whole)


@contextmanager
def _modules_as_parts(model: nn.Module) -> Iterator[None]:
    """While open, the forward pass of each module is a part of a step."""
    with ExitStack() as stack:
        stack.enter_context(_as_part(model, "forward", OTHERS))
        for module in model.modules():
            if module is not model and (part := _part_of(module)):
                stack.enter_context(_as_part(module, "forward", part))
        yield


def _named(event: Any, attention: tuple[str, ...]) -> str | None:
    """The part that an event itself names."""
    if event.name.startswith(PREFIX):
        return event.name.removeprefix(PREFIX)
    return "attention" if event.name in attention else None


def _times(events: list[Any], attention: tuple[str, ...]) -> dict[str, float]:
    """{part: seconds} of the operators among `events`."""
    nodes = [one for one in events if one.device_type == DeviceType.CPU]
    forward: dict[int, str] = {}  # {sequence number: part} of operators of the forward pass
    backward = "autograd::engine::evaluate_function"

    def part_of(event: Any) -> str:
        around = event
        while around is not None:
            if around.name.startswith(backward):
                return forward.get(around.sequence_nr, "loss")
            if part := _named(around, attention):
                return part
            around = around.cpu_parent
        return OTHERS

    def is_backward(event: Any) -> bool:
        while event is not None and not event.name.startswith(backward):
            event = event.cpu_parent
        return event is not None

    for event in nodes:
        if event.sequence_nr >= 0 and not is_backward(event):
            # A number is that of the last operator that asks for it: the innermost one.
            forward[event.sequence_nr] = part_of(event)
    found: dict[str, float] = defaultdict(float)
    for event in nodes:
        found[part_of(event)] += event.self_cpu_time_total / 1e6
    return dict(found)


def profile_of(
    step: Callable[[], object], model: nn.Module, functions: list[tuple[Any, str, str]]
) -> dict[str, Any]:
    """{"parts": {part: seconds}, "profiled": seconds of the profiled step, "plain": of the same
    step before it}. `functions`: owner, name and part of functions that are parts of a step.
    """
    began = time.perf_counter()
    step()
    plain = time.perf_counter() - began
    with ExitStack() as stack:
        stack.enter_context(_modules_as_parts(model))
        for owner, name, part in functions:
            stack.enter_context(_as_part(owner, name, part))
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            began = time.perf_counter()
            step()
            profiled = time.perf_counter() - began
    events = list(recorded.events() or ())
    parts = _times(events, ("_OverTokens",))
    parts[OUTSIDE] = parts.get(OUTSIDE, 0.0) + max(0.0, profiled - sum(parts.values()))
    assert set(parts) <= set(PARTS), sorted(set(parts) - set(PARTS))
    return {"parts": parts, "profiled": profiled, "plain": plain}


def show(found: dict[str, Any]) -> Iterator[str]:
    """Lines of a table, the largest part first."""
    total = found["profiled"]
    yield f"{'part of a step with shared prompts':36} {'s':>7} {'share':>6}"
    for part, seconds in sorted(found["parts"].items(), key=lambda one: -one[1]):
        yield f"{part:36} {seconds:7.3f} {seconds / total:6.1%}"
    yield f"{'all':36} {total:7.3f}; without the profiler {found['plain']:.3f} s"
