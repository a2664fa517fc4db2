"""What to run on eight GPUs, and on two nodes of eight, as data: commands in their order, what each
shows, what to look at, and what a healthy result is. Pure: starts nothing.

`python tools/run_gpu.py --cluster` prints the list. Only its first command has run on a GPU, in
part: what is called healthy follows from what each command checks, and from arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LAYOUTS = (
    "python tools/bench/layouts.py --ranks 8 --dtype bfloat16 --hidden 2048 --layers 16"
    " --heads 16 --kv-heads 8 --vocabulary 151936"
)
TWO_NODES = (
    "--training.layout.data 8 --rollout.num_engines 4 --weight_sync.transport point_to_point"
)
PLANNED = "megarl launch launch/recipes/dapo_14b.yaml --dry-run --nodes 2 --gpus-per-node 8"
SHORT = "--steps 3 --rollout.groups_per_step 32 --training.num_mini_batches 1"


@dataclass(frozen=True)
class ClusterStep:
    """One command for several GPUs."""

    name: str
    where: str
    """Which machines it needs."""
    command: str
    shows: str
    look: str
    """What to look at."""
    healthy: str
    dry_run: str = ""
    """The command that plans the same and starts nothing; empty where there is none."""


STEPS = (
    ClusterStep(
        "one GPU first",
        "one node",
        "CUDA_VISIBLE_DEVICES=0 bash tests/run_gpu.sh",
        "everything that one GPU can tell",
        "results.md",
        "every step is ok; what fails here fails on eight GPUs too",
        "python tools/run_gpu.py --list",
    ),
    ClusterStep(
        "layouts",
        "one node",
        f"{LAYOUTS} --zero 1,3 --tokens 131072 --documents 32 --micro-batch-tokens 16384"
        " --layouts 8x1x1,1x8x1,1x1x8,2x4x1,2x2x2",
        "data, sequence and tensor parallelism over NCCL train the same model",
        "losses of the rows, tokens/s, memory, bytes sent",
        "it ends with 0: losses differ by less than 5 % (bfloat16); ZeRO 3 of 8x1x1 takes less"
        " memory than ZeRO 1",
    ),
    ClusterStep(
        "ring attention",
        "one node",
        f"{LAYOUTS} --zero 1 --tokens 131072 --documents 1 --micro-batch-tokens 16384"
        " --gradient-checkpointing --layouts 1x8x1 --transport ring",
        "one document of 128K tokens over eight GPUs; then again with --transport ring_lean and"
        " --transport all_gather",
        "losses, tokens/s and memory of the three",
        "equal losses within 5 %; the ring is not slower than all_gather, whose memory is the"
        " largest",
    ),
    ClusterStep(
        "weights by NCCL",
        "one node",
        f"bash launch/dapo_14b.sh -- {SHORT} --weight_sync.transport point_to_point",
        "28 GB of weights from four trainer ranks to two engines of two GPUs; then again with"
        " --weight_sync.transport shared_memory",
        "time/publish_s, publish/bytes and mismatch/mean_abs in RUN/metrics.jsonl",
        "digests agree, or the run ends with an error that names the tensor; mismatch/mean_abs"
        " stays where it was at step 1; no engine is replaced (engines/replaced 0)",
        f"bash launch/dapo_14b.sh --dry-run --gpus-per-node 8 -- {SHORT}"
        " --weight_sync.transport point_to_point",
    ),
    ClusterStep(
        "ranks on two nodes",
        "two nodes, Slurm",
        "sbatch --nodes=2 launch/sft.sh -- --training.layout.data 16 --steps 20",
        "NCCL, torchrun and ZeRO 3 between nodes, without Ray; needs the recipe's demonstrations",
        "loss and tokens/trained_per_s, beside the same with one node and data 8",
        "losses of the same steps agree within bfloat16's rounding; NCCL names the fast network"
        " with NCCL_DEBUG=INFO, not `Socket`",
        "bash launch/sft.sh --dry-run --nodes 2 --gpus-per-node 8 -- --training.layout.data 16",
    ),
    ClusterStep(
        "engines on the second node",
        "two nodes, Slurm",
        f"sbatch --nodes=2 launch/dapo_14b.sh --requeue -- {SHORT} {TWO_NODES}",
        "Ray, the rollout service and weights from one node to the other",
        "time/publish_s and engines/replaced in RUN/metrics.jsonl; RUN/logs for each node",
        "three steps, exit code 0, and no process is left on either node",
        f"{PLANNED} -- {SHORT} {TWO_NODES}",
    ),
    ClusterStep(
        "two nodes without Slurm",
        "two nodes",
        f"{PLANNED} -- {SHORT} {TWO_NODES}",
        "the same without Slurm: the command prints `ray start` and `megarl torchrun` lines; set"
        " RAY_AUTH_TOKEN, start each line on its node, Ray of node 0 first",
        "as above",
        "as above",
        f"{PLANNED} -- {SHORT} {TWO_NODES}",
    ),
    ClusterStep(
        "preemption",
        "two nodes, Slurm",
        f"sbatch --nodes=2 launch/dapo_14b.sh --requeue -- {TWO_NODES}"
        "    # after a step: scancel --batch --signal=TERM JOB",
        "a checkpoint within the grace time, the requeue and the resume",
        "the job's log, `squeue`, RUN/checkpoints, step numbers in RUN/metrics.jsonl",
        "the job is PENDING again, then goes on with the step after the checkpoint; no step is"
        " twice in metrics.jsonl",
        f"bash launch/dapo_14b.sh --dry-run --nodes 2 --gpus-per-node 8 --requeue -- {TWO_NODES}",
    ),
    ClusterStep(
        "a node that dies",
        "two nodes, Slurm",
        f"sbatch --nodes=2 launch/dapo_14b.sh --requeue -- {TWO_NODES}"
        "    # after a checkpoint: power off the node of the engines",
        "the end of all processes, the requeue and the resume",
        "the end of the job's log",
        "the launcher names the node that does not answer within 30 s, and the requeued job goes"
        " on from the checkpoint once Slurm has two nodes",
    ),
    ClusterStep(
        "long responses",
        "two nodes, Slurm",
        "sbatch --nodes=2 launch/long_context_64k.sh -- --steps 2",
        "sequence parallelism of eight ranks over rows of 64K tokens, four engines of two GPUs",
        "the most memory of a rank, tokens/trained_per_s",
        "two steps without running out of memory; the recipe's arithmetic says 16 GiB of states"
        " and about 3 GiB of activations a rank",
        "bash launch/long_context_64k.sh --dry-run --nodes 2 --gpus-per-node 8",
    ),
)


def listed(steps: Iterable[ClusterStep]) -> Iterator[str]:
    """Lines of text: each command with what it shows, what to look at, and what is healthy."""
    for number, step in enumerate(steps, 1):
        yield f"{number}. {step.name} ({step.where})"
        yield f"   {step.command}"
        yield f"   shows    {step.shows}"
        yield f"   look at  {step.look}"
        yield f"   healthy  {step.healthy}"
        if step.dry_run and step.dry_run != step.command:
            yield f"   planned  {step.dry_run}"
        yield ""
