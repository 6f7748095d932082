"""Runs kernels with planted bugs on a GPU, in a process of its own: prints a line of JSON for each.

``python hang_worker.py ring WRONG_BYTES ..`` or ``python hang_worker.py access NAME ..``, with the checkout and its
tests on PYTHONPATH. After each kernel the same context runs one that is right, and says whether its result is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import access_kernel
import cupy
import hang_kernels

import cudatma
from cudatma.build.kernel import default_target
from cudatma.errors import PipelineHang


def ring(bug: str, *, debug: bool = True) -> bool:
    """Launch the ring; whether the sums are right."""
    config = hang_kernels.RingSpec()
    kernel = cudatma.compile(hang_kernels.RING, config, target=default_target(), template=True, debug=debug)
    tiles, sums, right = hang_kernels.operands()
    out = cupy.asarray(sums)
    planted = {known.name: known for known in hang_kernels.PLANTED}.get(bug)
    kernel.launch(
        hang_kernels.BLOCKS,
        hang_kernels.THREADS,
        (cupy.asarray(tiles), out, hang_kernels.TILES, hang_kernels.NUMBERS[bug]),
        cluster=planted.cluster if planted else None,
        shared_bytes=config.smem_bytes,
    )
    return bool((out.get() == right).all())


def access(name: str) -> bool:
    """Launch one access by TMA."""
    asked = next(known for known in access_kernel.ACCESSES if known.name == name)
    kernel = cudatma.compile(access_kernel.ACCESS, None, target=default_target(), template=True, debug=True)
    arguments = access_kernel.operands(asked, "driver", cupy.asarray)
    kernel.launch(1, 32, arguments, shared_bytes=access_kernel.SHARED_BYTES)
    return True


def told(wait: Any) -> dict[str, Any]:
    names = (
        "state",
        "barrier",
        "address",
        "block",
        "warp",
        "lanes",
        "parity",
        "arrivals",
        "raw",
        "line",
        "text",
        "rule",
        "detail",
    )
    return {name: getattr(wait, name) for name in names} | {"cause": wait.cause, "waited": wait.waited_seconds}


def main(kind: str, names: list[str]) -> None:
    for name in names:
        answer: dict[str, Any] = {"name": name, "hang": "", "waits": []}
        try:
            answer["result"] = (ring if kind == "ring" else access)(name)
        except PipelineHang as hang:
            answer |= {"hang": str(hang), "waits": [told(wait) for wait in hang.waits]}
        answer["after"] = ring("NONE") and ring("NONE", debug=False)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
