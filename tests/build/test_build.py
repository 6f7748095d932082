"""From a template or a source to a Kernel, without a GPU: compilations, cache hits and waits for other processes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threads import in_threads

import cudatma
from cudatma import backend, cli
from cudatma.build import kernel as build
from cudatma.build import render as render_module
from cudatma.build.cache import Cache
from cudatma.build.kernel import Kernels, default_target, load_kernel
from cudatma.build.kernel import compile as compile_kernel
from cudatma.context import runtime
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendWarning,
    CacheError,
    CompileError,
    DriverError,
    FieldError,
    LaunchError,
    TargetError,
    TemplateError,
)
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target
from tools import tune

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = """
extern "C" __global__ void ${ config.entry }(float* x) { x[threadIdx.x] *= ${ config.factor }; }
"""
PLAIN = 'extern "C" __global__ void plain(int* x) { *x = 1; }'


@dataclass(frozen=True, slots=True)
class Config:
    factor: int = 2
    entry: str = "scaled"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache folder and an empty in-memory cache."""
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDATMA_TARGET", raising=False)
    runtime().parts[Kernels] = Kernels()


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace cudatma's templates with templates of this test, which the real environment renders."""
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "kernel.cu.j2").write_text(TEMPLATE)
    real = build.render

    def render(template: str, config: Any, target: Any, *, is_source: bool = False, **more: Any) -> str:
        return real(template if is_source else (folder / template).read_text(), config, target, is_source=True)

    monkeypatch.setattr(build, "render", render)
    monkeypatch.setattr(build, "template_texts", lambda name: {name: (folder / name).read_bytes()})
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sources that reached NVRTC."""
    seen: list[str] = []
    real = build.compile_source

    def counted(source: str, *args: Any, **options: Any) -> Any:
        seen.append(source)
        return real(source, *args, **options)

    monkeypatch.setattr(build, "compile_source", counted)
    return seen


def forget() -> None:
    """Clear the in-memory cache, as in a new process."""
    runtime().parts[Kernels] = Kernels()


# --- load_kernel


def test_memory_then_disk_then_nvrtc(templates: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_kernel("kernel.cu.j2", Config(), "sm_90a")
    assert load_kernel("kernel.cu.j2", Config(), get_target("sm_90a")) is first
    assert "x[threadIdx.x] *= 2" in first.source
    forget()
    monkeypatch.setattr(build, "render", lambda *_, **__: pytest.fail("rendered although the cache holds it"))
    again = load_kernel("kernel.cu.j2", Config(), "sm_90a")
    assert again is not first
    assert (again.cubin, again.ptx, again.source, again.log) == (first.cubin, first.ptx, first.source, first.log)
    assert (again.entry, again.parameters, again.folder) == ("scaled", first.parameters, first.folder)
    assert len(compilations) == 1


def test_the_artifact_folder_can_be_read(templates: Path) -> None:
    kernel = load_kernel("kernel.cu.j2", Config(3), "sm_120a")
    assert kernel.folder is not None
    files = {path.name for path in kernel.folder.iterdir()}
    assert files == {"kernel.cu", "kernel.ptx", "kernel.cubin", "log.txt", "config.json", "manifest.json"}
    record = json.loads((kernel.folder / "config.json").read_text())
    assert record["config"]["fields"] == {"factor": 3, "entry": "scaled"}
    assert (record["entry"], record["target"], record["template"]) == ("scaled", "sm_120a", "kernel.cu.j2")
    assert (kernel.folder / "kernel.cu").read_text() == kernel.source


@dataclass(frozen=True, slots=True)
class OtherSpec:
    """A class with the fields of Config and another name."""

    factor: int = 2
    entry: str = "scaled"


def test_everything_that_decides_is_in_the_key(
    templates: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(expected: int, config: Any = None, target: str = "sm_90a") -> None:
        forget()
        load_kernel("kernel.cu.j2", config or Config(), target)
        assert len(compilations) == expected

    turn(1)
    turn(1)
    turn(2, Config(3))
    turn(3, target="sm_120a")
    turn(4, OtherSpec())
    (templates / "kernel.cu.j2").write_text(TEMPLATE + "// more\n")
    turn(5)
    monkeypatch.setattr(build, "_nvrtc_version", lambda root: (12, 99))
    turn(6)
    monkeypatch.setattr(build, "_code_digests", lambda kind: ["other code"])
    turn(7)
    turn(7)


def test_an_edit_that_keeps_size_and_time_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """rsync -t and reproducible images keep modification times, so cudatma compares the contents of its templates."""
    monkeypatch.setattr(render_module, "template_root", lambda: tmp_path)
    template = tmp_path / "kernel.cu.j2"
    for factor in (2, 3):
        template.write_text(TEMPLATE.replace("${ config.factor }", str(factor)))
        os.utime(template, ns=(0, 0))
        forget()
        assert f"*= {factor}" in load_kernel("kernel.cu.j2", Config(), "sm_90a").source
    assert len(compilations) == 2


def test_the_key_covers_the_code_that_makes_text_of_templates() -> None:
    """Errors, files, checks, cost and gpu do not change the text."""
    package, imported = Path(build.__file__).parents[1], set[str]()
    for file in ("build/render.py", "kernels/config.py", "kernels/launch_struct.py"):
        nodes = ast.walk(ast.parse((package / file).read_text()))
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name.removeprefix("cudatma.").replace(".", "/") for name in imported if name.startswith("cudatma.")}
    no_text = {"errors", "build/files", "kernels/checks", "kernels/cost", "kernels/gpu"}
    assert {f"{name}.py" for name in ours - no_text} <= set(build._COMMON_CODE)


def test_a_config_that_cannot_be_hashed(templates: Path, compilations: list[str]) -> None:
    @dataclass
    class Loose:
        factor: int = 2
        entry: str = "scaled"

    assert load_kernel("kernel.cu.j2", Loose(), "sm_90a") is load_kernel("kernel.cu.j2", Loose(), "sm_90a")
    assert len(compilations) == 1


def test_concurrent_threads_compile_once(templates: Path, compilations: list[str]) -> None:
    found = in_threads(6, lambda _: load_kernel("kernel.cu.j2", Config(5), "sm_90a"))
    assert len(compilations) == 1
    assert len({id(kernel) for kernel in found}) == 1
    assert runtime().part(Kernels).building == {}


_WORKER = """
import sys
from cudatma.build import kernel as build
seen = []
real = build.compile_source
def counted(*args, **options):
    seen.append(1)
    return real(*args, **options)
build.compile_source = counted
build.compile(sys.argv[1], target="sm_90a")
print(len(seen))
"""


def test_concurrent_processes_compile_once() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _WORKER, PLAIN]
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(worker.communicate(timeout=60)[0].strip() for worker in workers) == ["0", "1"]


_WARM = """
import sys
from dataclasses import dataclass
from cudatma.build import kernel as build
@dataclass(frozen=True)
class Config:
    entry: str = "copy"
build.compile("probes/bulk_copy.cu.j2", Config(), target="sm_90a")
print("cuda.bindings.nvrtc" in sys.modules)
"""


def test_a_warm_load_does_not_touch_nvrtc() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    turns = [subprocess.check_output([sys.executable, "-c", _WARM], env=environment, text=True) for _ in range(2)]
    assert [turn.strip() for turn in turns] == ["True", "False"]


def test_a_failed_compilation_keeps_its_artifacts_and_is_tried_again(templates: Path, compilations: list[str]) -> None:
    (templates / "kernel.cu.j2").write_text(TEMPLATE.replace("*=", "*= nonsense *"))
    for turn in (1, 2):
        with pytest.raises(CompileError, match="nonsense") as caught:
            load_kernel("kernel.cu.j2", Config(), "sm_90a")
        assert len(compilations) == turn
    assert caught.value.folder is not None
    folder = Path(caught.value.folder)
    assert "nonsense" in (folder / "kernel.cu").read_text()
    assert "error" in (folder / "log.txt").read_text()
    assert runtime().part(Kernels).building == {}


def test_a_template_that_ptxas_makes_slow_is_an_error(templates: Path) -> None:
    """ptxas ignores setmaxnreg without launch bounds. This is a warning in a user's source and an error in our
    templates."""
    slow = TEMPLATE.replace("{ x[", '{ asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); x[', 1)
    (templates / "kernel.cu.j2").write_text(slow)
    with pytest.raises(CompileError, match=r"setmaxnreg.*ignored") as caught:
        load_kernel("kernel.cu.j2", Config(), "sm_90a")
    assert caught.value.folder is not None
    assert "Potential Performance Loss" in (Path(caught.value.folder) / "log.txt").read_text()
    assert len(compile_kernel(slow, Config(), target="sm_90a", template=True).warnings) == 1


def test_a_damaged_entry_is_compiled_again(templates: Path, compilations: list[str]) -> None:
    folder = load_kernel("kernel.cu.j2", Config(), "sm_90a").folder
    assert folder is not None
    (folder / "kernel.cubin").write_bytes(b"")
    forget()
    assert load_kernel("kernel.cu.j2", Config(), "sm_90a").cubin[:4] == b"\x7fELF"
    assert len(compilations) == 2


def test_an_unwritable_cache_warns_once_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = [compile_kernel(PLAIN + "\n" * turn, target="sm_90a") for turn in (0, 1)]
    assert [kernel.folder for kernel in kernels] == [None, None]
    assert len(caught) == 1


def test_a_lock_that_never_comes_free_does_not_stop_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: Any, **__: Any) -> Any:
        raise CacheError("held by another process")

    monkeypatch.setattr(Cache, "lock", stuck)
    with pytest.warns(RuntimeWarning, match="without a lock"):
        assert compile_kernel(PLAIN, target="sm_90a").entry == "plain"


def test_a_forked_child_compiles_for_itself(tmp_path: Path) -> None:
    """The process may be forked while another thread of the parent holds the locks."""
    child = -1
    with runtime().part(Kernels).lock:
        child = os.fork()
        if child == 0:
            try:
                found = compile_kernel(PLAIN, target="sm_90a")
                os._exit(0 if found.entry == "plain" else 1)
            except BaseException:
                os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# --- compile


def test_a_source_with_primitives_and_a_config() -> None:
    source = """
    //% include "primitives/types.cuh.j2"
    extern "C" __global__ void mine(const __grid_constant__ cudatma::TensorMap map, int* x) { *x = ${ config.factor }; }
    """
    kernel = compile_kernel(source, Config(7, entry="mine"), target="sm_120a", template=True)
    assert "struct" in kernel.source
    assert "*x = 7" in kernel.source
    assert [p.size_bytes for p in kernel.parameters] == [128, 8]
    assert kernel.target.name == "sm_120a"


def test_a_config_of_another_template_is_refused() -> None:
    config = REGISTRY["gemm_v7"].configs("sm_90a")[0]
    with pytest.raises(ArgumentError, match=r"config must be a config for.*got GemmConfig for kernels/gemm_v7\.cu\.j2"):
        compile_kernel("kernels/gemm_v4.cu.j2", config=config, target="sm_90a")


def test_several_entries_need_a_name() -> None:
    source = PLAIN + '\nextern "C" __global__ void second(int* x) { *x = 2; }'
    with pytest.raises(ArgumentError, match=r"(plain or second|second or plain)"):
        compile_kernel(source, target="sm_90a")
    first = compile_kernel(source, target="sm_90a", entry="plain")
    second = compile_kernel(source, target="sm_90a", entry="second")
    assert (first.entry, second.entry) == ("plain", "second")
    with pytest.raises(ArgumentError, match="third"):
        compile_kernel(source, target="sm_90a", entry="third")


def test_a_source_without_a_kernel() -> None:
    with pytest.raises(ArgumentError, match='extern "C"'):
        compile_kernel("__device__ int x;", target="sm_90a")


def test_options_are_part_of_the_key(compilations: list[str]) -> None:
    source = 'extern "C" __global__ void k(int* x) { *x = VALUE; }'
    found = [compile_kernel(source, target="sm_90a", options=[f"-DVALUE={value}"]) for value in (7171, 7272, 7171)]
    assert "7171" in found[0].ptx
    assert "7272" in found[1].ptx
    assert found[2] is found[0]
    assert len(compilations) == 2


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu.j2"
    path.write_text(TEMPLATE)
    assert compile_kernel(str(path), Config(9), target="sm_90a").entry == "scaled"
    path.write_text(TEMPLATE.replace("*=", "+="))
    assert "+= 9" in compile_kernel(str(path), Config(9), target="sm_90a").source
    path.write_bytes(b"// Latin-1: \xe9\n" + TEMPLATE.encode())
    assert "\\xe9" in compile_kernel(str(path), Config(9), target="sm_90a").source


def test_plain_text_is_compiled_as_it_is(tmp_path: Path) -> None:
    """Nothing in the text is executed, and comments may contain any text."""
    marker = tmp_path / "ran"
    attack = f"''.__class__.__mro__[1].__subclasses__()[0]('touch {marker}')"
    source = f"//% of peak\n// ${{ {attack} }} /*% set x = 1\n{PLAIN}\n"
    assert compile_kernel(source, target="sm_90a").source == source
    assert not marker.exists()
    with pytest.raises(TemplateError, match=r"^kernel\.cu:1: "):
        compile_kernel(source, target="sm_90a", template=True)


@pytest.mark.parametrize(
    ("text", "is_template"),
    [('//% include "primitives/types.cuh.j2"\n', True), ("//% if config.factor\n", True), ("//% of peak\n", False)],
)
def test_plain_text_that_looks_like_a_template_says_so_when_it_fails(text: str, is_template: bool) -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel(text + PLAIN.replace("*x = 1", "u32 y = 1"), target="sm_90a")
    assert ("template=True" in str(caught.value).splitlines()[0]) == is_template


def test_a_compile_error_is_short_and_has_the_lines_of_the_text(tmp_path: Path) -> None:
    text = '//% include "primitives/mbarrier.cuh.j2"\n//% set a = 1\n// 3\n\n// 5\n'
    text += 'extern "C" __global__ void k(int* x) {\n  *x = ${ a };\n  *x = nothing;\n}\n// 10\n// 11\n// 12\n'
    path = tmp_path / "mine.cu.j2"
    path.write_text(text)
    found = []
    for source, name in ((text, "kernel.cu"), (str(path), "mine.cu")):
        with pytest.raises(CompileError) as caught:
            compile_kernel(source, target="sm_90a", template=True)
        lines = str(caught.value).splitlines()
        assert f'{name}(8): error: identifier "nothing" is undefined' in lines
        assert ">     8 |   *x = nothing;" in lines
        assert {"      5 | // 5", "     11 | // 11"} <= {f" {line[1:]}" for line in lines}
        assert "      7 |   *x = 1;" in lines
        assert not any("// 12" in line or "// 3" in line for line in lines)
        assert lines[-1] == f"artifacts: {caught.value.folder}"
        assert len(lines) < 16
        assert "mbarrier_init" in caught.value.source
        found.append(pickle.loads(pickle.dumps(caught.value)))
    assert str(found[-1]) == str(caught.value)


@pytest.mark.parametrize(
    ("selection", "hint"),
    [
        ("", r'^the template calls primitives that it does not select; add the line: //% use "fence_mbarrier_init"\n'),
        ('//% use "fence_mbarrier_init"\n', r"^fence_mbarrier_init is in namespace cudatma; add the line: using nam"),
    ],
)
def test_a_primitive_that_the_compiler_does_not_know(selection: str, hint: str) -> None:
    text = selection + PLAIN.replace("*x = 1;", "fence_mbarrier_init();")
    with pytest.raises(CompileError, match=hint):
        compile_kernel(text, target="sm_90a", template=True)


def test_an_error_in_a_primitive_names_its_file() -> None:
    text = '//% include "primitives/types.cuh.j2"\n' + PLAIN
    with pytest.raises(CompileError, match=r"types\.cuh\.j2\(\d+\): error") as caught:
        compile_kernel(text, target="sm_90a", template=True, options=["-Du32=3"])
    assert "typedef unsigned int u32;" in next(line for line in str(caught.value).splitlines() if line[:1] == ">")


def test_hazards_have_the_lines_of_the_text() -> None:
    text = '//% include "primitives/mbarrier.cuh.j2"\n\nextern "C" __global__ void race(int* x) {\n'
    text += "  __shared__ int s[64];\n  s[threadIdx.x] = 1;\n  *x = s[63 - threadIdx.x];\n}\n"
    x = np.zeros(1, np.int32)
    for source, is_template in ((text, True), (text.partition("\n")[2], False)):
        kernel = compile_kernel(source, target="sm_90a", template=is_template)
        report = kernel.emulate(1, 64, (x,), hazards="collect")
        assert {hazard.source for hazard in report.hazards} <= {f"kernel.cu:{n - (not is_template)}" for n in (5, 6)}
        quoted = [line.removeprefix("  source: ") for line in str(report).splitlines() if "  source: " in line]
        assert len(quoted) == len(report.hazards)
        assert all(line in ("s[threadIdx.x] = 1;", "*x = s[63 - threadIdx.x];") for line in quoted)
        assert "/tmp" not in kernel.ptx
        assert str(Path.cwd()) not in kernel.ptx


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"source_or_template": 5}, ArgumentTypeError),
        ({"source_or_template": b"code"}, ArgumentTypeError),
        ({"source_or_template": "kernel.cu"}, ArgumentError),
        ({"source_or_template": "no/such/file.cu.j2"}, TemplateError),
        ({"target": "sm_42"}, TargetError),
        ({"target": 90}, TargetError),
        ({"options": "-DX"}, ArgumentTypeError),
        ({"options": ["-arch=sm_80"]}, ArgumentError),
        ({"source_or_template": "${ config.missing }", "config": Config(), "template": True}, TemplateError),
        ({"template": "yes"}, ArgumentTypeError),
        ({"source_or_template": "not C++"}, CompileError),
        ({"source_or_template": "// \ud800"}, ArgumentError),
        ({"source_or_template": "x" * 5000 + ".cu.j2"}, TemplateError),
        ({"entry": "\ud800"}, ArgumentError),
    ],
)
def test_wrong_calls(call: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        compile_kernel(**({"source_or_template": PLAIN, "target": "sm_90a"} | call))
    assert str(caught.value).encode()


def test_the_target_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", "sm_121a")
    assert compile_kernel(PLAIN).target.name == "sm_121a"
    monkeypatch.setenv("CUDATMA_TARGET", "sm_1")
    with pytest.raises(TargetError, match="sm_1"):
        default_target()


def test_the_target_is_that_of_the_gpu_or_sm_90a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.context, "current_device", lambda: 3)
    monkeypatch.setattr(build, "detect", lambda device: get_target("sm_90a") if device == 3 else None)
    assert default_target().name == "sm_90a"

    for error in (
        DriverError("cuInit", None, "no CUDA driver"),
        TargetError("device", "compute capability 8.0", "at least 9.0"),
        LaunchError("process", 7, "a process that initializes CUDA itself"),
    ):

        def without(_: Exception = error) -> int:
            raise _

        monkeypatch.setattr(build.context, "current_device", without)
        assert compile_kernel(PLAIN).target.name == "sm_90a"


@pytest.mark.parametrize(
    "command", [["dump", "tile_copy", "--no-sass"], ["header"], ["emulate", "k.cu", "--entry", "plain"]]
)
def test_every_command_takes_the_same_target(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is that of this machine's GPU, which differs from the default without a GPU."""
    monkeypatch.chdir(tmp_path)
    Path("k.cu").write_text(PLAIN.replace("*x = 1;", "*x = __CUDA_ARCH__; if (*x != 1200) __trap();"))
    monkeypatch.setattr(build, "detect", lambda device: get_target("sm_120a"))
    monkeypatch.setattr(build.context, "current_device", lambda: 0)
    arguments = ["--arg", "x:int32[1]"] if command[0] == "emulate" else ["--out", "out"]
    assert cli.main([*command, *arguments]) == 0
    if command[0] == "dump":
        assert list(Path("out").glob("*_sm_120a.cu"))
    if command[0] == "header":
        assert "for sm_120a" in Path("out").read_text()


def test_a_remedy_is_one_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"choose sm_90 \(Hopper\) or a later architecture"):
        get_target("sm_80")
    with pytest.raises(TargetError, match="sm_90a if there is no GPU"):
        get_target("sm_91")

    def without(device: int = 0) -> Any:
        raise DriverError("cuInit", None, "no CUDA driver on this machine", "compute on the CPU")

    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: False)
    array, weight = np.zeros((64, 64), np.float16), cudatma.quantize(np.ones((64, 64), np.float16), group_size=64)
    for call in (
        lambda: compile_kernel(PLAIN, target="sm_90a").launch(1, 1, (array,), backend="cuda"),
        lambda: cudatma.copy(array, backend="cuda"),
        lambda: cudatma.tile_copy(array, array.copy(), backend="cuda"),
        lambda: cudatma.marlin_gemm(array, weight, backend="cuda"),
        lambda: cudatma.dequantize(weight, backend="cuda"),
        lambda: cudatma.ragged_copy([array], [array.copy()], backend="cuda"),
    ):
        with pytest.raises(FieldError, match="for host arrays, because this machine has no usable NVIDIA GPU"):
            call()
    monkeypatch.setattr(tune, "gpu_of", without)
    with pytest.raises(DriverError, match="pass --dry-run or --compile-only"):
        tune.main(["--model", "llama3-8b"])


def test_an_edited_class_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, templates: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Bytecode is valid for all texts of one second and size.
    module = tmp_path / "edited_spec.py"
    for number in (1, 2):
        module.write_text(
            "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Edited:\n    entry = 'scale'\n"
            f"    factor = property(lambda self: {number})\n"
        )
        forget()
        importlib.invalidate_caches()
        loaded = importlib.reload(sys.modules["edited_spec"]) if number > 1 else importlib.import_module("edited_spec")
        assert f"*= {number}" in load_kernel("kernel.cu.j2", loaded.Edited(), "sm_90a").source


def test_a_template_that_changes_while_it_is_compiled(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = build.render

    def render(*given: Any, **options: Any) -> str:
        (templates / "kernel.cu.j2").write_text(TEMPLATE + "// edited\n")
        return rendered(*given, **options)

    monkeypatch.setattr(build, "render", render)
    with pytest.raises(TemplateError, match="changed while it was being compiled"):
        load_kernel("kernel.cu.j2", Config(), "sm_90a")


def test_the_layout_belongs_to_the_config_of_the_call() -> None:
    source = 'extern "C" __global__ void layout_of() {}'
    layouts = [((name, 0, size),) for name, size in (("first", 16), ("second", 32))]
    for layout in layouts:
        config = SimpleNamespace(smem_layout=lambda layout=layout: layout)
        assert compile_kernel(source, config, target="sm_90a").smem_layout == layout


# --- backend


@pytest.mark.parametrize(
    ("explicit", "variable", "expected"),
    [
        ("cuda", "reference", "cuda"),
        ("reference", None, "reference"),
        (None, "cuda", "cuda"),
        (None, "reference", "reference"),
        (None, None, "auto"),
        (None, "", "auto"),
        ("auto", "cuda", "auto"),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
def test_backends(
    explicit: str | None, variable: str | None, expected: str, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: usable)
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDATMA_BACKEND", variable)
    automatic = "cuda" if usable else "emulator"
    assert backend.selected_backend(explicit) == (automatic if expected == "auto" else expected)


@pytest.mark.parametrize(
    ("explicit", "variable", "warned"),
    [(None, "", "no usable NVIDIA GPU"), ("auto", "", "no usable"), (None, "reference", ""), (None, "emulator", ""),
     ("emulator", "", ""), ("reference", "", ""), (None, "cuda", "")],
)  # fmt: skip
def test_a_function_says_that_it_computes_on_the_cpu_unless_asked_to(
    explicit: str | None, variable: str, warned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: False)
    monkeypatch.setenv("CUDATMA_BACKEND", variable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend.backend_for("some_function", explicit)
    assert [(w.category, w.filename) for w in caught] == [(BackendWarning, __file__)] * bool(warned)
    for warning in caught:
        assert warned in str(warning.message)
        assert "filterwarnings" in str(warning.message)


def test_it_is_said_once_in_a_process() -> None:
    code = (
        "import numpy as np, cudatma.backend as b\nb._has_usable_gpu = lambda: False\n"
        "b.backend_for('f', None)\nb.backend_for('f', None)\nb.backend_for('g', None)\n"
    )
    environment = {**os.environ, "CUDATMA_BACKEND": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.count("f computes on the CPU") == 1
    assert done.stderr.count("g computes on the CPU") == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("sm_90a", True), ("sm_100a", False), (DriverError("cuInit", None, "none"), False), (ImportError("none"), False)],
)
def test_what_a_usable_gpu_is(answer: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return get_target(answer)

    monkeypatch.setattr(backend, "detect", detect)
    backend._has_usable_gpu.cache_clear()
    assert backend._has_usable_gpu() is expected
    backend._has_usable_gpu.cache_clear()


def test_the_key_covers_the_files_of_a_config_and_its_bases() -> None:
    class Own(Config): ...

    common = set(build._code_files(object))
    assert {Path(name).name for name in common} > {"launch_struct.py", "render.py"}
    assert set(build._code_files(Own)) - common == {__file__}
    family = {Path(name).name for name in set(build._code_files(TileCopyConfig)) - common}
    assert {"tile_copy.py", "ring.py"} <= family
