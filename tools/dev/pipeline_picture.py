"""Draw the pipelines of the wgmma kernel (SM90) and of the mma.sync kernel (SM120).

python -m tools.dev.pipeline_picture            # writes docs/pictures/pipeline.svg
python -m tools.dev.pipeline_picture --check    # exit status 1 if the file is not current
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tools.dev.drawing import BLUE, GREEN, GREY, INK, ORANGE, ROOT, Drawing, write_picture

PICTURE = ROOT / "docs" / "pictures" / "pipeline.svg"
TITLE = "A ring of shared-memory stages that TMA fills, and that warpgroups (wgmma) or warps (mma.sync) empty"


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences between the two kernels. ``ldmatrix`` states whether activations pass through registers."""

    title: str
    consumers: str
    product: str
    operands: str
    ldmatrix: bool


KERNELS = (
    Variant(
        "SM90: the wgmma kernel",
        "consumer warpgroups",
        "wgmma m64nNk16",
        "A: weights, registers; B: shared memory",
        ldmatrix=False,
    ),
    Variant(
        "SM120: the mma.sync kernel",
        "consumer warps",
        "mma.sync m16n8k16",
        "A: weights, B: activations; registers",
        ldmatrix=True,
    ),
)
#: PTX instructions that the picture names. The templates contain each of them.
INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "ldmatrix", "stmatrix", "mbarrier.try_wait", "cp.async.bulk.tensor")

_WIDTH, _PANEL, _TOP, _FOOT = 1000, 384, 8, 40
_RING_X, _RING_WIDTH, _STAGE, _PITCH = 424, 180, 44, 56
_FULL_X, _EMPTY_X = 536, 581
_CONSUMER_X, _CONSUMER_WIDTH = 664, 320
_B_X, _A_X, _BOX_WIDTH = 678, 832, 138
_STAGES = (
    ("stage 0", "being filled", "#fde3c8", False, False),
    ("stage 1", "empty", "#f6f7fa", False, True),
    ("stage 2", "being read", "#cfe2f8", True, False),
    ("stage 3", "full", "#e2f0c8", True, False),
)


def _load_side(out: Drawing, top: float) -> None:
    """Draw global memory, the producer warp and TMA, which are the same in both kernels."""
    out.text(90, top + 52, "global memory", size=13.5, fill=INK, bold=True)
    operands = (("weights", "int4, packed"), ("scales", "one per group"), ("activations", "fp16 or bf16"))
    for number, (name, what) in enumerate(operands):
        y = top + 116 + 62 * number
        out.box(20, y, 140, 46, "#eef1f7", GREY, name, [what])
        out.arrow(f"M161 {y + 23:g} L206 {top + 172 + 29 * number:g}", "g")
    out.text(290, top + 52, "producer warp and TMA", size=13.5, fill=INK, bold=True)
    out.box(
        *(194, top + 66, 192, 62, "#fff3e6", ORANGE),
        "one thread",
        ["waits for an empty stage", "arrive.expect_tx on full"],
    )
    out.arrow(f"M290 {top + 129:g} V{top + 146:g}", "o")
    out.box(
        208,
        top + 148,
        164,
        104,
        "#eaf5d6",
        GREEN,
        "TMA",
        ["cp.async.bulk.tensor", "addresses, bounds and", "swizzle in hardware"],
    )
    out.text(290, top + 270, "counts arriving bytes", fill=GREEN)
    out.text(290, top + 286, "on the full mbarrier", fill=GREEN)


def _ring(out: Drawing, top: float) -> None:
    out.text(_RING_X + _RING_WIDTH / 2, top + 52, "stages in shared memory", size=13.5, fill=INK, bold=True)
    for number, (name, state, fill, is_full, is_empty) in enumerate(_STAGES):
        y = top + 76 + _PITCH * number
        out.box(_RING_X, y, _RING_WIDTH, _STAGE, fill, GREY)
        out.text(_RING_X + 10, y + 19, name, size=13, fill=INK, anchor="start", bold=True)
        out.text(_RING_X + 10, y + 36, state, anchor="start")
        barriers = ((_FULL_X, "full", GREEN, is_full), (_EMPTY_X, "empty", BLUE, is_empty))
        for x, what, color, is_complete in barriers:
            inside = color if is_complete else "#ffffff"
            out.lines.append(
                f'<circle cx="{x}" cy="{y + 14:g}" r="6.5" fill="{inside}" stroke="{color}" stroke-width="2"/>'
            )
            out.text(x, y + 37, what, size=11.5)
    out.arrow(f"M373 {top + 200:g} C404 {top + 200:g} 384 {top + 92:g} {_RING_X - 2} {top + 92:g}", "g")
    out.arrow(f"M387 {top + 84:g} C440 {top + 56:g} {_FULL_X} {top + 52:g} {_FULL_X} {top + 81:g}", "o", 1.5)
    out.arrow(f"M{_RING_X - 1} {top + 266:g} H410 V{top + 110:g} H{_RING_X - 2}", "n", 1.5, dashed=True)
    out.text(_RING_X + _RING_WIDTH / 2, top + 306, "stage 0 follows stage 3 with flipped parity")


def _consumer_side(out: Drawing, top: float, kernel: Variant) -> None:
    """Draw the path from a full stage through the MMA to the result."""
    right, middle = _RING_X + _RING_WIDTH, _CONSUMER_X + _CONSUMER_WIDTH / 2
    out.text(middle, top + 52, kernel.consumers, size=13.5, fill=INK, bold=True)
    out.box(_CONSUMER_X, top + 66, _CONSUMER_WIDTH, 226, "#eef4fc", BLUE)
    out.text(middle, top + 85, "mbarrier.try_wait on full", size=12.5, fill=INK, mono=True)
    white = "#ffffff"
    out.box(_A_X, top + 96, _BOX_WIDTH, 44, white, BLUE, "ld.shared", ["weights, scales"], mono=True)
    out.arrow(f"M{_A_X + 69} {top + 141:g} V{top + 154:g}", "a")
    out.box(_A_X, top + 156, _BOX_WIDTH, 44, white, BLUE, "lop3", ["int4 to fp16/bf16"], mono=True)
    out.arrow(f"M{_A_X + 69} {top + 201:g} V{top + 216:g}", "a")
    out.arrow(f"M{right + 1} {top + 196:g} C660 {top + 196:g} 620 {top + 118:g} {_A_X - 2} {top + 118:g}", "a")
    if kernel.ldmatrix:
        out.box(_B_X, top + 156, _BOX_WIDTH, 44, white, BLUE, "ldmatrix", ["activations"], mono=True)
        out.arrow(f"M{_B_X + 69} {top + 201:g} V{top + 216:g}", "a")
        out.arrow(f"M{right + 1} {top + 212:g} C640 {top + 212:g} 640 {top + 178:g} {_B_X - 2} {top + 178:g}", "a")
    else:
        out.text(_B_X + 69, top + 176, "activations stay in")
        out.text(_B_X + 69, top + 192, "shared memory")
        out.arrow(f"M{right + 1} {top + 214:g} C650 {top + 214:g} 640 {top + 240:g} {_B_X - 2} {top + 240:g}", "a")
    out.box(
        _B_X, top + 218, _A_X + _BOX_WIDTH - _B_X, 44, "#dbe9fa", BLUE, kernel.product, [kernel.operands], mono=True
    )
    out.text(middle, top + 281, "mbarrier.arrive on empty", size=12.5, fill=INK, mono=True)
    out.arrow(f"M{_CONSUMER_X - 1} {top + 277:g} H628 V{top + 238:g} H{_EMPTY_X} V{top + 233:g}", "b", 1.5)
    out.arrow(f"M{middle} {top + 293:g} V{top + 313:g}", "a")
    epilogue = "stream-K sums, bias, stmatrix, stores"
    out.box(
        _CONSUMER_X, top + 315, _CONSUMER_WIDTH, 46, "#f3effa", "#6a4fa3", "epilogue (fp32 accumulators)", [epilogue]
    )
    out.box(20, top + 315, 140, 46, "#eef1f7", GREY, "result", ["fp16 or bf16"])
    out.arrow(f"M{_CONSUMER_X - 1} {top + 338:g} H162", "a")


def picture() -> str:
    """Return an SVG with one pipeline below the other."""
    height = _TOP + _PANEL * len(KERNELS) + _FOOT
    out = Drawing()
    for number, kernel in enumerate(KERNELS):
        top = _TOP + _PANEL * number
        if number:
            out.lines.append(f'<path d="M20 {top + 2} H{_WIDTH - 20}" stroke="#c9cfdb" stroke-width="1"/>')
        out.text(20, top + 28, kernel.title, size=17, fill=INK, anchor="start", bold=True)
        _load_side(out, top)
        _ring(out, top)
        _consumer_side(out, top, kernel)
    foot = "A filled circle is an mbarrier with a complete phase. The stage may be read (full) or written (empty)."
    out.text(_WIDTH / 2, height - 20, foot)
    return out.document(TITLE, _WIDTH, height)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture, or with --check compare it with the file."""
    return write_picture(PICTURE, picture(), __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
