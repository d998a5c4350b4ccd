# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The TSSA operator beside its reference implementation and attention (`op`), and the cost of its options (`options`)."""

from dataclasses import replace

import torch
from registry import DECAYS, OPERATORS, PASSES, benchmark, make_grad, make_run, reference
from timing import (
    KEEP_FREED_MEMORY,
    Report,
    attempt,
    dtype_name,
    measure,
    peak_bytes,
    ratio,
    spread,
)

from tost_hf import TokenStatisticsSelfAttention


OP = """The TSSA operator: this package, the reference implementation, and attention; forward and backward, causal and
bidirectional; with --memory the peak memory of a forward pass over 131,072 tokens.

`reference` is the reference implementation with autograd's backward, as the authors' eager code computes it: in float32
whatever the input's dtype, as in their training under bfloat16 autocast. `sdpa` is PyTorch's attention (flash on a GPU) on
queries, keys and values of the same shape, and `fla ...` are operators of flash-linear-attention where it is installed.

`x roofline` is the time over the bandwidth bound: w read and the output written, and in the backward pass w and
the gradient read and w's gradient written, at the bandwidth of a large copy that is timed in turns with the operators. A TSSA
variant that differs from the reference in float64, in outputs or gradients, is not timed, and the exit status is 1. On a GPU
the times are the device's own, without the host's time to launch, except for `eager`, whose thousands of launches at long
lengths are more than the host can queue ahead.
"""
CPU_SHAPES = [(4, 1024, 12, 64)]
GPU_SHAPES = [(max(16384 // T, 1), T, 12, 64) for T in (512, 1024, 2048, 4096, 16384, 32768, 131072)] + [(8, 8192, 12, 64)]
LONG_SHAPE = (1, 131072, 12, 64)
ROOFLINE_TENSORS = {"forward": 2, "forward + backward": 5}  # times the bytes of w
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 2e-2)}  # relative, of outputs and gradients


def exact(inputs, grad, causal) -> list[torch.Tensor]:
    """The results of `run_once`, by the reference in float64."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    output = reference(*inputs, causal=causal)
    return [output.detach(), output.detach(), *torch.autograd.grad(output, inputs, grad.double())]


def run_once(variant: str, inputs, grad, causal: bool, device: str):
    """The operator, and its output without and with gradients, and the gradients.

    The output without gradients is separately compiled code, which must compile and be correct as well.
    """
    op = OPERATORS[variant].make(causal, device)
    with torch.no_grad():
        forward = op(*inputs)
    output = op(*inputs)
    return op, [forward, output.detach(), *torch.autograd.grad(output, inputs, grad)]


def find_error(results, expected, dtype) -> str | None:
    """Which of an operator's results is wrong; None if none is."""
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        error = ((result.double() - wanted).norm() / wanted.norm()).item()
        if not error <= TOLERANCE[dtype][min(index // 2, 1)]:  # NaN is wrong too
            names = ("output without gradients", "output")
            return f"relative error {error:.1e} of its " + (names[index] if index < 2 else f"gradient of input {index - 1}")
    return None


def check_operators(variants, shape, causal: bool, dtype, device: str) -> tuple[dict, list[str]]:
    """{variant: (operator, inputs)} of those that are available and correct, and the names of the wrong ones."""
    operators, wrong, expected = {}, [], None
    grad = make_grad(shape, dtype, device)
    for variant in variants:
        inputs = OPERATORS[variant].make_inputs(shape, causal, dtype, device)
        found = attempt(variant, run_once, variant, inputs, grad, causal, device)
        if found is None:
            continue
        op, results = found
        if OPERATORS[variant].is_tssa:
            expected = expected or exact(inputs, grad, causal)
            if error := find_error(results, expected, dtype):
                print(f"{variant}: WRONG, {error}; not timed", flush=True)
                wrong.append(variant)
                continue
        operators[variant] = (op, inputs)
    return operators, wrong


def time_operators(operators, shape, causal: bool, which: str, args, report: Report) -> None:
    """Reports one pass at one shape."""
    grad = make_grad(shape, args.dtype, args.device)
    runs = {variant: make_run(op, inputs, grad, which) for variant, (op, inputs) in operators.items()}
    source = torch.empty(COPY_BYTES[args.device], dtype=torch.uint8, device=args.device).random_()
    target = torch.empty_like(source)
    timed = runs | {"copy": lambda: target.copy_(source)}
    seconds = measure(timed, args.repeats, device=args.device, ahead=True)
    copy = seconds.pop("copy")
    min_bytes = ROOFLINE_TENSORS[which] * grad.nbytes
    roofline = [s * min_bytes / (2 * source.nbytes) for s in copy]
    case = {"form": "causal" if causal else "bidirectional", "pass": which}
    case |= dict(zip("BTHp", shape)) | {"dtype": dtype_name(args.dtype)}
    for variant, times in seconds.items():
        metrics = {"ms": spread(times) * 1e3, "GB/s": None, "x roofline": None}
        if OPERATORS[variant].is_tssa:
            metrics["GB/s"] = spread(1e-9 * min_bytes / s for s in times)
            metrics["x roofline"] = ratio(times, roofline)
        for baseline in ("reference", "reference compiled"):
            metrics[f"{baseline} / this"] = ratio(seconds[baseline], times) if baseline in seconds else None
        if args.device == "cuda":
            metrics["peak MiB"] = peak_bytes(runs[variant], args.device) / 2**20
        report.add({"variant": variant} | case, metrics)
    report.add({"variant": "copy"} | case, {"GB/s": spread(2e-9 * source.nbytes / s for s in copy)})


def report_memory(shape, args, report: Report) -> None:
    """Peak of a forward pass beyond its inputs; results are not checked, which would need several times the memory."""
    case = {"form": "causal", "pass": "forward", **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
    for variant in args.variants:
        inputs = OPERATORS[variant].make_inputs(shape, True, args.dtype, args.device)
        op = attempt(variant, OPERATORS[variant].make, True, args.device)
        if op is not None:
            peak = peak_bytes(make_run(op, inputs, None, "forward"), args.device)
            report.add({"variant": variant} | case, {"peak MiB": peak / 2**20, "peak / bytes of w": peak / inputs[0].nbytes})


def add_op_arguments(parser) -> None:
    shape = {"nargs": 4, "action": "append", "metavar": ("B", "T", "H", "p"), "help": "repeat it for several shapes"}
    parser.add_argument("--shape", type=int, **shape)
    parser.add_argument("--form", nargs="+", choices=("causal", "bidirectional"), default=("causal", "bidirectional"))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
    parser.add_argument("--variants", nargs="+", choices=OPERATORS, help="default: all; with --memory eager and reference")
    parser.add_argument("--memory", action="store_true", help="peak memory of a long forward pass instead of times")


def op_environment(args) -> dict[str, str]:
    return {} if args.memory else KEEP_FREED_MEMORY


@benchmark("op", OP, add_op_arguments, dtype=True, environment=op_environment)
def run_op(args, report: Report) -> int:
    args.variants = args.variants or (("eager", "reference") if args.memory else OPERATORS)
    if args.memory:
        for shape in args.shape or [LONG_SHAPE]:
            report_memory(tuple(shape), args, report)
        return 0

    all_wrong = []
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES):
        for form in args.form:
            torch.compiler.reset()
            operators, wrong = check_operators(args.variants, shape, form == "causal", args.dtype, args.device)
            all_wrong += wrong
            for which in args.passes:
                time_operators(operators, shape, form == "causal", which, args, report)
    return 1 if all_wrong else 0


# Options beyond the paper ---------------------------------------------------------------------------------------------

OPTIONS = """The cost of the options beyond the paper: the operator with decay beside the one without, and a layer with the
short convolution beside one without.

What is compared takes turns in one run; `this / plain` is a quotient of each round. Decay factors are those of a new model,
and per token scattered around them.
"""
CODES = ("eager", "compiled")
CONV_KERNEL = 4


def operator_runs(compiled: bool, which: str, shape, device: str) -> dict:
    """What is timed for each kind of decay."""
    runs = {}
    for kind, operator in DECAYS.items():
        inputs = operator.make_inputs(shape, True, torch.float32, device)
        op = replace(operator, compiled=compiled).make(True, device)
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


def add_options_arguments(parser) -> None:
    parser.add_argument("--shape", type=int, nargs=4, default=CPU_SHAPES[0], metavar=("B", "T", "H", "p"))
    parser.add_argument("--code", nargs="+", choices=CODES, default=CODES)


@benchmark("options", OPTIONS, add_options_arguments, repeats=15, environment=lambda args: KEEP_FREED_MEMORY)
def run_options(args, report: Report) -> None:
    shape = tuple(args.shape)
    for what, make_runs in {"operator": operator_runs, "layer": layer_runs}.items():
        for code in args.code:
            torch.compiler.reset()
            for which in PASSES:
                seconds = measure(make_runs(code == "compiled", which, shape, args.device), args.repeats, device=args.device)
                for kind, times in seconds.items():
                    case = {"option": kind, "what": what, "code": code, "pass": which, **dict(zip("BTHp", shape))}
                    report.add(case, {"ms": spread(times) * 1e3, "this / plain": ratio(times, seconds["none"])})
