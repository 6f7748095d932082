"""The benchmark of decoding without a GPU: its calls, its table and summary of cells written by hand."""

from __future__ import annotations

from typing import Any

from benchmarks import attention
from benchmarks.attention_decode import FP8, OURS, PAGED, Decoding, calls_of, decode_summary, decode_table
from tools.bench import benchmarks as scripts


def cell(batch: int, **us: float) -> dict[str, Any]:
    named = {"cuDNN": 10.0, "FA3": 8.0, OURS: 5.0, PAGED: 6.0, FP8: 4.0} | us
    return {"batch": batch, "length": 1024, "bytes": 4 << 20, "us": named}


def test_calls_and_their_bytes() -> None:
    assert calls_of((1, 8), (1024,)) == [Decoding(1, 1024), Decoding(8, 1024)]
    assert Decoding(2, 1024).bytes == 2 * 2 * 1024 * 8 * 128 * 2
    assert str(Decoding(2, 1024)) == "2 x 1024, 32/8 heads of 128"


def test_the_command_line() -> None:
    options = attention._parser().parse_args(["--decode", "--batch", "8", "--length", "4096"])
    assert (options.decode, options.batch, options.length) == (True, [8], [4096])
    assert "attention_decode" not in scripts(), "a module, not a script"


def test_the_table_compares_with_the_fastest_rival() -> None:
    table = decode_table([cell(1), cell(8, FA3=12.0)])
    assert table.columns == ("batch x keys", "cuDNN", "FA3", OURS, PAGED, FP8, f"{OURS} / best")
    assert table.rows[0] == ("1 x 1024", "10.0 (0.42)", "8.0 (0.52)", "5.0 (0.84)", "6.0 (0.70)", "4.0 (0.52)", "1.600")
    assert table.rows[1][-1] == "2.000"


def test_the_summary() -> None:
    found = {(entry["ours"], entry["rival"]): entry for entry in decode_summary([cell(1), cell(8)])}
    assert found[OURS, "best"]["geometric_mean"] == 1.6
    assert found[OURS, "cuDNN"]["geometric_mean"] == 2.0
    assert round(found[PAGED, OURS]["geometric_mean"], 4) == round(5 / 6, 4)
    assert found[FP8, PAGED]["geometric_mean"] == 1.5
