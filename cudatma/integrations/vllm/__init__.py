"""cudatma in vLLM: the plugin that puts the W4A16 GEMM first among vLLM's mixed-precision linear kernels."""

from __future__ import annotations

import logging
import os

from cudatma.errors import ArgumentError

__all__ = ["register"]

#: Environment variable; "0" leaves vLLM as it is.
SWITCH = "CUDATMA_VLLM"


def register() -> None:
    """Put CudatmaW4A16LinearKernel first where vLLM looks for a kernel of a 4-bit layer on CUDA devices.

    vLLM calls it in each of its processes through the entry point group ``vllm.general_plugins``. Further calls change
    nothing. The kernel refuses layers and GPUs that it cannot serve, and vLLM takes its next one. Does nothing with
    CUDATMA_VLLM=0; warns and does nothing where vLLM has no such list. Raises ArgumentError for other values than 0
    and 1.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ArgumentError(SWITCH, switch, "0, 1")
    if switch == "0":
        return
    try:
        from vllm.model_executor.kernels import linear
        from vllm.platforms import PlatformEnum

        from cudatma.integrations.vllm.kernel import CudatmaW4A16LinearKernel

        kernels = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    except (ImportError, AttributeError, KeyError) as error:
        cause = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).warning("cudatma does not know this vLLM, which keeps its own kernels: %s", cause)
        return
    if CudatmaW4A16LinearKernel not in kernels:
        kernels.insert(0, CudatmaW4A16LinearKernel)
