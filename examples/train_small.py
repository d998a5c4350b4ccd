# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Trains a small ToST language model on a folder of books: 2.8 M parameters in 76 minutes of one CPU core, or 25 M on a GPU.

    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books-3m
    python examples/train_small.py --text TEXT_FOLDER --output_dir gpt2-books --model gpt2
    python examples/train_small.py --text TEXT_FOLDER --output_dir tost-books --size gpu  # the default where there is a GPU

TEXT_FOLDER has parquet or JSON files with a column "text", one document per record, and a validation split. A byte-level BPE
tokenizer is trained on the training text. `run_clm.py` trains a position-free hybrid, with decay per token, a short
convolution, and attention over 256 tokens in one layer of four, or another model of about as many parameters (`--model`,
`--config_overrides`). The weights are then stored in bfloat16 and evaluated on the test split, or else the validation split,
beside a bigram model of the same training tokens: the loss, and how often the model predicts the tokens of a passage that its
prompt has already. The card of a ToST shows the results and ten sampled continuations, unselected and unedited. An interrupted
run resumes from its last checkpoint; `--model_name_or_path` trains a finished model further, with a lower `--learning_rate`.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import script_setup  # noqa: F401
import evaluate_lm
import run_clm
import torch
from datasets import load_dataset
from evaluation import EvaluationArguments, Measurement, load_source, make_results, print_results, write_results
from scoring import bigram_loss, score
from scripting import has_bf16_instructions, recorded_command, save_with_section
from texts import train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationConfig
from transformers.utils import is_torch_bf16_gpu_available

from tost_hf import ToSTConfig
from tost_hf.files import EVALUATION
from tost_hf.hub.cards import build_card
from tost_hf.hub.results import CARD
from tost_hf.training.metrics import perplexity


PROMPT, SEEDS = "It was a dark night, and", range(10)
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 60}
TITLE = "## Sampled text"
TOKENIZER_CHARACTERS = 8_000_000
PASSAGE, NUM_PASSAGES = 32, 256  # tokens of a passage to copy
DISTANCES = (32, 128, 200, 400)  # from a passage to its repetition, in tokens


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its training."""

    width: int
    layers: int  # of the ToST models
    heads: int
    vocab_size: int
    block_size: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    "cpu": Size(160, 8, 10, 4096, 512, 4, 16_000, 3e-3),
    "gpu": Size(384, 12, 6, 16_384, 1024, 32, 1600, 1e-3),
}
TOST_MODELS = {"hybrid": "tost-hybrid-base", "plus": "tost-plus-base", "published": "tost-base"}  # with their presets
HYBRID_WEIGHTS = 10.5  # of a block of width D, in D^2: 10 with TSSA, 12 with attention
BASELINES = {"gpt2": 12, "mamba2": 6.3}  # the same; Mamba-2 has no MLP
MIN_HEAD_DIM = 32  # of the hybrid, whose attention vLLM computes on CPUs from there on, and of Mamba-2, usually 64
MODELS = (*TOST_MODELS, *BASELINES)


def model_options(name: str, size: Size) -> dict[str, object]:
    """The arguments of `run_clm.py` for a model; baselines get as many layers as make their parameters equal."""
    layers = round(size.layers * HYBRID_WEIGHTS / BASELINES[name]) if name in BASELINES else size.layers
    overrides = {"vocab_size": size.vocab_size, "hidden_size": size.width, "num_hidden_layers": layers}
    num_heads = size.heads if name == "published" else min(size.heads, size.width // MIN_HEAD_DIM)
    heads, positions = {"num_attention_heads": num_heads}, {"max_position_embeddings": size.block_size}
    if name in TOST_MODELS:
        # the published models start LayerScale at 1e-5, for 600,000 steps; short runs need a larger value
        overrides |= heads | {"layer_scale_init_value": 0.3} | (positions if name == "published" else {})
        if name == "plus":  # as many parameters as with attention and a smaller MLP
            overrides["intermediate_size"] = size.width * 17 // 4
        model = {"config_name": TOST_MODELS[name]}
    elif name == "gpt2":
        overrides |= heads | positions | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = {"model_type": "gpt2"}
    else:
        overrides |= {"head_dim": size.width // num_heads, "num_heads": 2 * num_heads}
        overrides |= {"state_size": 32, "n_groups": 1, "chunk_size": 32}
        overrides |= {"tie_word_embeddings": "true"}
        model = {"model_type": "mamba2"}
    return model | {"config_overrides": ",".join(f"{key}={value}" for key, value in overrides.items())}


def train(args: argparse.Namespace, size: Size) -> None:
    """Trains tokenizer and model, or a finished model further, with a checkpoint after every tenth of the run."""
    options: dict[str, object] = {
        "dataset_name": args.text,
        "block_size": size.block_size,
        "warmup_steps": min(2000, size.steps // 10),
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
        "max_eval_samples": 100,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if args.model_name_or_path is None:
            documents = load_dataset(args.text, split="train")["text"]
            max_characters = TOKENIZER_CHARACTERS // len(documents)
            train_tokenizer((document[:max_characters] for document in documents), scratch, size.vocab_size)
            options |= model_options(args.model, size) | {"tokenizer_name": scratch}
            options["config_overrides"] = ",".join(filter(None, (options["config_overrides"], args.config_overrides)))
        run_clm.main(command_line(args, size, options))
    # transformers' server samples only with models that ask for it
    GenerationConfig.from_pretrained(args.output_dir, do_sample=True).save_pretrained(args.output_dir)


def choose_size(args: argparse.Namespace, sizes: dict):
    """The chosen size, with the steps and the learning rate of the command line, if any."""
    size = sizes[args.size]
    return replace(size, steps=args.steps or size.steps, learning_rate=args.learning_rate or size.learning_rate)


def command_line(args: argparse.Namespace, size, options: dict[str, object]) -> list[str]:
    """Options in the form of a command line, with those of both scripts: ten evaluations and checkpoints."""
    has_gpu = torch.cuda.is_available()
    if args.model_name_or_path is not None:
        options = options | {"model_name_or_path": args.model_name_or_path, "dtype": "float32"}
    options = options | {
        "seed": args.seed,
        "learning_rate": size.learning_rate,
        "per_device_train_batch_size": size.batch,
        "max_steps": size.steps,
        "logging_steps": max(1, size.steps // 50),
        "eval_strategy": "steps",
        "eval_steps": max(1, size.steps // 10),
        "save_steps": max(1, size.steps // 10),
        "save_total_limit": 1,
        "save_dtype": "bfloat16",
        "bf16": is_torch_bf16_gpu_available() if has_gpu else has_bf16_instructions(),
        "output_dir": args.output_dir,
        "report_to": "none",
    }
    flags = ["--do_train", "--do_eval", *([] if has_gpu else ["--use_cpu"])]
    return [*flags, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def make_parser(description: str | None, output_dir: str, sizes: dict) -> argparse.ArgumentParser:
    """A parser with the arguments of both scripts."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--output_dir", default=output_dir, help="the folder of the trained model")
    parser.add_argument("--size", choices=sizes, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: those of the size")
    parser.add_argument("--learning_rate", type=float, help="the peak; default: that of the size")
    parser.add_argument("--model_name_or_path", metavar="FOLDER", help="a model of this script to train further")
    parser.add_argument("--seed", type=int, default=42)
    return parser


def evaluate(dataset_name: str, folder: str, context: int) -> None:
    """Adds the held-out loss of the stored weights, copying, and the loss of bigrams to the folder's `evaluation.json`."""
    evaluate_lm.main(["--model", folder, "--tasks", "text", "--datasets", f"text={dataset_name}", "--context", str(context)])
    source = load_source(dataset_name, EvaluationArguments(model=folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = list(itertools.chain.from_iterable(tokenize(source.examples["text"], tokenizer)))
    loss = bigram_loss(tokenize(load_dataset(dataset_name, split="train")["text"], tokenizer), [tokens], len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    protocol = "bigrams of the training tokens, interpolated with unigrams (Witten-Bell); no neural network"
    measurements = [
        Measurement("loss", "Baseline: loss of bigrams, nats per token", loss, len(source.examples), protocol),
        Measurement(
            "perplexity", "Baseline: perplexity of bigrams, per token", perplexity(loss), len(source.examples), protocol
        ),
        *measure_copying(model, torch.tensor(tokens), context),
    ]
    results = make_results("text-generation", f"Text ({source.name})", source, measurements, recorded_command(sys.argv))
    write_results(Path(folder, EVALUATION), results)
    print_results(results)


def measure_copying(model: PreTrainedModel, tokens: torch.Tensor, context: int) -> list[Measurement]:
    """How often a model predicts the tokens of a passage that its prompt has already, by the distance of the two.

    Args:
        tokens: (T,), a text. The passages are evenly spaced in it; between a passage and its repetition stands another part.
        context: the largest number of tokens that the model reads.
    """
    starts = torch.linspace(0, len(tokens) - context, NUM_PASSAGES).long().tolist()
    passages = [tokens[start : start + PASSAGE] for start in starts]
    other_starts = starts[NUM_PASSAGES // 2 :] + starts[: NUM_PASSAGES // 2]
    protocol = f"{NUM_PASSAGES} passages of {PASSAGE} tokens; all but the first of each"
    accuracies = {}
    for distance in (x for x in DISTANCES if x + PASSAGE <= context):
        others = [tokens[start : start + distance - PASSAGE] for start in other_starts]
        sequences = [torch.cat([passage, other, passage]) for passage, other in zip(passages, others)]
        is_correct = [correct for _, correct in score(model, sequences, 32, f"Copying from {distance} tokens back")]
        accuracies["read the first time"] = torch.stack([x[: PASSAGE - 1] for x in is_correct])
        accuracies[f"read {distance} tokens before"] = torch.stack([x[1 - PASSAGE :] for x in is_correct])
    return [
        Measurement(
            "accuracy", f"Copying: predicted tokens of a passage {name}", x.float().mean().item(), NUM_PASSAGES, protocol
        )
        for name, x in accuracies.items()
    ]


def tokenize(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterable[list[int]]:
    """The tokens of each document, with end-of-text before and after it."""
    for document in documents:
        yield [tokenizer.eos_token_id, *tokenizer(document)["input_ids"], tokenizer.eos_token_id]


@torch.no_grad()
def sample_section(folder: str) -> str:
    """A section for the card: one continuation of the prompt for each seed."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    samples = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        tokens = model.generate(**tokenizer(PROMPT, return_tensors="pt"), **SAMPLING)
        samples.append(f"```text\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}\n```")
    note = (
        f"Sampled with temperature {SAMPLING['temperature']} and top-p {SAMPLING['top_p']}, seeds {SEEDS[0]} to {SEEDS[-1]}: "
        "none left out, unedited."
    )
    return "\n\n".join([TITLE, note, *samples])


def finish_card(folder: str, section: str) -> None:
    """Replaces Trainer's card by one with the evaluation and a section at its end."""
    save_with_section(build_card(folder), section, Path(folder, CARD))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "tost-books-3m", SIZES)
    parser.add_argument("--text", required=True, metavar="TEXT_FOLDER", help="a folder of text, or a dataset's Hub id")
    parser.add_argument("--model", choices=MODELS, default="hybrid", help="hybrid, plus and published are ToST models")
    parser.add_argument("--config_overrides", default="", help="of a new model, as in run_clm.py: sliding_window=64")
    args = parser.parse_args(arguments)
    if args.model_name_or_path is not None and args.model != parser.get_default("model"):
        parser.error("--model is for a new model, without --model_name_or_path")
    size = choose_size(args, SIZES)
    train(args, size)
    evaluate(args.text, args.output_dir, size.block_size)
    if AutoConfig.from_pretrained(args.output_dir).model_type == ToSTConfig.model_type:
        section = sample_section(args.output_dir)
        finish_card(args.output_dir, section)
        print(section)


if __name__ == "__main__":
    main()
