"""Files: packed weights there and back, versions and converters, damaged files, sharded checkpoints."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cudatma.errors import ArgumentTypeError, WeightFileError
from cudatma.quantization import (
    LAYOUT_VERSION,
    PackedWeight,
    load_gptq,
    load_weights,
    open_checkpoint,
    pack,
    save_weights,
)
from cudatma.quantization.storage import CONVERTERS, StoredWeight, supported_versions

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantization"
BF16 = np.dtype(ml_dtypes.bfloat16)


def weight(depth: int = 100, width: int = 72, dtype: Any = np.float16, asymmetric: bool = False) -> PackedWeight:
    rng = np.random.default_rng(depth)
    return pack(
        rng.integers(0, 16, (depth, width), dtype=np.uint8),
        rng.uniform(0.01, 0.02, (-(-depth // 32), width)).astype(dtype),
        rng.integers(0, 17, (-(-depth // 32), width)) if asymmetric else None,
        group_size=32,
        perm=rng.permutation(depth) if asymmetric else None,
    )


def same(one: PackedWeight, other: PackedWeight) -> None:
    for name in ("shape", "group_size", "dtype", "layout_version"):
        assert getattr(one, name) == getattr(other, name)
    for name in ("qweight", "scales", "zeros", "perm"):
        if getattr(one, name) is None:
            assert getattr(other, name) is None
        else:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_weight_there_and_back(tmp_path: Path, dtype: Any, asymmetric: bool) -> None:
    path = tmp_path / "weight.safetensors"
    original = weight(dtype=dtype, asymmetric=asymmetric)
    original.save(path)
    same(PackedWeight.load(path), original)
    with safe_open(path, framework="np") as file:
        assert (file.metadata()["format"], file.metadata()["layout_version"]) == ("cudatma-packed-weight", "1")
        assert file.get_slice("weight.scales").get_dtype() == ("BF16" if dtype == BF16 else "F16")
    assert os.listdir(tmp_path) == ["weight.safetensors"]


def test_several_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    originals = {"layers.0.q_proj": weight(64, 64), "layers.0.up": weight(70, 9, BF16, True), "Ω": weight(33, 1)}
    save_weights(originals, path)
    loaded = load_weights(str(path))
    assert list(loaded) == list(originals)
    for name, original in originals.items():
        same(loaded[name], original)
    with pytest.raises(WeightFileError, match="3 weights"):
        PackedWeight.load(path)
    save_weights({}, path)
    assert load_weights(path) == {}


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    weight().save(tmp_path / "weight.safetensors")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "weight.safetensors")}
    assert len(modes) == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weight.safetensors"
    weight().save(path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(WeightFileError, match="No space left"):
        weight(200).save(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["weight.safetensors"])


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError):
        weight().save(tmp_path / "missing" / "weight.safetensors")
    with pytest.raises(ArgumentTypeError):
        save_weights({"a": np.zeros(3)}, tmp_path / "x")  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError):
        save_weights({1: weight()}, tmp_path / "x")  # type: ignore[dict-item]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "weight.safetensors"
    weight(asymmetric=True).save(path)
    return path


def rewrite(path: Path, metadata: dict[str, Any] | None = None, **arrays: Any) -> None:
    """Write the file again with changed metadata and arrays (None leaves one out)."""
    tensors = load_file(path)
    with safe_open(path, framework="np") as file:
        facts = {**file.metadata(), **(metadata or {})}
    tensors.update({f"weight.{name}": array for name, array in arrays.items()})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {name: text for name, text in facts.items() if text is not None})


def test_truncated_anywhere(stored: Path) -> None:
    content = stored.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(content) // 2, len(content) - 1):
        stored.write_bytes(content[:length])
        with pytest.raises(WeightFileError):
            load_weights(stored)


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file at all",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nul\xff",
        (20000).to_bytes(8, "little") + b"[" * 20000,
        (12).to_bytes(8, "little") + b'{"a": [1,2]}',
        (21).to_bytes(8, "little") + b'{"__metadata__": [1]}',
        (24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}',
    ],
)
def test_corrupt_headers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weight.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightFileError) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F16", "shape": [-2], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2], "data_offsets": [4, 0]},
        {"dtype": "F16", "shape": [2], "data_offsets": [-4, 0]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0]},
        {"dtype": "F16", "shape": [2]},
        {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": 16, "shape": [2], "data_offsets": [0, 4]},
    ],
)
def test_contradicting_entries(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightFileError):
        open_checkpoint(path).read("x")


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([(0, 4), (0, 4)], "y: got data from byte {0}; allowed: {4}"),
        ([(0, 4), (6, 10)], "y: got data from byte {6}; allowed: {4}"),
        ([(2, 4), (4, 8)], "x: got data from byte {2}; allowed: {0}"),
        ([(0, 4), (4, 6)], "got {10} bytes; allowed: {6}"),
    ],
)
def test_data_that_overlaps_or_leaves_gaps(tmp_path: Path, ends: list[tuple[int, int]], message: str) -> None:
    named = zip("xy", ends, strict=True)
    entries = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in named}
    header, path = json.dumps(entries).encode(), tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    with pytest.raises(WeightFileError, match=re.escape(message.format(*range(8 + len(header), 30 + len(header))))):
        open_checkpoint(path)


def _facts(**changes: Any) -> dict[str, str]:
    facts = {"shape": [100, 72], "group_size": 32, "dtype": "float16", "arrays": ["qweight", "scales", "zeros", "perm"]}
    return {"weights": json.dumps({"weight": {**facts, **changes}})}


WRONG_FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no format": ({"format": None}, {}, "format"),
    "another format": ({"format": "pt"}, {}, "load_gptq"),
    "no version": ({"layout_version": None}, {}, "layout_version"),
    "version text": ({"layout_version": "one"}, {}, "layout_version"),
    "version 2": ({"layout_version": "2"}, {}, "allowed: layout version 1"),
    "version 0": ({"layout_version": "0"}, {}, "allowed: layout version 1"),
    "no facts": ({"weights": None}, {}, "JSON"),
    "facts a list": ({"weights": "[]"}, {}, "JSON object"),
    "facts without shape": ({"weights": '{"weight": {}}'}, {}, "shape, group_size"),
    "facts null": ({"weights": '{"weight": null}'}, {}, "shape, group_size"),
    "shape of another weight": (_facts(shape=[100, 200]), {}, "qweight"),
    "shape text": (_facts(shape=["100", "72"]), {}, "shape"),
    "shape of three": (_facts(shape=[1, 2, 3]), {}, "shape"),
    "group size 7": (_facts(group_size=7), {}, "group_size"),
    "group size of another weight": (_facts(group_size=64), {}, "scales"),
    "unknown dtype": (_facts(dtype="float8"), {}, "dtype"),
    "dtype a list": (_facts(dtype=["float16"]), {}, "dtype"),
    "no scales listed": (_facts(arrays=["qweight"]), {}, "no scales"),
    "an array that is not there": (_facts(arrays=["qweight", "scales", "extra"]), {}, "weight.extra"),
    "an array named by a list": (_facts(arrays=["qweight", "scales", ["x"]]), {}, "weight.['x']"),
    "scales missing": ({}, {"scales": None}, "weight.scales"),
    "zeros missing": ({}, {"zeros": None}, "weight.zeros"),
    "scales float32": ({}, {"scales": np.ones((4, 128), np.float32)}, "scales"),
    "scales NaN": ({}, {"scales": np.full((4, 128), np.nan, np.float16)}, "scales"),
    "qweight int8": ({}, {"qweight": np.zeros((4, 2048), np.int8)}, "qweight"),
    "zeros over 16": ({}, {"zeros": np.full((4, 128), 99, np.uint8)}, "zeros"),
    "perm repeated": ({}, {"perm": np.zeros(100, np.int32)}, "perm"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files(stored: Path, case: str) -> None:
    metadata, arrays, text = WRONG_FILES[case]
    rewrite(stored, metadata, **arrays)
    with pytest.raises(WeightFileError) as caught:
        load_weights(stored)
    assert text in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(WeightFileError):
            load_weights(path)
    with pytest.raises(WeightFileError, match=r"no \.safetensors file"):
        open_checkpoint(tmp_path)


def test_an_earlier_version_goes_through_its_converters(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up earlier versions: 0 knew no 'zeros' but stored them minus one, -1 cannot be reached."""
    original = PackedWeight.load(stored)

    def from_0(old: StoredWeight) -> StoredWeight:
        arrays = dict(old.arrays)
        arrays["zeros"] = arrays.pop("offsets") + np.uint8(1)
        return StoredWeight(old.name, 1, old.shape, old.group_size, old.dtype, arrays)

    zeros = original.zeros
    assert zeros is not None
    zeros[zeros == 0] = 1
    arrays = ["qweight", "scales", "offsets", "perm"]
    rewrite(stored, {**_facts(arrays=arrays), "layout_version": "0"}, offsets=zeros - 1, zeros=None)
    monkeypatch.setitem(CONVERTERS, 0, from_0)
    assert supported_versions() == (0, LAYOUT_VERSION)
    same(PackedWeight.load(stored), original)
    rewrite(stored, {"layout_version": "2"})
    with pytest.raises(WeightFileError, match="allowed: layout version 0, 1"):
        load_weights(stored)


def test_a_converter_that_leads_nowhere(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, 0, lambda old: old)
    rewrite(stored, {"layout_version": "0"})
    with pytest.raises(WeightFileError, match="from 0 to 0"):
        load_weights(stored)


def test_the_reader_agrees_with_the_library() -> None:
    for path in FIXTURES.glob("*.safetensors"):
        checkpoint = open_checkpoint(path)
        with safe_open(path, framework="np") as file:
            assert set(file.keys()) == set(checkpoint.names)
            for name in checkpoint.names:
                if file.get_slice(name).get_dtype() != "BF16":  # which the library's NumPy side does not read
                    np.testing.assert_array_equal(checkpoint.read(name), file.get_tensor(name), strict=True)


def shards(folder: Path) -> Path:
    """The first GPTQ fixture, dealt out to two files and an index."""
    checkpoint = open_checkpoint(FIXTURES / "gptq_v1.safetensors")
    where = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(checkpoint.names)}
    for file in set(where.values()):
        save_file({name: checkpoint.read(name) for name in where if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def test_sharded_checkpoints(tmp_path: Path) -> None:
    index = shards(tmp_path)
    wanted = load_gptq(FIXTURES / "gptq_v1.safetensors", "act")
    for path in (index, tmp_path, str(tmp_path), open_checkpoint(index)):
        same(load_gptq(path, "act"), wanted)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "folder of the index"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "folder of the index"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "readable"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "no such tensor"),
    ],
)
def test_wrong_indices(tmp_path: Path, content: str, text: str) -> None:
    index = shards(tmp_path)
    index.write_text(content)
    with pytest.raises(WeightFileError, match=text):
        open_checkpoint(index)


def test_a_folder_with_two_checkpoints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        weight().save(tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightFileError, match="one checkpoint"):
        open_checkpoint(tmp_path)
