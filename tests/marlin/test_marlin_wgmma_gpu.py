"""The wgmma kernel on a GPU, in its variants: a result that leaves by TMA stays within its bounds and follows the
array that it is given; raster groups change no value. test_marlin_gpu.py has every tile of the table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from marlin_builders import wgmma
from marlin_operands import (
    Options,
    activations,
    bits,
    compare,
    make_bias,
    make_weight,
    poisoned,
    serve_with,
    to_float64,
)
from this_gpu import TARGET, cupy

from cudatma import marlin_gemm
from cudatma.dtypes import activation_type
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.quantization.scale_range import ScaleFit

pytestmark = pytest.mark.gpu

if not TARGET.has_wgmma:
    pytest.skip(f"{TARGET.name} has no wgmma", allow_module_level=True)

SMALL = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)

TILES = {
    "small": SMALL,
    "stack": wgmma(tile_m=48, tile_n=256, tile_k=128, warpgroups=2, stages=4),
    "wide": wgmma(
        tile_m=256,
        tile_n=128,
        tile_k=64,
        warpgroups=2,
        stages=5,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
    ),
    "wide_multicast": wgmma(
        tile_m=256,
        tile_n=128,
        tile_k=64,
        warpgroups=2,
        stages=5,
        cluster_n=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
    ),
    "three_warpgroups": wgmma(
        tile_m=128, tile_n=192, tile_k=128, warpgroups=3, stages=4, mmas_per_commit=1, commits_in_flight=3
    ),
    "depth_divided": wgmma(tile_m=64, tile_n=64, tile_k=256, warpgroups=1, stages=3, slice_k=2),
    "pingpong": wgmma(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        warpgroups=1,
        stages=4,
        cluster_n=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
        pingpong=True,
    ),
}


def use(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig) -> None:
    """Whatever is asked for, this instance serves it, and divides tiles as readily as the other kernels do: else small
    problems' would all be whole."""
    serve_with(monkeypatch, lambda *_: config)
    monkeypatch.setattr(marlin, "schedule", partial(schedule, eager=True))


def test_a_plan_follows_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call and a graph use the plan of the first; each writes where it is told to, and nowhere else."""
    use(monkeypatch, SMALL)
    weight, x = make_weight(512, 264), activations((100, 512), "float16")
    reference = to_float64(x) @ weight.dense
    first, second, third = (poisoned((100, 264), "float16") for _ in range(3))
    marlin_gemm(x, weight.packed, out=first)
    kept = first.copy()
    first[...] = 0
    marlin_gemm(x, weight.packed, out=second)
    assert not bool(first.any())
    assert bool((bits(second) == bits(kept)).all())
    assert not compare(second, reference).problem("float16")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        marlin_gemm(x, weight.packed, out=second)  # the stream's workspace
        stream.begin_capture()
        marlin_gemm(x, weight.packed, out=third)
        graph = stream.end_capture()
        marlin_gemm(x, weight.packed, out=first)  # the plan goes on elsewhere, the graph does not
        second[...] = 0
        graph.launch(stream)
        stream.synchronize()
    assert not bool(second.any())
    assert bool((bits(third) == bits(kept)).all())
    assert bool((bits(first) == bits(kept)).all())


@pytest.mark.parametrize("tile", ["small", "wide_multicast", "pingpong"])
def test_a_partial_wave_is_divided_alone(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and a half waves in several rows of tiles."""
    config, rows = TILES[tile], 3
    ranges = cupy.cuda.Device().attributes["MultiProcessorCount"] // config.cluster
    columns = (ranges + ranges // 2) // rows

    def alone(*args: Any, **_: Any) -> Schedule:
        return replace(schedule(*args, divide=False), stream_tiles=rows * columns - ranges)

    serve_with(monkeypatch, lambda *_: config)
    monkeypatch.setattr(marlin, "schedule", alone)
    n = columns * config.tile_n * config.cluster - 40
    weight, x = make_weight(4096, n), activations((rows * config.tile_m - 5, 4096), "float16")
    out = poisoned((len(x), n), "float16")
    marlin_gemm(x, weight.packed, out=out)
    assert not compare(out, to_float64(x) @ weight.dense).problem("float16")


def test_a_chain_of_dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arrays in turns: each launch reads what the one before it stored, and stores over what that one read.

    Back to back, against the same launches with a wait after each.
    """
    use(monkeypatch, SMALL)
    weight, results = make_weight(512, 512), []
    for waits in (True, False):
        a, b = activations((100, 512), "float16"), poisoned((100, 512), "float16")
        for _ in range(6):
            marlin_gemm(a, weight.packed, out=b, programmatic=True)
            if waits:
                cupy.cuda.Device().synchronize()
            a, b = b, a
        cupy.cuda.Device().synchronize()
        results.append(bits(a).get())
    assert np.isfinite(results[0].view(np.float16)).all()
    np.testing.assert_array_equal(results[0], results[1])


#: The type, the largest scale, what the smallest is of it, and the fit then.
SCALES = {
    "as_stored": ("float16", 2.0**-9, 2.0**-15, ScaleFit("as_stored", 0)),
    "as_stored_large": ("float16", 1.7, 0.5, ScaleFit("as_stored", 9)),
    "shifted": ("float16", 2.0**-7, 2.0**-16, ScaleFit("shifted", 0)),
    "shifted_large": ("float16", 1.7, 2.0**-6, ScaleFit("shifted", 7)),
    "too_wide": ("float16", 1.7, 2.0**-9, ScaleFit("none", 0)),
    "bf16": ("bfloat16", 2.0**-6, 2.0**-16, ScaleFit("as_stored", 0)),
    "bf16_subnormal": ("bfloat16", 2.0**-100, 2.0**-30, ScaleFit("as_stored", 0)),
    "bf16_large": ("bfloat16", 1.7, 2.0**-50, ScaleFit("as_stored", 6)),
    "bf16_too_wide": ("bfloat16", 1.7, 2.0**-80, ScaleFit("none", 0)),
}


def on_host(array: Any) -> Any:
    """fp16 or bf16, by way of its bits, whatever CuPy can do with bf16."""
    return bits(array).get().view(activation_type(array.dtype.name).numpy)


def on_gpu(array: Any) -> Any:
    return cupy.asarray(array.view(np.uint16)).view(array.dtype)


def rescaled(k: int, n: int, dtype: str, largest: float, ratio: float, fit: ScaleFit) -> Any:
    """A weight with scales of either sign, evenly distributed over their exponents."""
    packed = make_weight(k, n, Options(dtype)).packed
    rng = np.random.default_rng(8)
    sizes = largest * 0.99 * ratio ** rng.uniform(0, 1, packed.scales.shape)
    sizes.flat[:2] = largest * 0.99, largest * ratio
    sizes *= rng.choice([-1, 1], sizes.shape)
    sizes[on_host(packed.scales) == 0] = 0
    made = replace(packed, scales=on_gpu(sizes.astype(activation_type(dtype).numpy)))
    assert made.scale_fit == fit
    return made


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", TILES)
def test_one_multiply_add_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, scales: str) -> None:
    """Tiles that are divided and whole ones, a bias that hides no product, and activations down to subnormal ones."""
    dtype, largest, *_ = SCALES[scales]
    numbers = activation_type(dtype).numpy.type
    config = replace(TILES[name], dtype=dtype)
    use(monkeypatch, config)
    for k, n, rows in ((2048, 4096 + 72, 333), (512, 20000, 70)):
        packed, bias = rescaled(k, n, *SCALES[scales]), on_gpu(on_host(make_bias(n, dtype)) * numbers(largest))
        values = on_host(activations((rows, k), dtype))
        values[::3] *= numbers(2.0**-12)
        x, found = on_gpu(values), []
        for form in (packed.scale_fit.form, "none"):
            with monkeypatch.context() as patched:
                planned = serve_with(patched, lambda *_: config)
                patched.setattr(MarlinConfig, "in_form", lambda config, _, form=form: replace(config, scale_form=form))
                found.append(bits(marlin_gemm(x, packed, bias=bias)).get())
                assert [one.scale_form for one in planned] == [form]
        assert np.isfinite(found[0].view(numbers).astype(np.float32)).all()
        np.testing.assert_array_equal(found[0], found[1])
