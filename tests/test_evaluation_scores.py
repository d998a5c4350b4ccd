"""What evaluate_lm.py measures, every protocol and task against scores computed one token at a time."""

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
    """Random weights, one token a byte, 32 positions."""
    return make_model()


def successor_model(tokenizer, successors: dict[str, str]) -> ToSTForCausalLM:
    """A model whose most likely next token depends on the last one alone, as the table says."""
    model = make_model(hidden_size=260, num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=256)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name == "model.norm.weight" else 0.0)  # LayerScale 0: the block adds nothing
        model.model.embed_tokens.weight.copy_(torch.eye(257, 260))
        for last, following in successors.items():
            column, row = (tokenizer(text)["input_ids"] for text in (last, following))
            assert len(column) == len(row) == 1
            model.lm_head.weight[row[0], column[0]] = 1.0
    return model


def nats_after(model, context: list[int], token: int) -> float:
    """The loss of one token after its context, alone in a batch."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context])).logits[0, -1].double()
    return float(logits.logsumexp(-1) - logits[token])


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(257, (length,), generator=torch.Generator().manual_seed(seed))


# Scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_model, make_gpt2])
def test_scores_do_not_depend_on_the_batch(make):
    model = make()
    sequences = [random_ids(length, seed=length) for length in (5, 33, 2, 17, 17)]
    for batch_size in (1, 3, 5):
        for ids, (nats, most_likely) in zip(sequences, scoring.score(model, sequences, batch_size)):
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1]).logits[0].double()
            expected = logits.logsumexp(-1) - logits.gather(1, ids[1:, None])[:, 0]
            assert nats.shape == expected.shape
            assert torch.allclose(nats.double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(most_likely, logits.argmax(-1) == ids[1:])


@pytest.mark.parametrize(
    "num_ids, context, stride",
    [(50, 16, 16), (50, 16, 8), (50, 16, 5), (50, 16, 1), (17, 16, 4), (9, 16, 8), (2, 16, 8), (34, 1, 1)],
)
def test_sweep_scores_each_token_once_with_the_context_its_stride_leaves(model, num_ids, context, stride):
    model = model.double()
    ids = random_ids(num_ids).tolist()
    expected = 0.0
    for t in range(1, num_ids):
        # the first window ends at token `context`, each other one `stride` further, and none past the last token
        windows_before = max(0, math.ceil((t - context) / stride))
        end = min(context + windows_before * stride, num_ids - 1)
        expected += nats_after(model, ids[max(0, end - context) : t], ids[t])
    for batch_size in (1, 3, 64):
        nats, scored = scoring.sweep(model, [torch.tensor(ids)], context, stride, batch_size)
        assert scored == num_ids - 1
        assert nats == pytest.approx(expected, rel=1e-10)


def test_sweep_rejects_a_stride_that_leaves_tokens_out(model):
    with pytest.raises(ValueError, match="stride"):
        scoring.sweep(model, [random_ids(50)], 16, 17, 4)


def test_random_windows(model):
    """Of a text with two windows, every draw is one of the two, all its tokens are scored, and both turn up."""
    model = model.double()
    ids = random_ids(18)
    of_each = [
        sum(nats_after(model, ids[start:t].tolist(), int(ids[t])) for t in range(start + 1, start + 17)) for start in (0, 1)
    ]

    def loss(**changes):
        options = {"context": 16, "num_windows": 20, "batch_size": 8, "seed": 0} | changes
        return scoring.windows_loss(model, ids, **options)

    nats, scored = loss()
    assert scored == 20 * 16
    second_ones = (nats - 20 * of_each[0]) / (of_each[1] - of_each[0])
    assert second_ones == pytest.approx(round(second_ones), abs=1e-6) and 0 < round(second_ones) < 20
    assert loss(batch_size=3)[0] == pytest.approx(nats, rel=1e-12)
    assert len({round(loss(seed=seed)[0], 6) for seed in range(10)}) > 1
    with pytest.raises(ValueError, match="--context"):
        loss(context=18)


def test_bigram_loss():
    """Against the same formula with dictionaries; after any token the probabilities add up to 1."""
    training, vocab_size = [[0, 1, 2, 0, 1, 1], [0, 3, 0, 1]], 6
    pairs = Counter(pair for text in training for pair in itertools.pairwise(text))
    tokens = Counter(token for text in training for token in text)
    unigram = [(tokens[token] + 1) / (sum(tokens.values()) + vocab_size) for token in range(vocab_size)]

    def probability(previous, token):
        counts = [pairs[previous, after] for after in range(vocab_size)]
        if not sum(counts):
            return unigram[token]
        distinct = sum(count > 0 for count in counts)
        return (counts[token] + distinct * unigram[token]) / (sum(counts) + distinct)

    for previous in range(vocab_size):
        assert sum(probability(previous, token) for token in range(vocab_size)) == pytest.approx(1)
    held_out = [0, 1, 2, 4, 5, 3, 0, 3]
    expected = -sum(math.log(probability(a, b)) for a, b in itertools.pairwise(held_out)) / (len(held_out) - 1)
    assert scoring.bigram_loss(training, [held_out[:4], held_out[3:]], vocab_size) == pytest.approx(expected)


# Losses in their units -----------------------------------------------------------------------------------------------


def test_what_the_protocols_score(model, tokenizer):
    """sweep: one stream, end-of-text after each example; documents: each independently, of lines the text they make."""
    model = model.double()
    texts = ["one\n", "", "two"]
    options = {"context": 6, "stride": 3, "batch_size": 4}

    def loss(pieces: list[str]) -> float:
        sums = [scoring.sweep(model, [torch.tensor(tokenizer(EOS + piece)["input_ids"])], **options) for piece in pieces]
        return sum(nats for nats, _ in sums) / sum(scored for _, scored in sums)

    def measured(protocol, texts, **kwargs):
        args = make_args(protocols=[protocol], stride=3, batch_size=4)
        return values(evaluate_lm.measure_loss(model, tokenizer, texts, args, context=6, **kwargs))["loss"]

    assert measured("sweep", texts) == pytest.approx(loss([f"one\n{EOS}{EOS}two{EOS}"]), rel=1e-12)
    # with space for only one window: nothing precedes the first example
    ids = tokenizer(f"three{EOS}")["input_ids"]
    nats, scored = scoring.sweep(model, [torch.tensor(ids)], 5, 5, 1)
    args = make_args(protocols=["windows"], num_windows=3)
    windows = values(evaluate_lm.measure_loss(model, tokenizer, ["three"], args, context=5))
    assert windows["loss"] == pytest.approx(nats / scored, rel=1e-12)
    assert measured("documents", ["one", "two"]) == pytest.approx(loss(["one", "two"]), rel=1e-12)
    assert measured("documents", texts, examples_are_lines=True) == pytest.approx(loss(["one\n\ntwo\n"]), rel=1e-12)


# LAMBADA -------------------------------------------------------------------------------------------------------------

SUCCESSORS = {"t": " ", " ": "c", "c": "a", "a": "b", "b": ".", ".": "'", "'": " ", "g": EOS, EOS: "c"}
LAMBADA = [  # passage, exact, lenient; after "hat" the model writes " cab.' cab"
    ("a hat cab", True, True),
    ("a hat CAB", False, True),
    ("a hat ab", False, True),  # anywhere in what is written, also inside a word
    ("a hat cat", False, False),  # its first two letters are right
    ("a hat cab.", True, True),
    ("a hat cab!", False, False),
    ("a hat cab.\u2019", False, True),  # straight in the prompt and in the word
    ("a dog cab", False, True),  # after end-of-text it writes on
    ("a hat cab \n", True, True),
]


@pytest.mark.parametrize("passage, exact, lenient", LAMBADA)
def test_lambada(tokenizer, passage, exact, lenient):
    model = successor_model(tokenizer, SUCCESSORS)
    model.generation_config.eos_token_id, model.generation_config.repetition_penalty = EOS_ID, 9.0
    own_settings = copy.deepcopy(model.generation_config)
    assert reading_tasks.lambada_exact(model, tokenizer, [passage], 256, 1).value == exact
    assert reading_tasks.lambada_lenient(model, tokenizer, [passage], 256, 1).value == lenient
    assert model.generation_config.to_dict() == own_settings.to_dict()


# Children's Book Test ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("context", [2000, 60])  # the passages have about 800 tokens: whole, and cut
def test_cbt(questions, tokenizer, context):
    """Against sums over the tokens one by one; the answers are changed so that one question is answered rightly."""
    model = make_model(max_position_embeddings=None).double()
    changed = []
    for number, example in enumerate(questions):
        losses = []
        texts = [
            " ".join([*example["sentences"], example["question"].replace("XXXXX", option)]) for option in example["options"]
        ]
        too_many = max(0, max(len(text.encode()) for text in texts) - context)
        for text in texts:
            ids = [EOS_ID, *tokenizer(text)["input_ids"][too_many:]]
            with torch.no_grad():
                logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            losses.append(-sum(float(logs[t - 1, ids[t]]) for t in range(1, len(ids))))
        order = sorted(range(10), key=losses.__getitem__)
        changed.append(example | {"answer": example["options"][order[number]]})
    for batch_size in (3, 32):
        measured = reading_tasks.cbt_accuracy(model, tokenizer, Dataset.from_list(changed), context, batch_size)
        assert (measured.value, measured.num_examples) == (0.5, 2)
        assert ("2 of 2 questions are longer than the context of 60 tokens" in measured.protocol) == (context == 60)


def test_cbt_scores_what_follows_the_candidate(tokenizer):
    """The candidates themselves are equally likely; only y is likely to be followed by "!"."""
    model = successor_model(tokenizer, {"y": "!"})
    example = {"sentences": ["."] * 20, "question": "See XXXXX!", "options": ["x", "y", "z"], "answer": "y"}
    assert reading_tasks.cbt_accuracy(model, tokenizer, Dataset.from_list([example]), 256, 3).value == 1
