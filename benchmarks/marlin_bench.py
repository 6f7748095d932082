"""Measuring cells of the Marlin benchmark on the GPU, layer by layer, within a budget."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cells import (
    CHAINED,
    FLOOR,
    FLOOR_CHAINED,
    OURS,
    CellFacts,
    Rivalry,
    failed_cell,
    key_of,
    line_of,
    make_cell,
)
from benchmarks.harness import Contender, cold, sustained
from benchmarks.layer import Layer, make_layer, ours
from benchmarks.operands import packed_bytes
from benchmarks.plan import PROGRAMMATIC_UP_TO, SUSTAINED_FROM, CellKey, Costs, choose, importance
from benchmarks.power import PowerLog, Sample
from benchmarks.read_floor import FloorBench
from benchmarks.report import Cell, Result, failure
from benchmarks.rivals import Field, make_field
from cudatma.errors import duration
from tools.model_layers import Shape

#: How many variants of cuBLAS take part in the turns of a cell.
FINALISTS = 3


class LayerBench(Protocol):
    """What run() needs: one layer's operands made, its cells measured, its memory given back.

    is_alive: whether the GPU still computes; after a trap nothing does in this process.
    """

    def open(self, shape: Shape, m_values: Sequence[int]) -> None: ...

    def cell(self, key: CellKey) -> Cell: ...

    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Floors:
    """F's kernel for one layer, in plain launches and chained; what cannot be had, and why."""

    plain: Contender | None
    chained: Contender | None
    errors: dict[str, str]


class GpuBench:
    """LayerBench on the current device.

    say: prints a line. reader: of clock and watts, or None. vllm: the folder with the libraries of vLLM's wheel.
    """

    def __init__(
        self,
        stream: Any,
        dtype: str,
        costs: Costs,
        floor_bench: FloorBench | None,
        reader: Callable[[], Sample] | None,
        say: Callable[[str], None],
        vllm: Path | None = None,
    ) -> None:
        self.stream, self.dtype, self.costs, self.say = stream, dtype, costs, say
        self.vllm = vllm
        self.floor_bench, self.reader = floor_bench, reader
        self.layer: Layer | None = None
        self.field, self.floors = Field(), Floors(None, None, {})

    def open(self, shape: Shape, m_values: Sequence[int]) -> None:
        """Operands, F and rivals of a layer. Raises what keeps its operands from being made."""
        k, n = shape
        few = min(m_values, default=1) < SUSTAINED_FROM
        self.floors = self._floors(k, n, min(m_values)) if few else Floors(None, None, {})
        rivals = self.costs.rivals
        self.layer = make_layer(k, n, self.dtype, max(m_values), with_dense="cublas" in rivals)
        began = time.monotonic()
        self.field = make_field(rivals, self.layer, m_values, self.vllm)
        self.say(f"{k} x {n}: rivals ready in {duration(time.monotonic() - began)}")
        for name, why in self.field.errors.items():
            self.say(f"{k} x {n}: {name}: {why}")

    def _floors(self, k: int, n: int, least_tokens: int) -> Floors:
        found = Floors(None, None, {})
        bench, nbytes = self.floor_bench, packed_bytes(k, n)
        if bench is None:
            return found
        for name, programmatic in ((FLOOR, False), (FLOOR_CHAINED, True)):
            if programmatic and least_tokens > PROGRAMMATIC_UP_TO:
                continue
            try:
                best, _ = bench.search(self.stream, nbytes, self.costs.replays, programmatic=programmatic)
                self.say(f"{k} x {n}: {name} {best.us:.2f} us ({best.terabytes_per_second:.2f} TB/s, {best.config})")
                again = bench.contender(nbytes, best.config, name, programmatic=programmatic)
                found.plain, found.chained = (found.plain, again) if programmatic else (again, found.chained)
            except Exception as error:
                found.errors[name] = failure(error)
        return found

    def cell(self, key: CellKey) -> Cell:
        """Everything that takes part in one cell. Raises what keeps ours from being measured at all."""
        if self.layer is None:
            raise RuntimeError("no layer is open")
        facts = self._cold(self.layer, key) if key.m < SUSTAINED_FROM else self._sustained(self.layer, key)
        return make_cell(facts)

    def _cold(self, layer: Layer, key: CellKey) -> CellFacts:
        replays = self.costs.replays
        found, errors = self.field.contenders(self.stream, key.m, FINALISTS)
        floors, rivals = self.floors, [each for ways in found.values() for each in ways]
        with_floor = [floors.plain] if floors.plain else []
        together = cold(self.stream, [ours(layer, key.m, name=OURS), *with_floor, *rivals], replays)
        facts = CellFacts(key, self.dtype, "cold", together, errors=errors | floors.errors)
        facts.rivalries = {name: Rivalry(together, [way.name for way in ways]) for name, ways in found.items()}
        if key.m <= PROGRAMMATIC_UP_TO:
            chain = [ours(layer, key.m, name=CHAINED, programmatic=True)]
            facts.chained = cold(self.stream, [*chain, *([floors.chained] if floors.chained else [])], replays)
        return facts

    def _sustained(self, layer: Layer, key: CellKey) -> CellFacts:
        found, errors = self.field.contenders(self.stream, key.m, 1)
        pairs, power = {}, {}
        for name, ways in found.items():
            with PowerLog(self.reader) as log:
                both = sustained(self.stream, [ours(layer, key.m, name=OURS), *ways], self.costs.seconds)
            pairs[name] = Rivalry(both, [way.name for way in ways])
            power[name] = log.summary()
        if pairs:
            together = next(iter(pairs.values())).measured  # cuBLAS' pair: it comes first
        else:
            together = sustained(self.stream, [ours(layer, key.m, name=OURS)], self.costs.seconds)
        return CellFacts(key, self.dtype, "sustained", together, rivalries=pairs, errors=errors, power=power)

    def is_alive(self) -> bool:
        try:
            self.stream.synchronize()
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Give the layer's memory back to the GPU: the next one's operands are of other sizes."""
        self.layer, self.field, self.floors = None, Field(), Floors(None, None, {})
        gc.collect()
        with contextlib.suppress(Exception):  # after a trap not even memory can be given back
            import cupy

            self.stream.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            if torch := sys.modules.get("torch"):
                torch.cuda.empty_cache()


def run(
    bench: LayerBench,
    keys: Sequence[CellKey],
    costs: Costs,
    budget_s: float | None,
    result: Result,
    clock: Callable[[], float] = time.monotonic,
) -> list[CellKey]:
    """Measure the cells that fit into the budget (None: all), adding each to ``result``; returns those left out.

    Whenever it comes to another layer it chooses again, by how much faster or slower than estimated it has been. It
    ends early where a trap has made the GPU useless to this process.
    """
    began, estimated_s = clock(), 0.0
    waiting, left_out = list(keys), list[CellKey]()
    dtype = str(result.settings.get("dtype", ""))

    def left_s() -> float | None:
        """Of the budget, in seconds of the estimate."""
        if budget_s is None:
            return None
        spent = clock() - began
        pace = min(4.0, max(0.25, spent / estimated_s)) if estimated_s else 1.0
        return (budget_s - spent) / pace

    while waiting:
        chosen, _ = choose(waiting, costs, left_s())
        if not chosen:
            break
        shape = chosen[0].shape
        now = [key for key in chosen if key.shape == shape]
        left_out += [key for key in waiting if key.shape == shape and key not in now]
        waiting = [key for key in waiting if key.shape != shape]
        estimated_s += costs.shape_s()
        why = _opened(bench, shape, [key.m for key in now])
        for key in sorted(now, key=importance):  # a clock that runs out leaves out the least important
            left = left_s()
            if not why and left is not None and costs.cell_s(key) > left:
                left_out.append(key)
                continue
            cell = failed_cell(key, dtype, why) if why else _measured(bench, key, dtype)
            estimated_s += 0.0 if why else costs.cell_s(key)
            result.add(cell, line_of(cell))
            if (cell.get("error") or cell.get("errors")) and not bench.is_alive():
                result.say(f"{key}: the GPU no longer computes for this process; go on with --resume, fewer --rivals")
                done = {key_of(each) for each in result.cells}
                return [each for each in keys if each not in done]
        bench.close()
    return left_out + waiting


def _opened(bench: LayerBench, shape: Shape, m_values: Sequence[int]) -> str:
    """Open a layer; what kept it from being opened, empty if nothing did."""
    try:
        bench.open(shape, m_values)
    except Exception as error:
        return failure(error)
    return ""


def _measured(bench: LayerBench, key: CellKey, dtype: str) -> Cell:
    try:
        return bench.cell(key)
    except Exception as error:
        return failed_cell(key, dtype, failure(error))
