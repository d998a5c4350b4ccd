"""examples/research/memberships.py: agreement of memberships with clusters and with outlines of objects on photographs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


sys.path.append(str(Path(__file__).parents[1] / "examples/benchmarks"))

import run as runner  # isort: skip  (adds the folders of the other modules to sys.path)

import memberships
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw
from records import read_records

from tost_hf import ToSTForImageClassification, ToSTVisionConfig
from tost_hf.image_processing import save_image_processor


SIDE, SQUARE = 32, [[0, 0], [15, 0], [15, 31], [0, 31]]  # the left half


@pytest.fixture
def photographs(tmp_path) -> tuple[Path, Path]:
    """Four photographs of a red or green square on blue, and their outlines."""
    images = []
    for color in ("red", "green", "red", "green"):
        image = Image.new("RGB", (SIDE, SIDE), "blue")
        ImageDraw.Draw(image).polygon([tuple(corner) for corner in SQUARE], fill=color)
        images.append(image)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["red", "green"])})
    file, masks = tmp_path / "photographs.parquet", tmp_path / "masks.json"
    Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, features=features).to_parquet(file)
    outlines = [{"index": i, "label": ("red", "green")[i % 2], "polygons": [SQUARE]} for i in range(4)]
    masks.write_text(json.dumps({"size": SIDE, "masks": outlines}))
    return file, masks


def test_photographs_and_their_outlines(photographs):
    file, masks = photographs
    pixels, objects, labels = memberships.load_photographs(str(file), masks, 16)
    assert pixels.shape == (4, 3, 16, 16) and labels == ["red", "green", "red", "green"]
    assert objects[..., :16].all() and not objects[..., 16:].any()
    outlines = json.loads(masks.read_text())
    outlines["masks"][1]["label"] = "red"
    masks.write_text(json.dumps(outlines))
    with pytest.raises(ValueError, match=r"Photograph 1 of .* is 'green'; masks\.json outlines 'red'"):
        memberships.load_photographs(str(file), masks, 16)


def test_outlines_of_the_repository():
    """Two of each class, each of 5 to 70 % of the picture."""
    outlines = json.loads(memberships.MASKS.read_text())
    labels = [outline["label"] for outline in outlines["masks"]]
    assert len(labels) == 20 and {labels.count(label) for label in labels} == {2}
    for outline in outlines["masks"]:
        assert 0.05 < memberships.draw_mask(outline["polygons"], outlines["size"]).mean() < 0.7


def test_agreement_with_an_object():
    is_object = torch.tensor([[True, True, False, False]] * 4)
    follows, avoids = torch.tensor([0.9, 0.8, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.8, 0.9])
    undecided = torch.tensor([0.5, 0.4, 0.5, 0.4])
    layers = [torch.stack([follows, avoids]), torch.stack([undecided, 1 - undecided])]
    maps = torch.stack(layers).double().expand(4, -1, -1, -1)  # (B, L, H, T)
    metrics = memberships.object_agreement(maps, is_object)
    assert metrics["object, own, layer 0"] == 1 and metrics["object, own, layer 1"] < 0.1
    assert [metrics[f"head, layer 0, head {head}"] for head in (0, 1)] == [1, 0]
    assert metrics["head, layer 1, head 0"] == 0.5
    assert metrics["chosen head, layer 0"] == 1 and metrics["chosen head, layer 1"] == 0.5


def test_head_is_chosen_on_other_photographs():
    """Not on those on which it is measured: a head that is right by chance on half of them has no advantage."""
    areas = torch.tensor([[1.0, 0.2], [0.5, 0.2], [1.0, 0.2], [0.5, 0.2]], dtype=torch.float64)
    # on the even photographs head 0 is chosen, measured at 0.5; on the odd ones head 1, which follows the background
    assert memberships._area_of_chosen_head(areas) == pytest.approx((0.5 + 0.8) / 2)


def test_evidence_of_the_class():
    """Of a model that sees one patch only: the patches of the head that leads there are the evidence."""
    replaced = set()

    def model(pixel_values):
        replaced.add(float((pixel_values == 0).double().mean()))
        score = 10 * pixel_values[:, 0, 0, 0]
        return SimpleNamespace(logits=torch.stack([score, torch.zeros_like(score)], -1))

    model.config = ToSTVisionConfig(patch_size=4, label2id={"red": 0, "green": 1}, id2label={0: "red", 1: "green"})
    maps = torch.full((2, 1, 2, 4), 0.1, dtype=torch.float64)
    maps[:, 0, 0, :1] = maps[:, 0, 1, 1:] = 0.9  # head 0 leads in the first patch
    is_object = torch.tensor([[True, False, False, False]] * 2)
    metrics = memberships.class_evidence(model, torch.ones(2, 3, 8, 8), maps, is_object, ["red", "red"])
    assert metrics["class, whole photograph"] > 0.99
    assert metrics["class, without the head's patches, layer 0"] == pytest.approx(0.5)
    assert metrics["class, replaced patches, layer 0"] == 0.25
    assert 0.6 < metrics["class, without random patches, layer 0"] < 0.99
    assert 0 <= metrics["class, standard error of the difference, layer 0"] < 0.2
    assert replaced == {0, 0.25}


def test_measurements_of_a_model(tmp_path, photographs):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "image_size": 16}
    config = ToSTVisionConfig(**sizes, label2id={"red": 0, "green": 1}, id2label={0: "red", 1: "green"})
    ToSTForImageClassification(config).save_pretrained(tmp_path / "model")
    save_image_processor(config, tmp_path / "model")
    picture, results = tmp_path / "picture.png", tmp_path / "results"
    file, masks = photographs
    command = ["memberships", "--photographs", str(file), "--masks", str(masks), "--models", str(tmp_path / "model")]
    command += ["--image_size", "16", "--seeds", "0", "--picture", str(picture), "--layer", "1"]
    runner.main([*command, "--results", str(results)])
    with Image.open(picture) as image:
        assert image.width == 640 and image.height > 400
    records = read_records(results / "memberships.csv")
    values = {(record["model"], record["metric"]): float(record["value"]) for record in records}
    shared = [f"head, layer {layer}, head {head}" for layer in (0, 1) for head in range(4)]
    names = [f"mutual information, {kind}" for kind in ("own", "shuffled", "another photograph's")]
    names += ["object, own", "object, another photograph's", "chosen head"]
    names.append("class attention")
    shared += [f"{name}, layer {layer}" for name in names for layer in (0, 1)]
    evidence = ("without the head's patches", "without random patches", "standard error of the difference", "replaced patches")
    own = ["class, whole photograph", *(f"class, {name}, layer {layer}" for name in evidence for layer in (0, 1))]
    assert set(values) == {(model, name) for model in ("model", "untrained") for name in shared} | {("model", x) for x in own}
    assert all(record["context"] == "16" and record["batch"] == "4" for record in records)
    for name in shared:  # the model was initialized with seed 0, too
        assert values["untrained", name] == pytest.approx(values["model", name], abs=1e-6)
