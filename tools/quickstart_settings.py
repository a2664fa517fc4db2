"""Prints the settings with which the recipe of a quick start runs on this machine, one word a
line; none on a machine without GPUs.

    settings=$(python tools/quickstart_settings.py launch/recipes/quickstart.yaml)
    megarl run launch/recipes/quickstart.yaml $settings

launch/quickstart.sh asks before its first stage, so that the last one is not refused after minutes.
With a GPU, trainer and engine take turns on the first one that is visible.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megarl.engines.plan import check_placement
from megarl.errors import UserError
from megarl.parallel.mesh import local_device
from megarl.settings.config import RunConfig, read
from megarl.settings.schema import require
from megarl.trainer.precision import has_bfloat16

GIB = 2**30
NEEDED_GIB = {"quickstart": (6.0, 3.0), "smollm2_arithmetic": (14.0, 9.0)}
"""{recipe: GPU memory in all, and of it what the engine leaves to the trainer}: weights, gradients
and optimizer state of 0.3 M and 135 M parameters, activations, CUDA, its libraries and Triton's
kernels in two processes, and a small cache."""


def main(arguments: list[str]) -> int:
    """Print the settings of the recipe that `arguments` name. Returns the exit code: 2 where the
    quick start cannot run, with the reason on standard error.
    """
    path = Path(arguments[0])
    try:
        settings = [] if local_device().type == "cpu" else gpu_settings(path.stem)
        config = read(RunConfig, path, settings)
        check_placement(config, 1, 1, shares_gpus=bool(settings))
    except (UserError, ValueError) as error:
        print(f"quickstart.sh: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(settings))
    return 0


def gpu_settings(recipe: str) -> list[str]:
    """Settings for one rank and one engine that take turns on one GPU. `recipe`: its file's name
    without the suffix. Raises `ValueError` if too little of the GPU's memory is free.
    """
    needed, beside = NEEDED_GIB[recipe]
    model = "" if recipe == "quickstart" else f" --model {recipe.partition('_')[0]}"
    free, total = (size / GIB for size in torch.cuda.mem_get_info(0))
    require(
        free >= needed,
        f"the quick start needs {needed:g} GiB of GPU memory, but"
        f" {torch.cuda.get_device_name(0)} has {free:.1f} of {total:.1f} GiB free; choose another"
        " GPU with CUDA_VISIBLE_DEVICES, or the CPU: CUDA_VISIBLE_DEVICES= MEGARL_DEVICE=cpu bash"
        f" launch/quickstart.sh{model}",
    )
    # The share of all memory that vLLM may use, its own kernels included.
    share = min(0.3, (free - beside) / total)
    chosen = {
        "rollout.placement": "colocated",
        "rollout.max_staleness": "0",
        "rollout.engine.dtype": "bfloat16" if has_bfloat16() else "float16",
        "algorithm.correction.kind": "tis",  # the trainer's dtype is another
        "rollout.engine.gpu_memory_utilization": f"{share:.3f}",
        # Starts a minute sooner, and short answers come fast enough without.
        "rollout.engine.compile": "false",
        "training.zero_stage": "2",
    }
    return [word for name, value in chosen.items() for word in (f"--{name}", value)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
