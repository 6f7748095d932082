"""Read the resources of kernels from the ELF sections of a cubin, without NVIDIA's programs.

NVIDIA does not document these sections. Their meaning was inferred from the output of ``cuobjdump --dump-elf`` and
``cuobjdump --dump-resource-usage``. A test compares the results with this output.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cudatma.errors import ArgumentError

ELF_MAGIC = b"\x7fELF"
CUDA_MACHINE, AMD_MACHINE = 190, 224
_SECTION_BYTES, _SYMBOL_BYTES = 64, 24
_FUNCTION, _ENTRY = 2, 0x10
#: Attributes of .nv.info.
_MAX_THREADS, _REQUIRED_THREADS, _REGISTERS, _BARRIERS = 0x05, 0x10, 0x2F, 0x4C
_FRAME_SIZE, _MIN_STACK_SIZE = 0x11, 0x12
#: Attribute of .nv.compat that is 1 for targets with the suffix "a", and the corresponding flag of older cubins.
_ACCELERATED, _ACCELERATED_FLAG = 0x09, 0x800
#: Formats of an attribute: a value preceded by its size, and a single byte. All other formats have 16 bits.
_SIZED, _BYTE = 4, 2
#: First ABI version whose flags store the architecture in bits 8-15 instead of 0-7.
_NEW_FLAGS_ABI = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a kernel.

    Attributes
    ----------
    registers : int
        Number of registers per thread.
    stack_bytes, local_bytes : int
        Stack frame and other local memory per thread.
    spill_store_bytes, spill_load_bytes : int or None
        Number of bytes per thread that register spills store and load, or None if there is no log of ptxas.
    static_smem_bytes, reserved_smem_bytes : int
        Static shared memory per CTA, and shared memory that the system reserves per CTA. cuobjdump prints the sum.
    named_barriers : int
        Number of named barriers.
    max_threads : int or None
        Number of threads per CTA from ``.reqntid``, otherwise from ``.maxntid``, or None.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    static_smem_bytes: int
    reserved_smem_bytes: int
    named_barriers: int
    max_threads: int | None


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    flags: int
    size: int
    link: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cubin:
    """Architecture of a cubin, and the resources of its kernels. ``target`` may have the suffix "a", but not "f"."""

    target: str
    kernels: dict[str, Resources]


def machine_of(data: bytes) -> int:
    """Return the machine number (``e_machine``) of an ELF file."""
    return int.from_bytes(data[18:20], "little")


def read_cubin(data: bytes, name: str, log: str = "") -> Cubin:
    """Return the contents of a cubin, with the spills from a log of ``ptxas -v``.

    Raises ArgumentError, which contains the file name ``name``, if the cubin is corrupt or truncated.
    """
    try:
        return _read(data, _spills(log))
    except (struct.error, LookupError, ValueError, OverflowError) as error:
        got = f"{name}, which is corrupt or truncated ({len(data)} bytes)"
        raise ArgumentError("file", got, "a valid cubin") from error


def _read(data: bytes, spilled: dict[str, tuple[int, int]]) -> Cubin:
    abi = data[8]
    (flags,) = struct.unpack_from("<I", data, 48)
    sections = _sections(data)
    by_name = {section.name: section for section in sections}
    names, entries = _symbols(by_name[".symtab"], sections)
    attributes = dict[tuple[str, int], list[int]]()
    for section in sections:
        if section.name == ".nv.info":
            for attribute, words in _attributes(section.data):
                if len(words) == 2:  # the index of a function, and the value
                    attributes[names.get(words[0], ""), attribute] = words[1:]
        elif section.name.startswith(".nv.info."):
            function = section.name.removeprefix(".nv.info.")
            attributes |= {(function, attribute): words for attribute, words in _attributes(section.data)}
    reserved = 1024 if ".nv.shared.reserved.0" in by_name else 0
    kernels = {}
    for entry in entries:
        shared = by_name.get(f".nv.shared.{entry}")
        local = by_name.get(f".nv.local.{entry}")
        barriers = attributes.get((entry, _BARRIERS), [0])[0]
        threads = attributes.get((entry, _REQUIRED_THREADS)) or attributes.get((entry, _MAX_THREADS))
        stored, loaded = spilled.get(entry, (None, None))
        kernels[entry] = Resources(
            registers=attributes[entry, _REGISTERS][0],
            stack_bytes=attributes.get((entry, _MIN_STACK_SIZE), attributes.get((entry, _FRAME_SIZE), [0]))[0],
            local_bytes=local.size if local else 0,
            spill_store_bytes=stored,
            spill_load_bytes=loaded,
            static_smem_bytes=max(0, (shared.size if shared else reserved) - reserved),
            reserved_smem_bytes=reserved,
            named_barriers=max(barriers, by_name[f".text.{entry}"].flags >> 20 & 0x7F),
            max_threads=threads[0] * threads[1] * threads[2] if threads else None,
        )
    if abi >= _NEW_FLAGS_ABI:
        compat = by_name.get(".nv.compat")
        number = flags >> 8 & 0xFF
        is_accelerated = compat is not None and (_ACCELERATED, [1]) in list(_attributes(compat.data))
    else:
        number, is_accelerated = flags & 0xFF, bool(flags & _ACCELERATED_FLAG)
    return Cubin(f"sm_{number}{'a' if is_accelerated else ''}", kernels)


def _sections(data: bytes) -> list[_Section]:
    segments, table = struct.unpack_from("<QQ", data, 32)
    segment_bytes, segment_count = struct.unpack_from("<HH", data, 54)
    count, names_index = struct.unpack_from("<HH", data, 60)
    if segments + segment_bytes * segment_count > len(data):
        raise ValueError("the table of segments is truncated")
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + _SECTION_BYTES * i) for i in range(count)]
    names = data[headers[names_index][4] :][: headers[names_index][5]]
    sections = []
    for name, kind, flags, _, offset, size, link, *_ in headers:
        has_data = kind not in (0, 8)  # SHT_NULL, SHT_NOBITS
        if has_data and offset + size > len(data):
            raise ValueError(f"a section ends at byte {offset + size}")
        content = data[offset : offset + size] if has_data else b""
        sections.append(_Section(_string(names, name), kind, flags, size, link, content))
    return sections


def _symbols(table: _Section, sections: list[_Section]) -> tuple[dict[int, str], list[str]]:
    """Return the name of each function by its index in the symbol table, and the names of the kernels."""
    strings = sections[table.link].data
    names, entries = {}, []
    for index in range(table.size // _SYMBOL_BYTES):
        name, info, other = struct.unpack_from("<IBB", table.data, index * _SYMBOL_BYTES)
        if info & 0xF == _FUNCTION:
            names[index] = _string(strings, name)
            if other & _ENTRY:
                entries.append(names[index])
    return names, entries


def _attributes(data: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield each attribute of .nv.info with its value as 32-bit words."""
    at = 0
    while at + 4 <= len(data):
        layout, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout == _SIZED:
            yield attribute, [word for (word,) in struct.iter_unpack("<I", data[at : at + value // 4 * 4])]
            at += value
        else:
            yield attribute, [value & 0xFF if layout == _BYTE else value]


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


_COMPILING = re.compile(r"Compiling entry function '(?P<entry>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def _spills(log: str) -> dict[str, tuple[int, int]]:
    """Return the number of bytes that each kernel's spills store and load, from a log of ``ptxas -v``."""
    result: dict[str, tuple[int, int]] = {}
    entry = ""
    for line in log.splitlines():
        if compiling := _COMPILING.search(line):
            entry = compiling["entry"]
        elif entry and (spills := _SPILLS.search(line)):
            result[entry], entry = (int(spills[1]), int(spills[2])), ""
    return result
