"""Explanations of hazards, which are files in explanations/: a text and a kernel with and without the mistake.

A file has a header with `group`, `meaning` and `launch`, then the text, then the kernel as a diff that repairs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cudatma.emulator.hazards.hazard import CAUSES
from cudatma.errors import ArgumentError

FOLDER = Path(__file__).with_name("explanations")
_FILE = re.compile(
    r"---\ngroup: (?P<group>.+?)\nmeaning: (?P<meaning>.+?)\nlaunch: (?P<launch>.+?)\n---\n\n(?P<text>.+?)\n\n"
    r"```diff\n(?P<diff>.+\n)```\n",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class HazardExplanation:
    """Explanation of a kind of hazard, with a kernel that shows it. Use ``str()`` to read it.

    Parameters
    ----------
    kind : str
        The kind, as in `Hazard.kind`.
    group : str
        Subject under which lists show the kind.
    meaning : str
        The meaning of the hazard, as a phrase.
    text : str
        What the mistake is, what effect it has on a GPU, and how to repair it, as Markdown.
    launch : str
        Options of ``cudatma emulate`` that launch the kernel.
    diff : str
        The whole kernel, as a template or PTX. Lines that begin with "-" are only in the broken version, and lines that
        begin with "+" only in the fixed one.
    """

    kind: str
    group: str
    meaning: str
    text: str
    launch: str
    diff: str

    @property
    def broken(self) -> str:
        """The kernel with the mistake."""
        return self._version("+")

    @property
    def fixed(self) -> str:
        """The kernel without the mistake."""
        return self._version("-")

    @property
    def file(self) -> str:
        """Name for a file that contains one version of the kernel, as PTX or as a template."""
        return f"{self.kind}.ptx" if ".entry" in self.diff else f"{self.kind}.cu.j2"

    @property
    def cause(self) -> str:
        """The usual cause, as reports state it."""
        return CAUSES[self.kind]

    def as_dict(self) -> dict[str, str]:
        """Return the explanation as a dict that can be serialized to JSON.

        Returns
        -------
        dict
            The explanation as plain data.
        """
        names = ("kind", "group", "meaning", "cause", "text", "launch", "broken", "fixed")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.meaning}\nusual cause: {self.cause}\n\n{self.text}\n\n{self.diff}\n"
            f"launch: cudatma emulate {self.file} {self.launch}"
        )

    def _repr_markdown_(self) -> str:
        files = f"`cudatma explain {self.kind} --out DIR` writes both versions to files. To run one:"
        return (
            f"# {self.kind}\n\n**Meaning:** {self.meaning}.\n\n**Usual cause:** {self.cause}.\n\n{self.text}\n\n"
            f"```diff\n{self.diff}```\n\n{files}\n\n```\ncudatma emulate {self.file} {self.launch}\n```\n"
        )

    def _version(self, left_out: str) -> str:
        lines = (line for line in self.diff.splitlines() if not line.startswith(left_out))
        return "".join(line[1:] + "\n" for line in lines)


def groups() -> dict[str, list[HazardExplanation]]:
    """Return the explanations of all kinds, by group."""
    found: dict[str, list[HazardExplanation]] = {}
    for kind in CAUSES:
        explanation = explain(kind)
        found.setdefault(explanation.group, []).append(explanation)
    return found


def explain(kind: str) -> HazardExplanation:
    """Explain a kind of hazard that the emulator reports.

    Parameters
    ----------
    kind : str
        Kind of hazard, a key of ``cudatma.emulator.CAUSES``.

    Returns
    -------
    HazardExplanation
        Text, broken kernel and fixed kernel. Use ``str()`` to read it.

    Raises
    ------
    ArgumentError
        If `kind` is unknown.

    Examples
    --------
    >>> cudatma.explain("read_before_load").meaning
    'bytes are read without a wait for the copy that writes them'
    """
    if kind not in CAUSES:
        raise ArgumentError("kind", kind, ", ".join(CAUSES), "`cudatma explain` lists the kinds")
    match = _FILE.fullmatch((FOLDER / f"{kind}.md").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{kind}.md: not in the form that _FILE describes")
    return HazardExplanation(kind, **match.groupdict())
