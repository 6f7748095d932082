"""Attention's benchmark without a GPU: calls, a run with a scripted clock, table, summary, operands and errors."""

from __future__ import annotations

import math
import sys
import types
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGpu

from benchmarks import attention
from benchmarks import attention_decode as decoding
from benchmarks.attention import LENGTHS, Operands, Shape, entrant, errors
from benchmarks.attention_decode import FP8, OURS, PAGED, Decoding, decode_summary, decode_table
from benchmarks.contest import field_of, find_entrants
from benchmarks.rivals import attention as rivals
from cudatma.errors import ArgumentError

SMALL = Shape(2, 4, 2, 48, 64, True, "bfloat16")


def cell(length: int = 1024, mask: str = "full", **more: Any) -> dict[str, Any]:
    """Return the cell of a call that takes cuDNN 10 us, FA3 8 us and our kernel 5 us."""
    us = {"cuDNN": 10.0, "FA3": 8.0, "a2": 20.0, "auto": 5.0}
    off = {"cuDNN": 2e-3, "FA3": 2e-3, "auto": 2.2e-3}
    made = {"batch": 16384 // length, "heads": 16, "kv_heads": 16, "length": length, "head_dim": 128, "mask": mask}
    made |= {"dtype": "bfloat16", "flops": 1e9, "us": us, "rms_error": off}
    return {**made, "largest_error": {name: 5 * each for name, each in off.items()}, **more}


# ---- What is measured -----------------------------------------------------------------------------------------------


def test_all_calls_are_asked_for_by_default() -> None:
    found = attention.calls_of(attention._parser().parse_args([]))
    assert len(found) == len(LENGTHS) * 2 * 4
    assert {(each.heads, each.kv_heads, each.head_dim) for each in found} == {
        *((32, 32, 64), (16, 16, 128), (8, 8, 256), (32, 8, 128)),
    }
    assert {each.batch * each.length for each in found if each.length <= 16384} == {16384}
    assert {each.batch for each in found if each.length == 32768} == {1}


# ---- Turns ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    return fake


def test_a_first_launch_decides_how_many_a_graph_has(gpu: FakeGpu) -> None:
    launches = [
        entrant(gpu, "it", lambda index, us=us: gpu.launch(us), None).contender.launches  # type: ignore[misc]
        for us in (1.0, 100.0, 5000.0)
    ]
    assert launches == [200, 30, 1]


def test_who_is_too_slow_or_fails_is_refused_with_the_reason(gpu: FakeGpu) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="one launch takes 900 ms"):
        entrant(gpu, "slow", lambda index: gpu.launch(9e5), None)
    with pytest.raises(RuntimeError, match="no kernel"):
        entrant(gpu, "broken", broken, None)


def test_without_a_library_of_fa3_the_packages_are_looked_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    rivals.fa3_forward.cache_clear()
    with pytest.raises(ImportError, match=r"install xformers 0\.0\.34"):
        rivals.fa3_forward(None)
    library = tmp_path / "xformers" / "flash_attn_3" / "_C.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert next(rivals._in_packages(rivals._FA3)) == library


# ---- What is said ---------------------------------------------------------------------------------------------------


def test_a_summary_has_means_and_the_least_by_group() -> None:
    slow = cell(2048, us={"cuDNN": 4.0, "FA3": 8.0, "auto": 5.0})
    long = cell(32768, "causal")
    lines = attention.attention_summary([cell(), slow, long, cell(512, us={}, error="failed")])
    kinds = [f"bfloat16, 16 heads of 128, {mask}" for mask in ("full", "causal")]
    assert [line.split(": geometric")[0] for line in lines] == [
        f"{group}: auto / {rival}"
        for group in ("bfloat16, all, 512 to 16384", *kinds)
        for rival in ("best", "cuDNN", "FA3")
    ]
    assert lines[0] == (
        "bfloat16, all, 512 to 16384: auto / best: geometric mean 1.131, least 0.800 at 2048, bfloat16, 16 heads of "
        "128, full, 2 cells (1 more not measured); errors at most 1.10 times those of best"
    )


# ---- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--length", "0"], "1 to 131072"),
        (["--length", "-3"], "1 to 131072"),
        (["--head-dim", "80"], "invalid choice"),
        (["--dtype", "float32"], "invalid choice"),
        (["--version", "a9"], "invalid choice"),
        (["--causal", "--full"], "not allowed with"),
        (["--rivals", "nobody"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        attention.main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_version_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(q: Any, k: Any, v: Any, *, causal: bool, version: str) -> Any:
        if version == "a2":
            raise ArgumentError("version", version, "one with a kernel")
        return SimpleNamespace(config=(q, k, causal, version))

    torch = SimpleNamespace(bfloat16="bf16", empty=lambda sizes, dtype, device: sizes)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(attention, "attention_explain", explain)
    refused: dict[str, str] = {}
    found = attention.configs_of(SMALL, ("a2", "a4"), refused)
    assert found == {name: ((2, 48, 4, 64), (2, 48, 2, 64), True, name) for name in ("a4", "auto")}
    assert list(refused) == ["a2"]


# ---- With torch alone -----------------------------------------------------------------------------------------------


def test_operands_are_normal_and_lie_by_rows() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands = Operands(SMALL)
    assert (operands.q.shape, operands.k.shape) == ((2, 48, 4, 64), (2, 48, 2, 64))
    assert operands.q.is_contiguous()
    assert operands.q.dtype == torch.bfloat16
    assert operands.heads_first()[1].shape == (2, 2, 48, 64)
    assert operands.out().isnan().all()


def test_results_are_compared_with_float64() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands = Operands(Shape(2, 4, 2, 300, 64, True, "bfloat16"))
    q, k, v = (each.float() for each in operands.heads_first())
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).to(torch.bfloat16)
    wrong, broken = right.clone(), right.clone()
    wrong[1, 299, 3, 5] += 8
    broken[0, 0, 0, 0] = math.nan
    found = errors(operands, {"right": right, "wrong": wrong, "broken": broken})
    assert 1e-4 < found["right"][0] < 4e-3
    assert found["wrong"][1] > 5
    assert all(math.isnan(each) for each in found["broken"])


torch = pytest.importorskip("torch", reason="torch is not installed")


def exact(q: Any, k: Any, v: Any) -> Any:
    """Return the exact result for one query (heads, dim) and the keys and values of a sequence (length, kv_heads,
    dim)."""
    k, v = (each.double().repeat_interleave(len(q) // each.shape[1], 1) for each in (k, v))
    weights = torch.einsum("hd,khd->hk", q.double(), k).mul(q.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


class Paged:
    """Fake of FlashInfer's BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, workspace: Any, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "NHD"
        self.workspace = workspace

    def plan(
        self, begins: Any, pages: Any, last: Any, heads: int, kv_heads: int, dim: int, page: int, **kinds: Any
    ) -> None:
        self.lists = [pages[begin:end].long() for begin, end in pairwise(begins)]
        assert last.tolist() == [page] * len(self.lists)

    def run(self, q: Any, cache: tuple[Any, Any], *, out: Any) -> None:
        for sequence, pages in enumerate(self.lists):
            out[sequence] = exact(q[sequence], *(each[pages].flatten(0, 1) for each in cache))


def forward(q: Any, k: Any, v: Any, *, out: Any) -> None:
    """Fake of FA4's _flash_attn_fwd."""
    for sequence in range(len(q)):
        out[sequence, 0] = exact(q[sequence, 0], k[sequence], v[sequence])


def test_fa4_and_flashinfer_read_the_cache_that_ours_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Paged)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(decoding, "fa4_forward", lambda: forward)
    monkeypatch.setattr(decoding, "flashinfer_workspace", lambda name: name)
    monkeypatch.setattr(decoding, "copies_for", lambda nbytes: 2)
    monkeypatch.setattr(decoding, "launches_for", lambda nbytes, copies: 2)
    caches = decoding.Caches(Decoding(3, 48))
    rivals = [*(rival for _, _, rival in decoding.OPTIONAL.values()), decoding._flashinfer(decoding.FLASHINFER_FP8)]
    entrants = [each for rival in rivals for each in rival(None, caches)]
    assert [each.rival for each in entrants] == ["FA4", "FlashInfer", "FlashInfer, CUDA cores", "FlashInfer, e4m3"]
    assert {each.rival for each in entrants[:3]} <= set(decoding.RIVALS)
    for each in entrants:
        each.contender.run(caches.copies - 1)
    for rms, _ in decoding.errors(caches, {each.rival: each.out for each in entrants}).values():
        assert rms < decoding._ALLOWED
    for each in entrants:
        each.contender.run(0)  # the first copy, which the result is not compared with
    assert min(rms for rms, _ in decoding.errors(caches, {each.rival: each.out for each in entrants}).values()) > 0.5


def test_who_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "copies_for", lambda nbytes: 1)
    monkeypatch.setattr(decoding, "launches_for", lambda nbytes, copies: 1)
    for name in ("flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    field, told = field_of({}, decoding.OPTIONAL, ["fa4", "flashinfer"])
    assert all(what.startswith("absent: ") for what in told.values())
    found, refused = find_entrants(None, decoding.Caches(Decoding(1, 16)), field)
    assert not found
    assert set(refused) == {"FA4", "FlashInfer"}


def decode_cell(batch: int, **us: float) -> dict[str, Any]:
    named = {"cuDNN": 10.0, "FA3": 8.0, OURS: 5.0, PAGED: 6.0, FP8: 4.0} | us
    return {"batch": batch, "length": 1024, "bytes": 4 << 20, "us": named}


def test_the_table_compares_with_the_fastest_rival() -> None:
    table = decode_table(
        [decode_cell(1), decode_cell(8, FA3=12.0), {"batch": 1, "length": 4096, "us": {}, "error": "failed"}]
    )
    assert table.columns == ("batch x keys", "cuDNN", "FA3", OURS, PAGED, FP8, f"{OURS} / best")
    assert table.rows[0] == ("1 x 1024", "10.0 (0.42)", "8.0 (0.52)", "5.0 (0.84)", "6.0 (0.70)", "4.0 (0.52)", "1.600")
    assert table.rows[1][-1] == "2.000"
    assert set(table.rows[2][1:]) == {"-"}


def test_the_summary_compares_ours_with_rivals_and_caches_with_each_other() -> None:
    lines = decode_summary([decode_cell(1), decode_cell(8)])
    assert [line.split(", least")[0] for line in lines] == [
        f"decoding: {OURS} / best: geometric mean 1.600",
        f"decoding: {OURS} / cuDNN: geometric mean 2.000",
        f"decoding: {OURS} / FA3: geometric mean 1.600",
        f"decoding: {PAGED} / {OURS}: geometric mean 0.833",
        f"decoding: {FP8} / {PAGED}: geometric mean 1.500",
    ]
