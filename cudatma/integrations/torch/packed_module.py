"""PackedModule, the base class of torch modules that hold packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudatma.errors import ArgumentTypeError
from cudatma.integrations.torch.weights import forget


class PackedModule(torch.nn.Module):  # type: ignore[misc]
    """A module whose buffers are the arrays of a packed weight. Its dtype cannot be changed."""

    @property
    def dtype(self) -> Any:
        """Type of activations, scales and biases."""
        return self.scales.dtype

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """Raise ArgumentTypeError for conversions to another dtype, such as .half()."""
        converted = fn(torch.empty(0, dtype=self.dtype, device=self.scales.device)).dtype
        if converted != self.dtype:
            remedy = "quantize the weight again for this dtype, or call .to(device) without a dtype"
            raise ArgumentTypeError("dtype", str(converted), f"{self.dtype}, the dtype of the layer", remedy)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Raise ArgumentTypeError if a tensor has a different dtype, because load_state_dict() would round it."""
        for name in ("qweight", "scales", "zeros", "perm", "bias"):
            loaded, own = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(loaded, torch.Tensor) and own is not None and loaded.dtype != own.dtype:
                raise ArgumentTypeError(
                    f"{prefix}{name}.dtype", str(loaded.dtype), f"{own.dtype}, the dtype of the layer"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not self.qweight.is_meta:
            forget(self.qweight)
