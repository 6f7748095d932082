"""Comparison of a driver's answers with the codec and the rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.errors import DescriptorError

EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """One case: the request, and the answers of the driver (code, raw) and of our rules (verdict, spec)."""

    fields: dict[str, Any]
    mutation: str | None
    memory: str
    code: int | str
    verdict: str
    spec: TiledSpec | Im2colSpec | None
    raw: bytes | None

    @property
    def is_compared(self) -> bool:
        """Whether both sides accept the case, so that there are bytes to compare."""
        return self.raw is not None and self.spec is not None and self.verdict in ("ok", "access")

    @property
    def agrees(self) -> bool:
        return not self.differences()

    def differences(self) -> list[str]:
        """Return how the driver differs from the rules, from the codec, or from the decoded bytes."""
        accepted, allowed = self.code == 0, self.verdict in ("ok", "access")
        if accepted != allowed:
            return [f"the driver says {self.code}, the rules say {self.verdict}, mutation {self.mutation}"]
        if not self.is_compared:
            return []
        assert self.spec is not None
        assert self.raw is not None
        encoded = codec.encode(self.spec)
        theirs, ours = codec.read_fields(self.raw)[1], codec.read_fields(encoded)[1]
        wrong = [f"{name}: {value:#x}, not {ours[name]:#x}" for name, value in theirs.items() if ours[name] != value]
        if self.raw != encoded and not wrong:
            wrong = ["bits that no field has"]
        try:
            wrong += [] if codec.decode(self.raw).spec == self.spec else ["decodes to another spec"]
        except DescriptorError as error:
            wrong.append(f"does not decode: {error.field}")
        return wrong


def report(answers: Sequence[Answer]) -> str:
    """Return each kind of difference with its count and a few examples."""
    examples = defaultdict(list)
    for answer in answers:
        for difference in answer.differences():
            examples[difference.partition(":")[0]].append(f"{difference} {answer.fields}")
    lines = [f"{len(answers)} cases, {sum(answer.is_compared for answer in answers)} compared"]
    for name, cases in sorted(examples.items(), key=lambda item: -len(item[1])):
        lines += [f"{len(cases):6d} {name}", *(f"       {case}" for case in cases[:EXAMPLES])]
    return "\n".join(lines)
