"""Tables of findings, accesses and bits for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cudatma.descriptor.bits import BitRange, Evidence
from cudatma.descriptor.spec import AnySpec
from cudatma.inspection.access import AccessReport, access_lines
from cudatma.inspection.lint import Lint
from cudatma.inspection.placement import Element

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_rows(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> None:
    """Print a table without borders. Only the last column is wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = list(rows)
    if not lines:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(head))
    for index in range(len(lines[0])):
        is_last = index == len(lines[0]) - 1
        name = head[index] if head else ""
        table.add_column(name, no_wrap=not is_last, overflow="fold")
    for line in lines:
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in line))
    Console(markup=False, highlight=False).print(table)


def print_access(spec: AnySpec, report: AccessReport) -> None:
    """Print the effect of accesses at the report's coordinates."""
    print(f"\naccess at ({', '.join(map(str, report.coords))})")
    print_rows(access_lines(report, spec.address))


def print_lint(lint: Lint) -> None:
    """Print every finding with its rule, source and remedy."""
    print(f"\nrisks{f' on {lint.target}' if lint.target else ''}")
    if not lint.findings:
        print("none found")
    rows: list[tuple[str, str]] = []
    for finding in lint.findings:
        rows.append((finding.severity, f"{finding.name}: {finding.message}"))
        rows.append(("", f"rule: {finding.rule} [{finding.source}]"))
        if finding.remedy:
            rows.append(("", f"remedy: {finding.remedy}"))
    print_rows(rows)


def print_element(element: Element, spec: AnySpec) -> None:
    """Print the position of one element."""
    where = (spec.address + element.gmem_offset) % (1 << 64)
    bit = f", bit {element.bit}" if element.bit else ""
    print(f"\nelement ({element.row}, {element.index})")
    print_rows(
        [
            ("coordinates", f"({', '.join(map(str, element.coords))})"),
            ("global", f"{where:#x}{bit}" if element.is_inside else "outside the tensor, filled by loads"),
            ("shared", f"{element.smem_address:#x}{bit}"),
            ("bank", str(element.bank)),
        ]
    )


def print_bits(ranges: Iterable[BitRange]) -> None:
    """Print every field, and the other bits that are set or have a note."""
    shown = [r for r in ranges if r.evidence is not Evidence.UNKNOWN or r.value or r.note]
    rows = [(r.place, r.name, f"{r.value:#x}", r.evidence.value + (f"; {r.note}" if r.note else "")) for r in shown]
    print_rows(rows, ("bits", "field", "value", "evidence"))
