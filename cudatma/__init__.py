"""Python interface to NVIDIA's Tensor Memory Accelerator, with kernels for int4 GEMM, dense GEMM and attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudatma.backend import selected_backend
    from cudatma.build.kernel import compile, debugging
    from cudatma.descriptor import (
        Im2colSpec,
        Im2colWideSpec,
        Interleave,
        L2Promotion,
        OobFill,
        Swizzle,
        TensorMap,
        TiledSpec,
        check_cluster,
        create_activation_tma_desc,
        create_scale_tma_desc,
        create_weight_tma_desc,
        multicast_mask,
    )
    from cudatma.emulator.hazards.explanation import HazardExplanation, explain
    from cudatma.errors import (
        ArgumentError,
        ArgumentTypeError,
        BackendWarning,
        CacheError,
        CompileError,
        CudaTmaError,
        DescriptorError,
        DriverError,
        HazardError,
        LaunchError,
        PeerTimeout,
        PipelineHang,
        QuantizationError,
        RecordingError,
        TargetError,
        TemplateError,
        TuneFileWarning,
        WeightFileError,
    )
    from cudatma.inspection import Inspection, inspect
    from cudatma.kernels.attention.attention import attention, attention_explain, attention_varlen
    from cudatma.kernels.attention.decode import attention_decode
    from cudatma.kernels.data_movement.broadcast import broadcast
    from cudatma.kernels.data_movement.copy import copy
    from cudatma.kernels.data_movement.gather import gather, halo_tiles
    from cudatma.kernels.data_movement.im2col import im2col
    from cudatma.kernels.data_movement.prefetch import prefetch
    from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, ragged_copy
    from cudatma.kernels.data_movement.reduce import reduce_into
    from cudatma.kernels.data_movement.rows import gather_rows, scatter_rows
    from cudatma.kernels.data_movement.tile_copy import tile_copy
    from cudatma.kernels.data_movement.transpose import transpose
    from cudatma.kernels.experts.moe import marlin_moe, moe_explain
    from cudatma.kernels.explain import Explanation
    from cudatma.kernels.gemm.gemm import gemm, gemm_explain
    from cudatma.kernels.marlin.choose import marlin_explain
    from cudatma.kernels.marlin.dequantize import dequantize
    from cudatma.kernels.marlin.gemm import marlin_gemm
    from cudatma.kernels.marlin.linear import MarlinLinear
    from cudatma.kernels.marlin.problem import LinearShape
    from cudatma.kernels.warm_up import warm_up
    from cudatma.kernels.workspace import Workspace, WorkspaceBytes, release_workspaces, workspace_bytes
    from cudatma.pipeline import Operand, PipelineSpec
    from cudatma.programs import emulate_launches, read_recording, record
    from cudatma.quantization import (
        PackedExperts,
        PackedWeight,
        from_awq,
        from_compressed_tensors,
        from_gptq,
        from_marlin,
        load_awq,
        load_compressed_tensors,
        load_gguf,
        load_gptq,
        load_marlin,
        load_weights,
        pack_experts,
        quantize,
        quantize_experts,
        quantize_linear,
        save_weights,
    )
    from cudatma.runtime.launch import Kernel, LaunchPlan
    from cudatma.target import TARGETS, Target, detect, get_target

__version__ = "0.1.0"

__all__ = [
    "TARGETS",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendWarning",
    "CacheError",
    "CompileError",
    "CudaTmaError",
    "DescriptorError",
    "DriverError",
    "Explanation",
    "HazardError",
    "HazardExplanation",
    "Im2colSpec",
    "Im2colWideSpec",
    "Inspection",
    "Interleave",
    "Kernel",
    "L2Promotion",
    "LaunchError",
    "LaunchPlan",
    "LinearShape",
    "MarlinLinear",
    "OobFill",
    "Operand",
    "PackedExperts",
    "PackedWeight",
    "PeerTimeout",
    "PipelineHang",
    "PipelineSpec",
    "QuantizationError",
    "RaggedCopy",
    "RecordingError",
    "Swizzle",
    "Target",
    "TargetError",
    "TemplateError",
    "TensorMap",
    "TiledSpec",
    "TuneFileWarning",
    "WeightFileError",
    "Workspace",
    "WorkspaceBytes",
    "__version__",
    "attention",
    "attention_decode",
    "attention_explain",
    "attention_varlen",
    "broadcast",
    "check_cluster",
    "compile",
    "copy",
    "create_activation_tma_desc",
    "create_scale_tma_desc",
    "create_weight_tma_desc",
    "debugging",
    "dequantize",
    "detect",
    "emulate_launches",
    "explain",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_marlin",
    "gather",
    "gather_rows",
    "gemm",
    "gemm_explain",
    "get_target",
    "halo_tiles",
    "im2col",
    "inspect",
    "load_awq",
    "load_compressed_tensors",
    "load_gguf",
    "load_gptq",
    "load_marlin",
    "load_weights",
    "marlin_explain",
    "marlin_gemm",
    "marlin_moe",
    "moe_explain",
    "multicast_mask",
    "pack_experts",
    "prefetch",
    "quantize",
    "quantize_experts",
    "quantize_linear",
    "ragged_copy",
    "read_recording",
    "record",
    "reduce_into",
    "release_workspaces",
    "save_weights",
    "scatter_rows",
    "selected_backend",
    "tile_copy",
    "transpose",
    "warm_up",
    "workspace_bytes",
]

#: Public names of each module, imported on first use (PEP 562).
_PUBLIC = {
    "backend": "selected_backend",
    "build.kernel": "compile debugging",
    "descriptor": (
        "Im2colSpec Im2colWideSpec Interleave L2Promotion OobFill Swizzle TensorMap TiledSpec check_cluster "
        "create_activation_tma_desc create_scale_tma_desc create_weight_tma_desc multicast_mask"
    ),
    "emulator.hazards.explanation": "HazardExplanation explain",
    "errors": (
        "ArgumentError ArgumentTypeError BackendWarning CacheError CompileError CudaTmaError DescriptorError "
        "DriverError HazardError LaunchError PeerTimeout PipelineHang QuantizationError RecordingError TargetError "
        "TemplateError TuneFileWarning WeightFileError"
    ),
    "inspection": "Inspection inspect",
    "kernels.attention.attention": "attention attention_explain attention_varlen",
    "kernels.attention.decode": "attention_decode",
    "kernels.data_movement.broadcast": "broadcast",
    "kernels.data_movement.copy": "copy",
    "kernels.data_movement.gather": "gather halo_tiles",
    "kernels.data_movement.im2col": "im2col",
    "kernels.data_movement.prefetch": "prefetch",
    "kernels.data_movement.ragged_copy": "RaggedCopy ragged_copy",
    "kernels.data_movement.reduce": "reduce_into",
    "kernels.data_movement.rows": "gather_rows scatter_rows",
    "kernels.data_movement.tile_copy": "tile_copy",
    "kernels.data_movement.transpose": "transpose",
    "kernels.marlin.dequantize": "dequantize",
    "kernels.experts.moe": "marlin_moe moe_explain",
    "kernels.explain": "Explanation",
    "kernels.gemm.gemm": "gemm gemm_explain",
    "kernels.marlin.choose": "marlin_explain",
    "kernels.marlin.gemm": "marlin_gemm",
    "kernels.marlin.linear": "MarlinLinear",
    "kernels.marlin.problem": "LinearShape",
    "kernels.warm_up": "warm_up",
    "kernels.workspace": "Workspace WorkspaceBytes release_workspaces workspace_bytes",
    "pipeline": "Operand PipelineSpec",
    "programs": "emulate_launches read_recording record",
    "quantization": (
        "PackedExperts PackedWeight from_awq from_compressed_tensors from_gptq from_marlin load_awq "
        "load_compressed_tensors load_gguf load_gptq load_marlin load_weights pack_experts quantize quantize_experts "
        "quantize_linear save_weights"
    ),
    "runtime.launch": "Kernel LaunchPlan",
    "target": "TARGETS Target detect get_target",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_PACKAGES = (
    "build",
    "descriptor",
    "emulator",
    "errors",
    "inspection",
    "kernels",
    "mutants",
    "programs",
    "quantization",
    "review",
    "runtime",
)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"cudatma.{_MODULE_OF[name]}"), name)
    elif name in _PACKAGES:
        value = import_module(f"cudatma.{name}")
    else:
        raise AttributeError(f"module 'cudatma' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
