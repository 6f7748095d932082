"""What the model of a GEMM's time must know of a card, and of an architecture. Each number says where it comes from.

Per card: what the driver tells (multiprocessors, clocks, width of the memory bus). Per architecture: rates of a
multiprocessor for each clock, read once on an H200 (docs/performance/model.md) or, where there was no such card, off a
data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cudatma import context
from cudatma.errors import check
from cudatma.target import Target, detect, get_target

#: Part of the memory bus' rate that one kernel's bulk copies reach: 4.6 of 4.92 TB/s. [H200, the read floor F]
_MEMORY_EFFICIENCY = 0.94
#: Bytes a clock that a multiprocessor takes from L2. [NVIDIA Nsight Compute's peak; the fit agrees]
_L2_BYTES_PER_CLOCK = 64


@dataclass(frozen=True, slots=True)
class Card:
    """A card's facts. sm_clock_mhz, memory_clock_mhz: the highest. memory_bus_bits: lines, of two bits a clock each."""

    target: str
    multiprocessors: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int

    @property
    def memory_bytes_per_us(self) -> float:
        """What one kernel's loads reach."""
        return _MEMORY_EFFICIENCY * 2 * self.memory_clock_mhz * self.memory_bus_bits / 8

    @property
    def l2_bytes_per_us(self) -> float:
        """From L2, for one multiprocessor."""
        return float(_L2_BYTES_PER_CLOCK * self.sm_clock_mhz)

    @property
    def clock_class_mhz(self) -> int:
        """The highest clock in steps of 100 MHz: cards of one make differ by less."""
        return round(self.sm_clock_mhz, -2)


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating-point operations a clock of one multiprocessor's tensor cores, fp16 or bf16 in, fp32 out.

    mma_sync: m16n8k16. wgmma: by the instruction's columns, operand A in registers, two warpgroups; wgmma_alone: one.
    sustained: part of the highest clock that the power limit leaves to a kernel that keeps wgmma busy; rested: the same
    where the card rests between short runs of it.
    """

    mma_sync: float
    wgmma: Mapping[int, float]
    wgmma_alone: Mapping[int, float]
    sustained: float
    rested: float


#: The card that the rates were read on. [driver 580.159, device attributes]
H200 = Card("sm_90a", 132, 1980, 3201, 6144)
#: Clocks and bus of other cards. [their data sheets; nothing here was measured on them]
_OTHERS = (
    Card("sm_90a", 114, 1755, 1593, 5120),  # H100 PCIe
    Card("sm_120a", 170, 2407, 14001, 512),  # RTX 5090
    Card("sm_120a", 188, 2617, 14001, 512),  # RTX PRO 6000
    Card("sm_121a", 48, 2525, 4266, 256),  # GB10
)


def _per_clock(teraflops: Mapping[int, float]) -> dict[int, float]:
    """TFLOP/s of the whole H200 at its highest clock -> operations a clock of one multiprocessor."""
    return {n: t * 1e6 / (H200.multiprocessors * H200.sm_clock_mhz) for n, t in teraflops.items()}


_HOPPER = Rates(
    mma_sync=_per_clock({8: 628})[8],
    wgmma=_per_clock({8: 299, 16: 595, 32: 962, 64: 965, 128: 917, 192: 917, 256: 877}),
    wgmma_alone=_per_clock({8: 175, 16: 334, 32: 560, 64: 708, 128: 773, 192: 804, 256: 824}),
    sustained=0.84,  # some 1660 of 1980 MHz: 1530 to 1700 under wgmma [docs/performance/marlin_wgmma.md]
    rested=0.96,
)
#: GeForce accumulates fp32 at half of the tensor cores' rate. [NVIDIA RTX Blackwell white paper; not measured]
_BLACKWELL_RTX = Rates(mma_sync=512, wgmma={}, wgmma_alone={}, sustained=1.0, rested=1.0)


def rates(target: Target) -> Rates:
    """Those of the architecture; of Hopper's mma.sync for one that has no row."""
    return _HOPPER if "wgmma" in target.features or target.compute_capability[0] == 9 else _BLACKWELL_RTX


def imagined_card(target: str | Target, multiprocessors: int) -> Card:
    """A known card of that target and number of multiprocessors, else one with the clocks and the share of the memory
    bus of the nearest known."""
    name = get_target(target).name
    known = [card for card in (H200, *_OTHERS) if card.target == name] or [H200]
    nearest = min(known, key=lambda card: abs(card.multiprocessors - multiprocessors))
    if nearest.target == name and nearest.multiprocessors == multiprocessors:
        return nearest
    bus = max(64, round(nearest.memory_bus_bits * multiprocessors / nearest.multiprocessors))
    return Card(name, multiprocessors, nearest.sm_clock_mhz, nearest.memory_clock_mhz, bus)


@lru_cache(maxsize=64)
def card_of(device: int) -> Card:
    """An installed card's facts. Raises DriverError without a driver, LaunchError for an ordinal that is none,
    TargetError for a card that no target serves. Creates no context. [CUDA driver API, cuDeviceGetAttribute]"""
    target, driver = detect(device), context.initialise()
    names = driver.CUdevice_attribute
    handle = check(driver.cuDeviceGet(device), "cuDeviceGet")
    clock_khz, memory_khz, bus = (
        int(check(driver.cuDeviceGetAttribute(name, handle), "cuDeviceGetAttribute"))
        for name in (
            names.CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            names.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            names.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
        )
    )
    known = imagined_card(target, context.device(device).multiprocessors)
    # A driver may answer 0, as for memory that the card shares with the host.
    return Card(
        target.name,
        known.multiprocessors,
        clock_khz // 1000 or known.sm_clock_mhz,
        memory_khz // 1000 or known.memory_clock_mhz,
        bus or known.memory_bus_bits,
    )
