"""Every kind of ToST model has the same results in vLLM as in transformers."""

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from conftest import OPTIONS, VOCABULARY, generate_reference, generate_with_vllm, make_prompts, save_tokenizer
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tost_hf import (
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTForMaskedLM,
    ToSTForSequenceClassification,
    ToSTForTokenClassification,
    ToSTModel,
    ToSTVisionConfig,
)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", OPTIONS)
def test_greedy_generation(folders, engine, kind):
    prompts = make_prompts()
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / kind), prompts)
    assert len({token for tokens in expected for token in tokens}) > 50
    llm = engine(folders / kind)
    for layer in loaded_model(llm).model.layers:
        if hasattr(layer.self_attn, "sums"):
            layer.self_attn.kv_cache[0].fill_(3)  # like values of earlier requests
    assert generate_with_vllm(llm, prompts[:1]) == expected[:1]  # a prompt of one token is scheduled as a decode
    assert generate_with_vllm(llm, prompts) == expected


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_chunked_prefill(folders, engine, backend, monkeypatch):
    """With one call a layer for all requests, and as on GPUs, where prompts are padded."""
    monkeypatch.setenv("TOST_HF_BACKEND", backend)
    prompts = make_prompts()
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / "hybrid"), prompts)
    assert generate_with_vllm(engine(folders / "hybrid", max_num_batched_tokens=64), prompts) == expected


def test_compiled(folders, engine):
    prompts = make_prompts(10)
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / "hybrid"), prompts)
    assert generate_with_vllm(engine(folders / "hybrid", enforce_eager=False), prompts) == expected


PARALLEL = {
    "tensor, hybrid": ("hybrid", {"tensor_parallel_size": 2}),  # with one key-value head
    "tensor, published": ("published", {"tensor_parallel_size": 2}),
    "pipeline, published": ("published", {"pipeline_parallel_size": 2, "enforce_eager": False}),
}


@pytest.mark.parametrize("kind, options", PARALLEL.values(), ids=PARALLEL)
def test_parallelism(folders, engine, kind, options):
    prompts = make_prompts(10)
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / kind), prompts)
    assert generate_with_vllm(engine(folders / kind, **options), prompts) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(folders, engine, dtype):
    """The sums stay float32 and float64; continuations differ from those of `generate` only by rounding."""
    prompts = make_prompts(10)
    llm = engine(folders / "conv_token", dtype=dtype)
    model = ToSTForCausalLM.from_pretrained(folders / "conv_token", dtype=getattr(torch, dtype))
    is_equal = [a == b for a, b in zip(generate_with_vllm(llm, prompts), generate_reference(model, prompts))]
    assert sum(is_equal) >= 6
    attention = loaded_model(llm).model.layers[0].self_attn
    assert [x.dtype for x in attention.sums] == [torch.float32, torch.float64, torch.float64]
    assert attention.temp.dtype == attention.forget_bias.dtype == torch.float32
    assert attention.conv_state.dtype == attention.in_proj.weight.dtype == getattr(torch, dtype)


def loaded_model(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def test_released_cache_is_freed(folders, engine):
    """vLLM frees the cache of its profile runs by replacing `kv_cache`, so a layer must not store a view of it."""
    attention = loaded_model(engine(folders / "conv_token")).model.layers[0].self_attn
    cache_ref = weakref.ref(attention.kv_cache[0])
    assert attention.sums.sum_sq.shape[1:] == (4, 32) and attention.conv_state.shape[1:] == (3, 128)
    attention.kv_cache = []
    gc.collect()
    assert cache_ref() is None


def test_quantized(folders, engine):
    """The linear layers in fp8, quantized while the model is loaded."""
    prompts = make_prompts(10)
    llm = engine(folders / "conv_token", dtype="bfloat16", quantization="fp8_per_channel")
    assert loaded_model(llm).model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    outputs = generate_with_vllm(llm, prompts, max_new_tokens=1)
    model = ToSTForCausalLM.from_pretrained(folders / "conv_token", dtype=torch.bfloat16)
    with torch.no_grad():
        top_tokens = [model(torch.tensor([p])).logits[0, -1].topk(5).indices.tolist() for p in prompts]
    assert all(output[0] in tokens for output, tokens in zip(outputs, top_tokens))


def test_embeddings_and_classes(folders, engine, tmp_path):
    """vLLM pools the last token itself, so the base model and the classifier have no code of their own for it."""
    prompts = make_prompts(6)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    for cls in (ToSTModel, ToSTForSequenceClassification):
        cls.from_pretrained(folders / "conv_token").eval().save_pretrained(tmp_path / cls.__name__)
        save_tokenizer(tmp_path / cls.__name__)
    llm = engine(tmp_path / "ToSTModel")
    base_model = ToSTModel.from_pretrained(tmp_path / "ToSTModel")
    for prompt, output in zip(prompts, llm.embed(inputs, use_tqdm=False)):
        expected = base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected / expected.norm())
    llm = engine(tmp_path / "ToSTForSequenceClassification")
    classifier = ToSTForSequenceClassification.from_pretrained(tmp_path / "ToSTForSequenceClassification")
    for prompt, output in zip(prompts, llm.classify(inputs, use_tqdm=False)):
        expected = classifier(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected)


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
DYNAMIC_ROPE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "position_embedding_type": "none",
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
}
REJECTED = {
    "an encoder": (lambda: ToSTForMaskedLM(ToSTConfig(is_causal=False, **SMALL)), {}, "ToSTForMaskedLM, an encoder"),
    "an encoder's base model": (lambda: ToSTModel(ToSTConfig(is_causal=False, **SMALL)), {}, "ToSTModel, an encoder"),
    "a classifier with mean pooling": (
        lambda: ToSTForSequenceClassification(ToSTConfig(pooling="mean", **SMALL)),
        {},
        "pools the last token.*pooling='mean'",
    ),
    "an image classifier": (
        lambda: ToSTForImageClassification(ToSTVisionConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)),
        {},
        "This is a ToSTForImageClassification",
    ),
    "a token classifier": (
        lambda: ToSTForTokenClassification(ToSTConfig(**SMALL)),
        {},
        "This is a ToSTForTokenClassification",
    ),
    "positions that depend on the batch": (
        lambda: ToSTForCausalLM(ToSTConfig(**SMALL | DYNAMIC_ROPE)),
        {},
        "with rope_type 'dynamic'",
    ),
    "speculative decoding": (
        lambda: ToSTForCausalLM(ToSTConfig(**SMALL)),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "no speculative decoding",
    ),
    "pipeline parallelism without the compiler": (
        lambda: ToSTForCausalLM(ToSTConfig(**SMALL)),
        {"pipeline_parallel_size": 2},
        "needs its compiler",
    ),
}


@pytest.mark.parametrize("make_model, options, message", REJECTED.values(), ids=REJECTED)
def test_unsupported_models_and_options_are_rejected(engine, tmp_path, make_model, options, message):
    make_model().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=message):
        engine(tmp_path, **options)


def test_lora(folders, engine, tmp_path):
    """An adapter of all linear layers, in PEFT's format, equals the merged weights; other requests do not use it."""
    model, rank, tensors = ToSTForCausalLM.from_pretrained(folders / "hybrid"), 8, {}
    base_outputs = generate_reference(model, make_prompts(8))
    names = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "up_proj", "down_proj")
    torch.manual_seed(1)
    for name, module in model.model.layers.named_modules():
        if name.endswith(names):
            a, b = 0.3 * torch.randn(rank, module.in_features), 0.3 * torch.randn(module.out_features, rank)
            module.weight.data += b @ a
            prefix = f"base_model.model.model.layers.{name}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(names), "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    prompts, adapter = make_prompts(8), LoRARequest("test", 1, str(tmp_path))
    # on CPUs vLLM applies the adapter of the last slot to requests without an adapter in a mixed batch: it must be empty
    llm = engine(folders / "hybrid", enable_lora=True, max_lora_rank=rank, max_loras=2)
    adapted_outputs = generate_reference(model, prompts)
    assert adapted_outputs != base_outputs
    assert generate_with_vllm(llm, prompts, lora_request=adapter) == adapted_outputs
    assert generate_with_vllm(llm, prompts) == base_outputs
    mixed = generate_with_vllm(llm, prompts, lora_request=[adapter if i % 2 else None for i in range(8)])
    assert mixed == [(adapted_outputs if i % 2 else base_outputs)[i] for i in range(8)]


def test_code_of_the_guide(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "examples/guides/generation.md").read_text()
    namespace = {"__name__": "__main__"}
    (block,) = re.findall(r"```python\n(from vllm .*?)```", page, re.DOTALL)
    exec(block, namespace)
    prompts = [list(output.prompt_token_ids) for output in namespace["outputs"]]
    model = ToSTForCausalLM.from_pretrained("model_cards/trained/tost-books-3m", dtype=torch.float32)
    expected = generate_reference(model, prompts, max_new_tokens=8)
    for output, expected_tokens in zip(namespace["outputs"], expected, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == expected_tokens[: len(tokens)] and (len(tokens) == 8 or tokens[-1] == 0)
    namespace["llm"].llm_engine.engine_core.shutdown()
