"""Time the bf16 GEMM and all-reduce of a row-parallel layer with AllReduce, NCCL and torch's one-shot all-reduce."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.harness import require_gpu
from benchmarks.report import ROOT, Cell, Result, Table, failure, make_parser, ratio, shown
from cudatma.errors import counted

K, N = 28672, 8192
M_VALUES = (1, 16, 64, 256, 512, 1024, 4096)
#: Number of layers that take turns (their weights exceed any L2), number of passes over all layers per graph, and
#: number of graph replays.
LAYERS, REPEATS, ROUNDS = 4, 4, 15
EQUAL_RUNS = 200
#: Maximum M for which torch's one-shot all-reduce is measured.
_MAX_ONE_SHOT_M = 256
_TIMEOUT_S = 400
# Disable NVLink multicast, and ignore the user's tuning file.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "CUDATMA_TUNE_FILE": "none"}

Step = Callable[[int], object]
#: Group numbers. They are negative because AllReduce uses positive numbers.
_numbers = itertools.count(-1, -1)


class Loopback:
    """An all-reduce of two ranks on one GPU.

    The packets that a rank sends to its peer arrive in its own inbox as the peer's packets, so the times exclude the
    link.
    """

    def __init__(self) -> None:
        import torch

        from cudatma.kernels.all_reduce.config import PACKET_BYTES, Group, Inbox, initial_state, longest_message_bytes
        from cudatma.runtime.device_memory import DeviceMemory

        self.device, self.max_bytes = torch.cuda.current_device(), longest_message_bytes(2)
        inbox = Inbox(2, self.max_bytes)
        shift = (
            inbox.slot_packets * PACKET_BYTES
        )  # The distance from rank 0's packets to the address of rank 1's packets.
        self._memory = DeviceMemory(inbox.nbytes + shift, self.device)
        self._memory.clear(0, self._memory.nbytes)
        self._memory.write(initial_state())
        self._failure = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        at = self._memory.pointer
        self._group = Group(2, inbox.member(0, [at, at + shift], self._failure.data_ptr(), 10**9))
        self._number = next(_numbers)

    def __call__(self, x: Any) -> Any:
        """Double x in place."""
        from cudatma.kernels.all_reduce.config import ALL_REDUCE
        from cudatma.kernels.engine import run

        run(ALL_REDUCE, (x,), None, (self._number,), resource=self._group)
        return x

    def close(self) -> None:
        """Do nothing, because no other rank uses the memory."""


def steps(layers: Sequence[Any], reduce: Any, x: Any) -> dict[str, Step]:
    """Return, for each contender, a function of i that applies the GEMM and the all-reduce of layer i to x."""
    if isinstance(reduce, Loopback):
        return {"gemm": lambda i: layers[i](x), "cudatma": lambda i: reduce(layers[i](x))}
    import torch
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symm_mem

    group = dist.group.WORLD

    def nccl(i: int) -> None:
        dist.all_reduce(layers[i](x))

    calls: dict[str, Step] = {
        "gemm": lambda i: layers[i](x),
        "nccl": nccl,
        "cudatma": lambda i: reduce(layers[i](x)),
    }
    if len(x) <= _MAX_ONE_SHOT_M:
        shared = symm_mem.empty((len(x), N), dtype=x.dtype, device=x.device)
        symm_mem.rendezvous(shared, group)

        def torch_one_shot(i: int) -> None:
            part = layers[i]
            parts = (part.qweight, part.scales, part.zeros, part.perm, part.bias)
            sizes = (part.in_features, part.out_features, part.group_size)
            torch.ops.cudatma.marlin_gemm_out(x, *parts, *sizes, out=shared)
            torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)

        calls["torch"] = torch_one_shot
    return calls


def timed(calls: dict[str, Step]) -> Cell:
    """Time the calls in turn, and return the microseconds per layer of each call on the slower rank.

    A failure on one rank becomes an error on all ranks.
    """
    import torch
    import torch.distributed as dist

    graphs: dict[str, Any] = {}
    cell: Cell = {}
    for name, step in calls.items():
        problem = ""
        try:
            for i in range(LAYERS):
                step(i)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # NCCL's threads may call CUDA at any time.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for i in range(LAYERS * REPEATS):
                    step(i % LAYERS)
        except Exception as error:
            problem = failure(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if any(problems):
            cell[f"{name}_error"] = why = next(filter(None, problems))
            if name in ("gemm", "cudatma"):
                cell["error"] = f"{name}: {why}"
        else:
            graphs[name] = graph
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # This replay synchronizes the ranks.
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3 / (LAYERS * REPEATS))
    for name, times in samples.items():
        slowest = torch.tensor([statistics.median(times)], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        cell[f"{name}_us"] = float(slowest)
    return cell


def unequal_runs(layer: Any, reduce: Any, x: Any) -> int:
    """Return the number of results, of EQUAL_RUNS per rank, that differ in any bit from rank 0's first result."""
    import torch
    import torch.distributed as dist

    results = [reduce(layer(x)).view(torch.int16) for _ in range(EQUAL_RUNS)]
    first = results[0].clone()
    dist.broadcast(first.view(torch.uint8), 0)
    different = torch.tensor([sum(not torch.equal(each, first) for each in results)], device="cuda")
    dist.all_reduce(different)
    return int(different)


def rank_main(folder: Path, rank: int, gpus: int, m_values: Sequence[int]) -> int:
    """Run one rank. If there is only one rank, it uses a Loopback. Rank 0 prints one cell per line."""
    import torch
    import torch.distributed as dist

    from cudatma.integrations.torch import AllReduce, MarlinLinear

    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    device = torch.device("cuda", rank)
    backend: dict[str, Any] = {"backend": "nccl", "device_id": device} if gpus > 1 else {"backend": "gloo"}
    dist.init_process_group(init_method=store, rank=rank, world_size=gpus, **backend)
    ranks = max(2, gpus)
    layers = []
    for seed in range(LAYERS):
        generator = torch.Generator("cuda").manual_seed(seed * ranks + rank)
        layer = MarlinLinear(K // ranks, N, False, dtype=torch.bfloat16, device="cuda")
        layer.qweight.random_(0, 256, generator=generator)
        layer.scales.fill_(0.01)
        layers.append(layer)
    reduce: Any = AllReduce() if gpus > 1 else Loopback()
    with torch.inference_mode():
        for m in m_values:
            if gpus == 1 and m * N * 2 > reduce.max_bytes:
                continue
            x = torch.randn(m, K // ranks, device="cuda", dtype=torch.bfloat16) / 8
            cell: Cell = {"m": m, "one_shot": m * N * 2 <= reduce.max_bytes}
            cell |= timed(steps(layers, reduce, x))
            if cell["one_shot"]:
                cell["unequal"] = unequal_runs(layers[0], reduce, x)
                if cell["unequal"]:
                    cell["error"] = f"{cell['unequal']} results have different bits"
            if rank == 0:
                print(json.dumps(cell), flush=True)
    torch.cuda.synchronize()
    reduce.close()
    dist.destroy_process_group()
    return 0


def cells(gpus: int, m_values: Sequence[int]) -> Iterator[Cell]:
    """Start a rank on each GPU and yield the cells of rank 0. A failed rank yields a cell with an error."""
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).resolve()), "--gpus", str(gpus), "--m", ",".join(map(str, m_values))]
    with tempfile.TemporaryDirectory(prefix="cudatma-all-reduce-") as folder:
        printed, running = Path(folder, "rank0"), []
        for rank in range(gpus):
            place = ["--rank", str(rank), "--folder", folder]
            with Path(folder, f"rank{rank}").open("w") as out, Path(folder, f"log{rank}").open("w") as log:
                running.append(subprocess.Popen([*command, *place], env=environment, stdout=out, stderr=log))
        count, deadline = 0, time.monotonic() + _TIMEOUT_S
        codes: list[int | None] = [None] * gpus
        try:
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.2)
                codes = [process.poll() for process in running]
                lines = [line for line in printed.read_text().splitlines(keepends=True) if line.endswith("\n")]
                yield from map(json.loads, lines[count:])
                count = len(lines)
        finally:
            for process in running:
                process.kill()
        for rank, code in enumerate(codes):
            if code:
                words = Path(folder, f"log{rank}").read_text().strip().splitlines()
                yield {
                    "m": 0,
                    "error": f"rank {rank} exited with status {code}: {words[-1] if words else 'no message'}",
                }
        if None in codes and not any(codes):
            yield {"m": 0, "error": f"not finished after {_TIMEOUT_S} s"}


def all_reduce_table(cells: Sequence[Cell]) -> Table:
    names = {"gemm": "GEMM alone", "nccl": "with NCCL", "torch": "with torch's one-shot", "cudatma": "with AllReduce"}
    rows = []
    for cell in cells:
        if "cudatma_us" in cell:
            times = (shown(cell.get(f"{name}_us")) for name in names)
            over = (shown(ratio(cell.get(f"{name}_us"), cell["cudatma_us"])) for name in ("nccl", "torch"))
            rows.append((cell["m"], *times, *over))
    note = "Microseconds of a layer in CUDA graphs, on the slower rank. "
    note += '"over" is the time divided by the time with AllReduce.'
    return Table(("M", *names.values(), "over NCCL", "over torch"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench all_reduce`` and return the exit status (1 if a rank failed or results differ)."""
    parser = make_parser("all_reduce", __doc__)
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="number of GPUs; 1 measures only the kernel, in a loopback (default: 2)")
    add("--m", default=",".join(map(str, M_VALUES)), help="values of M, separated by commas (default: %(default)s)")
    add("--rank", type=int, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    m_values = [int(m) for m in options.m.split(",")]
    if options.rank is not None:
        return rank_main(options.folder, options.rank, options.gpus, m_values)
    require_gpu(parser)
    import torch

    if (count := torch.cuda.device_count()) < options.gpus:
        remedy = "pass --gpus 1 to measure only the kernel, without a peer"
        parser.exit(2, f"{parser.prog} requires {options.gpus} GPUs, got {count}; {remedy}\n")
    result = Result({"gpus": options.gpus, "k": K, "n": N, "rounds": ROUNDS}, all_reduce_table, options.json)
    for cell in cells(options.gpus, m_values):
        times = ", ".join(f"{name[:-3]} {shown(us)} us" for name, us in cell.items() if name.endswith("_us"))
        result.add(cell, f"M = {cell['m']}: {times}")
    return result.finish(f"GEMM and all-reduce on {counted(options.gpus, 'GPU')}")


if __name__ == "__main__":
    raise SystemExit(main())
