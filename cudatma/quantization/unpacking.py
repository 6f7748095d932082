"""A packed weight's plain integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudatma.quantization import layout_v1
from cudatma.quantization.namespaces import namespace_of, on_device_of


@dataclass(frozen=True, slots=True, eq=False)
class LogicalWeight:
    """A weight's integers in plain order: q uint8 (K, N), scales (G, N), zeros uint8 (G, N) or None, perm (K,) or None.

    Rows of q are packed rows: row k belongs to activation column perm[k].
    """

    q: Any
    scales: Any
    zeros: Any | None
    perm: Any | None


def unpack(weight: Any) -> LogicalWeight:
    """The inverse of pack(): a PackedWeight's integers in plain order, on the host or the device where it is."""
    k, n = weight.shape
    xp = namespace_of(weight.qweight)
    with on_device_of(weight.qweight):
        q = layout_v1.unpack_values(weight.qweight, layout_v1.blocks(k), layout_v1.blocks(n), xp)
        rows = [None if a is None else layout_v1.restore_columns(a)[:, :n] for a in (weight.scales, weight.zeros)]
        return LogicalWeight(q[:k, :n], rows[0], rows[1], weight.perm)
