"""Which package may import which, read from the code's own imports; see docs/design.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    {"errors", "files", "host_memory", "peer_names", "quick_imports", "schema", "types"},
    {"chat_template", "recipe_file", "recipe_paths", "third_party"},
    {"console"},
    {"activity", "private_folder", "signals"},
    {"kernels", "parallel"},
    {"data", "environments", "ledger", "objectives", "observe", "weight_sync"},
    {"rollout", "checkpoints"},
    {"trainer"},
    {"cluster"},
    {"checks"},
    {"loops"},
    {"command_line"},
    {"cli", "api"},
    {"__main__"},
)
"""From the lowest: a package imports from its own and from lower layers only, and packages of one
layer do not import each other."""
ANYWHERE = {
    "config",
    "config_checks",
    "presets",
    "serve_config",
    "supervised_config",
    "command_config",
}
"""`megarl.config`, its parts, and every package's `config` module: importable from every package but `kernels`
and `parallel`, since they import nothing but `schema`, `recipe_file`, `recipe_paths` and each other."""
MAY_CALL_TORCH_DISTRIBUTED = {"parallel", "weight_sync"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80


def modules() -> dict[str, Path]:
    """{dotted name: file} of every source file, under the name it is imported by."""
    found = {}
    for base in ("megarl", "kernels", "parallel"):
        for path in (ROOT / base).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[1] in ("kernels", "parallel") and base == "megarl":
                continue  # the links
            name = ".".join(parts if base == "megarl" else ("megarl", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def package(module: str) -> str:
    """The package, or top-level module, that a dotted name belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it but under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for part in node.body:
                for inner in ast.walk(part):
                    inner.__dict__["only_types"] = True
    for node in ast.walk(tree):
        if node.__dict__.get("only_types"):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def level(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


def test_every_package_has_a_layer() -> None:
    known = set().union(*LAYERS) | ANYWHERE | {"__init__"}
    assert {package(name) for name in modules()} == known


def test_imports_go_down() -> None:
    wrong = []
    files = modules()
    for module, path in files.items():
        mine = package(module)
        if mine == "__init__":
            continue
        for name in imported(path) & set(files):
            other = package(name)
            if other in (mine, "__init__"):
                continue
            if other in ANYWHERE or name.endswith(".config"):
                if mine in ("kernels", "parallel", "schema", "types", "errors"):
                    wrong.append((module, name))
                continue
            if mine in ANYWHERE:
                if other not in ("schema", "recipe_file", "recipe_paths"):
                    wrong.append((module, name))
                continue
            if level(other) >= level(mine):
                wrong.append((module, name))
    assert not wrong


def test_no_import_cycles() -> None:
    """Also inside packages, and also through imports within functions."""
    files = modules()
    graph = {name: (imported(path) & set(files)) - {name} for name, path in files.items()}
    left = dict(graph)
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"modules that import each other are among {sorted(left)}"


def test_the_configuration_is_light() -> None:
    heavy = "[m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers') if m in sys.modules]"
    code = f"import sys, megarl.config, megarl.cli; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_only_parallel_and_weight_sync_call_torch_distributed() -> None:
    users = {
        package(name)
        for name, path in modules().items()
        if any(found.startswith("torch.distributed") for found in imported(path))
    }
    assert users <= MAY_CALL_TORCH_DISTRIBUTED


@pytest.mark.parametrize("folder", ["kernels", "parallel"])
def test_root_folders_are_no_packages(folder: str) -> None:
    """An `__init__.py` there would shadow an installed package of that name for everybody."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "megarl" / folder).is_symlink()


def test_files_and_functions_stay_short() -> None:
    long = []
    for name, path in modules().items():
        text = path.read_text()
        if text.count("\n") >= MAX_FILE_LINES:
            long.append((name, text.count("\n")))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long.append((f"{name}:{node.name}", lines))
    assert not long


def test_tools_stay_short() -> None:
    """Scripts are held to the same lengths as the packages."""
    long = []
    for path in (ROOT / "tools").rglob("*.py"):
        text = path.read_text()
        if text.count("\n") >= MAX_FILE_LINES:
            long.append((path.name, text.count("\n")))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long.append((f"{path.name}:{node.name}", lines))
    assert not long


def test_the_service_process_is_light() -> None:
    """It starts while engines and trainer ranks need the CPU."""
    heavy = "[m for m in ('torch', 'vllm', 'deepspeed', 'transformers') if m in sys.modules]"
    code = f"import sys, megarl.cluster.service_process; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
