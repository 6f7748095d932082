"""Problem and DecodeProblem, which describe the computation of a call without addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from cudatma.descriptor.rules import STRIDE_LIMIT, TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives, counted
from cudatma.kernels.family import MAX_EXTENT, resized_copy
from cudatma.kernels.launch_struct import Member

#: Maps the types of q, k, v and the result to their names in wgmma.
OPERAND_TYPES = {"float16": "f16", "bfloat16": "bf16"}
#: Additional type for the cache of attention_decode().
CACHE_TYPE = "float8_e4m3fn"
#: Supported pairs (head_dim, v_head_dim).
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
#: Number of steps of rounded_up() between two powers of two.
_STEPS = 8


class KernelOption(NamedTuple):
    """An option of the public functions that changes the kernel.

    Attributes
    ----------
    field : str
        Name of the bool in Problem and in AttentionConfig.
    name : str
        Suffix in the kernel's entry.
    words : str
        Name of the option in the description of a problem.
    parameters : tuple[str, ...]
        Launch parameters that the option adds.
    members : tuple[Member, ...]
        Members of the struct that the option adds.
    """

    field: str
    name: str
    words: str
    parameters: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()


_UPPER = Member("upper", "u32", "query i attends to keys below i + upper; signed")
_LOWER = Member("lower", "u32", "query i attends to keys from i + lower; signed")
_CAP_SCALE = Member("cap_scale", "float", "multiplier for the scores in the argument of tanh")
#: All options, in the order in which an entry's name lists them.
OPTIONS = (
    KernelOption(field="is_causal", name="causal", words="causal", members=(_UPPER,)),
    KernelOption(field="has_window", name="window", words="window", members=(_UPPER, _LOWER)),
    KernelOption(field="has_softcap", name="softcap", words="softcap", members=(_CAP_SCALE,)),
    KernelOption(field="has_sink", name="sink", words="sinks", parameters=("sink",)),
)
#: Fields that a problem and the configs of its kernels have in common.
PROBLEM_FIELDS = ("dtype", "head_dim", "v_head_dim", *(option.field for option in OPTIONS))
#: Names of the options of representative kernels, for dumps and compile checks.
DUMPED_OPTIONS = ((), ("causal",), ("causal", "window", "sink"), ("window", "softcap"))


def check_kind(fields: Any) -> None:
    """Raise ArgumentError or ArgumentTypeError for head dims or a dtype without a kernel."""
    if (fields.head_dim, fields.v_head_dim) not in HEAD_DIMS:
        allowed = alternatives(f"{q} (with {v} for v)" if q != v else q for q, v in HEAD_DIMS)
        raise ArgumentError("head_dim", f"{fields.head_dim} for q and k, {fields.v_head_dim} for v", allowed)
    if not isinstance(fields.dtype, str) or fields.dtype not in OPERAND_TYPES:
        raise ArgumentTypeError("dtype", fields.dtype, alternatives(OPERAND_TYPES))


def rounded_up(size: int) -> int:
    """Round a size up to one of eight steps per power of two, and clamp it to MAX_EXTENT.

    Sizes up to 16 are exact. The result exceeds a larger size by at most an eighth.
    """
    step = 1 << max(0, (size - 1).bit_length() - 1 - (_STEPS - 1).bit_length())
    return min(-(-size // step) * step, MAX_EXTENT)


def size_class(batch: int, q_length: int, k_length: int, is_varlen: bool) -> tuple[int, int]:
    """Return the rounded number of keys and the rounded number of sequences, on which the choice depends.

    The first number is 0 if ``k_length`` equals ``q_length``, so that both lengths change together. Otherwise, it is
    ``k_length``, rounded up to eight steps per power of two and at least 2. The number of variable-length sequences is
    also rounded up.
    """
    keys = 0 if q_length == k_length else rounded_up(max(2, k_length))
    return keys, rounded_up(batch) if is_varlen else batch


class Layout(NamedTuple):
    """Layout (batch, length, heads, dim) of q, k, v or the result, with contiguous elements.

    Variable-length sequences form a batch of one. The batch axis of a paged cache counts its pages. An axis of one
    element has the stride of a dense array.
    """

    shape: tuple[int, ...] = (0, 0, 0, 0)
    strides_bytes: tuple[int, ...] = (0, 0, 0, 0)

    def resized(self, shape: tuple[int, ...], strides_bytes: Sequence[int]) -> Layout | None:
        """Return the layout with another batch and length but the same pitch, or None if TMA cannot address it."""
        _, row, _, element = self.strides_bytes
        if len(shape) == 3:
            shape, strides_bytes = (1, *shape), (0, *strides_bytes)
        batch, length, heads, dim = shape
        outer, _, head, inner = strides_bytes
        if heads == 1:
            head = dim * element
        elif head % TMA_ALIGNMENT_BYTES or not 0 <= head < STRIDE_LIMIT:
            return None
        if batch == 1:
            outer = length * heads * dim * element
        elif outer % TMA_ALIGNMENT_BYTES or not 0 <= outer < STRIDE_LIMIT:
            return None
        return Layout(shape, (outer, row, head, element)) if inner == element else None

    @property
    def is_disjoint(self) -> bool:
        """Whether all elements occupy different bytes.

        Each axis must step over all elements of the axes with smaller strides.
        """
        end = self.strides_bytes[-1]
        for stride, extent in sorted(zip(self.strides_bytes, self.shape, strict=True)):
            if extent > 1:
                if stride < end:
                    return False
                end += (extent - 1) * stride
        return True


class Mask(NamedTuple):
    """Range of the keys that a query attends to.

    Query i of a sequence is at position p = i + k_length - q_length, so the last query is aligned with the last key.
    The query attends to keys p - left to p + right. None means no limit.
    """

    left: int | None = None
    right: int | None = None

    def kind(self, q_length: int, k_length: int) -> tuple[bool, bool]:
        """Return whether the mask is causal and whether it has a window.

        A limit that excludes no key at these lengths is ignored.
        """
        left, right = self
        has_left = left is not None and left < k_length - 1
        if right is None or right >= q_length - 1:
            return False, has_left
        return right == 0, has_left or right > 0

    def kinds_up_to(self, length: int) -> set[tuple[bool, bool]]:
        """Return all kinds that the mask has for lengths up to ``length``."""
        return {self.kind(*lengths) for lengths in product((1, length), repeat=2)}


class Layouts(NamedTuple):
    """Layouts of a call's arrays."""

    q: Layout = Layout()
    k: Layout = Layout()
    v: Layout = Layout()
    out: Layout = Layout()


NO_LIMITS, NO_LAYOUTS = Mask(), Layouts()
P = TypeVar("P", bound="Problem")


@dataclass(frozen=True, kw_only=True)  # without slots, as resized_copy() requires
class Problem:
    """Computation of out (batch, q_length, heads, v_head_dim) = softmax(scale q k^T) v, separately for each head.

    Attributes
    ----------
    batch, q_length, k_length : int
            Number of sequences, number of queries per sequence, and number of keys per sequence. For sequences of
            variable length, the last two are the lengths of the longest sequence.
    heads, kv_heads : int
        Number of query heads, and number of KV heads. Each KV head is shared by ``heads // kv_heads`` query heads.
    head_dim, v_head_dim : int
        Head dim of q and k, and head dim of v and the result.
    dtype : str
        One of OPERAND_TYPES.
    is_causal, has_window : bool
        Whether later keys are excluded, and whether another limit excludes keys.
    has_softcap, has_sink, has_lse : bool
        Whether logits are capped, whether heads have sinks, and whether the call returns lse.
    is_varlen : bool
        Whether the sequences have variable lengths and are concatenated.
    version : str
        Version of the kernel, or "" for any.
    scale, softcap : float
        Factor by which q k^T is multiplied, and cap of the logits (0 for no cap).
    limits : Mask
        Range of keys that a query attends to. A limit that excludes no key makes the problem neither causal nor
        windowed.
    layouts : Layouts
            Layouts of the arrays. The choice of a configuration ignores ``scale`` and all fields after it, so problems
            in tuning files use NO_LAYOUTS. Sizes may be 0 in a problem with layouts.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is out of range.
    """

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    v_head_dim: int
    dtype: str
    is_causal: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sink: bool = False
    has_lse: bool = False
    is_varlen: bool = False
    version: str = ""
    scale: float = 1.0
    softcap: float = 0.0
    limits: Mask = NO_LIMITS
    layouts: Layouts = NO_LAYOUTS

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "q_length", "k_length"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            min_value = 0 if name in _SIZES and self.layouts is not NO_LAYOUTS else 1
            if not min_value <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"{min_value} to {MAX_EXTENT}")
        if self.heads % self.kv_heads:
            raise ArgumentError("kv_heads", self.kv_heads, f"a divisor of {self.heads} (the number of query heads)")
        check_kind(self)
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise ArgumentTypeError(name, type(getattr(self, name)).__name__, "bool")

    @classmethod
    def of(cls: type[P], *, q_length: int, head_dim: int, dtype: str, **fields: Any) -> P:
        """Return a problem with defaults for fields that are not given.

        By default, there is one sequence and one head. ``k_length``, ``v_head_dim`` and ``kv_heads`` default to
        ``q_length``, ``head_dim`` and ``heads``.
        """
        heads = fields.get("heads", 1)
        given = {"batch": 1, "heads": heads, "kv_heads": heads, "k_length": q_length, "v_head_dim": head_dim}
        return cls(q_length=q_length, head_dim=head_dim, dtype=dtype, **given | fields)

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads

    # ---- Call

    @property
    def has_keys(self) -> bool:
        """Whether any query may attend to a key. If False, no kernel is needed."""
        return bool(self.batch and self.q_length and self.k_length and self.layouts.k.shape[0])

    def check_not_empty(self) -> None:
        """Raise ArgumentError if a call has nothing to compute."""
        if not self.has_keys:
            shapes = self.layouts.q.shape, self.layouts.k.shape
            raise ArgumentError(
                "q.shape, k.shape",
                shapes,
                "shapes with positive batch sizes and sequence lengths",
                "pass nonempty arrays",
            )

    def resized(
        self: P, batch: int, q_length: int, k_length: int, shapes: Sequence[Any], strides_bytes: Sequence[Any]
    ) -> P | None:
        """Return the problem with other sizes, or None if it may be invalid or if its kind of mask differs.

        ``shapes`` and ``strides_bytes`` begin with q, k and v and end with out. The entries for out are None if the
        caller passes no out.
        """
        kind = self.limits.kind(q_length, k_length)
        if kind != (self.is_causal, self.has_window):
            return None
        if max(batch, q_length, k_length, shapes[1][0]) > MAX_EXTENT:
            return None
        q, k, v, out = self.layouts
        new_q = q.resized(shapes[0], strides_bytes[0])
        new_k = k.resized(shapes[1], strides_bytes[1])
        is_like_k = v == k and shapes[2] == shapes[1] and strides_bytes[2] == strides_bytes[1]
        new_v = new_k if is_like_k else v.resized(shapes[2], strides_bytes[2])
        if new_q is None or new_k is None or new_v is None:
            return None
        if shapes[-1] is None:
            (count, length, heads, _), (_, row, head, element) = new_q.shape, out.strides_bytes
            if length * row >= STRIDE_LIMIT:
                return None
            new_out = Layout((count, length, heads, self.v_head_dim), (length * row, row, head, element))
        else:
            given = out.resized(shapes[-1], strides_bytes[-1])
            if given is None or not given.is_disjoint:
                return None
            new_out = given
        layouts = Layouts(new_q, new_k, new_v, new_out)
        return resized_copy(self, batch=batch, q_length=q_length, k_length=k_length, layouts=layouts)

    @property
    def plan_key(self) -> tuple[Any, ...]:
        """Fields, other than sizes, scale and softcap, on which a kernel and its tensor maps depend."""
        kept = [value for name, value in vars(self).items() if name not in _SIZES + _OF_A_CALL]
        return (*kept, *[layout.strides_bytes[1] for layout in self.layouts])

    # ---- Choice of a configuration

    @property
    def m(self) -> int:
        """Number of queries per sequence."""
        return self.q_length

    @property
    def n(self) -> int:
        """Number of columns per head of the result."""
        return self.v_head_dim

    @property
    def k(self) -> int:
        """Number of keys per sequence."""
        return self.k_length

    @property
    def keys(self) -> int:
        """Size class of ``k_length``, as size_class() returns it."""
        return size_class(self.batch, self.q_length, self.k_length, self.is_varlen)[0]

    @property
    def fixed(self) -> tuple[Any, ...]:
        """Fields other than ``q_length`` on which the choice depends."""
        sizes = size_class(self.batch, self.q_length, self.k_length, self.is_varlen)
        return (*sizes, *[value for name, value in vars(self).items() if name not in _SIZES + _OF_A_CALL])

    def with_queries(self, q_length: int) -> Problem:
        """Return the problem with another ``q_length``. ``k_length`` also changes if the two lengths are equal."""
        return replace(self, q_length=q_length, k_length=q_length if self.keys == 0 else self.k_length)

    def shape(self) -> Problem:
        """Return the problem with one query that has the same ``fixed``."""
        keys, batch, *_ = self.fixed
        return replace(self, batch=batch, q_length=1, k_length=keys or 1, layouts=NO_LAYOUTS)

    @property
    def constraint(self) -> str:
        """Reason why only some configurations are allowed, or "" if all are allowed."""
        return f"version {self.version} is selected" if self.version else ""

    @property
    def description(self) -> str:
        """Description of the problem in words."""
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        queries = "1 query" if self.q_length == 1 else f"{self.q_length} queries"
        parts = [f"{queries}, {counted(self.k_length, 'key')}, head dim {dims}, {self.dtype}"]
        parts += [counted(self.heads, "head") if self.group == 1 else f"{self.heads}/{self.kv_heads} heads"]
        parts += [f"batch of {self.batch}"] if self.batch > 1 else []
        kinds = {option.field: option.words for option in OPTIONS}
        kinds |= {"has_lse": "lse", "is_varlen": "sequences of different lengths"}
        return ", ".join([*parts, *(words for name, words in kinds.items() if getattr(self, name))])

    def as_json(self) -> dict[str, Any]:
        """Return the problem in the form that tuning entries store."""
        kept = {name: value for name, value in vars(self).items() if name not in ("version", *_OF_A_CALL)}
        return {"m": self.m, "n": self.n, "k": self.k, "keys": self.keys} | kept

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """Return the problem of a tuning entry, or of the sizes m, n and k and the options of a command line.

        Raises KeyError, ArgumentError or ArgumentTypeError.
        """
        given = {"q_length": raw["m"], "k_length": raw["k"], "v_head_dim": raw["n"], "head_dim": raw["n"]}
        given |= {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        if not given.get("kv_heads"):
            given.pop("kv_heads", None)
        return cls.of(**given)


#: Fields that are flags.
_FLAGS = ("is_causal", "has_window", "has_softcap", "has_sink", "has_lse", "is_varlen")
#: Sizes, which may differ between problems of one plan.
_SIZES = ("batch", "q_length", "k_length")
#: Fields on which neither the choice of a configuration nor a kernel depends.
_OF_A_CALL = ("scale", "softcap", "limits", "layouts", "k_scale", "v_scale")


@dataclass(frozen=True, kw_only=True)
class DecodeProblem(Problem):
    """A Problem whose keys and values are in a cache. ``k_length`` is the maximum number of keys per sequence.

    Attributes
    ----------
    page_size : int
        Number of keys per page, or 0 without pages.
    has_fp8_cache : bool
        Whether keys and values are e4m3.
    k_scale, v_scale : float
        Scales of an e4m3 cache, or 1 if the kernel reads them from an array.
    k_scale_step, v_scale_step : int
        Stride between the scales of heads, in elements, or 0 for a single scale.
    """

    page_size: int = 0
    has_fp8_cache: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scale_step: int = 0
    v_scale_step: int = 0
