"""PackedModule, the base class of torch modules that hold packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError
from cudatma.integrations.torch.weights import forget
from cudatma.kernels.marlin.linear import converted_bias


class PackedModule(torch.nn.Module):  # type: ignore[misc]
    """A module whose buffers are the arrays of a packed weight. Its dtype cannot be changed."""

    format: str

    @property
    def dtype(self) -> Any:
        """Type of activations, scales and biases."""
        return self.scales.dtype

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Raise ArgumentTypeError for conversions to another dtype, such as .half()."""
        converted = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        if converted != self.dtype:
            remedy = 'call .to(device) without a dtype, or quantize the weight with dtype="float16" or dtype="bfloat16"'
            raise ArgumentTypeError("dtype", str(converted), f"{self.dtype} (the dtype of the layer)", remedy)

        def keep_tensor_scale(tensor: Any) -> Any:
            """Apply fn without changing the type of the tensor scale."""
            return fn(tensor) if tensor is not self.tensor_scale else fn(tensor.view(torch.int32)).view(tensor.dtype)

        return super()._apply(keep_tensor_scale, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Record the format in the metadata of a state dict, which torch.save() stores."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["format"] = self.format

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Raise an error if the format or a tensor's dtype differs, because load_state_dict() would convert it."""
        if (stored := metadata.get("format", self.format)) != self.format:
            remedy = f"create the layer with format={stored!r}"
            raise QuantizationError(f"{prefix}format", repr(stored), f"{self.format!r} (the layer's format)", remedy)
        for name in ("qweight", "scales", "zeros", "perm", "bias", "tensor_scale"):
            loaded, own = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(loaded, torch.Tensor) and own is not None and loaded.dtype != own.dtype:
                raise ArgumentTypeError(
                    f"{prefix}{name}.dtype", str(loaded.dtype), f"{own.dtype} (the dtype of the layer)"
                )
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)
        if not self.qweight.is_meta:
            forget(self.qweight)


def bias_tensor(bias: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a layer's bias in host memory, in the layer's dtype."""
    if (got := describe(bias, "bias").shape) != shape:
        raise ArgumentError("bias.shape", got, str(shape))
    return torch.from_numpy(converted_bias(bias, dtype).view("int16").copy()).view(getattr(torch, dtype))
