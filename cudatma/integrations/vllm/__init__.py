"""A vLLM plugin that registers cudatma's kernels for quantized layers and experts ahead of vLLM's own kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os

from cudatma.errors import INSTALL_CUDA, ArgumentError

__all__ = ["register"]

#: Environment variable that disables the plugin if its value is "0".
SWITCH = "CUDATMA_VLLM"


def register() -> None:
    """Register cudatma's kernels as the first kernels that vLLM considers for quantized layers and experts.

    vLLM calls this function in each of its processes through the entry point group ``vllm.general_plugins``. Further
    calls have no effect. For layers and GPUs that the kernels do not support, vLLM uses its own kernels.
    CUDATMA_VLLM=0 disables this function. If CuPy is not installed or this version of vLLM is not supported, the
    function logs a warning and does not register the kernels.

    Raises
    ------
    ArgumentError
        If CUDATMA_VLLM is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH) or "1"
    if switch not in ("0", "1"):
        raise ArgumentError(SWITCH, switch, "0, 1")
    if switch == "0":
        return
    log = logging.getLogger(__name__)
    if importlib.util.find_spec("cupy") is None:
        log.warning(
            "cudatma does not register its kernels with vLLM because CuPy is not installed; run %s", INSTALL_CUDA
        )
        return
    for name, add in (
        ("linear layers", _add_linear),
        ("experts", _add_experts),
        ("MXFP4 experts", _add_mxfp4_experts),
        ("fp4 layers", _add_fp4),
    ):
        try:
            add()
        except (ImportError, AttributeError, KeyError) as error:
            cause = f"{type(error).__name__}: {error}"
            log.warning(
                "cudatma does not register a kernel for %s because this version of vLLM is not supported: %s",
                name,
                cause,
            )


def _add_linear() -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from cudatma.integrations.vllm.kernel import CudatmaWNA16LinearKernel

    kernels, variables = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA], envs.environment_variables
    if CudatmaWNA16LinearKernel not in kernels:
        kernels.insert(0, CudatmaWNA16LinearKernel)
    # vLLM caches compiled models on disk, keyed by a digest of these values. A model compiled for different kernels
    # would pass packed weights to those kernels.
    version = importlib.metadata.version("cudatma")
    variables[SWITCH] = lambda: version


def _add_experts() -> None:
    from cudatma.integrations.vllm.moe import install

    install()


def _add_mxfp4_experts() -> None:
    from cudatma.integrations.vllm.moe_mxfp4 import install

    install()


def _add_fp4() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from cudatma.integrations.vllm.fp4_kernels import CudatmaMxFp4LinearKernel, CudatmaNvFp4LinearKernel

    lists = linear._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CUDA], linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    for kernels, kernel in zip(lists, (CudatmaMxFp4LinearKernel, CudatmaNvFp4LinearKernel), strict=True):
        if kernel not in kernels:
            kernels.insert(0, kernel)
