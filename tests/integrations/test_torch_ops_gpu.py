"""torch.ops.cudatma.* and MarlinLinear of torch on a GPU: results, opcheck, torch.compile, graphs, streams, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudatma.errors import DriverError, LaunchError, TargetError
from cudatma.target import detect

pytestmark = pytest.mark.gpu

try:
    detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

import cudatma
from cudatma.integrations.torch import MarlinLinear

K, N = 1024, 768
TYPES = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def draw(*shape: int, dtype: Any = torch.float16, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def layer_of(dtype: Any = torch.float16, *, act_order: bool = False, **options: Any) -> MarlinLinear:
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((K, N), np.float32) / 32
    packed = cudatma.quantize(dense, group_size=64, symmetric=False, dtype=str(dtype)[6:])
    if act_order:
        logical = cudatma.quantization.unpack(packed)
        packed = cudatma.quantization.pack(
            logical.q, logical.scales, logical.zeros, group_size=64, perm=rng.permutation(K)
        )
    return MarlinLinear.from_packed(packed, rng.standard_normal(N, np.float32), **options).cuda()


def operands(layer: MarlinLinear) -> tuple[Any, ...]:
    parts = (layer.qweight, layer.scales, layer.zeros, layer.perm, layer.bias)
    return *parts, layer.in_features, layer.out_features, layer.group_size


def exact(layer: MarlinLinear, x: Any) -> Any:
    return x.double() @ layer.dequantize(dtype=torch.float64).T + layer.bias.double()


def check(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= ROUNDING[found.dtype] * wanted.norm()


def sdpa(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (each.double().transpose(1, 2) for each in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril(k.shape[2] - q.shape[2])
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return found.transpose(1, 2)


def heads(dtype: Any) -> tuple[Any, ...]:
    return draw(2, 130, 8, 128, dtype=dtype), *(draw(2, 200, 2, 128, dtype=dtype, seed=seed) for seed in (1, 2))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act_order", [False, True])
def test_layers_and_operators_against_float64(dtype: Any, act_order: bool) -> None:
    layer = layer_of(dtype, act_order=act_order)
    for shape in ((1,), (3, 5), (300,), (0,)):
        x = draw(*shape, K, dtype=dtype)
        for _ in range(2):  # the second call takes the short way
            check(layer(x), exact(layer, x))
        out = torch.full((*shape, N), float("nan"), dtype=dtype, device="cuda")
        torch.ops.cudatma.marlin_gemm_out(x, *operands(layer), out=out)
        assert torch.equal(out, layer(x))


@pytest.mark.parametrize("dtype", TYPES)
def test_gemm_and_attention_against_float64(dtype: Any) -> None:
    a, b, bias = draw(200, 320, dtype=dtype), draw(320, 264, dtype=dtype, seed=1), draw(264, dtype=dtype, seed=2)
    for _ in range(2):
        found = torch.ops.cudatma.gemm(a, b, bias=bias, alpha=0.5, activation="relu")
        check(found, (0.5 * (a.double() @ b.double()) + bias.double()).relu())
        out = torch.ones_like(found)
        torch.ops.cudatma.gemm_out(a, b, beta=2.0, out=out)
        check(out, a.double() @ b.double() + 2)
        q, k, v = heads(dtype)
        check(torch.ops.cudatma.attention(q, k, v, causal=True), sdpa(q, k, v))
        out = torch.empty_like(q)
        torch.ops.cudatma.attention_out(q, k, v, causal=True, out=out)
        check(out, sdpa(q, k, v))


def test_attention_of_sequences_and_of_a_cache_against_float64() -> None:
    q, k, v = heads(torch.bfloat16)
    for _ in range(2):
        found = torch.ops.cudatma.attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ints(0, 130, 260), ints(0, 200, 400),
            max_seqlen_q=130, max_seqlen_k=200, causal=True,
        )  # fmt: skip
        check(found, sdpa(q, k, v).flatten(0, 1))
        found = torch.ops.cudatma.attention_decode(q[:, -2:], k, v, ints(200, 190))
        check(found[0], sdpa(q[:1, -2:], k[:1], v[:1])[0])
        check(found[1], sdpa(q[1:, -2:], k[1:, :190], v[1:, :190])[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_opcheck(dtype: Any) -> None:
    layer, ops = layer_of(dtype), torch.ops.cudatma
    x, q = draw(5, K, dtype=dtype), heads(dtype)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ops.marlin_gemm, (x, *operands(layer)), {}),
        (ops.gemm, (x, draw(K, 64, dtype=dtype)), {"activation": "silu"}),
        (ops.attention, q, {"causal": True}),
        (ops.attention_decode, (q[0][:, :1], *q[1:], ints(200, 190)), {}),
    ]
    for operator, arguments, options in cases:
        torch.library.opcheck(operator.default, arguments, options)
        out = torch.empty_like(operator(*arguments, **options))
        torch.library.opcheck(getattr(ops, f"{operator.__name__}_out").default, arguments, {**options, "out": out})


Module: Any = torch.nn.Module


class Block(Module):
    """A module that calls every operator of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mixed = layer_of(), layer_of(act_order=True)
        self.register_buffer("down", draw(N, K, seed=7) / 32)

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.silu(self.up(x)) * self.mixed(x)
        q = y.view(*y.shape[:-1], N // 128, 128)
        y = torch.ops.cudatma.attention(q, q, q, causal=True).flatten(-2)
        return torch.ops.cudatma.gemm(y.flatten(0, 1), self.down).view_as(x)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_in_one_graph(mode: str) -> None:
    torch._dynamo.reset()
    block = Block()
    # The first iterations of reduce-overhead warm up and record.
    compiled = torch.compile(block, fullgraph=True, mode=mode, dynamic=mode == "default")
    with torch.inference_mode():
        for length in (16, 40, 16, 40, 16):
            for seed in range(3):
                x = draw(2, length, K, seed=seed)
                torch.compiler.cudagraph_mark_step_begin()
                found = compiled(x).clone()
                torch.testing.assert_close(found, block(x), rtol=1e-2, atol=1e-2)


def test_a_captured_graph_is_replayed_on_new_inputs() -> None:
    block, x = Block(), draw(1, 8, K)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                block(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = block(x)
        for seed in range(1, 4):
            x.copy_(draw(1, 8, K, seed=seed))
            graph.replay()
            assert torch.equal(found, block(x))


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def test_no_allocations_after_warm_up() -> None:
    """The test counts allocations by torch's allocator; workspace_bytes() counts cudatma's own memory."""
    layer, other = layer_of(), layer_of(act_order=True)
    x, out = draw(16, K), torch.empty(16, N, dtype=torch.float16, device="cuda")
    a, b = draw(64, 256), draw(256, 128)
    c, (q, k, v) = torch.empty(64, 128, dtype=torch.float16, device="cuda"), heads(torch.float16)
    attended = torch.empty_like(q)

    def calls() -> None:
        torch.ops.cudatma.marlin_gemm_out(x, *operands(layer), out=out)
        torch.ops.cudatma.marlin_gemm_out(x, *operands(other), out=out)
        torch.ops.cudatma.gemm_out(a, b, out=c)
        torch.ops.cudatma.attention_out(q, k, v, causal=True, out=attended)

    def count(function: Callable[[], None]) -> int:
        before, held = allocations(), cudatma.workspace_bytes()
        for _ in range(50):
            function()
        torch.cuda.synchronize()
        assert cudatma.workspace_bytes() == held
        return allocations() - before

    calls()
    assert count(calls) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    assert count(graph.replay) == 0
    # A result that the operator makes is the only allocation of its call.
    assert count(lambda: layer(x)) == 50


def test_a_weight_that_was_never_used_is_refused_in_a_capture_and_taken_after_warm_up() -> None:
    layer, x = layer_of(), draw(4, K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(LaunchError, match=r"warm_up.*before the capture"):
        layer(x)
    layer.warm_up([4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    graph.replay()
    check(found, exact(layer, x))


def test_calls_run_on_torchs_current_stream() -> None:
    """The operator's inputs are written late, on the same stream."""
    layer, x = layer_of(), draw(64, K)
    wanted = layer(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    late = [torch.empty_like(x) for _ in streams]
    found = []
    for stream, given in zip(streams, late, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            given.copy_(x)
            found.append(layer(given))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


def test_a_state_dict_loaded_in_place_and_one_moved_to_the_gpu() -> None:
    layer, x = layer_of(), draw(8, K)
    layer(x)
    layer.load_state_dict({name: t * 2 if name in ("scales", "bias") else t for name, t in layer.state_dict().items()})
    check(layer(x), exact(layer, x))
    again = MarlinLinear(K, N, group_size=64, symmetric=False)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.to("cuda")(x), layer(x))
    made = MarlinLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.float16, device="cuda"))
    assert made.qweight.is_cuda
    check(made(x), exact(made, x))


def test_memory_of_dropped_layers_is_free() -> None:
    x = draw(1, K)
    layer_of()(x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        layer_of()(x)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
