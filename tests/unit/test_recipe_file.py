"""Recipes: what YAML and the command line may say, and one line for everything else."""

from __future__ import annotations

import math
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest

from megarl.command_line.settings import settings
from megarl.settings import recipe_file, recipe_paths
from megarl.settings.config import (
    DistillConfig,
    PreferenceConfig,
    RunConfig,
    SftConfig,
    dump,
    from_tree,
    read,
)
from megarl.settings.peer_names import NAMES
from megarl.settings.recipe_file import has_key
from megarl.settings.schema import Range, replace

GOOD = "folder: runs/x\nmodel: {path: m}\nprompts: {source: a.jsonl}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)

WRONG: dict[str, tuple[str | bytes, list[str]]] = {
    "a key twice": (GOOD + "rollout: {group_size: 4}\nsteps: 3\nrollout: {group_size: 8}\n",
     ["line 6", "'rollout'", "line 4", "join the two"]),
    "a nested key twice": (GOOD + "rollout:\n  group_size: 4\n  group_size: 4\n",
     ["line 6", "line 5"]),
    "aliases that stand for gigabytes": (GOOD + BOMB, ["values with its aliases written out"]),
    "a list that contains itself": (GOOD + "a: &a [*a]\n", ["nested deeper"]),
    "nesting": (GOOD + "a: " + "[" * 5000 + "]" * 5000, ["nested deeper"]),
    "a key that is a number": (GOOD + "1: 2\n", ["line 4", "not a text"]),
    "a key that is a list": (GOOD + "? [1, 2]\n: 3\n", ["line 4", "not a text"]),
    "a date that Python has not": (GOOD + "steps: 2024-13-45\n", ["steps", "'2024-13-45'"]),
    "binary": (GOOD + "steps: !!binary YQ==\n", ["line 4", "binary"]),
    "a truth value that is none": (GOOD + 'resume: !!bool "x"\n', ["line 4", "cannot be read"]),
    "a Python object": (GOOD + "steps: !!python/name:os.system\n", ["line 4", "tag"]),
    "5,000 digits": (GOOD + f"steps: {'9' * 5000}\n", ["line 4", "digits"]),
    "half a surrogate pair": (GOOD + 'seed: "\\ud800"\n', ["line 4", "not Unicode text"]),
    "NUL": (GOOD + 'seed: "a\\0b"\n', ["line 4", "NUL"]),
    "no YAML": (GOOD + "a: [1\n", ["line 5", "is not YAML"]),
    "a control character": (GOOD + "a: \x01\n", ["is not YAML"]),
    "no text": (b"PAR1\xff\xfe\x00", ["recipe.yaml", "is no text", ".yaml file"]),
    "no mapping": ("[1, 2]\n", ["not a mapping of settings"]),
    "larger than a recipe": ("#" * 2_000_000, ["2,000,000 bytes"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_line(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        read(RunConfig, path)
    said = str(caught.value)
    assert "\n" not in said and str(path) in said and len(said) < 1000
    for part in says:
        assert part in said


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("010", 10), ("0x10", 16), ("0o17", 15), ("1_000", 1000),
    ("2024-01-01", "2024-01-01"), ("12:30", "12:30"), (".5", 0.5), ("-3", -3), ("true", True),
    ("~", None),
])  # fmt: skip
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = recipe_file.parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1e5", "0o17", "010", "1_0", "2024-01-01", "true", "~", "a: b"])
def test_a_text_that_looks_like_a_number_is_written_as_a_text(text: str) -> None:
    assert recipe_file.parse_yaml(recipe_file.dump_yaml({"a": text})) == {"a": text}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe_file.dump_yaml(recipe_file.parse_yaml(GOOD) | changes))
    return path


@pytest.mark.parametrize(("changes", "says"), [
    ({"evaluation": {"prompts": {"max_prompt_tokens": 0}}},
     "evaluation.prompts.max_prompt_tokens is 0"),
    ({"evaluation": {"prompts": {"system": "a"}}},
     "evaluation.prompts.system is 'a', but evaluation.prompts.template is 'none'"),
    ({"reference": {"layout": {"tensor": 0}}}, "reference.layout.tensor is 0"),
    ({"reference": {"ranks": [1, -1]}}, "reference.ranks is -1"),
    ({"algorithm": {"aggregation": "constant", "constant_tokens": -5}},
     "algorithm.constant_tokens is -5"),
    ({"rollout": {"temperature": 1e-30}}, "rollout.temperature is 1e-30"),
    ({"training": {"num_threads": 10**6}}, "training.num_threads is 1000000"),
    ({"environment": {"correct": math.nan}}, "environment.correct is nan"),
    ({"rollout": {"engine": {"max_num_sequences": 9000, "max_batched_tokens": 512}}},
     "rollout.engine.max_batched_tokens is 512"),
])  # fmt: skip
def test_an_error_names_the_setting(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read(RunConfig, write(tmp_path, **changes))
    assert says in str(caught.value)


LINES: dict[str, tuple[str, list[str]]] = {
    "values": ("steps: many\nrollout:\n  group_size: 0\n",
     ["line 4: steps is 'many'; ", "; line 6: rollout.group_size is 0; set it to a number >= 1"]),
    "keys": ("rollout:\n  n: 2\n  engine: {tensors: 2}\n",
     ["line 5: rollout.n: unknown key", "line 6: rollout.engine.tensors: unknown key"]),
    "a list": ("reward_models:\n  judge: {model: {path: m},\n    ranks: [1,\n    -1]}\n",
     ["line 6: reward_models.judge.ranks is -1"]),
    "two settings that do not fit": ("training:\n  num_mini_batches: 3\n",
     ["line 5: rollout.groups_per_step is 16, not divisible by training.num_mini_batches = 3"]),
    "an alias": ("rollout: &same {group_size: 0}\nreference: *same\n",
     ["line 4: rollout.group_size is 0", "line 4: reference.group_size: unknown key"]),
    "a section for another": ("algorithm: {loss: gspo,\n  dual_clip: 2.0}\n",
     ["line 5: algorithm.dual_clip is 2.0, but algorithm.loss is 'gspo', which does not use it"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_an_error_has_its_line(name: str, tmp_path: Path) -> None:
    text, says = LINES[name]
    (tmp_path / "recipe.yaml").write_text(GOOD + text)
    with pytest.raises(ValueError) as caught:
        read(RunConfig, tmp_path / "recipe.yaml")
    assert all(one in str(caught.value) for one in says), str(caught.value)


def test_what_the_command_line_sets_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD + "steps: 3\n")
    with pytest.raises(ValueError, match=r"with --steps 0: steps is 0; set it to a number >= 1"):
        read(RunConfig, tmp_path / "recipe.yaml", ["--steps", "0"])
    (tmp_path / "recipe.yaml").write_text(GOOD + "rollout: {group_size: 2}\n")
    with pytest.raises(ValueError, match=r"with --rollout.n 3: rollout.n: unknown key; here it is"):
        read(RunConfig, tmp_path / "recipe.yaml", ["--rollout.n", "3"])


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--resume", "False"], "resume", False),
        (["--resume=TRUE"], "resume", True),
        (["--training.micro-batch-tokens", "64"], "training.micro_batch_tokens", 64),
        (["--training.optimizer.learning_rate=1e-4"], "training.optimizer.learning_rate", 1e-4),
        (["--environment.wrong", "-1"], "environment.wrong", -1.0),
        (["--prompts.limit", "None"], "prompts.limit", None),
        (["--prompts.answer_after", "1e5"], "prompts.answer_after", "1e5"),
        (["--folder", "2024"], "folder", "2024"),
        (["--reference.zero_stage", "3", *(kl := ["--algorithm.kl.coefficient", "1"])], "reference.zero_stage", 3),
        (["--reference.ranks", "1", "2", *kl], "reference.ranks", (1, 2)),
    ],
)  # fmt: skip
def test_the_command_line_overrides(words: list[str], key: str, value: Any, tmp_path: Path) -> None:
    found: Any = read(RunConfig, write(tmp_path), words)
    for part in key.split("."):
        found = getattr(found, part)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("words", "says"), [
    (["--training.optimizer.learning_rat", "1"],
     "training.optimizer.learning_rat: unknown key; did you mean 'learning_rate'?"),
    (["--steps", "many"], "steps is 'many'; it should be a valid integer"),
    (["--steps"], "--steps has 0 values"),
    (["--resume"], "write one: --resume auto"),
    (["--steps", "1", "2"], "--steps has 2 values"),
    (["--rollout", "1"], "--rollout is a section"),
    (["--folder.x", "1"], " --folder.x 1: folder is {'x': '1'}; it should be a valid string"),
    (["steps", "1"], "'steps' is no setting; did you mean --steps 1?"),
    (["-steps=5"], "did you mean --steps 5?"),
    (["rollout.group-size"], "did you mean --rollout.group-size VALUE?"),
    (["nonsense=5"], "'nonsense=5' is no setting; write --section.key value"),
    (["--resume", "perhaps"], "resume is 'perhaps'; it should be true, false or 'auto'"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read(RunConfig, write(tmp_path), words)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def is_number(kind: Any) -> bool:
    """Whether a setting of this type is a number, or may be."""
    return bool({kind, *typing.get_args(kind)} & {int, float})


def has_marks(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Annotated


@pytest.mark.parametrize("kind", [RunConfig, SftConfig])
def test_every_number_has_a_finite_range(kind: Any) -> None:
    for one in settings(kind):
        inner, *marks = (
            typing.get_args(one.annotation) if has_marks(one.annotation) else (one.annotation,)
        )
        ranges = [mark for mark in marks if isinstance(mark, Range)]
        bounded = [mark for mark in ranges if math.isfinite(mark.high - mark.low)]
        assert bounded or not is_number(inner), one.key


def test_a_changed_copy_is_checked(tmp_path: Path) -> None:
    config = read(RunConfig, write(tmp_path))
    assert replace(config, steps=3) == read(RunConfig, write(tmp_path, steps=3))
    with pytest.raises(ValueError, match=r"^RunConfig\.steps is 0; set it to a number >= 1"):
        replace(config, steps=0)
    with pytest.raises(ValueError, match=r"RunConfig\.stepps: unknown key"):
        replace(config, stepps=1)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config.training, replace(config.training, zero_stage=0)}) == 1


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `home`, `work` (where the command runs) and `recipes`."""
    for name in ("home", "work", "recipes"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("UNSET_HERE", raising=False)
    return tmp_path


def test_paths_are_expanded_in_every_section(at_home: Path) -> None:
    home, rewards = at_home / "home", ("~/r.py:f", "math", "http://h:1/$DATA", "code")
    code = {"interpreter": ["python", "$DATA/i.py"], "visible": ["~"]}
    tree = {
        "folder": "~/runs/x",
        "model": {"path": "Qwen/Qwen2.5", "tokenizer": "${DATA}/t"},
        "prompts": {"sources": [{"source": "$DATA/a*.jsonl", "weight": 1.0}]},
        "environment": {"rewards": dict.fromkeys(rewards, 1.0), "code": code},
        "evaluation": {"models": ["~/m", "org/name"]},
    }
    config = read(RunConfig, write_tree(at_home / "recipes", tree))
    assert config.folder == f"{home}/runs/x"
    assert (config.model.path, config.model.tokenizer) == ("Qwen/Qwen2.5", "/data/t")
    assert config.prompts.sources[0].source == "/data/a*.jsonl"
    assert list(config.environment.rewards) == [f"{home}/r.py:f", *rewards[1:]]
    assert config.environment.code.interpreter == ("python", "/data/i.py")
    assert config.environment.code.visible == (str(home),)
    assert config.evaluation.models == (f"{home}/m", "org/name")
    assert f"folder: {home}/runs/x" in dump(config)


def write_tree(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "recipe.yaml").write_text(recipe_file.dump_yaml(tree))
    return folder / "recipe.yaml"


@pytest.mark.parametrize(("text", "says"), [
    ("$UNSET_HERE/x", r"prompts.source is '\$UNSET_HERE/x', but the variable UNSET_HERE is not"),
    ("x/${UNSET_HERE}", r"prompts.source .*variable UNSET_HERE is not set"),
    ("~nobody-of-that-name/x", r"prompts.source .*no user's name; write \./~nobody"),
])  # fmt: skip
def test_a_path_that_cannot_be_expanded_is_refused(text: str, says: str, at_home: Path) -> None:
    path = write(at_home, prompts={"source": text})
    with pytest.raises(ValueError, match=says):
        read(RunConfig, path)
    assert read(RunConfig, path, ["--prompts.source=a.jsonl"]).prompts.source == "a.jsonl"


def test_inputs_are_looked_for_beside_the_recipe(at_home: Path) -> None:
    recipes, work = at_home / "recipes", at_home / "work"
    for path in ("m", "math", "f", "data"):
        (recipes / path).mkdir()
    for path in ("a.jsonl", "r.py", "both.jsonl", "data/1.jsonl"):
        (recipes / path).touch()
    (work / "both.jsonl").touch()
    tree: dict[str, Any] = {
        "folder": "f",
        "model": {"path": "m"},
        "prompts": {"source": "a.jsonl"},
        "environment": {"verifier": "r.py:score"},
        "evaluation": {"prompts": {"source": "both.jsonl"}, "sources": ["data/*.jsonl", "none"]},
    }
    said: list[str] = []
    config = read(RunConfig, write_tree(recipes, tree), say=said.append)
    assert config.folder == "f"  # what is written is never beside the recipe
    assert config.model.path == str(recipes / "m")
    assert config.prompts.source == str(recipes / "a.jsonl")
    assert config.environment.verifier == f"{recipes}/r.py:score"
    assert config.evaluation.prompts.source == "both.jsonl"
    assert config.evaluation.sources == (f"{recipes}/data/*.jsonl", "none")
    keys = ["environment.verifier", "evaluation.sources", "model.path", "prompts.source"]
    assert sorted(line.partition(":")[0].partition("[")[0] for line in said) == keys
    assert f"model.path: m is not in the working folder; {recipes}/m is taken" in said
    tree["environment"]["verifier"] = "math"
    assert read(RunConfig, write_tree(recipes, tree)).environment.verifier == "math"


def test_words_of_a_command_line_have_the_home_folder(at_home: Path) -> None:
    words = ["~/a.yaml", "--out=~/x", "~", "--prompts.system=a~/b", "x~/y", "-x", "--a.b", "~z"]
    home = at_home / "home"
    found = [f"{home}/a.yaml", f"--out={home}/x", str(home), *words[3:]]
    assert [recipe_paths.typed(word) for word in words] == found


@pytest.mark.parametrize(("kind", "key", "says"), [
    (RunConfig, "rollout.num_generations", "here it is rollout.group_size or sample.samples"),
    (RunConfig, "beta", "here it is algorithm.kl.coefficient"),
    (RunConfig, "loss_type", "here it is algorithm.aggregation .* or algorithm.loss"),
    (RunConfig, "optimizer_offload", "here it is training.offload_optimizer$"),
    (RunConfig, "training.optimizer_offload", "here it is training.offload_optimizer$"),
    (RunConfig, "rollout.enforce_eager", "here it is rollout.engine.compile"),
    (SftConfig, "training.gradient_accumulation_steps",
     "here it is training.micro_batch_tokens .* samples_per_step"),
    (SftConfig, "max_length", "here it is demonstrations.max_tokens$"),
    (SftConfig, "clip_eps", "known keys: task, folder"),  # nothing that this command has
])  # fmt: skip
def test_names_of_other_trainers_lead_to_ours(
    kind: Any, key: str, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path)
    if kind is SftConfig:
        path.write_text("folder: f\nmodel: {path: m}\ndemonstrations: {source: a.jsonl}\n")
    with pytest.raises(ValueError, match=f"--{key} 1: .*unknown key; {says}"):
        read(kind, path, [f"--{key}", "1"])
    tree = recipe_file.read_tree(path)
    recipe_file.put(tree, key.split("."), 1)
    with pytest.raises(ValueError, match=rf"{key}: unknown key; {says}"):
        from_tree(kind, tree, where="recipe")


def test_names_that_hints_give_are_there() -> None:
    kinds = (RunConfig, SftConfig, PreferenceConfig, DistillConfig)
    ours = {one.split()[0] for pair in NAMES.values() for one in pair}
    assert [key for key in ours if not any(has_key(kind, key) for kind in kinds)] == []


RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"


@pytest.mark.parametrize(("kind", "name"), [(SftConfig, "grpo"), (RunConfig, "dpo")])
def test_a_recipe_of_another_task_is_refused(kind: Any, name: str) -> None:
    ours = kind.model_fields["task"].default
    with pytest.raises(
        ValueError, match=rf"{name}\.yaml: line \d: task is .*; it should be '{ours}'"
    ):
        read(kind, RECIPES / f"{name}.yaml")


def test_a_marker_beside_another_verifier_is_unset_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, environment={"answer_after": "#"}, rollout={"max_staleness": 0})
    words = ["--environment.verifier", "math"]
    with pytest.raises(ValueError, match=r"over a recipe that has it: --environment.answer_after="):
        read(RunConfig, path, words)
    assert read(RunConfig, path, [*words, "--environment.answer_after="]).environment.verifier
