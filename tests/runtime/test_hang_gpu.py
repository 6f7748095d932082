"""Planted hangs on a real GPU: each ends, is named, and leaves a context in which other kernels run. Needs CuPy.

Each hang has a process of its own, which is killed where it does not end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from access_kernel import ACCESSES
from hang_kernels import PLANTED, Planted
from this_gpu import TARGET, cupy

import cudatma
from cudatma.errors import LaunchError

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).with_name("hang_worker.py")
#: Seconds after which a worker is taken for hung: compilation, start and one timeout of TIMEOUT each.
PATIENCE, TIMEOUT = 120, "0.5"


def ask(*arguments: str) -> list[dict[str, Any]]:
    """The worker's answers. Fails, with what it said, where it hangs or dies."""
    tests = WORKER.parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"CUDATMA_DEBUG_TIMEOUT": TIMEOUT, "PYTHONPATH": path}
    command = [sys.executable, str(WORKER), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{arguments} hung the GPU: {error.stdout!r}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


HERE = [planted for planted in PLANTED if planted.cluster is None or TARGET.has("cluster")]


@pytest.mark.parametrize("planted", HERE, ids=lambda planted: planted.name.lower())
def test_a_planted_hang_ends_and_is_named(planted: Planted) -> None:
    (answer,) = ask("ring", planted.name)
    check(planted, answer)


def check(planted: Planted, answer: dict[str, Any]) -> None:
    """The hang has ended; the wait that the bug is known by is in the report, with what is missing there.

    Where the causes are wrong and the rest is right, the layout of cudatma/mbarrier_bits.py is not the GPU's: see
    test_mbarrier_bits_gpu.py.
    """
    assert answer["after"], "the context is not usable"
    assert answer["hang"], "nothing was reported"
    states = (planted.state,) if planted.leads else (planted.state, "waiting")
    named = [
        wait
        for wait in answer["waits"]
        if wait["state"] in states
        and (planted.races or (wait["parity"], wait["rule"]) == (planted.parity, planted.rule))
        and (planted.races or wait["barrier"] in planted.barrier.split("|"))
        and planted.text in wait["text"]
        and planted.cause in wait["cause"]
    ]
    assert named, answer["hang"]
    if not planted.rule:
        expired = [wait["waited"] for wait in answer["waits"] if wait["state"] == "expired"]
        assert expired, answer["hang"]
        assert min(expired) >= float(TIMEOUT)
    at_barriers = [wait for wait in answer["waits"] if wait["parity"] is not None]
    assert all(wait["raw"] is not None for wait in at_barriers), answer["hang"]
    states_of: dict[tuple[Any, ...], set[int]] = {}
    for wait in at_barriers:
        states_of.setdefault((*wait["block"], wait["address"]), set()).add(wait["raw"])
    assert all(len(found) == 1 for found in states_of.values()), answer["hang"]


def test_hangs_follow_one_another_in_one_process() -> None:
    """Reading the barriers ends them; the next launch makes its own, and is read again."""
    planted = [p for p in HERE if p.cluster is None and not p.races]
    by_name = {p.name: p for p in planted}
    names = [p.name for p in (*planted, *planted[:3])]
    answers = ask("ring", *names)
    assert [answer["name"] for answer in answers] == names
    for answer in answers:
        check(by_name[answer["name"]], answer)


def test_accesses_are_refused_as_on_the_emulator() -> None:
    answers = ask("access", *(access.name for access in ACCESSES))
    assert len(answers) == len(ACCESSES)
    for access, answer in zip(ACCESSES, answers, strict=True):
        assert answer["after"], f"{access.name}: the context is not usable"
        assert [wait["rule"] for wait in answer["waits"]] == ([access.rule] if access.rule else []), answer["hang"]


def test_the_gemm_is_the_same_with_debug() -> None:
    random = np.random.default_rng(0)
    w = cudatma.quantize(
        random.normal(size=(1024, 512)).astype(np.float32), group_size=128, dtype="float16"
    ).to_device()
    for tokens in (1, 16, 64, 256):
        x = cupy.asarray(random.normal(size=(tokens, 1024)).astype(np.float16))
        plain = cudatma.marlin_gemm(x, w)
        checked = cudatma.marlin_gemm(x, w, debug=True)
        assert (plain.view(cupy.uint16) == checked.view(cupy.uint16)).all(), tokens
        with cudatma.debugging():
            again = cudatma.marlin_gemm(x, w)
        assert (plain.view(cupy.uint16) == again.view(cupy.uint16)).all(), tokens


def test_a_copy_is_the_same_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_DEBUG", "1")
    source = cupy.random.random((300, 200), dtype=cupy.float32)
    destination = cupy.zeros_like(source)
    cudatma.tile_copy(source, destination)
    assert (source == destination).all()


def test_a_capture_is_refused() -> None:
    random = np.random.default_rng(0)
    w = cudatma.quantize(random.normal(size=(512, 256)).astype(np.float32), group_size=128, dtype="float16").to_device()
    x = cupy.asarray(random.normal(size=(4, 512)).astype(np.float16))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cudatma.marlin_gemm(x, w, debug=True)
        stream.begin_capture()
        try:
            with pytest.raises(LaunchError, match="under graph capture"):
                cudatma.marlin_gemm(x, w, debug=True)
        finally:
            stream.end_capture()
