"""Run TMA cases on a GPU and print one answer per line, until the first trap, which loses the context.

python tests/emulator/tma_worker.py CUBIN CASES.json < numbers of the cases, as JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

# The checkout's package and the capture of descriptors.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "descriptor"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from capture_descriptors import ask_driver
from tma_answer import expected_bytes, finished, set_bits
from tma_data import before
from tma_kernel import request_bytes

from cudatma.errors import check

ARENA_BYTES = 64 << 20
SETTLE_NS = 20_000
MAX_WINDOW = 208 << 10
#: Offsets of the edited map, the request, the window's image and the report in the arena; the global buffer follows.
EDITED, REQUEST, IMAGE, REPORT, GMEM = 0, 4096, 1 << 16, 1 << 20, 32 << 20


class Gpu:
    """The kernel in its own context, and an arena of device memory."""

    def __init__(self, cubin: bytes) -> None:
        from cuda.bindings import driver

        self.driver = driver
        check(driver.cuInit(0), "cuInit")
        device = check(driver.cuDeviceGet(0), "cuDeviceGet")
        context = check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        module = check(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self.function = check(driver.cuModuleGetFunction(module, b"tma_case"), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, attribute, MAX_WINDOW + 1024), "cuFuncSetAttribute")
        self.arena = int(check(driver.cuMemAlloc(ARENA_BYTES), "cuMemAlloc"))
        check(driver.cuMemsetD8(self.arena, 0, ARENA_BYTES), "cuMemsetD8")

    def put(self, at: int, data: Any) -> None:
        raw = np.ascontiguousarray(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data)
        check(self.driver.cuMemcpyHtoD(self.arena + at, raw.ctypes.data, raw.nbytes), "cuMemcpyHtoD")

    def get(self, at: int, size: int) -> Any:
        raw = np.empty(size, np.uint8)
        check(self.driver.cuMemcpyDtoH(raw.ctypes.data, self.arena + at, size), "cuMemcpyDtoH")
        return raw

    def descriptor(self, case: dict[str, Any]) -> tuple[int | str, bytes]:
        """Return (0 or the driver's refusal, the 128 bytes)."""
        fields = case.get("original", case.get("map"))
        if fields is None:
            return 0, bytes(128)
        code, raw = ask_driver(self.driver, fields | {"address": self.arena + GMEM + case["base"]})
        if raw is not None and "raw_bits" in case:
            raw = set_bits(raw, *case["raw_bits"])
        return code, raw or bytes(128)

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one case; a trap ends the process."""
        code, raw = self.descriptor(case)
        if code:
            return {"n": case["n"], "result": f"refused: {code}"}
        gmem, window = before(case)
        expected = expected_bytes(case)
        self.put(GMEM, gmem)
        self.put(IMAGE, window)
        self.put(REQUEST, request_bytes(case, expected, self.arena + GMEM, SETTLE_NS))
        storage = ctypes.create_string_buffer(128 + 63)
        offset = -ctypes.addressof(storage) % 64
        ctypes.memmove(ctypes.addressof(storage) + offset, raw, 128)
        values = [ctypes.c_uint64(self.arena + at) for at in (EDITED, REQUEST, IMAGE, REPORT)]
        addresses = [ctypes.addressof(storage) + offset, *(ctypes.addressof(value) for value in values)]
        pointers = (ctypes.c_void_p * 5)(*addresses)
        code = self.launch(case["window"] + 1024, case.get("cluster", 0), ctypes.addressof(pointers))
        if not int(code):
            code = self.driver.cuCtxSynchronize()[0]
        if int(code):
            self.lost(case["n"], code)
        blocks = max(1, case.get("cluster", 0))
        report = self.get(REPORT, 16 * blocks).view(np.uint32).reshape(blocks, 4)
        if (report[:, 3] % 1024).any():
            raise RuntimeError(f"shared memory begins at {report[:, 3]}")
        memories = (gmem, self.get(GMEM, gmem.size)), (window, self.get(IMAGE, window.size))
        return finished(case, report[:, :3].tolist(), expected, memories, self.get(EDITED, 128).tobytes())

    def launch(self, shared_bytes: int, blocks: int, pointers: int) -> Any:
        """Launch one block, or a cluster if ``blocks`` is not 0; return the driver's code."""
        driver = self.driver
        if not blocks:
            return driver.cuLaunchKernel(self.function, 1, 1, 1, 128, 1, 1, shared_bytes, 0, pointers, 0)[0]
        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
        config.sharedMemBytes = shared_bytes
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = blocks, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        return driver.cuLaunchKernelEx(config, self.function, pointers, 0)[0]

    def lost(self, number: int, code: Any) -> None:
        """Answer with the trap and exit, because the context is lost."""
        name = self.driver.CUresult(int(code)).name.removeprefix("CUDA_ERROR_")
        print(json.dumps({"n": number, "result": f"trap: {name}"}), flush=True)
        os._exit(3)


def main() -> None:
    gpu = Gpu(Path(sys.argv[1]).read_bytes())
    cases = json.loads(Path(sys.argv[2]).read_text())
    for number in json.loads(sys.stdin.read()):
        print(json.dumps(gpu.run(cases[number])), flush=True)


if __name__ == "__main__":
    main()
