"""A struct that a launch passes to its kernel by value: its members, and its bytes as the device reads them. Pure.

A kernel's spec names the members that the kernel reads; the template declares the struct from them
(``parts/problem.cuh.j2``), and ``pack()`` lays the values out as C does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cudatma.kernels.schedule import DivisorStruct

_TYPES: dict[str, Any] = {
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "Divisor": DivisorStruct,
}


@dataclass(frozen=True, slots=True)
class Member:
    """One member. type: as the template spells it, one of u32, u64, float and Divisor. meaning: its comment."""

    name: str
    type: str
    meaning: str

    @property
    def declaration(self) -> str:
        """The member in CUDA, padded to the width of the longest: comments line up."""
        return f"{self.type} {self.name};".ljust(32)


@lru_cache(maxsize=64)
def _structure(members: tuple[Member, ...]) -> type[ctypes.Structure]:
    fields = [(member.name, _TYPES[member.type]) for member in members]
    return type("LaunchStruct", (ctypes.Structure,), {"_fields_": fields})


def pack(members: tuple[Member, ...], values: Mapping[str, Any]) -> bytes:
    """The struct's bytes: each member at its alignment, as in C. values: by name; other members are ignored."""
    return bytes(_structure(members)(*(values[member.name] for member in members)))


def offsets(members: tuple[Member, ...]) -> dict[str, int]:
    """Offset of each member, bytes."""
    structure = _structure(members)
    return {member.name: getattr(structure, member.name).offset for member in members}


def size_bytes(members: tuple[Member, ...]) -> int:
    """What a kernel's parameter of the struct takes."""
    return ctypes.sizeof(_structure(members))
