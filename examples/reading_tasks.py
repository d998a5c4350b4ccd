# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Cloze tasks with one correct word: LAMBADA (arXiv 1606.06031) and the Children's Book Test (arXiv 1511.02301)."""

import logging
import re
from pathlib import Path

import torch
from datasets import Dataset
from evaluation import EvaluationArguments, Measurement, Source, load_source
from scoring import batch_by_length, pad, prefix_token, score, tokenize
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger("reading_tasks")

STRAIGHT_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
PLACEHOLDER = "XXXXX"  # of the missing word in a question of the Children's Book Test


# LAMBADA -------------------------------------------------------------------------------------------------------------


def truncation_note(num_truncated: int, total: int, kind: str, context: int) -> str:
    """Logs and returns how many examples were longer than the context; empty if none was."""
    if num_truncated == 0:
        return ""
    note = (
        f"{num_truncated:,} of {total:,} {kind} are longer than the context of {context:,} tokens and were cut at their "
        "beginning"
    )
    logger.warning(note)
    return f"; {note}"


def lambada_exact(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: list[str], context: int, batch_size: int
) -> Measurement:
    """The usual accuracy: every token of the last word is the most likely one, given the tokens before it."""
    sequences, targets, num_truncated = [], [], 0
    for passage in passages:
        beginning, _, word = passage.strip().rpartition(" ")
        ids = tokenizer(f"{beginning} {word}")["input_ids"]
        targets.append(max(1, len(ids) - len(tokenizer(beginning)["input_ids"])))
        sequences.append(torch.tensor(ids[-(context + 1) :]))
        num_truncated += len(ids) > context + 1
    scores = score(model, sequences, batch_size, "LAMBADA, exact")
    num_correct = sum(bool(is_most_likely[-count:].all()) for (_, is_most_likely), count in zip(scores, targets))
    protocol = "right if every token of the last word is the most likely one given those before it"
    protocol += truncation_note(num_truncated, len(passages), "passages", context)
    return Measurement(
        "accuracy", f"Accuracy (exact last word, context {context})", num_correct / len(passages), len(passages), protocol
    )


@torch.inference_mode()
def lambada_lenient(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: list[str], context: int, batch_size: int
) -> Measurement:
    """The ToST authors' accuracy: the last word occurs anywhere, ignoring case, in 10 greedy tokens.

    The prompt is a newline and all but the last word; curly quotes are made straight. End-of-text tokens do not end
    the generation.
    """
    new_tokens = 10
    prompts, words, num_truncated = [], [], 0
    for passage in passages:
        beginning, _, word = passage.translate(STRAIGHT_QUOTES).strip().rpartition(" ")
        ids = tokenizer(f"\n{beginning}")["input_ids"]
        prompts.append(torch.tensor(ids[-(context - new_tokens) :]))
        words.append(word)
        num_truncated += len(ids) > context - new_tokens

    num_correct = 0
    # the model's generation config may sample, penalize repetition or stop at end-of-text
    generation_config, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        for indices, batch in batch_by_length(prompts, batch_size, "LAMBADA, lenient"):
            inputs = {name: tensor.to(model.device) for name, tensor in pad(batch, "left").items()}
            new_ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[:, inputs["input_ids"].shape[1] :]
            for index, continuation in zip(indices, tokenizer.batch_decode(new_ids)):
                num_correct += words[index].lower() in continuation.lower()
    finally:
        model.generation_config = generation_config
    protocol = (
        "right if the last word occurs anywhere, ignoring case, in 10 greedy tokens after a newline and the words before it"
    )
    protocol += truncation_note(num_truncated, len(passages), "prompts", context - new_tokens)
    return Measurement(
        "accuracy", f"Accuracy (lenient last word, context {context})", num_correct / len(passages), len(passages), protocol
    )


# Children's Book Test ------------------------------------------------------------------------------------------------


def parse_cbt(text: str) -> Dataset:
    """Parses questions in the original format into examples with `sentences`, `question`, `answer` and `options`.

    A question has 21 numbered lines; the last one is `21 question<TAB>answer<TAB><TAB>option|option|...`. Empty lines separate
    questions.
    """
    examples = []
    for block in re.split(r"\n\s*\n", text.strip()):
        *sentences, last_line = (line.partition(" ")[2] for line in block.splitlines())
        if len(sentences) != 20 or last_line.count("\t") < 2:
            raise ValueError(f"A question should have 20 lines, and one with its answer and options: {block[:60]!r}")
        question, answer, *_, options = last_line.split("\t")
        examples.append({"sentences": sentences, "question": question, "answer": answer, "options": options.split("|")})
    return Dataset.from_list(examples)


def load_cbt(source: str, args: EvaluationArguments) -> Source:
    """Questions of a file in the original format, or of a dataset with its columns."""
    if not source.lower().endswith(".txt"):
        return load_source(source, args)
    examples = parse_cbt(Path(source).read_text(encoding="utf-8"))
    return Source(examples.select(range(min(args.max_examples or len(examples), len(examples)))), Path(source).name)


def cbt_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Dataset, context: int, batch_size: int
) -> Measurement:
    """The fraction of questions whose passage is most likely with the correct candidate in place of XXXXX."""
    prefix = prefix_token(tokenizer)
    sequences, num_truncated = [], 0
    for example in questions:
        if PLACEHOLDER not in example["question"] or example["answer"] not in example["options"]:
            raise ValueError(f"The question {example['question'][:60]!r} lacks {PLACEHOLDER}, or its answer is not an option.")
        passage = " ".join([*example["sentences"], example["question"]])
        encoded = tokenize(tokenizer, [passage.replace(PLACEHOLDER, option) for option in example["options"]])
        # all candidates are truncated by the same number of tokens, so that their sums are comparable
        excess = max(0, max(map(len, encoded)) - context)
        sequences += [torch.tensor([prefix, *ids[excess:]]) for ids in encoded]
        num_truncated += excess > 0
    sums = iter([float(nats.double().sum()) for nats, _ in score(model, sequences, batch_size, "Children's Book Test")])
    num_correct = 0
    for example in questions:
        losses = [next(sums) for _ in example["options"]]
        num_correct += example["options"][losses.index(min(losses))] == example["answer"]
    protocol = f"of the candidates in place of {PLACEHOLDER}, the one that makes passage and question most probable"
    protocol += truncation_note(num_truncated, len(questions), "questions", context)
    return Measurement(
        "accuracy", f"Accuracy (whole passage, context {context})", num_correct / len(questions), len(questions), protocol
    )
