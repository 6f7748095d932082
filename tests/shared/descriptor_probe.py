"""A kernel that moves one box by TMA, and returns the barrier's count and the contents of shared memory.

It limits the time of its wait, so that a wrong byte count does not hang.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cudatma.descriptor import Im2colSpec
from cudatma.descriptor.spec import AnySpec
from cudatma.errors import check
from cudatma.target import detect

POISON = 0xA5
SOURCE = r"""
struct alignas(128) TensorMap { unsigned char opaque[128]; };

// Loads one box to the first 1024-byte boundary of shared memory, or stores one from there.
extern "C" __global__ void probe(const __grid_constant__ TensorMap map, unsigned char* image, unsigned* report,
                                 unsigned expected, unsigned total, int c0, int c1, int c2, int c3, int c4) {
    extern __shared__ unsigned char memory[];
    __shared__ unsigned long long barrier;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    unsigned raw = (unsigned)__cvta_generic_to_shared(memory), base = (raw + 1023) & ~1023u;
    unsigned char* box = memory + (base - raw);
    for (unsigned i = threadIdx.x; i < total; i += blockDim.x) box[i] = STORE ? image[i] : 0xA5;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned done = 0, missing = 0;
#if STORE
        asm volatile("cp.async.bulk.tensor.RANKd.global.shared::cta.tile.bulk_group [%0, {COORDS}], [%1];"
            :: "l"(&map), "r"(base), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
        done = 1;
#else
        asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}"
            :: "r"(bar), "r"(expected) : "memory");
        asm volatile("cp.async.bulk.tensor.RANKd.shared::cluster.global.LOADMODE.mbarrier::complete_tx::bytes"
            " [%1], [%0, {COORDS}], [%7]OFFSETS;"
            :: "l"(&map), "r"(base), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(bar), "h"((short)0) : "memory");
        long long start = clock64();
        while (!done && clock64() - start < 40000000) {
            asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(bar) : "memory");
        }
        // Bytes beyond the expected ones may still be on their way; they must not land in a block that is gone.
        for (start = clock64(); clock64() - start < 200000;) {}
        // What is still missing is completed byte by byte: expected - missing is what the box counted.
        for (unsigned complete = done; !complete && missing < expected; ++missing) {
            asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
            asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(complete) : "r"(bar) : "memory");
        }
#endif
        report[0] = done;
        report[1] = base;
        report[2] = missing;
    }
    __syncthreads();
#if !STORE
    for (unsigned i = threadIdx.x; i < total; i += blockDim.x) image[i] = box[i];
#endif
}
"""


class MapLike(Protocol):
    """A TensorMap, or 128 bytes that are not a valid tensor map."""

    spec: AnySpec
    data: Any


@dataclass(frozen=True)
class Seen:
    """Result of the probe.

    The fields are: whether the barrier completed by itself, the number of missing bytes, the address of the box in
    shared memory, and the contents of shared memory.
    """

    done: bool
    missing_bytes: int
    base: int
    image: np.ndarray[Any, Any]


_functions: dict[tuple[int, bool, bool], Any] = {}


def probe_function(rank: int, store: bool, im2col: bool) -> Any:
    """Return the probe for a rank and direction, which is compiled once."""
    key = (rank, store, im2col)
    if key not in _functions:
        from cuda.bindings import driver, nvrtc

        coords = ", ".join(f"%{2 + i}" for i in range(rank))
        offsets = ", {" + ", ".join(["%8"] * (rank - 2)) + "}" if im2col else ""
        text = SOURCE.replace("RANK", str(rank)).replace("COORDS", coords).replace("OFFSETS", offsets)
        text = text.replace("LOADMODE", "im2col" if im2col else "tile")
        program = check(nvrtc.nvrtcCreateProgram(text.encode(), b"probe.cu", 0, [], []), "nvrtcCreateProgram")
        options = [f"--gpu-architecture={detect().name}".encode(), f"-DSTORE={int(store)}".encode(), b"-std=c++17"]
        code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(code):
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.decode())
        cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        module = check(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        function = check(driver.cuModuleGetFunction(module, b"probe"), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, 200 * 1024), "cuFuncSetAttribute")
        _functions[key] = function
    return _functions[key]


def run(made: MapLike, coords: Sequence[int], expected: int, total: int, stored: Any = None) -> Seen:
    """Load one box, or store ``stored``. The probe returns ``total`` bytes of shared memory."""
    import cupy as cp
    from cuda.bindings import driver

    image = cp.zeros(total, cp.uint8) if stored is None else cp.asarray(stored)
    report = cp.zeros(3, cp.uint32)
    function = probe_function(made.spec.rank, stored is not None, isinstance(made.spec, Im2colSpec))
    values: list[Any] = [
        made.data,
        *(ctypes.c_void_p(int(array.data.ptr)) for array in (image, report)),
        *(ctypes.c_uint32(number) for number in (expected, total)),
        *(ctypes.c_int32(c) for c in (*coords, 0, 0, 0, 0)[:5]),
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    launch = driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, total + 1024, 0, ctypes.addressof(pointers), 0)
    check(launch, "cuLaunchKernel")
    check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
    done, base, missing = (int(value) for value in report.get())
    return Seen(bool(done), missing, base, image.get())
