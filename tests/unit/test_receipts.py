"""Tokens of other weights than those that an engine should have are refused; versions have digests."""

from __future__ import annotations

import torch

from megarl.checkpoints.adapter_files import adapter_bytes
from megarl.settings.training import LoraConfig
from megarl.weights.weight_receipts import receipt_of_adapter, receipt_of_weights


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


def test_equal_adapters_have_equal_receipts() -> None:
    tensors = {f"model.layers.{n}.self_attn.q_proj.lora_A": torch.ones(2, 3) * n for n in range(4)}
    config = LoraConfig(rank=2)
    for digest in ("", "9f"):
        found = {
            receipt_of_adapter(adapter_bytes(tensors, config, base=None, base_digest=digest))
            for _ in range(20)
        }
        assert len(found) == 1
