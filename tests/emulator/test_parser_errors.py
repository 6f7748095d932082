"""Text that is not PTX is refused with a PtxError."""

from __future__ import annotations

import pytest

from cudatma.emulator import PtxError, load


@pytest.mark.parametrize("version", ["0x9", "1" * 5000, "8.1e3", "9999999999.1"])
def test_a_version_that_is_none(version: str) -> None:
    text = f".version {version}\n.target sm_90a\n.address_size 64\n"
    with pytest.raises(PtxError, match="version"):
        load(text)
