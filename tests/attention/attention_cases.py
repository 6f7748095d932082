"""Calls of attention that every version supports. The same table runs on the emulator and on a GPU."""

from __future__ import annotations

from typing import Any

#: Sizes, and options of the call.
CASES: dict[str, dict[str, Any]] = {
    "tails": {"q_length": 65, "k_length": 130},
    "one_query": {"heads": 2, "q_length": 1, "k_length": 65, "causal": True},
    "grouped_causal": {"heads": 4, "q_length": 70, "k_length": 200, "causal": True},
    "softcap": {"q_length": 65, "k_length": 70, "softcap": 2.0, "causal": True},
    "window": {"q_length": 130, "k_length": 200, "window": (70, 20)},
    "causal_window": {"q_length": 200, "k_length": 260, "causal": True, "window": (60, 0)},
    "left_limit": {"q_length": 100, "k_length": 70, "window": (30, None), "scale": 0.3},
    "rows_without_keys": {"q_length": 130, "k_length": 65, "causal": True},
}
