"""The W4A16 GEMM as one of vLLM's mixed-precision linear kernels. The only module that needs vLLM when imported."""

from __future__ import annotations

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import current_platform

from cudatma.integrations.vllm.layer import PackedLayer, refusal

#: Compute capabilities that marlin_gemm has kernels for.
_CAPABILITIES = (90, 120, 121)


class CudatmaW4A16LinearKernel(PackedLayer, MPLinearKernel):  # type: ignore[misc]  # vLLM's class is not typed here
    """vLLM asks can_implement(), makes one for each layer, has it pack the layer's weight, and calls it.

    Its name is what VLLM_DISABLED_KERNELS takes. It has neither "marlin" nor "humming" in it: on SM90 vLLM moves its
    Humming kernel before the first class that is named after Marlin.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return min(_CAPABILITIES)

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether marlin_gemm serves such a layer on the current GPU; the reason where it does not."""
        reason = _unfit_platform() or refusal(c)
        return reason is None, reason

    @property
    def batch_invariant(self) -> bool:
        """Whether rows must not depend on their batch, as VLLM_BATCH_INVARIANT says."""
        return bool(envs.VLLM_BATCH_INVARIANT)

    @property
    def max_m(self) -> int | None:
        """The largest number of tokens of a batch, as vLLM's configuration says while it loads a model."""
        config = get_current_vllm_config_or_none()
        return None if config is None else int(config.scheduler_config.max_num_batched_tokens)


def _unfit_platform() -> str | None:
    if not current_platform.is_cuda():
        return "cudatma needs a CUDA device"
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() not in _CAPABILITIES:
        return f"the compute capability is {capability}; it has to be 9.0, 12.0 or 12.1"
    return None
