"""Parser of variable and parameter declarations. Source: PTX ISA, "Variables", "Kernel Function Parameters"."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cudatma.emulator.ptx.lexer import TYPE_BYTES, Cursor, number
from cudatma.emulator.ptx.model import Variable

#: Maximum size of a variable in bytes. The limit protects against malicious input.
MAX_VARIABLE_BYTES = 1 << 32
MAX_ALIGN = 1 << 16


def read_variable(cursor: Cursor, space: str, is_extern: bool = False) -> Iterator[Variable]:
    """Yield the variables of a declaration.

    The cursor starts after the state-space directive and stops before ``;``, ``,`` or ``)``. Examples of declarations
    are ``.align 16 .b8 name[128]``, ``.u64 name``, ``.u64 .ptr .global .align 16 name`` and ``.v4 .f32 name``. Each
    declaration may have an initializer.
    """
    align, size, count, kind, is_pointer = 0, 0, 1, "", False
    while cursor.token.kind == "directive":
        directive = cursor.next().text[1:]
        if directive in TYPE_BYTES and not size:
            size, kind = TYPE_BYTES[directive], directive
        elif directive == "align":
            value = cursor.integer()
            if not 1 <= value <= MAX_ALIGN or value & (value - 1):
                raise cursor.error(f".align must be a power of two of at most {MAX_ALIGN}, got {value}")
            if not is_pointer:  # After .ptr, .align describes the memory to which the pointer refers.
                align = align or value
        elif directive == "ptr":
            is_pointer = True
        elif directive in ("v2", "v4", "v8"):
            count = int(directive[1:])
        elif directive == "attribute":
            cursor.expect("(")
            while not cursor.accept(")"):
                cursor.next()
        elif directive in ("texref", "samplerref", "surfref"):
            size, kind = 8, "u64"
        elif directive not in ("global", "shared", "const", "local", "param", "managed"):
            raise cursor.error(f"`.{directive}` is not supported in a declaration")
    if not size:
        raise cursor.error("the declaration has no type")
    while True:
        yield _read_declarator(cursor, space, align, size * count, kind, is_extern)
        if space == "param" or not cursor.accept(","):
            return


def _read_declarator(cursor: Cursor, space: str, align: int, element: int, kind: str, is_extern: bool) -> Variable:
    name = cursor.expect_kind("word").text
    size, has_size = element, True
    while cursor.accept("["):
        if cursor.accept("]"):
            has_size = False
            continue
        size *= cursor.integer()
        cursor.expect("]")
        if not 0 <= size <= MAX_VARIABLE_BYTES:
            raise cursor.error(f"the size of a variable must be from 0 to {MAX_VARIABLE_BYTES} bytes, got {size}")
    init, patches = b"", []
    if cursor.accept("="):
        values = list(_initializer(cursor))
        parts = []
        for position, value in enumerate(values):
            if isinstance(value, tuple):
                patches.append((position * TYPE_BYTES[kind], *value))
                parts.append(bytes(TYPE_BYTES[kind]))
            else:
                parts.append(_encode(cursor, value, kind))
        init = b"".join(parts)
        size = max(size, len(init)) if has_size else len(init)
    elif not has_size:
        size = 0
    return Variable(name, space, align or element, size, init, tuple(patches), is_extern, kind)


def _initializer(cursor: Cursor) -> Iterator[int | tuple[str, int]]:
    """Yield the numbers and the (symbol, offset) pairs of a nested initializer in order. Floats are yielded as bits."""
    if cursor.accept("{"):
        while not cursor.accept("}"):
            yield from _initializer(cursor)
            cursor.accept(",")
        return
    negative = cursor.accept("-")
    token = cursor.next()
    if token.kind == "number":
        yield number(token, negative).bits
    elif token.kind == "word":
        name = token.text
        if name == "generic" and cursor.accept("("):
            name = cursor.expect_kind("word").text
            cursor.expect(")")
        yield (name, cursor.integer() if cursor.accept("+") else 0)
    else:
        raise cursor.error(f"`{token.text}` is not supported in an initializer")


def _encode(cursor: Cursor, value: int, kind: str) -> bytes:
    size = TYPE_BYTES[kind]
    if kind == "f32" and value >> 32:
        return struct.pack("<f", struct.unpack("<d", value.to_bytes(8, "little"))[0])
    return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
