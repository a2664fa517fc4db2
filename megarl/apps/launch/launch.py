"""Start the run of one recipe on this machine, or on all nodes of a Slurm allocation, as `megarl
run` does with GPUs.

    recipe --launch_plan--> LaunchPlan, Gpus, processes
    processes --launch_run--> exit code

Whatever ends the launcher, every process that it started has ended then, and no other one has.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megarl.apps.launch.launch_plan import (
    HEAD,
    RAY_PORT,
    TORCH_PORT,
    Addresses,
    Gpus,
    LaunchPlan,
    ProgramCommand,
    deal_cpu,
    deal_gpus,
    make_launch_plan,
    processes,
    shown_commands,
)
from megarl.apps.launch.launch_run import Launcher, announce
from megarl.apps.launch.slurm import allocated_hosts, requeue, srun
from megarl.checkpoints.run_folder import plan_folder
from megarl.data.hub import read_model_folder
from megarl.parallel.devices import are_hidden, driver_gpus
from megarl.parallel.launcher import free_port
from megarl.run.named_files import check_named_files, check_sizes
from megarl.settings.config import AnyConfig, RunConfig, handed
from megarl.settings.recipe_paths import recipe_path
from megarl.settings.schema import require
from megarl.system.console import Options, result
from megarl.system.signals import SAVE_WITHIN_S, EndedBySignal


def planned(config: AnyConfig, options: Options) -> Callable[[], int]:
    """Plan the start of Ray and of the trainer ranks of a recipe on all nodes. `options`: the words
    after `megarl run`. Returns the function that starts them, waits for their end and returns the
    exit code: that of the ranks that failed first, or 0; with `--dry-run`, one that prints
    placement and commands on standard output. Raises `ValueError` for a mistake in options or
    recipe.
    """
    host = os.uname().nodename
    is_named = options.nodes is not None  # nodes that this process need not be on
    hosts = [host] if is_named else allocated_hosts(os.environ, host)
    num_nodes = options.nodes or len(hosts)
    if options.requeue:
        refuse_requeue(config, options)
    plan = make_launch_plan(config, options)
    gpus = find_gpus(plan, options, num_nodes)
    elsewhere = hosts[0].split(".")[0] != host.split(".")[0]
    if not (options.dry_run or elsewhere):
        with plan_folder(config, starts=False):  # rank 0 takes it
            check_named_files(config)
    if isinstance(config, RunConfig):
        refuse_placement(config, plan, gpus)
        if options.dry_run:
            check_models(config, plan, gpus)
    by_us = not is_named or num_nodes == 1
    at = addresses(options, hosts) if by_us else Addresses(ray_port=options.port or RAY_PORT)
    started = processes(plan, gpus, options, at)
    facts = {"recipe": str(recipe_path(options.recipe).resolve()), "folder": config.folder}
    facts |= {"host": " ".join(hosts), "python": sys.executable}
    facts |= {"overrides": " ".join(options.overrides)} if options.overrides else {}
    there = srun(hosts[0], [sys.executable, "-m", "megarl", "run", *options.words])
    facts |= {"started from": str(ProgramCommand({}, there))} if elsewhere else {}
    # Imported here: the parameter tables import torch, and a mistake is told without it.
    from megarl.apps.launch.plan_text import plan_text

    text = plan_text(facts, plan, gpus, shown_commands(started, hosts if by_us else []))
    if options.dry_run:
        by_hand = "" if by_us else f"\n# in place of {HEAD} write the address of node 0"
        return lambda: result(f"{text}{by_hand}\n# the recipe passes; nothing was started") or 0
    if elsewhere:
        announce(f"this is not the allocation's first host; going to {hosts[0]}")
        return lambda: os.execvp(there[0], there)  # noqa: S606 - srun itself, no shell
    print(text, file=sys.stderr, flush=True)
    job, restarts = (os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "RESTART_COUNT"))
    logs = Path(config.folder, "logs", f"{job}-{restarts or 0}" if job else "launch")
    more_s = max(0.0, config.training.checkpoint.save_within_s - SAVE_WITHIN_S)
    for process in started:
        if process.kind == "ranks":
            process.command.environment.update(handed(config))
    return partial(
        run_launcher, Launcher(started, hosts, at, logs, more_s), job if options.requeue else ""
    )


def run_launcher(launcher: Launcher, job: str) -> int:
    """Start a run and wait for its end; returns the exit code. If the run was interrupted, the
    Slurm job `job`, if any, is put back into the queue.
    """
    interrupted = False
    try:
        code = launcher.run()
        if code != 0 and launcher.silent:
            announce(f"error: {', '.join(launcher.silent)} did not end in time: is the node dead?")
            interrupted = True
        return code
    except EndedBySignal as ended:
        interrupted = ended.number != signal.SIGINT
        raise
    finally:
        if job and interrupted:
            announce(requeue(job))


def refuse_requeue(config: AnyConfig, options: Options) -> None:
    """Raise `ValueError` if the run could not be requeued: it never resumes, or is no Slurm job."""
    require(
        config.resume is not False,
        "--requeue needs a run that goes on from its checkpoint; set resume to auto",
    )
    require(
        options.dry_run or "SLURM_JOB_ID" in os.environ,
        "--requeue is for a job of Slurm, and this is none; leave it out",
    )


def refuse_placement(config: RunConfig, plan: LaunchPlan, gpus: Gpus) -> None:
    """Check the placement of a run before it starts. Raises `ValueError` if the GPUs and nodes that
    `gpus` gives to the processes of `plan` do not suit the recipe's inference engines, or its way
    to send weights from trainer ranks to engines.
    """
    # Imported here: transformers takes seconds, and other mistakes are told without it.
    from megarl.engines.plan import check_placement

    check_placement(
        config,
        len(plan.roles["policy"].ranks),
        len({gpu.node for gpu in sum(gpus.engines, gpus.ranks)}),
        shares_gpus=not gpus.on_cpu,
        started=False,
    )


def check_models(config: RunConfig, plan: LaunchPlan, gpus: Gpus) -> None:
    """Raise `ValueError` as a start would if a model does not suit the recipe or the policy. Sizes
    are checked of folders that are here; models beside the policy if all have their weights, and
    this process has a device like the ranks'.
    """
    from megarl.parallel.mesh import local_device  # imported here: as in `refuse_placement`
    from megarl.trainer.model_config import load_model_config
    from megarl.trainer.plan import plan_role

    models = [config.model, *(role.model for role in config.other_roles.values())]
    folders = [Path(model.path) for model in models if model.path]
    if folders[0].is_dir():
        tree = read_model_folder(config.model.path, "model.path")
        check_sizes(config, tree, trains=True)
    are_whole = all(any(folder.glob("*.safetensors")) for folder in folders)
    if are_whole and gpus.on_cpu == (local_device().type == "cpu"):
        hf = load_model_config(config.model)
        for name in config.other_roles:
            plan_role(name, config, hf, plan.roles["policy"])


def addresses(options: Options, hosts: Sequence[str]) -> Addresses:
    """Choose where the processes of a run meet: the first node's address, a free port for Ray's
    head (or `options.port`), for Ray's clients and for torchrun, and Ray's folder. `hosts`: names
    of the run's nodes, this machine first; a run on one host uses its loopback address.
    """
    several = len(hosts) > 1
    return Addresses(
        head=hosts[0] if several else "127.0.0.1",
        ray_port=options.port or free_port(),
        torch_port=free_port() if several else TORCH_PORT,
        client_port=free_port(),
        # /tmp and not TMPDIR: Ray's sockets lie inside, and their paths may have 107 characters.
        state=f"/tmp/megarl-{os.getpid()}-{secrets.token_hex(4)}",
        python=sys.executable,
    )


def find_gpus(plan: LaunchPlan, options: Options, num_nodes: int) -> Gpus:
    """Assign GPUs to the trainer ranks and engines of `plan`, on `num_nodes` nodes that have the
    same GPUs. On each node the GPUs in CUDA_VISIBLE_DEVICES are used: none if this variable is
    empty, all of this node's if the variable is not set. With `--cpu`, processes are assigned to
    nodes and not to GPUs. A dry run assumes the nodes and GPUs that `--nodes` and `--gpus-per-node`
    name; without options and variable, one node with as many GPUs as are needed. Returns the GPU of
    each rank and the GPUs of each engine. Raises `ValueError` if there are too few.
    """
    if options.cpu:
        return deal_cpu(plan, num_nodes)
    if options.gpus_per_node:
        count, each = options.nodes or 1, options.gpus_per_node
        nodes = [[str(gpu) for gpu in range(each)]] * count
        source = f"--nodes {count} x --gpus-per-node {each} are {count * each}"
        return deal_gpus(plan, nodes, source)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if are_hidden():
        names, source = [], "CUDA_VISIBLE_DEVICES or MEGARL_DEVICE hides all GPUs: unset it"
    elif visible is not None:
        names = [name.strip() for name in visible.split(",")]
        source = f"CUDA_VISIBLE_DEVICES is {visible}"
        require(
            all(names) and len(set(names)) == len(names),
            f"{source}; set it to each GPU once, separated by commas, such as 0,1,2",
        )
    elif options.dry_run and num_nodes == 1:
        names, source = [str(gpu) for gpu in range(plan.num_gpus)], ""
    else:
        names = [str(gpu) for gpu in range(len(driver_gpus()))]
        source = f"nvidia-smi lists {len(names)} GPUs"
    source += f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
    return deal_gpus(plan, [names] * num_nodes, source)
