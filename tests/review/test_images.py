"""Compiled modules from files and folders, through `cudatma dump` and `cudatma diff`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cudatma
from cudatma.errors import ArgumentError, CompileError, TargetError
from cudatma.review import KernelReport, compare, disassembled, read_images, reports
from cudatma.toolkit import find_program
from tools import diff_builds, dump_kernels

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) scale(float* x, float factor, int n) {
    __shared__ float shared[128];
    for (int i = threadIdx.x; i < n; i += 128) {
        shared[threadIdx.x] = x[i];
        __syncthreads();
        x[i] = shared[threadIdx.x ^ 1] * factor;
    }
}
"""


def dumped(path: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert dump_kernels.main([str(path), "--out", str(out), "--json", *options]) == 0
    result: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return result


def triton_entry(folder: Path, source: str = SOURCE, target: str = "sm_90a") -> Path:
    """A folder as Triton writes it, with other files that it has."""
    kernel = cudatma.compile(source, target=target)
    folder.mkdir(parents=True)
    about = {
        "name": "scale",
        "num_warps": 4,
        "num_stages": 3,
        "shared": 4096,
        "maxnreg": None,
        "triton_version": "3.9.0",
    }
    (folder / "scale.cubin").write_bytes(kernel.cubin)
    (folder / "scale.ptx").write_text(kernel.ptx)
    (folder / "scale.json").write_text(json.dumps(about))
    (folder / "scale.ttgir").write_text("module {}")
    (folder / "__grp__scale.json").write_text('{"child_paths": {}}')
    return folder


def test_a_source_for_two_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scale.cu").write_text(SOURCE)
    found = dumped(tmp_path / "scale.cu", tmp_path / "out", capsys, "--target", "sm_90a", "--target", "sm_120a")
    assert [(each["name"], each["target"]) for each in found] == [
        ("scale_sm_90a", "sm_90a"),
        ("scale_sm_120a", "sm_120a"),
    ]
    assert all(each["resources"]["static_smem_bytes"] == 512 and each["threads"] == 128 for each in found)
    assert {"scale_sm_90a.ptx", "scale_sm_90a.cubin", "scale_sm_90a.report.txt"} <= set(os.listdir(tmp_path / "out"))
    (tmp_path / "factor.h").write_text("#define FACTOR 3")
    (tmp_path / "more.cu").write_text('#include "factor.h"\n' + SOURCE.replace("factor;", "FACTOR + MORE;"))
    (more,) = dumped(tmp_path / "more.cu", tmp_path / "out", capsys, "-D", "MORE=4", "--no-sass")
    assert more["name"] == "more"
    (tmp_path / "bad.cu").write_text("__global__ void k() { no_such(); }")
    with pytest.raises(CompileError, match=r"bad\.cu\(1\): error"):
        dump_kernels.main([str(tmp_path / "bad.cu"), "--out", str(tmp_path / "out")])


def test_a_triton_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    triton_entry(cache / "AAAA")
    triton_entry(cache / "BBBB", target="sm_120a")
    first, second = dumped(cache, tmp_path / "out", capsys)
    assert (first["name"], second["name"], second["target"]) == ("scale", "scale_2", "sm_120a")
    assert first["config"] == {"num_warps": 4, "num_stages": 3, "triton_version": "3.9.0"}
    assert (first["dynamic_smem_bytes"], first["smem_total_bytes"]) == (4096, 4608)
    (alone,) = dumped(cache / "AAAA", tmp_path / "out", capsys, "--shared-bytes", "8192", "--no-sass")
    assert (alone["dynamic_smem_bytes"], alone["sass"]) == (8192, None)


def test_a_cubin_and_ptx_of_one_module_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = triton_entry(tmp_path / "cache")
    (cubin,) = dumped(entry / "scale.cubin", tmp_path / "out", capsys)
    assert (cubin["target"], cubin["config"], cubin["dynamic_smem_bytes"]) == ("sm_90a", {}, None)
    if find_program("ptxas") is None:
        (ptx,) = dumped(entry / "scale.ptx", tmp_path / "out", capsys)
        assert "no ptxas was found" in ptx["notes"][0]
        pytest.skip("ptxas is not installed here")
    (ptx,) = dumped(entry / "scale.ptx", tmp_path / "out", capsys)
    assert ptx["compiler"] == "ptxas"
    assert ptx["resources"]["static_smem_bytes"] == cubin["resources"]["static_smem_bytes"] == 512
    assert (ptx["resources"]["spill_store_bytes"], cubin["resources"]["spill_store_bytes"]) == (0, None)


def test_a_fatbin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fatbinary = find_program("fatbinary")
    if fatbinary is None or find_program("cuobjdump") is None:
        pytest.skip("fatbinary or cuobjdump is not installed here")
    arguments = ["--64", "--create=k.fatbin"]
    for target in ("sm_90a", "sm_120a"):
        kernel = cudatma.compile(SOURCE, target=target)
        (tmp_path / f"{target}.cubin").write_bytes(kernel.cubin)
        (tmp_path / f"{target}.ptx").write_text(kernel.ptx)
        number = target.removeprefix("sm_")
        arguments += [f"--image3=kind=elf,sm={number},file={target}.cubin"]
    arguments += ["--image3=kind=ptx,sm=90a,file=sm_90a.ptx"]
    subprocess.run([str(fatbinary), *arguments], cwd=tmp_path, check=True)
    found = dumped(tmp_path / "k.fatbin", tmp_path / "out", capsys)
    assert sorted(each["target"] for each in found) == ["sm_120a", "sm_90a"]
    assert sorted(bool(image.ptx) for image in read_images(tmp_path / "k.fatbin")) == [False, True]
    content = (tmp_path / "k.fatbin").read_bytes()
    (tmp_path / "cut.fatbin").write_bytes(content[:-100])
    with pytest.raises(ArgumentError, match=rf"\({len(content)} bytes .*got .*{len(content) - 100} bytes"):
        read_images(tmp_path / "cut.fatbin")


PTX = b""".version 8.0
.target sm_90a
.address_size 64
.entry k() {
    ret; // }
}
"""


def amd(cubin: bytes) -> bytes:
    return cubin[:18] + (224).to_bytes(2, "little") + cubin[20:]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("amd.co", amd, "amd.co, which is an AMD code object"),
        ("cut.cubin", lambda cubin: cubin[:3000], "truncated \\(3000 bytes"),
        ("short.cubin", lambda cubin: cubin[:20], "truncated \\(20 bytes"),
        ("noise.cubin", lambda cubin: cubin[:64] + bytes(255 - b for b in cubin[64:]), "corrupt or truncated"),
        ("text.ptx", lambda _: b"hello", "text.ptx, which has an unknown format"),
        ("half.ptx", lambda _: b".version 8.0\n", "no .target directive"),
        ("none.ptx", lambda _: b".version 8.0\n.target sm_90a\n.address_size 64\n", "none, which contains no kernel"),
        ("last.cubin", lambda cubin: cubin[:-1], "corrupt or truncated"),
        ("end.ptx", lambda _: PTX[: PTX.index(b"ret;")], "end.ptx, which is truncated"),
        ("missing/k.cubin", None, "a readable file"),
    ],
)
def test_other_files_are_refused(name: str, change: Callable[[bytes], bytes] | None, why: str, tmp_path: Path) -> None:
    if change is not None:
        (tmp_path / name).write_bytes(change(cudatma.compile(SOURCE, target="sm_90a").cubin))
    with pytest.raises(ArgumentError, match=why):
        dump_kernels.main([str(tmp_path / name), "--out", str(tmp_path / "out"), "--no-sass"])


def test_errors_in_ptx(tmp_path: Path) -> None:
    if find_program("ptxas") is None:
        pytest.skip("ptxas is not installed here")
    (tmp_path / "k.ptx").write_bytes(PTX.replace(b"ret", b"rat"))
    with pytest.raises(ArgumentError, match=r"file must be .*got k with an error in line 5: Not a name .*'rat'"):
        dump_kernels.main([str(tmp_path / "k.ptx"), "--out", str(tmp_path / "out")])


def test_files_that_are_too_old_or_too_large_and_folders_without_kernels(tmp_path: Path) -> None:
    (tmp_path / "old.ptx").write_text(".version 3.2\n.target sm_20\n.entry k() { ret; }\n")
    with pytest.raises(TargetError, match=r"target must be sm_75 or later.*got sm_20 in old\.ptx"):
        read_images(tmp_path / "old.ptx")
    with (tmp_path / "large.cubin").open("wb") as file:
        file.truncate(4 << 30)
    with pytest.raises(ArgumentError, match=r"must be at most .*4294967296 bytes"):
        read_images(tmp_path / "large.cubin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match=r"contains no \.ptx or \.cubin file"):
        read_images(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="a regular file"):
        read_images(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["x.cubin", "--config", "stages=3"], "--config must be omitted with a file"),
        (["x.cubin", "--jobs", "99"], "--jobs must be omitted with a file"),
        (["tile_copy", "-D", "X"], "-D must be omitted with tile_copy, one of cudatma's own kernels"),
        (["tile_copy", "--block", "64"], "--block must be omitted with tile_copy, one of cudatma's own kernels"),
    ],
)
def test_options_of_the_other_kind_are_refused(arguments: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=why):
        dump_kernels.main([*arguments, "--out", str(tmp_path)])


def difference(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = diff_builds.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def kernels(path: Path) -> list[KernelReport]:
    return [report for image in read_images(path) for report in reports(disassembled(image))]


def test_what_changed_between_two_builds(tmp_path: Path) -> None:
    if find_program("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed here")
    before = kernels(triton_entry(tmp_path / "A"))
    assert compare(before, kernels(triton_entry(tmp_path / "B", f"// a comment that moves the lines{SOURCE}"))).equal
    assert compare(before, kernels(tmp_path / "A" / "scale.cubin")).equal, "what one of them does not state is ignored"
    other = SOURCE.replace("* factor", "* factor + __fdividef(1.0f, x[n])").replace("[128]", "[256]")
    found = compare(before, kernels(triton_entry(tmp_path / "C", other)))
    (kernel,) = found.kernels
    assert not found.equal
    assert kernel.values["static_smem_bytes"] == (512, 1024)
    assert kernel.mnemonics["MUFU"][1] > kernel.mnemonics["MUFU"][0] == 0
    assert any("MUFU.RCP" in change.opcodes for change in kernel.changes)
    assert kernel.loops
    assert re.search(r"\+\d MUFU.RCP", str(found))
    assert "static_smem_bytes        512 -> 1024" in str(found)
    found = compare(before, kernels(triton_entry(tmp_path / "D", SOURCE.replace("x ^ 1", "x ^ 2"))))
    (kernel,) = found.kernels
    assert (found.equal, kernel.values, kernel.changes) == (False, {}, ()), "only a constant differs"
    assert kernel.operands > 0


def test_builds_without_sass_are_compared_by_their_bytes(tmp_path: Path) -> None:
    before, after = (triton_entry(tmp_path / name, SOURCE.replace("x ^ 1", f"x ^ {name}")) for name in "12")
    for image, other, is_equal in ((before, before, True), (before, after, False)):
        assert compare(reports(read_images(image)[0]), reports(read_images(other)[0])).equal == is_equal


@pytest.mark.slow
def test_kernels_are_matched_by_name_and_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, targets in (("A", ("sm_90a", "sm_120a")), ("B", ("sm_120a",))):
        for target in targets:
            triton_entry(tmp_path / folder / target, target=target)
    triton_entry(tmp_path / "B" / "other", SOURCE.replace("scale(", "other("), "sm_120a")
    status, found = difference(capsys, tmp_path / "A", tmp_path / "B")
    assert (status, found["only_before"], found["only_after"]) == (1, ["scale (sm_90a)"], ["other (sm_120a)"])
    assert [kernel["name"] for kernel in found["kernels"]] == ["scale (sm_120a)"]


def test_kernels_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        job.name
        for job in dump_kernels.jobs_for(dump_kernels.kernel("transpose"), cudatma.get_target("sm_90a"), {})[:2]
    )
    assert difference(capsys, first, first, "--target", "sm_90a")[0] == 0
    status, found = difference(capsys, first, second, "--target", "sm_90a")
    assert status == 1
    assert [name for name in found["kernels"][0]["values"] if name.startswith("config.")]
    with pytest.raises(ArgumentError, match=r"A or B must be a file, a folder, or a kernel that.*got transpose"):
        diff_builds.main(["transpose", first, "--target", "sm_90a"])


def test_a_real_triton_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cached_triton_kernels.py").write_text(TRITON)
    monkeypatch.syspath_prepend(str(tmp_path))
    import cached_triton_kernels

    source = ASTSource(cached_triton_kernels.add_one, {"x": "*fp32", "size": "constexpr"}, {"size": 256})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    (report,) = dumped(tmp_path / "cache", tmp_path / "out", capsys)
    assert (report["entry"], report["threads"], report["config"]["num_warps"]) == ("add_one", 64, 2)
    assert report["compiler"] == "Triton"
    assert report["resources"]["registers"] > 0


TRITON = """
import triton
import triton.language as tl


@triton.jit
def add_one(x, size: tl.constexpr):
    at = x + tl.arange(0, size)
    tl.store(at, tl.load(at) + 1)
"""
