"""torch's MarlinLinear against its dequantized weight, on the CPU with the reference backend."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import safetensors.torch

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError
from cudatma.integrations.torch import MarlinLinear, warm_up

K, N = 160, 136  # no multiples of a block
FORMATS = ("mxfp4", "nvfp4", "fp8", "int8")


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")


def linear(dtype: Any = torch.float16, *, bias: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(K, N, bias=bias, dtype=dtype).requires_grad_(False)


def rows(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def layer_of(dtype: Any = torch.float16, **options: Any) -> MarlinLinear:
    return MarlinLinear.from_linear(linear(dtype), **{"group_size": 32, **options})


def act_order() -> cudatma.PackedWeight:
    draw = np.random.default_rng(2)
    q = draw.integers(0, 16, (K, N), dtype=np.uint8)
    scales = draw.uniform(0.01, 0.02, (K // 32, N)).astype(np.float16)
    zeros = draw.integers(0, 17, (K // 32, N), dtype=np.uint8)
    return cudatma.quantization.pack(q, scales, zeros, group_size=32, perm=draw.permutation(K))


def check(layer: MarlinLinear, x: Any, weight: Any) -> None:
    """Compare a layer with ``weight``, (N, K) in float64."""
    y = layer(x)
    assert y.dtype == x.dtype
    assert y.shape == (*x.shape[:-1], layer.out_features)
    wanted = x.double() @ weight.T + (0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group_size", "symmetric", "bias"), [(32, True, True), (-1, False, False)])
def test_a_quantized_linear_multiplies_by_its_dequantized_weight(
    dtype: Any, group_size: int, symmetric: bool, bias: bool
) -> None:
    dense = linear(dtype, bias=bias)
    layer = MarlinLinear.from_linear(dense, group_size=group_size, symmetric=symmetric)
    assert layer.dtype == dtype
    packed = cudatma.quantize_linear(dense.weight, group_size=group_size, symmetric=symmetric, dtype=str(dtype)[6:])
    weight = torch.from_numpy(packed.dequantize().T)
    torch.testing.assert_close(layer.dequantize(dtype=torch.float64), weight, rtol=0, atol=0)
    for shape in ((), (3,), (2, 5), (0,)):
        check(layer, rows(*shape, dtype=dtype), weight)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_in_another_format_is_restored_from_its_state(tmp_path: Path, format: str) -> None:
    dense, x = linear(torch.bfloat16), rows(3, dtype=torch.bfloat16)
    layer = MarlinLinear.from_linear(dense, format=format)
    packed = cudatma.quantize_linear(dense.weight, format=format, dtype="bfloat16")
    check(layer, x, torch.from_numpy(packed.dequantize().T))
    torch.testing.assert_close(layer._dequantize_by_kernel(), layer.dequantize(), rtol=0, atol=0)
    assert f"group_size={packed.group_size}, format={format!r}, dtype" in repr(layer)
    state = layer.state_dict()
    assert set(state) == {"qweight", "scales", "bias"} | ({"tensor_scale"} if format == "nvfp4" else set())
    safetensors.torch.save_file(state, tmp_path / "layer.safetensors")
    other = MarlinLinear(K, N, dtype=torch.bfloat16, format=format)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "layer.safetensors"))
    for same in (other, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).to("cpu", torch.bfloat16)):
        assert (same.format, repr(same)) == (format, repr(layer))
        torch.testing.assert_close(same(x), layer(x), rtol=0, atol=0)


def test_the_tensor_scale_stays_fp32_and_its_changes_are_seen() -> None:
    layer, x = layer_of(group_size=16, format="nvfp4"), rows(3)
    layer.bias = None
    before = layer(x)
    assert torch.nn.Sequential(layer).half()[0].tensor_scale.dtype == torch.float32
    layer.tensor_scale.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before, rtol=0, atol=0)
    with pytest.raises(ArgumentTypeError, match=r"^tensor_scale\.dtype must be torch.float32.*got torch.float16"):
        layer.load_state_dict(layer.state_dict() | {"tensor_scale": torch.ones((), dtype=torch.float16)})


def test_a_layer_of_float32_becomes_fp16_and_its_bias_is_rounded() -> None:
    dense = linear(torch.float32)
    layer = MarlinLinear.from_linear(dense)
    assert layer.dtype == torch.float16
    torch.testing.assert_close(layer.bias, dense.bias.half(), rtol=0, atol=0)
    assert MarlinLinear.from_linear(dense, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_activation_order_and_zero_points_are_kept() -> None:
    packed = act_order()
    layer = MarlinLinear.from_packed(packed)
    assert layer.perm.dtype == torch.int32
    check(layer, rows(4), torch.from_numpy(packed.dequantize().T))
    assert "symmetric=False" in repr(layer)
    assert "act_order=True" in repr(layer)


@pytest.mark.parametrize("n", [136, 131])
def test_a_layer_on_a_gpu_is_dequantized_as_on_the_cpu(n: int) -> None:
    """The test uses the reference of the kernel that a GPU runs."""
    made = cudatma.quantize(np.random.default_rng(4).standard_normal((K, n)), dtype="bfloat16", symmetric=False)
    layer = MarlinLinear.from_packed(made)
    torch.testing.assert_close(layer._dequantize_by_kernel(), layer.dequantize(), rtol=0, atol=0)


def test_a_layer_does_not_share_memory_with_the_weight_that_it_was_made_of() -> None:
    packed = act_order()
    layer = MarlinLinear.from_packed(packed)
    before = packed.dequantize()
    layer.scales.zero_()
    layer.qweight.zero_()
    np.testing.assert_array_equal(packed.dequantize(), before)


def test_transposed_activations_are_taken_as_torch_takes_them() -> None:
    layer = layer_of()
    x = rows(3, 4)
    torch.testing.assert_close(layer(x.transpose(0, 1)), layer(x).transpose(0, 1), rtol=0, atol=0)


@pytest.mark.parametrize("made_of", ["gptq", "awq", "compressed_tensors", "marlin"])
def test_imported_tensors_give_the_layer_that_the_importer_gives(made_of: str) -> None:
    draw = np.random.default_rng(3)

    def words(*shape: int) -> Any:
        return torch.from_numpy(draw.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32))

    scales = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)).half() / 64
    bias = torch.linspace(-1, 1, 64).half()
    tensors: dict[str, tuple[Any, ...]] = {
        "gptq": (words(16, 64), words(4, 8), scales),
        "awq": (words(128, 8), words(4, 8), scales),
        "compressed_tensors": (words(64, 16), scales.T.contiguous(), (64, 128)),
        "marlin": (words(8, 128), scales),
    }
    options = {"zero_point_format": "v2"} if made_of == "gptq" else {}
    packed = getattr(cudatma, f"from_{made_of}")(*tensors[made_of], **options)
    layer = getattr(MarlinLinear, f"from_{made_of}")(*tensors[made_of], bias=bias, **options)
    torch.testing.assert_close(layer.dequantize(dtype=torch.float64), torch.from_numpy(packed.dequantize().T))
    torch.testing.assert_close(layer.bias, bias)
    assert layer.group_size == 32


def test_a_state_dict_fills_a_module_that_was_made_with_the_same_arguments(tmp_path: Path) -> None:
    layer, x = layer_of(symmetric=False), rows(3)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert set(state) == {"qweight", "scales", "zeros", "bias"}
    safetensors.torch.save_file(state, tmp_path / "layer.safetensors")
    state = safetensors.torch.load_file(tmp_path / "layer.safetensors")
    for place, assign in (("cpu", False), ("cpu", True), ("meta", True)):
        other = MarlinLinear(K, N, group_size=32, symmetric=False, device=place)
        assert other.load_state_dict(state, assign=assign).missing_keys == []
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


def test_parameters_may_take_the_buffers_places() -> None:
    layer = MarlinLinear.from_linear(torch.nn.Linear(64, 32), group_size=32, symmetric=False)
    x = torch.randn(3, 64, dtype=torch.float16)
    expected = layer(x)
    given = {name: torch.nn.Parameter(tensor, False) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(given, assign=True)
    assert len(list(layer.parameters())) == 4
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_a_layer_without_memory_gives_results_without_memory() -> None:
    layer = MarlinLinear(K, N, device="meta")
    assert layer(torch.empty(2, K, dtype=torch.float16, device="meta")).shape == (2, N)


def test_a_state_dict_of_another_kind_of_layer_is_refused() -> None:
    state = layer_of().state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        MarlinLinear(K, N, group_size=64).load_state_dict(state)
    with pytest.raises(RuntimeError, match="zeros"):
        MarlinLinear(K, N, group_size=32, symmetric=False).load_state_dict(state)
    with pytest.raises(QuantizationError, match=r"^format must be 'mxfp4'.*got 'int4'; create the layer with"):
        MarlinLinear(K, N, format="mxfp4").load_state_dict(state)
    model = torch.nn.ModuleDict({"proj": MarlinLinear(K, N, group_size=32, dtype=torch.bfloat16)})
    with pytest.raises(ArgumentTypeError, match=r"proj\.scales.dtype must be .*got torch.float16"):
        model.load_state_dict({f"proj.{name}": tensor for name, tensor in state.items()})


@pytest.mark.parametrize("inference", [False, True])
def test_a_state_dict_loaded_in_place_is_seen_by_the_next_call(inference: bool) -> None:
    with torch.inference_mode(inference):
        layer, other = layer_of(), MarlinLinear.from_linear(linear(seed=1), group_size=32)
        # What kernels may do is read from the scales: these allow more than those of the first.
        other.scales.mul_(64)
        x, before = rows(3), layer(rows(3))
        fit = layer._packed_weight().scale_fit
        layer.load_state_dict(other.state_dict())
        torch.testing.assert_close(layer(x), other(x), rtol=0, atol=0)
        assert not torch.equal(layer(x), before)
        assert layer._packed_weight().scale_fit == other._packed_weight().scale_fit != fit


def test_copies_and_pickles_compute_the_same_and_are_independent() -> None:
    layer, x = layer_of(), rows(3)
    wanted = layer(x)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(stream, weights_only=False)]
    layer.scales.zero_()
    for other in copies:
        torch.testing.assert_close(other(x), wanted, rtol=0, atol=0)
        assert repr(other) == repr(layer)


def test_to_a_device_moves_and_to_another_dtype_raises() -> None:
    layer, x = layer_of(), rows(3)
    model = torch.nn.Sequential(layer)
    wanted, state = layer(x), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for convert in (model.bfloat16, model.float, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(ArgumentTypeError, match=r"the dtype of the layer.*; call .to\(device\) without a dtype"):
            convert()
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)
    torch.testing.assert_close(model.half().to("cpu").eval().to(torch.float16)(x), wanted, rtol=0, atol=0)
    assert copy.deepcopy(model).to("meta")[0].qweight.is_meta
    assert copy.deepcopy(model).to_empty(device="cpu")[0].scales.dtype == torch.float16
    torch.testing.assert_close(model.share_memory()(x), wanted, rtol=0, atol=0)


def test_gradients_are_refused_while_torch_records() -> None:
    layer, x = layer_of(), rows(3).requires_grad_()
    with pytest.raises(ArgumentError, match=r"x must be .*got a tensor that requires grad.*no_grad"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (3, N)
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "field"),
    [
        ((0, 8), {}, ArgumentError, "in_features"),
        ((8, 2.0), {}, ArgumentError, "out_features"),
        ((8, 8), {"group_size": 48}, QuantizationError, "group_size"),
        ((8, 8), {"group_size": 32, "format": "nvfp4"}, QuantizationError, "group_size"),
        ((8, 8), {"symmetric": False, "format": "fp8"}, QuantizationError, "symmetric"),
        ((8, 8), {"format": "fp4"}, ArgumentTypeError, "format"),
        ((8, 8), {"dtype": torch.float32}, ArgumentTypeError, "dtype"),
        ((8, 8), {"batch_invariant": 1}, ArgumentTypeError, "batch_invariant"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, options: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=f"^{field}"):
        MarlinLinear(*arguments, **options)


def test_wrong_sources_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^linear must be .*got Conv2d"):
        MarlinLinear.from_linear(torch.nn.Conv2d(1, 1, 1))
    with pytest.raises(ArgumentTypeError, match=r"^w must be .*got Tensor"):
        MarlinLinear.from_packed(torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"bias\.shape must be .*got \(3,\)"):
        MarlinLinear.from_packed(act_order(), torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"^bias must be .*got 1e\+06"):
        MarlinLinear.from_packed(act_order(), torch.full((N,), 1e6))


def test_values_that_no_weight_has_are_found_by_warm_up() -> None:
    layer = layer_of()
    layer.warm_up([1, 16])
    layer.warm_up(16)
    for wrong in (-16, 1.5, [1.5], [-1]):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="m_values"):
            layer.warm_up(wrong)
    layer.scales[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match=r"scales\[0, 0\] must be .*got nan"):
        layer.warm_up([1])


def test_a_model_compiles_into_one_graph_for_any_batch() -> None:
    layers = [layer_of(), layer_of(symmetric=False), MarlinLinear.from_packed(act_order())]
    layers += [layer_of(group_size=None, format=format) for format in FORMATS]

    def model(x: Any) -> Any:
        return torch.cat([torch.nn.functional.silu(layer(x)) * 2 for layer in layers], -1)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 1, 7):
        torch.testing.assert_close(compiled(rows(m)), model(rows(m)), rtol=2e-3, atol=2e-3)


def test_a_layer_is_exported_with_a_free_batch() -> None:
    layer, x = layer_of(), rows(3)
    dynamic = {"x": {0: torch.export.Dim("m")}}
    program = torch.export.export(layer, (x,), dynamic_shapes=dynamic)
    torch.testing.assert_close(program.module()(rows(6)), layer(rows(6)), rtol=0, atol=0)


def test_warming_up_a_model_checks_its_arguments_without_a_gpu_too() -> None:
    model = torch.nn.Sequential(layer_of())
    warm_up(model, 16)
    for wrong in (0, -1, 2.5, "16", [], True):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"max_m must be .*got "):
            warm_up(model, wrong)
    with pytest.raises(ArgumentTypeError, match=r"model must be .*got NoneType"):
        warm_up(None, 16)


def test_buffers_off_16_bytes_run_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in a safetensors file may begin at any multiple of 8 bytes."""
    layer = layer_of()
    x = torch.ones(1, layer.in_features, dtype=torch.float16)
    expected = layer(x)
    for name, tensor in list(layer.named_buffers()):
        size = tensor.numel() * tensor.element_size()
        whole = torch.empty(size + 32, dtype=torch.uint8)
        start = -whole.data_ptr() % 16 + 8
        moved = whole[start : start + size].view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor)
        setattr(layer, name, moved)
    monkeypatch.setenv("CUDATMA_BACKEND", "emulator")
    torch.testing.assert_close(layer(x), expected, rtol=2e-3, atol=2e-3)
