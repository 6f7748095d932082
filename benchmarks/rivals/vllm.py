"""vLLM's W4A16 kernels, Marlin (fp16) and Machete (fp16, bf16), without vLLM: group 128, symmetric.

They come from libraries in a folder that ``--vllm`` names. To build them (nvcc 13, some 20 minutes on one core, no
GPU), with vLLM's source distribution, unpacked, and a checkout of CUTLASS:

    curl -LO https://files.pythonhosted.org/.../vllm-0.33.0.tar.gz      # "Download files" of pypi.org/project/vllm
    git clone --depth 1 https://github.com/NVIDIA/cutlass               # 4.7
    benchmarks/rivals/vllm_build/build.sh vllm-0.33.0 cutlass FOLDER    # FOLDER/lib*.so, VERSION

The folder travels to the machine with the GPU. Marlin runs what vLLM chooses. Machete runs every tile that vLLM's
heuristic knows, and the fastest take part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE, filled, packed_bytes, random_words, to_torch
from benchmarks.plan import expected_us
from benchmarks.rivals.check import check
from benchmarks.rivals.cublas import current_stream
from benchmarks.rivals.fastest import fastest
from benchmarks.rivals.tinygemm import abs_scales
from cudatma.dtypes import BFLOAT16

#: Marlin's scratch: fp32 partial sums of a tile of 64 tokens for each SM, and locks, as vLLM makes them.
_PARTIALS_PER_SM, _LOCKS_PER_SM = 64 * 256, 4
#: A tile of few tokens is no choice for many: it would read the weights once for each.
_MOST_TILES, _LARGE_TILE = 8, 64

_MARLIN = {
    "marlin_error": (c_char_p, ()),
    "marlin_repack": (c_int, (c_void_p, c_void_p, c_int, c_int, c_void_p)),
    "marlin_gemm": (c_int, (*[c_void_p] * 6, *[c_int] * 5, c_void_p)),
}
_MACHETE = {
    "machete_count": (c_int, ()),
    "machete_name": (c_char_p, (c_int,)),
    "machete_tokens": (c_int, (c_int,)),
    "machete_workspace": (c_size_t, (*[c_int] * 5,)),
    "machete_prepack": (c_int, (c_void_p, c_void_p, c_int, c_int, c_void_p)),
    "machete_run": (c_int, (c_int, *[c_void_p] * 4, *[c_int] * 4, c_void_p, c_void_p)),
}


def version_of(folder: Path | None) -> str:
    """Which vLLM the libraries of a folder were built from: ``"vLLM 0.33.0"``; empty where it does not say."""
    told = folder / "VERSION" if folder else None
    return told.read_text().strip() if told and told.is_file() else ""


def load(name: str, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]], folder: Path | None, library: Any) -> Any:
    """A library of the folder with its functions' types declared. Raises OSError where it is not there."""
    if library is None:
        if folder is None:
            raise FileNotFoundError("name the folder of its library with --vllm (benchmarks/rivals/vllm.py)")
        library = ctypes.CDLL(str((folder / f"lib{name}.so").resolve()))
    for function, (result, arguments) in signatures.items():
        made = getattr(library, function)
        made.restype, made.argtypes = result, arguments
    return library


def address(array: Any) -> int:
    return int(array.data.ptr)


def processors() -> int:
    """SMs of the current device."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


def dense_weight(xp: Any, words: Any, scales: Any) -> Any:
    """(K, N), of the type of scales: the weight that ``words`` (N, K / 8), eight codes along K from the low nibble on,
    and scales (K / 128, N) mean: (code - 8) * scale."""
    shifts = xp.arange(0, 32, 4, dtype=xp.uint32)
    codes = (words.view(xp.uint32)[:, :, None] >> shifts) & xp.uint32(15)
    values = codes.astype(xp.float16).reshape(len(words), -1) - xp.float16(8)
    if scales.dtype != BFLOAT16:
        return values.T * xp.repeat(scales, GROUP_SIZE, axis=0)
    wide = (scales.view(xp.uint16).astype(xp.uint32) << xp.uint32(16)).view(xp.float32)
    bits = (values.T * xp.repeat(wide, GROUP_SIZE, axis=0)).view(xp.uint32)
    bits += xp.uint32(0x7FFF) + ((bits >> xp.uint32(16)) & xp.uint32(1))  # to the nearest, ties to even
    return (bits >> xp.uint32(16)).astype(xp.uint16).view(BFLOAT16)


def marlin_scales(scales: Any) -> Any:
    """Scales (K / 128, N) in the order of Marlin's fragments: within 64 columns an 8 x 8 transposition."""
    groups, n = scales.shape
    return scales.reshape(groups, n // 64, 8, 8).swapaxes(2, 3).reshape(groups, n)


class _Weights:
    """One layer's weight, packed in as many copies as it takes to leave L2, and the dense one that it means.

    pack: (words, scales) -> the packed pair; its launches go to the current stream.
    """

    def __init__(self, layer: Layer, multiple_of_n: int, pack: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        import cupy

        k, n = layer.k, layer.n
        if k % GROUP_SIZE or n % multiple_of_n:
            raise ValueError(f"K = {k} is no multiple of {GROUP_SIZE}, or N = {n} none of {multiple_of_n}")
        # Any code is a valid weight. Scales in a band like that of our own weights.
        words = filled(cupy, (n, k // 8), random_words(cupy, 1 << 20, 6)).view(cupy.int32)
        scales = filled(cupy, (k // GROUP_SIZE, n), abs_scales(cupy, layer.dtype))
        packed, scales_as_packed = pack(words, scales)
        copies = copies_for(packed_bytes(k, n)) - 1
        self.arrays = [(packed, scales_as_packed), *((packed.copy(), scales_as_packed.copy()) for _ in range(copies))]
        self.addresses = [(address(weight), address(scale)) for weight, scale in self.arrays]
        self.reference = to_torch(dense_weight(cupy, words, scales))


class _Vllm:
    """What both have in common: checked and made contenders. errors: what of it cannot run, anew for each cell."""

    def __init__(self, layer: Layer, weights: _Weights) -> None:
        self.layer, self.weights, self.errors = layer, weights, dict[str, str]()

    def checked(self, name: str, run: Callable[[int], None], m: int) -> Contender:
        """The contender, after its result was compared. Raises what its launch raises, or that it is wrong."""
        layer, copies = self.layer, len(self.weights.addresses)
        layer.out[:m].view("uint16").fill(0)  # as integers: not every CuPy fills bf16
        run(0)
        check(to_torch(layer.out[:m]), to_torch(layer.x[:m]), self.weights.reference)
        nbytes = packed_bytes(layer.k, layer.n)
        return Contender(name, run, copies, launches_for(nbytes, copies, expected_us(layer.k, layer.n, m)))


class Marlin(_Vllm):
    """vLLM's Marlin on one layer, with the tile that vLLM chooses and its fp32 reduction."""

    name = "marlin"

    def __init__(self, layer: Layer, m_values: Sequence[int], folder: Path | None, library: Any = None) -> None:
        import cupy

        if layer.dtype != "float16":
            raise ValueError("fp16 only")
        self.library = load(self.name, _MARLIN, folder, library)
        self.sms = processors()
        self.partials = cupy.zeros(self.sms * _PARTIALS_PER_SM, cupy.float32)
        self.locks = cupy.zeros(self.sms * _LOCKS_PER_SM, cupy.int32)
        super().__init__(layer, _Weights(layer, 64, self._pack))

    def _pack(self, words: Any, scales: Any) -> tuple[Any, Any]:
        """GPTQ's (K / 8, N) to Marlin's (K / 16, 2 N)."""
        import cupy

        k, n = words.shape[1] * 8, words.shape[0]
        gptq = cupy.ascontiguousarray(words.T)
        packed = cupy.zeros((k // 16, 2 * n), cupy.int32)
        self._call("marlin_repack", address(gptq), address(packed), k, n, current_stream())
        return packed, cupy.ascontiguousarray(marlin_scales(scales))

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        k, n, addresses = self.layer.k, self.layer.n, self.weights.addresses
        x, out, partials, locks = map(address, (self.layer.x, self.layer.out, self.partials, self.locks))

        def run(index: int) -> None:
            weight, scales = addresses[index % len(addresses)]
            arrays = (x, weight, out, partials, scales, locks)
            self._call("marlin_gemm", *arrays, m, n, k, GROUP_SIZE, self.sms, current_stream())

        return [self.checked(self.name, run, m)]

    def _call(self, name: str, *arguments: int) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} returned {code} {(self.library.marlin_error() or b'').decode()}".strip())


class Machete(_Vllm):
    """vLLM's Machete on one layer: the fastest of its schedules, named by tile (channels x tokens) and cluster."""

    name = "machete"

    def __init__(self, layer: Layer, m_values: Sequence[int], folder: Path | None, library: Any = None) -> None:
        name = self.name if layer.dtype == "float16" else f"{self.name}_bf16"
        self.library = load(name, _MACHETE, folder, library)
        numbers = range(self.library.machete_count())
        #: Number -> (name, tokens of a tile).
        self.schedules = {i: (self.library.machete_name(i).decode(), self.library.machete_tokens(i)) for i in numbers}
        super().__init__(layer, _Weights(layer, 128, self._pack))

    def _pack(self, words: Any, scales: Any) -> tuple[Any, Any]:
        import cupy

        n, eighth_of_k = words.shape
        packed = cupy.zeros_like(words)
        self._call("machete_prepack", address(words), address(packed), n, 8 * eighth_of_k, current_stream())
        return packed, scales

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """The fastest ``count`` in a short run of all. A schedule that cannot run is an error of its own."""
        self.errors.clear()
        makers = {
            f"{self.name} {name}": partial(self._schedule, number, f"{self.name} {name}", m)
            for number, (name, tile) in self.schedules.items()
            if tile >= _LARGE_TILE or m <= _MOST_TILES * tile
        }
        return fastest(stream, makers, expected_us(self.layer.k, self.layer.n, m), count, self.errors)

    def _schedule(self, number: int, name: str, m: int) -> Contender:
        import cupy

        k, n, addresses = self.layer.k, self.layer.n, self.weights.addresses
        workspace = cupy.zeros(max(1, self.library.machete_workspace(number, m, n, k, GROUP_SIZE)), cupy.uint8)
        x, out = address(self.layer.x), address(self.layer.out)

        def run(index: int) -> None:
            weight, scales = addresses[index % len(addresses)]
            sizes = (m, n, k, GROUP_SIZE)
            self._call("machete_run", number, x, weight, scales, out, *sizes, address(workspace), current_stream())

        return self.checked(name, run, m)

    def _call(self, name: str, *arguments: int) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")
