"""The states of random generators go through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.checkpoints.checkpoint import random_states, restore_random_states


def test_the_cpus_generator_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(random_states())
    wanted = torch.rand(3)
    torch.rand(5)
    restore_random_states(path)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.gpu
def test_the_gpus_generator_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(random_states())
    wanted = torch.rand(3, device="cuda")
    torch.rand(5, device="cuda")
    restore_random_states(path)
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
