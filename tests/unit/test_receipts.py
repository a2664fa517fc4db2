"""Samples of other weights than the trainer has published are refused before they are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.rollouts import Prompts, rollout_service, segment

from megarl.checkpoints.adapter_files import adapter_bytes
from megarl.rollout.config import DynamicSamplingConfig, RolloutConfig
from megarl.rollout.engine import Engine
from megarl.rollout.receipts import Receipts, spans_of
from megarl.trainer.config import LoraConfig
from megarl.types import Group, Prompt, Rollout, Segment, Verdict
from megarl.weight_sync.weight_receipts import receipt_of_adapter, receipt_of_weights

PUBLISHED = {version: receipt_of_weights([[version, -version], [7, 8]]) for version in range(4)}
"""{version: receipt} of a run whose engines have two ranks."""


def answer(spans: list[tuple[int, int]], receipts: list[str]) -> Segment:
    count = sum(tokens for _, tokens in spans)
    return segment([1] * count, versions=spans, receipts=receipts)


def right(version: int) -> Segment:
    return answer([(version, 2)], [PUBLISHED[version]])


def half_cut(version: int) -> Segment:
    """One of two ranks has the tensors of the version before."""
    found = receipt_of_weights([[version, -version], [6, 8]])
    return answer([(version, 2)], [found])


def left_behind(version: int) -> Segment:
    """The engine says the newest version and computes with the one before."""
    return answer([(version, 2)], [PUBLISHED[version - 1]])


def dropped(version: int) -> Segment:
    """The engine has no adapters, so no receipt."""
    return answer([(version, 2)], [""])


def unnamed(version: int) -> Segment:
    """The engine does not say what weights have generated the last token."""
    return replace(right(version), versions=[(version, 1)])


def nameless(version: int) -> Segment:
    """The engine says of no token what weights have generated it."""
    return replace(right(version), versions=[], receipts=[])


def in_the_middle(fault: Callable[[int], Segment]) -> Callable[[int], Segment]:
    """A response that begins with the right weights."""

    def made(version: int) -> Segment:
        first, wrong = right(version), fault(version)
        return answer([*first.versions, *wrong.versions], [*first.receipts, *wrong.receipts])

    return made


class Engines:
    """An engine that answers rightly, but for the requests of one version."""

    def __init__(self, fault: Callable[[int], Segment], at: int) -> None:
        self.fault, self.at = fault, at
        self.version = 0

    async def generate(self, *args: object, **settings: object) -> Segment:
        return (self.fault if self.version == self.at else right)(self.version)


PROMPTS = Prompts(lambda ordinal: Prompt(ordinal, "", [5], ""))


def tell(version: int) -> list[str]:
    """What the trainer says of a version: two receipts, as for engines that receive it in pieces of
    their own.
    """
    return ["of another engine", PUBLISHED[version]]


def run(engines: Engines, tell: Callable[[int], list[str]], steps: int = 4) -> int:
    """Steps that a run takes from its service; `tell` are the trainer's receipts of a version."""
    sampling = DynamicSamplingConfig(enabled=False)
    config = RolloutConfig(groups_per_step=2, group_size=2, dynamic_sampling=sampling)
    service = rollout_service([engines], config, PROMPTS, last_step=steps - 1)

    async def go() -> int:
        taken = 0
        await service.start(tell(0))
        try:
            for step in range(steps):
                async with asyncio.timeout(20):
                    await service.take(step, 0)
                taken += 1
                engines.version = step + 1
                if step + 1 < steps:
                    await service.release(step + 1, tell(step + 1))
        finally:
            await service.stop()
        return taken

    return asyncio.run(go())


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("fault", [half_cut, left_behind, dropped])
def test_a_wrong_receipt_is_caught_before_the_step(
    fault: Callable[[int], Segment], at: int
) -> None:
    """Three faults at three versions; steps before the fault are taken."""
    for one in (fault, in_the_middle(fault)):
        engines = Engines(one, at)
        with pytest.raises(RuntimeError, match=rf"weights of version {at} .* is not\s+trained on"):
            run(engines, tell)
        assert engines.version == at


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("fault", "named"), [(unnamed, 1), (nameless, 0)])
def test_tokens_of_no_known_version_are_refused(
    fault: Callable[[int], Segment], named: int, at: int
) -> None:
    """Before the step of these tokens."""
    engines = Engines(fault, at)
    with pytest.raises(RuntimeError, match=rf"has 2 tokens, but the engine says of {named} which"):
        run(engines, tell)
    assert engines.version == at
    receipts = Receipts(staleness=1, known={at: tell(at)})
    rollout = Rollout(0, 1, [fault(at)], Verdict(1.0, True), at)
    with pytest.raises(RuntimeError, match="rollout 0 of group 7 has 2 tokens"):
        receipts.check_groups([Group(7, PROMPTS.at(7), [rollout])])


def test_right_receipts_pass_and_none_is_asked_for_where_nothing_is_published() -> None:
    assert run(Engines(right, at=9), tell) == 4
    for fault in (dropped, unnamed):
        assert run(Engines(fault, at=1), lambda version: []) == 4


def test_a_version_that_is_told_later_is_looked_at_then() -> None:
    """An engine may answer with a version before the trainer has said what it is."""
    receipts = Receipts(staleness=1)
    assert receipts.publish(0, tell(0)) and not receipts.publish(0, ["other"])
    early = half_cut(1)
    receipts.check_answer(early, "a response")
    assert receipts.publish(1, tell(1))
    with pytest.raises(RuntimeError, match="a response was generated with weights of version 1"):
        receipts.check_answer(early, "a response")
    for version in (2, 3):
        receipts.publish(version, tell(version))
    assert sorted(receipts.known) == [1, 2, 3], "as many as samples may be old, and one"
    receipts.check_answer(dropped(0), "of a checkpoint, and checked when that was written")
    assert spans_of([replace(early, receipts=[])])[0].receipt == ""


def test_receipts_tell_ranks_tensors_and_files_apart() -> None:
    digests = [[1, 2], [3, 4]]
    others = [[[1, 2, 3, 4]], [[1], [2, 3, 4]], [[3, 4], [1, 2]], [[1, 2], [3, -4]], [[1, 2]]]
    found = {receipt_of_weights(one) for one in (digests, *others)}
    assert len(found) == 6 and receipt_of_weights([[1, 2], [3, 4]]) in found
    files = {"a": b"12", "b": b"3"}
    changed = [
        {"a": b"1", "b": b"23"},
        {"a": b"12"},
        {"b": b"12", "a": b"3"},
        {"a1": b"2", "b": b"3"},
    ]
    assert len({receipt_of_adapter(one) for one in (files, *changed)}) == 5
    assert receipt_of_adapter(dict(reversed(files.items()))) == receipt_of_adapter(files)


def test_the_greedy_response_is_checked_and_a_group_of_a_checkpoint_is_not() -> None:
    receipts = Receipts(staleness=1)
    receipts.publish(1, tell(1))
    fine, wrong = (
        Rollout(0, 1, [one(1)], Verdict(1.0, True), dispatched_at=1) for one in (right, half_cut)
    )
    prompt = PROMPTS.at(0)
    receipts.check_groups([Group(4, prompt, [fine], greedy=fine)])
    with pytest.raises(RuntimeError, match="group 4 was generated with weights of version 1"):
        receipts.check_groups([Group(4, prompt, [fine], greedy=wrong)])
    receipts.carried.add(4)
    receipts.check_groups([Group(4, prompt, [wrong], greedy=wrong)])


def test_equal_adapters_have_equal_receipts() -> None:
    tensors = {f"model.layers.{n}.self_attn.q_proj.lora_A": torch.ones(2, 3) * n for n in range(4)}
    config = LoraConfig(rank=2)
    for digest in ("", "9f"):
        found = {
            receipt_of_adapter(adapter_bytes(tensors, config, base=None, base_digest=digest))
            for _ in range(20)
        }
        assert len(found) == 1


def test_an_engine_without_its_adapters_has_no_receipt() -> None:
    engine = Engine(
        number=0,
        model="",
        config=RolloutConfig().engine,
        max_tokens=8,
        stop_token_ids=[],
        trust_remote_code=False,
        seed=0,
        environment={},
        adapter_rank=8,
    )
    engine._receipts[3] = "9f"
    assert engine._receipt(3) == ""
    engine._lora = object()
    assert (engine._receipt(3), engine._receipt(2)) == ("9f", "")
