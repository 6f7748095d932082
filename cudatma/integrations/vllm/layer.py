"""What vLLM asks of a linear kernel, with nothing of vLLM imported. kernel.py joins it with vLLM's base class."""

from __future__ import annotations

from typing import Any, Protocol

import torch

import cudatma.integrations.torch  # noqa: F401  registers torch.ops.cudatma
from cudatma.errors import QuantizationError
from cudatma.integrations.vllm.repack import WORD_VALUES, repack
from cudatma.quantization import GROUP_SIZES
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.scale_range import ScaleFit, fit_scales


class LayerConfig(Protocol):
    """What is read of vLLM's MPLinearLayerConfig. Shapes are (K, N), the partition is this rank's part."""

    partition_weight_shape: tuple[int, int]
    weight_type: Any
    act_type: Any
    out_type: Any
    group_size: int
    zero_points: bool


def refusal(config: LayerConfig) -> str | None:
    """Why marlin_gemm cannot serve a layer; None where it can."""
    (k, n), size = config.partition_weight_shape, config.group_size
    wanted = "uint4" if config.zero_points else "uint4b8"
    if str(config.weight_type) != wanted:
        points = "with" if config.zero_points else "without"
        return f"the weight type is {config.weight_type}; {points} zero points it has to be {wanted}"
    if config.act_type not in (torch.float16, torch.bfloat16):
        return f"activations are {config.act_type}; they have to be torch.float16 or torch.bfloat16"
    if config.out_type not in (None, config.act_type):
        return f"results are {config.out_type}; they have to be {config.act_type}, as the activations"
    if size not in GROUP_SIZES:
        return f"the group size is {size}; it has to be one of {', '.join(map(str, GROUP_SIZES))}"
    multiple = WORD_VALUES if size == -1 else size
    if k % multiple:
        return f"the weight is {k} x {n} (K x N) on each rank; K has to be a multiple of {multiple}"
    if getattr(config, "has_g_idx", False):  # of vLLM before 0.33
        return "the weight is in activation order"
    return None


class PackedLayer:
    """The calls of a linear kernel, for one layer. vLLM's base class sets the attributes.

    config: the layer's. w_q_name, w_s_name, w_zp_name: of its parameters, each of which says by ``output_dim`` which
    of its dimensions is N. The packed weight takes their places, under the same names.
    """

    config: LayerConfig
    w_q_name: str
    w_s_name: str
    w_zp_name: str | None
    _fit: ScaleFit | None = None

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits must not depend on the other rows of its batch."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's weight anew, and free what was loaded.

        For weights that replace earlier ones in place, as vLLM's reload_weights() has it, raises QuantizationError
        where their scales have another range: the kernels that serve the layer were chosen for the first.
        """
        config, names = self.config, (self.w_q_name, self.w_s_name, self.w_zp_name)
        loaded = [_input_major(layer, name) for name in names[: 2 + config.zero_points]]
        packed = repack(*loaded, n=config.partition_weight_shape[1], group_size=config.group_size)
        self._keep_fit(packed[1])
        for name, tensor in zip(names, packed, strict=True):
            if name is None or not hasattr(layer, name):
                continue
            # Not vLLM's parameter classes, which run Python code at each access. None: zero points that are all 8.
            setattr(layer, name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """x (..., K) -> x W + bias (..., N), by torch.ops.cudatma.marlin_gemm."""
        config, (k, n) = self.config, self.config.partition_weight_shape
        qweight, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zeros = getattr(layer, self.w_zp_name) if config.zero_points and self.w_zp_name else None
        return torch.ops.cudatma.marlin_gemm(
            x, qweight, scales, zeros, None, bias, k, n, config.group_size, self.batch_invariant
        )

    def _keep_fit(self, scales: Any) -> None:
        fit = fit_scales(host_array(scales, self.w_s_name))
        if self._fit not in (None, fit):
            remedy = "start vLLM anew with these weights, or with VLLM_DISABLED_KERNELS=CudatmaW4A16LinearKernel"
            raise QuantizationError(self.w_s_name, f"scales with {fit}", f"{self._fit}, as before the reload", remedy)
        self._fit = fit


def _input_major(layer: Any, name: Any) -> Any:
    """A parameter's values with K, or what stands for it, as the first dimension."""
    parameter = getattr(layer, name)
    return parameter.data.t() if parameter.output_dim == 0 else parameter.data
