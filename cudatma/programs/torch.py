"""Make torch use the CPU as its CUDA device, so that programs that create tensors on this device run unchanged."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from cudatma.programs.device import REGISTERS, SHARED_BYTES, SM_COUNT, TOTAL_BYTES, WARP_SIZE, device_name
from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder


class Stream:
    """A stream that never contains unfinished work. It has no effect as a context manager."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        """Store the current time in an event, and return the event."""
        event = Event() if event is None else event
        event.record()
        return event


class Event:
    """An event that records a time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Store the current time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the time between two events in milliseconds."""
        return 1e3 * (end._seconds - self._seconds)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Make torch use the CPU as its CUDA device, with the properties of the log's target."""
    import torch

    target = log.target
    major, minor = target.compute_capability
    properties = SimpleNamespace(
        name=device_name(target),
        major=major,
        minor=minor,
        total_memory=TOTAL_BYTES,
        multi_processor_count=SM_COUNT,
        shared_memory_per_block=SHARED_BYTES,
        shared_memory_per_block_optin=target.smem_per_block_bytes,
        shared_memory_per_multiprocessor=target.smem_per_sm_bytes,
        max_threads_per_multi_processor=target.max_threads_per_sm,
        regs_per_multiprocessor=REGISTERS,
        warp_size=WARP_SIZE,
    )
    stream = Stream()
    results = {
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
    for name, result in results.items():
        patches.set(torch.cuda, name, lambda *args, _result=result, **options: _result)
    patches.set(torch.cuda, "Stream", Stream)
    patches.set(torch.cuda, "Event", Event)
    mode = _cpu_mode(torch, log)
    patches.enter_context(mode())
    start = threading.Thread.start

    def start_in_mode(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            with mode():
                run()

        thread.run = run_in_mode  # type: ignore[method-assign]
        start(thread)

    patches.set(threading.Thread, "start", start_in_mode)


def _cpu_mode(torch: Any, log: LaunchLog) -> Any:
    """Return a context manager class that makes torch's functions in one thread use the CPU as the CUDA device.

    A context has no effect after the end of the log's block, because a thread can outlive the block.
    """
    from torch.overrides import TorchFunctionMode

    def cpu(value: Any) -> Any:
        is_device = isinstance(value, str | torch.device)
        return "cpu" if is_device and str(value).partition(":")[0] == "cuda" else value

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch's class is not typed here
        def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            if not log.is_open:
                return function(*args, **(options or {}))
            if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if function == torch.Tensor.is_cuda.__get__:
                return True
            options = {name: cpu(value) for name, value in (options or {}).items() if name != "pin_memory"}
            return function(*map(cpu, args), **options)

    return OnCpu


def record(patches: Patches, recorder: Recorder) -> None:
    """Count kernel launches on the GPU by name with torch's profiler, unless the program uses the profiler."""
    import torch

    try:
        activity = torch.profiler.ProfilerActivity.CUDA
        if torch.cuda.is_available() and activity in torch.profiler.supported_activities():
            profile = torch.profiler.profile(activities=[activity], acc_events=True)
            profile.start()
            patches.callback(_count_kernels, profile, recorder)
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError if this version has no acc_events
        recorder.refuse("kernels of other libraries", f"torch's profiler failed: {error}")


def _count_kernels(profile: Any, recorder: Recorder) -> None:
    """Stop the profiler, and count the kernel launches."""
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
    """Make torch.compile launch its kernels through Triton instead of C++ code."""
    import torch._inductor.config as config

    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, name):
            patches.set(config, name, False)


def pause_for_inductor(patches: Patches, recorder: Recorder) -> None:
    """Pause the recording while torch.compile benchmarks configurations."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    recorder.pause_during(patches, CachingAutotuner, "bench")
