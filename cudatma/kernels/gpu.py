"""Properties of a GPU for cost models and launches. A comment states the source of each number.

The driver reports the number of SMs, the clock rates and the width of the memory bus. The rate of mma.sync, the number
of resident clusters and the effective size of L2 were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma import context
from cudatma.errors import check
from cudatma.target import Target, detect, get_target

#: Fraction of the memory bandwidth that the bulk copies of a kernel reach: 4.6 of 4.92 TB/s. [H200,
#: benchmarks/read_floor.py]
_MEMORY_EFFICIENCY = 0.94
#: Number of operand bytes that may stay in L2 from one launch to the next. [H200]
IN_L2_BYTES = 50 << 20
#: Rate of mma.sync: on Hopper, 132 SMs at 1980 MHz reach 628 TFLOP/s [H200]. GeForce GPUs accumulate in fp32 at half
#: the rate of the tensor cores [NVIDIA RTX Blackwell white paper; not measured].
_HOPPER_MMA_SYNC, _GEFORCE_MMA_SYNC = 2403, 512
#: Maps the number of CTAs per cluster to the fraction of a GPU's SMs that clusters of this size can use. A GPU with 132
#: SMs in GPCs of at most 18 SMs runs 66, 39, 30, 22, 17 and 15 clusters of 2, 3, 4, 5, 6 and 8 CTAs, with one CTA per
#: SM. [H200, cuOccupancyMaxActiveClusters]
_IN_CLUSTERS = {1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
#: Allowed values of cluster_k, the number of CTAs that split K.
CLUSTER_K = tuple(_IN_CLUSTERS)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU.

    Clock rates are maximum rates. ``memory_bus_bits`` is the width of the memory bus, which transfers data twice per
    clock cycle.
    """

    target: str
    sm_count: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int

    @property
    def memory_bytes_per_us(self) -> float:
        """Memory bandwidth that the loads of one kernel reach, in bytes per microsecond."""
        return _MEMORY_EFFICIENCY * 2 * self.memory_clock_mhz * self.memory_bus_bits / 8

    @property
    def mma_sync_flops(self) -> int:
        """Floating-point operations per clock and SM by mma.sync with fp16 or bf16 operands and fp32 sums."""
        return _HOPPER_MMA_SYNC if get_target(self.target).compute_capability[0] == 9 else _GEFORCE_MMA_SYNC

    @property
    def clock_class_mhz(self) -> int:
        """The maximum SM clock, rounded to 100 MHz (GPUs of one model differ by less)."""
        return round(self.sm_clock_mhz, -2)


#: Most cost models were fitted to measurements on this GPU. [driver 580.159, device attributes]
H200 = Gpu("sm_90a", 132, 1980, 3201, 6144)
#: Clock rates and bus widths of other GPUs. [data sheets; not measured]
_KNOWN = (
    Gpu("sm_90a", 114, 1755, 1593, 5120),  # H100 PCIe
    Gpu("sm_120a", 170, 2407, 14001, 512),  # RTX 5090
    Gpu("sm_120a", 188, 2617, 14001, 512),  # RTX PRO 6000
    Gpu("sm_121a", 48, 2525, 4266, 256),  # GB10
)


def imagined_gpu(target: str | Target, sm_count: int | None = None) -> Gpu:
    """Return a known GPU of a target with this number of SMs, or a GPU extrapolated from the nearest known GPU.

    An extrapolated GPU has the same clock rates and the same memory-bus width per SM as the nearest GPU. If
    ``sm_count`` is None, the result is the first known GPU of the target. For sm_90a, this is an H200.
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
    """The installed GPUs of a Runtime, keyed by ordinal."""


def gpu_of(device: int) -> Gpu:
    """Return an installed GPU's properties without creating a context.

    Raises DriverError if there is no driver, LaunchError for an invalid ordinal, and TargetError for a GPU without a
    target.
    """
    gpus: _Gpus = context.runtime().part(_Gpus)
    if device not in gpus:
        gpus[device] = _read_gpu(device)
    return gpus[device]


def _read_gpu(device: int) -> Gpu:
    # Source: CUDA driver API, cuDeviceGetAttribute.
    target, driver = detect(device), context.initialize()
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
    """Return the number of clusters with ``cluster_k`` CTAs that run at the same time, with one CTA per SM."""
    return int(sm_count * _IN_CLUSTERS[cluster_k]) // cluster_k
