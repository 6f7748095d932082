"""A plan's map of activations and its result follow the arrays of each call."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

from cudatma.kernels.marlin.plan import Plan


def test_a_plan_follows_its_arrays() -> None:
    """Without a card: a plan whose arguments are plain memory, as LaunchPlan would hold them."""
    plan, sent = Plan.__new__(Plan), []
    activations = (ctypes.c_uint64 * 16)(*range(16))
    pointers = {name: ctypes.c_uint64() for name in ("_x", "_output", "_bias", "_partials", "_flags")}
    fields = {"_map": activations, "_map_address": 0, **pointers}
    fields |= {"_space": 0, "_last_bias": 0, "_lock": threading.Lock()}
    for name, value in fields.items():
        setattr(plan, name, value)
    output = pointers["_output"]
    plan._plan = SimpleNamespace(launch=lambda stream: sent.append((stream, activations[0], output.value)))  # type: ignore
    space: Any = SimpleNamespace(partials_pointer=7, flags_pointer=8)
    plan.run(0x1000, 0x2000, 0, space, 3)
    plan.run(0x3000, 0x4000, 0, space, 4)
    assert sent == [(3, 0x1000, 0x2000), (4, 0x3000, 0x4000)]
    assert list(activations[1:]) == list(range(1, 16))
