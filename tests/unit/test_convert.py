"""cudatma convert: every format to packed layers, what is refused, and going on after an interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folders import linear_shapes, write_awq, write_compressed, write_float, write_gptq
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cudatma import cli
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError, WeightFileError
from cudatma.quantization import PackedWeight, open_checkpoint
from cudatma.quantization.conversion import convert_checkpoint, folder, shards
from cudatma.quantization.safetensors_file import open_safetensors

ROOT = Path(__file__).resolve().parents[2]
WRITERS: dict[str, Any] = {
    "gptq v1": lambda path: write_gptq(path, order=False),
    "gptq v1, act-order": lambda path: write_gptq(path, order=True, sym=True),
    "gptq v2, act-order": lambda path: write_gptq(path, form="v2", order=True, shards=3),
    "gptq of GPTQModel": lambda path: write_gptq(path, form="v1_borrow", group=64),
    "gptq, column": lambda path: write_gptq(path, group=-1, sym=True, dtype="bfloat16"),
    "awq": write_awq,
    "compressed": write_compressed,
    "compressed, zeros, act-order": lambda path: write_compressed(path, sym=False, order=True, group=32, shards=2),
    "compressed, column": lambda path: write_compressed(path, group=-1, dtype="float16"),
}


def packed_layers(out: Path) -> dict[str, PackedWeight]:
    """The layers of a converted folder, by nothing but its config.json and its tensors."""
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    checkpoint = open_checkpoint(out)
    found = {}
    for layer, facts in section["layers"].items():
        facts = {**section, **facts}
        parts = {part: checkpoint.read_if_present(f"{layer}.{part}") for part in ("qweight", "scales", "zeros", "perm")}
        assert (parts["zeros"] is None, parts["perm"] is None) == (facts["symmetric"], not facts["act_order"])
        found[layer] = PackedWeight(
            **parts, shape=linear_shapes()[layer], group_size=facts["group_size"], dtype=facts["dtype"]
        )
    return found


def expect_weights(out: Path, weights: dict[str, NDArray[Any]]) -> None:
    packed = packed_layers(out)
    assert {f"{layer}.weight" for layer in packed} == set(weights)
    for layer, weight in packed.items():
        np.testing.assert_array_equal(weight.dequantize(dtype=np.float32), weights[f"{layer}.weight"].T)


@pytest.mark.parametrize("kind", WRITERS)
def test_integers_and_scales_are_those_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    weights = WRITERS[kind](tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=60_000)
    expect_weights(tmp_path / "out", weights)
    assert done.shards > 1
    assert len(done.layers) == len(linear_shapes())
    assert {layer.max_error for layer in done.layers} == {0.0}
    assert done.skipped.keys() == {"lm_head", "model.embed_tokens"}
    source, copied = open_checkpoint(tmp_path / "in"), open_checkpoint(tmp_path / "out")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(source.read(name), copied.read(name), strict=True)
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_the_library_of_safetensors_reads_every_file_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    write_compressed(tmp_path / "in", sym=False, order=True)
    # An odd number of bytes would misalign what follows it.
    more = {"model.layers.0.flags": np.ones(3, np.uint8), "model.layers.0.odd": np.ones(5, np.float16)}
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file({**tensors, **more}, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), path.name)
        for name, entry in open_safetensors(path).tensors.items():
            size = np.dtype({"BF16": "i2", "F16": "i2", "I32": "i4", "U8": "i1"}[entry.dtype]).itemsize
            assert entry.begin % size == 0, name
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == done.out_bytes
    for name, array in more.items():
        np.testing.assert_array_equal(open_checkpoint(tmp_path / "out").read(name), array, strict=True)


@pytest.mark.parametrize(("group", "symmetric"), [(128, True), (32, False), (-1, True)])
def test_a_float_model_is_quantized(tmp_path: Path, group: int, symmetric: bool) -> None:
    weights = write_float(tmp_path / "in", "bfloat16", shards=2)
    done = convert_checkpoint(
        tmp_path / "in", tmp_path / "out", quantize=True, group_size=group, symmetric=symmetric, exclude=["*.1.mlp.*"]
    )
    packed = packed_layers(tmp_path / "out")
    assert {name for name in linear_shapes() if ".1.mlp." not in name} == set(packed)
    assert done.skipped["model.layers.1.mlp.up_proj"] == "excluded by *.1.mlp.*"
    assert "blocks" in done.skipped["lm_head"]
    for layer in done.layers:
        weight = weights[f"{layer.name}.weight"].T.astype(np.float64)
        off = np.abs(packed[layer.name].dequantize() - weight)
        assert layer.max_error == pytest.approx(off.max() / np.abs(weight).max(), rel=1e-5)
        assert layer.mean_error == pytest.approx(off.sum() / np.abs(weight).sum(), rel=1e-5)
        assert 0.02 < layer.mean_error < 0.2
        assert (layer.group_size, layer.symmetric, packed[layer.name].dtype) == (group, symmetric, "bfloat16")


def test_scales_of_another_type_are_rounded_and_the_report_says_how_far(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    assert done.dtype == json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for layer in done.layers:
        assert 2**-11 < layer.max_error <= 2**-8
        assert 0 < layer.mean_error < layer.max_error


# ---- interruptions


def digests(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", order=True)
    convert_checkpoint(tmp_path / "in", tmp_path / "whole", shard_bytes=60_000)
    code = """
        import sys, time
        from cudatma.quantization.conversion import convert_checkpoint
        def slow(what, done, total):
            print(what, flush=True)
            time.sleep(0.05)
        convert_checkpoint(sys.argv[1], sys.argv[2], shard_bytes=60_000, progress=slow)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "in"), str(tmp_path / "out")]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list((tmp_path / "out").glob("model-00002*")):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "out" / "config.json").exists()
    first = (tmp_path / "out" / "model-00001-of-00004.safetensors").stat().st_mtime_ns
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=60_000)
    assert 1 <= done.kept_shards < done.shards
    assert (tmp_path / "out" / "model-00001-of-00004.safetensors").stat().st_mtime_ns == first
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_finished_file_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=60_000)
    before = digests(tmp_path / "out")
    for number, damage in ((1, lambda data: data[:-1]), (2, lambda data: data[:-1] + bytes([data[-1] ^ 1]))):
        path = next((tmp_path / "out").glob(f"model-0000{number}*"))
        path.write_bytes(damage(path.read_bytes()))
    next((tmp_path / "out").glob("model-00003*")).unlink()
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=60_000)
    assert done.kept_shards == done.shards - 3
    assert digests(tmp_path / "out") == before


def test_what_an_error_interrupts_leaves_nothing_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_awq(tmp_path / "in")

    def full(self: Any, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "replace", full)
    with pytest.raises(WeightFileError, match="No space left"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    monkeypatch.undo()
    assert not list((tmp_path / "out").iterdir())
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out").kept_shards == 0


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")

    def again(what: str, done: int, total: int) -> None:
        with pytest.raises(WeightFileError, match="another conversion"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out")

    convert_checkpoint(tmp_path / "in", tmp_path / "out", progress=again)


# ---- what is refused


def test_folders_that_would_be_overwritten_are_refused(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    write_awq(tmp_path / "in2", seed=5)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "in")
    for out in (
        tmp_path / "in",
        tmp_path / "in" / "deeper",
        tmp_path,
        link,
        link / "x",
        tmp_path / "in2" / ".." / "in",
    ):
        with pytest.raises(ArgumentError, match="out: got"):
            convert_checkpoint(tmp_path / "in", out)
    with pytest.raises(WeightFileError, match="not empty"):
        convert_checkpoint(tmp_path / "in", tmp_path / "in2")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WeightFileError, match="not empty"):
        convert_checkpoint(tmp_path / "in", tmp_path / "file")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    before = digests(tmp_path / "out")
    with pytest.raises(WeightFileError, match="other source"):  # same shapes, other weights
        convert_checkpoint(tmp_path / "in2", tmp_path / "out")
    with pytest.raises(WeightFileError, match="other options"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    (tmp_path / "out" / "cudatma_conversion.json").write_text("{}")
    with pytest.raises(WeightFileError, match="another format"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert before.keys() == digests(tmp_path / "out").keys()


def test_the_disk_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_awq(tmp_path / "in")
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(WeightFileError, match=r"0\.00 GB free"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].update(values)
    (path / "config.json").write_text(json.dumps(config))


def change_tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def patched(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of the header, of the same number."""
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


LAYER = "model.layers.0.mlp.up_proj"
HOSTILE: dict[str, tuple[Any, type[Exception], str]] = {
    "8 bits": (lambda path: change_config(path, bits=8), QuantizationError, "bits: got 8"),
    "bits of another type": (lambda path: change_config(path, bits="4"), WeightFileError, "bits"),
    "another method": (lambda path: change_config(path, quant_method="aqlm"), WeightFileError, "aqlm"),
    "no g_idx": (
        lambda path: change_tensors(path, lambda tensors: tensors.pop(f"{LAYER}.g_idx")),
        WeightFileError,
        f"{LAYER}: got no g_idx",
    ),
    "no scales": (
        lambda path: change_tensors(path, lambda tensors: tensors.pop(f"{LAYER}.scales")),
        WeightFileError,
        f"{LAYER}: got no scales",
    ),
    "scales of one dimension": (
        lambda path: change_tensors(path, lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"].ravel()})),
        QuantizationError,
        rf"{LAYER}\.scales",
    ),
    "an expert": (
        lambda path: change_tensors(
            path,
            lambda t: t.update({f"model.layers.0.mlp.experts.0.{p}": t[f"{LAYER}.{p}"] for p in ("qweight", "scales")}),
        ),
        WeightFileError,
        "expert",
    ),
    "a truncated file": (
        lambda path: os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1),
        WeightFileError,
        "truncated",
    ),
    "a header beyond the file": (
        lambda path: (path / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        WeightFileError,
        "header",
    ),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), WeightFileError, "JSON"),
    "a JSON list": (lambda path: (path / "config.json").write_text("[]"), WeightFileError, "object"),
    "no config": (lambda path: (path / "config.json").unlink(), WeightFileError, "config.json"),
    "a name twice": (
        lambda path: patched(
            path / "model.safetensors",
            b"model.layers.0.self_attn.k_proj.g_idx",
            b"model.layers.0.self_attn.v_proj.g_idx",
        ),
        WeightFileError,
        "occurs twice",
    ),
    "a shape that contradicts the bytes": (
        lambda path: patched(path / "model.safetensors", b'"shape":[96,128]', b'"shape":[96,999]'),
        WeightFileError,
        "bytes for",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_checkpoints_that_contradict_themselves_are_refused_before_anything_is_written(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gptq(tmp_path / "in", order=True)
    change, error, says = HOSTILE[what]
    change(tmp_path / "in")
    with pytest.raises(error, match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert cli.main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: dict.fromkeys(files, "../in/model-00001-of-00002.safetensors"), "in the folder of the index"),
        (lambda files: dict.fromkeys(files, "/etc/passwd"), "in the folder of the index"),
        (lambda files: dict.fromkeys(files, "model-00009-of-00002.safetensors"), "model-00009"),
        (lambda files: {**files, "more.weight": "model-00001-of-00002.safetensors"}, r"more\.weight"),
        (lambda files: {**files, "lm_head.weight": 7}, "weight_map"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    write_gptq(tmp_path / "in", shards=2)
    path = tmp_path / "in" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "weight_map": change(index["weight_map"])}))
    with pytest.raises(WeightFileError, match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_cannot_be_packed_is_named_and_ends_the_conversion(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", order=True)

    def spoil(tensors: dict[str, NDArray[Any]]) -> None:
        tensors[f"{LAYER}.scales"][1, 2] = np.nan

    change_tensors(tmp_path / "in", spoil)
    with pytest.raises(QuantizationError, match=rf"{LAYER}: scales\[1, 2\]"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_quantized_and_float_models_are_told_apart(tmp_path: Path) -> None:
    write_float(tmp_path / "float")
    write_awq(tmp_path / "awq")
    with pytest.raises(ArgumentError, match="--quantize"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out")
    with pytest.raises(ArgumentTypeError, match="exclude"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantize=True, exclude="*.mlp.*")
    with pytest.raises(ArgumentError, match=r"^exclude: got model\.layer\.0\.\*; .* its first layers are "):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantize=True, exclude=["*.0.*", "model.layer.0.*"])
    with pytest.raises(ArgumentError, match="exclude"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", exclude=["*.0.*"])
    with pytest.raises(ArgumentError, match=r"quantized \(awq\)"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", quantize=True)


# ---- the command


def test_the_command_reports_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_float(tmp_path / "in")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"x")
    command = [
        "convert",
        str(tmp_path / "in"),
        str(tmp_path / "out"),
        "--quantize",
        "--group-size",
        "64",
        "--asymmetric",
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "14 layers of" in shown
    assert "not packed, outside the model's numbered blocks" in shown
    assert "pytorch_model.bin (other weights)" in shown
    errors = [error for row in re.findall(r"(0\.\d+) +(0\.\d+)$", shown, re.MULTILINE) for error in row]
    assert len(errors) == 14
    assert {len(error.lstrip("0.")) for error in errors} == {2}, "digits of an error"
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (len(report["layers"]), report["kept_shards"], report["shards"]) == (14, 1, 1)
    assert {layer["group_size"] for layer in report["layers"]} == {64}
    assert cli.main(["convert", str(tmp_path / "in"), str(tmp_path / "o"), "--group-size", "64"]) == 2
    assert "without --quantize" in capsys.readouterr().err


def test_no_more_than_a_layer_is_in_memory(tmp_path: Path) -> None:
    """Eight layers of 8 MB in float32 as fp16: the peak grows by a few times one of them, not by all."""
    layers = {f"model.layers.{i}.mlp.up_proj.weight": np.full((2048, 1024), 0.5, np.float16) for i in range(24)}
    (tmp_path / "in").mkdir()
    save_file(layers, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float16"}))
    code = """
        import resource, sys
        from cudatma.quantization.conversion import convert_checkpoint
        peaks = []
        def note(what, done, total):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        convert_checkpoint(sys.argv[1], sys.argv[2], quantize=True, progress=note)
        print(peaks[-1] - peaks[0])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "in"), str(tmp_path / "out")]
    grown = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < 40e6  # 24 layers are 100 MB
