"""In which order the wgmma kernel's tiles read the least from DRAM: a model of L2, from sizes alone. Pure.

Tiles are walked through in bands of token tiles, channel by channel, a wave of them at a time. The tiles of a wave go
through their depth together, so that a wave reads each operand once. What a later wave or band needs again, it finds in
L2 if little enough came in between. docs/performance/marlin_wgmma.md has the figures; none of them is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec

#: What a kernel can count on of the 50 MB of L2 of an H100 (an H200's driver names 60): its two halves keep some lines
#: twice, and replacement is not perfect.
_L2_BYTES = 50_000_000 * 6 // 10
_VALUE_BYTES = 2
#: The model is no finer than that.
_AS_GOOD = 1.02
#: More bands than that are narrower than any card wants them, or belong to more tokens than memory holds.
_MOST_BANDS = 256


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that pass between DRAM and L2. weights: with scales and zero points."""

    activations: int
    weights: int
    result: int

    @property
    def total(self) -> int:
        return self.activations + self.weights + self.result


def traffic(spec: WgmmaSpec, m: int, n: int, k: int, shares: int, band: int) -> Traffic:
    """DRAM bytes of an (m, n, k) product whose ``shares`` clusters walk through bands of ``band`` token tiles.

    A wave is band x columns tiles. From one wave to the next a line of the activations has to outlast the band's other
    activations, the wave's weights (unless they are evicted first) and its results; from one band to the next a line of
    the weights everything that the band reads and writes. Tiles that are divided by depth count like whole ones.
    """
    tiles_m, tiles_n = ceil_div(m, spec.block_m), ceil_div(n, spec.block_n * spec.cluster)
    band = min(band, tiles_m)
    columns = min(tiles_n, max(1.0, shares / band))
    passes, bands = tiles_n / columns, ceil_div(tiles_m, band)

    weight = n * _channel_bytes(spec, k)
    band_tokens = min(m, band * spec.block_m)
    band_x, band_result = band_tokens * k * _VALUE_BYTES, band_tokens * n * _VALUE_BYTES
    stays = spec.weight_policy == "evict_normal"
    x_distance = band_x + (band_result + (weight if stays else 0)) / passes
    weight_missed = _missed(band_x + weight + band_result) if stays else 1.0
    return Traffic(
        round(m * k * _VALUE_BYTES * (1 + (passes - 1) * _missed(x_distance))),
        round(weight * (1 + (bands - 1) * weight_missed)),
        m * n * _VALUE_BYTES,
    )


def least_traffic(spec: WgmmaSpec, m: int, n: int, k: int, shares: int) -> tuple[int, str]:
    """(token tiles of a band, weight_policy) with the least traffic, to a few percent: of several the widest band, and
    weights that stay. Bands of one problem are as even as they can be."""
    tiles_m = ceil_div(m, spec.block_m)
    widths = {ceil_div(tiles_m, count) for count in range(1, min(tiles_m, _MOST_BANDS) + 1)}
    choices = [(width, policy) for width in sorted(widths, reverse=True) for policy in ("evict_normal", "evict_first")]

    totals = [traffic(replace(spec, weight_policy=policy), m, n, k, shares, width).total for width, policy in choices]
    return next(choice for choice, total in zip(choices, totals, strict=True) if total <= _AS_GOOD * min(totals))


def _channel_bytes(spec: WgmmaSpec, k: int) -> int:
    """What one channel of the packed weight takes, scales and zero points among them."""
    groups = 1 if spec.group_size == -1 else ceil_div(k, spec.group_size)
    return k // 2 + groups * (_VALUE_BYTES + spec.has_zeros)


def _missed(distance_bytes: float) -> float:
    """The part of some lines that is no longer in L2 once so many bytes came by, the lines among them. Replacement is
    not strictly the oldest first, so that a little too much does not drop everything."""
    return max(0.0, 1.0 - _L2_BYTES / distance_bytes)
