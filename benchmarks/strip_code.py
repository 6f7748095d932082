"""What 64 x 64 weights cost in the code of the kernel for few tokens, and the floors of its pipes; no card."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.feed_code import consumer_loop
from benchmarks.report import Cell, Result, Table, failure, print_table
from benchmarks.sass_loops import Loop, natural_loops
from benchmarks.subjects import disassembled
from cudatma.kernels.marlin.layer import Layer
from cudatma.kernels.marlin.strip_config import has_deep_box
from cudatma.kernels.marlin.strip_spec import SCALE_ON, StripSpec
from cudatma.target import Target, get_target
from tools.sass import parse_ptxas

TOKENS, DTYPES = (8, 16, 32), ("float16", "bfloat16")
#: Column -> mnemonics. What is in none of them is "other": addresses, barriers, the loop.
CLASSES: dict[str, tuple[str, ...]] = {
    "LDSM": ("LDSM",),
    "LDS": ("LDS",),
    "HMMA": ("HMMA",),
    "LOP3": ("LOP3",),
    "SHF, PRMT": ("SHF", "PRMT"),
    "H*2": ("HADD2", "HMUL2", "HFMA2"),
    "FFMA": ("FFMA", "FMUL", "FADD"),
    "IMAD": ("IMAD",),
}
#: Clocks that a multiprocessor takes for a warp's instruction. Four schedulers issue one a clock each; logic and shifts
#: have 64 lanes, packed halves, FP32 and IMAD 128 [CUDA C++ Programming Guide, throughput of arithmetic instructions];
#: m16n8k16 as measured on an H200, 628 TFLOP/s at 1.98 GHz; shared memory moves 128 bytes.
_ISSUE, _LOGIC, _FMA, _HMMA, _SHARED_BYTES = 1 / 4, 1 / 2, 1 / 4, 1.705, 128
_WIDTHS = {"128": 512, "64": 256}
#: Where the floors are given: the busiest multiprocessor of 132 has 7 strips of the 8192 x 28672 layer.
_MEGAHERTZ, _BLOCKS, _STRIPS = 1755, 8192 // 64 * 7 / 2, 7


@dataclass(frozen=True, slots=True)
class StripCode:
    """For 64 depths x 64 channels: warp instructions of the main loop by class, all of them, and the floors in us."""

    registers: int
    spilled_bytes: int
    counts: dict[str, float]
    instructions: float
    floors_us: dict[str, float]


def spec_of(dtype: str, m: int, strips_per_warp: int, scale_on: str) -> StripSpec:
    """Whole rows alone, 128 depths a warp and stage, registers enough: all that differs is what is asked for, and the
    boxes of activations as the rules take them."""
    deep_box = has_deep_box(Layer(8192, 28672, 128, False, dtype), m, 4)
    return StripSpec(
        dtype, 128, False, m, 4, 256, 2, 3, strips_per_warp=strips_per_warp, scale_on=scale_on, deep_box=deep_box
    )


def shared_clocks(loop: Loop, blocks: float, m: int) -> float:
    """Of one 64 x 64 block: what the loop reads, and what TMA writes; blocks: that the loop multiplies."""
    loads = [step.opcode.split(".") for step in loop.steps if step.mnemonic == "LDS"]
    read = sum(next((_WIDTHS[part] for part in parts if part in _WIDTHS), 128) for parts in loads)
    read += loop.counts["LDSM"] * 512
    written = 64 * 64 // 2 + 64 * m * 2 / (_STRIPS / 2)  # a block's activations serve all of its strips
    return (read / blocks + written) / _SHARED_BYTES


def analyse(spec: StripSpec, sass: str, log: str) -> StripCode:
    """What a compiled instance costs. sass: nvdisasm's or cuobjdump's text. log: ptxas', under -v.

    Raises LookupError if the two are not of this kernel.
    """
    used = parse_ptxas(log).get(spec.entry)
    if used is None:
        raise LookupError(f"the log says nothing of {spec.entry}")
    loop = consumer_loop(natural_loops(sass))
    blocks = spec.k64_per_warp * spec.strips_per_warp / 2
    counts = {name: sum(loop.counts[each] for each in members) / blocks for name, members in CLASSES.items()}
    instructions = len(loop.steps) / blocks
    counts["other"] = instructions - sum(counts.values())
    clocks = {
        "issue": instructions * _ISSUE,
        "logic": (counts["LOP3"] + counts["SHF, PRMT"]) * _LOGIC,
        "fma": (counts["H*2"] + counts["FFMA"] + counts["IMAD"]) * _FMA,
        "tensor": counts["HMMA"] * _HMMA,
        "shared": shared_clocks(loop, blocks, spec.block_m),
    }
    floors = {name: each * _BLOCKS / _MEGAHERTZ for name, each in clocks.items()}
    return StripCode(used.registers, used.spill_store_bytes, counts, instructions, floors)


def compile_and_analyse(spec: StripSpec, target: Target) -> StripCode:
    """analyse() of a spec, compiled for a target. Raises LookupError where nothing disassembles it."""
    return analyse(spec, *disassembled(spec, target))


def make_cell(dtype: str, m: int, strips_per_warp: int, scale_on: str, target: Target) -> Cell:
    """One instance; a failure is recorded in the cell."""
    cell: Cell = {"dtype": dtype, "m": m, "strips_per_warp": strips_per_warp, "scale_on": scale_on}
    try:
        code = compile_and_analyse(spec_of(dtype, m, strips_per_warp, scale_on), target)
    except Exception as error:
        return cell | {"error": failure(error)}
    figures = {"registers": code.registers, "spilled": code.spilled_bytes, "instructions": code.instructions}
    return cell | figures | {"counts": code.counts, "floors_us": code.floors_us}


def code_table(cells: Sequence[Cell]) -> Table:
    known = [cell for cell in cells if not cell.get("error")]
    rows = [
        (
            *(cell["dtype"], cell["m"], cell["strips_per_warp"], cell["scale_on"][:6], cell["registers"]),
            cell["spilled"],
            *(f"{count:g}" for count in cell["counts"].values()),
            f"{cell['instructions']:g}",
            *(f"{floor:.1f}" for floor in cell["floors_us"].values()),
        )
        for cell in known
    ]
    titles = ("dtype", "M", "strips", "scales", "regs", "spills", *CLASSES, "other", "all")
    note = (
        "strips: of 32 channels, that a warp has. Static counts: warp "
        "instructions of the main loop as they stand in SASS, for 64 depths x 64 channels. "
        "Behind them what each pipe would take by itself at 8192 x 28672 on 132 multiprocessors of 1.755 GHz, in us."
    )
    return Table((*titles, "issue", "logic", "fma", "tensor", "shared"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench strip_code``; returns the exit status: 1 if an instance could not be analysed."""
    parser = argparse.ArgumentParser(prog="cudatma bench strip_code", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--target", type=get_target, default=get_target("sm_90a"), metavar="NAME", help="default: sm_90a")
    add("--m", type=int, action="append", metavar="M", choices=TOKENS, help="tokens, repeatable (default: 8 16 32)")
    options = parser.parse_args(argv)
    result = Result({"target": options.target.name}, code_table, options.json)
    for dtype, m, wide, scale_on in itertools.product(DTYPES, options.m or TOKENS, (1, 2), SCALE_ON):
        cell = make_cell(dtype, m, wide, scale_on, options.target)
        result.add(cell, f"{dtype}, M = {m}, {wide} strips a warp, scales on {scale_on}s")
    print_table(result.console, code_table(result.cells), f"Code of the kernel for few tokens, {options.target.name}")
    return int(any(cell.get("error") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
