"""Augmentation of images for training, and the image processor for evaluation."""

import json

import numpy as np
import pytest
import torch
from conftest import small_vision_config
from image_runs import digit_pictures, load_processor
from PIL import Image as PILImage
from transformers import ViTImageProcessorPil

from tost_hf import ToSTForImageClassification, ToSTVisionConfig
from tost_hf.image_processing import convert_image, make_image_processor, save_image_processor
from tost_hf.training.augmentation import EpochOrder, ImageCollator, TrainingView, draw_seed, mix
from tost_hf.training.metrics import Accuracy


MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


# Augmentation ---------------------------------------------------------------------------------------------------------


def test_view_depends_on_its_seed_only():
    view = TrainingView((16, 24), MEAN, STD)
    picture = digit_pictures(1)[0][0].convert("RGB")
    state = torch.get_rng_state()
    views = [view(picture, seed) for seed in range(30)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert all(torch.equal(view(picture, seed), views[seed]) for seed in reversed(range(30)))
    assert len({tensor.numpy().tobytes() for tensor in views}) == 30
    assert all(tensor.shape == (3, 16, 24) and tensor.dtype == torch.float32 for tensor in views)
    stacked = torch.stack(views)
    assert stacked.min() >= -2 - 1e-5 and stacked.max() <= 2 + 1e-5  # pixels from 0 to 1, normalized


def test_padded_crop_is_a_window_of_the_reflected_image():
    pixels = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3) % 251
    view = TrainingView((8, 12), [0, 0, 0], [1, 1, 1], operations=0, erasing=0, padding=2)
    padded = torch.from_numpy(np.pad(pixels, ((2, 2), (2, 2), (0, 0)), mode="reflect")).permute(2, 0, 1).float() / 255
    windows = [padded[:, top : top + 8, left : left + 12] for top in range(5) for left in range(5)]
    windows += [window.flip(-1) for window in windows]
    drawn = set()
    for seed in range(400):
        actual = view(PILImage.fromarray(pixels), seed)
        [index] = [i for i, window in enumerate(windows) if torch.equal(actual, window)]
        drawn.add(index)
    assert drawn == set(range(50))
    for padding in (-1, 8):
        with pytest.raises(ValueError, match="padding must be from 0 to 7"):
            TrainingView((8, 12), MEAN, STD, padding=padding)


@pytest.mark.parametrize("size", [(16, 16), (16, 32), (48, 16)])
def test_crops_distort_images_of_any_shape_alike(size):
    """The sides of a crop, read off two gradients, are to those of the view as 3 : 4 to 4 : 3."""
    y, x = np.mgrid[:240, :240]
    picture = PILImage.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    view = TrainingView(size, [0, 0, 0], [1, 1, 1], operations=0, erasing=0, scale=(0.1, 0.2))
    distortions = []
    for seed in range(200):
        horizontal, vertical, _ = view(picture, seed) * 255
        steps = float(horizontal.diff(dim=1).abs().mean()), float(vertical.diff(dim=0).mean())  # pixels per pixel of the view
        distortions.append(steps[0] / steps[1])
    assert min(distortions) == pytest.approx(3 / 4, abs=0.06) and max(distortions) == pytest.approx(4 / 3, abs=0.06)


def test_repeated_augmentation():
    order = EpochOrder(10, repeats=3, seed=1)
    first_epoch = [order[i] for i in range(len(order))]
    assert first_epoch == [order[i] for i in range(len(order))] and len(first_epoch) == 10
    assert [len({index for index, _ in first_epoch[i : i + 3]}) for i in (0, 3, 6)] == [1, 1, 1]
    assert len({index for index, _ in first_epoch}) == 4 and [draw for _, draw in first_epoch[:6]] == [0, 1, 2, 0, 1, 2]
    order.set_epoch(1)
    second_epoch = [order[i] for i in range(len(order))]
    assert not set(first_epoch) & set(second_epoch) and {draw for _, draw in second_epoch} == {3, 4, 5}
    order = EpochOrder(10, seed=2)
    assert sorted(order[i][0] for i in range(10)) == list(range(10))
    assert len({draw_seed(seed, index, draw) for seed in range(3) for index in range(3) for draw in range(3)}) == 27


def test_mixup_and_cutmix():
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    for seed in range(20):
        mixed, soft_labels = mix(images, labels, 3, 0.8, 0, np.random.default_rng(seed))
        weight = np.random.default_rng(seed).beta(0.8, 0.8)
        torch.testing.assert_close(mixed, (weight * images + (1 - weight) * images.flip(0)).float())
        torch.testing.assert_close(soft_labels[0], torch.tensor([weight, 0, 1 - weight]).float())

        mixed, soft_labels = mix(images, labels, 3, 0, 1.0, np.random.default_rng(seed))
        is_from_other = (mixed != images).any(1)
        assert torch.equal(mixed, torch.where(is_from_other[:, None], images.flip(0), images))
        assert (is_from_other == is_from_other[0]).all()  # one rectangle
        assert soft_labels[0, 2].item() == pytest.approx(is_from_other[0].float().mean().item(), abs=1e-6)
        torch.testing.assert_close(soft_labels.sum(1), torch.ones(6))


def test_collator_mixes_training_views_only():
    items = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 3} for i in range(4)]
    batch = ImageCollator(3, 0.8, 1.0)(items)
    assert torch.equal(batch["labels"], torch.tensor([0, 1, 2, 0]))
    seeded_items = [item | {"seed": i} for i, item in enumerate(items)]
    first, second = (ImageCollator(3, 0.8, 1.0)(seeded_items) for _ in range(2))
    assert first["labels"].shape == (4, 3) and torch.equal(first["labels"], second["labels"])
    assert torch.equal(first["pixel_values"], second["pixel_values"]) and set(first) == {"pixel_values", "labels"}


def test_top_k_accuracy():
    accuracies = Accuracy().compute(predictions=[[5, 7, 9, 1, 2], [3, 1, 0, 2, 8], [1, 2, 3, 4, 5]], references=[5, 0, 9])
    assert accuracies == {"accuracy": pytest.approx(1 / 3), "top5_accuracy": pytest.approx(2 / 3)}
    metric = Accuracy()  # with fewer candidates than five
    metric.add_batch(predictions=[[0, 1], [1, 0]], references=[0, 0])
    assert metric.compute() == {"accuracy": 0.5}


# The image processor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, crop", [(16, "center"), (16, "squash"), ((16, 24), None)])
def test_image_processor_accepts_all_modes(tmp_path, size, crop):
    rgb = PILImage.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    rgba = rgb.copy()
    rgba.putalpha(128)
    pictures = [rgb, rgb.convert("L"), rgb.convert("P"), rgba, rgb.convert("1"), rgb.convert("CMYK"), rgb.convert("LA")]
    processor = make_image_processor(size, crop)
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (7, 3, 16, 16 if size == 16 else 24) and pixels.dtype == torch.float32
    processor.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert torch.equal(loaded(pictures, return_tensors="pt")["pixel_values"], pixels)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_image_processor_rejects_modes_that_transformers_misreads(tmp_path, num_channels):
    gray = PILImage.linear_gradient("L")
    processor = make_image_processor(small_vision_config(num_channels=num_channels))
    pixels = processor(gray, return_tensors="pt")["pixel_values"]
    converted = {mode: gray.convert(mode) for mode in ("1", "P", "LA", "RGB", "RGBA", "CMYK")}
    for mode, picture in converted.items():
        if num_channels == 1:
            with pytest.raises(ValueError, match=f'mode {mode}: pass image.convert."L"'):
                processor(picture, return_tensors="pt")
        picture = convert_image(picture, num_channels)
        assert picture.mode == ("L" if num_channels == 1 else "RGB")
        if mode != "1":  # dithered
            assert torch.equal(processor(picture, return_tensors="pt")["pixel_values"], pixels)
    for mode in ("I;16", "I", "F"):
        for read in (processor, lambda picture: convert_image(picture, num_channels)):
            with pytest.raises(ValueError, match=f"8 bits per channel .mode {mode}"):
                read(gray.convert(mode))
    processor.save_pretrained(tmp_path)  # it loads without this package
    loaded = ViTImageProcessorPil.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == "ViTImageProcessor"
    assert torch.equal(loaded(gray, return_tensors="pt")["pixel_values"], pixels)


def test_evaluation_crops():
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, 16:48] = 255  # the center, as wide as the picture is high
    low, high = ((value - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225] for value in (0, 1))
    center = make_image_processor(ToSTVisionConfig(image_size=32))(picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(center, np.broadcast_to(high[:, None, None], center.shape), rtol=1e-5)
    squash = make_image_processor(32, "squash")(picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(squash[:, 0, 0], low, rtol=1e-5)
    np.testing.assert_allclose(squash[:, 16, 16], high, rtol=1e-5)


def test_images_that_are_not_square_are_shown_as_a_whole(tmp_path):
    """One of the model's size is not resized, any other is; by the loaded processor as well."""
    config = ToSTVisionConfig(image_size=(64, 128))
    save_image_processor(config, tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (64, 128, 3), np.uint8)
    normalized = (picture / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    other = PILImage.fromarray(picture).resize((300, 100))
    for processor in (make_image_processor(config), load_processor(tmp_path)):
        pixels = processor(picture, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(pixels, normalized.transpose(2, 0, 1), rtol=1e-5, atol=1e-5)
        assert processor(other)["pixel_values"][0].shape == (3, 64, 128)
    with pytest.raises(ValueError, match="no center crop of 64 x 128 pixels"):
        make_image_processor(config, "center")


def test_saved_processors_of_other_channel_counts(tmp_path, caplog):
    """Of one-channel models that for gray images; for 4 channels none is saved."""
    config = small_vision_config(num_channels=1)
    save_image_processor(config, tmp_path)
    processor, gray = load_processor(tmp_path), PILImage.linear_gradient("L")
    pixels = processor([gray, gray], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 1, 16, 16) and ToSTForImageClassification(config)(pixels).logits.shape == (2, 2)
    with pytest.raises(ValueError, match="must have 3 elements"):
        processor(gray.convert("RGB"))
    save_image_processor(small_vision_config(num_channels=4), tmp_path / "other")
    assert not (tmp_path / "other").exists() and "none for images of 4 channels" in caplog.text
