"""What a driver's answers say about the codec and the rules, in a report of bounded length.

Every class of disagreement has a line with its count and a few examples. An example names a spec in short: kind and
rank, element type, d(ims), s(trides in bytes), b(ox) or c(hannels) x p(ixels) with corners l and u, e(lement strides),
i(nterleave), w (swizzle), L (L2 promotion), f(ill), a(ddress).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from descriptor_guesses import Known, best_predictors, conflicts, count_guesses

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.descriptor.rules import CORNER_RANGE
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave, Swizzle

REPORT_CHARACTERS = 10_500
CLASSES = 10
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """One case: what was asked, and what the driver (code, raw) and our rules (verdict, spec) say of it."""

    fields: dict[str, Any]
    mutation: str | None
    memory: str
    code: int | str
    verdict: str
    spec: TiledSpec | Im2colSpec | None
    raw: bytes | None

    @property
    def accepted(self) -> bool:
        return self.code == 0

    @property
    def allowed(self) -> bool:
        return self.verdict in ("ok", "access")

    @property
    def known(self) -> Known | None:
        """Spec and bytes where both sides accept."""
        return Known(self.spec, self.raw, self.memory) if self.raw and self.spec and self.allowed else None

    @property
    def agrees(self) -> bool:
        """Both accept, with the same 128 bytes that decode to the spec, or both refuse."""
        if self.accepted is not self.allowed:
            return False
        return self.known is None or (codec.encode(self.known.spec) == self.raw and not decode_error(self.known))


def wrong_fields(known: Known) -> dict[str, tuple[int, int]]:
    """Fields in which the driver's value (first) is not the codec's (second)."""
    theirs, ours = known.read, codec.read_fields(codec.encode(known.spec))[1]
    return {name: (value, ours[name]) for name, value in theirs.items() if ours[name] != value}


def decode_error(known: Known) -> str:
    """Why the driver's bytes do not decode to the spec; empty where they do."""
    try:
        return "" if codec.decode(known.raw).spec == known.spec else "another spec"
    except DescriptorError as error:
        return f"refused: {error.field}"


def brief(fields: dict[str, Any]) -> str:
    """A spec's plain values in one short line."""

    def joined(values: Iterable[int]) -> str:
        return ",".join(str(value) for value in values)

    if fields["kind"] == "tiled":
        extent = f"b={joined(fields['box'])}"
    else:
        corners = f"l={joined(fields['lower_corner'])} u={joined(fields['upper_corner'])}"
        extent = f"c={fields['channels_per_pixel']} p={fields['pixels_per_column']} {corners}"
    return (
        f"{fields['kind'][0]}{len(fields['dims'])} {fields['dtype']} d={joined(fields['dims'])} "
        f"s={joined(fields['strides_bytes'])} {extent} e={joined(fields['element_strides'])} "
        f"i{fields['interleave']} w{fields['swizzle']} L{fields['l2_promotion']} f{fields['oob_fill']} "
        f"a={fields['address']:#x}"
    )


@dataclass(slots=True)
class Section:
    """Counted classes with examples under a title; the most frequent come first."""

    title: str
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, example: str = "") -> None:
        self.counts[name] += 1
        if example and len(self.examples.setdefault(name, [])) < EXAMPLES:
            self.examples[name].append(example)

    def lines(self, examples: int) -> list[str]:
        lines = [f"## {self.title}"]
        for name, count in self.counts.most_common(CLASSES):
            lines.append(f"{count:6d} {name}")
            lines += [f"       {text}" for text in self.examples.get(name, [])[:examples]]
        if len(self.counts) > CLASSES:
            lines.append(f"       and {len(self.counts) - CLASSES} more classes")
        return lines if self.counts else [f"{lines[0]}: none"]


def rules_section(answers: Sequence[Answer]) -> Section:
    """Specs that only one side accepts."""
    section = Section("rules and driver that differ")
    for answer in answers:
        if answer.accepted and not answer.allowed:
            section.add(f"driver accepts, we refuse {answer.verdict} ({answer.mutation})", brief(answer.fields))
        elif answer.allowed and not answer.accepted:
            what = answer.mutation or f"valid {answer.fields['kind']} interleave {answer.fields['interleave']}"
            section.add(f"driver refuses ({answer.code}), we accept: {what}", brief(answer.fields))
    return section


def mutation_lines(answers: Sequence[Answer]) -> list[str]:
    """For each mutation: cases / accepted by the driver / by the rules / refused by the bindings."""
    table: dict[str, list[int]] = {}
    for answer in answers:
        row = table.setdefault(str(answer.mutation), [0] * 4)
        for i, hit in enumerate((True, answer.accepted, answer.allowed, answer.code == "bindings")):
            row[i] += hit
    cells = [f"{name} {'/'.join(map(str, row))}" for name, row in sorted(table.items())]
    return ["## mutation: cases/driver accepts/we accept/bindings refuse", "; ".join(cells)]


def interleave_lines(answers: Sequence[Answer]) -> list[str]:
    """How the driver's verdict on interleaved specs that only the box can spoil depends on the inner extent."""
    table: dict[str, list[int]] = {}
    for answer in answers:
        fields = answer.fields
        if not fields["interleave"] or len(fields["dims"]) < 3 or answer.mutation not in (None, "inner_not_16_bytes"):
            continue
        inner = fields["box"][0] if fields["kind"] == "tiled" else fields["channels_per_pixel"]
        width = inner * TMA_TYPES[fields["dtype"]].element_bytes
        piece, span = 16 * fields["interleave"], Swizzle(fields["swizzle"]).span_bytes
        facts = {
            "% 16": width % 16 > 0,
            "% slice": width % piece > 0,
            "> slice": width > piece,
            "> span": width > span > 0,
        }
        name = f"{fields['kind']} i{fields['interleave']} w{fields['swizzle']}: " + " ".join(
            text for text, hit in facts.items() if hit
        )
        table.setdefault(name, [0, 0])[not answer.accepted] += 1
    cells = [f"{name} {yes}/{no}" for name, (yes, no) in sorted(table.items())]
    return ["## interleaved, bytes of the inner extent: accepted/refused", "; ".join(cells)]


def codec_section(answers: Sequence[Answer]) -> Section:
    """Fields in which driver and codec differ, and bytes that do not decode."""
    section = Section("fields that differ, and decoding")
    for answer in answers:
        if (known := answer.known) is None:
            continue
        section.add("descriptors compared")
        for name, (theirs, ours) in wrong_fields(known).items():
            text = f"{brief(answer.fields)} driver={theirs:#x} ours={ours:#x}"
            section.add(f"{known.kind} {name}", text)
        if error := decode_error(known):
            section.add(f"decode {error}", f"{brief(answer.fields)} {known.raw.hex()}")
    return section


def im2col_lines(known: Sequence[Known]) -> list[str]:
    """Agreement of the fields that only im2col has, by rank, and both orders of the corners where they differ."""
    lines = ["## im2col fields: agreeing/all; corner order: agreeing/cases that tell the orders apart"]
    for rank in (3, 4, 5):
        chosen = [k for k in known if isinstance(k.spec, Im2colSpec) and k.spec.rank == rank]
        wrong = Counter(name for k in chosen for name in wrong_fields(k))
        names = [name for name in codec.FIELDS["im2col"] if name not in codec.FIELDS["tiled"]]
        cells = [f"{name} {len(chosen) - wrong[name]}/{len(chosen)}" for name in names]
        others = [f"{name} wrong {count}" for name, count in wrong.items() if name not in names]
        first, last, total = corner_orders(chosen, rank)
        order = [f"W lowest {first}/{total}", f"W highest {last}/{total}"] if rank > 3 else []
        lines.append(f"rank {rank}: {'; '.join(cells + others + order)}")
    return lines


def corner_orders(known: Sequence[Known], rank: int) -> tuple[int, int, int]:
    """Cases that fit with W in the lowest bits, in the highest bits, and cases in which the two differ."""
    bits = CORNER_RANGE[rank][1].bit_length() + 1
    first = last = total = 0
    for k in known:
        assert isinstance(k.spec, Im2colSpec)
        for name, corner in (("lower_corner", k.spec.lower_corner), ("upper_corner", k.spec.upper_corner)):
            forward, backward = (
                sum((value & ((1 << bits) - 1)) << bits * i for i, value in enumerate(order))
                for order in (corner, corner[::-1])
            )
            total += forward != backward
            first += forward != backward and k.read[name] == forward
            last += forward != backward and k.read[name] == backward
    return first, last, total


def category(known: Known) -> str:
    """What a derived field may go by: kind, interleave, swizzle."""
    spec = known.spec
    leave = "" if spec.interleave is Interleave.NONE else f" i{spec.interleave.label}"
    return f"{known.kind}{leave} w{spec.swizzle.label}"


def derived_lines(pairs: Sequence[tuple[str, Known]], name: str) -> Callable[[int], list[str]]:
    """One derived field: guesses that hold overall and by category, and what the field is a function of."""
    first, bits = codec.FIELDS["tiled"][name]
    groups: dict[str, list[tuple[str, Known]]] = {}
    for pair in pairs:
        groups.setdefault(category(pair[1]), []).append(pair)
    counts = {label: count_guesses([known for _, known in members], name) for label, members in groups.items()}
    overall = sum(counts.values(), Counter()).most_common(4)
    head = [f"## bits {first}-{first + bits - 1} ({name}), {len(pairs)} cases"]
    head.append("best overall: " + "; ".join(f"{guess} {hits}" for guess, hits in overall))
    head.append("conflicts/repeated keys: " + "; ".join(conflicts([k for _, k in pairs], name)))
    details: list[tuple[str, list[str]]] = []
    for label, members in sorted(groups.items()):
        if overall and counts[label][overall[0][0]] == len(members):
            continue
        best = counts[label].most_common(2)
        values = Counter(known.read[name] for _, known in members).most_common(4)
        shown = ", ".join(f"{value:#x} x{count}" for value, count in values)
        guesses = "; ".join(f"{guess} {hits}" for guess, hits in best)
        missed = (
            f"{text} bits={known.read[name]:#x}" for text, known in members if not known.guesses(name)[best[0][0]]
        )
        details.append((f"{label}: {len(members)}; {guesses}; values {shown}", list(islice(missed, EXAMPLES))))

    def lines(examples: int) -> list[str]:
        return head + [line for text, missed in details for line in (text, *(f"   {m}" for m in missed[:examples]))]

    return lines


def bits_lines(pairs: Sequence[tuple[str, Known]]) -> Callable[[int], list[str]]:
    """Version values, and every set bit that the spec does not account for with what predicts it best."""
    versions = Counter((known.kind, known.read["version"]) for _, known in pairs)
    head = ["## version (65-67): " + "; ".join(f"{kind} {value}: {n}" for (kind, value), n in versions.items())]
    unknown = Counter(bit for _, known in pairs for bit in known.unknown_bits)
    head.append(f"## unaccounted bits of {len(pairs)}: " + "; ".join(f"{b}: {n}" for b, n in unknown.most_common(20)))
    details: list[tuple[str, list[str]]] = []
    for bit, _ in unknown.most_common(3):
        found = best_predictors([known for _, known in pairs], bit)[:4]
        shown = "; ".join(f"{name} [{'/'.join(map(str, table))}]" for name, table in found)
        best = found[0][0]
        missed = (
            f"{text} {known.memory} bit={int(bit in known.unknown_bits)}"
            for text, known in pairs
            if known.facts[best] != (bit in known.unknown_bits)
        )
        details.append((f"bit {bit}, fact [set+fact/set/fact/neither]: {shown}", list(islice(missed, EXAMPLES))))

    def lines(examples: int) -> list[str]:
        return head + [line for text, missed in details for line in (text, *(f"   {m}" for m in missed[:examples]))]

    return lines


def report(answers: Sequence[Answer], limit: int = REPORT_CHARACTERS) -> str:
    """All sections, with as many examples (5 at most a class) as ``limit`` characters allow; cut off there."""
    pairs = [(brief(answer.fields), known) for answer in answers if (known := answer.known)]
    kinds = Counter(f"{a.fields['kind']} rank {len(a.fields['dims'])}" for a in answers)
    parts = [fixed([f"{len(answers)} cases: " + "; ".join(f"{kind}: {n}" for kind, n in sorted(kinds.items()))])]
    parts += [rules_section(answers).lines, fixed(interleave_lines(answers)), fixed(mutation_lines(answers))]
    if pairs:
        parts += [codec_section(answers).lines, fixed(im2col_lines([known for _, known in pairs])), bits_lines(pairs)]
        parts += [derived_lines(pairs, name) for name in ("smem_bytes", "smem_pattern")]
    texts = ["\n".join(part(0)) for part in parts]
    for examples in range(1, EXAMPLES + 1):
        for i, part in enumerate(parts):
            longer = "\n".join(part(examples))
            if sum(len(text) + 1 for text in texts) - len(texts[i]) + len(longer) <= limit:
                texts[i] = longer
    text = "\n".join(texts)
    return text if len(text) <= limit else text[:limit] + "\n(cut off)"


def fixed(lines: list[str]) -> Callable[[int], list[str]]:
    """A part of the report without examples."""
    return lambda _: lines
