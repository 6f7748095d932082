"""Measure the host time of repeated calls to marlin_gemm (with changing x and out), torch.mm and torch operators."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from benchmarks.harness import require_gpu
from benchmarks.operands import filled, random_numbers, random_packed, to_torch
from benchmarks.report import Cell, Result, Table, failure, make_parser, shown

K = N = 4096
PAIRS = 64
CALLS, ROUNDS = 2000, 5
#: Number of calls between two waits for the GPU, small enough that the launch queue does not fill up.
DRAIN_EVERY = 500
_WARM_UP = 200
_CASES = (
    "CuPy",
    "CuPy, bias",
    "CuPy, named stream",
    "CuPy, out allocated by the call",
    "torch",
    "torch, bias",
    "torch.mm, fp16, out given",
)

Call = Callable[[int], object]


def time_calls(
    call: Call, drain: Callable[[], object], calls: int, clock: Callable[[], int] = time.perf_counter_ns
) -> list[int]:
    """Return the duration of each ``call(i)`` in nanoseconds.

    After every DRAIN_EVERY calls, ``drain()`` waits for the GPU. The waiting time is not included.
    """
    samples = [0] * calls
    for index in range(calls):
        if index % DRAIN_EVERY == 0:
            drain()
        begin = clock()
        call(index)
        samples[index] = clock() - begin
    drain()
    return samples


def quantiles_us(samples_ns: Sequence[int]) -> dict[str, float]:
    """Return the median, the minimum, and the 90th and 99th percentiles in microseconds."""
    ordered = sorted(samples_ns)
    at = {f"p{p}_us": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] / 1e3 for p in (90, 99)}
    return {"median_us": statistics.median(ordered) / 1e3, "min_us": ordered[0] / 1e3, **at}


class Operands:
    """A packed weight, PAIRS pairs of x and out, and a bias, as CuPy arrays and torch tensors that share memory."""

    def __init__(self, m: int) -> None:
        import cupy

        numbers = random_numbers(cupy, 1 << 20, "float16", 5)
        xs = filled(cupy, (PAIRS, m, K), numbers)
        outs, bias = cupy.zeros((PAIRS, m, N), cupy.float16), filled(cupy, (N,), numbers)
        self.weight = random_packed(cupy, K, N, "float16", 1)[0]
        self.xs, self.outs, self.bias = [xs[i] for i in range(PAIRS)], [outs[i] for i in range(PAIRS)], bias

    def case(self, name: str) -> Call:
        """Return the timed call of a case. Raises ImportError for a torch case if torch is missing."""
        import cupy

        from cudatma import marlin_gemm

        xs, outs, bias, w = self.xs, self.outs, self.bias, self.weight
        if name.startswith("torch"):
            xs, outs, bias = [to_torch(x) for x in xs], [to_torch(out) for out in outs], to_torch(bias)
        if name.startswith("torch.mm"):
            import torch

            dense = torch.zeros(w.shape, dtype=xs[0].dtype, device=xs[0].device)
            return lambda i: torch.mm(xs[i % PAIRS], dense, out=outs[i % PAIRS])
        if name.endswith("bias"):
            return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS], bias=bias)
        if name.endswith("allocated by the call"):
            return lambda i: marlin_gemm(xs[i % PAIRS], w)
        if name.endswith("named stream"):
            stream = cupy.cuda.Stream(non_blocking=True)
            return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS], stream=stream)
        return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS])


def operators(device: str, k: int = K, n: int = N) -> dict[str, dict[str, Call]]:
    """Return, for each function, the direct call and the call through torch's dispatcher, for one row or one query."""
    import torch

    import cudatma
    from cudatma.integrations.torch import MarlinLinear
    from cudatma.integrations.torch.weights import packed_weight

    layer = MarlinLinear(k, n, False, device=device)
    layer.qweight.fill_(0x79)
    layer.scales.fill_(0.01)
    tensors = (layer.qweight, layer.scales, None, None)
    parts = (*tensors, None, k, n, 128)
    weight = packed_weight(*tensors, k, n, 128)
    half = {"dtype": torch.float16, "device": device}
    x, out = torch.ones((1, k), **half), torch.empty((1, n), **half)
    a, b, c = torch.ones((64, 256), **half), torch.ones((256, 128), **half), torch.empty((64, 128), **half)
    q, to = torch.ones((1, 64, 8, 64), **half), torch.empty((1, 64, 8, 64), **half)
    ops = torch.ops.cudatma

    def pair(direct: Call, operator: Call) -> dict[str, Call]:
        return {"direct": direct, "operator": operator}

    return {
        "marlin_gemm, out given": pair(
            lambda i: cudatma.marlin_gemm(x, weight, out=out),
            lambda i: ops.marlin_gemm_out.default(x, *parts, out=out),
        ),
        "marlin_gemm": pair(lambda i: cudatma.marlin_gemm(x, weight), lambda i: ops.marlin_gemm.default(x, *parts)),
        "MarlinLinear": pair(lambda i: cudatma.marlin_gemm(x, weight), lambda i: layer(x)),
        "gemm, out given": pair(lambda i: cudatma.gemm(a, b, out=c), lambda i: ops.gemm_out.default(a, b, out=c)),
        "attention, out given": pair(
            lambda i: cudatma.attention(q, q, q, out=to), lambda i: ops.attention_out.default(q, q, q, out=to)
        ),
    }


def measure(
    case: str, make: Callable[[], Mapping[str, Call]], drain: Callable[[], object], calls: int, rounds: int = ROUNDS
) -> list[Cell]:
    """Time the calls of a case in turns, and return a cell with the quantiles of each."""
    try:
        both = make()
        samples: dict[str, list[int]] = {name: [] for name in both}
        with _quiet():
            for call in both.values():
                time_calls(call, drain, _WARM_UP)
            for _ in range(rounds):
                for name, call in both.items():
                    samples[name] += time_calls(call, drain, calls)
    except Exception as error:
        return [{"case": case, "error": failure(error)}]
    return [{"case": f"{case}{name and f', {name}'}", **quantiles_us(each)} for name, each in samples.items()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Enable torch's inference mode and disable the garbage collector, which would pause calls for milliseconds."""
    torch = sys.modules.get("torch")
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode() if torch else nullcontext():
            yield
    finally:
        gc.enable()


def host_table(cells: Sequence[Cell]) -> Table:
    keys = ("median_us", "p90_us", "p99_us", "min_us")
    rows = [(c["case"], *(shown(c.get(key)) for key in keys)) for c in cells]
    note = f"Host microseconds per call. {PAIRS} pairs of x and out are used in turn, without synchronization."
    return Table(("arrays", "median", "p90", "p99", "min"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench host_cost`` and return the exit status (1 if a case could not be measured)."""
    parser = make_parser("host_cost", __doc__)
    add = parser.add_argument
    add("--calls", type=int, default=CALLS, help=f"number of timed calls in each of {ROUNDS} rounds (default: {CALLS})")
    add("--m", type=int, default=1, help="number of rows of x (default: 1)")
    options = parser.parse_args(argv)
    require_gpu(parser)
    import cupy

    result = Result(
        {"calls": options.calls, "rounds": ROUNDS, "m": options.m, "k": K, "n": N}, host_table, options.json
    )
    operands, drain = Operands(options.m), cupy.cuda.Device().synchronize
    cases: dict[str, Callable[[], Mapping[str, Call]]] = {
        name: lambda name=name: {"": operands.case(name)}  # type: ignore[misc]
        for name in _CASES
    }
    try:
        cases |= {name: lambda both=both: both for name, both in operators("cuda").items()}  # type: ignore[misc]
    except ImportError as error:
        result.say(f"torch operators are not measured: {failure(error)}")
    for name, make in cases.items():
        for cell in measure(name, make, drain, options.calls):
            result.add(cell, f"{cell['case']}: {shown(cell.get('median_us'))} us")
    return result.finish("Host cost")


if __name__ == "__main__":
    raise SystemExit(main())
