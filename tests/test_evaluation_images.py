"""evaluate_image_classification.py: accuracies against single predictions, labels matched by name, ReaL labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomize, small_vision_config
from datasets import ClassLabel, Dataset, Features, Image, Value
from evaluate_image_classification import DataTrainingArguments, load_real_labels, main, match_labels, real_accuracy
from PIL import Image as PILImage

from tost_hf import ToSTForImageClassification
from tost_hf.image_processing import make_image_processor


CLASSES = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kite"]


@pytest.fixture
def pictures(tmp_path) -> Dataset:
    """Thirty pictures whose labels are in another order than the model's, with the model's labels in a column."""
    generator, names = np.random.default_rng(0), CLASSES[::-1]
    features = Features({"image": Image(), "label": ClassLabel(names=names), "model_label": Value("int16")})
    labels = [int(label) for label in generator.integers(0, len(names), 30)]
    images = [PILImage.fromarray(generator.integers(0, 256, (16, 20, 3), dtype=np.uint8)) for _ in labels]
    columns = {"image": images, "label": labels, "model_label": [len(names) - 1 - label for label in labels]}
    return Dataset.from_dict(columns, features)


@pytest.fixture
def classifier(tmp_path) -> tuple[Path, ToSTForImageClassification]:
    config = small_vision_config(id2label=dict(enumerate(CLASSES)), label2id={name: i for i, name in enumerate(CLASSES)})
    model = randomize(ToSTForImageClassification(config)).eval()
    model.save_pretrained(tmp_path / "classifier")
    make_image_processor(config).save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier", model


def evaluate_images(folder, pictures, tmp_path, *options) -> dict[str, dict]:
    pictures.to_parquet(tmp_path / "test.parquet")
    command = ["--model", folder, "--dataset", tmp_path / "test.parquet", "--device", "cpu", "--batch_size", 7]
    main([str(argument) for argument in [*command, "--cache_dir", tmp_path / "cache", *options]])
    return {result["metric_name"]: result for result in json.loads((folder / "evaluation.json").read_text())["results"]}


@pytest.mark.parametrize("column", ["label", "model_label"])
def test_evaluate_image_classification(tmp_path, pictures, classifier, column):
    folder, model = classifier
    processor = make_image_processor(16)
    real_labels = [[], [0, 1], *([number % 7, 5] for number in range(28))]
    (tmp_path / "real.json").write_text(json.dumps(real_labels))
    predictions, ranks = [], []
    for example in pictures:
        with torch.no_grad():
            logits = model(processor(example["image"], return_tensors="pt")["pixel_values"]).logits[0]
        predictions.append(int(logits.argmax()))
        ranks.append(int((logits > logits[example["model_label"]]).sum()))

    options = ["--label_column_name", column, "--real_labels", tmp_path / "real.json"]
    results = evaluate_images(folder, pictures, tmp_path, *options)
    assert results["Accuracy (top-1)"]["metric_value"] == pytest.approx(np.mean([rank < 1 for rank in ranks]))
    assert results["Accuracy (top-5)"]["metric_value"] == pytest.approx(np.mean([rank < 5 for rank in ranks]))
    assert 0 < results["Accuracy (top-5)"]["metric_value"] < 1
    real_result = results["Accuracy (top-1 on ReaL labels)"]
    is_correct = [prediction in labels for prediction, labels in zip(predictions, real_labels) if labels]
    assert (real_result["metric_value"], real_result["num_examples"]) == (pytest.approx(sum(is_correct) / 29), 29)
    assert 0 < real_result["metric_value"] < 1 and real_result["task_type"] == "image-classification"

    results = evaluate_images(folder, pictures, tmp_path, "--label_column_name", column, "--max_examples", 4)
    limited_result = results["Accuracy (top-1, first 4 examples)"]
    assert (limited_result["metric_value"], limited_result["num_examples"]) == (np.mean([rank < 1 for rank in ranks[:4]]), 4)
    assert "Accuracy (top-1)" in results


def test_labels_are_matched_by_name(pictures):
    def match(examples, classes):
        return match_labels(examples, "test", classes, DataTrainingArguments(dataset_name="x"))["label"][:]

    with pytest.raises(ValueError, match="10 classes"):
        match(pictures, CLASSES[1:])
    unnamed = [f"LABEL_{number}" for number in range(13)]
    assert match(pictures, unnamed) == pictures["label"][:]
    assert match(pictures.cast_column("label", ClassLabel(names=unnamed[10::-1])), unnamed) == pictures["model_label"][:]
    assert match(pictures, CLASSES) == pictures["model_label"][:]
    numbers = pictures.remove_columns("label").rename_column("model_label", "label")
    assert match(numbers, CLASSES) == numbers["label"][:]
    assert match(numbers, [str(number) for number in range(11)][::-1]) == [10 - number for number in numbers["label"]]


def test_real_labels_are_matched_by_file_name(tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[10], [], [12, 2], [13], [14]]))

    def load(paths):
        images = [{"bytes": b"", "path": path} for path in paths]
        return load_real_labels(str(file), Dataset.from_dict({"image": images}, Features({"image": Image(decode=False)})))

    names = [f"ILSVRC2012_val_{number:08}_n01440764.JPEG" for number in (4, 1, 3)]
    assert load(names) == [[13], [10], [12, 2]]
    assert load([names[2], names[0]]) == [[12, 2], [13]]
    assert load(["a.png", None, "c.png", "d.png", "e.png"]) == [[10], [], [12, 2], [13], [14]]
    with pytest.raises(ValueError, match="labels of 5 images"):
        load(["a.png", "b.png"])


def test_real_accuracy_ignores_images_without_labels():
    predictions = torch.tensor([[1, 0], [2, 0], [3, 0], [0, 1]])
    assert real_accuracy(predictions, [[1, 5], [], [4], [9, 0]]) == (2 / 3, 3)
