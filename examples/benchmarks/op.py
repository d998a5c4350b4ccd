# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The TSSA operator beside its reference implementation and attention (`op`), and the cost of its options (`options`)."""

from dataclasses import replace

import torch
from registry import DECAYS, OPERATORS, PASSES, benchmark, make_grad, make_run
from timing import KEEP_FREED_MEMORY, Report, attempt, dtype_name, in_new_process, measure, peak_bytes, ratio, spread

from tost_hf import TokenStatisticsSelfAttention


OP = """The TSSA operator: this package, the reference implementation, and attention; forward and backward, causal and
bidirectional; with --memory the peak memory of a forward pass over 131,072 tokens.

`reference` is the reference implementation with autograd's backward, as the authors' eager code computes it: in float32
whatever the input's dtype, as in their training under bfloat16 autocast. `sdpa` is PyTorch's attention on queries, keys
and values of the same shape.

On a GPU the times are the device's own, without the host's time to launch, except for `eager`, whose thousands of launches at
long lengths are more than the host can queue ahead.
"""
CPU_SHAPES = [(4, 1024, 12, 64)]
GPU_SHAPES = [(max(16384 // T, 1), T, 12, 64) for T in (512, 1024, 2048, 4096, 16384, 32768, 131072)] + [(8, 8192, 12, 64)]
LONG_SHAPE = (1, 131072, 12, 64)


def start(variant: str, shape, causal: bool, args) -> dict:
    """The passes of an operator, each run once: what cannot run fails here."""
    operator, grad = OPERATORS[variant], make_grad(shape, args.dtype, args.device)
    inputs, function = operator.make_inputs(shape, causal, args.dtype, args.device), operator.make(causal)
    runs = {which: make_run(function, inputs, grad, which) for which in PASSES}
    for run in runs.values():
        run()
    return runs


def time_operators(runs: dict, shape, form: str, which: str, args, report: Report) -> None:
    """Reports one pass at one shape."""
    seconds = measure(runs, args.repeats, device=args.device, ahead=True)
    case = {"form": form, "pass": which, **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
    for variant, times in seconds.items():
        metrics = {"ms": spread(times) * 1e3}
        for baseline in ("reference", "reference compiled"):
            metrics[f"{baseline} / this"] = ratio(seconds[baseline], times) if baseline in seconds else None
        if args.device == "cuda":
            metrics["peak MiB"] = peak_bytes(runs[variant], args.device) / 2**20
        report.add({"variant": variant} | case, metrics)


def find_peak(variant: str, shape, dtype, device: str) -> tuple[int, int]:
    """Peak of a forward pass beyond its inputs, and the bytes of w."""
    operator = OPERATORS[variant]
    inputs = operator.make_inputs(shape, True, dtype, device)
    return peak_bytes(make_run(operator.make(True), inputs, None, "forward"), device), inputs[0].nbytes


def report_memory(shape, args, report: Report) -> None:
    case = {"form": "causal", "pass": "forward", **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
    for variant in args.variants or ("eager", "reference"):
        peak, size = in_new_process(find_peak, variant, shape, args.dtype, args.device)
        report.add({"variant": variant} | case, {"peak MiB": peak / 2**20, "peak / bytes of w": peak / size})


def add_op_arguments(parser) -> None:
    shape = {"nargs": 4, "action": "append", "metavar": ("B", "T", "H", "p"), "help": "repeat it for several shapes"}
    parser.add_argument("--shape", type=int, **shape)
    parser.add_argument("--form", nargs="+", choices=("causal", "bidirectional"), default=("causal", "bidirectional"))
    parser.add_argument("--variants", nargs="+", choices=OPERATORS, help="default: all; with --memory eager and reference")
    parser.add_argument("--memory", action="store_true", help="peak memory of a long forward pass instead of times")


@benchmark("op", OP, add_op_arguments, dtype=True, environment=KEEP_FREED_MEMORY)
def run_op(args, report: Report) -> None:
    if args.memory:
        for shape in args.shape or [LONG_SHAPE]:
            report_memory(tuple(shape), args, report)
        return
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES):
        for form in args.form:
            torch.compiler.reset()
            started = {x: attempt(x, start, x, shape, form == "causal", args) for x in args.variants or OPERATORS}
            for which in PASSES:
                runs = {variant: passes[which] for variant, passes in started.items() if passes}
                time_operators(runs, shape, form, which, args, report)


# Options beyond the paper ---------------------------------------------------------------------------------------------

OPTIONS = """The cost of the options beyond the paper: the operator with decay beside the one without, and a layer with the
short convolution beside one without.

What is compared takes turns in one run; `this / plain` is a quotient of each round. Decay factors are those of a new model,
and per token scattered around them.
"""
CONV_KERNEL = 4


def operator_runs(compiled: bool, which: str, shape, device: str) -> dict:
    """What is timed for each kind of decay."""
    runs = {}
    for kind, operator in DECAYS.items():
        inputs = operator.make_inputs(shape, True, torch.float32, device)
        op = replace(operator, compiled=compiled).make(True)
        runs[kind] = make_run(op, inputs, make_grad(shape, torch.float32, device), which)
    return runs


def layer_runs(compiled: bool, which: str, shape, device: str) -> dict:
    """What is timed with and without the convolution, of one attention layer."""
    B, T, H, p = shape
    runs = {}
    for kind, kernel in {"none": None, f"convolution of {CONV_KERNEL}": CONV_KERNEL}.items():
        torch.manual_seed(0)
        layer = TokenStatisticsSelfAttention(H * p, H, causal=True, conv_kernel=kernel, backend="torch").to(device)
        tokens = torch.randn(B, T, H * p).to(device).requires_grad_()

        def attend(tokens, *parameters, layer=layer):
            return layer(tokens)[0]

        function = torch.compile(attend, dynamic=False) if compiled else attend
        runs[kind] = make_run(function, [tokens, *layer.parameters()], make_grad((B, T, H * p), torch.float32, device), which)
    return runs


@benchmark("options", OPTIONS, repeats=15, environment=KEEP_FREED_MEMORY)
def run_options(args, report: Report) -> None:
    shape = CPU_SHAPES[0]
    for what, make_runs in {"operator": operator_runs, "layer": layer_runs}.items():
        for code in ("eager", "compiled"):
            torch.compiler.reset()
            for which in PASSES:
                seconds = measure(make_runs(code == "compiled", which, shape, args.device), args.repeats, device=args.device)
                for kind, times in seconds.items():
                    case = {"option": kind, "what": what, "code": code, "pass": which, **dict(zip("BTHp", shape))}
                    report.add(case, {"ms": spread(times) * 1e3, "this / plain": ratio(times, seconds["none"])})
