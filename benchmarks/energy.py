"""Energy of one launch: our GEMM and cuBLAS, each by itself for a second, by NVML's counter of joules.

From some M on the GPU is at its power limit; then the energy of a kernel decides its time, not its pipes.
Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption (millijoules since the driver was loaded).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Contender, capture, measuring_stream, require_gpu
from benchmarks.power import PowerLog, find_reader, gpu_bus_id
from benchmarks.report import Cell, Result, Table, failure, print_table, shown
from benchmarks.shapes import parse_m_values, parse_shape

#: Before it counts, and while it counts.
WARM_S, COUNT_S = 0.4, 1.0
M_VALUES = (1, 16, 32, 64, 128, 256, 1024)
#: Enqueued together; the counter itself moves every 20 to 100 ms.
_BATCH_S = 0.1


def energy_counter(bus_id: str | None) -> Callable[[], float] | None:
    """A function that reads joules since some time, None where NVML does not tell."""
    try:
        import pynvml as nvml  # nvidia-ml-py

        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode()) if bus_id else nvml.nvmlDeviceGetHandleByIndex(0)
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except Exception:  # not installed, no driver, a GPU without the counter
        return None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1e3


def run_for(replay: Callable[[], float], seconds: float) -> tuple[int, float]:
    """(replays, seconds on the GPU) until ``seconds`` are over. replay: one replay; returns its seconds."""
    count, spent, begun = 0, 0.0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        spent += replay()
        count += 1
    return count, spent


def measure(stream: Any, contender: Contender, read: Callable[[], float]) -> Cell:
    """us, millijoules and watts of one launch in a long run, and the clock meanwhile."""
    import cupy

    graph = capture(stream, contender)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    repeats = 1

    def replay() -> float:
        begin.record(stream)
        for _ in range(repeats):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3

    repeats = max(1, round(_BATCH_S / replay()))
    run_for(replay, WARM_S)
    with PowerLog(find_reader()) as log:
        before = read()
        count, seconds = run_for(replay, COUNT_S)
        joules = read() - before
    launches = count * repeats * contender.launches
    cell: Cell = {"us": seconds / launches * 1e6, "mj": joules / launches * 1e3, "watts": joules / seconds}
    return cell | {"power": log.summary()}


def energy_table(cells: Sequence[Cell]) -> Table:
    rows = []
    for cell in cells:
        clock = (cell.get("power") or {}).get("sm_mhz")
        numbers = (shown(cell.get("us"), 1), shown(cell.get("mj"), 1), shown(cell.get("watts"), 0), shown(clock, 0))
        rows.append((cell["what"], f"{cell['k']} x {cell['n']}", cell["m"], *numbers))
    note = "Each by itself for a second, weights cold in L2: microseconds and millijoules of a launch, watts, SM clock."
    return Table(("what", "K x N", "M", "us", "mJ", "W", "MHz"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench energy``; returns the exit status: 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="cudatma bench energy", description=__doc__)
    add = parser.add_argument
    add("--shape", type=parse_shape, default=(8192, 28672), metavar="KxN", help="a layer (default: 8192x28672)")
    add(
        "--m",
        type=parse_m_values,
        default=M_VALUES,
        metavar="M,..",
        help="values of M (seven, 1 to 1024)",
    )
    add("--dtype", choices=("float16", "bfloat16"), default="float16")
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    require_gpu(parser)
    read = energy_counter(gpu_bus_id())
    if read is None:
        parser.exit(2, f"{parser.prog}: NVML does not count this GPU's energy\n")
    import torch  # noqa: F401  # before the stream is made, which is to be torch's as well

    from benchmarks.layer import make_layer, ours
    from benchmarks.rivals.cublas import Cublas

    m_values, (k, n) = list(options.m), options.shape
    result = Result({"tokens": m_values, "dtype": options.dtype, "seconds": COUNT_S}, energy_table, options.json)
    with measuring_stream() as stream:
        layer = make_layer(k, n, options.dtype, max(m_values))
        cublas = Cublas(layer, m_values)
        for m in m_values:
            for what, contender in (("ours", ours(layer, m)), ("cuBLAS", cublas.contenders(stream, m, 1)[0])):
                cell: Cell = {"what": what, "k": k, "n": n, "m": m}
                try:
                    cell |= measure(stream, contender, read)
                except Exception as error:
                    cell["error"] = failure(error)
                line = f"{what} {k} x {n}, M = {m}: {shown(cell.get('us'), 1)} us, {shown(cell.get('mj'), 1)} mJ"
                result.add(cell, f"{line}, {shown(cell.get('watts'), 0)} W")
    print_table(result.console, energy_table(result.cells), "Energy")
    return int(any(cell.get("error") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
