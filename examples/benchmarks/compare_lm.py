# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""ToST and transformers' GPT-2 trained alike on a folder of text: at equal width and depth, and with equal parameters.

    python examples/benchmarks/compare_lm.py --text TEXT_FOLDER
    python examples/benchmarks/compare_lm.py --text TEXT_FOLDER --size large  # about 25 M parameters: for a GPU

A folder of .txt files, or of parquet or JSON files with a column "text" (one document per row), or a dataset's Hub id. Where
there is no validation split, the last tenth of the characters is held out. A byte-level BPE tokenizer is trained on the
training text; that of the small size has no merges, so that each token is one byte. A block of ToST has five sixths of the
parameters of one of GPT-2, so that six blocks stand beside five: "ToST" has GPT-2's width and depth, "ToST, deeper" its
parameters. `bigram` counts which token follows which in the training text and looks at nothing but the current token: a model
that does not beat it makes no use of its context.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import DatasetDict, load_dataset
from experiments import Results, make_language_model, make_parser, over_seeds, train
from rows import Panel, Spread, around_mean, parse_arguments, plot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Size:
    """Sizes of a comparison; `layers` are GPT-2's, a multiple of five."""

    width: int
    layers: int
    head_dim: int
    vocab_size: int
    context: int
    batch: int
    steps: int
    train_characters: int | None  # used of the training text, all if None
    validation_characters: int


SIZES = {
    "small": Size(64, 5, 16, 257, 128, 8, 400, 4_000_000, 16_384),  # 257: bytes and the end of the text
    "large": Size(448, 10, 64, 4096, 1024, 32, 4000, None, 2_000_000),
}


def load_texts(name: str) -> tuple[list[str], list[str]]:
    """Training and validation documents of a folder or a Hub dataset."""
    if any(Path(name).glob("*.txt")):
        splits = load_dataset("text", data_dir=name, sample_by="document")
    else:
        splits = load_dataset(name)
    assert isinstance(splits, DatasetDict)
    training = splits["train"]["text"]
    if "validation" in splits:
        return list(training), list(splits["validation"]["text"])
    text = "\n".join(training)
    border = len(text) * 9 // 10
    return [text[:border]], [text[border:]]


def shorten(texts: list[str], characters: int | None) -> list[str]:
    """About so many characters: the beginning of every text."""
    return texts if characters is None else [text[: characters // len(texts)] for text in texts]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of the kind GPT-2 has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """The tokens of all texts in a row, each text ended by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [piece for text in texts for piece in text.splitlines(keepends=True)]  # long texts are slow to encode whole
    ids = [encoding.ids for encoding in tokenizer.encode_batch(pieces)]
    tokens, done = [], 0
    for text in texts:
        count = len(text.splitlines(keepends=True))
        for line in ids[done : done + count]:
            tokens.extend(line)
        tokens.append(end)
        done += count
    return torch.tensor(tokens)


def cut(tokens: torch.Tensor, context: int) -> list[dict[str, torch.Tensor]]:
    """Examples of `context` tokens each."""
    blocks = tokens[: len(tokens) // context * context].view(-1, context)
    return [{"input_ids": block, "labels": block} for block in blocks]


def bigram_loss(training: torch.Tensor, blocks: list[dict], vocab_size: int, smoothing: float = 0.1) -> float:
    """Mean cross-entropy (nats per token) of the counted pairs of neighbours, over the same targets as the models'."""
    counts = torch.bincount(training[:-1] * vocab_size + training[1:], minlength=vocab_size**2).view(vocab_size, vocab_size)
    unigram = (torch.bincount(training, minlength=vocab_size) + smoothing) / (len(training) + smoothing * vocab_size)
    prior = smoothing * vocab_size
    probability = (counts + prior * unigram) / (counts.sum(1, keepdim=True) + prior)
    pairs = torch.stack([block["input_ids"] for block in blocks])
    return -probability[pairs[:, :-1], pairs[:, 1:]].log().mean().item()


@dataclass(frozen=True)
class Data:
    """A text cut into examples of `context` tokens, and the loss of a table of pairs of neighbours on the held-out ones."""

    examples: list[dict[str, torch.Tensor]]
    held_out: list[dict[str, torch.Tensor]]
    vocab_size: int
    bigram_loss: float


def prepare(text: str, size: Size) -> Data:
    """Loads a text, trains its tokenizer, cuts it into examples."""
    training, validation = load_texts(text)
    training = shorten(training, size.train_characters)
    tokenizer = train_tokenizer(shorten(training, 4_000_000), size.vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    tokens = encode(tokenizer, training)
    held_out = cut(encode(tokenizer, shorten(validation, size.validation_characters)), size.context)
    baseline = bigram_loss(tokens, held_out, vocab_size)
    print(f"{len(tokens):,} training tokens, {len(held_out) * size.context:,} to validate; bigram {baseline:.3f}", flush=True)
    return Data(cut(tokens, size.context), held_out, vocab_size, baseline)


def train_language_model(name: str, layers: int, data: Data, size: Size, *, steps: int, learning_rate: float, seed: int):
    """The trainer, with eight evaluations in its history, and the loss at the end."""
    model = make_language_model(
        name, vocab_size=data.vocab_size, width=size.width, layers=layers, head_dim=size.head_dim, context=size.context
    )
    trainer = train(
        model,
        data.examples,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        batch_size=size.batch,
        eval_dataset=data.held_out,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        per_device_eval_batch_size=size.batch,
        prediction_loss_only=True,
    )
    return trainer, {"loss": trainer.evaluate()["eval_loss"]}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, steps=None, learning_rates=(3e-3, 1e-2))
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--name", default="text", help="what the text is called in the table and the plot")
    parser.add_argument("--size", choices=SIZES, default="small")
    args = parse_arguments(parser, arguments, __file__)
    size = SIZES[args.size]
    steps = size.steps if args.steps is None else args.steps
    data, results, curves = prepare(args.text, size), Results(args), {}
    deeper = size.layers * 6 // 5
    for label, name, layers in (
        ("GPT-2", "GPT-2", size.layers),
        ("ToST", "ToST", size.layers),
        ("ToST, deeper", "ToST", deeper),
    ):

        def run(seed, learning_rate, label=label, name=name, layers=layers):
            trainer, metrics = train_language_model(
                name, layers, data, size, steps=steps, learning_rate=learning_rate, seed=seed
            )
            print(f"{label}, seed {seed}, learning rate {learning_rate}: {metrics['loss']:.3f}", flush=True)
            return trainer, metrics

        found = over_seeds(run, args.seeds, args.learning_rates, lambda metrics: -metrics["loss"])
        baseline = {"bigram_loss": data.bigram_loss}
        models = {seed: (trainer.model, metrics | baseline) for seed, (trainer, metrics) in found.items()}
        results.add_seeds(models, task=args.name, model=label, steps=steps, batch=size.batch, context=size.context)
        curves[label] = curve([trainer for trainer, _ in found.values()])
    print(results.table("loss", [args.name], form=".3f"))
    print(f"bigram: {data.bigram_loss:.3f} nats per token, perplexity {math.exp(data.bigram_loss):.1f}")
    curves["bigram"] = dict.fromkeys(next(iter(curves.values())), Spread(*[data.bigram_loss] * 3))
    file = args.results / f"compare_lm_{args.name.replace(' ', '_')}_{args.size}.png"
    plot(file, Panel(curves, "step", f"validation loss on {args.name} (nats per token)", "linear", "linear"))


def curve(runs: list) -> dict[int, Spread]:
    """Validation loss at each step that all runs have, around its mean over the runs."""
    histories = [{log["step"]: log["eval_loss"] for log in run.state.log_history if "eval_loss" in log} for run in runs]
    steps = [step for step in histories[0] if all(step in history for history in histories)]
    return {step: around_mean([history[step] for history in histories]) for step in steps}


if __name__ == "__main__":
    main()
