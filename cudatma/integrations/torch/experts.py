"""The class ExpertWeights, a torch module with quantized expert weights, and marlin_moe() for these modules."""

from __future__ import annotations

from typing import Any

import torch

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.integrations.torch.operators import MOE
from cudatma.integrations.torch.packed_module import PackedModule, bias_tensor
from cudatma.integrations.torch.weights import expert_tensors
from cudatma.pipeline import align_up
from cudatma.quantization import PackedExperts
from cudatma.quantization.layout_v1 import BLOCK, part_shapes
from cudatma.quantization.weight_format import weight_format


class ExpertWeights(PackedModule):
    """The quantized weights (K, N) of all experts of an MoE layer, for inference.

    ``from_packed`` creates a module with weights. The constructor leaves the buffers uninitialized.

    Parameters
    ----------
    experts : int
        Number of experts.
    in_features : int
        Number of inputs of an expert, K.
    out_features : int
        Number of outputs of an expert, N.
    gated : bool
        Whether the weights combine gate and up, so that the outputs of gate precede the outputs of up.
    group_size : int, optional
        Number of rows of K that share a scale; see ``cudatma.quantize``. Default: 128, or the only size of the format.
    symmetric : bool, default True
        Whether the weights have no zero points.
    dtype : torch.dtype, default torch.float16
        Type of activations and scales, float16 or bfloat16. The type cannot be changed later.
    device : torch.device or str, optional
        Device of the buffers. Default: torch's default device.
    format : str, default "int4"
        Format of the weights; see ``PackedWeight``.
    bias : bool, default False
        Whether each expert has a bias.

    Raises
    ------
    ArgumentError, ArgumentTypeError, QuantizationError
        If an argument is invalid.

    Notes
    -----
    The buffers are ``qweight`` (uint8), ``scales``, ``zeros`` (uint8), ``bias`` (experts, N) and ``tensor_scale``
    (float32). Buffers that the weights do not need are None. The columns of ``bias`` are in the order of the outputs,
    even if ``gated`` is True. Only nvfp4 weights have ``tensor_scale``, of shape (experts, 2) if ``gated`` is True,
    otherwise (experts, 1).

    Examples
    --------
    >>> from cudatma.integrations.torch import ExpertWeights
    >>> ExpertWeights.from_packed(cudatma.quantize_experts(np.ones((4, 128, 256), np.float32), gated=True))
    ExpertWeights(experts=4, in_features=128, out_features=256, gated=True, bias=False, group_size=128, \
symmetric=True, dtype=torch.float16)
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        gated: bool,
        group_size: int | None = None,
        symmetric: bool = True,
        dtype: Any = torch.float16,
        device: Any = None,
        format: str = "int4",
        bias: bool = False,
    ) -> None:
        super().__init__()
        kind = weight_format(format)
        group_size = kind.default_group_size if group_size is None else group_size
        kind.check_group_size(group_size)
        kind.check_symmetric(symmetric)
        for field, size in (("experts", experts), ("in_features", in_features), ("out_features", out_features)):
            if type(size) is not int or not 1 <= size < 2**31:
                raise ArgumentError(field, size, "an int from 1 to 2**31 - 1")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ArgumentTypeError("dtype", str(dtype), "torch.float16, torch.bfloat16")
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.gated, self.group_size, self.format = gated, group_size, format
        shapes = part_shapes(in_features, experts * align_up(out_features, BLOCK), group_size, kind.bits)
        shapes |= {"tensor_scale": (experts, 1 + gated), "bias": (experts, out_features)}
        dtypes = {"qweight": torch.uint8, "scales": dtype, "zeros": torch.uint8, "tensor_scale": torch.float32}
        dtypes["bias"] = dtype
        absent = {"zeros": symmetric, "tensor_scale": not kind.has_tensor_scale, "bias": not bias}
        # torch.export miscounts buffers if a buffer that is None precedes another buffer.
        for name in sorted(dtypes, key=lambda name: absent.get(name, False)):
            buffer = None if absent.get(name) else torch.empty(shapes[name], dtype=dtypes[name], device=device)
            self.register_buffer(name, buffer)

    @classmethod
    def from_packed(cls, weights: PackedExperts, bias: Any = None) -> ExpertWeights:
        """Create a module from a copy of a PackedExperts, on the device of the weights.

        Parameters
        ----------
        weights : PackedExperts
            The weights, of shape (experts, K, N).
        bias : array_like, shape (experts, N), optional
            Floating-point bias of each expert, as an array from any library. Default: no bias.

        Returns
        -------
        ExpertWeights
            The module.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If ``weights`` is not a PackedExperts, or ``bias`` has the wrong shape or dtype.
        """
        if not isinstance(weights, PackedExperts):
            raise ArgumentTypeError("weights", type(weights).__name__, "PackedExperts", "call quantize_experts()")
        parts = expert_tensors(weights)
        module = cls(
            *weights.shape,
            gated=weights.gated,
            group_size=weights.group_size,
            symmetric=weights.symmetric,
            dtype=parts["scales"].dtype,
            device="meta",
            format=weights.format,
            bias=bias is not None,
        )
        if bias is not None:
            experts, _, columns = weights.shape
            parts["bias"] = bias_tensor(bias, (experts, columns), weights.dtype).to(parts["scales"].device)
        for name in ("qweight", "scales", "zeros", "tensor_scale", "bias"):
            setattr(module, name, parts.get(name))
        return module

    def extra_repr(self) -> str:
        parts = [f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"]
        parts += [f"gated={self.gated}, bias={self.bias is not None}, group_size={self.group_size}"]
        parts += [f"symmetric={self.zeros is None}"]
        parts += [f"format={self.format!r}"] if self.format != "int4" else []
        return ", ".join([*parts, f"dtype={self.dtype}"])


def marlin_moe(
    x: Any,
    w1: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: Any,
    topk_ids: Any,
    *,
    activation: str = "silu_glu",
    expert_map: Any = None,
) -> Any:
    """Compute a mixture-of-experts layer, including biases; see ``cudatma.marlin_moe``.

    torch.compile supports this function.

    Parameters
    ----------
    x : torch.Tensor, shape (tokens, K)
        Activations, with the same dtype and on the same device as the weights. On the CPU, $CUDATMA_BACKEND
        selects the backend.
    w1 : ExpertWeights
        First weights (experts, K, 2 I), with ``gated=True``.
    w2 : ExpertWeights
        Second weights (experts, I, K).
    topk_weights : torch.Tensor, shape (tokens, top_k)
        Router weights of the experts selected for each token, float32.
    topk_ids : torch.Tensor, shape (tokens, top_k)
        Indices of the experts selected for each token, int32 or int64.
    activation : {"silu_glu", "swiglu_oai"}, default "silu_glu"
        Activation between the products.
    expert_map : torch.Tensor, shape (global experts,), optional
        Local index of each global expert, int32, or -1 for experts on other GPUs.

    Returns
    -------
    torch.Tensor, shape (tokens, K)
        The result.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If an argument is invalid; see ``cudatma.marlin_moe``.
    """
    for name, module in (("w1", w1), ("w2", w2)):
        if not isinstance(module, ExpertWeights):
            raise ArgumentTypeError(name, type(module).__name__, "ExpertWeights")
    sizes = w1.experts, w1.in_features, w1.out_features // 2
    is_pair = (w2.experts, w2.out_features, w2.in_features) == sizes and w1.format == w2.format
    if not w1.gated or w2.gated or not is_pair:
        raise ArgumentError("w2", repr(w2), f"ungated ExpertWeights that match a gated w1 (w1 is {w1!r})")
    return MOE(
        x.contiguous(),
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        w1.qweight,
        w1.scales,
        w1.zeros,
        w2.qweight,
        w2.scales,
        w2.zeros,
        w1.experts,
        w2.in_features,
        w1.group_size,
        w2.group_size,
        expert_map=expert_map,
        format=w1.format,
        w1_tensor_scale=w1.tensor_scale,
        w2_tensor_scale=w2.tensor_scale,
        bias1=w1.bias,
        bias2=w2.bias,
        activation=activation,
    )
