"""torch.ops.cudatma.* on the CPU: results against torch in float64, opcheck, fake kernels, torch.compile."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cudatma
import cudatma.integrations.torch
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, FieldError
from cudatma.integrations.torch import ExpertWeights, marlin_moe
from cudatma.integrations.torch.weights import packed_weight, weight_tensors

ONE = torch.tensor(1.0)
TYPES = [torch.float16, torch.bfloat16]
K, N = 96, 72


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")


def draw(*shape: int, dtype: Any = torch.float16, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Call:
    """An operator's arguments and its expected result in float64."""

    operator: str
    arguments: tuple[Any, ...]
    wanted: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **options: Any) -> Any:
        return getattr(torch.ops.cudatma, self.operator)(*self.arguments, **self.options, **options)

    @property
    def result(self) -> Any:
        return self.wanted(*self.arguments, **self.options)


def weight(dtype: Any, *, perm: bool = False, **options: Any) -> list[Any]:
    options = {"group_size": 32, "symmetric": False} | options
    packed = cudatma.quantize(draw(K, N, dtype=torch.float32), dtype=str(dtype)[6:], **options)
    parts = list(weight_tensors(packed).values())
    if perm:
        parts[3] = torch.randperm(K, generator=torch.Generator().manual_seed(5)).int()
    return parts


def marlin(x: Any, *rest: Any, **options: Any) -> Any:
    *parts, bias, k, n, group_size = rest[:8]
    weight: Any = [*parts, k, n, group_size]
    y = x.double() @ torch.from_numpy(packed_weight(*weight, **options).dequantize())
    return y if bias is None else y + bias.double()


EXPERTS, INTERMEDIATE = 3, 32


def expert_weights(dtype: Any, *, biases: bool = False, form: str = "int4") -> list[ExpertWeights]:
    shapes, name = ((EXPERTS, K, 2 * INTERMEDIATE), (EXPERTS, INTERMEDIATE, K)), str(dtype)[6:]
    return [
        ExpertWeights.from_packed(
            cudatma.quantize_experts(
                0.1 * draw(*shape, dtype=torch.float32, seed=seed) * draw(shape[0], 1, 1, seed=seed),
                group_size=16 if form == "nvfp4" else 32, gated=seed == 0, symmetric=seed == 0 or form != "int4",
                dtype=name, format=form,
            ),
            draw(shape[0], shape[2], seed=seed) if biases else None,
        )
        for seed, shape in enumerate(shapes)
    ]  # fmt: skip


def moe_operands(dtype: Any, x: Any, choices: Any, form: str = "int4") -> tuple[Any, ...]:
    parts = [getattr(w, name) for w in expert_weights(dtype, form=form) for name in ("qweight", "scales", "zeros")]
    factors = torch.rand(choices.shape, generator=torch.Generator().manual_seed(7))
    return x, factors, choices, *parts, EXPERTS, INTERMEDIATE, *(2 * [16 if form == "nvfp4" else 32])


def moe(
    x: Any,
    factors: Any,
    choices: Any,
    *rest: Any,
    expert_map: Any = None,
    bias1: Any = None,
    bias2: Any = None,
    activation: str = "silu_glu",
    format: str = "int4",
    w1_tensor_scale: Any = None,
    w2_tensor_scale: Any = None,
) -> Any:
    values = []
    for parts, k, n, factors_of in (
        (rest[:3], K, 2 * INTERMEDIATE, w1_tensor_scale),
        (rest[3:6], INTERMEDIATE, K, w2_tensor_scale),
    ):
        columns = -(-n // 64) * 64
        qweight, scales, zeros = parts
        stored = packed_weight(qweight, scales, zeros, None, k, EXPERTS * columns, rest[-1], format)
        value = torch.from_numpy(cudatma.PackedExperts(stored, EXPERTS, n, n != K).dequantize())
        if factors_of is not None:
            value = value * factors_of.double().repeat_interleave(n // factors_of.shape[1], 1)[:, None]
        values.append(value)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in torch.cartesian_prod(torch.arange(len(x)), torch.arange(choices.shape[1])):
        expert = choices[token, choice] if expert_map is None else expert_map[choices[token, choice]]
        if expert >= 0:
            both = x[token].double() @ values[0][expert]
            gate, up = (both if bias1 is None else both + bias1[expert].double()).chunk(2)
            if activation == "silu_glu":
                hidden = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            result = hidden @ values[1][expert]
            out[token] += factors[token, choice] * (result if bias2 is None else result + bias2[expert].double())
    return out


def product(a: Any, b: Any, *, bias: Any = None, alpha: float = 1.0, **options: Any) -> Any:
    c = alpha * (a.double() @ b.double())
    for name in ("a_scale", "b_scale"):
        if name in options:
            scale = options[name].double()
            c = c * (scale[:, None] if name == "a_scale" else scale)
    c = c if bias is None else c + bias.double()
    return torch.nn.functional.silu(c) if options.get("activation") == "silu" else c


def sdpa(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    sink: Any = None,
) -> Any:
    """Return attention by torch for q, k and v (batch, length, heads, dim)."""
    q, k, v = (each.double().transpose(1, 2) for each in (q, k, v))
    behind = k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - behind
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen &= distance <= 0 if causal else seen
    seen &= seen if left is None else distance >= -left
    seen &= seen if right is None else distance <= right
    if sink is None:
        done = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return done.transpose(1, 2)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    logits = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    logits = torch.cat([logits, sink.double()[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def varlen(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, *, causal: bool = False, **_: Any) -> Any:
    parts = []
    for i in range(len(of_q) - 1):
        rows, keys = slice(of_q[i], of_q[i + 1]), slice(of_k[i], of_k[i + 1])
        parts.append(sdpa(q[None, rows], k[None, keys], v[None, keys], causal=causal)[0])
    return torch.cat(parts)


def decode(
    q: Any, k: Any, v: Any, seqlens: Any, *, page_table: Any = None, k_scale: Any = ONE, v_scale: Any = ONE
) -> Any:
    k, v = k.double() * k_scale.reshape(-1, 1), v.double() * v_scale.reshape(-1, 1)
    if page_table is not None:
        k, v = (torch.stack([each[pages].flatten(0, 1) for pages in page_table]) for each in (k, v))
    each = [sdpa(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], causal=True) for i, n in enumerate(seqlens.tolist())]
    return torch.cat(each)


@cache
def calls(dtype: Any) -> dict[str, Call]:
    def heads(*shape: int, seed: int = 0) -> Any:
        return draw(*shape, dtype=dtype, seed=seed)

    q, k, v = heads(2, 5, 4, 32), heads(2, 7, 2, 32, seed=1), heads(2, 7, 2, 32, seed=2)
    sizes = (K, N, 32)
    packed = (heads(9, 4, 32), heads(12, 2, 32, seed=1), heads(12, 2, 32, seed=2), ints(0, 4, 9), ints(0, 5, 12))
    cache = heads(2, 16, 2, 32, seed=1), heads(2, 16, 2, 32, seed=2)
    pages = heads(3, 8, 2, 32, seed=1), heads(3, 8, 2, 32, seed=2)
    bias, bias1 = heads(N), heads(EXPERTS, 2 * INTERMEDIATE, seed=3)
    bias1[:, 1], bias1[:, INTERMEDIATE + 2] = 12, -12  # beyond the limits of gate and up
    *nvfp4, tensor_scale = weight(dtype, group_size=16, symmetric=True, format="nvfp4")
    scales = [each.tensor_scale for each in expert_weights(dtype, form="nvfp4")]
    fp8 = weight(dtype, group_size=-1, symmetric=True, format="fp8")
    return {
        "marlin_gemm": Call("marlin_gemm", (heads(2, 3, K), *weight(dtype), bias, *sizes), marlin),
        "marlin_gemm, act-order": Call("marlin_gemm", (heads(3, K), *weight(dtype, perm=True), None, *sizes), marlin),
        "marlin_gemm, nvfp4": Call(
            "marlin_gemm",
            (heads(3, K), *nvfp4, bias, K, N, 16),
            marlin,
            {"format": "nvfp4", "tensor_scale": tensor_scale},
        ),
        "marlin_gemm, fp8": Call("marlin_gemm", (heads(3, K), *fp8, None, K, N, -1), marlin, {"format": "fp8"}),
        "marlin_moe": Call("marlin_moe", moe_operands(dtype, heads(3, K), ints([0, 2], [1, 0], [2, 1])), moe),
        "marlin_moe, map": Call(
            "marlin_moe",
            moe_operands(dtype, heads(2, K), torch.tensor([[0, 3], [4, 1]])),
            moe,
            {"expert_map": ints(2, -1, 1, 0, -1)},
        ),
        "marlin_moe, biases": Call(
            "marlin_moe",
            moe_operands(dtype, heads(2, K), ints([0, 2], [1, 0])),
            moe,
            {
                "bias1": bias1,
                "bias2": heads(EXPERTS, K, seed=4),
                "activation": "swiglu_oai",
            },
        ),
        "marlin_moe, nvfp4": Call(
            "marlin_moe",
            moe_operands(dtype, heads(2, K), ints([0, 2], [1, 0]), "nvfp4"),
            moe,
            {"format": "nvfp4", "w1_tensor_scale": scales[0], "w2_tensor_scale": scales[1]},
        ),
        "gemm": Call("gemm", (heads(24, 40), heads(40, 16)), product, {"alpha": 0.5}),
        "gemm, epilogue": Call(
            "gemm",
            (heads(24, 40), heads(40, 16)),
            product,
            {"bias": heads(16).float(), "activation": "silu", "out_dtype": torch.float32},
        ),
        "gemm, batch": Call("gemm", (heads(3, 8, 40), heads(1, 40, 16)), product),
        "gemm, scales": Call(
            "gemm", (heads(8, 32), heads(32, 16)), product, {"a_scale": torch.rand(8), "b_scale": torch.rand(16)}
        ),
        "attention": Call("attention", (q, k, v), sdpa, {"causal": True}),
        "attention, sink": Call("attention", (q, k, v), sdpa, {"causal": True, "sink": draw(4).float()}),
        "attention, window": Call("attention", (q, k, v), sdpa, {"left": 3, "right": 1}),
        "attention_varlen": Call(
            "attention_varlen", packed, varlen, {"max_seqlen_q": 5, "max_seqlen_k": 7, "causal": True}
        ),
        "attention_decode": Call("attention_decode", (q[:, :2], *cache, ints(9, 16)), decode),
        "attention_decode, pages": Call(
            "attention_decode", (q[:, :1], *pages, ints(9, 16)), decode, {"page_table": ints([2, 0], [1, 2])}
        ),
        "attention_decode, fp8": Call(
            "attention_decode",
            (q[:, :2], *(each.to(torch.float8_e4m3fn) for each in cache), ints(9, 16)),
            decode,
            {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([2.0, 0.25])},
        ),
    }


NAMES = list(calls(torch.float16))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_computes_what_torch_does_in_float64(name: str, dtype: Any) -> None:
    call = calls(dtype)[name]
    result = call.run()
    tolerance = {"rtol": 2**-7 if dtype == torch.bfloat16 else 2**-10, "atol": 1e-2}
    torch.testing.assert_close(result.double(), call.result, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_writes_out(name: str) -> None:
    call = calls(torch.bfloat16)[name]
    wanted = call.run()
    out, options = torch.full_like(wanted, float("nan")), dict(call.options)
    options.pop("out_dtype", None)
    operator, version = getattr(torch.ops.cudatma, f"{call.operator}_out"), out._version
    assert operator(*call.arguments, **options, out=out) is None
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    assert out._version > version  # autograd and packed_weight() see the change


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    call = calls(torch.float16)[name]
    tried = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = {"test_utils": tried[1:] if "fp8" in name else tried}  # torch's check of a schema multiplies operands
    torch.library.opcheck(getattr(torch.ops.cudatma, call.operator).default, call.arguments, call.options, **checks)
    out, options = torch.empty_like(call.run()), dict(call.options)
    options.pop("out_dtype", None)
    operator = getattr(torch.ops.cudatma, f"{call.operator}_out").default
    torch.library.opcheck(operator, call.arguments, {**options, "out": out}, **checks)


def test_beta_adds_to_out() -> None:
    a, b, out = draw(8, 16), draw(16, 24, seed=1), draw(8, 24, seed=2)
    wanted = a.double() @ b.double() + 2 * out.double()
    torch.ops.cudatma.gemm_out(a, b, beta=2.0, out=out)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-10, atol=1e-2)


def test_functions_compile_into_one_graph_with_out_and_any_length() -> None:
    parts, experts = weight(torch.float16), expert_weights(torch.float16)
    biased = expert_weights(torch.float16, biases=True)

    def model(x: Any, w: Any) -> Any:
        y = torch.ops.cudatma.marlin_gemm(x, *parts, None, K, N, 32)
        z = torch.zeros_like(y)
        torch.ops.cudatma.gemm_out(y, w, bias=None, out=z)
        q = (y + z)[:, :64].reshape(1, -1, 2, 32)
        lengths, rows = torch.arange(2, dtype=torch.int32) * q.shape[1], q[0]
        ids = torch.arange(2 * len(x)).reshape(-1, 2) % EXPERTS
        return (
            marlin_moe(x, experts[0], experts[1], torch.full(ids.shape, 0.5), ids),
            marlin_moe(x, *biased, torch.full(ids.shape, 0.5), ids, activation="swiglu_oai"),
            torch.ops.cudatma.attention(q, q, q, causal=True),
            torch.ops.cudatma.attention_varlen(
                rows, rows, rows, lengths, lengths, max_seqlen_q=q.shape[1], max_seqlen_k=q.shape[1]
            ),
            torch.ops.cudatma.attention_decode(q[:, -1:], q, q, lengths[1:]),
            torch.ops.cudatma.gemm(q.transpose(1, 2)[0].contiguous(), w[None, :32, :8].contiguous()),
        )

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 1, 9):
        x, w = draw(m, K), draw(N, N, seed=3)
        torch.testing.assert_close(compiled(x, w), model(x, w), rtol=0, atol=0)


def test_biases_of_experts_must_match_the_weights() -> None:
    packed = cudatma.quantize_experts(draw(EXPERTS, K, N), group_size=32)
    loaded = ExpertWeights(EXPERTS, K, N, gated=False, group_size=32, bias=True)
    loaded.load_state_dict(ExpertWeights.from_packed(packed, bias := draw(EXPERTS, N)).state_dict())
    torch.testing.assert_close(loaded.bias, bias, rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=r"^bias\.shape must be \(3, 72\)"):
        ExpertWeights.from_packed(packed, draw(N))
    with pytest.raises(ArgumentTypeError, match=r"^bias\.dtype must be "):
        ExpertWeights.from_packed(packed, ints(1).expand(EXPERTS, N))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("optional", ["bias", "perm", "tensor_scale"])
def test_inductor_generates_direct_calls(optional: str) -> None:
    """The calls have a view with a pitch, dynamic lengths, and one optional tensor."""
    importlib.import_module("cudatma.integrations.torch.inductor")
    from torch._inductor.utils import run_and_get_code

    parts, bias = weight(torch.float16, perm=optional == "perm"), draw(N) if optional == "bias" else None
    group_size, options = 32, {}
    if optional == "tensor_scale":
        _, *parts, _, _, _, group_size = calls(torch.float16)["marlin_gemm, nvfp4"].arguments
        options = calls(torch.float16)["marlin_gemm, nvfp4"].options

    def model(x: Any) -> Any:
        return torch.ops.cudatma.marlin_gemm(x[..., :K], *parts, bias, K, N, group_size, **options)

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    x = draw(2, 5, K + 8)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        y, (code,) = run_and_get_code(compiled, x)
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)
        assert "cudatma_marlin_gemm(" in code
        assert "torch.ops.cudatma" not in code
        torch.testing.assert_close(compiled(x[:1, :3]), model(x[:1, :3]), rtol=0, atol=0)
        if optional == "perm":  # once: it runs a C++ compiler
            torch._dynamo.reset()
            fast = {"cpp_cache_precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
            with torch._inductor.config.patch({"cpp_wrapper": True} | fast):  # C++ calls the operator
                torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=0, atol=0)


@cache
def wrong_calls() -> dict[str, tuple[Call, str]]:
    """Yield calls with one mistake, and the field that the error must name."""
    known = calls(torch.float16)
    found: dict[str, tuple[Call, str]] = {}

    def wrong(name: str, why: str, named: str, index: int | str, value: Any) -> None:
        call = known[name]
        arguments, options = list(call.arguments), dict(call.options)
        if isinstance(index, int):
            arguments[index] = value
        else:
            options[index] = value
        found[f"{name}: {why}"] = Call(call.operator, tuple(arguments), call.wanted, options), named

    wrong("marlin_gemm", "K", "x.shape", 0, draw(2, K + 1))
    wrong("marlin_gemm", "no dimension", "x.shape", 0, draw())
    wrong("marlin_gemm", "type of x", "x.dtype", 0, draw(2, K, dtype=torch.bfloat16))
    wrong("marlin_gemm", "qweight", "qweight", 1, torch.zeros(1, 2048, dtype=torch.uint8))
    wrong("marlin_gemm", "type of qweight", "qweight", 1, torch.zeros(4, 2048, dtype=torch.int8))
    wrong("marlin_gemm", "scales", "scales", 2, draw(1, 128))
    wrong("marlin_gemm", "type of scales", "scales.dtype", 2, draw(3, 128, dtype=torch.float32))
    wrong("marlin_gemm", "zeros", "zeros", 3, torch.zeros(1, 128, dtype=torch.uint8))
    wrong("marlin_gemm", "perm", "perm", 4, ints(0))
    wrong("marlin_gemm", "bias", "bias.shape", 5, draw(N + 1))
    wrong("marlin_gemm", "group size", "group_size", 8, 48)
    wrong("marlin_gemm", "gradient", "x", 0, draw(2, K).requires_grad_())
    wrong("marlin_gemm", "gradient of scales", "scales", 2, weight(torch.float16)[1].requires_grad_())
    wrong("marlin_gemm", "gradient of bias", "bias", 5, draw(N).requires_grad_())
    wrong("marlin_gemm", "format", "format", "format", "fp4")
    wrong("marlin_gemm", "tensor scale of int4", "tensor_scale", "tensor_scale", ONE)
    wrong("marlin_gemm, fp8", "group size of fp8", "group_size", 8, 32)
    wrong("marlin_gemm, fp8", "codes of another size", "qweight", "format", "int4")
    wrong("marlin_gemm, fp8", "zeros", "zeros", 3, torch.zeros(1, 128, dtype=torch.uint8))
    wrong("marlin_gemm, nvfp4", "tensor scale", "tensor_scale.shape", "tensor_scale", torch.ones(1))
    wrong("marlin_gemm, nvfp4", "type of tensor scale", "tensor_scale.dtype", "tensor_scale", ONE.half())
    wrong("marlin_moe, biases", "first bias", "bias1.shape", "bias1", draw(EXPERTS, INTERMEDIATE))
    wrong("marlin_moe, biases", "second bias", "bias2.shape", "bias2", draw(K))
    wrong("marlin_moe, biases", "type of a bias", "bias2.dtype", "bias2", draw(EXPERTS, K, dtype=torch.float32))
    wrong("marlin_moe, biases", "gradient of a bias", "bias1", "bias1", draw(EXPERTS, 64).requires_grad_())
    wrong("marlin_moe, biases", "activation", "activation", "activation", "gelu")
    wrong("marlin_moe, nvfp4", "tensor scales", "w1_tensor_scale.shape", "w1_tensor_scale", torch.ones(EXPERTS, 1))
    wrong("marlin_moe, nvfp4", "type of scales", "w2_tensor_scale.dtype", "w2_tensor_scale", draw(EXPERTS, 1))
    pitched = torch.ones(2, EXPERTS).T
    wrong("marlin_moe, nvfp4", "pitch of scales", "w1_tensor_scale.strides", "w1_tensor_scale", pitched)
    wrong("marlin_moe", "tensor scales of int4", "w2_tensor_scale", "w2_tensor_scale", torch.ones(EXPERTS, 1))
    wrong("gemm", "K", "b.shape", 1, draw(41, 16))
    wrong("gemm", "dimensions", "a.shape", 0, draw(40))
    wrong("gemm", "type of a", "a.dtype", 0, draw(24, 40, dtype=torch.float32))
    wrong("gemm", "type of b", "b.dtype", 1, draw(40, 16, dtype=torch.bfloat16))
    wrong("gemm", "type of c", "out_dtype", "out_dtype", torch.int8)
    wrong("gemm", "activation", "activation", "activation", "tanh")
    wrong("gemm", "bias", "bias.shape", "bias", draw(17))
    wrong("gemm", "type of bias", "bias.dtype", "bias", draw(16, dtype=torch.float32))
    wrong("gemm", "gradient", "a", 0, draw(24, 40).requires_grad_())
    wrong("gemm, batch", "batches", "b.shape", 1, draw(2, 40, 16))
    wrong("attention", "head dim", "q.shape", 0, draw(2, 5, 4, 33))
    wrong("attention", "heads", "k.shape", 1, draw(2, 7, 3, 32))
    wrong("attention", "batch", "k.shape", 1, draw(3, 7, 2, 32))
    wrong("attention", "length", "v.shape", 2, draw(2, 6, 2, 32))
    wrong("attention", "type", "v.dtype", 2, draw(2, 7, 2, 32, dtype=torch.bfloat16))
    wrong("attention", "dimensions", "q.shape", 0, draw(5, 4, 32))
    wrong("attention", "gradient", "v", 2, draw(2, 7, 2, 32).requires_grad_())
    wrong("attention, sink", "heads of sink", "sink.shape", "sink", torch.zeros(3))
    wrong("attention, sink", "type of sink", "sink.dtype", "sink", torch.zeros(4).half())
    wrong("attention_varlen", "offsets", "cu_seqlens_k.shape", 4, ints(0, 12))
    wrong("attention_varlen", "type of offsets", "cu_seqlens_q.dtype", 3, torch.tensor([0, 4, 9]))
    wrong("attention_varlen", "length", "v.shape", 2, draw(11, 2, 32))
    wrong("attention_decode", "lengths", "seqlens.shape", 3, ints(1, 2, 3))
    wrong("attention_decode", "batch", "k_cache.shape", 0, draw(3, 2, 4, 32))
    wrong("attention_decode, fp8", "type of v", "v_cache.dtype", 2, draw(2, 16, 2, 32))
    wrong("attention_decode, fp8", "heads of a scale", "v_scale.shape", "v_scale", torch.ones(3))
    wrong("attention_decode, fp8", "type of a scale", "k_scale.dtype", "k_scale", torch.ones(2).half())
    wrong("attention_decode", "scale", "k_scale", "k_scale", torch.ones(2))
    wrong("attention_decode, pages", "table", "page_table.shape", "page_table", ints([2, 0]))
    return found


@pytest.mark.parametrize("name", wrong_calls())
def test_fake_kernels_refuse_what_the_operators_refuse(name: str) -> None:
    call, named = wrong_calls()[name]
    with pytest.raises(CudaTmaError, match=rf"^{re.escape(named)} must be ") as real:
        call.run()
    with torch._subclasses.FakeTensorMode() as mode:
        arguments = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in call.arguments]
        options = {
            key: mode.from_tensor(each) if isinstance(each, torch.Tensor) else each
            for key, each in call.options.items()
        }
        with pytest.raises(CudaTmaError) as fake:
            getattr(torch.ops.cudatma, call.operator)(*arguments, **options)
    assert isinstance(fake.value, FieldError)
    assert fake.value.field == named
    assert type(fake.value) is type(real.value)


def test_an_out_of_the_wrong_kind_is_refused_by_both() -> None:
    call = calls(torch.float16)["gemm"]
    for out, named in ((draw(24, 17), "out.shape"), (draw(24, 16).requires_grad_(), "out")):
        options = {**call.options, "out": out}
        with pytest.raises(CudaTmaError, match=rf"^{named} must be "):
            torch.ops.cudatma.gemm_out(*call.arguments, **options)
        with torch._subclasses.FakeTensorMode() as mode:
            arguments = [mode.from_tensor(each) for each in call.arguments]
            with pytest.raises(CudaTmaError, match=rf"^{named} must be "):
                torch.ops.cudatma.gemm_out(*arguments, **call.options, out=mode.from_tensor(out))


def test_importing_again_registers_nothing_twice() -> None:
    before = torch.ops.cudatma.marlin_gemm.default
    importlib.reload(cudatma.integrations.torch.operators)
    kept = {name: module for name, module in sys.modules.items() if name.startswith("cudatma.integrations.torch")}
    for name in kept:
        del sys.modules[name]
    importlib.import_module("cudatma.integrations.torch")
    sys.modules.update(kept)
    assert torch.ops.cudatma.marlin_gemm.default is before
    calls(torch.float16)["gemm"].run()


def test_a_nested_tensor_is_refused() -> None:
    """It is also rejected after an earlier call with otherwise equal tensors."""
    whole, b = draw(2, 4, 16), draw(16, 8)
    cudatma.gemm(whole, b)
    nested = torch.nested.nested_tensor([draw(3, 16), draw(4, 16)])
    with pytest.raises(ArgumentTypeError, match=r"^a must be a strided tensor.*got a nested tensor on cpu"):
        cudatma.gemm(nested, b)


def test_tensors_that_have_no_memory_or_a_tangent_are_refused() -> None:
    """Otherwise a kernel would read address 0, or a derivative would silently be 0."""
    a, b = draw(4, 64), draw(64, 8)
    freed = draw(4, 64)
    freed.untyped_storage().resize_(0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(ArgumentError, match=r"^a must be .*got a tensor with a tangent"):
            cudatma.gemm(dual, b, backend="reference")
        assert cudatma.gemm(a, b, backend="reference").shape == (4, 8)
    with pytest.raises(ArgumentError, match=r"^a\.pointer must be .*got 0x0"):
        cudatma.gemm(freed, b, backend="reference")
    with pytest.raises(ArgumentTypeError, match=r"^a must be .*got a tensor without its own memory"):
        torch.vmap(lambda one: cudatma.gemm(one, b, backend="reference"))(draw(3, 4, 64))
