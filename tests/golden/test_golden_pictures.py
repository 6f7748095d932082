"""The pictures in docs/howto/inspect_a_descriptor.md equal those that `cudatma inspect --svg` draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cudatma
from cudatma.descriptor import TiledSpec

Golden = Callable[[str, str], None]
#: The page's files, seen from the folder of the goldens.
PICTURES = "../../../docs/pictures"
MAPS: dict[str, tuple[TiledSpec, tuple[int, ...], tuple[int, int]]] = {
    "tensor_map_swizzle": (
        TiledSpec(
            dtype="float16",
            dims=(4096, 4096),
            strides_bytes=(8192,),
            box=(64, 64),
            swizzle="128B",
            address=0x7F0000001000,
        ),
        (128, 256),
        (3, 17),
    ),
    "tensor_map_narrow": (
        TiledSpec(
            dtype="float16",
            dims=(100, 64),
            strides_bytes=(208,),
            box=(16, 12),
            swizzle="128B",
            address=0x7F0000001000,
        ),
        (88, 56),
        (3, 9),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_the_pictures_of_the_page(golden: Golden, name: str) -> None:
    config, coords, element = MAPS[name]
    text = cudatma.inspect(config).svg(coords, element=element)
    golden(f"{PICTURES}/{name}.svg", text)
    assert len(text) < 120_000
