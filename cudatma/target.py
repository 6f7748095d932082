"""Architectures for which cudatma generates code, and their features.

No other module compares architecture numbers. Code checks whether a Target has a feature. Sources: PTX ISA, "Target ISA
Notes" and "PTX ISA Notes" of each instruction; CUDA C++ Programming Guide, "Compute Capabilities".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from cudatma.errors import DriverError, TargetError, check, no_driver

KIB = 1024
#: Shared memory that the system reserves for each resident thread block. [CUDA C++ Programming Guide]
SMEM_RESERVED_BYTES = KIB

#: Maps each feature to (minimum PTX ISA version, instructions).
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
    """A GPU architecture and its features.

    Parameters
    ----------
    name : str
        Name for NVRTC's ``--gpu-architecture``, such as ``"sm_90a"``.
    compute_capability : tuple of int
        Compute capability of the first GPU with this architecture. ``loads_on`` covers other GPUs.
    ptx_isa : tuple of int
        Minimum PTX ISA version.
    smem_per_block_bytes : int
        Maximum dynamic plus static shared memory of a thread block in bytes (opt-in limit).
    smem_per_sm_bytes : int
        Shared memory of an SM in bytes. The system reserves 1 KiB for each resident block.
    max_cluster_blocks : int
        Maximum number of thread blocks in a portable cluster, or 1 if cudatma does not use clusters on this target.
    features : frozenset of str
        Names from ``FEATURES``.
    runs_here : bool, default: True
        Whether cudatma launches kernels on this architecture. For sm_100, it only compiles and describes kernels.
    tensormap_knows_allocation : bool, default: False
        Whether a tensor map has bits that depend on the allocation at its address. If so, only the driver can change
        the address (cuTensorMapReplaceAddress). Otherwise the address is the first eight bytes.
    max_threads_per_sm, max_blocks_per_sm, named_barriers_per_sm : int
        Threads, thread blocks and named barriers that can be resident on an SM.

    Examples
    --------
    >>> target = cudatma.get_target("sm_90a")
    >>> target.mma, target.smem_per_block_bytes
    ('wgmma', 232448)
    >>> target.has("multicast")
    True
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
    max_threads_per_sm: int = 2048
    max_blocks_per_sm: int = 32
    named_barriers_per_sm: int = 64

    def has(self, feature: str) -> bool:
        """Return whether the target has a feature.

        Parameters
        ----------
        feature : str
            A name from ``FEATURES``.

        Returns
        -------
        bool
            Whether the target has the feature.

        Raises
        ------
        TargetError
            If the name is unknown.
        """
        if feature not in FEATURES:
            raise TargetError("feature", feature, ", ".join(sorted(FEATURES)))
        return feature in self.features

    def require(self, feature: str, purpose: str) -> None:
        """Raise TargetError unless the target has a feature.

        Parameters
        ----------
        feature : str
            A name from ``FEATURES``.
        purpose : str
            Name of the operation that needs the feature, for the error message.

        Raises
        ------
        TargetError
            If the target lacks the feature, or the name is unknown.
        """
        if not self.has(feature):
            able = [t.name for t in TARGETS.values() if feature in t.features]
            allowed = f"a target with {feature} ({', '.join(able)})"
            choice = next((name for name in able if TARGETS[name].runs_here), able[0])
            remedy = f"choose another target for {purpose}; set CUDATMA_TARGET={choice} for the emulator"
            raise TargetError("target", self.name, allowed, remedy)

    def smem_share_bytes(self, blocks: int) -> int:
        """Return the shared memory available to each of several resident thread blocks.

        Parameters
        ----------
        blocks : int
            Number of thread blocks on one SM.

        Returns
        -------
        int
            Maximum dynamic plus static shared memory of each block, in bytes.
        """
        return min(self.smem_per_block_bytes, self.smem_per_sm_bytes // blocks - SMEM_RESERVED_BYTES)

    @property
    def has_multicast(self) -> bool:
        """Whether TMA loads can multicast to a cluster."""
        return "multicast" in self.features

    @property
    def has_wgmma(self) -> bool:
        """Whether the target has wgmma.mma_async."""
        return "wgmma" in self.features

    @property
    def has_setmaxnreg(self) -> bool:
        """Whether warpgroups can release and request registers."""
        return "setmaxnreg" in self.features

    @property
    def mma(self) -> str:
        """Tensor core instructions to generate: ``"wgmma"`` or ``"mma_sync"``."""
        return "wgmma" if self.has_wgmma else "mma_sync"

    def loads_on(self, compute_capability: tuple[int, int]) -> bool:
        """Return whether a cubin for this target loads on a GPU.

        A cubin for a target that ends in "a" loads only on that target's own GPU. A cubin for a target that ends in "f"
        loads on its family. Any other cubin loads on GPUs with the same major version.

        Parameters
        ----------
        compute_capability : tuple of int
            Compute capability of the GPU, such as ``(9, 0)``.

        Returns
        -------
        bool
            Whether the cubin loads.
        """
        if self.name.endswith("a"):
            return compute_capability == self.compute_capability
        return (
            compute_capability[0] == self.compute_capability[0] and compute_capability[1] >= self.compute_capability[1]
        )


_TMA = frozenset({"tma", "mbarrier_expect_tx", "shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol"})
_BLACKWELL = _TMA | {"setmaxnreg", "tensormap_replace", "gather4", "im2col_w", "swizzle_atoms", "packed_types"}
_HOPPER_A = _TMA | {"cluster", "multicast", "wgmma", "setmaxnreg", "tensormap_replace"}
_GEFORCE = _BLACKWELL | {"mma_sync_fp8"}
#: Resident threads, blocks and named barriers of a GeForce SM. [CUDA 13.0, cuda_occupancy.h]
_SMALL_SM = (1536, 24, 24)
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
        Target("sm_120a", (12, 0), (8, 7), *_SMEM_SMALL, 1, _GEFORCE, True, True, *_SMALL_SM),
        Target("sm_120f", (12, 0), (8, 8), *_SMEM_SMALL, 1, _GEFORCE, True, True, *_SMALL_SM),
        Target("sm_121a", (12, 1), (8, 8), *_SMEM_SMALL, 1, _GEFORCE, True, True, *_SMALL_SM),
    )
}


def get_target(target: str | Target) -> Target:
    """Return the target with this name.

    Parameters
    ----------
    target : str or Target
        Name with or without "sm_", in upper or lower case, such as ``"sm_120a"`` or ``"120a"``. A Target is returned
        unchanged.

    Returns
    -------
    Target
        The target.

    Raises
    ------
    TargetError
        If the name is unknown.

    Examples
    --------
    >>> cudatma.get_target("120a").name
    'sm_120a'
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, str):
        name = target.strip().lower().replace("compute_", "sm_")
        name = name if name.startswith("sm_") else f"sm_{name}"
        if name in TARGETS:
            return TARGETS[name]
    remedy = "omit the target to use the GPU's target, or sm_90a if there is no GPU"
    if isinstance(target, str) and re.fullmatch(r"(sm_)?[5-8]\d[af]?", target.strip().lower()):
        remedy = "choose sm_90 (Hopper) or a later architecture, because TMA needs it"
    raise TargetError("target", target, ", ".join(TARGETS), remedy)


def target_for(compute_capability: tuple[int, int]) -> Target:
    """Return the best target for a GPU.

    The best target is the GPU's own "a" target if there is one, otherwise the target of its family, otherwise the plain
    target of its generation. Raises TargetError for a GPU without TMA (before compute capability 9.0), and for a GPU on
    which no target loads.
    """
    shown = f"compute capability {compute_capability[0]}.{compute_capability[1]}"
    if compute_capability < (9, 0):
        raise TargetError(
            "device",
            shown,
            "of compute capability 9.0 or later (TMA requires Hopper)",
            "pass backend='emulator' to compute on the CPU",
        )
    fitting = [t for t in TARGETS.values() if t.loads_on(compute_capability)]
    if not fitting:
        gpus = sorted({t.compute_capability for t in TARGETS.values()})
        allowed = "of compute capability " + " or ".join(f"{major}.{minor}" for major, minor in gpus)
        raise TargetError("device", shown, allowed, "add a row to cudatma/target.py for this architecture")
    return max(fitting, key=lambda t: (t.name.endswith("a"), t.name.endswith("f")))


def detect(device: int = 0) -> Target:
    """Return the target for an installed GPU, without creating a context.

    Parameters
    ----------
    device : int, default: 0
        CUDA ordinal of the GPU.

    Returns
    -------
    Target
        The best target for this GPU.

    Raises
    ------
    DriverError
        If there is no driver.
    TargetError
        If the GPU does not exist or has no target.
    """
    if not isinstance(device, int) or isinstance(device, bool):
        raise TargetError("device", device, "a nonnegative ordinal")
    return _detect(device)


def forget_detected() -> None:
    """Clear the cache of detect() after a change of driver."""
    _detect.cache_clear()


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
        raise TargetError(
            "device", device, f"0 to {count - 1}" if count else "the ordinal of a CUDA device (there is no CUDA device)"
        )
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
