"""Compare TMA operations captured on a GPU (tests/emulator/capture_tma.py) with the emulator.

    python tests/emulator/compare_tma.py CAPTURE.jsonl.gz ... [--sample tests/fixtures/tma/h200.jsonl.gz --count 800]

Prints every kind of case that differs, and the number of cases. --sample also writes a sample that contains every kind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Import the checkout's package from any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tma_direct import answer

#: Compared fields of an operation that ended.
RESULTS = ("counted", "done", "gmem", "smem", "map")


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


def kind_of(case: dict[str, Any]) -> tuple[str, ...]:
    """Return the properties that a sample must cover: tag, operation, interleave, type."""
    fields = case.get("map", {})
    action = case["op"].rsplit("_", 1)[0] if fields else case["op"]
    return case["tag"], action, str(fields.get("interleave", "")), case["dtype"] if fields else ""


def sample(cases: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return ``count`` cases, one of each kind first; hashes replace the bytes."""
    by_kind = defaultdict(list)
    for case in cases:
        by_kind[kind_of(case)].append(case)
    rng = random.Random(0)
    chosen = [rng.choice(found) for _, found in sorted(by_kind.items())]
    rng.shuffle(chosen)
    taken = {id(case) for case in chosen}
    others = [case for _, found in sorted(by_kind.items()) for case in found if id(case) not in taken]
    chosen = (chosen + rng.sample(others, min(len(others), count)))[:count]
    return [
        case | {"answer": {k: v for k, v in case["answer"].items() if not k.endswith("_x")}}
        for case in sorted(chosen, key=lambda case: str(kind_of(case)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path, nargs="+")
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--count", type=int, default=800)
    arguments = parser.parse_args()
    cases = [case for path in arguments.captures for case in read_cases(path)]
    found = defaultdict(list)
    for case in cases:
        what = difference(case, answer(case))
        if what:
            kind = (*kind_of(case), what)
            found[kind].append(case["n"])
    for kind, numbers in sorted(found.items()):
        print(len(numbers), *kind, numbers[:5])
    print(f"{len(cases)} cases, {sum(map(len, found.values()))} differ")
    if arguments.sample:
        arguments.sample.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(arguments.sample, "wt", encoding="utf-8") as out:
            for case in sample(cases, arguments.count):
                out.write(json.dumps(case, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
