"""The fastest of a rival's variants, chosen in a short run of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import Contender, quick
from benchmarks.report import failure

#: Launches of one variant take about this long.
_CHOOSING_LAUNCHES_US = 4000


def fastest(
    stream: Any, makers: Mapping[str, Callable[[], Contender]], expected: float, count: int, errors: dict[str, str]
) -> list[Contender]:
    """At most ``count`` contenders, the fastest first. makers: by name; expected: microseconds of a launch.

    A variant that cannot be made, or cannot run, goes to ``errors`` with the reason.
    """
    took: list[tuple[float, Contender]] = []
    for name, make in makers.items():
        try:
            way = make()
            launches = max(2, min(way.launches, int(_CHOOSING_LAUNCHES_US / expected)))
            measured = quick(stream, way, launches)
            if (us := measured.us(way.name)) is not None:
                took.append((us, way))
            errors |= measured.errors
        except Exception as error:
            errors[name] = failure(error)
    return [way for _, way in sorted(took, key=lambda item: item[0])[:count]]
