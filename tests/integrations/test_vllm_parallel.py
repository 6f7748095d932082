"""vLLM's tensor parallelism in two processes, with our kernel on each rank's shard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


def test_two_ranks_compute_the_product_of_the_whole_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("vllm_rank.py"))]
    environment = {**os.environ, "CUDATMA_BACKEND": "reference"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, rank, str(tmp_path / "meeting")], env=environment, **pipes) for rank in "01"]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
