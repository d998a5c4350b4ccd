# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Time by number of tokens, as in the paper's figure: 12 attention layers (width 384, 8 heads), batch 1, forward.

    python examples/benchmarks/run.py scaling

Bidirectional TSSA layers beside softmax attention layers (a projection to queries, keys and values, PyTorch's scaled dot
product attention, an output projection); each layer's output is added to its input. ToST is measured first, with all lengths
interleaved in every round, then softmax attention interleaved with ToST, then memory; each is reported as soon as it is
measured. Prints time (on a GPU without the host's time to launch kernels), peak memory beyond weights and input, and the
exponent of time by tokens from 8,192 tokens on: 1 is linear growth, 2 quadratic.
"""

import torch
from registry import benchmark
from timing import (
    KEEP_FREED_MEMORY,
    Report,
    attempt,
    dtype_name,
    measure,
    peak_bytes,
    ratio,
    run_in_new_process,
    slope,
    spread,
)
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


def measure_peaks(kind: str, lengths, dtype, device: str) -> dict[int, int]:
    """Peak bytes at each length."""
    model = Layers(kind).to(device, dtype)
    model(make_tokens(64, dtype, device))  # warm-up: allocations of the first pass do not count
    peaks = {}
    for length in lengths:
        x = make_tokens(length, dtype, device)
        peaks[length] = peak_bytes(lambda x=x: model(x), device)
    return peaks


def measure_times(kinds, lengths, args) -> dict[str, dict[int, list[float]]]:
    """Seconds of each round, {kind: {length: seconds}}; kinds and lengths are interleaved."""
    models = {kind: Layers(kind).to(args.device, args.dtype) for kind in kinds}
    tokens = {n: make_tokens(n, args.dtype, args.device) for n in lengths}
    runs = {(kind, n): lambda model=models[kind], x=tokens[n]: model(x) for n in lengths for kind in kinds}
    warm_up = 1 if args.device == "cpu" else 3
    seconds = measure(runs, args.repeats, device=args.device, warm_up=warm_up, exclude_launch=True)
    return {kind: {n: seconds[kind, n] for n in lengths} for kind in kinds}


def report_exponent(kind: str, times: dict[int, list[float]], case: dict, report: Report) -> None:
    long_lengths = [n for n in sorted(times) if n >= SLOPE_FROM]
    if len(long_lengths) > 1:
        exponents = spread(slope(long_lengths, seconds) for seconds in zip(*(times[n] for n in long_lengths)))
        report.add({"kind": kind, "tokens": long_lengths[-1]} | case, {"exponent": exponents})


def add_arguments(parser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--softmax_limit", type=int, help="maximum length for softmax; default: 131,072 on a GPU, 8,192 on a CPU"
    )


@benchmark("scaling", __doc__, add_arguments, dtype=True, environment=KEEP_FREED_MEMORY)
def run(args, report: Report) -> None:
    max_softmax_length = args.softmax_limit or (131072 if args.device == "cuda" else 8192)
    lengths = {"ToST": sorted(set(args.tokens))}
    lengths["softmax"] = [n for n in lengths["ToST"] if n <= max_softmax_length]
    case = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "dtype": dtype_name(args.dtype)}

    seconds = measure_times(["ToST"], lengths["ToST"], args)
    for n, times in seconds["ToST"].items():
        report.add({"kind": "ToST", "tokens": n} | case, {"ms": spread(times) * 1e3})
    report_exponent("ToST", seconds["ToST"], case, report)

    compared_seconds = attempt("softmax", measure_times, KINDS, lengths["softmax"], args) or {}
    seconds["softmax"] = compared_seconds.get("softmax", {})
    for n, times in seconds["softmax"].items():
        metrics = {"ms": spread(times) * 1e3, "softmax / ToST": ratio(times, compared_seconds["ToST"][n])}
        report.add({"kind": "softmax", "tokens": n} | case, metrics)
    report_exponent("softmax", seconds["softmax"], case, report)

    for kind in KINDS:
        peaks = attempt(kind, run_in_new_process, measure_peaks, kind, lengths[kind], args.dtype, args.device) or {}
        for n, peak in peaks.items():
            report.add({"kind": kind, "tokens": n} | case, {"peak MiB": peak / 2**20})
