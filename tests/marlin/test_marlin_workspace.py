"""The workspace is large enough for every launch, and streams, threads and graphs do not share one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver import build_driver, wrong_cases
from hypothesis import given
from hypothesis import strategies as st

from cudatma import LaunchError, Workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.arguments import sizes_for
from cudatma.kernels.marlin.choose import choose_untuned
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES, schedule
from cudatma.quantization import GROUP_SIZES
from cudatma.target import TARGETS, Target

PROCESSORS = 132


@pytest.fixture(scope="module")
def sizes() -> Workspace:
    """One whose memory nobody asks for, of the size for a GPU of PROCESSORS SMs."""
    space = object.__new__(Workspace)
    space.partials_bytes = PROCESSORS * PARTIALS_PER_SM_BYTES
    space.flags_bytes = PROCESSORS * FLAGS_PER_SM_BYTES
    return space


@given(
    layer=st.builds(
        LinearShape,
        k=st.integers(1, 40_000),
        n=st.integers(1, 70_000),
        group_size=st.sampled_from(GROUP_SIZES),
        has_zeros=st.booleans(),
        dtype=st.sampled_from(("float16", "bfloat16")),
    ),
    m=st.integers(1, 5000),
    target=st.sampled_from([t for t in TARGETS.values() if t.runs_here]),
)
def test_every_launch_finds_room(sizes: Workspace, layer: LinearShape, m: int, target: Target) -> None:
    """A workspace then never grows, and a graph may hold one."""
    config = choose_untuned(Problem(layer, m), imagined_gpu(target, PROCESSORS))
    work = schedule(config, m, layer.n, layer.k, PROCESSORS * config.ctas_per_sm)
    launch = sizes_for(Problem(layer, m), config, lambda m: work, target)(Problem(layer, m))
    sizes.require_room(launch.partials_bytes, launch.flags_bytes)


def test_a_launch_without_room_is_refused(sizes: Workspace) -> None:
    sizes.require_room(sizes.partials_bytes, sizes.flags_bytes)
    for partials, flags in ((sizes.partials_bytes + 1, 0), (0, sizes.flags_bytes + 1)):
        with pytest.raises(LaunchError, match="workspace"):
            sizes.require_room(partials, flags)


@pytest.mark.slow
def test_on_the_fake_driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    script = Path(__file__).with_name("marlin_on_fake_driver.py")
    assert not (wrong := wrong_cases(script, tmp_path, environment={"CUDATMA_BACKEND": "cuda"})), wrong
