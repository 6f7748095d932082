"""Random operands of attention on a GPU, with enough copies of k and v to keep them cold, for the tuner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cudatma.arrays import ArrayInfo, dense_strides, describe
from cudatma.kernels.attention.plan import plan_attention
from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.attention.request import Mask, Request
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.choosing import Listed
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.kernels.trial import Launch, cold_copies, empty_rows, in_turn, random_rows
from cudatma.target import detect

#: Of a cap, and of a window, that a problem has without saying how large.
_SOFTCAP, _WINDOW = 30.0, 256


class AttentionTrial:
    """A Trial (kernels/trial.py). Raises DriverError without CuPy or a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._result: Any = None
        self._requests: list[Request] = []

    @property
    def copies(self) -> int:
        return len(self._requests)

    def prepare(self, problem: Problem) -> None:
        """Random q, k and v."""
        import cupy

        self._requests, self.out, self._result = [], None, None
        cupy.get_default_memory_pool().free_all_blocks()
        of_k = problem.batch, problem.k_length, problem.kv_heads, problem.head_dim
        of_v = *of_k[:3], problem.v_head_dim
        of_q = problem.batch, problem.q_length, problem.heads, problem.head_dim
        q, of_out = _operand(of_q, problem.dtype, 0), (*of_q[:3], problem.v_head_dim)
        right = 0 if problem.is_causal else None
        mask = Mask(_WINDOW if problem.has_window else None, right)
        cap = _SOFTCAP if problem.has_softcap else 0.0
        sink = describe(cupy.zeros(problem.heads, "float32")) if problem.has_sink else None
        size_bytes = 2 * problem.batch * problem.k_length * problem.kv_heads * (problem.head_dim + problem.v_head_dim)
        for copy in range(cold_copies(size_bytes)):
            k, v = _operand(of_k, problem.dtype, 2 * copy + 1), _operand(of_v, problem.dtype, 2 * copy + 2)
            self._requests.append(Request(q, k, v, problem.head_dim**-0.5, mask, cap, sink=sink))
        self.out = empty_rows(of_out[0] * of_out[1] * of_out[2], of_out[3], problem.dtype)
        self._result = _shaped(self.out, of_out)

    def launcher(self, candidate: Listed[AttentionSpec], copies: int, stream: int) -> Launch:
        """launch(i) enqueues the candidate on the i-th of so many copies of k and v; its kernel is loaded now."""
        target, sm_count = detect(self.device), gpu_of(self.device).sm_count
        counter = stream_workspace(self.device, stream).flags_pointer
        launches = [
            plan_attention(request, self._result, None, candidate.spec, target, sm_count, counter)
            for request in self._requests[:copies]
        ]
        kernel = launches[0].loaded(target, self.device, stream)
        return in_turn([partial(launch.plan(kernel, self.device).launch, stream) for launch in launches])


def _operand(shape: tuple[int, int, int, int], dtype: str, seed: int) -> ArrayInfo:
    """Normally distributed."""
    return _shaped(random_rows(shape[0] * shape[1] * shape[2], shape[3], dtype, seed), shape)


def _shaped(rows: Any, shape: tuple[int, int, int, int]) -> ArrayInfo:
    """Rows without gaps as (batch, length, heads, dim)."""
    info = describe(rows)
    return replace(info, shape=shape, strides_bytes=dense_strides(shape, info.dtype))
