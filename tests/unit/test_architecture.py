"""Who may import whom: the floors of the house, read from the code's own imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROOMS = ("prompts", "rollout", "environments", "algorithms", "training", "publish", "observe")
NOUNS = {"schema", "types", "contracts"}
MAY_IMPORT = {
    "kernels": set(),
    "parallel": set(),
    "schema": set(),
    "types": set(),
    "contracts": {"types"},
    "third_party": set(),
    "config": {"schema", *ROOMS},  # their config modules only, see below
    "prompts": NOUNS,
    "environments": NOUNS,
    "algorithms": NOUNS,
    "observe": NOUNS,
    "rollout": NOUNS | {"parallel"},
    "publish": NOUNS | {"parallel"},
    "training": NOUNS | {"algorithms", "parallel", "kernels"},
}
CONDUCTORS = {"cli", "engine_group", "placement", "__main__", "runs", "loop", "sft", "parts", "preflight", "cluster", "doctor"}
MAY_CALL_TORCH_DISTRIBUTED = {"parallel", "publish"}


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every source file."""
    found = [(path.stem, path) for path in (ROOT / "megarl").glob("*.py")]
    for room in (*ROOMS, "kernels", "parallel"):
        folder = ROOT / room if room in ("kernels", "parallel") else ROOT / "megarl" / room
        found += [(room, path) for path in folder.rglob("*.py")]
    return found


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def edges() -> set[tuple[str, str, str]]:
    """(room, imported room, dotted name) over the whole tree."""
    found = set()
    for room, path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "megarl" and len(parts) > 1 and parts[1] != room:
                found.add((room, parts[1], name))
    return found


def test_floors_hold() -> None:
    wrong = []
    for room, other, name in edges():
        if room in CONDUCTORS or room == "__init__":
            continue
        if other not in MAY_IMPORT[room]:
            wrong.append((room, name))
    assert not wrong


def test_rooms_do_not_import_each_other_in_pairs() -> None:
    pairs = {(room, other) for room, other, _ in edges()}
    assert not [pair for pair in pairs if (pair[1], pair[0]) in pairs and not set(pair) & CONDUCTORS]


def test_the_configuration_is_light() -> None:
    assert all(name.split(".")[2] == "config" for room, other, name in edges() if room == "config" and other in ROOMS)
    heavy = "[m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers') if m in sys.modules]"
    code = f"import sys, megarl.config; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "[]"


def test_only_parallel_and_publish_call_torch_distributed() -> None:
    users = {room for room, path in modules() if any(name.startswith("torch.distributed") for name in imports(path))}
    assert users <= MAY_CALL_TORCH_DISTRIBUTED


@pytest.mark.parametrize("folder", ["kernels", "parallel"])
def test_root_folders_are_no_packages(folder: str) -> None:
    """An `__init__.py` there would shadow an installed package of that name for everybody."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "megarl" / folder).is_symlink()


LONGER_ON_PURPOSE = {"doctor.py": 560}
"""One list of checks, each a few lines: nothing to find one's way in."""


def test_files_and_functions_stay_readable() -> None:
    """Files under 400 lines and functions under 80: past that, a room wants a wall."""
    long = []
    for _, path in modules():
        text = path.read_text()
        if text.count("\n") > LONGER_ON_PURPOSE.get(path.name, 400):
            long.append((path.name, text.count("\n")))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 90:
                    long.append((f"{path.name}:{node.name}", lines))
    assert not long


BANNED = ("episode", "trajectory", "trajectories", "experience", "manager", "helper")


def test_words_of_the_house() -> None:
    """One word per thing: see the list in docs/design.md."""
    for _, path in modules():
        words = path.read_text().lower()
        for allowed in ("contextmanager", "a context manager", "nodemanager"):  # Python's, and Ray's
            words = words.replace(allowed, "")
        assert not [word for word in BANNED if word in words], path
        assert path.stem not in ("utils", "helpers", "misc", "common")
