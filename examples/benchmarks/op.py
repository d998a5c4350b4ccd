# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The TSSA operator beside its reference implementation and attention (`op`), the cost of its options (`options`), and of
compiling its kernels (`first_use`)."""

import os
import time
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory

import torch
from registry import DECAY_OPERATORS, OPERATORS, PASSES, benchmark, make_grad, make_run
from timing import KEEP_FREED_MEMORY, Report, attempt, dtype_name, measure, peak_bytes, ratio, run_in_new_process, spread

from tost_hf import TokenStatisticsSelfAttention


OP = """The TSSA operator, the reference implementation, and attention: forward and backward, causal and bidirectional; with
--memory the peak memory of both passes over 131,072 tokens.

`reference` is the reference implementation with autograd's backward, as in the authors' eager code: in float32 for any dtype
of the input, as in their training under bfloat16 autocast. `sdpa` is PyTorch's attention on queries, keys and values of the
same shape. `copy` only copies the tokens: the time that the memory's bandwidth permits.

On a GPU the times exclude the host's time to launch kernels.
"""
CPU_SHAPES = [(4, 1024, 12, 64)]
GPU_SHAPES = [(max(16384 // T, 1), T, 12, 64) for T in (512, 1024, 2048, 4096, 16384, 32768, 131072)] + [(8, 8192, 12, 64)]
LONG_SHAPE = (1, 131072, 12, 64)


def start_passes(variant: str, shape, causal: bool, args) -> dict:
    """The passes of an operator, each run once, so that errors occur here."""
    operator, grad = OPERATORS[variant], make_grad(shape, args.dtype, args.device)
    inputs, function = operator.make_inputs(shape, causal, args.dtype, args.device), operator.make(causal)
    runs = {pass_name: make_run(function, inputs, grad, pass_name) for pass_name in PASSES}
    for run in runs.values():
        run()
    return runs


def time_operators(runs: dict, shape, form: str, pass_name: str, args, report: Report) -> None:
    """Measures and reports one pass at one shape."""
    seconds = measure(runs, args.repeats, device=args.device, exclude_launch=True)
    case = {"form": form, "pass": pass_name, **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
    for variant, times in seconds.items():
        metrics = {"ms": spread(times) * 1e3}
        for baseline in ("reference", "reference compiled"):
            metrics[f"{baseline} / this"] = ratio(seconds[baseline], times) if baseline in seconds else None
        if args.device == "cuda":
            metrics["peak MiB"] = peak_bytes(runs[variant], args.device) / 2**20
        report.add({"variant": variant} | case, metrics)


def measure_peak(variant: str, shape, pass_name: str, dtype, device: str) -> tuple[int, int]:
    """Peak memory of a pass beyond its inputs and the output's gradient, and the bytes of w."""

    def prepare(shape):
        operator, grad = OPERATORS[variant], make_grad(shape, dtype, device)
        inputs = operator.make_inputs(shape, True, dtype, device)
        return make_run(operator.make(True), inputs, grad, pass_name), inputs[0].nbytes

    prepare((1, 2, *shape[2:]))[0]()  # compiles kernels
    run, size = prepare(shape)
    return peak_bytes(run, device), size


def report_memory(shape, args, report: Report) -> None:
    for variant, pass_name in product(args.variants or ("numba", "reference"), PASSES):
        case = {"form": "causal", "pass": pass_name, **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
        peak, size = run_in_new_process(measure_peak, variant, shape, pass_name, args.dtype, args.device)
        report.add({"variant": variant} | case, {"peak MiB": peak / 2**20, "peak / bytes of w": peak / size})


def add_op_arguments(parser) -> None:
    shape = {"nargs": 4, "action": "append", "metavar": ("B", "T", "H", "p"), "help": "repeat it for several shapes"}
    parser.add_argument("--shape", type=int, **shape)
    parser.add_argument("--form", nargs="+", choices=("causal", "bidirectional"), default=("causal", "bidirectional"))
    parser.add_argument("--variants", nargs="+", choices=OPERATORS, help="default: all; with --memory numba and reference")
    parser.add_argument("--memory", action="store_true", help="peak memory for long sequences instead of times")


@benchmark("op", OP, add_op_arguments, dtype=True, environment=KEEP_FREED_MEMORY)
def run_op(args, report: Report) -> None:
    if args.memory:
        for shape in args.shape or [LONG_SHAPE]:
            report_memory(tuple(shape), args, report)
        return
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES):
        for form in args.form:
            torch.compiler.reset()
            passes_by_variant = {
                variant: attempt(variant, start_passes, variant, shape, form == "causal", args)
                for variant in args.variants or OPERATORS
            }
            for pass_name in PASSES:
                runs = {variant: passes[pass_name] for variant, passes in passes_by_variant.items() if passes}
                time_operators(runs, shape, form, pass_name, args, report)


# Options beyond the paper ---------------------------------------------------------------------------------------------

OPTIONS = """The cost of the options beyond the paper: the operator with and without decay, and a layer with and without the
short convolution.

The compared variants are interleaved; `this / plain` is the ratio per round. The decay is that of a new model, and per token
scattered around it.
"""
CONV_KERNEL_SIZE = 4


def operator_runs(compiled: bool, pass_name: str, shape, device: str) -> dict:
    """The functions to time for each kind of decay."""
    runs = {}
    for kind, operator in DECAY_OPERATORS.items():
        inputs = operator.make_inputs(shape, True, torch.float32, device)
        op = replace(operator, compiled=compiled).make(True)
        runs[kind] = make_run(op, inputs, make_grad(shape, torch.float32, device), pass_name)
    return runs


def layer_runs(compiled: bool, pass_name: str, shape, device: str) -> dict:
    """The functions to time for an attention layer with and without the convolution."""
    B, T, H, p = shape
    runs = {}
    for kind, kernel_size in {"none": None, f"convolution of {CONV_KERNEL_SIZE}": CONV_KERNEL_SIZE}.items():
        torch.manual_seed(0)
        layer = TokenStatisticsSelfAttention(H * p, H, causal=True, conv_kernel=kernel_size).to(device)
        hidden_states = torch.randn(B, T, H * p).to(device).requires_grad_()

        def attend(hidden_states, *parameters, layer=layer):
            return layer(hidden_states)[0]

        function = torch.compile(attend, dynamic=False) if compiled else attend
        runs[kind] = make_run(
            function, [hidden_states, *layer.parameters()], make_grad((B, T, H * p), torch.float32, device), pass_name
        )
    return runs


@benchmark("options", OPTIONS, repeats=15, environment=KEEP_FREED_MEMORY)
def run_options(args, report: Report) -> None:
    shape = CPU_SHAPES[0]
    for subject, make_runs in {"operator": operator_runs, "layer": layer_runs}.items():
        for code in ("eager", "compiled"):
            torch.compiler.reset()
            for pass_name in PASSES:
                seconds = measure(
                    make_runs(code == "compiled", pass_name, shape, args.device), args.repeats, device=args.device
                )
                for kind, times in seconds.items():
                    case = {"option": kind, "what": subject, "code": code, "pass": pass_name, **dict(zip("BTHp", shape))}
                    report.add(case, {"ms": spread(times) * 1e3, "this / plain": ratio(times, seconds["none"])})


# Compile time of the kernels in numba ---------------------------------------------------------------------------------

FIRST_USE = """Seconds of the first pass of an attention layer in a new process, with an empty and with a filled cache of
compiled kernels. The causal layer has a short convolution and decay per token. The pass imports numba.
"""


def time_first_pass(cache: str, form: str, pass_name: str, dtype: torch.dtype) -> float:
    os.environ["NUMBA_CACHE_DIR"] = cache  # numba reads it when the pass imports it
    options = {"decay_type": "token", "conv_kernel": CONV_KERNEL_SIZE} if form == "causal" else {}
    layer = TokenStatisticsSelfAttention(64, 4, causal=form == "causal", **options).to(dtype)
    inputs = [torch.randn(1, 8, 64).to(dtype).requires_grad_(), *layer.parameters()]
    run = make_run(lambda hidden_states, *_: layer(hidden_states)[0], inputs, make_grad((1, 8, 64), dtype, "cpu"), pass_name)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@benchmark("first_use", FIRST_USE, repeats=3, dtype=True)
def run_first_use(args, report: Report) -> None:
    for form in ("causal", "bidirectional"):
        for pass_name in PASSES:
            seconds: dict[str, list[float]] = {"empty cache": [], "filled cache": []}
            for _ in range(args.repeats):
                with TemporaryDirectory() as cache:
                    for times in seconds.values():
                        times.append(run_in_new_process(time_first_pass, cache, form, pass_name, args.dtype))
            case = {"form": form, "pass": pass_name, "dtype": dtype_name(args.dtype)}
            report.add(case, {f"s, {state}": spread(times) for state, times in seconds.items()})
