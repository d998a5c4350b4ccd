"""Shared fixtures and small models; the network is limited to loopback."""

import gc
import os
import socket
import sys


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Cache, PreTrainedTokenizerFast, StaticCache

import tost_hf


collect_ignore = ["vllm"]  # has its own environment: make test-vllm
sys.modules["vllm"] = None  # otherwise that folder, beside this file, would be imported as the package


@pytest.fixture(autouse=True, scope="module")
def freeze_objects():
    """Excludes what is imported so far from garbage collections: each run of Trainer starts one, which would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def set_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def restrict_network_to_loopback():
    """Raises an error when a test looks up any other host."""
    getaddrinfo = socket.getaddrinfo

    def getaddrinfo_on_loopback(host, *args, **kwargs):
        if host not in (None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1", socket.gethostname()):
            raise AssertionError(f"A test tried to reach {host!r}.")
        return getaddrinfo(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo_on_loopback
    yield
    socket.getaddrinfo = getaddrinfo


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Sets every parameter to a value that affects outputs: initial ones (LayerScale 1e-5, denom_bias 0) hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "layer_scale" in name:
                param.copy_(0.5 + 0.1 * noise)
            elif "temp" in name or "norm.weight" in name:
                param.copy_(1 + 0.2 * noise)
            elif param.ndim == 1 or "denom_bias" in name:
                param.copy_(0.1 * noise)
            else:
                param.copy_(noise / param.shape[-1] ** 0.5)
    return model


def small_config(**changes) -> tost_hf.ToSTConfig:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None}
    return tost_hf.ToSTConfig(**(sizes | tokens | changes))


def small_vision_config(**changes) -> tost_hf.ToSTVisionConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "image_size": 16}
    return tost_hf.ToSTVisionConfig(**(sizes | changes))


def make_cache(config: tost_hf.ToSTConfig, static: bool) -> Cache:
    return StaticCache(config, max_cache_len=99) if static else tost_hf.ToSTCache(config)


@pytest.fixture
def tiny_config():
    return small_config(num_hidden_layers=3, bos_token_id=1, pad_token_id=0)


@pytest.fixture
def tiny_model(tiny_config):
    return randomize(tost_hf.ToSTForCausalLM(tiny_config)).eval()


def tiny_vision_model(**fields) -> tost_hf.ToSTForImageClassification:
    config = small_vision_config(**({"num_hidden_layers": 3} | fields))
    return randomize(tost_hf.ToSTForImageClassification(config)).eval()


@pytest.fixture
def images():
    return torch.rand(2, 3, 16, 24)  # 4 x 6 patches


@pytest.fixture
def batch():
    """Three sequences of 12, 9 and 7 tokens, the second padded on the left and the third on the right."""
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :3] = 0
    mask[2, 7:] = 0
    return {"input_ids": torch.randint(1, 97, (3, 12)), "attention_mask": mask}


@pytest.fixture
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["the heads of the model share the tokens of the text " * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@pytest.fixture
def text_model():
    config = small_config(vocab_size=300, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    return randomize(tost_hf.ToSTForCausalLM(config)).eval()


# at the end, because these modules import from this one
from hub_clients import clients  # noqa: E402, F401
from hub_server import hub  # noqa: E402, F401
from image_runs import digit_folder, image_args  # noqa: E402, F401
from text_runs import clm_args, text_folder, text_parts  # noqa: E402, F401
