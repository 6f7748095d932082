"""A packed weight as a dense matrix (K, N) on the GPU: TMA loads packed tiles and stores dequantized ones.

The values are those of PackedWeight.dequantize(), rounded once to the weight's type, bit for bit. Rows are in the order
of the activation's columns, whatever order the weight was packed in. Bound by memory: docs/performance/marlin_paths.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_in_cupy, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target, load_kernel
from cudatma.deprecation import former_arguments
from cudatma.descriptor import TensorMap, create_scale_tma_desc, create_weight_tile_tma_desc
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, counted
from cudatma.kernels.host import host_array, host_bytes
from cudatma.kernels.sample import Sample
from cudatma.library_streams import stream_handle
from cudatma.pipeline import Operand, PipelineSpec, align_up
from cudatma.quantization import GROUP_SIZES, PackedWeight, quantize
from cudatma.runtime.launch import Kernel
from cudatma.runtime.streams import order_after_producers
from cudatma.target import SMEM_RESERVED_BYTES, Target, detect

if TYPE_CHECKING:
    from cudatma.emulator import Report

TEMPLATE = "kernels/dequantize.cu.j2"
_ELEMENT_BYTES, _CHUNK_BYTES = 2, 16
_BLOCK, _BLOCK_BYTES = 64, 2048
#: A row of 64 columns in a buffer, and the gap after it that avoids bank conflicts without a swizzle.
_ROW_BYTES, _GAP_BYTES = 128, 16


@dataclass(frozen=True, slots=True)
class DequantizeSpec:
    """One instance of ``kernels/dequantize.cu.j2``.

    dtype, group_size, has_zeros: the weight's. has_permutation: rows are stored one by one, in the order of the
    permutation, instead of whole tiles. warps: 64 x 64 blocks of a tile along N. stages: tiles in flight. Raises
    ArgumentError.
    """

    dtype: str
    group_size: int
    has_zeros: bool
    has_permutation: bool = False
    warps: int = 4
    stages: int = 2
    entry: str = "dequantize"

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        if self.group_size not in GROUP_SIZES:
            raise ArgumentError("group_size", self.group_size, ", ".join(map(str, GROUP_SIZES)))
        if not 1 <= self.warps <= 4:
            raise ArgumentError("warps", self.warps, "1 to 4", "a box of scales has at most 256 columns")
        if not 1 <= self.stages <= 8:
            raise ArgumentError("stages", self.stages, "1 to 8")

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def threads(self) -> int:
        """Warps that dequantize, and one that loads."""
        return 32 * (self.warps + 1)

    @property
    def groups_per_tile(self) -> int:
        """Rows of scales that a tile needs, for 64 rows of W."""
        return 2 if self.group_size == 32 else 1

    @property
    def row_bytes(self) -> int:
        return _ROW_BYTES + _GAP_BYTES * self.has_permutation

    @property
    def staging_bytes(self) -> int:
        """Two buffers for each warp: the warp fills one while TMA reads the other."""
        return 2 * self.warps * _BLOCK * self.row_bytes

    @property
    def ring(self) -> PipelineSpec:
        """A packed tile, its scales and zero points a stage; one thread loads, each warp releases the slot."""
        columns = self.warps * _BLOCK
        sizes = {"weight": self.warps * _BLOCK_BYTES, "scales": self.groups_per_tile * columns * _ELEMENT_BYTES}
        if self.has_zeros:
            sizes["zeros"] = self.groups_per_tile * columns
        return PipelineSpec(
            self.stages, tuple(Operand(name, size, size) for name, size in sizes.items()), consumer_arrivals=self.warps
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What shared memory holds, for the head of the generated source."""
        buffers = f"buffers: {2 * self.warps} x 64 rows x 64 columns, {self.row_bytes} bytes a row"
        return (buffers, f"after them, at +{self.staging_bytes}:", *self.ring.notes())

    @property
    def smem_bytes(self) -> int:
        return self.staging_bytes + self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of what stands in dynamic shared memory."""
        ring, at = self.ring, self.staging_bytes
        return [
            ("buffers", 0, at),
            ("packed tiles", at, ring.stages * ring.stage_bytes),
            ("barriers", at + ring.barriers_offset, ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        return [(operand.name, operand.footprint_bytes) for operand in self.ring.operands]

    def check_target(self, target: Target) -> None:
        """Raise TargetError or ArgumentError unless the target has what the kernel uses and the memory it takes."""
        for feature in ("tma", "stmatrix"):
            target.require(feature, "dequantize() on the GPU")
        self.ring.check_fits(target, other_bytes=self.staging_bytes)


def spec_for(w: PackedWeight) -> DequantizeSpec:
    """The instance for a weight: as many stages as 99 KiB of shared memory hold, which SM90 has twice."""
    permuted = w.perm is not None
    return DequantizeSpec(w.dtype, w.group_size, not w.symmetric, permuted, stages=2 if permuted else 3)


def dense_pitch_bytes(n: int) -> int:
    """From one row of a dense weight to the next: TMA stores whole chunks of 16 bytes."""
    return align_up(n * _ELEMENT_BYTES, _CHUNK_BYTES)


@former_arguments("out", "stream")
def dequantize(w: PackedWeight, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """The weight as a dense matrix (K, N) of its own type, fp16 or bf16; x @ dense is what marlin_gemm(x, w) computes.

    w: on a device; with backend "emulator" or "reference" on the host. out: (K, N) of w's dtype on w's device (CuPy,
    torch, DLPack, ``__cuda_array_interface__``; NumPy on the host), returned; its elements of a row dense, its base and
    pitch multiples of 16 bytes, N a multiple of 8. None: made by CuPy or NumPy, for any N; its pitch is padded to 16
    bytes. stream: None is the current stream of out's library. backend: as in marlin_gemm.
    The bits are those of ``w.dequantize(w.dtype)``. Can be captured into a graph from the second call on.

    Raises ArgumentError, ArgumentTypeError, TargetError, CompileError, DriverError, LaunchError and HazardError.
    """
    if not isinstance(w, PackedWeight):
        raise ArgumentTypeError("w", type(w).__name__, "PackedWeight", "quantize() or an importer makes one")
    chosen = backend_for("dequantize", backend)
    if (w.device is None) == (chosen == "cuda"):
        allowed = f"{'a CUDA device' if chosen == 'cuda' else 'the host'} with {chosen!r}"
        raise ArgumentError(
            "w.device", place_name(w.device), allowed, device_remedy("w.to_device() moves it", w.device)
        )
    if out is None:
        out = _new_result(w, None if w.device is None else stream_handle(stream, "cupy", w.device))
    info = check_dense(out, w)
    if chosen == "reference":
        host_array(info)[...] = w.dequantize(dtype=w.dtype)
        return out
    if w.device is None:
        _emulate(w, info, default_target())
    else:
        handle = stream_handle(stream, info.kind, w.device)
        order_after_producers(handle, w.device, info)
        dequantize_into(w, info, handle)
    return out


def dequantize_into(w: PackedWeight, out: ArrayInfo, stream: int) -> None:
    """Launch on a stream, by its handle, into memory that check_dense() would take.

    Raises LaunchError inside a graph capture unless the kernel is loaded.
    """
    device = w.device or 0
    target, spec = detect(device), spec_for(w)
    # Shared memory limits the CTAs of an SM.
    resident = max(1, target.smem_per_sm_bytes // (spec.smem_bytes + SMEM_RESERVED_BYTES))
    grid, args = prepare(w, out, spec, target, context.device(device).sm_count * resident)
    kernel = load_kernel(TEMPLATE, spec, target)
    kernel.launch(grid, spec.threads, args, shared_bytes=spec.smem_bytes, stream=stream, backend="cuda")


def prepare(
    w: PackedWeight, out: ArrayInfo, spec: DequantizeSpec, target: Target, blocks: int
) -> tuple[int, tuple[Any, ...]]:
    """(grid, arguments). blocks: CTAs that run at the same time; all arrays on the host, or on one device."""
    spec.check_target(target)
    k, n = w.shape
    k64, columns = -(-k // _BLOCK), spec.warps * _BLOCK
    tables = [w.scales] if w.zeros is None else [w.scales, w.zeros]
    maps = [create_weight_tile_tma_desc(w.qweight, k64, 1, spec.warps, target=target)]
    for table in tables:
        maps.append(create_scale_tma_desc(table, columns, spec.groups_per_tile, whole_column=False, target=target))
    # The padding of a row is written too: a store that ended inside of 16 bytes would be refused by the driver's rules.
    width = dense_pitch_bytes(n) // _ELEMENT_BYTES
    whole = replace(out, shape=(k, width), strides_bytes=(out.strides_bytes[0], _ELEMENT_BYTES))
    place: tuple[Any, ...]
    if spec.has_permutation:
        place = (whole, out.strides_bytes[0], w.perm, k)
    else:
        place = (TensorMap.from_array(whole, (_BLOCK, _BLOCK), axes=(1, 0), swizzle="128B", target=target),)
    tiles_n = -(-n // columns)
    tiles = tiles_n * k64
    return min(tiles, blocks), (*maps, *place, width, tiles_n, tiles)


def check_dense(out: object, w: PackedWeight) -> ArrayInfo:
    """An array that the kernel can write the weight to. ArgumentError or ArgumentTypeError for any other."""
    info = describe(out, "out")
    if info.dtype.name != w.dtype or not info.dtype.isnative:
        raise ArgumentTypeError("out.dtype", str(info.dtype), w.dtype)
    if info.device != w.device:
        raise ArgumentError("out.device", place_name(info.device), f"{place_name(w.device)}, where w is")
    if info.shape != w.shape:
        raise ArgumentError("out.shape", info.shape, str(w.shape))
    if info.readonly:
        raise ArgumentError("out", "a read-only array", "a writable array")
    pitch, step = info.strides_bytes
    if step != _ELEMENT_BYTES and w.shape[1] > 1:
        raise ArgumentError("out.strides", info.strides_bytes, f"{_ELEMENT_BYTES} in the last dimension")
    least = dense_pitch_bytes(w.shape[1])
    if w.shape[0] > 1 and (pitch < least or pitch % _CHUNK_BYTES):
        allowed = f"rows a multiple of {_CHUNK_BYTES} bytes apart, at least {least}"
        raise ArgumentError("out.strides", info.strides_bytes, allowed, "leave out= away, or give it wider rows")
    if info.pointer % _CHUNK_BYTES:
        raise ArgumentError("out.pointer", hex(info.pointer), f"a multiple of {_CHUNK_BYTES} bytes")
    return info if w.shape[0] > 1 else replace(info, strides_bytes=(least, _ELEMENT_BYTES))


def _new_result(w: PackedWeight, stream: int | None = None) -> Any:
    """(K, N), each row padded to whole 16-byte chunks. stream: as in empty_like_library()."""
    k, n = w.shape
    shape, dtype = (k, dense_pitch_bytes(n) // _ELEMENT_BYTES), activation_type(w.dtype).numpy
    if w.device is None:
        return np.empty(shape, dtype)[:, :n]
    return empty_in_cupy(shape, np.dtype(dtype), w.device, stream)[:, :n]


def emulate(
    w: PackedWeight,
    out: ArrayInfo,
    target: Target,
    *,
    blocks: int = 132,
    spec: DequantizeSpec | None = None,
    **run: Any,
) -> Report:
    """The kernel on the emulator, host arrays throughout; run: options of ``Kernel.emulate``."""
    spec = spec or spec_for(w)
    grid, args = prepare(w, out, spec, target, blocks)
    whole = replace(out, shape=(w.shape[0], dense_pitch_bytes(w.shape[1]) // _ELEMENT_BYTES))
    arrays = [host_bytes(whole)]
    args = tuple(value.pointer if isinstance(value, ArrayInfo) else value for value in args)
    kernel: Kernel = load_kernel(TEMPLATE, spec, target)
    return kernel.emulate(grid, spec.threads, args, shared_bytes=spec.smem_bytes, **({"arrays": arrays} | run))


def _emulate(w: PackedWeight, out: ArrayInfo, target: Target) -> None:
    emulate(w, out, target, schedules=1)


def dump_specs(target: Target) -> list[DequantizeSpec]:
    """The instances that stand for all in dumps and compile checks; none where the target cannot run them."""
    if not target.has("tma") or not target.has("stmatrix"):
        return []
    return [
        DequantizeSpec("float16", 128, False, stages=3),
        DequantizeSpec("bfloat16", 32, True, stages=3),
        DequantizeSpec("float16", 64, True, True),
        DequantizeSpec("bfloat16", -1, False, True),
    ]


def sample(
    target: Target,
    *,
    k: int = 200,
    n: int = 300,
    dtype: str = "float16",
    group_size: int = 128,
    zeros: bool = False,
    permute: bool = False,
    blocks: int = 2,
) -> Sample:
    """A random weight dequantized, for `cudatma emulate dequantize`. blocks: the most CTAs that divide the tiles.

    zeros: with zero points. permute: packed in another order of its rows. Raises ArgumentError.
    """
    if min(k, n, blocks) < 1:
        raise ArgumentError("k, n, blocks", (k, n, blocks), "1 and more each")
    random = np.random.default_rng(0)
    values = random.standard_normal((k, n), np.float32)
    w = quantize(values, group_size=group_size, symmetric=not zeros, dtype=dtype)
    if permute:
        w = replace(w, perm=random.permutation(k).astype(np.int32))
    spec = replace(spec_for(w), warps=2)
    out = _new_result(w)
    kernel = load_kernel(TEMPLATE, spec, target)
    run = partial(emulate, w, check_dense(out, w), target, blocks=blocks, spec=spec)

    def error() -> float:
        return float((out.view(np.uint16) != w.dequantize(dtype=dtype).view(np.uint16)).mean())

    grid = f"at most {counted(blocks, 'block')} of {spec.threads}"
    title = f"dequantized weight, {k} x {n}, {dtype}, groups of {group_size}, {grid}"
    return Sample(title, kernel, run, error, 0.0)
