"""The table of commands, from which the command line, `--help` and completion are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megarl.system import signals

if TYPE_CHECKING:
    from megarl.settings.config import AnyConfig, ServeRewardConfig


class TrainingTask(NamedTuple):
    """What `megarl run` does for a value of the setting `task`: the function that checks the
    recipe, and the one that runs it on this rank; see `Command`.
    """

    summary: str
    check: str
    run: str


TASKS = {
    "rl": TrainingTask(
        "reinforcement learning", "megarl.run.plan:plan_run", "megarl.run.loop:main"
    ),
    "sft": TrainingTask(
        "supervised fine-tuning",
        "megarl.apps.tune.tune_checks:check_sft",
        "megarl.apps.tune.sft:main",
    ),
    "preference": TrainingTask(
        "learning from pairs of responses: DPO and its relatives",
        "megarl.apps.tune.tune_checks:check_preference",
        "megarl.apps.tune.preference:main",
    ),
    "reward_model": TrainingTask(
        "a reward model, from pairs of responses",
        "megarl.apps.tune.tune_checks:check_reward_model",
        "megarl.apps.tune.preference:train_reward_model",
    ),
    "distill": TrainingTask(
        "on-policy distillation: a teacher's distributions",
        "megarl.run.plan:plan_run",
        "megarl.run.distill:main",
    ),
}
"""{`task` of a recipe: what runs it}"""


@dataclass(frozen=True)
class Command:
    """A subcommand of `megarl`: the functions that check its recipe and run it, its options and the
    texts of its help.

    The functions are named, not imported, so that a mistake in a recipe is reported before
    DeepSpeed and Ray are imported.
    """

    summary: str
    """What the command does, for the help text."""
    run: str = ""
    """"module:function" of (config, inputs) -> exit code, where inputs is what `check` returned; of
    (arguments) -> exit code for a command without recipe; empty where `TASKS` names it."""
    tasks: tuple[str, ...] = ()
    """The values of the setting `task` in recipes that the command takes."""
    config: str = ""
    """Class in `megarl.settings.config` for recipes without `task`."""
    check: str = ""
    """"module:function" of (config, ranks or None) -> inputs; raises `ValueError` for what the user
    can correct."""
    end_within_s: float = signals.SAVE_WITHIN_S + 1.0
    """Seconds after a signal until everything this process started has ended, by force if need
    be."""
    owns_folder: bool = False
    """Whether the command writes to its run folder, which then belongs to it alone."""
    arguments: str = ""
    """For a command that is given a run folder first: "module:function" of (options), which changes
    them to those of a command with a recipe."""
    starts: str = ""
    """For a command that may run in other processes: "module:function" of (command's name, options,
    configuration class) -> function that starts them, or None."""
    reads_files: bool = True
    """Whether the files that the recipe names are needed."""
    first: str = "RECIPE.yaml"
    """What the command is given first; empty for nothing."""
    flags: dict[str, str] = field(default_factory=dict)
    """{short name for a key of the recipe: the key}"""
    options: dict[str, str] = field(default_factory=dict)
    """{option, with a name for its value: meaning} of what is no key of the recipe."""
    about: str = ""
    """More sentences about the command, for its own help text."""
    example: str = ""
    """A command line, without `megarl` and the command's name."""
    docs: str = "docs/runs.md"
    """The page about the command."""

    @property
    def all_options(self) -> dict[str, str]:
        """{option as --help writes it, such as "--num N": meaning} of the command's own options,
        and for a command with a recipe of the options that all such commands have.
        """
        return self.options | (RECIPE_OPTIONS if self.tasks or self.config else {})

    @property
    def option_names(self) -> list[str]:
        """Names of the options in `all_options`, such as "--dry-run"."""
        return [option.partition(" ")[0] for option in self.all_options]

    def kinds(self) -> dict[str, type[AnyConfig | ServeRewardConfig]]:
        """{task: configuration class} of the recipes that the command takes; the task is "" for
        recipes without one. Empty for a command without recipe.
        """
        from megarl.settings import config as configs

        if self.config:
            return {"": getattr(configs, self.config)}
        return {task: configs.TASKS[task] for task in self.tasks}


RECIPE_OPTIONS = {
    "--check": "check everything that can be known to be wrong, and start nothing",
    "--print-config": "print every setting, defaults and presets included, as YAML",
}
PLACEMENT_OPTIONS = {
    "--port N": "port of this run's Ray (default: a free one)",
    "--cpu": "the same processes without GPUs, to rehearse with a small recipe",
    "--requeue": (
        "in a Slurm job: put it back into the queue after SIGTERM (time limit, preemption), once"
        " its checkpoint is saved, and when a node does not answer; needs resume: auto"
    ),
    "--dry-run": (
        "check the recipe, print ranks, GPUs and memory of each role and engine, and every"
        " command, and start nothing; needs no GPU, no weights and no network"
    ),
    "--nodes N": "with --dry-run: plan for N nodes, and print what to start on each (default: 1)",
    "--gpus-per-node G": (
        "with --dry-run: GPUs of each node (default with one node: as many as needed)"
    ),
}
"""Options of `megarl run` with which it places its processes on GPUs and nodes."""
STARTS = "megarl.apps.launch.run_words:other_processes"
RANKS = {"--ranks N": "trainer ranks (default: as many as the recipe's layout and roles need)"}
OTHERS = {
    "--help": "after a command: its options and settings",
    "--version": "of megarl, and of what it stands on",
    "completion": "of words by the Tab key: megarl completion bash, or zsh",
}
"""{first word of a command line that is not in the table of commands: meaning}"""

COMMANDS = {
    "init": Command(
        summary="a folder with a recipe, a reward and problems to begin with",
        run="megarl.apps.launch.new_task:main",
        first="FOLDER",
        options={"--model PATH": "the recipe's model.path (default: Qwen/Qwen2.5-0.5B-Instruct)"},
        example="my_task --model ~/models/mine",
        docs="docs/tutorials/own_reward.md",
    ),
    "run": Command(
        summary="start the run of a recipe: training of any kind, on any machine",
        tasks=tuple(TASKS),
        owns_folder=True,
        starts=STARTS,
        options=RANKS | PLACEMENT_OPTIONS,
        about=(
            "RECIPE.yaml may be the name of one of megarl's recipes, such as quickstart. With GPUs,"
            " in a job of Slurm, and with --cpu or --dry-run, starts Ray, if there are engines, and"
            " the trainer ranks, and ends them; elsewhere the ranks alone. GPUs are those of"
            " CUDA_VISIBLE_DEVICES, none if it is set to nothing, and all of the node without it."
            " In a rank, as torchrun starts it, the run is this process. The exit code is 0 when"
            " done, 2 if the recipe or this command is at fault, 130 or 143 when ended by a signal,"
            " and otherwise that of the rank that failed first."
        ),
        example="recipe.yaml --ranks 2 --steps 50",
    ),
    "eval": Command(
        summary="score models on held-out problems, with pass@k of several samples",
        tasks=("rl",),
        check="megarl.run.plan:check_eval",
        run="megarl.run.evaluate:main",
        example="recipe.yaml --model.path runs/mine/checkpoints/step_000100/model",
    ),
    "sample": Command(
        summary="best of n responses, or pairs of them, as a data set",
        tasks=("rl",),
        check="megarl.apps.tune.tune_checks:check_sample",
        run="megarl.apps.tune.sample:main",
        example="recipe.yaml --sample.keep pairs",
        docs="docs/preferences.md",
    ),
    "rollout": Command(
        summary="print a few rollouts of a recipe, turn by turn",
        tasks=("rl",),
        check="megarl.apps.runs.command_checks:check_rollout",
        run="megarl.apps.runs.show_rollouts:main",
        flags={"--num": "sample.shown"},
        options={"--num N": "how many rollouts"},
        example="recipe.yaml --num 4",
        docs="docs/environments.md",
    ),
    "replay": Command(
        summary="train again on the batches that a run has recorded, and compare",
        tasks=("rl", "distill"),
        arguments="megarl.apps.runs.command_checks:arguments",
        first="RUN",
        check="megarl.apps.runs.command_checks:check_replay",
        run="megarl.apps.runs.replay:main",
        owns_folder=True,
        starts=STARTS,
        reads_files=False,
        options=RANKS,
        example="runs/mine --replay.steps 20",
    ),
    "serve-reward": Command(
        summary="verifiers, a reward model or a judge as an HTTP server",
        config="ServeRewardConfig",
        reads_files=False,
        check="megarl.apps.serve.serve_reward:check_serve_reward",
        run="megarl.apps.serve.serve_reward:main",
        end_within_s=70.0,  # more than server.drain_s may be
        example="launch/recipes/serve_reward.yaml",
        docs="docs/howto/reward_server.md",
    ),
    "report": Command(
        summary="write a run folder's report.html again, or compare runs on one page",
        run="megarl.apps.runs.report:main",
        first="RUN",
        options={"--out FILE": "where to write (default: RUN/report.html, or compare.html)"},
        about="Several run folders are compared; those that differ in the seed alone are one band.",
        example="runs/first runs/second",
        docs="docs/howto/read_run_folder.md",
    ),
    "ledger": Command(
        summary="what became of every group of a run, audited",
        run="megarl.apps.runs.ledger_command:main",
        first="RUN",
        options={"--json": "one JSON object in place of the table"},
        about="The exit code is 1 if the ledger contradicts itself.",
        example="runs/mine",
    ),
    "chat": Command(
        summary="talk to a trained model, or to any other",
        run="megarl.apps.runs.chat:main",
        first="RUN|MODEL",
        options={
            "--best": "of a run's checkpoints the best (training.checkpoint.best), not the newest",
            "--prompt TEXT": "answer this alone (default: each line of standard input)",
            "--system TEXT": "the system message",
            "--max-tokens N": "tokens of an answer at most (default: 512)",
            "--temperature T": "0 for the most probable answer (default: 0.7)",
        },
        about=(
            "Of a run folder the model of the newest checkpoint answers, by vLLM on the first GPU"
            " or the CPU. A model without a chat template goes on with each line."
        ),
        example='runs/mine --prompt "What is 47 plus 38?"',
    ),
    "status": Command(
        summary="what each process of a run does, and on whom it waits",
        run="megarl.apps.runs.status:main",
        first="RUN",
        options={
            "--json": "one JSON object in place of the table",
            "--stacks": "also the Python stacks of this machine's processes",
            "--watch": "again each second, until the run has ended",
        },
        example="runs/mine --stacks",
        docs="docs/activity.md",
    ),
    "doctor": Command(
        summary="what this machine has, and whether it is enough",
        run="megarl.apps.doctor.doctor:main",
        first="",
        options={"--json": "one JSON object in place of the table"},
        about="Changes nothing. The exit code is 1 if anything is missing that a run needs.",
        example="--json",
        docs="README.md",
    ),
}
"""{name on the command line: subcommand}"""
