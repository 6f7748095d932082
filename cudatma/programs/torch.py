"""torch's CUDA device on the CPU, so that programs that create tensors on it run unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cudatma.programs.log import SM_COUNT, LaunchLog
from cudatma.programs.patches import Patches


class TorchInterceptor:
    """Creates tensors of the CUDA device on the CPU, and answers queries of the device with the log's target."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._mode: Any = None

    def install(self, log: LaunchLog) -> None:
        """Replace the device in calls of torch, and the functions of torch.cuda."""
        import torch

        target = log.target
        properties = SimpleNamespace(
            name=f"emulator {target.name}",
            major=target.compute_capability[0],
            minor=target.compute_capability[1],
            multi_processor_count=SM_COUNT,
            shared_memory_per_block_optin=target.smem_per_block_bytes,
            shared_memory_per_multiprocessor=target.smem_per_sm_bytes,
            warp_size=32,
        )
        answers = {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_capability": target.compute_capability,
            "get_device_name": properties.name,
            "get_device_properties": properties,
            "current_stream": SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
        }
        for name, answer in answers.items():
            self._patches.set(torch.cuda, name, lambda *args, _answer=answer, **options: _answer)
        self._mode = _on_cpu(torch)
        self._mode.__enter__()

    def remove(self) -> None:
        """Restore torch."""
        self._mode.__exit__(None, None, None)
        self._patches.undo()


def _on_cpu(torch: Any) -> Any:
    """Return a context in which torch's functions use the CPU where the program names the CUDA device."""
    from torch.overrides import TorchFunctionMode

    def cpu(value: Any) -> Any:
        is_device = isinstance(value, str | torch.device)
        return "cpu" if is_device and str(value).partition(":")[0] == "cuda" else value

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch's class is not typed here
        def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if function == torch.Tensor.is_cuda.__get__:
                return True
            options = {name: cpu(value) for name, value in (options or {}).items() if name != "pin_memory"}
            return function(*map(cpu, args), **options)

    return OnCpu()
