"""vLLM kernels that compute MXFP4 and NVFP4 linear layers with marlin_gemm. This module imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.kernels.linear import MxFp4LinearKernel, NvFp4LinearKernel
from vllm.platforms import current_platform

from cudatma.integrations.vllm.fp4 import PackedFp4Layer
from cudatma.integrations.vllm.kernel import CudatmaW4A16LinearKernel


class _Fp4Kernel(PackedFp4Layer):
    """Methods that both kernels share."""

    batch_invariant = CudatmaW4A16LinearKernel.batch_invariant
    max_m = CudatmaW4A16LinearKernel.max_m

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether the GPU is a Hopper GPU, and the reason if it is not.

        On newer GPUs, vLLM's other kernels use fp4 Tensor Core instructions.
        """
        capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
        if capability is None or capability.to_int() != 90:
            return False, f"the compute capability must be 9.0, got {capability}"
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return True. vLLM checks the formats of the weight and the activations before this call."""
        return True, None


class CudatmaMxFp4LinearKernel(_Fp4Kernel, MxFp4LinearKernel):  # type: ignore[misc]  # vLLM's class is not typed here
    """MXFP4 kernel with 16-bit activations for vLLM. VLLM_DISABLED_KERNELS disables this class by name."""

    format = "mxfp4"


class CudatmaNvFp4LinearKernel(_Fp4Kernel, NvFp4LinearKernel):  # type: ignore[misc]  # vLLM's class is not typed here
    """NVFP4 kernel with 16-bit activations for vLLM. VLLM_DISABLED_KERNELS disables this class by name."""

    format = "nvfp4"
