"""Make code that Inductor generates call marlin_gemm directly instead of through torch's dispatcher.

The dispatcher converts each argument twice, and allocates the result with another operator. After this module is
imported, Inductor (the code generator of torch.compile) allocates the result as it does for its own kernels, and the
generated code calls the Python function directly. The generated code imports this function, so it also works in
processes that load the code from Inductor's cache.
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
    """A call whose result Inductor allocates. ``is_given`` is True for each tensor argument that is not None."""

    is_given: tuple[bool, ...] = ()

    def codegen_args(self) -> list[str]:
        tensors = iter(self.inputs)
        *arguments, tensor_scale = [
            V.graph.wrapper_code.val_to_arg_str(next(tensors) if present else None) for present in self.is_given
        ]
        return [*arguments, *self.codegen_const_args(), tensor_scale]

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
    format: str = "int4",
    tensor_scale: Any = None,
) -> Any:
    """Return the graph node for a call.

    C++ and FX wrappers call the operator instead, because they cannot call Python functions.
    """
    operands, constants = (x, qweight, scales, zeros, perm, bias), (k, n, group_size, batch_invariant, format)
    if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False):
        return _operator(*operands, *constants, tensor_scale)
    tensors = *operands, tensor_scale
    node = _Call(
        ir.FixedLayout(x.get_device(), x.get_dtype(), [*x.get_size()[:-1], n]),
        [ir.ExternKernel.realize_input(tensor) for tensor in tensors if tensor is not None],
        constants,
        python_kernel_name=_NAME,
        op_overload=MARLIN_GEMM,
    )
    node.is_given = tuple([tensor is not None for tensor in tensors])
    return ir.TensorBox.create(node)


_operator = fallback_handler(MARLIN_GEMM, add_to_fallback_set=False)
# Keep the traced strides. The operator's tag needs_exact_strides applies only to fallbacks.
add_layout_constraint(MARLIN_GEMM, constrain_to_fx_strides)
register_lowering(MARLIN_GEMM, type_promotion_kind=None)(_lowered)
