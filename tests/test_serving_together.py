"""`tost-hf serve` with many clients at once: what each gets, who waits, who is refused, who goes away, whose request fails."""

import json
import threading
import time

import pytest
import serving_clients
from serving_clients import (
    COMPLETIONS,
    JSON,
    LIMIT,
    Answer,
    asking,
    both_ways,
    everywhere,
    wait_until,
)

from tost_hf.serving.generation import MANAGER_NAME


folder, served = serving_clients.folder, serving_clients.served  # fixtures


@pytest.fixture
def slow_steps(served):
    """Each step of the model takes a while; the list of the steps' token ids, row by row, grows with them."""
    steps = []
    with served.before_each_step(lambda tokens: (steps.append(tokens.tolist()), time.sleep(0.03))):
        yield steps


@pytest.fixture
def one_at_a_time(served, monkeypatch):
    """One request is computed, one more may wait."""
    served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1))  # makes the scheduler
    scheduler = getattr(served.model, MANAGER_NAME).scheduler
    monkeypatch.setattr(scheduler, "max_rows", 1)
    monkeypatch.setattr(scheduler, "max_waiting", 1)
    return scheduler


def leave(served, path, stream, when) -> None:
    """Sends a request and goes away when `when()` is true."""
    connection = served.connect()
    connection.request("POST", path, json.dumps(asking(path, "gone", stream=stream)), JSON)
    wait_until(when)
    connection.sock.close()


@everywhere
@both_ways
def test_generation_ends_when_the_client_has_gone(served, slow_steps, path, stream):
    leave(served, path, stream, when=lambda: len(slow_steps) >= 3)
    begun = len(slow_steps)
    assert served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=2)).usage == (2, 2)
    assert len(slow_steps) <= begun + 2 + 5, "The generation went on."


@everywhere
@both_ways
def test_client_that_goes_while_it_waits_is_not_served(served, one_at_a_time, slow_steps, path, stream):
    first = threading.Thread(target=served.ask, args=(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=20)))
    first.start()
    wait_until(lambda: slow_steps)
    leave(served, path, stream, when=lambda: one_at_a_time.waiting)
    first.join()
    served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1))
    assert [served.processor("gone").input_ids] not in slow_steps
    assert len(slow_steps) == 20 + 1


@everywhere
@both_ways
def test_others_are_answered_while_a_prompt_is_tokenized(served, monkeypatch, path, stream):
    tokenize, others_answered = type(served.processor).__call__, threading.Event()

    def slow_tokenize(*args, **options):
        assert others_answered.wait(20), "The event loop waits for the tokenizer."
        return tokenize(*args, **options)

    monkeypatch.setattr(type(served.processor), "__call__", slow_tokenize)
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(served.ask(path, asking(path, "hi", stream=stream, **{LIMIT[path]: 2})))
    )
    client.start()
    assert served.ask("/health", method="GET").status == 200
    others_answered.set()
    client.join()
    assert answers[0].usage == (2, 2)


@both_ways
def test_client_that_goes_while_its_prompt_is_tokenized_is_not_served(served, slow_steps, monkeypatch, stream):
    tokenize, begun, gone = type(served.processor).__call__, threading.Event(), threading.Event()

    def slow_tokenize(*args, **options):
        begun.set()
        assert gone.wait(20)
        return tokenize(*args, **options)

    monkeypatch.setattr(type(served.processor), "__call__", slow_tokenize)
    leave(served, COMPLETIONS, stream, when=begun.is_set)
    time.sleep(0.2)  # until the server knows
    gone.set()
    assert served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=2)).usage == (2, 2)
    assert [served.processor("gone").input_ids] not in slow_steps


@both_ways
def test_bytes_of_an_unfinished_character_are_sent(served, stream):
    """The model's next two tokens are the first two bytes of a character of three."""
    begun = served.processor("\u20ac").input_ids[:2]

    def say(module, args, options, output):
        output.logits[:] = -1.0
        output.logits[..., begun[0 if options["input_ids"].shape[1] > 1 else 1]] = 1.0

    hook = served.model.register_forward_hook(say, with_kwargs=True)
    answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=2, temperature=0, stream=stream))
    hook.remove()
    assert text_of(answer) == served.processor.decode(begun) != "" and answer.usage == (2, 2)


@everywhere
@both_ways
def test_more_requests_than_may_wait_are_refused(served, one_at_a_time, slow_steps, path, stream):
    def ask():
        answers.append(served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=20)))

    answers, clients = [], [threading.Thread(target=ask) for _ in range(2)]
    clients[0].start()
    wait_until(lambda: slow_steps)
    clients[1].start()
    wait_until(lambda: one_at_a_time.waiting)
    refused = served.ask(path, asking(path, "hi", stream=stream))
    assert refused.status == 429 and refused.error == "1 requests wait already; try again later."
    for client in clients:
        client.join()
    assert [answer.usage for answer in answers] == [(2, 20)] * 2
    assert served.ask(path, asking(path, "hi", stream=stream, **{LIMIT[path]: 2})).usage == (2, 2)


def text_of(answer: Answer) -> str:
    return "".join(event["choices"][0]["text"] for event in answer.events)


SAMPLED = {"temperature": 0.8, "generation_config": '{"do_sample": true, "max_new_tokens": 12}'}
WAYS = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seed 1": SAMPLED | {"seed": 1},
    "seed 2": SAMPLED | {"seed": 2},
    "nucleus": SAMPLED | {"seed": 1, "top_p": 0.5},
    "stop": {"temperature": 0, "max_tokens": 12, "stop": "STOP"},
}


@both_ways
def test_clients_at_the_same_time_get_what_each_gets_alone(served, stream):
    whole = text_of(served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", **WAYS["greedy"])))
    ways = WAYS | {"stop": WAYS["stop"] | {"stop": next(c for c in whole[3:] if c.isascii())}}
    bodies = [asking(COMPLETIONS, "hi" * (1 + i % 3), stream=stream, **way) for i, way in enumerate([*ways.values()] * 3)]
    expected = [text_of(served.ask(COMPLETIONS, body | {"stream": False})) for body in bodies]
    together, rows = [None] * len(bodies), []

    def ask(i):
        together[i] = text_of(served.ask(COMPLETIONS, bodies[i]))

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    with served.before_each_step(lambda tokens: (rows.append(len(tokens)), time.sleep(0.01))):
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert together == expected and max(rows) > 3
    assert len(set(expected)) > 5


@pytest.fixture
def failing_model(served):
    """The logits of a prompt with ! are NaN; one with ? raises, with a message that would break a stream's JSON."""
    nan, error = (served.processor(mark).input_ids[0] for mark in "!?")

    def fail(module, args, inputs, output):
        if (inputs["input_ids"] == error).any():
            raise RuntimeError('out of "memory"\n\\ at 0x7f')
        output.logits[(inputs["input_ids"] == nan).any(1)] = float("nan")

    hook = served.model.register_forward_hook(fail, with_kwargs=True)
    yield
    hook.remove()


@everywhere
@both_ways
@pytest.mark.parametrize("text, sentence", [("a!", "logits are not finite"), ("a?", "out of 'memory' / at 0x7f")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_failure_reaches_its_own_client_alone(served, failing_model, path, stream, text, sentence, temperature):
    good = asking(COMPLETIONS, "hi", max_tokens=30, temperature=0)
    alone = served.ask(COMPLETIONS, good).events[0]["choices"]
    answers = []
    others = [threading.Thread(target=lambda: answers.append(served.ask(COMPLETIONS, good))) for _ in range(2)]
    for other in others:
        other.start()
    answer = served.ask(path, asking(path, text, stream=stream, generation_config='{"do_sample": true}'))
    assert answer.status == (200 if stream else 500) and sentence in answer.error
    for other in others:
        other.join()
    assert [answer.events[0]["choices"] for answer in answers] == [alone, alone]
