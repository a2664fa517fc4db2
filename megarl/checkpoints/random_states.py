"""The states of torch's random generators on a rank, as a file of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save


def random_states() -> bytes:
    """Content of a file with the states of the generators of the CPU and, where there is one, of
    this rank's GPU.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return save(states)


def restore_random_states(path: Path) -> None:
    """Set the generators to the states of a file of `random_states`. A GPU's state is left
    out where there is no GPU, and a GPU keeps its own where the file has none.
    """
    states = load_file(str(path))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
