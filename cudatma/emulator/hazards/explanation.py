"""Explanations of hazards, each with a broken and a fixed kernel.

Each file in explanations/ consists of a header (`group`, `meaning` and `launch`), a text, and a diff that repairs the
kernel.
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
    """Explanation of a kind of hazard, with a kernel that demonstrates it. ``str()`` returns the text.

    Parameters
    ----------
    kind : str
        Hazard kind, as in `Hazard.kind`.
    group : str
        Heading under which the kind is listed.
    meaning : str
        Meaning of the hazard in one phrase.
    text : str
        Description of the mistake, its effect on a GPU, and the repair, as Markdown.
    launch : str
        Options of ``cudatma emulate`` that launch the kernel.
    diff : str
        Complete kernel, as a template or PTX. Lines that start with "-" occur only in the broken version, and lines
        that start with "+" only in the fixed version.
    """

    kind: str
    group: str
    meaning: str
    text: str
    launch: str
    diff: str

    @property
    def broken(self) -> str:
        """Kernel with the mistake."""
        return self._version("+")

    @property
    def fixed(self) -> str:
        """Kernel without the mistake."""
        return self._version("-")

    @property
    def file(self) -> str:
        """File name for a version of the kernel."""
        return f"{self.kind}.ptx" if ".entry" in self.diff else f"{self.kind}.cu.j2"

    @property
    def cause(self) -> str:
        """Usual cause of the hazard, as in `CAUSES`."""
        return CAUSES[self.kind]

    def as_dict(self) -> dict[str, str]:
        """Return the explanation as JSON-compatible data.

        Returns
        -------
        dict
            The attributes except ``diff``, and ``cause``, ``broken`` and ``fixed``.
        """
        names = ("kind", "group", "meaning", "cause", "text", "launch", "broken", "fixed")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.meaning}\nusual cause: {self.cause}\n\n{self.text}\n\n{self.diff}\n"
            f"To run the broken kernel:\n{self._commands}"
        )

    def _repr_markdown_(self) -> str:
        run = f"To write both versions to files and run the broken kernel:\n\n```\n{self._commands}\n```\n"
        return (
            f"# {self.kind}\n\n**Meaning:** {self.meaning}.\n\n**Usual cause:** {self.cause}.\n\n{self.text}\n\n"
            f"```diff\n{self.diff}```\n\n{run}\nThe fixed kernel is in `example/fixed/{self.file}`.\n"
        )

    @property
    def _commands(self) -> str:
        return f"cudatma explain {self.kind} --out example\ncudatma emulate example/broken/{self.file} {self.launch}"

    def _version(self, left_out: str) -> str:
        lines = (line for line in self.diff.splitlines() if not line.startswith(left_out))
        return "".join(line[1:] + "\n" for line in lines)


def groups() -> dict[str, list[HazardExplanation]]:
    """Return the explanations of all kinds, as a mapping from group to explanations."""
    found: dict[str, list[HazardExplanation]] = {}
    for kind in CAUSES:
        explanation = explain(kind)
        found.setdefault(explanation.group, []).append(explanation)
    return found


def explain(kind: str) -> HazardExplanation:
    """Return the explanation of a kind of hazard.

    Parameters
    ----------
    kind : str
        Hazard kind, a key of ``cudatma.emulator.CAUSES``.

    Returns
    -------
    HazardExplanation
        Explanation with a broken and a fixed kernel.

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
        raise ArgumentError("kind", kind, ", ".join(CAUSES), "run `cudatma explain` to list the kinds")
    match = _FILE.fullmatch((FOLDER / f"{kind}.md").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{kind}.md does not match the format of _FILE")
    return HazardExplanation(kind, **match.groupdict())
