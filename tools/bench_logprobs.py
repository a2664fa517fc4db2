"""Log-probs and entropies with gradients, eager against fused: peak memory and time.

    python tools/bench_logprobs.py [--json] [--tokens 4096] [--vocabulary 151936] [--hidden 256]
    [--rounds 3]
    python tools/bench_logprobs.py --device cuda        32,768 tokens x 151,936 words, hidden 4,096,
                                                        bfloat16

    eager          the whole logits: torch's matmul, log_softmax, gather, entropy, autograd's
                   backward
    eager oneDNN   the same with megarl's matrix product, on CPU only: what fusing alone is worth
    fused          megarl.kernels.logprobs.linear_logprobs
    liger          the same with backend "liger", on CUDA where liger-kernel imports

One step is forward and backward, with an upstream gradient for each token's log-prob and entropy,
to both hidden states and weight. Every measurement is a process of its own; systems take turns, and
the table has medians over rounds.

Memory is the most that a step used beyond its inputs and the two gradients that are its result. On
CPU:
    VmHWM after the step, reset before it through /proc/self/clear_refs, minus VmRSS before it,
    minus the gradients' bytes
in a process of its own whose malloc gives every tensor of 64 KiB or more a mapping
(MALLOC_MMAP_THRESHOLD_), so that what is freed leaves VmRSS at once. A step of a few tokens goes
before, so that libraries are loaded. At the peak of eager the gradients need not be there yet:
subtracting them makes its figure smaller, not ours. The method is checked against tensors of known
size first, of which some are freed, and refused if it is off by more than 2 %. On CUDA:
max_memory_allocated.

Time is measured with the malloc that everybody has. On CPU it is one step a process, after one of a
few tokens: memory of this size goes back to the system when freed, so a second step would find
nothing warmer. On CUDA the median of --repeats. TFLOP/s-equivalent counts the products a step
cannot do without, 2 T H V forward and 6 T H V in all; fused makes one more, as it computes the
logits again. `CPU s` is the CPU time of a step, which other processes disturb least. Runs are
refused where results differ; `others` is the share of the CPU that processes outside of the run
took meanwhile: above a few percent the times are worth little.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "cpu": {"tokens": 4096, "vocabulary": 151936, "hidden": 256, "dtype": "float32"},
    "cuda": {"tokens": 32768, "vocabulary": 151936, "hidden": 4096, "dtype": "bfloat16"},
}
WARM_UP_TOKENS = 128
KNOWN_BYTES = 256 * 2**20
METHOD_AGREES = 0.02
QUIET = 0.05
TIMES = ("forward_s", "step_s", "cpu_s")
EAGER_COPIES = 6
"""Of the logits in float32, to see beforehand whether eager fits; it used 4 to 5 when this was
written.
"""
AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
"""By how much results of two systems may differ, relative to their size."""

# ---------------------------------------------------------------------------------- one measurement


def _eager(linear: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def eager(hidden: Any, weight: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # No name holds the logits: they may go as soon as autograd lets them.
        log_p = torch.log_softmax(
            linear(hidden, weight), dim=-1, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    return eager


def _eager_torch() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    import torch

    return _eager(torch.nn.functional.linear)


def _eager_onednn() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from megarl.kernels.linear import linear

    return _eager(linear)


def _fused(backend: str = "chunked") -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from megarl.kernels.logprobs import linear_logprobs

    return lambda hidden, weight, targets: linear_logprobs(hidden, weight, targets, backend=backend)


EAGER, ONEDNN, FUSED, LIGER = "eager", "eager oneDNN", "fused", "liger"
SYSTEMS: dict[str, Callable[[], Callable[..., tuple[torch.Tensor, torch.Tensor]]]] = {
    EAGER: _eager_torch,
    ONEDNN: _eager_onednn,
    FUSED: _fused,
    LIGER: lambda: _fused("liger"),
}


def resident(field: str) -> int:
    """Bytes of VmRSS, or of VmHWM, its largest value since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_of(body: Callable[[], Any]) -> tuple[int, Any]:
    """The most resident bytes while `body` ran beyond those before, and what it returned."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = body()
    return resident("VmHWM") - before, result


def check_method() -> None:
    """Two tensors at a time of three, one after the other: the peak is known."""
    import torch

    def body() -> None:
        numel = KNOWN_BYTES // 4
        first, second = torch.ones(numel), torch.ones(numel)
        del first
        third = torch.ones(numel)
        assert second is not third

    for _ in range(2):  # the second time shows that the first left nothing
        found, _ = peak_of(body)
        if abs(found / (2 * KNOWN_BYTES) - 1) > METHOD_AGREES:
            raise RuntimeError(
                f"the memory measurement is wrong here: {found:,} bytes found where"
                f" {2 * KNOWN_BYTES:,} were used"
            )


class Step:
    """Inputs, and a step of one system with them."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        self.function, self.cuda = SYSTEMS[given["system"]](), given["device"] == "cuda"
        tokens, words, width = (given[name] for name in ("tokens", "vocabulary", "hidden"))
        torch.manual_seed(0)
        settings = {"dtype": getattr(torch, given["dtype"]), "device": given["device"]}
        self.hidden = torch.randn(tokens, width, **settings).requires_grad_()
        self.weight = (
            torch.randn(words, width, **settings).mul_(2 / math.sqrt(width)).requires_grad_()
        )
        self.targets = torch.randint(0, words, (tokens,), device=given["device"])
        self.upstream = torch.randn(2, tokens, device=given["device"])

    def synchronize(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def __call__(self, tokens: int | None = None) -> tuple[dict[str, float], list[Any]]:
        """Seconds, and log-probs, entropies and both gradients."""
        import torch

        piece = slice(0, tokens)
        self.synchronize()
        started_at, used = time.perf_counter(), time.process_time()
        outputs = self.function(self.hidden[piece], self.weight, self.targets[piece])
        self.synchronize()
        middle = time.perf_counter()
        grads = torch.autograd.grad(
            outputs,
            (self.hidden, self.weight),
            [x[piece].to(outputs[0].dtype) for x in self.upstream],
        )
        self.synchronize()
        seconds = {
            "forward_s": middle - started_at,
            "step_s": time.perf_counter() - started_at,
            "cpu_s": time.process_time() - used,
        }
        return seconds, [*outputs, *grads]


def worker(given: dict[str, Any]) -> dict[str, Any]:
    """Memory or time of one system, in a fresh process."""
    import torch

    torch.set_num_threads(given["threads"])
    result: dict[str, Any] = {}
    if given["measure"] == "memory" and given["device"] == "cpu":
        check_method()
    step = Step(given)
    step(min(WARM_UP_TOKENS, given["tokens"]))
    try:
        if given["measure"] == "memory":
            outputs, peak = measure_memory(step)
            result |= {"peak_bytes": peak} | (
                {"room_bytes": room_bytes(step)} if given["system"] == FUSED else {}
            )
            result["digest"] = [float(x.detach().double().norm()) for x in outputs]
        else:
            repeats = [step()[0] for _ in range(given["repeats"])]
            result |= {
                name: statistics.median(seconds[name] for seconds in repeats) for name in TIMES
            }
    except torch.cuda.OutOfMemoryError:
        result["does_not_fit"] = True
    return result


def measure_memory(step: Step) -> tuple[list[Any], int]:
    """What a step returns, and its peak in bytes beyond inputs and gradients."""
    import torch

    if step.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = step()[1]
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak, (_, outputs) = peak_of(step)
    return outputs, peak - sum(grad.nbytes for grad in outputs[2:])


def room_bytes(step: Step) -> int:
    """The largest chunk of logits that fused makes of these inputs."""
    from megarl.kernels import logprobs

    return logprobs._chunks(step.hidden, step.weight, None)[1].nbytes


# --------------------------------------------------------------------------------------- comparison


def machine_busy_s() -> float:
    """CPU seconds that all processes have used since boot, and those the machine was denied."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _wait, interrupt, soft, steal = fields[:8]
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """CPU seconds of the processes started and ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(args: argparse.Namespace, system: str, what: str) -> dict[str, Any]:
    """A worker's answer; raises `RuntimeError` with its output on failure."""
    given = {
        name: getattr(args, name)
        for name in ("device", "tokens", "vocabulary", "hidden", "dtype", "threads", "repeats")
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(ROOT)}
    if what == "memory":
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        json.dumps({**given, "system": system, "measure": what}),
    ]
    started_at, busy, cpu_s = time.monotonic(), machine_busy_s(), children_s()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=args.deadline
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{what} of {system} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    available = (time.monotonic() - started_at) * (os.cpu_count() or 1)
    found["others"] = max(0.0, (machine_busy_s() - busy - (children_s() - cpu_s)) / available)
    said = {name: value for name, value in found.items() if name != "digest"}
    print(f"{system:13} {what:7} {said}", file=sys.stderr, flush=True)
    return found


def compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Memory of every system, then their times in turns."""
    rows: dict[str, dict[str, Any]] = {
        system: measure(args, system, "memory") for system in args.systems
    }
    fitting = [system for system in args.systems if "does_not_fit" not in rows[system]]
    for system in fitting[1:]:
        for name, mine, first in zip(
            ("log-probs", "entropies", "grad of hidden", "grad of weight"),
            rows[system]["digest"],
            rows[fitting[0]]["digest"],
            strict=True,
        ):
            if not abs(mine - first) <= AGREE[args.dtype] * abs(first):
                raise RuntimeError(
                    f"{name} differ: norm {mine} of {system}, {first} of {fitting[0]}"
                )
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in fitting}
    for _ in range(args.rounds):
        for system in fitting:
            runs[system].append(measure(args, system, "time"))
    products = args.tokens * args.vocabulary * args.hidden / 1e12
    for system in fitting:
        row, of_system = rows[system], runs[system]
        row |= {name: spread([run[name] for run in of_system]) for name in TIMES}
        row["forward_tflops"] = 2 * products / row["forward_s"]["median"]
        row["step_tflops"] = 6 * products / row["step_s"]["median"]
        row["others"] = max(run["others"] for run in of_system)
        if EAGER in fitting and system != EAGER:
            row["memory_of_eager"] = row["peak_bytes"] / rows[EAGER]["peak_bytes"]
            pairs = zip(of_system, runs[EAGER], strict=True)
            row["times_as_fast"] = spread(
                [eager["step_s"] / ours["step_s"] for ours, eager in pairs]
            )
    return rows


def spread(values: list[float]) -> dict[str, Any]:
    """Median, smallest, largest, and all in the order of rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": values,
    }


def machine(device: str) -> dict[str, Any]:
    """What this ran on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    found = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    here, task = result["machine"], result["task"]
    yield f"{here.get('gpu', here['cpu'])}; torch {here['torch']}; {task['threads']} threads"
    yield (
        f"{task['tokens']:,} tokens x {task['vocabulary']:,} words, hidden {task['hidden']:,},"
        f" {task['dtype']}; {task['rounds']} rounds, median (smallest to largest)"
    )
    head = (
        f"{'system':13} {'peak MB':>9} {'of eager':>8} {'forward s':>25} {'step s':>25}"
        f" {'CPU s':>7} {'times as fast':>20}"
    )
    yield f"{head} {'TFLOP/s fwd, step':>18} {'others':>6}"
    for system, row in result["systems"].items():
        if "does_not_fit" in row:
            yield f"{system:13} does not fit"
            continue
        share = f"{row['memory_of_eager']:.2%}" if "memory_of_eager" in row else ""
        ratio = (
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["times_as_fast"])
            if "times_as_fast" in row
            else ""
        )
        forward, step = (
            "{median:.3f} ({min:.3f} to {max:.3f})".format(**row[name])
            for name in ("forward_s", "step_s")
        )
        rates = f"{row['forward_tflops']:.3g}, {row['step_tflops']:.3g}"
        yield (
            f"{system:13} {row['peak_bytes'] / 1e6:9,.0f} {share:>8} {forward:>25} {step:>25}"
            f" {row['cpu_s']['median']:7.2f} {ratio:>20} {rates:>18} {row['others']:6.0%}"
        )
    if FUSED in result["systems"]:
        yield (
            "largest chunk of logits of fused:"
            f" {result['systems'][FUSED]['room_bytes'] / 1e6:,.0f} MB"
        )
    worst = max(row["others"] for row in result["systems"].values())
    if worst > QUIET:
        yield (
            f"NOT QUIET: other processes took up to {worst:.0%} of the CPU during a run; repeat on"
            " an idle machine"
        )


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--device", choices=tuple(DEFAULTS), default="cpu")
    for name in ("tokens", "vocabulary", "hidden"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=tuple(AGREE))
    parser.add_argument("--systems", help=f"separated by commas, of: {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, help="steps of a process that measures time; 1 on CPU, 10 on CUDA"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's, in every process")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="seconds a single process may take"
    )
    args = parser.parse_args(argv)
    for name, value in {
        **DEFAULTS[args.device],
        "repeats": 1 if args.device == "cpu" else 10,
    }.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(args.tokens, args.vocabulary, args.hidden, args.rounds, args.repeats, args.threads) < 1:
        parser.error(
            "--tokens, --vocabulary, --hidden, --rounds, --repeats and --threads must be 1 or more"
        )
    on_gpu = [EAGER, FUSED, *([LIGER] if importlib.util.find_spec("liger_kernel") else [])]
    default = [EAGER, ONEDNN, FUSED] if args.device == "cpu" else on_gpu
    args.systems = args.systems.split(",") if args.systems else default
    if not set(args.systems) <= set(SYSTEMS):
        parser.error(f"--systems is {','.join(args.systems)!r}; choose of {', '.join(SYSTEMS)}")
    if args.device == "cpu" and LIGER in args.systems:
        parser.error("--systems has liger, which needs --device cuda")
    if args.device == "cpu" and {EAGER, ONEDNN} & set(args.systems):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
        needed = EAGER_COPIES * 4 * args.tokens * args.vocabulary
        if available < needed:
            parser.error(
                f"eager needs about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are"
                f" available; set --tokens to {int(args.tokens * available / needed)} or less, or"
                " --systems fused"
            )
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--worker"]:
        print(json.dumps(worker(json.loads(argv[1]))))
        return 0
    args = arguments(argv)
    try:
        task = {
            name: value
            for name, value in vars(args).items()
            if name not in ("json", "deadline", "systems")
        }
        result = {"machine": machine(args.device), "task": task, "systems": compare(args)}
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"bench_logprobs: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if args.json else "\n".join(show(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
