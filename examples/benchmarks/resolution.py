# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What an image costs at 224 to 2,048 pixels a side: ToST-small beside transformers' ViT-small, both with 16-pixel patches.

    python examples/benchmarks/resolution.py

Random weights (they do not change the cost), batch 1, eager, float32, forward only; ViT with PyTorch's scaled dot product
attention, and an `image_size` of its own at every resolution. The two models take turns, with a C library that keeps freed
memory. Prints the median time of a forward pass, its peak memory beyond the loaded model (each measured in a process of its
own, with an ordinary C library), the first size from which on ToST is the faster, and the ratios of times at four times the
tokens: 4 is linear growth, 16 quadratic.
"""

import argparse
import multiprocessing
import os

import torch
from decode import peak_bytes_of
from timing import KEEP_FREED_MEMORY, interleaved_medians, print_header, restart_keeping_freed_memory
from transformers import ViTConfig, ViTModel

from tost_hf import ToSTVisionConfig, ToSTVisionModel


PATCH = 16
MODELS = ("ToST", "ViT")


def build(name: str, side: int):
    """Models of width 384 with 12 layers; ToST has 8 heads, ViT 6, as in their papers."""
    torch.manual_seed(0)
    if name == "ToST":
        return ToSTVisionModel(ToSTVisionConfig.from_preset(f"tost-vision-small-patch{PATCH}", image_size=side)).eval()
    config = ViTConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=side,
        patch_size=PATCH,
        attn_implementation="sdpa",
    )
    return ViTModel(config, add_pooling_layer=False).eval()


@torch.no_grad()
def measure_peak(name: str, side: int, queue) -> None:
    model = build(name, side)
    # what the first pass allocates once; on a small image, as memory that it gives back would be used again unseen
    model(torch.randn(1, 3, 2 * PATCH, 2 * PATCH), interpolate_pos_encoding=True)
    pixels = torch.randn(1, 3, side, side)
    queue.put(peak_bytes_of(lambda: model(pixels)))


def peak_bytes(name: str, side: int) -> int:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure_peak, args=(name, side, queue))
    for variable in KEEP_FREED_MEMORY:
        os.environ.pop(variable)
    process.start()
    os.environ.update(KEEP_FREED_MEMORY)
    peak = queue.get()
    process.join()
    return peak


@torch.no_grad()
def measure_seconds(side: int, repeats: int) -> dict[str, float]:
    pixels = torch.randn(1, 3, side, side)
    models = {name: build(name, side) for name in MODELS}
    return interleaved_medians({name: lambda m=model: lambda: m(pixels) for name, model in models.items()}, repeats, warm_up=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 448, 512, 896, 1024, 2048], help="sides in pixels")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for side in args.sizes:
        if side < PATCH or side % PATCH:
            parser.error(f"a size must be a multiple of the patch size ({PATCH}), got {side}")
    restart_keeping_freed_memory()
    print_header()
    columns = [f"{name} {what}" for what in ("ms", "MiB") for name in MODELS]
    print(f"{'pixels':>6}{'tokens':>8}" + "".join(f"{column:>11}" for column in columns) + f"{'ViT / ToST':>12}", flush=True)
    seconds = {}
    for side in sorted(set(args.sizes)):
        seconds[side] = measure_seconds(side, args.repeats)
        times = [seconds[side][name] * 1e3 for name in MODELS]
        peaks = [peak_bytes(name, side) / 2**20 for name in MODELS]
        cells = "".join(f"{time:11.1f}" for time in times) + "".join(f"{peak:11.0f}" for peak in peaks)
        print(f"{side:6}{(side // PATCH) ** 2:8,}{cells}{times[1] / times[0]:12.2f}", flush=True)
    faster = [side for side in seconds if all(seconds[s]["ToST"] < seconds[s]["ViT"] for s in seconds if s >= side)]
    print(f"ToST is the faster from {min(faster)} pixels on." if faster else "ToST is the faster at no size measured.")
    for side in seconds:
        if 2 * side in seconds:
            growth = ", ".join(f"{name} {seconds[2 * side][name] / seconds[side][name]:.2f}" for name in MODELS)
            print(f"time at {2 * side} / time at {side} pixels, four times the tokens: {growth}")


if __name__ == "__main__":
    main()
