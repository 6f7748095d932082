"""Compilation with NVRTC: results, errors and rejected arguments. Needs NVRTC but no GPU."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cudatma.build import nvrtc as compiler
from cudatma.build.nvrtc import compile_flags, compile_source, nvrtc_fingerprint, nvrtc_version, require_nvrtc_for
from cudatma.errors import ArgumentError, ArgumentTypeError, CompileError, DriverError, TargetError
from cudatma.runtime.compiler_log import log_warnings, performance_losses
from cudatma.target import TARGETS, get_target

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
HOPPER = get_target("sm_90a")


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_compiles(name: str) -> None:
    made = compile_source(SOURCE, TARGETS[name])
    assert f".target {name}" in made.ptx
    assert ".entry twice" in made.ptx
    assert made.cubin[:4] == b"\x7fELF"
    assert b"twice" in made.cubin
    assert made.nvrtc_version == nvrtc_version()
    assert made.seconds > 0
    assert made.warnings == ()


def test_the_ptx_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_source(SOURCE, HOPPER)
    monkeypatch.chdir(tmp_path)
    there = compile_source(SOURCE, HOPPER)
    assert here.ptx == there.ptx
    assert here.cubin == there.cubin
    assert ".loc" in here.ptx


def test_options_reach_nvrtc() -> None:
    source = 'extern "C" __global__ void k(int* x) { *x = VALUE; }'
    assert "424242" in compile_source(source, HOPPER, options=["-DVALUE=424242"]).ptx


def test_an_error_shows_log_and_numbered_source() -> None:
    kept: dict[str, bytes] = {}

    def keep(files: Mapping[str, bytes]) -> Path:
        kept.update(files)
        return Path("/kept/here")

    source = f"{SOURCE}\n__global__ void wrong() {{ missing(); }}"
    with pytest.raises(CompileError) as caught:
        compile_source(source, HOPPER, name="mine.cu", keep=keep)
    text = str(caught.value)
    assert 'mine.cu(2): error: identifier "missing" is undefined' in text
    assert "    2 | __global__ void wrong() { missing(); }" in text
    assert "/kept/here" in text
    assert "sm_90a" in text
    assert kept["kernel.cu"].decode() == source
    assert b"missing" in kept["log.txt"]
    assert isinstance(caught.value, RuntimeError)


def test_an_instruction_that_ptxas_refuses_keeps_its_ptx() -> None:
    kept: dict[str, bytes] = {}

    def keep(files: Mapping[str, bytes]) -> None:
        kept.update(files)

    source = 'extern "C" __global__ void k() { asm volatile("bogus.u32;"); }'
    with pytest.raises(CompileError, match="bogus"):
        compile_source(source, HOPPER, keep=keep)
    assert b"bogus.u32;" in kept["kernel.ptx"]


def test_a_feature_of_another_target_is_a_compile_error() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }'
    with pytest.raises(CompileError, match="setmaxnreg"):
        compile_source(source, get_target("sm_90"))


def test_serialized_wgmma_is_a_warning() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(128) k(float* x, unsigned long long a, unsigned long long b) {
        float d[4] = {0, 0, 0, 0};
        asm volatile("wgmma.fence.sync.aligned;");
        for (int i = 0; i < 4; i++) {
            asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b));
            d[0] += 1.0f;
            asm volatile("wgmma.commit_group.sync.aligned;");
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;");
        x[threadIdx.x] = d[0];
    }
    """
    assert any("serialized" in line for line in compile_source(source, HOPPER).warnings)


def test_unused_constants_are_no_warning_but_other_things_are() -> None:
    source = """
    namespace { constexpr unsigned STAGE_BYTES = 4096; }
    extern "C" __global__ void k(int* x) { int lost; lost = 1; *x = 2; }
    """
    (warning,) = compile_source(source, HOPPER).warnings
    assert "#550-D" in warning
    shown = compile_source(source, HOPPER, options=["--diag-warn=177"]).warnings
    assert any("STAGE_BYTES" in line for line in shown)


def test_warnings_of_a_log() -> None:
    log = """kernel.cu(1): warning #177-D: variable "unused" was declared but never referenced
    ptxas info    : Used 40 registers, used 1 barriers
    Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
    ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x
    """
    assert [line.split(":")[0].strip() for line in log_warnings(log)] == ["kernel.cu(1)", "ptxas info"]
    (loss,) = performance_losses(log)
    assert "serialized" in loss


@pytest.mark.parametrize(
    "option",
    [
        *("-arch=sm_80", "--gpu-architecture=sm_80", "--gpu-architecture"),
        *("-dlto", "--dlink-time-opt", "--relocatable-device-code=true"),
    ],
)
def test_options_that_are_refused(option: str) -> None:
    with pytest.raises(ArgumentError, match=r"options\[1\]"):
        compile_flags(HOPPER, ("-DX", option))


@pytest.mark.parametrize("options", ["-DX", [1], [None]])
def test_options_are_strings(options: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="options"):
        compile_flags(HOPPER, options)


def test_a_nul_in_the_source_is_refused() -> None:
    with pytest.raises(ArgumentError, match="NUL"):
        compile_source("a\0b", HOPPER)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^source must be .*got the unpaired surrogate '\\ud800' at position 3"):
        compile_source("// \ud800", HOPPER)
    with pytest.raises(ArgumentError, match=r"^options\[0\] must be .*got the unpaired surrogate"):
        compile_flags(HOPPER, ["-DX=\udcff"])


@pytest.mark.parametrize(
    ("name", "version", "needed"),
    [
        ("sm_120a", (12, 7), "12.8"),
        ("sm_121a", (12, 8), "12.9"),
        ("sm_100a", (12, 6), "12.7"),
        ("sm_90a", (11, 8), "12.0"),
    ],
)
def test_an_older_nvrtc_is_named(name: str, version: tuple[int, int], needed: str) -> None:
    with pytest.raises(TargetError, match=f"NVRTC {needed} or newer"):
        require_nvrtc_for(TARGETS[name], version)
    major, minor = map(int, needed.split("."))
    require_nvrtc_for(TARGETS[name], (major, minor))


def test_an_architecture_that_nvrtc_does_not_know_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_source(SOURCE, dataclasses.replace(HOPPER, name="sm_9999"))


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DriverError, match=r"nvidia-cuda-nvrtc>=13"):
        nvrtc_version()


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def nvrtcVersion() -> None:  # noqa: N802
            raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(compiler, "_nvrtc", lambda: Broken)
    with pytest.raises(DriverError, match=r"libnvrtc\.so not found"):
        nvrtc_version()


def test_the_fingerprint_changes_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, bindings = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13", tmp_path / "cuda/bindings/_version.py"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert nvrtc_fingerprint() == ()
    for path in (library, bindings):
        path.parent.mkdir(parents=True)
        path.write_text("1")
        os.utime(path, ns=(5, 5))
    first = nvrtc_fingerprint()
    assert {entry[0] for entry in first} == {str(library), str(bindings)}
    library.write_text("22")
    os.utime(library, ns=(5, 5))
    second = nvrtc_fingerprint()
    os.utime(bindings, ns=(6, 6))
    assert len({first, second, nvrtc_fingerprint()}) == 3
