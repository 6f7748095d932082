"""The architectures that cudatma generates code for, and their features: one row each.

Nothing else in the project compares architecture numbers; code asks a Target for a feature. Sources: PTX ISA, the
"Target ISA Notes" and "PTX ISA Notes" of each instruction; CUDA C++ Programming Guide, "Compute Capabilities".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from cudatma.errors import DriverError, TargetError, check, no_driver

KIB = 1024
#: What the system reserves of an SM's shared memory for each thread block. [CUDA C++ Programming Guide]
SMEM_RESERVED_BYTES = KIB

#: Least PTX ISA version of each feature that a Target may have, and what it is.
FEATURES: dict[str, tuple[tuple[int, int], str]] = {
    "tma": ((8, 0), "cp.async.bulk.tensor, cp.async.bulk, cp.reduce.async.bulk"),
    "mbarrier_expect_tx": ((8, 0), "mbarrier.expect_tx, mbarrier.try_wait"),
    "shared_cta_destination": ((8, 6), "cp.async.bulk* with a .shared::cta destination"),
    "mma_sync": ((7, 0), "mma.sync.m16n8k16 for f16 and bf16"),
    "stmatrix": ((7, 8), "stmatrix.sync.aligned"),
    "griddepcontrol": ((7, 8), "griddepcontrol.wait, griddepcontrol.launch_dependents"),
    "cluster": ((7, 8), "thread block clusters of more than one CTA"),
    "multicast": ((8, 0), "cp.async.bulk*.multicast::cluster"),
    "wgmma": ((8, 0), "wgmma.mma_async"),
    "setmaxnreg": ((8, 0), "setmaxnreg.inc/dec"),
    "mma_sync_fp8": ((8, 4), "mma.sync of fp8 as one instruction"),
    "tensormap_replace": ((8, 3), "tensormap.replace"),
    "gather4": ((8, 6), "cp.async.bulk.tensor.2d.tile::gather4"),
    "scatter4": ((8, 6), "cp.async.bulk.tensor.2d.tile::scatter4"),
    "im2col_w": ((8, 6), "cp.async.bulk.tensor with .im2col::w"),
    "swizzle_atoms": ((8, 6), "128B swizzles with 32B and 64B atomicity"),
    "packed_types": ((8, 6), "packed 4- and 6-bit tensor map types"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture.

    name: what NVRTC's ``--gpu-architecture`` takes, ``"sm_90a"``.
    compute_capability: the first GPU it is for; loads_on() says which GPUs run its cubin.
    ptx_isa: least PTX ISA version that knows the target.
    smem_per_block_bytes: most dynamic + static shared memory of one thread block (opt-in limit).
    smem_per_sm_bytes: shared memory of one SM; each thread block costs SMEM_RESERVED_BYTES besides its own.
    max_cluster_blocks: largest portable cluster, in CTAs; 1 where clusters are to be treated as absent.
    features: names out of FEATURES.
    runs_here: whether cudatma launches on it; sm_100 is compiled and described only.
    tensormap_knows_allocation: drivers derive bits of a tensor map from the allocation at its address, so that a
    new address is the driver's business (cuTensorMapReplaceAddress); elsewhere it is the first eight bytes.
    """

    name: str
    compute_capability: tuple[int, int]
    ptx_isa: tuple[int, int]
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    max_cluster_blocks: int
    features: frozenset[str]
    runs_here: bool = True
    tensormap_knows_allocation: bool = False

    def has(self, feature: str) -> bool:
        """Whether the target has a feature of FEATURES; TargetError for an unknown name."""
        if feature not in FEATURES:
            raise TargetError("feature", feature, ", ".join(sorted(FEATURES)))
        return feature in self.features

    def require(self, feature: str, purpose: str) -> None:
        """Raise TargetError unless the target has the feature; ``purpose`` names what requires it."""
        if not self.has(feature):
            able = [t.name for t in TARGETS.values() if feature in t.features]
            allowed = f"a target with {feature} ({', '.join(able)})"
            choice = next((name for name in able if TARGETS[name].runs_here), able[0])
            remedy = f"{purpose} needs it; CUDATMA_TARGET={choice} chooses such a target for the emulator"
            raise TargetError("target", self.name, allowed, remedy)

    def smem_share_bytes(self, blocks: int) -> int:
        """Most shared memory of each thread block where ``blocks`` of them are resident on one SM."""
        return min(self.smem_per_block_bytes, self.smem_per_sm_bytes // blocks - SMEM_RESERVED_BYTES)

    @property
    def has_multicast(self) -> bool:
        return "multicast" in self.features

    @property
    def has_wgmma(self) -> bool:
        return "wgmma" in self.features

    @property
    def has_setmaxnreg(self) -> bool:
        return "setmaxnreg" in self.features

    @property
    def mma(self) -> str:
        """The tensor-core instruction family to generate: ``"wgmma"`` or ``"mma_sync"``."""
        return "wgmma" if self.has_wgmma else "mma_sync"

    def loads_on(self, compute_capability: tuple[int, int]) -> bool:
        """Whether a cubin of this target loads on a GPU. "a": only its own; "f": its family; plain: same major."""
        if self.name.endswith("a"):
            return compute_capability == self.compute_capability
        return (
            compute_capability[0] == self.compute_capability[0] and compute_capability[1] >= self.compute_capability[1]
        )


_TMA = frozenset({"tma", "mbarrier_expect_tx", "shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol"})
_BLACKWELL = _TMA | {"setmaxnreg", "tensormap_replace", "gather4", "im2col_w", "swizzle_atoms", "packed_types"}
_HOPPER_A = _TMA | {"cluster", "multicast", "wgmma", "setmaxnreg", "tensormap_replace"}
_GEFORCE = _BLACKWELL | {"mma_sync_fp8"}
_SMEM_BIG, _SMEM_SMALL = (227 * KIB, 228 * KIB), (99 * KIB, 100 * KIB)

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_90", (9, 0), (7, 8), *_SMEM_BIG, 8, _TMA | {"cluster", "multicast"}),
        Target("sm_90a", (9, 0), (8, 0), *_SMEM_BIG, 8, _HOPPER_A),
        Target(
            "sm_100a", (10, 0), (8, 6), *_SMEM_BIG, 8, _BLACKWELL | {"cluster", "multicast", "scatter4"}, False, True
        ),
        Target(
            "sm_100f", (10, 0), (8, 8), *_SMEM_BIG, 8, _BLACKWELL | {"cluster", "multicast", "scatter4"}, False, True
        ),
        Target("sm_120a", (12, 0), (8, 7), *_SMEM_SMALL, 1, _GEFORCE, True, True),
        Target("sm_120f", (12, 0), (8, 8), *_SMEM_SMALL, 1, _GEFORCE, True, True),
        Target("sm_121a", (12, 1), (8, 8), *_SMEM_SMALL, 1, _GEFORCE, True, True),
    )
}


def get_target(target: str | Target) -> Target:
    """A Target by name (``"sm_120a"``, ``"120a"``); a Target is returned as it is. TargetError if unknown."""
    if isinstance(target, Target):
        return target
    if isinstance(target, str):
        name = target.strip().lower().replace("compute_", "sm_")
        name = name if name.startswith("sm_") else f"sm_{name}"
        if name in TARGETS:
            return TARGETS[name]
    remedy = "leave it out for that of the GPU, or for sm_90a where there is none"
    if isinstance(target, str) and re.fullmatch(r"(sm_)?[5-8]\d[af]?", target.strip().lower()):
        remedy = "TMA begins with sm_90, Hopper"
    raise TargetError("target", target, ", ".join(TARGETS), remedy)


def target_for(compute_capability: tuple[int, int]) -> Target:
    """The best target for a GPU: its own "a" target, else its family's, else the plain one of its generation.

    Raises TargetError for a GPU without TMA (before 9.0) or one that no target's cubin loads on.
    """
    shown = f"compute capability {compute_capability[0]}.{compute_capability[1]}"
    if compute_capability < (9, 0):
        raise TargetError(
            "device", shown, "9.0 and up", "TMA begins with Hopper; compute on the CPU: backend='emulator'"
        )
    fitting = [t for t in TARGETS.values() if t.loads_on(compute_capability)]
    if not fitting:
        gpus = sorted({t.compute_capability for t in TARGETS.values()})
        allowed = ", ".join(f"{major}.{minor}" for major, minor in gpus)
        raise TargetError("device", shown, allowed, "add a row to cudatma/target.py for this architecture")
    return max(fitting, key=lambda t: (t.name.endswith("a"), t.name.endswith("f")))


def detect(device: int = 0) -> Target:
    """The target for an installed GPU, by its ordinal. Raises DriverError without a driver or GPU, TargetError for
    a GPU that no target serves. Creates no context."""
    if not isinstance(device, int) or isinstance(device, bool):
        raise TargetError("device", device, "an ordinal, 0 and up")
    return _detect(device)


@lru_cache(maxsize=64)
def _detect(device: int) -> Target:
    from cuda.bindings import driver

    try:
        check(driver.cuInit(0), "cuInit")
    except RuntimeError as error:
        if isinstance(error, DriverError):
            raise
        no_driver("cuInit", error)
    count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
    if not 0 <= device < count:
        raise TargetError("device", device, f"0..{count - 1}" if count else "none: this machine has no CUDA device")
    handle = check(driver.cuDeviceGet(device), "cuDeviceGet")
    attribute = driver.CUdevice_attribute
    major, minor = (
        check(driver.cuDeviceGetAttribute(a, handle), "cuDeviceGetAttribute")
        for a in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return target_for((major, minor))
