"""Results of many trials: counted, stored as JSON, shown as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cudatma.mutants.operators import OPERATORS
from cudatma.mutants.trial import EXEMPT, REPORTED, SURVIVED, WRONG_KIND

VERDICTS = (REPORTED, WRONG_KIND, EXEMPT, SURVIVED)
#: What has to be reported of those that are not exempt, and what may be exempt of all.
LEAST_REPORTED, MOST_EXEMPT = 0.95, 0.10


@dataclass(slots=True)
class Result:
    """One subject. counts: operator -> verdict -> how many; notes: what is to be said of those that were not reported.

    clean_schedules: under how many the unchanged kernel ran without a hazard; unclean: what it showed otherwise.
    """

    subject: str
    clean_schedules: int = 0
    unclean: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one mutant. row: operator, verdict, line, text, kinds, note."""
        verdicts = self.counts.setdefault(row["operator"], {})
        verdicts[row["verdict"]] = verdicts.get(row["verdict"], 0) + 1
        if row["verdict"] != REPORTED:
            self.notes.append(dict(row))

    def totals(self) -> Counter[str]:
        """Verdict -> how many."""
        return sum((Counter(verdicts) for verdicts in self.counts.values()), Counter())

    def to_json(self) -> dict[str, Any]:
        counts = {operator: self.counts[operator] for operator in OPERATORS if operator in self.counts}
        return {
            "subject": self.subject,
            "clean_schedules": self.clean_schedules,
            "unclean": self.unclean,
            "counts": counts,
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        return cls(data["subject"], data["clean_schedules"], data["unclean"], dict(data["counts"]), list(data["notes"]))


def total(results: Iterable[Result]) -> Counter[str]:
    """Verdict -> how many, over all subjects."""
    return sum((result.totals() for result in results), Counter())


def reported_share(counts: Mapping[str, int]) -> float:
    """Reported with an expected kind, of those that are not exempt."""
    tried = sum(counts.get(verdict, 0) for verdict in VERDICTS) - counts.get(EXEMPT, 0)
    return counts.get(REPORTED, 0) / tried if tried else 1.0


def exempt_share(counts: Mapping[str, int]) -> float:
    """Exempt ones of all."""
    return counts.get(EXEMPT, 0) / max(1, sum(counts.values()))


def is_enough(results: Iterable[Result]) -> bool:
    """Whether every kernel is clean unchanged and enough of the mutants are reported."""
    results = list(results)
    counts = total(results)
    clean = all(not result.unclean for result in results)
    return clean and reported_share(counts) >= LEAST_REPORTED and exempt_share(counts) <= MOST_EXEMPT


# ---- Markdown


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    sides = ["---", *["---:" if len(head) > 2 else "---"] * (len(head) - 1)]
    return [_row(head), _row(sides), *map(_row, rows)]


def to_markdown(results: list[Result], schedules: int) -> str:
    """The tables of docs/mutants.md."""
    counts = total(results)
    lines = [
        f"{sum(counts.values())} mutants of {len(results)} kernels, each under up to {schedules} schedules: "
        f"{100 * reported_share(counts):.1f} % of those that are not exempt are reported with an expected kind "
        f"({counts[REPORTED]}), {100 * exempt_share(counts):.1f} % are exempt ({counts[EXEMPT]}), "
        f"{counts[WRONG_KIND]} are reported with other kinds, {counts[SURVIVED]} survive.",
        "",
        "## By kernel",
        "",
        *_by_kernel(results),
        "",
        "## By operator",
        "",
        "Reported / all; `e` exempt, `s` survived, `w` reported with other kinds only.",
        "",
        *_by_operator(results),
        "",
        *_table(["operator", "what is done"], ([f"`{name}`", text] for name, text in OPERATORS.items())),
        "",
        "## Exempt, and what gives the same order",
        "",
        *_notes(results, EXEMPT),
        "",
        "## Survivors",
        "",
        *_notes(results, SURVIVED, WRONG_KIND),
    ]
    return "\n".join(lines) + "\n"


def _by_kernel(results: list[Result]) -> list[str]:
    rows = []
    for result in results:
        found = result.totals()
        clean = f"{result.clean_schedules} schedules clean" if not result.unclean else result.unclean
        share = f"{100 * reported_share(found):.0f} %"
        rows.append([result.subject, sum(found.values()), *(found[v] for v in VERDICTS), share, clean])
    head = ["kernel", "mutants", "reported", "other kind", "exempt", "survived", "reported, of not exempt", "unchanged"]
    return _table(head, rows)


def _by_operator(results: list[Result]) -> list[str]:
    kernels = list(dict.fromkeys(result.subject.partition("/")[0] for result in results))
    rows = []
    for operator in OPERATORS:
        cells = []
        for kernel in kernels:
            found: Counter[str] = Counter()
            for result in results:
                if result.subject.partition("/")[0] == kernel:
                    found.update(result.counts.get(operator, {}))
            cells.append(_cell(found))
        if any(cells):
            rows.append([f"`{operator}`", *cells])
    return _table(["operator", *kernels], rows)


def _cell(found: Counter[str]) -> str:
    count = sum(found.values())
    marks = [
        f" {found[verdict]}{mark}"
        for verdict, mark in ((EXEMPT, "e"), (SURVIVED, "s"), (WRONG_KIND, "w"))
        if found[verdict]
    ]
    return f"{found[REPORTED]}/{count}{''.join(marks)}" if count else ""


def _notes(results: list[Result], *verdicts: str) -> list[str]:
    """One line for each operator and reason, with the kernels and how often."""
    grouped: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        for row in result.notes:
            if row["verdict"] in verdicts:
                text = row["note"] or row["text"]
                if row["kinds"]:
                    text = f"{row['text']}: reported as {', '.join(row['kinds'])}"
                grouped.setdefault((row["operator"], text), Counter())[result.subject] += 1
    if not grouped:
        return ["None."]
    lines = ["| operator | why | kernels |", "| --- | --- | --- |"]
    for (operator, text), subjects in sorted(grouped.items()):
        where = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in subjects.items())
        lines.append(_row([f"`{operator}`", text, where]))
    return lines
