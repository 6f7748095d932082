"""What a repeated call of attention_decode and attention_varlen launches: with the workspace of its stream."""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.kernels.replay import Replay
from cudatma.kernels.stream_workspaces import stream_workspace


@dataclass(frozen=True, slots=True)
class DecodeReplay:
    """A launch, and the partial sums that it needs of a workspace; 0 for none."""

    replay: Replay
    device: int
    partials_bytes: int

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        """addresses: of the arrays that are read, the result and lse, 0 for what there is not."""
        if not self.partials_bytes:
            self.replay.run((*addresses, 0, 0), stream)
            return
        space = stream_workspace(self.device, stream, self.partials_bytes)
        self.replay.run((*addresses, space.partials_pointer, space.flags_pointer), stream)
