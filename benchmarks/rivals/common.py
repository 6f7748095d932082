"""Code for all competing libraries: operands of int4 layers, the check of a result, and the choice of variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import Contender, copies_for, quick
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE, filled, packed_bytes, random_numbers, random_words, to_torch
from benchmarks.report import failure

#: Upper limit on ||out - reference|| / ||reference||. 16-bit results differ by at most 1e-2.
TOLERANCE = 2e-2
#: Number of rows to compare at the beginning and at the end, because errors appear in the first or the last tile.
ROWS = 16
#: Approximate total duration, in microseconds, of the launches that choose among variants.
_CHOOSING_US = 4000.0


def check(out: Any, x: Any, weight: Any) -> None:
    """Compare rows of ``out`` (M, N) with ``x`` (M, K) @ ``weight`` (K, N), torch tensors of the same 16-bit type.

    Raises ArithmeticError if the results differ or if the result contains a NaN.
    """
    rows = sorted({*range(min(ROWS, len(x))), *range(max(0, len(x) - ROWS), len(x))})
    reference = (x[rows] @ weight).float()
    error = float((out[rows].float() - reference).norm() / reference.norm())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"the relative error of the result must be at most {TOLERANCE:g}, got {error:.3g}")


def fastest(
    stream: Any, makers: Mapping[str, Callable[[], Contender]], expected_us: float, count: int, errors: dict[str, str]
) -> list[Contender]:
    """Return at most ``count`` contenders, the fastest in a short run first.

    If a variant cannot be created or run, the reason is added to ``errors``.
    """
    times: list[tuple[float, Contender]] = []
    for name, make in makers.items():
        try:
            contender = make()
            launches = max(2, min(contender.launches, int(_CHOOSING_US / expected_us)))
            measured = quick(stream, contender, launches)
            if (us := measured.us(contender.name)) is not None:
                times.append((us, contender))
            errors |= measured.errors
        except Exception as error:
            errors[name] = failure(error)
    return [contender for _, contender in sorted(times, key=lambda item: item[0])[:count]]


class Int4Rival:
    """A library on one symmetric int4 layer with group size 128.

    Attributes
    ----------
    name : str
        A key of rivals.RIVALS.
    errors : dict of str to str
        Maps each part that cannot run to the reason.
    multiple_of_k, multiple_of_n : int
        Numbers that must divide the K and N of a layer.
    codes : torch.Tensor of uint8, shape (N, K / 2)
        Quantized values with even k in the low nibble. All libraries use the same values.
    scales : torch.Tensor, shape (K / 128, N)
        Positive scales in a range similar to that of our weights.
    reference : torch.Tensor, shape (K, N)
        The dense weight.

    Raises
    ------
    ValueError
        If the library does not support the layer.
    """

    name: str
    is_bf16_only = False
    multiple_of_k, multiple_of_n = GROUP_SIZE, 64

    def __init__(self, layer: Layer) -> None:
        import cupy
        import torch

        k, n = layer.k, layer.n
        if self.is_bf16_only and layer.dtype != "bfloat16":
            raise ValueError("only bf16 is supported")
        if k % self.multiple_of_k or n % self.multiple_of_n:
            raise ValueError(
                f"K must be a multiple of {self.multiple_of_k} and N a multiple of {self.multiple_of_n}, "
                f"got K = {k} and N = {n}"
            )
        self.layer, self.errors = layer, dict[str, str]()
        self.x, self.out = to_torch(layer.x), to_torch(layer.out)
        words = filled(cupy, (n, k // 8), random_words(cupy, 1 << 20, 6))
        self.codes = torch.as_tensor(words.view(cupy.uint8), device=self.x.device)
        numbers = random_numbers(cupy, 1 << 16, layer.dtype, 2, 1 / 64)
        positive = (numbers.view(cupy.uint16) & cupy.uint16(0x7FFF)).view(numbers.dtype)
        self.scales = to_torch(filled(cupy, (k // GROUP_SIZE, n), positive))
        self.reference = dense_weight(self.codes, self.scales)
        self.weights: list[Any] = []

    def rotate(self, weight: Any, copy: Callable[[Any], Any]) -> None:
        """Create copies of a packed weight that together exceed L2."""
        count = copies_for(packed_bytes(self.layer.k, self.layer.n))
        self.weights = [weight, *(copy(weight) for _ in range(count - 1))]

    def checked(self, name: str, m: int, run: Callable[[int], Any]) -> Contender:
        """Return a contender. Raises ArithmeticError if the result of its first launch is wrong."""
        self.out[:m].zero_()
        check(run(0), self.x[:m], self.reference)
        return self.layer.contender(name, run, self.weights, m)


def dense_weight(codes: Any, scales: Any) -> Any:
    """Return the weight (K, N) for codes (N, K / 2), with even k in the low nibble, and scales (K / 128, N)."""
    import torch

    values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).to(scales.dtype) - 8
    return values.t() * scales.repeat_interleave(GROUP_SIZE, dim=0)


def cloned(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tensor.clone() for tensor in tensors)
