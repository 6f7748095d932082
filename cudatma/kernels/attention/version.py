"""Which version of the kernel a call of attention asks for."""

from __future__ import annotations

from cudatma.kernels.attention.versions import VERSIONS
from cudatma.kernels.version import Versions

#: "": any.
CHOICE: Versions[str] = Versions("attention", "CUDATMA_ATTENTION_VERSION", tuple(VERSIONS), "")
chosen_version = CHOICE.chosen
