# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Classifying long texts: accuracy by length, time and memory, of a ToST, BERTs of as many parameters and TF-IDF.

    OMP_NUM_THREADS=1 python examples/benchmarks/run.py text_classification
    OMP_NUM_THREADS=1 python examples/benchmarks/run.py text_classification --dataset stanfordnlp/imdb \
        --classifiers model_cards/trained/tost-imdb-2m bert-imdb

Time and memory: the small trained ToST of this repository; a BERT with positions for the longest text, and others that read
only the first 128, 256 and 512 tokens, all with random weights, which do not change the cost. One text at a time, in float32;
the models are interleaved. The memory is the peak of a forward pass beyond the loaded model.

Accuracy, with --dataset: of trained classifiers on its test split, by the number of tokens of ToST's tokenizer, and of a
logistic regression on TF-IDF of words and pairs of words (scikit-learn), fitted to its training split. Each classifier reads
as many tokens as it has positions for.
"""

import functools
import math
import time
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from registry import benchmark
from scripting import position_limit
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from timing import KEEP_FREED_MEMORY, Report, measure, peak_bytes, ratio, run_in_new_process, spread
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    pipeline,
)

import tost_hf  # noqa: F401  registers the models with the Auto classes


MODEL = Path(__file__).resolve().parents[2] / "model_cards" / "trained" / "tost-imdb-2m"
CUTS = (128, 256, 512)
GROUPS = {  # of texts, by their tokens
    "all": (0, math.inf),
    "up to 200": (0, 200),
    "201 to 400": (200, 400),
    "401 to 1,000": (400, 1000),
    "more": (1000, math.inf),
}
BATCH = 25
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
        model.to(device)
        model(tokens[:, :8].to(device))  # allocations of the first pass do not count
        peaks[name] = peak_bytes(functools.partial(model, tokens[:, :cut].to(device)), device)
    return peaks


def predict(folder: str, texts: list[str]) -> tuple[np.ndarray, int]:
    """The classes of texts by the classifier of a folder, and the number of its parameters."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    max_length = position_limit(config)
    options = {} if max_length is None else {"truncation": True, "max_length": max_length}
    classify = pipeline("text-classification", folder, tokenizer=tokenizer, dtype=torch.float32, batch_size=BATCH)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    results = classify([texts[i] for i in order], **options)
    labels = [label for _, label in sorted(zip(order, (result["label"] for result in results)))]
    return np.array(labels), classify.model.num_parameters()


def fit_tfidf(texts: list[str], labels: list[str]) -> Pipeline:
    features = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    return make_pipeline(features, LogisticRegression(C=10, max_iter=1000)).fit(texts, labels)


def report_accuracy(args, report: Report) -> None:
    """The accuracy of classifiers on the test split of `args.dataset`, by length."""
    splits = {split: load_dataset(args.dataset, split=split) for split in ("train", "test")}
    names = splits["train"].features["label"].names
    train_texts, texts = (list(splits[split]["text"]) for split in splits)
    train_labels, labels = (np.array([names[label] for label in splits[split]["label"]]) for split in splits)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lengths = np.array([len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]])
    start = time.perf_counter()
    tfidf = fit_tfidf(train_texts, train_labels)
    print(f"TF-IDF and logistic regression were fitted in {time.perf_counter() - start:.0f} s", flush=True)
    predictions = {"TF-IDF": (tfidf.predict(texts), len(tfidf[0].vocabulary_))}
    predictions |= {Path(folder).name: predict(folder, texts) for folder in args.classifiers}
    for name, (classes, parameters) in predictions.items():
        for tokens, (low, high) in GROUPS.items():
            chosen = (lengths > low) & (lengths <= high)
            if not chosen.any():
                continue
            case = {"model": name, "parameters": parameters, "tokens": tokens, "device": args.device}
            report.add(case, {"accuracy": float((classes == labels)[chosen].mean()), "texts": int(chosen.sum())})


def add_arguments(parser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 3000], help="tokens of a text")
    parser.add_argument("--model", default=str(MODEL), help="the folder of the ToST classifier")
    parser.add_argument("--dataset", help="a dataset with the columns text and label: the accuracy is measured instead")
    parser.add_argument("--classifiers", nargs="*", default=[str(MODEL)], help="folders of trained classifiers")


@benchmark("text_classification", __doc__, add_arguments, environment=KEEP_FREED_MEMORY)
@torch.no_grad()
def run(args, report: Report) -> None:
    if args.dataset is not None:
        report_accuracy(args, report)
        return
    longest = max(args.lengths)
    models = make_models(args.model, longest)
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
