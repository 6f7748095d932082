"""Former forms of calls: they still work, and a DeprecationWarning at the caller's line names the present form."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatma as c
from cudatma.deprecation import former_arguments, user_stacklevel

A = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
IMAGES = np.arange(5 * 5 * 4, dtype=np.float32).reshape(1, 5, 5, 4)
W = c.quantize(np.random.default_rng(0).standard_normal((128, 64), np.float32))
MAP: Any = c.TensorMap.from_array(np.zeros((64, 64), np.float16), (64, 64), encoder="codec")
RING = c.PipelineSpec(2, (c.Operand("tile", 128, 128),))
STRIDED: dict[str, Any] = {"strides_bytes": (512, 2), "dtype": "float16", "box": (8, 64)}
ON_HOST = {"backend": "reference"}
Case = tuple[str, Callable[[Any], object], Callable[[Any], object]]

#: What the warning says, the former call and the present one. ``c`` is untyped: mypy would refuse the former ones.
CASES: list[Case] = [
    ("cudatma.copy: .*out=", lambda c: c.copy(A, np.empty_like(A), **ON_HOST),
     lambda c: c.copy(A, out=np.empty_like(A), **ON_HOST)),
    ("cudatma.transpose: .*out=", lambda c: c.transpose(A, np.empty((8, 4), A.dtype), **ON_HOST),
     lambda c: c.transpose(A, out=np.empty((8, 4), A.dtype), **ON_HOST)),
    ("cudatma.broadcast: .*out=", lambda c: c.broadcast(A, 2, np.empty((2, 4, 8), A.dtype), **ON_HOST),
     lambda c: c.broadcast(A, 2, **ON_HOST)),
    ("cudatma.gather: .*out=", lambda c: c.gather(A, [(0, 0)], (2, 4), np.empty((1, 2, 4), A.dtype), **ON_HOST),
     lambda c: c.gather(A, [(0, 0)], (2, 4), **ON_HOST)),
    ("cudatma.halo_tiles: .*out=",
     lambda c: c.halo_tiles(A, (2, 8), (0, 0), np.empty((2, 1, 2, 8), A.dtype), **ON_HOST),
     lambda c: c.halo_tiles(A, (2, 8), (0, 0), **ON_HOST)),
    ("cudatma.im2col: .*stride=.*, padding=", lambda c: c.im2col(IMAGES, 3, 2, 1, **ON_HOST),
     lambda c: c.im2col(IMAGES, 3, stride=2, padding=1, **ON_HOST)),
    ("cudatma.ragged_copy: .*stream=", lambda c: c.ragged_copy([], [], None, backend="emulator"),
     lambda c: c.ragged_copy([], [], backend="emulator")),
    ("cudatma.RaggedCopy.run: .*stream=", lambda c: c.RaggedCopy([], [], backend="emulator").run(None),
     lambda c: c.RaggedCopy([], [], backend="emulator").run()),
    ("cudatma.tile_copy: .*stages=", lambda c: c.tile_copy(A[:0], A[:0].copy(), 2, backend="emulator"),
     lambda c: c.tile_copy(A[:0], A[:0].copy(), stages=2, backend="emulator")),
    ("cudatma.tile_copy: source= is now called src=",
     lambda c: c.tile_copy(source=A[:0], dst=A[:0].copy(), backend="emulator"),
     lambda c: c.tile_copy(src=A[:0], dst=A[:0].copy(), backend="emulator")),
    ("cudatma.dequantize: .*out=", lambda c: c.dequantize(W, np.empty((128, 64), np.float16), **ON_HOST),
     lambda c: c.dequantize(W, **ON_HOST)),
    ("cudatma.PackedWeight.dequantize: .*dtype=", lambda c: W.dequantize(*(np.float32,)),
     lambda c: W.dequantize(dtype=np.float32)),
    ("cudatma.check_cluster: .*target=", lambda c: c.check_cluster((4,), (2,), "sm_90a"),
     lambda c: c.check_cluster((4,), (2,), target="sm_90a")),
    ("cudatma.selected_backend: explicit= is now called backend=", lambda c: c.selected_backend(explicit="emulator"),
     lambda c: c.selected_backend(backend="emulator")),
    ("cudatma.PipelineSpec.check_fits: .*other_bytes=", lambda c: RING.check_fits(*(c.get_target("sm_90a"), 16)),
     lambda c: RING.check_fits(c.get_target("sm_90a"), other_bytes=16)),
    ("cudatma.TiledSpec.from_strided: .*strides_bytes=.*, dtype=.*, box=",
     lambda c: c.TiledSpec.from_strided(0, (64, 256), *STRIDED.values()),
     lambda c: c.TiledSpec.from_strided(0, (64, 256), **STRIDED)),
    ("cudatma.TensorMap.tiled: backend= is now called encoder=",
     lambda c: bytes(c.TensorMap.tiled(MAP.spec, backend="codec")),
     lambda c: bytes(c.TensorMap.tiled(MAP.spec, encoder="codec"))),
    ("cudatma.TensorMap: backend= is now called encoder=", lambda c: bytes(c.TensorMap(MAP.spec, backend="codec")),
     lambda c: bytes(c.TensorMap(MAP.spec, encoder="codec"))),
    ("cudatma.create_activation_tma_desc: backend= is now called encoder=",
     lambda c: bytes(c.create_activation_tma_desc(MAP.owner, 64, backend="codec")),
     lambda c: bytes(c.create_activation_tma_desc(MAP.owner, 64, encoder="codec"))),
    ("cudatma.TensorMap: .* backend is now called encoder", lambda c: MAP.backend, lambda c: MAP.encoder),
    ("cudatma.Inspection.lint: .*target=", lambda c: str(c.inspect(MAP).lint(*("sm_90a",))),
     lambda c: str(c.inspect(MAP).lint(target="sm_90a"))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "former", "present"), CASES, ids=[text.split(" ")[0] for text, _, _ in CASES])
def test_the_former_form_works_and_names_the_present_one(
    text: str, former: Callable[[Any], object], present: Callable[[Any], object]
) -> None:
    with pytest.warns(DeprecationWarning, match=text) as caught:
        found = former(c)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)], "one warning, at the caller's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = present(c)
    if isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted, strict=True)  # type: ignore[call-overload]
    else:
        assert found == wanted


def test_weights_come_before_their_path(tmp_path: Path) -> None:
    former: Any = c.save_weights
    with pytest.warns(DeprecationWarning, match=r"cudatma.save_weights: .*save_weights\(weights, path\)"):
        former(tmp_path / "former", {"a": W})
    c.save_weights({"a": W}, tmp_path / "present")
    former_weight, present_weight = (c.load_weights(tmp_path / name)["a"] for name in ("former", "present"))
    np.testing.assert_array_equal(former_weight.qweight, present_weight.qweight)


@former_arguments("second", "third", old="first")
def example(first: int, *, second: int = 2, third: int = 3) -> tuple[int, int, int]:
    return first, second, third


def test_a_function_shows_its_present_signature() -> None:
    assert list(inspect.signature(example).parameters) == ["first", "second", "third"]
    assert inspect.signature(example).parameters["second"].kind is inspect.Parameter.KEYWORD_ONLY


def test_former_positions_and_names_together() -> None:
    call: Any = example
    with pytest.warns(DeprecationWarning, match=r"second=\.\.\.$"):
        assert call(1, 5) == (1, 5, 3)
    with pytest.warns(DeprecationWarning, match=r"second=\.\.\., third=\.\.\.$"):
        assert call(1, 5, 6) == (1, 5, 6)
    with pytest.warns(DeprecationWarning, match="old= is now called first="):
        assert call(old=1, third=6) == (1, 2, 6)


@pytest.mark.filterwarnings("ignore:cudatma:DeprecationWarning")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda call: call(1, 2, 3, 4),
        lambda call: call(1, 2, second=2),
        lambda call: call(old=1, first=1),
        lambda call: call(1, old=1),
        lambda call: call(1, fourth=4),
    ],
)
def test_what_is_wrong_in_either_form_is_a_type_error(wrong: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        wrong(example)


def test_the_users_frame_is_the_nearest_outside_of_the_package() -> None:
    assert user_stacklevel() == 1
