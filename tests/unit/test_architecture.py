"""Which package may import which, read from the code's own imports; see docs/design.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from support.commands import ROOT, python

from megarl.command_line.table import COMMANDS, TASKS
from megarl.environments.verifiers import VERIFIERS
from megarl.system.lookup import AGENTS, OF_APPS, SESSIONS, SOURCES

LAYERS = (
    {"errors", "types"},
    {"system"},
    {"settings"},
    {"kernels", "parallel"},
    {"data", "ledger", "objectives", "observe", "weights"},
    {"environments", "checkpoints"},
    {"engines"},
    {"rollout"},
    {"trainer"},
    {"run"},
    {"apps"},
    {"command_line", "python"},
    {"cli", "api"},
    {"__main__"},
)
"""From the lowest: a package imports from its own and from lower layers only, and packages of one
layer do not import each other."""
APP_USES_APP = {("doctor", "verifiers"), ("gateway", "tools")}
"""(an app, another that it imports): the doctor starts the sandbox of programs, and the gateway reads tool
calls and writes turns as tools do. All other apps are independent of each other."""
MAY_CALL_TORCH_DISTRIBUTED = {"parallel", "weights"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80
TRANSPORTS = "megarl.weights.transports."
MAY_REPEAT = {
    **{"main": "megarl.", "Sender": TRANSPORTS, "Receiver": TRANSPORTS},
    **dict.fromkeys(("statistics", "gradient_"), "megarl.kernels.logprobs_"),
}
"""{public name that several files may define: how their modules begin}. Entry points are `main` by
convention; transports are implementations of one base class, log-probs have two, and both are found
by their module."""


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


def app(module: str) -> str:
    """The app that a dotted name belongs to; empty for the core."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["apps"] and len(parts) > 2 else ""


@cache
def imported(path: Path, *, for_types: bool = False) -> set[str]:
    """Dotted names that a file imports, anywhere in it but under TYPE_CHECKING, or there too with
    `for_types`.
    """
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree) if not for_types else ():
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
    known = set().union(*LAYERS) | {"__init__"}
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
            if level(other) >= level(mine):
                wrong.append((module, name))
    assert not wrong


def test_public_names_occur_once() -> None:
    """Who looks for a function or class by its name finds one."""
    seen: dict[str, set[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                place = MAY_REPEAT.get(node.name, module)
                seen.setdefault(node.name, set()).add(place if module.startswith(place) else module)
    repeated = {name: at for name, at in seen.items() if len(at) > 1 and name[0] != "_"}
    assert not repeated, "give all but the most central one a name that says what it does"


def test_no_import_cycles() -> None:
    """Also inside packages, through imports within functions, and for types."""
    files = modules()
    graph = {
        name: (imported(path, for_types=True) & set(files)) - {name} for name, path in files.items()
    }
    left = dict(graph)
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"modules that import each other are among {sorted(left)}"


def test_the_core_imports_no_app() -> None:
    """Neither at the top of a module nor in a function nor for types; what the core needs of an app
    it looks up by name (`megarl.system.lookup`).
    """
    wrong = [
        (module, name)
        for module, path in modules().items()
        if package(module) != "apps"
        for name in sorted(imported(path, for_types=True))
        if name.startswith("megarl.apps")
    ]
    assert not wrong


def test_apps_are_named_in_tables_only() -> None:
    """An app's module as a string of the core is in one of the tables of names."""
    tables = {"megarl.system.lookup", "megarl.command_line.table", "megarl.environments.verifiers"}
    named = {
        module
        for module, path in modules().items()
        if package(module) != "apps"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"megarl\.apps[\w.:]*", str(node.value))
    }
    assert named == tables


def test_apps_import_no_other_app_but_those_of_the_table() -> None:
    files = modules()
    used = {
        (app(module), app(name))
        for module, path in files.items()
        if app(module)
        for name in imported(path, for_types=True) & set(files)
    }
    assert {(user, other) for user, other in used if other not in ("", user)} == APP_USES_APP


def test_what_is_looked_up_exists() -> None:
    """The tables that name code as "module:function" name functions and classes that are there."""
    files = modules()
    commands = [(one.check, one.run, one.arguments) for one in COMMANDS.values()]
    commands += [(task.check, task.run, "") for task in TASKS.values()]
    tables = (OF_APPS, SOURCES, SESSIONS, AGENTS, VERIFIERS)
    places = {place for table in tables for place in table.values()}
    places |= {place for row in commands for place in row}
    for place in sorted(places - {""}):
        module, _, name = place.partition(":")
        assert module in files, place
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        tree = ast.parse(files[module].read_text())
        assert any(isinstance(node, defined) and node.name == name for node in tree.body), place


def test_only_parallel_and_weights_call_torch_distributed() -> None:
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
    """Scripts are held to the same lengths as the packages."""
    long = []
    for path in (*modules().values(), *(ROOT / "tools").rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if text.count("\n") >= MAX_FILE_LINES:
            long.append((name, text.count("\n")))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long.append((f"{name}:{node.name}", lines))
    assert not long


@pytest.mark.parametrize(("imported", "heavy"), [
    ("megarl.settings.config, megarl.cli", "torch ray vllm deepspeed transformers"),
    # It starts while engines and trainer ranks need the CPU.
    ("megarl.rollout.service_process", "torch vllm deepspeed transformers"),
])  # fmt: skip
def test_what_starts_often_is_light(imported: str, heavy: str) -> None:
    code = f"import sys, {imported}; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr
