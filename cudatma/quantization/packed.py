"""Quantized weights in the layout that the kernels read, and functions that pack and unpack them."""

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
from cudatma.quantization.storage import StoredWeight, read_weight, write_weights
from cudatma.quantization.weight_format import WEIGHT_FORMATS, weight_format


@dataclass(frozen=True, slots=True, eq=False)
class LogicalWeight:
    """Codes, scales and zero points of a weight, in plain order.

    Row k of ``q`` belongs to column perm[k] of the activations.

    Parameters
    ----------
    q : array of uint8, shape (K, N)
        Codes. The codes of int4 are integers from 0 to 15.
    scales : array, shape (G, N)
        Scales, fp16 or bf16.
    zeros : array of uint8, shape (G, N), or None
        Zero points, or None for the offset 8.
    perm : array of int32, shape (K,), or None
        Column of the activations for each row, or None if the rows are in order.
    """

    q: Any
    scales: Any
    zeros: Any | None
    perm: Any | None


def unpack(weight: Any) -> LogicalWeight:
    """Unpack a weight into codes, scales and zero points in plain order.

    Parameters
    ----------
    weight : PackedWeight
        The weight.

    Returns
    -------
    LogicalWeight
        The weight's codes, scales, zero points and permutation, on the same device.
    """
    k, n = weight.shape
    xp = namespace_of(weight.qweight)
    with on_device_of(weight.qweight):
        kind = weight_format(weight.format)
        blocks = layout_v1.blocks(k), layout_v1.blocks(n)
        q = layout_v1.unpack_codes(weight.qweight, *blocks, kind.bits, kind.is_e2m1, xp)
        rows = [None if a is None else layout_v1.restore_columns(a)[:, :n] for a in (weight.scales, weight.zeros)]
        return LogicalWeight(q[:k, :n], rows[0], rows[1], weight.perm)


#: Supported group sizes of int4 weights. -1 means one scale per column.
GROUP_SIZES = WEIGHT_FORMATS["int4"].group_sizes
#: GPTQ's first format stores zero points minus one in four bits, so a zero point can be 16.
MAX_ZERO = 16

_MAX_EXTENT = 2**31 - 1
_NAMES = ("qweight", "scales", "zeros", "perm")


class _Referable:
    """Base class that supports weak references, because slotted dataclasses do not support them in Python 3.10."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PackedWeight(_Referable):
    """A quantized weight W of shape (K, N) in layout version 1 (docs/design/packed_weights.md).

    Either all arrays are NumPy arrays, or all arrays are CuPy arrays on one device. Use ``quantize``, ``pack`` or an
    importer to create a weight. Weights compare by identity.

    Parameters
    ----------
    qweight : array of uint8, shape (N64 * K64 * bits / 4, 2048)
        Packed codes in C order, with K64 = ceil(K / 64) and N64 = ceil(N / 64).
    scales : array of float16 or bfloat16, shape (G, 64 N64)
        Scales in stored order. G is the number of groups along K.
    zeros : array of uint8, shape (G, 64 N64), or None
        Zero points from 0 to 16 in stored order, or None for a symmetric weight, which has the offset 8.
    perm : array of int32, shape (K,), or None
        Activation order, or None. Packed row k multiplies column perm[k] of the activations.
    shape : tuple of int
        The sizes (K, N).
    group_size : int
        Number of rows of K that share a scale: 16, 32, 64, 128, or -1 for all rows. ``format`` limits these sizes.
    dtype : str
        Type of the scales, ``"float16"`` or ``"bfloat16"``.
    layout_version : int, default 1
        Version of the layout.
    format : str, default "int4"
        Format of the codes: ``"int4"``, ``"mxfp4"``, ``"nvfp4"``, ``"fp8"`` (e4m3) or ``"int8"``.
    tensor_scale : float, default 1.0
        Multiplier for the whole weight, an fp32 number. Only ``"nvfp4"`` allows values other than 1.

    Attributes
    ----------
    scale_fit : ScaleFit
        How kernels can apply the scale and offset with one multiply-add.
    attachments : dict
        Objects that kernels cache with this weight. They are neither saved nor copied.

    Raises
    ------
    QuantizationError
        If a shape, dtype or order is invalid, if a scale or an fp8 code is not finite, if a zero point exceeds 16, or
        if perm is not a permutation. The error names the field.
    ArgumentTypeError
        If an array is not a NumPy or CuPy array.

    Notes
    -----
    Do not modify the arrays after packing. Create a new weight instead. The padding of qweight is not checked, because
    kernels read activations beyond K as zero and never write outputs beyond N.

    Examples
    --------
    >>> weight = cudatma.quantize(np.ones((128, 64), dtype=np.float32))
    >>> weight
    PackedWeight(shape=(128, 64), group_size=128, float16, symmetric, host)
    >>> float(weight.dequantize()[0, 0])
    1.0
    """

    qweight: Any
    scales: Any
    zeros: Any | None
    perm: Any | None
    shape: tuple[int, int]
    group_size: int
    dtype: str
    layout_version: int = LAYOUT_VERSION
    format: str = "int4"
    tensor_scale: float = 1.0
    scale_fit: ScaleFit = field(default=ScaleFit(), init=False)
    attachments: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _check_facts(self)
        _check_arrays(self)
        scales, kind = _checked_scales(self), weight_format(self.format)
        fit = ScaleFit(exponent=kind.scale_exponent(scales)) if self.format != "int4" else fit_scales(scales)
        object.__setattr__(self, "scale_fit", fit)
        _check_values(self)

    @property
    def symmetric(self) -> bool:
        """Whether the weight has no zero points."""
        return self.zeros is None

    @property
    def groups(self) -> int:
        """Number of scale groups along K."""
        return layout_v1.group_count(self.shape[0], self.group_size)

    @property
    def nbytes(self) -> int:
        """Total size of all arrays in bytes."""
        return sum(int(a.nbytes) for a in self._arrays() if a is not None)

    @property
    def device(self) -> int | None:
        """CUDA device ordinal of the arrays, or None if they are on the host."""
        return int(self.qweight.device.id) if library_of(self.qweight) == "cupy" else None

    def dequantize(self, *, dtype: Any = np.float64) -> NDArray[Any]:
        """Return the dequantized values of the weight.

        A value is (q - zero) * scale in integer formats. In floating-point formats, it is the product of the code's
        value, the scale and ``tensor_scale``.

        Parameters
        ----------
        dtype : dtype, default float64
            Type of the result. The products of codes and scales are exact in float32 and float64, and are rounded once
            to other types. If ``tensor_scale`` is not 1, results other than float64 are first rounded to float32.

        Returns
        -------
        numpy.ndarray, shape (K, N)
            The values. The rows are in the order of the activations' columns.
        """
        dtype = np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)
        logical = unpack(self.to_host())
        k, code_values = self.shape[0], weight_format(self.format).values
        size = k if self.group_size == -1 else self.group_size
        exact: Any = np.float64 if dtype == np.float64 else np.float32
        out: NDArray[Any] = np.empty(self.shape, dtype=dtype)
        for group in range(self.groups):
            rows = slice(group * size, min((group + 1) * size, k))
            q, zeros = logical.q[rows], logical.zeros
            levels = code_values[q] if zeros is None else q.astype(exact) - zeros[group].astype(exact)
            with np.errstate(over="ignore"):  # Values beyond the range of dtype become infinite, as on the GPU.
                values = levels.astype(exact) * logical.scales[group].astype(exact)
                if self.tensor_scale != 1:
                    values *= exact(self.tensor_scale)
                out[rows if logical.perm is None else logical.perm[rows]] = values.astype(dtype)
        return out

    def to_device(self, device: int | None = None) -> PackedWeight:
        """Return a copy of this weight on a GPU.

        Parameters
        ----------
        device : int, optional
            Device ordinal. Default: CuPy's current device.

        Returns
        -------
        PackedWeight
            The weight with CuPy arrays, or this weight if it is already on the device.

        Raises
        ------
        ArgumentTypeError
            If ``device`` is not an ordinal, or if the scales are bf16 and the installed CuPy does not support bf16.
        DriverError
            If CuPy is not installed, or if there is no driver or no such GPU.
        """
        if device is not None and (type(device) is not int or device < 0):
            raise ArgumentTypeError("device", repr(device), "a device ordinal (a nonnegative int) or None")

        def move(cupy: Any) -> PackedWeight:
            ordinal = cupy.cuda.Device().id if device is None else device
            if self.device == ordinal:
                return self
            host = self.to_host()  # The devices might not be peers, so data is copied through the host.
            with cupy.cuda.Device(ordinal):
                return host._moved(upload)

        return with_cupy("PackedWeight.to_device", move)  # type: ignore[no-any-return]

    def to_host(self) -> PackedWeight:
        """Return a copy of this weight in host memory.

        Returns
        -------
        PackedWeight
            The weight with NumPy arrays, or this weight if it is on the host.
        """
        return self if self.device is None else self._moved(lambda array: host_array(array, "array"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weight to a safetensors file.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file.

        Raises
        ------
        WeightFileError
            If the file cannot be written.
        """
        write_weights(path, {"weight": self.stored("weight")})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedWeight:
        """Read the only weight from a file that save() or save_weights() wrote.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file.

        Returns
        -------
        PackedWeight
            The weight, on the host.

        Raises
        ------
        WeightFileError
            If the file cannot be read or is invalid, or if it contains several weights or expert weights.
        """
        return cls.from_stored(path, read_weight(path))

    def stored(self, name: str) -> StoredWeight:
        """Return the content of a file that stores this weight.

        Parameters
        ----------
        name : str
            Name of the weight in the file.

        Returns
        -------
        StoredWeight
            The metadata of the weight, and its arrays on the host.
        """
        host = self.to_host()
        arrays = {array: getattr(host, array) for array in _NAMES if getattr(host, array) is not None}
        facts = self.layout_version, self.shape, self.group_size, self.dtype
        return StoredWeight(name, *facts, arrays, self.format, self.tensor_scale)

    @classmethod
    def from_stored(cls, path: str | os.PathLike[str], stored: StoredWeight) -> PackedWeight:
        """Create a weight from the content of a file.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file, for error messages.
        stored : StoredWeight
            Content of the file.

        Returns
        -------
        PackedWeight
            The weight, on the host.

        Raises
        ------
        WeightFileError
            If a field is invalid. The error names the file, the weight and the field.
        """
        field = f"{os.fspath(path)}: {stored.name}"
        if stored.are_experts:
            got = f"expert weights of shape {stored.shape}"
            raise WeightFileError(field, got, "a weight of shape (K, N)", "call PackedExperts.load() or load_weights()")
        parts = stored.arrays
        try:
            return cls(
                qweight=parts["qweight"],
                scales=parts["scales"],
                zeros=parts.get("zeros"),
                perm=parts.get("perm"),
                shape=stored.shape,  # type: ignore[arg-type]  # checked by the class
                group_size=stored.group_size,
                dtype=stored.dtype,
                format=stored.format,
                tensor_scale=stored.tensor_scale,
            )
        except FieldError as error:
            raise WeightFileError(
                f"{field}.{error.field}", error.got, error.allowed, "pack the weight again"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles start without attachments, because attachments depend on this weight's addresses.
        return type(self), tuple(getattr(self, part.name) for part in fields(self) if part.init)

    def __repr__(self) -> str:
        where = "host" if self.device is None else f"device {self.device}"
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        kind = symmetry if self.format == "int4" else f"format={self.format!r}"
        order = "" if self.perm is None else ", act-order"
        return f"PackedWeight(shape={self.shape}, group_size={self.group_size}, {self.dtype}, {kind}{order}, {where})"

    def _arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _NAMES)

    def _moved(self, move: Callable[[Any], Any]) -> PackedWeight:
        """Return a copy with moved arrays. The arrays have already been checked."""
        twin = object.__new__(PackedWeight)
        for part in fields(self):
            value = getattr(self, part.name)
            moved = move(value) if part.name in _NAMES and value is not None else value
            object.__setattr__(twin, part.name, moved)
        object.__setattr__(twin, "attachments", {})
        return twin


def check_group_size(group_size: object, format: str = "int4") -> None:
    """Raise QuantizationError unless weights of this format may have this group size."""
    weight_format(format).check_group_size(group_size)


def _check_facts(weight: PackedWeight) -> None:
    if type(weight.layout_version) is not int or weight.layout_version != LAYOUT_VERSION:
        raise QuantizationError("layout_version", weight.layout_version, str(LAYOUT_VERSION))
    shape: object = weight.shape
    if not isinstance(shape, tuple) or len(shape) != 2 or any(type(e) is not int for e in shape):
        raise QuantizationError("shape", shape, "a tuple (K, N) of two ints")
    if any(not 1 <= extent <= _MAX_EXTENT for extent in shape):
        raise QuantizationError("shape", shape, f"a tuple (K, N) of ints from 1 to {_MAX_EXTENT}")
    kind = weight_format(weight.format)
    check_group_size(weight.group_size, weight.format)
    if not isinstance(weight.dtype, str) or weight.dtype not in ACTIVATION_TYPES:
        remedy = "convert the scales to float16 or bfloat16"
        raise QuantizationError("dtype", weight.dtype, ", ".join(ACTIVATION_TYPES), remedy)
    if weight.zeros is not None and not kind.has_zeros:
        raise QuantizationError("zeros", "zero points", f"None for format {weight.format!r}")
    scale: object = weight.tensor_scale
    if type(scale) is not float or not np.isfinite(scale) or scale == 0 or float(np.float32(scale)) != scale:
        raise QuantizationError("tensor_scale", repr(scale), "a finite, nonzero float that fp32 represents exactly")
    if scale != 1 and not kind.has_tensor_scale:
        raise QuantizationError(
            "tensor_scale", scale, f"1.0 for format {weight.format!r}", "multiply the scales by tensor_scale"
        )


def _check_arrays(weight: PackedWeight) -> None:
    dtypes: dict[str, np.dtype[Any]] = {
        "qweight": np.dtype(np.uint8),
        "scales": ACTIVATION_TYPES[weight.dtype].numpy,
        "zeros": np.dtype(np.uint8),
        "perm": np.dtype(np.int32),
    }
    library = library_of(weight.qweight)
    bits = weight_format(weight.format).bits
    for name, shape in layout_v1.part_shapes(*weight.shape, weight.group_size, bits).items():
        array, dtype = getattr(weight, name), dtypes[name]
        if array is None and name in ("zeros", "perm"):
            continue
        if library_of(array) not in ("numpy", "cupy") or not hasattr(array, "flags"):
            raise ArgumentTypeError(
                name, type(array).__name__, "a NumPy or CuPy array", "create the weight with pack()"
            )
        if library_of(array) != library or (library == "cupy" and array.device.id != weight.qweight.device.id):
            raise QuantizationError(
                name, f"a {library_of(array)} array", "on the device of qweight", "move all arrays to one device"
            )
        if array.dtype != dtype or tuple(array.shape) != shape:
            raise QuantizationError(
                name,
                f"{array.dtype} {tuple(array.shape)}",
                f"an array with dtype {dtype} and shape {shape}",
                "create the weight with pack()",
            )
        if not array.flags.c_contiguous:
            raise QuantizationError(name, f"strides {array.strides}", "a C-contiguous array", "pass a contiguous copy")


def _checked_scales(weight: PackedWeight) -> NDArray[Any]:
    """Return the scales on the host after checking that they are finite."""
    scales = host_array(weight.scales, "scales")
    broken = ~np.isfinite(scales)
    if broken.any():
        group, position = (int(i) for i in np.argwhere(broken)[0])
        field = f"scales[{group}, {layout_v1.column_at(position)}]"
        raise QuantizationError(field, str(scales[group, position]), "finite", "load or quantize the weight again")
    return scales


def _check_values(weight: PackedWeight) -> None:
    """Check fp8 codes, zero points and perm."""
    if weight.format == "fp8" and bool(((weight.qweight & 127) == 127).any()):
        raise QuantizationError("qweight", "NaN codes (127 or 255)", "finite fp8 codes", "quantize the weight again")
    if weight.zeros is not None:
        zeros = host_array(weight.zeros, "zeros")
        if int(zeros.max()) > MAX_ZERO:
            group, position = (int(i) for i in np.argwhere(zeros > MAX_ZERO)[0])
            field = f"zeros[{group}, {layout_v1.column_at(position)}]"
            raise QuantizationError(field, int(zeros[group, position]), f"0 to {MAX_ZERO}")
    if weight.perm is not None:
        perm, k = host_array(weight.perm, "perm"), weight.shape[0]
        if int(perm.min()) < 0 or int(perm.max()) >= k or (np.bincount(perm, minlength=k) != 1).any():
            raise QuantizationError(
                "perm", "repeated values or values out of range", f"a permutation of the integers from 0 to {k - 1}"
            )


def pack(
    q: Any,
    scales: Any,
    zeros: Any | None = None,
    *,
    group_size: int = 128,
    perm: Any | None = None,
    format: str = "int4",
    tensor_scale: float = 1.0,
) -> PackedWeight:
    """Pack codes and scales into layout version 1.

    Parameters
    ----------
    q : array of uint8, shape (K, N)
        Codes in a NumPy or CuPy array: for int4 the value + 8 (0 to 15), for int8 the value + 128, for fp8 the bits of
        an e4m3 number, and for mxfp4 and nvfp4 the bits of an e2m1 number (0 to 15). The result is on the same device.
    scales : array_like of float16 or bfloat16, shape (G, N)
        Scales, with G = ceil(K / group_size), or G = 1 for group_size -1.
    zeros : array_like of int, shape (G, N), optional
        Zero points from 0 to 16. Default: the weight is symmetric and has the offset 8.
    group_size : int, default 128
        Number of rows of K that share a scale: 32, 64, 128 or -1 (all rows) for int4 and int8, 32 for mxfp4, 16 for
        nvfp4, and 128 or -1 for fp8.
    perm : array_like of int, shape (K,), optional
        Column of the activations for each row of ``q``. Default: the rows are in order.
    format : str, default "int4"
        Format of the codes: ``"int4"``, ``"mxfp4"``, ``"nvfp4"``, ``"fp8"`` or ``"int8"``.
    tensor_scale : float, default 1.0
        Multiplier for the whole weight, an fp32 number. Only ``"nvfp4"`` allows values other than 1.

    Returns
    -------
    PackedWeight
        The packed weight.

    Raises
    ------
    QuantizationError
        If shapes or values are invalid.
    ArgumentTypeError
        If ``q`` is not a NumPy or CuPy array, if another argument is not an array, or if the format is unknown.

    Examples
    --------
    >>> from cudatma.quantization import pack
    >>> q = np.full((128, 64), 9, dtype=np.uint8)
    >>> pack(q, np.ones((1, 64), dtype=np.float16)).dequantize()[0, :3]
    array([1., 1., 1.])
    """
    xp = namespace_of(q)
    if xp is np and not isinstance(q, np.ndarray):
        raise ArgumentTypeError("q", type(q).__name__, "a NumPy or CuPy array")
    if q.ndim != 2 or q.dtype != np.uint8 or 0 in q.shape:
        raise QuantizationError("q", f"{q.dtype} {q.shape}", "a nonempty uint8 array of shape (K, N)")
    kind = weight_format(format)
    if kind.bits == 4 and int(q.max()) > 15:
        raise QuantizationError("q", f"a value of {int(q.max())}", "0 to 15", "pass four-bit values")
    shape = (int(q.shape[0]), int(q.shape[1]))
    check_group_size(group_size, format)
    scales, zeros = host_array(scales, "scales"), None if zeros is None else _plain_zeros(zeros)
    rows = layout_v1.group_count(shape[0], group_size)
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array is not None and array.shape != (rows, shape[1]):
            raise QuantizationError(
                name, array.shape, f"({rows}, {shape[1]}) for q of shape {shape} and group_size {group_size}"
            )
    with on_device_of(q):
        padded = _padded_values(q, zeros, group_size, kind.zero_code, xp)
        packed = layout_v1.pack_codes(padded, kind.bits, kind.is_e2m1, xp)
        place: Callable[[Any], Any] = np.ascontiguousarray if xp is np else upload
        return PackedWeight(
            qweight=xp.ascontiguousarray(packed),
            scales=place(_ordered(scales, 0)),
            zeros=None if zeros is None else place(_ordered(zeros, SYMMETRIC_ZERO)),
            perm=None if perm is None else place(_plain_perm(perm, shape[0])),
            shape=shape,
            group_size=group_size,
            dtype=scales.dtype.name,
            format=format,
            tensor_scale=tensor_scale,
        )


def _plain_zeros(zeros: Any) -> NDArray[Any]:
    host = host_array(zeros, "zeros")
    if host.dtype.kind not in "ui":
        raise QuantizationError("zeros", host.dtype.name, f"an integer array with values from 0 to {MAX_ZERO}")
    if host.size and (host.min() < 0 or host.max() > MAX_ZERO):
        raise QuantizationError("zeros", f"{host.min()} to {host.max()}", f"0 to {MAX_ZERO}")
    return host.astype(np.uint8)


def _plain_perm(perm: Any, k: int) -> NDArray[np.int32]:
    """Convert a permutation to int32 after checking its range. PackedWeight rejects duplicates."""
    host = host_array(perm, "perm")
    if host.dtype.kind not in "ui" or host.shape != (k,):
        raise QuantizationError("perm", f"{host.dtype} {host.shape}", f"an integer array with shape ({k},)")
    if host.min() < 0 or host.max() >= k:
        allowed = f"a permutation of the integers from 0 to {k - 1}"
        raise QuantizationError("perm", f"values from {host.min()} to {host.max()}", allowed)
    return np.ascontiguousarray(host, dtype=np.int32)


def _ordered(rows: NDArray[Any], padding: int) -> NDArray[Any]:
    """Pad rows (G, N) to (G, 64 N64), and reorder them for storage."""
    groups, n = rows.shape
    padded: NDArray[Any] = np.full((groups, layout_v1.blocks(n) * layout_v1.BLOCK), padding, dtype=rows.dtype)
    padded[:, :n] = rows
    return np.ascontiguousarray(layout_v1.order_columns(padded))


def _padded_values(q: Any, zeros: NDArray[Any] | None, group_size: int, zero_code: int, xp: Any) -> Any:
    """Pad q to whole blocks with values that dequantize to 0.

    If a zero point is 16, no code dequantizes to 0. The padding is then 15, which does not affect results because
    activations beyond K are zero.
    """
    k, n = q.shape
    padded_shape = (layout_v1.blocks(k) * layout_v1.BLOCK, layout_v1.blocks(n) * layout_v1.BLOCK)
    if padded_shape == (k, n):
        return q
    padded = xp.full(padded_shape, zero_code, dtype=np.uint8)
    padded[:k, :n] = q
    if zeros is not None:
        for row in range(k, padded_shape[0]):
            group = 0 if group_size == -1 else row // group_size
            if group < zeros.shape[0]:
                padded[row, :n] = xp.asarray(np.minimum(zeros[group], 15))
    return padded
