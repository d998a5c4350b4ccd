# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Time and memory of classifying a long text: the small trained ToST of this repository, and BERTs of as many parameters.

    OMP_NUM_THREADS=1 python examples/benchmarks/run.py text_classification

One BERT has positions for the longest text, the others read only the first 128, 256 and 512 tokens. They have random weights,
which do not change the cost. One text at a time, in float32; the models are interleaved. The memory is the peak of a forward
pass beyond the loaded model.
"""

import functools
from pathlib import Path

import torch
from registry import benchmark
from timing import KEEP_FREED_MEMORY, Report, measure, peak_bytes, ratio, run_in_new_process, spread
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

import tost_hf  # noqa: F401  registers the models with the Auto classes


MODEL = Path(__file__).resolve().parents[2] / "model_cards" / "trained" / "tost-imdb-2m"
CUTS = (128, 256, 512)
WIDTH, CUT_WIDTH = 112, 128  # of BERT; without a large table of positions a wider one has as many parameters


def make_bert(width: int, max_length: int, vocab_size: int) -> PreTrainedModel:
    sizes = {"hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 4 * width}
    config = BertConfig(**sizes, max_position_embeddings=max_length, vocab_size=vocab_size)
    return BertForSequenceClassification(config)


def make_models(folder: str, longest: int) -> dict[str, tuple[PreTrainedModel, int]]:
    """The models by name, each with the number of tokens that it reads."""
    tost = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    vocab_size = tost.config.vocab_size
    models = {"ToST": (tost, longest), "BERT": (make_bert(WIDTH, longest, vocab_size), longest)}
    models |= {f"BERT, first {cut} tokens": (make_bert(CUT_WIDTH, cut, vocab_size), cut) for cut in CUTS}
    return {name: (model.eval(), cut) for name, (model, cut) in models.items()}


@torch.no_grad()
def measure_memory(folder: str, longest: int, tokens: torch.Tensor, device: str) -> dict[str, int]:
    """The peak bytes of a forward pass over `tokens` (1, T), by model."""
    peaks = {}
    for name, (model, cut) in make_models(folder, longest).items():
        model(tokens[:, :8].to(model.to(device).device))  # allocations of the first pass do not count
        peaks[name] = peak_bytes(functools.partial(model, tokens[:, :cut].to(device)), device)
    return peaks


def add_arguments(parser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 3000], help="tokens of a text")
    parser.add_argument("--model", default=str(MODEL), help="the folder of the ToST classifier")


@benchmark("text_classification", __doc__, add_arguments, environment=KEEP_FREED_MEMORY)
@torch.no_grad()
def run(args, report: Report) -> None:
    models, longest = make_models(args.model, max(args.lengths)), max(args.lengths)
    for length in args.lengths:
        tokens = torch.randint(3, models["ToST"][0].config.vocab_size, (1, length))
        peaks = run_in_new_process(measure_memory, args.model, longest, tokens, args.device)
        runs = {
            name: functools.partial(model.to(args.device), tokens[:, :cut].to(args.device))
            for name, (model, cut) in models.items()
        }
        seconds = measure(runs, args.repeats, device=args.device)
        for name, times in seconds.items():
            case = {"model": name, "parameters": models[name][0].num_parameters(), "tokens": length, "device": args.device}
            metrics = {"ms": spread(times) * 1e3, "this / ToST": ratio(times, seconds["ToST"])}
            report.add(case, metrics | {"peak MiB": peaks[name] / 2**20})
