"""The emulator's TMA and kernels against recorded results of an H200.

``tests/fixtures/tma/h200.jsonl.gz`` contains random TMA operations with the GPU's answers, including traps.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cases import TOLERANCE, kernel_cases
from kernel_replay import EmulatedDevice
from tma_direct import answer
from tma_replay import EmulatedGpu

from cudatma.target import get_target

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "tma"
#: Compared fields of an operation that ended.
RESULTS = ("counted", "done", "gmem", "smem", "map")
CASES, KERNELS = FIXTURES / "h200.jsonl.gz", FIXTURES / "kernels_h200.npz"
STORED = {name.split("/")[0] for name in np.load(KERNELS).files}
#: Entry names that the capture was made under.
FORMER_PREFIXES = {"marlin_skinny_": "marlin_strip_", "marlin_mma_sync_": "marlin_", "box_copy_": "tile_move_"}


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a capture with an answer other than "skipped" and "lost"."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    return [case for case in cases if not case["answer"]["result"].startswith(("skipped", "lost"))]


def difference(case: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return the difference between the GPU's answer and the emulator's, or ""."""
    gpu = case["answer"]
    if gpu["result"].startswith("refused") and mine["result"].startswith("refused"):
        return ""
    if gpu["result"] != mine["result"]:
        return f"GPU {gpu['result']}, emulator {mine['result']} {mine.get('why', '')}".strip()
    return ", ".join(name for name in RESULTS if name in gpu and as_list(gpu[name]) != as_list(mine[name]))


def as_list(value: object) -> object:
    """Convert a count of one block, which the first captures store without a list."""
    return value if isinstance(value, list) else [value]


def stored_name(name: str) -> str:
    """Return the name of a case in the capture."""
    return next((old + name.removeprefix(new) for new, old in FORMER_PREFIXES.items() if name.startswith(new)), name)


NAMES = [name for name in kernel_cases(get_target("sm_90a")) if stored_name(name) in STORED]
#: A GEMM takes a second: every third of them runs here (all were compared when the capture was made).
NAMES = [n for n in NAMES if not n.startswith("marlin")] + [n for n in NAMES if n.startswith("marlin")][::3]
#: Every n-th case also runs as PTX with all warps.
PTX_SHARE = 7


@lru_cache(maxsize=1)
def cases() -> list[dict[str, Any]]:
    return read_cases(CASES)


def differences(chosen: list[dict[str, Any]], ask: Any) -> list[str]:
    found = ((case["n"], case["tag"], case["op"], difference(case, ask(case))) for case in chosen)
    return [f"case {n}, {tag} {op}: {what}" for n, tag, op, what in found if what]


def test_the_sample_has_every_operation_type_and_reason() -> None:
    found = cases()
    assert len(found) >= 400
    assert {case["op"].split("_")[0] for case in found} >= {"tile", "im2col", "bulk", "shared"}
    assert {case["map"]["dtype"] for case in found if "map" in case and case["answer"]["result"] == "ok"} >= {
        *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64"),
        *("float32_ftz", "tfloat32", "tfloat32_ftz"),
    }
    results = Counter(case["answer"]["result"].split(":")[0] for case in found)
    assert results["ok"] > 300
    assert results["trap"] > 50


def test_every_case_is_as_on_the_gpu() -> None:
    assert differences(cases(), answer) == []


def test_the_same_through_ptx() -> None:
    gpu = EmulatedGpu()
    # A copy that never completes is waited for in a bounded loop there, and is a deadlock here.
    complete = [case for case in cases() if case["answer"].get("done", 1)]
    assert differences(complete[::PTX_SHARE], gpu.run) == []


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_what_they_do_on_the_gpu(name: str) -> None:
    stored = np.load(KERNELS)
    for key, mine in kernel_cases(get_target("sm_90a"))[name](EmulatedDevice()).items():
        gpu = stored[f"{stored_name(name)}/{key}"].view(mine.dtype).reshape(mine.shape)
        tolerance = max(
            ((len(kind), value) for kind, value in TOLERANCE.items() if name.startswith(kind)), default=(0, 0)
        )[1]
        if tolerance:
            wanted = gpu.astype(np.float64)
            assert np.linalg.norm(mine.astype(np.float64) - wanted) <= tolerance * np.linalg.norm(wanted)
        else:
            assert mine.tobytes() == gpu.tobytes()
