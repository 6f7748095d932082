"""Sources that include files, and sources with host code. No GPU; CUDA's headers are needed where a case names them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma import toolkit
from cudatma.build import headers, nvcc, nvrtc
from cudatma.build.includes import includes_of
from cudatma.build.kernel import Kernels
from cudatma.build.ptx_source import ptx_source
from cudatma.context import runtime
from cudatma.errors import ArgumentError, CompileError

FOLDERS = headers.cuda_headers(nvrtc.nvrtc_version()[0])


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder and an empty memory; relative paths are in the test's folder."""
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    runtime().parts[Kernels] = Kernels()


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def need_header(name: str) -> None:
    if not any((Path(folder) / name).is_file() for folder in FOLDERS):
        pytest.skip(f"no {name}; install the extra `headers`")


#: Name -> a header that it needs, the includes, and a body that doubles 32 floats at x.
DOUBLE = {
    "cuda_fp16.h": (
        "#include <cuda_fp16.h>\n#include <stdint.h>",
        "uint32_t i = threadIdx.x; __half h = __float2half(x[i]); x[i] = __half2float(h + h);",
    ),
    "cuda.h": (
        "#include <cuda.h>\n#include <cassert>\n#include <cstdio>\n#include <type_traits>\nvoid host_helper();",
        "static_assert(std::is_same_v<int, int>); assert(x); x[threadIdx.x] *= sizeof(CUtensorMap) / 64;",
    ),
    "mma.h": (
        "#include <mma.h>",
        """__shared__ half a[256], b[256]; __shared__ float c[256];
        for (int i = threadIdx.x; i < 256; i += 32) a[i] = i < 32 ? x[i] : 0.f, b[i] = i % 17 == 0 ? 2.f : 0.f;
        __syncwarp();
        nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> fa;
        nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::row_major> fb;
        nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> fc;
        nvcuda::wmma::fill_fragment(fc, 0.f);
        nvcuda::wmma::load_matrix_sync(fa, a, 16);
        nvcuda::wmma::load_matrix_sync(fb, b, 16);
        nvcuda::wmma::mma_sync(fc, fa, fb, fc);
        nvcuda::wmma::store_matrix_sync(c, fc, 16, nvcuda::wmma::mem_row_major);
        __syncwarp();
        x[threadIdx.x] = c[threadIdx.x];""",
    ),
    "cuda_pipeline.h": (
        "#include <cuda_pipeline.h>",
        """__shared__ float tile[32];
        __pipeline_memcpy_async(&tile[threadIdx.x], &x[threadIdx.x], 4);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        x[threadIdx.x] = 2 * tile[threadIdx.x];""",
    ),
    "cooperative_groups.h": (
        "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;",
        """auto warp = cg::tiled_partition<32>(cg::this_thread_block());
        float other = warp.shfl_xor(x[threadIdx.x], 1);
        x[threadIdx.x] = x[threadIdx.x] + warp.shfl_xor(other, 1);""",
    ),
    "cuda/ptx": (
        "#include <cuda/ptx>\nnamespace ptx = cuda::ptx;",
        """__shared__ alignas(16) float tile[32];
        __shared__ uint64_t full;
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(&full, 1);
            ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile, x, sizeof(tile), &full);
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, sizeof(tile));
        }
        __syncthreads();
        while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
        x[threadIdx.x] = 2 * tile[threadIdx.x];""",
    ),
    "cuda/barrier": (
        "#include <cuda/barrier>\n#include <cuda/ptx>\nusing barrier = cuda::barrier<cuda::thread_scope_block>;",
        """__shared__ alignas(16) float tile[32];
        __shared__ alignas(8) unsigned char space[sizeof(barrier)];
        barrier& full = *reinterpret_cast<barrier*>(space);
        if (threadIdx.x == 0) {
            init(&full, 32);
            cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
        }
        __syncthreads();
        if (threadIdx.x == 0) cuda::memcpy_async(tile, x, cuda::aligned_size_t<16>(sizeof(tile)), full);
        full.arrive_and_wait();
        x[threadIdx.x] = 2 * tile[threadIdx.x];""",
    ),
}


def doubling(name: str) -> str:
    includes, body = DOUBLE[name]
    return f'{includes}\nextern "C" __global__ void twice(float* x) {{\n{body}\n}}\n'


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", DOUBLE)
def test_cudas_headers_need_no_option(name: str) -> None:
    need_header("crt/mma.h" if name == "mma.h" else name)
    need_header("cuda/std/version")
    kernel = cudatma.compile(doubling(name), target="sm_90a")
    x = np.arange(32, dtype=np.float32)
    assert kernel.emulate(1, 32, (x,)).is_clean
    assert np.array_equal(x, 2 * np.arange(32))


def test_a_report_quotes_the_users_line_and_names_that_of_the_header() -> None:
    need_header("cuda/ptx")
    source = doubling("cuda/ptx")
    racy = source.replace("while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}", "")
    Path("racy.cu").write_text(racy.replace("x[threadIdx.x] = 2", "if (threadIdx.x < 40)\n x[threadIdx.x] = 2"))
    report = cudatma.compile("racy.cu", target="sm_90a").emulate(1, 32, (np.zeros(32, np.float32),), hazards="collect")
    hazard = next(hazard for hazard in report.hazards if hazard.kind == "read_before_load")
    assert hazard.source.startswith("racy.cu:")
    assert hazard.source_text == "x[threadIdx.x] = 2 * tile[threadIdx.x];"
    assert "cp_async_bulk.h:" in hazard.message
    assert "inlined at racy.cu:9" in hazard.message
    lines = ptx_source("racy.cu", target="sm_90a").lines
    assert next(iter(lines)) == "racy.cu"
    assert any("cp.async.bulk" in text for text in lines["cp_async_bulk.h"].values())


KERNEL = 'extern "C" __global__ void k(int* x) { *x = VALUE; }\n'
#: Name -> files, options of the compiler, and the file whose edit or creation changes VALUE.
EDITS: dict[str, tuple[dict[str, str], list[str], str]] = {
    "next to the file": ({"k.cu": '#include "v.h"\n', "v.h": ""}, [], "v.h"),
    "in an include folder": ({"k.cu": "#include <v.h>\n", "inc/v.h": ""}, ["-Iinc"], "inc/v.h"),
    "in an option of two words": ({"k.cu": "#include <v.h>\n", "inc/v.h": ""}, ["-I", "inc"], "inc/v.h"),
    "through a header": (
        {"k.cu": '#include "inc/a.h"\n', "inc/a.h": '# /**/ include /**/ "b/v.h"\n', "inc/b/v.h": ""},
        [],
        "inc/b/v.h",
    ),
    "in an earlier folder": (
        {"k.cu": "#include <v.h>\n", "a/x.h": "", "b/v.h": "#define VALUE 11111\n"},
        ["-Ia", "--include-path=b"],
        "a/v.h",
    ),
    "that may exist": (
        {"k.cu": '#if __has_include("v.h")\n#include "v.h"\n#else\n#define VALUE 11111\n#endif\n'},
        [],
        "v.h",
    ),
    "that may exist, named by a macro": (
        {"k.cu": '#define NAME "v.h"\n#if __has_include(NAME)\n#include NAME\n#else\n#define VALUE 11111\n#endif\n'},
        [],
        "v.h",
    ),
    "that may exist, asked by a macro": (
        {"k.cu": '#define H(x) __has_include(x)\n#if H("v.h")\n#include "v.h"\n#else\n#define VALUE 11111\n#endif\n'},
        [],
        "v.h",
    ),
    "that may exist, asked by an alias": (
        {"k.cu": '#define H __has_include\n#if H("v.h")\n#include "v.h"\n#else\n#define VALUE 11111\n#endif\n'},
        [],
        "v.h",
    ),
    "of a split line": ({"k.cu": '#inc\\\nlude "v.h"\n', "v.h": ""}, [], "v.h"),
    "through a link": ({"k.cu": '#include "link/../v.h"\n', "real/sub/x.h": "", "real/v.h": ""}, [], "real/v.h"),
    "named by a macro": ({"k.cu": "#define NAME(x) <inc/x>\n#include NAME(v.h)\n", "inc/v.h": ""}, ["-I."], "inc/v.h"),
    "named by an option": ({"k.cu": "#include NAME\n", "v.h": ""}, ['-DNAME="v.h"'], "v.h"),
    "named by several macros": ({"k.cu": '#define A B\n#define B "v.h"\n#include A\n', "v.h": ""}, [], "v.h"),
    "named by a joined token": (
        {"k.cu": "#define NAME(x) <v##x>\n#include NAME(1.h)\n", "inc/v1.h": ""},
        ["-Iinc"],
        "inc/v1.h",
    ),
    "in a folder that a macro names": (
        {"k.cu": "#define PART inc\n#define NAME <PART/v.h>\n#include NAME\n", "inc/v.h": ""},
        ["-I."],
        "inc/v.h",
    ),
    "included by an option": ({"k.cu": "", "v.h": ""}, ["--pre-include=v.h"], "v.h"),
}
#: Cases whose files are unknown. Every call compiles, and nothing is stored.
UNKNOWN = {
    "named by several macros",
    "that may exist, asked by an alias",
    "that may exist, asked by a macro",
    "named by a joined token",
    "in a folder that a macro names",
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_header_is_compiled_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, options, edited = EDITS[case]
    write({name: text or "#define VALUE 11111\n" for name, text in files.items() if name != "k.cu"})
    Path("k.cu").write_text(f"// #include words of a comment\n{files['k.cu']}{KERNEL}")
    Path("link").symlink_to("real/sub")

    def ptx() -> str:
        runtime().parts[Kernels] = Kernels()
        return cudatma.compile("k.cu", target="sm_90a", options=options).ptx

    first = ptx()
    assert "11111" in first
    assert bool(list(Path("cache/entries").iterdir())) == (case not in UNKNOWN)
    assert bool(runtime().parts[Kernels].known) == (case not in UNKNOWN)
    if case not in UNKNOWN:
        with monkeypatch.context() as patch:
            patch.setattr("cudatma.build.kernel.compile_source", lambda *_, **__: pytest.fail("compiled again"))
            assert ptx() == first
    Path(edited).write_text("#define VALUE 22222\n")
    assert "22222" in ptx()


def test_a_source_without_includes_searches_no_folder() -> None:
    assert includes_of(KERNEL, ["-Iinc", "-DVALUE=1"], "/", 13) is None


def test_names_of_the_keywords() -> None:
    write({"inc/v.h": "#define VALUE (N + M)\n"})
    source = f"#include <v.h>\n{KERNEL}"
    for defines in ({"N": 20000, "M": True}, ["N=20000", "M"]):
        compiled = cudatma.compile(source, target="sm_90a", include_dirs=[Path("inc")], defines=defines)
        assert "20001" in compiled.ptx
        assert ptx_source(source, target="sm_90a", include_dirs=["inc"], defines=defines).ptx == compiled.ptx
    source = 'template <int N> concept Few = N < 3;\nextern "C" __global__ void k(int* x) { *x = Few<2>; }'
    assert cudatma.compile(source, target="sm_90a", options=["--std=c++20"]).entry == "k"


def test_a_kernel_is_named_by_a_part_of_its_mangled_name() -> None:
    source = "__global__ void first(int* x) { *x = 1; }\n__global__ void second(int* x) { *x = 2; }\n"
    assert cudatma.compile(source, entry="second", target="sm_90a").entry == "_Z6secondPi"
    with pytest.raises(ArgumentError, match=r"entry must be _Z5firstPi or _Z6secondPi.*found no name"):
        cudatma.compile(source, target="sm_90a")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("cuda_fp16.h", "install CUDA's headers: pip install nvidia-cuda-runtime"), ("mine.h", "pass its folder with -I")],
)
def test_a_missing_header_is_named_with_folders_and_remedy(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("headers", "includes"):
        monkeypatch.setattr(f"cudatma.build.{module}.cuda_headers", lambda major: ())
    write({"k.cu": f"\n#include <{name}>\n{KERNEL}", "inc/other.h": ""})
    with pytest.raises(CompileError, match=rf"^k\.cu:2 includes {name}, which is not found in inc; {remedy}"):
        cudatma.compile("k.cu", target="sm_90a", include_dirs=["inc"])


def test_an_error_in_a_header_names_it() -> None:
    write({"inc/broken.h": "\nint x = nothing;\n"})
    with pytest.raises(CompileError, match=r'inc/broken\.h\(2\): error: identifier "nothing" is undefined'):
        cudatma.compile(f"#include <broken.h>\n{KERNEL}", target="sm_90a", include_dirs=["inc"])


#: Host code, and the line that the error names.
HOST = {
    "launch": ("__global__ void k(int* x) { *x = 3; }\n// k<<<1, 1>>>\nvoid run() { k<<<1, 1>>>(nullptr); }\n", 3),
    "main": ('__global__ void k(int* x) { *x = 3; }\nconst char* s = "main(";\n\nint main() {}\n', 4),
    "header": ("\n#include <vector>\n__global__ void k(int* x) { *x = 3; }\n", 2),
}


@pytest.mark.parametrize("case", HOST)
def test_host_code_without_nvcc_is_refused_with_its_line_and_the_command(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, line = HOST[case]
    Path("program.cu").write_text(text)
    monkeypatch.setattr(nvcc, "find_program", lambda name: None)
    monkeypatch.setattr("cudatma.build.includes.cuda_headers", lambda major: ())
    expected = rf"^program\.cu:{line}: `.+` is host code, .* run `nvcc -ptx -lineinfo -arch=sm_90a -DN=1 program\.cu`"
    with pytest.raises(CompileError, match=expected):
        cudatma.compile("program.cu", target="sm_90a", options=["-DN=1"])


#: Stands in for nvcc: writes the PTX and cubin of the same source without its last line.
NVCC = """#!{python}
import sys
from pathlib import Path
given = sys.argv[1:]
keep, out, source = given[given.index("--keep-dir") + 1], given[given.index("-o") + 1], Path(given[-1])
assert "-arch=sm_90a" in given and "--define-macro=N=1" in given and "-Xcompiler=-iquote{folder}" in given, given
assert "int main()" in source.read_text()
Path(keep, source.stem + ".ptx").write_text(Path("{ptx}").read_text())
Path(out).write_bytes(b"cubin")
print("ptxas info: fine", file=sys.stderr)
"""


def test_nvcc_compiles_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "__global__ void k(int* x) { *x = 3; }\n"
    Path("k.ptx").write_text(cudatma.compile(device, target="sm_90a").ptx)
    write({"bin/nvcc": NVCC.format(python=sys.executable, folder=tmp_path, ptx=tmp_path / "k.ptx")})
    Path("bin/nvcc").chmod(stat.S_IRWXU)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    Path("program.cu").write_text(f"{device}int main() {{}}\n")
    kernel = cudatma.compile("program.cu", target="sm_90a", defines={"N": 1})
    assert (kernel.entry, kernel.cubin, kernel.log) == ("_Z1kPi", b"cubin", "ptxas info: fine")
    x = np.zeros(1, np.int32)
    assert kernel.emulate(1, 1, (x,)).is_clean
    assert x[0] == 3
    Path("k.ptx").write_text(cudatma.compile(device.replace("3", "444"), target="sm_90a").ptx)
    with Path("bin/nvcc").open("a") as file:
        file.write("# another version\n")
    assert "444" in cudatma.compile("program.cu", target="sm_90a", defines={"N": 1}).ptx


def test_where_headers_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place of the right version wins, for each part."""

    def place(name: str, major: int, *parts: str) -> str:
        write({f"{name}/{part}": "" for part in parts})
        write({f"{name}/cuda_runtime_api.h": f"#define CUDART_VERSION  {major}010\n"})
        return str(tmp_path / name)

    found: list[str] = []
    monkeypatch.setattr(headers, "include_folders", lambda major: map(Path, found))
    parts = ("cuda/std/version", "cub/version.cuh", "thrust/version.h", "crt/mma.h")
    old = place("old", 12, *parts)
    new = place("new", 13, "crt/mma.h", "cccl/cuda/std/version")
    rest = place("rest", 13, *parts)
    for places, major, expected in (
        ([old, new, rest], 13, (new, f"{new}/cccl", rest)),
        ([new, old], 12, (old,)),
        ([old], 13, (old,)),
        ([], 13, ()),
    ):
        found[:] = places
        assert headers.cuda_headers(major) == expected


def test_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"CUDA_HOME": tmp_path / "home", "CUDA_PATH": tmp_path / "path"}
    for name, path in names.items():
        monkeypatch.setenv(name, str(path))
    assert toolkit.include_folders(13)[:2] == [path / "include" for path in names.values()]


def test_folders_that_do_not_exist_and_files_that_never_end(tmp_path: Path) -> None:
    device = "__global__ void k(int* x) { *x = 3; }\n"
    with pytest.raises(ArgumentError, match=r"include_dirs must be a sequence of existing folders, got nowhere"):
        cudatma.compile(device, target="sm_90a", include_dirs=["nowhere"])
    os.mkfifo(tmp_path / "pipe.h")
    with pytest.raises(ArgumentError, match=r"#include must be a regular file.*got .*pipe\.h"):
        cudatma.compile(f'#include "pipe.h"\n{device}', target="sm_90a", include_dirs=[tmp_path])
