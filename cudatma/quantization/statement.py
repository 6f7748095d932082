"""Read the quantization configuration from the JSON files of a model folder.

This module distinguishes four classes of keys:

- Keys that this module reads.
- Keys for the quantization process or for other tools. They do not affect the weights. The report lists them.
- Keys that change the model's computation. They raise an error.
- Unknown keys. The report lists them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from cudatma.errors import WeightFileError, reason_of
from cudatma.quantization.checkpoint import read_json
from cudatma.quantization.formats import (
    AWQ,
    COMPRESSED_TENSORS,
    FP8_BLOCK,
    FP8_BLOCK_COMPRESSED,
    FP8_BLOCK_SIZE,
    FP8_CHANNEL,
    FROM_FLOAT,
    GPTQ,
    GPTQ8,
    MARLIN,
    MXFP4,
    NVFP4_COMPRESSED,
    NVFP4_MODELOPT,
    Format,
)

Section = Mapping[str, Any]

#: Files with quantization configurations. Values in later files replace values in earlier files.
_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "config.json")
_CONFIG_KEYS = ("quantization_config", "compression_config")

# ---- the keys


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


_READ = _keys("""
    quant_method method bits w_bit wbits group_size q_group_size sym zero_point desc_act checkpoint_format format
    dynamic extra_config modules_to_not_convert modules_in_block_to_quantize lm_head
    data_type act_bits pack_dtype sparsity_config transform_config
""")
_READ_OF_METHOD = {
    "gptq": _READ | {"is_marlin_format"},
    "marlin": _READ | {"is_marlin_format"},
    "awq": _READ | {"version", "backend"},
    "auto-round": _READ - {"checkpoint_format", "format"} | {"packing_format", "backend"},
    "compressed-tensors": _keys("quant_method format config_groups ignore sparsity_config transform_config"),
    "fp8": _keys("""
        quant_method activation_scheme weight_block_size fmt modules_to_not_convert ignored_layers scale_fmt
    """),
    "mxfp4": _keys("quant_method modules_to_not_convert"),
    "modelopt": _keys("""
        quant_method quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore
        config_groups producer
    """),
}
_READ_ANYWHERE = frozenset[str]().union(*_READ_OF_METHOD.values())
_READ_OF_GROUP = _keys("""
    targets format weights num_bits type symmetric strategy group_size actorder dynamic block_structure
""")
_FORMAT_KEYS = _keys("quant_method method checkpoint_format format")
_READ_OF_LAYER = _FORMAT_KEYS | _keys("""
    bits w_bit wbits group_size q_group_size sym zero_point desc_act data_type act_bits pack_dtype
""")
#: Keys that identify a quantization configuration.
_MARKERS = _keys("quant_method bits w_bit group_size q_group_size config_groups checkpoint_format desc_act")
#: Keys for the quantization process or for other tools, which do not affect the stored weights.
_HARMLESS = _keys("""
    damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware gptaq foem hessian dataset
    tokenizer batch_size pad_token_id model_seqlen seqlen nsamples iters lr minmax_lr amp gradient_accumulate_steps
    low_gpu_mem_usage low_cpu_mem_usage enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    enable_torch_compile scale_dtype zp_dtype sampler nblocks not_use_best_mse dynamic_max_gap momentum
    act_data_type act_dynamic act_group_size act_sym block_name_to_quantize
    to_quant_block_names quant_block_list module_name_preceding_first_block mock_quantization offload_to_disk
    offload_to_disk_path pack_impl device fallback failsafe observer observer_kwargs quantization_status
    global_compression_ratio provider autoround_version quantizer uri transformers_version model_name_or_path
    model_file_base_name
    use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length cache_block_outputs do_fuse
    fuse_max_seq_len modules_to_fuse run_compressed dequantize backend hyb_act meta version
""")
#: Pattern in the lowercase names of keys that change the model's computation.
_COMPUTES = re.compile(
    r"rotat|hadamard|quarot|spin_?quant|transform|activation|act_?scale|act_?quant|act_?bit|input_?bit|a_?bits?$"
    r"|(?<![a-z])kv|smooth_?quant|adapter|lora|eora|low_?rank|online|permut|super_"
)
#: A layer with at least this number of bits per value counts as not quantized.
_FLOAT_BITS = 16


@dataclass(frozen=True, slots=True)
class LayerStatement:
    """Facts that a configuration specifies for a layer. An unspecified fact is None.

    Attributes
    ----------
    where : str
        File and key, for error messages.
    bits : int or None
        Number of bits per value.
    group_size : int or None
        Number of rows per group. -1 means one scale per column.
    symmetric : bool or None
        Whether all zero points are 8.
    act_order : bool or None
        Whether rows are in activation order.
    quantized : bool
        Whether the layer is quantized. False if the configuration lists it as not quantized.
    """

    where: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    quantized: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """Statement that applies to the layers whose names match ``pattern`` (see re.match)."""

    pattern: re.Pattern[str]
    statement: LayerStatement


@dataclass(frozen=True, slots=True)
class Statement:
    """Quantization configuration of a model.

    Attributes
    ----------
    format : Format
        Format of the tensors.
    where : str
        File and key, for error messages.
    zero_point_format : str
        Encoding of the zero points; see ``from_gptq``.
    rules : tuple of Rule
        Rules for layers. The first rule that matches a layer applies.
    notes : tuple of str
        Notes for the report.
    unused : tuple of str
        Keys that do not affect the weights.
    borrows : bool
        Whether asymmetric layers have the format "v1_borrow".
    """

    format: Format
    where: str
    zero_point_format: str
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]
    unused: tuple[str, ...]
    borrows: bool = False

    def of(self, layer: str) -> LayerStatement | None:
        """Return the statement about a layer, or None."""
        return next((rule.statement for rule in self.rules if rule.pattern.match(layer)), None)


# ---- finding the configuration


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises WeightFileError unless the content is a JSON object."""
    content = read_json(folder / "config.json")
    if not isinstance(content, dict):
        raise WeightFileError(str(folder / "config.json"), type(content).__name__, "a JSON object")
    return content


def statement_files(folder: Path) -> list[Path]:
    """Return the files in a folder that may contain a quantization configuration."""
    return [folder / name for name in (*_FILES, MODELOPT_FILE) if (folder / name).is_file()]


def read_section(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the quantization configuration of a folder, and its location for error messages.

    The configuration is empty if the folder has none. Raises WeightFileError if files are not JSON or contradict each
    other, or if the configuration belongs to an unsupported tool.
    """
    if (folder / MODELOPT_FILE).is_file():
        content = read_json(folder / MODELOPT_FILE)
        quantization = content.get("quantization") if isinstance(content, dict) else None
        if not isinstance(quantization, dict):
            raise WeightFileError(f"{folder / MODELOPT_FILE}: quantization", repr(quantization)[:80], "an object")
        return {**quantization, "quant_method": "modelopt"}, str(folder / MODELOPT_FILE)
    sections: list[tuple[str, Section]] = []
    for path in statement_files(folder):
        content = read_json(path)
        if not isinstance(content, dict):
            continue
        if path.name == "config.json":
            sections += [(f"{path}: {key}", section) for key, section in _in_config(content, str(path))]
        elif not _MARKERS.isdisjoint(content):
            sections.append((str(path), content))
    _check_alike(folder, sections)
    merged: dict[str, Any] = {}
    for _, section in sections:
        stated = {key: value for key, value in section.items() if value is not None}
        merged |= {key: value for key, value in stated.items() if key not in merged or not _is_neutral(value)}
    if tools := [tool for _, section in sections if (tool := _tools(section))]:
        merged["meta"] = {"quantizer": tools}
    if merged and not merged.get("quant_method"):
        merged |= {"quant_method": method} if (method := _inferred_method(merged)) else {}
    return merged, sections[-1][0] if sections else str(folder)


def _in_config(config: Section, where: str) -> Iterable[tuple[str, Section]]:
    """Yield the sections of config.json. Multimodal models store theirs in text_config."""
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:
        raise WeightFileError(f"{where}: quantization", "the format of MLX", _SUPPORTED, FROM_FLOAT)
    parts = {f"{name}.": part for name, part in config.items() if isinstance(part, dict) and name not in _CONFIG_KEYS}
    for prefix, holder in (*parts.items(), ("", config)):
        for name in ("rotation_config", "transform_config"):
            if not _is_neutral(holder.get(name)):
                _raise_unsupported(f"{where}: {prefix}{name}", holder[name])
    for prefix, holder in (("text_config.", parts.get("text_config.", {})), ("", config)):
        for key in reversed(_CONFIG_KEYS):
            section = holder.get(key)
            if section is not None and not isinstance(section, dict):
                raise WeightFileError(f"{where}: {prefix}{key}", repr(section)[:80], "an object")
            if section:
                yield prefix + key, section


_SYNONYMS = {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size"}


def _check_alike(folder: Path, sections: list[tuple[str, Section]]) -> None:
    """Raise WeightFileError if two sections contain different values for one key."""
    stated: dict[str, dict[str, Any]] = defaultdict(dict)
    for where, section in sections:
        for key, value in section.items():
            if key in _READ_ANYWHERE and (value is False or not _is_neutral(value)):
                stated[_SYNONYMS.get(key, key)][where.removeprefix(f"{folder}/")] = value
    for key, values in stated.items():
        if len({_normalized(value) for value in values.values()}) > 1:
            got = ", ".join(f"{str(value)[:80]} in {file}" for file, value in values.items())
            remedy = "correct one of the files"
            if key == "checkpoint_format":
                remedy += ", or pass zero_point_format ('v1' or 'v2') to load_gptq()"
            raise WeightFileError(f"{folder}: {key}", got, "the same value in all files", remedy)


def _normalized(value: Any) -> str:
    """Return a string that is equal for equal settings, regardless of case, order, repetitions and null values."""
    if isinstance(value, dict):
        return f"{{{sorted(f'{key}: {_normalized(item)}' for key, item in value.items() if item is not None)}}}"
    if isinstance(value, list):
        return str(sorted({_normalized(item) for item in value}))
    return str(value).lower()


def _tools(section: Section) -> str:
    """Return the names of the tools that quantized the model, or ""."""
    meta = section.get("meta")
    return str(meta.get("quantizer") or "").lower() if isinstance(meta, Mapping) else ""


def _inferred_method(section: Section) -> str | None:
    """Infer a section's method from keys that only one tool writes. Returns None if there are no such keys."""
    if "method" in section:
        return str(section["method"])
    if "config_groups" in section:
        return "compressed-tensors"
    if "packing_format" in section:
        return "auto-round"
    if not section.keys().isdisjoint(("zero_point", "version", "w_bit", "q_group_size")):
        return "awq"
    if not section.keys().isdisjoint(("desc_act", "sym", "damp_percent", "checkpoint_format", "is_marlin_format")):
        return "gptq"
    return None


# ---- reading the configuration

_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
METHODS = ("gptq", "awq", "compressed-tensors", "marlin", "fp8", "mxfp4", "modelopt", *_AUTO_ROUND)
#: zero_point_format by checkpoint_format.
_GPTQ_FORMATS = {"gptq": "v1", "gptq_v2": "v2"}

_INTEGERS = (None, "int", "int_sym", "int_asym")
_SUPPORTED = (
    "GPTQ, AWQ (gemm), compressed-tensors (pack-quantized), AutoRound, Marlin, fp8, MXFP4 or NVFP4, in safetensors"
)
#: Formats of compressed-tensors, by the name of the format and the type of the weights.
_COMPRESSED_FORMATS = {
    ("pack-quantized", "int"): COMPRESSED_TENSORS,
    ("nvfp4-pack-quantized", "float"): NVFP4_COMPRESSED,
    ("float-quantized", "float"): FP8_CHANNEL,
}
_UNQUANTIZED_ACTIVATIONS = "activations are not quantized, although the configuration specifies quantized activations"
#: Configuration of ModelOpt.
MODELOPT_FILE = "hf_quant_config.json"


def read_statement(section: Section, where: str) -> Statement:
    """Read a quantization configuration.

    ``where`` is the file and key of the configuration, for error messages. Raises WeightFileError for unsupported
    methods, variants and keys, and for values of an invalid type.
    """
    method = str(section.get("quant_method") or _inferred_method(section)).lower()
    if method not in METHODS:
        raise WeightFileError(f"{where}: quant_method", method, ", ".join(METHODS), FROM_FLOAT)
    method = "auto-round" if method in _AUTO_ROUND else method
    if method == "awq" and section.get("zero_point") is not None:  # GPTQModel also writes the default value of "sym".
        section = {key: value for key, value in section.items() if key != "sym"}
    notes: list[str] = []
    unused = tuple(sorted(section.keys() & _HARMLESS - _READ_OF_METHOD[method]))
    _check_keys(section, where, _READ_OF_METHOD[method], notes)
    _check_types(section, where)
    _check_transforms(section.get("transform_config"), f"{where}: transform_config", notes)
    sparse = section.get("sparsity_config")
    if not _is_neutral(sparse) and not (isinstance(sparse, dict) and sparse.get("format", "dense") == "dense"):
        raise WeightFileError(f"{where}: sparsity_config", repr(sparse)[:80], "null, or the format dense", FROM_FLOAT)
    zero_point_format = "v2"
    if method == "compressed-tensors":
        kind, rules = _compressed_rules(section, where, notes)
    elif method in ("fp8", "mxfp4", "modelopt"):
        kind, rules = _float_rules(method, section, where, notes)
    else:
        default = _common(section, where)
        kind, zero_point_format = _kind(method, section, default)
        kind = GPTQ8 if kind is GPTQ and default.bits == GPTQ8.bits else kind
        rules = _layer_rules(section, default, notes)
    borrows = method == "gptq" and zero_point_format == "v1" and "gptqmodel" in _tools(section)
    return Statement(kind, where, zero_point_format, rules, tuple(notes), unused, borrows)


def _kind(method: str, section: Section, default: LayerStatement) -> tuple[Format, str]:
    """Return the format of the tensors and the zero_point_format."""
    if method == "awq":
        _check_awq(section, default.where)
        return AWQ, "v2"
    if method == "auto-round":
        return _auto_round_format(section, default)
    return _gptq_format(section, default.where, is_marlin=method == "marlin")


def _gptq_format(section: Section, where: str, is_marlin: bool) -> tuple[Format, str]:
    named = {key: str(section[key]) for key in ("checkpoint_format", "format") if section.get(key) is not None}
    if is_marlin or section.get("is_marlin_format") is True:
        named["quant_method" if is_marlin else "is_marlin_format"] = "marlin"
    for key, value in named.items():
        if value not in (*_GPTQ_FORMATS, "marlin"):
            remedy = "if these are GPTQ tensors, pass zero_point_format ('v1', 'v1_borrow' or 'v2') to load_gptq()"
            raise WeightFileError(f"{where}: {key}", value, ", ".join((*_GPTQ_FORMATS, "marlin")), remedy)
    if len(set(named.values())) > 1:
        got = ", ".join(f"{key} {value}" for key, value in named.items())
        raise WeightFileError(f"{where}: format", got, "the same format in all keys", "correct one of the keys")
    value = next(iter(named.values()), "gptq")
    return (MARLIN, "v2") if value == "marlin" else (GPTQ, _GPTQ_FORMATS[value])


def _check_awq(section: Section, where: str) -> None:
    for key in ("version", "format", "checkpoint_format"):
        named = str(section.get(key) or "gemm").lower()
        remedy = f"quantize the model again with version gemm, or {FROM_FLOAT}"
        if named in ("exllama", "ipex"):
            remedy = f"if qweight has the shape (K, N / 8), replace {named}, which only names a kernel, with gemm"
        elif named == "marlin":
            remedy = "read the layers with cudatma.quantization.from_marlin(qweight, scales)"
        if named != "gemm":
            raise WeightFileError(f"{where}: {key}", named, "gemm", remedy)
    if "llm-awq" in str(section.get("backend")):
        raise WeightFileError(f"{where}: backend", str(section["backend"]), "autoawq", FROM_FLOAT)


def _auto_round_format(section: Section, default: LayerStatement) -> tuple[Format, str]:
    """Return the format of AutoRound's tensors (GPTQ or AWQ), and the zero_point_format."""
    packing = section.get("packing_format") or section.get("backend")
    kind = str(packing or "").removeprefix("auto_round").removeprefix(":").removeprefix("auto_").partition(":")[0]
    if kind == "awq":
        return AWQ, "v2"
    if packing == "auto_round" or kind == "gptqmodel":
        return GPTQ, "v2"
    # Old files do not specify the packing. If they are symmetric, it can be inferred from the zero points.
    if kind == "gptq" or (kind in ("", "exllamav2") and default.symmetric):
        return GPTQ, "v1"
    allowed = "auto_round, auto_round:auto_gptq, auto_round:auto_awq, auto_round:gptqmodel"
    raise WeightFileError(f"{default.where}: packing_format", str(packing), allowed, FROM_FLOAT)


def _float_rules(method: str, section: Section, where: str, notes: list[str]) -> tuple[Format, tuple[Rule, ...]]:
    """Return the format and the rules of an fp8, gpt-oss (MXFP4) or ModelOpt checkpoint."""
    kind, quantizes_activations = MXFP4, False
    if method == "fp8":
        block = section.get("weight_block_size")
        if block not in (None, [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE]) or section.get("fmt", "e4m3") != "e4m3":
            got = f"blocks {block}, format {section.get('fmt')}"
            allowed = f"null or [{FP8_BLOCK_SIZE}, {FP8_BLOCK_SIZE}], with format e4m3"
            raise WeightFileError(f"{where}: weight_block_size", got, allowed, FROM_FLOAT)
        kind, quantizes_activations = FP8_BLOCK if block else FP8_CHANNEL, True
    elif method == "modelopt":
        algorithm = section.get("quant_algo")
        if algorithm not in ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            raise WeightFileError(
                f"{where}: quant_algo", str(algorithm), "NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN", FROM_FLOAT
            )
        kind, quantizes_activations = NVFP4_MODELOPT if algorithm == "NVFP4" else FP8_CHANNEL, True
        if not _is_neutral(section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme")):
            notes.append(
                f"{where}: the KV cache is not quantized, although the configuration specifies a quantized KV cache"
            )
    if quantizes_activations:
        notes.append(f"{where}: {_UNQUANTIZED_ACTIVATIONS}")
    rules = []
    for key in ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore"):
        for name in _names(section.get(key), f"{where}: {key}"):
            # In ModelOpt's patterns, * may match the names of several nested modules.
            pattern = ".*".join(map(re.escape, name.split("*")))
            rules.append(_rule(rf"(?:.*\.)?{pattern}(?:\.|$)", LayerStatement(f"{where}: {key}", quantized=False)))
    return kind, (*rules, _rule("", LayerStatement(where)))


def _compressed_rules(section: Section, where: str, notes: list[str]) -> tuple[Format, tuple[Rule, ...]]:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise WeightFileError(f"{where}: config_groups", repr(groups)[:80], "an object with at least one group")
    targeted: list[tuple[str, LayerStatement]] = []
    kinds: dict[str, Format] = {}
    for name, group in groups.items():
        field = f"{where}: config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise WeightFileError(f"{field}.weights", repr(weights)[:80], "an object with num_bits, type and strategy")
        stored = group.get("format") or section.get("format")
        kind = _COMPRESSED_FORMATS.get((str(stored), str(weights.get("type", "int"))))
        if kind is None:
            got = f"format {stored}, type {weights.get('type')}"
            allowed = (
                "a group with type int and format pack-quantized, or type float and format nvfp4-pack-quantized or "
                "float-quantized"
            )
            raise WeightFileError(field, got, allowed, FROM_FLOAT)
        if kind is FP8_CHANNEL and weights.get("strategy") == "block":
            if weights.get("block_structure") != [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE]:
                got = str(weights.get("block_structure"))
                allowed = f"[{FP8_BLOCK_SIZE}, {FP8_BLOCK_SIZE}]"
                raise WeightFileError(f"{field}.weights.block_structure", got, allowed, FROM_FLOAT)
            kind = FP8_BLOCK_COMPRESSED
        kinds[field] = kind
        activations = group.get("input_activations")
        if kind.group_size and not _is_neutral(activations):
            notes.append(f"{field}: {_UNQUANTIZED_ACTIVATIONS}")
            group = {**group, "input_activations": None}
        _check_keys({**weights, **group}, field, _READ_OF_GROUP, notes)
        statement = LayerStatement(
            f"{field}.weights",
            _value(weights, "num_bits", int, f"{field}.weights"),
            None if kind.group_size else _compressed_group_size(weights, f"{field}.weights"),
            _value(weights, "symmetric", bool, f"{field}.weights"),
            weights.get("actorder") in ("group", "dynamic", True),
        )
        if weights.get("dynamic"):
            _raise_unsupported(f"{field}.weights.dynamic", weights["dynamic"])
        targeted += [(target, statement) for target in _names(group.get("targets"), f"{field}.targets")]
    if len(set(kinds.values())) > 1:
        got = ", ".join(f"{kind.title} in {field}" for field, kind in kinds.items())
        raise WeightFileError(f"{where}: config_groups", got, "groups of one format", FROM_FLOAT)
    ignored = LayerStatement(f"{where}: ignore", quantized=False)
    # The name of a layer takes precedence over a pattern, and a pattern takes precedence over a class of modules.
    targeted.sort(key=lambda item: (item[0] == "Linear", item[0].startswith("re:")))
    targeted[:0] = [(name, ignored) for name in _names(section.get("ignore"), ignored.where)]
    return next(iter(kinds.values())), tuple(
        _rule(_target(target), statement)
        for target, statement in targeted
        if target == "Linear" or not _is_class(target)
    )


def _is_class(target: str) -> bool:
    return "." not in target and target[:1].isupper()


def _target(target: str) -> str:
    """Return the pattern for a target. The model class and the files may use different prefixes for a module."""
    if target == "Linear":
        return ""
    if target.startswith("re:"):
        return target.removeprefix("re:")
    wrappers = r"(?:(?:model|language_model|text_model)\.)*"
    return f"{wrappers}{re.escape(re.sub(f'^{wrappers}', '', target))}$"


def _compressed_group_size(weights: Section, where: str) -> int | None:
    size: int | None = _value(weights, "group_size", int, where)
    strategy = weights.get("strategy")
    if strategy not in (None, "group", "channel", "tensor"):
        raise WeightFileError(f"{where}.strategy", str(strategy), "group, channel, tensor", FROM_FLOAT)
    if strategy in ("channel", "tensor"):
        if size not in (None, -1):
            raise WeightFileError(
                f"{where}.group_size", size, f"null for strategy {strategy}", "correct one of the values"
            )
        return -1
    return size


def _check_transforms(transforms: Any, where: str, notes: list[str]) -> None:
    """Raise WeightFileError for transforms of activations. The stored weights already include weight transforms."""
    if _is_neutral(transforms):
        return
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    if isinstance(transforms, dict):
        _check_keys(transforms, where, _keys("config_groups"), notes)
    if not _is_transform(groups):
        _raise_unsupported(where, transforms)
    applied = [apply for group in groups.values() for apply in group["apply"]]
    if any(apply.get("location") not in ("weight_input", "weight_output") for apply in applied):
        _raise_unsupported(where, transforms)
    notes.append(f"{where}: the stored weights already include the weight transforms")


def _is_transform(groups: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(groups, dict) and all(
        isinstance(group, dict)
        and isinstance(group.get("apply"), list)
        and all(isinstance(apply, dict) for apply in group["apply"])
        for group in groups.values()
    )


def _common(section: Section, where: str) -> LayerStatement:
    """Read the facts that GPTQ, AWQ and AutoRound specify with the same keys, for all layers or for some layers."""
    symmetric, zero_point = _value(section, "sym", bool, where), _value(section, "zero_point", bool, where)
    if symmetric is None:
        symmetric = None if zero_point is None else not zero_point
    elif zero_point is symmetric:
        got = f"sym {symmetric}, zero_point {zero_point}"
        raise WeightFileError(f"{where}: sym", got, "the opposite of zero_point", "correct one of the keys")
    return LayerStatement(
        where,
        _same(section, ("bits", "w_bit", "wbits"), where),
        _same(section, ("group_size", "q_group_size"), where),
        symmetric,
        _value(section, "desc_act", bool, where),
    )


def _overrides(
    section: Section, key: str, default: LayerStatement, notes: list[str]
) -> list[tuple[str, LayerStatement]]:
    """Return pairs of a name or pattern and its statement for layers that have their own settings."""
    where = f"{default.where}: {key}"
    overrides = {} if section.get(key) is None else section[key]
    if not isinstance(overrides, dict):
        raise WeightFileError(where, repr(overrides)[:80], "an object that maps names to settings")
    statements = []
    for name, settings in overrides.items():
        field = f"{where}[{name!r}]"
        if name.startswith("-:"):
            statements.append((name, LayerStatement(field, quantized=False)))
            continue
        if not isinstance(settings, dict):
            raise WeightFileError(field, repr(settings)[:80], "an object with settings")
        _check_keys(settings, field, _READ_OF_LAYER, notes)
        for name_of_format in _FORMAT_KEYS & settings.keys():
            if settings[name_of_format] not in (None, *(section.get(name) for name in _FORMAT_KEYS)):
                got = str(settings[name_of_format])
                raise WeightFileError(f"{field}: {name_of_format}", got, "the format of the other layers", FROM_FLOAT)
        stated = _common(settings, field)
        facts = {fact: getattr(stated, fact) for fact in ("bits", "group_size", "symmetric", "act_order")}
        statement = replace(default, where=field, **{fact: value for fact, value in facts.items() if value is not None})
        if statement.bits is not None and statement.bits >= _FLOAT_BITS:
            statement = LayerStatement(field, quantized=False)
        else:
            _check_types(settings, field)
        statements.append((name, statement))
    return statements


def _layer_rules(section: Section, default: LayerStatement, notes: list[str]) -> tuple[Rule, ...]:
    """Return the rules, from the keys of all tools, for layers that are not quantized or have their own settings."""
    rules = []
    field = f"{default.where}: modules_to_not_convert"
    for name in _names(section.get("modules_to_not_convert"), field):  # A whole name or the end of a name.
        rules.append(_rule(_module(name), LayerStatement(field, quantized=False)))
    if inside := section.get("modules_in_block_to_quantize"):  # A list of modules, or a list of lists of modules.
        field = f"{default.where}: modules_in_block_to_quantize"
        if isinstance(inside, list):
            inside = [name for part in inside for name in (part if isinstance(part, list) else [part])]
        names = "|".join(re.escape(name) for name in _names(inside, field))
        rules.append(_rule(rf"(?!(?:.*\.)?(?:{names})$).*\.\d+\.", LayerStatement(field, quantized=False)))
    for name, statement in _overrides(section, "dynamic", default, notes):
        rules.append(_rule(name.removeprefix("-:").removeprefix("+:"), statement))
    extra = _overrides(section, "extra_config", default, notes)
    rules += [_rule(f"{re.escape(name)}$", statement) for name, statement in extra]
    rules += [_rule(_module(name) if _is_module(name) else f".*?(?:{name})", statement) for name, statement in extra]
    if section.get("lm_head") is False:
        rules.append(_rule(r"(?:.*\.)?lm_head$", LayerStatement(f"{default.where}: lm_head", quantized=False)))
    return (*rules, _rule("", default))


def _module(name: str) -> str:
    """Return the pattern that matches a module and its submodules. ``name`` is the whole name or its end."""
    return rf"(?:.*\.)?{re.escape(name)}(?:\.|$)"


def _is_module(name: str) -> bool:
    """Return whether a key of extra_config names a single module in a numbered block. Other keys are patterns."""
    return re.search(r"\.\d+\.", name) is not None and not set(name) & set("*+?^$()[]{}|\\")


def _rule(pattern: str, statement: LayerStatement) -> Rule:
    try:
        return Rule(re.compile(pattern), statement)
    except re.error as error:
        raise WeightFileError(
            statement.where, f"{pattern!r} ({reason_of(error)})", "a valid regular expression"
        ) from error


def _check_keys(section: Section, where: str, read: frozenset[str], notes: list[str]) -> None:
    """Raise WeightFileError for keys that change the computation, and note unknown keys."""
    if (_value(section, "act_bits", int, where) or _FLOAT_BITS) < _FLOAT_BITS:
        _raise_unsupported(f"{where}: act_bits", section["act_bits"])
    unknown = [name for name in section if name not in read | _HARMLESS]
    computing = [name for name in unknown if _COMPUTES.search(name.lower())]
    for name in computing:
        if not _is_neutral(section[name]):
            _raise_unsupported(f"{where}: {name}", section[name])
    if unknown := [name for name in unknown if name not in computing]:
        notes.append(f"{where}: unknown keys were ignored and dropped: {', '.join(unknown)}")


def _check_types(section: Section, where: str) -> None:
    """Raise WeightFileError unless the weights are integers in 32-bit words."""
    if section.get("data_type") not in _INTEGERS:
        raise WeightFileError(f"{where}: data_type", str(section["data_type"]), "int", FROM_FLOAT)
    if str(section.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise WeightFileError(f"{where}: pack_dtype", str(section["pack_dtype"]), "int32", FROM_FLOAT)


def _is_neutral(value: Any) -> bool:
    return not value or value in ("none", "None")


def _raise_unsupported(field: str, value: Any) -> NoReturn:
    got = f"{str(value)[:80]}, which changes the model's computation"
    raise WeightFileError(field, got, "absent", f"this setting is not supported; {FROM_FLOAT}")


def _names(value: Any, where: str) -> list[str]:
    names = [] if value is None else value
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise WeightFileError(where, repr(value)[:80], "a list of names")
    return names


def _value(section: Section, name: str, kind: type, where: str) -> Any:
    value: Any = section.get(name)
    if value is not None and type(value) is not kind:
        raise WeightFileError(f"{where}: {name}", repr(value)[:80], f"of type {kind.__name__}")
    return value


def _same(section: Section, names: tuple[str, ...], where: str) -> int | None:
    """Return the integer that synonymous keys share. Raises WeightFileError if the values differ."""
    stated = {name: value for name in names if (value := _value(section, name, int, where)) is not None}
    if len(set(stated.values())) > 1:
        got = ", ".join(f"{name} {value}" for name, value in stated.items())
        raise WeightFileError(f"{where}: {names[0]}", got, "the same as the other keys", "correct one of the keys")
    return next(iter(stated.values()), None)
