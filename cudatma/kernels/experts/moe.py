"""The function marlin_moe, which computes a mixture-of-experts layer with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe
from cudatma.build.kernel import debugging
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.choice import choice_table, choose
from cudatma.kernels.engine import run
from cudatma.kernels.experts.arguments import launches, sizes_for
from cudatma.kernels.experts.choose import EXPERTS
from cudatma.kernels.experts.layer import MoeConfig, route_shape
from cudatma.kernels.experts.problem import MAX_PAIRS, MoeProblem, check_call, check_weights
from cudatma.kernels.explain import Explanation, explained, explained_gpu
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.operation import Checked, Operation, Weight
from cudatma.kernels.workspace import Workspace, check_workspace
from cudatma.quantization import PackedWeight
from cudatma.quantization.experts import GATE_COLUMNS, GATES, PackedExperts
from cudatma.target import Target, get_target

_WEIGHT = "launch"
_PARTS = ("qweight", "scales", "zeros")
_ARRAYS = (*_PARTS, "tensor_scales")


def marlin_moe(
    x: Any,
    w1: PackedExperts,
    w2: PackedExperts,
    topk_weights: Any,
    topk_ids: Any,
    *,
    bias1: Any = None,
    bias2: Any = None,
    activation: str = "silu_glu",
    batch_invariant: bool = False,
    expert_map: Any = None,
    out: Any = None,
    stream: Any = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
    programmatic: bool = False,
    debug: bool | None = None,
) -> Any:
    """Compute an MoE layer: ``out[t] = sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t])``.

    Each expert computes ``(silu(gate) * up) W2 + bias2``, where gate and up are the halves of ``x W1 + bias1``.
    Routing, both products and the sum run on the GPU without a host synchronization. The activations and the results of
    the experts are rounded to x's dtype. The results of a token's experts are added in fp32, in the order of
    ``topk_ids``. Results are bitwise reproducible.

    Parameters
    ----------
    x : array (tokens, K)
        Activations, fp16 or bf16, with the same dtype and on the same device as the weights. Rows must begin at
        multiples of 16 bytes.
    w1 : PackedExperts
        First weights (experts, K, 2 I), packed with ``gated=True``. K and I must be multiples of 16.
    w2 : PackedExperts
        Second weights (experts, I, K).
    topk_weights : float32 array (tokens, top_k)
        Routing weight of each of a token's selected experts.
    topk_ids : int32 or int64 array (tokens, top_k)
        Ids of the experts selected for each token. An entry of -1 is skipped. All other ids in host memory must be
        valid. Ids in device memory are not read back, so every invalid id is skipped.
    bias1 : array (experts, 2 I), optional
        Biases of the gate, followed by those of up, which are added to the first product. The dtype must be that of
        ``x``.
    bias2 : array (experts, K), optional
        Biases of the second product, which are added before the multiplication by ``topk_weights``. The dtype must be
        that of ``x``. If I is sharded across several GPUs, pass the biases on only one of them.
    activation : {"silu_glu", "swiglu_oai"}, default "silu_glu"
        Activation between the products. ``"swiglu_oai"`` is the activation of gpt-oss. It clamps the gate to at most 7
        and ``up`` to the range -7 to 7, and then computes ``gate * sigmoid(1.702 * gate) * (up + 1)``.
    batch_invariant : bool, default False
        Whether a token's result must be bitwise independent of the other tokens. The result may differ from
        the result without this option, and small batches take longer.
    expert_map : int32 array (global experts,), optional
        Index of each expert in ``w1`` and ``w2``, or -1 for an expert on another GPU, which is skipped. Default: all
        experts are on this GPU.
    out : array (tokens, K), optional
        The result, with the same dtype as ``x``. Default: a new array from the library of ``x``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the library of ``x``.
    backend : str, optional
        Where to run; see ``marlin_gemm``.
    workspace : Workspace, optional
        Memory for the activations and results of the experts. Default: the stream's workspace; during capture, one
        workspace per graph branch.
    programmatic : bool, default False
        Whether to launch as a programmatic dependent of the previous kernel.
    debug : bool, optional
        Whether to run debug builds; see ``marlin_gemm``.

    Returns
    -------
    array (tokens, K)
        The result.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a shape, dtype, device or layout is wrong, if arrays overlap, or if an id in host memory is out of range.
    LaunchError, TargetError, CompileError, DriverError, HazardError, PipelineHang
        If a kernel cannot be compiled, loaded or launched; see ``marlin_gemm``.

    Examples
    --------
    >>> w1 = cudatma.quantize_experts(np.ones((4, 64, 64), np.float32), group_size=64, gated=True)
    >>> w2 = cudatma.quantize_experts(np.ones((4, 32, 64), np.float32), group_size=32)
    >>> x = np.ones((2, 64), np.float16)
    >>> ids, weights = np.array([[0, 3], [1, 2]], np.int32), np.full((2, 2), 0.5, np.float32)
    >>> cudatma.marlin_moe(x, w1, w2, weights, ids, backend="reference").shape
    (2, 64)
    """
    space = None if workspace is None else check_workspace(workspace, getattr(w1, "device", None) or 0)
    weight = weight_of(w1, w2)
    inputs = x, topk_weights, topk_ids, expert_map, bias1, bias2
    options = MoeOptions(activation, batch_invariant, programmatic)
    if debug is None:
        return run(MARLIN_MOE, inputs, out, options, stream, backend, weight, (w1, w2), space)
    with debugging(debug):
        return run(MARLIN_MOE, inputs, out, options, stream, backend, weight, (w1, w2), space)


def moe_explain(
    x: Any,
    w1: PackedExperts,
    w2: PackedExperts,
    topk_weights: Any,
    topk_ids: Any,
    *,
    bias1: Any = None,
    bias2: Any = None,
    activation: str = "silu_glu",
    batch_invariant: bool = False,
    expert_map: Any = None,
    out: Any = None,
    target: str | Target | None = None,
) -> Explanation:
    """Explain which kernels marlin_moe() would run and their predicted time, without compiling or launching them.

    Parameters
    ----------
    x, w1, w2, topk_weights, topk_ids, bias1, bias2, activation, batch_invariant, expert_map, out : arguments
        The arguments of ``marlin_moe``.
    target : str or Target, optional
        Target to assume, such as ``"sm_120a"``. Default: the target of the GPU that holds the arrays. For host arrays,
        the default is ``$CUDATMA_TARGET``, or an H200 if this variable is not set.

    Returns
    -------
    Explanation
        The explanation. The number of blocks is the expected number if tokens choose experts at random.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError
        If the arguments are invalid, or if no kernel supports the target.

    Examples
    --------
    >>> w1 = cudatma.quantize_experts(np.ones((4, 64, 64), np.float32), group_size=64, gated=True)
    >>> w2 = cudatma.quantize_experts(np.ones((4, 32, 64), np.float32), group_size=32)
    >>> x = np.ones((2, 64), np.float16)
    >>> ids, weights = np.array([[0, 3], [1, 2]], np.int32), np.full((2, 2), 0.5, np.float32)
    >>> cudatma.moe_explain(x, w1, w2, weights, ids, target="sm_90a").kernel
    'skinny'
    """
    weights = check_weights(w1, w2)
    inputs = x, topk_weights, topk_ids, expert_map, bias1, bias2
    checked = check_call(inputs, out, MoeOptions(activation, batch_invariant), weights)
    return explained(EXPERTS, checked.problem, explained_gpu(w1.device, target))


class MoeOptions(NamedTuple):
    """Options of marlin_moe, which are part of a call's key."""

    activation: str = "silu_glu"
    batch_invariant: bool = False
    programmatic: bool = False


class MarlinMoe(Operation[MoeProblem, MoeConfig]):
    """Operation of marlin_moe()."""

    name: ClassVar[str] = "marlin_moe"
    inputs: ClassVar[tuple[str, ...]] = ("x", "topk_weights", "topk_ids", "expert_map", "bias1", "bias2")
    weight_arrays: ClassVar[tuple[str, ...]] = tuple(f"{w}_{name}" for w in ("w1", "w2") for name in _ARRAYS)
    fixed_axes: ClassVar[tuple[int | None, ...]] = (1, 1, 1, None, None, None, 1)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[MoeProblem]:
        """Validate a call. ``options`` is a MoeOptions object, and ``resource`` contains the weights."""
        return check_call(inputs, out, options, resource)

    def resized(
        self, problem: MoeProblem, shapes: Sequence[Any], strides_bytes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[MoeProblem, tuple[int, ...], None] | None:
        """Return the same problem with another number of tokens."""
        x, factors, ids, *_, out = shapes
        m = x[0]
        if len(x) != 2 or factors[:1] != (m,) or ids[:1] != (m,) or (out is not None and out[:1] != (m,)):
            return None
        return None if m * problem.top_k > MAX_PAIRS else (problem.with_m(m), (m, problem.down.n), None)

    def alignment_masks(self, problem: MoeProblem) -> tuple[int, ...]:
        """Return 15 for arrays accessed by TMA or in vectors, 3 for arrays of words, and 1 for the biases."""
        return 15, 3, 3, 3, 1, 1, 15

    def plan_key(self, problem: MoeProblem) -> Hashable:
        """Return every field except the number of tokens and the scale exponents."""
        return problem.plan_key

    def configure(self, problem: MoeProblem, gpu: Gpu, memo: dict[Any, Any]) -> MoeConfig:
        """Return the kernels for a problem."""
        layer, target = choose(EXPERTS, problem, gpu, memo), get_target(gpu.target)
        key = id(layer), route_shape(problem, target)
        _, config = memo.get(key) or (None, None)
        if config is None:
            # The reference to the layer keeps it alive, so that its id is not reused.
            _, config = memo[key] = layer, layer.kernels(problem, target)
        return config

    def kernels(self, problem: MoeProblem, config: MoeConfig) -> tuple[tuple[str, Any], ...]:
        """Return the kernels in order of launch."""
        return config.kernels

    def kernels_up_to(self, checked: Checked[MoeProblem], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the kernels for every number of tokens up to ``max_m``."""
        problem, target = checked.problem, get_target(gpu.target)
        table = choice_table(EXPERTS, problem, gpu, max_m)
        shapes = {route_shape(problem.with_m(m), target): m for m in table.ms_up_to(max_m)}
        for layer in table.configs_up_to(max_m):
            for m in shapes.values():
                yield from layer.kernels(problem.with_m(m), target).kernels

    def arguments(
        self, problem: MoeProblem, config: MoeConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launches of a problem."""
        return launches(problem, config, resident)

    def sizes_for(
        self, problem: MoeProblem, config: MoeConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[MoeProblem], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launches."""
        return sizes_for(problem, config, resident)

    def reference(self, problem: MoeProblem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute each expert with dequantized weights in fp64, rounded at the same points as in the kernels."""
        named = {name: host_array(info) for name, info in arrays.items() if not name.startswith(("w1", "w2"))}
        x, out, ids, factors = (named[name] for name in ("x", "out", "topk_ids", "topk_weights"))
        local = ids if "expert_map" not in named else np.where(ids < 0, -1, named["expert_map"][ids])
        w1, w2 = (
            _host_weight(problem.experts, shape, name, arrays, factor)
            for shape, name, factor in zip((problem.up, problem.down), ("w1", "w2"), problem.tensor_scales, strict=True)
        )
        total = np.zeros(out.shape, np.float32)
        with np.errstate(all="ignore"):  # Infinities and NaNs are valid results, as on the GPU.
            for expert in np.unique(local[local >= 0]):
                token, choice = np.nonzero(local == expert)
                both = x[token].astype(np.float64) @ w1[expert]
                gate, up = (
                    both.reshape(len(token), -1, 2, GATE_COLUMNS).transpose(2, 0, 1, 3).reshape(2, len(token), -1)
                )
                if "bias1" in named:
                    halves = np.split(named["bias1"][expert].astype(np.float64), 2)
                    gate, up = gate + halves[0], up + halves[1]
                hidden = GATES[problem.gate](gate, up).astype(x.dtype).astype(np.float64)
                result = hidden @ w2[expert]
                if "bias2" in named:
                    result += named["bias2"][expert].astype(np.float64)
                result = result.astype(x.dtype).astype(np.float32)
                np.add.at(total, token, factors[token, choice, None] * result)
            out[...] = total.astype(out.dtype)


MARLIN_MOE = MarlinMoe()


def _host_weight(
    experts: int, shape: LinearShape, name: str, arrays: Mapping[str, ArrayInfo], tensor_scale: float
) -> Any:
    """Return dequantized weights (experts, K, N) in fp64. The columns are in stored order."""
    parts: dict[str, Any] = {
        part: host_array(info) if (info := arrays.get(f"{name}_{part}")) is not None else None for part in _PARTS
    }
    columns = -(-shape.n // 64) * 64
    parts |= {"group_size": shape.group_size, "dtype": shape.dtype, "format": shape.format}
    weight = PackedWeight(**parts, perm=None, shape=(shape.k, experts * columns), tensor_scale=tensor_scale)
    values = weight.dequantize().reshape(shape.k, experts, columns)[:, :, : shape.n].transpose(1, 0, 2)
    if (info := arrays.get(f"{name}_tensor_scales")) is not None:
        factors = np.repeat(host_array(info), GATE_COLUMNS, axis=1)  # one per 8 columns (of gate and of up)
        values *= np.tile(factors, shape.n // factors.shape[1])[:, None]
    return values


class _Format:
    """The part of a plan's key that comes from the weights. Layers with the same shapes and formats share it."""


class _Formats(dict[Hashable, _Format]):
    """Formats of all layers in a process, which the Runtime holds."""


def weight_of(w1: Any, w2: Any) -> Weight:
    """Return the arrays of a layer's weights for a launch. Raises ArgumentError or ArgumentTypeError."""
    first, second = check_weights(w1, w2)
    known = first.attachments.get(_WEIGHT)
    if known is not None and known[0] is second:
        weight: Weight = known[1]
        return weight
    arrays = {
        f"{name}_{part}": getattr(w.weight if part in _PARTS else w, part)
        for name, w in (("w1", first), ("w2", second))
        for part in _ARRAYS
    }
    infos = {name: describe(array, name) for name, array in arrays.items() if array is not None}
    for name, info in infos.items():
        if first.device is not None and info.pointer % TMA_ALIGNMENT_BYTES:
            allowed = f"a multiple of {TMA_ALIGNMENT_BYTES} bytes"
            raise ArgumentError(f"{name}.pointer", hex(info.pointer), allowed, "pass an aligned copy")
    factors = *(w.weight.scale_fit for w in (first, second)), first.weight.tensor_scale, second.weight.tensor_scale
    key = first.device, factors, *((w.shape, w.group_size, w.symmetric, w.dtype, w.format) for w in (first, second))
    formats: _Formats = context.runtime().part(_Formats)
    weight = Weight.of(formats.setdefault(key, _Format()), arrays, infos)
    first.attachments[_WEIGHT] = second, weight  # Keeps w2 alive, because the launch reads its arrays.
    return weight
