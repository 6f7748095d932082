"""The one-shot all-reduce among processes, each on a GPU of its own or all on one, which runs them in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("all_reduce_worker.py")


def run(folder: Path, ranks: int, part: str) -> list[int]:
    """The exit codes of all ranks; what they print goes to pytest's output."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # NVLink multicast stays off, whoever asks for it.
    environment = {**os.environ, "PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER), str(folder)]
    started = [subprocess.Popen([*command, str(rank), str(ranks), part], env=environment) for rank in range(ranks)]
    try:
        return [process.wait(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: int, tmp_path: Path) -> None:
    assert run(tmp_path, ranks, "results") == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_dies_ends_the_others_with_an_error(ranks: int, tmp_path: Path) -> None:
    """Processes that share a GPU and stop with a trap at the same time do not all end: seen on an H200."""
    if ranks > 2 and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: of two processes that trap on one GPU, one did not end")
    assert run(tmp_path, ranks, "dies") == [0] * (ranks - 1) + [3]
    for rank in range(ranks - 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "CUDA error" in found["cuda"]
        assert found["rank"] == ranks - 1
        assert f"rank {ranks - 1} did not send its part of all-reduce number 2 within 3 s" in found["next"]
