"""Hardware counters of each version of attention: Nsight Compute on one launch of each, with cold caches."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_shapes import Operands, Shape
from benchmarks.ncu import ProfilerError, Run, profile, stalls_text
from benchmarks.report import Cell, Result, Table, print_table, shown
from benchmarks.turns import precompile
from cudatma.kernels.attention.attention import attention

NOTE = (
    "Nsight Compute, one launch with cold caches, its time under the profiler; DRAM % of the peak rate, L2 hit rate of "
    "sectors; stalls: cycles that a warp waits for each instruction that it issues, the three longest reasons."
)


def child_of(shape: Shape, versions: Iterable[str]) -> list[str]:
    """The process whose launches ncu looks at: one for all versions, as its start takes longer than a launch."""
    script = str(Path(__file__).resolve().with_name("attention.py"))
    mask = "--causal" if shape.is_causal else "--full"
    sizes = ["--head-dim", str(shape.head_dim), "--length", str(shape.length), "--dtype", shape.dtype]
    launches = [word for version in versions for word in ("--launch", version)]
    return [sys.executable, script, *launches, mask, *sizes, "--no-gqa"]


def launch_once(shape: Shape, versions: Iterable[str]) -> None:
    """One launch of each version for a profiler to look at; waits for their end."""
    import torch

    operands = Operands(shape)
    for version in versions:
        attention(operands.q, operands.k, operands.v, causal=shape.is_causal, version=version)
    torch.cuda.synchronize()


def counted(shape: Shape, specs: Mapping[str, Any], run: Run = subprocess.run) -> dict[str, Any]:
    """By version, the figures of its kernel, or ``{"error": why}``. specs: what each would run."""
    why, by_entry = "ncu did not see its kernel", dict[str, dict[str, Any]]()
    try:
        by_entry = {
            each["kernel"].partition("(")[0]: each for each in profile(child_of(shape, specs), run, "attention")
        }
    except ProfilerError as error:
        why = str(error)
    return {
        version: by_entry.get(spec.entry, {"error": why}) | {"shared_bytes": spec.smem_bytes, "entry": spec.entry}
        for version, spec in specs.items()
    }


def counters_table(cells: Sequence[Cell]) -> Table:
    """A row a call and version."""
    rows = []
    for cell in cells:
        call = f"{cell['batch']} x {cell['length']}", cell["head_dim"], cell["mask"], cell["dtype"]
        for version, found in cell.get("ncu", {}).items():
            us = found.get("us")
            rows.append(
                (
                    *(*call, version, shown(us, 1), shown(1e-6 * cell["flops"] / us if us else None, 1)),
                    *(shown(found.get(name), 1) for name in ("dram_pct", "l2_hit_pct", "tensor_pct")),
                    *(f"{found['shared_bytes'] / 1024:.0f}", shown(found.get("registers"), 0), stalls_text(found)),
                )
            )
    columns = (
        *("batch x length", "head dim", "mask", "dtype", "version", "us", "TFLOP/s", "DRAM %", "L2 hit %", "tensor %"),
        *("shared KB", "registers", "stalls"),
    )
    return Table(columns, tuple(rows), NOTE)


def run_counters(cells: Sequence[tuple[Shape, Cell, Mapping[str, Any]]], path: Path | None) -> int:
    """Look at calls, with their facts and the specs of each version; returns the exit status: 1 if one could not be
    profiled, 2 without ncu."""
    if shutil.which("ncu") is None:
        print("ncu (Nsight Compute) is not on the PATH", file=sys.stderr)
        return 2
    result = Result({}, counters_table, path)
    result.say(precompile(spec for _, _, specs in cells for spec in specs.values()))
    for number, (shape, facts, specs) in enumerate(cells, 1):
        found = counted(shape, specs)
        cell: Cell = {**facts, "ncu": found}
        if failed := {version: each["error"] for version, each in found.items() if "error" in each}:
            cell["error"] = "; ".join(f"{version}: {why}" for version, why in failed.items())
        told = "; ".join(f"{version} {failed.get(version) or stalls_text(each)}" for version, each in found.items())
        result.add(cell, f"[{number}/{len(cells)}] {shape}: {told}")
    print_table(result.console, counters_table(result.cells), "Counters of attention")
    return int(any(cell.get("error") for cell in result.cells))
