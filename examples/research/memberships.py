# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Do memberships group a photograph? Their agreement with clusters of color and place, and with outlines drawn by hand.

    python examples/benchmarks/run.py memberships --photographs imagenette224/validation.parquet
    python examples/benchmarks/run.py memberships --photographs imagenette224/validation.parquet --picture heads.png

object_masks.json has the outline of the object in 20 validation photographs of Imagenette, the first two of each class in
which it covers 5 to 70 % of the picture and can be told apart. For the models, and for untrained ones of the first model's
configuration, one per seed, the means over these photographs are measured layer by layer:

- *clusters*: adjusted mutual information of each patch's strongest head with k-means clusters of color and place, as many as
  a layer has heads (`membership_clusters_score`), beside two controls: the memberships shuffled over the patches, and those of
  the next photograph, which agree by place alone;
- *object*: adjusted mutual information of the strongest head with the outline, beside the next photograph's memberships;
- *head*: how well each head's membership tells object from background, as the area under the ROC curve: 0.5 is chance, below
  it the head follows the background. The head that is furthest from 0.5 on every other photograph is measured on the rest.
  Beside it the same of the class token's attention, the mean over its heads;
- *class*: the probability of the right class, also with the patches replaced by the mean color in which the head leads that
  leads in most of the object, and with as many random patches replaced. Not for models of other classes.

--picture draws the photographs of examples/photos and the strongest heads of the first model's --layer.
"""

import json
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from observations import mutual_information
from PIL import Image, ImageDraw, ImageOps
from registry import benchmark
from sklearn.metrics import adjusted_mutual_info_score, roc_auc_score
from training import Results
from transformers import AutoModelForImageClassification, PreTrainedModel, set_seed

from tost_hf import ToSTForImageClassification
from tost_hf.image_processing import make_image_processor, open_image
from tost_hf.interpret import membership_maps, plots, trace_model


ROOT = Path(__file__).resolve().parents[2]
PHOTOS = ROOT / "examples" / "photos"
MODELS = [str(ROOT / "model_cards" / "trained" / name) for name in ("tost-photos-3m", "tost-cifar10-3m")]
MASKS = Path(__file__).with_name("object_masks.json")
RANDOM_DRAWS = 10  # of patches that are replaced
PICTURE_SIDE = 256  # pixels of a photograph of --picture, which the model sees at --image_size
TASK = "photographs"


def load_photographs(file: str, masks: Path, side: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Photographs with outlines.

    Returns:
        `pixel_values` (B, 3, side, side); the masks of the objects (B, 1, size, size), of the outlines' size; the labels.

    Raises:
        ValueError: a photograph has another label than the one that was outlined.
    """
    outlines = json.loads(masks.read_text(encoding="utf-8"))
    data = load_dataset("parquet", data_files=file, split="train")
    names, images, objects, labels = data.features["label"].names, [], [], []
    for outline in outlines["masks"]:
        example = data[outline["index"]]
        label = names[example["label"]]
        if label != outline["label"]:
            raise ValueError(
                f"Photograph {outline['index']} of {file} is {label!r}; {masks.name} outlines {outline['label']!r}."
            )
        images.append(example["image"].convert("RGB"))
        objects.append(draw_mask(outline["polygons"], outlines["size"]))
        labels.append(label)
    return make_image_processor(side)(images, return_tensors="pt")["pixel_values"], torch.stack(objects), labels


def draw_mask(polygons: list, size: int) -> torch.Tensor:
    """The pixels of outlined polygons as (1, size, size): 1 of the object, 0 of the background."""
    mask = Image.new("L", (size, size))
    for polygon in polygons:
        ImageDraw.Draw(mask).polygon([tuple(corner) for corner in polygon], fill=1)
    return torch.from_numpy(np.array(mask, dtype=np.float64))[None]


def object_agreement(memberships: torch.Tensor, is_object: torch.Tensor) -> dict[str, float]:
    """How memberships (B, L, H, T) agree with the patches of the objects (B, T), by layer."""
    metrics = {}
    partitions = {"own": memberships.argmax(2), "another photograph's": memberships.argmax(2).roll(-1, 0)}
    for kind, strongest in partitions.items():
        for layer, labels in enumerate(strongest.unbind(1)):
            scores = [adjusted_mutual_info_score(*pair) for pair in zip(is_object.numpy(), labels.numpy())]
            metrics[f"object, {kind}, layer {layer}"] = sum(scores) / len(scores)
    areas = head_areas(memberships, is_object)
    means = areas.mean(0)
    metrics |= {f"head, layer {i}, head {h}": x for i, row in enumerate(means.tolist()) for h, x in enumerate(row)}
    for layer in range(areas.shape[1]):
        metrics[f"chosen head, layer {layer}"] = _area_of_chosen_head(areas[:, layer])
    return metrics


def head_areas(memberships: torch.Tensor, is_object: torch.Tensor) -> torch.Tensor:
    """The area under the ROC curve of each head's membership as a score of the object: (B, L, H)."""
    areas = [
        [[roc_auc_score(mask, head) for head in layer] for layer in image.numpy()]
        for image, mask in zip(memberships, is_object.numpy())
    ]
    return torch.tensor(areas).double()


def _area_of_chosen_head(areas: torch.Tensor) -> float:
    """Of areas (B, H): that of the head furthest from 0.5 on every other photograph, measured on the rest, and vice versa.

    A head that follows the background counts by its area below 0.5, as 1 minus the area.
    """
    values = []
    for chosen, measured in ((areas[::2], areas[1::2]), (areas[1::2], areas[::2])):
        distance = chosen.mean(0) - 0.5
        head = int(distance.abs().argmax())
        area = measured[:, head].mean()
        values.append(area if distance[head] > 0 else 1 - area)
    return float(sum(values) / 2)


@torch.no_grad()
def class_evidence(model: PreTrainedModel, pixels: torch.Tensor, memberships: torch.Tensor, is_object, labels) -> dict:
    """The probability of the right class with patches replaced, by layer."""
    targets = torch.tensor([model.config.label2id[label] for label in labels])
    rows = pixels.shape[-2] // model.config.patch_size
    generator = torch.Generator().manual_seed(0)

    def probability(replaced: torch.Tensor) -> torch.Tensor:  # (B, T) to (B,)
        mask = replaced.unflatten(-1, (rows, -1))[:, None].float()
        mask = torch.nn.functional.interpolate(mask, size=pixels.shape[-2:])
        logits = model(pixel_values=pixels * (1 - mask)).logits  # 0 is the mean color
        return logits.double().softmax(-1).gather(1, targets[:, None])[:, 0]

    metrics = {"class, whole photograph": float(probability(torch.zeros_like(is_object)).mean())}
    for layer in range(memberships.shape[1]):
        strongest = memberships[:, layer].argmax(1)  # (B, T)
        counts = torch.nn.functional.one_hot(strongest, memberships.shape[2]) * is_object[..., None]
        replaced = strongest == counts.sum(1).argmax(-1, keepdim=True)
        orders = [torch.rand(replaced.shape, generator=generator).argsort(-1) for _ in range(RANDOM_DRAWS)]
        without_random = torch.stack([probability(replaced.gather(1, order)) for order in orders]).mean(0)
        without_head = probability(replaced)
        standard_error = (without_random - without_head).std() / len(pixels) ** 0.5
        values = {
            "without the head's patches": without_head.mean(),
            "without random patches": without_random.mean(),
            "standard error of the difference": standard_error,
            "replaced patches": replaced.double().mean(),
        }
        metrics |= {f"class, {name}, layer {layer}": float(value) for name, value in values.items()}
    return metrics


def measure(model: PreTrainedModel, pixels: torch.Tensor, objects: torch.Tensor, labels: list[str]) -> dict[str, float]:
    """Every metric, by layer; without `labels`, or those of a model of other classes, no evidence of the class."""
    metrics = mutual_information(model, pixels, "photograph")
    trace = trace_model(model, pixel_values=pixels)
    coverage = torch.nn.functional.adaptive_avg_pool2d(objects, trace.grid).flatten(1)
    is_object = coverage > 0.5
    metrics |= object_agreement(trace.memberships, is_object)
    attention = head_areas(trace.class_attentions.mean(2, keepdim=True), is_object).mean((0, 2))
    metrics |= {f"class attention, layer {layer}": area for layer, area in enumerate(attention.tolist())}
    if labels and set(labels) <= set(model.config.label2id):
        metrics |= class_evidence(model, pixels, trace.memberships, is_object, labels)
    return metrics


def draw_photos(model: PreTrainedModel, layer: int, side: int):
    """The figure of the photographs of examples/photos and the strongest heads of their patches."""
    images = [ImageOps.fit(open_image(file), (PICTURE_SIDE,) * 2) for file in sorted(PHOTOS.glob("*.jpg"))]
    trace = trace_model(model, pixel_values=make_image_processor(side)(images, return_tensors="pt")["pixel_values"])
    pictures = torch.stack([torch.from_numpy(np.array(image)) for image in images]) / 255
    return plots.plot_photographs(membership_maps(trace)[:, trace.layers.index(layer)], pictures)


def add_arguments(parser) -> None:
    parser.add_argument("--photographs", required=True, metavar="FILE", help="Imagenette's validation split, a parquet file")
    parser.add_argument("--masks", type=Path, default=MASKS, help="a JSON file of outlines")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders of vision models with TSSA")
    parser.add_argument("--image_size", type=int, default=96, help="side in pixels to which the photographs are resized")
    parser.add_argument("--picture", type=Path, help="a PNG file for a plot of the strongest heads of examples/photos")
    parser.add_argument("--layer", type=int, default=2, help="the layer of the picture")


@benchmark("memberships", __doc__, add_arguments, trains=True, file="memberships")
def run(args, results: Results) -> None:
    pixels, objects, labels = load_photographs(args.photographs, args.masks, args.image_size)
    models = {}
    for folder in args.models:
        model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
        models[Path(folder).name, None] = model
    first = next(iter(models.values()))
    for seed in args.seeds:
        set_seed(seed)
        models["untrained", seed] = ToSTForImageClassification(first.config).eval()
    for (name, seed), model in models.items():
        patches = (args.image_size // model.config.patch_size) ** 2
        metrics = measure(model, pixels, objects, labels if seed is None else [])
        results.add(metrics, task=TASK, model=name, network=model, steps=None, batch=len(pixels), context=patches, seed=seed)
    results.print_means()
    if args.picture is not None:
        draw_photos(first, args.layer, args.image_size).savefig(args.picture, dpi=100)
