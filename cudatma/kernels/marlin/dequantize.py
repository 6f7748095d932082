"""Dequantize a packed weight to a dense matrix (K, N) on the GPU. TMA loads packed tiles and stores dequantized tiles.

The result is bitwise identical to that of PackedWeight.dequantize(), rounded once to the weight's type. Rows are always
in the order of the activation's columns, even if the rows of the packed weight are permuted. The kernel is memory-bound
(docs/design/marlin.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe, empty_in_cupy, place_name
from cudatma.backend import device_remedy, selected_backend
from cudatma.descriptor import TiledSpec
from cudatma.descriptor.helpers import scale_map_spec, weight_tile_map_spec
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, counted
from cudatma.kernels.arguments import Arguments, At, Map, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.engine import run
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.marlin.gemm import MarlinGemm, host_weight, weight_of
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape, check_format
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.sample import Sample
from cudatma.layout import Swizzle
from cudatma.library_streams import stream_handle
from cudatma.pipeline import Operand, PipelineSpec, align_up
from cudatma.quantization import PackedWeight, quantize
from cudatma.quantization.layout_v1 import part_shapes, row_blocks
from cudatma.quantization.weight_format import WEIGHT_FORMATS, WeightFormat
from cudatma.target import Target

TEMPLATE = "kernels/dequantize.cu.j2"
_ELEMENT_BYTES = 2
_BLOCK, _BLOCK_BYTES = 64, 2048
#: Bytes per row of 64 columns in a buffer, and bytes of padding after a row, which avoid bank conflicts without a
#: swizzle.
_ROW_BYTES, _GAP_BYTES = 128, 16


@dataclass(frozen=True, slots=True)
class DequantizeConfig:
    """A configuration of ``kernels/dequantize.cu.j2``.

    Attributes
    ----------
    dtype, group_size, has_zeros, format
        Fields of the weight.
    has_permutation : bool
        Whether rows are stored one by one, in the order of the permutation, instead of in whole tiles.
    warps : int
        Number of 64 x 64 blocks in a tile, along N.
    stages : int
        Number of packed tiles in flight.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    dtype: str
    group_size: int
    has_zeros: bool
    has_permutation: bool = False
    warps: int = 4
    stages: int = 2
    format: str = "int4"
    entry: str = "dequantize"

    #: Codes become values before they are multiplied by the scales.
    scales_floats: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field_types(self)
        activation_type(self.dtype)
        check_format(self.format, self.group_size, self.has_zeros)
        if not 1 <= self.warps <= 4:
            raise ArgumentError("warps", self.warps, "1 to 4 (a box of scales has at most 256 columns)")
        if not 1 <= self.stages <= 8:
            raise ArgumentError("stages", self.stages, "1 to 8")

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def weight(self) -> WeightFormat:
        """Format of the weight."""
        return WEIGHT_FORMATS[self.format]

    @property
    def weight_bits(self) -> int:
        return self.weight.bits

    @property
    def bias_correction(self) -> str:
        """Literal of the power of two that corrects the codes' exponent bias, in both 16-bit halves."""
        return self.weight.bias_correction(self.dtype)

    @property
    def threads(self) -> int:
        """Number of threads in the warps that dequantize and in the warp that loads."""
        return 32 * (self.warps + 1)

    @property
    def groups_per_tile(self) -> int:
        """Number of rows of scales for the 64 rows of W in a tile."""
        return max(1, _BLOCK // self.group_size) if self.group_size > 0 else 1

    @property
    def row_bytes(self) -> int:
        return _ROW_BYTES + _GAP_BYTES * self.has_permutation

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of the staging buffers. Each warp has two buffers and fills one while TMA reads the other."""
        return 2 * self.warps * _BLOCK * self.row_bytes

    @property
    def ring(self) -> PipelineSpec:
        """Ring with one packed tile, its scales and its zero points per stage.

        One thread loads a stage, and each warp releases it.
        """
        columns = self.warps * _BLOCK
        weight_bytes = self.warps * _BLOCK_BYTES * self.weight_bits // 4
        sizes = {"weight": weight_bytes, "scales": self.groups_per_tile * columns * _ELEMENT_BYTES}
        if self.has_zeros:
            sizes["zeros"] = self.groups_per_tile * columns
        return PipelineSpec(
            self.stages, tuple(Operand(name, size, size) for name, size in sizes.items()), consumer_arrivals=self.warps
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Description of shared memory in the opening comment of the generated source."""
        buffers = f"buffers: {2 * self.warps} x 64 rows x 64 columns, {self.row_bytes} bytes per row"
        return (buffers, f"after the buffers, at +{self.staging_bytes}:", *self.ring.notes())

    @property
    def smem_bytes(self) -> int:
        return self.staging_bytes + self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        ring, at = self.ring, self.staging_bytes
        return [
            ("buffers", 0, at),
            ("packed tiles", at, ring.stages * ring.stage_bytes),
            ("barriers", at + ring.barriers_offset, ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        return [(operand.name, operand.footprint_bytes) for operand in self.ring.operands]

    def check_target(self, target: Target) -> None:
        """Raise TargetError or ArgumentError unless the target has the kernel's features and enough shared memory."""
        for feature in ("tma", "stmatrix"):
            target.require(feature, "dequantize() on the GPU")
        self.ring.check_fits(target, other_bytes=self.staging_bytes)


def dense_pitch_bytes(n: int) -> int:
    """Return the row pitch of a dense weight, a multiple of 16 bytes because TMA stores whole 16-byte chunks."""
    return align_up(n * _ELEMENT_BYTES, TMA_ALIGNMENT_BYTES)


def dequantize(w: PackedWeight, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """Dequantize a weight to a dense matrix of the weight's dtype.

    ``x @ dequantize(w)`` equals ``marlin_gemm(x, w)`` except for rounding. The result is bitwise identical to
    ``w.dequantize(w.dtype)``.

    Parameters
    ----------
    w : PackedWeight
        The weight (K, N). The weight must be on a device, or on the host for backend "emulator" or "reference".
    out : array (K, N), optional
        The result, with the same dtype and on the same device as ``w``: a CuPy array, a torch tensor, or an object that
        supports DLPack or ``__cuda_array_interface__``. For a weight on the host, a NumPy array is also accepted. N
        must be a multiple of 8, rows must be contiguous, and address and pitch must be multiples of 16 bytes. By
        default, any N is supported, and the result is a new CuPy or NumPy array whose pitch is padded to a multiple of
        16 bytes.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the library of ``out``.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array (K, N)
        The dense weight.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the device, shape, dtype or layout of an array is invalid.
    LaunchError
        If the first call is made during graph capture, or if the process was forked.
    TargetError, CompileError, DriverError
        If no kernel exists for the GPU, or if the kernel does not compile or load.
    HazardError
        If the emulator finds a hazard.

    Examples
    --------
    >>> w = cudatma.quantize(np.ones((128, 64), np.float32))
    >>> cudatma.dequantize(w, backend="reference").shape
    (128, 64)
    """
    weight = weight_of(w)
    chosen = selected_backend(backend)
    if (w.device is None) == (chosen == "cuda"):
        allowed = f"{'a CUDA device' if chosen == 'cuda' else 'the host'} for backend {chosen!r}"
        raise ArgumentError(
            "w.device", place_name(w.device), allowed, device_remedy("move the weight with w.to_device()", w.device)
        )
    if out is None:
        out = _new_result(w, None if w.device is None else stream_handle(stream, "cupy", w.device))
    return run(DEQUANTIZE, (), out, (), stream=stream, backend=backend, weight=weight, resource=w)


class DenseProblem(NamedTuple):
    """Shape and format of a weight, and pitch of the result."""

    layer: LinearShape
    has_permutation: bool
    pitch_bytes: int
    tensor_scale: float

    @classmethod
    def of(cls, w: PackedWeight, out: ArrayInfo) -> DenseProblem:
        """Return the problem for a weight and for a result that check_dense() returned."""
        return cls(LinearShape.of(w), w.perm is not None, out.strides_bytes[0], w.tensor_scale)


class Dequantize(Operation[DenseProblem, DequantizeConfig]):
    """Operation of dequantize(). All inputs belong to the weight."""

    name: ClassVar[str] = "dequantize"
    inputs: ClassVar[tuple[str, ...]] = ()
    weight_arrays: ClassVar[tuple[str, ...]] = MarlinGemm.weight_arrays

    def check(
        self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any
    ) -> Checked[DenseProblem]:
        """Validate a call. ``resource`` is the weight."""
        info = check_dense(out, resource)
        return Checked(DenseProblem.of(resource, info), (), info, info.shape, info.dtype)

    def configure(self, problem: DenseProblem, gpu: Gpu, memo: dict[Any, Any]) -> DequantizeConfig:
        """Return a configuration with the most stages that fit in 99 KiB, so that two CTAs fit on an SM of SM90."""
        return _config(problem.layer, problem.has_permutation)

    def kernels(self, problem: DenseProblem, config: DequantizeConfig) -> tuple[tuple[str, Any], ...]:
        """Return the template and the configuration of the kernel."""
        return ((TEMPLATE, config),)

    def arguments(
        self, problem: DenseProblem, config: DequantizeConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the arguments of the launch."""
        return (dequantize_arguments(problem, config, resident[0]),)

    def reference(self, problem: DenseProblem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Dequantize with NumPy."""
        layer = problem.layer
        host_array(arrays["out"])[:, : layer.n] = host_weight(layer, arrays, problem.tensor_scale).dequantize(
            dtype=layer.dtype
        )


DEQUANTIZE = Dequantize()


@lru_cache(maxsize=64)
def _config(layer: LinearShape, has_permutation: bool) -> DequantizeConfig:
    stages = 2 if has_permutation else 3
    facts = {name: getattr(layer, name) for name in PROBLEM_FIELDS}
    return DequantizeConfig(**facts, has_permutation=has_permutation, stages=stages)


def dequantize_arguments(problem: DenseProblem, config: DequantizeConfig, resident: int) -> Arguments:
    """Return the arguments of the launch. ``resident`` is the number of CTAs that run at the same time."""
    layer = problem.layer
    k, n, columns = layer.k, layer.n, config.warps * _BLOCK
    k64, n64 = -(-k // _BLOCK), -(-n // _BLOCK)
    bits = layer.weight.bits
    shapes = part_shapes(k, n, layer.group_size, bits)
    maps = [Map("qweight", weight_tile_map_spec(row_blocks(k, bits), n64, bits // 4, config.warps))]
    tables = {"scales": layer.dtype} | ({"zeros": "uint8"} if layer.has_zeros else {})
    for name, dtype in tables.items():
        maps.append(Map(name, scale_map_spec(shapes[name], dtype, columns, config.groups_per_tile)))
    # The padding of a row is also written, because a store must not end inside a 16-byte chunk.
    width = dense_pitch_bytes(n) // _ELEMENT_BYTES
    place: tuple[Any, ...] = At("out"), problem.pitch_bytes, At("perm"), k
    if not config.has_permutation:
        box, strides = (_BLOCK, _BLOCK), (problem.pitch_bytes, _ELEMENT_BYTES)
        spec = TiledSpec.from_strided(
            0, (k, width), strides_bytes=strides, dtype=layer.dtype, box=box, axes=(1, 0), swizzle=Swizzle.B128
        )
        place = (Map("out", spec),)
    if layer.weight.has_tensor_scale:
        place = (*place, problem.tensor_scale)
    tiles_n = -(-n // columns)
    tiles = tiles_n * k64
    return Arguments(TEMPLATE, config, (*maps, *place, width, tiles_n, tiles), Sizes(min(tiles, resident)))


def on_host(
    w: PackedWeight, out: object, *, config: DequantizeConfig | None = None, resident: int = 132
) -> tuple[Arguments, dict[str, ArrayInfo]]:
    """Return the launch for a weight in host memory, and the launch's arrays by name.

    By default, ``config`` is the config that a call would use.
    """
    info = check_dense(out, w)
    problem = DenseProblem.of(w, info)
    config = config or _config(problem.layer, problem.has_permutation)
    return dequantize_arguments(problem, config, resident), {**weight_of(w).arrays, "out": info}


def check_dense(out: object, w: PackedWeight) -> ArrayInfo:
    """Return the caller's result including the padding of its rows, which the kernel also writes.

    Raises ArgumentError or ArgumentTypeError if the kernel cannot write the array.
    """
    info = describe(out, "out")
    if info.dtype.name != w.dtype or not info.dtype.isnative:
        raise ArgumentTypeError("out.dtype", str(info.dtype), w.dtype)
    if info.device != w.device:
        raise ArgumentError("out.device", place_name(info.device), f"{place_name(w.device)} (the device of w)")
    if info.shape != w.shape:
        raise ArgumentError("out.shape", info.shape, str(w.shape))
    if info.readonly:
        raise ArgumentError("out", "a read-only array", "a writable array")
    pitch, step = info.strides_bytes
    if step != _ELEMENT_BYTES and w.shape[1] > 1:
        raise ArgumentError("out.strides", info.strides_bytes, f"{_ELEMENT_BYTES} bytes in the last dimension")
    min_pitch = dense_pitch_bytes(w.shape[1])
    if w.shape[0] > 1 and (pitch < min_pitch or pitch % TMA_ALIGNMENT_BYTES):
        allowed = f"a multiple of {TMA_ALIGNMENT_BYTES} bytes, at least {min_pitch}, between rows"
        raise ArgumentError("out.strides", info.strides_bytes, allowed, "omit out or pass an array with wider rows")
    if info.pointer % TMA_ALIGNMENT_BYTES:
        allowed = f"a multiple of {TMA_ALIGNMENT_BYTES} bytes"
        raise ArgumentError("out.pointer", hex(info.pointer), allowed, "omit out or pass an aligned array")
    strides = pitch if w.shape[0] > 1 else min_pitch, _ELEMENT_BYTES
    return replace(info, shape=(w.shape[0], min_pitch // _ELEMENT_BYTES), strides_bytes=strides)


def _new_result(w: PackedWeight, stream: int | None = None) -> Any:
    """Return a new (K, N) array whose rows are padded to multiples of 16 bytes.

    See empty_like_library() for ``stream``.
    """
    k, n = w.shape
    shape, dtype = (k, dense_pitch_bytes(n) // _ELEMENT_BYTES), activation_type(w.dtype).numpy
    if w.device is None:
        return np.empty(shape, dtype)[:, :n]
    return empty_in_cupy(shape, np.dtype(dtype), w.device, stream)[:, :n]


def dump_configs(target: Target) -> list[DequantizeConfig]:
    """Return the representative configs, or an empty list if the target cannot run them."""
    if not target.has("tma") or not target.has("stmatrix"):
        return []
    return [
        DequantizeConfig("float16", 128, False, stages=3),
        DequantizeConfig("bfloat16", 32, True, stages=3),
        DequantizeConfig("float16", 64, True, True),
        DequantizeConfig("bfloat16", -1, False, True),
        DequantizeConfig("bfloat16", 16, False, format="nvfp4", stages=3),
        DequantizeConfig("float16", -1, False, format="fp8", stages=3),
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
    """Return a sample launch that dequantizes a random weight, for `cudatma emulate dequantize`.

    ``zeros`` adds zero points to the weight, and ``permute`` packs its rows in a different order. ``blocks`` is the
    maximum number of CTAs. Raises ArgumentError for an invalid argument.
    """
    if min(k, n, blocks) < 1:
        raise ArgumentError("k, n, blocks", (k, n, blocks), "at least 1 each")
    random = np.random.default_rng(0)
    values = random.standard_normal((k, n), np.float32)
    w = quantize(values, group_size=group_size, symmetric=not zeros, dtype=dtype)
    if permute:
        w = replace(w, perm=random.permutation(k).astype(np.int32))
    out = _new_result(w)
    config = replace(_config(LinearShape.of(w), bool(permute)), warps=2)
    planned, arrays = on_host(w, out, config=config, resident=blocks)
    config.check_target(target)

    def error() -> float:
        return float((out.view(np.uint16) != w.dequantize(dtype=dtype).view(np.uint16)).mean())

    grid = f"at most {counted(blocks, 'CTA')} of {config.threads}"
    title = f"dequantized weight, {k} x {n}, {dtype}, groups of {group_size}, {grid}"
    return Sample(title, planned.kernel(target), partial(planned.emulate, target, arrays), error, 0.0)
