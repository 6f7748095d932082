"""A rank of test_torch_parallel.py and test_torch_parallel_gpu.py. It writes its results to a file.

With gloo, rank 1 then dies during a call of rank 0.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cudatma
from cudatma.integrations.torch import AllReduce, ColumnParallel, RowParallel

K, HIDDEN, N = 128, 192, 72


def weight(k: int, n: int, seed: int, dtype: str = "float16") -> Any:
    dense = np.random.default_rng(seed).standard_normal((k, n), np.float32) / 8
    return cudatma.quantize(dense, group_size=32, symmetric=False, dtype=dtype)


def biases() -> tuple[Any, Any]:
    draw = np.random.default_rng(9)
    return tuple(torch.from_numpy(draw.standard_normal(n, np.float32)) for n in (HIDDEN, N))


def activations(dtype: str) -> Any:
    """Return activations on the host."""
    return torch.randn(2, 3, K, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))


def results(device: str) -> dict[str, Any]:
    found = {}
    for dtype in ("bfloat16", "float16"):
        up, down, (first, second) = weight(K, HIDDEN, 1, dtype), weight(HIDDEN, N, 2, dtype), biases()
        x = activations(dtype).to(device)
        columns = ColumnParallel.from_packed(up, first).to(device)
        rows = RowParallel.from_packed(down, second).to(device)
        found[f"columns, {dtype}"] = columns(x)
        found[f"gathered, {dtype}"] = ColumnParallel.from_packed(up, first, gather_output=True).to(device)(x)
        model = torch.nn.Sequential(columns, torch.nn.SiLU(), rows)
        found[f"mlp, {dtype}"] = model(x)
        reduce = AllReduce(timeout_s=30)
        found[f"one-shot, {dtype}"] = RowParallel(rows.layer, all_reduce=reduce)(model[:2](x))
        reduce.check()
        reduce.close()
    if device != "cpu":  # test_torch_parallel.py compiles without another process
        found["compiled"] = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")(x)
    return found


def main(folder: Path, rank: int, backend: str) -> None:
    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=60)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=limit)
    found = {name: tensor.cpu() for name, tensor in results(device).items()}
    torch.save(found, folder / f"rank{rank}.pt")
    if backend != "gloo":
        dist.destroy_process_group()
        return
    layer, x = RowParallel.from_packed(weight(K, N, 3)), torch.ones(4, K // 2, dtype=torch.float16)
    dist.barrier()
    if rank:
        os._exit(3)
    try:
        layer(x)
    except RuntimeError as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # the group cannot be ended in order
    os._exit(4)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
