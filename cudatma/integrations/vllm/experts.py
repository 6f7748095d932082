"""Expert layers with vLLM's interface. This module does not import vLLM. moe.py adds vLLM's base class.

vLLM loads the weights of all local experts of a layer into the parameters w13 (gate, then up) and w2. Their layout
depends on the checkpoint's format. torch repacks them on their device, one expert at a time, with the same result as
``pack_experts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from cudatma.context import runtime
from cudatma.errors import QuantizationError, alternatives
from cudatma.integrations.torch.weights import packed_weight
from cudatma.integrations.vllm.fp4 import pack_fp4_words
from cudatma.integrations.vllm.layer import BYTES_PER_WORD, WORD_VALUES, pack_columns, repack_int8, unpack_nibbles
from cudatma.kernels.experts.moe import marlin_moe
from cudatma.kernels.experts.problem import MAX_EXPERTS, SIZE_UNIT
from cudatma.kernels.warm_up import LARGEST_M, warm_up
from cudatma.kernels.workspace import share_captured_workspaces
from cudatma.quantization.experts import PackedExperts, gate_then_up, stored_order
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, blocks
from cudatma.quantization.weight_format import weight_format

#: Name of the layer attribute that stores the ScaleFits of the weights.
_FITS = "cudatma_scale_fits"
#: Mask of all bits except the sign bits in a word of MXFP4 codes.
_MAGNITUDES = 0x77777777
#: Position of each of the eight columns in an AWQ word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class LoadedFormat(NamedTuple):
    """How vLLM stores loaded expert weights.

    Attributes
    ----------
    layout : {"gptq", "awq", "n_major", "n_major_interleaved"}
        Layout of the codes and zero points. "gptq": words (experts, K / 8, N) that hold consecutive rows. "awq": words
        (experts, K, N / 8) in AWQ's order. "n_major": words or bytes (experts, N, K / 8 or K / 2) that hold
        consecutive rows, and zero points (experts, N / 8 or N / 2, groups). "n_major_interleaved": like "n_major", but
        with alternating columns of gate and up. A word holds eight 4-bit codes or four 8-bit codes.
    names : tuple of str
        Names of the parameters for codes, scales and zero points, without the prefix "w13_" or "w2_".
    group_size : int
        Number of rows of K that share a scale, or -1 for all rows.
    has_zeros : bool
        Whether the weights have zero points.
    format : str
        Format of the weights, such as "int4".
    """

    layout: str
    names: tuple[str, str, str]
    group_size: int
    has_zeros: bool
    format: str = "int4"


class ExpertsConfig(Protocol):
    """Fields of vLLM's FusedMoEConfig that cudatma reads. The intermediate size counts only this rank's shard."""

    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    experts_per_token: int
    in_dtype: Any


def refusal(config: ExpertsConfig, loaded: LoadedFormat, sizes: tuple[int, int] | None = None) -> str | None:
    """Return the reason why marlin_moe does not support a layer, or None if it does.

    ``sizes`` are the hidden and intermediate sizes of the rank after vLLM has rounded the sizes in ``config``. Default:
    vLLM does not round them.
    """
    if config.in_dtype not in (torch.float16, torch.bfloat16):
        return f"activations must be torch.float16 or torch.bfloat16, got {config.in_dtype}"
    group_sizes = weight_format(loaded.format).group_sizes
    if loaded.group_size not in group_sizes:
        return f"the group size must be {alternatives(group_sizes)}, got {loaded.group_size}"
    sizes = sizes or (config.hidden_dim, config.intermediate_size_per_partition)
    multiple = max(SIZE_UNIT, loaded.group_size)
    for name, size in zip(("hidden", "intermediate"), sizes, strict=True):
        if size % multiple:
            return f"the {name} size must be a multiple of {multiple} on each rank, got {size}"
    if config.num_local_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts per rank are supported, got {config.num_local_experts}"
    if getattr(config, "swiglu_limit", None) is not None:
        return "swiglu_limit is not supported"
    return None


def pack_layer(layer: Any, loaded: LoadedFormat, replace: Callable[[Any, str, Any], None]) -> None:
    """Replace the loaded weights of a layer with packed weights, one product at a time.

    ``replace(layer, name, tensor)`` is vLLM's function that replaces a parameter. The packed codes uint8 (experts,
    blocks, 2048) are also available as ``w13_weight`` and ``w2_weight``, which vLLM passes to the kernel.
    """
    q_name, s_name, z_name = loaded.names
    for prefix, is_gated in (("w13", True), ("w2", False)):
        q, s = getattr(layer, f"{prefix}_{q_name}").data, getattr(layer, f"{prefix}_{s_name}").data
        z = getattr(layer, f"{prefix}_{z_name}").data if loaded.has_zeros else None
        if loaded.format == "mxfp4":  # vLLM stores e8m0 scales as bytes.
            s = s.view(torch.float8_e8m0fnu).to(layer.moe_config.in_dtype)
        qweight, scales, zeros = pack_tensors(loaded.layout, q, s, z, is_gated=is_gated, format=loaded.format)
        del q, s, z
        replace(layer, f"{prefix}_{q_name}", qweight)
        replace(layer, f"{prefix}_{s_name}", scales)
        if getattr(layer, f"{prefix}_{z_name}", None) is not None:
            replace(layer, f"{prefix}_{z_name}", zeros)
        setattr(layer, f"{prefix}_weight", getattr(layer, f"{prefix}_{q_name}"))


def prepare_layer(
    layer: Any,
    loaded: LoadedFormat,
    max_m: int | None,
    *,
    activation: str = "silu_glu",
    batch_invariant: bool = False,
    switch: str = "CudatmaWNA16Experts",
) -> None:
    """Compile and load the kernels for batches of up to ``max_m`` tokens, and share a workspace among graphs.

    The function compiles nothing for weights in host memory or if ``max_m`` is None. ``switch`` is the name by which
    VLLM_DISABLED_KERNELS disables the layer's class.

    vLLM's reload_weights() replaces weights in place. Raises QuantizationError if the new scales have a different
    range, because the layer's kernels were chosen for the original range.
    """
    _, s_name, z_name = loaded.names
    config, device = layer.moe_config, layer.w13_weight.device
    hidden, intermediate = config.hidden_dim, config.intermediate_size_per_partition
    first, second = (
        experts_of(
            getattr(layer, f"{prefix}_weight"),
            getattr(layer, f"{prefix}_{s_name}"),
            getattr(layer, f"{prefix}_{z_name}") if loaded.has_zeros else None,
            *sizes,
            is_gated=is_gated,
            format=loaded.format,
        )
        for prefix, sizes, is_gated in (
            ("w13", (hidden, 2 * intermediate), True),
            ("w2", (intermediate, hidden), False),
        )
    )
    fits = first.weight.scale_fit, second.weight.scale_fit
    for name, fit, known in zip(("w13", "w2"), fits, getattr(layer, _FITS, fits), strict=True):
        if fit != known:
            remedy = f"restart vLLM with these weights, or set VLLM_DISABLED_KERNELS={switch}"
            allowed = f"scales with {known}, as before the reload"
            raise QuantizationError(f"{name}_{s_name}", f"scales with {fit}", allowed, remedy)
    setattr(layer, _FITS, fits)
    if device.type != "cuda":
        return
    share_captured_workspaces()  # vLLM runs its graphs one after another.
    if max_m is None:
        return
    done: _WarmedUp = runtime().part(_WarmedUp)
    tokens, expert_map, top_k = min(max_m, LARGEST_M), layer.expert_map, config.experts_per_token
    formats = tuple(
        [(w.shape, w.format, w.group_size, w.symmetric, w.dtype, w.weight.scale_fit.form) for w in (first, second)]
    )
    options: dict[str, Any] = {"activation": activation, "batch_invariant": batch_invariant}
    key = first.device, formats, top_k, None if expert_map is None else len(expert_map), tokens, *options.values()
    if key not in done:
        x = torch.empty((2, hidden), dtype=config.in_dtype, device=device)
        ids = torch.zeros((2, top_k), dtype=torch.int32, device=device)
        operands = x, first, second, ids.float(), ids
        warm_up(marlin_moe, operands, expert_map=expert_map, max_m=tokens, **options)
        done.add(key)


def pack_tensors(
    layout: str, q: Any, scales: Any, zeros: Any | None, *, is_gated: bool, format: str = "int4"
) -> tuple[Any, Any, Any | None]:
    """Return the packed codes uint8 (experts, blocks, 2048), scales and zero points of a PackedExperts.

    Raises QuantizationError if the shapes do not match each other.
    """
    per_word = BYTES_PER_WORD if weight_format(format).bits == 8 else WORD_VALUES
    result: tuple[Any, Any, Any | None] | None = None
    for expert in range(len(q)):
        words, rows, points = _input_major(layout, q[expert], scales[expert], None if zeros is None else zeros[expert])
        k, n = words.shape[0] * per_word, words.shape[1]
        for name, part in (("scales", rows), ("zeros", points)):
            if part is not None and tuple(part.shape) != (len(rows), n):
                allowed = f"{(len(rows), n)} for a weight with shape {(k, n)}"
                raise QuantizationError(f"{name}[{expert}]", tuple(part.shape), allowed, "pass tensors of one layer")
        if is_gated:
            order = torch.arange(n, device=words.device)
            order = stored_order(gate_then_up(order) if layout == "n_major_interleaved" else order)
            words, rows = words[:, order], rows[:, order]
            points = None if points is None else points[:, order]
        packed: tuple[Any, Any, Any | None]
        if format == "int8":
            packed = repack_int8(words, rows, n=n, group_size=group_size_of(k, len(rows)))
        elif format == "mxfp4":
            packed = *pack_fp4_words(words, _without_zero_groups(words, rows)), None
        else:
            packed = pack_columns(words, rows, points, group_size_of(k, len(rows)))
        if result is None:
            result = _empty(packed, len(q))
        columns = slice(expert * packed[1].shape[1], (expert + 1) * packed[1].shape[1])
        result[0][expert] = packed[0]
        result[1][:, columns] = packed[1]
        if result[2] is not None:
            result[2][:, columns] = packed[2]
    if result is None:
        raise QuantizationError("q", "no experts", "the weights of one or more experts")
    return result


def _without_zero_groups(words: Any, scales: Any) -> Any:
    """Return MXFP4 scales (groups, N) in which the scales of all-zero groups are 0.

    vLLM pads weights with zeros whose scales are 2^-127. These scales would extend the range of the weight's scales.
    """
    is_zero = ((words & _MAGNITUDES) == 0).reshape(len(scales), -1, words.shape[1]).all(1)
    return scales.masked_fill(is_zero, 0)


def _empty(packed: tuple[Any, Any, Any | None], experts: int) -> tuple[Any, Any, Any | None]:
    """Allocate tensors for the packed weights of all experts, given those of one expert."""
    qweight, scales, zeros = packed
    width = experts * scales.shape[1]
    stored = None if zeros is None else zeros.new_empty((len(zeros), width))
    return qweight.new_empty((experts, *qweight.shape)), scales.new_empty((len(scales), width)), stored


def _input_major(layout: str, q: Any, scales: Any, zeros: Any | None) -> tuple[Any, Any, Any | None]:
    """Return the words (K / 8, N), scales (groups, N) and zero points uint8 (groups, N) of one expert."""
    if layout == "gptq":
        return q, scales, None if zeros is None else unpack_nibbles(zeros)
    if layout == "awq":
        values = _awq_values(q)
        pairs = values[0::2] | values[1::2] << 4  # K / 2, N
        split = pairs.view(-1, WORD_VALUES // 2, pairs.shape[1]).transpose(1, 2).contiguous()
        return split.view(torch.int32)[:, :, 0], scales, None if zeros is None else _awq_values(zeros)
    words = q.view(torch.int32).t()
    if zeros is None:
        return words, scales.t(), None
    pairs_or_words = zeros.t().contiguous().view(torch.int32)
    return words, scales.t(), unpack_nibbles(pairs_or_words)


def _awq_values(words: Any) -> Any:
    """Unpack words (R, C) in AWQ's order into uint8 (R, 8 C)."""
    stored = unpack_nibbles(words).view(len(words), -1, WORD_VALUES)
    return stored[:, :, list(_AWQ_PLACES)].reshape(len(words), -1)


def group_size_of(k: int, groups: int) -> int:
    """Return the group size of a weight with this number of groups, where one group means all rows."""
    return -1 if groups == 1 else k // groups


def experts_of(
    qweight: Any, scales: Any, zeros: Any | None, k: int, columns: int, *, is_gated: bool, format: str
) -> PackedExperts:
    """Return PackedExperts that use the memory of the tensors that pack_tensors() returned."""
    experts = len(qweight)
    flat = qweight.view(-1, BLOCK_BYTES)
    n = experts * blocks(columns) * BLOCK
    weight = packed_weight(flat, scales, zeros, None, k, n, group_size_of(k, len(scales)), format)
    return PackedExperts(weight, experts, columns, is_gated)


class PackedExpertsLayer:
    """Experts of one layer. vLLM's base class sets the attributes.

    Attributes
    ----------
    moe_config : ExpertsConfig
        The layer's configuration.
    w1_scale, w2_scale, w1_zp, w2_zp : torch.Tensor or None
        Packed scales and zero points.
    w1_bias, w2_bias : torch.Tensor or None
        Biases (experts, N) of both products. In ``w1_bias``, the columns of gate precede those of up.
    activation_name : str
        Activation between the products, as in ``marlin_moe``.
    """

    activation_name: ClassVar[str] = "silu_glu"
    moe_config: ExpertsConfig
    w1_scale: Any
    w2_scale: Any
    w1_zp: Any
    w2_zp: Any
    w1_bias: Any
    w2_bias: Any
    _known: tuple[int, int, PackedExperts, PackedExperts] | None = None

    @property
    def format(self) -> str:
        """Format of the weights."""
        return "int4"

    @property
    def batch_invariant(self) -> bool:
        """Whether the result of a token must be independent of the other tokens of its batch."""
        return False

    def weights(self, w1: Any, w2: Any) -> tuple[PackedExperts, PackedExperts]:
        """Return the weights whose packed codes are w1 and w2. The first call reads the scales."""
        known = self._known
        if known is None or known[0] != w1.data_ptr() or known[1] != w2.data_ptr():
            hidden, intermediate = self.moe_config.hidden_dim, self.moe_config.intermediate_size_per_partition
            sizes, format = (hidden, 2 * intermediate), self.format
            first = experts_of(w1, self.w1_scale, self.w1_zp, *sizes, is_gated=True, format=format)
            second = experts_of(w2, self.w2_scale, self.w2_zp, intermediate, hidden, is_gated=False, format=format)
            known = self._known = w1.data_ptr(), w2.data_ptr(), first, second
        return known[2], known[3]

    def run(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sums of the experts' results to ``output`` (tokens, K).

        If ``apply_router_weight_on_input`` is True, vLLM has already applied the weights to the input.
        """
        first, second = self.weights(w1, w2)
        factors = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int64)
        marlin_moe(
            hidden_states.contiguous(),
            first,
            second,
            factors.float().contiguous(),
            ids.contiguous(),
            bias1=self.w1_bias,
            bias2=self.w2_bias,
            activation=self.activation_name,
            batch_invariant=self.batch_invariant,
            expert_map=expert_map,
            out=output,
        )


class _WarmedUp(set[tuple[Any, ...]]):
    """Completed warm-ups of a Runtime, which are recorded because a model has many layers of the same shape."""

    #: choice.forget() drops this cache.
    holds_choices = True
