"""Properties of a GPU for cost models and launches. A comment names the source of each number.

The driver reports SMs, clocks and the width of the memory bus. The rates of mma.sync and of clusters, and L2, are
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma import context
from cudatma.errors import check
from cudatma.target import Target, detect, get_target

#: Fraction of the memory bus' rate that bulk copies of a kernel reach: 4.6 of 4.92 TB/s. [H200, the read floor F]
_MEMORY_EFFICIENCY = 0.94
#: Bytes of operands that L2 may retain from one launch to the next. [H200]
IN_L2_BYTES = 50 << 20
#: mma.sync on Hopper: 628 TFLOP/s of 132 SMs at 1980 MHz [H200]. GeForce accumulates fp32 at half of the tensor cores'
#: rate [NVIDIA RTX Blackwell white paper; not measured].
_HOPPER_MMA_SYNC, _GEFORCE_MMA_SYNC = 2403, 512
#: CTAs of a cluster -> fraction of a GPU's SMs that clusters of this size can use. A GPU with 132 SMs, in GPCs of
#: at most 18, runs 66, 39, 30, 22, 17 and 15 clusters of 2, 3, 4, 5, 6 and 8 CTAs, with one CTA on an SM.
#: [H200, cuOccupancyMaxActiveClusters]
_IN_CLUSTERS = {1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
#: Numbers of CTAs that may divide K.
CLUSTER_K = tuple(_IN_CLUSTERS)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's properties.

    Clocks are the highest ones. memory_bus_bits: bus width in bits; data moves twice per clock.
    """

    target: str
    sm_count: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int

    @property
    def memory_bytes_per_us(self) -> float:
        """Bytes per microsecond that the loads of one kernel reach."""
        return _MEMORY_EFFICIENCY * 2 * self.memory_clock_mhz * self.memory_bus_bits / 8

    @property
    def mma_sync_flops(self) -> int:
        """Floating-point operations per clock and SM by mma.sync with fp16 or bf16 operands and fp32 sums."""
        return _HOPPER_MMA_SYNC if get_target(self.target).compute_capability[0] == 9 else _GEFORCE_MMA_SYNC

    @property
    def clock_class_mhz(self) -> int:
        """The highest clock in steps of 100 MHz. GPUs of one model differ by less."""
        return round(self.sm_clock_mhz, -2)


#: Most cost models were fitted to measurements on this GPU. [driver 580.159, device attributes]
H200 = Gpu("sm_90a", 132, 1980, 3201, 6144)
#: Clocks and bus of other GPUs. [data sheets; not measured]
_KNOWN = (
    Gpu("sm_90a", 114, 1755, 1593, 5120),  # H100 PCIe
    Gpu("sm_120a", 170, 2407, 14001, 512),  # RTX 5090
    Gpu("sm_120a", 188, 2617, 14001, 512),  # RTX PRO 6000
    Gpu("sm_121a", 48, 2525, 4266, 256),  # GB10
)


def imagined_gpu(target: str | Target, sm_count: int | None = None) -> Gpu:
    """Return a known GPU of a target with this number of SMs, or one extrapolated from the nearest known GPU.

    An extrapolated GPU has the clocks of the nearest one, and the same memory-bus width per SM. ``sm_count`` None means
    the first known GPU of the target, for sm_90a an H200.
    """
    name = get_target(target).name
    known = [gpu for gpu in (H200, *_KNOWN) if gpu.target == name] or [H200]
    sm_count = known[0].sm_count if sm_count is None else sm_count
    nearest = min(known, key=lambda gpu: abs(gpu.sm_count - sm_count))
    if nearest.target == name and nearest.sm_count == sm_count:
        return nearest
    bus = max(64, round(nearest.memory_bus_bits * sm_count / nearest.sm_count))
    return Gpu(name, sm_count, nearest.sm_clock_mhz, nearest.memory_clock_mhz, bus)


class _Gpus(dict[int, Gpu]):
    """The installed GPUs by their ordinals, a part of the Runtime."""


def gpu_of(device: int) -> Gpu:
    """Return an installed GPU's properties. Creates no context.

    Raises DriverError without a driver, LaunchError for an invalid ordinal, TargetError for a GPU without a target.
    """
    gpus: _Gpus = context.runtime().part(_Gpus)
    if device not in gpus:
        gpus[device] = _read_gpu(device)
    return gpus[device]


def _read_gpu(device: int) -> Gpu:
    # Source: CUDA driver API, cuDeviceGetAttribute.
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
    known = imagined_gpu(target, context.device(device).sm_count)
    # A driver may report 0, for example if the GPU shares memory with the host.
    return Gpu(
        target.name,
        known.sm_count,
        clock_khz // 1000 or known.sm_clock_mhz,
        memory_khz // 1000 or known.memory_clock_mhz,
        bus or known.memory_bus_bits,
    )


def clusters_at_once(cluster_k: int, sm_count: int) -> int:
    """Return the number of clusters with ``cluster_k`` CTAs that run at the same time, with one CTA on an SM."""
    return int(sm_count * _IN_CLUSTERS[cluster_k]) // cluster_k
