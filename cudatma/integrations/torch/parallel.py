"""Layers whose weight is divided among the GPUs of a process group, which is torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.integrations.torch.all_reduce import AllReduce, rank_and_members
from cudatma.integrations.torch.linear import MarlinLinear
from cudatma.quantization import PackedWeight
from cudatma.quantization.sharding import shard


class ColumnParallel(torch.nn.Module):  # type: ignore[misc]
    """Each rank has some of the outputs: y[..., r N / ranks :][..., : N / ranks] on rank r, all of x on every rank.

    layer: the rank's own MarlinLinear, its part of the bias included. group: None is torch's default group.
    gather_output: the result is the whole y on every rank, by an all-gather. Raises ArgumentError, ArgumentTypeError.
    """

    def __init__(self, layer: MarlinLinear, *, group: Any = None, gather_output: bool = False) -> None:
        super().__init__()
        if type(gather_output) is not bool:
            raise ArgumentTypeError("gather_output", type(gather_output).__name__, "bool")
        self.layer, self.group, self.gather_output = _checked(layer), group, gather_output
        self.rank, members = rank_and_members(group)
        self.ranks = len(members)

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        bias: Any = None,
        *,
        group: Any = None,
        gather_output: bool = False,
        batch_invariant: bool = False,
    ) -> ColumnParallel:
        """The rank's part of a weight and bias, which every rank gives whole. Raises what shard() raises."""
        rank, members = rank_and_members(group)
        part = shard(weight, rank, len(members), by="columns")
        if bias is not None:
            if (got := describe(bias, "bias").shape) != weight.shape[1:]:
                raise ArgumentError("bias.shape", got, f"({weight.shape[1]},), the whole bias")
            n = part.shape[1]
            bias = bias[rank * n : (rank + 1) * n]
        layer = MarlinLinear.from_packed(part, bias, batch_invariant=batch_invariant)
        return cls(layer, group=group, gather_output=gather_output)

    def forward(self, x: Any) -> Any:
        """x (..., K) -> (..., N / ranks), with gather_output (..., N)."""
        y = self.layer(x)
        if not self.gather_output or self.ranks == 1:
            return y
        parts = y.new_empty(self.ranks * y.numel())
        dist.all_gather_into_tensor(parts, y.view(-1), group=self.group)
        return parts.view(self.ranks, *y.shape).movedim(0, -2).flatten(-2)

    def extra_repr(self) -> str:
        return f"rank={self.rank} of {self.ranks}, gather_output={self.gather_output}"


class RowParallel(torch.nn.Module):  # type: ignore[misc]
    """Each rank has some of the inputs: x[..., r K / ranks :][..., : K / ranks] on rank r, as ColumnParallel gives it.

    The partial results are added up by an all-reduce, which gives every rank the same y. layer: the rank's own
    MarlinLinear; rank 0 alone has the bias, which is added once. group: None is torch's default group. all_reduce: an
    AllReduce of the same group, which layers share; None is the group's own. Raises ArgumentError, ArgumentTypeError.
    """

    def __init__(self, layer: MarlinLinear, *, group: Any = None, all_reduce: AllReduce | None = None) -> None:
        super().__init__()
        self.layer, self.group, self.all_reduce = _checked(layer), group, all_reduce
        self.rank, members = rank_and_members(group)
        self.ranks = len(members)
        if all_reduce is not None and not isinstance(all_reduce, AllReduce):
            raise ArgumentTypeError("all_reduce", type(all_reduce).__name__, "AllReduce, or None")
        if all_reduce is not None and all_reduce.members != members:
            raise ArgumentError("all_reduce", f"one for ranks {all_reduce.members}", f"one for ranks {members}")
        if self.rank and layer.bias is not None:
            raise ArgumentError(
                "layer.bias", f"a bias on rank {self.rank}", "a bias on rank 0 alone", "it is added once"
            )

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        bias: Any = None,
        *,
        group: Any = None,
        batch_invariant: bool = False,
        all_reduce: AllReduce | None = None,
    ) -> RowParallel:
        """The rank's part of a weight, which every rank gives whole, with the bias. Raises what shard() raises."""
        rank, members = rank_and_members(group)
        part = shard(weight, rank, len(members), by="rows")
        layer = MarlinLinear.from_packed(part, None if rank else bias, batch_invariant=batch_invariant)
        return cls(layer, group=group, all_reduce=all_reduce)

    def forward(self, x: Any) -> Any:
        """x (..., K / ranks) -> (..., N), the same on every rank."""
        y = self.layer(x)
        if self.all_reduce is not None:
            return self.all_reduce(y)
        if self.ranks > 1:
            dist.all_reduce(y, group=self.group)
        return y

    def extra_repr(self) -> str:
        return f"rank={self.rank} of {self.ranks}"


def _checked(layer: Any) -> MarlinLinear:
    if not isinstance(layer, MarlinLinear):
        raise ArgumentTypeError("layer", type(layer).__name__, "MarlinLinear", "from_packed() divides a weight")
    return layer
