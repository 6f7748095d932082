"""Work in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the results of work(0), work(1), and so on. The threads begin together and exist until the last one ends.

    Raises the first error.
    """
    together = threading.Barrier(count)

    def body(number: int) -> Any:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(body, number) for number in range(count)]]
