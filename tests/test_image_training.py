"""Training on images: the recipes, ToSTVisionTrainer, the augmentation, run_image_classification.py and digits.py."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import auto_processor_missing, randomize
from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset
from PIL import Image as PILImage
from safetensors.torch import load_file
from scripts import EXAMPLES, command_line, environment, kill_once_written, launch, losses, run_in_background
from sklearn.datasets import load_digits
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    ViTImageProcessorPil,
    pipeline,
)

from tost_hf import ToSTForImageClassification, ToSTVisionConfig, ToSTVisionModel
from tost_hf.image_processing import make_image_processor
from tost_hf.training.augmentation import ImageCollator, RepeatedSampler, TrainingView, draw_seed, mix
from tost_hf.training.metrics import TopKAccuracy
from tost_hf.training.trainer_vision import ToSTVisionTrainer, ToSTVisionTrainingArguments


SCRIPT = EXAMPLES / "run_image_classification.py"
NAMES = ["zero", "one", "two"]
TINY = "patch_size=4,hidden_size=32,num_hidden_layers=2,num_class_attention_layers=1,num_attention_heads=4"
MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


def load_script():
    sys.path.insert(0, str(EXAMPLES))  # it takes a few functions from run_clm.py beside it
    try:
        spec = importlib.util.spec_from_file_location("run_image_classification", SCRIPT)
        module = sys.modules["run_image_classification"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


script = load_script()


def digit_pictures(count: int, skipped: int = 0) -> list[tuple[PILImage.Image, int]]:
    """Real digits, the classes 0 to 2 in turn, as grey pictures of 8 x 8 pixels."""
    digits = load_digits()
    found = [np.flatnonzero(digits.target == number) for number in range(len(NAMES))]
    rows = [(int(found[i % 3][(skipped + i) // 3]), i % 3) for i in range(count)]
    return [(PILImage.fromarray((digits.images[row] * 15.9).astype(np.uint8)), number) for row, number in rows]


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory) -> Path:
    """Image folders "train" of 96 digits and "validation" of 30."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count, skipped in (("train", 96, 0), ("validation", 30, 96)):
        for i, (picture, number) in enumerate(digit_pictures(count, skipped)):
            (folder / split / NAMES[number]).mkdir(parents=True, exist_ok=True)
            picture.save(folder / split / NAMES[number] / f"{i:03}.png")
    return folder


@pytest.fixture
def image_args(digit_folder, tmp_path):
    """Arguments of a small run of the script; keywords replace and add, None leaves out, True is a bare flag."""

    def make(**changes) -> list[str]:
        values = {
            "config_name": "tost-vision-tiny-patch16",
            "config_overrides": TINY,
            "image_size": 16,
            "train_dir": digit_folder / "train",
            "validation_dir": digit_folder / "validation",
            "cache_dir": tmp_path / "cache",
            "output_dir": tmp_path / "out",
            "per_device_train_batch_size": 8,
            "max_steps": 3,
            "learning_rate": 0.001,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": "true",
            "use_cpu": True,
            "do_train": True,
        } | changes
        return command_line(values)

    return make


def load_processor(folder) -> ViTImageProcessorPil:
    if auto_processor_missing:
        return ViTImageProcessorPil.from_pretrained(folder)
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def make_pipeline(folder):
    options = {"image_processor": load_processor(folder)} if auto_processor_missing else {}
    return pipeline("image-classification", model=str(folder), **options)


def results(output_dir) -> dict[str, float]:
    return json.loads((Path(output_dir) / "eval_results.json").read_text())


def tiny_vision_model(**changes) -> ToSTForImageClassification:
    sizes = dict(assignment.split("=") for assignment in TINY.split(","))
    config = ToSTVisionConfig(**{key: int(value) for key, value in sizes.items()}, image_size=16, num_labels=3, **changes)
    return randomize(ToSTForImageClassification(config))


def training_args(tmp_path, **changes) -> ToSTVisionTrainingArguments:
    values = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return ToSTVisionTrainingArguments(**(values | changes))


def digit_examples(count: int = 32) -> list[dict]:
    pixels = make_image_processor(16)([picture for picture, _ in digit_pictures(count)], return_tensors="pt")["pixel_values"]
    return [{"pixel_values": image, "labels": number} for image, (_, number) in zip(pixels, digit_pictures(count))]


def make_trainer(tmp_path, model=None, **changes) -> ToSTVisionTrainer:
    return ToSTVisionTrainer(
        model or tiny_vision_model(),
        training_args(tmp_path, **changes),
        train_dataset=digit_examples(),
        eval_dataset=digit_examples(12),
    )


# The recipes ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_pretraining_recipe(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ToSTVisionTrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.num_train_epochs, args.weight_decay, args.adam_epsilon, args.max_grad_norm) == (400, 0.05, 1e-8, 0)
    assert (args.adam_beta1, args.adam_beta2, args.label_smoothing_factor) == (0.9, 0.999, 0.1)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 2048
    assert args.learning_rate == pytest.approx(5e-4 * 2048 / 512)
    assert (args.mixup, args.cutmix, args.random_erasing, args.repeated_augmentation) == (0.8, 1.0, 0.25, 3)
    assert (args.rand_augment_operations, args.rand_augment_magnitude, args.rand_augment_std) == (2, 27, 1.5)
    assert (args.ema_decay, args.rand_augment_probability, args.bf16) == (0.99996, 0.5, False)
    assert args.get_warmup_steps(4000) == 50  # 5 epochs of 400


def test_the_finetuning_recipe(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ToSTVisionTrainingArguments(str(tmp_path), recipe="finetune", use_cpu=True)
    assert (args.num_train_epochs, args.weight_decay, args.learning_rate) == (200, 0.01, 1e-4)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 256
    assert (args.rand_augment_operations, args.rand_augment_magnitude, args.rand_augment_std) == (2, 14, 0)
    assert (args.rand_augment_probability, args.repeated_augmentation, args.get_warmup_steps(1000)) == (1, 1, 0)
    assert not any((args.mixup, args.cutmix, args.random_erasing, args.label_smoothing_factor, args.ema_decay))
    assert args.lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"per_device_train_batch_size": 64}, {"gradient_accumulation_steps": 1, "learning_rate": 5e-4 * 64 / 512}),
        ({"learning_rate": 0.1}, {"learning_rate": 0.1}),
        ({"ema_decay": 0.0, "mixup": 0.0}, {"ema_decay": 0.0, "mixup": 0.0, "cutmix": 1.0}),
        ({"lr_scheduler_type": "linear"}, {"lr_scheduler_kwargs": None}),
        ({"recipe": "finetune", "weight_decay": 0.3}, {"weight_decay": 0.3, "learning_rate": 1e-4}),
    ],
)
def test_defaults_step_aside(tmp_path, monkeypatch, given, expected):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ToSTVisionTrainingArguments(str(tmp_path), use_cpu=True, **given)
    assert {name: getattr(args, name) for name in expected} == expected


def test_processes_share_the_default_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(ToSTVisionTrainingArguments, "device", torch.device("cpu"))  # do not wait for three other processes
    parser = HfArgumentParser(ToSTVisionTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu"])
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (128, 4)
    assert args.learning_rate == pytest.approx(2e-3)


def test_warmup(tmp_path):
    def steps(**given):
        return ToSTVisionTrainingArguments(str(tmp_path), use_cpu=True, **given).get_warmup_steps(1000)

    assert steps(num_train_epochs=100) == 50
    assert steps(num_train_epochs=10) == 100 == steps(max_steps=1000)  # no more than a tenth
    assert steps(warmup_steps=7) == 7 and steps(warmup_steps=0.25) == 250


@pytest.mark.parametrize("name, value", [("mixup", -0.1), ("ema_decay", 1.5), ("rand_augment_magnitude", 31), ("recipe", "x")])
def test_impossible_arguments(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        ToSTVisionTrainingArguments(str(tmp_path), use_cpu=True, **{name: value})


def test_learning_rate(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=20, learning_rate=None, per_device_train_batch_size=16)
    trainer.create_optimizer_and_scheduler(20)
    rates = []
    for _ in range(20):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    peak = 5e-4 * 16 / 512
    assert rates[0] == pytest.approx(1e-6) and max(rates) == pytest.approx(peak, rel=0.01)
    assert rates[-1] == pytest.approx(1e-5, rel=0.01)


@pytest.mark.parametrize("attention_type, name", [("tssa", "temp"), ("xca", "temperature")])
def test_parameter_groups(tmp_path, attention_type, name):
    model = tiny_vision_model(attention_type=attention_type)
    decayed = make_trainer(tmp_path, model).get_decay_parameter_names(model)
    expected = [
        key for key, value in model.named_parameters() if value.ndim >= 2 and not key.endswith((f".{name}", "class_token"))
    ]
    assert decayed == expected
    assert any(key.endswith(f".{name}") for key, _ in model.named_parameters())


# Trainer -------------------------------------------------------------------------------------------------------------


def test_loss_and_label_smoothing(tmp_path):
    """Training smooths, evaluation does not; shares of classes count as such."""
    model = tiny_vision_model().eval()
    trainer = make_trainer(tmp_path, model, label_smoothing_factor=0.1)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 1])}
    logits = model(batch["pixel_values"]).logits
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(F.cross_entropy(logits, batch["labels"]).item())
    model.train()
    logits = model(batch["pixel_values"]).logits
    smoothed = F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(smoothed.item())
    shares = F.one_hot(batch["labels"], 3) * 0.7 + F.one_hot(batch["labels"].flip(0), 3) * 0.3
    mixed = -((0.9 * shares + 0.1 / 3) * logits.log_softmax(-1)).sum(-1).mean()
    assert trainer.compute_loss(model, batch | {"labels": shares}).item() == pytest.approx(mixed.item(), rel=1e-5)
    assert model.config.problem_type in (None, "single_label_classification")


def test_ema_is_the_average_and_is_evaluated(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.6)
    expected = {}

    def follow(model):
        for name, value in model.state_dict().items():
            expected[name] = (
                value.clone() if name not in expected else torch.lerp(expected[name].double(), value.double(), 0.4)
            )

    step = trainer.ema.update_parameters
    trainer.ema.update_parameters = lambda model: (step(model), follow(model))
    trainer.train()
    for name, value in trainer.ema.module.state_dict().items():
        if value.is_floating_point():  # BatchNorm counts, too
            torch.testing.assert_close(value, expected[name].to(value.dtype), msg=name)

    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    metrics = trainer.evaluate()
    batch = trainer.data_collator([trainer.eval_dataset[i] for i in range(12)])
    with torch.no_grad():
        for prefix, model in (("eval", trainer.model), ("eval_ema", trainer.ema.module)):
            assert metrics[f"{prefix}_loss"] == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-5)
    assert metrics["eval_loss"] != metrics["eval_ema_loss"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_ema_is_saved_and_restored(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.6, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    averaged = trainer.ema.module.state_dict()
    for folder in (tmp_path / "out", tmp_path / "out/checkpoint-4"):
        saved = ToSTForImageClassification.from_pretrained(folder, subfolder="ema").state_dict()
        assert all(torch.equal(value, averaged[name]) for name, value in saved.items())
        assert not torch.equal(load_file(folder / "model.safetensors")["classifier.weight"], saved["classifier.weight"])

    resumed = make_trainer(tmp_path, ema_decay=0.6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    for name, value in resumed.ema.module.state_dict().items():
        assert torch.equal(value, averaged[name]), name

    (tmp_path / "out/checkpoint-2/ema/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no averaged weights"):
        make_trainer(tmp_path, ema_decay=0.6).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))


def test_without_ema_nothing_is_kept(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0)
    trainer.train()
    trainer.save_model()
    assert trainer.ema is None and not (tmp_path / "out/ema").exists() and "eval_ema_loss" not in trainer.evaluate()


def test_frozen_batch_norm(tmp_path):
    for frozen in (False, True):
        model = tiny_vision_model()
        before = {name: value.clone() for name, value in model.named_buffers()}
        make_trainer(tmp_path, model, freeze_batch_norm=frozen).train()
        unchanged = [torch.equal(value, before[name]) for name, value in model.named_buffers()]
        assert len(unchanged) == 6 and all(unchanged) == frozen and any(unchanged) == frozen


def test_gradient_accumulation_equals_a_big_batch(tmp_path):
    def train(**changes):
        trainer = make_trainer(tmp_path, freeze_batch_norm=True, optim="sgd", learning_rate=0.1, **changes)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = train(per_device_train_batch_size=16)
    torch.testing.assert_close(train(gradient_accumulation_steps=2), whole, rtol=1e-5, atol=1e-5)


def test_sync_batch_norm_converts_the_stem(tmp_path, monkeypatch):
    model = tiny_vision_model()
    names = list(model.state_dict())
    trainer = make_trainer(tmp_path, model, sync_batch_norm=True)
    norms = trainer.model.tost.embeddings.patch_embeddings.norms
    assert len(norms) == 2 and all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert list(trainer.model.state_dict()) == names
    trainer.train()  # one process: as BatchNorm
    trainer.save_model()
    loaded = ToSTForImageClassification.from_pretrained(tmp_path / "out")
    assert all(type(norm) is torch.nn.BatchNorm2d for norm in loaded.tost.embeddings.patch_embeddings.norms)

    monkeypatch.setattr(ToSTVisionTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="sync_batch_norm needs an accelerator"):
        make_trainer(tmp_path, sync_batch_norm=True)


# Augmentation --------------------------------------------------------------------------------------------------------


def test_a_view_follows_from_its_seed_alone():
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
    assert stacked.min() >= -2 - 1e-5 and stacked.max() <= 2 + 1e-5  # pixels from 0 to 1, normalised


def test_a_view_without_augmentation_is_a_crop():
    view = TrainingView((8, 8), [0.0] * 3, [1.0] * 3, operations=0, erasing=0, scale=(1.0, 1.0))
    picture = digit_pictures(1)[0][0].convert("RGB")
    whole = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    found = [torch.equal(view(picture, seed), crop) for seed in range(20) for crop in (whole, whole.flip(-1))]
    assert sum(found) == 20 and any(found[::2]) and any(found[1::2])  # flipped or not


def test_repeated_augmentation_shows_an_image_several_times():
    sampler = RepeatedSampler(10, repeats=3, seed=1)
    first = list(sampler)
    assert first == list(sampler) and len(first) == len(sampler) == 10
    assert [len({index for index, _ in first[i : i + 3]}) for i in (0, 3, 6)] == [1, 1, 1]
    assert len({index for index, _ in first}) == 4 and [draw for _, draw in first[:6]] == [0, 1, 2, 0, 1, 2]
    sampler.epoch = 1
    second = list(sampler)
    assert not set(first) & set(second) and {draw for _, draw in second} == {3, 4, 5}
    assert sorted(index for index, _ in RepeatedSampler(10, seed=2)) == list(range(10))
    assert len({draw_seed(seed, index, draw) for seed in range(3) for index in range(3) for draw in range(3)}) == 27


def test_mixup_and_cutmix():
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    for seed in range(20):
        mixed, shares = mix(images, labels, 3, 0.8, 0, np.random.default_rng(seed))
        own = np.random.default_rng(seed).beta(0.8, 0.8)
        torch.testing.assert_close(mixed, (own * images + (1 - own) * images.flip(0)).float())
        torch.testing.assert_close(shares[0], torch.tensor([own, 0, 1 - own]).float())

        mixed, shares = mix(images, labels, 3, 0, 1.0, np.random.default_rng(seed))
        from_other = (mixed != images).any(1)
        assert torch.equal(mixed, torch.where(from_other[:, None], images.flip(0), images))
        assert (from_other == from_other[0]).all()  # one rectangle
        assert shares[0, 2].item() == pytest.approx(from_other[0].float().mean().item(), abs=1e-6)
        torch.testing.assert_close(shares.sum(1), torch.ones(6))


def test_the_collator_mixes_training_views_alone():
    items = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 3} for i in range(4)]
    batch = ImageCollator(3, 0.8, 1.0)(items)
    assert torch.equal(batch["labels"], torch.tensor([0, 1, 2, 0]))
    seeded = [item | {"seed": i} for i, item in enumerate(items)]
    one, two = (ImageCollator(3, 0.8, 1.0)(seeded) for _ in range(2))
    assert one["labels"].shape == (4, 3) and torch.equal(one["labels"], two["labels"])
    assert torch.equal(one["pixel_values"], two["pixel_values"]) and set(one) == {"pixel_values", "labels"}


def test_top_k_accuracy():
    counted = TopKAccuracy().compute(predictions=[[5, 7, 9, 1, 2], [3, 1, 0, 2, 8], [1, 2, 3, 4, 5]], references=[5, 0, 9])
    assert counted == {"accuracy": pytest.approx(1 / 3), "top5_accuracy": pytest.approx(2 / 3)}
    metric = TopKAccuracy()  # with fewer classes than five
    metric.add_batch(predictions=[[0, 1], [1, 0]], references=[0, 0])
    assert metric.compute() == {"accuracy": 0.5, "top5_accuracy": 1.0}


# The image processor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, (16, 24)])
@pytest.mark.parametrize("crop", ["center", "squash"])
def test_image_processor_of_any_picture(tmp_path, size, crop):
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


def test_the_two_evaluation_crops():
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, 16:48] = 255  # the centre, as wide as the picture is high
    low, high = ((value - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225] for value in (0, 1))
    center = make_image_processor(ToSTVisionConfig(image_size=32))(picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(center, np.broadcast_to(high[:, None, None], center.shape), rtol=1e-5)
    squash = make_image_processor(32, "squash")(picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(squash[:, 0, 0], low, rtol=1e-5)
    np.testing.assert_allclose(squash[:, 16, 16], high, rtol=1e-5)


def test_impossible_processors():
    with pytest.raises(ValueError, match="crop must be one of center, squash, got 'round'"):
        make_image_processor(32, "round")
    with pytest.raises(ValueError, match="at least 1, got 0 x 0"):
        make_image_processor(0)


# run_image_classification.py, in this process ------------------------------------------------------------------------


def test_from_training_to_the_pipeline(tmp_path, digit_folder, image_args):
    """With the whole pre-training recipe, over an epoch's end, and everything that is left in the folder."""
    script.main(image_args(max_steps=14, do_eval=True, save_strategy="steps", save_steps=7, ema_decay=0.5))
    out = tmp_path / "out"
    assert len(losses(out)) == 14
    measured = results(out)
    assert {"eval_accuracy", "eval_top5_accuracy", "eval_ema_accuracy", "eval_ema_loss"} <= set(measured)
    assert measured["eval_samples"] == 30
    for folder in (out, out / "ema", out / "checkpoint-7", out / "checkpoint-7/ema"):
        model = AutoModelForImageClassification.from_pretrained(folder)
        assert list(model.config.id2label.values()) == sorted(NAMES) and model.config.image_size == 16
        processor = load_processor(folder)
        assert processor.do_center_crop and dict(processor.crop_size) == {"height": 16, "width": 16}

    pictures = sorted((digit_folder / "validation").rglob("*.png"))
    classify = make_pipeline(out)
    guesses = [guess[0]["label"] for guess in classify([str(picture) for picture in pictures])]
    right = [guess == picture.parent.name for guess, picture in zip(guesses, pictures)]
    assert measured["eval_accuracy"] == pytest.approx(np.mean(right))


def test_the_finetuning_crop(tmp_path, image_args):
    script.main(image_args(recipe="finetune", max_steps=1, do_eval=True))
    processor = load_processor(tmp_path / "out")
    assert not processor.do_center_crop and dict(processor.size) == {"height": 16, "width": 16}
    assert not (tmp_path / "out/ema").exists() and "eval_ema_accuracy" not in results(tmp_path / "out")


def test_evaluation_alone(tmp_path, image_args):
    script.main(image_args(max_steps=2, do_eval=True))
    expected = results(tmp_path / "out")
    changes = {"config_name": None, "config_overrides": None, "train_dir": None, "do_train": None, "do_eval": True}
    script.main(image_args(model_name_or_path=tmp_path / "out", output_dir=tmp_path / "again", ema_decay=0, **changes))
    assert results(tmp_path / "again")["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("names", [["zero", "one", "two"], ["cat", "dog", "owl"], ["cat", "dog"]])
def test_the_head_follows_the_labels(tmp_path, names, caplog):
    """It is kept for the same names in the same order, and replaced for others, as many or not."""
    old = tiny_vision_model(id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)})
    old.save_pretrained(tmp_path)
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    new = script.load_model(args, script.load_config(args), names)
    assert new.config.id2label == dict(enumerate(names)) and new.config.label2id == {n: i for i, n in enumerate(names)}
    assert new.classifier.weight.shape == (len(names), 32) and new.num_labels == len(names)
    kept = names == NAMES
    assert torch.equal(new.classifier.weight, old.classifier.weight) == kept
    assert ("its classifier is replaced" in caplog.text) == (not kept)
    for name, value in new.tost.state_dict().items():
        assert torch.equal(value, old.tost.state_dict()[name]), name


def test_a_trunk_alone_can_be_finetuned(tmp_path):
    trunk = tiny_vision_model().tost
    trunk.save_pretrained(tmp_path)
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    model = script.load_model(args, script.load_config(args), ["cat", "dog"])
    assert isinstance(model.tost, ToSTVisionModel) and model.num_labels == 2
    assert torch.equal(model.tost.class_token, trunk.class_token)


def test_the_statistics_of_a_pretrained_model_are_kept(tmp_path):
    tiny_vision_model().save_pretrained(tmp_path)
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    assert script.load_processor(args, script.load_config(args), "finetune").image_mean[0] == 0.485
    processor = make_image_processor(16)
    processor.image_mean = MEAN
    processor.save_pretrained(tmp_path)
    assert script.load_processor(args, script.load_config(args), "finetune").image_mean[0] == 0.5


@pytest.mark.parametrize(
    "name, rate", [("tiny-patch16", 0), ("tiny-24-patch8", 0), ("small-patch8", 0.05), ("medium-patch16", 0.15)]
)
def test_drop_path_of_the_presets(name, rate):
    args = script.ModelArguments(config_name=f"tost-vision-{name}")
    assert script.load_config(args).drop_path_rate == rate and script.load_config(args, "finetune").drop_path_rate == 0
    args.config_overrides = "drop_path_rate=0.3"
    assert script.load_config(args).drop_path_rate == 0.3


def test_config_overrides():
    args = script.ModelArguments(config_name="tost-vision-tiny-patch16", config_overrides="hidden_size=64,patch_size=4")
    config = script.load_config(args)
    assert (config.hidden_size, config.intermediate_size, config.patch_size) == (64, 256, 4)


def rows_of(data_args, tmp_path) -> dict[str, Dataset]:
    return script.load_images(script.ModelArguments(cache_dir=str(tmp_path / "cache")), data_args, 0)


def png(picture: PILImage.Image, file: Path) -> bytes:
    picture.save(file)
    return file.read_bytes()


def write_parquet(file: Path, labels: list, feature, tmp_path) -> str:
    contents = [{"bytes": png(picture, tmp_path / "x.png"), "path": None} for picture, _ in digit_pictures(len(labels))]
    features = Features({"img": Image(), "fine": feature, "other": Value("string")})
    Dataset.from_dict({"img": contents, "fine": labels, "other": ["x"] * len(labels)}, features).to_parquet(str(file))
    return str(file)


@pytest.mark.parametrize("kind", ["folder", "name", "parquet"])
def test_images_from_a_folder_and_from_parquet(tmp_path, digit_folder, kind):
    if kind == "folder":
        data_args = script.DataTrainingArguments(train_dir=str(digit_folder / "train"))
    elif kind == "name":
        data_args = script.DataTrainingArguments(dataset_name=str(digit_folder))
    else:
        file = write_parquet(tmp_path / "x.parquet", [0, 1, 2] * 4, ClassLabel(names=NAMES), tmp_path)
        data_args = script.DataTrainingArguments(train_file=file)
    rows = rows_of(data_args, tmp_path)
    assert set(rows) == {"train", "validation"}
    assert rows["train"].column_names == ["image", "label", "source"]
    assert sorted(rows["train"].features["label"].names) == sorted(NAMES)
    if kind != "name":  # which has its own
        total = len(rows["train"]) + len(rows["validation"])
        assert len(rows["validation"]) == -(-total * 15 // 100) and total == (96 if kind == "folder" else 12)
    picture = script.read_image(rows["train"][0]["source"], rows["train"][0]["image"])
    assert picture.mode == "RGB" and picture.size == (8, 8)


def test_labels_are_matched_by_name(tmp_path):
    """Words become numbers, and files may number the same names differently."""
    train = write_parquet(tmp_path / "train.parquet", ["two", "one", "zero"], Value("string"), tmp_path)
    validation = write_parquet(tmp_path / "v.parquet", [0, 1, 2], ClassLabel(names=["zero", "one", "two"]), tmp_path)
    columns = {"label_column_name": "fine"}
    rows = rows_of(script.DataTrainingArguments(train_file=train, validation_file=validation, **columns), tmp_path)
    assert rows["train"].features["label"].names == ["one", "two", "zero"]
    assert rows["train"]["label"][:] == [1, 0, 2] and rows["validation"]["label"][:] == [2, 0, 1]


def test_names_for_numbers(tmp_path):
    train = write_parquet(tmp_path / "train.parquet", [2, 0, 1], Value("int64"), tmp_path)
    data_args = script.DataTrainingArguments(
        train_file=train, label_column_name="fine", class_names="cat, dog,owl", train_val_split=0
    )
    rows = rows_of(data_args, tmp_path)
    assert rows["train"].features["label"].names == ["cat", "dog", "owl"] and rows["train"]["label"][:] == [2, 0, 1]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_every_kind_of_picture_is_read_as_rgb(tmp_path, mode):
    grey = digit_pictures(1)[0][0]
    rgb = grey.convert("RGB")
    picture = rgb.quantize() if mode == "P" else rgb.convert(mode)  # with a palette of its own colours
    file = tmp_path / ("x.tiff" if mode == "CMYK" else "x.png")
    read = script.read_image("Row 0", {"bytes": png(picture, file), "path": None})
    assert read.mode == "RGB" and read.size == (8, 8)
    if mode in ("L", "P", "RGBA", "LA"):
        assert np.abs(np.array(read)[..., 0].astype(int) - np.array(grey)).max() <= 3


def test_transparent_pictures_are_put_on_white(tmp_path):
    picture = PILImage.new("RGBA", (8, 8), (200, 0, 0, 0))
    read = script.read_image("Row 0", {"bytes": png(picture, tmp_path / "x.png"), "path": None})
    assert np.array(read).min() == 255


@pytest.mark.parametrize("kind", ["text", "cut", "zero", "deep", "empty", "none", "path"])
def test_bad_images(tmp_path, kind):
    content = png(digit_pictures(1)[0][0].resize((64, 64)), tmp_path / "x.png")
    deep = png(PILImage.fromarray(np.full((8, 8), 40_000, np.uint16)), tmp_path / "deep.png")
    header = b"IHDR" + bytes(4) + content[20:29]  # of no width
    (tmp_path / "empty.png").touch()
    stored = {
        "text": {"bytes": b"this is no image", "path": "a/b.png"},
        "cut": {"bytes": content[: len(content) // 2], "path": None},
        "zero": {"bytes": content[:12] + header + zlib.crc32(header).to_bytes(4) + content[33:], "path": None},
        "deep": {"bytes": deep, "path": None},
        "empty": {"bytes": b"", "path": None},
        "none": None,
        "path": {"bytes": None, "path": str(tmp_path / "empty.png")},
    }[kind]
    sentence = "is empty" if kind in ("empty", "none", "path") else "cannot be read as an image"
    with pytest.raises(ValueError, match=rf"Row 7 of the train images .*{sentence}") as caught:
        script.read_image("Row 7 of the train images", stored)
    if kind in ("text", "path"):
        assert stored["path"] in str(caught.value)  # the file is named


def test_a_corrupt_image_stops_training_by_name(tmp_path, digit_folder, image_args):
    shutil.copytree(digit_folder / "train", tmp_path / "train")
    broken = tmp_path / "train/one/001.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"Row \d+ of the train images .*001\.png.* cannot be read as an image"):
        script.main(image_args(train_dir=tmp_path / "train", max_steps=12, repeated_augmentation=1))


@pytest.mark.parametrize(
    "labels, feature, changes, sentence",
    [
        (
            [0, 1, 7],
            Value("int64"),
            {"class_names": "a,b,c"},
            "Row 2 of the train images has the label 7, which is none of the 3",
        ),
        ([0, -1, 1], ClassLabel(names=NAMES), {}, "Row 1 of the train images has the label -1"),
        (["one", None, "two"], Value("string"), {}, "Row 1 of the train images has the label None"),
        ([0, 1, 2], Value("int64"), {}, "The labels are numbers without names: give the names by --class_names"),
        ([0, 1, 2], ClassLabel(names=NAMES), {"label_column_name": "absent"}, "no column 'absent'; choose one of img, fine"),
        ([0, 1, 2], Value("int64"), {"label_column_name": None}, "no column of labels; choose one of img, fine, other by"),
        ([0], ClassLabel(names=NAMES), {}, "a single training image"),
    ],
)
def test_bad_labels(tmp_path, labels, feature, changes, sentence):
    file = write_parquet(tmp_path / "x.parquet", labels, feature, tmp_path)
    data_args = script.DataTrainingArguments(**({"train_file": file, "label_column_name": "fine"} | changes))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rows_of(data_args, tmp_path)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"train_dir": None, "validation_dir": None}, ValueError, "no images to work on"),
        ({"train_dir": "absent"}, FileNotFoundError, "The image folder 'absent' does not exist"),
        ({"train_dir": None, "train_file": "a.csv"}, ValueError, "must end in .parquet"),
        ({"train_dir": None, "train_file": "absent.parquet"}, FileNotFoundError, "'absent.parquet' does not exist"),
        ({"train_dir": None}, ValueError, "There are no train images"),
        ({"validation_dir": None, "train_val_split": 0, "do_eval": True}, ValueError, "There are no validation images"),
        ({"train_val_split": 1}, ValueError, "below 1, got 1"),
        ({"config_name": "tost-vision-huge-patch16"}, ValueError, "There is no preset 'tost-vision-huge-patch16'"),
        ({"config_overrides": "hiden_size=8"}, ValueError, "no use for 'hiden_size=8'"),
        ({"image_size": 18}, ValueError, "The image size 18 must be a multiple of the patch size 4"),
        ({"image_size": 2}, ValueError, "The image size 2 must be a multiple of the patch size 4"),
        ({"image_size": 0}, ValueError, "--image_size must be at least 1"),
        ({"model_name_or_path": "x"}, ValueError, "--config_name is for a model trained from scratch"),
        ({"recipe": "finetune", "mixup": -1}, ValueError, "mixup must be from 0 to 1000, got -1.0"),
        ({"resume_from_checkpoint": "absent"}, FileNotFoundError, "'absent' does not exist"),
        ({"nonsense": 1}, ValueError, "nonsense"),
    ],
)
def test_bad_input(image_args, changes, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        script.main(image_args(**changes))


def test_a_language_model_is_refused(tmp_path, image_args, tiny_model):
    tiny_model.save_pretrained(tmp_path / "language")
    with pytest.raises(ValueError, match="ToSTConfig"):
        script.main(image_args(config_name=None, config_overrides=None, model_name_or_path=tmp_path / "language"))


# Processes of their own ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, image_args):
    """Started by `accelerate launch`; with BatchNorm frozen, as each process would see its own half of a batch."""
    common = {"freeze_batch_norm": True, "optim": "sgd", "learning_rate": 0.1, "mixup": 0, "cutmix": 0, "ema_decay": 0.5}
    # 12 steps an epoch; the images of the evaluation fill its batches, as Trainer averages over batches
    common |= {"max_steps": 14, "do_eval": True, "lr_scheduler_type": "constant", "max_eval_samples": 16}
    one = launch(SCRIPT, tmp_path, image_args(output_dir=tmp_path / "one", per_device_train_batch_size=8, **common), 1)
    two = launch(SCRIPT, tmp_path, image_args(output_dir=tmp_path / "two", per_device_train_batch_size=4, **common), 2)
    assert "process 0 of 1" in one and "process 0 of 2" in two and "process 1 of 2" in two
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5, atol=1e-5)
    for file in ("model.safetensors", "ema/model.safetensors"):
        alone, together = (load_file(tmp_path / folder / file) for folder in ("one", "two"))
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    for name, value in results(tmp_path / "one").items():
        if name.endswith(("accuracy", "loss", "samples")):
            assert results(tmp_path / "two")[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_kill_and_resume_bit_for_bit(tmp_path, image_args):
    """With the whole recipe, dropout, workers, accumulation and epochs' ends on the way; the averaged weights, too."""
    common = {
        "config_overrides": TINY + ",drop_path_rate=0.1,hidden_dropout=0.1,attention_dropout=0.1,embedding_dropout=0.1",
        "per_device_train_batch_size": 5,
        "gradient_accumulation_steps": 2,  # 9.6 steps an epoch
        "max_steps": 30,
        "save_strategy": "steps",
        "save_steps": 5,
        "ema_decay": 0.9,
        "dataloader_num_workers": 1,
    }

    def start(folder, **changes):
        return run_in_background(SCRIPT, tmp_path, image_args(**common, output_dir=folder, **changes))

    assert start(tmp_path / "whole").wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    killed = start(tmp_path / "killed")
    kill_once_written(killed, tmp_path / "killed/checkpoint-15/trainer_state.json", tmp_path / "log.txt")
    assert not (tmp_path / "killed/checkpoint-30").exists()  # it did not get to the end

    first_checkpoint = (tmp_path / "killed/checkpoint-5/trainer_state.json").stat()
    assert start(tmp_path / "killed").wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert len(losses(tmp_path / "whole")) == 30 and losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert (tmp_path / "killed/checkpoint-5/trainer_state.json").stat().st_mtime_ns == first_checkpoint.st_mtime_ns
    for file in ("model.safetensors", "ema/model.safetensors"):
        whole, resumed = (load_file(tmp_path / folder / file) for folder in ("whole", "killed"))
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_digits_example(tmp_path):
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--output_dir", str(tmp_path / "out"), "--max_steps", "4"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Test accuracy on 360 digits: \d+\.\d%", done.stdout)
    picture = np.array(PILImage.open(tmp_path / "out/membership_maps.png").convert("RGB"))
    assert min(picture.shape[:2]) > 400 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 50  # not blank
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label[7] == "seven"
    guesses = make_pipeline(tmp_path / "out")(digit_pictures(1)[0][0])
    assert {guess["label"] for guess in guesses} <= set(model.config.label2id)


def test_hub_cards_name_no_folder(tmp_path, image_args, digit_folder):
    script.main(image_args(train_dir=None, validation_dir=None, dataset_name=digit_folder, max_steps=1))
    assert (tmp_path / "out/README.md").exists() and len(load_dataset(str(digit_folder))["train"]) == 96
