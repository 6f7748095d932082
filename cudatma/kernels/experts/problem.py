"""Problems of marlin_moe, the checks of its arguments, and the members of the kernels' launch struct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives, counted, quoted
from cudatma.kernels.checks import check_gradient, check_out, check_place
from cudatma.kernels.family import resized_copy
from cudatma.kernels.host import host_array
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.marlin.problem import MEMBERS as MARLIN_MEMBERS
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape, weight_text
from cudatma.kernels.operation import Checked
from cudatma.quantization.experts import GATES, PackedExperts

FUNCTION = "marlin_moe"
#: Maximum number of (token, expert) pairs, because the device divides their indices as 31-bit numbers.
MAX_PAIRS = 2**31 - 1
ELEMENT_BYTES = 2
MAX_EXPERTS = 1024
#: K and N of both products must be multiples of this number, so that every row begins at a multiple of 32 bytes.
SIZE_UNIT = 16
#: Members of the launch structs.
MEMBERS = {
    member.name: member
    for member in (
        *(WORK_MEMBERS[name] for name in ("m", "n", "k", "tiles_n", "k_iterations")),
        *(MARLIN_MEMBERS[name] for name in ("scale_pitch", "scale_offset", "scale_back")),
        Member("pairs", "u32", "number of (token, expert) pairs"),
        Member("top_k", "u32", "number of experts per token"),
        Member("experts", "u32", "number of experts whose weights are on this GPU"),
        Member("global_experts", "u32", "number of experts on all GPUs"),
        Member("id_words", "u32", "number of 32-bit words per expert id, 1 or 2"),
        Member("expert_rows", "u32", "number of rows of packed weights (64 columns) per expert"),
        Member("by_tiles_n", "Divisor", "divides by tiles_n"),
        Member("by_top_k", "Divisor", "divides by top_k"),
        WORK_MEMBERS["output_pitch"],
        MARLIN_MEMBERS["activation_pitch"],
        Member("result_at", "u64", "offset of this kernel's results in the workspace, in bytes"),
        Member("blocks_at", "u64", "offset of the number of blocks and the next tiles, which precede the blocks"),
        Member("pairs_at", "u64", "offset of the sorted pairs"),
        Member("places_at", "u64", "offset of each pair's index in the sorted pairs"),
    )
}


@dataclass(frozen=True)  # without slots, as resized_copy() requires
class MoeProblem:
    """A mixture-of-experts layer for M tokens.

    up, down: shape and format of an expert's first and second weight. experts: number of experts whose weights are on
    this GPU. global_experts: number of experts on all GPUs. id_words: 1 for int32 ids, 2 for int64 ids. x_pitch_bytes,
    out_pitch_bytes: row pitches. gate: a key of GATES. scale_forms, exponents, tensor_scales: factors of each weight's
    ``scale_fit``. batch_invariant: whether a token's result must not depend on the other tokens. programmatic: whether
    the first launch is a programmatic dependent of the previous kernel.
    """

    up: LinearShape
    down: LinearShape
    m: int
    top_k: int
    experts: int
    global_experts: int
    id_words: int = 1
    x_pitch_bytes: int = 0
    out_pitch_bytes: int = 0
    gate: str = "silu_glu"
    scale_forms: tuple[str, str] = ("none", "none")
    exponents: tuple[int, int] = (0, 0)
    tensor_scales: tuple[float, float] = (1.0, 1.0)
    batch_invariant: bool = False
    programmatic: bool = False

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MoeProblem:
        """Return the problem of a tuning entry. The scales of the weights are assumed to allow one multiply-add.

        Raises KeyError, ArgumentError or ArgumentTypeError for an invalid entry.
        """
        sizes = {name: raw[name] for name in ("m", "n", "k", "experts", "top_k")}
        for name, value in sizes.items():
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            if value < 1:
                raise ArgumentError(name, value, "at least 1")
        m, n, k, experts, top_k = sizes.values()
        check_sizes(k, n, experts, "k", "n", "experts")
        if top_k > experts:
            raise ArgumentError("top_k", top_k, f"at most {experts} (the number of experts)")
        if m * top_k > MAX_PAIRS:
            raise ArgumentError("m", m, f"at most {MAX_PAIRS // top_k} with top_k = {top_k}", "split the batch")
        kind = {name: raw[name] for name in PROBLEM_FIELDS}
        return cls(
            LinearShape(k, 2 * n, **kind), LinearShape(n, k, **kind), m, top_k, experts, experts,
            scale_forms=("as_stored", "as_stored"),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Return the problem in the form that tuning entries store, with the format of the first weight."""
        sizes = {"k": self.k, "n": self.n, "experts": self.experts, "top_k": self.top_k}
        return sizes | {name: getattr(self.up, name) for name in PROBLEM_FIELDS} | {"m": self.m}

    @property
    def n(self) -> int:
        """Number of columns of the gate."""
        return self.down.k

    @property
    def k(self) -> int:
        return self.up.k

    @property
    def fixed(self) -> tuple[Any, ...]:
        """Fields other than M on which the choice depends."""
        return self.up, self.down, self.top_k, self.experts, self.global_experts, self.batch_invariant

    @property
    def constraint(self) -> str:
        """Reason why only some configurations are allowed, or "" if all are allowed."""
        return "batch invariance requires the same order of additions for every M" if self.batch_invariant else ""

    @property
    def description(self) -> str:
        """Description of the problem in words."""
        local = "" if self.experts == self.global_experts else f"{self.experts} of "
        layer = f"{local}{counted(self.global_experts, 'expert')} with K = {self.k} and N = {self.n}, top {self.top_k}"
        weights = [weight_text(self.up), weight_text(self.down)]
        return f"M = {self.m}, {layer}, {', then '.join(dict.fromkeys(weights))}"

    def with_m(self, m: int) -> MoeProblem:
        """Return the problem with another M. The caller must have checked M."""
        return resized_copy(self, m=m)

    def product(self, name: str) -> LinearShape:
        """Return the shape of the "up" or "down" weight."""
        return self.up if name == "up" else self.down

    def scale_form(self, name: str) -> str:
        """Return the scale form of the "up" or "down" weight."""
        return self.scale_forms[name == "down"]

    @property
    def pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return self.m * self.top_k

    @property
    def plan_key(self) -> tuple[Any, ...]:
        """Every field except M and the exponents, which are members of the structs."""
        return (
            *(self.up, self.down, self.top_k, self.experts, self.global_experts, self.id_words),
            *(self.x_pitch_bytes, self.out_pitch_bytes, self.gate, self.scale_forms),
            *(self.batch_invariant, self.programmatic),
        )


def check_weights(w1: Any, w2: Any) -> tuple[PackedExperts, PackedExperts]:
    """Return the weights, or raise ArgumentTypeError or ArgumentError unless they belong to one layer."""
    for name, weight in (("w1", w1), ("w2", w2)):
        if not isinstance(weight, PackedExperts):
            remedy = "create the weights with quantize_experts() or pack_experts()"
            raise ArgumentTypeError(name, type(weight).__name__, "PackedExperts", remedy)
    if not w1.gated:
        remedy = "pack the weight with gated=True"
        raise ArgumentError("w1.gated", False, "True", remedy)
    if w2.gated:
        raise ArgumentError("w2.gated", True, "False", "pack the weight with gated=False")
    experts, k, columns = w1.shape
    if w2.shape != (experts, columns // 2, k):
        raise ArgumentError("w2.shape", w2.shape, f"{(experts, columns // 2, k)} for w1 of shape {w1.shape}")
    for name in ("dtype", "device"):
        if getattr(w2, name) != getattr(w1, name):
            raise ArgumentError(f"w2.{name}", getattr(w2, name), f"{getattr(w1, name)} (the {name} of w1)")
    check_sizes(k, columns // 2, experts, "w1.shape[1]", "w1.shape[2] / 2", "w1.shape[0]")
    return w1, w2


def check_sizes(k: int, n: int, experts: int, k_name: str, n_name: str, experts_name: str) -> None:
    """Raise ArgumentError unless the kernels support K, N (the columns of the gate) and the number of experts."""
    for name, extent in ((k_name, k), (n_name, n)):
        if extent % SIZE_UNIT:
            raise ArgumentError(name, extent, f"a multiple of {SIZE_UNIT}", "pad the weights with zeros")
    if experts > MAX_EXPERTS:
        raise ArgumentError(experts_name, experts, f"at most {MAX_EXPERTS}", "divide the experts among several GPUs")


def check_call(
    inputs: Sequence[Any],
    out: Any,
    options: Any,
    weights: tuple[PackedExperts, PackedExperts],
) -> Checked[MoeProblem]:
    """Validate a call. ``options`` is a MoeOptions object. Raises ArgumentError or ArgumentTypeError."""
    x, topk_weights, topk_ids, expert_map, *biases = inputs
    w1, w2 = weights
    if not isinstance(options.activation, str) or options.activation not in GATES:
        raise ArgumentError("activation", options.activation, quoted(GATES))
    for name in ("batch_invariant", "programmatic"):
        if not isinstance(value := getattr(options, name), bool):
            raise ArgumentTypeError(name, type(value).__name__, "bool")
    dtype = ACTIVATION_TYPES[w1.dtype].numpy
    info = describe(x, "x")
    _check_dtype(info, "x", (dtype.name,))
    experts, k, columns = w1.shape
    if len(info.shape) != 2 or info.shape[1] != k:
        raise ArgumentError("x.shape", info.shape, f"(tokens, {k}) for w1 of shape {w1.shape}")
    m = info.shape[0]
    if info.device != w1.device:
        raise ArgumentError(
            "x.device", info.device, f"{w1.device} (the device of the weights)", "move the weights with to_device()"
        )
    pitch = _check_rows(info, "x")
    check_gradient(info.owner, "x", FUNCTION)
    factors = describe(topk_weights, "topk_weights")
    _check_dtype(factors, "topk_weights", ("float32",))
    if len(factors.shape) != 2 or factors.shape[0] != m or not factors.shape[1] >= 1:
        raise ArgumentError(
            "topk_weights.shape", factors.shape, f"({m}, top_k) with top_k > 0 and one row per row of x"
        )
    top_k = factors.shape[1]
    ids = describe(topk_ids, "topk_ids")
    _check_dtype(ids, "topk_ids", ("int32", "int64"))
    if ids.shape != factors.shape:
        raise ArgumentError("topk_ids.shape", ids.shape, f"{factors.shape} (the shape of topk_weights)")
    if m * top_k > MAX_PAIRS:
        raise ArgumentError("topk_ids.shape", ids.shape, f"a shape of at most {MAX_PAIRS} elements", "split the batch")
    local = None
    if expert_map is not None:
        local = describe(expert_map, "expert_map")
        _check_dtype(local, "expert_map", ("int32",))
        if len(local.shape) != 1 or not local.shape[0]:
            raise ArgumentError("expert_map.shape", local.shape, "(number of experts on all GPUs,)")
    arrays = {"x": info, "topk_weights": factors, "topk_ids": ids} | ({} if local is None else {"expert_map": local})
    for name, array in list(arrays.items())[1:]:
        check_place(array, name, info, "x", FUNCTION)
        if not array.is_contiguous:
            raise ArgumentError(
                f"{name}.strides", array.strides_bytes, "contiguous (C order)", "pass a contiguous copy"
            )
    added: list[ArrayInfo | None] = []
    for name, bias, columns_of in (("bias1", biases[0], columns), ("bias2", biases[1], k)):
        info_of = None if bias is None else describe(bias, name)
        added.append(info_of)
        if info_of is None:
            continue
        _check_dtype(info_of, name, (dtype.name,))
        if info_of.shape != (experts, columns_of):
            raise ArgumentError(f"{name}.shape", info_of.shape, f"{(experts, columns_of)} (one row per expert)")
        check_place(info_of, name, info, "x", FUNCTION)
        if not info_of.is_contiguous:
            raise ArgumentError(
                f"{name}.strides", info_of.strides_bytes, "contiguous (C order)", "pass a contiguous copy"
            )
        check_gradient(info_of.owner, name, FUNCTION)
        arrays[name] = info_of
    global_experts = experts if local is None else local.shape[0]
    if info.device is None:
        _check_host_ids(ids, local, experts, global_experts)
    result = None
    out_pitch = k * ELEMENT_BYTES
    if out is not None:
        result = describe(out, "out")
        check_out(result, dtype, f"{dtype.name} (the dtype of x)", (m, k), arrays, FUNCTION)
        out_pitch = _check_rows(result, "out")
    problem = MoeProblem(
        up=LinearShape(k, columns, w1.group_size, not w1.symmetric, w1.dtype, w1.format),
        down=LinearShape(columns // 2, k, w2.group_size, not w2.symmetric, w2.dtype, w2.format),
        m=max(m, 1),
        top_k=top_k,
        experts=experts,
        global_experts=global_experts,
        id_words=ids.dtype.itemsize // 4,
        x_pitch_bytes=pitch,
        out_pitch_bytes=out_pitch,
        gate=options.activation,
        scale_forms=(w1.weight.scale_fit.form, w2.weight.scale_fit.form),
        exponents=(w1.weight.scale_fit.exponent, w2.weight.scale_fit.exponent),
        tensor_scales=(w1.weight.tensor_scale, w2.weight.tensor_scale),
        batch_invariant=options.batch_invariant,
        programmatic=options.programmatic,
    )
    return Checked(problem, (info, factors, ids, local, *added), result, (m, k), info.dtype)


def _check_dtype(info: ArrayInfo, field: str, allowed: tuple[str, ...]) -> None:
    if info.dtype.name not in allowed or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), alternatives(allowed), f"convert {field}")


def _check_rows(info: ArrayInfo, field: str) -> int:
    """Return the row pitch of a matrix. The rows must be contiguous and aligned for TMA."""
    pitch = info.shape[1] * ELEMENT_BYTES if info.shape[0] <= 1 else info.strides_bytes[0]
    if info.size_elems:
        if info.shape[1] > 1 and info.strides_bytes[1] != ELEMENT_BYTES:
            raise ArgumentError(
                f"{field}.strides", info.strides_bytes, "contiguous within rows", "pass a contiguous copy"
            )
        if pitch < info.shape[1] * ELEMENT_BYTES or pitch % TMA_ALIGNMENT_BYTES:
            allowed = f"multiples of {TMA_ALIGNMENT_BYTES} bytes between rows that do not overlap"
            raise ArgumentError(f"{field}.strides", info.strides_bytes, allowed, "pass a copy")
        if info.device is not None and (info.pointer % TMA_ALIGNMENT_BYTES or not info.pointer):
            allowed = f"a nonzero multiple of {TMA_ALIGNMENT_BYTES} bytes"
            raise ArgumentError(f"{field}.pointer", hex(info.pointer), allowed, "pass a copy")
    return pitch


def _check_host_ids(ids: ArrayInfo, local: ArrayInfo | None, experts: int, global_experts: int) -> None:
    """Raise ArgumentError for an id or an entry of the map that is out of range. Only host arrays are checked."""
    checked = (
        ("topk_ids", ids, global_experts, "pass -1 to skip the expert"),
        ("expert_map", local, experts, "pass -1 for an expert on another GPU"),
    )
    for name, info, end, remedy in checked:
        if info is None:
            continue
        values = host_array(info)
        wrong = np.argwhere((values < -1) | (values >= end))
        if wrong.size:
            at = ", ".join(str(int(i)) for i in wrong[0])
            raise ArgumentError(f"{name}[{at}]", int(values[tuple(wrong[0])]), f"-1 to {end - 1}", remedy)
