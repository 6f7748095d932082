"""Libraries that compete with attention: cuDNN, FlashAttention-2 and -3, and optionally FA4 and FlashInfer.

cuDNN and FA2 run through torch. A competing library that is not installed or does not support a call raises an error
with the reason.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from benchmarks.attention import CUDNN, FA2, FA3, FA4, FLASHINFER, Operands, entrant
from benchmarks.contest import Entrant, Rival

#: Paths of FA3's library (from xformers' wheel) and of its CUDA runtime in the installed packages.
_FA3 = ("flash_attn_3/_C*.so", "xformers/flash_attn_3/_C*.so")
_RUNTIME = ("nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/cu12/lib/libcudart.so.12")
_WORKSPACE_BYTES = 256 << 20


def sdpa(name: str, backend: str, stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for a backend of torch's scaled_dot_product_attention, which allocates each result."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape, (q, k, v) = operands.shape, operands.heads_first()
    chosen, options = getattr(SDPBackend, backend), {"is_causal": shape.is_causal}
    if shape.heads != shape.kv_heads:
        options["enable_gqa"] = True

    def compute() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def run(index: int) -> None:
        compute()

    out = compute().transpose(1, 2)
    return [entrant(stream, name, run, out)]


def fa3(library: Path | None, stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for FlashAttention-3's forward pass, from ``library`` or from the installed packages."""
    forward, out = fa3_forward(library), operands.out()
    q, k, v, shape = operands.q, operands.k, operands.v, operands.shape

    def run(index: int) -> None:
        forward(q, k, v, out=out, softmax_scale=shape.head_dim**-0.5, is_causal=shape.is_causal, num_splits=1)

    run(0)
    return [entrant(stream, FA3, run, out)]


@lru_cache(maxsize=4)
def fa3_forward(library: Path | None) -> Callable[..., Any]:
    """Return FA3's torch operator, from ``library`` or from the installed packages."""
    import torch

    path = library or next(_in_packages(_FA3), None)
    if path is None:
        raise ImportError(
            "flash_attn_3/_C.so was not found in the installed packages; install xformers 0.0.34, or pass --fa3"
        )
    runtime = next(_in_packages(_RUNTIME), Path("libcudart.so.12"))
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
    forward: Callable[..., Any] = torch.ops.flash_attn_3.fwd
    return forward


def _in_packages(patterns: tuple[str, ...]) -> Iterator[Path]:
    for folder in sys.path:
        for pattern in patterns:
            yield from sorted(Path(folder or ".").glob(pattern))


def fa4(stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for FlashAttention-4's forward pass in CuTe DSL, which the first call compiles."""
    forward, out = fa4_forward(), operands.out()

    def run(index: int) -> None:
        forward(operands.q, operands.k, operands.v, causal=operands.shape.is_causal, out=out)

    run(0)
    return [entrant(stream, FA4, run, out)]


def fa4_forward() -> Callable[..., Any]:
    """Return FA4's forward pass on torch tensors (batch, length, heads, dim), which also accepts ``out``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    forward: Callable[..., Any] = _flash_attn_fwd
    return forward


def flashinfer(stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for FlashInfer's prefill of concatenated sequences."""
    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    shape, out = operands.shape, operands.out()
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(flashinfer_workspace(FLASHINFER), "NHD")
    begins = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * shape.length
    wrapper.plan(
        begins,
        begins,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        causal=shape.is_causal,
        q_data_type=operands.q.dtype,
    )
    q, k, v, flat_out = (each.flatten(0, 1) for each in (operands.q, operands.k, operands.v, out))

    def run(index: int) -> None:
        wrapper.run(q, k, v, out=flat_out)

    run(0)
    return [entrant(stream, FLASHINFER, run, out)]


@lru_cache(maxsize=3)
def flashinfer_workspace(name: str) -> Any:
    """Return device memory for a contender's kernels."""
    import torch

    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def always(fa3_library: Path | None) -> dict[str, Rival]:
    """Return the libraries that are measured in every run, by their names in the table."""
    return {
        CUDNN: partial(sdpa, CUDNN, "CUDNN_ATTENTION"),
        FA2: partial(sdpa, FA2, "FLASH_ATTENTION"),
        FA3: partial(fa3, fa3_library),
    }


#: Values of --rivals, each with its name in the table, its package and its function.
OPTIONAL: dict[str, tuple[str, str, Rival]] = {
    "fa4": (FA4, "flash_attn.cute", fa4),
    "flashinfer": (FLASHINFER, "flashinfer", flashinfer),
}
