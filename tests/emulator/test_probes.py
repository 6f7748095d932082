"""The probe kernels on the emulator under several schedules: results against NumPy, and no hazards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import probe_configs as probes
import pytest
from primitive_tests import *  # noqa: F403
from primitive_tests import Array, Machine, move, numbers, tensor_map
from ptx_of import probe

from cudatma.descriptor import TensorMap
from cudatma.layout import Swizzle, swizzle
from cudatma.target import get_target


class Emulator:
    """Arrays of the device are arrays of the host."""

    target, encoder = get_target("sm_90a"), "codec"

    def upload(self, array: Array) -> Array:
        return array.copy()

    def download(self, array: Array) -> Array:
        return array

    def launch(self, name: str, config: Any, grid: int, block: int, args: Sequence[Any], **options: Any) -> None:
        owners = tuple(value.owner for value in args if isinstance(value, TensorMap))
        report = probe(name, config).launch(name, grid, block, tuple(args), arrays=owners, schedules=2, **options)
        assert report.is_clean, str(report)


@pytest.fixture
def machine() -> Machine:
    return Emulator()


@pytest.mark.parametrize("mode", [Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize("narrow", [False, True])
def test_swizzled_rows_lie_on_permuted_chunks_and_narrow_rows_are_padded(
    machine: Machine, mode: Swizzle, narrow: bool
) -> None:
    span = mode.span_bytes
    inner = 16 // 2 if narrow else span // 2
    source = numbers((32, 128), np.uint16, 3) + np.arange(32 * 128, dtype=np.uint16).reshape(32, 128)
    dump, after = move(machine, source, np.zeros_like(source), (16, inner), (4, 8), (8, 16), mode.label)
    expected = source[4:20, 8 : 8 + inner]
    raw = np.full(16 * span, 0xEE, np.uint8)
    for row in range(16):
        for chunk in range(inner * 2 // 16):
            # The probe's buffer is aligned to 1024, so that offsets and addresses have the same low bits.
            at = swizzle(row * span + chunk * 16, mode)
            raw[at : at + 16] = expected[row, chunk * 8 : chunk * 8 + 8].view(np.uint8)
    assert dump.tobytes() == raw.tobytes()
    assert (after[8:24, 16 : 16 + inner] == expected).all()
    assert int((after != 0).sum()) == int((expected != 0).sum())


def test_stores_clip_at_sixteen_bytes(machine: Machine) -> None:
    """A row of 15 elements of 2 bytes in rows 20 elements apart: the 16th is overwritten, the 17th is not."""
    storage = np.full((8, 24), 99, np.uint16)
    source = np.arange(8 * 16, dtype=np.uint16).reshape(8, 16)
    load, store = (tensor_map(machine, array, (8, 16)) for array in (source, storage[:, :15]))
    config = probes.BoxCopy(2, load.expected_bytes, load.footprint_bytes)
    args = (load, store, np.zeros(load.footprint_bytes, np.uint8), *[0] * 10)
    probe("box_copy", config).launch("box_copy", 1, 128, args, shared_bytes=256, arrays=(source, storage))
    assert (storage[:, :16] == source).all()
    assert (storage[:, 16:] == 99).all()


def test_a_tensor_map_below_4_gib_is_not_mistaken_for_shared_memory(machine: Machine) -> None:
    """Edit a map in global memory whose address would also be valid in shared memory."""
    map_32bit = 0x40  # MAP_32BIT of Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_32bit
    edited = np.frombuffer(mmap.mmap(-1, 4096, flags=flags), np.uint8)[:128]
    assert edited.ctypes.data < 1 << 32
    original, dump = tensor_map(machine, numbers((8, 32), np.float32), (8, 32)), np.zeros((8, 32), np.float32)
    second = numbers((8, 32), np.float32, 2)
    probe_config = probes.TensorMapEdit(original.expected_bytes)
    args = (original, edited, second, 5, dump)
    machine.launch("tensormap_edit", probe_config, 1, 32, args, shared_bytes=original.footprint_bytes)
    second[5:] = 0
    assert (dump == second).all()
