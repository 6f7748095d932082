"""Linear layers whose weights are sharded across the GPUs of a torch process group."""

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
    """A linear layer whose outputs are sharded across the ranks of a group.

    Every rank gets the whole x. Rank r computes y[..., r * N / ranks : (r + 1) * N / ranks].

    Parameters
    ----------
    layer : MarlinLinear
        This rank's layer, including this rank's shard of the bias.
    group : torch.distributed.ProcessGroup, optional
        Process group of the ranks. Default: torch's default group.
    gather_output : bool, default False
        Whether an all-gather combines the shards, so that every rank returns the whole y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If an argument is invalid.
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
        """Create this rank's layer from the whole weight and bias.

        Parameters
        ----------
        weight : PackedWeight
            The whole weight, which must be the same on every rank.
        bias : array_like, shape (N,), optional
            The whole bias. Default: no bias.
        group : torch.distributed.ProcessGroup, optional
            Process group of the ranks. Default: torch's default group.
        gather_output : bool, default False
            Whether every rank returns the whole y.
        batch_invariant : bool, default False
            See ``marlin_gemm``.

        Returns
        -------
        ColumnParallel
            The layer.

        Raises
        ------
        ArgumentError, ArgumentTypeError, QuantizationError
            If ``shard()`` does not support the weight, or if the bias has an invalid shape.
        """
        rank, members = rank_and_members(group)
        part = shard(weight, rank, len(members), by="columns")
        if bias is not None:
            if (got := describe(bias, "bias").shape) != weight.shape[1:]:
                raise ArgumentError("bias.shape", got, f"({weight.shape[1]},)", "pass the whole bias")
            n = part.shape[1]
            bias = bias[rank * n : (rank + 1) * n]
        layer = MarlinLinear.from_packed(part, bias, batch_invariant=batch_invariant)
        return cls(layer, group=group, gather_output=gather_output)

    def forward(self, x: Any) -> Any:
        """Return this rank's shard of y, or the whole y if ``gather_output`` is True.

        Parameters
        ----------
        x : torch.Tensor, shape (..., K)
            The whole input x.

        Returns
        -------
        torch.Tensor, shape (..., N / ranks)
            This rank's shard, or the whole y, of shape (..., N), if ``gather_output`` is True.
        """
        y = self.layer(x)
        if not self.gather_output or self.ranks == 1:
            return y
        parts = y.new_empty(self.ranks * y.numel())
        dist.all_gather_into_tensor(parts, y.view(-1), group=self.group)
        return parts.view(self.ranks, *y.shape).movedim(0, -2).flatten(-2)

    def extra_repr(self) -> str:
        return f"rank={self.rank} of {self.ranks}, gather_output={self.gather_output}"


class RowParallel(torch.nn.Module):  # type: ignore[misc]
    """A linear layer whose inputs are sharded across the ranks of a group.

    Rank r reads x[..., r * K / ranks : (r + 1) * K / ranks], which is the result of a ColumnParallel on this rank. An
    all-reduce adds the partial results, so every rank gets the same y.

    Parameters
    ----------
    layer : MarlinLinear
        This rank's layer. Only the layer of rank 0 may have a bias, because the bias must be added once.
    group : torch.distributed.ProcessGroup, optional
        Process group of the ranks. Default: torch's default group.
    all_reduce : AllReduce, optional
        AllReduce of the same group. Several layers may share one object. Default: torch.distributed.all_reduce.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If an argument is invalid.
    """

    def __init__(self, layer: MarlinLinear, *, group: Any = None, all_reduce: AllReduce | None = None) -> None:
        super().__init__()
        self.layer, self.group, self.all_reduce = _checked(layer), group, all_reduce
        self.rank, members = rank_and_members(group)
        self.ranks = len(members)
        if all_reduce is not None and not isinstance(all_reduce, AllReduce):
            raise ArgumentTypeError("all_reduce", type(all_reduce).__name__, "AllReduce or None")
        if all_reduce is not None and all_reduce.members != members:
            raise ArgumentError(
                "all_reduce", f"an AllReduce for ranks {all_reduce.members}", f"an AllReduce for ranks {members}"
            )
        if self.rank and layer.bias is not None:
            raise ArgumentError(
                "layer.bias",
                "a bias",
                f"None on rank {self.rank}",
                "pass the bias only on rank 0; it must be added once",
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
        """Create this rank's layer from the whole weight and bias.

        Parameters
        ----------
        weight : PackedWeight
            The whole weight, which must be the same on every rank.
        bias : array_like, shape (N,), optional
            The whole bias, which rank 0 adds. Default: no bias.
        group : torch.distributed.ProcessGroup, optional
            Process group of the ranks. Default: torch's default group.
        batch_invariant : bool, default False
            See ``marlin_gemm``.
        all_reduce : AllReduce, optional
            AllReduce of the same group. Default: torch.distributed.all_reduce.

        Returns
        -------
        RowParallel
            The layer.

        Raises
        ------
        ArgumentError, ArgumentTypeError, QuantizationError
            If ``shard()`` does not support the weight.
        """
        rank, members = rank_and_members(group)
        part = shard(weight, rank, len(members), by="rows")
        layer = MarlinLinear.from_packed(part, None if rank else bias, batch_invariant=batch_invariant)
        return cls(layer, group=group, all_reduce=all_reduce)

    def forward(self, x: Any) -> Any:
        """Return y, which is the same on every rank.

        Parameters
        ----------
        x : torch.Tensor, shape (..., K / ranks)
            This rank's shard of the input.

        Returns
        -------
        torch.Tensor, shape (..., N)
            The sum of all partial results.
        """
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
        raise ArgumentTypeError("layer", type(layer).__name__, "MarlinLinear", "shard a weight with from_packed()")
    return layer
