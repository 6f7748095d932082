"""Where results are computed: on the card, or on the CPU by the reference or the emulator."""

from __future__ import annotations

import os
from functools import lru_cache

from cudatma.errors import ArgumentError, DriverError, TargetError
from cudatma.target import detect

BACKENDS = ("auto", "cuda", "reference", "emulator")
BACKEND_VARIABLE = "CUDATMA_BACKEND"


def selected_backend(explicit: str | None = None) -> str:
    """``"cuda"``, ``"reference"`` or ``"emulator"``: the explicit choice, else $CUDATMA_BACKEND, else "auto".

    "auto" is "cuda" where the first card is one that cudatma launches on, else "reference"; "cuda" is taken at its
    word, and a missing driver shows at the first launch. Raises ArgumentError for another name.
    """
    named, field = explicit, "backend"
    if named is None:
        named, field = os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE
    if named not in BACKENDS:
        raise ArgumentError(field, named, ", ".join(BACKENDS))
    if named == "auto":
        return "cuda" if _has_usable_card() else "reference"
    return named


@lru_cache(maxsize=1)
def _has_usable_card() -> bool:
    try:
        return detect().runs_here
    except (DriverError, TargetError, ImportError):
        return False
