"""Run recorded TMA operations on the emulator's TMA alone, without a kernel and warps, a hundred times faster."""

from __future__ import annotations

from typing import Any

from tma_answer import expected_bytes, finished
from tma_data import before
from tma_kernel import IMMEDIATE_FIELDS, REDUCTIONS
from tma_replay import descriptor

from cudatma.descriptor.spec import TiledSpec
from cudatma.emulator.async_copy import bulk, tensor_map, tensor_values
from cudatma.emulator.async_copy.tensor_box import BoxError, check_load, check_store, im2col_box, read_map, tiled_box
from cudatma.errors import DescriptorError
from cudatma.target import get_target

#: Offset of the window in the block's shared memory, a multiple of 1024 bytes as in the kernel.
WINDOW_AT = 1024
ADDRESS = 1 << 20


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the emulator's answer to a case: tma_answer.finished(), or the result "trap" or "refused"."""
    gmem, window = before(case)
    memories = gmem.copy(), window.copy()
    edited = bytes(128)
    try:
        if "map" not in case:
            _without_map(case, *memories)
        else:
            edited = _edited(case, descriptor(case, ADDRESS))
            if case["op"] != "nothing":
                _through_map(case, edited, *memories)
    except DescriptorError as error:
        return {"n": case["n"], "result": f"refused: {error.field}"}
    except BoxError as error:
        return {"n": case["n"], "result": f"trap: {error.error}", "why": str(error)}
    expected = expected_bytes(case)
    both = (gmem, memories[0]), (window, memories[1])
    missing = expected % 16 if "map" not in case else 0
    return finished(case, [[int(not missing), missing, 1]] * max(1, case.get("cluster", 0)), expected, both, edited)


def _edited(case: dict[str, Any], raw: bytes) -> bytes:
    for field, ordinal, value in case.get("edits", []):
        new = ADDRESS + value if field == "global_address" else value
        raw = tensor_map.edit(raw, field, 0 if field in IMMEDIATE_FIELDS else ordinal, new)
    return raw


def _through_map(case: dict[str, Any], raw: bytes, gmem: Any, window: Any) -> None:
    spec = read_map(raw, get_target("sm_90a"))
    mode, action, _ = case["op"].split("_")
    coords, offsets = case["coords"], case.get("offsets", [])
    if action in ("load", "multicast", "prefetch"):
        check_load(spec, coords, mode)
    else:
        check_store(spec, coords, mode, action if action in REDUCTIONS else "")
    if action == "prefetch":
        return
    at = WINDOW_AT + case["to"]
    if at % 128:
        raise BoxError("shared memory that is not aligned", "MISALIGNED_ADDRESS")
    if isinstance(spec, TiledSpec):
        box = tiled_box(spec, coords, at)
    else:
        box = im2col_box(spec, coords, offsets if action == "load" else [], at)
    if int(box.smem.max()) + 16 - WINDOW_AT > case["window"]:
        raise BoxError("past the window", "ILLEGAL_ADDRESS")
    origin = spec.address - ADDRESS
    if not 0 <= origin < gmem.size:
        raise BoxError("no memory there", "ILLEGAL_ADDRESS")
    index = (box.smem - WINDOW_AT) // 16
    if action in ("load", "multicast"):
        words = tensor_values.loaded_words(box, gmem, origin)
        for part in _targets(case, window):
            tensor_values.shared_chunks(part)[index] = words
        return
    mask = tensor_values.written_chunks(box)
    if mask.any():
        target, words = box.gmem[mask] + origin, tensor_values.shared_chunks(window)[index][mask]
        if action in REDUCTIONS:
            tensor_values.reduce(gmem, target, words, spec, action)
        else:
            tensor_values.write(gmem, target, words)


def _targets(case: dict[str, Any], window: Any) -> list[Any]:
    """Return the windows of the blocks that receive bytes."""
    parts = window.reshape(-1, case["window"])
    return [part for rank, part in enumerate(parts) if case.get("targets", 1) >> rank & 1]


def _without_map(case: dict[str, Any], gmem: Any, window: Any) -> None:
    size, at = case["size"] // 16 * 16, case["gmem_at"]
    to, source = case["to"], case["from"]
    family, operation, *rest = case["op"].split("_")
    if family == "shared" and not case.get("cluster"):
        raise BoxError("a launch with a cluster")
    used = (
        *((to, source) if family == "shared" else (to, at) if operation in ("load", "multicast") else (source, at)),
    )
    if any(value % 16 for value in used):
        raise BoxError("an address off 16 bytes", "MISALIGNED_ADDRESS")
    shared = window[source : source + size]
    if family == "shared":
        place = _targets(case, window)[0][to : to + size]
        bulk.reduce_into(place, shared, "" if operation == "copy" else operation, rest[0] if rest else "")
    elif operation in ("load", "multicast"):
        for part in _targets(case, window):
            part[to : to + size] = gmem[at : at + size]
    elif operation != "prefetch":
        place = gmem[at : at + size]
        bulk.reduce_into(place, shared, "" if operation == "store" else operation, rest[0] if rest else "")
