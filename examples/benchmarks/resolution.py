# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Latency and peak memory on images of 224 to 2,048 pixels per side: ToST-small and ViT-small with 16-pixel patches.

    python examples/benchmarks/run.py resolution
    python examples/benchmarks/run.py resolution --training --preset tiny --sizes 96 224 --batch 32  # training steps
    python examples/benchmarks/run.py resolution --folders tost-photos-3m softmax vit --sizes 64 96 128 192 256 \
        --photographs imagenette224/validation.parquet

Random weights (they do not change the cost), batch 1, eager, forward only; ViT with PyTorch's scaled dot product attention and
with the `image_size` of each resolution. The models are interleaved, and the C library keeps freed memory. Reports the time of
a forward pass and its peak memory beyond the loaded model (measured in a separate process).

--training measures steps on batches of --batch images instead (forward, backward, fused AdamW), also of the XCA and softmax
models, and the percentage of a step that the profiler attributes to matrix products and convolutions. TSSA's percentage is the
time of its operator alone, forward and backward, in all layers.

--folders measures trained classifiers instead: the time of one photograph, and the accuracy on all --photographs, resized to
each size, with the weights as they are. A ViT's table of positions is interpolated.
"""

import functools
from pathlib import Path

import torch
from classification import label_names
from datasets import load_dataset
from evaluate_image_classification import match_labels
from registry import benchmark
from run_image_classification import DataTrainingArguments, EvaluationImages
from timing import KEEP_FREED_MEMORY, Report, dtype_name, measure, peak_bytes, ratio, run_in_new_process, spread
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTModel

from tost_hf import ToSTVisionConfig, ToSTVisionModel, tssa
from tost_hf.image_processing import make_image_processor


PATCH, LAYERS = 16, 12
MODELS = ("ToST", "ViT")
ATTENTION_TYPES = {"ToST": "tssa", "XCA": "xca", "softmax": "softmax"}
PROFILED = {"matrix products": ("aten::mm", "aten::addmm", "aten::bmm"), "convolutions": ("convolution",)}


def build(name: str, side: int, preset: str, device: str, dtype):
    """A model of a preset's width. As in their papers, small ToST has 8 heads and ViT 6, tiny ToST 4 and ViT 3."""
    torch.manual_seed(0)
    size = {"image_size": side, "num_hidden_layers": LAYERS}
    config = ToSTVisionConfig.from_preset(f"tost-vision-{preset}-patch{PATCH}", **size)
    if name in ATTENTION_TYPES:
        config.attention_type = ATTENTION_TYPES[name]
        return ToSTVisionModel(config).eval().to(device, dtype)
    config = ViTConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.hidden_size // 64,
        intermediate_size=4 * config.hidden_size,
        patch_size=PATCH,
        attn_implementation="sdpa",
        **size,
    )
    return ViTModel(config, add_pooling_layer=False).eval().to(device, dtype)


@torch.no_grad()
def measure_peaks(name: str, sides, *build_options) -> dict[int, int]:
    """Peak bytes of a forward pass at each size; `build_options` are preset, device and dtype."""
    peaks = {}
    for side in sides:
        model = build(name, side, *build_options)
        # warm-up on a small image: allocations of the first pass do not count
        small = torch.randn(1, 3, 2 * PATCH, 2 * PATCH).to(model.device, model.dtype)
        model(small, interpolate_pos_encoding=True)
        pixels = torch.randn(1, 3, side, side).to(small)
        peaks[side] = peak_bytes(lambda model=model, pixels=pixels: model(pixels), model.device)
    return peaks


@torch.no_grad()
def report_inference(sides, args, report: Report) -> None:
    build_options = (args.preset, args.device, args.dtype)
    peaks = {name: run_in_new_process(measure_peaks, name, sides, *build_options) for name in MODELS}
    for side in sides:
        pixels = torch.randn(1, 3, side, side, device=args.device, dtype=args.dtype)
        models = {name: build(name, side, *build_options) for name in MODELS}
        runs = {name: lambda model=model, pixels=pixels: model(pixels) for name, model in models.items()}
        seconds = measure(runs, args.repeats, device=args.device, warm_up=1 if args.device == "cpu" else 3)
        for name, times in seconds.items():
            speedup = ratio(seconds["ViT"], times)
            metrics = {"ms": spread(times) * 1e3, "peak MiB": peaks[name][side] / 2**20, "ViT / this": speedup}
            report.add(make_case(name, side, 1, args), metrics)


def make_training_step(name: str, side: int, args):
    model = build(name, side, args.preset, args.device, args.dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pixels = torch.randn(args.batch, 3, side, side, device=args.device, dtype=args.dtype)

    def step():
        model(pixels).last_hidden_state.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_operator_step(side: int, args):
    """TSSA alone, forward and backward in all layers, on tokens of the model's shape."""
    config = ToSTVisionConfig.from_preset(f"tost-vision-{args.preset}-patch{PATCH}")
    heads = config.num_attention_heads
    shape = args.batch, (side // PATCH) ** 2, heads, config.hidden_size // heads
    w = torch.randn(shape, device=args.device, dtype=args.dtype, requires_grad=True)
    temp = torch.ones(heads, device=args.device, requires_grad=True)

    def step():
        for _ in range(LAYERS):
            tssa(w, temp, causal=False).output.sum().backward()

    return step


def profile_percentages(step, device: str) -> dict[str, float]:
    """The percentage of a step's time in each group of operators of `PROFILED`."""
    activity = torch.profiler.ProfilerActivity.CPU if device == "cpu" else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    times = {event.key: getattr(event, field) for event in profiler.key_averages()}
    total = sum(times.values())
    return {
        f"{group} %": 100 * sum(time for name, time in times.items() if any(key in name for key in keys)) / total
        for group, keys in PROFILED.items()
    }


def report_training(sides, args, report: Report) -> None:
    for side in sides:
        steps = {name: make_training_step(name, side, args) for name in (*ATTENTION_TYPES, "ViT")}
        runs = steps | {"TSSA": make_operator_step(side, args)}
        seconds = measure(runs, args.repeats, device=args.device, warm_up=1 if args.device == "cpu" else 3)
        for name, step in steps.items():
            times = seconds[name]
            metrics = {"training images/s": spread(args.batch / s for s in times), "ViT / this": ratio(seconds["ViT"], times)}
            metrics |= profile_percentages(step, args.device)
            metrics["TSSA %"] = ratio(seconds["TSSA"], times) * 100 if name == "ToST" else None
            report.add(make_case(name, side, args.batch, args), metrics)


@torch.no_grad()
def report_trained(sides, args, report: Report) -> None:
    models = {}
    for folder in args.folders:
        model = AutoModelForImageClassification.from_pretrained(folder, dtype=args.dtype).eval().to(args.device)
        interpolates = isinstance(model, ViTForImageClassification)
        options = {"interpolate_pos_encoding": True} if interpolates else {}
        models[Path(folder).name] = model, functools.partial(model, **options)
    photographs = load_dataset("parquet", data_files=args.photographs, split="train")
    names = label_names(model.config)  # of the last one; all have the same
    data = match_labels(photographs, "validation", names, DataTrainingArguments(args.photographs))
    labels = torch.tensor(data["label"][:])
    for side in sides:
        images = EvaluationImages(data, make_image_processor(side))
        pixels = torch.stack([images[i]["pixel_values"] for i in range(len(images))]).to(args.device, args.dtype)
        runs = {name: functools.partial(run, pixels[:1]) for name, (_, run) in models.items()}
        seconds = measure(runs, args.repeats, device=args.device, warm_up=3)
        first = next(iter(seconds))
        for name, (model, run) in models.items():
            predictions = torch.cat([run(batch).logits.argmax(-1).cpu() for batch in pixels.split(50)])
            patch = model.config.patch_size
            case = {"model": name, "pixels": side, "tokens": (side // patch) ** 2, "layers": model.config.num_hidden_layers}
            case |= {"dtype": dtype_name(args.dtype), "batch": 1}
            metrics = {"ms": spread(seconds[name]) * 1e3, "this / first": ratio(seconds[name], seconds[first])}
            report.add(case, metrics | {"accuracy": float((predictions == labels).double().mean())})


def make_case(name: str, side: int, batch: int, args) -> dict[str, object]:
    name = name if args.preset == "small" else f"{name}-{args.preset}"
    case = {"model": name, "pixels": side, "tokens": (side // PATCH) ** 2, "layers": LAYERS}
    return case | {"dtype": dtype_name(args.dtype), "batch": batch}


def add_arguments(parser) -> None:
    sides = [224, 448, 512, 896, 1024, 2048]
    parser.add_argument("--sizes", type=int, nargs="+", default=sides, help=f"sides in pixels, multiples of {PATCH}")
    parser.add_argument("--preset", choices=("tiny", "small"), default="small", help="the size of the models")
    parser.add_argument("--training", action="store_true", help="images per second of training steps instead")
    parser.add_argument("--folders", nargs="+", help="trained classifiers of the same classes, to measure instead")
    parser.add_argument("--photographs", help="a parquet file of labeled photographs, for --folders")
    parser.add_argument("--batch", type=int, default=8, help="images of a training step")


@benchmark("resolution", __doc__, add_arguments, dtype=True, environment=KEEP_FREED_MEMORY)
def run(args, report: Report) -> None:
    report_times = report_trained if args.folders else report_training if args.training else report_inference
    report_times(sorted(set(args.sizes)), args, report)
