# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What the options beyond the paper cost: the operator that forgets beside the plain one, a layer with the short convolution
beside one without.

    python examples/benchmarks/options.py

All that is compared takes turns in one run; `this / plain` is a quotient of each round. The operator is that of op.py, on the
same tokens; the factors of forgetting are those of a new model, and per token scattered around them.
"""

import sys

import torch
from op import PASSES, make_grad, make_inputs, make_run
from rows import parse_arguments
from timing import Report, arguments, measure, print_header, ratio, restart_keeping_freed_memory, spread
from torch.nn import functional as F

from tost_hf import TokenStatisticsSelfAttention, tssa
from tost_hf.model.layers_tost import initial_forget_bias


SHAPE = (4, 1024, 12, 64)
CODES = ("eager", "compiled")
FORGETTING = ("none", "head", "token")
CONV_KERNEL = 4


def forgetting_inputs(kind: str, shape, device: str) -> list[torch.Tensor]:
    """The operator's differentiable inputs, with the logarithms of factors where it forgets."""
    inputs = make_inputs("eager", shape, True, torch.float32, device)
    if kind == "none":
        return inputs
    logit = initial_forget_bias(shape[2])
    if kind == "token":
        logit = logit + 0.5 * torch.randn(*shape[:3], generator=torch.Generator().manual_seed(2))
    return [*inputs, F.logsigmoid(logit).to(device).requires_grad_()]


def operator_runs(code: str, which: str, shape, device: str) -> dict:
    """What is timed for each kind of forgetting."""

    def op(w, temp, denom_bias, log_decay=None):
        return tssa(w, temp, denom_bias, log_decay=log_decay, backend="reference").output

    runs = {}
    for kind in FORGETTING:
        function = torch.compile(op, dynamic=False) if code == "compiled" else op
        inputs = forgetting_inputs(kind, shape, device)
        runs[kind] = make_run(function, inputs, make_grad(shape, torch.float32, device), which)
    return runs


def layer_runs(code: str, which: str, shape, device: str) -> dict:
    """What is timed with and without the convolution, of one attention layer."""
    B, T, H, p = shape
    runs = {}
    for kind, kernel in {"none": None, f"convolution of {CONV_KERNEL}": CONV_KERNEL}.items():
        torch.manual_seed(0)
        layer = TokenStatisticsSelfAttention(H * p, H, causal=True, conv_kernel=kernel, backend="reference").to(device)
        tokens = torch.randn(B, T, H * p).to(device).requires_grad_()

        def attend(tokens, *parameters, layer=layer):
            return layer(tokens)[0]

        function = torch.compile(attend, dynamic=False) if code == "compiled" else attend
        runs[kind] = make_run(function, [tokens, *layer.parameters()], make_grad((B, T, H * p), torch.float32, device), which)
    return runs


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--shape", type=int, nargs=4, default=SHAPE, metavar=("B", "T", "H", "p"))
    parser.add_argument("--code", nargs="+", choices=CODES, default=CODES)
    args = parse_arguments(parser, argv, __file__)
    print_header(args.device)
    report, shape = Report(args), tuple(args.shape)
    for what, make in {"operator": operator_runs, "layer": layer_runs}.items():
        for code in args.code:
            torch.compiler.reset()
            for which in PASSES:
                runs = make(code, which, shape, args.device)
                seconds = measure({kind: lambda run=run: run for kind, run in runs.items()}, args.repeats, device=args.device)
                for kind, times in seconds.items():
                    case = {"option": kind, "what": what, "code": code, "pass": which, **dict(zip("BTHp", shape))}
                    report.add(case, {"ms": spread(times) * 1e3, "this / plain": ratio(times, seconds["none"])})
    return 0


if __name__ == "__main__":
    restart_keeping_freed_memory()
    sys.exit(main())
