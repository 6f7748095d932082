"""A driver that records launches instead of running them, for tests of the engine and of families."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupy import Array, fake_cupy

from cudatma import PackedWeight, context
from cudatma.descriptor import codec, driver
from cudatma.dtypes import activation_type
from cudatma.kernels import plans
from cudatma.kernels.attention.attention import Attention, AttentionVarlen
from cudatma.kernels.attention.decode import AttentionDecodeCall
from cudatma.kernels.choice import Tables
from cudatma.kernels.gemm.gemm import Gemm
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.gemm import MarlinGemm
from cudatma.quantization.layout_v1 import part_shapes
from cudatma.quantization.scale_range import ScaleFit
from cudatma.target import get_target

#: Addresses of results, partial sums, flags and copied rows.
RESULT, PARTIALS, FLAGS, ROWS = 0x1000, 0x2000, 0x3000, 0x4000
AS_STORED = ScaleFit("as_stored", 0)


@dataclass(frozen=True)
class Launch:
    """A launch with the bytes of each argument."""

    entry: str
    stream: int
    grid: Any
    shared_bytes: int
    programmatic: bool
    arguments: tuple[bytes, ...]

    def words(self) -> list[int]:
        """The first 64 bits of each argument. For a tensor map, this is its address."""
        return [int.from_bytes(argument[:8], "little") for argument in self.arguments]


class LaunchPlan:
    """A plan that records the arguments of a launch."""

    def __init__(self, owner: StubDriver, entry: str, arguments: list[Any], shape: tuple[Any, int, bool]) -> None:
        self.owner, self.entry, self.arguments, self.shape = owner, entry, arguments, shape

    def reshape(self, grid: Any, shared_bytes: int, programmatic: bool) -> None:
        self.shape = grid, shared_bytes, programmatic

    def twin(self) -> LaunchPlan:
        copies = [type(value).from_buffer_copy(value) for value in self.arguments]
        return LaunchPlan(self.owner, self.entry, copies, self.shape)

    def launch(self, stream: int) -> None:
        self.owner.during_launch()
        self.owner.launches.append(Launch(self.entry, stream, *self.shape, tuple(map(bytes, self.arguments))))


def marshalled(value: Any) -> Any:
    """Return an argument as a ctypes object. The width of integers is irrelevant."""
    if isinstance(value, bytes):
        return (ctypes.c_uint8 * len(value)).from_buffer_copy(value)
    return ctypes.c_uint64(value)


@dataclass
class StubDriver:
    """Driver with the recorded ``launches``, the number of ``plans``, and the ``encoded`` tensor maps.

    ``loaded`` says whether kernels are already loaded. ``during_launch`` is called before a launch is recorded.
    """

    launches: list[Launch] = field(default_factory=list)
    plans: int = 0
    encoded: int = 0
    loaded: bool = True
    capturing: bool = False
    during_launch: Callable[[], object] = bool

    def kernel(self, template: str, config: Any, target: Any) -> Any:
        """Return a kernel that is not compiled."""

        def plan(grid: Any, block: Any, args: Any, **options: Any) -> LaunchPlan:
            self.plans += 1
            shape = grid, options["shared_bytes"], options["programmatic"]
            return LaunchPlan(self, config.entry, [marshalled(value) for value in args], shape)

        return SimpleNamespace(
            target=target,
            plan=plan,
            load=lambda device: None,
            is_loaded=lambda device: self.loaded,
            occupancy=lambda *_, **__: getattr(config, "ctas_per_sm", 1),
        )

    def encode(self, config: Any, device: Any = None) -> bytes:
        self.encoded += 1
        return codec.encode(config)

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 0, int(self.capturing)

    @contextlib.contextmanager
    def using(self, device: int) -> Iterator[StubDriver]:
        yield self

    def last(self, count: int = 1) -> list[Launch]:
        """Return the last launches."""
        return self.launches[-count:]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    """Make device 0 an H200 on which nothing runs, and Array the class of CuPy's arrays."""
    made = StubDriver()
    rows = SimpleNamespace(lock=threading.Lock(), room=lambda nbytes: ROWS)
    space = SimpleNamespace(partials_pointer=PARTIALS, flags_pointer=FLAGS, rows=rows)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(lambda shape, dtype: Array(shape, dtype, RESULT)))
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    monkeypatch.setattr(plans, "known_kernel", made.kernel)
    monkeypatch.setattr(plans, "load_kernel", made.kernel)
    monkeypatch.setattr(plans, "gpu_of", lambda device: H200)
    monkeypatch.setattr(plans, "detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(plans, "stream_workspace", lambda *_: space)
    monkeypatch.setattr(context, "using", made.using)
    monkeypatch.setattr(context, "device", lambda o: context.Device(o, (9, 0), 232_448, H200.sm_count))
    monkeypatch.setattr(driver, "encode", made.encode)
    monkeypatch.setattr(PackedWeight, "device", property(lambda weight: weight.qweight.data.device_id))
    return made


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each operation whose checks run is appended."""
    names: list[str] = []

    def watch(kind: Any) -> None:
        check = kind.check

        def spy(self: Any, *arguments: Any) -> Any:
            names.append(self.name)
            return check(self, *arguments)

        monkeypatch.setattr(kind, "check", spy)

    for kind in (MarlinGemm, Gemm, Attention, AttentionVarlen, AttentionDecodeCall):
        watch(kind)
    return names


def fresh() -> context.Runtime:
    """Return a Runtime without plans. Tables of choices are shared, because building one takes longer than a call."""
    made = context.Runtime()
    made.parts[Tables] = context.runtime().part(Tables)
    return made


def packed_weight(
    k: int,
    n: int,
    *,
    group_size: int = 128,
    dtype: str = "float16",
    zeros: bool = False,
    act_order: bool = False,
    fit: ScaleFit = AS_STORED,
    address: int = 1 << 40,
) -> PackedWeight:
    """Return a weight without values on device 0."""
    shapes = part_shapes(k, n, group_size)
    weight = object.__new__(PackedWeight)
    fields = {
        "qweight": Array(shapes["qweight"], np.uint8, address),
        "scales": Array(shapes["scales"], activation_type(dtype).numpy, address + (1 << 36)),
        "zeros": Array(shapes["zeros"], np.uint8, address + (2 << 36)) if zeros else None,
        "perm": Array((k,), np.int32, address + (3 << 36)) if act_order else None,
        "shape": (k, n),
        "group_size": group_size,
        "dtype": dtype,
        "layout_version": 1,
        "format": "int4",
        "tensor_scale": 1.0,
        "scale_fit": fit,
        "attachments": {},
    }
    for name, value in fields.items():
        object.__setattr__(weight, name, value)
    return weight
