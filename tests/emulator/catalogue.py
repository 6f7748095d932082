"""Helpers of the hazard catalogue: PTX as macros, and kernels with and without each of their bugs.

The instructions are macros, so that a hazard's source line is the line of the kernel that uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
from ptx_of import ptx_alone

from cudatma.emulator import CAUSES, EmulatedModule, Hazard, Report, load
from cudatma.target import get_target

HEADER = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
struct alignas(64) Map { u8 bytes[128]; };
#define ADDRESS(p) ((u32)__cvta_generic_to_shared(p))
#define MEMORY ::: "memory"
// barriers in shared memory
#define INIT(bar, n) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"((u32)(n)) : "memory")
#define ARRIVE(bar) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory")
#define ARRIVE_REMOTE(bar) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) \
    : "memory")
#define EXPECT(bar, n) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), \
    "r"((u32)(n)) : "memory")
#define WAIT(bar, parity) asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; " \
    "@p bra D; bra W; D: }" :: "r"(bar), "r"((u32)(parity)) : "memory")
#define WAIT_CLUSTER(bar, parity) asm \
    volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 " \
    "p, [%0], %1; @p bra D; bra W; D: }" :: "r"(bar), "r"((u32)(parity)) : "memory")
// copies
#define TMA_LOAD(to, map, bar, x, y) asm \
    volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes" \
    " [%0], [%1, {%3, %4}], [%2];" :: "r"(to), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory")
#define TMA_MULTICAST(to, map, bar, x, y, mask) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global." \
    "mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" \
    :: "r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "h"((u16)(mask)) : "memory")
#define TMA_STORE(map, from, x, y) asm \
    volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" \
    :: "l"(map), "r"(from), "r"(x), "r"(y) : "memory")
#define TMA_ADD(map, from, x, y) asm \
    volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group " \
    "[%0, {%2, %3}], [%1];" :: "l"(map), "r"(from), "r"(x), "r"(y) : "memory")
#define BULK_LOAD(to, from, n, bar) asm \
    volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], " \
    "%2, [%3];" :: "r"(to), "l"(from), "r"((u32)(n)), "r"(bar) : "memory")
#define BULK_STORE(to, from, n) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" \
    :: "l"(to), "r"(from), "r"((u32)(n)) : "memory")
#define BULK_TO_CLUSTER(to, from, n, bar) asm \
    volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes " \
    "[%0], [%1], %2, [%3];" :: "r"(to), "r"(from), "r"((u32)(n)), "r"(bar) : "memory")
#define COMMIT() asm volatile("cp.async.bulk.commit_group;" MEMORY)
#define WAIT_READ(n) asm volatile("cp.async.bulk.wait_group.read " #n ";" MEMORY)
#define WAIT_ALL(n) asm volatile("cp.async.bulk.wait_group " #n ";" MEMORY)
#define CP_ASYNC(to, from) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory")
#define CP_COMMIT() asm volatile("cp.async.commit_group;" MEMORY)
#define CP_WAIT(n) asm volatile("cp.async.wait_group " #n ";" MEMORY)
// fences and barriers
#define FENCE_INIT() asm volatile("fence.mbarrier_init.release.cluster;" MEMORY)
#define FENCE_ASYNC() asm volatile("fence.proxy.async;" MEMORY)
#define FENCE_ASYNC_SHARED() asm volatile("fence.proxy.async.shared::cta;" MEMORY)
#define FENCE_ASYNC_GLOBAL() asm volatile("fence.proxy.async.global;" MEMORY)
#define CLUSTER_ARRIVE() asm volatile("barrier.cluster.arrive.release.aligned;" MEMORY)
#define CLUSTER_ARRIVE_RELAXED() asm volatile("barrier.cluster.arrive.relaxed.aligned;" MEMORY)
#define CLUSTER_WAIT() asm volatile("barrier.cluster.wait.acquire.aligned;" MEMORY)
#define NAMED_SYNC(id, n) asm volatile("bar.sync %0, %1;" :: "r"((u32)(id)), "r"((u32)(n)) : "memory")
#define NAMED_ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" :: "r"((u32)(id)), "r"((u32)(n)) : "memory")
#define MAPA(to, from, rank) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(from), \
    "r"((u32)(rank)))
#define ELECT(flag) asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(flag))
"""

NAME = "kernel.cu"
#: Kinds whose reports name the missing call.
ADVISED = ("read_before_load", "wrong_parity", "overwritten_while_read")


@lru_cache(maxsize=128)
def module_of(source: str, defines: tuple[str, ...], target: str = "sm_90a") -> EmulatedModule:
    """Return a kernel of the catalogue with some macros defined."""
    text = "".join(f"#define {name}\n" for name in defines) + HEADER + source
    return load(ptx_alone(text, get_target(target)))


def line_of(source: str, defines: tuple[str, ...], mark: str) -> int:
    """Return the line of the compiled text that ends with a comment ``//! mark``."""
    text = "".join(f"#define {name}\n" for name in defines) + HEADER + source
    found = [number for number, line in enumerate(text.splitlines(), 1) if re.search(rf"//!.*\b{mark}\b", line)]
    assert len(found) == 1, f"{mark}: {found}"
    return found[0]


@dataclass(frozen=True)
class Case:
    """A kernel ``k`` and its bugs.

    ``bugs`` maps a macro to the kind of hazard that it causes, and to other kinds that may occur with it. The line at
    which a bug shows is marked ``//! MACRO``; without a mark it is not checked. ``arguments`` returns the launch
    arguments and a check of the correct kernel's results. ``variants`` are macros that keep the kernel correct.
    """

    name: str
    source: str
    bugs: dict[str, str | tuple[str, ...]]
    arguments: Callable[[], tuple[Sequence[Any], Callable[[], bool]]]
    grid: int = 1
    block: int = 32
    shared_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "sm_90a"
    variants: tuple[str, ...] = ()

    def run(self, *defines: str, schedules: int) -> tuple[Report, bool]:
        """Return the report and whether the results are right."""
        args, is_right = self.arguments()
        options: dict[str, Any] = {
            name: tuple(args[k] for k in value) if name == "produced_by_previous" else value
            for name, value in self.options.items()
        }
        report = module_of(self.source, defines, self.target).launch(
            "k",
            self.grid,
            self.block,
            args,
            shared_bytes=self.shared_bytes,
            schedules=schedules,
            hazards="collect",
            step_limit=300_000,
            **options,
        )
        return report, is_right()


def checks_of(
    cases: Sequence[Case], clean_sweep: int | None = None, bug_sweep: int | None = None
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a test that the correct kernels are clean, and a test that each bug is reported.

    The sweeps are arguments of ``pytest.mark.sweep``: the number of quick cases, or None for all.
    """

    @pytest.mark.parametrize(
        ("case", "variant"), [(case, variant) for case in cases for variant in ("", *case.variants)], ids=_name
    )
    def is_clean(case: Case, variant: str) -> None:
        report, is_right = case.run(*filter(None, [variant]), schedules=3)
        assert report.is_clean, str(report)
        assert is_right

    @pytest.mark.parametrize(("case", "bug"), [(case, bug) for case in cases for bug in case.bugs], ids=_name)
    def is_reported(case: Case, bug: str) -> None:
        _check_bug(case, bug)

    return (
        is_clean if clean_sweep is None else pytest.mark.sweep(clean_sweep)(is_clean),
        is_reported if bug_sweep is None else pytest.mark.sweep(bug_sweep)(is_reported),
    )


def _name(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def _check_bug(case: Case, bug: str) -> None:
    """Check that a bug is reported first, once at each place, with a complete report and no unexpected kinds."""
    wanted = case.bugs[bug]
    kinds = (wanted,) if isinstance(wanted, str) else wanted
    report, _ = case.run(bug, schedules=4)
    assert [hazard.kind for hazard in report.hazards][:1] == [kinds[0]], str(report)
    assert report.kinds <= set(kinds), str(report)
    found = [hazard for hazard in report.hazards if hazard.kind == kinds[0]]
    places = [(hazard.ptx_line, hazard.instruction) for hazard in found]
    assert len(places) == len(set(places))
    for hazard in found:
        check_complete(hazard)
        assert hazard.advice or hazard.kind not in ADVISED
    if re.search(rf"//!.*\b{bug}\b", case.source):
        line = line_of(case.source, (bug,), bug)
        assert f"{NAME}:{line}" in [hazard.source for hazard in found], f"line {line} in\n{report}"


def check_complete(hazard: Hazard) -> None:
    assert hazard.kernel == "k"
    assert hazard.ptx_line > 0
    assert hazard.instruction
    assert hazard.source.startswith(f"{NAME}:")
    assert hazard.cause == CAUSES[hazard.kind] or hazard.kind in ("deadlock", "lane_race")  # which depend on the case
    assert len(hazard.block) == 3
    assert hazard.warp >= 0
