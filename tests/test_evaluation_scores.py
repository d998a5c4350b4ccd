"""The measurements of evaluate_lm.py: every protocol and task against scores computed one token at a time."""

import copy
import itertools
import math
from collections import Counter
from pathlib import Path

import evaluate_lm
import pytest
import reading_tasks
import scoring
import torch
from byte_models import EOS, EOS_ID, byte_tokenizer, make_args, make_gpt2, make_model, values
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from tost_hf import ToSTForCausalLM


FIXTURES = Path(__file__).parent / "fixtures" / "evaluation"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def model() -> ToSTForCausalLM:
    """A byte-level model with random weights and 32 positions."""
    return make_model()


def successor_model(tokenizer, successors: dict[str, str]) -> ToSTForCausalLM:
    """A model whose most likely next token is the successor of the last one in the table."""
    model = make_model(hidden_size=260, num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=256)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name == "model.norm.weight" else 0.0)  # LayerScale 0: the block adds nothing
        model.model.embed_tokens.weight.copy_(torch.eye(257, 260))
        for last_token, next_token in successors.items():
            column, row = (tokenizer(text)["input_ids"] for text in (last_token, next_token))
            assert len(column) == len(row) == 1
            model.lm_head.weight[row[0], column[0]] = 1.0
    return model


def token_loss(model, context: list[int], token: int) -> float:
    """The loss of one token after its context, computed without a batch."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context])).logits[0, -1].double()
    return float(logits.logsumexp(-1) - logits[token])


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed))


# Scores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_model, make_gpt2])
def test_scores_do_not_depend_on_the_batch(make):
    model = make()
    sequences = [random_ids(length, seed=length) for length in (5, 33, 2, 17, 17)]
    for batch_size in (1, 3, 5):
        for ids, (losses, most_likely) in zip(sequences, scoring.score(model, sequences, batch_size)):
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1]).logits[0].double()
            expected = logits.logsumexp(-1) - logits.gather(1, ids[1:, None])[:, 0]
            assert losses.shape == expected.shape
            assert torch.allclose(losses.double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(most_likely, logits.argmax(-1) == ids[1:])


@pytest.mark.parametrize(
    "num_ids, context, stride",
    [(50, 16, 16), (50, 16, 8), (50, 16, 5), (50, 16, 1), (17, 16, 4), (9, 16, 8), (2, 16, 8), (34, 1, 1)],
)
def test_sweep_scores_each_token_once(model, num_ids, context, stride):
    model = model.double()
    ids = random_ids(num_ids).tolist()
    expected = 0.0
    for t in range(1, num_ids):
        # the first window ends at token `context`, each further one `stride` later, the last one at the last token
        windows_before = max(0, math.ceil((t - context) / stride))
        end = min(context + windows_before * stride, num_ids - 1)
        expected += token_loss(model, ids[max(0, end - context) : t], ids[t])
    for batch_size in (1, 3, 64):
        total_loss, num_scored = scoring.sweep(model, [torch.tensor(ids)], context, stride, batch_size)
        assert num_scored == num_ids - 1
        assert total_loss == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ValueError, match="stride"):
        scoring.sweep(model, [torch.tensor(ids)], context, context + 1, 4)


def test_random_windows(model):
    """A sequence with two windows: every sample is one of them, all its tokens are scored, and both are sampled."""
    model = model.double()
    ids = random_ids(18)
    window_losses = [
        sum(token_loss(model, ids[start:t].tolist(), int(ids[t])) for t in range(start + 1, start + 17)) for start in (0, 1)
    ]

    def loss(**changes):
        options = {"context": 16, "num_windows": 20, "batch_size": 8, "seed": 0} | changes
        return scoring.windows_loss(model, ids, **options)

    total_loss, num_scored = loss()
    assert num_scored == 20 * 16
    num_second_windows = (total_loss - 20 * window_losses[0]) / (window_losses[1] - window_losses[0])
    assert num_second_windows == pytest.approx(round(num_second_windows), abs=1e-6) and 0 < round(num_second_windows) < 20
    assert loss(batch_size=3)[0] == pytest.approx(total_loss, rel=1e-12)
    assert len({round(loss(seed=seed)[0], 6) for seed in range(10)}) > 1
    with pytest.raises(ValueError, match="--context"):
        loss(context=18)


def test_bigram_loss():
    """Against an implementation with dictionaries, whose probabilities sum to 1."""
    training, vocab_size = [[0, 1, 2, 0, 1, 1], [0, 3, 0, 1]], 6
    pair_counts = Counter(pair for sequence in training for pair in itertools.pairwise(sequence))
    token_counts = Counter(token for sequence in training for token in sequence)
    unigram = [(token_counts[token] + 1) / (sum(token_counts.values()) + vocab_size) for token in range(vocab_size)]

    def probability(previous, token):
        counts = [pair_counts[previous, next_token] for next_token in range(vocab_size)]
        if not sum(counts):
            return unigram[token]
        distinct = sum(count > 0 for count in counts)
        return (counts[token] + distinct * unigram[token]) / (sum(counts) + distinct)

    for previous in range(vocab_size):
        assert sum(probability(previous, token) for token in range(vocab_size)) == pytest.approx(1)
    held_out = [0, 1, 2, 4, 5, 3, 0, 3]
    expected = -sum(math.log(probability(a, b)) for a, b in itertools.pairwise(held_out)) / (len(held_out) - 1)
    assert scoring.bigram_loss(training, [held_out[:4], held_out[3:]], vocab_size) == pytest.approx(expected)


# Losses in their units ------------------------------------------------------------------------------------------------


def test_protocols(model, tokenizer):
    """sweep scores one stream with end-of-text after each example; documents scores each independently, joining lines."""
    model = model.double()
    texts = ["one\n", "", "two"]
    options = {"context": 6, "stride": 3, "batch_size": 4}

    def loss(documents: list[str]) -> float:
        sums = [scoring.sweep(model, [torch.tensor(tokenizer(EOS + text)["input_ids"])], **options) for text in documents]
        return sum(total_loss for total_loss, _ in sums) / sum(num_scored for _, num_scored in sums)

    def measure(protocol, texts, **kwargs):
        args = make_args(protocols=[protocol], stride=3, batch_size=4)
        return values(evaluate_lm.measure_loss(model, tokenizer, texts, args, context=6, **kwargs))["loss"]

    assert measure("sweep", texts) == pytest.approx(loss([f"one\n{EOS}{EOS}two{EOS}"]), rel=1e-12)
    # there is only one window, because nothing precedes the first example
    ids = tokenizer(f"three{EOS}")["input_ids"]
    total_loss, num_scored = scoring.sweep(model, [torch.tensor(ids)], 5, 5, 1)
    args = make_args(protocols=["windows"], num_windows=3)
    windows = values(evaluate_lm.measure_loss(model, tokenizer, ["three"], args, context=5))
    assert windows["loss"] == pytest.approx(total_loss / num_scored, rel=1e-12)
    assert measure("documents", ["one", "two"]) == pytest.approx(loss(["one", "two"]), rel=1e-12)
    assert measure("documents", texts, examples_are_lines=True) == pytest.approx(loss(["one\n\ntwo\n"]), rel=1e-12)


# LAMBADA --------------------------------------------------------------------------------------------------------------

SUCCESSORS = {"t": " ", " ": "c", "c": "a", "a": "b", "b": ".", ".": "'", "'": " ", "g": EOS, EOS: "c"}
LAMBADA = [  # passage, exact, lenient; after "hat" the model generates " cab.' cab"
    ("a hat cab", True, True),
    ("a hat CAB", False, True),
    ("a hat ab", False, True),  # anywhere in the generated text, also inside a word
    ("a hat cat", False, False),  # only the first two letters are correct
    ("a hat cab.", True, True),
    ("a hat cab!", False, False),
    ("a hat cab.\u2019", False, True),  # the apostrophe is straightened in prompt and word
    ("a dog cab", False, True),  # generation continues after end-of-text
    ("a hat cab \n", True, True),
]


@pytest.mark.parametrize("passage, exact, lenient", LAMBADA)
def test_lambada(tokenizer, passage, exact, lenient):
    model = successor_model(tokenizer, SUCCESSORS)
    model.generation_config.eos_token_id, model.generation_config.repetition_penalty = EOS_ID, 9.0
    original_config = copy.deepcopy(model.generation_config)
    assert reading_tasks.lambada_exact(model, tokenizer, [passage], 256, 1).value == exact
    assert reading_tasks.lambada_lenient(model, tokenizer, [passage], 256, 1).value == lenient
    assert model.generation_config.to_dict() == original_config.to_dict()


# Children's Book Test -------------------------------------------------------------------------------------------------


@pytest.fixture
def questions() -> Dataset:
    return reading_tasks.parse_cbt((FIXTURES / "cbt.txt").read_text(encoding="utf-8"))


def test_cbt_file(questions):
    assert questions["answer"][:] == ["kettle", "Tobin"]
    first = questions[0]
    assert (len(first["sentences"]), first["sentences"][0]) == (20, "The kettle stood on the stove .")
    assert first["sentences"][19] == "He sat up and rubbed his face ."
    assert first["question"] == "Mara poured the water from the XXXXX into both cups ."
    assert first["options"] == ["bread", "brother", "crow", "cups", "drawer", "gate", "kettle", "roof", "snow", "window"]


@pytest.mark.parametrize("context", [2000, 60])  # the passages have about 800 tokens: untruncated and truncated
def test_cbt(questions, tokenizer, context):
    """Against sums over single tokens; the answers are changed so that one of two questions is answered correctly."""
    model = make_model(position_embedding_type="none").double()
    changed_examples = []
    for number, example in enumerate(questions):
        losses = []
        texts = [
            " ".join([*example["sentences"], example["question"].replace("XXXXX", option)]) for option in example["options"]
        ]
        num_truncated = max(0, max(len(text.encode()) for text in texts) - context)
        for text in texts:
            ids = [EOS_ID, *tokenizer(text)["input_ids"][num_truncated:]]
            with torch.no_grad():
                log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            losses.append(-sum(float(log_probs[t - 1, ids[t]]) for t in range(1, len(ids))))
        order = sorted(range(10), key=losses.__getitem__)
        changed_examples.append(example | {"answer": example["options"][order[number]]})
    for batch_size in (3, 32):
        measurement = reading_tasks.cbt_accuracy(model, tokenizer, Dataset.from_list(changed_examples), context, batch_size)
        assert (measurement.value, measurement.num_examples) == (0.5, 2)
        assert ("2 of 2 questions are longer than the context of 60 tokens" in measurement.protocol) == (context == 60)


def test_cbt_scores_the_tokens_after_the_candidate(tokenizer):
    """All candidates are equally likely; only y is likely to be followed by "!"."""
    model = successor_model(tokenizer, {"y": "!"})
    example = {"sentences": ["."] * 20, "question": "See XXXXX!", "options": ["x", "y", "z"], "answer": "y"}
    assert reading_tasks.cbt_accuracy(model, tokenizer, Dataset.from_list([example]), 256, 3).value == 1
