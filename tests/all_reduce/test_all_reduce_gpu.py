"""The one-shot all-reduce among processes that have one GPU each or share one GPU."""

from __future__ import annotations

import json
import os
import signal
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
    """Return the exit codes of all ranks. Their output goes to pytest's output."""
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
def test_a_rank_that_dies_leaves_the_others_nans_an_error_and_their_context(ranks: int, tmp_path: Path) -> None:
    assert run(tmp_path, ranks, "dies") == [0] * (ranks - 1) + [-signal.SIGKILL]
    for rank in range(ranks - 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["rank"] == ranks - 1
        for name in ("check", "call"):
            assert f"rank {ranks - 1} did not send its part of all-reduce number 2 within 3 s" in found[name]
        assert found["nans"]
        assert found["sum"] == 4950
