"""Find the matrices of a checkpoint that belong to the experts of one layer.

A checkpoint stores either a tensor per projection of each expert (``experts.17.gate_proj``, or ``experts.17.w1`` in
Mixtral), or one stacked tensor for all experts (``experts.gate_up_proj``). The conversion packs them as two weights,
``experts.gate_up_proj`` and ``experts.down_proj``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.agreement import LayerFacts
from cudatma.quantization.experts import gate_then_up

#: Names of an expert's gate, up and down projections.
NAMINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
#: K and N of both weights must be multiples of this number, as in marlin_moe.
_UNIT = 16
_AGAIN = "copy or download the checkpoint again"


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The matrices of a layer's experts that become one PackedExperts.

    Attributes
    ----------
    layers : tuple of str
        Names of the matrices, expert by expert. In a gated group, each expert has two matrices, gate and up. A stacked
        group has a single name, the name of the stacked tensor.
    experts : int
        Number of experts.
    gated : bool
        Whether the matrices are gate and up projections.
    is_stacked : bool
        Whether one tensor contains all experts.
    is_transposed : bool
        Whether a stacked tensor has the shape (experts, K, N) instead of (experts, N, K).
    is_interleaved : bool
        Whether the outputs of gate and up alternate in a stacked tensor, as in gpt-oss.
    bias : str
        Name of the tensor with the biases (experts, N) of a stacked tensor, or "".
    """

    layers: tuple[str, ...]
    experts: int
    gated: bool
    is_stacked: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    bias: str = ""

    def split(self, tensor: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Yield the matrices in a tensor. Float matrices have shape (N, K)."""
        if not self.is_stacked:
            yield tensor
            return
        for matrix in tensor.transpose(0, 2, 1) if self.is_transposed else tensor:
            yield matrix[gate_then_up(np.arange(len(matrix)))] if self.is_interleaved else matrix

    def arrange(self, bias: NDArray[Any]) -> NDArray[Any]:
        """Return the biases (experts, N) in the column order of the packed weight (gate, then up)."""
        return gate_then_up(bias) if self.is_interleaved else bias


def is_expert(layer: str) -> bool:
    """Return whether a name belongs to an expert or to the weights of all experts."""
    return re.search(r"\.experts\.", layer) is not None


def is_expert_weight(layer: str) -> bool:
    """Return whether a name belongs to the packed weights of all experts."""
    return re.search(rf"\.experts\.({_GATE_UP}|{_DOWN})$", layer) is not None


def sibling(group: str) -> str:
    """Return the name of the other packed weight of the same experts."""
    other = _DOWN if group.endswith(_GATE_UP) else _GATE_UP
    return group.removesuffix(_GATE_UP if other == _DOWN else _DOWN) + other


def group_experts(layers: Iterable[str]) -> tuple[dict[str, ExpertGroup], dict[str, WeightFileError]]:
    """Group the matrices of experts.

    Returns the groups by name, and an error for each layer that has the name of an expert but cannot be grouped.
    """
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    errors: dict[str, WeightFileError] = {}
    for layer in layers:
        if match := _MATRIX.fullmatch(layer):
            found[match[1]][int(match[2])].add(match[3])
        elif is_expert(layer):
            names = " or ".join("{}, {} and {}".format(*naming) for naming in NAMINGS)
            errors[layer] = WeightFileError(
                layer, "an expert with other matrices", f"an expert with the matrices {names}"
            )
    groups: dict[str, ExpertGroup] = {}
    for module, matrices in found.items():
        present = set[str]().union(*matrices.values())
        naming = next(naming for naming in NAMINGS if present.intersection(naming))
        for expert in range(max(matrices) + 1):
            if matrices.get(expert, set()) != set(naming):
                missing = [name for name in naming if name not in matrices.get(expert, ())]
                got = f"no {' and no '.join(missing)}" if missing else "matrices of two naming schemes"
                allowed = "an expert with {}, {} and {}".format(*naming)
                error = WeightFileError(f"{module}.{expert}", got, allowed, _AGAIN)
                present_names = (f"{module}.{index}.{name}" for index, names in matrices.items() for name in names)
                errors |= dict.fromkeys(present_names, error)
                break
        else:
            gate, up, down = naming
            for name, parts in ((_GATE_UP, (gate, up)), (_DOWN, (down,))):
                members = tuple(f"{module}.{index}.{part}" for index in range(len(matrices)) for part in parts)
                groups[f"{module}.{name}"] = ExpertGroup(members, len(matrices), name == _GATE_UP)
    return groups, errors


def stacked_experts(shapes: Mapping[str, tuple[int, ...]], is_interleaved: bool) -> dict[str, ExpertGroup]:
    """Return the groups of the stacked float tensors in ``shapes``.

    The orientation follows from the shapes, because transformers 5 stores (experts, N, K) for most models, whereas
    earlier versions and some models store (experts, K, N). ``is_interleaved`` states whether gate and up alternate.
    """
    groups: dict[str, ExpertGroup] = {}
    for down in (name for name in shapes if name.endswith(f".experts.{_DOWN}")):
        first, second = shapes.get(sibling(down), ()), shapes[down]
        if len(first) != 3 or len(second) != 3 or first[0] != second[0]:
            continue
        for is_transposed in (False, True):
            (n, k), (rows, columns) = (shape[:0:-1] if is_transposed else shape[1:] for shape in (first, second))
            if (n, k) == (2 * columns, rows):
                for name, columns in ((sibling(down), n), (down, k)):
                    groups[name] = ExpertGroup(
                        (name,),
                        first[0],
                        gated=name != down,
                        is_stacked=True,
                        is_transposed=is_transposed,
                        is_interleaved=is_interleaved and name != down,
                        bias=_bias(name, shapes, (first[0], columns)),
                    )
    return groups


def _bias(name: str, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, int]) -> str:
    """Return the name of a stacked tensor's bias tensor, or "" if it has none.

    Raises WeightFileError if the bias tensor's shape is wrong.
    """
    bias = f"{name}_bias"
    if shapes.get(bias, shape) != shape:
        raise WeightFileError(bias, f"shape {shapes[bias]}", f"{shape} (one bias per output of each expert)", _AGAIN)
    return bias if bias in shapes else ""


def interleaved_experts(
    layers: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ExpertGroup]:
    """Return the groups of gpt-oss's experts.

    ``layers`` contains the shapes (experts, N, ...) of the experts' tensors, and ``shapes`` contains the shapes of all
    tensors. Raises WeightFileError if a layer is not one of gpt-oss's experts.
    """
    groups = {}
    for name, shape in layers.items():
        if not is_expert_weight(name) or sibling(name) not in layers:
            allowed = f"a layer with the name *.experts.{_GATE_UP} or *.experts.{_DOWN}"
            raise WeightFileError(name, "a layer that is not an expert", allowed)
        gated = name.endswith(_GATE_UP)
        bias = _bias(name, shapes, (shape[0], shape[1]))
        groups[name] = ExpertGroup((name,), shape[0], gated, is_stacked=True, is_interleaved=gated, bias=bias)
    return groups


def misfit(sizes: Mapping[str, tuple[int, ...]], group: str) -> str:
    """Return the reason why marlin_moe cannot use the experts of this group, or "".

    ``sizes`` contains (experts, K, N) of each group.
    """
    k, n = sizes[group][1:]
    first, second = (sizes[name] for name in sorted((group, sibling(group)), reverse=True))  # gate_up_proj, down_proj
    if (first[0], first[2], first[1]) != (second[0], 2 * second[1], second[2]):
        return f"experts whose projections have the sizes {first} and {second}"
    if k % _UNIT or n % _UNIT:
        return f"experts of size {k} x {n}, which is not a multiple of {_UNIT} in both dimensions"
    return ""


def check_alike(group: str, members: ExpertGroup, facts: Mapping[str, LayerFacts]) -> None:
    """Raise QuantizationError unless a group's matrices have equal sizes and groups, and no activation order."""
    first = facts[members.layers[0]]
    for layer in members.layers:
        fact = facts[layer]
        if fact.act_order:
            remedy = "quantize the model again without activation order (desc_act=False)"
            raise QuantizationError(layer, "activation order", "an expert without activation order", remedy)
        for name, value, expected in (
            ("K x N", (fact.extent.k, fact.extent.n), (first.extent.k, first.extent.n)),
            ("group_size", fact.group_size, first.group_size),
            ("groups", fact.extent.groups, first.extent.groups),
        ):
            if value != expected:
                allowed = f"{expected} (as in {members.layers[0]})"
                raise QuantizationError(f"{layer}: {name}", value, allowed, f"quantize all experts of {group} alike")


def stacked_sizes(group: ExpertGroup, k: int, n: int) -> tuple[int, int, int]:
    """Return (experts, K, N) of a group whose first matrix has the sizes K and N."""
    return group.experts, k, n * (2 if group.gated and not group.is_stacked else 1)
