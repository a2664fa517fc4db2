"""Fuzz of recipes: values for every setting by its type and range, YAML as text, command lines."""

from __future__ import annotations

import json
import math
import random
import types
import typing
from pathlib import Path
from typing import Any

from megarl.command_line.settings import settings as listed
from megarl.settings.config import (
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
)
from megarl.settings.schema import Range
from support.fuzz_case import Case, Expect

KINDS: dict[str, Any] = {
    "rl": RunConfig, "distill": DistillConfig, "eval": RunConfig, "sft": SftConfig,
    "preference": PreferenceConfig, "reward_model": RewardModelConfig,
}  # fmt: skip

PATHS = (
    "folder", "model.path", "model.tokenizer", "reference.model.path", "teacher.model.path",
    "prompts.source", "demonstrations.source", "evaluation.prompts.source",
    "environment.verifier", "environment.session",
)  # fmt: skip

TEXTS = [
    "", " ", "\0", "a\0b", "\ud800", "x" * 5000, "x/" * 3000, "../" * 50, "/dev/null",
    "/dev/zero/x", "/proc/self/mem", "~", "{folder}/loop", "{folder}/loop/x", "{folder}/data.jsonl",
    "{folder}/data.jsonl/x", "{folder}", "a:b", ":", "x.py:", "nobody/nothing-at-all", "\n",
    "é\u200b\U0001f600",
]  # fmt: skip


def settings(kind: Any) -> list[tuple[str, Any, Range | None]]:
    """(dotted key, type, declared range) of every setting of a configuration class."""
    found = []
    for one in listed(kind):
        if one.is_section or ".N." in one.key:
            continue
        is_marked = typing.get_origin(one.annotation) is typing.Annotated
        hint, *marks = typing.get_args(one.annotation) if is_marked else (one.annotation,)
        allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
        found.append((one.key.replace(".NAME.", ".judge."), hint, allowed))
    return found


def parts(hint: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return list(typing.get_args(hint))
    return [hint]


def value(draw: random.Random, key: str, hint: Any, allowed: Range | None) -> tuple[Any, Expect]:
    """A value for setting `key` of type `hint`, and what the check must do with it."""
    kinds = parts(hint)
    first = kinds[0]
    if draw.random() < 0.25:
        wrong = [[], {}, [1], {"a": 1}, "text", None, 1.5, True, 7, [[]], "1", "nan"]
        fits = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(first, ())
        choices = [
            one
            for one in wrong
            if not (isinstance(one, fits) and (first is bool or not isinstance(one, bool)))
            and not (one is None and type(None) in kinds)
            and not isinstance(one, {tuple: list, dict: dict}.get(typing.get_origin(first), ()))
        ]
        return draw.choice(choices), "refuse"
    if first is bool:
        return draw.choice([True, False]), "either"
    if first in (int, float):
        return number(draw, first, allowed)
    if first is str:
        text = draw.choice(TEXTS)
        broken = "\0" in text or "\ud800" in text
        return text, "refuse" if broken or (key in PATHS and len(text) > 4096) else "either"
    if typing.get_origin(first) is tuple:
        tuples = [[0], [1], [1, 1], [2, 1], [-1], [10**9], [1.5], [None], ["x"]]
        return draw.choice(tuples), "either"
    if typing.get_origin(first) is dict:
        weights: list[Any] = [{}, {"exact_match": 1.0}, {"math": 0, "exact_match": 2}, {"a": 1}]
        wrong = [{"math": math.nan}, {"math": 1e9}, {"math": "x"}, {"math": None}, {"a\0": 1}]
        if draw.random() < 0.5:
            return draw.choice(wrong), "refuse"
        return draw.choice(weights), "either"
    members = [one for part in kinds for one in typing.get_args(part)]
    if draw.random() < 0.5:
        wrong = [one for one in ["", "no such", -1, 99] if one not in members]
        return draw.choice(wrong), "refuse"
    return draw.choice(members), "either"


def number(draw: random.Random, kind: type, allowed: Range | None) -> tuple[Any, Expect]:
    """A number in or out of the range that its setting declares."""
    assert allowed is not None, "test_every_number_has_a_finite_range"
    low, high = allowed.low, allowed.high
    outside: list[Any] = [high * 2 + 1, high + 1, 10**25, -(10**25)]
    if low > 0 and not allowed.or_zero:
        outside += [0, -1, low / 2]
    outside += [low - 1] if low - 1 or not allowed.or_zero else []
    if kind is float:
        outside += [math.nan, math.inf, -math.inf, 1e308, -1e308]
    else:
        outside = [int(one) if one == int(one) else one for one in outside]
    if draw.random() < 0.5:
        return draw.choice(outside), "refuse"
    near = [low, high, (low + high) / 2, draw.uniform(low, high), low + 1, min(low + 2, high)]
    near.append(math.exp(draw.uniform(math.log(max(low, 1e-12)), math.log(max(high, 1e-12)))))
    found = min(max(draw.choice(near), low), high)
    return (kind(found) if kind is float else int(found)), "either"


def one_setting(draw: random.Random, case: Case, _: Path) -> Case:
    """One setting of the recipe."""
    case.task = draw.choice([*KINDS, "rl", "rl", "rl"])
    key, hint, allowed = draw.choice(settings(KINDS[case.task]))
    found, expect = value(draw, key, hint, allowed)
    case.verifier = key.startswith("environment.")
    return case.set(key, found, expect)


def several_settings(draw: random.Random, case: Case, _: Path) -> Case:
    """Two to five settings, each in its range."""
    case.task = draw.choice(["rl", "distill", "sft", "preference"])
    known = settings(KINDS[case.task])
    for _ in range(draw.randint(2, 5)):
        key, hint, allowed = draw.choice(known)
        for _ in range(20):
            found, expect = value(draw, key, hint, allowed)
            if expect == "either":
                case.set(key, found, "either").what += "; "
                break
    return case


def unknown_key(draw: random.Random, case: Case, _: Path) -> Case:
    """A key that there is not, at any depth."""
    key, _, _ = draw.choice(settings(RunConfig))
    place = key.rpartition(".")[0]
    name = draw.choice(["x", "", "a.b", "é", "0", "x" * 300])
    return case.set(f"{place}.{name}" if place else name or "y", 1, "refuse")


SNIPPETS: list[tuple[str, Expect]] = [
    ("steps: 3\nsteps: 3\n", "refuse"),
    ("a: &a [x,x,x]\nb: &b [*a,*a,*a]\n", "refuse"),
    ("1: 2\n", "refuse"),
    ("!!binary YQ==: 2\n", "refuse"),
    ("steps: !!binary YQ==\n", "refuse"),
    ("steps: !!int '3'\n", "either"),
    ("steps: !!timestamp 2024-01-01\n", "refuse"),
    ("steps: !!python/object:os.system {}\n", "refuse"),
    ("seed: 010\n", "either"),
    ("seed: " + "9" * 5000 + "\n", "refuse"),
    ("seed: 1e400\n", "refuse"),
    ("steps: [" + "[" * 3000 + "]" * 3000 + "]\n", "refuse"),
    ("? [a, b]\n: c\n", "refuse"),
    ("--- \n{}\n", "refuse"),
    ("<<: {steps: 3}\n", "either"),
    ("<<: 3\n", "refuse"),
    ("\tsteps: 3\n", "refuse"),
    ("steps: *nowhere\n", "refuse"),
    ("%YAML 9.9\n---\n", "refuse"),
    ("steps: 3\x00\n", "refuse"),
    ('folder: "\\ud800"\n', "refuse"),
    ("on: 3\n", "refuse"),
    ("observe: null\n", "refuse"),
    ("a: " + "&x {b: " * 200 + "\n", "refuse"),
]


def yaml_text(draw: random.Random, case: Case, _: Path) -> Case:
    """The recipe as bytes: snippets, cuts, flipped bytes, or no text at all."""
    good = (
        b"task: rl\nfolder: '{folder}/run'\nmodel: {path: '{model}'}\n"
        b"prompts: {source: '{folder}/data.jsonl', max_prompt_tokens: 8}\n"
        b"rollout: {groups_per_step: 4, group_size: 2, max_new_tokens: 8}\n"
    )
    way = draw.choice(["snippet", "snippet", "cut", "flip", "bytes"])
    if way == "snippet":
        text, case.expect = draw.choice(SNIPPETS)
        case.what, case.text = f"recipe with {text[:60]!r}", good + text.encode()
    elif way == "cut":
        end = draw.randrange(len(good))
        case.what, case.text = f"recipe cut at byte {end}", good[:end]
    elif way == "flip":
        place, byte = draw.randrange(len(good)), draw.randrange(256)
        case.what = f"recipe with byte {place} = {byte}"
        case.text = good[:place] + bytes([byte]) + good[place + 1 :]
    else:
        case.text = draw.choice([b"", b"PAR1\x00\xff", b"\xff\xfe", b"[]", b"3", b"\x00" * 100])
        case.what, case.expect = f"recipe {case.text[:20]!r}", "refuse"
    return case


def command_line(draw: random.Random, case: Case, _: Path) -> Case:
    """A setting on the command line, or words that are none."""
    if draw.random() < 0.4:
        case.arguments = draw.choice([
            ["-x"], ["--steps"], ["--steps", "1", "2"], ["x"], ["--rollout", "3"],
            ["--=3"], ["--steps=", "3"], ["--.x", "1"], ["--folder.x", "1"], ["--ranks", "0"],
        ])  # fmt: skip
        case.what, case.expect = f"arguments {case.arguments}", "refuse"
        return case
    key, hint, allowed = draw.choice(settings(RunConfig))
    found, expect = value(draw, key, hint, allowed)
    text = found if isinstance(found, str) else json.dumps(found)
    if "\0" in text:  # no process can be given one
        text, expect = "", "either"
    if parts(hint)[0] is str or found is None or isinstance(found, str | list | bool):
        expect = "either"  # every word is a text; a list is what several words make
    case.verifier = key.startswith("environment.")
    case.arguments, case.expect = [f"--{key}", text], expect
    case.what = f"--{key} {text[:60]!r}"
    return case
