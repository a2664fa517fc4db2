"""The root folders `kernels` and `parallel` must never hide an installed package of the same name."""

from __future__ import annotations

from pathlib import Path

from support.commands import python

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


def fake_kernels(folder: Path) -> Path:
    """A distribution named `kernels`, as Hugging Face's is."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(FAKE)
    info = folder / "kernels-0.17.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    return folder


def shows(folder: Path, code: str) -> str:
    """The last line that a program prints where such a distribution is installed."""
    paths = {"PYTHONPATH": str(fake_kernels(folder)), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = python("-c", code, env=paths)
    assert done.stdout.strip(), done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_installed_kernels_wins_from_the_root_folder(tmp_path: Path) -> None:
    code = "import kernels, transformers.modeling_utils; print(kernels.__file__)"
    assert shows(tmp_path, code) == str(tmp_path / "kernels" / "__init__.py")
