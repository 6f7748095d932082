"""Kernels with the most common mistakes, and what cudatma reports about each.

python docs/guide/mistakes.py          # write mistakes.md
python docs/guide/mistakes.py 6        # print the whole report about mistake 6, and how to repair it
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cudatma
from cudatma import TensorMap
from cudatma.errors import CudaTmaError

PAGE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Program:
    """A correct kernel and how to launch it. `arguments` makes the launch arguments, on arrays of its own."""

    kernel: str
    arguments: Callable[[], tuple[Any, ...]]
    block: int = 64
    grid: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def report(self, kernel: str) -> str:
        """Emulate a version of the kernel; return the report, empty if it is clean."""
        try:
            report = cudatma.compile(kernel, target="sm_90a", template=True).emulate(
                self.grid, self.block, self.arguments(), schedules=8, hazards="collect", **self.options
            )
        except CudaTmaError as error:
            return f"{type(error).__name__}: {error}"
        return "" if report.is_clean else str(report)


@dataclass(frozen=True)
class Mistake:
    """A mistake in a kernel, or in Python code that needs no kernel.

    Attributes
    ----------
    says : str
        The kind of the hazard, or the name of the error.
    wrong, right : str
        Replacing `right` by `wrong` in the program makes the mistake. Without a program, both are Python code.
    """

    title: str
    text: str
    says: str
    wrong: str
    right: str
    program: Program | None = None

    def version(self, *, repaired: bool) -> str:
        if self.program is None:
            return textwrap.dedent(self.right if repaired else self.wrong).strip() + "\n"
        kernel = self.program.kernel
        return kernel if repaired else kernel.replace(self.right, self.wrong)

    def report(self, *, repaired: bool = False) -> str:
        """Return what cudatma says about the code, empty if nothing."""
        code = self.version(repaired=repaired)
        if self.program is not None:
            return self.program.report(code)
        try:
            exec(code, {})
        except CudaTmaError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def diff(self) -> str:
        """Return the repair as a diff, with the indentation that its lines share removed."""
        versions = [self.version(repaired=repaired).splitlines() for repaired in (False, True)]
        context = 1 if self.program else 4
        lines = list(difflib.unified_diff(*versions, n=context, lineterm=""))[2:]
        changed = [line for line in lines if not line.startswith("@@")]
        shared = min((len(line[1:]) - len(line[1:].lstrip()) for line in changed if line[1:].strip()), default=0)
        return "\n".join((line[0] + line[1 + shared :]).rstrip() for line in changed).strip("\n")


def tile(rows: int) -> np.ndarray:
    return np.arange(rows * 32, dtype=np.float32).reshape(rows, 32)


INCLUDES = """
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/cluster.cuh.j2"
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tensormap.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
using namespace cudatma;
"""

LOAD = Program(
    INCLUDES
    + r"""
extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 4, 0);
    }
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[i] = tile[i];
}
""",
    lambda: (TensorMap.from_array(tile(8), (8, 32)), tile(8)),
)

LOAD_TWICE = Program(
    INCLUDES
    + r"""
extern "C" __global__ void load_twice(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (u32 turn = 0; turn < 2; ++turn) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(bar, sizeof(tile));
            cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 8 * turn);
        }
        mbarrier_wait_parity(bar, turn & 1);
        for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[8 * 32 * turn + i] = tile[i];
        __syncthreads();  // all threads have read the tile
    }
}
""",
    lambda: (TensorMap.from_array(tile(16), (8, 32)), tile(16)),
)

RING = Program(
    INCLUDES
    + r"""
extern "C" __global__ void pass_on(const __grid_constant__ TensorMap map, float* out, int last) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barriers[2];
    const u32 full = shared_address(&barriers[0]), empty = shared_address(&barriers[1]);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 32);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
        if (threadIdx.x == 32) {  // the producer
            mbarrier_wait_parity(empty, (turn & 1) ^ 1);
            mbarrier_arrive_expect_tx(full, sizeof(tile));
            cp_async_bulk_tensor_2d_load(shared_address(tile), &map, full, 0, 8 * turn);
        } else if (threadIdx.x < 32) {  // 32 consumers
            mbarrier_wait_parity(full, turn & 1);
            for (int i = threadIdx.x; i < 8 * 32; i += 32) out[8 * 32 * turn + i] = tile[i];
            mbarrier_arrive(empty);
        }
    }
}
""",
    lambda: (TensorMap.from_array(tile(16), (8, 32)), tile(16), 31),
)

STORE = Program(
    INCLUDES
    + r"""
extern "C" __global__ void store(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) float tile[8 * 32];
    for (int turn = 0; turn < 2; ++turn) {
        for (u32 i = threadIdx.x; i < 8 * 32; i += 64) tile[i] = 1000.0f * turn + i;
        fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            cp_async_bulk_tensor_2d_store(&map, shared_address(tile), 0, 8 * turn);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
        }
        __syncthreads();  // the store has read the tile
    }
}
""",
    lambda: (TensorMap.from_array(tile(16), (8, 32)),),
)

REFILL = Program(
    INCLUDES
    + r"""
extern "C" __global__ void refill(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) tile[i] = 0;
    fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 0);
    }
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[i] = tile[i];
}
""",
    lambda: (TensorMap.from_array(tile(8), (8, 32)), tile(8)),
)

SWIZZLED = Program(
    INCLUDES
    + r"""
extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barrier;
    u8* tile = shared + 1024;  // after a small array
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 8 * 128);
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) {
        const u32 row = i / 32, chunk = i % 32 / 4 ^ row;
        out[i] = *(const float*)(tile + row * 128 + chunk * 16 + i % 4 * 4);
    }
}
""",
    lambda: (TensorMap.from_array(tile(8), (8, 32), swizzle="128B"), tile(8)),
    options={"shared_bytes": 2048},
)

PADDED = Program(
    INCLUDES
    + r"""
constexpr u32 TILE_BYTES = 64 * 128;
constexpr u32 OFFSET = 8192 - TILE_BYTES;  // the tile is at the end of shared memory

extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 64 * 32);  // the padding does not count
        cp_async_bulk_tensor_2d_load(shared_address(shared + OFFSET), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 64 * 8; i += 64) {
        const u32 row = i / 8, chunk = i % 8 / 4 ^ row % 8;
        out[i] = *(const float*)(shared + OFFSET + row * 128 + chunk * 16 + i % 4 * 4);
    }
}
""",
    lambda: (TensorMap.from_array(tile(16).reshape(64, 8), (64, 8), swizzle="128B"), tile(16)),
    options={"shared_bytes": 8192},
)

#: Two arrays of 8 x 32 in one allocation, and memory for one tensor map.
EDIT = Program(
    INCLUDES
    + r"""
__device__ __align__(128) TensorMap edited;

extern "C" __global__ void edit(const __grid_constant__ TensorMap map, const float* arrays, float* out) {
    __shared__ __align__(128) float tiles[2][8 * 32];
    __shared__ __align__(128) TensorMap copy;
    __shared__ u64 barriers[2];
    const u32 lane = threadIdx.x, working = shared_address(&copy);
    if (lane == 0) {
        mbarrier_init(shared_address(&barriers[0]), 1);
        mbarrier_init(shared_address(&barriers[1]), 1);
        fence_mbarrier_init();
    }
    for (u32 i = lane; i < sizeof(TensorMap); i += 32) copy.bytes[i] = map.bytes[i];
    __syncwarp();
    for (u32 turn = 0; turn < 2; ++turn) {
        const u32 bar = shared_address(&barriers[turn]);
        if (lane == 0 && turn == 1) tensormap_replace_global_address(working, arrays + 8 * 32);
        __syncwarp();
        tensormap_cp_fenceproxy_release_gpu(&edited, working);
        if (lane == 0) {
            fence_proxy_tensormap_acquire_gpu(&edited);
            mbarrier_arrive_expect_tx(bar, sizeof(tiles[turn]));
            cp_async_bulk_tensor_2d_load(shared_address(tiles[turn]), &edited, bar, 0, 0);
        }
        __syncwarp();
        mbarrier_wait_parity(bar, 0);  // before the map changes
    }
    mbarrier_wait_parity(shared_address(&barriers[0]), 0);
    for (u32 i = lane; i < 2 * 8 * 32; i += 32) out[i] = tiles[i / 256][i % 256];
}
""",
    lambda: (TensorMap.from_array(arrays := tile(16), (8, 32)), arrays, tile(16)),
    block=32,
)

SHARE = Program(
    INCLUDES
    + r"""
extern "C" __global__ void __cluster_dims__(2) share(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier), rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();  // the barriers of both CTAs are ready
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        if (rank == 0) cp_async_bulk_tensor_2d_load_multicast(shared_address(tile), &map, bar, 0, 0, 0b11);
    }
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[8 * 32 * rank + i] = tile[i];
}
""",
    lambda: (TensorMap.from_array(tile(8), (8, 32)), tile(16)),
    grid=2,
    options={"cluster": 2},
)

MISTAKES = (
    Mistake(
        "Announcing elements instead of bytes",
        "`expect_tx` counts bytes. The load delivers four times the announced number, and the barrier's phase "
        "completes too early.",
        says="byte_count",
        wrong="expect_tx(bar, 8 * 32)",
        right="expect_tx(bar, sizeof(tile))",
        program=LOAD,
    ),
    Mistake(
        "Initializing the barrier for the wrong number of arrivals",
        "The count is the number of arrivals in one phase. Threads that wait do not arrive, so here the producer is "
        "the only one. The kernel hangs.",
        says="deadlock",
        wrong="mbarrier_init(bar, 64)",
        right="mbarrier_init(bar, 1)",
        program=LOAD,
    ),
    Mistake(
        "Reading a tile without waiting for its load",
        "`__syncthreads()` waits for the threads of the block, not for the load. Every thread that reads the tile "
        "waits on the load's barrier.",
        says="read_before_load",
        wrong="    __syncthreads();\n    for",
        right="    mbarrier_wait_parity(bar, 0);\n    for",
        program=LOAD,
    ),
    Mistake(
        "Not fencing the initialization of a barrier",
        "An ordinary store initializes the barrier, but TMA signals it through the asynchronous proxy. A fence "
        "makes the store visible there.",
        says="missing_init_fence",
        wrong="        mbarrier_init(bar, 1);\n    }",
        right="        mbarrier_init(bar, 1);\n        fence_mbarrier_init();\n    }",
        program=LOAD,
    ),
    Mistake(
        "Waiting on a barrier that may not be initialized",
        "The fence is for TMA. The other threads of the block need a `__syncthreads()` between the initialization "
        "and their wait.",
        says="missing_init_sync",
        wrong="    }\n    if",
        right="    }\n    __syncthreads();\n    if",
        program=LOAD,
    ),
    Mistake(
        "Waiting for the same parity again",
        "The second load completes the second phase, whose parity is 1. A wait for parity 0 returns at once, "
        "because the first phase has completed.",
        says="wrong_parity",
        wrong="mbarrier_wait_parity(bar, 0)",
        right="mbarrier_wait_parity(bar, turn & 1)",
        program=LOAD_TWICE,
    ),
    Mistake(
        "Loading into a tile that is still being read",
        "The wait for the next load does not protect the current tile: thread 0 may issue that load while other "
        "threads still read.",
        says="overwritten_while_read",
        wrong="",
        right="        __syncthreads();  // all threads have read the tile\n",
        program=LOAD_TWICE,
    ),
    Mistake(
        "Releasing a slot on some paths only",
        "The `empty` barrier expects 32 arrivals. A consumer that leaves early, or skips the release in a branch, "
        "stops the producer for good.",
        says="deadlock",
        wrong="if (threadIdx.x < last) mbarrier_arrive(empty);",
        right="mbarrier_arrive(empty);",
        program=RING,
    ),
    Mistake(
        "Storing a tile without a proxy fence",
        "TMA reads shared memory through the asynchronous proxy, which may not see ordinary stores yet. Each "
        "thread fences its own stores; the barrier comes after the fence.",
        says="missing_proxy_fence",
        wrong="",
        right="        fence_proxy_async_shared_cta();\n",
        program=STORE,
    ),
    Mistake(
        "Writing to a tile that is still being stored",
        "The store returns before it has read the tile. `wait_group_read<0>` waits until it has.",
        says="store_source_reused",
        wrong="if (turn == 1) cp_async_bulk_wait_group_read<0>();",
        right="cp_async_bulk_wait_group_read<0>();",
        program=STORE,
    ),
    Mistake(
        "Exiting while a store still reads shared memory",
        "When a block exits, another block may get its shared memory. Wait for the last store as well.",
        says="exit_with_pending_store",
        wrong="if (turn == 0) cp_async_bulk_wait_group_read<0>();",
        right="cp_async_bulk_wait_group_read<0>();",
        program=STORE,
    ),
    Mistake(
        "Waiting for a group that was never committed",
        "`wait_group` waits for committed groups only. Without `commit_group` it returns at once.",
        says="uncommitted_group",
        wrong="",
        right="            cp_async_bulk_commit_group();\n",
        program=STORE,
    ),
    Mistake(
        "Loading into memory that ordinary code wrote",
        "The proxies are not ordered: without a fence, an earlier ordinary store may land on top of the loaded "
        "data. This includes code that clears a tile, or writes results into a slot of the ring.",
        says="missing_proxy_fence",
        wrong="",
        right="    fence_proxy_async_shared_cta();\n",
        program=REFILL,
    ),
    Mistake(
        "Placing a swizzled tile at an address that is not aligned",
        "The pattern depends on the address. A tile with the 128-byte swizzle begins at a multiple of 1024 bytes; "
        "otherwise its rows are permuted by the wrong values.",
        says="swizzle_alignment",
        wrong="u8* tile = shared + 128;",
        right="u8* tile = shared + 1024;",
        program=SWIZZLED,
    ),
    Mistake(
        "Sizing a tile by the bytes that arrive",
        "Rows that are shorter than the span of the swizzle are padded to it. The tile takes `footprint_bytes`, "
        "here four times the `expected_bytes`.",
        says="out_of_bounds",
        wrong="TILE_BYTES = 64 * 32;",
        right="TILE_BYTES = 64 * 128;",
        program=PADDED,
    ),
    Mistake(
        "Starting a box in the middle of a 16-byte chunk",
        "The x coordinate times the size of an element must be a multiple of 16 bytes, in loads too. The GPU "
        "traps otherwise, and the CUDA context is lost.",
        says="trap",
        wrong="&map, bar, 2, 0)",
        right="&map, bar, 4, 0)",
        program=LOAD,
    ),
    Mistake(
        "Storing at a negative coordinate",
        "Loads may begin outside the tensor, stores may not. The GPU traps.",
        says="trap",
        wrong="0, 8 * turn - 4);",
        right="0, 8 * turn);",
        program=STORE,
    ),
    Mistake(
        "Using an edited tensor map without acquiring it",
        "TMA reads tensor maps through a proxy of their own. The thread that uses an edited map acquires it first.",
        says="tensor_map_fence",
        wrong="",
        right="            fence_proxy_tensormap_acquire_gpu(&edited);\n",
        program=EDIT,
    ),
    Mistake(
        "Editing a tensor map that is in use",
        "Wait for the loads that use a map before you edit it, or alternate between several maps.",
        says="tensor_map_in_use",
        wrong="        if (turn == 1) mbarrier_wait_parity(bar, 0);",
        right="        mbarrier_wait_parity(bar, 0);  // before the map changes",
        program=EDIT,
    ),
    Mistake(
        "Sending to a CTA that is not ready",
        "A multicast load signals a barrier in each receiving CTA. `__syncthreads()` covers the block of the "
        "sender only; the cluster needs its own barrier.",
        says="missing_init_sync",
        wrong="    __syncthreads();\n",
        right="    barrier_cluster_arrive();\n    barrier_cluster_wait();  // the barriers of both CTAs are ready\n",
        program=SHARE,
    ),
    Mistake(
        "Receiving a multicast without expecting its bytes",
        "Every receiver expects the bytes on its own barrier, whether or not it issues the load.",
        says="byte_count",
        wrong="mbarrier_arrive_expect_tx(bar, rank == 0 ? sizeof(tile) : 0);",
        right="mbarrier_arrive_expect_tx(bar, sizeof(tile));",
        program=SHARE,
    ),
    Mistake(
        "Giving the box in bytes",
        "A box counts elements. 64 halves are 128 bytes.",
        says="DescriptorError",
        wrong="""
            import numpy as np
            from cudatma import TensorMap

            x = np.zeros((1024, 1024), np.float16)
            TensorMap.from_array(x, box=(64, 128), swizzle="128B")
        """,
        right="""
            import numpy as np
            from cudatma import TensorMap

            x = np.zeros((1024, 1024), np.float16)
            TensorMap.from_array(x, box=(64, 64), swizzle="128B")
        """,
    ),
    Mistake(
        "Rows that do not begin at multiples of 16 bytes",
        "Allocate longer rows, and describe a view of them.",
        says="DescriptorError",
        wrong="""
            import numpy as np
            from cudatma import TensorMap

            x = np.zeros((1000, 1001), np.float32)
            TensorMap.from_array(x, box=(64, 64))
        """,
        right="""
            import numpy as np
            from cudatma import TensorMap

            x = np.zeros((1000, 1004), np.float32)[:, :1001]
            TensorMap.from_array(x, box=(64, 64))
        """,
    ),
    Mistake(
        "Storing rows that end within a 16-byte chunk",
        "A store clips at 16 bytes, not at the element: it would overwrite up to 15 bytes after each row. "
        "`check_store` raises the error that the hardware does not.",
        says="DescriptorError",
        wrong="""
            import numpy as np
            from cudatma import TensorMap
            from cudatma.descriptor import check_store

            out = np.zeros((64, 104), np.float32)[:, :101]
            check_store(TensorMap.from_array(out, box=(64, 64)).spec)
        """,
        right="""
            import numpy as np
            from cudatma import TensorMap
            from cudatma.descriptor import check_store

            out = np.zeros((64, 104), np.float32)
            check_store(TensorMap.from_array(out, box=(64, 64)).spec)
        """,
    ),
    Mistake(
        "Listing dimensions in NumPy's order in a spec",
        "`TiledSpec` and the CUDA driver count from the innermost dimension. Only `TensorMap.from_array` takes "
        "the box in NumPy order. Here 512 rows of 100 columns are meant, in boxes of 64 x 32.",
        says="DescriptorError",
        wrong="""
            from cudatma import TiledSpec

            TiledSpec(dtype="float32", dims=(512, 100), strides_bytes=(400,), box=(64, 32), swizzle="128B")
        """,
        right="""
            from cudatma import TiledSpec

            TiledSpec(dtype="float32", dims=(100, 512), strides_bytes=(400,), box=(32, 64), swizzle="128B")
        """,
    ),
)

HEAD = """# Common mistakes, and how cudatma reports them

Each section shows a mistake, its repair as a diff, and the first line of the report about the wrong code. To see a
whole report, run for example `python docs/guide/mistakes.py 6` in a checkout. You do not need a GPU.

## Checklist

- The base address, the strides, and the x coordinate of a box are multiples of 16 bytes. So are the rows of a tensor
  that you store to.
- A tile begins at a multiple of `smem_alignment_bytes` and takes `footprint_bytes` of shared memory.
- The barrier expects `expected_bytes`. Elements outside the tensor count.
- `fence.mbarrier_init` and a barrier of all threads that use it follow `mbarrier.init`.
- One thread issues a load; every reader waits on its barrier. The parity of the wait toggles with each lap of the ring.
- A slot is refilled after all readers have arrived at its `empty` barrier.
- A proxy fence comes between ordinary writes to a tile and a load or store by TMA.
- A store is committed, and waited for before you reuse the tile or exit.
- No CTA of a cluster sends before the barriers of all CTAs are initialized, or exits before the others have stopped
  sending to it.

## Index

"""
#: Places in a report that differ from run to run, or with the line numbers of the templates.
_PLACE = re.compile(r" \((shared )?address 0x.*$|; PTX line .*$|: (it ends )?phase .*$")


def page() -> str:
    """Return the text of mistakes.md."""
    kinds: dict[str, list[str]] = {}
    for number, mistake in enumerate(MISTAKES, 1):
        kinds.setdefault(mistake.says, []).append(f"[{number}](#{_anchor(number, mistake)})")
    rows = [f"| `{kind}` | {', '.join(links)} |\n" for kind, links in sorted(kinds.items())]
    index = "| the report says | mistake |\n|---|---|\n" + "".join(rows)
    return HEAD + index + "".join(_section(number, mistake) for number, mistake in enumerate(MISTAKES, 1))


def _anchor(number: int, mistake: Mistake) -> str:
    return re.sub(r"[^\w -]", "", f"{number}. {mistake.title}".lower()).replace(" ", "-")


def _section(number: int, mistake: Mistake) -> str:
    text = textwrap.fill(mistake.text, 120, break_on_hyphens=False)
    finding = textwrap.fill(_finding(mistake), 120, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False)
    return f"\n## {number}. {mistake.title}\n\n{text}\n\n```diff\n{mistake.diff()}\n```\n\n{finding}\n"


def _finding(mistake: Mistake) -> str:
    """Return the first line of the finding that the mistake is known by."""
    line = next(line for line in mistake.report().splitlines() if line.startswith(mistake.says))
    kind, _, message = _PLACE.sub("", line).partition(":")
    return f"`{kind}`: {message.strip().rstrip(':')}."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write mistakes.md, or show what cudatma says about one mistake.")
    parser.add_argument("number", type=int, nargs="?", choices=range(1, len(MISTAKES) + 1), metavar="NUMBER")
    number = parser.parse_args(argv).number
    if number is None:
        PAGE.write_text(page(), encoding="utf-8")
        return
    mistake = MISTAKES[number - 1]
    print(f"{mistake.title}\n\n{mistake.report()}\n\n{mistake.diff()}")


if __name__ == "__main__":
    main()
