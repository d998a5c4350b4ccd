# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A position-free ToST far past the length it was trained at: what the constant state is worth, and what it costs.

    python examples/research/long_context.py --text TEXT_FOLDER
    python examples/research/long_context.py --text TEXT_FOLDER --model my-position-free-tost
    python examples/research/long_context.py --text TEXT_FOLDER --variant "ToST conv token" --length 16384

Trains a small model with max_position_embeddings=None on blocks of 1,024 tokens (or loads one with its tokenizer), then reads
the validation text as one sequence of up to 262,144 tokens, in pieces, with the cache carrying the state. For each range of
positions: the mean loss; the loss of the same tokens when the state is thrown away every 1,024 tokens, so that their
difference is what the older past is worth; by how much the entropy of the memberships falls short of its highest value, as a
share of it (0: Pi is flat, every head has the same share of every token); how far the moments (sum_weighted_sq /
sum_membership) move while the range is read, relative to their size; time, memory beyond the model's, bytes of the cache.
"""

import itertools
import math
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from compare_lm import cut, encode, load_texts, shorten, train_tokenizer
from experiments import Results, make_parser, over_seeds, train
from language_models import HYBRID, NO_STATISTICS, OPTIONS, make_language_model
from rows import parse_arguments
from timing import peak_bytes

from tost_hf import CausalStatisticsCache


TRAINED_AT = 1024  # tokens
PIECE = 1024  # tokens of one forward pass; the first ranges of positions are shorter
FIRST_RANGE = 64
VOCAB_SIZE = 1024
PURE = tuple(name for name in OPTIONS if name not in (HYBRID, NO_STATISTICS))  # those with statistics in every layer


def position_ranges(length: int, first: int) -> list[tuple[int, int]]:
    """(0, first), (first, 2 * first), (2 * first, 4 * first), ... up to `length`."""
    borders = [0, min(first, length)]
    while borders[-1] < length:
        borders.append(min(2 * borders[-1], length))
    return list(itertools.pairwise(borders))


@torch.no_grad()
def read_piece(model, tokens: torch.Tensor, targets: torch.Tensor, cache: CausalStatisticsCache) -> tuple:
    """Losses (T,) of the targets (T,) after the tokens (T,); the memberships' shortfall of entropy in each layer (L, T)."""
    outputs = model(input_ids=tokens[None].to(model.device), past_key_values=cache, output_memberships=True)
    losses = F.cross_entropy(outputs.logits[0].float(), targets.to(model.device), reduction="none").cpu()
    memberships = torch.stack([m[0] for m in outputs.memberships]).double()  # (L, H, T)
    entropy = torch.special.entr(memberships).sum(1) / math.log(memberships.shape[1])
    return losses, (1 - entropy).cpu()


def moments(cache: CausalStatisticsCache) -> torch.Tensor:
    """Every layer's moments, in a row."""
    return torch.cat([(x.sum_weighted_sq / x.sum_membership.unsqueeze(-1)).flatten().double().cpu() for x in cache.layers])


def read(model, tokens: torch.Tensor) -> list[dict[str, float]]:
    """Reads the tokens as one sequence; the metrics of each range of positions."""
    length, cache = len(tokens) - 1, CausalStatisticsCache(model.config)
    kept, thrown, shortfalls, seconds, peaks, moments_at = [], [], [], [], [], {}
    for place in range(0, length, PIECE):
        stop = min(place + PIECE, length)
        piece, targets = tokens[place:stop], tokens[place + 1 : stop + 1]

        def run(piece=piece, targets=targets):
            begin = time.perf_counter()
            losses, shortfall = read_piece(model, piece, targets, cache)
            seconds.append(time.perf_counter() - begin)
            kept.append(losses)
            shortfalls.append(shortfall)

        peaks.append(peak_bytes(run, model.device))
        thrown.append(read_piece(model, piece, targets, CausalStatisticsCache(model.config))[0])
        moments_at[stop] = moments(cache)
    kept, thrown, shortfalls = torch.cat(kept), torch.cat(thrown), torch.cat(shortfalls, 1)

    rows = []
    for start, stop in position_ranges(length, FIRST_RANGE):
        part = slice(start, stop)
        row = {
            "start": start,
            "stop": stop,
            "loss": kept[part].mean().item(),
            "loss_without_older_past": thrown[part].mean().item(),
            "entropy_shortfall": shortfalls[:, part].mean().item(),
            "entropy_shortfall_highest_layer": shortfalls[:, part].mean(1).max().item(),
            "cache_bytes": sum(x.nbytes for layer in cache.layers for x in layer.state),
        }
        if stop in moments_at:
            row["moment_norm"] = moments_at[stop].norm().item()
        if start in moments_at:
            row["moment_change"] = ((moments_at[stop] - moments_at[start]).norm() / moments_at[start].norm()).item()
            pieces = slice(start // PIECE, -(-stop // PIECE))
            row["microseconds_a_token"] = sum(seconds[pieces]) / (stop - start) * 1e6
            row["peak_mebibytes"] = max(peaks[pieces]) / 2**20
        rows.append(row)
    return rows


def load(name: str):
    """A model of one's own and its tokenizer.

    Raises:
        ValueError: the model is not a ToST without positions.
    """
    model = AutoModelForCausalLM.from_pretrained(name).to(torch.accelerator.current_accelerator() or "cpu").eval()
    if model.config.model_type != "tost" or model.config.max_position_embeddings is not None:
        raise ValueError("--model must be a ToST without positions (max_position_embeddings=None).")
    return model, AutoTokenizer.from_pretrained(name)


def train_models(training: list[str], validation: list[str], args) -> tuple[dict, torch.Tensor]:
    """One small model for each seed, and the tokens of the validation text."""
    training = shorten(training, 4_000_000)
    tokenizer = train_tokenizer(training, VOCAB_SIZE)
    tokens = encode(tokenizer, validation)
    examples = cut(encode(tokenizer, training), TRAINED_AT)
    held_out = cut(tokens, TRAINED_AT)[:32]

    def run(seed, learning_rate):
        vocab_size = tokenizer.get_vocab_size()
        model = make_language_model(
            args.variant, vocab_size=vocab_size, width=args.width, layers=args.layers, head_dim=16, context=None
        )
        trainer = train(
            model,
            examples,
            steps=args.steps,
            learning_rate=learning_rate,
            seed=seed,
            batch_size=args.batch,
            eval_dataset=held_out,
            prediction_loss_only=True,
        )
        return trainer.model.eval(), {"loss": trainer.evaluate()["eval_loss"]}

    found = over_seeds(run, args.seeds, args.learning_rates, lambda metrics: -metrics["loss"])
    return {seed: model for seed, (model, _) in found.items()}, tokens


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, steps=400, learning_rates=(3e-3,))
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--model", metavar="MODEL_FOLDER", help="a position-free ToST with its tokenizer, not to train one")
    parser.add_argument("--variant", choices=PURE, default="ToST", help="which ToST to train")
    parser.add_argument("--length", type=int, default=262_144, help="tokens to read")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help=f"blocks of {TRAINED_AT:,} tokens per step")
    args = parse_arguments(parser, arguments, __file__)
    results = Results(args)
    training, validation = load_texts(args.text)
    if args.model is None:
        models, tokens = train_models(training, validation, args)
        steps = args.steps
    else:
        try:
            model, tokenizer = load(args.model)
        except ValueError as error:
            parser.error(str(error))
        text = (tokenizer.eos_token or "\n").join(validation)
        models, tokens, steps = {args.seeds[0]: model}, torch.tensor(tokenizer(text, verbose=False)["input_ids"]), 0
    if len(tokens) <= args.length:
        print(f"The validation text has {len(tokens):,} tokens only; reading as many.")
    for seed, model in models.items():
        for row in read(model, tokens[: args.length + 1]):
            task = f"{row.pop('start'):,} to {row.pop('stop'):,}"
            results.add(
                row,
                task=task,
                model=f"{args.variant}, no positions",
                network=model,
                steps=steps,
                batch=args.batch,
                context=TRAINED_AT,
                seed=seed,
            )
    results.print_means()


if __name__ == "__main__":
    main()
