"""`cudatma dump` on a small kernel of the tests' own: its files, its report, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatma.build import render as render_module
from cudatma.errors import ArgumentError, CompileError, FieldError
from cudatma.kernels.marlin.choose import marlin_explain
from cudatma.kernels.registry import REGISTRY, KernelEntry
from cudatma.quantization import quantize
from cudatma.target import Target, get_target
from tools import dump_kernels

SOURCE = """extern "C" __global__ void __launch_bounds__(${ config.threads })
${ config.entry }(float* out, const float* in) {
  extern __shared__ float tile[];
  __shared__ float fixed[32];
  tile[threadIdx.x] = in[threadIdx.x];
  fixed[threadIdx.x & 31] = in[0];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1] + fixed[threadIdx.x & 7];
}
"""


@dataclass(frozen=True, slots=True)
class TinySpec:
    """A block of ``threads`` swaps neighbours through shared memory."""

    threads: int = 64

    @property
    def entry(self) -> str:
        return f"tiny_{self.threads}"

    @property
    def smem_bytes(self) -> int:
        return 4 * self.threads

    def smem_layout(self) -> list[tuple[str, int, int]]:
        return [("tile", 0, self.smem_bytes)]

    def stage_layout(self) -> list[tuple[str, int]]:
        return [("neighbours", self.smem_bytes)]

    def check_target(self, target: Target) -> None:
        if self.threads > 1024:
            raise ArgumentError("threads", self.threads, "at most 1024")


def tiny_configs(target: Target) -> list[TinySpec]:
    return [TinySpec(64), TinySpec(128)]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the kernel; its template is the text above."""
    real = render_module.render

    def render(template: str, config: Any, target: Target, *, is_source: bool = False, debug: bool = False) -> str:
        return real(SOURCE, config, target, is_source=True) if template == "tiny" else real(template, config, target)

    monkeypatch.setattr(render_module, "render", render)
    monkeypatch.setattr(dump_kernels, "usable_cores", lambda: 1)  # other processes would not know this kernel
    monkeypatch.setitem(REGISTRY, "tiny", KernelEntry("tiny", "tiny", f"{__name__}:tiny_configs", "a small kernel"))


def test_every_file_is_written_and_the_report_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiny", "--target", "sm_120a", "--config", "threads=64", "--out", str(tmp_path), "--json"]
    assert dump_kernels.main(arguments) == 0
    (first,) = json.loads(capsys.readouterr().out)
    assert first["name"] == "tiny_64_sm_120a"
    assert (first["threads"], first["dynamic_smem_bytes"], first["smem_limit_bytes"]) == (64, 256, 99 * 1024)
    assert first["resources"]["static_smem_bytes"] == 128
    assert first["smem_total_bytes"] == 256 + 128
    assert first["resources"]["named_barriers"] == 1
    assert 0 < first["resources"]["registers"] < 64
    assert first["config"] == {"threads": 64}
    for ending in ("cu", "ptx", "cubin", "report.txt"):
        assert (tmp_path / f"tiny_64_sm_120a.{ending}").stat().st_size > 0
    assert (tmp_path / "tiny_64_sm_120a.cubin").read_bytes()[:4] == b"\x7fELF"
    text = (tmp_path / "tiny_64_sm_120a.report.txt").read_text()
    assert "384 of 101376 bytes: fits" in text
    assert "neighbours" in text
    assert len(text.splitlines()) < 80
    if first["sass"] is None:
        pytest.skip("no disassembler is installed here")
    assert (first["sass"]["BAR"], first["sass"]["STG"], first["sass"]["STS"]) == (1, 1, 2)
    assert first["cluster_opcodes"] == []


def test_config_changes_the_configs_and_equal_ones_are_dumped_once(tmp_path: Path) -> None:
    arguments = ["tiny", "--target", "sm_90a", "--config", "threads=32", "--no-sass", "--out", str(tmp_path)]
    assert dump_kernels.main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"tiny_32_sm_90a.{ending}" for ending in ("cu", "cubin", "ptx", "report.txt")
    ]


@pytest.mark.parametrize(
    ("config", "words"), [("colour=3", r"a field of TinySpec \(threads"), ("threads=2048", "at most 1024")]
)
def test_a_config_option_that_is_refused(config: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        dump_kernels.main(["tiny", "--target", "sm_90a", "--config", config, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_refused_config_names_the_values_that_serve_with_the_rest(tmp_path: Path) -> None:
    words = ["attention_mma_sync", "--target", "sm_120a", "--config", "stages=1", "--out", str(tmp_path)]
    with pytest.raises(
        ArgumentError,
        match=r"stages must be one of 2(, [3-7])*, got 1; choose one of these values, which are valid on sm_120a",
    ):
        dump_kernels.main(words)


@pytest.mark.parametrize(
    ("kernel", "config", "allowed"),
    [
        ("marlin_skinny", "has_zeros=no", "has_zeros must be bool.*got str"),
        ("tile_copy", "stages=x", "stages must be int.*got str"),
        ("attention_a1", "v_head_dim=64.0", "v_head_dim must be int.*got float"),
        ("plain_copy", "entry=x", r"a field of PlainConfig \(element_bytes"),
    ],
)
def test_a_field_of_another_type_is_refused(kernel: str, config: str, allowed: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=allowed):
        dump_kernels.main([kernel, "--target", "sm_90a", "--config", config, "--out", str(tmp_path)])


def test_a_config_does_not_become_another_kernel(tmp_path: Path) -> None:
    words = ["attention_a3", "--target", "sm_90a", "--config", "version=a4", "--out", str(tmp_path)]
    with pytest.raises(ArgumentError, match=r"--config must be a field of AttentionConfig \(dtype, .*got version"):
        dump_kernels.main(words)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="--out"):
        dump_kernels.main(["tiny", "--target", "sm_90a", "--out", str(tmp_path / "file" / "x")])


def test_a_source_that_does_not_compile_is_left_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "render", lambda *_, **__: 'extern "C" __global__ void tiny_64() { no_such(); }')
    with pytest.raises(CompileError, match="tiny_64_sm_90a") as caught:
        dump_kernels.main(["tiny", "--target", "sm_90a", "--out", str(tmp_path)])
    assert "no_such" in caught.value.log
    assert caught.value.folder == str(tmp_path)
    assert "tiny_64_sm_90a.cu" in {path.name for path in tmp_path.iterdir()}


def test_a_missing_disassembler_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cudatma.review.nvidia_programs.find_programs", lambda name: iter(()))
    assert dump_kernels.main(["tiny", "--target", "sm_90a", "--config", "threads=32", "--out", str(tmp_path)]) == 0
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err
    assert "no SASS" in (tmp_path / "tiny_32_sm_90a.report.txt").read_text()


def test_two_configs_with_one_entry_get_two_names() -> None:
    entry = KernelEntry("tiny", "tiny", f"{__name__}:tiny_configs", "")
    target = get_target("sm_90a")
    names = [job.name for job in dump_kernels.jobs_for(entry, target, {})]
    assert names == ["tiny_64_sm_90a", "tiny_128_sm_90a"]
    assert len(dump_kernels.jobs_for(entry, target, {"threads": 64})) == 1


def test_the_kernel_of_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["marlin", "--target", "sm_90a", "--m", "64", "--n", "4096", "--k", "1024", "--no-sass", "--json"]
    assert dump_kernels.main([*arguments, "--out", str(tmp_path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    weight = quantize(np.random.default_rng(0).standard_normal((1024, 4096), np.float32))
    config = marlin_explain(weight, 64, target="sm_90a").config
    assert config.scale_form == "as_stored", "the form is a part of the choice"
    assert report["name"] == f"{config.entry}_sm_90a"
    assert 'extern "C" __global__' in (tmp_path / f"{report['name']}.cu").read_text()


@pytest.mark.parametrize(("family", "version"), [("attention", "a1"), ("gemm", "v2")])
def test_the_kernel_of_a_problem_is_of_the_version_that_the_environment_asks_for(
    family: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [family, "--target", "sm_90a", "--m", "512", "--n", "128", "--k", "512", "--no-sass", "--json"]
    variable = f"CUDATMA_{family.upper()}_VERSION"
    monkeypatch.setenv(variable, version)
    assert dump_kernels.main([*arguments, "--out", str(tmp_path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"].startswith(f"{family}_{version}_")
    assert f"version {version} is selected by ${variable}" in " ".join(report["notes"])
    arguments[0] = kernel = {"attention": "attention_a2", "gemm": "gemm_v3"}[family]
    assert dump_kernels.main([*arguments, "--out", str(tmp_path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"].startswith(f"{kernel}_")
    assert "is selected by the call" in " ".join(report["notes"])
    arguments[0] = family
    monkeypatch.setenv(variable, "zz")
    with pytest.raises(ArgumentError, match=variable):
        dump_kernels.main([*arguments, "--out", str(tmp_path)])


def test_heads_and_batch_of_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["attention", "--target", "sm_90a", "--m", "512", "--n", "128", "--k", "512", "--no-sass", "--json"]
    arguments += ["--heads", "8", "--kv-heads", "2", "--batch", "3", "--out", str(tmp_path)]
    assert dump_kernels.main(arguments) == 0
    assert "8/2 heads, batch of 3" in json.loads(capsys.readouterr().out)[0]["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["marlin", "--m", "16"], "--n must be passed"),
        (["tiny", "--m", "1", "--n", "1", "--k", "1"], "kernel must be marlin, gemm.*got tiny"),
        (["marlin", "--m", "0", "--n", "64", "--k", "64"], "m must be from 1 to 2147483647.*got 0"),
        (["gemm", "--m", "9" * 50, "--n", "64", "--k", "64"], "m must be .*got an int of 167 bits"),
        (["gemm", "--dtype", "bfloat16"], "--dtype must be combined with --m, --n and --k"),
        (
            ["gemm", "--m", "1", "--n", "64", "--k", "64", "--sm-count", "0"],
            "--sm-count must be a positive integer, got 0",
        ),
        (
            ["marlin", "--m", "1", "--n", "64", "--k", "64", "--config", "stages=3"],
            "--config must be omitted if --m",
        ),
    ],
)
def test_sizes_that_name_no_problem(arguments: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"^{why}"):
        dump_kernels.main([*arguments, "--target", "sm_90a", "--out", str(tmp_path)])


def test_a_target_that_runs_none_of_a_kernels_configs(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="gemm_v3 for sm_120a"):
        dump_kernels.main(["gemm_v3", "--target", "sm_120a", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_several_processes_give_the_reports_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["transpose", "--target", "sm_90a", "--no-sass", "--jobs", "2", "--json", "--out", str(tmp_path)]
    assert dump_kernels.main(arguments) == 0
    names = [report["name"] for report in json.loads(capsys.readouterr().out)]
    assert names == [job.name for job in dump_kernels.jobs_for(REGISTRY["transpose"], get_target("sm_90a"), {})]
    assert len(names) > 1


def test_the_list_is_of_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--m", "64"], ["--causal"], ["--config", "stages=3"], ["--no-sass"]):
        with pytest.raises(ArgumentError, match=f"^{option[0]} must be omitted with --list"):
            dump_kernels.main(["attention_a3", "--list", *option])
    assert dump_kernels.main(["attention_a3", "--list", "--json", "--target", "sm_90a"]) == 0
    assert [each["kernel"] for each in json.loads(capsys.readouterr().out)] == ["attention_a3"]
    assert dump_kernels.main(["attention", "--list", "--target", "sm_90a"]) == 0
    printed = capsys.readouterr().out
    assert "marlin" not in printed
    assert " configs: " in printed
    assert max(map(len, printed.splitlines())) < 240
