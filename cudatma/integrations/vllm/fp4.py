"""Linear kernel for MXFP4 and NVFP4 weights with vLLM's interface. This module does not import vLLM.

vLLM's weights are uint8 (N, K / 2), where a byte holds two consecutive values along K, low nibble first. torch
operations repack the weights on their device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from cudatma.errors import QuantizationError
from cudatma.integrations.torch.operators import MARLIN_GEMM
from cudatma.integrations.vllm.layer import pack_words, prepare_layer
from cudatma.quantization.layout_v1 import E2M1_BITS
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.weight_format import weight_format


class PackedFp4Layer:
    """Linear kernel of one layer. Subclasses add vLLM's base class.

    Attributes
    ----------
    format : str
        Format of the weight, "mxfp4" or "nvfp4".
    """

    format: ClassVar[str]
    _range: tuple[int, float] | None = None

    @property
    def batch_invariant(self) -> bool:
        """Whether the result of a row must be independent of the other rows of its batch."""
        return False

    @property
    def max_m(self) -> int | None:
        """Maximum number of tokens in a batch, or None to compile no kernels in advance."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's weight, free the loaded tensors, and compile and load the kernels that batches will need.

        Raises QuantizationError if vLLM reloads a weight with a different scale exponent or tensor scale, because
        captured graphs contain the original values.
        """
        n, k = layer.weight.shape[0], 2 * layer.weight.shape[1]
        scales, tensor_scale = layer.weight_scale.data.t(), None
        if self.format == "mxfp4":
            scales = scales.contiguous().view(torch.float8_e8m0fnu)
        else:
            tensor_scale = layer.weight_global_scale.data.float().reshape(())
        qweight, scales = repack_fp4(layer.weight.data, scales.to(layer.params_dtype))
        self._keep_range(scales, 1.0 if tensor_scale is None else float(tensor_scale))
        named = {"weight": qweight, "weight_scale": scales, "weight_global_scale": tensor_scale}
        for name, tensor in named.items():
            if tensor is not None:
                setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
        self._sizes = k, n, weight_format(self.format).default_group_size
        weight = qweight, scales, None, None, *self._sizes, self.format, tensor_scale
        prepare_layer(*weight, max_m=self.max_m, batch_invariant=self.batch_invariant)

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """Return x W + bias, of shape (..., N), from torch.ops.cudatma.marlin_gemm. ``x`` has shape (..., K)."""
        tensor_scale = layer.weight_global_scale if self.format == "nvfp4" else None
        facts = *self._sizes, self.batch_invariant, self.format, tensor_scale
        return MARLIN_GEMM(x, layer.weight, layer.weight_scale, None, None, bias, *facts)

    def _keep_range(self, scales: Any, tensor_scale: float) -> None:
        exponent = weight_format(self.format).scale_exponent(host_array(scales, "weight_scale"))
        if self._range not in (None, (exponent, tensor_scale)):
            got = f"scales with exponent {exponent} and tensor scale {tensor_scale:g}"
            remedy = f"restart vLLM with these weights, or set VLLM_DISABLED_KERNELS={type(self).__name__}"
            allowed = "scales with the same exponent and tensor scale as before the reload"
            raise QuantizationError("weight_scale", got, allowed, remedy)
        self._range = exponent, tensor_scale


def repack_fp4(weight: Any, scales: Any) -> tuple[Any, Any]:
    """Return the arrays qweight and scales of a PackedWeight (K, N) as new tensors.

    Parameters
    ----------
    weight : torch.Tensor of uint8, shape (N, K / 2)
        Packed e2m1 codes. K must be a multiple of 8.
    scales : torch.Tensor of float16 or bfloat16, shape (G, N)
        Scales.
    """
    return pack_fp4_words(weight.contiguous().view(torch.int32).t(), scales)


def pack_fp4_words(words: Any, scales: Any) -> tuple[Any, Any]:
    """Return the result of repack_fp4() for int32 words (K / 8, N). A word holds eight rows, lowest nibble first."""
    qweight, ordered = pack_words(words, scales)
    words = qweight.view(torch.int32)
    stored = torch.zeros_like(words)
    for nibble, positions in enumerate(E2M1_BITS):
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            stored |= ((words >> (4 * nibble + bit)) & 1) << position
    return stored.view(torch.uint8), ordered
