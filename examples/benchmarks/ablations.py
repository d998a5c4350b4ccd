# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Two choices inside TSSA, on CIFAR-10: the width of a head at equal width of the model, and what memberships are made from.

    python examples/benchmarks/ablations.py --images CIFAR10_FOLDER

The paper leaves open how wide a head should be; here heads of 16, 32, 64 and 128 channels at a width of 128 (the last is one
head alone, whose memberships are all 1). And it reports that normalising each channel over the tokens before the scores are
made matters (CIFAR-10, 400 epochs: 91.2 % with, 85.2 % without): `raw scores` are made from the squares as they are. Same
data, steps and learning rates to choose from as in compare_vision.py.
"""

import torch
from compare_vision import compare, make_classifier, make_parser_of_images
from experiments import Results
from rows import parse_arguments
from torch import nn

from tost_hf import TokenStatisticsSelfAttention


HEAD_DIMS = (16, 32, 64, 128)
RAW_HEAD_DIM = 32


def raw_score_tssa(w: torch.Tensor, temp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional TSSA whose scores are plain sums of squares: Pi = softmax over heads of temp * sum_c w_c^2.

    Args:
        w: projected tokens, (B, T, H, p).
        temp: (H, 1).

    Returns:
        The output (B, T, H, p) and the membership (B, H, T).
    """
    squares = w * w
    membership = (squares.sum(-1) * temp.reshape(-1)).softmax(-1)  # (B, T, H)
    weight = membership.unsqueeze(-1)
    moment = (squares * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    return -(w * weight) / (1 + moment), membership.transpose(1, 2)


class RawScoreAttention(TokenStatisticsSelfAttention):
    """The vision models' TSSA layer without the normalisation inside the scores."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        B, T, _ = hidden_states.shape
        out, membership = raw_score_tssa(self.in_proj(hidden_states).view(B, T, self.num_heads, self.head_dim), self.temp)
        return self.out_proj(out.reshape(B, T, -1)), membership


def with_raw_scores(model: nn.Module) -> nn.Module:
    """The same model, same weights, other scores."""
    for module in model.modules():
        if type(module) is TokenStatisticsSelfAttention:
            module.__class__ = RawScoreAttention
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser_of_images(__doc__, steps=300)
    parser.add_argument("--head_dims", type=int, nargs="+", default=list(HEAD_DIMS))
    args = parse_arguments(parser, arguments, __file__)
    for head_dim in (*args.head_dims, RAW_HEAD_DIM):
        if args.width % head_dim:
            parser.error(f"a width of {args.width} cannot be split into heads of {head_dim} channels")

    def maker(head_dim):
        return lambda names, side: make_classifier(args, names, side, num_attention_heads=args.width // head_dim)

    makers = {f"{head_dim} channels a head": maker(head_dim) for head_dim in args.head_dims}
    makers[f"{RAW_HEAD_DIM} channels a head, raw scores"] = lambda names, side: with_raw_scores(
        maker(RAW_HEAD_DIM)(names, side)
    )
    compare(args, Results(args), "CIFAR-10", makers)


if __name__ == "__main__":
    main()
