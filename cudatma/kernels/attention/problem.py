"""What a caller of attention() asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cudatma.errors import ArgumentError, ArgumentTypeError, counted
from cudatma.kernels.family import MAX_EXTENT

#: Types of q, k, v and the result, and their names in wgmma.
OPERAND_TYPES = {"float16": "f16", "bfloat16": "bf16"}
#: What a cache of keys and values may be instead, in attention_decode().
CACHE_TYPE = "float8_e4m3fn"
#: Head dims of q and k, and of v.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
#: Versions of the kernel, the baseline first.
VERSION_NAMES = ("phase1", "a1", "a2", "a3", "a4", "p1")


#: Steps of rounded_up() between two powers of two.
_STEPS = 8


def rounded_up(size: int) -> int:
    """Return the size in eight steps an octave: exact up to 16, else at most an eighth more, and at most MAX_EXTENT."""
    step = 1 << max(0, (size - 1).bit_length() - 1 - (_STEPS - 1).bit_length())
    return min(-(-size // step) * step, MAX_EXTENT)


def size_class(batch: int, q_length: int, k_length: int, is_varlen: bool) -> tuple[int, int]:
    """Return what the choice of a configuration depends on of the keys and the batch.

    Of the keys it is 0 if ``k_length`` equals ``q_length``, so that both change together. Otherwise it is ``k_length``,
    rounded up to eight steps an octave and at least 2. The number of varlen sequences is rounded up, too: their lengths
    differ, so that tiles are counted roughly anyway.
    """
    keys = 0 if q_length == k_length else rounded_up(max(2, k_length))
    return keys, rounded_up(batch) if is_varlen else batch


@dataclass(frozen=True, slots=True)
class Problem:
    """out (batch, q_length, heads, v_head_dim) = softmax(scale q k^T) v, for each head by itself.

    heads: of q; kv_heads: of k and v, which groups of heads // kv_heads share. dtype: one of OPERAND_TYPES. is_causal:
    query i sees keys up to i + k_length - q_length. has_window: it sees keys near that one only. has_softcap: whether
    logits are capped. has_sink: whether each head has a sink. has_lse: whether the logarithms of the sums are a result
    too. is_varlen: sequences of different lengths lie one after the other; q_length and k_length are then the longest.
    version: one of VERSION_NAMES, "" for any. Raises ArgumentError, ArgumentTypeError.
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

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "q_length", "k_length"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            if not 1 <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"1 to {MAX_EXTENT}")
        if self.heads % self.kv_heads:
            raise ArgumentError("kv_heads", self.kv_heads, f"a divisor of the {self.heads} heads of q")
        if (self.head_dim, self.v_head_dim) not in HEAD_DIMS:
            shown = ", ".join(f"{q}/{v}" if q != v else str(q) for q, v in HEAD_DIMS)
            raise ArgumentError("head_dim", f"{self.head_dim} of q and k, {self.v_head_dim} of v", shown)
        if not isinstance(self.dtype, str) or self.dtype not in OPERAND_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(OPERAND_TYPES))
        if self.version not in ("", *VERSION_NAMES):
            raise ArgumentError("version", self.version, ", ".join(VERSION_NAMES))

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads // self.kv_heads

    @property
    def m(self) -> int:
        """Queries of a sequence: the size that changes from call to call."""
        return self.q_length

    @property
    def n(self) -> int:
        """Columns of a head of the result."""
        return self.v_head_dim

    @property
    def k(self) -> int:
        """Keys of a sequence."""
        return self.k_length

    @property
    def keys(self) -> int:
        """The class of ``k_length``: see size_class()."""
        return size_class(self.batch, self.q_length, self.k_length, self.is_varlen)[0]

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All that the choice depends on but ``q_length``."""
        sizes = size_class(self.batch, self.q_length, self.k_length, self.is_varlen)
        return (*sizes, *[getattr(self, name) for name in _EXACT])

    def with_queries(self, q_length: int) -> Problem:
        """Return the problem with another ``q_length``; ``k_length`` follows if both were equal."""
        return replace(self, q_length=q_length, k_length=q_length if self.keys == 0 else self.k_length)

    def shape(self) -> Problem:
        """Return the problem with one query that ``fixed`` describes."""
        keys, batch, *_ = self.fixed
        return replace(self, batch=batch, q_length=1, k_length=keys or 1)

    @property
    def constraint(self) -> str:
        """Why only some configurations may serve, in words; empty where all may."""
        return f"version {self.version} is asked for" if self.version else ""

    @property
    def description(self) -> str:
        """In words, for people."""
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        queries = "1 query" if self.q_length == 1 else f"{self.q_length} queries"
        told = [f"{queries}, {counted(self.k_length, 'key')}, head dim {dims}, {self.dtype}"]
        told += [counted(self.heads, "head") if self.group == 1 else f"{self.heads}/{self.kv_heads} heads"]
        told += [f"batch of {self.batch}"] if self.batch > 1 else []
        kinds = {"is_causal": "causal", "has_window": "window", "has_softcap": "softcap", "has_lse": "lse"}
        kinds |= {"has_sink": "sinks", "is_varlen": "of different lengths"}
        return ", ".join([*told, *(words for name, words in kinds.items() if getattr(self, name))])

    def as_json(self) -> dict[str, Any]:
        """As a tuning entry keeps it."""
        kept = {name: value for name, value in asdict(self).items() if name != "version"}
        return {"m": self.m, "n": self.n, "k": self.k, "keys": self.keys} | kept

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """From a tuning entry, or from m, n, k and options of a command line. Raises KeyError, ArgumentError,
        ArgumentTypeError."""
        given = {"q_length": raw["m"], "k_length": raw["k"], "v_head_dim": raw["n"], "head_dim": raw["n"]}
        given |= {"batch": 1, "heads": 1} | {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        return cls(**(given | {"kv_heads": raw.get("kv_heads") or given["heads"]}))


#: Fields of a Problem that ``fixed`` holds as they are.
_EXACT = tuple(name for name in Problem.__dataclass_fields__ if name not in ("batch", "q_length", "k_length"))
