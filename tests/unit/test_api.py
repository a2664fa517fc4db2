"""`megarl.Trainer`: what is given as Python objects reaches the run, the caller sees the run's files
grow, and a loop that is left ends the run. The run is a stand-in with the real writer of metrics.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import yaml
from support.commands import ROOT, python, records, until

import megarl
from megarl import KeptEngines, RunConfig, Trainer, api, load_recipe, open_run
from megarl.environments.user_code import function_of
from megarl.environments.verifiers import load_functions
from megarl.settings import config
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import Config

RUN = """
import json, signal, sys, time
from pathlib import Path
from megarl.settings.config import RunConfig, read
from megarl.observe.observer import Observer
from megarl.types import StepReport

told = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: told.append(1))
config = read(RunConfig, sys.argv[-1])
folder = Path(config.folder)
saved = sorted((folder / "checkpoints").glob("step_*")) if config.resume else []
saved = [one for one in saved if not (one / "damaged").exists()]
done = first = int(saved[-1].name[5:]) if saved else 0
if done >= config.steps:  # as the real one, which then writes nothing
    print(json.dumps({"steps": done}))
    sys.exit()
with Observer(config.observe, folder, total_steps=config.steps, first_step=first) as observer:
    if observer.evaluated(done, "eval") is None:
        observer.evaluation(done, {"eval/accuracy": 0.0}, [{"response": "before"}])
    while done < config.steps and not told:
        observer.transcripts(done, [{"prompt": f"{done + 1}"}, {"prompt": "b"}])
        observer.step(StepReport(done, {"reward/mean": 0.5}))
        time.sleep(0.05 if config.steps > 9 else 0)
        done += 1
    if not told:
        observer.evaluation(done, {"eval/accuracy": 1.0}, [{"response": "after"}])
(folder / "checkpoints" / f"step_{done:06d}").mkdir(parents=True, exist_ok=True)
if told:
    print("a line of the run", file=sys.stderr)
    sys.exit(130)
print(json.dumps({"steps": done}))
"""
"""What takes the place of `task: rl`: its last word is the recipe."""
PYTHON = """#!/bin/sh
[ "$1" != -m ] || exec {python} {file} "$@"
exec {python} "$@"
"""
"""A Python that runs a file instead of a module."""
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "größer", "answer": "3"}]


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """The dicts of a recipe."""
    return {
        "task": "rl",
        "folder": str(folder / "run"),
        "steps": 3,
        "model": {"path": "nowhere"},
        "prompts": {"source": "nobody/nothing"},
    } | changes


def stand_in(folder: Path, code: str = RUN) -> str:
    """A program in the place of Python, with which `python -m megarl` is `code`."""
    (folder / "run.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{code}")
    made = folder / "python"
    made.write_text(PYTHON.format(python=sys.executable, file=folder / "run.py"))
    made.chmod(0o755)
    return str(made)


@pytest.fixture
def stands_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Trainers start `RUN`."""
    made = stand_in(tmp_path_factory.mktemp("python"))
    monkeypatch.setattr(sys, "executable", made)
    return made


class Log:
    """A callback that notes everything."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_start(self, config: Config) -> None:
        self.events.append("start")

    def on_rollouts(self, step: int, groups: list[dict[str, Any]]) -> None:
        self.events.append((step, [group["prompt"] for group in groups]))

    def on_step(self, row: dict[str, Any]) -> None:
        self.events.append(row["step"])

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self.events.append(f"evaluation {row['step']} {row['transcripts'][0]['response']}")

    def on_end(self, result: api.Result) -> None:
        self.events.append(result.summary)


@pytest.mark.usefixtures("stands_in")
def test_callbacks_hear_all_of_a_run_in_its_order(tmp_path: Path) -> None:
    log = Log()
    result = Trainer(recipe(tmp_path), callbacks=[log]).train()
    steps = [one for step in (1, 2, 3) for one in ((step, [f"{step}", "b"]), step)]
    first, last = "evaluation 0 before", "evaluation 3 after"
    assert log.events == ["start", first, *steps, last, {"steps": 3}]
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert result.transcripts == [{"response": "after"}]


@pytest.mark.usefixtures("stands_in")
def test_a_loop_that_is_left_ends_the_run_and_another_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the resumed run only the steps after its checkpoint come, but the evaluation that was not
    made any more comes too, and a new run begins at 1.
    """
    trainer = Trainer(recipe(tmp_path, steps=10_000, resume="auto"))
    for row in trainer.steps():
        if row["step"] == 4:
            break
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    done = int(saved.name[5:])
    assert done >= 4 and "a line of the run" in capfd.readouterr().err
    lines = open_run(tmp_path / "run").metrics
    assert [row["step"] for row in lines] == list(range(1, done + 1))

    # As if it had been killed after the checkpoint.
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + f'{{"step": {done + 1}}}\n')
    log = Log()
    more = Trainer(trainer.config, steps=done + 2, callbacks=[log])
    assert [row["step"] for row in more.steps()] == [done + 1, done + 2]
    assert [one for one in log.events if isinstance(one, str)][1:] == [
        f"evaluation {done} before",
        f"evaluation {done + 2} after",
    ]
    assert records(metrics)[-2]["reward/mean"] == 0.5

    for row in Trainer(trainer.config, resume=False).steps():
        assert row["step"] == 1
        break


@pytest.mark.usefixtures("stands_in")
def test_a_trainer_tells_each_step_once_also_where_its_loop_was_left(tmp_path: Path) -> None:
    """The step under way at `break` is told by the next loop, also if it was the last one."""
    log = Log()
    trainer = Trainer(recipe(tmp_path, steps=10, resume="auto"), callbacks=[log])
    metrics, told = tmp_path / "run" / "metrics.jsonl", list[int]()
    for left in (2, 9, 0):
        for row in trainer.steps():
            told.append(row["step"])
            if row["step"] == left:
                until(lambda: len(records(metrics)) > left)  # noqa: B023
                break
    assert told == [one for one in log.events if isinstance(one, int)] == list(range(1, 11))
    evaluated = [one for one in log.events if str(one).startswith("evaluation")]
    assert len(evaluated) == len(set(evaluated))


@pytest.mark.usefixtures("stands_in")
def test_steps_that_a_resumed_run_makes_again_are_told_again(tmp_path: Path) -> None:
    """Its newest checkpoint is damaged."""
    Trainer(recipe(tmp_path)).train()
    saved = tmp_path / "run" / "checkpoints"
    (saved / "step_000001").mkdir()
    (saved / "step_000003" / "damaged").touch()
    log = Log()
    more = Trainer(recipe(tmp_path, steps=4, resume="auto"), callbacks=[log])
    assert [row["step"] for row in more.steps()] == [2, 3, 4]
    told = [one for one in log.events if str(one).startswith("evaluation")]
    assert told == ["evaluation 1 before", "evaluation 4 after"]


class Broken:
    """A callback that fails."""

    def on_step(self, row: dict[str, Any]) -> None:
        raise KeyError("mine")


@pytest.mark.usefixtures("stands_in")
def test_an_exception_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Trainer(recipe(tmp_path, steps=10_000), callbacks=[Broken()]).train()
    assert [one.name[:5] for one in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_"]


def test_the_run_ends_with_its_caller(tmp_path: Path, stands_in: str) -> None:
    """A notebook's kernel that is killed in the middle of the loop."""
    code = f"""
import os, signal, sys
from megarl import Trainer
sys.executable = {stands_in!r}
for row in Trainer({recipe(tmp_path, steps=10_000)!r}).steps():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python("-c", code).returncode == -9
    until((tmp_path / "run" / "checkpoints").exists)


@pytest.mark.parametrize(("code", "kind"), [(2, ValueError), (1, RuntimeError)])
def test_mistakes_are_one_line_and_failures_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    said = f"print('megarl: error: steps is odd', file=sys.stderr)\nsys.exit({code})"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, said))
    with pytest.raises(kind) as error:
        Trainer(recipe(tmp_path)).train()
    assert str(error.value).endswith("steps is odd")


def test_too_few_ranks_are_told_as_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from megarl.parallel.layout import resolve
try:
    resolve(data=1, sequence=1, tensor=2, num_ranks=1)
except ValueError as error:
    sys.exit(print(f"megarl: error: {error}", file=sys.stderr) or 2)
"""
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, code))
    with pytest.raises(ValueError, match=r"or start 2 ranks \(the argument ranks\)$"):
        Trainer(recipe(tmp_path)).train()


# ------------------------------------------------------------------------ engines that stay

KEEPER = """
if "megarl.rollout.keeper" in sys.argv:
    import signal
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if "fails" in open(sys.argv[-1]).read():
        sys.exit(print("megarl: error: no room", file=sys.stderr) or 2)
    import json, os
    open(RAYS, "a").write(f"{os.getpid()} ")
    print(json.dumps({"RAY_ADDRESS": "here:1"}), flush=True)
    signal.pause()
import os
assert os.environ["RAY_ADDRESS"] == "here:1"
"""
"""What takes the place of the process that keeps Ray."""


@pytest.fixture
def rays(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the ids of the processes that keep Ray; trainers start `RUN` beside them."""
    folder = tmp_path_factory.mktemp("python")
    code = f"RAYS = {str(folder / 'rays')!r}\n{KEEPER}\n{RUN}"
    monkeypatch.setattr(sys, "executable", stand_in(folder, code))
    return folder / "rays"


def test_engines_stay_until_they_are_closed(tmp_path: Path, rays: Path) -> None:
    """Also where a loop is left; one run at a time has them."""
    with KeptEngines() as engines:
        Trainer(recipe(tmp_path), engines=engines).train()
        changes = {"folder": str(tmp_path / "second"), "steps": 10_000, "resume": "auto"}
        second = Trainer(recipe(tmp_path) | changes, engines=engines)
        for row in second.steps():
            with pytest.raises(
                ValueError, match=r"are in use by the run in .*second; end its loop"
            ):
                Trainer(recipe(tmp_path), engines=engines).train()
            if row["step"] == 2:
                break
        assert next(second.steps())["step"] > 2
        (kept,) = rays.read_text().split()
        os.kill(int(kept), 9)
        until(lambda: not engines._keeper or engines._keeper.is_over(0))
        Trainer(recipe(tmp_path), engines=engines).train()
    _, again = rays.read_text().split()
    assert not Path("/proc", again).exists()
    engines.close()
    Trainer(recipe(tmp_path), engines=engines).train()
    assert len(rays.read_text().split()) == 3, "the next run starts others"
    engines.close()


def test_engines_of_other_settings_are_refused(tmp_path: Path, rays: Path) -> None:
    with KeptEngines() as engines:
        Trainer(recipe(tmp_path), engines=engines).train()
        for changes, says in (
            ({"rollout__engine__dtype": "bfloat16", "prompts__template": "chat"},
             r"rollout\.engine\.dtype \(float32 there, bfloat16 here\), prompts\.template \(none there, chat, none here\); set these"),
            ({"rollout__max_new_tokens": 7}, "the most tokens of a sequence"),
            ({"rollout__placement": "colocated"}, "memory of the GPUs that a colocated trainer"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=says):
                Trainer(recipe(tmp_path), engines=engines, **changes)
        alike = {"training__optimizer__learning_rate": 1.0, "seed": 3, "algorithm": "gspo"}
        Trainer(recipe(tmp_path), engines=engines, reward=lambda prompt, response: 1.0, **alike)
        sft = {"model": {"path": "nowhere"}, "folder": "x", "demonstrations": {"source": "x"}}
        sft["task"] = "sft"
        with pytest.raises(ValueError, match="task: sft has no engines; leave it out"):
            Trainer(sft, engines=engines)
    with pytest.raises(ValueError, match="no room"):
        Trainer(recipe(tmp_path, model={"path": "fails"}), engines=KeptEngines()).train()
    assert len(rays.read_text().split()) == 1


# ---------------------------------------------------------------------- functions and data


def loaded(trainer: Trainer) -> Any:
    """The reward function as the run loads it."""
    assert isinstance(trainer.config, RunConfig)
    (found,) = load_functions(
        EnvironmentConfig(verifier=trainer.config.environment.verifier)
    ).values()
    return found.call


def test_a_function_of_a_file_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "api_reward.py").write_text(
        "def score(prompt, response):\n    return 1.0\n\n\nother = lambda prompt, response: 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import api_reward  # pyright: ignore[reportMissingImports]

    trainer = Trainer(recipe(tmp_path), reward=api_reward.score)
    assert trainer.config.environment.verifier == f"{tmp_path}/api_reward.py:score"
    assert not (tmp_path / "run").exists()
    assert loaded(Trainer(recipe(tmp_path), reward=api_reward.other))(None, "") == 2.0


def test_a_function_of_main_is_run_elsewhere_by_value(tmp_path: Path) -> None:
    """With what it uses: a global, an import of a module beside it, a closure. The same function has
    the same file, in another process too.
    """
    (tmp_path / "beside.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "script.py").write_text(f"""
import beside
from megarl import Trainer
factor = 3.0
def make(more):
    return lambda x: factor * x + more
plus = make(1.0)
def score(prompt, response):
    return plus(beside.half(len(response)))
print(Trainer({recipe(tmp_path)!r}, reward=score).config.environment.verifier)
""")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    names = [python(str(tmp_path / "script.py"), env=environment).stdout for _ in range(2)]
    assert names[0] == names[1] and names[0].startswith(f"{tmp_path}/run/inputs/reward-")
    told = """
import sys
from megarl.environments.user_code import own_function
print(own_function(sys.argv[1], "environment.verifier")(None, "abcd"))
"""
    assert python("-P", "-c", told, names[0].strip(), env=environment).stdout == "7.0\n"


def test_advantage_and_loss_share_their_globals(tmp_path: Path) -> None:
    """A notebook's advantage counts, and its loss reads the count."""
    space: dict[str, Any] = {"__name__": "__main__", "count": 0}
    exec(  # a notebook's cell
        "def advantage():\n    global count\n    count += 1\n\n\ndef loss():\n    return count\n",
        space,
    )
    trainer = Trainer(recipe(tmp_path), advantage=space["advantage"], loss=space["loss"])
    assert isinstance(trainer.config, RunConfig)
    names = trainer.config.algorithm.advantage, trainer.config.algorithm.loss
    advantage, loss = (function_of(name, {}, "algorithm") for name in names)
    advantage()
    assert loss() == 1 and space["count"] == 0


def test_every_function_and_every_table_of_rows_has_its_setting(tmp_path: Path) -> None:
    def own(*arguments: Any, **named: Any) -> float:
        return 1.0

    trainer = Trainer(
        recipe(tmp_path),
        reward=lambda prompt, response: len(response),
        advantage=partial(own, 1),
        loss=own,
        data=ROWS,
        evaluation_data=iter(ROWS[:1]),
    )
    found = trainer.config
    assert isinstance(found, RunConfig)
    assert loaded(trainer)(None, "abc") == 3
    algorithm, inputs = found.algorithm, f"{tmp_path}/run/inputs"
    file = algorithm.loss.removesuffix(":loss")
    assert file.startswith(f"{inputs}/advantage-loss-") and file.endswith(".py")
    assert algorithm.advantage == f"{file}:advantage"
    assert records(Path(found.prompts.source)) == ROWS
    assert records(Path(found.evaluation.prompts.source)) == ROWS[:1]
    files = sorted((tmp_path / "run" / "inputs").iterdir())
    assert {one.stat().st_mode & 0o777 for one in files} == {0o600}
    again = Trainer(found, data=ROWS)
    assert again.config == found and sorted((tmp_path / "run" / "inputs").iterdir()) == files
    other = Trainer(found, data=ROWS[:1])
    assert (
        isinstance(other.config, RunConfig) and other.config.prompts.source != found.prompts.source
    )


def test_rows_of_datasets_are_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    kinds = [
        Trainer(recipe(tmp_path), data=rows).config for rows in (ROWS, Dataset.from_list(ROWS))
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("section", "kind"), [
    ({"task": "sft"}, "SftConfig"),
    ({"task": "preference"}, "PreferenceConfig"),
    ({"task": "reward_model"}, "RewardModelConfig"),
    ({"task": "distill", "teacher": {"model": {"path": "nowhere"}}}, "DistillConfig"),
    ({"task": "rl", "algorithm": "gspo"}, "RunConfig"),
])  # fmt: skip
def test_the_task_says_what_the_recipe_is(
    tmp_path: Path, section: dict[str, Any], kind: str
) -> None:
    tree = {"folder": str(tmp_path / "run"), "model": {"path": "nowhere"}} | section
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    data: Any = {"data": ROWS}
    for one in (tree, tmp_path / "recipe.yaml"):
        found = Trainer(one, **data).config
        assert type(found).__name__ == kind
        assert config.dump(found).count("inputs/data-") == 1
    with pytest.raises(ValueError, match="stepz: unknown key; did you mean 'steps'"):
        Trainer(tree | {"stepz": 1}, **data)
    with pytest.raises(ValueError, match="add a line such as `task: rl`"):
        Trainer({name: value for name, value in tree.items() if name != "task"}, **data)


def test_load_recipe_takes_dicts_and_paths(tmp_path: Path) -> None:
    tree = recipe(tmp_path, algorithm="gspo")
    found = load_recipe(
        RunConfig, tree, model__path=tmp_path / "model", algorithm__entropy_coefficient=0.1
    )
    assert found.model.path == str(tmp_path / "model") and found.algorithm.preset == "gspo"
    assert tree == recipe(tmp_path, algorithm="gspo")


@pytest.mark.parametrize(("given", "says"), [
    ({"reward": lambda p, r, lock=Lock(): 1.0}, "reward: .*<lambda> cannot be sent .*lock"),
    ({"reward": "math"}, "reward is 'math', .* set environment.verifier"),
    ({"data": [{"prompt": "a"}, "b"]}, r"data\[1\] is str, not a dict"),
    ({"data": [{"prompt": {1}}]}, r"data\[0\] cannot be written as JSON .*set"),
    ({"evaluation_data": [{"prompt": float("nan")}]}, r"evaluation_data\[0\] cannot be written"),
    ({"callbacks": [object()]}, "has no method on_start, on_rollouts"),
    ({"data": ROWS, "rollout__group_sise": 4}, "rollout.group_sise: unknown key"),
    ({"data": ROWS, "folder": "$NO_SUCH/run"}, "folder is .*variable NO_SUCH is not set"),
    ({"data": ROWS, "folder": "/proc/run"}, "/proc/run/inputs cannot be written"),
    ({"data": ROWS, "folder": ""}, "folder is empty"),
])  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says) as error:
        Trainer(recipe(tmp_path), **given)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_only_public_names_are_shown() -> None:
    assert dir(megarl) == sorted(megarl.__all__)
    assert all(
        getattr(megarl, name).__module__
        in ("megarl.api", "megarl.settings.config", "megarl.settings.rl")
        for name in dir(megarl)
    )
