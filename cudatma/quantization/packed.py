"""PackedWeight: one int4 weight in the layout that the kernels read, on the host or on a device; pack(), unpack()."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.arrays import with_cupy
from cudatma.dtypes import ACTIVATION_TYPES, BFLOAT16
from cudatma.errors import ArgumentTypeError, FieldError, QuantizationError, WeightFileError
from cudatma.quantization import layout_v1
from cudatma.quantization.layout_v1 import LAYOUT_VERSION, SYMMETRIC_ZERO
from cudatma.quantization.namespaces import host_array, library_of, namespace_of, on_device_of, upload
from cudatma.quantization.scale_range import ScaleFit, fit_scales
from cudatma.quantization.storage import StoredWeight, read_weights, write_weights


@dataclass(frozen=True, slots=True, eq=False)
class LogicalWeight:
    """A weight's integers in plain order: q uint8 (K, N), scales (G, N), zeros uint8 (G, N) or None, perm (K,) or None.

    Rows of q are packed rows: row k belongs to activation column perm[k].
    """

    q: Any
    scales: Any
    zeros: Any | None
    perm: Any | None


def unpack(weight: Any) -> LogicalWeight:
    """The inverse of pack(): a PackedWeight's integers in plain order, on the host or the device where it is."""
    k, n = weight.shape
    xp = namespace_of(weight.qweight)
    with on_device_of(weight.qweight):
        q = layout_v1.unpack_values(weight.qweight, layout_v1.blocks(k), layout_v1.blocks(n), xp)
        rows = [None if a is None else layout_v1.restore_columns(a)[:, :n] for a in (weight.scales, weight.zeros)]
        return LogicalWeight(q[:k, :n], rows[0], rows[1], weight.perm)


#: Rows of K that share one scale; -1 is one scale for the whole column.
GROUP_SIZES = (32, 64, 128, -1)
#: GPTQ's first format stores zero points minus one in four bits, so 16 occurs.
MAX_ZERO = 16

_MAX_EXTENT = 2**31 - 1
_NAMES = ("qweight", "scales", "zeros", "perm")


class _Referable:
    """Slotted dataclasses of Python 3.10 cannot be asked for a weak reference themselves."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PackedWeight(_Referable):
    """A weight W of shape (K, N), int4, in layout version 1 (docs/design/packed_weights.md).

    qweight: uint8 (N64 * K64, 2048), C order. scales: fp16 or bf16 (G, 64 N64). zeros: uint8 (G, 64 N64), 0..16, or
    None where symmetric (the offset is 8). perm: int32 (K,) or None; packed row k multiplies activation column
    perm[k]. shape: (K, N). group_size: 32, 64, 128 or -1. dtype: ``"float16"`` or ``"bfloat16"``, the scales' type.

    All arrays are NumPy arrays, or all are CuPy arrays of one device. Everything is checked when the weight is made:
    QuantizationError names the field (shapes, dtypes, order, NaN and infinite scales, zero points over 16, a perm that
    is no permutation), ArgumentTypeError an object that is no such array. What the padding of qweight holds is not
    checked: activations beyond K read as zero and outputs beyond N are never written. Weights compare by identity.

    The arrays are not to be changed afterwards: kernels rely on what was read of them then. Make another weight.
    scale_fit: how kernels may multiply scales and subtract zero points in one step (scale_range.py).
    """

    qweight: Any
    scales: Any
    zeros: Any | None
    perm: Any | None
    shape: tuple[int, int]
    group_size: int
    dtype: str
    layout_version: int = LAYOUT_VERSION
    scale_fit: ScaleFit = field(default=ScaleFit(), init=False)
    #: What kernels cache with a weight (launch plans), by their own keys; never saved or copied.
    attachments: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _check_facts(self)
        _check_arrays(self)
        object.__setattr__(self, "scale_fit", fit_scales(_checked_scales(self)))
        _check_values(self)

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 8."""
        return self.zeros is None

    @property
    def groups(self) -> int:
        """G, the number of scale groups along K."""
        return layout_v1.group_count(self.shape[0], self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(int(a.nbytes) for a in self._arrays() if a is not None)

    @property
    def device(self) -> int | None:
        """The CUDA device ordinal that holds the arrays; None on the host."""
        return int(self.qweight.device.id) if library_of(self.qweight) == "cupy" else None

    def dequantize(self, *, dtype: Any = np.float64) -> NDArray[Any]:
        """W as a NumPy array (K, N) of ``dtype``: (q - zero) * scale, rows in the order of the activation's columns.

        Exact in float32 and float64 (a 5-bit integer times an 11-bit significand); other types round once.
        """
        dtype = np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)
        logical = unpack(self.to_host())
        k = self.shape[0]
        size = k if self.group_size == -1 else self.group_size
        exact: Any = np.float64 if dtype == np.float64 else np.float32
        out: NDArray[Any] = np.empty(self.shape, dtype=dtype)
        for group in range(self.groups):
            rows = slice(group * size, min((group + 1) * size, k))
            zero = SYMMETRIC_ZERO if logical.zeros is None else logical.zeros[group].astype(exact)
            values = (logical.q[rows].astype(exact) - zero) * logical.scales[group].astype(exact)
            with np.errstate(over="ignore"):  # as the GPU: what is too large for dtype becomes infinite
                out[rows if logical.perm is None else logical.perm[rows]] = values.astype(dtype)
        return out

    def to_device(self, device: int | None = None) -> PackedWeight:
        """This weight with CuPy arrays on ``device`` (an ordinal; None is CuPy's current one). Itself if already there.

        Raises ArgumentTypeError for what is no ordinal, and where the installed CuPy has no bf16 and the scales are
        bf16; DriverError without CuPy, driver or such a GPU.
        """
        if device is not None and (type(device) is not int or device < 0):
            raise ArgumentTypeError("device", repr(device), "a device's ordinal, an int from 0 up, or None")

        def move(cupy: Any) -> PackedWeight:
            ordinal = cupy.cuda.Device().id if device is None else device
            if self.device == ordinal:
                return self
            host = self.to_host()  # from another device by way of the host: GPUs need not be peers
            with cupy.cuda.Device(ordinal):
                return host._moved(upload)

        return with_cupy("PackedWeight.to_device", move)  # type: ignore[no-any-return]

    def to_host(self) -> PackedWeight:
        """This weight with NumPy arrays; itself if it is on the host."""
        return self if self.device is None else self._moved(lambda array: host_array(array, "array"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weight to a safetensors file (weights_file.save_weights). Raises WeightFileError."""
        write_weights(path, {"weight": self.stored("weight")})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedWeight:
        """Read the only weight of a file written by save() or save_weights(). Raises WeightFileError."""
        weights = read_weights(path)
        if len(weights) != 1:
            shown = ", ".join(list(weights)[:4]) or "none"
            raise WeightFileError(str(path), f"{len(weights)} weights ({shown})", "one", "use load_weights()")
        return cls.from_stored(path, next(iter(weights.values())))

    def stored(self, name: str) -> StoredWeight:
        """What a file holds of this weight under ``name``."""
        host = self.to_host()
        held = {array: getattr(host, array) for array in _NAMES if getattr(host, array) is not None}
        return StoredWeight(name, self.layout_version, self.shape, self.group_size, self.dtype, held)

    @classmethod
    def from_stored(cls, path: str | os.PathLike[str], stored: StoredWeight) -> PackedWeight:
        """The weight that the file at ``path`` holds. Raises WeightFileError, which names file, weight and field."""
        parts = stored.arrays
        try:
            return cls(
                qweight=parts["qweight"],
                scales=parts["scales"],
                zeros=parts.get("zeros"),
                perm=parts.get("perm"),
                shape=stored.shape,
                group_size=stored.group_size,
                dtype=stored.dtype,
            )
        except FieldError as error:
            field = f"{os.fspath(path)}: {stored.name}.{error.field}"
            raise WeightFileError(field, error.got, error.allowed, "pack the weight again") from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are made anew: what kernels attached belongs to this weight's addresses.
        return type(self), tuple(getattr(self, part.name) for part in fields(self) if part.init)

    def __repr__(self) -> str:
        where = "host" if self.device is None else f"device {self.device}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        order = "" if self.perm is None else ", act-order"
        return f"PackedWeight(shape={self.shape}, group_size={self.group_size}, {self.dtype}, {kind}{order}, {where})"

    def _arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _NAMES)

    def _moved(self, move: Callable[[Any], Any]) -> PackedWeight:
        """A copy whose arrays were moved. They are what was checked already, so nothing is read back to check it."""
        twin = object.__new__(PackedWeight)
        for part in fields(self):
            value = getattr(self, part.name)
            moved = move(value) if part.name in _NAMES and value is not None else value
            object.__setattr__(twin, part.name, moved)
        object.__setattr__(twin, "attachments", {})
        return twin


def check_group_size(group_size: object) -> None:
    """QuantizationError unless ``group_size`` is one of GROUP_SIZES."""
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        raise QuantizationError("group_size", repr(group_size), allowed, "-1 is the whole column")


def _check_facts(weight: PackedWeight) -> None:
    if type(weight.layout_version) is not int or weight.layout_version != LAYOUT_VERSION:
        raise QuantizationError("layout_version", weight.layout_version, str(LAYOUT_VERSION))
    shape: object = weight.shape
    if not isinstance(shape, tuple) or len(shape) != 2 or any(type(e) is not int for e in shape):
        raise QuantizationError("shape", shape, "a tuple (K, N) of two ints")
    if any(not 1 <= extent <= _MAX_EXTENT for extent in shape):
        raise QuantizationError("shape", shape, f"K and N in 1..{_MAX_EXTENT}")
    check_group_size(weight.group_size)
    if not isinstance(weight.dtype, str) or weight.dtype not in ACTIVATION_TYPES:
        remedy = "convert the scales to float16 or bfloat16"
        raise QuantizationError("dtype", weight.dtype, ", ".join(ACTIVATION_TYPES), remedy)


def _check_arrays(weight: PackedWeight) -> None:
    dtypes: dict[str, np.dtype[Any]] = {
        "qweight": np.dtype(np.uint8),
        "scales": ACTIVATION_TYPES[weight.dtype].numpy,
        "zeros": np.dtype(np.uint8),
        "perm": np.dtype(np.int32),
    }
    library = library_of(weight.qweight)
    for name, shape in layout_v1.part_shapes(*weight.shape, weight.group_size).items():
        array, dtype = getattr(weight, name), dtypes[name]
        if array is None and name in ("zeros", "perm"):
            continue
        if library_of(array) not in ("numpy", "cupy") or not hasattr(array, "flags"):
            raise ArgumentTypeError(name, type(array).__name__, "a NumPy or CuPy array", "use pack() to build a weight")
        if library_of(array) != library or (library == "cupy" and array.device.id != weight.qweight.device.id):
            raise QuantizationError(
                name, f"{library_of(array)} array", "the library and device of qweight", "use to_device()"
            )
        if array.dtype != dtype or tuple(array.shape) != shape:
            raise QuantizationError(
                name, f"{array.dtype} {tuple(array.shape)}", f"{dtype} {shape}", "use pack() to build it"
            )
        if not array.flags.c_contiguous:
            raise QuantizationError(name, f"strides {array.strides}", "C order without gaps", "use ascontiguousarray")


def _checked_scales(weight: PackedWeight) -> NDArray[Any]:
    """The scales on the host; they are small compared with qweight."""
    scales = host_array(weight.scales, "scales")
    broken = ~np.isfinite(scales)
    if broken.any():
        group, position = (int(i) for i in np.argwhere(broken)[0])
        field = f"scales[{group}, {layout_v1.column_at(position)}]"
        raise QuantizationError(
            field, str(scales[group, position]), "finite values", "the weight was not loaded, or not quantized well"
        )
    return scales


def _check_values(weight: PackedWeight) -> None:
    """Read zero points and perm once, on the host."""
    if weight.zeros is not None:
        zeros = host_array(weight.zeros, "zeros")
        if int(zeros.max()) > MAX_ZERO:
            group, position = (int(i) for i in np.argwhere(zeros > MAX_ZERO)[0])
            field = f"zeros[{group}, {layout_v1.column_at(position)}]"
            raise QuantizationError(field, int(zeros[group, position]), f"0..{MAX_ZERO}")
    if weight.perm is not None:
        perm, k = host_array(weight.perm, "perm"), weight.shape[0]
        if int(perm.min()) < 0 or int(perm.max()) >= k or (np.bincount(perm, minlength=k) != 1).any():
            raise QuantizationError("perm", "repeated or outside values", f"each of 0..{k - 1} once")


def pack(
    q: Any, scales: Any, zeros: Any | None = None, *, group_size: int = 128, perm: Any | None = None
) -> PackedWeight:
    """Pack integers and scales into layout version 1.

    q: uint8 (K, N), 0..15, NumPy or CuPy; the result is on the same device. scales: fp16 or bf16 (G, N) with
    G = ceil(K / group_size), or 1 for group_size -1. zeros: integers 0..16 (G, N), None for the symmetric offset 8.
    perm: (K,), row k of q belongs to activation column perm[k]. Raises QuantizationError, ArgumentTypeError.
    """
    xp = namespace_of(q)
    if xp is np and not isinstance(q, np.ndarray):
        raise ArgumentTypeError("q", type(q).__name__, "a NumPy or CuPy array of uint8")
    if q.ndim != 2 or q.dtype != np.uint8 or 0 in q.shape:
        raise QuantizationError("q", f"{q.dtype} {q.shape}", "uint8 (K, N) with K and N at least 1")
    if int(q.max()) > 15:
        raise QuantizationError("q", f"a value of {int(q.max())}", "0..15", "four bits hold no more")
    shape = (int(q.shape[0]), int(q.shape[1]))
    check_group_size(group_size)
    scales, zeros = host_array(scales, "scales"), None if zeros is None else _plain_zeros(zeros)
    rows = layout_v1.group_count(shape[0], group_size)
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array is not None and array.shape != (rows, shape[1]):
            raise QuantizationError(
                name, array.shape, f"({rows}, {shape[1]}) for q {shape} and group_size {group_size}"
            )
    with on_device_of(q):
        packed = layout_v1.pack_values(_padded_values(q, zeros, group_size, xp))
        place: Callable[[Any], Any] = np.ascontiguousarray if xp is np else upload
        return PackedWeight(
            qweight=xp.ascontiguousarray(packed),
            scales=place(_ordered(scales, 0)),
            zeros=None if zeros is None else place(_ordered(zeros, SYMMETRIC_ZERO)),
            perm=None if perm is None else place(_plain_perm(perm, shape[0])),
            shape=shape,
            group_size=group_size,
            dtype=scales.dtype.name,
        )


def _plain_zeros(zeros: Any) -> NDArray[Any]:
    host = host_array(zeros, "zeros")
    if host.dtype.kind not in "ui":
        raise QuantizationError("zeros", host.dtype.name, f"integers 0..{MAX_ZERO}")
    if host.size and (host.min() < 0 or host.max() > MAX_ZERO):
        raise QuantizationError("zeros", f"{host.min()}..{host.max()}", f"0..{MAX_ZERO}")
    return host.astype(np.uint8)


def _plain_perm(perm: Any, k: int) -> NDArray[np.int32]:
    """Convert to int32 after a range check in the original type; PackedWeight rejects duplicates."""
    host = host_array(perm, "perm")
    if host.dtype.kind not in "ui" or host.shape != (k,):
        raise QuantizationError("perm", f"{host.dtype} {host.shape}", f"integers ({k},)")
    if host.min() < 0 or host.max() >= k:
        raise QuantizationError("perm", f"{host.min()}..{host.max()}", f"each of 0..{k - 1} once")
    return np.ascontiguousarray(host, dtype=np.int32)


def _ordered(rows: NDArray[Any], padding: int) -> NDArray[Any]:
    """(G, N) -> (G, 64 N64) padded and in stored order."""
    groups, n = rows.shape
    padded: NDArray[Any] = np.full((groups, layout_v1.blocks(n) * layout_v1.BLOCK), padding, dtype=rows.dtype)
    padded[:, :n] = rows
    return np.ascontiguousarray(layout_v1.order_columns(padded))


def _padded_values(q: Any, zeros: NDArray[Any] | None, group_size: int, xp: Any) -> Any:
    """q padded to whole blocks with values that dequantise to 0.

    A zero point of 16 has no such value: there padding holds 15, and the zero activation beyond K cancels it.
    """
    k, n = q.shape
    padded_shape = (layout_v1.blocks(k) * layout_v1.BLOCK, layout_v1.blocks(n) * layout_v1.BLOCK)
    if padded_shape == (k, n):
        return q
    padded = xp.full(padded_shape, SYMMETRIC_ZERO, dtype=np.uint8)
    padded[:k, :n] = q
    if zeros is not None:
        for row in range(k, padded_shape[0]):
            group = 0 if group_size == -1 else row // group_size
            if group < zeros.shape[0]:
                padded[row, :n] = xp.asarray(np.minimum(zeros[group], 15))
    return padded
