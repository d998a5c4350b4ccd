# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Latency of a text classifier of long texts: the small trained ToST of this repository, and a BERT of as many parameters.

    OMP_NUM_THREADS=1 python examples/benchmarks/run.py text_classification

BERT, with positions for the longest text, has random weights, which do not change the cost. One text at a time, in float32;
the models are interleaved.
"""

from pathlib import Path

import torch
from registry import benchmark
from timing import KEEP_FREED_MEMORY, Report, measure, ratio, spread
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import tost_hf  # noqa: F401  registers the models with the Auto classes


MODEL = Path(__file__).resolve().parents[2] / "model_cards" / "trained" / "tost-imdb-2m"
BERT = {"hidden_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 448}


def add_arguments(parser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 3000], help="tokens of a text")
    parser.add_argument("--model", default=str(MODEL), help="the folder of the ToST classifier")


@benchmark("text_classification", __doc__, add_arguments, environment=KEEP_FREED_MEMORY)
@torch.no_grad()
def run(args, report: Report) -> None:
    tost = AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32)
    sizes = {"vocab_size": tost.config.vocab_size, "max_position_embeddings": max(512, *args.lengths)}
    bert = BertForSequenceClassification(BertConfig(**BERT, **sizes))
    models = {name: model.eval().to(args.device) for name, model in (("ToST", tost), ("BERT", bert))}
    for length in args.lengths:
        tokens = torch.randint(3, tost.config.vocab_size, (1, length), device=args.device)
        runs = {name: lambda model=model, tokens=tokens: model(tokens) for name, model in models.items()}
        seconds = measure(runs, args.repeats, device=args.device)
        for name, times in seconds.items():
            case = {"model": name, "parameters": models[name].num_parameters(), "tokens": length, "device": args.device}
            report.add(case, {"ms": spread(times) * 1e3, "BERT / this": ratio(seconds["BERT"], times)})
