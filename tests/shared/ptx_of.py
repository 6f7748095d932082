"""PTX for the emulator's tests. NVRTC compiles each source once per process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cudatma.build.kernel import load_kernel, wants_debug
from cudatma.build.nvrtc import _run, compile_flags
from cudatma.build.render import render
from cudatma.emulator import EmulatedModule, load
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, get_target

#: Functions of the tests' kernels for instructions that CUDA C++ lacks.
PRELUDE = """
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/cluster.cuh.j2"
//% include "primitives/cp_async.cuh.j2"
//% include "primitives/fence.cuh.j2"
//% include "primitives/ldmatrix.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/mma.cuh.j2"
//% include "primitives/sync.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
using namespace cudatma;
"""


def ptx_alone(text: str, target: Target) -> str:
    """Compile a source to PTX without a cubin, which saves 60 % of the time. *_compile tests cover cubins."""
    _, *flags = compile_flags(target)
    log, ptx, _ = _run(text, "/kernel.cu", [f"-arch={target.name.replace('sm', 'compute')}", *flags], None)
    assert ptx, log
    return ptx


@lru_cache(maxsize=256)
def ptx_of_source(source: str, target: str = "sm_90a") -> str:
    """Return the PTX of a source that may use all primitives."""
    chosen = get_target(target)
    return ptx_alone(render(PRELUDE + source, None, chosen, is_source=True), chosen)


@lru_cache(maxsize=256)
def ptx_of_template(template: str, config: object, target: str = "sm_90a") -> str:
    """Return the PTX of a template of this project."""
    chosen = get_target(target)
    return ptx_alone(render(template, config, chosen), chosen)


@lru_cache(maxsize=64)
def kernel_for_emulator(template: str, config: Any, target: Target) -> Kernel:
    """Return a kernel without its cubin, which the emulator does not need."""
    return Kernel(b"\177ELF", config.entry, target, ptx=ptx_of_template(template, config, target.name))


def kernel_for_call(template: str, config: Any, target: Target) -> Kernel:
    """Replace load_kernel() for calls on the emulator."""
    load = load_kernel if wants_debug(None) else kernel_for_emulator
    return load(template, config, target)


def module_of(source: str, target: str = "sm_90a") -> EmulatedModule:
    return load(ptx_of_source(source, target))


def probe(name: str, config: object, target: str = "sm_90a") -> EmulatedModule:
    return load(ptx_of_template(f"probes/{name}.cu.j2", config, target))
