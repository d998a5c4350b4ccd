"""bitsandbytes and torchao on language and vision models: errors of the logits; statistics parameters stay float32."""

import pytest
import torch
from conftest import randomize, small_config, tiny_vision_model
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, BitsAndBytesConfig, TorchAoConfig

from tost_hf import ToSTForCausalLM


INPUT_IDS = torch.arange(1, 65).reshape(2, 32)
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WIDE = {"hidden_size": 64, "num_attention_heads": 4}  # bitsandbytes quantizes blocks of 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    randomize(ToSTForCausalLM(small_config(**WIDE))).save_pretrained(folder / "language")
    tiny_vision_model(**WIDE, num_labels=32).save_pretrained(folder / "vision")
    return {
        "language": (AutoModelForCausalLM, folder / "language"),
        "vision": (AutoModelForImageClassification, folder / "vision"),
    }


def bitsandbytes_config(**options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    return BitsAndBytesConfig(**options)


def torchao_config(name: str):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed (pip install torchao)")
    return TorchAoConfig(getattr(quantization, name)())


METHODS = {
    "bitsandbytes, 4 bits, NF4": (lambda: bitsandbytes_config(load_in_4bit=True, bnb_4bit_quant_type="nf4"), 0.35),
    "bitsandbytes, 8 bits": (lambda: bitsandbytes_config(load_in_8bit=True), 0.05),
    "torchao, int8 weights": (lambda: torchao_config("Int8WeightOnlyConfig"), 0.05),
    "torchao, int8": (lambda: torchao_config("Int8DynamicActivationInt8WeightConfig"), 0.05),
}


def compute_logits(model, kind: str) -> torch.Tensor:
    with torch.no_grad():
        return model(INPUT_IDS if kind == "language" else IMAGES).logits.float()


def quantized_layers(model: torch.nn.Module) -> list[str]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    return [name for name, x in layers.items() if type(x) is not torch.nn.Linear or type(x.weight) is not torch.nn.Parameter]


@pytest.mark.parametrize("kind", ["language", "vision"])
@pytest.mark.parametrize("make_config, max_error", METHODS.values(), ids=METHODS)
def test_logits_of_a_quantized_model(folders, kind, make_config, max_error):
    auto_class, folder = folders[kind]
    original = auto_class.from_pretrained(folder).eval()
    quantized = auto_class.from_pretrained(folder, quantization_config=make_config(), dtype=torch.float32).eval()
    assert type(quantized) is type(original)
    assert len(quantized_layers(quantized)) >= 2 * 4 + (kind == "vision")
    expected, actual = compute_logits(original, kind), compute_logits(quantized, kind)
    error = ((actual - expected).norm() / expected.norm()).item()
    assert 0 < error < max_error, error
    for name, parameter in quantized.named_parameters():
        if name.endswith((".temp", ".denom_bias")):
            assert parameter.dtype == torch.float32 and torch.equal(parameter, original.get_parameter(name)), name
