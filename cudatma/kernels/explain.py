"""Explain why a configuration is chosen for a problem of any family."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from cudatma.backend import selected_backend
from cudatma.build.kernel import default_target
from cudatma.errors import counted, duration
from cudatma.kernels.choice import Decision, Listed, decide
from cudatma.kernels.cost import Cost, cheapest_first
from cudatma.kernels.family import Family
from cudatma.kernels.gpu import Gpu, gpu_of, imagined_gpu
from cudatma.kernels.plans import ctas_on_sm
from cudatma.kernels.schedule import Schedule
from cudatma.target import KIB, Target, get_target

#: Maximum number of candidates in an explanation.
_LISTED = 8
#: Width of a table in characters. A row takes about 60 characters, and a wrapped table is hard to read.
_WIDTH = 160


def explained_gpu(device: int | None, target: str | Target | None) -> Gpu:
    """Return the GPU of a call's arrays, or an assumed GPU if ``target`` is given or the arrays are on the host.

    By default, the assumed GPU for host arrays has the target that default_target() returns. Raises TargetError for an
    unknown target.
    """
    if target is None and device is not None:
        return gpu_of(device)
    return imagined_gpu(default_target() if target is None else target)


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel that a call launches, and the distribution of its work among CTAs."""

    config: Any
    schedule: Schedule

    def as_dict(self) -> dict[str, Any]:
        """Return the launch as a dict for JSON."""
        return {
            "entry": self.config.entry,
            "threads": self.config.threads,
            "smem_bytes": self.config.smem_bytes,
            "ctas_per_sm": ctas_on_sm(self.config, 1),
            "schedule": asdict(self.schedule),
        }

    def __str__(self) -> str:
        work, config = self.schedule, self.config
        size = f"{counted(work.ctas, 'CTA')} of {config.threads} threads"
        size += f" and {config.smem_bytes / KIB:.4g} KiB of shared memory" if config.smem_bytes else ""
        if not work.k_iterations:
            return size
        tiles = f"{work.tiles_m} x {work.tiles_n} tile{'s' * (work.tiles_m * work.tiles_n > 1)} "
        tiles += f"of a cluster of {work.cluster} CTAs, " if work.cluster > 1 else ""
        divided = f", {counted(work.stream_tiles, 'tile')} split among CTAs" if work.stream_tiles else ""
        if config.cluster_k > 1:
            divided = f", the K of each tile split among the {config.cluster_k} CTAs of a cluster"
        return f"{tiles}of {counted(work.k_iterations, 'stage')} on {size}{divided}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a problem's configuration. ``str()`` returns readable text, and ``as_dict()`` returns a dict.

    Parameters
    ----------
    family : Family
        Family of the function's kernels.
    problem : Problem
        The computation.
    gpu : Gpu
        The installed or assumed GPU.
    decision : Decision
        The configuration, its source, and the reason.
    launches : tuple of Launched
        The kernels that the call launches, in order.
    prediction : Cost
        Time that the cost model predicts for operands that are not in L2.
    candidates : tuple of Listed
        The cheapest configurations and the chosen configuration.
    considered : int
        Number of candidates.
    """

    family: Family[Any, Any] = field(compare=False)
    problem: Any
    gpu: Gpu
    decision: Decision[Any]
    launches: tuple[Launched, ...]
    prediction: Cost
    candidates: tuple[Listed[Any], ...]
    considered: int

    @property
    def kernel(self) -> str:
        """Name of the kernel in its family, for example ``"skinny"``, ``"wgmma"`` or ``"mma_sync"`` for Marlin."""
        return str(self.config.version)

    @property
    def config(self) -> Any:
        """The chosen configuration."""
        return self.decision.config

    @property
    def m(self) -> int:
        """M of the problem."""
        return int(self.problem.m)

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict that can be serialized to JSON.

        Returns
        -------
        dict
            The explanation, as dicts, lists, strings and numbers.
        """
        return {
            "layer": {name: value for name, value in self.problem.as_json().items() if name != "m"},
            "m": self.m,
            "gpu": asdict(self.gpu),
            "kernel": self.kernel,
            "entry": self.config.entry,
            "config": asdict(self.config),
            "source": self.decision.source,
            "why": self.decision.why,
            "launches": [launched.as_dict() for launched in self.launches],
            "prediction": self.prediction.as_dict(),
            "considered": self.considered,
            "candidates": [
                {
                    "kernel": candidate.config.version,
                    "label": candidate.label,
                    "us": candidate.cost.us,
                    "bound": candidate.cost.bound,
                    "chosen": candidate.config == self.config,
                }
                for candidate in self.candidates
            ],
        }

    def __str__(self) -> str:
        gpu, cost, several = self.gpu, self.prediction, len(self.launches) > 1
        assumed = "" if selected_backend("auto") == "cuda" else " (assumed; this machine has no usable GPU)"
        terms = [(each.name.removesuffix("_us"), getattr(cost, each.name)) for each in fields(cost)]
        lines = [
            self.problem.description,
            f"on {gpu.target}{assumed}, {counted(gpu.sm_count, 'SM')}, {gpu.sm_clock_mhz} MHz, "
            f"memory {gpu.memory_bytes_per_us / 1e6:.3g} TB/s",
            f"kernel     {self.kernel}: {self.config.entry}",
            f"why        {self.decision.source}: {self.decision.why}",
            *(
                line
                for each in self.launches
                for line in ([f"launch     {each.config.entry}"] if several else []) + [f"work       {each}"]
            ),
            f"predicted  {duration(1e-6 * cost.us)}: "
            + ", ".join(f"{term} {duration(1e-6 * us)}" for term, us in terms if us >= 0.005),
            "           (if the operands are not in L2)",
            "",
        ]
        rows = [
            (
                "->" if candidate.config == self.config else "",
                f"{candidate.cost.us:.4g}",
                candidate.cost.bound,
                candidate.config.version,
                candidate.label,
            )
            for candidate in self.candidates
        ]
        title = f"Cheapest of {counted(self.considered, 'candidate')}, by predicted time"
        return "\n".join(lines) + table_text(title, ("", "us", "bound by", "kernel", "entry"), rows)


def explained(
    family: Family[Any, Any],
    problem: Any,
    gpu: Gpu,
    *,
    launched: Callable[[Any], Any] | None = None,
) -> Explanation:
    """Return the explanation of the configuration that a family chooses for a problem.

    ``launched`` maps a chosen config to the launched config. The default is ``Family.launched``. Raises
    the errors of decide().
    """
    launched = launched or family.launched
    decision = decide(family, problem, gpu)
    decision = replace(decision, config=launched(decision.config))
    ranked = cheapest_first(family.times, problem, gpu)
    configs = [launched(config) for config, _ in ranked[:_LISTED]]
    config, target = decision.config, get_target(gpu.target)
    if config not in configs:
        configs.append(config)
    listed = [Listed(config, config.cost(problem, gpu), config.launches(problem, target)) for config in configs]
    kernels = next(each.kernels for each in listed if each.config == config)
    return Explanation(
        family=family,
        problem=problem,
        gpu=gpu,
        decision=decision,
        launches=tuple([Launched(kernel, family.schedule(kernel, problem, gpu)) for kernel in kernels]),
        prediction=config.cost(problem, gpu),
        candidates=tuple(listed),
        considered=max(len(ranked), len(listed)),
    )


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a title and column names, without colors or markup."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return plain_table(title, columns, rows)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column == "us" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    page = io.StringIO()
    Console(file=page, width=_WIDTH, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table of table_text() without using rich."""
    table = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([title, *lines])
