# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The causal TSSA operator on the machine at hand: this package against the formulas written down literally.

    python examples/benchmarks/op.py

Prints the median time of both, eager and float32, forward and forward + backward, and their ratio.
"""

import argparse

import torch
from timing import interleaved_medians, print_header

from tost_hf import tssa


def literal(w, temp, denom_bias):
    """The formulas of causal TSSA in their order, head-major, with autograd's backward."""
    w = w.transpose(1, 2)
    sq = w.square()
    denom = sq.cumsum(-2).clamp_min(1e-12)
    score = temp[None, :, None] * (sq / denom + denom_bias.T[None, :, :, None]).sum(-1)
    membership = score.softmax(1)
    moment = (membership[..., None] * sq).cumsum(-2) / (membership.cumsum(-1) + 1e-8)[..., None]
    return (-(w * membership[..., None]) / (1 + moment)).transpose(1, 2).contiguous()


def ours(w, temp, denom_bias):
    return tssa(w, temp, denom_bias).output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(4, 1024, 12, 64), metavar=("B", "T", "H", "p"))
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    print_header()
    B, T, H, p = args.shape
    inputs = [torch.randn(B, T, H, p), torch.ones(H), torch.zeros(T, H)]
    grad = torch.randn(B, T, H, p)

    def forward(op):
        def run():
            with torch.no_grad():
                op(*inputs)

        return lambda: run

    def forward_backward(op):
        leaves = [x.clone().requires_grad_() for x in inputs]
        return lambda: lambda: torch.autograd.grad(op(*leaves), leaves, grad)

    print(f"causal, float32, B {B}, T {T}, H {H}, p {p}; median of {args.repeats}")
    print(f"{'':20}{'literal ms':>12}{'tost_hf ms':>12}{'ratio':>8}")
    for name, measure in (("forward", forward), ("forward + backward", forward_backward)):
        medians = interleaved_medians({"literal": measure(literal), "ours": measure(ours)}, args.repeats)
        theirs, mine = medians["literal"] * 1e3, medians["ours"] * 1e3
        print(f"{name:20}{theirs:12.1f}{mine:12.1f}{theirs / mine:8.2f}")


if __name__ == "__main__":
    main()
