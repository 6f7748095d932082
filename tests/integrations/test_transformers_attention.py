"""The attention "cudatma" in transformers against sdpa and eager, on the CPU: patterns, padding, caches, fallbacks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cudatma.integrations.transformers import attention, register
from cudatma.kernels import engine
from cudatma.kernels.gpu import H200

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 256, "head_dim": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.arange(3, 3 + 36).reshape(3, 12)
#: Of sequences of 12, 7 and 1 tokens.
LEFT = torch.tensor([[0] * (12 - n) + [1] * n for n in (12, 7, 1)])
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[1] * 12, [1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0] * 5 + [1] * 7])


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    monkeypatch.setattr(attention, "_warned", set())
    register()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cudatma attention")
        yield


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Return tiny models with random fp16 weights."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    made = {
        "llama": auto.from_config(transformers.LlamaConfig(**SIZES)),
        "mistral": auto.from_config(transformers.MistralConfig(**SIZES, sliding_window=5)),
        "gemma2": auto.from_config(
            transformers.Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=64)
        ),
        "llama4": auto.from_config(
            transformers.Llama4TextConfig(
                **{**SIZES, "intermediate_size_mlp": 128}, attention_chunk_size=4, num_local_experts=2
            )
        ),
        "gpt-oss": auto.from_config(
            transformers.GptOssConfig(**SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
        ),
        "bert": transformers.AutoModel.from_config(
            transformers.BertConfig(
                hidden_size=128, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=96
            )
        ),
    }
    return {name: model.to(torch.float16).eval() for name, model in made.items()}


def outputs(model: Any, implementation: str, tokens: Any = TOKENS, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(tokens, **options)[0].float()


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the operators that are called."""
    made: list[str] = []
    for name in ("attention", "attention_decode", "attention_varlen"):
        function = getattr(torch.ops.cudatma, name)

        def noting(*operands: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            made.append(name)
            return function(*operands, **options)

        monkeypatch.setattr(torch.ops.cudatma, name, noting)
    return made


EAGER = {"gemma2": "eager", "gpt-oss": "eager"}  # sdpa ignores softcap and sinks


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "bert"])
@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_patterns_and_padding_give_what_sdpa_gives(
    models: dict[str, Any], name: str, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(monkeypatch)
    expected = outputs(models[name], EAGER.get(name, "sdpa"), attention_mask=mask)
    assert not made
    got = outputs(models[name], "cudatma", attention_mask=mask)
    assert made == ["attention" if mask is None else "attention_varlen"] * 2
    valid = torch.ones_like(LEFT, dtype=torch.bool) if mask is None else mask.bool()
    assert (got - expected)[valid].abs().max() < 1e-2
    assert torch.isfinite(got).all()


def test_a_mask_of_ones_is_no_padding(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    outputs(models["llama"], "cudatma", attention_mask=torch.ones_like(LEFT))
    assert made == ["attention"] * 2


@pytest.mark.parametrize(
    ("name", "cache", "mask"),
    [
        ("llama", "dynamic", None),
        ("llama", "dynamic", LEFT),
        ("llama", "static", None),
        ("llama", "static", LEFT),
        ("mistral", "dynamic", LEFT),
        ("gemma2", "static", LEFT),
    ],
)
def test_generation_gives_what_sdpa_gives(
    models: dict[str, Any], name: str, cache: str, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(monkeypatch)
    model = models[name]
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "disable_compile": True,
               "return_dict_in_generate": True, "output_logits": True}  # fmt: skip
    options["attention_mask"] = torch.ones_like(LEFT) if mask is None else mask
    if cache == "static":
        options["cache_implementation"] = "static"
    model.set_attn_implementation(EAGER.get(name, "sdpa"))
    expected = model.generate(TOKENS, **options)
    model.set_attn_implementation("cudatma")
    got = model.generate(TOKENS, **options)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert (ours - theirs).abs().max() < 2e-2
    decoded = made[2:]
    assert len(made) == 12
    if name == "llama":  # others slide past the padding
        assert decoded == ["attention_decode" if mask is None else "attention_varlen"] * 10


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_the_calls_to_warm_up_cover_what_a_model_launches(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kernels, first = models[name], {True: set[Any](), False: set[Any]()}, engine._run_checked
    is_warming = False

    def noted(called: Any, inputs: Any, out: Any, options: Any, *others: Any) -> Any:
        checked = called.check(inputs, out, options, None)
        if is_warming:
            kernels[True] |= set(called.kernels_up_to(checked, 256, H200))
        else:
            kernels[False] |= set(called.kernels(checked.problem, called.configure(checked.problem, H200, {})))
        return first(called, inputs, out, options, *others)

    monkeypatch.setattr(engine, "_run_checked", noted)
    model.set_attn_implementation("cudatma")
    for mask in (None, LEFT):
        model.generate(TOKENS, attention_mask=mask, max_new_tokens=3, do_sample=False)
    is_warming = True
    for function, operands, options in attention.attention_calls(model):
        function(*operands, **options)
    assert kernels[False]
    assert kernels[False] <= kernels[True]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left"])
def test_several_tokens_after_a_cache(models: dict[str, Any], name: str, mask: Any) -> None:
    """The queries begin in the middle of the keys."""
    model = models[name]
    found = {}
    for implementation in ("sdpa", "cudatma"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(TOKENS[:, :7], attention_mask=None if mask is None else mask[:, :7], past_key_values=cache)
            found[implementation] = model(TOKENS[:, 7:], attention_mask=mask, past_key_values=cache)[0]
    valid = slice(None) if mask is None else mask[:, 7:].bool()
    assert (found["cudatma"] - found["sdpa"])[valid].abs().max() < 1e-2


# ---- what goes to sdpa


def expect_sdpa(model: Any, says: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    made = calls(monkeypatch)
    expected = outputs(model, "sdpa", **options)
    with pytest.warns(RuntimeWarning, match=says) as told:
        got = outputs(model, "cudatma", **options)
    assert not made
    assert sum("cudatma does not support" in str(one.message) for one in told) == 1
    outputs(model, "cudatma", **options)  # which warns no more
    return (got - expected).abs()


def test_padding_among_the_tokens(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    off = expect_sdpa(models["llama"], "a mask that is not causal", monkeypatch, attention_mask=HOLES)
    assert off[HOLES.bool()].max() == 0


def test_chunked_attention(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert expect_sdpa(models["llama4"], "a mask that is not causal", monkeypatch).max() == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sequences_packed_by_their_positions(
    models: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = torch.tensor([[*range(5), *range(7)]] * 3)
    options = {"position_ids": positions, "use_cache": False}
    assert expect_sdpa(models[name], "a mask that is not causal", monkeypatch, **options).max() == 0


def test_a_mask_of_the_callers(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(12, dtype=torch.bool)
    assert expect_sdpa(models["llama"], "a mask that is not causal", monkeypatch, attention_mask=mask).max() == 0


@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left"])
def test_other_types(models: dict[str, Any], mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our encoded mask is converted to a bool mask."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**SIZES, sliding_window=5)).eval()
    off = expect_sdpa(model, "tensors of torch.float32", monkeypatch, attention_mask=mask)
    assert off[slice(None) if mask is None else mask.bool()].max() < 1e-5


def test_softcap_goes_to_eager(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs(models["gemma2"], "eager", attention_mask=HOLES)
    with pytest.warns(RuntimeWarning, match="so this call uses eager"):
        got = outputs(models["gemma2"], "cudatma", attention_mask=HOLES)
    assert (got - expected)[HOLES.bool()].abs().max() < 1e-3


def test_training(models: dict[str, Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, attention_dropout=0.5))
    model.set_attn_implementation("cudatma")
    with pytest.warns(RuntimeWarning, match="dropout, so this call uses sdpa"):
        model.train()(TOKENS).logits.sum().backward()
    with pytest.warns(RuntimeWarning, match="a backward pass, so this call uses sdpa"):
        model.eval()(TOKENS).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


# ---- compiling


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left"])
def test_it_compiles_as_one_graph(models: dict[str, Any], mask: Any) -> None:
    """Padding cannot be read during tracing, so sdpa handles it."""
    model = models["mistral"]
    expected = outputs(model, "sdpa", attention_mask=mask)
    model.set_attn_implementation("cudatma")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(TOKENS, attention_mask=mask)[0]
    valid = slice(None) if mask is None else mask.bool()
    assert (got - expected)[valid].abs().max() < 1e-2


# ---- masks


def random_case(rng: random.Random) -> tuple[dict[str, Any], bool, int | None]:
    """Return random arguments as transformers passes them, whether attention is causal, and the window."""
    batch, q_length, causal = rng.randint(1, 4), rng.choice([1, 1, 2, 5, 8]), rng.random() < 0.75
    past = rng.choice([0, 0, 1, 5, 9]) if causal else 0
    window = rng.choice([None, None, 1, 3, 6, 20]) if causal else None
    static = causal and rng.random() < 0.4
    forgotten = past - min(past, window - 1) if window and not static and rng.random() < 0.5 else 0
    padding = torch.zeros(batch, past + q_length, dtype=torch.bool)
    for row in padding:
        begin, end = sorted(rng.sample(range(past + q_length + 1), 2))
        row[begin:end] = True
        row[rng.randrange(past + q_length)] = rng.random() < 0.9  # at times a hole, or a token apart
    if static and rng.random() < 0.5:  # a mask of the whole cache
        padding = torch.nn.functional.pad(padding, (0, 6), value=True)
    function = attention.causal_mask_function if causal else attention.bidirectional_mask_function
    case = {
        "batch_size": batch,
        "q_length": q_length,
        "kv_length": past + q_length - forgotten + (rng.randint(0, 6) if static else 0),
        "q_offset": torch.tensor(past) if static else past,
        "kv_offset": forgotten,
        "mask_function": attention.sliding_window_causal_mask_function(window) if window else function,
        "attention_mask": rng.choice([None, torch.ones_like(padding), padding, padding, padding]),
        "local_size": window,
        "allow_is_causal_skip": causal and not (static and q_length == 1),
    }
    return case, causal, window


def test_random_lengths_caches_patterns_and_padding_give_what_sdpa_gives() -> None:
    rng, generator, kinds = random.Random(0), torch.Generator().manual_seed(0), set()
    for _ in range(150):
        case, causal, window = random_case(rng)
        batch, q_length, kv_length = case["batch_size"], case["q_length"], case["kv_length"]
        ours = attention.attention_mask(**case)
        kinds.add("none" if ours is None else "sdpa" if ours.dtype == torch.bool else tuple(ours.shape[1:3]))
        sdpas = attention.sdpa_mask(**{**case, "allow_is_causal_skip": False}).expand(batch, 1, q_length, kv_length)
        q = torch.randn(batch, 4, q_length, 32, generator=generator)
        k, v = torch.randn(2, batch, 2, kv_length, 32, generator=generator)
        module = SimpleNamespace(is_causal=causal, num_key_value_groups=2)
        expected = sdpa_attention_forward(module, q, k, v, sdpas, scaling=0.3, is_causal=False)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            half = q.half(), k.half(), v.half()
            got = attention.attention_forward(module, *half, ours, scaling=0.3, sliding_window=window)[0]
        real = sdpas.any(-1)[:, 0]  # a query of padding has any result
        if case["attention_mask"] is not None:
            first = int(case["q_offset"])
            real &= case["attention_mask"][:, first : first + q_length]
        assert ((got.float() - expected).abs().amax((2, 3)) < 1e-2)[real].all(), case
        dense = (
            ours if ours is not None and ours.dtype == torch.bool else attention.dense_mask(ours, q, k, causal, window)
        )
        assert torch.equal(dense.expand_as(sdpas)[:, 0][real], sdpas[:, 0][real]), case
    assert kinds == {"none", "sdpa", (1, 1), (1, 2), (2, 1)}
