# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Agreement of memberships with k-means clusters of color and place on photographs, trained and untrained.

    python examples/benchmarks/run.py memberships --model model_cards/trained/tost-cifar10-3m

The photographs of examples/photos and scikit-learn's two are cropped to squares and resized to four times the side that the
model was trained on. The patches of each are clustered by k-means on color and place, with as many clusters as a layer has
heads, and compared with

- *layers*: each patch's strongest head, by adjusted mutual information (`membership_clusters_score`), beside two controls: the
  memberships shuffled over the patches, and those of the next photograph, which agree by place alone;
- *heads*: each head's membership, by the fraction of its variance over the patches that is between clusters.

The same is measured for untrained models of the same configuration, one per seed. --picture plots the first photographs, their
clusters, and the memberships of the heads that agree most.
"""

from pathlib import Path

import sklearn.datasets
import torch
from matplotlib.figure import Figure
from observations import mutual_information
from PIL import Image
from registry import benchmark
from training import Results
from transformers import AutoModelForImageClassification, PreTrainedModel, ViTImageProcessorPil, set_seed

from tost_hf import ToSTForImageClassification
from tost_hf.interpret import membership_maps, trace_model
from tost_hf.interpret.plots import scale_limit
from tost_hf.interpret.quantities import cluster_patches


PHOTOS = Path(__file__).resolve().parents[1] / "photos"
NUM_PLOTTED_PHOTOS = NUM_PLOTTED_HEADS = 3
SCALE = 4  # times the side that the model was trained on
TASK = "photographs"


def list_photos() -> list[Path]:
    """Photographs that may be redistributed: those of examples/photos and scikit-learn's two (CC BY 2.0)."""
    return [*sorted(PHOTOS.glob("*.jpg")), *sorted(Path(sklearn.datasets.__file__).with_name("images").glob("*.jpg"))]


def load_photos(files: list[Path], processor: ViTImageProcessorPil, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Square crops: `pixel_values` (B, 3, side, side), and images to plot (B, side, side, 3) from 0 to 1."""
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    images = [Image.open(file).convert("RGB") for file in files]
    pixels = processor(images, return_tensors="pt", **size)["pixel_values"]
    mean, std = (torch.tensor(x)[:, None, None] for x in (processor.image_mean, processor.image_std))
    return pixels, (pixels * std + mean).clamp(0, 1).permute(0, 2, 3, 1).double()


def explained_variance(maps: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """The fraction of a membership's variance over the patches that is between clusters.

    Args:
        maps: (L, H, T) memberships of one image.
        clusters: (T,) cluster of each patch.

    Returns:
        (L, H), from 0 to 1; 0 for a constant membership.
    """
    one_hot = torch.nn.functional.one_hot(clusters.long()).to(maps)  # (T, clusters)
    counts = one_hot.sum(0).clamp_min(1)
    centered = maps - maps.mean(-1, keepdim=True)
    variance_between = ((centered @ one_hot) ** 2 / counts).sum(-1)
    return variance_between / (centered**2).sum(-1).clamp_min(1e-30)


def measure(model: PreTrainedModel, pixels: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics by layer and head, means over photographs, and the explained variance (L, H)."""
    metrics = mutual_information(model, pixels, "photograph")
    trace = trace_model(model, pixel_values=pixels)
    assert trace.grid is not None  # every image has a grid
    clusters = cluster_patches(pixels, trace.grid, trace.memberships.shape[2])
    explained = torch.stack([explained_variance(maps, labels) for maps, labels in zip(trace.memberships, clusters)]).mean(0)
    for layer, heads in enumerate(explained.tolist()):
        metrics |= {f"explained variance, layer {layer}, head {head}": x for head, x in enumerate(heads)}
    return metrics, explained


def plot_heads(model: PreTrainedModel, pixels: torch.Tensor, images: torch.Tensor, explained: torch.Tensor) -> Figure:
    """Plots photographs, clusters and memberships of the heads with the largest `explained` (L, H), one per layer."""
    trace = trace_model(model, pixel_values=pixels)
    assert trace.grid is not None
    clusters = cluster_patches(pixels, trace.grid, explained.shape[1]).unflatten(-1, trace.grid)
    layers = sorted(explained.max(1).values.topk(min(NUM_PLOTTED_HEADS, len(explained))).indices.tolist())
    heads = [(layer, int(explained[layer].argmax())) for layer in layers]
    figure = Figure(figsize=(1.5 * (2 + len(heads)), 1.5 * len(pixels) + 0.3), layout="constrained")
    axes = figure.subplots(len(pixels), 2 + len(heads), squeeze=False)
    limit = scale_limit(trace.memberships, 1 / trace.memberships.shape[2])
    titles = ["photograph", "k-means", *(f"layer {layer}, head {head}" for layer, head in heads)]
    for panels, image, labels, maps in zip(axes, images, clusters, membership_maps(trace)):
        panels[0].imshow(image.numpy())
        panels[1].imshow(labels.numpy(), cmap="tab10", vmax=9)
        for axis, (layer, head) in zip(panels[2:], heads):
            axis.imshow(maps[layer, head].numpy(), cmap="viridis", vmin=0, vmax=limit)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=9)
    return figure


def add_arguments(parser) -> None:
    parser.add_argument("--model", required=True, help="the folder of a vision model with TSSA")
    parser.add_argument("--picture", type=Path, help="a PNG file for a plot of the heads that agree most")


@benchmark("memberships", __doc__, add_arguments, trains=True, file="memberships")
def run(args, results: Results) -> None:
    files = list_photos()
    model = AutoModelForImageClassification.from_pretrained(args.model, dtype=torch.float32).eval()
    side = SCALE * model.config.image_size
    pixels, images = load_photos(files, ViTImageProcessorPil.from_pretrained(args.model), side)
    models = {("trained", None): model}
    for seed in args.seeds:
        set_seed(seed)
        models["untrained", seed] = ToSTForImageClassification(model.config).eval()

    patches = (side // model.config.patch_size) ** 2
    for (state, seed), network in models.items():
        metrics, explained = measure(network, pixels)
        results.add(metrics, task=TASK, model=state, network=network, steps=None, batch=len(files), context=patches, seed=seed)
        if args.picture and state == "trained":
            plot_heads(network, pixels[:NUM_PLOTTED_PHOTOS], images, explained).savefig(args.picture, dpi=100)
    results.print_means()
