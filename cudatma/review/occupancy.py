"""Number of CTAs that an SM can run at the same time, and the resource that limits it.

Source: CUDA 13.0, cuda_occupancy.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.review.cubin import Resources
from cudatma.target import SMEM_RESERVED_BYTES, TARGETS, Target

#: Registers and partitions of an SM, and the allocation units of registers and shared memory.
_REGISTERS_PER_SM, _PARTITIONS, _REGISTER_UNIT, _SMEM_UNIT_BYTES = 65536, 4, 256, 128
_WARP = 32


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of an SM.

    Attributes
    ----------
    threads : int
        Threads per CTA.
    dynamic_smem_bytes : int
        Dynamic shared memory per CTA.
    ctas, warps : int
        Number of resident CTAs and of resident warps per SM. 0 if no CTA fits.
    limited_by : tuple of str
        Resources that prevent an additional CTA.
    """

    threads: int
    dynamic_smem_bytes: int
    ctas: int
    warps: int
    limited_by: tuple[str, ...]


def target_of(name: str) -> Target | None:
    """Return the target with this name, otherwise a target with the same compute capability, or None."""
    digits = name.removeprefix("sm_").rstrip("af")
    capability = int(digits[:-1] or 0), int(digits[-1:] or 0)
    return TARGETS.get(name) or next((t for t in TARGETS.values() if t.compute_capability == capability), None)


def occupancy(resources: Resources, target: Target, threads: int, dynamic_smem_bytes: int) -> Occupancy:
    """Return the occupancy of a kernel for a number of threads and a dynamic shared memory size per CTA."""
    warps = -(-threads // _WARP)
    warp_registers = _round_up(max(resources.registers, 1) * _WARP, _REGISTER_UNIT)
    smem = _round_up(resources.static_smem_bytes + dynamic_smem_bytes + SMEM_RESERVED_BYTES, _SMEM_UNIT_BYTES)
    smem_fits = resources.static_smem_bytes + dynamic_smem_bytes <= target.smem_per_block_bytes
    limits = {
        "registers": _REGISTERS_PER_SM // _PARTITIONS // warp_registers * _PARTITIONS // warps,
        "shared memory": target.smem_per_sm_bytes // smem if smem_fits else 0,
        "threads": target.max_threads_per_sm // (warps * _WARP),
        "CTAs": target.max_blocks_per_sm,
    }
    if resources.named_barriers:
        limits["named barriers"] = target.named_barriers_per_sm // resources.named_barriers
    ctas = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == ctas)
    return Occupancy(threads, dynamic_smem_bytes, ctas, ctas * warps, limited_by)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
