"""What a load path's code (TMA, cp.async, TMA for scales only) costs a pipeline stage, read from SASS; no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from cudatma.kernels.marlin.problem import Problem

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import Cell, Result, Table, failure, print_table
from benchmarks.sass_loops import Loop, natural_loops
from benchmarks.shapes import parse_shape
from benchmarks.subjects import LOAD_PATHS, TITLES, disassembled
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.mma_sync_candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.target import Target, get_target
from tools.sass import parse_ptxas

#: SMs of an H200: which tile is chosen depends on their number.
SM_COUNT = 132
#: One batch size for each tile that the kernel has for a large layer.
M_VALUES = (1, 16, 64, 1024)
_CHUNK_BYTES = 16
_TENSOR_LOAD, _PIECE_LOAD, _TENSOR_CORE, _WAIT = "UTMALDG", "LDGSTS", "HMMA", "TRYWAIT"


@dataclass(frozen=True, slots=True)
class LoadPathCode:
    """What one pipeline stage costs.

    registers: of a thread. copies: load instructions that the producers issue for a stage (warp instructions), by
    operand in `copies_by_operand`. threads: that issue them. loop: instructions in the code of the producer's loop,
    loop_integer: those of them that compute integers, addresses above all.
    producer_slots, consumer_slots: issue slots (warp instructions) of a stage, all warps together; the producer's are
    an estimate where loops copy chunks, see producer_slots().
    """

    registers: int
    spilled_bytes: int
    stages: int
    copies: int
    copies_by_operand: dict[str, int]
    threads: int
    loop: int
    loop_integer: int
    producer_slots: int
    consumer_slots: int

    @property
    def slots(self) -> int:
        return self.producer_slots + self.consumer_slots


def copies_by_operand(spec: MmaSyncSpec) -> dict[str, int]:
    """Load instructions of one stage, in the order in which the template issues them.

    TMA: one instruction a box. cp.async: one warp instruction for each 32 chunks of 16 bytes.
    """
    boxes = {"weight": spec.block_n // 64, "scale": 1, "activation": spec.block_k // 64}
    nbytes = {
        "weight": spec.weight_stage_bytes,
        "scale": spec.scale_stage_bytes,
        "activation": spec.activation_stage_bytes,
    }
    ways = {"weight": spec.weight_load_path, "scale": spec.scale_load_path, "activation": spec.activation_load_path}
    return {
        name: boxes[name] if way == "tma" else -(-nbytes[name] // (_CHUNK_BYTES * 32)) for name, way in ways.items()
    }


def producer_loop(loops: Sequence[Loop]) -> Loop:
    """The steady loop that fills slots: the smallest with loads from global memory and a wait on a barrier.

    Raises LookupError where no loop is one: the disassembly is of another kernel.
    """
    found = [
        loop
        for loop in loops
        if any(_WAIT in step.opcode for step in loop.steps)
        and (loop.counts[_TENSOR_LOAD] or loop.counts[_PIECE_LOAD])
        and not loop.counts[_TENSOR_CORE]
    ]
    if not found:
        raise LookupError("no loop with a wait and loads in the disassembly")
    return min(found, key=lambda loop: len(loop.steps))


def consumer_loop(loops: Sequence[Loop]) -> Loop:
    """The loop that consumes stages: the smallest with tensor-core instructions. Raises LookupError without one."""
    found = [loop for loop in loops if loop.counts[_TENSOR_CORE]]
    if not found:
        raise LookupError("no loop with tensor-core instructions in the disassembly")
    return min(found, key=lambda loop: len(loop.steps))


def producer_slots(loops: Sequence[Loop], copies: Sequence[int], warps: int) -> int:
    """Issue slots of the producer warps for one stage; ``copies``: warp instructions of each operand that cp.async
    brings, in order.

    Without cp.async the loop runs once as written. With it, the copies of an operand are in a loop of their own,
    unrolled, and before it once more for what the unrolling leaves over. A copy costs what its loop says; the leftover
    copies, which do the same work, are taken off the rest, which every warp runs once.
    """
    loop = producer_loop(loops)
    if not copies:
        return len(loop.steps) * warps
    inner = [each for each in loops if loop.contains(each) and each.counts[_PIECE_LOAD]]
    inner = sorted((a for a in inner if not any(a.contains(b) for b in inner)), key=lambda each: each.header)
    inside = sum(len(each.steps) for each in inner)
    loads_inside = sum(each.counts[_PIECE_LOAD] for each in inner)
    mean = inside / loads_inside if inner else 0.0
    costs = [len(each.steps) / each.counts[_PIECE_LOAD] for each in inner]
    if len(costs) != len(copies):
        costs = [mean] * len(copies)  # an operand's loop was unrolled away: nobody can tell whose is whose
    leftover = loop.counts[_PIECE_LOAD] - loads_inside
    rest = len(loop.steps) - inside - leftover * mean
    return round(warps * rest + sum(count * cost for count, cost in zip(copies, costs, strict=True)))


def analyse(spec: MmaSyncSpec, sass: str, log: str) -> LoadPathCode:
    """What a compiled instance costs. sass: nvdisasm's or cuobjdump's text. log: ptxas', under -v.

    Raises LookupError if the two are not of this kernel.
    """
    loops, used = natural_loops(sass), parse_ptxas(log).get(spec.entry)
    if used is None:
        raise LookupError(f"the log says nothing of {spec.entry}")
    copies = copies_by_operand(spec)
    ways = (spec.weight_load_path, spec.scale_load_path, spec.activation_load_path)
    by_pieces = [count for count, way in zip(copies.values(), ways, strict=True) if way == "cp_async"]
    producer, consumer = producer_loop(loops), consumer_loop(loops)
    # m16n8k16: what a warp multiplies in one stage; the loop may hold a part of it, or several stages.
    multiplications = spec.block_m // 8 * (spec.warp_n // 16) * (spec.block_k // 16 // spec.slice_k)
    passes = multiplications / consumer.counts[_TENSOR_CORE]
    return LoadPathCode(
        registers=used.registers,
        spilled_bytes=used.spill_store_bytes,
        stages=spec.stages,
        copies=sum(copies.values()),
        copies_by_operand=copies,
        threads=1 if spec.all_tma else spec.producer_threads,
        loop=len(producer.steps),
        loop_integer=producer.integer,
        producer_slots=producer_slots(loops, by_pieces, 1 if spec.all_tma else spec.producer_warps),
        consumer_slots=round(passes * len(consumer.steps) * spec.consumer_warps),
    )


def compile_and_analyse(spec: MmaSyncSpec, target: Target) -> LoadPathCode:
    """analyse() of a spec, compiled for a target. Raises LookupError where nothing disassembles it."""
    return analyse(spec, *disassembled(spec, target))


def make_cell(layer: LinearShape, m: int, name: str, target: Target) -> Cell:
    """One (M, load path); a failure is recorded in the cell."""
    cell: Cell = {"k": layer.k, "n": layer.n, "m": m, "load_path": name, "target": target.name}
    try:
        spec = choose_mma_sync(Problem(layer, m), imagined_gpu(target, H200.sm_count), LOAD_PATHS[name])
        code = compile_and_analyse(spec, target)
    except Exception as error:
        return cell | {"error": failure(error)}
    return cell | {"spec": spec.entry, **asdict(code), "slots": code.slots}


def code_table(cells: Sequence[Cell]) -> Table:
    keys = ("registers", "copies", "threads", "loop", "loop_integer", "producer_slots", "consumer_slots", "slots")
    rows = [(f"M = {c['m']}", TITLES[c["load_path"]], *(c[key] for key in keys)) for c in cells if not c.get("error")]
    titles = ("registers", "loads", "by threads", "loop", "integer", "producer slots", "consumer slots", "slots")
    note = (
        "For one pipeline stage: load instructions that the producers issue; instructions in the producers' loop as "
        "they are in SASS, and the integer ones among them; issue slots (warp instructions) of producers, estimated "
        "for cp.async, of consumers, and of both."
    )
    return Table(("M", "load path", *titles), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench load_path_code``; returns the exit status: 1 if a cell could not be analysed."""
    parser = argparse.ArgumentParser(prog="cudatma bench load_path_code", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--target", type=get_target, default=get_target("sm_90a"), metavar="NAME", help="default: sm_90a")
    add("--shape", type=parse_shape, default=(8192, 28672), metavar="KxN", help="the layer (default: 8192x28672)")
    add("--m", type=int, action="append", metavar="M", help="rows of x, repeatable (default: one for each tile)")
    options = parser.parse_args(argv)
    k, n = options.shape
    layer = LinearShape(k, n, 128, False, "float16")
    settings = {"target": options.target.name, "multiprocessors": SM_COUNT, "k": layer.k, "n": layer.n}
    result = Result(settings, code_table, options.json)
    for m in options.m or M_VALUES:
        for name in LOAD_PATHS:
            cell = make_cell(layer, m, name, options.target)
            result.add(cell, f"M = {m}, {TITLES[name]}: {cell.get('slots', '-')} issue slots a stage")
    print_table(result.console, code_table(result.cells), f"Code of the load paths, {options.target.name}")
    return int(any(cell.get("error") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
