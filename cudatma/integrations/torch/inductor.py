"""Direct calls of marlin_gemm in code that Inductor generates, instead of calls through torch's dispatcher.

The dispatcher converts each argument twice, and allocates the result with another operator. Once this module is
imported, Inductor (torch.compile's code generator) allocates the result as for its own kernels and calls the Python
function directly. The generated code imports this function, so it also works in processes that load the code from
Inductor's cache.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, fallback_handler, register_lowering
from torch._inductor.virtualized import V

from cudatma.integrations.torch.operators import MARLIN_GEMM, marlin_gemm

_NAME = "cudatma_marlin_gemm"
_IMPORT = f"from {marlin_gemm.__module__} import {marlin_gemm.__name__} as {_NAME}"


class _Call(ir.ExternKernelOut):  # type: ignore[misc]  # torch's class is not typed here
    """A call whose result Inductor allocates. ``is_given`` marks the tensor arguments that are not None."""

    is_given: tuple[bool, ...] = ()

    def codegen_args(self) -> list[str]:
        tensors = iter(self.inputs)
        arguments = [
            V.graph.wrapper_code.val_to_arg_str(next(tensors) if present else None) for present in self.is_given
        ]
        return [*arguments, *self.codegen_const_args()]

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once(_IMPORT)
        super().codegen(wrapper)


def _lowered(
    x: Any,
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    bias: Any,
    k: Any,
    n: Any,
    group_size: int,
    batch_invariant: bool = False,
) -> Any:
    """Return the graph node for a call.

    C++ and FX wrappers call the operator instead, because they cannot call Python functions.
    """
    tensors, numbers = (x, qweight, scales, zeros, perm, bias), (k, n, group_size, batch_invariant)
    if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False):
        return _operator(*tensors, *numbers)
    node = _Call(
        ir.FixedLayout(x.get_device(), x.get_dtype(), [*x.get_size()[:-1], n]),
        [ir.ExternKernel.realize_input(tensor) for tensor in tensors if tensor is not None],
        numbers,
        python_kernel_name=_NAME,
        op_overload=MARLIN_GEMM,
    )
    node.is_given = tuple([tensor is not None for tensor in tensors])
    return ir.TensorBox.create(node)


_operator = fallback_handler(MARLIN_GEMM, add_to_fallback_set=False)
# Keep the traced strides, as the operator's tag requests for fallbacks.
add_layout_constraint(MARLIN_GEMM, constrain_to_fx_strides)
register_lowering(MARLIN_GEMM, type_promotion_kind=None)(_lowered)
