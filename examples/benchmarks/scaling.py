# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Time over the number of tokens, as in the paper's figure: 12 attention layers (width 384, 8 heads), batch 1, forward.

    python examples/benchmarks/run.py scaling

Bidirectional TSSA layers beside softmax attention layers (one projection to queries, keys and values, PyTorch's scaled
dot product attention, one projection back); each layer's output is added to its input. ToST is measured first, all lengths
taking turns in every round, then softmax attention in turns with ToST again, then memory; each is reported as soon as it is
measured. Prints time (on a GPU the device's own, without the host's time to launch), peak memory beyond weights and input, and
the exponent of time over tokens from 8,192 on: 1 is linear growth, 2 quadratic.
"""

import torch
from registry import benchmark
from timing import KEEP_FREED_MEMORY, Report, attempt, dtype_name, in_new_process, measure, peak_bytes, ratio, slope, spread
from torch import nn
from torch.nn import functional as F

from tost_hf.model.layers_tost import TokenStatisticsSelfAttention


LAYERS, WIDTH, HEADS = 12, 384, 8
LENGTHS = (100, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SLOPE_FROM = 8192
KINDS = ("ToST", "softmax")


class SoftmaxAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.in_proj(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TSSA(TokenStatisticsSelfAttention):
    def __init__(self):
        super().__init__(WIDTH, HEADS, causal=False)

    def forward(self, x):
        return super().forward(x)[0]


class Layers(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList((TSSA if kind == "ToST" else SoftmaxAttention)() for _ in range(LAYERS))

    @torch.no_grad()
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_tokens(length: int, dtype, device: str) -> torch.Tensor:
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def find_peaks(kind: str, lengths, dtype, device: str) -> dict[int, int]:
    """Peak bytes at each length."""
    model = Layers(kind).to(device, dtype)
    model(make_tokens(64, dtype, device))  # what the first pass allocates once
    found = {}
    for length in lengths:
        x = make_tokens(length, dtype, device)
        found[length] = peak_bytes(lambda x=x: model(x), device)
    return found


def measure_times(kinds, lengths, args) -> dict[str, dict[int, list[float]]]:
    """Seconds of each round, {kind: {length: seconds}}; all take turns."""
    models = {kind: Layers(kind).to(args.device, args.dtype) for kind in kinds}
    tokens = {n: make_tokens(n, args.dtype, args.device) for n in lengths}
    runs = {(kind, n): lambda model=models[kind], x=tokens[n]: model(x) for n in lengths for kind in kinds}
    warm_up = 1 if args.device == "cpu" else 3
    seconds = measure(runs, args.repeats, device=args.device, warm_up=warm_up, ahead=True)
    return {kind: {n: seconds[kind, n] for n in lengths} for kind in kinds}


def report_exponent(kind: str, times: dict[int, list[float]], case: dict, report: Report) -> None:
    far = [n for n in sorted(times) if n >= SLOPE_FROM]
    if len(far) > 1:
        exponents = spread(slope(far, seconds) for seconds in zip(*(times[n] for n in far)))
        report.add({"kind": kind, "tokens": far[-1]} | case, {"exponent": exponents})


def add_arguments(parser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--softmax_limit", type=int, help="longest for softmax; default: 131,072 on a GPU, 8,192 on a CPU")


@benchmark("scaling", __doc__, add_arguments, dtype=True, environment=KEEP_FREED_MEMORY)
def run(args, report: Report) -> None:
    limit = args.softmax_limit or (131072 if args.device == "cuda" else 8192)
    lengths = {"ToST": sorted(set(args.tokens))}
    lengths["softmax"] = [n for n in lengths["ToST"] if n <= limit]
    case = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "dtype": dtype_name(args.dtype)}

    seconds = measure_times(["ToST"], lengths["ToST"], args)
    for n, times in seconds["ToST"].items():
        report.add({"kind": "ToST", "tokens": n} | case, {"ms": spread(times) * 1e3})
    report_exponent("ToST", seconds["ToST"], case, report)

    beside = attempt("softmax", measure_times, KINDS, lengths["softmax"], args) or {}
    seconds["softmax"] = beside.get("softmax", {})
    for n, times in seconds["softmax"].items():
        metrics = {"ms": spread(times) * 1e3, "softmax / ToST": ratio(times, beside["ToST"][n])}
        report.add({"kind": "softmax", "tokens": n} | case, metrics)
    report_exponent("softmax", seconds["softmax"], case, report)

    for kind in KINDS:
        peaks = attempt(kind, in_new_process, find_peaks, kind, lengths[kind], args.dtype, args.device) or {}
        for n, peak in peaks.items():
            report.add({"kind": kind, "tokens": n} | case, {"peak MiB": peak / 2**20})
