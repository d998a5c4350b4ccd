# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token losses: of batches of sequences, of documents by a sliding window, of random windows, and of bigrams."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token put before a document so that its first token is scored: BOS, or else EOS."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ValueError("The tokenizer has neither a bos nor an eos token to put before a document; set one.")
    return token


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def pad(sequences: Sequence[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """A batch of token ids (B, T) with its attention mask."""
    masks = [torch.ones_like(ids) for ids in sequences]
    return {
        "input_ids": pad_sequence(sequences, batch_first=True, padding_side=side),
        "attention_mask": pad_sequence(masks, batch_first=True, padding_side=side),
    }


def batch_by_length(
    sequences: Sequence[torch.Tensor], batch_size: int, description: str
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yields batches of sequences of similar length and their indices, the longest first, so that memory runs out early."""
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    for indices in tqdm(DataLoader(order, batch_size, collate_fn=list), desc=description):
        yield indices, [sequences[index] for index in indices]


@torch.inference_mode()
def score(
    model: PreTrainedModel, sequences: Sequence[torch.Tensor], batch_size: int, description: str = "Scoring"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores every token but the first of each sequence, given the tokens before it.

    Args:
        model: a causal language model in evaluation mode.
        sequences: token ids, each (T,), at least two.
        batch_size: sequences per batch; does not change the results.
        description: the title of the progress bar.

    Returns:
        For each sequence the losses in nats and whether the token was the most likely one, each (T - 1,), on the CPU.
    """
    scores: list = [None] * len(sequences)
    for indices, batch in batch_by_length(sequences, batch_size, description):
        inputs = {name: tensor.to(model.device) for name, tensor in pad([ids[:-1] for ids in batch], "right").items()}
        logits = model(**inputs, use_cache=False).logits
        for index, ids, sample_logits in zip(
            indices, batch, logits
        ):  # one at a time: a float32 copy of the batch would be large
            sample_logits, targets = sample_logits[: len(ids) - 1], ids[1:].to(sample_logits.device)
            nats = F.cross_entropy(
                sample_logits.to(torch.promote_types(sample_logits.dtype, torch.float32)), targets, reduction="none"
            )
            scores[index] = nats.cpu(), (sample_logits.argmax(-1) == targets).cpu()
    return scores


def sweep_windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, end, scored) of windows whose last `scored` targets are scored, each of `num_tokens` targets once.

    The targets are the inputs shifted by one token. The first window scores all its targets, each later one the next `stride`,
    the last one the remainder.
    """
    num_scored = 0
    while num_scored < num_tokens:
        end = min(num_scored + (stride if num_scored else context), num_tokens)
        yield max(0, end - context), end, end - num_scored
        num_scored = end


def sweep(
    model: PreTrainedModel, documents: Sequence[torch.Tensor], context: int, stride: int, batch_size: int
) -> tuple[float, int]:
    """The loss of documents by a sliding window that scores every token but the first of each document once.

    Args:
        model: a causal language model in evaluation mode.
        documents: token ids, each (T,). The first token is not scored: begin with BOS or EOS to score a whole document.
        context: input tokens of a window.
        stride: tokens scored by each window but the first. Every token has at least `context - stride + 1` tokens of context,
            or all preceding ones.
        batch_size: windows per batch; does not change the result.

    Returns:
        The sum in nats, and the number of tokens scored.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"The stride must lie between 1 and the context of {context}, got {stride}.")
    windows, counts = [], []
    for ids in documents:
        for start, end, scored in sweep_windows(len(ids) - 1, context, stride):
            windows.append(ids[start : end + 1])
            counts.append(scored)
    scores = score(model, windows, batch_size, "Sweeping")
    return math.fsum(float(nats[-scored:].double().sum()) for (nats, _), scored in zip(scores, counts)), sum(counts)


def windows_loss(
    model: PreTrainedModel,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    context: int,
    num_windows: int,
    batch_size: int,
    seed: int,
) -> tuple[float, int]:
    """The loss of random windows of a document with all their tokens scored: the ToST authors' protocol.

    Args:
        model: a causal language model in evaluation mode.
        token_ids: (T,), more than `context`.
        context: tokens of a window.
        num_windows: number of windows, sampled with replacement.
        batch_size: windows per batch; does not change the result.
        seed: seed of the sampling, which is the same on every device.

    Returns:
        The sum in nats, and the number of tokens scored, `num_windows * context`.
    """
    ids = torch.as_tensor(token_ids)
    if len(ids) <= context:
        raise ValueError(
            f"A document of {len(ids)} tokens has no window of {context} and the token after it: lower --context."
        )
    starts = torch.randint(len(ids) - context, (num_windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    scores = score(model, [ids[start : start + context + 1] for start in starts], batch_size, "Random windows")
    return math.fsum(float(nats.double().sum()) for nats, _ in scores), num_windows * context


def bigram_loss(training: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]], vocab_size: int) -> float:
    """Cross-entropy, in nats per token, of a bigram model on all tokens but the first of each held-out sequence.

    Bigrams are counted within each training sequence and interpolated with unigrams by Witten-Bell smoothing: after a token
    with n successors, d of them distinct, the unigrams have the weight d / (n + d). Every unigram count is increased by one.
    """
    flat_counts, unigram_counts = np.zeros(vocab_size * vocab_size, np.uint32), np.ones(vocab_size)
    for ids in map(np.asarray, training):
        unigram_counts += np.bincount(ids, minlength=vocab_size)
        bigrams, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
        flat_counts[bigrams] += counts.astype(np.uint32)
    bigram_counts = flat_counts.reshape(vocab_size, vocab_size)
    total, distinct = bigram_counts.sum(1), (bigram_counts > 0).sum(1)
    backoff = np.where(total > 0, distinct, 1)  # unigrams only, after a token without successors
    losses = []
    for ids in map(np.asarray, held_out):
        previous, following = ids[:-1], ids[1:]
        unigram = (unigram_counts / unigram_counts.sum())[following]
        probability = (bigram_counts[previous, following] + backoff[previous] * unigram) / (total + backoff)[previous]
        losses.append(-np.log(probability))
    return float(np.concatenate(losses).mean())
