"""Configs for the templates that copy or reduce boxes, runs of bytes or single elements."""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.descriptor import REDUCE_TYPES
from cudatma.errors import ArgumentError, alternatives, quoted
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.ring import BOXES, CopyRing, usual_ring
from cudatma.target import Target

WINDOW, RUN, PLAIN = "kernels/window_copy.cu.j2", "kernels/run_copy.cu.j2", "kernels/plain_copy.cu.j2"
OPS = ("copy", *REDUCE_TYPES)
#: L2 policies of loads and stores. "" means no policy.
CACHES = ("", "evict_first", "evict_last", "evict_normal")
#: Element types of the bulk reductions. [PTX ISA, cp.reduce.async.bulk]
_ORDERED = ("u32", "s32", "u64", "s64", "f16", "bf16")
RUN_KINDS: dict[str, tuple[str, ...]] = {
    "copy": ("b8",),
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": _ORDERED,
    "max": _ORDERED,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
_MAX_RANK = 5
_CUDA_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ArgumentError unless the value is one of these strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(field, value, quoted(allowed))


def checked_cache(cache: object) -> str:
    """Return the L2 policy of a call as an element of CACHES. Raises ArgumentError for an unknown policy."""
    if cache is None:
        return ""
    check_choice("cache", cache, CACHES[1:])
    return str(cache)


def check_policies(op: str, load_cache: str, store_cache: str) -> None:
    """Raise ArgumentError unless an operation's loads and stores can have these L2 policies."""
    check_choice("load_cache", load_cache, CACHES)
    check_choice("store_cache", store_cache, CACHES if op == "copy" else CACHES[:1])


def check_rank(rank: int, min_rank: int = 1) -> None:
    """Raise ArgumentError unless tensor maps can have this rank."""
    if not min_rank <= rank <= _MAX_RANK:
        raise ArgumentError("rank", rank, f"{min_rank} to {_MAX_RANK}")


def coordinates(rank: int) -> str:
    """Return the names of a box's coordinates in the templates, innermost first."""
    return ", ".join(f"at{axis}" for axis in range(rank))


@dataclass(frozen=True, slots=True)
class WindowConfig(CopyRing):
    """A configuration of ``kernels/window_copy.cu.j2``, which moves boxes with tensor maps.

    The launch passes the box size.

    Attributes
    ----------
    op : str
        "copy", or a reduction in REDUCE_TYPES.
    rank : int
        Number of axes, 1 to 5.
    stage_bytes : int
        Maximum bytes of a box.
    stages, in_flight : int
        See CopyRing.
    load_cache, store_cache : str
        L2 policies in CACHES. Stores of a reduction have no policy.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    op: str
    rank: int
    stage_bytes: int
    stages: int
    in_flight: int
    load_cache: str = ""
    store_cache: str = ""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_choice("op", self.op, OPS)
        check_policies(self.op, self.load_cache, self.store_cache)
        check_rank(self.rank)
        self.check_ring()

    @property
    def entry(self) -> str:
        return f"window_{self.op}"

    @property
    def at(self) -> str:
        """Names of the coordinates."""
        return coordinates(self.rank)


@dataclass(frozen=True, slots=True)
class RunConfig(CopyRing):
    """A configuration of ``kernels/run_copy.cu.j2``, which moves a run of bytes by 1D bulk copies.

    Attributes
    ----------
    kind : str
        Element type in PTX, one of RUN_KINDS[op].
    stage_bytes : int
        Bytes per segment.
    op, stages, in_flight, load_cache, store_cache
        See WindowConfig.
    """

    op: str
    kind: str
    stage_bytes: int
    stages: int
    in_flight: int
    load_cache: str = ""
    store_cache: str = ""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_choice("op", self.op, OPS)
        check_choice("kind", self.kind, RUN_KINDS[self.op])
        check_policies(self.op, self.load_cache, self.store_cache)
        self.check_ring()

    @property
    def entry(self) -> str:
        return "run_copy" if self.op == "copy" else f"run_{self.op}_{self.kind}"


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """A configuration of ``kernels/plain_copy.cu.j2``, which uses plain loads and stores.

    Attributes
    ----------
    element_bytes : int
        Bytes per element, 1, 2, 4 or 8.
    rank : int
        Number of axes.
    index_bits : int
        Number of bits per index: 32 (faster divisions) for fewer than 2**31 elements, otherwise 64.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    element_bytes: int
    rank: int
    index_bits: int = 64
    entry: str = "plain_copy"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.element_bytes not in _CUDA_TYPES:
            raise ArgumentError("element_bytes", self.element_bytes, alternatives(_CUDA_TYPES))
        if not 1 <= self.rank <= 64:
            raise ArgumentError("rank", self.rank, "1 to 64")
        if self.index_bits not in (32, 64):
            raise ArgumentError("index_bits", self.index_bits, "32 or 64")

    @property
    def cuda_type(self) -> str:
        return _CUDA_TYPES[self.element_bytes]

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return 0

    def check_target(self, target: Target) -> None:
        """Do nothing, because every target can run the kernel."""


def window_configs(target: Target) -> list[WindowConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target has no TMA."""
    if not target.has("tma"):
        return []
    slot = BOXES.slot(target)
    return [WindowConfig("copy", 2, slot, *BOXES.ring(target, slot))]


def run_configs(target: Target) -> list[RunConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target has no TMA."""
    if not target.has("tma"):
        return []
    return [RunConfig("copy", "b8", *usual_ring(target))]


def plain_configs(target: Target) -> list[PlainConfig]:
    """Return the configs for dumps and compile checks."""
    return [PlainConfig(2, 3, 32)]
