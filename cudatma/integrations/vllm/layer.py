"""A linear kernel with vLLM's interface. This module does not import vLLM. kernel.py adds vLLM's base class.

vLLM's q is int32 (K / 8, N) for 4-bit weights, where a word holds eight consecutive rows, lowest nibble first, and
int32 (K / 4, N) for 8-bit weights. The zero points are int32 (G, N / 8), where a word holds eight consecutive columns.
torch repacks q and the zero points on their device. The result is the same as from ``quantization.pack``, which
takes one byte per value. quantization/layout_v1.py defines the layout.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Protocol

import torch

from cudatma.errors import QuantizationError, alternatives
from cudatma.integrations.torch.operators import MARLIN_GEMM
from cudatma.integrations.torch.weights import packed_weight
from cudatma.kernels.marlin.warm_up import warm_up
from cudatma.kernels.warm_up import LARGEST_M
from cudatma.kernels.workspace import share_captured_workspaces
from cudatma.quantization import GROUP_SIZES
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, SYMMETRIC_ZERO, blocks, group_count
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.scale_range import ScaleFit, fit_scales
from cudatma.quantization.weight_format import WEIGHT_FORMATS


class LayerConfig(Protocol):
    """Fields of vLLM's MPLinearLayerConfig that cudatma reads. Shapes are (K, N). A partition is this rank's shard."""

    partition_weight_shape: tuple[int, int]
    weight_type: Any
    act_type: Any
    out_type: Any
    group_size: int
    zero_points: bool


def refusal(config: LayerConfig) -> str | None:
    """Return the reason why marlin_gemm does not support a layer, or None if it does."""
    (k, n), size = config.partition_weight_shape, config.group_size
    expected = ("uint4",) if config.zero_points else ("uint4b8", _INT8)
    if str(config.weight_type) not in expected:
        points = "with" if config.zero_points else "without"
        return f"the weight type must be {' or '.join(expected)} {points} zero points, got {config.weight_type}"
    if config.act_type not in (torch.float16, torch.bfloat16):
        return f"activations must be torch.float16 or torch.bfloat16, got {config.act_type}"
    if config.out_type not in (None, config.act_type):
        return f"results must be {config.act_type}, the type of the activations, got {config.out_type}"
    if size not in GROUP_SIZES:
        return f"the group size must be {alternatives(GROUP_SIZES)}, got {size}"
    values = BYTES_PER_WORD if str(config.weight_type) == _INT8 else WORD_VALUES
    multiple = values if size == -1 else size
    if k % multiple:
        return f"K must be a multiple of {multiple} on each rank, got K = {k} (N = {n})"
    if getattr(config, "has_g_idx", False):  # Only vLLM before 0.33 has this field.
        return "the weight is in activation order"
    return None


def prepare_layer(*weight: Any, max_m: int | None, batch_invariant: bool) -> None:
    """Compile and load the kernels that a layer will need for batches of up to ``max_m`` tokens.

    ``weight`` contains the arguments of packed_weight(). The first call also prepares the process.
    """
    _enable_direct_calls()
    if not weight[0].is_cuda:
        return
    share_captured_workspaces()  # vLLM runs its graphs one after another.
    if max_m is not None:
        warm_up([packed_weight(*weight)], min(max_m, LARGEST_M), batch_invariant=batch_invariant)


class PackedLayer:
    """Linear kernel of one layer. vLLM's base class sets the attributes.

    Attributes
    ----------
    config : LayerConfig
        The layer's configuration.
    w_q_name, w_s_name, w_zp_name : str
        Names of the layer's parameters. Their ``output_dim`` is the dimension of N. The arrays of the packed weight
        replace these parameters under the same names.
    """

    config: LayerConfig
    w_q_name: str
    w_s_name: str
    w_zp_name: str | None
    _format = "int4"
    _fit: ScaleFit | None = None

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

        The first call also prepares the process. It enables direct calls in compiled models, and makes vLLM's CUDA
        graphs share one workspace.

        vLLM's reload_weights() replaces weights in place. Raises QuantizationError if the new scales have a different
        range, because the layer's kernels were chosen for the original range.
        """
        config, names = self.config, (self.w_q_name, self.w_s_name, self.w_zp_name)
        loaded = [_input_major(layer, name) for name in names[: 2 + config.zero_points]]
        k, n = config.partition_weight_shape
        self._format = "int8" if str(config.weight_type) == _INT8 else "int4"
        function = repack if self._format == "int4" else repack_int8
        packed = function(*loaded, n=n, group_size=config.group_size)
        self._keep_fit(packed[1])
        for name, tensor in zip(names, packed, strict=True):
            if name is None or not hasattr(layer, name):
                continue
            # vLLM's parameter classes run Python code at each access, so plain parameters are used. None means that all
            # zero points are 8.
            setattr(layer, name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
        weight = *packed, None, k, n, config.group_size, self._format
        prepare_layer(*weight, max_m=self.max_m, batch_invariant=self.batch_invariant)

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """Return x W + bias, of shape (..., N), from torch.ops.cudatma.marlin_gemm. ``x`` has shape (..., K)."""
        config, (k, n) = self.config, self.config.partition_weight_shape
        qweight, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zeros = getattr(layer, self.w_zp_name) if config.zero_points and self.w_zp_name else None
        facts = config.group_size, self.batch_invariant, self._format
        return MARLIN_GEMM(x, qweight, scales, zeros, None, bias, k, n, *facts)

    def _keep_fit(self, scales: Any) -> None:
        fit = ScaleFit() if self._format == "int8" else fit_scales(host_array(scales, self.w_s_name))
        if self._fit not in (None, fit):
            remedy = "restart vLLM with these weights, or set VLLM_DISABLED_KERNELS=CudatmaWNA16LinearKernel"
            raise QuantizationError(
                self.w_s_name, f"scales with {fit}", f"scales with {self._fit}, as before the reload", remedy
            )
        self._fit = fit


@functools.cache
def _enable_direct_calls() -> None:
    """Enable direct calls to marlin_gemm in compiled models if this version of torch's Inductor supports them."""
    try:
        importlib.import_module("cudatma.integrations.torch.inductor")
    except Exception as error:  # The torch functions that inductor.py uses are not public and may change.
        cause = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).warning(
            "compiled models call marlin_gemm through torch's dispatcher because direct calls are not available: %s",
            cause,
        )


def _input_major(layer: Any, name: Any) -> Any:
    """Return a parameter's values with K, or the dimension derived from K, as the first dimension."""
    parameter = getattr(layer, name)
    return parameter.data.t() if parameter.output_dim == 0 else parameter.data


#: Number of four-bit values, and of eight-bit values, per 32-bit word.
WORD_VALUES, BYTES_PER_WORD = 8, 4
#: vLLM's name for 8-bit weights whose codes are the values plus 128.
_INT8 = "uint8b128"
#: Multiplier that copies a nibble to both nibble positions of a byte.
_TWICE = 0x11
_INT8_ZERO = WEIGHT_FORMATS["int8"].zero_code


def repack(
    words: Any, scales: Any, zero_words: Any | None = None, *, n: int, group_size: int
) -> tuple[Any, Any, Any | None]:
    """Return the arrays qweight, scales and zeros of a PackedWeight (K, N) as new tensors.

    Parameters
    ----------
    words : torch.Tensor of int32, shape (K / 8, N)
        Packed integers, with any strides.
    scales : torch.Tensor of float16 or bfloat16, shape (G, N)
        Scales.
    zero_words : torch.Tensor of int32, shape (G, ceil(N / 8)), optional
        Packed zero points. Default: every zero point is 8.
    n : int
        Number of columns, N.
    group_size : int
        Number of rows of K that share a scale, or -1 for all rows.

    Returns
    -------
    tuple of torch.Tensor
        The tensors qweight, scales and zeros. zeros is None if ``zero_words`` is None.

    Raises
    ------
    QuantizationError
        If the shapes do not match each other.
    """
    k = words.shape[0] * WORD_VALUES
    groups = group_count(k, group_size)
    _require("words", words, (k // WORD_VALUES, n))
    _require("scales", scales, (groups, n))
    zeros = None
    if zero_words is not None:
        _require("zero_words", zero_words, (groups, -(-n // WORD_VALUES)))
        zeros = unpack_nibbles(zero_words)[:, :n]
    return pack_columns(words, scales, zeros, group_size)


def pack_columns(words: Any, scales: Any, zeros: Any | None, group_size: int) -> tuple[Any, Any, Any | None]:
    """Return the result of repack() for zero points uint8 (G, N). The shapes must match each other."""
    padding = zeros[0] if zeros is not None and group_size == -1 else None
    packed_zeros = None if zeros is None else _ordered(zeros, SYMMETRIC_ZERO)
    return _packed(words, padding), _ordered(scales, 0), packed_zeros


def pack_words(words: Any, scales: Any) -> tuple[Any, Any]:
    """Pack words int32 (K / 8, N) of 4-bit codes, and scales (G, N). Rows beyond K hold the code 8."""
    return _packed(words, None), _ordered(scales, 0)


def repack_int8(words: Any, scales: Any, *, n: int, group_size: int) -> tuple[Any, Any, None]:
    """Return the result of repack() for words int32 (K / 4, N) of 8-bit codes, lowest byte first."""
    k = words.shape[0] * BYTES_PER_WORD
    _require("words", words, (k // BYTES_PER_WORD, n))
    _require("scales", scales, (group_count(k, group_size), n))
    q = words.new_full((blocks(k) * BLOCK, blocks(n) * BLOCK), _INT8_ZERO, dtype=torch.uint8)
    q[:k, :n] = _bytes(words).permute(0, 2, 1).reshape(k, n)
    split = q.view(-1, 2, 2, 4, 2, blocks(n), 4, 2, 8)  # k32 j r1 t h n64 c r0 g
    qweight = split.permute(5, 0, 6, 8, 3, 1, 2, 4, 7).reshape(-1, BLOCK_BYTES)  # n64 k32 c g t j r1 h r0
    return qweight, _ordered(scales, 0), None


def _require(field: str, tensor: Any, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise QuantizationError(field, tuple(tensor.shape), str(shape), "pass tensors of one layer")


def _bytes(words: Any) -> Any:
    """Return the bytes uint8 (R, C, 4) of words (R, C), least significant first."""
    words = words.clone(memory_format=torch.contiguous_format)  # contiguous() would keep a single column's stride.
    return words.view(torch.uint8).reshape(*words.shape, 4)


def unpack_nibbles(words: Any) -> Any:
    """Unpack words (R, C) into uint8 (R, 8 C), lowest nibble first."""
    data = _bytes(words)
    return torch.stack((data & 15, data >> 4), dim=-1).reshape(len(words), -1)


def _packed(words: Any, padding: Any | None) -> Any:
    """Pack words (K / 8, N) into uint8 (N64 K64, 2048). Rows beyond K hold ``padding`` (N,), or 8 by default."""
    rows, n = words.shape
    k64, n64 = blocks(rows * WORD_VALUES), blocks(n)
    data = _bytes(words)
    if (rows, n) != (k64 * WORD_VALUES, n64 * BLOCK):
        padded = data.new_full((k64 * WORD_VALUES, n64 * BLOCK, 4), SYMMETRIC_ZERO * _TWICE)
        padded[:rows, :n] = data
        if padding is not None:
            padded[rows:, :n] = (padding * _TWICE)[:, None]
        data = padded
    # A byte of a word holds k = ... + 2 t in its low nibble and k = ... + 2 t + 1 in its high nibble. A packed byte
    # holds the columns with r0 = 0 and r0 = 1.
    split = data.view(k64, 4, 2, n64, 4, 2, 8, 4)  # k64 j r1 n64 c r0 g t
    left, right = split[:, :, :, :, :, 0], split[:, :, :, :, :, 1]
    pairs = torch.stack(((left & 15) | (right << 4), (left >> 4) | (right & 240)))  # h k64 j r1 n64 c g t
    return pairs.permute(4, 1, 5, 6, 7, 2, 0, 3).reshape(n64 * k64, BLOCK_BYTES)  # n64 k64 c g t j h r1


def _ordered(rows: Any, padding: int) -> Any:
    """Pad rows (G, N) to (G, 64 N64), and store every 64 columns in packed order."""
    groups, n = rows.shape
    n64 = blocks(n)
    padded = rows.new_full((groups, n64 * BLOCK), padding)
    padded[:, :n] = rows
    return padded.view(groups, n64, 4, 2, 8).permute(0, 1, 4, 2, 3).reshape(groups, n64 * BLOCK)
