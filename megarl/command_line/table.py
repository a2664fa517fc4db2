"""The table of commands, from which the command line, `--help` and completion are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megarl import signals


@dataclass(frozen=True)
class Command:
    """A subcommand of `megarl`, such as `train`, as the table `COMMANDS` lists them: the functions
    that check its recipe and run it, its options and the texts of its help.

    The functions are named, not imported, so that a mistake in a recipe is reported before
    DeepSpeed and Ray are imported.
    """

    summary: str
    """What the command does, for the help text."""
    run: str = ""
    """"module:function" of (config, inputs) -> exit code, where inputs is what `check` returned; of
    (arguments) -> exit code for a command without recipe; empty where `becomes` is set."""
    becomes: str = ""
    """For a command that starts another one: "module:function" of (words after the command) ->
    words after `megarl` that are run in their place."""
    config: str = ""
    """Class in `megarl.config` for the recipe; empty for a command without recipe."""
    check: str = ""
    """"module:function" of (config, ranks or None) -> inputs; raises `ValueError` for what the user
    can correct."""
    end_within_s: float = signals.SAVE_WITHIN_S + 1.0
    """Seconds after a signal until everything this process started has ended, by force if need
    be."""
    owns_folder: bool = False
    """Whether the command writes to its run folder, which then belongs to it alone."""
    arguments: str = ""
    """For a command that is given something else than a recipe first: "module:function" of (command
    line) -> (class in `megarl.config`, command line with a recipe first)."""
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
        return self.options | (RECIPE_OPTIONS if self.config else {})

    @property
    def option_names(self) -> list[str]:
        """Names of the options in `all_options`, such as "--dry-run", without the names of their
        values. Settings of the recipe, such as --training.zero_stage, are not included.
        """
        return re.findall(r"--[a-z-]+(?= |$)", " ".join(self.all_options))


RECIPE_OPTIONS = {
    "--section.key VALUE": "a setting of the recipe; several values make a list",
    "--check": "check everything that can be known to be wrong, and start nothing",
    "--ranks N": "with --check: for a run of N ranks, without starting them",
    "--print-config": "print every setting, defaults and presets included, as YAML",
}


LAUNCH_OPTIONS = {
    "--gpus-train N": (
        "GPUs of the trainer ranks, the first ones, one for each rank of every role (default:"
        " ranks of training.layout and of roles on ranks of their own)"
    ),
    "--gpus-engine N": (
        "GPUs of the engines, the next ones (default: the recipe's rollout.num_engines x"
        " rollout.engine.tensor); colocated engines use those of the policy"
    ),
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
    "-- OVERRIDES": "settings of the recipe: -- --steps 10 --rollout.max_staleness 1",
}

RUN_OPTIONS = RECIPE_OPTIONS | {
    "--ranks N": (
        "trainer ranks, with --check without starting them (default: as many as the recipe's"
        " layout and roles need)"
    )
}

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
        becomes="megarl.apps.launch.run_words:words_to_start",
        options=RUN_OPTIONS | {k: v for k, v in LAUNCH_OPTIONS.items() if k != "-- OVERRIDES"},
        about=(
            "RECIPE.yaml may be the name of one of megarl's recipes, such as quickstart. Finds by"
            " the recipe's sections which of train, distill, sft, preference and reward-model it is"
            " for. With GPUs, in a job of Slurm, and with an option that megarl"
            " launch has too, the run is started by megarl launch; elsewhere in this process, or"
            " with several ranks by megarl torchrun."
        ),
        example="recipe.yaml --ranks 2 --steps 50",
    ),
    "train": Command(
        summary="reinforcement learning",
        config="RunConfig",
        check="megarl.checks.preflight:check_train",
        run="megarl.loops.rl:main",
        owns_folder=True,
        example="recipe.yaml --steps 50 --training.optimizer.learning_rate 1e-6",
    ),
    "distill": Command(
        summary="on-policy distillation: learn a teacher's distributions",
        config="DistillConfig",
        check="megarl.checks.preflight:check_train",
        run="megarl.loops.distill:main",
        owns_folder=True,
        example="distill.yaml --check",
        docs="docs/distill.md",
    ),
    "sft": Command(
        summary="supervised fine-tuning",
        config="SftConfig",
        check="megarl.apps.tune.supervised_checks:check_sft",
        run="megarl.apps.tune.sft:main",
        owns_folder=True,
        example="sft.yaml --folder runs/second",
    ),
    "preference": Command(
        summary="learn from pairs of responses: DPO and its relatives",
        config="PreferenceConfig",
        check="megarl.apps.tune.supervised_checks:check_preference",
        run="megarl.apps.tune.preference:main",
        owns_folder=True,
        example="dpo.yaml --check",
        docs="docs/preferences.md",
    ),
    "reward-model": Command(
        summary="train a reward model on pairs of responses",
        config="RewardModelConfig",
        check="megarl.apps.tune.supervised_checks:check_reward_model",
        run="megarl.apps.tune.reward_model:main",
        owns_folder=True,
        example="reward_model.yaml --check",
        docs="docs/howto/reward_model.md",
    ),
    "eval": Command(
        summary="score models on held-out problems, with pass@k of several samples",
        config="RunConfig",
        check="megarl.checks.preflight:check_eval",
        run="megarl.loops.evaluate:main",
        example="recipe.yaml --model.path runs/mine/checkpoints/step_000100/model",
    ),
    "sample": Command(
        summary="best of n responses, or pairs of them, as a data set",
        config="RunConfig",
        check="megarl.apps.tune.sampling_checks:check_sample",
        run="megarl.apps.tune.sample:main",
        example="recipe.yaml --sample.keep pairs",
        docs="docs/preferences.md",
    ),
    "rollout": Command(
        summary="print a few rollouts of a recipe, turn by turn",
        config="RunConfig",
        check="megarl.apps.runs.command_checks:check_rollout",
        run="megarl.apps.runs.show_rollouts:main",
        flags={"--num": "--sample.shown"},
        options={"--num N": "how many rollouts"},
        example="recipe.yaml --num 4",
        docs="docs/environments.md",
    ),
    "replay": Command(
        summary="train again on the batches that a run has recorded, and compare",
        config="RunConfig",
        arguments="megarl.apps.runs.command_checks:arguments",
        first="RUN",
        check="megarl.apps.runs.command_checks:check_replay",
        run="megarl.apps.runs.replay:main",
        owns_folder=True,
        example="runs/mine --replay.steps 20",
    ),
    "serve-reward": Command(
        summary="verifiers, a reward model or a judge as an HTTP server",
        config="ServeRewardConfig",
        check="megarl.apps.serve.serve_reward:check_serve_reward",
        run="megarl.apps.serve.serve_reward:main",
        end_within_s=70.0,  # more than server.drain_s may be
        example="launch/recipes/serve_reward.yaml",
        docs="docs/howto/reward_server.md",
    ),
    "launch": Command(
        summary="the ranks of a recipe's run, Ray and engines, here or on Slurm's nodes",
        run="megarl.apps.launch.launch:main",
        end_within_s=90.0,  # more than the launcher gives the ranks, and then Ray
        options=LAUNCH_OPTIONS,
        about=(
            "Starts Ray, if there are engines, and the trainer ranks, and ends them. GPUs are those"
            " of CUDA_VISIBLE_DEVICES, none if it is set to nothing, and all of the node without"
            " it. The exit code is 0 when done, 2 if the recipe or this command is at fault, 130"
            " or 143 when ended by a signal, and otherwise that of the rank that failed first."
        ),
        example="recipe.yaml --dry-run -- --steps 10",
        docs="docs/slurm.md",
    ),
    "report": Command(
        summary="write a run folder's report.html again, or compare runs on one page",
        run="megarl.apps.runs.report:main",
        first="RUN",
        options={"--out FILE": "where to write (default: RUN/report.html, or compare.html)"},
        about="Several run folders are compared; those that differ in the seed alone are one band.",
        example="runs/first runs/second",
        docs="docs/howto/compare_runs.md",
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
    "torchrun": Command(
        summary="a training command on several ranks",
        run="megarl.parallel.torchrun:command",
        end_within_s=90.0,
        first="COMMAND RECIPE.yaml",
        options={
            "--nproc-per-node N": "ranks on this node",
            "--max-restarts N": "start failed ranks again, N times; needs resume: auto",
            "--shutdown-timeout S": "seconds after a signal until ranks are killed (default: 30)",
        },
        about=(
            "The options stand before COMMAND, which is train, distill, sft, preference,"
            " reward-model or replay. All others are torchrun's own: python -m"
            " torch.distributed.run --help."
        ),
        example="--nproc-per-node 2 train recipe.yaml --training.zero_stage 3",
        docs="docs/layouts.md",
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
