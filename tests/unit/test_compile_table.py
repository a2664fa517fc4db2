"""tools/compile_table.py: what is read of the compiler, and kernels compiled for GPUs that are not
here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from compile_table import SHARED_KIB, Compiled, compile_all, facts, loop_spills

from megarl.kernels.tiles import tiles_for

ROW = Compiled("forward_kernel", 64, "bfloat16", 90, 128, 0, 0, 0, 64 * 1024, 8)

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x00000a0000017a02 */
        /*0010*/                   STL [R1], R2 ;              /* 0x0000000201007387 */
        /*0020*/                   MOV R3, R4 ;                /* the outer loop begins */
        /*0030*/                   LDL R5, [R1] ;              /* in the outer loop only */
        /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0050*/                   LDL.64 R10, [R1+0x8] ;
        /*0060*/                   STL [R1+0x8], R10 ;
        /*0070*/              @P0 BRA 0x40 ;
        /*0080*/              @!P1 BRA 0x20 ;
        /*0090*/                   BRA 0xb0 ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   BRA 0xc0;
"""


def test_only_what_is_moved_in_innermost_loops_counts() -> None:
    assert loop_spills(SASS) == 2
    assert loop_spills(SASS.replace("@P0 BRA 0x40", "@P0 BRA 0x90")) == 3
    assert loop_spills("") == 0


def test_what_breaks_the_bar() -> None:
    assert ROW.problem == ""
    assert "shared memory" in replace(ROW, shared=SHARED_KIB[90] * 1024 + 1).problem
    spilled = replace(ROW, spill_stores=8, loop_spills=3)
    assert spilled.problem.startswith("3 instructions")
    assert replace(spilled, loop_spills=0).problem == ""
    assert replace(spilled, width=256).problem == ""
    assert replace(spilled, width=None).problem
    with pytest.raises(ValueError, match="says nothing of registers"):
        facts("forward_kernel", None, "ptxas info", width=64, dtype="bfloat16", target=90)


def test_the_largest_tiles_need_the_largest_memory() -> None:
    for width in (64, 80, 96, 128, 192, 256):
        small, large = (tiles_for(kib * 1024, torch.bfloat16, width) for kib in (99, 227))
        assert small == tiles_for(163 * 1024, torch.bfloat16, width) and small != large
        exact = tiles_for(227 * 1024, torch.float32, width)
        assert all(tile.rows <= 32 for tile in exact.values())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "width"), [*itertools.product((80, 90), (64, 80, 96, 128)), (100, 128)]
)
def test_kernels_meet_the_bar(target: int, width: int) -> None:
    rows = list(compile_all([target], [width], ["bfloat16"]))
    assert len(rows) == (15 if target == 90 and width in (64, 128) else 11)
    assert [(row.kernel, row.problem) for row in rows if row.problem] == []
    assert all(16 <= row.registers <= 255 for row in rows)
