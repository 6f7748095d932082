"""Generate broken PTX, and load and launch it: the outcome must be a report or a typed error."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cudatma.descriptor import TensorMap
from cudatma.emulator import EmulatedModule, load
from cudatma.errors import CudaTmaError

STEP_LIMIT = 1500
_TOKENS = re.compile(r"[\w.$%:]+|[^\w\s]|\s+")
#: Replacements for a token.
_STRANGE = (
    *("", " ", "\0", "\r\n", "é", "\u2028", "\ud800", "{", "}", "(", ")", "[", "]", "@", "!", "|", "_", "-", "+", ";"),
    *("%r1", "%p1", "%rd1", "%f1", "%r999999999999", "%tid.x", "%nosuch", "$L__BB0_1", "0", "-1", "1", "31", "32"),
    *("4294967295", "18446744073709551615", "9" * 23, "0x", "0xffffffffffffffff", "0f7FC00000", "0d", "1e999", "1.5"),
    *("'", '"', "/*", "*/", "//", "\\", ",", "bra", "ret", "exit", "trap", "call", "mov.u32", "mov.b64", "ld", "setp"),
    *("ld.shared.v4.u32", "st.global.u8", "atom.add.u32", "bar.sync", "cvt.rn.f16.f32", "wgmma.mma_async", "cp"),
    *(".reg", ".shared", ".entry", ".func", ".align", ".b8", ".pred", ".v4", ".loc", ".target", ".extern", "WARP_SZ"),
)


def arguments(module: EmulatedModule, entry: str) -> list[Any]:
    """Return an argument for each parameter: an array, a tensor map (128 bytes) or a small number."""
    values: list[Any] = []
    for position, param in enumerate(module.module.functions[entry].params):
        if param.size_bytes == 8:
            values.append(np.zeros(1 << 14, np.uint32))
        elif param.size_bytes == 128:
            array = np.zeros((64, 64), np.float16)
            values.append(TensorMap.from_array(array, (16, 64), encoder="codec"))
        else:
            values.append((3 + position).to_bytes(8, "little").ljust(param.size_bytes, b"\0")[: param.size_bytes])
    return values


def attempt(text: Any, *, grid: Any = 2, block: Any = 64, **options: Any) -> str:
    """Load and launch every kernel; return "report" or the name of the typed error, and let other exceptions pass."""
    chosen = {"schedules": 2, "hazards": "collect", "step_limit": STEP_LIMIT, "shared_bytes": 4096, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            module = load(text)
            for entry in module.entries[:2]:
                module.launch(entry, grid, block, arguments(module, entry), **chosen)
        except CudaTmaError as error:
            return type(error).__name__
    return "report"


def _cut(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text))]


def _drop_span(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + text[at + rng.choice((1, 2, 5, 20, 100, 1000)) :]


def _repeat_span(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + text[at : at + rng.choice((1, 5, 40, 300))] * rng.choice((2, 3)) + text[at:]


def _random_characters(text: str, rng: random.Random) -> str:
    letters = list(text)
    for _ in range(rng.choice((1, 3, 10))):
        letters[rng.randrange(len(letters))] = chr(
            rng.choice((rng.randrange(128), rng.randrange(256), 0x2028, 0x10FFFF))
        )
    return "".join(letters)


def _tokens(change: Callable[[list[str], int, random.Random], None]) -> Callable[[str, random.Random], str]:
    """Mutate some tokens after the parameters."""

    def mutate(text: str, rng: random.Random) -> str:
        tokens = _TOKENS.findall(text)
        places = [i for i, token in enumerate(tokens) if not token.isspace()]
        for _ in range(rng.choice((1, 1, 2, 4))):
            change(tokens, rng.choice(places), rng)
        return "".join(tokens)

    return mutate


def _delete(tokens: list[str], at: int, rng: random.Random) -> None:
    tokens[at] = ""


def _double(tokens: list[str], at: int, rng: random.Random) -> None:
    tokens[at] += " " + tokens[at]


def _swap(tokens: list[str], at: int, rng: random.Random) -> None:
    other = min(len(tokens) - 1, at + rng.choice((1, 2, 3, 4, 8)))
    tokens[at], tokens[other] = tokens[other], tokens[at]


def _take_another(tokens: list[str], at: int, rng: random.Random) -> None:
    """Return another token with the same first letter, which exchanges registers, opcodes and directives."""
    like = [t for t in tokens if t[:1] == tokens[at][:1]] if tokens[at] else [""]
    tokens[at] = rng.choice(like)


def _strange(tokens: list[str], at: int, rng: random.Random) -> None:
    tokens[at] = rng.choice(_STRANGE)


def _lines(text: str, rng: random.Random) -> str:
    """Drop, double or move whole statements; the result is mostly still PTX."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 2, 5))):
        at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(3)
        if kind == 0:
            lines[at] = ""
        elif kind == 1:
            lines[at] += "\n" + lines[at]
        else:
            lines[at], lines[to] = lines[to], lines[at]
    return "\n".join(lines)


def _opcode(text: str, rng: random.Random) -> str:
    """Drop modifiers of one opcode, or replace them by another opcode's."""
    found = list(re.finditer(r"(?m)^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)", text))
    if not found:
        return text
    one, other = rng.choice(found), rng.choice(found)
    parts = one[1].split(".")
    theirs = other[1].split(".")
    kind = rng.randrange(3)
    if kind == 0:
        del parts[rng.randrange(len(parts))]
    elif kind == 1:
        parts[rng.randrange(len(parts))] = rng.choice(theirs)
    else:
        parts.insert(1 + rng.randrange(len(parts)), rng.choice(theirs))
    return text[: one.start(1)] + ".".join(parts) + text[one.end(1) :]


MUTATIONS: dict[str, Callable[[str, random.Random], str]] = {
    "cut": _cut,
    "drop": _drop_span,
    "repeat": _repeat_span,
    "characters": _random_characters,
    "delete": _tokens(_delete),
    "double": _tokens(_double),
    "swap": _tokens(_swap),
    "another": _tokens(_take_another),
    "strange": _tokens(_strange),
    "lines": _lines,
    "opcode": _opcode,
    "crlf": lambda text, rng: text.replace("\n", "\r\n", rng.randrange(200)),
}


def mutants(text: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (name of the mutation, broken text), cycling through the mutations."""
    rng = random.Random(seed)
    for number in range(count):
        name = list(MUTATIONS)[number % len(MUTATIONS)]
        yield f"{name} {number} of seed {seed}", MUTATIONS[name](text, rng)
