"""The vision models: sizes, initial values, attention types, recorded outputs, saving and pipelines, bad input."""

import copy
import itertools
import logging
import math

import pytest
import torch
from authors_checkpoints import assert_same_bits
from conftest import randomize, small_vision_config
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    GPT2Config,
    pipeline,
)

from tost_hf import (
    ToSTBackbone,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTModel,
    ToSTVisionConfig,
    ToSTVisionModel,
)
from tost_hf.image_processing import make_image_processor
from tost_hf.model.configuration_tost_vision import ATTENTION_TYPES, VISION_PRESETS


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
parametrize_attention = pytest.mark.parametrize("attention_type", ATTENTION_TYPES)


def tiny_config(**fields):
    return small_vision_config(**({"patch_size": 8, "image_size": 32, "num_labels": 3} | fields))


def tiny_model(**fields):
    return randomize(ToSTForImageClassification(tiny_config(**fields))).eval()


def images(*shape):
    return torch.randn(*(shape or (2, 3, 32, 32)))


# Sizes and initial values --------------------------------------------------------------------------------------------

COUNTS = (5_769_328, 5_759_560, 22_589_944, 22_549_672, 10_223_008, 10_213_240)
COUNTS += (40_344_664, 40_304_392, 71_481_064, 71_408_936, 160_286_920, 160_123_432)


@pytest.mark.parametrize(
    "name, attention_type, count",
    [
        *((name, "tssa", count) for name, count in zip(VISION_PRESETS, COUNTS, strict=True)),
        ("tost-vision-small-patch16", "xca", 26_138_104),
        ("tost-vision-small-patch16", "softmax", 26_138_008),
    ],
)
def test_preset_parameter_counts(name, attention_type, count):
    with torch.device("meta"):
        config = ToSTVisionConfig.from_preset(name, num_labels=1000, attention_type=attention_type)
        model = ToSTForImageClassification(config)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters()) == count


def test_initial_weights():
    model = ToSTForImageClassification(
        ToSTVisionConfig(hidden_size=256, num_hidden_layers=2, layer_scale_init_value=0.25, initializer_factor=0.5)
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.bias is None or (module.bias == 0).all(), name
            if module.weight.numel() > 5000:
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
        elif isinstance(module, nn.Conv2d):  # half PyTorch's default: uniform within 1 / sqrt(fan in)
            bound = 0.5 / math.sqrt(module.weight[0].numel())
            assert bound * 0.98 < module.weight.abs().max() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name
    for block in (*model.tost.layers, *model.tost.class_attention_layers):
        assert (block.attention_layer_scale == 0.25).all() and (block.mlp_layer_scale == 0.25).all()
    assert (model.tost.layers[0].attention.temp == 1).all()
    assert model.tost.class_token.std().item() == pytest.approx(0.02, rel=0.2)
    xca = ToSTForImageClassification(tiny_config(attention_type="xca"))
    assert (xca.tost.layers[0].attention.temperature == 1).all()


# Images of any size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_size, attention_type", [*((2**i, "tssa") for i in range(1, 6)), (4, "xca"), (8, "softmax")])
def test_patch_sizes_and_rectangular_images(patch_size, attention_type):
    model = tiny_model(patch_size=patch_size, attention_type=attention_type).train()
    output = model.tost(images(2, 3, 2 * patch_size, 3 * patch_size))
    assert output.last_hidden_state.shape == (2, 1 + 6, 32) and output.pooler_output.shape == (2, 32)
    assert torch.equal(output.last_hidden_state[:, 0], output.pooler_output)
    model(images(2, 3, 2 * patch_size, 3 * patch_size), labels=torch.tensor([0, 2])).loss.backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.isfinite().all(), name
        # every parameter affects the loss, as convolutions before a BatchNorm have no bias
        assert param.grad.any(), name


# Attention of the baselines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_type", ["xca", "softmax"])
def test_attention_of_the_baselines_equals_its_definition(attention_type):
    module = randomize(tiny_model(attention_type=attention_type).tost.layers[0].attention).double()
    x = images(2, 7, 32).double()
    q, k, v = module.qkv(x).reshape(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)
    if attention_type == "xca":  # each channel is a vector over the tokens
        q, k, v = (y.transpose(-2, -1) for y in (q, k, v))
        q, k, scale = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), module.temperature
    else:
        scale = 1 / math.sqrt(8)
    output = torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v
    output = output.permute(0, 3, 1, 2) if attention_type == "xca" else output.transpose(1, 2)
    torch.testing.assert_close(module(x)[0], module.out_proj(output.reshape(2, 7, 32)))


# Training ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_drop_path_drops_whole_images():
    model = tiny_model(drop_path_rate=0.25).tost
    assert {block.drop_path_rate for block in (*model.layers, *model.class_attention_layers)} == {0.25}
    layer = model.layers[0].train()
    branch = images(4000, 3, 2)
    scale = layer.drop_path(branch) / branch
    is_kept = scale[:, 0, 0] != 0
    # each image is dropped or rescaled as a whole
    torch.testing.assert_close(scale, is_kept.float()[:, None, None].expand_as(scale) / 0.75)
    assert is_kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(layer.eval().drop_path(branch), branch)


@pytest.mark.parametrize("field", ["hidden_dropout", "attention_dropout", "embedding_dropout", "drop_path_rate"])
def test_dropout_acts_in_training_only(field):
    model, plain_model, pixels = tiny_model(**{field: 0.4}), tiny_model(), images()
    assert torch.equal(model(pixels).logits, plain_model(pixels).logits)
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # so that only dropout is random
    assert not torch.equal(model(pixels).logits, model(pixels).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_equal_gradients(reentrant):
    model = tiny_model(drop_path_rate=0.3).train()
    checkpointed, pixels, labels = copy.deepcopy(model), images(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for m in (model, checkpointed):
        torch.manual_seed(3)
        m(pixels, labels=labels).loss.backward()
    # reentrant checkpointing sums the gradients of residual branches in another order
    tolerance = {"rtol": 1e-4, "atol": 1e-7} if reentrant else {"rtol": 0, "atol": 0}
    torch.testing.assert_close([p.grad for p in checkpointed.parameters()], [p.grad for p in model.parameters()], **tolerance)
    assert_same_bits(checkpointed.state_dict(), model.state_dict())  # BatchNorm has counted the batch once


@parametrize_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(attention_type, dtype, tmp_path):
    model, pixels = tiny_model(attention_type=attention_type), images()
    model.save_pretrained(tmp_path)
    expected, temps = model(pixels).logits, [getattr(layer.attention, "temp", None) for layer in model.tost.layers]
    for half_model in (ToSTForImageClassification.from_pretrained(tmp_path, dtype=dtype), copy.deepcopy(model).to(dtype)):
        output = half_model(pixels, output_memberships=True)  # pixels are cast
        assert output.logits.dtype == dtype
        torch.testing.assert_close(output.logits.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
        if attention_type == "tssa":
            # temp stays float32
            assert all(torch.equal(layer.attention.temp, temp) for layer, temp in zip(half_model.tost.layers, temps))
            assert {membership.dtype for membership in output.memberships} == {torch.float32}


def test_loss():
    model, pixels, labels = tiny_model(), images(), torch.tensor([2, 0])
    output = model(pixels, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    assert torch.equal(model(pixels, labels=labels, return_dict=False)[1], output.logits)


CONVERSIONS = {
    "plain": lambda model: model,
    "synchronized": nn.SyncBatchNorm.convert_sync_batchnorm,
    "compiled": lambda model: torch.compile(model, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_frozen_batch_norm_keeps_its_statistics(convert):
    model, pixels = tiny_model(), 5 * images() + 3
    stem = model.tost.embeddings.patch_embeddings.requires_grad_(False)
    initial_state, expected = copy.deepcopy(stem.state_dict()), stem(pixels)
    model = convert(model).train()
    model(pixels).logits.sum().backward()
    assert torch.equal(stem(pixels), expected)
    assert_same_bits(stem.state_dict(), initial_state)
    stem.requires_grad_()  # a call of train() is not needed
    model(pixels)
    assert all(norm.num_batches_tracked == 1 and norm.running_mean.any() for norm in stem.norms)


def explicit_stem(stem, x):
    for i, (convolution, norm) in enumerate(zip(stem.convolutions, stem.norms)):
        x = F.conv2d(stem.act_fn(x) if i else x, convolution.weight, stride=2, padding=1)
        mean, var = norm.running_mean, norm.running_var
        if norm.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        mean, var, weight, bias = (y[:, None, None] for y in (mean, var, norm.weight, norm.bias))
        x = (x - mean) / (var + norm.eps).sqrt() * weight + bias
    return x


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("num_channels", [1, 2, 3])
@pytest.mark.parametrize("patch_size, hidden_size", [(2, 1), (2, 8), (4, 2), (4, 8), (8, 4), (8, 8), (16, 8), (16, 32)])
def test_stem_gradients_do_not_depend_on_the_batch_size(patch_size, hidden_size, num_channels, is_training):
    fields = {"patch_size": patch_size, "hidden_size": hidden_size, "num_channels": num_channels, "num_attention_heads": 1}
    stem = randomize(ToSTVisionModel(tiny_config(**fields))).double().train(is_training).embeddings.patch_embeddings

    def gradients(forward, pixels):
        output = forward(pixels).flatten(2).transpose(1, 2)  # as the embeddings do
        weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).view_as(output[:1])
        return torch.autograd.grad((weights * output.square()).sum(), tuple(stem.parameters()))

    for rows, columns in ((3, 2), (1, 3), (3, 1)):  # patches
        pixels = images(4, num_channels, rows * patch_size, columns * patch_size).double()
        for batch in (pixels, *pixels.split(1)):
            expected = gradients(lambda x: explicit_stem(stem, x), batch)
            torch.testing.assert_close(gradients(stem, batch), expected)


def test_gradient_of_torch_batch_norm_is_wrong_for_some_layouts():
    """Where this fails in every supported torch, the stem's convolutions need no `contiguous`."""
    x, grad = torch.randn(1, 8, 3, 2), torch.randn(1, 3, 2, 8).permute(0, 3, 1, 2).as_strided((1, 8, 3, 2), (8, 1, 16, 8))
    x.requires_grad_()
    output = F.batch_norm(x, torch.zeros(8), torch.ones(8), eps=0)
    assert not torch.allclose(torch.autograd.grad(output, x, grad)[0], grad)


# Recorded outputs ----------------------------------------------------------------------------------------------------


@parametrize_attention
def test_recorded_outputs(attention_type):
    model, pixels = tiny_model(attention_type=attention_type, num_class_attention_layers=3), images(2, 3, 32, 48)
    logits_only = model(pixels)
    assert logits_only.hidden_states is None and logits_only.memberships is None and logits_only.class_attentions is None
    output = model(pixels, output_hidden_states=True, output_memberships=True, output_class_attentions=True)
    assert torch.equal(output.logits, logits_only.logits)
    assert [tuple(x.shape) for x in output.hidden_states] == [(2, 24, 32)] * 3
    assert torch.equal(output.hidden_states[0], model.tost.embeddings(pixels))
    assert [tuple(x.shape) for x in output.class_attentions] == [(2, 4, 1, 25)] * 3
    for weights in output.class_attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))
    assert [tuple(x.shape) for x in output.memberships or ()] == [(2, 4, 24)] * (2 if attention_type == "tssa" else 0)
    for membership in output.memberships or ():
        torch.testing.assert_close(membership.sum(1), torch.ones(2, 24))


@pytest.mark.parametrize("model_class", [ToSTForImageClassification, ToSTBackbone])
@parametrize_attention
def test_output_attentions_warns_once_without_softmax_attention(attention_type, model_class, caplog):
    logging.Logger.warning_once.cache_clear()  # transformers adds the method
    model, pixels = model_class(tiny_config(attention_type=attention_type)), images()
    for _ in range(2):
        assert "attentions" not in model(pixels, output_attentions=True)
    warnings = [record.message for record in caplog.records if "output_memberships=True" in record.message]
    assert len(warnings) == (attention_type != "softmax")


# Compilers -----------------------------------------------------------------------------------------------------------

ONE_BLOCK = {"num_hidden_layers": 1, "num_class_attention_layers": 1, "patch_size": 4}


@pytest.mark.parametrize("attention_type, backend", [("tssa", "aot_eager"), ("xca", "eager"), ("softmax", "eager")])
def test_compile_without_graph_breaks(attention_type, backend):
    model = tiny_model(attention_type=attention_type, **ONE_BLOCK).train()
    eager_model, pixels, labels = copy.deepcopy(model), images(), torch.tensor([0, 2])
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected, output = eager_model(pixels, labels=labels), compiled(pixels, labels=labels)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    expected.loss.backward()
    output.loss.backward()
    for (name, param), compiled_param in zip(eager_model.named_parameters(), model.parameters()):
        torch.testing.assert_close(compiled_param.grad, param.grad, rtol=1e-3, atol=1e-4, msg=name)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_class, config_class",
    [
        *itertools.product((ToSTForImageClassification, ToSTVisionModel), (ToSTConfig,)),
        *itertools.product((ToSTForCausalLM, ToSTModel), (ToSTVisionConfig, GPT2Config)),
    ],
)
def test_models_reject_another_models_config(model_class, config_class):
    with pytest.raises(ValueError, match=f"got a {config_class.__name__}"):
        model_class(config_class())


@pytest.mark.parametrize(
    "pixels, message",
    [
        (None, "Give pixel_values"),
        (torch.zeros(2, 4, 32, 32), "shape"),
        (torch.zeros(3, 32, 32), "shape"),
        (torch.zeros(2, 3, 4, 32), "at least one patch"),
        (torch.zeros(0, 3, 32, 32), "at least one image"),
        (torch.zeros(2, 3, 32, 36), "multiples"),
    ],
)
def test_bad_images(pixels, message):
    model = tiny_model()
    for module in (model, model.tost):
        with pytest.raises(ValueError, match=message):
            module(pixels)


# Saving and pipelines ------------------------------------------------------------------------------------------------

LABELS = {0: "cat", 1: "dog", 2: "tost"}


@pytest.fixture
def saved(tmp_path):
    """A model with the batch statistics of one batch, and the folder that stores it with its image processor."""
    model = tiny_model(id2label=LABELS, label2id={name: index for index, name in LABELS.items()})
    model.train()(images(4, 3, 32, 32))
    model.eval().save_pretrained(tmp_path / "model")
    make_image_processor(model.config).save_pretrained(tmp_path / "model")
    return model, str(tmp_path / "model")


def test_save_load_equality_with_batch_statistics(saved):
    model, folder = saved
    loaded, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is ToSTForImageClassification and not any(info.values())
    assert_same_bits(loaded.state_dict(), model.state_dict())
    norm = loaded.tost.embeddings.patch_embeddings.norms[0]
    assert norm.num_batches_tracked == 1 and norm.running_mean.any()
    pixels = images()
    assert torch.equal(loaded(pixels).logits, model(pixels).logits)
    assert loaded.config.id2label == LABELS and loaded.config.label2id["tost"] == 2


def test_base_model_and_head_of_another_size(saved, tmp_path):
    model, folder = saved
    base_model = AutoModel.from_pretrained(folder)
    assert type(base_model) is ToSTVisionModel
    assert_same_bits(base_model.state_dict(), model.tost.state_dict())
    base_model.save_pretrained(tmp_path / "base")
    for source in (folder, tmp_path / "base"):
        loaded = AutoModelForImageClassification.from_pretrained(source, num_labels=7, ignore_mismatched_sizes=True)
        assert loaded.classifier.weight.shape == (7, 32) and (loaded.classifier.bias == 0).all()
        assert_same_bits(loaded.tost.state_dict(), model.tost.state_dict())


@torch.no_grad()
def test_image_classification_pipeline(saved, tmp_path):
    model, folder = saved
    picture = Image.effect_noise((50, 40), 90).convert("RGB")
    picture.save(tmp_path / "picture.png")
    classify = pipeline("image-classification", model=folder, device="cpu")
    pixels = AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt").pixel_values
    expected = {LABELS[i]: p for i, p in enumerate(model(pixels).logits.softmax(-1)[0].tolist())}
    answers = classify([picture, str(tmp_path / "picture.png")], top_k=3, batch_size=2)
    for answer in answers:
        assert {entry["label"]: entry["score"] for entry in answer} == pytest.approx(expected, rel=1e-5)
    assert len(answers) == 2 and answers[0][0]["label"] == max(expected, key=expected.get)
