"""Marlin GEMM: W4A16 with weights that TMA streams, for SM90 and SM120."""

from cudatma.kernels.marlin.gemm import marlin_gemm
from cudatma.kernels.marlin.linear import MarlinLinear
from cudatma.kernels.marlin.owners import WorkspaceBytes, release_workspaces, workspace_bytes
from cudatma.kernels.marlin.workspace import MarlinWorkspace

__all__ = [
    "MarlinLinear",
    "MarlinWorkspace",
    "WorkspaceBytes",
    "marlin_gemm",
    "release_workspaces",
    "workspace_bytes",
]
