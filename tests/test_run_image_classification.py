"""run_image_classification.py and digits.py: images, labels, the head, resuming; called here and launched as by users."""

import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import run_image_classification as script
import torch
from classification import load_classifier
from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset
from image_runs import NAMES, TINY, digit_pictures, load_processor, results, tiny_teacher, tiny_vision_model
from PIL import Image as PILImage
from safetensors.torch import load_file
from scripts import EXAMPLES, environment, launch, losses
from transformers import AutoConfig, AutoModelForImageClassification, EvalPrediction, pipeline


sys.path.append(str(EXAMPLES / "research"))

import ablations

from tost_hf import ToSTVisionConfig
from tost_hf.image_processing import make_image_processor


SCRIPT = EXAMPLES / "run_image_classification.py"
MEAN = [0.5, 0.5, 0.5]
TRAINED_MODELS = EXAMPLES.parent / "model_cards/trained"
TRAINED = [path.parent.name for path in TRAINED_MODELS.glob("*/preprocessor_config.json")]


# run_image_classification.py, in this process ------------------------------------------------------------------------


def test_training_evaluation_and_pipeline(tmp_path, digit_folder, image_args):
    """With the whole pre-training recipe, for more than one epoch; checks every saved model and processor."""
    script.main(image_args(max_steps=14, do_eval=True, save_strategy="steps", save_steps=7, ema_decay=0.5))
    out = tmp_path / "out"
    assert len(losses(out)) == 14
    metrics = results(out)
    assert {"eval_accuracy", "eval_ema_accuracy", "eval_ema_loss"} <= set(metrics)
    assert metrics["eval_samples"] == 30
    for folder in (out, out / "ema", out / "checkpoint-7", out / "checkpoint-7/ema"):
        model = AutoModelForImageClassification.from_pretrained(folder)
        assert list(model.config.id2label.values()) == sorted(NAMES) and model.config.image_size == 16
        processor = load_processor(folder)
        assert processor.do_center_crop and dict(processor.crop_size) == {"height": 16, "width": 16}

    pictures = sorted((digit_folder / "validation").rglob("*.png"))
    classify = pipeline("image-classification", model=str(out))
    guesses = [guess[0]["label"] for guess in classify([str(picture) for picture in pictures])]
    is_correct = [guess == picture.parent.name for guess, picture in zip(guesses, pictures)]
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(is_correct))

    changes = {"config_name": None, "config_overrides": None, "train_dir": None, "do_train": None, "do_eval": True}
    script.main(image_args(model_name_or_path=out, output_dir=tmp_path / "again", ema_decay=0, **changes))
    assert results(tmp_path / "again")["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_finetuning_with_the_ablations_of_the_paper(tmp_path, image_args, digit_folder):
    """On a dataset loaded by name, with images that are resized without cropping."""
    changes = {"train_dir": None, "validation_dir": None, "dataset_name": digit_folder, "max_steps": 1, "do_eval": True}
    changes["config_overrides"] = f"{TINY},mlp_type=ista,normalize_scores=false"
    with pytest.raises(ValueError, match=r"mlp_type='ista'.*examples/research/ablations\.py"):
        script.main(image_args("image_finetuning", **changes))
    script.main(image_args("image_finetuning", **changes), ablations.ModelArguments)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    fields = config.model_type, config.mlp_type, config.normalize_scores
    assert fields == (ablations.ToSTVisionAblationConfig.model_type, "ista", False)
    processor = load_processor(tmp_path / "out")
    assert not processor.do_center_crop and dict(processor.size) == {"height": 16, "width": 16}
    assert not (tmp_path / "out/ema").exists() and "eval_ema_accuracy" not in results(tmp_path / "out")
    assert results(tmp_path / "out")["eval_loss"] < 10
    assert (tmp_path / "out/README.md").exists() and len(load_dataset(str(digit_folder))["train"]) == 96


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_at_another_size(tmp_path, image_args, name, caplog):
    """Which the log names, beside the size of the images."""
    caplog.set_level("INFO", "run_image_classification")
    changes = {"config_name": None, "config_overrides": None, "model_name_or_path": TRAINED_MODELS / name, "dtype": "float32"}
    script.main(image_args("image_finetuning", **changes, image_size=64, max_steps=1, do_eval=True))
    assert "Images, the first of 8 x 8 pixels, are resized to 64 x 64 (--image_size)." in caplog.text
    assert AutoConfig.from_pretrained(tmp_path / "out").image_size == 64
    assert dict(load_processor(tmp_path / "out").size) == {"height": 64, "width": 64}


def test_no_line_on_images_of_the_models_size(tmp_path, image_args, caplog):
    caplog.set_level("INFO", "run_image_classification")
    script.main(image_args(image_size=8, max_steps=1))
    assert "resized" not in caplog.text


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("names", [["zero", "one", "two"], ["cat", "dog", "owl"], ["cat", "dog"]])
def test_head_matches_the_labels(tmp_path, names, has_head, caplog):
    """The head is reused for the same labels in the same order, replaced for any others, and added to a bare base model."""
    caplog.set_level("INFO", "scripting")
    old = tiny_vision_model(id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)})
    (old if has_head else old.tost).save_pretrained(tmp_path)
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    new = load_classifier(AutoModelForImageClassification, args, script.load_config(args), names, trains=True)
    assert new.config.id2label == dict(enumerate(names)) and new.config.label2id == {n: i for i, n in enumerate(names)}
    assert new.classifier.weight.shape == (len(names), 32) and new.num_labels == len(names)
    is_reused = names == NAMES
    assert torch.equal(new.classifier.weight, old.classifier.weight) == (is_reused and has_head)
    assert ("its classifier is replaced" in caplog.text) == (not is_reused)
    for name, value in new.tost.state_dict().items():
        assert torch.equal(value, old.tost.state_dict()[name]), name


def test_evaluation_keeps_the_head(tmp_path, digit_folder, image_args):
    """On images that lack a class or number the classes otherwise; other classes are an error, and a missing head is."""
    names = NAMES[::-1]
    model = tiny_vision_model(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    model.save_pretrained(tmp_path / "model")
    make_image_processor(model.config).save_pretrained(tmp_path / "model")
    shutil.copytree(digit_folder / "validation", tmp_path / "some", ignore=shutil.ignore_patterns("one"))
    labels = [number for _, number in digit_pictures(30)]
    file = write_parquet(tmp_path / "x.parquet", labels, ClassLabel(names=NAMES), tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path / "model"))
    changes = {"config_name": None, "config_overrides": None, "image_size": None}
    changes |= {"model_name_or_path": tmp_path / "model", "do_train": None, "do_eval": True, "train_dir": None, "ema_decay": 0}
    pictures = {str(picture): picture.parent.name for picture in (tmp_path / "some").rglob("*.png")}
    pairs = [(guess[0]["label"], name) for guess, name in zip(classify(list(pictures)), pictures.values())]
    script.main(image_args(**changes, validation_dir=tmp_path / "some", output_dir=tmp_path / "some-classes"))
    assert results(tmp_path / "some-classes")["eval_accuracy"] == pytest.approx(
        np.mean([guess == name for guess, name in pairs])
    )

    guesses = [guess[0]["label"] for guess in classify([picture.convert("RGB") for picture, _ in digit_pictures(30)])]
    options = {"validation_dir": None, "validation_file": file, "label_column_name": "fine", "output_dir": tmp_path / "order"}
    script.main(image_args(**changes | options))
    expected = np.mean([guess == NAMES[label] for guess, label in zip(guesses, labels)])
    assert results(tmp_path / "order")["eval_accuracy"] == pytest.approx(expected)

    (tmp_path / "some/two").rename(tmp_path / "some/three")
    with pytest.raises(ValueError, match="the label 'three', which is none of the 3 classes two, one, zero"):
        script.main(image_args(**changes, validation_dir=tmp_path / "some"))
    model.tost.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"lacks classifier\.(weight|bias), classifier\.(bias|weight), 2 in all"):
        script.main(image_args(**changes, validation_dir=digit_folder / "validation"))


@pytest.mark.parametrize("num_classes", [3, 10, 11])
def test_top5_accuracy_of_more_than_ten_classes(num_classes):
    """Labels of the last classes, whose ranks from the end are known."""
    logits = torch.arange(num_classes).float().repeat(num_classes, 1)  # class K - 1 is the most likely one
    predictions = script.preprocess_logits_for_metrics(logits, None)
    metrics = script.compute_metrics(EvalPrediction(predictions.numpy(), np.arange(num_classes)))
    assert metrics == {"accuracy": 1 / num_classes} | ({"top5_accuracy": 5 / 11} if num_classes == 11 else {})


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_finetuning_of_bfloat16_weights(tmp_path, image_args, caplog, dtype):
    """They are trained as stored, with a warning, unless --dtype says otherwise."""
    tiny_vision_model().to(torch.bfloat16).save_pretrained(tmp_path / "old")
    changes = {"config_name": None, "config_overrides": None, "model_name_or_path": tmp_path / "old", "max_steps": 1}
    script.main(image_args(dtype=dtype, ema_decay=0, **changes))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == (torch.bfloat16 if dtype is None else torch.float32)
    assert ("train them with --dtype float32" in caplog.text) == (dtype is None)


def test_normalization_of_a_pretrained_model_is_reused(tmp_path):
    tiny_vision_model().save_pretrained(tmp_path)
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    assert script.load_processor(args, script.load_config(args)).image_mean[0] == 0.485
    processor = make_image_processor(16)
    processor.image_mean = MEAN
    processor.save_pretrained(tmp_path)
    assert script.load_processor(args, script.load_config(args)).image_mean[0] == 0.5


def test_models_with_one_input_channel(digit_folder):
    """They cannot be trained; evaluate_image_classification.py supports them."""
    args = script.ModelArguments(config_name="tost-vision-tiny-patch16", config_overrides="num_channels=1")
    with pytest.raises(ValueError, match="channels"):
        script.load_config(args)
    example = {"source": "A digit", "image": {"path": str(next(digit_folder.rglob("*.png")))}, "label": 0}
    processor = make_image_processor(ToSTVisionConfig(image_size=16, num_channels=1))
    assert script.EvaluationImages([example], processor)[0]["pixel_values"].shape == (1, 16, 16)


def load_splits(data_args, tmp_path, *requested) -> tuple[dict[str, Dataset], list[str]]:
    args = script.ModelArguments(cache_dir=str(tmp_path / "cache"))
    return script.load_images(args, data_args, 0, requested or ("train", "validation"))


def png(picture: PILImage.Image, file: Path) -> bytes:
    picture.save(file)
    return file.read_bytes()


def write_parquet(file: Path, labels: list, feature, tmp_path) -> str:
    contents = [{"bytes": png(picture, tmp_path / "x.png"), "path": None} for picture, _ in digit_pictures(len(labels))]
    features = Features({"img": Image(), "fine": feature, "other": Value("string")})
    Dataset.from_dict({"img": contents, "fine": labels, "other": ["x"] * len(labels)}, features).to_parquet(str(file))
    return str(file)


@pytest.mark.parametrize("kind", ["folder", "name", "parquet"])
def test_loading_images(tmp_path, digit_folder, kind):
    if kind == "folder":
        data_args = script.DataTrainingArguments(train_dir=str(digit_folder / "train"))
    elif kind == "name":
        data_args = script.DataTrainingArguments(dataset_name=str(digit_folder))
    else:
        file = write_parquet(tmp_path / "x.parquet", [0, 1, 2] * 4, ClassLabel(names=NAMES), tmp_path)
        data_args = script.DataTrainingArguments(train_file=file)
    splits, names = load_splits(data_args, tmp_path)
    assert set(splits) == {"train", "validation"}
    assert splits["train"].column_names == ["image", "source", "label"]
    assert sorted(names) == sorted(NAMES)
    assert set(load_splits(data_args, tmp_path, "train")[0]) == {"train"}
    if kind != "name":  # that one has a validation split
        total = len(splits["train"]) + len(splits["validation"])
        assert len(splits["validation"]) == -(-total * 15 // 100) and total == (96 if kind == "folder" else 12)
    picture = script.read_image(splits["train"][0]["source"], splits["train"][0]["image"])
    assert picture.mode == "RGB" and picture.size == (8, 8)


def test_labels_of_the_splits_are_matched_by_name(tmp_path):
    """String labels become ids; ids of the validation file, which orders the names differently, are mapped."""
    train = write_parquet(tmp_path / "train.parquet", ["two", "one", "zero"], Value("string"), tmp_path)
    validation = write_parquet(tmp_path / "v.parquet", [0, 1, 2], ClassLabel(names=["zero", "one", "two"]), tmp_path)
    columns = {"label_column_name": "fine"}
    splits, names = load_splits(
        script.DataTrainingArguments(train_file=train, validation_file=validation, **columns), tmp_path
    )
    assert names == ["one", "two", "zero"]
    assert splits["train"]["label"][:] == [1, 0, 2] and splits["validation"]["label"][:] == [2, 0, 1]


def test_class_names_for_integer_labels(tmp_path):
    train = write_parquet(tmp_path / "train.parquet", [2, 0, 1], Value("int64"), tmp_path)
    data_args = script.DataTrainingArguments(
        train_file=train, label_column_name="fine", class_names="cat, dog,owl", train_val_split=0
    )
    splits, names = load_splits(data_args, tmp_path, "train")
    assert names == ["cat", "dog", "owl"] and splits["train"]["label"][:] == [2, 0, 1]


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_images_are_read_as_rgb(tmp_path, mode):
    """By `convert_image`, whose tests have all modes; turned as the camera was held; transparent ones are put on white."""
    picture = digit_pictures(1)[0][0].resize((8, 4)).convert(mode)
    if mode == "RGBA":
        picture.putalpha(0)
    exif = PILImage.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture.save(tmp_path / "x.png", exif=exif)
    image = script.read_image("Image 0", {"bytes": (tmp_path / "x.png").read_bytes(), "path": None})
    assert image.mode == "RGB" and image.size == (4, 8)
    expected = np.full((8, 4), 255) if mode == "RGBA" else np.rot90(np.array(picture), -1)
    assert (np.array(image) == expected[..., None]).all()


@pytest.mark.parametrize("kind", ["text", "truncated", "zero", "deep", "empty", "none", "path"])
def test_bad_images(tmp_path, kind):
    content = png(digit_pictures(1)[0][0].resize((64, 64)), tmp_path / "x.png")
    deep = png(PILImage.fromarray(np.full((8, 8), 40_000, np.uint16)), tmp_path / "deep.png")
    header = b"IHDR" + bytes(4) + content[20:29]  # width 0
    (tmp_path / "empty.png").touch()
    value = {
        "text": {"bytes": b"this is no image", "path": "a/b.png"},
        "truncated": {"bytes": content[: len(content) // 2], "path": None},
        "zero": {"bytes": content[:12] + header + zlib.crc32(header).to_bytes(4) + content[33:], "path": None},
        "deep": {"bytes": deep, "path": None},
        "empty": {"bytes": b"", "path": None},
        "none": None,
        "path": {"bytes": None, "path": str(tmp_path / "empty.png")},
    }[kind]
    with pytest.raises(ValueError, match="Image 7") as error_info:
        script.read_image("Image 7 of the train split", value)
    if kind in ("text", "path"):
        assert value["path"] in str(error_info.value)


def test_error_message_names_a_corrupt_image(tmp_path, digit_folder, image_args):
    shutil.copytree(digit_folder / "train", tmp_path / "train")
    corrupt = tmp_path / "train/one/001.png"
    corrupt.write_bytes(corrupt.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"001\.png"):
        script.main(image_args(train_dir=tmp_path / "train", max_steps=12, repeated_augmentation=1))


@pytest.mark.parametrize(
    "labels, feature, changes, message",
    [
        ([0, 1, 7], Value("int64"), {"class_names": "a,b,c"}, "label '7'"),
        ([0, -1, 1], ClassLabel(names=NAMES), {}, "label '-1'"),
        (["one", None, "two"], Value("string"), {}, "Image 1 of the train split has no label"),
        ([0, 1, 2], Value("int64"), {"label_column_name": None}, "no column"),
    ],
)
def test_bad_labels(tmp_path, labels, feature, changes, message):
    file = write_parquet(tmp_path / "x.parquet", labels, feature, tmp_path)
    data_args = script.DataTrainingArguments(**({"train_file": file, "label_column_name": "fine"} | changes))
    with pytest.raises(ValueError, match=message):
        load_splits(data_args, tmp_path)


# Subprocesses -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, image_args):
    """With a teacher, and frozen BatchNorm, because each process would compute statistics of its own half of the batch."""
    common = {"freeze_batch_norm": True, "optim": "sgd", "learning_rate": 0.1, "mixup": 0, "cutmix": 0, "ema_decay": 0.5}
    # an epoch has 12 steps; the evaluation batches are full because Trainer averages over batches
    common |= {"max_steps": 14, "do_eval": True, "lr_scheduler_type": "constant", "max_eval_samples": 16}
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    common |= {"teacher_model_name_or_path": tmp_path / "teacher", "distillation_type": "soft"}
    one = launch(SCRIPT, tmp_path, image_args(output_dir=tmp_path / "one", per_device_train_batch_size=8, **common), 1)
    two = launch(SCRIPT, tmp_path, image_args(output_dir=tmp_path / "two", per_device_train_batch_size=4, **common), 2)
    assert "float32, on cpu" in one and "float32, on 2 processes, cpu" in two
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5, atol=1e-5)
    for file in ("model.safetensors", "ema/model.safetensors"):
        one_weights, two_weights = (load_file(tmp_path / folder / file) for folder in ("one", "two"))
        torch.testing.assert_close(two_weights, one_weights, rtol=1e-5, atol=1e-5)
    for name, value in results(tmp_path / "one").items():
        if name.endswith(("accuracy", "loss", "samples")):
            assert results(tmp_path / "two")[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_digits_example(tmp_path):
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--output_dir", str(tmp_path / "out"), "--max_steps", "4"]
    result = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r"Test accuracy on 360 digits: \d+\.\d%", result.stdout)
    picture = np.array(PILImage.open(tmp_path / "out/membership_maps.png").convert("RGB"))
    assert min(picture.shape[:2]) > 400 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 50  # not blank
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label[7] == "seven"
    guesses = pipeline("image-classification", model=str(tmp_path / "out"))(digit_pictures(1)[0][0])
    assert {guess["label"] for guess in guesses} <= set(model.config.label2id)
