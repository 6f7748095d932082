"""Packed layers, attention and experts for Hugging Face's transformers. Call register() to enable them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from cudatma.errors import ArgumentError, WeightFileError
from cudatma.integrations.torch import warm_up
from cudatma.integrations.transformers.attention import attention_calls, attention_forward, attention_mask
from cudatma.integrations.transformers.config import CudatmaConfig
from cudatma.integrations.transformers.experts import expert_calls, experts_forward
from cudatma.integrations.transformers.quantizer import CudatmaHfQuantizer, check_ranks
from cudatma.kernels.warm_up import LARGEST_M, check_max_m
from cudatma.kernels.warm_up import warm_up as warm_up_calls
from cudatma.quantization.checkpoint import MAIN_FILES, open_checkpoint, read_json
from cudatma.quantization.conversion.folder import METHOD
from cudatma.quantization.conversion.source import ADAPTER
from cudatma.quantization.safetensors_file import check_suffix
from cudatma.quantization.statement import METHODS, read_config, read_section

__all__ = ["CudatmaConfig", "load", "register"]


#: Options of from_pretrained() that also determine where transformers looks for a configuration.
_LOCATION = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")


def register() -> None:
    """Register the quantization method, attention and experts "cudatma" with transformers, and MarlinLinear with peft.

    Repeated calls have no effect.
    """
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(CudatmaConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(CudatmaHfQuantizer)
    AttentionInterface.register(METHOD, attention_forward)
    AttentionMaskInterface.register(METHOD, attention_mask)
    ExpertsInterface.register(METHOD, experts_forward)
    with contextlib.suppress(ImportError):  # peft is not installed.
        from cudatma.integrations import peft

        peft.register()


def load(model: str | os.PathLike[str], *, auto_class: Any = None, max_m: int | None = None, **options: Any) -> Any:
    """Load a model that another tool quantized, and pack its layers during loading.

    load() reads the same formats as `cudatma convert`: GPTQ, AWQ, AutoRound, Marlin, compressed-tensors, fp8,
    ModelOpt's NVFP4 and gpt-oss's MXFP4. The tool that quantized the model need not be installed. For a model that
    `cudatma convert` wrote, this function is equivalent to from_pretrained().

    Parameters
    ----------
    model : path or str
        A folder, or a name on the Hugging Face Hub.
    auto_class : class, optional
        A class with from_pretrained(). Default: AutoModelForCausalLM.
    max_m : int, optional
        Maximum number of tokens in a batch. If ``max_m`` is given, load() compiles and loads all kernels that the
        packed layers and the attention "cudatma" need on a GPU for these batches. Default: kernels are compiled at
        their first use.
    **options
        Arguments of from_pretrained().

    Returns
    -------
    transformers.PreTrainedModel
        The model.

    Raises
    ------
    WeightFileError, QuantizationError
        If a layer cannot be packed, or if the model class cannot load it.
    ArgumentError
        If the quantization method is not supported, if the folder does not exist, if tensor parallelism is requested,
        or if ``max_m`` is out of range.
    """
    if max_m is not None:
        check_max_m(max_m)
    _check_folder(model, options)
    check_ranks(options)
    register()
    loader = auto_class or transformers.AutoModelForCausalLM
    location = {name: options[name] for name in _LOCATION if name in options}
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(model, **location)
    section = _section(Path(model, options.get("subfolder", "")), config)
    method = str(section.get("quant_method")).lower()
    if method not in (METHOD, *METHODS):
        remedy = "load a float model with from_pretrained(..., quantization_config=CudatmaConfig())"
        if method == "none":
            remedy += ", or specify the quant_method of a quantized model in config.json"
        raise ArgumentError("quant_method", method, f"{METHOD}, {', '.join(METHODS)}", remedy)
    if method != METHOD:
        config.quantization_config = CudatmaConfig(source=section).to_dict()
    loaded = loader.from_pretrained(model, config=config, **options)
    if max_m is not None:
        warm_up(loaded, max_m)
        for moe, arrays, settings in expert_calls(loaded):
            warm_up_calls(moe, arrays, max_m=max_m, **settings)
        for function, operands, settings in attention_calls(loaded):
            if operands[0].is_cuda:
                warm_up_calls(
                    function, operands, max_m=LARGEST_M, **settings
                )  # A cache may hold more tokens than a batch.
    return loaded


def _check_folder(model: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a path that does not exist, and WeightFileError for files that transformers cannot load.

    A name on the Hub has the form "name" or "owner/name".
    """
    text = os.fspath(model)
    is_path = not isinstance(model, str) or text.count("/") > 1 or text[:1] in ("/", ".", "~") or "\\" in text
    if is_path and not os.path.exists(text):
        raise ArgumentError("model", text, "an existing folder or a name on the Hugging Face Hub")
    path = Path(model, options.get("subfolder", ""))
    check_suffix(path)
    if not path.is_dir():
        return
    if (path / ADAPTER).is_file() and find_spec("peft") is None:
        raise WeightFileError("package peft", ..., f"installed to load {path / ADAPTER}", "run `pip install peft`")
    config = read_config(path) if "config" not in options else {}
    read_section(path)
    if "transformers_weights" in config or options.get("variant") or options.get("use_safetensors") is False:
        return  # transformers loads other files.
    file = open_checkpoint(path).path
    if file.name not in MAIN_FILES:
        remedy = "convert the model with `cudatma convert`"
        raise WeightFileError(str(path), file.name, f"a folder that contains {' or '.join(MAIN_FILES)}", remedy)
    if file.suffix == ".json" and not isinstance(read_json(file).get("metadata"), dict):
        remedy = "transformers requires metadata; add an empty object, or convert the model with `cudatma convert`"
        raise WeightFileError(f"{file}: metadata", "no value", "an object", remedy)


def _section(folder: Path, config: Any) -> dict[str, Any]:
    """Return the quantization configuration from a folder's files, or from the config.json of a model on the Hub."""
    section, _ = read_section(folder) if folder.is_dir() else ({}, "")
    holders = (config, config.get_text_config(decoder=True))
    stated: Any = next(filter(None, (getattr(holder, "quantization_config", None) for holder in holders)), {})
    return section or (stated.to_dict() if hasattr(stated, "to_dict") else dict(stated))
