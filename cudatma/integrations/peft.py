"""Register MarlinLinear as a target module for peft's LoRA, for inference."""

from __future__ import annotations

import warnings
from typing import Any

from peft.tuners.lora import LoraModel
from peft.tuners.lora.gptq import GPTQLoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer

from cudatma.errors import ArgumentError
from cudatma.integrations.torch import MarlinLinear


class MarlinLoraLinear(GPTQLoraLinear):  # type: ignore[misc]
    """A MarlinLinear with LoRA adapters.

    peft adds the results of the adapters to the result of the layer, as it does for GPTQ layers.
    """

    def __init__(self, base_layer: Any, adapter_name: str, *, config: Any, **options: Any) -> None:
        if config.use_dora or getattr(config, "use_qalora", False):
            variant = "use_dora" if config.use_dora else "use_qalora"
            remedy = "train a plain LoRA adapter; packed weights cannot be rescaled"
            raise ArgumentError(f"LoraConfig.{variant}", True, "False", remedy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")
            super().__init__(base_layer, adapter_name, config=config, **options)

    def merge(self, *_: Any, **__: Any) -> None:
        """Raise ArgumentError, because an adapter cannot be merged into a packed weight."""
        remedy = "keep the adapter as a separate module, or merge it into the float model before quantization"
        raise ArgumentError("adapter", "an adapter of a packed layer", "an adapter of a float layer", remedy)


def register() -> None:
    """Register MarlinLinear as a target module for peft's LoRA. Repeated calls have no effect."""
    create = LoraModel._create_new_module
    if getattr(create, "_takes_marlin", False):
        return

    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **options: Any) -> Any:
        layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(layer, MarlinLinear):
            return MarlinLoraLinear(target, adapter_name, config=lora_config, **options)
        return create(lora_config, adapter_name, target, **options)

    create_new_module._takes_marlin = True  # type: ignore[attr-defined]
    LoraModel._create_new_module = staticmethod(create_new_module)  # type: ignore[method-assign, unused-ignore]
