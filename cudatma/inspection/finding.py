"""One finding of the linter."""

from __future__ import annotations

from dataclasses import dataclass

#: The worst first.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A risk of a tensor map.

    name: of the rule, always the same for the same risk. severity: of SEVERITIES. message: what applies to this map.
    rule: what is asked for. source: which document says it. remedy: what to do.
    """

    name: str
    severity: str
    message: str
    rule: str
    source: str
    remedy: str
