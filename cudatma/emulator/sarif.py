"""Convert hazards to SARIF, a format that code-scanning services show next to the source.

Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cudatma.emulator.hazards.explanation import explain
from cudatma.emulator.hazards.hazard import Hazard, placed
from cudatma.emulator.hazards.sources import Sources, places

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_results(
    hazards: Iterable[Hazard], warnings: Iterable[Hazard], sources: Sources, call: str = ""
) -> list[dict[str, Any]]:
    """Return one SARIF result for each place of each hazard in a launch.

    ``call`` is the "file:line" that launches the kernel. It is the location of the results if the kernel's source is
    not in a file.
    """
    return [
        _result(place, hazard, level, sources, call)
        for level, members in (("error", hazards), ("warning", warnings))
        for hazard in members
        for place in (hazard, *hazard.also)
    ]


def sarif_log(results: Sequence[dict[str, Any]]) -> str:
    """Return a SARIF log with these results, without duplicates."""
    distinct = list({result["partialFingerprints"]["cudatma/v1"]: result for result in reversed(results)}.values())
    distinct.reverse()
    kinds = list(dict.fromkeys(result["ruleId"] for result in distinct))
    for result in distinct:
        result["ruleIndex"] = kinds.index(result["ruleId"])
    driver = {"name": "cudatma", "rules": [_rule(kind) for kind in kinds]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": distinct}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(kind: str) -> dict[str, Any]:
    explanation = explain(kind)
    meaning = f"{explanation.meaning[0].upper()}{explanation.meaning[1:]}."
    return {
        "id": kind,
        "shortDescription": {"text": meaning},
        "fullDescription": {"text": f"{meaning} Usual cause: {explanation.cause}."},
        "help": {
            "text": f"{explanation.text}\n\n{explanation.diff}",
            "markdown": f"{explanation.text}\n\n```diff\n{explanation.diff}```\n",
        },
        "properties": {"tags": ["cuda", "synchronization"]},
    }


def _result(place: Hazard, hazard: Hazard, level: str, sources: Sources, call: str) -> dict[str, Any]:
    lines = [place.message, *hazard.notes[: bool(hazard.advice)], f"usual cause: {hazard.cause}"]
    lines += [f"at {placed(place.ptx_line, place.source)}"] if call else []
    lines += [f"reproduce with --seed {place.seed} --replay {place.schedule}"]
    others = [
        {
            "id": number,
            "message": {"text": f"{other.verb} at {placed(other.ptx_line, other.source)}" if call else other.verb},
            **_location(other.source, other.ptx_line, place.kernel, sources, call),
        }
        for number, other in enumerate(place.others)
    ]
    text = [place.kind, place.kernel, place.source_text or place.instruction]
    text += [sources.text(other.source) or other.instruction for other in place.others]
    location = _location(place.source, place.ptx_line, place.kernel, sources, call)
    return {
        "ruleId": place.kind,
        "level": level,
        "message": {"text": "\n".join(lines)},
        "locations": [{**location, "logicalLocations": [{"name": place.kernel, "kind": "function"}]}],
        "relatedLocations": others,
        "partialFingerprints": {"cudatma/v1": hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]},
    }


def _location(source: str, ptx_line: int, kernel: str, sources: Sources, call: str) -> dict[str, Any]:
    """Return the place of the source line. If its file is unknown, return the place of the launch or the PTX line."""
    place = sources.locate(source) or next(iter(places(source)), None)
    file, line = place or ("", max(1, ptx_line))
    path = sources.paths.get(file) or file or f"{kernel}.ptx"
    snippet = sources.lines.get(file, {}).get(line)
    for called, number in places(call):
        if os.path.isfile(called) and not os.path.isfile(path):
            path, line, snippet = os.path.abspath(called), number, None
    region: dict[str, Any] = {"startLine": max(1, line)}
    if snippet is not None:
        region["snippet"] = {"text": snippet}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, "region": region}}


def _uri(path: str) -> str:
    """Return the URI of a file. The URI of a file below the working directory is relative, as code scanning expects."""
    if not os.path.isabs(path) or not os.path.isfile(path):  # NVRTC places a name without a folder in the root.
        return quote(path.lstrip("/"))
    try:
        return quote(Path(path).relative_to(Path.cwd()).as_posix())
    except ValueError:
        return Path(path).as_uri()
