"""vLLM's W4A16 kernels Marlin and Machete, for fp16 or bf16 activations and symmetric weights with group size 128.

The kernels are operators in ``_C_stable_libtorch.abi3.so`` from vLLM's wheel. This library is loaded without importing
vLLM. ``--vllm`` specifies its folder. The calls match version 0.25.1, whose library requires torch 2.11:

    pip download --no-deps vllm==0.25.1
    unzip -d FOLDER vllm-*.whl 'vllm/_C_stable_libtorch.abi3.so' '*.dist-info/METADATA'    # --vllm FOLDER/vllm

Marlin runs with the tile that vLLM chooses. All schedules of Machete are tried, and the fastest schedules are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE
from benchmarks.rivals.common import Int4Rival, cloned, fastest

LIBRARY = "_C_stable_libtorch.abi3.so"
#: vLLM's number for unsigned int4 with a bias of 8 (``scalar_types.uint4b8.id``).
_UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
_LOCKS_PER_SM = 4
#: Schedules with small tiles are not tried for many tokens, because they read the weights once per tile.
_SMALL_TILE, _MAX_SMALL_TILES = 64, 8


def version_of(folder: Path | None) -> str:
    """Return the version of the wheel unpacked in this folder or its parent, or "" if the version is unknown."""
    places = [str(folder), str(folder.resolve().parent)] if folder else []
    return next((wheel.version for wheel in distributions(name="vllm", path=places)), "")


def load(folder: Path | None) -> Any:
    """Load the library in the folder and return ``torch.ops._C``. Raises OSError if it cannot be loaded."""
    import torch

    if folder is None:
        raise FileNotFoundError(f"pass the folder of {LIBRARY} with --vllm (benchmarks/rivals/vllm.py)")
    torch.ops.load_library(str(folder.resolve() / LIBRARY))
    return torch.ops._C


def marlin_scales(scales: Any) -> Any:
    """Reorder scales (K / 128, N) for Marlin's fragments by an 8 x 8 transposition of every 64 columns."""
    groups, n = scales.shape
    return scales.reshape(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n)


class _Vllm(Int4Rival):
    """A layer packed by vLLM's operators."""

    def __init__(self, layer: Layer, m_values: Sequence[int], folder: Path | None, ops: Any = None) -> None:
        import torch

        super().__init__(layer)
        self.ops = load(folder) if ops is None else ops
        self.rotate(self._pack(self.codes.view(torch.int32), self.scales), cloned)

    def _pack(self, words: Any, scales: Any) -> tuple[Any, Any]:
        """Pack int32 words (N, K / 8) and scales (K / 128, N)."""
        raise NotImplementedError


class Marlin(_Vllm):
    """vLLM's Marlin on one layer, with the tile that vLLM chooses and with fp32 reduction."""

    name = "marlin"

    def _pack(self, words: Any, scales: Any) -> tuple[Any, Any]:
        import torch

        sms = torch.cuda.get_device_properties(words.device).multi_processor_count if words.is_cuda else 1
        self.locks = torch.zeros(sms * _LOCKS_PER_SM, dtype=torch.int32, device=words.device)
        no_order = torch.empty(0, dtype=torch.int32, device=words.device)
        gptq = words.t().contiguous()
        packed = self.ops.gptq_marlin_repack(gptq, no_order, self.layer.k, self.layer.n, 4, False)
        return packed, marlin_scales(scales).contiguous()

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        k, n, x, out = self.layer.k, self.layer.n, self.x[:m], self.out[:m]

        def run(index: int) -> Any:
            weight, scales = self.weights[index % len(self.weights)]
            # These arguments select no bias, activation scales, global scale, zero points, group indices or
            # permutation, a complete K, no atomic additions, fp32 reduction, and no floating-point zero points.
            rest = (None, None, None, None, None, self.locks, _UINT4B8, m, n, k, True, False, True, False)
            self.ops.marlin_gemm(x, out, weight, None, scales, *rest)
            return out

        return [self.checked(self.name, m, run)]


class Machete(_Vllm):
    """vLLM's Machete on one layer, with the fastest of its schedules."""

    name = "machete"
    multiple_of_n = 128

    def _pack(self, words: Any, scales: Any) -> tuple[Any, Any]:
        dtype = scales.dtype
        return self.ops.machete_prepack_B(words.t(), dtype, _UINT4B8, dtype), scales

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """Return the ``count`` fastest schedules. Each schedule that cannot run is recorded as an error."""
        self.errors.clear()
        dtype = self.x.dtype
        schedules = self.ops.machete_supported_schedules(dtype, _UINT4B8, dtype, None, None, None, None)
        makers = {}
        for schedule in schedules:  # "128x16_1x1x1_...": channels x tokens of a tile, then cluster
            tile = int(schedule.partition("_")[0].partition("x")[2])
            if tile >= _SMALL_TILE or m <= _MAX_SMALL_TILES * tile:
                name = f"{self.name} {schedule}"
                makers[name] = partial(self._contender, name, schedule, m)
        return fastest(stream, makers, self.layer.expected_us(m), count, self.errors)

    def _contender(self, name: str, schedule: str, m: int) -> Contender:
        x = self.x[:m]
        out: list[Any] = []

        def run(index: int) -> Any:
            weight, scales = self.weights[index % len(self.weights)]
            # The operator allocates its result. Free the previous result, so that all launches of a graph write to the
            # same memory, and keep this result alive while the graph exists.
            out.clear()
            out.append(self.ops.machete_mm(x, weight, _UINT4B8, None, scales, None, GROUP_SIZE, None, None, schedule))
            return out[0]

        return self.checked(name, m, run)
