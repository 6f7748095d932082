"""The class MarlinLinear, a linear layer with a packed weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma import context
from cudatma.arrays import describe, place_name
from cudatma.backend import selected_backend
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.engine import launch_of
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, marlin_gemm, weight_of
from cudatma.kernels.marlin.operands import check_weight
from cudatma.kernels.marlin.warm_up import dense_problem, warm_up
from cudatma.kernels.workspace import stream_workspace
from cudatma.library_streams import stream_handle
from cudatma.quantization import PackedWeight, quantize_linear
from cudatma.quantization.namespaces import host_array, is_float
from cudatma.target import detect


class MarlinLinear:
    """A callable linear layer y = x W + b with a packed weight.

    Parameters
    ----------
    weight : PackedWeight
        The weight (K, N). ``in_features`` is K, and ``out_features`` is N.
    bias : array (N,), optional
        The bias, with the same dtype and on the same device as the weight.
    batch_invariant : bool, default False
        Whether the result of each row is bitwise identical at every M; see ``marlin_gemm``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the bias does not match the weight.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: Any = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.weight = check_weight(weight)
        self.batch_invariant = batch_invariant
        if type(batch_invariant) is not bool:
            raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
        self.in_features, self.out_features = weight.shape
        if bias is not None:
            info = describe(bias, "bias")
            if info.dtype.name != weight.dtype:
                raise ArgumentTypeError("bias.dtype", info.dtype.name, weight.dtype, "convert the bias")
            if info.shape != (self.out_features,) or info.device != weight.device:
                got = f"shape {info.shape} on {place_name(info.device)}"
                allowed = f"an array of shape ({self.out_features},) on {place_name(weight.device)}"
                raise ArgumentError("bias", got, allowed)
        self.bias = bias

    @classmethod
    def from_dense(
        cls,
        weight: Any,
        bias: Any = None,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: str = "float16",
        clip_search: bool = False,
        format: str = "int4",
    ) -> MarlinLinear:
        """Quantize the weight (N, K) of a dense layer, as in torch and Hugging Face.

        Parameters
        ----------
        weight : array (N, K)
            The dense weight. The new layer is on the same device.
        bias : array (N,), optional
            The bias. Default: no bias.
        group_size, symmetric, dtype, clip_search, format : int, bool, str, bool, str
            Options of ``quantize``.

        Returns
        -------
        MarlinLinear
            The quantized layer.
        """
        options: dict[str, Any] = {"group_size": group_size, "symmetric": symmetric, "clip_search": clip_search}
        packed = quantize_linear(weight, dtype=dtype, format=format, **options)
        if bias is None:
            return cls(packed)
        values = converted_bias(bias, dtype)
        return cls(packed, values if packed.device is None else _upload(values, packed.device))

    def to_device(self, device: int | None = None) -> MarlinLinear:
        """Return this layer with its weight and bias on a device.

        Parameters
        ----------
        device : int, optional
            Ordinal of the device. Default: CuPy's current device.

        Returns
        -------
        MarlinLinear
            The layer on the device.
        """
        weight = self.weight.to_device(device)
        if weight is self.weight or self.bias is None:
            return MarlinLinear(weight, self.bias, batch_invariant=self.batch_invariant)
        bias = _upload(self.bias, weight.device or 0)
        return MarlinLinear(weight, bias, batch_invariant=self.batch_invariant)

    def __call__(self, x: Any, *, out: Any = None, stream: Any = None, **options: Any) -> Any:
        """Compute y = x W + b.

        Parameters
        ----------
        x : array (..., K)
            Activations; see ``marlin_gemm``.
        out : array (..., N), optional
            The result. Default: a new array.
        stream : stream, optional
            Stream of the launch. Default: the current stream of the library of ``x``.
        **options
            Other options of ``marlin_gemm``, including ``backend``.

        Returns
        -------
        array (..., N)
            The result y.
        """
        return marlin_gemm(
            x, self.weight, out=out, bias=self.bias, stream=stream, batch_invariant=self.batch_invariant, **options
        )

    def warm_up(self, m_values: int | Iterable[int], *, stream: Any = None) -> None:
        """Compile and load the kernels that later calls need, and reserve memory for these calls.

        Call this method at startup, so that no request waits for the compiler, or before a graph capture, during which
        kernels cannot be loaded.

        Parameters
        ----------
        m_values : int or iterable of int
            An int n prepares calls with 1 to n rows of x in any layout, and compiles missing kernels in parallel. An
            iterable prepares only calls with these row counts, whose rows are dense and aligned to 16 bytes.
        stream : stream, optional
            Stream whose workspace is reserved. Default: the current stream.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If a number is out of range, or if the weight is in host memory.
        """
        batches = checked_m_values(m_values)
        if self.weight.device is None:
            if selected_backend() != "cuda":
                return
            raise ArgumentError("weight.device", "the host", "a CUDA device", "move the layer with to_device()")
        device = self.weight.device
        detect(device)  # Called first, so that a missing driver is reported.
        if isinstance(m_values, int) and m_values:
            warm_up([self.weight], m_values, batch_invariant=self.batch_invariant)
        handle = stream_handle(stream, "cupy", device)
        space = stream_workspace(device, handle)
        for m in filter(None, batches):
            problem = dense_problem(self.weight, m, batch_invariant=self.batch_invariant)
            launch = launch_of(MARLIN_GEMM, problem, device, handle, weight=weight_of(self.weight))
            if launch.rows_bytes:
                with space.rows.lock:
                    space.rows.room(launch.rows_bytes)

    def __repr__(self) -> str:
        invariant = ", batch_invariant=True" if self.batch_invariant else ""
        return f"MarlinLinear({self.weight!r}, bias={self.bias is not None}{invariant})"


def converted_bias(bias: Any, dtype: str) -> NDArray[Any]:
    """Return a dense layer's bias in host memory, rounded to the weight's dtype.

    Raises ArgumentError if a value exceeds the range of this dtype.
    """
    values, kind = host_array(bias, "bias"), activation_type(dtype)
    if not is_float(values.dtype):
        raise ArgumentTypeError("bias.dtype", str(values.dtype), "float16, bfloat16, float32 or float64")
    with np.errstate(over="ignore"):
        rounded = values.astype(kind.numpy)
    if not bool(np.isfinite(rounded).all()):
        got = f"{float(values[~np.isfinite(rounded)][0]):g}"
        raise ArgumentError("bias", got, f"finite in {kind.name}", "pass dtype='bfloat16' or correct the bias")
    return rounded


def _upload(values: Any, device: int) -> Any:
    import cupy

    with context.using(device), cupy.cuda.Device(device):
        return cupy.asarray(values)


def checked_m_values(m_values: Any) -> list[int]:
    """Return the values of M, or a list with only the bound. Raises ArgumentError or ArgumentTypeError."""
    if type(m_values) is int:
        m_values = [m_values]
    if not isinstance(m_values, Iterable) or isinstance(m_values, str | bytes):
        raise ArgumentTypeError("m_values", type(m_values).__name__, "an int or a sequence of ints")
    batches = list(m_values)
    for m in batches:
        if type(m) is not int or not 0 <= m < 2**31:
            raise ArgumentError("m_values", m, "an int, or a sequence of ints, from 0 to 2**31 - 1")
    return batches
