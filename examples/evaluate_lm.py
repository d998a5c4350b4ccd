# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Evaluates a causal language model, ToST or any other of transformers: loss, LAMBADA and Children's Book Test accuracy.

    python examples/evaluate_lm.py --model my-tost --tasks wikitext lambada cbt_cn cbt_ne
    python examples/evaluate_lm.py --model gpt2 --tasks ptb text --datasets ptb=ptb.test.txt text=notes.txt \
        --protocols sweep windows --output_file gpt2.json

Results go to the model's `evaluation.json`, by which they get into its card. Every number says by which protocol it was made:

    sweep      all rows, end-of-text after each, as one stream; windows one stride apart, so that every token is scored once
    windows    the ToST authors' figures: random windows of the same stream, drawn with replacement
    documents  every text by itself, nothing appended: the numbers of lm-evaluation-harness where the stride is the context

lm-evaluation-harness itself runs on ToST models with

    python -c "import tost_hf; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \
        run --model hf --model_args pretrained=my-tost --tasks lambada_openai

or, for a repository that brings its own code, with `lm_eval run ... --model_args pretrained=NAME,trust_remote_code=True`. It
takes the context from the model's positions; for a position-free model give max_length=1024 or the like, or it takes 2,048.
"""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from datasets import Dataset
from evaluation import (
    EvaluationArguments,
    Measurement,
    Source,
    load_source,
    make_results,
    print_results,
    recorded_command,
    results_file,
    write_results,
)
from run_clm import parse_args
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import tost_hf  # noqa: F401 (makes ToST known to the Auto classes)
from tost_hf.training.metrics import perplexity


logger = logging.getLogger("evaluate_lm")

DEFAULT_CONTEXT = 1024
PROTOCOLS = ("sweep", "windows", "documents")
STRAIGHT_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
PLACEHOLDER = "XXXXX"  # of the missing word in a question of the Children's Book Test


@dataclass(frozen=True)
class Task:
    """What is evaluated: its title, the Hub dataset it is by default, and whether a row is a line of one long text."""

    title: str
    dataset: str | None
    rows_are_lines: bool = False


TASKS = {
    "wikitext": Task("WikiText", "Salesforce/wikitext:wikitext-2-v1", rows_are_lines=True),
    "lambada": Task("LAMBADA", "EleutherAI/lambada_openai"),
    "ptb": Task("Penn Treebank", None, rows_are_lines=True),
    "cbt_cn": Task("Children's Book Test, common nouns", "cam-cst/cbt:CN"),
    "cbt_ne": Task("Children's Book Test, named entities", "cam-cst/cbt:NE"),
    "text": Task("Text", None),
}


@dataclass(kw_only=True)
class LMEvaluationArguments(EvaluationArguments):
    """On what, and how."""

    counts = (*EvaluationArguments.counts, "context", "stride", "num_windows", "num_words")

    tasks: list[str] = field(metadata={"help": "What to evaluate.", "choices": list(TASKS)})
    datasets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Where a task's data is, as TASK=SOURCE: a file (txt, json, jsonl, csv, parquet), a folder, or a Hub "
            "dataset NAME or NAME:CONFIG. Defaults: "
            + ", ".join(f"{name}={task.dataset}" for name, task in TASKS.items() if task.dataset)
        },
    )
    text_column_name: str | None = field(
        default=None, metadata={"help": "The column of text. Default: text, sentence, page or the only column of strings."}
    )
    protocols: list[str] = field(
        default_factory=lambda: ["sweep"],
        metadata={"help": "How the loss is measured; see the top of the script.", "choices": list(PROTOCOLS)},
    )
    context: int | None = field(
        default=None, metadata={"help": "Tokens the model sees at once. Default: what it can take, up to 1,024."}
    )
    stride: int | None = field(
        default=None, metadata={"help": "Tokens scored by each window of a sweep but the first. Default: half the context."}
    )
    num_windows: int = field(default=16_000, metadata={"help": "Random windows of `windows`; the authors drew 1,000 x 16."})
    num_words: int | None = field(
        default=None,
        metadata={
            "help": "Words to divide by for the perplexity a word. Default: what white space separates, and end-of-texts."
        },
    )
    seed: int = field(default=0, metadata={"help": "The seed of the random windows."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "The tokenizer, if not the model's own."})

    def __post_init__(self):
        super().__post_init__()
        if self.num_words is not None and len(self.tasks) > 1:
            raise ValueError("--num_words is the count of one text: evaluate that task alone.")
        for assignment in self.datasets:
            if assignment.partition("=")[0] not in self.tasks or not assignment.partition("=")[2]:
                raise ValueError(f"--datasets takes TASK=SOURCE with a task of {', '.join(self.tasks)}, got {assignment!r}.")
        for task in self.tasks:
            if task not in self.sources:
                raise ValueError(f"There is no default data for {task!r}: give --datasets {task}=SOURCE.")

    @property
    def sources(self) -> dict[str, str]:
        """Where each task's data is."""
        defaults = {name: task.dataset for name, task in TASKS.items() if task.dataset is not None}
        return defaults | dict(assignment.split("=", 1) for assignment in self.datasets)


# Scores of tokens ----------------------------------------------------------------------------------------------------


def pad(sequences: Sequence[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """A batch of token ids (B, T) with its mask."""
    masks = [torch.ones_like(ids) for ids in sequences]
    return {
        "input_ids": pad_sequence(sequences, batch_first=True, padding_side=side),
        "attention_mask": pad_sequence(masks, batch_first=True, padding_side=side),
    }


def by_length(sequences: Sequence[torch.Tensor], batch_size: int, what: str) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Batches of sequences of like length, the longest first (memory runs out at once or never), and their places."""
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place]))
    for places in tqdm(DataLoader(order, batch_size, collate_fn=list), desc=what, disable=None):
        yield places, [sequences[place] for place in places]


@torch.inference_mode()
def score(
    model: PreTrainedModel, sequences: Sequence[torch.Tensor], batch_size: int, what: str = "Scoring"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores every token but the first of each sequence, given the tokens before it.

    Args:
        model: a causal language model in evaluation mode.
        sequences: token ids, each (T,), at least two.
        batch_size: how many run at once; no result depends on it.
        what: the title of the progress bar.

    Returns:
        For each sequence the losses in nats and whether the token was the most likely one, each (T - 1,), on the CPU.
    """
    scores: list = [None] * len(sequences)
    for places, batch in by_length(sequences, batch_size, what):
        inputs = {name: tensor.to(model.device) for name, tensor in pad([ids[:-1] for ids in batch], "right").items()}
        logits = model(**inputs, use_cache=False).logits
        for place, ids, row in zip(places, batch, logits):  # one by one: a float32 copy of all would be large
            row, targets = row[: len(ids) - 1], ids[1:].to(row.device)
            nats = F.cross_entropy(row.to(torch.promote_types(row.dtype, torch.float32)), targets, reduction="none")
            scores[place] = nats.cpu(), (row.argmax(-1) == targets).cpu()
    return scores


def sweep_windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows that score each of `num_tokens` tokens once: the inputs' start and end, and how many of the last they score.

    The inputs are one token before the scored ones. The first window scores all it sees, every other one the `stride` tokens
    after the last, the final one what is left.
    """
    done = 0
    while done < num_tokens:
        end = min(done + (stride if done else context), num_tokens)
        yield max(0, end - context), end, end - done
        done = end


def _sweep(model, documents: Sequence[torch.Tensor], context: int, stride: int, batch_size: int) -> tuple[float, int]:
    if not 1 <= stride <= context:
        raise ValueError(
            f"The stride must lie between 1 and the context of {context}, got {stride}: tokens would be left out."
        )
    windows, counts = [], []
    for ids in documents:
        for start, end, scored in sweep_windows(len(ids) - 1, context, stride):
            windows.append(ids[start : end + 1])
            counts.append(scored)
    scores = score(model, windows, batch_size, "Sweeping")
    return math.fsum(float(nats[-scored:].double().sum()) for (nats, _), scored in zip(scores, counts)), sum(counts)


def sweep_loss(
    model: PreTrainedModel, token_ids: Sequence[int] | torch.Tensor, *, context: int, stride: int, batch_size: int
) -> tuple[float, int]:
    """The loss of a text, every token but the first scored exactly once.

    Args:
        model: a causal language model in evaluation mode.
        token_ids: (T,); the first one is only seen: put the begin- or end-of-text token there to score all of a text.
        context: tokens the model sees at once.
        stride: tokens scored by each window but the first; every token sees at least `context - stride + 1` tokens before it,
            or all there are.
        batch_size: windows run at once; the result does not depend on it.

    Returns:
        The sum in nats, and the number of tokens scored.

    Raises:
        ValueError: the stride is larger than the context.
    """
    return _sweep(model, [torch.as_tensor(token_ids)], context, stride, batch_size)


def windows_loss(
    model: PreTrainedModel,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    context: int,
    num_windows: int,
    batch_size: int,
    seed: int,
) -> tuple[float, int]:
    """The loss of random windows of a text, all their tokens scored: the protocol of the ToST authors.

    Args:
        model: a causal language model in evaluation mode.
        token_ids: (T,), more than `context`.
        context: tokens of a window.
        num_windows: windows drawn, with replacement.
        batch_size: windows run at once; the result does not depend on it.
        seed: the seed of the draw, the same on every device.

    Returns:
        The sum in nats, and the number of tokens scored, `num_windows * context`.

    Raises:
        ValueError: the text is too short for a window.
    """
    ids = torch.as_tensor(token_ids)
    if len(ids) <= context:
        raise ValueError(f"A text of {len(ids)} tokens has no window of {context} and the token after it: lower --context.")
    starts = torch.randint(len(ids) - context, (num_windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    scores = score(model, [ids[start : start + context + 1] for start in starts], batch_size, "Random windows")
    return math.fsum(float(nats.double().sum()) for nats, _ in scores), num_windows * context


# Loss ----------------------------------------------------------------------------------------------------------------


def text_rows(rows: Dataset, column: str | None) -> list[str]:
    """The column of text.

    Raises:
        ValueError: there is none, or it is not clear which.
    """
    strings = [
        name for name, feature in rows.features.items() if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if column is None:
        column = next((name for name in ("text", "sentence", "page") if name in strings), None)
        if column is None and len(strings) == 1:
            column = strings[0]
    if column not in strings:
        raise ValueError(f"Choose the column of text by --text_column_name, one of: {', '.join(strings) or 'none is there'}.")
    return rows[column][:]


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before a text, for its first token to be scored: begin-of-text, or else end-of-text."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ValueError("The tokenizer has neither a bos nor an eos token to put before a text; set one.")
    return token


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def measure_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    args: LMEvaluationArguments,
    context: int,
    rows_are_lines: bool = False,
) -> list[Measurement]:
    """Loss, perplexity, bits per byte and word-level perplexity of rows of text, by each of `args.protocols`."""
    stride = args.stride or max(1, context // 2)
    measurements = []
    for protocol in args.protocols:
        rows = texts
        if protocol == "documents" and rows_are_lines:
            rows = ["".join(row if row.endswith("\n") else row + "\n" for row in texts)]
        encoded = tokenize(tokenizer, rows)
        num_bytes = sum(len(row.encode()) for row in rows)
        num_words = sum(len(row.split()) for row in rows)
        if protocol == "documents":
            prefix = prefix_token(tokenizer)
            documents = [torch.tensor([prefix, *ids]) for ids in encoded]
            num_tokens = sum(map(len, encoded))
        else:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    "The tokenizer has no eos token to put after each row; set one, or use --protocols documents."
                )
            stream = torch.tensor(
                [prefix_token(tokenizer), *chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in encoded)]
            )
            documents = [stream]
            num_tokens = len(stream) - 1
            num_words += len(rows)
        if num_bytes == 0:
            raise ValueError("The text is empty: there is nothing to score.")

        num_examples = len(rows)
        if protocol == "windows":
            nats, scored = windows_loss(
                model, stream[1:], context=context, num_windows=args.num_windows, batch_size=args.batch_size, seed=args.seed
            )
            label = f"windows, context {context}"
            how = f"{args.num_windows:,} windows of {context:,} tokens drawn with replacement, end-of-text after each row"
            num_examples = args.num_windows
        else:
            nats, scored = _sweep(model, documents, context, stride, args.batch_size)
            label = f"{protocol}, context {context}, stride {stride}"
            whole = "all rows as one stream, end-of-text after each" if protocol == "sweep" else "each document by itself"
            how = f"{whole}; every token scored once, in windows of {context:,} tokens, {stride:,} apart"
        measurements += loss_measurements(
            nats / scored, num_tokens, num_bytes, args.num_words or num_words, label, how, num_examples
        )
    return measurements


def loss_measurements(
    nats_per_token: float, num_tokens: int, num_bytes: int, num_words: int, label: str, protocol: str, num_examples: int
) -> list[Measurement]:
    """A mean loss in its usual units. Tokens, UTF-8 bytes and words are those of the whole data."""
    nats = nats_per_token * num_tokens
    counts = f"{num_tokens:,} tokens, {num_bytes:,} bytes, {num_words:,} words"
    return [
        Measurement(metric_type, f"{name} ({label})", value, num_examples, f"{protocol}; {counts}")
        for metric_type, name, value in (
            ("loss", "Loss, nats per token", nats_per_token),
            ("perplexity", "Perplexity per token", perplexity(nats_per_token)),
            ("bits_per_byte", "Bits per byte", nats / (num_bytes * math.log(2))),
            ("word_perplexity", "Perplexity per word", perplexity(nats / num_words) if num_words else math.nan),
        )
    ]


# LAMBADA -------------------------------------------------------------------------------------------------------------


def cut_note(cut: int, total: int, what: str, context: int) -> str:
    """Says how many examples were longer than the context, "" if none was; also in the log."""
    if cut == 0:
        return ""
    note = f"{cut:,} of {total:,} {what} are longer than the context of {context:,} tokens and were cut at their beginning"
    logger.warning(note)
    return f"; {note}"


def split_last_word(passage: str) -> tuple[str, str]:
    """A passage without its last word, and the word.

    Raises:
        ValueError: there is only one word.
    """
    beginning, space, word = passage.strip().rpartition(" ")
    if not space:
        raise ValueError(f"The passage {passage[:60]!r} has no word before the one to predict.")
    return beginning, word


def lambada_exact(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: list[str], context: int, batch_size: int
) -> Measurement:
    """The usual accuracy: every token of the last word is the most likely one, given the tokens before it."""
    sequences, targets, cut = [], [], 0
    for passage in passages:
        beginning, word = split_last_word(passage)
        whole = tokenizer(f"{beginning} {word}")["input_ids"]
        targets.append(max(1, len(whole) - len(tokenizer(beginning)["input_ids"])))
        sequences.append(torch.tensor(whole[-(context + 1) :]))
        cut += len(whole) > context + 1
    scores = score(model, sequences, batch_size, "LAMBADA, exact")
    right = sum(bool(most_likely[-count:].all()) for (_, most_likely), count in zip(scores, targets))
    how = "right if every token of the last word is the most likely one given those before it"
    how += cut_note(cut, len(passages), "passages", context)
    return Measurement("accuracy", f"Accuracy (exact last word, context {context})", right / len(passages), len(passages), how)


@torch.inference_mode()
def lambada_lenient(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passages: list[str], context: int, batch_size: int
) -> Measurement:
    """The ToST authors' accuracy: the last word occurs anywhere, ignoring case, in 10 greedy tokens.

    The prompt is a newline and all but the last word; curly quotes are made straight. An end-of-text token ends nothing.
    """
    new_tokens = 10
    if context <= new_tokens:
        raise ValueError(f"A context of {context} tokens has no room for a prompt and {new_tokens} new ones: raise --context.")
    prompts, words, cut = [], [], 0
    for passage in passages:
        beginning, word = split_last_word(passage.translate(STRAIGHT_QUOTES))
        ids = tokenizer(f"\n{beginning}")["input_ids"]
        prompts.append(torch.tensor(ids[-(context - new_tokens) :]))
        words.append(word)
        cut += len(ids) > context - new_tokens

    right = 0
    # the model's own settings may sample, penalise repetition or stop at the end of a text
    own_settings, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        for places, batch in by_length(prompts, batch_size, "LAMBADA, lenient"):
            inputs = {name: tensor.to(model.device) for name, tensor in pad(batch, "left").items()}
            written = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[:, inputs["input_ids"].shape[1] :]
            for place, text in zip(places, tokenizer.batch_decode(written)):
                right += words[place].lower() in text.lower()
    finally:
        model.generation_config = own_settings
    how = "right if the last word occurs anywhere, ignoring case, in 10 greedy tokens after a newline and the words before it"
    how += cut_note(cut, len(passages), "prompts", context - new_tokens)
    return Measurement(
        "accuracy", f"Accuracy (lenient last word, context {context})", right / len(passages), len(passages), how
    )


# Children's Book Test ------------------------------------------------------------------------------------------------


def parse_cbt(text: str) -> Dataset:
    """Questions of a file in the original format, as rows `sentences`, `question`, `answer`, `options`.

    A question has 21 numbered lines; the last one is `21 question<TAB>answer<TAB><TAB>option|option|...`. Empty lines stand
    between questions.

    Raises:
        ValueError: a question that is not so; the sentence names its line.
    """
    rows: dict[str, list] = {"sentences": [], "question": [], "answer": [], "options": []}
    sentences: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        count, _, content = line.partition(" ")
        if count != str(len(sentences) + 1):
            raise ValueError(
                f"Line {number} should begin with {len(sentences) + 1}, the next of 21 lines, and begins with {count!r}."
            )
        if len(sentences) < 20:
            sentences.append(content)
            continue
        fields = content.split("\t")
        if len(fields) < 3 or not fields[-1]:
            raise ValueError(f"Line {number} should be a question, its answer and its options, with tabs between.")
        for name, value in zip(rows, (sentences, fields[0], fields[1], fields[-1].split("|"))):
            rows[name].append(value)
        sentences = []
    if sentences:
        raise ValueError(f"The last question has {len(sentences)} lines instead of 21.")
    return Dataset.from_dict(rows)


def load_cbt(source: str, args: LMEvaluationArguments) -> Source:
    """Questions of a file in the original format, or of a dataset with its columns."""
    if not source.lower().endswith(".txt"):
        found = load_source(source, args)
        missing = {"sentences", "question", "answer", "options"} - set(found.rows.column_names)
        if missing:
            raise ValueError(f"{source} lacks the columns {', '.join(sorted(missing))} of the Children's Book Test.")
        return found
    rows = parse_cbt(Path(source).read_text(encoding="utf-8"))
    if len(rows) == 0:
        raise ValueError(f"{source} has no questions.")
    return Source(rows.select(range(min(args.max_examples or len(rows), len(rows)))), Path(source).name)


def cbt_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Dataset, context: int, batch_size: int
) -> Measurement:
    """How often the passage with its question is most likely with the right one of the candidates in place of XXXXX."""
    prefix = prefix_token(tokenizer)
    sequences, cut = [], 0
    for row in questions:
        if PLACEHOLDER not in row["question"] or row["answer"] not in row["options"]:
            raise ValueError(f"The question {row['question'][:60]!r} lacks {PLACEHOLDER}, or its answer is not an option.")
        passage = " ".join([*row["sentences"], row["question"]])
        encoded = tokenize(tokenizer, [passage.replace(PLACEHOLDER, option) for option in row["options"]])
        # the same words go for every candidate, or the sums would not be comparable
        excess = max(0, max(map(len, encoded)) - context)
        sequences += [torch.tensor([prefix, *ids[excess:]]) for ids in encoded]
        cut += excess > 0
    sums = iter([float(nats.double().sum()) for nats, _ in score(model, sequences, batch_size, "Children's Book Test")])
    right = 0
    for row in questions:
        losses = [next(sums) for _ in row["options"]]
        right += row["options"][losses.index(min(losses))] == row["answer"]
    how = f"of the candidates in place of {PLACEHOLDER}, the one that makes passage and question most probable"
    how += cut_note(cut, len(questions), "questions", context)
    return Measurement("accuracy", f"Accuracy (whole passage, context {context})", right / len(questions), len(questions), how)


# The command ---------------------------------------------------------------------------------------------------------


def choose_context(context: int | None, config) -> int:
    """The context asked for, if the model can take it, or else the largest one up to 1,024."""
    limit = getattr(config, "max_position_embeddings", None)
    if context is not None and limit is not None and context > limit:
        raise ValueError(f"--context {context} is over the model's {limit} positions (max_position_embeddings): lower it.")
    if context is None:
        context = min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        logger.info(f"The context is {context:,} tokens" + (", all the positions the model has." if context == limit else "."))
    return context


def evaluate_task(name: str, model, tokenizer, args: LMEvaluationArguments, context: int) -> tuple[Source, list[Measurement]]:
    """The data of a task, and everything measured on it."""
    task, source = TASKS[name], args.sources[name]
    if name.startswith("cbt_"):
        found = load_cbt(source, args)
        return found, [cbt_accuracy(model, tokenizer, found.rows, context, args.batch_size)]
    found = load_source(source, args, sample_by="line" if task.rows_are_lines else "document")
    texts = text_rows(found.rows, args.text_column_name)
    measurements = measure_loss(model, tokenizer, texts, args, context, task.rows_are_lines)
    if name == "lambada":
        measurements += [
            measure(model, tokenizer, texts, context, args.batch_size) for measure in (lambada_exact, lambada_lenient)
        ]
    return found, measurements


def main(args: list[str] | None = None) -> None:
    words = sys.argv[1:] if args is None else args
    (args,) = parse_args(words, LMEvaluationArguments, description=__doc__)
    command = recorded_command(__file__, words, args)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    file = results_file(args)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or args.model, **args.hub_options)
    model = args.load_model(AutoModelForCausalLM)
    context = choose_context(args.context, model.config)
    everything = []
    for name in args.tasks:
        found, measurements = evaluate_task(name, model, tokenizer, args, context)
        for measured in measurements:
            measured.name = f"{measured.name.removesuffix(')')}{args.limit})"
            measured.protocol += f"; {model.dtype}"
        title = f"{TASKS[name].title} ({found.config or found.name})"
        results = make_results("text-generation", title, found, measurements, command, args.seed)
        write_results(file, results)  # after each task: the next may fail
        everything += results
    print_results(everything)
    print(f"Written to {file}")


if __name__ == "__main__":
    main()
