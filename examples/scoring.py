# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Token losses: of sequences in batches, of a sliding-window sweep over a text, of random windows, of bigrams."""

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
    """The token before a text, for its first token to be scored: begin-of-text, or else end-of-text."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ValueError("The tokenizer has neither a bos nor an eos token to put before a text; set one.")
    return token


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


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
    for places in tqdm(DataLoader(order, batch_size, collate_fn=list), desc=what):
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
        for place, ids, sample in zip(places, batch, logits):  # one by one: a float32 copy of all would be large
            sample, targets = sample[: len(ids) - 1], ids[1:].to(sample.device)
            nats = F.cross_entropy(sample.to(torch.promote_types(sample.dtype, torch.float32)), targets, reduction="none")
            scores[place] = nats.cpu(), (sample.argmax(-1) == targets).cpu()
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


def sweep(
    model: PreTrainedModel, documents: Sequence[torch.Tensor], context: int, stride: int, batch_size: int
) -> tuple[float, int]:
    """The loss of texts, every token but the first of each scored exactly once.

    Args:
        model: a causal language model in evaluation mode.
        documents: token ids, each (T,); the first one is not scored: put the begin- or end-of-text token there to score all of
            a text.
        context: tokens the model sees at once.
        stride: tokens scored by each window but the first; every token sees at least `context - stride + 1` tokens before it,
            or all there are.
        batch_size: windows run at once; the result does not depend on it.

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
    """
    ids = torch.as_tensor(token_ids)
    if len(ids) <= context:
        raise ValueError(f"A text of {len(ids)} tokens has no window of {context} and the token after it: lower --context.")
    starts = torch.randint(len(ids) - context, (num_windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    scores = score(model, [ids[start : start + context + 1] for start in starts], batch_size, "Random windows")
    return math.fsum(float(nats.double().sum()) for nats, _ in scores), num_windows * context


def bigram_loss(training: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]], vocab_size: int) -> float:
    """Cross-entropy, in nats per token, of a bigram model on all tokens but the first of each held-out sequence.

    Bigrams are counted within each training sequence and interpolated with unigrams by Witten-Bell smoothing: the weight of
    the unigrams is the share of distinct successors among the previous token's occurrences. Every token has one extra count.
    """
    pairs, tokens = np.zeros(vocab_size * vocab_size, np.uint32), np.ones(vocab_size)
    for ids in map(np.asarray, training):
        tokens += np.bincount(ids, minlength=vocab_size)
        bigrams, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
        pairs[bigrams] += counts.astype(np.uint32)
    table = pairs.reshape(vocab_size, vocab_size)
    total, distinct = table.sum(1), (table > 0).sum(1)
    unseen = np.where(total > 0, distinct, 1)  # after a token without successors the unigrams alone count
    losses = []
    for ids in map(np.asarray, held_out):
        previous, following = ids[:-1], ids[1:]
        unigram = (tokens / tokens.sum())[following]
        probability = (table[previous, following] + unseen[previous] * unigram) / (total + unseen)[previous]
        losses.append(-np.log(probability))
    return float(np.concatenate(losses).mean())
