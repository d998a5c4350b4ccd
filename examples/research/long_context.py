# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Loss and memberships of a position-free ToST by position, far beyond its training length.

    python examples/benchmarks/run.py long_context --text TEXT_FOLDER
    python examples/benchmarks/run.py long_context --text TEXT_FOLDER --variant "ToST conv token" --length 16384

Trains a small model with position_embedding_type="none" on blocks of 1,024 tokens, then reads the validation text as one
sequence of up to 262,144 tokens in chunks, with the recurrent state in the cache. Reports for each range of positions: the
mean loss; the loss of the same tokens if this state is reset every 1,024 tokens, so that their difference is the gain by older
tokens; and the normalized distance of the memberships' entropy from its maximum (0: the membership Pi is uniform over the
heads).
"""

import itertools
import math

import torch
from compare_lm import encode, load_documents, shorten, split_into_examples
from language_models import ATTENTION_TYPES, NO_STATISTICS, OPTIONS, make_language_model
from registry import benchmark
from texts import train_bpe
from torch.nn import functional as F
from training import Results, run_seeds, train

from tost_hf import ToSTCache


TRAINING_LENGTH = 1024  # tokens
CHUNK = 1024  # tokens of a forward pass
FIRST_RANGE = 64
SIZES = {"vocab_size": 1024, "width": 96, "layers": 5, "head_dim": 16, "context": None}
BATCH = 2  # blocks per training step
WITHOUT_STATISTICS = (*ATTENTION_TYPES, NO_STATISTICS)  # in all layers or in some
VARIANTS = tuple(name for name in OPTIONS if name not in WITHOUT_STATISTICS)


def position_ranges(length: int, first: int) -> list[tuple[int, int]]:
    """(0, first), (first, 2 * first), (2 * first, 4 * first), ... up to `length`."""
    boundaries = [0, min(first, length)]
    while boundaries[-1] < length:
        boundaries.append(min(2 * boundaries[-1], length))
    return list(itertools.pairwise(boundaries))


@torch.no_grad()
def read_chunk(model, tokens: torch.Tensor, targets: torch.Tensor, cache: ToSTCache) -> tuple:
    """Losses (T,) of the targets (T,) after the tokens (T,); 1 - entropy / ln H of the memberships in each layer (L, T)."""
    outputs = model(input_ids=tokens[None].to(model.device), past_key_values=cache, output_memberships=True)
    losses = F.cross_entropy(outputs.logits[0].float(), targets.to(model.device), reduction="none").cpu()
    memberships = torch.stack([m[0] for m in outputs.memberships]).double()  # (L, H, T)
    entropy = torch.special.entr(memberships).sum(1) / math.log(memberships.shape[1])
    return losses, (1 - entropy).cpu()


def evaluate_sequence(model, tokens: torch.Tensor) -> list[dict[str, float]]:
    """Metrics of each range of positions of the tokens, read as one sequence in chunks."""
    length, cache = len(tokens) - 1, ToSTCache(model.config)
    losses, reset_losses, shortfalls = [], [], []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        chunk, targets = tokens[start:stop], tokens[start + 1 : stop + 1]
        loss, shortfall = read_chunk(model, chunk, targets, cache)
        losses.append(loss)
        shortfalls.append(shortfall)
        reset_losses.append(read_chunk(model, chunk, targets, ToSTCache(model.config))[0])
    losses, reset_losses, shortfalls = torch.cat(losses), torch.cat(reset_losses), torch.cat(shortfalls, 1)
    return [
        {
            "start": start,
            "stop": stop,
            "loss": losses[start:stop].mean().item(),
            "loss_with_state_reset": reset_losses[start:stop].mean().item(),
            "entropy_shortfall": shortfalls[:, start:stop].mean().item(),
        }
        for start, stop in position_ranges(length, FIRST_RANGE)
    ]


def add_arguments(parser) -> None:
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--variant", choices=VARIANTS, default="ToST", help="which ToST to train")
    parser.add_argument("--length", type=int, default=262_144, help="tokens to read")


@benchmark("long_context", __doc__, add_arguments, trains=True, steps=400, learning_rates=(3e-3,))
def run(args, results: Results) -> None:
    training, validation = load_documents(args.text)
    training = shorten(training, 4_000_000)
    tokenizer = train_bpe(training, SIZES["vocab_size"])
    tokens = encode(tokenizer, validation)
    examples = split_into_examples(encode(tokenizer, training), TRAINING_LENGTH)
    held_out = split_into_examples(tokens, TRAINING_LENGTH)[:32]
    if len(tokens) <= args.length:
        print(f"The validation text has {len(tokens):,} tokens only; reading as many.")

    def train_one(seed, learning_rate):
        model = make_language_model(args.variant, **SIZES)
        options = {"learning_rate": learning_rate, "batch_size": BATCH, "eval_dataset": held_out}
        trainer = train(model, examples, steps=args.steps, seed=seed, prediction_loss_only=True, **options)
        return trainer.model.eval(), {"loss": trainer.evaluate()["eval_loss"]}

    runs = run_seeds(train_one, args.seeds, args.learning_rates, lambda metrics: -metrics["loss"], args.variant)
    case = {"model": f"{args.variant}, no positions", "steps": args.steps, "batch": BATCH, "context": TRAINING_LENGTH}
    for seed, (model, _) in runs.items():
        for metrics in evaluate_sequence(model, tokens[: args.length + 1]):
            task = f"{metrics.pop('start'):,} to {metrics.pop('stop'):,}"
            results.add(metrics, task=task, network=model, seed=seed, **case)
    results.print_means()
