"""Which version of the kernel a call of gemm asks for."""

from __future__ import annotations

from cudatma.kernels.gemm.versions import VERSIONS
from cudatma.kernels.version import Versions

#: 0: any.
CHOICE: Versions[int | str] = Versions("gemm", "CUDATMA_GEMM_VERSION", tuple(VERSIONS), 0)
chosen_version = CHOICE.chosen
