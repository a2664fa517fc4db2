"""Who does what in a run, and who waits on whom, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.activity.files import Life, SpanRecord

LONGEST_CHAIN = 6
"""Processes that a chain of waits names."""


def doing(life: Life, span: SpanRecord | None, now: float) -> str:
    """What a process does, or did last, since when, and on whom it waits. `now`: seconds since the
    epoch.
    """
    if span is None:
        return "nothing recorded"
    around = [one.what for one in life.around(span)]
    words = ", in ".join([span.what, *around])
    until = life.last if life.is_alive is False else now
    words += f", for {seconds(until - span.begin)}"
    if span.deadline_s:
        words += f" of {seconds(span.deadline_s)}"
    if span.open or span.done:
        words += f" ({span.open} open, {span.done} answered)"
    if span.of:
        words += f", {'waits on' if span.kind == 'wait' else 'with'} {', '.join(span.of)}"
    return words


def condition(life: Life) -> str:
    """Whether a process lives: "alive", "stopped by a signal", "ended", "gone" (without an end in
    order) or "on HOST".
    """
    if life.closed:
        return "ended"
    if not life.is_here:
        return f"on {life.host}"
    state = life.state
    return "gone" if not state else state if state.startswith("stopped") else "alive"


def is_out(life: Life) -> bool:
    """Whether a process is known to have ended or to be stopped."""
    return condition(life) not in ("alive", f"on {life.host}")


def named(names: Sequence[str], lives: Mapping[str, Life]) -> list[Life]:
    """The processes that the names of a span mean: "engines" is every engine, "3 ranks" every
    rank, "ranks 2-3" as it says.
    """
    found = []
    for name in names:
        kind = "engine" if name == "engines" else "rank" if name.endswith(" ranks") else ""
        if kind:
            found += [one for key, one in lives.items() if key.startswith(kind)]
        elif name in lives:
            found.append(lives[name])
    return found


def culprit(span: SpanRecord, waiting: str, lives: Mapping[str, Life]) -> Life | None:
    """Of the processes that the span of process `waiting` waits on, the one that most likely keeps
    it: one that is gone or stopped, else one that is not in the same wait; None if it is unknown.
    """
    candidates = [one for one in named(span.of, lives) if one.process != waiting]
    dead = [one for one in candidates if is_out(one)]
    other = [one for one in candidates if span.what not in [open.what for open in one.open]]
    return next(iter([*dead, *other, *candidates]), None)


def chain(waiting: str, span: SpanRecord, lives: Mapping[str, Life], now: float) -> list[str]:
    """One text for each process of the chain of waits that begins with `span`: who keeps whom."""
    found, seen = [], {waiting}
    if span.of and not named(span.of, lives):
        return [f"{', '.join(span.of)}, of which nothing is recorded"]
    while len(found) < LONGEST_CHAIN and (keeps := culprit(span, waiting, lives)) is not None:
        name = keeps.process
        if name in seen:
            found.append(f"{name} again: a circle")
            break
        seen.add(name)
        inner = keeps.open
        state = condition(keeps)
        said = f"{name} is {state}" if state != "alive" else name
        if not inner:
            found.append(f"{said}: idle")
            break
        waits = [one for one in inner if one.of]
        span = min(waits, key=lambda one: one.begin) if waits else inner[-1]
        found.append(f"{said}: {doing(keeps, span, now)}")
        # What a process computes may be in a part of it, such as "engine0-core".
        parts = [one for key, one in lives.items() if key.startswith(f"{name}-")]
        found += [f"{one.process} is {condition(one)}" for one in parts if is_out(one)]
        if state != "alive" or found[-1].startswith(f"{name}-"):
            break
        waiting = name
    return found


def seconds(value: float) -> str:
    """A duration for people."""
    value = max(0.0, value)
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
