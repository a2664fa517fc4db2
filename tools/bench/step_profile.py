"""Where the time of a training step on the CPU goes, by torch.profiler: for tools/bench/prefix.py.

Modules and parts of a step are named ranges. What an operator took counts for the innermost range
around it. In the backward pass there are no ranges around operators: a node of the graph counts for
the range of the forward operator that made it, which has the same sequence number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from common import table
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "part of a step: "
OTHERS, OUTSIDE = "others in the model", "outside of operators"
MODULES = {
    "LogProbHead": "loss head",
    "Linear": "linear layers",
    "Norm": "norms",
    "Attention": "rotary embeddings, heads",
    "MLP": "gated activations",
    "Embedding": "embedding",
}
"""{end of a module's class: the part that its forward pass is}"""
BACKWARD, ATTENTION = "autograd::engine::evaluate_function", "_OverTokens"
"""Names of the profiler's events: a node of the backward pass, and the ring's function."""


def _as_part(owner: Any, name: str, part: str) -> Any:
    """Context manager, inside which the function `owner.name` is the part `part` of a step."""
    whole = getattr(owner, name)

    def inside(*arguments: Any, **named: Any) -> Any:
        with record_function(PREFIX + part):
            return whole(*arguments, **named)

    return patch.object(owner, name, inside)


def _around(event: Any) -> Iterator[Any]:
    """An event and those around it, the innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _times(events: Iterable[Any]) -> Counter[str]:
    """{part: seconds} of the operators among `events`."""
    nodes = [one for one in events if one.device_type == DeviceType.CPU]
    forward: dict[int, str] = {}  # {sequence number: part} of operators of the forward pass

    def part_of(event: Any) -> str:
        for one in _around(event):
            if one.name.startswith(BACKWARD):
                return forward.get(one.sequence_nr, "loss")
            if one.name.startswith(PREFIX) or one.name == ATTENTION:
                return "attention" if one.name == ATTENTION else one.name.removeprefix(PREFIX)
        return OTHERS

    for event in nodes:
        is_backward = any(one.name.startswith(BACKWARD) for one in _around(event))
        if event.sequence_nr >= 0 and not is_backward:
            # A number is that of the last operator that asks for it: the innermost one.
            forward[event.sequence_nr] = part_of(event)
    found: Counter[str] = Counter()
    for event in nodes:
        found[part_of(event)] += event.self_cpu_time_total / 1e6  # type: ignore[assignment]
    return found


def profile_of(
    step: Callable[[], object], model: nn.Module, functions: list[tuple[Any, str, str]]
) -> dict[str, Any]:
    """{"parts": {part: seconds}, "profiled": seconds of the profiled step, "plain": of the same
    step before it}. `functions`: owner, name and part of functions that are parts of a step.
    """

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    plain = timed()
    with ExitStack() as stack:
        for module in model.modules():
            ends = (part for end, part in MODULES.items() if type(module).__name__.endswith(end))
            part = OTHERS if module is model else next(ends, None)
            if part:
                stack.enter_context(_as_part(module, "forward", part))
        for one in functions:
            stack.enter_context(_as_part(*one))
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            profiled = timed()
    parts = _times(recorded.events() or ())
    parts[OUTSIDE] += max(0.0, profiled - parts.total())  # type: ignore[assignment]
    return {"parts": dict(parts), "profiled": profiled, "plain": plain}


def show(found: dict[str, Any]) -> Iterator[str]:
    """Lines of a table, the largest part first."""
    total = found["profiled"]
    parts = sorted(found["parts"].items(), key=lambda one: -one[1])
    rows = [{"part": part, "s": seconds, "share": seconds / total} for part, seconds in parts]
    columns = "part of a step with shared prompts=part; s .3f; share .1%"
    yield from table(rows, columns)
    yield f"all {total:.3f} s; without the profiler {found['plain']:.3f} s"
