"""torch's CUDA device on the CPU, so that programs that create tensors on it run unchanged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from cudatma.programs.log import SM_COUNT, LaunchLog
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder

_TOTAL_BYTES = 80 << 30


@dataclass(frozen=True, slots=True)
class _Properties:
    """Properties of the emulated device."""

    name: str
    major: int
    minor: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    total_memory: int = _TOTAL_BYTES
    multi_processor_count: int = SM_COUNT
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32


class Stream:
    """A stream, in which every call has ended. As a context, it has no effect."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        """Return True: every call has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: every call has ended."""

    def wait_event(self, event: Event) -> None:
        """Do nothing: every call has ended."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: every call has ended."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event with the time of this call."""
        event = Event() if event is None else event
        event.record()
        return event


class Event:
    """An event of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Keep the time of this call."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two events."""
        return 1e3 * (end._seconds - self._seconds)

    def query(self) -> bool:
        """Return True: every call has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: every call has ended."""

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: every call has ended."""


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Create tensors of the CUDA device on the CPU, and answer queries of the device with the log's target."""
    import torch

    target = log.target
    properties = _Properties(
        name=f"emulator {target.name}",
        major=target.compute_capability[0],
        minor=target.compute_capability[1],
        shared_memory_per_block_optin=target.smem_per_block_bytes,
        shared_memory_per_multiprocessor=target.smem_per_sm_bytes,
        max_threads_per_multi_processor=target.max_threads_per_sm,
    )
    stream = Stream()
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": target.compute_capability,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "current_stream": stream,
        "default_stream": stream,
        "stream": stream,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, lambda *args, _answer=answer, **options: _answer)
    patches.set(torch.cuda, "Stream", Stream)
    patches.set(torch.cuda, "Event", Event)
    patches.enter_context(_on_cpu(torch))


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


def record(patches: Patches, recorder: Recorder) -> None:
    """List the kernels of the GPU by name with torch's profiler, unless the program uses the profiler itself."""
    import torch

    try:
        activity = torch.profiler.ProfilerActivity.CUDA
        if torch.cuda.is_available() and activity in torch.profiler.supported_activities():
            profile = torch.profiler.profile(activities=[activity], acc_events=True)
            profile.start()
            patches.callback(_count_kernels, profile, recorder)
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: a version without acc_events
        recorder.refuse("kernels of other libraries", f"torch's profiler failed: {error}")


def _count_kernels(profile: Any, recorder: Recorder) -> None:
    """Stop the profiler, and count the kernels."""
    import torch

    try:
        torch.cuda.synchronize()
        profile.stop()
        for event in profile.events():
            if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset")):
                recorder.other_kernels[event.name] += 1
    except (RuntimeError, AssertionError) as error:
        recorder.refuse("kernels of other libraries", f"torch's profiler failed: {error}")


def record_inductor(patches: Patches, recorder: Recorder) -> None:
    """Make torch.compile launch its kernels through Triton, instead of from C++."""
    import torch._inductor.config as config

    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, name):
            patches.set(config, name, False)


def pause_for_inductor(patches: Patches, recorder: Recorder) -> None:
    """Pause the recording while torch.compile measures configurations."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    recorder.pause_during(patches, CachingAutotuner, "bench")
