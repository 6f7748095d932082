"""Names for the shared addresses and line numbers of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatma.runtime.source_lines import own_lines

_BARRIER_BYTES = 8
#: A shared address has the CTA's rank in its cluster from here on.
_RANK_SHIFT = 24


@dataclass(frozen=True, slots=True)
class Names:
    """entry: the kernel. source: its CUDA text. layout: (name, offset, bytes) of dynamic shared memory, as a spec's
    ``smem_layout()`` gives it, empty where there is none."""

    entry: str
    source: str = ""
    layout: Sequence[tuple[str, int, int]] = ()

    def barrier(self, address: int, dynamic_base: int) -> str:
        """``full_barriers[2]`` where the layout has it: array and stage. Else the address."""
        rank, low = address >> _RANK_SHIFT, (1 << _RANK_SHIFT) - 1
        if rank != dynamic_base >> _RANK_SHIFT:
            return f"{self.barrier(address & low, dynamic_base & low)} of rank {rank} of the cluster"
        offset = address - dynamic_base
        for name, start, size in self.layout:
            if start <= offset < start + size:
                stage, inside = divmod(offset - start, _BARRIER_BYTES)
                return f"{name}[{stage}]" + (f" + {inside} B" if inside else "")
        where = f"dynamic shared memory + {offset:#x}" if offset >= 0 else "static shared memory"
        return f"mbarrier at {address:#x} ({where})"

    def line(self, number: int) -> str:
        """The text of a line, without its indentation; "" where there is none. Lines are numbered as in the text that
        compile() was given, and for cudatma's own templates as in the generated source."""
        (lines,) = own_lines(self.source).values()
        return lines.get(number, "").strip()
