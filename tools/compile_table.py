"""Compile every Triton kernel for NVIDIA GPUs, on a machine that needs none, and print what the
compiler found: registers, spilled bytes, and shared memory against the GPU's limit.

    python tools/compile_table.py                                 # all kernels, widths and types
    python tools/compile_table.py --targets 90 --widths 128 --dtypes bfloat16

The kernels are compiled through the calls that megarl makes, with the tile sizes that it chooses
for the GPU, by Triton and the ptxas that Triton carries. The exit status is 1 where a kernel does
not compile, needs more shared memory than a block can have, or spills registers in an innermost
loop at a head width of 64 to 128. What is spilled outside of them is moved once for each
tile of a program, which a loop over hundreds of tiles does not feel.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import common
import torch

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""{compute capability: KiB of shared memory that one block may have} (CUDA C++ Programming Guide,
table of technical specifications per compute capability)."""
WIDTHS = (64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16", "float32")
TARGETS = (80, 90, 100)
NO_SPILLS = (64, 80, 96, 128)
"""Head widths at which inner loops may not spill."""
OTHER_BLOCKS = ("WideKeys", "SmallPrograms")
TOKENS, QUERY_HEADS, KV_HEADS, VOCABULARY = 512, 4, 2, 8192


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel."""

    kernel: str
    width: int | None
    """Head width; None for kernels over logits, of elementwise functions and of experts."""
    dtype: str
    target: int
    registers: int
    """Registers of a thread."""
    spill_stores: int
    spill_loads: int
    """Bytes of a thread's registers that are written to and read from memory, counted once for each
    instruction in the code."""
    loop_spills: int
    """Instructions of innermost loops that move spilled registers."""
    shared: int
    """Bytes of shared memory of a block."""
    warps: int

    @property
    def limit(self) -> int:
        """Bytes of shared memory that a block may have on this target."""
        return SHARED_KIB[self.target] * 1024

    @property
    def problem(self) -> str:
        """What breaks the bar, or an empty text."""
        if self.shared > self.limit:
            return f"shared memory {self.shared} of {self.limit} bytes"
        if self.width in (*NO_SPILLS, None) and self.loop_spills:
            return f"{self.loop_spills} instructions of inner loops move spilled registers"
        return ""


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[dict[str, Any]]:
    """Inside, a launched Triton kernel is compiled for `capability` and not run.

    Yields {kernel name: (compiled kernel, ptxas's log)}, which fills as kernels are launched. Every
    kernel is compiled anew, since a kept one has no log.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    # In the place of Triton's driver of a GPU: enough to compile. Triton keeps compiled kernels by
    # the number of the device.
    target = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    found: dict[str, Any] = {}

    def only_compile(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            kernel.device_caches.clear()  # of this process, which `always_compile` does not mean
            with contextlib.redirect_stdout(io.StringIO()) as log:
                made = kernel.run(*args, grid=grid, warmup=True, **options)
            found[kernel.__name__] = made, log.getvalue()

        return launch

    # Triton reads this default before it sees the option of a launch.
    with (
        patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}),
        patch.object(driver, "_active", target),
        patch.object(JITFunction, "__getitem__", only_compile),
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield found


def launch_attention(
    capability: int, dtype: Any, width: int, descriptors: bool = False, block: str = "TritonBlock"
) -> None:
    """Forward and backward of a Triton block, as on a GPU of this compute capability."""
    from megarl.kernels import block_triton
    from megarl.kernels.block import Positions
    from megarl.kernels.tiles import tiles_for

    row, starts = torch.arange(TOKENS), torch.tensor([0, TOKENS])
    tiles = tiles_for(SHARED_KIB[capability] * 1024, dtype, width)
    made = getattr(block_triton, block)(tiles, descriptors)
    positions = Positions.of(row, starts)
    work = made.prepare(positions, positions, torch.device("cpu"))
    assert work is not None
    shapes = ((TOKENS, heads, width) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    out, lse = torch.zeros(q.shape), torch.zeros(QUERY_HEADS, TOKENS)
    made.forward(q, k, v, work, 0.1, out, lse)
    made.backward(q, q, k, v, out, lse, work, 0.1, out, k.float(), v.float())


def launch_logprobs(dtype: Any) -> None:
    """Call the forward and backward kernels of the log-probs on one chunk of logits, so that Triton
    compiles them for `dtype`.
    """
    from megarl.kernels import logprobs_triton

    row = torch.arange(TOKENS)
    logits = torch.zeros(TOKENS, VOCABULARY, dtype=dtype)
    logprobs_triton.statistics(logits, row, 0, 1.0)
    logprobs_triton.gradient_(logits, row, 0, 1.0, *torch.zeros(5, TOKENS))


def launch_elementwise(dtype: Any) -> None:
    """Call the forward and backward kernels of every gated activation, and of rotary embedding on
    96 of a head's 128 dimensions, so that Triton compiles them for `dtype`.
    """
    from megarl.kernels.gated_triton import ACTIVATIONS, gated
    from megarl.kernels.rotary_triton import rotary

    gate, up = torch.zeros(2, TOKENS, VOCABULARY, dtype=dtype).unbind()
    x = torch.zeros(1, QUERY_HEADS, TOKENS, 128, dtype=dtype, requires_grad=True)
    cos, sin = torch.zeros(2, 1, TOKENS, 96, dtype=dtype)
    for name in ACTIVATIONS:
        gated(gate.requires_grad_(), up, name).sum().backward()
    rotary(x, cos, sin).sum().backward()


def launch_experts(dtype: Any, is_transposed: bool = False) -> None:
    """Call both kernels of experts' products, so that Triton compiles them for `dtype`."""
    from megarl.kernels.experts_triton import grouped_rows, grouped_weights

    a, b = torch.zeros(2, TOKENS, 1024, dtype=dtype).unbind()
    weight = torch.zeros(2, 1024, 1024, dtype=dtype)
    grouped_rows(a, weight.transpose(1, 2) if is_transposed else weight, [TOKENS, 0])
    grouped_weights(b, a, [TOKENS, 0])


def loop_spills(sass: str) -> int:
    """Loads and stores of spilled registers (LDL, STL) in the innermost loops of a kernel's machine
    code, as cuobjdump prints it.

    A loop is what lies between a branch backwards and its target; an innermost one has no other.
    """
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", sass)
    code = [(int(address, 16), text) for address, text in found]
    branches = ((re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text), at) for at, text in code)
    loops = [(int(found[1], 16), at) for found, at in branches if found]
    loops = [(first, last) for first, last in loops if first < last]

    def has_other(first: int, last: int) -> bool:
        return any((first, last) != one and first <= one[0] and one[1] <= last for one in loops)

    inner = [one for one in loops if not has_other(*one)]
    moves = [address for address, text in code if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(first <= address <= last for first, last in inner) for address in moves)


def machine_code(made: Any) -> str:
    """A compiled kernel's machine code as text, by the cuobjdump that Triton carries."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def facts(kernel: str, made: Any, log: str, **where: Any) -> Compiled:
    """Reads ptxas's log of one kernel; raises `ValueError` where it has not the known form."""
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise ValueError(f"ptxas's log of {kernel} says nothing of registers or spills: {log!r}")
    return Compiled(
        kernel=kernel,
        registers=int(registers[1]),
        spill_stores=int(spills[1]),
        spill_loads=int(spills[2]),
        loop_spills=loop_spills(machine_code(made)) if int(spills[1]) else 0,
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        **where,
    )


def compile_all(
    targets: Iterable[int], widths: Iterable[int], dtypes: Iterable[str], descriptors: bool = False
) -> Iterator[Compiled]:
    """Every kernel at every width and type for every target, one after another. On Hopper in 16 bit
    also the other backward kernels of `block_triton`.
    """
    widths, dtypes = list(widths), list(dtypes)
    without_width = (launch_logprobs, launch_elementwise, launch_experts)
    for target, name in itertools.product(targets, dtypes):
        dtype = getattr(torch, name)
        launches = list[tuple[str, int | None, Callable[[], None]]]()
        for width in widths:
            attention = partial(launch_attention, target, dtype, width, descriptors)
            launches.append(("", width, attention))
            if target == 90 and dtype != torch.float32 and width in (64, 128):
                launches += [(one, width, partial(attention, one)) for one in OTHER_BLOCKS]
        launches += [("", None, partial(one, dtype)) for one in without_width]
        for block, width, launch in launches:
            with compiling(target) as found:
                launch()
            for kernel, (made, log) in found.items():
                if not block or kernel.startswith("grad_"):
                    title = f"{kernel} of {block}" if block else kernel
                    yield facts(title, made, log, width=width, dtype=name, target=target)


def table(rows: Iterable[Compiled]) -> Iterator[str]:
    """Markdown: a line for each kernel, type and width, a column for each target."""
    cells: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for row in rows:
        inside = f", {row.loop_spills} moves in loops" if row.loop_spills else ""
        spilled = f", {row.spill_stores} B spilled{inside}" if row.spill_stores else ""
        text = f"{row.registers} x {32 * row.warps}{spilled}, {row.shared / 1024:.0f} KiB"
        about = {"kernel": row.kernel, "type": row.dtype, "width": row.width or "-"}
        cells.setdefault((row.kernel, row.dtype, row.width), about)[str(row.target)] = text
    targets = sorted({int(name) for one in cells.values() for name in one if name.isdigit()})
    heads = (f"; sm_{target} ({SHARED_KIB[target]} KiB)={target}" for target in targets)
    return common.table(cells.values(), "kernel; type; width" + "".join(heads))


OPTIONS = {
    "--targets": (list(TARGETS), "compute capabilities", tuple(SHARED_KIB)),
    "--widths": (list(WIDTHS), "head widths"),
    "--dtypes": (list(DTYPES), "types", DTYPES),
    "--descriptors": (False, "load tiles by TMA (sm_90 on)"),
    "--json": (False, "print a JSON list, not a table"),
}


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where the bar is not met."""
    args, began, rows = common.command_line(__doc__, OPTIONS).parse_args(argv), time.monotonic(), []
    for row in compile_all(args.targets, args.widths, args.dtypes, args.descriptors):
        rows.append(row)
        print(f"sm_{row.target} {row.dtype} {row.width or ''} {row.kernel}", file=sys.stderr)
    found = [asdict(row) | {"limit": row.limit} for row in rows]
    print(json.dumps(found) if args.json else "\n".join(table(rows)))
    bad = [row for row in rows if row.problem]
    for row in bad:
        where = f"sm_{row.target} {row.kernel} {row.dtype} {row.width or ''}"
        print(f"{where}: {row.problem}", file=sys.stderr)
    print(f"{len(rows)} kernels in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
