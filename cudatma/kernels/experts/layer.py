"""LayerConfig, the tiles of a layer of experts, and MoeConfig, the kernels that a call launches with these tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from cudatma.errors import ArgumentError, quoted
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.config import Config
from cudatma.kernels.cost import Cost
from cudatma.kernels.experts.config import (
    MAX_STAGES,
    PRESETS,
    PRODUCTS,
    ROUTE_CTAS,
    ROUTE_THREADS,
    ExpertsConfig,
    RouteConfig,
    SumConfig,
)
from cudatma.kernels.experts.cost import layer_cost
from cudatma.kernels.experts.problem import MAX_EXPERTS, MoeProblem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape
from cudatma.target import Target

#: Minimum number of pairs for a routing kernel with several CTAs.
_MIN_PAIRS_OF_CLUSTER = 4096
#: Fields of an ExpertsConfig that a LayerConfig has for each product.
_PRODUCT_FIELDS = ("tile_n", "tile_k", "slice_k", "ctas_per_sm")
#: Values of (tile_k, slice_k, ctas_per_sm) that are worth measuring.
_PIPELINES = {
    "skinny": ((256, 1, 1), (256, 2, 1), (256, 2, 2), (512, 4, 1), (128, 2, 2)),
    "wgmma": ((256, 1, 1), (128, 1, 1)),
}


class MoeConfig(NamedTuple):
    """Kernels of a call: the routing unless each pair is a block, the two grouped GEMMs, and the sum."""

    route: RouteConfig | None
    up: ExpertsConfig
    down: ExpertsConfig
    sum: SumConfig

    @classmethod
    def of(cls, threads: int, up: ExpertsConfig, down: ExpertsConfig, ctas: int = 1) -> MoeConfig:
        """Return the kernels for these grouped GEMMs, which must have the same tile_m and version."""
        route = None if up.direct else RouteConfig(up.tile_m, short_rows(up), threads, ctas)
        return cls(route, up, down, SumConfig(up.dtype, up.direct))

    @property
    def named_kernels(self) -> tuple[tuple[str, Any], ...]:
        """(name, config) of each kernel in order of launch."""
        return tuple([(name, config) for name, config in self._asdict().items() if config is not None])

    @property
    def kernels(self) -> tuple[tuple[str, Any], ...]:
        """(template, config) of each kernel in order of launch."""
        return tuple([(config.template, config) for config in self if config is not None])


def short_rows(config: ExpertsConfig) -> int:
    """Return the number of rows up to which a block takes much less time than a whole block."""
    return max(config.row_counts[:-1], default=0)


def route_threads(experts: int, pairs: int) -> int:
    """Return the number of threads of the routing kernel."""
    return next(threads for threads in ROUTE_THREADS if threads >= min(MAX_EXPERTS, max(experts, pairs // 2)))


def route_shape(problem: MoeProblem, target: Target) -> tuple[int, int]:
    """Return the numbers of threads per CTA and of CTAs of the routing kernel."""
    ctas = ROUTE_CTAS if problem.pairs >= _MIN_PAIRS_OF_CLUSTER and target.has("cluster") else 1
    return route_threads(problem.experts, problem.pairs), ctas


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig(Config):
    """Tiles of the two grouped GEMMs of a layer of experts.

    Attributes
    ----------
    version : str
        A key of PRESETS, the version of both grouped GEMMs.
    tile_m : int
        Maximum number of rows of a block.
    direct : bool
        Whether each pair of a token and an expert is a block, so that no routing kernel is needed.
    up_tile_n, up_tile_k, up_slice_k, up_ctas_per_sm : int
        Fields of the first product's ExpertsConfig. Its ring is the longest one that fits.
    down_tile_n, down_tile_k, down_slice_k, down_ctas_per_sm : int
        Fields of the second product's ExpertsConfig.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    version: str
    tile_m: int
    up_tile_n: int
    up_tile_k: int
    down_tile_n: int
    down_tile_k: int
    up_slice_k: int = 1
    up_ctas_per_sm: int = 1
    down_slice_k: int = 1
    down_ctas_per_sm: int = 1
    direct: bool = False

    revision: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.version not in PRESETS:
            raise ArgumentError("version", self.version, quoted(PRESETS))

    @classmethod
    def of(cls, up: ExpertsConfig, down: ExpertsConfig) -> LayerConfig:
        """Return the tiles of two grouped GEMMs, which must have the same version and tile_m."""
        fields = {
            f"{config.product}_{name}": getattr(config, name) for config in (up, down) for name in _PRODUCT_FIELDS
        }
        return cls(version=up.version, tile_m=up.tile_m, direct=up.direct, **fields)

    @property
    def entry(self) -> str:
        """Name of the configuration."""
        names = [self.version, str(self.tile_m), *(["pairs"] if self.direct else [])]
        for product in PRODUCTS:
            n, k, slices, ctas = self.fields_of(product).values()
            names += [product, f"{n}x{k}", *([f"k{slices}"] if slices > 1 else []), *([f"b{ctas}"] if ctas > 1 else [])]
        return f"experts_{'_'.join(names)}"

    def fields_of(self, product: str) -> dict[str, int]:
        """Return the fields of a product's ExpertsConfig."""
        return {name: getattr(self, f"{product}_{name}") for name in _PRODUCT_FIELDS}

    def grouped(self, product: str, problem: MoeProblem, target: Target) -> ExpertsConfig:
        """Return the grouped GEMM of a product for weights without a scale form, with the longest ring that fits."""
        tile = tuple(self.fields_of(product).items())
        return _grouped(
            self.version, product, problem.product(product), self.tile_m, tile, problem.gate, self.direct, target
        )

    def kernels(self, problem: MoeProblem, target: Target) -> MoeConfig:
        """Return the kernels of a call. Raises ArgumentError if a kernel does not support the tiles."""
        up, down = (self.grouped(name, problem, target).in_form(problem.scale_form(name)) for name in PRODUCTS)
        threads, ctas = route_shape(problem, target)
        return MoeConfig.of(threads, up, down, ctas)

    def launches(self, problem: MoeProblem, target: Target) -> tuple[Any, ...]:
        return tuple([config for config in self.kernels(problem, target) if config is not None])

    def check(self, problem: MoeProblem, target: Target) -> None:
        for config in self.launches(problem, target):
            config.check_target(target)

    def adapted(self, problem: MoeProblem) -> LayerConfig | None:
        """Return the config for weights with another dtype, group size or four-bit format, or None for other problems.

        Weights of eight bits have shorter rings, and experts on other GPUs leave fewer rows for the same M.
        """
        is_whole = problem.experts == problem.global_experts
        return self if is_whole and problem.up.weight.bits == problem.down.weight.bits == 4 else None

    def cost_at(self, m: Any, problem: MoeProblem, gpu: Gpu) -> Cost:
        return layer_cost(self, m, problem, gpu)

    def variants(self, problem: MoeProblem) -> Iterator[Mapping[str, Any]]:
        for pipeline in _PIPELINES[self.version]:
            for product in PRODUCTS:
                names = [f"{product}_{name}" for name in _PRODUCT_FIELDS[1:]]
                yield dict(zip(names, pipeline, strict=True))


@lru_cache(maxsize=1024)
def _grouped(
    version: str,
    product: str,
    shape: LinearShape,
    tile_m: int,
    tile: tuple[tuple[str, int], ...],
    gate: str,
    direct: bool,
    target: Target,
) -> ExpertsConfig:
    config = grouped(version, product, shape, tile_m=tile_m, gate=gate, direct=direct, **dict(tile))
    return config.with_longest_ring(target.smem_share_bytes(config.ctas_per_sm), MAX_STAGES) or config


def grouped(version: str, product: str, shape: LinearShape, *, tile_n: int, **fields: Any) -> ExpertsConfig:
    """Return a grouped GEMM for an expert's weight, with two stages. ``fields`` are fields of an ExpertsConfig."""
    if version == "skinny":
        fields |= {"deep_box": shape.k % 64 == 0}
    else:
        warpgroups = max(1, tile_n // 128)
        fields |= {"warpgroups": warpgroups, "consumer_registers": 232 if warpgroups == 2 else 0}
        fields |= {"mmas_per_commit": 2, "commits_in_flight": 1}
    fields |= {name: getattr(shape, name) for name in PROBLEM_FIELDS}
    return ExpertsConfig(version=version, product=product, tile_n=tile_n, stages=2, **fields)
