"""Draw the sequence diagram of a call for docs/design/path_of_a_call.md.

python -m tools.dev.call_picture            # writes docs/pictures/path_of_a_call.svg
python -m tools.dev.call_picture --check    # exit status 1 if the file is not current
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tools.dev.drawing import BLUE, FAINT, GREEN, GREY, INK, ORANGE, ROOT, Drawing, write_picture

PICTURE = ROOT / "docs" / "pictures" / "path_of_a_call.svg"
TITLE = "The path of a call from a public function to a launch, on each of the engine's three levels"


@dataclass(frozen=True, slots=True)
class Message:
    """An arrow from one lifeline to another."""

    sender: str
    receiver: str
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A box on one lifeline."""

    at: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One of the ways in which the engine handles a call."""

    title: str
    fill: str
    color: str
    steps: tuple[Message | Note, ...]


#: Key, name, location and horizontal center of each lifeline.
LIFELINES = (
    ("call", "public function", "gemm(), copy(), ...", 90),
    ("run", "run()", "kernels/engine.py", 290),
    ("operation", "Operation", "of the family", 488),
    ("table", "ChoiceTable", "one per shape", 654),
    ("replay", "Replay", "kernels/replay.py", 820),
    ("driver", "CUDA driver", "descriptor, runtime", 986),
)
_CALLS = Message("call", "run", "arrays, options")
LEVELS = (
    Level(
        "1  A repeated call",
        "#f1f8e6",
        GREEN,
        (
            _CALLS,
            Note("run", ("finds the Call by its key,", "checks the addresses")),
            Message("run", "replay", "sizes, addresses"),
            Note("replay", ("writes addresses",)),
            Message("replay", "driver", "launch"),
        ),
    ),
    Level(
        "2  Other sizes of a known shape",
        "#eef4fc",
        BLUE,
        (
            _CALLS,
            Note("run", ("finds the plan by the key", "without the leading sizes")),
            Message("run", "operation", "resized(): Problem"),
            Message("run", "operation", "configure(): Config"),
            Message("operation", "table", "M"),
            Message("run", "operation", "sizes(): Sizes"),
            Message("run", "replay", "sizes, addresses"),
            Note("replay", ("writes grid, struct,", "map fields, addresses")),
            Message("replay", "driver", "launch"),
            Note("run", ("stores the Call",)),
        ),
    ),
    Level(
        "3  Any other call",
        "#fff5ea",
        ORANGE,
        (
            _CALLS,
            Message("run", "operation", "check(): Problem"),
            Message("run", "operation", "configure(): Config"),
            Message("operation", "table", "M"),
            Note("table", ("built once per shape",)),
            Note("run", ("loads the kernel from the", "cache, or compiles it")),
            Message("run", "operation", "arguments(): Arguments"),
            Message("run", "replay", "Arguments, kernel, addresses"),
            Message("replay", "driver", "encode tensor maps"),
            Message("replay", "driver", "launch"),
            Note("run", ("stores the plan and the Call",)),
        ),
    ),
)
_WIDTH, _TOP, _HEAD = 1076, 16, 48
_TITLE, _MESSAGE, _GAP, _LINE, _SIZE = 38, 30, 12, 17, 12
_AT = {key: x for key, _, _, x in LIFELINES}


def picture() -> str:
    """Return the diagram as an SVG, with a band for each level."""
    out, bodies = Drawing(), Drawing()
    y: float = _TOP + _HEAD + _GAP
    for level in LEVELS:
        top = y
        bodies.text(28, top + 23, level.title, size=14, fill=level.color, anchor="start", bold=True)
        y += _TITLE
        for step in level.steps:
            y += _message(bodies, step, y) if isinstance(step, Message) else _note(bodies, step, y, level.color)
        y += _GAP
        out.lines.append(
            f'<rect x="12" y="{top:g}" width="{_WIDTH - 24}" height="{y - top:g}" rx="9" fill="{level.fill}"/>'
        )
        y += _GAP
    for _, name, where, x in LIFELINES:
        out.lines.append(f'<path d="M{x} {_TOP + _HEAD} V{y - _GAP:g}" stroke="#aab2c0" stroke-dasharray="3 4"/>')
        out.box(x - 74, _TOP, 148, _HEAD, "#eef1f7", GREY, name, [where])
    out.lines += bodies.lines
    return out.document(TITLE, _WIDTH, round(y))


def _message(out: Drawing, message: Message, y: float) -> float:
    """Draw an arrow with text above it, and return the height of both."""
    begin, end = _AT[message.sender], _AT[message.receiver]
    following = min(x for x in _AT.values() if x > begin)
    out.text((begin + following) / 2, y + 13, message.text, size=_SIZE, fill=INK)
    out.arrow(f"M{begin} {y + 20:g} H{end - 1}", "a", 1.4)
    return _MESSAGE


def _note(out: Drawing, note: Note, y: float, color: str) -> float:
    """Draw a box on a lifeline, and return the height of the box."""
    width, height = (150 if note.at != "run" else 190), _LINE * len(note.lines) + 10
    x = _AT[note.at]
    out.lines.append(
        f'<rect x="{x - width / 2:g}" y="{y + 2:g}" width="{width}" height="{height}" rx="6" fill="#ffffff" '
        f'stroke="{color}" stroke-width="1.3"/>'
    )
    for number, line in enumerate(note.lines):
        out.text(x, y + 19 + _LINE * number, line, size=_SIZE, fill=FAINT)
    return height + 8


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture, or with --check compare it with the file."""
    return write_picture(PICTURE, picture(), __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
