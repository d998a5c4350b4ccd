"""Texts cut along their tokens over 2 and 4 processes: the same numbers, exchanges of constant size, sentences."""

import context_cases
import pytest
from processes import run_cases

from tost_hf import ToSTForCausalLM


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    names = [*context_cases.CASES, "exchanged", "refused"]
    return run_cases(context_cases.run, names, processes=4, folder=tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("case", context_cases.CASES)
def test_cut_texts_give_the_same_numbers(answers, case):
    single = "float32" in case
    for distances in answers[case]:
        # transformers computes the loss in float32, whatever comes in
        assert distances.pop("loss") < 1e-6
        assert all(distance < (1e-5 if single else 1e-10) for distance in distances.values())


@pytest.mark.parametrize("options,exchanges", [("published", 2), ("forgetting per token", 2), ("convolution", 3)])
def test_what_is_exchanged_does_not_grow_with_the_text(answers, options, exchanges):
    layers, heads, width, rows = 2, 4, 32, 1
    for answer in answers["exchanged"]:
        short, long = answer[options]
        assert short == long
        calls, sent, backward_calls, _ = short
        assert calls == backward_calls == layers * exchanges
        expected = 4 * (width + (heads if "forgetting" in options else 0)) + 8 * (width + heads)
        if "convolution" in options:
            expected += 4 * 3 * (width + 2)
        assert sent == layers * rows * expected


@pytest.mark.slow
def test_a_million_tokens_take_a_quarter_of_the_memory_on_four_processes(tmp_path):
    grown = {}
    for processes in (1, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        answers = run_cases(context_cases.run, ["million"], processes, folder)["million"]
        grown[processes] = max(answer["grown"] for answer in answers)
    assert all(answer["sent"] < 4096 for answer in answers)
    assert grown[1] > 1e9
    assert grown[4] < 0.25 * grown[1] + 2.5e8  # which is not the tokens


SENTENCES = {
    "hybrid": "ValueError: parallelize cannot cut texts for layers of full_attention",
    "encoder": "ValueError: parallelize cannot cut texts for an encoder",
    "classifier": "TypeError: parallelize takes a ToSTModel or a ToSTForCausalLM",
    "twice": "ValueError: The model's texts or heads are spread over processes already",
    "two dimensions": "ValueError: parallelize takes a mesh of one dimension, got 2",
    "few tokens": "ValueError: A text of 3 tokens cannot be cut for 4 processes",
    "cache": "ValueError: A text spread over processes has no cache",
    "use_cache": "ValueError: A text spread over processes has no cache",
    "generate": "ValueError: A text spread over processes has no cache",
    "last logits": "ValueError: A text spread over processes has the logits of all tokens",
    "too long": "IndexError: Position 128 is past the end",
    "wrong mask": "ValueError: attention_mask must have shape (1, 9)",
    "no tokens": "ValueError: Give exactly one of input_ids and inputs_embeds",
    "one dimension": "ValueError: input_ids must be integers of shape (batch, tokens)",
    "unequal labels": "ValueError: labels must have the shape of the tokens",
    "torch's own": "ValueError: torch's context_parallel shards texts for softmax attention",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_cannot_be_cut_is_refused(answers, case):
    for answer in answers["refused"]:
        assert answer[case].startswith(SENTENCES[case])


def test_a_model_on_one_process_knows_nothing_of_it(tiny_model, texts):
    assert isinstance(tiny_model, ToSTForCausalLM)
    assert not tiny_model._forward_pre_hooks and not tiny_model.model._forward_pre_hooks
