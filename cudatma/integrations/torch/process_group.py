"""A process's rank in a process group, and who its members are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cudatma.errors import ArgumentError, ArgumentTypeError


def rank_and_members(group: Any) -> tuple[int, list[int]]:
    """This process's rank in a group, and all members' ranks in the default group. None is the default group.

    ArgumentError without a group, and outside of it; ArgumentTypeError.
    """
    if not dist.is_available() or not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group(), or run under torchrun and do so"
        raise ArgumentError("group", "no process group", "one of torch.distributed", remedy)
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "a group without this process", "one that it is in")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError("group", type(group).__name__, "None, or a ProcessGroup of torch.distributed")
    return dist.get_rank(group), list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
