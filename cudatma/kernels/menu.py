"""Which few kernels serve a shape: a menu that loses little against all configurations. Pure.

Each M has its own cheapest tile, but a kernel is compiled and loaded before its first launch. A menu is a small set of
kernels such that every M has one that takes little longer than the cheapest: a greedy set cover.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The part for other M grows by this much while a menu has more kernels than its limit.
_GROWTH = 0.005
#: Allowed loss at M = 1, about the error of the cost model there.
_AT_ONE = 0.002
#: Weight of a kernel that the menus of few shapes contain.
_SELDOM = 0.4


@dataclass(frozen=True, slots=True)
class _Range:
    """Values of M with a menu of their own.

    last: M. limit: kernels. at_powers: the part by which one may be slower than the cheapest where M is a power of two,
    as most batches are; it is _AT_ONE where M is 1. loss: the same at other M. max_loss: the same where the menu would
    have more kernels than the limit; if that does not suffice, it has more.
    """

    last: int
    limit: int
    at_powers: float
    loss: float
    max_loss: float


#: Below 256 the tile follows M closely. M beyond the last range have its menu. Families whose shapes share
#: kernels accept larger losses, so that all shapes together need fewer kernels.
_RANGES = (_Range(255, 24, 0.005, 0.01, 0.03), _Range(8192, 8, 0.005, 0.01, 0.03))
_SHARED_RANGES = (_Range(255, 24, 0.01, 0.04, 0.05), _Range(8192, 8, 0.01, 0.06, 0.1))
LAST_M = _RANGES[-1].last
#: The first M of each range: no interval of M may span two.
FIRST_MS = (1, *(one.last + 1 for one in _RANGES))


def menu(us: NDArray[np.float64], ms: NDArray[np.int64], shared: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each M, the index of the configuration that serves it: the cheapest kernel of the menu.

    Parameters
    ----------
    us : array of shape (configurations, len(ms))
        Predicted microseconds; inf where a configuration cannot run.
    ms : array of int64, sorted, starting with 1
        The first M of each interval.
    shared : array of bool, shape (configurations,)
        Configurations that the menus of many shapes hold.
    """
    found, has_power, first = np.zeros(len(ms), np.int64), _has_power(ms), 1
    for one in _SHARED_RANGES if shared.any() else _RANGES:
        inside, served = (ms >= first) & (ms <= one.last), ms >= first
        losses = np.where(ms == 1, _AT_ONE, np.where(has_power, one.at_powers, np.inf))
        kernels = _smallest(us[:, inside], losses[inside], shared, one)
        found[served] = kernels[us[np.ix_(kernels, served)].argmin(axis=0)]
        first = one.last + 1
    return found


def _has_power(ms: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether a power of two is in the intervals that begin at ``ms``."""
    after = np.append(ms[1:], ms[-1] + 1)
    return np.asarray(2 ** np.ceil(np.log2(ms)) < after)


def _smallest(
    us: NDArray[np.float64], losses: NDArray[np.float64], shared: NDArray[np.bool_], of: _Range
) -> NDArray[np.int64]:
    """Return a menu with the smallest loss that its limit allows.

    ``losses`` holds the loss that is allowed at each M, inf for that of the range. Shared kernels, which other shapes
    need anyway, take the places that remain.
    """
    cheapest = us.min(axis=0)
    excess = (us / cheapest - 1)[:, np.isfinite(cheapest)]
    losses, loss = losses[np.isfinite(cheapest)], of.loss
    while True:
        able = (excess <= np.where(np.isinf(losses), loss, losses)).astype(np.float32)
        found = _cover(able, np.where(shared, 1, _SELDOM))
        if len(found) <= of.limit or loss + _GROWTH > of.max_loss + 1e-9:
            break
        loss += _GROWTH
    while len(found) < of.limit:
        gains = np.maximum(0, excess[found].min(axis=0) - excess).sum(axis=1) * shared
        if not gains.any():
            break
        found.append(int(gains.argmax()))
    return np.sort(found)


def _cover(able: NDArray[np.float32], weights: NDArray[np.float64]) -> list[int]:
    """Return rows such that each column is 1 in at least one of them."""
    uncovered, found = np.ones(able.shape[1], np.float32), []
    while uncovered.any():
        found.append(int((able @ uncovered * weights).argmax()))
        uncovered *= 1 - able[found[-1]]
    times_covered = able[found].sum(axis=0)
    for one in list(found):
        if (times_covered - able[one]).all():
            times_covered -= able[one]
            found.remove(one)
    return found
