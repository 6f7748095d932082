"""Parallel layers on two GPUs with NCCL, as test_torch_parallel.py checks them with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "integrations" / "parallel_worker.py"


@pytest.mark.timeout(300)
def test_two_gpus_give_what_two_processes_on_the_cpu_give(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = {}
    for backend, computes in (("gloo", "reference"), ("nccl", "cuda")):
        folder = tmp_path / backend
        folder.mkdir()
        # NVLink multicast stays off.
        environment = {**os.environ, "CUDATMA_BACKEND": computes, "PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, "-W", "ignore", str(WORKER), str(folder)]
        ranks = [subprocess.Popen([*command, str(rank), backend], env=environment) for rank in range(2)]
        try:
            codes = [rank.wait(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == ([0, 3] if backend == "gloo" else [0, 0])
        found[backend] = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for wanted, got in zip(found["gloo"], found["nccl"], strict=True):
        for name, tensor in got.items():
            same = wanted["mlp, float16" if name == "compiled" else name]
            torch.testing.assert_close(tensor.double(), same.double(), rtol=2e-2, atol=6e-2)
    for name in ("mlp, float16", "mlp, bfloat16", "compiled"):
        assert torch.equal(found["nccl"][0][name], found["nccl"][1][name])
