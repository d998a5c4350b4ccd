# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The TSSA operator on the machine at hand: this package, the formulas written down literally, and attention.

    python examples/benchmarks/op.py               # forward and backward, causal and bidirectional
    python examples/benchmarks/op.py --memory      # peak memory of a forward pass over 131,072 tokens

`literal` is the reference implementation with autograd's backward, as the authors' eager code computes it: in
float32 inside whatever the input's dtype, as in their training under bfloat16 autocast. `sdpa` is PyTorch's attention (flash
where the GPU has it) on queries, keys and values of the same shape, and `fla ...` are operators of flash-linear-attention
where it is installed.

`x floor` is the time over that of the least memory traffic: w read and the output written, and in the backward pass w and
the gradient read and w's gradient written, at the bandwidth of a large copy that takes turns with the operators. Every TSSA
variant must equal the reference in float64, outputs and gradients, before it is timed; one that does not is refused, and the
script ends with status 1. On a GPU the times are the device's own, without the host's time to launch, but
for `eager`, whose thousands of launches at long lengths are more than the host can queue ahead.
"""

import sys

import torch
from registry import OPERATORS, PASSES, literal, make_grad, make_run
from rows import Spread
from timing import (
    Report,
    attempt,
    benchmark,
    describe_crossover,
    dtype_name,
    measure,
    peak_bytes,
    ratio,
    restart_keeping_freed_memory,
    spread,
)


CPU_SHAPES = [(4, 1024, 12, 64)]
GPU_SHAPES = [(max(16384 // T, 1), T, 12, 64) for T in (512, 1024, 2048, 4096, 16384, 32768, 131072)] + [(8, 8192, 12, 64)]
LONG_SHAPE = (1, 131072, 12, 64)
FLOOR_TENSORS = {"forward": 2, "forward + backward": 5}  # times the bytes of w
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 2e-2)}  # relative, of outputs and gradients
OURS = ("triton", "compiled", "eager")  # of which the fastest counts


def exact(inputs, grad, causal) -> list[torch.Tensor]:
    """The results of `run_once`, by the reference in float64."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    output = literal(*inputs, causal=causal)
    return [output.detach(), output.detach(), *torch.autograd.grad(output, inputs, grad.double())]


def run_once(variant: str, inputs, grad, causal: bool, device: str):
    """The operator, and its output without and with gradients, and the gradients.

    The first is what the forward pass times: compiled code of its own, which must compile and be right as well.
    """
    op = OPERATORS[variant].make(causal, device)
    with torch.no_grad():
        forward = op(*inputs)
    output = op(*inputs)
    return op, [forward, output.detach(), *torch.autograd.grad(output, inputs, grad)]


def find_error(results, expected, dtype) -> str | None:
    """What is wrong with an operator's results, in words."""
    for index, (result, reference) in enumerate(zip(results, expected, strict=True)):
        error = ((result.double() - reference).norm() / reference.norm()).item()
        if not error <= TOLERANCE[dtype][min(index // 2, 1)]:  # NaN is wrong too
            names = ("output without gradients", "output")
            return f"relative error {error:.1e} of its " + (names[index] if index < 2 else f"gradient of input {index - 1}")
    return None


def check_operators(variants, shape, causal: bool, dtype, device: str) -> tuple[dict, list[str]]:
    """{variant: (operator, inputs)} of those that exist here and are right, and the names of the wrong ones."""
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


def time_operators(operators, shape, causal: bool, which: str, args, report: Report) -> dict[str, Spread]:
    """Reports one pass at one shape; returns the milliseconds of each variant."""
    grad = make_grad(shape, args.dtype, args.device)
    runs = {variant: make_run(op, inputs, grad, which) for variant, (op, inputs) in operators.items()}
    source = torch.empty(COPY_BYTES[args.device], dtype=torch.uint8, device=args.device).random_()
    target = torch.empty_like(source)
    timed = {variant: lambda run=run: run for variant, run in runs.items()} | {"copy": lambda: lambda: target.copy_(source)}
    seconds = measure(timed, args.repeats, device=args.device, ahead=True)
    copy = seconds.pop("copy")
    floor_bytes = FLOOR_TENSORS[which] * grad.nbytes
    floor = [s * floor_bytes / (2 * source.nbytes) for s in copy]
    case = {"form": "causal" if causal else "bidirectional", "pass": which}
    case |= dict(zip("BTHp", shape)) | {"dtype": dtype_name(args.dtype)}
    for variant, times in seconds.items():
        metrics = {"ms": spread(times) * 1e3, "GB/s": None, "x floor": None}
        if OPERATORS[variant].is_tssa:
            metrics["GB/s"] = spread(1e-9 * floor_bytes / s for s in times)
            metrics["x floor"] = ratio(times, floor)
        for baseline in ("literal", "literal compiled"):
            metrics[f"{baseline} / this"] = ratio(seconds[baseline], times) if baseline in seconds else None
        if args.device == "cuda":
            metrics["peak MiB"] = peak_bytes(runs[variant], args.device) / 2**20
        report.add({"variant": variant} | case, metrics)
    report.add({"variant": "copy"} | case, {"GB/s": spread(2e-9 * source.nbytes / s for s in copy)})
    return {variant: spread(times) * 1e3 for variant, times in seconds.items()}


def report_memory(shape, args, report: Report) -> None:
    """Peak of a forward pass beyond its inputs, without the wrong results' check: it would need several times the memory."""
    for variant in args.variants:
        inputs = OPERATORS[variant].make_inputs(shape, True, args.dtype, args.device)
        op = attempt(variant, OPERATORS[variant].make, True, args.device)
        if op is None:
            continue
        peak = peak_bytes(make_run(op, inputs, None, "forward"), args.device)
        case = {
            "variant": variant,
            "form": "causal",
            "pass": "forward",
            **dict(zip("BTHp", shape)),
            "dtype": dtype_name(args.dtype),
        }
        report.add(case, {"peak MiB": peak / 2**20, "peak / bytes of w": peak / inputs[0].nbytes})


def add_arguments(parser) -> None:
    parser.add_argument(
        "--shape", type=int, nargs=4, action="append", metavar=("B", "T", "H", "p"), help="repeat it for several shapes"
    )
    parser.add_argument("--form", nargs="+", choices=("causal", "bidirectional"), default=("causal", "bidirectional"))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
    parser.add_argument(
        "--variants", nargs="+", choices=OPERATORS, help="all, or with --memory eager and literal, unless given"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of a long forward pass instead of times")


def run(args, report: Report) -> int:
    args.variants = args.variants or (("eager", "literal") if args.memory else OPERATORS)
    if args.memory:
        for shape in args.shape or [LONG_SHAPE]:
            report_memory(tuple(shape), args, report)
        return 0

    all_wrong, gains = [], {}
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES):
        for form in args.form:
            torch.compiler.reset()
            operators, wrong = check_operators(args.variants, shape, form == "causal", args.dtype, args.device)
            all_wrong += wrong
            for which in args.passes:
                times = time_operators(operators, shape, form == "causal", which, args, report)
                best = min((times[x].value for x in OURS if x in times), default=None)
                if best and "sdpa" in times:
                    gains.setdefault(f"{form}, {which}", {})[shape[1]] = times["sdpa"].value / best
    for title, found in gains.items():
        print(f"{title}: " + describe_crossover(found, "sdpa", "tokens"))
    return 1 if all_wrong else 0


main = benchmark(__doc__, __file__, run, add_arguments, dtype=True)

if __name__ == "__main__":
    if "--memory" not in sys.argv:
        restart_keeping_freed_memory()
    sys.exit(main())
