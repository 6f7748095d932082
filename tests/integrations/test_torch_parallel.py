"""Parallel layers in two CPU processes with gloo, against the undivided layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import parallel_worker as worker
from torch.testing._internal.distributed.fake_pg import FakeStore

from cudatma.errors import ArgumentError, ArgumentTypeError, PeerTimeout
from cudatma.integrations.torch import AllReduce, ColumnParallel, MarlinLinear, RowParallel

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"float16": 2**-8, "bfloat16": 2**-5}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return the folder to which two ranks wrote, and their exit codes."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CUDATMA_BACKEND": "reference", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", worker.__file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank), "gloo"], env=environment) for rank in range(2)]
    try:
        return folder, [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def exact(dtype: str) -> tuple[Any, Any]:
    """Return the outputs of the first layer, and of both layers with SiLU between them, for undivided weights in
    float64."""
    up, down = (torch.from_numpy(worker.weight(*sizes, dtype).dequantize()) for sizes in ((128, 192, 1), (192, 72, 2)))
    first, second = worker.biases()
    hidden = worker.activations(dtype).double() @ up + first.double()
    return hidden, torch.nn.functional.silu(hidden) @ down + second.double()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_ranks_give_what_the_whole_layers_give(dtype: str, ended: tuple[Path, list[int]]) -> None:
    found = [torch.load(ended[0] / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    hidden, result = exact(dtype)
    allowed = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    columns = torch.cat([each[f"columns, {dtype}"] for each in found], -1)
    torch.testing.assert_close(columns.double(), hidden, **allowed)
    for each in found:
        torch.testing.assert_close(each[f"gathered, {dtype}"], columns, rtol=0, atol=0)
        torch.testing.assert_close(each[f"mlp, {dtype}"].double(), result, **allowed)
        for name in (f"mlp, {dtype}", f"one-shot, {dtype}"):  # which is the group's all-reduce on the CPU
            torch.testing.assert_close(each[name], found[0][f"mlp, {dtype}"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other_with_an_error(ended: tuple[Path, list[int]]) -> None:
    folder, codes = ended
    assert codes == [0, 3]
    assert "Error" in (folder / "error.txt").read_text()


def test_without_a_process_group_the_remedy_is_said() -> None:
    makers = (ColumnParallel.from_packed, RowParallel.from_packed, lambda _: AllReduce())
    for make in makers:
        with pytest.raises(ArgumentError, match=r"^group must be .*found no process group.*init_process_group"):
            make(worker.weight(128, 64, 0))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """Create a group that contains only this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def two_ranks() -> Any:
    """Create a group of this process and a nonexistent one, with collectives that do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_parallel_layers_compile_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    columns = ColumnParallel.from_packed(worker.weight(128, 192, 1))
    for reduce in (None, AllReduce()):
        down = RowParallel.from_packed(worker.weight(192, 72, 2), all_reduce=reduce)
        model = torch.nn.Sequential(columns, torch.nn.SiLU(), down)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (1, 5):
            x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).half()
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


@pytest.mark.usefixtures("two_ranks")
def test_a_compiled_call_of_a_closed_all_reduce_finds_no_other_one() -> None:
    reduce = AllReduce()
    compiled = torch.compile(lambda x: reduce(x), fullgraph=True, backend="aot_eager")
    compiled(torch.ones(4))
    reduce.close()
    AllReduce()
    with pytest.raises(ArgumentError, match=r"^number must be the number of an open AllReduce.*got \d+"):
        compiled(torch.ones(4))


@pytest.mark.usefixtures("two_ranks")
def test_what_an_all_reduce_refuses() -> None:
    layer = MarlinLinear(128, 64, False)
    for call, field in (
        (lambda: AllReduce()(np.ones(2)), "x"),
        (lambda: layer(np.ones((1, 128), np.float16)), "x"),
        (lambda: RowParallel(layer, all_reduce=3), "all_reduce"),
        (lambda: AllReduce("tp"), "group"),
        (lambda: AllReduce(max_bytes=1e6), "max_bytes"),
        (lambda: AllReduce(timeout_s="30"), "timeout_s"),
        (lambda: AllReduce(np.ones(2)), "group"),
        (lambda: AllReduce(device="cuda:0"), "device"),
        (lambda: ColumnParallel(layer, gather_output=1), "gather_output"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{field} must be .*got "):
            call()
    for options, field in (({"timeout_s": 0}, "timeout_s"), ({"max_bytes": -1}, "max_bytes")):
        with pytest.raises(ArgumentError, match=f"^{field}"):
            AllReduce(**options)
    alone = AllReduce(torch.distributed.new_group([0]))
    with pytest.raises(
        ArgumentError, match=r"^all_reduce must be an AllReduce for ranks \[0, 1\], got an AllReduce for ranks \[0\]"
    ):
        RowParallel(layer, all_reduce=alone)
    of_others = AllReduce()
    of_others.members = [2, 3]
    with pytest.raises(ArgumentError, match=r"^all_reduce must be .*got an AllReduce for ranks \[2, 3\]"):
        RowParallel(layer, all_reduce=of_others)
    with pytest.raises(ArgumentError, match=r"^group must be .*got a group without this process"):
        AllReduce(torch.distributed.new_group([1]))


@pytest.mark.usefixtures("two_ranks")
def test_a_launch_that_waited_in_vain_is_an_error_that_names_the_rank() -> None:
    reduce = AllReduce(timeout_s=2)
    reduce.max_bytes, reduce._failed = 1024, np.array([-(2**63) + 5 * 2**32 + 4], np.int64)  # as the kernel writes it
    with pytest.raises(PeerTimeout, match=r"^rank 3 did not send its part of all-reduce number 2147483653 within 2 s"):
        reduce.check()


@pytest.mark.usefixtures("alone")
def test_one_rank_has_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    packed, x = worker.weight(128, 72, 0), worker.activations("float16")
    bias = torch.linspace(-1, 1, 72)
    wanted = MarlinLinear.from_packed(packed, bias)(x)
    for layer in (ColumnParallel.from_packed(packed, bias, gather_output=True), RowParallel.from_packed(packed, bias)):
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0)
        assert "rank=0 of 1" in repr(layer)
    with pytest.raises(ArgumentError, match=r"^bias\.shape must be .*got \(73,\)"):
        ColumnParallel.from_packed(packed, torch.zeros(73))
    with pytest.raises(ArgumentTypeError, match=r"^layer must be MarlinLinear, got Linear"):
        RowParallel(torch.nn.Linear(2, 2))
