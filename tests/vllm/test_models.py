"""Every kind of ToST language model writes in vLLM what `generate` writes."""

import json

import pytest
import torch
from conftest import OPTIONS, expected, make_prompts, write
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tost_hf import ToSTConfig, ToSTForCausalLM, ToSTForMaskedLM


@pytest.mark.parametrize("kind", OPTIONS)
def test_texts(folders, engine, kind):
    prompts = make_prompts()
    wanted = expected(ToSTForCausalLM.from_pretrained(folders / kind), prompts)
    assert len({token for text in wanted for token in text}) > 50
    assert write(engine(folders / kind), prompts) == wanted


@pytest.mark.parametrize("kind", ["conv_token", "hybrid"])
def test_chunked_prefill(folders, engine, kind):
    prompts = make_prompts()
    wanted = expected(ToSTForCausalLM.from_pretrained(folders / kind), prompts)
    assert write(engine(folders / kind, max_num_batched_tokens=64), prompts) == wanted


def test_compiled(folders, engine):
    prompts = make_prompts(10)
    wanted = expected(ToSTForCausalLM.from_pretrained(folders / "hybrid"), prompts)
    assert write(engine(folders / "hybrid", enforce_eager=False), prompts) == wanted


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "enforce_eager": False}])
def test_several_processes(folders, engine, sizes):
    prompts = make_prompts(10)
    wanted = expected(ToSTForCausalLM.from_pretrained(folders / "hybrid"), prompts)
    assert write(engine(folders / "hybrid", **sizes), prompts) == wanted


def test_bfloat16(folders, engine):
    """The sums stay float32 and float64, the texts those of `generate` in bfloat16."""
    prompts = make_prompts(10)
    llm = engine(folders / "conv_token", dtype="bfloat16")
    model = ToSTForCausalLM.from_pretrained(folders / "conv_token", dtype=torch.bfloat16)
    same = [a == b for a, b in zip(write(llm, prompts), expected(model, prompts))]
    assert sum(same) >= 8


def test_lora(folders, engine, tmp_path):
    """An adapter of each linear layer, as PEFT writes it, equals the merged weights; other requests do without it."""
    model, rank, tensors = ToSTForCausalLM.from_pretrained(folders / "hybrid"), 8, {}
    base = expected(model, make_prompts(8))
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
    llm = engine(folders / "hybrid", enable_lora=True, max_lora_rank=rank)
    tuned = expected(model, prompts)
    assert tuned != base
    assert write(llm, prompts, lora_request=adapter) == tuned
    assert write(llm, prompts) == base
    mixed = write(llm, prompts, lora_request=[adapter if i % 2 else None for i in range(8)])
    assert mixed == [(tuned if i % 2 else base)[i] for i in range(8)]
