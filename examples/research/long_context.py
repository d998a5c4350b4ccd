# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""A position-free ToST far beyond its training length: loss, memberships, time and memory by position.

    python examples/benchmarks/run.py long_context --text TEXT_FOLDER
    python examples/benchmarks/run.py long_context --text TEXT_FOLDER --model my-position-free-tost
    python examples/benchmarks/run.py long_context --text TEXT_FOLDER --variant "ToST conv token" --length 16384

Trains a small model with max_position_embeddings=None on blocks of 1,024 tokens (or loads one with its tokenizer), then
reads the validation text as one sequence of up to 262,144 tokens in chunks, with the state in the cache. For each range of
positions: the mean loss; the loss of the same tokens when the state is dropped every 1,024 tokens, so that their difference
is the gain by older tokens; the normalised distance of the memberships' entropy from its maximum (0: Pi is uniform over the
heads); the relative change of the moments (sum_weighted_sq / sum_membership) over the range; time, memory beyond the
model's, bytes of the cache.
"""

import itertools
import math
import time

import torch
from compare_lm import encode, load_texts, shorten, split_into_examples
from demo import train_bpe
from language_models import HYBRID, NO_STATISTICS, OPTIONS, make_language_model
from registry import benchmark
from timing import peak_bytes
from torch.nn import functional as F
from training import Results, run_seeds, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from tost_hf import ToSTCache


TRAINED_AT = 1024  # tokens
CHUNK = 1024  # tokens of one forward pass
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
def read_chunk(model, tokens: torch.Tensor, targets: torch.Tensor, cache: ToSTCache) -> tuple:
    """Losses (T,) of the targets (T,) after the tokens (T,); 1 - entropy / ln H of the memberships in each layer (L, T)."""
    outputs = model(input_ids=tokens[None].to(model.device), past_key_values=cache, output_memberships=True)
    losses = F.cross_entropy(outputs.logits[0].float(), targets.to(model.device), reduction="none").cpu()
    memberships = torch.stack([m[0] for m in outputs.memberships]).double()  # (L, H, T)
    entropy = torch.special.entr(memberships).sum(1) / math.log(memberships.shape[1])
    return losses, (1 - entropy).cpu()


def moments(cache: ToSTCache) -> torch.Tensor:
    """The concatenated moments of all layers."""
    return torch.cat([(x.sum_weighted_sq / x.sum_membership.unsqueeze(-1)).flatten().double().cpu() for x in cache.layers])


def read(model, tokens: torch.Tensor) -> list[dict[str, float]]:
    """Reads the tokens as one sequence; the metrics of each range of positions."""
    length, cache = len(tokens) - 1, ToSTCache(model.config)
    losses, recent_losses, shortfalls, seconds, peaks, moments_at = [], [], [], [], [], {}
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        chunk, targets = tokens[start:stop], tokens[start + 1 : stop + 1]

        def run(chunk=chunk, targets=targets):
            begin = time.perf_counter()
            loss, shortfall = read_chunk(model, chunk, targets, cache)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
            shortfalls.append(shortfall)

        peaks.append(peak_bytes(run, model.device))
        recent_losses.append(read_chunk(model, chunk, targets, ToSTCache(model.config))[0])
        moments_at[stop] = moments(cache)
    losses, recent_losses, shortfalls = torch.cat(losses), torch.cat(recent_losses), torch.cat(shortfalls, 1)

    ranges = []
    for start, stop in position_ranges(length, FIRST_RANGE):
        part = slice(start, stop)
        metrics = {
            "start": start,
            "stop": stop,
            "loss": losses[part].mean().item(),
            "loss_with_state_reset": recent_losses[part].mean().item(),
            "entropy_shortfall": shortfalls[:, part].mean().item(),
            "entropy_shortfall_highest_layer": shortfalls[:, part].mean(1).max().item(),
            "cache_bytes": sum(x.nbytes for layer in cache.layers for x in layer.state),
        }
        if stop in moments_at:
            metrics["moment_norm"] = moments_at[stop].norm().item()
        if start in moments_at:
            metrics["moment_change"] = ((moments_at[stop] - moments_at[start]).norm() / moments_at[start].norm()).item()
            chunks = slice(start // CHUNK, -(-stop // CHUNK))
            metrics["microseconds_a_token"] = sum(seconds[chunks]) / (stop - start) * 1e6
            metrics["peak_mebibytes"] = max(peaks[chunks]) / 2**20
        ranges.append(metrics)
    return ranges


def load(name: str):
    """A trained model and its tokenizer.

    Raises:
        SystemExit: the model is not a ToST without positions.
    """
    model = AutoModelForCausalLM.from_pretrained(name).to(torch.accelerator.current_accelerator() or "cpu").eval()
    if model.config.model_type != "tost" or model.config.max_position_embeddings is not None:
        raise SystemExit("--model must be a ToST without positions (max_position_embeddings=None).")
    return model, AutoTokenizer.from_pretrained(name)


def train_models(training: list[str], validation: list[str], args) -> tuple[dict, torch.Tensor]:
    """One small model for each seed, and the tokens of the validation text."""
    training = shorten(training, 4_000_000)
    tokenizer = train_bpe(training, VOCAB_SIZE)
    tokens = encode(tokenizer, validation)
    examples = split_into_examples(encode(tokenizer, training), TRAINED_AT)
    held_out = split_into_examples(tokens, TRAINED_AT)[:32]

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

    found = run_seeds(run, args.seeds, args.learning_rates, lambda metrics: -metrics["loss"], args.variant)
    return {seed: model for seed, (model, _) in found.items()}, tokens


def add_arguments(parser) -> None:
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--model", metavar="MODEL_FOLDER", help="a position-free ToST with its tokenizer, not to train one")
    parser.add_argument("--variant", choices=PURE, default="ToST", help="which ToST to train")
    parser.add_argument("--length", type=int, default=262_144, help="tokens to read")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help=f"blocks of {TRAINED_AT:,} tokens per step")


@benchmark("long_context", __doc__, add_arguments, trains=True, steps=400, learning_rates=(3e-3,))
def run(args, results: Results) -> None:
    training, validation = load_texts(args.text)
    if args.model is None:
        models, tokens = train_models(training, validation, args)
        steps = args.steps
    else:
        model, tokenizer = load(args.model)
        text = (tokenizer.eos_token or "\n").join(validation)
        models, tokens, steps = {args.seeds[0]: model}, torch.tensor(tokenizer(text, verbose=False)["input_ids"]), 0
    if len(tokens) <= args.length:
        print(f"The validation text has {len(tokens):,} tokens only; reading as many.")
    for seed, model in models.items():
        for metrics in read(model, tokens[: args.length + 1]):
            task = f"{metrics.pop('start'):,} to {metrics.pop('stop'):,}"
            results.add(
                metrics,
                task=task,
                model=f"{args.variant}, no positions",
                network=model,
                steps=steps,
                batch=args.batch,
                context=TRAINED_AT,
                seed=seed,
            )
    results.print_means()
