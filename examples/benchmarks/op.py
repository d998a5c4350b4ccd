# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The TSSA operator on the machine at hand: this package, the formulas written down literally, and attention.

    python examples/benchmarks/op.py               # forward and backward, causal and bidirectional
    python examples/benchmarks/op.py --memory      # peak memory of a forward pass over 131,072 tokens

`literal` is the plain formulas (tssa_reference.py) with autograd's backward, as the authors' eager code computes them: in
float32 inside whatever the input's dtype, as in their training under bfloat16 autocast. `sdpa` is PyTorch's attention (flash
where the GPU has it) on queries, keys and values of the same shape, and `fla ...` are operators of flash-linear-attention
where it is installed.

`x floor` is the time over that of the least memory traffic: w read and the output written, and in the backward pass w and
the gradient read and w's gradient written, at the bandwidth of a large copy that takes turns with the operators. Every TSSA
variant must equal the formulas in float64, outputs and gradients, before it is timed; one that does not is refused, and the
script ends with status 1. On a GPU the times are the device's own, without the host's time to launch, but
for `eager`, whose thousands of launches at long lengths are more than the host can queue ahead.
"""

import sys

import torch
from rows import Panel, Spread, parse_arguments, plot
from timing import (
    Report,
    arguments,
    attempt,
    choose_dtype,
    describe_crossover,
    dtype_argument,
    measure,
    peak_bytes,
    print_header,
    ratio,
    restart_keeping_freed_memory,
    spread,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tost_hf import tssa
from tost_hf.model import tssa_reference


CPU_SHAPES = [(4, 1024, 12, 64)]
GPU_SHAPES = [(max(16384 // T, 1), T, 12, 64) for T in (512, 1024, 2048, 4096, 16384, 32768, 131072)] + [(8, 8192, 12, 64)]
LONG_SHAPE = (1, 131072, 12, 64)
PASSES = ("forward", "forward + backward")
FLOOR_TENSORS = {"forward": 2, "forward + backward": 5}  # times the bytes of w
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 2e-2)}  # relative, of outputs and gradients
OURS = ("triton", "compiled", "eager")
TSSA = (*OURS, "literal", "literal compiled")
FLA = ("fla linear_attn", "fla simple_gla", "fla hgrn")
VARIANTS = (*TSSA, "sdpa", *FLA)


def literal(w, temp, denom_bias=None, causal=True):
    """The plain formulas in their order, with autograd's backward."""
    return tssa_reference.causal(w, temp, denom_bias)[0] if causal else tssa_reference.bidirectional(w, temp)[0]


def ours(backend: str):
    def op(w, temp, denom_bias=None, causal=True):
        return tssa(w, temp, denom_bias, causal=causal, backend=backend).output

    return op


def attention(q, k, v, causal=True):
    """Softmax attention on (B, T, H, p)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda and q.dtype != torch.float32:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def make_operator(variant: str, causal: bool, device: str):
    """A function of `make_inputs`' tensors; raises where the variant does not exist."""
    if variant in FLA:
        if not causal:
            raise NotImplementedError("causal only")
        return fla_operator(variant.removeprefix("fla "))
    if variant == "triton" and device == "cpu":
        raise NotImplementedError("the kernels need a GPU")
    op = {
        "triton": ours("triton"),
        "compiled": ours("reference"),
        "eager": ours("reference"),
        "literal": literal,
        "literal compiled": literal,
        "sdpa": attention,
    }[variant]

    def run(*inputs):
        return op(*inputs, causal=causal)

    return torch.compile(run, dynamic=False) if "compiled" in variant else run


def fla_operator(name: str):
    if name == "linear_attn":
        from fla.ops.linear_attn import chunk_linear_attn

        return lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0]
    if name == "simple_gla":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda q, k, v, gate: chunk_simple_gla(q, k, v, g=gate)[0]
    from fla.ops.hgrn import chunk_hgrn

    return lambda x, gate: chunk_hgrn(x.flatten(2), gate.flatten(2))[0].reshape(x.shape)


def make_grad(shape, dtype, device: str) -> torch.Tensor:
    """A gradient of the output."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def make_inputs(variant: str, shape, causal: bool, dtype, device: str) -> list[torch.Tensor]:
    """The operator's differentiable inputs, the same at every call."""
    _, T, H, _ = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size, dtype=torch.float32):
        return torch.randn(size, generator=generator).to(device, dtype)

    if variant in TSSA:
        w, temp, bias = randn(*shape, dtype=dtype), 1 + 0.2 * randn(H), 0.1 * randn(T, H)
        inputs = [w, temp, bias] if causal else [w, temp]
    elif variant == "fla hgrn":
        inputs = [randn(*shape, dtype=dtype), -randn(*shape).abs().to(dtype)]
    else:
        inputs = [randn(*shape, dtype=dtype) for _ in range(3)]
        if variant == "fla simple_gla":
            inputs.append(-randn(*shape[:3]).abs())
    return [x.requires_grad_() for x in inputs]


def exact(inputs, grad, causal) -> list[torch.Tensor]:
    """The results of `run_once`, by the formulas in float64."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    output = literal(*inputs, causal=causal)
    return [output.detach(), output.detach(), *torch.autograd.grad(output, inputs, grad.double())]


def run_once(variant: str, inputs, grad, causal: bool, device: str):
    """The operator, and its output without and with gradients, and the gradients.

    The first is what the forward pass times: compiled code of its own, which must compile and be right as well.
    """
    op = make_operator(variant, causal, device)
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
        inputs = make_inputs(variant, shape, causal, dtype, device)
        found = attempt(variant, run_once, variant, inputs, grad, causal, device)
        if found is None:
            continue
        op, results = found
        if variant in TSSA:
            expected = expected or exact(inputs, grad, causal)
            if error := find_error(results, expected, dtype):
                print(f"{variant}: WRONG, {error}; not timed", flush=True)
                wrong.append(variant)
                continue
        operators[variant] = (op, inputs)
    return operators, wrong


def make_run(op, inputs, grad, which: str):
    def forward():
        with torch.no_grad():
            op(*inputs)

    return forward if which == "forward" else lambda: torch.autograd.grad(op(*inputs), inputs, grad)


def time_operators(operators, shape, causal: bool, which: str, dtype, args, report: Report) -> dict[str, Spread]:
    """Reports one pass at one shape; returns the milliseconds of each variant."""
    grad = make_grad(shape, dtype, args.device)
    runs = {variant: make_run(op, inputs, grad, which) for variant, (op, inputs) in operators.items()}
    source = torch.empty(COPY_BYTES[args.device], dtype=torch.uint8, device=args.device).random_()
    target = torch.empty_like(source)
    timed = {variant: lambda run=run: run for variant, run in runs.items()} | {"copy": lambda: lambda: target.copy_(source)}
    seconds = measure(timed, args.repeats, device=args.device, ahead=True)
    copy = seconds.pop("copy")
    floor_bytes = FLOOR_TENSORS[which] * grad.nbytes
    floor = [s * floor_bytes / (2 * source.nbytes) for s in copy]
    case = {"form": "causal" if causal else "bidirectional", "pass": which}
    case |= dict(zip("BTHp", shape)) | {"dtype": name_of(dtype)}
    for variant, times in seconds.items():
        metrics = {"ms": spread(times) * 1e3, "GB/s": None, "x floor": None}
        if variant in TSSA:
            metrics["GB/s"] = spread(1e-9 * floor_bytes / s for s in times)
            metrics["x floor"] = ratio(times, floor)
        for baseline in ("literal", "literal compiled"):
            metrics[f"{baseline} / this"] = ratio(seconds[baseline], times) if baseline in seconds else None
        if args.device == "cuda":
            metrics["peak MiB"] = peak_bytes(runs[variant], args.device) / 2**20
        report.add({"variant": variant} | case, metrics)
    report.add({"variant": "copy"} | case, {"GB/s": spread(2e-9 * source.nbytes / s for s in copy)})
    return {variant: spread(times) * 1e3 for variant, times in seconds.items()}


def report_memory(shape, dtype, args, report: Report) -> None:
    """Peak of a forward pass beyond its inputs, without the wrong results' check: it would need several times the memory."""
    for variant in args.variants:
        inputs = make_inputs(variant, shape, True, dtype, args.device)
        op = attempt(variant, make_operator, variant, True, args.device)
        if op is None:
            continue
        peak = peak_bytes(make_run(op, inputs, None, "forward"), args.device)
        case = {"variant": variant, "form": "causal", "pass": "forward", **dict(zip("BTHp", shape)), "dtype": name_of(dtype)}
        report.add(case, {"peak MiB": peak / 2**20, "peak / bytes of w": peak / inputs[0].nbytes})


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    dtype_argument(parser)
    parser.add_argument(
        "--shape", type=int, nargs=4, action="append", metavar=("B", "T", "H", "p"), help="repeat it for several shapes"
    )
    parser.add_argument("--form", nargs="+", choices=("causal", "bidirectional"), default=("causal", "bidirectional"))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=PASSES, dest="passes")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="all, or with --memory eager and literal, unless given"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of a long forward pass instead of times")
    args = parse_arguments(parser, argv, __file__)
    args.variants = args.variants or (("eager", "literal") if args.memory else VARIANTS)
    dtype = choose_dtype(args)
    print_header(args.device)
    report = Report(args)
    if args.memory:
        for shape in args.shape or [LONG_SHAPE]:
            report_memory(tuple(shape), dtype, args, report)
        return 0

    all_wrong, series = [], {}
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES):
        for form in args.form:
            torch.compiler.reset()
            operators, wrong = check_operators(args.variants, shape, form == "causal", dtype, args.device)
            all_wrong += wrong
            for which in args.passes:
                times = time_operators(operators, shape, form == "causal", which, dtype, args, report)
                for variant, milliseconds in times.items():
                    series.setdefault(f"{form}, {which}", {}).setdefault(variant, {})[shape[1]] = milliseconds
    for title, times in series.items():
        best = {}  # ours is the fastest of our variants
        for variant in OURS:
            for length, milliseconds in times.get(variant, {}).items():
                best[length] = min(best.get(length, milliseconds.value), milliseconds.value)
        gains = {length: x.value / best[length] for length, x in times.get("sdpa", {}).items() if length in best}
        if gains:
            print(f"{title}: " + describe_crossover(gains, "sdpa", "tokens"))
    if args.plot:
        lines = {f"{variant}, {title}": x for title, times in series.items() for variant, x in times.items()}
        plot(args.plot, Panel(lines, "tokens", "ms"))
    return 1 if all_wrong else 0


if __name__ == "__main__":
    if "--memory" not in sys.argv:
        restart_keeping_freed_memory()
    sys.exit(main())
