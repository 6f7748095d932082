"""The benchmark of decoding without a GPU: its table and summary, and rivals whose functions are written with torch."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import attention_decode as decoding
from benchmarks.attention_decode import FP8, OURS, PAGED, Decoding, decode_summary, decode_table
from benchmarks.contest import field_of, find_entrants

torch = pytest.importorskip("torch", reason="torch is not installed")


def exact(q: Any, k: Any, v: Any) -> Any:
    """Of one query (heads, dim) and the keys and values of a sequence (length, kv_heads, dim)."""
    k, v = (each.double().repeat_interleave(len(q) // each.shape[1], 1) for each in (k, v))
    weights = torch.einsum("hd,khd->hk", q.double(), k).mul(q.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v)


class Paged:
    """BatchDecodeWithPagedKVCacheWrapper of FlashInfer."""

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
    """_flash_attn_fwd of FA4."""
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


def cell(batch: int, **us: float) -> dict[str, Any]:
    named = {"cuDNN": 10.0, "FA3": 8.0, OURS: 5.0, PAGED: 6.0, FP8: 4.0} | us
    return {"batch": batch, "length": 1024, "bytes": 4 << 20, "us": named}


def test_the_table_compares_with_the_fastest_rival() -> None:
    table = decode_table([cell(1), cell(8, FA3=12.0), {"batch": 1, "length": 4096, "us": {}, "error": "failed"}])
    assert table.columns == ("batch x keys", "cuDNN", "FA3", OURS, PAGED, FP8, f"{OURS} / best")
    assert table.rows[0] == ("1 x 1024", "10.0 (0.42)", "8.0 (0.52)", "5.0 (0.84)", "6.0 (0.70)", "4.0 (0.52)", "1.600")
    assert table.rows[1][-1] == "2.000"
    assert set(table.rows[2][1:]) == {"-"}


def test_the_summary_compares_ours_with_rivals_and_caches_with_each_other() -> None:
    lines = decode_summary([cell(1), cell(8)])
    assert [line.split(", least")[0] for line in lines] == [
        f"decoding: {OURS} / best: geometric mean 1.600",
        f"decoding: {OURS} / cuDNN: geometric mean 2.000",
        f"decoding: {OURS} / FA3: geometric mean 1.600",
        f"decoding: {PAGED} / {OURS}: geometric mean 0.833",
        f"decoding: {FP8} / {PAGED}: geometric mean 1.500",
    ]
