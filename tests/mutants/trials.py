"""Everything whose mutants are tried, by name: variants of our kernels, probes, samples of other registry entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from probe_subjects import subjects as probe_subjects
from registry_subjects import registry_subjects

from cudatma.emulator import EmulatedModule
from cudatma.kernels.registry import REGISTRY, KernelEntry
from cudatma.kernels.sample import Sample
from cudatma.mutants import Call, Trial
from cudatma.target import get_target

#: What says how to look at a launch, not what is launched.
_OF_THE_RUN = ("schedules", "seed", "replay", "hazards", "step_limit", "trace", "progress")
#: A sample is made for the first of these that its kernel runs on.
_TARGETS = ("sm_90a", "sm_100a", "sm_120a")


class _Launched(Exception):  # noqa: N818 - it is no error
    """Carries a launch out of the function that would have run it."""


def _record(
    module: EmulatedModule,
    entry: str,
    grid: Any,
    block: Any,
    args: Any,
    *,
    cluster: Any = None,
    shared_bytes: int = 0,
    arrays: Any = (),
    **options: Any,
) -> None:
    kept = tuple((name, value) for name, value in options.items() if name not in _OF_THE_RUN)
    raise _Launched(Call(entry, grid, block, tuple(args), cluster, shared_bytes, tuple(arrays), kept))


def launch_of(sample: Sample) -> Call:
    """The launch that a sample runs."""
    try:
        with mock.patch.object(EmulatedModule, "launch", _record):
            sample.run()
    except _Launched as launched:
        (call,) = launched.args
        assert isinstance(call, Call)
        return replace(call, keep=sample)
    raise AssertionError(f"{sample.title}: launches nothing")


def sample_trial(entry: KernelEntry) -> Trial:
    """The mutants of a registry kernel's sample. Each run begins with the arrays as the kernel finds them."""
    make = entry.sample
    assert make is not None
    target = get_target(next(name for name in _TARGETS if entry.configs(name)))
    sample = make(target)
    call = launch_of(sample)
    initial = [array.copy() for array in call.arrays]

    def restored() -> Call:
        for array, values in zip(call.arrays, initial, strict=True):
            array[...] = values
        return call

    return Trial(sample.kernel.ptx, restored)


def trials() -> dict[str, Callable[[], Trial]]:
    """``kernel/variant`` -> its trial. A kernel of the registry that has no launch here takes part with its sample."""
    subjects = [*registry_subjects(), *probe_subjects()]
    found: dict[str, Callable[[], Trial]] = {subject.name: subject.trial for subject in subjects}
    launched = {subject.kernel for subject in subjects}
    samples = [entry for entry in REGISTRY.values() if entry.emulated and entry.name not in launched]
    return found | {f"{entry.name}/sample": partial(sample_trial, entry) for entry in samples}
