"""What `pip install` takes along, and that it works outside of the checkout: every file, the version,
recipes by their names, the quick start's data.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import ROOT
from transformers import Qwen2Config

import megarl
from megarl import RunConfig
from megarl.engines import plan
from megarl.errors import UserError
from megarl.settings import config
from megarl.system.files import RECIPES

PLACES = {
    "megarl": "megarl",
    "kernels": "megarl/kernels",
    "parallel": "megarl/parallel",
    "launch/recipes": "megarl/recipes",
}
"""{folder of the checkout: where the package has it}"""


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `words` in the folder `cwd`, with no PYTHONPATH but that of `environment`."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel holds, without the wheel's own records."""
    folder = tmp_path_factory.mktemp("built")
    done = run("setup.py", "-q", "build_py", "--build-lib", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def packaged() -> dict[str, Path]:
    """{path in the package: path in the checkout} of all files that git knows of or would add."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PLACES]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if told.returncode != 0:
        pytest.skip(f"this is no git checkout: {told.stderr.strip()}")
    files = {}
    for name in told.stdout.splitlines():
        top = next(top for top in PLACES if name == top or name.startswith(f"{top}/"))
        if (ROOT / name).is_file():  # not a link to a folder, nor a file that was removed
            files[PLACES[top] + name.removeprefix(top)] = ROOT / name
    return files


def test_the_package_has_every_file(built: Path) -> None:
    """Of Python, and of what is read beside it: templates, recipes, sources to compile."""
    wanted = packaged()
    assert {"megarl/recipes/quickstart.yaml", "megarl/parallel/mesh.py"} <= set(wanted)
    found = {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()}
    assert found == set(wanted)
    for name, path in wanted.items():
        assert (built / name).read_bytes() == path.read_bytes(), name


def test_the_version_comes_from_one_place() -> None:
    done = run("setup.py", "-q", "--version", cwd=ROOT)
    assert done.stdout.split()[-1:] == [megarl.__version__], done.stderr


def test_the_engine_that_an_extra_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the tested one, and where it is missing, a run is refused before anything starts."""
    tested = re.findall("^# vllm: (.+)$", (ROOT / "launch/requirements-cuda.txt").read_text(), re.M)
    assert f'"cuda": {json.dumps(tested)}' in (ROOT / "setup.py").read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM is not installed; `pip install 'megarl\[cuda\]'`"):
        plan.check_engine_kind("vllm", Qwen2Config())


def test_a_recipe_is_named_outside_of_the_checkout(built: Path, tmp_path: Path) -> None:
    """Paths in it are relative to the working folder, unless a file stands beside the recipe."""
    words = ("-m", "megarl", "run", "smollm2_format", "--print-config")
    done = run(*words, cwd=tmp_path, PYTHONPATH=str(built))
    assert done.returncode == 0, done.stderr
    recipes = built / "megarl" / "recipes"
    assert f"recipe smollm2_format: {recipes}/smollm2_format.yaml is taken" in done.stderr
    told = yaml.safe_load(done.stdout)
    assert told["environment"]["verifier"] == f"{recipes}/boxed.py:score"
    assert (
        not Path(told["folder"]).is_absolute() and not Path(told["prompts"]["source"]).is_absolute()
    )
    words = ("-m", "megarl", "run", "dapo_14b", "--dry-run", "--cpu")
    done = run(*words, cwd=tmp_path, PYTHONPATH=str(built))
    assert f"{recipes}/dapo_14b.yaml" in done.stdout, done.stderr
    done = run("-m", "megarl", "run", "dpo", "--help", "loss", cwd=tmp_path, PYTHONPATH=str(built))
    assert "loss.method" in done.stdout, done.stderr


def test_the_quick_start_data_is_made_outside_of_the_checkout(built: Path, tmp_path: Path) -> None:
    """Where the two recipes of the quick start look for it."""
    module = ("-m", "megarl.recipes.make_addition", "runs/quickstart/data")
    small = ("--demonstrations", "4", "--prompts", "3", "--held-out", "2", "--validation", "1")
    done = run(*module, *small, cwd=tmp_path, PYTHONPATH=str(built))
    assert done.returncode == 0, done.stderr
    found = config.read(RunConfig, "quickstart")
    rows = (tmp_path / found.prompts.source).read_text().splitlines()
    assert [sorted(json.loads(row)) for row in rows] == [["answer", "prompt"]] * 3
    sft = config.written_tree("quickstart_sft")
    assert (tmp_path / sft["model"]["path"] / "config.json").is_file()
    assert (tmp_path / sft["demonstrations"]["source"]).is_file()


def test_names_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the working folder goes before a recipe of megarl, and other names are refused."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    ours = config.read(RunConfig, "grpo", say=said.append)
    assert len(said) == 1 and said[0].endswith("recipes/grpo.yaml is taken")
    assert megarl.load_recipe(RunConfig, "grpo") == ours
    Path("grpo").write_text((RECIPES / "grpo.yaml").read_text().replace("seed: 1\n", "seed: 77\n"))
    assert config.read(RunConfig, "grpo", say=said.append).seed == 77 and len(said) == 1
    meant = r"recipe quikstart does not exist; did you mean quickstart or quickstart_sft\?; pass"
    with pytest.raises(ValueError, match=meant):
        config.read(RunConfig, "quikstart")
    for name in ("grpo.yaml", "./rloo", "x" * 5000, "nothing like it"):
        with pytest.raises(
            (ValueError, UserError), match=r"recipe .*(does not exist|cannot be read)"
        ):
            config.read(RunConfig, name)
