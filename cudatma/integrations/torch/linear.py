"""MarlinLinear: an int4 weight and a bias as a torch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cudatma.arrays import describe
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.integrations.torch.operators import MARLIN_GEMM
from cudatma.integrations.torch.weights import forget, packed_weight, weight_tensors
from cudatma.kernels.marlin.dequantize import dequantize
from cudatma.kernels.marlin.linear import MarlinLinear as ArrayLayer
from cudatma.kernels.marlin.linear import checked_m_values, converted_bias
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
from cudatma.quantization.packed import check_group_size


class MarlinLinear(torch.nn.Module):  # type: ignore[misc]
    """y = x W + b with W in int4 (PackedWeight): torch.nn.Linear for inference. There is no backward pass.

    The weight's arrays are the buffers ``qweight`` (uint8), ``scales`` (fp16 or bf16), ``zeros`` (uint8) and ``perm``
    (int32), the last two None without zero points or activation order; ``bias`` is a buffer or None. ``state_dict()``
    holds them and nothing else; the sizes are the constructor's, so that load_state_dict() fills a module that was made
    with the same arguments, also on the meta device with ``assign=True``.

    in_features, out_features: K and N. group_size: 32, 64, 128 or -1 for the whole column. symmetric: no zero points.
    act_order: with a permutation of the activations' columns. dtype: torch.float16 or torch.bfloat16, of activations,
    scales and bias. It is fixed, since the weight was quantized for it: ``.half()``, ``.float()`` and ``.to(dtype)``
    raise ArgumentTypeError for any other; ``.to(device)`` and ``.cuda()`` move the module. batch_invariant: as in
    marlin_gemm. The buffers are not initialized. Raises ArgumentError, ArgumentTypeError, QuantizationError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int = 128,
        symmetric: bool = True,
        act_order: bool = False,
        dtype: Any = torch.float16,
        device: Any = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        check_group_size(group_size)
        for field, size in (("in_features", in_features), ("out_features", out_features)):
            if type(size) is not int or not 1 <= size < 2**31:
                raise ArgumentError(field, size, "an int from 1 to 2**31 - 1")
        if type(batch_invariant) is not bool:
            raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ArgumentTypeError("dtype", str(dtype), "torch.float16, torch.bfloat16")
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.batch_invariant = batch_invariant
        shapes = part_shapes(in_features, out_features, group_size) | {"bias": (out_features,)}
        dtypes = {"qweight": torch.uint8, "scales": dtype, "zeros": torch.uint8, "perm": torch.int32, "bias": dtype}
        absent = {"zeros": symmetric, "perm": not act_order, "bias": not bias}
        # torch.export miscounts buffers where one that is None precedes another.
        for name in sorted(shapes, key=lambda name: absent.get(name, False)):
            buffer = None if absent.get(name) else torch.empty(shapes[name], dtype=dtypes[name], device=device)
            self.register_buffer(name, buffer)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Any = None, *, batch_invariant: bool = False) -> MarlinLinear:
        """A copy of a PackedWeight, on its device. bias: (N,), floats of any array library, or None.

        Raises ArgumentError, ArgumentTypeError.
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
        )
        if bias is not None:
            parts["bias"] = _bias(bias, n, weight.dtype).to(parts["scales"].device)
        for name, tensor in parts.items():
            setattr(layer, name, tensor)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: Any,
        *,
        group_size: int = 128,
        symmetric: bool = True,
        dtype: Any = None,
        clip_search: bool = False,
        batch_invariant: bool = False,
    ) -> MarlinLinear:
        """Quantize a torch.nn.Linear, on its device; the options are those of quantize().

        dtype: torch.float16, torch.bfloat16 or a name; None: the layer's own, float16 for others.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise ArgumentTypeError("linear", type(linear).__name__, "torch.nn.Linear")
        name = str(linear.weight.dtype if dtype is None else dtype).removeprefix("torch.")
        if dtype is None and name not in ACTIVATION_TYPES:
            name = "float16"
        weight = quantize_linear(
            linear.weight, group_size=group_size, symmetric=symmetric, dtype=name, clip_search=clip_search
        )
        return cls.from_packed(weight, linear.bias, batch_invariant=batch_invariant)

    @classmethod
    def from_gptq(cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any) -> MarlinLinear:
        """From GPTQ tensors: qweight, qzeros, scales, g_idx and the options of cudatma.from_gptq().

        The layer is on the first tensor's device, as with the other importers below.
        """
        return cls._imported(from_gptq, tensors, bias, batch_invariant, options)

    @classmethod
    def from_awq(cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any) -> MarlinLinear:
        """From AWQ tensors: qweight, qzeros, scales and the options of cudatma.from_awq()."""
        return cls._imported(from_awq, tensors, bias, batch_invariant, options)

    @classmethod
    def from_compressed_tensors(
        cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any
    ) -> MarlinLinear:
        """From compressed-tensors' tensors and the options of cudatma.from_compressed_tensors()."""
        return cls._imported(from_compressed_tensors, tensors, bias, batch_invariant, options)

    @classmethod
    def from_marlin(
        cls, *tensors: Any, bias: Any = None, batch_invariant: bool = False, **options: Any
    ) -> MarlinLinear:
        """From tensors in Marlin's layout and the options of cudatma.from_marlin()."""
        return cls._imported(from_marlin, tensors, bias, batch_invariant, options)

    @classmethod
    def _imported(
        cls,
        function: Callable[..., PackedWeight],
        tensors: tuple[Any, ...],
        bias: Any,
        batch_invariant: bool,
        options: dict[str, Any],
    ) -> MarlinLinear:
        layer = cls.from_packed(function(*tensors, **options), bias, batch_invariant=batch_invariant)
        given = (each for each in (*tensors, *options.values()) if isinstance(each, torch.Tensor))
        first = next(given, None)
        return layer if first is None else layer.to(first.device)

    @property
    def dtype(self) -> Any:
        """Of activations, scales and bias."""
        return self.scales.dtype

    def dequantize(self, *, dtype: Any = None) -> Any:
        """W as torch.nn.Linear keeps it, (N, K), on the layer's device; dtype: torch's, None is the layer's."""
        kind = self.dtype if dtype is None else dtype
        if self.qweight.is_cuda:
            if kind == self.dtype:
                return self._dequantize_by_kernel()
            torch.cuda.current_stream(self.qweight.device).synchronize()  # CuPy reads on a stream of its own
        values = torch.from_numpy(
            self._packed_weight().dequantize(dtype="float64" if kind == torch.float64 else "float32")
        )
        return values.T.contiguous().to(self.scales.device, kind)

    def _dequantize_by_kernel(self) -> Any:
        """dequantize() by the kernel, in the layer's dtype. It writes (K, N), each row padded to 16 bytes."""
        rows = self.scales.new_empty((self.in_features, align_up(self.out_features, 8)))[:, : self.out_features]
        return dequantize(self._packed_weight(), out=rows).T.contiguous()

    def forward(self, x: Any) -> Any:
        """x (..., K) of the layer's dtype, on its device -> (..., N). On the CPU, $CUDATMA_BACKEND says how."""
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError("x", type(x).__name__, "a torch tensor")
        tensors = self._buffers  # each attribute of a module costs 0.5 us more
        if self._parameters:  # a buffer that was replaced by a Parameter
            tensors = {**tensors, **self._parameters}
        # What MARLIN_GEMM calls: its own Python frame costs 0.2 us. torch.compile knows only the operator.
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
        )

    def warm_up(self, m_values: int | Iterable[int]) -> None:
        """Read the weight's values, and compile and load what calls need: at start-up, or before a graph capture.

        On the CPU the weight is read and checked.

        Parameters
        ----------
        m_values : int or iterable of int
            Numbers of rows of x, the product of all its dimensions but the last. An int n covers 1 to n rows. To warm
            up a whole model, use ``cudatma.integrations.torch.warm_up(model, max_m)``, which is faster.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If a number is out of range.
        """
        weight = self._packed_weight()
        if self.qweight.is_cuda:
            layer = ArrayLayer(weight, batch_invariant=self.batch_invariant)
            layer.warm_up(m_values, stream=torch.cuda.current_stream(self.qweight.device))
        else:
            checked_m_values(m_values)

    def _packed_weight(self) -> PackedWeight:
        """Over the buffers, which it does not keep alive."""
        parts = (self.qweight, self.scales, self.zeros, self.perm)
        return packed_weight(*parts, self.in_features, self.out_features, self.group_size)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        parts += [f"group_size={self.group_size}, symmetric={self.zeros is None}, dtype={self.dtype}"]
        parts += ["act_order=True"] if self.perm is not None else []
        parts += ["batch_invariant=True"] if self.batch_invariant else []
        return ", ".join(parts)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """What .to(), .cuda() and .half() call."""
        converted = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        if converted != self.dtype:
            remedy = "the weight was quantized for its dtype: quantize it again, or use .to(device)"
            raise ArgumentTypeError("dtype", str(converted), f"{self.dtype}, the layer's", remedy)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """load_state_dict() would round scales of another dtype."""
        for name in ("qweight", "scales", "zeros", "perm", "bias"):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(given, torch.Tensor) and own is not None and given.dtype != own.dtype:
                raise ArgumentTypeError(f"{prefix}{name}.dtype", str(given.dtype), f"{own.dtype}, the layer's")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not self.qweight.is_meta:
            forget(self.qweight)


def _bias(bias: Any, n: int, dtype: str) -> Any:
    """A layer's bias on the host, rounded to its dtype, which must hold it."""
    shape = describe(bias, "bias").shape
    if shape != (n,):
        raise ArgumentError("bias.shape", shape, f"({n},)")
    return torch.from_numpy(converted_bias(bias, dtype).view("int16").copy()).view(getattr(torch, dtype))


def warm_up(model: torch.nn.Module, max_m: int, *, progress: bool | None = None) -> None:
    """Prepare every MarlinLinear of a model on a GPU for calls with up to ``max_m`` rows.

    Afterwards such calls compile nothing. Layers of one shape share their kernels, and kernels that the cache lacks
    are compiled in parallel.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or a single layer.
    max_m : int
        Largest number of rows of a layer's input: the tokens of a batch together.
    progress : bool, optional
        Show a progress bar on stderr. Default: only if stderr is a terminal.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If ``max_m`` is out of range.
    """
    check_max_m(max_m)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model", type(model).__name__, "torch.nn.Module")
    layers = [module for module in model.modules() if isinstance(module, MarlinLinear) and module.qweight.is_cuda]
    for invariant in (False, True):
        weights = [layer._packed_weight() for layer in layers if layer.batch_invariant is invariant]
        if weights:
            warm_up_weights(weights, max_m, batch_invariant=invariant, progress=progress)
