"""The function attention_decode, which computes attention of a few new queries over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from cudatma.kernels.arguments import Sizes
from cudatma.kernels.attention.arguments import decode_sizes
from cudatma.kernels.attention.attention import AttentionOperation, kinds_of, named_options
from cudatma.kernels.attention.check import DECODE, check_decode
from cudatma.kernels.attention.choose import ATTENTION, decode_config
from cudatma.kernels.attention.config import DECODE_VERSIONS, AttentionConfig
from cudatma.kernels.attention.problem import DecodeProblem
from cudatma.kernels.engine import run
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.operation import Checked
from cudatma.kernels.tuning import pinned_config
from cudatma.target import get_target


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute attention for new queries over a cache that already contains their keys and values.

    The result is bitwise reproducible, because the split of a sequence's keys among CTAs depends only on the capacity,
    and partial results are added in a fixed order.

    Parameters
    ----------
    q : array (batch, q_length, heads, dim)
        The last queries of each sequence. Each query attends to the keys up to its own position.
    k_cache : array (batch, capacity, kv_heads, dim), or (pages, page_size, kv_heads, dim) with a page_table
        Keys with the same dtype as ``q``, or in float8_e4m3fn. The page size of a float8_e4m3fn cache must be a
        multiple of 8 keys.
    v_cache : array (batch, capacity, kv_heads, v_dim), or (pages, page_size, kv_heads, v_dim) with a page_table
        Values in the dtype of k_cache.
    seqlens : int32 array (batch,)
        Number of keys of each sequence, including the new keys. The kernel reads the lengths and the page table, so a
        graph replay uses their current contents. Lengths in device memory are clamped to the range 0 to capacity.
    page_table : int32 array (batch, pages), optional
        Element [i, j] is the page that contains keys j * page_size up to, but not including, (j + 1) * page_size of
        sequence i. The keys and values of a page outside the cache are treated as zeros. Entries after the end of a
        sequence are not read.
    k_scale, v_scale : float or fp32 array, optional
        Scales of an e4m3 cache: a number, or an array with one element or with one element per KV head.
    scale, window, softcap, sink, out, return_lse, backend, stream : optional
        Options; see ``attention``. ``lse`` has the shape (batch, heads, q_length).

    Returns
    -------
    array (batch, q_length, heads, v_dim), or (out, lse)
        The result, or the result and lse; see ``attention``.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, LaunchError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``attention``.

    Notes
    -----
    TMA loads pages whose size is a multiple of 8 keys. Other pages are copied row by row.
    """
    k_number, k_array = _factor(k_scale)
    v_number, v_array = _factor(v_scale)
    inputs = q, k_cache, v_cache, seqlens, page_table, sink, k_array, v_array
    kinds = kinds_of(window, scale, softcap, return_lse, k_number, v_number)
    options = DecodeOptions(window, scale, softcap, return_lse, k_number, v_number, kinds)
    return run(DECODE_CALL, inputs, out, options, stream, backend)


class DecodeOptions(NamedTuple):
    """Options of attention_decode().

    Attributes
    ----------
    k_scale, v_scale : Any
        Numeric scales.
    kinds : tuple[type, ...]
        Types of the options, as kinds_of() returns them.
    """

    window: Any
    scale: Any
    softcap: Any
    return_lse: Any
    k_scale: Any
    v_scale: Any
    kinds: tuple[type, ...]


def _factor(scale: Any) -> tuple[Any, Any]:
    """Return a scale as a number or as an array."""
    return (scale, None) if scale is None or isinstance(scale, Real) else (None, scale)


class AttentionDecodeCall(AttentionOperation[DecodeProblem]):
    """Operation of attention_decode()."""

    name: ClassVar[str] = DECODE
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seqlens", "page_table", "sink", "k_scale", "v_scale")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, 0, 1, None, None, None, 2)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[DecodeProblem]:
        """Validate a call. ``options`` is a DecodeOptions object."""
        *arrays, k_array, v_array = inputs
        named = named_options(options)
        if k_array is not None:
            named["k_scale"] = k_array
        if v_array is not None:
            named["v_scale"] = v_array
        return check_decode(*arrays, out=out, **named)

    def lengths(
        self, problem: DecodeProblem, shapes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[int, int, int] | None:
        """Return the number of sequences, the number of queries, and the maximum number of keys per sequence."""
        q, k, _, seqlens, table = shapes[:5]
        batch, length = q[:2]
        if seqlens[0] != batch or (k if table is None else table)[0] != batch:
            return None
        if table is None:
            return batch, length, k[1]
        return (batch, length, k[1] * table[1]) if k[1] == problem.page_size else None

    def configure(self, problem: DecodeProblem, gpu: Gpu, memo: dict[Any, Any]) -> AttentionConfig:
        """Return the pinned configuration if there is one, otherwise the result of decode_config()."""
        config: AttentionConfig | None = memo.get("config")
        if config is None:
            config = memo["config"] = _chosen(problem, gpu)
        return config

    def configs(self, problem: DecodeProblem, gpu: Gpu) -> Iterator[AttentionConfig]:
        """Yield the only configuration, which does not depend on sizes."""
        yield _chosen(problem, gpu)

    def sizes_for(
        self, problem: DecodeProblem, config: AttentionConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[DecodeProblem], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launch."""
        sizes = decode_sizes(problem, config, gpu)
        return lambda problem: (sizes(problem),)


def _chosen(problem: DecodeProblem, gpu: Gpu) -> AttentionConfig:
    pinned = pinned_config(ATTENTION, problem, gpu, DECODE_VERSIONS)
    return decode_config(problem, get_target(gpu.target)) if pinned is None else pinned


DECODE_CALL = AttentionDecodeCall()
