"""warm_up() covers every kernel that calls up to its bound launch, and processes share the compilations."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stub_driver import Array, StubDriver, fresh, packed_weight
from stub_driver import stub as stub  # the fixture

import cudatma
from cudatma import attention, attention_varlen, gemm, marlin_gemm
from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.context import Runtime, using_runtime
from cudatma.errors import ArgumentError, ArgumentTypeError, CompileError
from cudatma.kernels import engine, warm_up
from cudatma.kernels.attention import problem as attention_problem
from cudatma.kernels.attention.choose import ATTENTION
from cudatma.kernels.choice import forget
from cudatma.kernels.gemm import problem as gemm_problem
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.copies import _copy
from cudatma.kernels.gemm.matrices import as_rows, letter_of, why_copied
from cudatma.kernels.gpu import H200, Gpu, imagined_gpu
from cudatma.kernels.marlin import warm_up as marlin_warm_up
from cudatma.kernels.marlin.gemm import MARLIN_GEMM
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.tuning import Entry, GpuClass, store_entry
from cudatma.target import get_target

TYPES = {"f2": np.dtype(np.float16), "f4": np.dtype(np.float32), "i4": np.dtype(np.int32)}
TYPES |= {"bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
MAX_M = 700
RTX_PRO = imagined_gpu("sm_120a")
Kernels = set[tuple[str, Any]]


class Memory:
    """Creates arrays on device 0 that share no memory and are never read."""

    def __init__(self) -> None:
        self.next = 1 << 44

    def array(self, *shape: int, dtype: str = "f2", **changes: Any) -> ArrayInfo:
        self.next += 1 << 36
        kind = TYPES[dtype]
        offset = changes.pop("offset", 0)
        info = ArrayInfo(self.next + offset, shape, dense_strides(shape, kind), kind, 0, None, "cai")
        return replace(info, **changes)


def columns_first(info: ArrayInfo, pitch: int = 0) -> ArrayInfo:
    """Return a column-major array with the same elements, ``pitch`` elements from one column to the next."""
    *outer, _, columns = info.shape
    size, pitch = info.dtype.itemsize, pitch or info.shape[-2]
    return replace(info, strides_bytes=(*(columns * pitch * size for _ in outer), size, pitch * size))


class Taken:
    """Receives calls instead of launching them, and records their kernels or those that warm_up() prepares."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.kernels = gpu, set[tuple[str, Any]]()

    def __call__(self, called: Operation[Any, Any], checked: Checked[Any], device: int, weight: Any) -> None:
        problem = checked.problem
        if called.name == "gemm":
            for field, info in zip(("a", "b"), checked.arrays[:2], strict=True):
                assert info is not None
                self.kernels |= copies(info, field, self.gpu)
        if called.name.startswith("attention") and not problem.has_keys:
            return
        self.kernels |= set(called.kernels(problem, called.configure(problem, self.gpu, {})))


def copies(info: ArrayInfo, field: str, gpu: Gpu) -> Kernels:
    letter = letter_of(info, field)
    if not why_copied(info, letter):
        return set()
    copy, options, source, target = _copy(as_rows(info, letter))
    problem = copy.check((source,), replace(target, pointer=1 << 40), options, None).problem
    return set(copy.kernels(problem, copy.configure(problem, gpu, {})))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """Return a function that returns what warm_up() compiles and loads on a GPU."""

    def kernels(gpu: Gpu, function: Any, *operands: Any, **options: Any) -> Kernels:
        found: Kernels = set()
        monkeypatch.setattr(warm_up, "gpu_of", lambda device: gpu)
        monkeypatch.setattr(warm_up, "compile_and_load", lambda kernels, device, progress: found.update(kernels))
        monkeypatch.setattr(warm_up, "launch_of", lambda *_, **__: None)
        cudatma.warm_up(function, operands, max_m=MAX_M, **options)
        return found

    return kernels


def launched(gpu: Gpu, function: Any, *operands: Any, **options: Any) -> Kernels:
    taken = Taken(gpu)
    token = engine.intercept.set(taken)
    try:
        function(*operands, **options, backend="cuda")
    finally:
        engine.intercept.reset(token)
    return taken.kernels


def sizes(random: random.Random) -> Iterator[int]:
    yield from (1, 1, 1, 1, 2, 3, 16, 64, MAX_M)
    yield from (random.randint(1, MAX_M) for _ in range(40))


A = Callable[[Memory, int, random.Random], ArrayInfo]


def row_major(k: int, **others: Any) -> A:
    return lambda memory, m, random: memory.array(m, k, **others)


def pitched(k: int) -> A:
    """Return rows with gaps that may begin at any element."""

    def a(memory: Memory, m: int, random: random.Random) -> ArrayInfo:
        pitch = 2 * (k + random.choice((0, 1, 8)))
        return memory.array(m, k, strides_bytes=(pitch, 2), offset=random.choice((0, 2)))

    return a


def column_major(k: int, **others: Any) -> A:
    return lambda memory, m, random: columns_first(memory.array(m, k, **others), m + random.choice((0, 1)))


def batch(count: int, k: int, share: int = 1) -> A:
    """Return a batch of matrices that divide the rows."""
    return lambda memory, m, random: memory.array(count, -(-m // share), k, offset=random.choice((0, 2)))


def block_scales(memory: Memory, m: int, k: int, random: random.Random) -> ArrayInfo:
    made = memory.array(m, -(-k // 128), dtype="f4")
    return columns_first(made, m + -m % random.choice((1, 4))) if random.random() < 0.5 else made


GEMMS: list[tuple[str, Gpu, A, tuple[int, ...], dict[str, Any]]] = [
    # What is special; the GPU; a; shape of b; options.
    ("rows", H200, row_major(1024), (1024, 3072), {"activation": "silu"}),
    ("rows off 16 bytes", H200, row_major(1021), (1021, 512), {}),
    ("rows with gaps", H200, pitched(640), (640, 1536), {"out_dtype": "float32", "alpha": 0.5}),
    ("columns", H200, column_major(520), (520, 4096), {}),
    ("a batch", H200, batch(3, 256), (3, 256, 512), {}),
    ("a batch that shares b", H200, batch(4, 256, share=4), (256, 512), {}),
    ("a batch with scales of rows", H200, batch(16, 512, share=16), (512, 256), {"scales": "rows"}),
    ("the same bits for each M", H200, row_major(2048), (2048, 512), {"batch_invariant": True}),
    ("a version", H200, row_major(512), (512, 512), {"version": "v4"}),
    ("without wgmma", RTX_PRO, pitched(1024), (1024, 3072), {"batch_invariant": True}),
    ("fp8", H200, row_major(1024, dtype="e4m3"), (1024, 2048), {"dtype": "e4m3"}),
    ("fp8 columns", H200, column_major(1000, dtype="e4m3"), (1000, 2048), {"dtype": "e4m3"}),
    ("block scales", H200, row_major(1024, dtype="e4m3"), (1024, 2048), {"dtype": "e4m3", "scales": "blocks"}),
    ("scales of a block", H200, row_major(128, dtype="e4m3"), (128, 384), {"dtype": "e4m3", "scales": "blocks"}),
]


@pytest.mark.parametrize(("gpu", "a", "b", "options"), [one[1:] for one in GEMMS], ids=[one[0] for one in GEMMS])
def test_a_gemm_needs_no_other_kernel(
    prepared: Callable[..., Kernels], gpu: Gpu, a: A, b: tuple[int, ...], options: dict[str, Any]
) -> None:
    memory, draw = Memory(), random.Random(0)
    options = dict(options)
    dtype, scales = options.pop("dtype", "f2"), options.pop("scales", "")
    right = memory.array(*b, dtype=dtype)
    if scales == "blocks":
        options["b_scale"] = memory.array(-(-b[0] // 128), -(-b[1] // 128), dtype="f4")

    def call(m: int) -> tuple[Any, ...]:
        left = a(memory, m, draw)
        if scales:
            rows = left.shape[-2]
            of_blocks = scales == "blocks"
            options["a_scale"] = block_scales(memory, rows, b[0], draw) if of_blocks else memory.array(rows, dtype="f4")
        return left, right

    expected = prepared(gpu, cudatma.gemm, *call(33), **options)
    used: Kernels = set()
    for m in sizes(draw):
        used |= launched(gpu, cudatma.gemm, *call(m), **options)
    assert used <= expected
    assert len(expected) <= 2 * len(used) + 24, "and few that nobody needs"


ATTENTIONS: list[tuple[Gpu, tuple[int, int, int, int], dict[str, Any]]] = [
    # The GPU; heads, heads of keys and values, and their dims; options.
    (H200, (32, 8, 128, 128), {"causal": True}),
    (H200, (8, 8, 64, 64), {"window": (100, 0), "softcap": 30.0}),
    (H200, (4, 4, 192, 128), {"causal": True, "return_lse": True}),
    (H200, (4, 2, 256, 256), {"window": (200, 300)}),
    (RTX_PRO, (32, 8, 128, 128), {"causal": True, "window": (64, None)}),
]


@pytest.mark.parametrize(("gpu", "dims", "options"), ATTENTIONS)
def test_attention_needs_no_other_kernel(
    prepared: Callable[..., Kernels], gpu: Gpu, dims: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    memory, draw = Memory(), random.Random(0)
    heads, kv_heads, dim, v_dim = dims

    def of(batch: int, q: int, k: int) -> tuple[ArrayInfo, ...]:
        keys = memory.array(batch, k, kv_heads, dim), memory.array(batch, k, kv_heads, v_dim)
        return memory.array(batch, q, heads, dim), *keys

    def of_sequences(batch: int, q: int, k: int) -> tuple[ArrayInfo, ...]:
        dense = (replace(info, shape=info.shape[1:], strides_bytes=info.strides_bytes[1:]) for info in of(1, q, k))
        return *dense, *(memory.array(batch + 1, dtype="i4") for _ in range(2))

    expected = prepared(gpu, cudatma.attention, *of(2, 9, 9), **options)
    longest = {"max_seqlen_q": 9, "max_seqlen_k": 9}
    of_lengths = prepared(gpu, cudatma.attention_varlen, *of_sequences(2, 9, 9), **longest, **options)
    for q in sizes(draw):
        batch, k = draw.randint(1, 40), draw.choice((q, draw.randint(1, MAX_M)))
        assert launched(gpu, cudatma.attention, *of(batch, q, k), **options) <= expected
        operands = of_sequences(batch, batch * q, batch * k)
        longest = {"max_seqlen_q": q, "max_seqlen_k": k}
        assert launched(gpu, cudatma.attention_varlen, *operands, **longest, **options) <= of_lengths


def test_tuning_entries_count(
    prepared: Callable[..., Kernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, path = Memory(), tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    product = gemm_problem.Problem(m=48, n=512, k=512, dtype="float16", layout="RR")
    heads = attention_problem.Problem.of(batch=7, heads=4, q_length=600, head_dim=64, dtype="float16")
    for family, problem in ((GEMM, product), (ATTENTION, heads)):
        found = [config for config, _ in family.times(problem, np.array([problem.m]), H200)]
        shallow = replace(next(config for config in found if config.stages > 3), stages=3)
        assert shallow not in found
        store_entry(path, GpuClass.of(H200), family, Entry(problem, shallow, 1.0, 2.0))
    with using_runtime(Runtime()):
        forget()
        for function, few, many in (
            (
                cudatma.gemm,
                [memory.array(1, 512), memory.array(512, 512)],
                [memory.array(48, 512), memory.array(512, 512)],
            ),
            (cudatma.attention, [memory.array(1, 9, 4, 64)] * 3, [memory.array(7, 600, 4, 64)] * 3),
        ):
            used = launched(H200, function, *many)
            assert [config.stages for _, config in used] == [3]
            assert used <= prepared(H200, function, *few)
    forget()


@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_decoding_needs_no_other_kernel(prepared: Callable[..., Kernels], dtype: str, page_size: int) -> None:
    memory, draw = Memory(), random.Random(0)

    def of(batch: int, q: int, keys: int) -> tuple[tuple[ArrayInfo, ...], dict[str, Any]]:
        shape = (64, page_size) if page_size else (batch, keys)
        cache = [memory.array(*shape, 8, 128, dtype=dtype) for _ in range(2)]
        table = memory.array(batch, -(-keys // page_size), dtype="i4") if page_size else None
        query = memory.array(batch, q, 32, 128, dtype="bf16")
        return (query, *cache, memory.array(batch, dtype="i4")), {"page_table": table, "window": (100, 0)}

    operands, options = of(2, 1, 64)
    expected = prepared(H200, cudatma.attention_decode, *operands, **options)
    used: Kernels = set()
    for keys in sizes(draw):
        operands, options = of(draw.randint(1, 200), draw.choice((1, 1, 4)), keys)
        used |= launched(H200, cudatma.attention_decode, *operands, **options)
    assert used <= expected
    assert len(expected) <= 4


MARLIN: list[tuple[Gpu, dict[str, Any]]] = [
    (H200, {}),
    (H200, {"has_perm": True, "scale_form": "as_stored"}),
    (H200, {"batch_invariant": True}),
    (imagined_gpu("sm_90a", 20), {"has_perm": True}),
    (RTX_PRO, {"scale_form": "shifted"}),
]


@pytest.mark.parametrize(("gpu", "facts"), MARLIN)
def test_marlin_needs_no_other_kernel(gpu: Gpu, facts: dict[str, Any]) -> None:
    layer = LinearShape(1024, 1536, 128, True, "bfloat16")
    call = Checked(Problem(layer, 1, **facts), (), None, None, None)
    expected, used, memo = set(MARLIN_GEMM.kernels_up_to(call, MAX_M, gpu)), set(), dict[Any, Any]()
    for m in range(1, MAX_M + 1):
        for is_aligned in (False, True):
            problem = Problem(layer, m, has_aligned_x=is_aligned, **facts)
            used |= set(MARLIN_GEMM.kernels(problem, MARLIN_GEMM.configure(problem, gpu, memo)))
    assert used == expected


def test_the_wrong_function_or_bound() -> None:
    memory = Memory()
    operands = memory.array(4, 64), memory.array(64, 64)
    with pytest.raises(ArgumentError, match=r"function must be attention, .*got copy"):
        cudatma.warm_up(cudatma.copy, operands[:1], max_m=4)
    with pytest.raises(ArgumentTypeError, match=r"operands must be a tuple.*got ArrayInfo"):
        cudatma.warm_up(cudatma.gemm, operands[0], max_m=4)  # type: ignore[arg-type]
    for bound, kind in ((0, ArgumentError), (1 << 20, ArgumentError), (2.0, ArgumentTypeError)):
        with pytest.raises(kind, match=r"max_m must be .*got "):
            cudatma.warm_up(cudatma.gemm, operands, max_m=bound)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"a\.device must be .*got the host"):
        cudatma.warm_up(cudatma.gemm, [np.ones((64, 64), np.float16)] * 2, max_m=4)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the compiler, the cache and the driver, and record compilations, processes and loads."""
    made = SimpleNamespace(orders=[], jobs=[], loaded=[], refused=None, begins=lambda: None)

    def compile_all(orders: Any, target: Any, jobs: int, tell: Any) -> None:
        made.jobs.append(jobs)
        made.begins()
        for order in orders:
            tell(order[1], made.refused)
            made.orders.append(order)

    def load_kernel(template: str, config: Any, target: Any) -> Any:
        return SimpleNamespace(load=lambda device: made.loaded.append((template, config)))

    monkeypatch.setattr(warm_up, "detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(warm_up, "usable_cores", lambda: 16)
    monkeypatch.setattr(warm_up, "is_cached", lambda template, config, target: (template, config) in made.orders)
    monkeypatch.setattr(warm_up, "compile_all", compile_all)
    monkeypatch.setattr(warm_up, "load_kernel", load_kernel)
    return made


KERNELS = [("kernels/a.cu.j2", number) for number in range(5)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder."""
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    with using_runtime(Runtime()):
        yield tmp_path / "cache"


def test_processes_that_begin_together_compile_each_kernel_once(compiler: SimpleNamespace, folder: Path) -> None:
    """Threads with their own open files stand for two ranks, because the lock of the cache folder works for both."""
    ranks = [threading.Thread(target=warm_up.compile_and_load, args=(KERNELS, rank)) for rank in (0, 1)]
    compiler.begins = lambda: (ranks[1].start(), time.sleep(0.2))
    ranks[0].start()
    ranks[0].join()
    ranks[1].join()
    assert compiler.orders == KERNELS
    assert compiler.jobs == [16]
    assert sorted(compiler.loaded) == sorted(2 * KERNELS)


def test_a_process_that_dies_while_it_compiles_holds_up_no_other(compiler: SimpleNamespace, folder: Path) -> None:
    program = "import os\nfrom cudatma.build.kernel import compiling_alone\nwith compiling_alone(): os._exit(1)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
    warm_up.compile_and_load(KERNELS, 0)
    assert compiler.orders == KERNELS


def test_without_a_folder_kernels_are_compiled_where_they_are_kept(compiler: SimpleNamespace, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.warns(RuntimeWarning, match="only in memory"):
        warm_up.compile_and_load(KERNELS, 0)
    assert compiler.jobs == [1]


def test_a_kernel_that_does_not_compile_is_an_error(compiler: SimpleNamespace, folder: Path) -> None:
    compiler.refused = CompileError("NVRTC refuses it")
    with pytest.raises(CompileError, match="NVRTC refuses it"):
        warm_up.compile_and_load(KERNELS, 0)
    assert not compiler.loaded


def test_warming_up_marlin_compiles_what_is_missing_and_loads_the_rest(
    compiler: SimpleNamespace, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [packed_weight(128, 64, address=(number + 1) << 40) for number in (0, 1)]
    monkeypatch.setattr(warm_up, "is_cached", lambda template, config, target: "permute" in template)
    monkeypatch.setattr(warm_up, "gpu_of", lambda device: imagined_gpu("sm_90a", 4))
    monkeypatch.setattr(warm_up, "launch_of", lambda *_, **__: None)
    marlin_warm_up.warm_up(weights, 100)
    loaded = set(compiler.loaded)
    assert len(loaded) == len(compiler.loaded)
    assert set(compiler.orders) == {one for one in loaded if "permute" not in one[0]}
    assert len(compiler.orders) > 3
    marlin_warm_up.warm_up(weights, 100)
    assert len(loaded) == len(compiler.loaded), "the second time there is nothing to do"
    forget()
    marlin_warm_up.warm_up(weights[:1], 100)
    assert len(compiler.loaded) == 2 * len(loaded), "another tuning file may have come"
    compiler.loaded.clear()
    cudatma.warm_up(marlin_gemm, (Array((5, 128), address=1 << 36), weights[0]), max_m=100)
    assert set(compiler.loaded) == loaded, "of the call, it is the same"
    for wrong in (0, 1 << 20):
        with pytest.raises(ArgumentError, match=r"max_m must be from 1 to 131072.*got \d+"):
            marlin_warm_up.warm_up(weights, wrong)


WEIGHTS = {"marlin": packed_weight(1024, 1536), "act-order": packed_weight(1024, 1536, act_order=True)}


def heads(batch: int, length: int) -> tuple[Array, Array, Array]:
    """Return q, k and v with 8 heads and 2 of keys."""
    q, k, v = ((batch, length, count, 128) for count in (8, 2, 2))
    return Array(q, address=1 << 36), Array(k, address=1 << 37), Array(v, address=1 << 38)


#: Calls as functions of M: the function, its operands, and its options.
CALLS: dict[str, Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "marlin": lambda m: (marlin_gemm, (Array((m, 1024), address=1 << 36), WEIGHTS["marlin"]), {}),
    "act-order": lambda m: (marlin_gemm, (Array((m, 1024), address=1 << 36), WEIGHTS["act-order"]), {}),
    "gemm": lambda m: (gemm, (Array((m, 1024), address=1 << 36), Array((1024, 1000), address=1 << 37)), {}),
    "gemm, epilogue": lambda m: (
        gemm,
        (Array((m, 1024), address=1 << 36), Array((1024, 1000), address=1 << 37)),
        {"bias": Array((1000,), address=1 << 38), "activation": "silu"},
    ),
    "attention": lambda m: (attention, heads(1, m), {}),
    "attention, lse": lambda m: (attention, heads(2, m), {"return_lse": True}),
    "attention_varlen": lambda m: (
        attention_varlen,
        (*(Array(one.shape[1:], address=one.data.ptr) for one in heads(1, m)), *2 * (Array((9,), "i4", 1 << 39),)),
        {"max_seqlen_q": m, "max_seqlen_k": m},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_after_a_warm_up_makes_a_plan(stub: StubDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(warm_up, "gpu_of", lambda device: H200)
    monkeypatch.setattr(warm_up, "compile_and_load", lambda kernels, device, progress: None)
    with using_runtime(fresh()):
        function, operands, options = CALLS[name](16)
        cudatma.warm_up(function, operands, max_m=MAX_M, **options)
        plans = stub.plans
        assert plans > 1
        assert not stub.launches
        for m in sizes(random.Random(7)):
            function, operands, options = CALLS[name](m)
            function(*operands, **options)
        assert stub.plans == plans
