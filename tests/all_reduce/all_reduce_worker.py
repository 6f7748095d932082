"""A rank of test_all_reduce_gpu.py: all-reduces of a group over gloo, on a GPU that ranks may share.

Each rank checks its own results, because it knows the random numbers of every rank.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cudatma
from cudatma.errors import ArgumentError, PeerTimeout
from cudatma.integrations.torch import AllReduce, RowParallel

#: Elements of messages: less than a packet, tails, several batches of a thread. Long and short ones in turns.
SIZES = (2, 8192, 4, 131074, 6, 1030, 8192 * 64, 8)
LONGEST_BYTES = 1 << 20
RUNS = 200
#: After so long a rank says where it is, and ends.
LIMIT_S = 50


def draw(rank: int, seed: int, size: int, dtype: Any) -> Any:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def exact(ranks: int, seed: int, size: int, dtype: Any) -> Any:
    """Return the fp32 sum in rank order, and whether it is close to the float64 sum."""
    parts = [draw(rank, seed, size, dtype) for rank in range(ranks)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total.to(dtype)
    torch.testing.assert_close(total.double(), sum(part.double() for part in parts), rtol=1e-2, atol=5e-2)
    return total


def sizes(reduce: AllReduce) -> None:
    for seed, size in enumerate(SIZES * 3):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        got = reduce(draw(reduce.rank, seed, size, dtype))
        assert torch.equal(got, exact(reduce.ranks, seed, size, dtype)), (seed, size)


def equal_runs(reduce: AllReduce) -> None:
    """Reduce the same messages in every run, without waiting for the GPU in between."""
    same = draw(reduce.rank, 1, 8192 * 16, torch.bfloat16)
    results = [reduce(same.clone()) for _ in range(RUNS)]
    wanted = exact(reduce.ranks, 1, 8192 * 16, torch.bfloat16)
    assert all(torch.equal(result, wanted) for result in results)


def graphs(reduce: AllReduce) -> None:
    """Replay a graph with an odd number of launches between launches outside the graph."""
    shapes = (8192, 64, 8192 * 7)
    inputs = [torch.zeros(shape, dtype=torch.float16, device="cuda") for shape in shapes]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [reduce(x * 1) for x in inputs]
    for seed in range(20):
        for x in inputs:
            x.copy_(draw(reduce.rank, seed, x.numel(), x.dtype))
        graph.replay()
        if seed % 3 == 0:
            got = reduce(draw(reduce.rank, seed, 1030, torch.float16))
            assert torch.equal(got, exact(reduce.ranks, seed, 1030, torch.float16))
        for y in outputs:
            assert torch.equal(y, exact(reduce.ranks, seed, y.numel(), y.dtype)), seed


def layers(reduce: AllReduce) -> None:
    """Compare RowParallel with the group's own all-reduce, also in a graph."""
    k, n = 256 * reduce.ranks, 520
    dense = np.random.default_rng(5).standard_normal((k, n), np.float32) / 16
    packed, bias = cudatma.quantize(dense, group_size=64), torch.linspace(-1, 1, n)
    ours = RowParallel.from_packed(packed, bias, all_reduce=reduce).cuda()
    theirs = RowParallel.from_packed(packed, bias).cuda()
    for m in (1, 5, 64):
        x = draw(reduce.rank, m, m * 256, torch.float16).view(m, 256)
        torch.testing.assert_close(ours(x), theirs(x), rtol=4e-3, atol=2e-2)
        first = ours(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x)
        for _ in range(3):
            graph.replay()
            assert torch.equal(y, first)
    x = draw(reduce.rank, 0, 3 * 256, torch.float16).view(3, 256)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), ours(x))


def others(reduce: AllReduce) -> None:
    """Check which tensors use the group's all-reduce, and which raise an error."""
    long = torch.ones(LONGEST_BYTES, device="cuda").half()
    for x in (torch.ones(64, device="cuda"), torch.ones(3, device="cuda").half(), torch.ones(64).half(), long):
        assert torch.equal(reduce(x), torch.full_like(x, reduce.ranks))
    try:
        reduce(torch.ones(4, 4, device="cuda").half().t())
    except ArgumentError:
        return
    raise AssertionError("a transposed tensor was added up")


def main(folder: Path, rank: int, ranks: int, part: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    print(f"rank {rank}: in the group of {ranks}", flush=True)
    if part == "dies":
        dies(folder, AllReduce(timeout_s=3.0))
    reduce = AllReduce(max_bytes=LONGEST_BYTES, timeout_s=30.0)
    # torch.compile takes seconds, and has nothing to do with how many ranks there are.
    checks = (sizes, equal_runs, graphs, others, layers)[: 5 if ranks == 2 else 4]
    with torch.inference_mode():
        for check in checks:
            began = time.monotonic()
            check(reduce)
            torch.cuda.synchronize()
            reduce.check()
            print(f"rank {rank}: {check.__name__} {time.monotonic() - began:.1f} s", flush=True)
    reduce.close()
    dist.destroy_process_group()


def dies(folder: Path, reduce: AllReduce) -> None:
    """Kill the last rank before its second launch. The other ranks record what they get and how soon."""
    x = torch.ones(8192, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [reduce(x[:size] * 1) for size in (64, 8192)]
    reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if reduce.rank == reduce.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, found = time.monotonic(), {}
    graph.replay()
    torch.cuda.synchronize()
    found["waited"] = time.monotonic() - began
    for name, call in (("check", reduce.check), ("call", lambda: reduce(x))):
        try:
            call()
        except PeerTimeout as error:
            found |= {name: str(error), "rank": error.rank}
    began = time.monotonic()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    found |= {"replays": time.monotonic() - began, "nans": all(bool(y.isnan().all()) for y in outputs)}
    found["sum"] = torch.arange(100, device="cuda").sum().item()  # the context works
    print(f"rank {reduce.rank}: {found}", flush=True)
    (folder / f"rank{reduce.rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the group cannot be ended in order


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
