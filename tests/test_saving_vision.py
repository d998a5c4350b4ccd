"""Vision models saved and loaded again: weights, heads, configurations, Auto classes, pipelines."""

import pytest
import torch
from conftest import needs_auto_processor
from PIL import Image
from test_modeling_vision import CLOSE, assert_equal_states, every_attention, images, tiny_model
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)

from tost_hf import (
    ToSTForImageClassification,
    ToSTVisionConfig,
    ToSTVisionModel,
)
from tost_hf.image_processing import make_image_processor


LABELS = {0: "cat", 1: "dog", 2: "tost"}


@pytest.fixture
def saved(tmp_path):
    """A model after a training step, with its processor, and its folder."""
    model = tiny_model(id2label=LABELS, label2id={name: number for number, name in LABELS.items()})
    model.train()(images(4, 3, 32, 32))
    model.eval().save_pretrained(tmp_path / "model")
    make_image_processor(model.config).save_pretrained(tmp_path / "model")
    return model, str(tmp_path / "model")


def test_save_load_equality_with_batch_statistics(saved):
    model, folder = saved
    again, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert type(again) is ToSTForImageClassification and not any(info.values())
    assert_equal_states(again.state_dict(), model.state_dict())
    norm = again.tost.embeddings.patch_embeddings.norms[0]
    assert norm.num_batches_tracked == 1 and norm.running_mean.any()
    pixels = images()
    assert torch.equal(again(pixels).logits, model(pixels).logits)
    assert again.config.id2label == LABELS and again.config.label2id["tost"] == 2


@every_attention
def test_baselines_save_and_load(tmp_path, attention_type):
    model = tiny_model(attention_type=attention_type)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert again.config.attention_type == attention_type
    assert_equal_states(again.state_dict(), model.state_dict())


def test_trunk_and_classifier_share_their_weights(saved, tmp_path):
    model, folder = saved
    trunk = AutoModel.from_pretrained(folder)
    assert type(trunk) is ToSTVisionModel
    assert_equal_states(trunk.state_dict(), model.tost.state_dict())
    trunk.save_pretrained(tmp_path / "trunk")
    again, info = ToSTForImageClassification.from_pretrained(tmp_path / "trunk", num_labels=5, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert_equal_states(again.tost.state_dict(), model.tost.state_dict())


def test_head_is_replaced_when_the_labels_differ(saved):
    model, folder = saved
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForImageClassification.from_pretrained(folder, num_labels=7)
    again = AutoModelForImageClassification.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
    assert again.classifier.weight.shape == (7, 32) and (again.classifier.bias == 0).all()
    assert_equal_states(again.tost.state_dict(), model.tost.state_dict())


def test_config_round_trip(tmp_path):
    config = ToSTVisionConfig.from_preset(
        "tost-vision-tiny-24-patch8", num_labels=11, attention_type="xca", image_size=[64, 32]
    )
    assert config.layer_scale_init_value == 1e-5
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is ToSTVisionConfig
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


@needs_auto_processor
@torch.no_grad()
def test_image_classification_pipeline(saved, tmp_path):
    model, folder = saved
    picture = Image.effect_noise((50, 40), 90).convert("RGB")
    picture.save(tmp_path / "picture.png")
    classify = pipeline("image-classification", model=folder, device="cpu")
    pixels = AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt").pixel_values
    expected = {LABELS[i]: p for i, p in enumerate(model(pixels).logits.softmax(-1)[0].tolist())}
    for source in (picture, str(tmp_path / "picture.png")):
        answer = {entry["label"]: entry["score"] for entry in classify(source, top_k=3)}
        assert answer == pytest.approx(expected, rel=1e-5)
    both = classify([picture, str(tmp_path / "picture.png")], top_k=3, batch_size=2)
    assert len(both) == 2 and both[0] == both[1]
    assert both[0][0]["label"] == max(expected, key=expected.get)


@needs_auto_processor
@torch.no_grad()
def test_image_feature_extraction_pipeline(saved):
    model, folder = saved
    picture = Image.effect_noise((32, 32), 90).convert("RGB")
    extract = pipeline("image-feature-extraction", model=folder, device="cpu")
    features = extract(picture, return_tensors=True)
    pixels = AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt").pixel_values
    assert features.shape == (1, 17, 32)
    torch.testing.assert_close(features, model.tost(pixels).last_hidden_state, **CLOSE)
    pooled = extract(picture, pool=True, return_tensors=True)
    torch.testing.assert_close(pooled, model.tost(pixels).pooler_output, **CLOSE)
