"""The functions attention and attention_varlen, which compute softmax(scale q k^T) v in fp16 or bf16."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from cudatma.arrays import ArrayInfo, describe, with_cupy
from cudatma.backend import backend_for
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.attention.arguments import attention_sizes, launch_arguments
from cudatma.kernels.attention.check import ATTENTION as NAME
from cudatma.kernels.attention.check import VARLEN, check_attention, check_varlen
from cudatma.kernels.attention.choose import ATTENTION, times
from cudatma.kernels.attention.config import VERSIONS, AttentionConfig
from cudatma.kernels.attention.problem import Problem, size_class
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choice import choice_table, choose
from cudatma.kernels.engine import run
from cudatma.kernels.explain import Explanation, explained, explained_gpu
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.tuning import every_entry_config
from cudatma.kernels.version import naming
from cudatma.library_streams import working_on
from cudatma.target import Target, get_target

P = TypeVar("P", bound=Problem)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute softmax(scale q k^T) v for each head.

    The computation is in fp32 with a single rounding, and the result is bitwise reproducible. There is no backward
    pass. The function raises an error for tensors that require grad while autograd is recording.

    Parameters
    ----------
    q : array (batch, q_length, heads, dim)
        Queries in fp16 or bf16: a CuPy array, a torch tensor, or an object that supports DLPack or
        ``__cuda_array_interface__``. The emulator also accepts a NumPy array. The last dimension must be contiguous,
        and the other strides must be multiples of 16 bytes. Transposed views that meet these conditions are read in
        place.
    k : array (batch, k_length, kv_heads, dim)
        Keys. ``heads`` must be a multiple of ``kv_heads``. Each KV head is shared by
        ``heads / kv_heads`` neighboring query heads.
    v : array (batch, k_length, kv_heads, v_dim)
        Values. ``dim`` must be 32, 64, 96, 128, 192 or 256. ``v_dim`` must be equal to ``dim``, or 128 if ``dim`` is
        192.
    causal : bool, default False
        Whether query i attends only to keys up to i + k_length - q_length. The last query then attends to all keys.
    scale : float, optional
        Positive factor by which q k^T is multiplied. Default: 1 / sqrt(dim).
    window : (left, right), optional
        Number of keys before and after its own position that a query attends to. None means no limit.
    softcap : float, optional
        Cap of the logits. Each logit x becomes softcap tanh(x / softcap).
    sink : array (heads,), optional
        One fp32 logit per head for an additional key with value zero that all queries attend to.
    out : array (batch, q_length, heads, v_dim), optional
        The result. Default: a new array from the library of ``q``.
    return_lse : bool, default False
        Whether to also return the logsumexp of each query's logits.
    version : str, default "auto"
        Version of the kernel (docs/design/attention.md). ``$CUDATMA_ATTENTION_VERSION`` or cudatma.toml can also set
        it.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of q's library.

    Returns
    -------
    out : array (batch, q_length, heads, v_dim)
        The result. The row of a query that attends to no key is zero.
    lse : array (batch, heads, q_length)
        The logsumexp in fp32, returned only if ``return_lse`` is True. The value for a query that attends to no key is
        the head's sink if there is one, otherwise -inf.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If arguments are invalid or do not match each other.
    TargetError
        If no kernel supports the problem on the GPU.
    LaunchError, CompileError, DriverError, HazardError
        If a kernel cannot be compiled, loaded or launched, or if the emulator finds a hazard; see ``marlin_gemm``.

    Examples
    --------
    >>> q = np.ones((1, 2, 4, 64), np.float16)  # 1 sequence, 2 queries, 4 heads
    >>> k = v = np.ones((1, 3, 4, 64), np.float16)
    >>> cudatma.attention(q, k, v, causal=True, backend="reference").shape
    (1, 2, 4, 64)
    """
    name, selected_by = VERSIONS.chosen(version)
    kinds = kinds_of(window, causal, scale, softcap, return_lse)
    options = AttentionOptions(causal, window, scale, softcap, return_lse, name, kinds)
    with naming(selected_by):
        return run(ATTENTION_CALL, (q, k, v, sink), out, options, stream, backend)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute attention independently for each of several concatenated sequences of different lengths.

    Parameters
    ----------
    q : array (total_q, heads, dim)
        Concatenated queries of all sequences.
    k : array (total_k, kv_heads, dim)
        Concatenated keys.
    v : array (total_k, kv_heads, v_dim)
        Concatenated values.
    cu_seqlens_q, cu_seqlens_k : int32 array (sequences + 1,)
        Offsets of the sequences. Sequence i consists of the rows from cu_seqlens[i] up to, but not including,
        cu_seqlens[i + 1]. Offsets must start at 0, be nondecreasing, and end at the total number of rows. Offsets in
        host memory are checked. The kernel clamps offsets in device memory to the total number of rows, and sequence
        lengths to the maximum lengths. Rows of the result that belong to no sequence are not written.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds on the sequence lengths.
    causal, scale, window, softcap, sink, out, return_lse, backend, stream : optional
        Options; see ``attention``. ``lse`` has the shape (heads, total_q).

    Returns
    -------
    array (total_q, heads, v_dim), or (out, lse)
        The result, or the result and lse; see ``attention``.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, LaunchError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``attention``.

    Notes
    -----
    Version a3 runs on SM90, and version mma_sync runs on SM120.
    """
    kinds = kinds_of(window, causal, scale, softcap, return_lse, max_seqlen_q, max_seqlen_k)
    options = VarlenOptions(max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, return_lse, kinds)
    inputs = q, k, v, cu_seqlens_q, cu_seqlens_k, sink
    return run(VARLEN_CALL, inputs, out, options[2:], stream, backend, size_options=options[:2])


def attention_explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
    target: str | Target | None = None,
) -> Explanation:
    """Explain which kernel attention() would run and its predicted time, without compiling or launching it.

    Parameters
    ----------
    q, k, v, causal, scale, window, softcap, sink, out, return_lse, version : arguments
        The arguments of ``attention``.
    backend, stream : optional
        Ignored. Accepted so that the arguments of ``attention`` can be passed unchanged.
    target : str or Target, optional
        Target to assume, such as "sm_120a". Default: the target of the GPU that holds the arrays. For host arrays, the
        default is $CUDATMA_TARGET, or an H200 if this variable is not set.

    Returns
    -------
    Explanation
        ``str()`` returns readable text, and ``as_dict()`` returns a dict for JSON.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError
        If the arguments are invalid, if no kernel supports the problem, or if there is nothing to compute.
    """
    name, selected_by = VERSIONS.chosen(version)
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "return_lse": return_lse}
    problem = check_attention(q, k, v, sink, out=out, version=name, **options).problem
    first = describe(q, "q")
    if backend is not None:
        check_backend(first, "q", backend_for("attention", backend))
    problem.check_not_empty()
    gpu = explained_gpu(first.device, target)
    with naming(selected_by):
        explanation = explained(ATTENTION, problem, gpu)
    if not name:
        return explanation
    return replace(
        explanation, decision=replace(explanation.decision, why=f"{explanation.decision.why} by {selected_by}")
    )


class AttentionOptions(NamedTuple):
    """Options of attention(), which are part of a call's key. ``kinds`` comes from kinds_of()."""

    causal: Any
    window: Any
    scale: Any
    softcap: Any
    return_lse: Any
    version: str
    kinds: tuple[type, ...]


class VarlenOptions(NamedTuple):
    """Options of attention_varlen(). The first two fields are sizes."""

    max_seqlen_q: Any
    max_seqlen_k: Any
    causal: Any
    window: Any
    scale: Any
    softcap: Any
    return_lse: Any
    kinds: tuple[type, ...]


def named_options(options: Any) -> dict[str, Any]:
    """Return the options of a check function by name."""
    named: dict[str, Any] = options._asdict()
    del named["kinds"]
    return named


def kinds_of(window: Any, *options: Any) -> tuple[type, ...]:
    """Return the types of options for a call's key, because 1 and True compare equal."""
    kinds = [option.__class__ for option in options]
    if isinstance(window, tuple):
        kinds += [side.__class__ for side in window]
    return tuple(kinds)


def fill_empty(arrays: Mapping[str, ArrayInfo], stream: int | None) -> None:
    """Fill ``out`` with zeros, and ``lse`` with -inf or the sinks. ``stream`` is a handle, or None for host arrays."""
    _fill(arrays["out"], 0.0, stream)
    if "lse" in arrays:
        _fill(arrays["lse"], arrays.get("sink", -math.inf), stream)


def _fill(info: ArrayInfo, value: float | ArrayInfo, stream: int | None) -> None:
    """Fill an array with a number, or with one number per head, which is the second-to-last dimension."""
    if info.device is None:
        host_array(info)[...] = host_array(value)[:, None] if isinstance(value, ArrayInfo) else value
        return

    def write(array: Any, heads: Any) -> None:
        array[...] = value if heads is None else heads[:, None]

    owner = value.owner if isinstance(value, ArrayInfo) else None
    if info.kind == "torch":
        with working_on("torch", info.device, stream):
            write(info.owner, owner)
        return

    def write_by_cupy(cupy: Any) -> None:
        with cupy.cuda.Device(info.device), working_on("cupy", info.device, stream):
            write(cupy.asarray(info.owner), None if owner is None else cupy.asarray(owner))

    with_cupy("cupy.ndarray.fill", write_by_cupy)


class AttentionOperation(Operation[P, AttentionConfig]):
    """Base class of the attention operations. Each call launches one kernel."""

    joins_axes: ClassVar[bool] = False

    @abstractmethod
    def lengths(self, problem: P, shapes: Sequence[Any], size_options: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return batch, q_length and k_length for resized(), or None if check() must validate the call."""

    @abstractmethod
    def configs(self, problem: P, gpu: Gpu) -> Iterator[AttentionConfig]:
        """Yield every configuration that may run the problem at other sizes with the same kinds of masks."""

    @abstractmethod
    def sizes_for(
        self, problem: P, config: AttentionConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[P], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launch."""

    def resized(
        self, problem: P, shapes: Sequence[Any], strides_bytes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[P, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the problem with other sizes."""
        q, k, v, out = shapes[0], shapes[1], shapes[2], shapes[-1]
        if v[:-2] != k[:-2] or (out is not None and out[:-2] != q[:-2]):
            return None
        lengths = self.lengths(problem, shapes, size_options)
        if lengths is None:
            return None
        new = problem.resized(*lengths, shapes, strides_bytes)
        if new is None:
            return None
        return new, (*q[:-1], v[-1]), (*q[:-3], q[-2], q[-3]) if problem.has_lse else None

    def alignment_masks(self, problem: P) -> tuple[int, ...]:
        """Return 15 for q, k, v and out, which are accessed by TMA or in vectors, and 3 for the other arrays."""
        return (15, 15, 15, *(3,) * (len(self.inputs) - 3), 15)

    def plan_key(self, problem: P) -> Hashable:
        """Return the fields, other than sizes, on which a kernel and its tensor maps depend."""
        return problem.plan_key

    def compute_without_kernel(self, problem: P, arrays: Mapping[str, ArrayInfo], stream: int | None) -> bool:
        """Write the results and return True if no query attends to a key."""
        if problem.has_keys:
            return False
        fill_empty(arrays, stream)
        return True

    def kernels(self, problem: P, config: AttentionConfig) -> tuple[tuple[str, Any], ...]:
        """Return the template and the configuration of the kernel."""
        return ((config.template, config),)

    def arguments(
        self, problem: P, config: AttentionConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launch arguments of a call."""
        (sizes,) = self.sizes_for(problem, config, gpu, resident)(problem)
        return (launch_arguments(problem, config, get_target(gpu.target), sizes),)

    def reference(self, problem: P, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result in float64, and round once."""
        reference(problem, arrays)

    def kernels_up_to(self, checked: Checked[P], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the kernels for each kind of mask that is possible for lengths up to ``max_m``."""
        problem = checked.problem
        problem.check_not_empty()
        for is_causal, has_window in problem.limits.kinds_up_to(max_m):
            for config in self.configs(replace(problem, is_causal=is_causal, has_window=has_window), gpu):
                yield config.template, config


class Attention(AttentionOperation[Problem]):
    """Operation of attention()."""

    name: ClassVar[str] = NAME
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "sink")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, None, 2)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[Problem]:
        """Validate a call. ``options`` is an AttentionOptions object."""
        return check_attention(*inputs, out=out, **named_options(options))

    def lengths(
        self, problem: Problem, shapes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[int, int, int] | None:
        """Return the sizes of the arrays."""
        q, k = shapes[:2]
        return (q[0], q[1], k[1]) if q[0] == k[0] else None

    def configure(self, problem: Problem, gpu: Gpu, memo: dict[Any, Any]) -> AttentionConfig:
        """Return the configuration for a problem."""
        key = size_class(problem.batch, problem.q_length, problem.k_length, problem.is_varlen)
        return choose(ATTENTION, problem, gpu, memo, key)

    def configs(self, problem: Problem, gpu: Gpu) -> Iterator[AttentionConfig]:
        """Yield all candidates, because almost every one is the best at some size."""
        yield from (config for config, _ in times(problem, np.ones(1, np.int64), gpu))
        yield from every_entry_config(ATTENTION, problem, gpu)

    def problems_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterable[Problem]:
        """Return one problem for each number of queries at which the configuration may change."""
        table = choice_table(ATTENTION, checked.problem, gpu, max_m)
        return [checked.problem.with_queries(m) for m in table.starts if m <= max_m]

    def sizes_for(
        self, problem: Problem, config: AttentionConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[Problem], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launch."""
        sizes = attention_sizes(problem, config, gpu.sm_count)
        return lambda problem: (sizes(problem),)


class AttentionVarlen(Attention):
    """Operation of attention_varlen(). The sizes of a call are the maximum lengths."""

    name: ClassVar[str] = VARLEN
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sink")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, 0, 0, None, 2)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[Problem]:
        """Validate a call. ``options`` is a VarlenOptions object."""
        return check_varlen(*inputs, out=out, **named_options(VarlenOptions(*options)))

    def lengths(
        self, problem: Problem, shapes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[int, int, int] | None:
        """Return the number of sequences and the maximum lengths."""
        q, k, _, q_offsets, k_offsets = shapes[:5]
        max_q, max_k = size_options
        if q_offsets != k_offsets or max_q.__class__ is not int or max_k.__class__ is not int or max_q < 1 or max_k < 1:
            return None
        return q_offsets[0] - 1, min(max_q, q[0]), min(max_k, k[0])


ATTENTION_CALL, VARLEN_CALL = Attention(), AttentionVarlen()
