"""The root folders `kernels` and `parallel` must never hide an installed package of the same name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE = """
class Anything:
    def __init__(self, *arguments, **options): ...
    def __call__(self, *arguments, **options):
        return arguments[0] if arguments and callable(arguments[0]) else self
    def __getattr__(self, name):
        return Anything()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()

class CUDAProperties: ...
class Device: ...
class LayerRepository: ...
class Mode: ...
__version__ = "0.17.2"
"""

IN_RAY = """
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote
def look():
    import kernels, transformers.modeling_utils, megarl.kernels.logprobs
    return kernels.__file__

print(ray.get(look.remote(), timeout=120))
ray.shutdown()
"""


def fake_kernels(folder: Path) -> Path:
    """A distribution named `kernels`, as Hugging Face's is."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(FAKE)
    info = folder / "kernels-0.17.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    return folder


def test_installed_kernels_wins_from_the_root_folder(tmp_path: Path) -> None:
    code = "import kernels, transformers.modeling_utils; print(kernels.__file__)"
    environment = {
        "PYTHONPATH": str(fake_kernels(tmp_path)),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py"), done.stderr[-2000:]


@pytest.mark.engine
def test_installed_kernels_wins_in_a_ray_worker(tmp_path: Path) -> None:
    """Ray puts the driver's working folder first on its workers' path."""
    environment = {
        "PYTHONPATH": str(fake_kernels(tmp_path)),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", IN_RAY]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=180
    )
    assert done.stdout.strip().endswith(str(tmp_path / "kernels" / "__init__.py")), done.stderr[
        -2000:
    ]
