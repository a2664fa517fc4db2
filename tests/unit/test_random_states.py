"""The states of random generators go through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.checkpoints.checkpoint import random_states, restore_random_states


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_generator_goes_on(tmp_path: Path, device: str) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(random_states())
    wanted = torch.rand(3, device=device)
    torch.rand(5, device=device)
    restore_random_states(path)
    assert torch.equal(torch.rand(3, device=device), wanted)
