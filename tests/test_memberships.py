"""examples/research/memberships.py: agreement of memberships with clusters of color and position on photographs."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.append(str(Path(__file__).parents[1] / "examples/benchmarks"))

import run as runner  # isort: skip  (adds the folders of the other modules to sys.path)

import memberships
from PIL import Image
from records import read_records

from tost_hf import ToSTForImageClassification, ToSTVisionConfig
from tost_hf.image_processing import save_image_processor


def test_explained_variance():
    clusters = torch.tensor([0, 0, 1, 1, 3, 3])  # cluster 2 is empty
    between_clusters = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.9, 0.9], dtype=torch.float64)
    within_clusters = torch.tensor([0.1, 0.3, 0.1, 0.3, 0.1, 0.3], dtype=torch.float64)
    constant = torch.full((6,), 0.25, dtype=torch.float64)
    combined = 2 * between_clusters + within_clusters  # variances of 4 * 0.32 / 3 and 0.01 add up
    maps = torch.stack([between_clusters, within_clusters, constant, combined])[None]
    expected = torch.tensor([[1, 0, 0, (1.28 / 3) / (1.28 / 3 + 0.01)]], dtype=torch.float64)
    torch.testing.assert_close(memberships.explained_variance(maps, clusters), expected)


def test_photographs_of_a_new_model(tmp_path):
    torch.manual_seed(0)
    config = ToSTVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, patch_size=4, image_size=16)
    ToSTForImageClassification(config).save_pretrained(tmp_path / "model")
    save_image_processor(config, tmp_path / "model")
    picture, results = tmp_path / "picture.png", tmp_path / "results"
    command = ["--model", str(tmp_path / "model"), "--seeds", "0", "--picture", str(picture)]
    runner.main(["memberships", *command, "--results", str(results)])
    assert {"cat", "coffee", "rocket", "china", "flower"} == {file.stem for file in memberships.list_photos()}
    with Image.open(picture) as image:
        assert image.width > 300 and image.height > 300
    records = read_records(results / "memberships.csv")
    values = {(record["model"], record["metric"]): float(record["value"]) for record in records}
    metrics = [f"explained variance, layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1, 2, 3)]
    kinds = ("own", "shuffled", "another photograph's")
    metrics += [f"mutual information, {kind}, layer {layer}" for kind in kinds for layer in (0, 1)]
    assert set(values) == {(state, metric) for state in ("trained", "untrained") for metric in metrics}
    assert all(record["context"] == "256" and record["batch"] == "5" for record in records)
    for metric in metrics:  # the model was initialized with seed 0, too
        assert values["untrained", metric] == pytest.approx(values["trained", metric], abs=1e-6)
    assert values["trained", metrics[0]] > 0
