"""Small models with random weights, and their continuations of prompts with vLLM and with `generate`."""

import os
import sys
import tempfile
from pathlib import Path


sys.path.append(str(Path(__file__).parents[2] / "examples/benchmarks"))
os.environ |= {
    "VLLM_CACHE_ROOT": tempfile.mkdtemp(),  # else a compiled model of an earlier run could be used
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process; the server has its own process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams

from tost_hf import ToSTConfig, ToSTForCausalLM
from tost_hf.model.base_tost import AUTO_MAPS


VOCABULARY = 512
TSSA, FULL, SLIDING = "tssa", "full_attention", "sliding_attention"
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
OPTIONS = {
    "published": {"tie_word_embeddings": True},
    "conv_token": {
        "position_embedding_type": "none",
        "max_position_embeddings": 4096,
        "decay_type": "token",
        "conv_kernel": 4,
    },
    "hybrid": {
        "position_embedding_type": "none",
        "decay_type": "token",
        "conv_kernel": 4,
        "layer_types": [TSSA, FULL, TSSA, SLIDING],
        "sliding_window": 64,
        "num_key_value_heads": 1,
        "rope_parameters": ROPE,
    },
    "window": {
        "position_embedding_type": "none",
        "decay_type": "token",
        "conv_kernel": 4,
        "layer_types": [TSSA, SLIDING, TSSA, SLIDING],
        "sliding_window": 64,
    },
    "hybrid_positions": {"layer_types": [TSSA, FULL, TSSA, TSSA], "use_bias": True},
    "odd": {
        "position_embedding_type": "none",
        "hidden_size": 75,
        "num_attention_heads": 5,
        "decay_type": "head",
        "conv_kernel": 3,
    },
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_model(kind: str) -> ToSTForCausalLM:
    """A model whose greedy continuations do not degenerate to one token."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    sizes |= {"vocab_size": VOCABULARY, "layer_scale_init_value": 1.0, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = ToSTForCausalLM(ToSTConfig(bos_token_id=0, eos_token_id=0, **(sizes | OPTIONS[kind])))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "convolution" not in name and "forget" not in name:
                parameter.mul_(4 if "layers" in name else 30 if "positions" in name else 1)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save_tokenizer(folder) -> None:
    """One token for each byte; further ids of the vocabulary are never in a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0} | {symbol: i for i, symbol in enumerate(alphabet, 1)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")
    fast_tokenizer.chat_template = TEMPLATE
    fast_tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder with a model of each kind and its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for kind in OPTIONS:
        model = make_model(kind)
        if kind == "conv_token":
            model.config.auto_map = AUTO_MAPS["tost"]  # as in published models; the remote code is not trusted here
        model.save_pretrained(root / kind)
        save_tokenizer(root / kind)
    return root


@pytest.fixture
def engine():
    """Starts an engine, and shuts down the previous one; the last one is shut down after the test."""
    engines = []

    def start(folder, **options) -> LLM:
        while engines:
            engines.pop().llm_engine.engine_core.shutdown()
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 2**27}
        engines.append(LLM(str(folder), **(defaults | options)))
        return engines[-1]

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


def make_prompts(count: int = 20, max_length: int = 600) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 5, 31, 32, 33, 127, 128, 129, 256, 257, max_length]
    lengths += torch.randint(1, max_length, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths[:count]]


def generate_with_vllm(
    llm: LLM, prompts: list[list[int]], sampling=None, max_new_tokens: int = 32, **options
) -> list[list[int]]:
    """The tokens that vLLM generates for each prompt, greedily by default."""
    sampling = sampling or SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate_reference(model, prompts: list[list[int]], max_new_tokens: int = 32) -> list[list[int]]:
    """The tokens that `generate` generates for each prompt separately."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    return [model.generate(x, attention_mask=torch.ones_like(x), **options)[0, x.shape[1] :].tolist() for x in inputs]
