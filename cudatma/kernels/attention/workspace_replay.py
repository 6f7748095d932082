"""What a repeated call launches where its kernel may need the workspace of its stream."""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.kernels.replay import Replay
from cudatma.kernels.stream_workspaces import stream_workspace


@dataclass(frozen=True, slots=True)
class WorkspaceReplay:
    """A launch whose last two arrays are partial sums and counters. partials_bytes: of the partial sums; None where it
    needs no workspace."""

    replay: Replay
    device: int
    partials_bytes: int | None

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        """addresses: of the arrays that are read, the result and lse, 0 for what there is not."""
        if self.partials_bytes is None:
            self.replay.run((*addresses, 0, 0), stream)
            return
        space = stream_workspace(self.device, stream, self.partials_bytes)
        self.replay.run((*addresses, space.partials_pointer, space.flags_pointer), stream)
