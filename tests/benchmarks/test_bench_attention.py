"""Attention's benchmark without a GPU: calls, tables, summaries, arguments, operands and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import attention
from benchmarks.attention import LENGTHS, Operands, Shape, errors
from benchmarks.attention_decode import FP8, OURS, PAGED, decode_summary, decode_table

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
