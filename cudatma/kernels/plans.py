"""Plans, which contain the kernels and marshaled arguments that all sizes of a shape share on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple

from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import known_kernel, load_kernel
from cudatma.errors import ArgumentError, LaunchError
from cudatma.kernels.arguments import Sizes
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.operation import SPACES, C, Operation, P, Weight
from cudatma.kernels.replay import Replay
from cudatma.kernels.workspace import Workspace, is_capturing, stream_workspace
from cudatma.target import Target, detect

#: Workspace addresses of launches that use no workspace.
NO_SPACES = (0,) * len(SPACES)


class Launch(NamedTuple):
    """Launches of a call, without the addresses and the stream.

    ``partials_bytes`` is the size of the partial sums, or None if the call uses no workspace.
    """

    replays: tuple[Replay, ...]
    sizes: tuple[Sizes, ...]
    device: int
    partials_bytes: int | None
    rows_bytes: int

    def run(self, addresses: list[int], stream: int, weight: Weight | None, workspace: Workspace | None = None) -> None:
        """Launch the kernels with arrays at these addresses, in the order of Operation.names.

        The caller must not modify the list afterwards.
        """
        weight_addresses = weight.addresses if weight else ()
        if self.partials_bytes is None:
            for replay, sizes in zip(self.replays, self.sizes):  # noqa: B905 (a keyword takes time)
                replay.run(sizes, addresses, stream, NO_SPACES, weight_addresses)
            return
        space: Any = workspace
        if workspace is None:
            space = stream_workspace(self.device, stream, self.partials_bytes)
        else:
            for sizes in self.sizes:
                workspace.require_room(sizes.partials_bytes, sizes.flags_bytes)
        with space.rows.lock if self.rows_bytes else nullcontext():
            rows = space.rows.room(self.rows_bytes) if self.rows_bytes else 0
            spaces = space.partials_pointer, space.flags_pointer, rows
            for replay, sizes in zip(self.replays, self.sizes):  # noqa: B905
                replay.run(sizes, addresses, stream, spaces, weight_addresses)


class _Loaded(NamedTuple):
    """Loaded kernels of a configuration on a device.

    ``sizes_of`` maps a problem to the Sizes of its launches.
    """

    config: Any
    replays: tuple[Replay, ...]
    sizes_of: Callable[[Any], tuple[Sizes, ...]]


#: Maximum number of configurations that a plan looks up by identity.
_MAX_CONFIGS = 512
#: Aligned placeholder address for tensor maps whose array does not exist yet.
_ANY_ADDRESS = 1 << 20


class Plan(Generic[P, C]):
    """Loaded kernels and marshaled arguments for calls that differ only in sizes and addresses."""

    __slots__ = ("_by_identity", "_gpu", "_loaded", "_memo", "_operation", "_target", "device")

    def __init__(self, operation: Operation[P, C], device: int) -> None:
        self._operation, self.device = operation, device
        self._gpu, self._target = gpu_of(device), detect(device)
        self._loaded: dict[C, _Loaded] = {}
        #: Lookups by identity avoid hashing a configuration, which takes longer than all other work for a new size.
        self._by_identity: dict[int, _Loaded] = {}
        self._memo: dict[Any, Any] = {}

    def loaded_launch(self, problem: P) -> Launch | None:
        """Return the launches of a problem, or None if its kernels are not loaded."""
        config = self._operation.configure(problem, self._gpu, self._memo)
        loaded = self._by_identity.get(id(config)) or self._lookup(config)
        return None if loaded is None else self._launch(problem, loaded)

    def load(self, problem: P, stream: int, named: Mapping[str, ArrayInfo], weight: Weight | None) -> Launch:
        """Compile and load missing kernels, and return the launches of a problem.

        ``named`` contains the arrays of the call, whose addresses the tensor maps contain. Raises LaunchError if a
        kernel is missing and the stream is being captured.
        """
        operation, gpu, target = self._operation, self._gpu, self._target
        config = operation.configure(problem, gpu, self._memo)
        loaded = self._lookup(config)
        if loaded is None:
            kernels, resident = [], []
            for template, kernel_config in operation.kernels(problem, config):
                kernels.append(_loaded_kernel(template, kernel_config, target, self.device, stream, operation.name))
                held = kernels[-1].occupancy(
                    kernel_config.threads, shared_bytes=kernel_config.smem_bytes, device=self.device
                )
                if held < 1:
                    raise ArgumentError(
                        "device", self.device, f"a GPU with enough resources for one CTA of {kernel_config.entry}"
                    )
                resident.append(gpu.sm_count * min(held, ctas_on_sm(kernel_config, held)))
            known = {name: info.pointer for name, info in named.items()}
            if weight is not None:
                known |= zip(operation.weight_arrays, weight.addresses, strict=True)
            addresses = dict.fromkeys((*operation.names, *SPACES), _ANY_ADDRESS) | known
            launches = operation.arguments(problem, config, gpu, tuple(resident))
            replays = [
                Replay(arguments, kernel, self.device, operation.names, addresses, SPACES, operation.weight_arrays)
                for arguments, kernel in zip(launches, kernels, strict=True)
            ]
            sizes_of = operation.sizes_for(problem, config, gpu, tuple(resident))
            loaded = self._loaded[config] = _Loaded(config, tuple(replays), sizes_of)
        return self._launch(problem, loaded)

    def _lookup(self, config: C) -> _Loaded | None:
        """Return the loaded kernels of a configuration, and record the identity of the configuration."""
        loaded = self._loaded.get(config)
        if loaded is not None:
            if len(self._by_identity) >= _MAX_CONFIGS:
                self._by_identity.clear()
            self._by_identity[id(config)] = loaded._replace(
                config=config
            )  # This reference keeps the object alive, so that its id is not reused.
        return loaded

    def _launch(self, problem: P, loaded: _Loaded) -> Launch:
        sizes = loaded.sizes_of(problem)
        partials = flags = rows = 0
        for launch in sizes:
            partials, flags = max(partials, launch.partials_bytes), flags | launch.flags_bytes
            rows += launch.rows_bytes
        return Launch(loaded.replays, sizes, self.device, partials if partials or flags or rows else None, rows)


def ctas_on_sm(config: Any, occupancy: int) -> int:
    """Return the number of CTAs per SM: the config's ``ctas_per_sm`` if it has this field, otherwise the occupancy."""
    return int(getattr(config, "ctas_per_sm", occupancy))


def _loaded_kernel(template: str, config: Any, target: Target, device: int, stream: int, function: str) -> Any:
    """Return a loaded kernel. Raises LaunchError if the kernel is not loaded and the stream is being captured."""
    kernel = known_kernel(template, config, target)
    if (kernel is None or not kernel.is_loaded(device)) and is_capturing(device, stream):
        allowed = f"outside a graph capture until the kernel for this call to {function} is loaded"
        remedy = f"call {function} or warm_up() before the capture"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)
    kernel = load_kernel(template, config, target)
    kernel.load(device)
    return kernel
