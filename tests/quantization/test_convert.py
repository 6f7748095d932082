"""cudatma convert: every format to packed layers, what is refused, and going on after an interruption."""

from __future__ import annotations

import json
import os
import re
import resource
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
from model_folders import (
    BLOCKS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MOE,
    linear_shapes,
    write_auto_round,
    write_awq,
    write_compressed,
    write_float,
    write_gptq,
    write_marlin,
    write_moe,
)
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cudatma import cli
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError, WeightFileError
from cudatma.quantization import PackedExperts, PackedWeight, open_checkpoint, quantize_experts
from cudatma.quantization.conversion import convert_checkpoint, folder, shards
from cudatma.quantization.safetensors_file import open_safetensors

ROOT = Path(__file__).resolve().parents[2]
WRITERS: dict[str, Any] = {
    "gptq v1": lambda path: write_gptq(path, order=False),
    "gptq v1, act-order": lambda path: write_gptq(path, order=True, sym=True),
    "gptq v2, act-order": lambda path: write_gptq(path, form="v2", order=True, shards=3),
    "gptq of GPTQModel": lambda path: write_gptq(path, form="v1_borrow", group=64),
    "gptq, column": lambda path: write_gptq(path, group=-1, sym=True, dtype="bfloat16"),
    "gptq, groups of 96": lambda path: write_gptq(path, group=96, order=True),
    "awq": write_awq,
    "auto-round, gptq": lambda path: write_auto_round(path, packing="auto_round:auto_gptq", sym=True),
    "auto-round, plain zeros": lambda path: write_auto_round(path, packing="auto_round", sym=False),
    "auto-round, awq": lambda path: write_auto_round(path, packing="auto_round:auto_awq", sym=False),
    "marlin": write_marlin,
    "marlin, column": lambda path: write_marlin(path, group=-1),
    "compressed": write_compressed,
    "compressed, zeros in bytes": lambda path: write_compressed(path, sym=False, unpacked=True),
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
        scale = checkpoint.read_if_present(f"{layer}.tensor_scale")
        found[layer] = PackedWeight(
            **parts, shape=linear_shapes()[layer], group_size=facts["group_size"], dtype=facts["dtype"],
            format=facts.get("format", "int4"), tensor_scale=1.0 if scale is None else float(scale),
        )  # fmt: skip
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
    more = {"model.layers.0.flags": np.ones(3, np.bool_), "model.layers.0.odd": np.ones(5, np.float16)}
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
            size = np.dtype({"BF16": "i2", "F16": "i2", "I32": "i4", "U8": "i1", "BOOL": "i1"}[entry.dtype]).itemsize
            assert entry.begin % size == 0, name
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == done.out_bytes
    for name, array in more.items():
        np.testing.assert_array_equal(open_checkpoint(tmp_path / "out").read(name), array, strict=True)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 128},
        {"group_size": 32, "symmetric": False},
        {"group_size": -1},
        {"format": "mxfp4"},
        {"format": "nvfp4"},
        {"format": "fp8"},
        {"format": "int8", "group_size": 64},
    ],
)
def test_a_float_model_is_quantized(tmp_path: Path, options: dict[str, Any]) -> None:
    weights = write_float(tmp_path / "in", "bfloat16", shards=2)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True, exclude=["*.1.mlp.*"], **options)
    form, symmetric = options.get("format", "int4"), options.get("symmetric", True)
    group = options.get("group_size", {"mxfp4": 32, "nvfp4": 16}.get(form, 128))
    packed = packed_layers(tmp_path / "out")
    assert {name for name in linear_shapes() if ".1.mlp." not in name} == set(packed)
    assert done.skipped["model.layers.1.mlp.up_proj"] == "excluded by *.1.mlp.*"
    assert "blocks" in done.skipped["lm_head"]
    for layer in done.layers:
        weight = weights[f"{layer.name}.weight"].T.astype(np.float64)
        off = np.abs(packed[layer.name].dequantize() - weight)
        assert layer.max_error == pytest.approx(off.max() / np.abs(weight).max(), rel=1e-5)
        assert layer.mean_error == pytest.approx(off.sum() / np.abs(weight).sum(), rel=1e-5)
        assert 0.002 < layer.mean_error < (0.03 if form in ("fp8", "int8") else 0.2)
        assert (layer.group_size, layer.symmetric, layer.format) == (group, symmetric, form)
        assert packed[layer.name].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "fp4"}, r"^format must be .*'int8', got 'fp4'"),
        ({"format": "nvfp4", "group_size": 32}, r"^group_size must be 16 for format 'nvfp4', got 32"),
        ({"format": "fp8", "symmetric": False}, r"^symmetric must be True for format 'fp8', got False"),
    ],
)
def test_options_that_a_format_lacks_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    write_float(tmp_path / "in")
    with pytest.raises((ArgumentTypeError, QuantizationError), match=match):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True, **options)
    assert not (tmp_path / "out").exists()


def packed_experts(out: Path, name: str) -> PackedExperts:
    """The weights of experts in a converted folder."""
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    facts, checkpoint = {**section, **section["layers"][name]}, open_checkpoint(out)
    parts = {part: checkpoint.read_if_present(f"{name}.{part}") for part in ("qweight", "scales", "zeros", "perm")}
    k, n = (HIDDEN, 2 * INTERMEDIATE) if name.endswith("gate_up_proj") else (INTERMEDIATE, HIDDEN)
    shape = k, EXPERTS * n
    weight = PackedWeight(**parts, shape=shape, group_size=facts["group_size"], dtype=facts["dtype"])
    return PackedExperts(weight, EXPERTS, n, gated=name.endswith("gate_up_proj"))


@pytest.mark.parametrize("model", MOE)
@pytest.mark.parametrize(("form", "sym"), [("gptq", False), ("gptq", True), ("awq", False), ("compressed", True)])
def test_experts_of_a_quantized_model_become_two_weights(tmp_path: Path, model: str, form: str, sym: bool) -> None:
    weights = write_moe(tmp_path / "in", model, form, sym=sym)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=60_000)
    assert {layer.name for layer in done.layers} == set(weights)
    experts = {layer.name: layer for layer in done.layers if ".experts." in layer.name}
    assert len(experts) == 2 * BLOCKS
    for name, layer in experts.items():
        assert layer.shape == weights[name].shape
        assert (layer.max_error, layer.symmetric) == (0.0, sym)
        np.testing.assert_array_equal(packed_experts(tmp_path / "out", name).dequantize(), weights[name])
    router = f"model.layers.0.{MOE[model][0]}.gate"
    assert done.skipped[router] == "not quantized in the checkpoint"
    assert not done.notes


def test_one_expert_with_zero_points(tmp_path: Path) -> None:
    """A GPTQ layer is symmetric if all its zero points are 8, even if its neighbors are not."""
    weights = write_moe(tmp_path / "in", form="gptq")
    name = "model.layers.0.mlp.experts"
    scales, q = np.ones((4, INTERMEDIATE), np.float16), np.full((HIDDEN // 8, INTERMEDIATE), 0x99999999, np.uint32)
    zeros = np.full((4, INTERMEDIATE // 8), 0x77777777, np.int32)
    changed = {"scales": scales, "qzeros": zeros, "qweight": q.view(np.int32)}
    change_tensors(tmp_path / "in", lambda t: t.update({f"{name}.2.up_proj.{part}": a for part, a in changed.items()}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    expected = weights[f"{name}.gate_up_proj"]
    expected[2, :, INTERMEDIATE:] = 1
    packed = packed_experts(tmp_path / "out", f"{name}.gate_up_proj")
    np.testing.assert_array_equal(packed.dequantize(), expected)


@pytest.mark.parametrize("model", MOE)
@pytest.mark.parametrize("form", ["float", "stacked", "transposed"])
def test_experts_of_a_float_model_are_quantized(tmp_path: Path, model: str, form: str) -> None:
    weights = write_moe(tmp_path / "in", model, "float" if form == "float" else "stacked")
    if form == "transposed":
        change_tensors(
            tmp_path / "in",
            lambda t: t.update({n: t[n].transpose(0, 2, 1).copy() for n in t if ".experts." in n}),
        )
        change_json(tmp_path / "in", lambda config: config.pop("architectures"))  # no class with this orientation
    pattern = "*.1.*.experts.3.*" if form == "float" else "*.1.*.down_proj"
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True, group_size=64, exclude=[pattern])
    excluded = {f"model.layers.1.{MOE[model][0]}.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert {layer.name for layer in done.layers} == set(weights) - excluded
    assert {done.skipped[name] for name in excluded} == {f"excluded by {pattern}"}
    assert done.skipped[f"model.layers.0.{MOE[model][0]}.gate"] == "an expert or a router"
    for layer in done.layers:
        if ".experts." in layer.name:
            packed = packed_experts(tmp_path / "out", layer.name)
            single = quantize_experts(weights[layer.name], group_size=64, gated=packed.gated)
            np.testing.assert_array_equal(packed.weight.qweight, single.weight.qweight)
            off = np.abs(packed.dequantize() - weights[layer.name])
            assert layer.max_error == pytest.approx(off.max() / np.abs(weights[layer.name]).max(), rel=1e-5)
            assert layer.mean_error == pytest.approx(off.sum() / np.abs(weights[layer.name]).sum(), rel=1e-5)
    kept = [name for name in open_checkpoint(tmp_path / "out").names if ".layers.1." in name and ".experts." in name]
    assert len(kept) == (3 * EXPERTS if form == "float" else 2)


EXPERT = "model.layers.0.mlp.experts.2.up_proj"
#: What is wrong with the quantized experts of a model.
EXPERTS_REFUSED: dict[str, tuple[Any, str]] = {
    "an expert of another form": (
        lambda t: t.update({f"{EXPERT[:-8]}.fc1.{p}": t[f"{EXPERT}.{p}"]
                            for p in ("qweight", "qzeros", "scales", "g_idx")}),
        "fc1 must be an expert with the matrices gate_proj, up_proj and down_proj or w1",
    ),
    "no up": (
        lambda t: [t.pop(f"{EXPERT}.{p}") for p in ("qweight", "qzeros", "scales", "g_idx")],
        r"experts\.2 must be an expert with gate_proj, up_proj and down_proj, found no up_proj",
    ),
    "no expert": (
        lambda t: [t.pop(name) for name in list(t) if ".0.mlp.experts.2." in name],
        r"experts\.2 must be .*found no gate_proj and no up_proj",
    ),
    "activation order": (
        lambda t: t.update({f"{EXPERT}.g_idx": t[f"{EXPERT}.g_idx"][::-1].copy()}),
        f"{EXPERT} must be .*an expert without activation order, got activation order.*desc_act=False",
    ),
    "a bias": (
        lambda t: t.update({f"{EXPERT}.bias": np.ones(INTERMEDIATE, np.float16)}),
        r"up_proj\.bias must be absent or all zeros, got nonzero values",
    ),
    "another size": (
        lambda t: t.update({f"{EXPERT}.{p}": t[f"{EXPERT}.{p}"][:, :n].copy()
                            for p, n in (("qweight", 32), ("qzeros", 4), ("scales", 32))}),
        rf"{EXPERT}: K x N must be \(128, 64\) \(as in model\.layers\.0\.mlp\.experts\.0\.gate_proj.*got \(128, 32\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPERTS_REFUSED)
def test_quantized_experts_that_cannot_be_packed_are_refused(tmp_path: Path, what: str) -> None:
    change, says = EXPERTS_REFUSED[what]
    write_moe(tmp_path / "in", form="gptq")
    change_json(tmp_path / "in", lambda config: config["quantization_config"].update(desc_act=True))
    change_tensors(tmp_path / "in", change)
    with pytest.raises((QuantizationError, WeightFileError), match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_biases_of_experts_that_are_zeros_are_left_out(tmp_path: Path) -> None:
    write_moe(tmp_path / "in", form="gptq")
    change_tensors(tmp_path / "in", lambda t: t.update({f"{EXPERT}.bias": np.zeros(INTERMEDIATE, np.float16)}))
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert (done.left_out, done.notes) == ({f"{EXPERT}.bias": "zeros"}, ())


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


@pytest.mark.slow
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


@pytest.mark.parametrize("limit", [5000, 60_000])
def test_a_file_that_becomes_too_large_leaves_nothing(tmp_path: Path, limit: int) -> None:
    write_awq(tmp_path / "in")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(WeightFileError, match=r"model\.safetensors must be a writable file, got .*File too large"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800", "loop", "loop/x"])
def test_paths_that_no_folder_can_have(tmp_path: Path, name: str) -> None:
    write_float(tmp_path / "in")
    (tmp_path / "loop").symlink_to("loop")
    for paths in ((tmp_path / name, tmp_path / "out"), (tmp_path / "in", tmp_path / name)):
        with pytest.raises(WeightFileError, match=r"^path must be the path of a file or folder"):
            convert_checkpoint(*paths, quantize=True)


def test_a_file_with_the_longest_name_is_copied(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    (tmp_path / "in" / ("a" * 255)).write_text("text")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / ("a" * 255)).read_text() == "text"


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")

    def again(what: str, done: int, total: int) -> None:
        with pytest.raises(WeightFileError, match="no other conversion"):
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
        with pytest.raises(ArgumentError, match="out must be"):
            convert_checkpoint(tmp_path / "in", out)
    with pytest.raises(WeightFileError, match="files that no conversion wrote"):
        convert_checkpoint(tmp_path / "in", tmp_path / "in2")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WeightFileError, match="files that no conversion wrote"):
        convert_checkpoint(tmp_path / "in", tmp_path / "file")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    before = digests(tmp_path / "out")
    with pytest.raises(WeightFileError, match="another source"):  # same shapes, other weights
        convert_checkpoint(tmp_path / "in2", tmp_path / "out")
    with pytest.raises(WeightFileError, match="different options"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    (tmp_path / "out" / "cudatma_conversion.json").write_text("{}")
    with pytest.raises(WeightFileError, match="another format"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert before.keys() == digests(tmp_path / "out").keys()


def test_the_disk_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_awq(tmp_path / "in")
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(WeightFileError, match=r"GB free, got a disk with 0\.00 GB"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_config(path: Path, **values: Any) -> None:
    change_json(path, lambda config: config["quantization_config"].update(values))


def change_json(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
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
    "8 bits": (lambda path: change_config(path, bits=8), QuantizationError, "specifies 8 bits"),
    "bits of another type": (lambda path: change_config(path, bits="4"), WeightFileError, "bits"),
    "another method": (lambda path: change_config(path, quant_method="aqlm"), WeightFileError, "aqlm"),
    "no g_idx": (
        lambda path: change_tensors(path, lambda tensors: tensors.pop(f"{LAYER}.g_idx")),
        WeightFileError,
        f"{LAYER}.g_idx must be a tensor of the layer, found no such tensor",
    ),
    "no scales": (
        lambda path: change_tensors(path, lambda tensors: tensors.pop(f"{LAYER}.scales")),
        WeightFileError,
        f"{LAYER} must be .*found no scales",
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
        r"experts\.0 must .*found no qzeros",
    ),
    "a truncated file": (
        lambda path: os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1),
        WeightFileError,
        "which ends at byte",
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
    "a scale that is not finite": (
        lambda path: change_tensors(path, lambda tensors: tensors[f"{LAYER}.scales"].__setitem__((1, 2), np.nan)),
        QuantizationError,
        rf"{LAYER}\.scales\[1, 2\] must be .*got nan",
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


def section(**values: Any) -> Any:
    """A change of quantization_config."""
    return lambda path: change_config(path, **values)


def weights(**values: Any) -> Any:
    """A change of compressed-tensors' only group: of its weights, or of the whole group."""

    def change(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        for name, value in values.items():
            (group["weights"] if name in group["weights"] else group)[name] = value

    return lambda path: change_json(path, change)


def tensor(name: str, array: Any) -> Any:
    """One tensor more."""
    return lambda path: change_tensors(path, lambda tensors: tensors.update({name: array}))


def beside(name: str, **content: Any) -> Any:
    """Another JSON file."""
    return lambda path: (path / name).write_text(json.dumps(content))


def gptq(path: Path) -> Any:
    return write_gptq(path, sym=True)


def gptq_plain(path: Path) -> Any:
    """Symmetric, its zero points stored as 8."""
    return write_gptq(path, sym=True, form="v2")


def compressed_zeros(path: Path) -> Any:
    return write_compressed(path, sym=False)


def auto_round(path: Path) -> Any:
    return write_auto_round(path, packing="auto_round:auto_gptq", sym=True)


def awq_without(*names: str) -> Any:
    """A writer of a folder whose configuration lists modules that are not quantized."""
    return lambda path: (write_awq(path), change_config(path, modules_to_not_convert=[*names]))[0]


AWQ_KEYS = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
EIGHTS, SCALE = np.zeros((4, 48), np.int32), np.ones((4, 4), np.float16)
R4 = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
#: Writer of a folder, what is changed in it, and the words of the error: both statements, or the name of the key.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    # configuration against tensors
    "zero points of another format": (
        gptq,
        section(checkpoint_format="gptq_v2"),
        "must be 8 everywhere.*got 7 everywhere",
    ),
    "zero points of symmetric gptq": (
        write_gptq,
        section(sym=True),
        "qzeros must be 7 everywhere, got .* symmetric",
    ),
    "zero points of symmetric awq": (
        write_awq,
        section(zero_point=False),
        "qzeros must be .* everywhere, got .* symmetric",
    ),
    "zero points of symmetric groups": (
        compressed_zeros,
        weights(symmetric=True),
        "weight_zero_point must be .*symmetric",
    ),
    "no zero points": (
        write_compressed,
        weights(symmetric=False),
        "zero_point must be a tensor of the layer.*specifies asymmetric",
    ),
    "another group size": (
        gptq,
        section(group_size=64),
        "must be divided into 3 groups, got 6 groups for K = 192; .*group_size 64",
    ),
    "no groups": (write_compressed, weights(strategy="channel", group_size=None), "got 3 groups.*group_size -1"),
    "groups of 48": (
        lambda path: write_gptq(path, group=48),
        section(),
        "group_size must be .*multiple of 32.*got 48",
    ),
    "rows in another order": (
        lambda path: write_gptq(path, order=True),
        section(desc_act=False),
        "g_idx must be in ascending order.*got group indices in",
    ),
    "order of groups": (
        write_compressed,
        weights(actorder="group"),
        "weight_g_idx must be a tensor of the layer.*activation order",
    ),
    "awq in order": (
        write_awq,
        section(desc_act=True),
        "got a tensor of AWQ.*desc_act",
    ),
    "8 bits in tensors": (gptq, tensor(f"{LAYER}.qzeros", EIGHTS), "instead of 8; .*specifies 4 bits"),
    "another format": (
        gptq,
        section(quant_method="awq", checkpoint_format=None),
        r"must be a tensor of AWQ \(the format in .*looks like GPTQ",
    ),
    "marlin by name": (
        gptq,
        section(checkpoint_format="marlin"),
        "got layers of GPTQ.*specifies the original Marlin",
    ),
    "two formats": (gptq, section(format="gptq_v2"), "got checkpoint_format gptq, format gptq_v2"),
    "two names of one key": (write_awq, section(w_bit=8), "bits must be .*got bits 4, w_bit 8"),
    "two files": (gptq, beside("quantize_config.json", bits=8), "got 8 in quantize_config.json, 4 in config.json"),
    "two files, lists": (
        awq_without("lm_head", "visual"),
        beside("quant_config.json", **AWQ_KEYS, modules_to_not_convert=["lm_head"]),
        "modules_to_not_convert must be",
    ),
    "two files, dynamic": (
        lambda path: (write_gptq(path, sym=True), change_config(path, dynamic={"x": {"bits": 8}}))[0],
        beside("quantize_config.json", dynamic={"y": {"bits": 8}}, bits=4),
        r"dynamic must be .*got \{'y'.* in quantize_config.json, ",
    ),
    # single layers
    "dynamic, excluded": (
        gptq,
        section(dynamic={"-:.*up_proj": {}}),
        r"up_proj\.qweight must be a float weight, got a quantized weight",
    ),
    "dynamic, 8 bits": (
        gptq,
        section(dynamic={r"+:.*\.1\..*up_proj": {"bits": 8}}),
        r"bits must be .*got 8; .*layers\.1\.mlp",
    ),
    "dynamic, groups": (gptq, section(dynamic={".*up_proj": {"group_size": 64}}), "up_proj.*dynamic.*specifies"),
    "dynamic, format": (
        gptq,
        section(dynamic={".*up_proj": {"format": "fp8"}}),
        "format must be .*the other layers.*got fp8",
    ),
    "extra_config, 8 bits": (
        auto_round,
        section(extra_config={LAYER: {"bits": 8}}),
        r"extra_config\[.*bits must be .*got 8",
    ),
    "extra_config, float": (auto_round, section(extra_config={"up_pro": {"bits": 16}}), "up_proj.*not quantized"),
    "extra_config, a block": (
        auto_round,
        section(extra_config={"layers.1.mlp": {"bits": 16}}),
        r"layers\.1\.mlp\.down_proj.*not quantized",
    ),
    "not to convert": (
        write_awq,
        section(modules_to_not_convert=["up_proj"]),
        "a float weight, got .*modules_to_not_convert",
    ),
    "a text as list": (gptq, section(modules_in_block_to_quantize="mlp.up_proj"), "must be a list of names"),
    "a number as list": (gptq, section(modules_in_block_to_quantize=5), "must be a list of names"),
    "not in the block": (
        gptq,
        section(modules_in_block_to_quantize=[["mlp.up_proj"]]),
        "a float weight, got .*modules_in_block",
    ),
    "lm_head": (
        lambda path: (gptq(path), change_config(path, lm_head=False))[0],
        lambda path: change_tensors(
            path,
            lambda tensors: tensors.update(
                {f"lm_head.{part}": tensors[f"{LAYER}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
            ),
        ),
        r"lm_head\.qweight must be a float weight, got a quantized weight; .*: lm_head lists ",
    ),
    "ignored": (write_compressed, section(ignore=["re:.*up_proj"]), "a float weight, got .*ignore lists"),
    "no target": (
        write_compressed,
        weights(targets=["re:.*self_attn.*"]),
        "no target for model.layers.0.mlp.down_proj",
    ),
    "targets of another class": (write_compressed, weights(targets=["Embedding"]), "no target for model"),
    "all linear layers ignored": (write_compressed, section(ignore=["Linear"]), "a float weight, got .*ignore lists"),
    # keys that change the computation
    "rotation": (
        gptq,
        section(rotation="hadamard"),
        "rotation must be .*got hadamard, which changes the model's computation",
    ),
    "a rotated layer": (
        gptq,
        section(dynamic={"x": {"rotation_config": {"block_size": 32}}}),
        "rotation_config must be",
    ),
    "rotation beside": (
        gptq,
        lambda p: change_json(p, lambda c: c.update(rotation_config={"a": 1})),
        "rotation_config",
    ),
    "rotation of the text model": (
        gptq,
        lambda p: change_json(p, lambda c: c.update(text_config={"rotation_config": {"a": 1}})),
        r"text_config\.rotation_config must be",
    ),
    "rotation in one of two files": (
        lambda path: (gptq(path), change_config(path, rotation="", dynamic={}))[0],
        beside("quantize_config.json", rotation="hadamard", bits=4),
        "rotation must be .*got hadamard",
    ),
    "rotation by another name": (gptq, section(onlineHadamard=True), "onlineHadamard must be .*got True"),
    "activations by another name": (gptq, section(abits=8), "abits must be .*got 8"),
    "transform": (write_compressed, section(transform_config=R4), "transform_config must be"),
    "a key of transforms": (
        write_compressed,
        section(transform_config={"config_groups": {}, "rotation": "R1"}),
        "transform_config: rotation must be .*got R1",
    ),
    "activations": (write_compressed, weights(input_activations={"num_bits": 8}), "input_activations must be"),
    "activations of auto-round": (auto_round, section(act_bits=8), "act_bits must be .*got 8"),
    "activations of a float layer": (
        auto_round,
        section(extra_config={"lm_head": {"bits": 16, "act_bits": 8}}),
        "act_bits must be .*got 8",
    ),
    "no columns": (
        gptq,
        lambda path: change_tensors(
            path, lambda t: t.update({name: t[name][..., :0] for name in t if re.search("qweight|qzeros|scales", name)})
        ),
        "two-dimensional and nonempty",
    ),
    "KV cache": (write_compressed, section(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme must be"),
    "adapter": (gptq, section(adapter={"name": "lora"}), "adapter must be"),
    "sparsity": (write_compressed, section(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config must be"),
    "scaled activation": (write_awq, tensor("model.layers.0.mlp.act.scales", SCALE[0]), "got activation scales"),
    # other formats
    "zero points of eight bytes": (
        compressed_zeros,
        lambda path: change_tensors(
            path, lambda t: t.update({f"{LAYER}.weight_zero_point": t[f"{LAYER}.weight_zero_point"].astype(np.int64)})
        ),
        "weight_zero_point.* must be one of I32, U32, I8.*got I64",
    ),
    "gemv": (
        write_awq,
        section(version="GEMV"),
        "version must be .*got gemv.*quantize the model again with version gemm",
    ),
    "gemv by format": (write_awq, section(checkpoint_format="gemv_fast"), "checkpoint_format must be .*got gemv_fast"),
    "ipex": (write_awq, section(version="ipex"), "if qweight has the shape .*replace ipex"),
    "awq of marlin": (write_awq, section(format="marlin"), "from_marlin"),
    "auto-round without format": (
        auto_round,
        section(packing_format=None, sym=False),
        "packing_format must be .*got None",
    ),
    "floats of auto-round": (auto_round, section(data_type="mx_fp"), "data_type must be .*got mx_fp"),
    "ModelOpt": (
        gptq,
        beside("hf_quant_config.json", quantization={"quant_algo": "W4A8_AWQ"}),
        "quant_algo must be one of NVFP4, FP8, .*, got W4A8_AWQ.*--quantize",
    ),
    "MLX": (gptq, lambda path: change_json(path, lambda c: c.update(quantization={"bits": 4})), "MLX.*--quantize"),
    "an adapter beside": (
        gptq,
        beside("adapter_config.json", peft_type="LORA"),
        r"adapter_config\.json must be .*got an adapter",
    ),
    "a pickle": (gptq, lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"), "torch.*save_file"),
    "GGUF": (gptq, lambda p: (p / "model.safetensors").rename(p / "model.gguf"), "GGUF.*--quantize"),
    "no configuration": (
        write_awq,
        lambda p: change_json(p, lambda c: c.pop("quantization_config")),
        "and looks like AWQ",
    ),
    # tensors that are left over
    "integers": (gptq, tensor("model.layers.0.x", EIGHTS), "does not belong to a packed layer"),
    "packed experts": (
        write_compressed,
        tensor("model.layers.0.mlp.experts.down_proj_packed", np.zeros((2, 4, 4), np.int32)),
        "contains the weights of several experts",
    ),
    "scales": (gptq, tensor("model.layers.0.mlp.other.scales", SCALE), "does not belong to a packed layer"),
    "a scale": (gptq, tensor("model.layers.0.mlp.other.weight_scale", SCALE), "does not belong to a packed layer"),
    "scales of a KV cache": (
        gptq,
        tensor("model.layers.0.self_attn.k_scale", SCALE[0, :1]),
        "does not belong to a packed layer",
    ),
    "a bias": (gptq, tensor("model.layers.0.mlp.other.bias", SCALE[0]), "a module without a weight"),
    "a second weight": (gptq, tensor(f"{LAYER}.weight", SCALE), f"another tensor in the packed layer {LAYER}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_contradictions_and_what_would_be_lost_are_refused(tmp_path: Path, what: str) -> None:
    writer, change, says = REFUSED[what]
    writer(tmp_path / "in")
    change(tmp_path / "in")
    with pytest.raises((QuantizationError, WeightFileError, ArgumentError), match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


FUSED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}}
#: Writer of a folder, what is changed in it, and words of the report.
READ: dict[str, tuple[Any, Any, str]] = {
    "zero points stored as 8": (gptq_plain, section(checkpoint_format="gptq"), r"read as 8, not 9 \(14 of 14 layers\)"),
    "of a format that is not stated": (gptq_plain, section(checkpoint_format=None, sym=None), "read as 8"),
    "old auto-round": (auto_round, section(quant_method="intel/auto-round", packing_format=None), "iters"),
    "unknown and harmless keys": (gptq, section(fancy=1, damp_percent=0.1), "damp_percent.*unknown.*fancy"),
    "neutral keys": (gptq, section(rotation=None, adapter={}, act_bits=16, kv_cache_scheme=None), "^$"),
    "settings of other layers": (gptq, section(dynamic={"-:lm_head": {}, "+:.*expert": {"bits": 8}}), "^$"),
    "settings of one layer": (gptq, section(group_size=128, dynamic={"model": {"group_size": 32}}), "^$"),
    "lists in another order": (
        awq_without("lm_head", "visual"),
        beside("quant_config.json", **AWQ_KEYS, modules_to_not_convert=["visual", "lm_head"]),
        "^$",
    ),
    "objects in another order": (
        lambda path: (gptq(path), section(dynamic={"x": {"bits": 8, "sym": True}, "y": {"bits": 8}})(path))[0],
        beside("quantize_config.json", bits=4, dynamic={"y": {"bits": 8}, "x": {"sym": True, "bits": 8}}),
        "^$",
    ),
    "a layer whose name begins others": (
        auto_round,
        section(extra_config={"model.layers.0.mlp.gate": {"bits": 16}, "layers.1.mlp.u": {"bits": 8}}),
        "iters",
    ),
    "an empty value in one of two files": (
        lambda path: (write_awq(path), change_config(path, modules_to_not_convert=[]))[0],
        beside("quant_config.json", **AWQ_KEYS, modules_to_not_convert=["lm_head"]),
        "^$",
    ),
    "sym of asymmetric awq": (write_awq, section(sym=True), "^$"),
    "parts of names": (write_awq, section(modules_to_not_convert=["gate", "visual", "lm_head"]), "^$"),
    "names as targets": (write_compressed, weights(targets=list(linear_shapes())), "^$"),
    "names of the class as targets": (
        write_compressed,
        weights(targets=[name.replace("model.", "model.language_model.") for name in linear_shapes()]),
        "^$",
    ),
    "names of another tower as targets": (
        write_compressed,
        lambda path: change_json(
            path,
            lambda c: c["quantization_config"]["config_groups"].update(
                tower={
                    "targets": [name.replace("model.", "vision_tower.encoder.") for name in linear_shapes()],
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
                }
            ),
        ),
        "^$",
    ),
    "transforms of weights": (write_compressed, section(transform_config=FUSED), "already include"),
    "tensors without layer": (
        gptq,
        lambda path: change_tensors(
            path,
            lambda tensors: tensors.update(
                {f"{LAYER}.bias": 0 * SCALE[0], "logit_scale": SCALE[0, :1], "logit_bias": SCALE[0, :1],
                 "visual.position_ids": EIGHTS, "visual.layer_scale": SCALE[0], "lm_head.bias": SCALE[0],
                 "h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8)}
            ),
        ),
        r"^$|not loaded by LlamaForCausalLM: h\.0\.attn\.bias, lm_head\.bias, logit_bias and 3 others$",
    ),
}  # fmt: skip
for name in ("quant_config.json", "quantize_config.json", "quantization_config.json"):
    READ[name] = (
        write_awq,
        lambda p, name=name: (beside(name, **AWQ_KEYS)(p), change_json(p, lambda c: c.pop("quantization_config"))),
        "^$",
    )


@pytest.mark.parametrize("what", READ)
def test_what_is_stated_elsewhere_or_harmless_is_read_and_reported(tmp_path: Path, what: str) -> None:
    writer, change, says = READ[what]
    expected = writer(tmp_path / "in")
    change(tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    expect_weights(tmp_path / "out", expected)
    assert re.search(says, "; ".join(done.notes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: dict.fromkeys(files, "../in/model-00001-of-00002.safetensors"), "in the index's folder"),
        (lambda files: dict.fromkeys(files, "/etc/passwd"), "in the index's folder"),
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


def test_a_layer_that_cannot_be_quantized_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_float(tmp_path / "in")
    change_tensors(tmp_path / "in", lambda tensors: tensors[f"{LAYER}.weight"].__setitem__((1, 2), np.nan))
    with pytest.raises(QuantizationError, match=rf"{LAYER}: weight\["):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True)
    assert not (tmp_path / "out").exists()


def test_every_tensor_of_the_shards_is_read_and_two_values_of_one_are_refused(tmp_path: Path) -> None:
    weights = write_gptq(tmp_path / "in", order=True, shards=2)
    index = tmp_path / "in" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = {name: file for name, file in content["weight_map"].items() if not name.endswith("g_idx")}
    index.write_text(json.dumps({**content, "weight_map": files}))
    first, second = sorted((tmp_path / "in").glob("model-*.safetensors"))
    name, more = next(iter(load_file(first).items())), load_file(second)
    save_file({**more, name[0]: name[1]}, second, metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    expect_weights(tmp_path / "out", weights)
    save_file({**more, name[0]: name[1] + 1}, second, metadata={"format": "pt"})
    with pytest.raises(
        WeightFileError, match=rf"^{name[0]} must be .*got different values in {first.name} and {second.name}"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "other")


def test_quantized_and_float_models_are_told_apart(tmp_path: Path) -> None:
    write_float(tmp_path / "float")
    write_awq(tmp_path / "awq")
    with pytest.raises(ArgumentError, match="--quantize"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out")
    with pytest.raises(ArgumentTypeError, match="exclude"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantize=True, exclude="*.mlp.*")
    with pytest.raises(
        ArgumentError, match=r"^exclude must be .*got model\.layer\.0\.\*; pass a pattern for names such as "
    ):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantize=True, exclude=["*.0.*", "model.layer.0.*"])
    with pytest.raises(ArgumentError, match=r"^exclude must be patterns that leave .*, got \*; .*--exclude"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantize=True, exclude=["*"])
    with pytest.raises(ArgumentError, match="exclude"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", exclude=["*.0.*"])
    with pytest.raises(ArgumentError, match="vision_tower"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", vision_tower=True)
    with pytest.raises(ArgumentError, match=r"quantized \(awq\)"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", quantize=True)
    change_json(tmp_path / "awq", lambda config: config.update(quantization_config={"bits": 4}))
    with pytest.raises(ArgumentError, match=r"quantized \(no quant_method\)"):
        convert_checkpoint(tmp_path / "awq", tmp_path / "out", quantize=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NoSuchModel"]}, r"transformers \S+ has no class NoSuchModel"),
        ({"hidden_act": "no such function"}, "LlamaForCausalLM cannot be built: .*no such function.*"),
        (
            {"auto_map": {"AutoModelForCausalLM": "model.Custom"}, "intermediate_size": 320},
            "the model uses custom code, and its layers differ from the layers of LlamaForCausalLM in transformers",
        ),
    ],
)
def test_a_class_that_cannot_be_compared_is_reported(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    pytest.importorskip("transformers")
    write_awq(tmp_path / "in")
    change_json(tmp_path / "in", lambda config: config.update(changes))
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert re.fullmatch(reason, done.not_compared)
    assert len(done.layers) == len(linear_shapes())


# ---- the command


def test_the_command_reports_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_float(tmp_path / "in")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"x")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "architectures": None}))
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
    assert "pytorch_model.bin (contains other weights)" in shown
    assert "layers not compared with the model class: config.json names no architecture" in shown
    errors = [error for row in re.findall(r"(0\.\d+) +(0\.\d+)$", shown, re.MULTILINE) for error in row]
    assert len(errors) == 14
    assert {len(error.lstrip("0.")) for error in errors} == {2}, "digits of an error"
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (len(report["layers"]), report["kept_shards"], report["shards"]) == (14, 1, 1)
    assert {layer["group_size"] for layer in report["layers"]} == {64}
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "fp8"), "--quantize", "--format", "fp8", "--json"]
    assert cli.main([*command, "--group-size", "-1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {(layer["format"], layer["group_size"]) for layer in report["layers"]} == {("fp8", -1)}
    assert cli.main(["convert", str(tmp_path / "in"), str(tmp_path / "o"), "--group-size", "64"]) == 2
    assert "--group-size must be combined with --quantize" in capsys.readouterr().err
