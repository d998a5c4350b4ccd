# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Latency and peak memory on images of 224 to 2,048 pixels per side: ToST-small and ViT-small with 16-pixel patches.

    python examples/benchmarks/run.py resolution
    python examples/benchmarks/run.py resolution --training --preset tiny --sizes 96 224 --batch 32  # training steps

Random weights (they do not change the cost), batch 1, eager, forward only; ViT with PyTorch's scaled dot product attention,
and the `image_size` of every resolution. The models take turns, with a C library that keeps freed memory. Reports the time
of a forward pass and its peak memory beyond the loaded model (on a CPU measured in a separate process).

With --training it is steps on batches of --batch images (forward, backward, Trainer's fused AdamW), of the XCA and softmax
trunks as well, and the shares of a step that the profiler finds for matrix products and convolutions. TSSA's share is the time
of its operator alone, forward and backward, in all layers.
"""

import argparse

import torch
from registry import benchmark
from timing import (
    KEEP_FREED_MEMORY,
    Report,
    dtype_name,
    in_new_process,
    measure,
    peak_bytes,
    ratio,
    spread,
)
from transformers import ViTConfig, ViTModel

from tost_hf import ToSTVisionConfig, ToSTVisionModel, tssa


PATCH = 16
MODELS = ("ToST", "ViT")
TRUNKS = {"ToST": "tssa", "XCA": "xca", "softmax": "softmax"}
PROFILED = {"matrix products": ("aten::mm", "aten::addmm", "aten::bmm"), "convolutions": ("convolution",)}


def build(name: str, side: int, layers: int, device: str, dtype, preset: str = "small"):
    """Models of a preset's width; ToST small has 8 heads and ViT 6, tiny 4 and 3, as in their papers."""
    torch.manual_seed(0)
    size = {"image_size": side, "num_hidden_layers": layers}
    config = ToSTVisionConfig.from_preset(f"tost-vision-{preset}-patch{PATCH}", **size)
    if name in TRUNKS:
        config.attention_type = TRUNKS[name]
        return ToSTVisionModel(config).eval().to(device, dtype)
    config = ViTConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=config.hidden_size // 64,
        intermediate_size=4 * config.hidden_size,
        image_size=side,
        patch_size=PATCH,
        attn_implementation="sdpa",
    )
    return ViTModel(config, add_pooling_layer=False).eval().to(device, dtype)


@torch.no_grad()
def find_peaks(name: str, sides, layers: int, device: str, dtype) -> dict[int, int]:
    """Peak bytes of a forward pass at each size."""
    peaks = {}
    for side in sides:
        model = build(name, side, layers, device, dtype)
        # what the first pass allocates once; on a small image
        small = torch.randn(1, 3, 2 * PATCH, 2 * PATCH, device=device, dtype=dtype)
        model(small, interpolate_pos_encoding=True)
        pixels = torch.randn(1, 3, side, side, device=device, dtype=dtype)
        peaks[side] = peak_bytes(lambda model=model, pixels=pixels: model(pixels), device)
    return peaks


@torch.no_grad()
def find_seconds(side: int, layers: int, repeats: int, device: str, dtype) -> dict[str, list[float]]:
    pixels = torch.randn(1, 3, side, side, device=device, dtype=dtype)
    models = {name: build(name, side, layers, device, dtype) for name in MODELS}
    runs = {name: lambda model=model: model(pixels) for name, model in models.items()}
    return measure(runs, repeats, device=device, warm_up=1 if device == "cpu" else 3)


def make_training_step(name: str, side: int, args):
    model = build(name, side, args.layers, args.device, args.dtype, args.preset).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pixels = torch.randn(args.batch, 3, side, side, device=args.device, dtype=args.dtype)

    def step():
        model(pixels).last_hidden_state.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_operator_step(side: int, args):
    """TSSA of all layers alone, forward and backward, on tokens of the model's shape."""
    config = ToSTVisionConfig.from_preset(f"tost-vision-{args.preset}-patch{PATCH}")
    heads = config.num_attention_heads
    shape = args.batch, (side // PATCH) ** 2, heads, config.hidden_size // heads
    w = torch.randn(shape, device=args.device, dtype=args.dtype, requires_grad=True)
    temp = torch.ones(heads, device=args.device, requires_grad=True)

    def step():
        for _ in range(args.layers):
            tssa(w, temp, causal=False).output.sum().backward()

    return step


def profile_shares(step, device: str) -> dict[str, float]:
    """Per cent of a step's time in the operators of `PROFILED`."""
    activity = torch.profiler.ProfilerActivity.CPU if device == "cpu" else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    times = {event.key: getattr(event, field) for event in profiler.key_averages()}
    total = sum(times.values())
    return {
        f"{kind} %": 100 * sum(time for name, time in times.items() if any(word in name for word in words)) / total
        for kind, words in PROFILED.items()
    }


def report_training(sides, args, report: Report) -> None:
    for side in sides:
        steps = {name: make_training_step(name, side, args) for name in (*TRUNKS, "ViT")}
        runs = steps | {"TSSA": make_operator_step(side, args)}
        seconds = measure(runs, args.repeats, device=args.device, warm_up=1 if args.device == "cpu" else 3)
        for name, step in steps.items():
            times = seconds[name]
            metrics = {
                "training images/s": spread(args.batch / s for s in times),
                "ViT / this": ratio(seconds["ViT"], times),
            }
            metrics |= profile_shares(step, args.device)
            metrics["TSSA %"] = ratio(seconds["TSSA"], times) * 100 if name == "ToST" else None
            label = name if args.preset == "small" else f"{name}-{args.preset}"
            report.add(case_of(label, side, args.batch, args), metrics)


def case_of(name: str, side: int, batch: int, args) -> dict[str, object]:
    tokens, dtype = (side // PATCH) ** 2, dtype_name(args.dtype)
    return {"model": name, "pixels": side, "tokens": tokens, "layers": args.layers, "dtype": dtype, "batch": batch}


def side_length(text: str) -> int:
    """A --sizes argument."""
    side = int(text)
    if side < PATCH or side % PATCH:
        raise argparse.ArgumentTypeError(f"a size must be a multiple of the patch size ({PATCH}), got {side}")
    return side


def add_arguments(parser) -> None:
    sides = [224, 448, 512, 896, 1024, 2048]
    parser.add_argument("--sizes", type=side_length, nargs="+", default=sides, help="sides in pixels")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--preset", choices=("tiny", "small"), default="small", help="the size of the trained models")
    parser.add_argument("--training", action="store_true", help="images per second of training steps instead")
    parser.add_argument("--batch", type=int, default=8, help="images of a training step")


@benchmark("resolution", __doc__, add_arguments, dtype=True, environment=lambda args: KEEP_FREED_MEMORY)
def run(args, report: Report) -> None:
    sides = sorted(set(args.sizes))
    if args.training:
        report_training(sides, args, report)
        return
    peaks = {}
    for name in MODELS:
        where = (name, sides, args.layers, args.device, args.dtype)
        peaks[name] = find_peaks(*where) if args.device == "cuda" else in_new_process(find_peaks, *where)
    for side in sides:
        seconds = find_seconds(side, args.layers, args.repeats, args.device, args.dtype)
        for name, times in seconds.items():
            gain = ratio(seconds["ViT"], times)
            metrics = {"ms": spread(times) * 1e3, "peak MiB": peaks[name][side] / 2**20, "ViT / this": gain}
            report.add(case_of(name, side, 1, args), metrics)
