"""Run recorded TMA operations on the emulator with the PTX of the kernel that ran on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_of import ptx_alone
from tma_answer import expected_bytes, finished, make_spec, set_bits
from tma_data import before
from tma_kernel import TEMPLATE, TmaCase, request_bytes

from cudatma.build.render import render
from cudatma.descriptor.codec import encode
from cudatma.emulator import load
from cudatma.emulator.errors import TrapError
from cudatma.errors import DescriptorError
from cudatma.target import get_target

Array = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(size: int, alignment: int = 256) -> Array:
    """Return bytes at an aligned address."""
    raw = np.zeros(size + alignment, np.uint8)
    return raw[-raw.ctypes.data % alignment :][:size]


def descriptor(case: dict[str, Any], address: int) -> bytes:
    """Return the 128 bytes of a case's map over a buffer, or raise DescriptorError if the rules refuse it."""
    fields = case.get("original", case.get("map"))
    if fields is None:
        return bytes(128)
    spec = make_spec(fields, address + case["base"])
    if spec.swizzle.is_atom:
        raise DescriptorError("swizzle", spec.swizzle.label, "none of sm_100's")
    raw = encode(spec)
    return set_bits(raw, *case["raw_bits"]) if "raw_bits" in case else raw


class EmulatedGpu:
    """The kernel on the emulator."""

    def __init__(self, target: str = "sm_90a") -> None:
        chosen = get_target(target)
        self.module = load(ptx_alone(render(TEMPLATE, TmaCase(), chosen), chosen))

    def run(self, case: dict[str, Any], hazards: str = "off") -> dict[str, Any]:
        """Return the answer to one case."""
        gmem, window = before(case)
        buffer, image = aligned(gmem.size), aligned(window.size)
        buffer[:], image[:] = gmem, window
        try:
            raw = descriptor(case, buffer.ctypes.data)
        except DescriptorError as error:
            return {"n": case["n"], "result": f"refused: {error.field}"}
        expected = expected_bytes(case)
        request = np.frombuffer(request_bytes(case, expected, buffer.ctypes.data, 0), np.uint8).copy()
        blocks = max(1, case.get("cluster", 0))
        edited, report = aligned(128), np.zeros((blocks, 4), np.uint32)
        try:
            self.module.launch(
                "tma_case",
                blocks,
                128,
                (raw, edited, request, image, report),
                cluster=case.get("cluster") or None,
                shared_bytes=case["window"] + 1024,
                schedules=1,
                hazards=hazards,
                arrays=(buffer,),
            )
        except TrapError as error:
            return {"n": case["n"], "result": f"trap: {error.error}", "why": str(error)}
        memories = (gmem, buffer), (window, image)
        return finished(case, report[:, :3].tolist(), expected, memories, edited.tobytes())
