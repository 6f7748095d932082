"""The class MarlinLinear, a torch module with a quantized weight and an optional bias."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.integrations.torch.operators import MARLIN_GEMM
from cudatma.integrations.torch.packed_module import PackedModule, bias_tensor
from cudatma.integrations.torch.weights import packed_weight, weight_tensors
from cudatma.kernels.marlin.dequantize import dequantize
from cudatma.kernels.marlin.linear import MarlinLinear as ArrayLayer
from cudatma.kernels.marlin.linear import checked_m_values
from cudatma.kernels.marlin.operands import check_weight
from cudatma.kernels.marlin.warm_up import warm_up as warm_up_weights
from cudatma.kernels.warm_up import check_max_m
from cudatma.pipeline import align_up
from cudatma.quantization import (
    PackedWeight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_marlin,
    quantize_linear,
)
from cudatma.quantization.layout_v1 import part_shapes
from cudatma.quantization.weight_format import weight_format


class MarlinLinear(PackedModule):
    """A linear layer y = x W + b with a quantized weight, for inference.

    MarlinLinear replaces torch.nn.Linear and has no backward pass. The constructor leaves the buffers uninitialized.
    Use ``from_linear``, ``from_packed`` or an importer to create a layer with a weight.

    Parameters
    ----------
    in_features : int
        Number of inputs, K.
    out_features : int
        Number of outputs, N.
    bias : bool, default True
        Whether the layer has a bias.
    group_size : int, optional
        Number of rows of K that share a scale; see ``cudatma.quantize``. Default: 128, or the only size of the format.
    symmetric : bool, default True
        Whether the weight has no zero points. Only int4 weights may have zero points.
    act_order : bool, default False
        Whether the weight is in activation order, so that the columns of the activations are permuted.
    dtype : torch.dtype, default torch.float16
        Type of activations, scales and bias, float16 or bfloat16. The type cannot be changed later, because it
        determines the quantized weight.
    device : torch.device or str, optional
        Device of the buffers. Default: torch's default device.
    batch_invariant : bool, default False
        Whether each row is bitwise identical at every M; see ``marlin_gemm``.
    format : str, default "int4"
        Format of the weight: ``"int4"``, ``"mxfp4"``, ``"nvfp4"``, ``"fp8"`` or ``"int8"``.

    Raises
    ------
    ArgumentError, ArgumentTypeError, QuantizationError
        If an argument is invalid.

    Notes
    -----
    The weight's arrays are the buffers ``qweight`` (uint8), ``scales`` (the layer's dtype), ``zeros`` (uint8) and
    ``perm`` (int32). ``zeros`` is None if the weight is symmetric. ``perm`` is None if the weight has no activation
    order. ``bias`` is a buffer or None. Only nvfp4 layers have the buffer ``tensor_scale`` (float32, zero-dimensional).
    ``state_dict()`` contains only these tensors. ``load_state_dict()`` fills a module that was created
    with the same arguments. If the module is on the meta device, pass ``assign=True``.

    ``.half()``, ``.float()`` and ``.to(dtype)`` raise ArgumentTypeError if the dtype differs from that of the layer.
    ``.to(device)`` and ``.cuda()`` move the module.

    Examples
    --------
    >>> import torch
    >>> from cudatma.integrations.torch import MarlinLinear
    >>> layer = MarlinLinear.from_linear(torch.nn.Linear(256, 128))
    >>> layer
    MarlinLinear(in_features=256, out_features=128, bias=True, group_size=128, symmetric=True, dtype=torch.float16)
    >>> {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    {'qweight': (8, 2048), 'scales': (2, 128), 'bias': (128,)}
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        act_order: bool = False,
        dtype: Any = torch.float16,
        device: Any = None,
        batch_invariant: bool = False,
        format: str = "int4",
    ) -> None:
        super().__init__()
        kind = weight_format(format)
        group_size = kind.default_group_size if group_size is None else group_size
        kind.check_group_size(group_size)
        kind.check_symmetric(symmetric)
        for field, size in (("in_features", in_features), ("out_features", out_features)):
            if type(size) is not int or not 1 <= size < 2**31:
                raise ArgumentError(field, size, "an int from 1 to 2**31 - 1")
        if type(batch_invariant) is not bool:
            raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ArgumentTypeError("dtype", str(dtype), "torch.float16, torch.bfloat16")
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.batch_invariant, self.format = batch_invariant, format
        shapes = part_shapes(in_features, out_features, group_size, kind.bits)
        shapes |= {"bias": (out_features,), "tensor_scale": ()}
        dtypes = {"qweight": torch.uint8, "scales": dtype, "zeros": torch.uint8, "perm": torch.int32, "bias": dtype}
        dtypes["tensor_scale"] = torch.float32
        absent = {"zeros": symmetric, "perm": not act_order, "bias": not bias}
        absent["tensor_scale"] = not kind.has_tensor_scale
        # torch.export miscounts buffers if a buffer that is None precedes another buffer.
        for name in sorted(shapes, key=lambda name: absent.get(name, False)):
            buffer = None if absent.get(name) else torch.empty(shapes[name], dtype=dtypes[name], device=device)
            self.register_buffer(name, buffer)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Any = None, *, batch_invariant: bool = False) -> MarlinLinear:
        """Create a layer from a copy of a PackedWeight, on the device of the weight.

        Parameters
        ----------
        weight : PackedWeight
            The weight, of shape (K, N).
        bias : array_like, shape (N,), optional
            Floating-point bias, as an array from any library. Default: no bias.
        batch_invariant : bool, default False
            See ``marlin_gemm``.

        Returns
        -------
        MarlinLinear
            The layer.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If an argument is invalid.
        """
        k, n = check_weight(weight).shape
        parts = weight_tensors(weight)
        layer = cls(
            k,
            n,
            bias is not None,
            group_size=weight.group_size,
            symmetric=weight.symmetric,
            act_order=weight.perm is not None,
            dtype=parts["scales"].dtype,
            device="meta",
            batch_invariant=batch_invariant,
            format=weight.format,
        )
        if bias is not None:
            parts["bias"] = bias_tensor(bias, (n,), weight.dtype).to(parts["scales"].device)
        for name, tensor in parts.items():
            setattr(layer, name, tensor)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: Any,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: Any = None,
        clip_search: bool = False,
        batch_invariant: bool = False,
        format: str = "int4",
    ) -> MarlinLinear:
        """Create a layer by quantizing a torch.nn.Linear, on the device of its weight.

        Parameters
        ----------
        linear : torch.nn.Linear
            The float layer.
        group_size : int, optional
            Number of rows of K that share a scale; see ``cudatma.quantize``.
        symmetric : bool, default True
            Whether to quantize without zero points; see ``cudatma.quantize``.
        dtype : torch.dtype or str, optional
            Type of the layer, float16 or bfloat16. Default: the type of ``linear`` if it is one of these, otherwise
            float16.
        clip_search : bool, default False
            Whether to try smaller ranges for each group; see ``cudatma.quantize``.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        format : str, default "int4"
            Format of the weight; see ``cudatma.quantize``.

        Returns
        -------
        MarlinLinear
            The layer.

        Raises
        ------
        ArgumentTypeError
            If ``linear`` is not a torch.nn.Linear, or if the format is unknown.
        QuantizationError
            If the weight cannot be quantized.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise ArgumentTypeError("linear", type(linear).__name__, "torch.nn.Linear")
        name = str(linear.weight.dtype if dtype is None else dtype).removeprefix("torch.")
        if dtype is None and name not in ACTIVATION_TYPES:
            name = "float16"
        options: dict[str, Any] = {"group_size": group_size, "symmetric": symmetric, "clip_search": clip_search}
        weight = quantize_linear(linear.weight, dtype=name, format=format, **options)
        return cls.from_packed(weight, linear.bias, batch_invariant=batch_invariant)

    @classmethod
    def from_gptq(cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any) -> MarlinLinear:
        """Create a layer from GPTQ tensors, on the first tensor's device.

        Parameters
        ----------
        *tensors : torch.Tensor
            The tensors qweight, qzeros, scales and optionally g_idx; see ``cudatma.from_gptq``.
        bias : array_like, shape (N,), optional
            Floating-point bias.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        **options
            Options of ``cudatma.from_gptq``.

        Returns
        -------
        MarlinLinear
            The layer.
        """
        return cls._import(from_gptq, tensors, bias, batch_invariant, options)

    @classmethod
    def from_awq(cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any) -> MarlinLinear:
        """Create a layer from AWQ tensors, on the first tensor's device.

        Parameters
        ----------
        *tensors : torch.Tensor
            The tensors qweight, qzeros and scales; see ``cudatma.from_awq``.
        bias : array_like, shape (N,), optional
            Floating-point bias.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        **options
            Options of ``cudatma.from_awq``.

        Returns
        -------
        MarlinLinear
            The layer.
        """
        return cls._import(from_awq, tensors, bias, batch_invariant, options)

    @classmethod
    def from_compressed_tensors(
        cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any
    ) -> MarlinLinear:
        """Create a layer from compressed-tensors tensors, on the first tensor's device.

        Parameters
        ----------
        *tensors : torch.Tensor
            The tensors, in the order of the arguments of ``cudatma.from_compressed_tensors``.
        bias : array_like, shape (N,), optional
            Floating-point bias.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        **options
            Options of ``cudatma.from_compressed_tensors``.

        Returns
        -------
        MarlinLinear
            The layer.
        """
        return cls._import(from_compressed_tensors, tensors, bias, batch_invariant, options)

    @classmethod
    def from_marlin(
        cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any
    ) -> MarlinLinear:
        """Create a layer from the original Marlin's tensors, on the first tensor's device.

        Parameters
        ----------
        *tensors : torch.Tensor
            The tensors B and s; see ``cudatma.from_marlin``.
        bias : array_like, shape (N,), optional
            Floating-point bias.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        **options
            Options of ``cudatma.from_marlin``.

        Returns
        -------
        MarlinLinear
            The layer.
        """
        return cls._import(from_marlin, tensors, bias, batch_invariant, options)

    @classmethod
    def _import(
        cls,
        function: Callable[..., PackedWeight],
        tensors: tuple[Any, ...],
        bias: Any,
        batch_invariant: bool,
        options: dict[str, Any],
    ) -> MarlinLinear:
        layer = cls.from_packed(function(*tensors, **options), bias, batch_invariant=batch_invariant)
        arguments = (*tensors, *options.values())
        first = next((argument for argument in arguments if isinstance(argument, torch.Tensor)), None)
        return layer if first is None else layer.to(first.device)

    def dequantize(self, *, dtype: Any = None) -> Any:
        """Return the dequantized weight (N, K) on the layer's device.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Type of the result. Default: the layer's type.

        Returns
        -------
        torch.Tensor, shape (N, K)
            The dequantized weight, in torch's orientation.
        """
        result = self.dtype if dtype is None else dtype
        if self.qweight.is_cuda:
            if result == self.dtype:
                return self._dequantize_by_kernel()
            torch.cuda.current_stream(self.qweight.device).synchronize()  # CuPy reads on a different stream.
        values = torch.from_numpy(
            self._packed_weight().dequantize(dtype="float64" if result == torch.float64 else "float32")
        )
        return values.T.contiguous().to(self.scales.device, result)

    def _dequantize_by_kernel(self) -> Any:
        """Dequantize the weight with the kernel.

        The kernel writes (K, N) in the layer's dtype and pads each row to a multiple of 16 bytes.
        """
        rows = self.scales.new_empty((self.in_features, align_up(self.out_features, 8)))[:, : self.out_features]
        return dequantize(self._packed_weight(), out=rows).T.contiguous()

    def forward(self, x: Any) -> Any:
        """Return x W + bias.

        Parameters
        ----------
        x : torch.Tensor, shape (..., K)
            Activations, with the same dtype and on the same device as the layer. On the CPU,
            $CUDATMA_BACKEND selects the backend.

        Returns
        -------
        torch.Tensor, shape (..., N)
            The result.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If ``x`` does not match the layer.
        """
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError("x", type(x).__name__, "a torch tensor")
        tensors = self._buffers  # Each access to a module's attribute takes 0.5 us.
        if self._parameters:  # A Parameter may have replaced a buffer.
            tensors = {**tensors, **self._parameters}
        # _op avoids MARLIN_GEMM's own Python frame, which takes 0.2 us. torch.compile supports only the operator.
        operator = MARLIN_GEMM if torch.compiler.is_compiling() else MARLIN_GEMM._op
        return operator(
            x.contiguous(),
            tensors["qweight"],
            tensors["scales"],
            tensors["zeros"],
            tensors["perm"],
            tensors["bias"],
            self.in_features,
            self.out_features,
            self.group_size,
            self.batch_invariant,
            self.format,
            tensors["tensor_scale"],
        )

    def warm_up(self, m_values: int | Iterable[int]) -> None:
        """Compile and load the kernels for later calls, and check the weight's values.

        Call this method at startup or before a graph capture. On the CPU, the method only checks ``m_values`` and the
        weight.

        Parameters
        ----------
        m_values : int or iterable of int
            Number of rows of x (the product of all dimensions except the last) in each later call. An int n means all
            numbers from 1 to n. For a whole model, ``cudatma.integrations.torch.warm_up(model, max_m)`` is faster.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If a number of rows is out of range.
        """
        weight = self._packed_weight()
        if self.qweight.is_cuda:
            layer = ArrayLayer(weight, batch_invariant=self.batch_invariant)
            layer.warm_up(m_values, stream=torch.cuda.current_stream(self.qweight.device))
        else:
            checked_m_values(m_values)

    def _packed_weight(self) -> PackedWeight:
        """Return a PackedWeight that uses the buffers' memory but does not keep the buffers alive."""
        parts, sizes = (self.qweight, self.scales, self.zeros, self.perm), (self.in_features, self.out_features)
        return packed_weight(*parts, *sizes, self.group_size, self.format, self.tensor_scale)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        form = f"symmetric={self.zeros is None}" if self.format == "int4" else f"format={self.format!r}"
        parts += [f"group_size={self.group_size}, {form}, dtype={self.dtype}"]
        parts += ["act_order=True"] if self.perm is not None else []
        parts += ["batch_invariant=True"] if self.batch_invariant else []
        return ", ".join(parts)


def warm_up(model: torch.nn.Module, max_m: int, *, progress: bool | None = None) -> None:
    """Compile and load the kernels of every MarlinLinear in a model for up to ``max_m`` rows.

    Later calls with at most ``max_m`` rows do not compile anything. Layers with the same shape share kernels. Kernels
    that are not in the cache are compiled in parallel.

    Parameters
    ----------
    model : torch.nn.Module
        A model or a single layer on a GPU.
    max_m : int
        Maximum number of rows in a layer's input. In a language model, this is the number of tokens in a batch.
    progress : bool, optional
        Whether to show a progress bar on stderr. Default: True if stderr is a terminal.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If ``max_m`` is out of range, or if ``model`` is not a torch.nn.Module.
    """
    check_max_m(max_m)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model", type(model).__name__, "torch.nn.Module")
    layers = [module for module in model.modules() if isinstance(module, MarlinLinear) and module.qweight.is_cuda]
    for invariant in (False, True):
        weights = [layer._packed_weight() for layer in layers if layer.batch_invariant is invariant]
        if weights:
            warm_up_weights(weights, max_m, batch_invariant=invariant, progress=progress)
