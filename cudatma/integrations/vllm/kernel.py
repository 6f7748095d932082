"""vLLM kernel that computes mixed-precision linear layers with marlin_gemm. This module imports vLLM."""

from __future__ import annotations

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import current_platform

from cudatma.integrations.vllm.layer import PackedLayer, refusal

#: Compute capabilities for which marlin_gemm has kernels.
_CAPABILITIES = (90, 120, 121)


class CudatmaW4A16LinearKernel(PackedLayer, MPLinearKernel):  # type: ignore[misc]  # vLLM's class is not typed here
    """Linear kernel for vLLM. vLLM creates one object for each layer that can_implement() accepts.

    VLLM_DISABLED_KERNELS disables this class by name. The name contains neither "marlin" nor "humming", because on
    SM90, vLLM moves its Humming kernel ahead of the first class with "Marlin" in its name.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return min(_CAPABILITIES)

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether marlin_gemm supports a layer on the current GPU, and the reason if it does not."""
        reason = unfit_platform() or refusal(c)
        return reason is None, reason

    @property
    def batch_invariant(self) -> bool:
        """Whether the result of a row must be independent of the other rows of its batch (VLLM_BATCH_INVARIANT)."""
        return bool(envs.VLLM_BATCH_INVARIANT)

    @property
    def max_m(self) -> int | None:
        """Maximum number of tokens in a batch, from vLLM's configuration, or None after the layers are loaded."""
        config = get_current_vllm_config_or_none()
        return None if config is None else int(config.scheduler_config.max_num_batched_tokens)


def unfit_platform() -> str | None:
    if not current_platform.is_cuda():
        return "cudatma requires a CUDA device"
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() not in _CAPABILITIES:
        return f"the compute capability must be 9.0, 12.0 or 12.1, got {capability}"
    return None
