"""`tost-hf serve` with many clients at once: texts, limits, disconnects and failures."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import serving_clients
import torch
from hub_clients import language_model, save_tokenizer
from serving_clients import (
    COMPLETIONS,
    JSON,
    LIMIT,
    Answer,
    Served,
    asking,
    both_ways,
    everywhere,
    serving,
    wait_until,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tost_hf import prefill_cache, save_cache
from tost_hf.cli import main
from tost_hf.serving.server_generation import MANAGER_NAME


folder, served = serving_clients.folder, serving_clients.served  # fixtures


@pytest.fixture
def slow_steps(served):
    """Each step of the model takes a while; the token ids of the steps so far."""
    steps = []
    with served.before_each_step(lambda tokens: (steps.append(tokens.tolist()), time.sleep(0.02))):
        yield steps


@pytest.fixture
def one_at_a_time(served, monkeypatch):
    """One request is computed, one more may wait."""
    served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1))  # makes the scheduler
    scheduler = getattr(served.model, MANAGER_NAME).scheduler
    monkeypatch.setattr(scheduler, "max_batch_size", 1)
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
    assert len(slow_steps) <= begun + 2 + 5, "The generation continued."


@both_ways
def test_client_that_goes_while_it_waits_is_not_served(served, one_at_a_time, slow_steps, stream):
    with ThreadPoolExecutor() as pool:
        pool.submit(served.ask, COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=20))
        wait_until(lambda: slow_steps)
        leave(served, COMPLETIONS, stream, when=lambda: one_at_a_time.waiting)
    served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1))
    assert [served.processor("gone").input_ids] not in slow_steps
    assert len(slow_steps) == 20 + 1


@pytest.fixture
def held_tokenizer(served, monkeypatch):
    """The tokenizer begins (first event) and continues when it may (second event)."""
    tokenize, begun, released = type(served.processor).__call__, threading.Event(), threading.Event()

    def wait(*args, **options):
        begun.set()
        assert released.wait(20), "The event loop waits for the tokenizer."
        return tokenize(*args, **options)

    monkeypatch.setattr(type(served.processor), "__call__", wait)
    return begun, released


@everywhere
@both_ways
def test_others_are_answered_while_a_prompt_is_tokenized(served, held_tokenizer, path, stream):
    begun, released = held_tokenizer
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(served.ask, path, asking(path, "hi", stream=stream, **{LIMIT[path]: 2}))
        assert begun.wait(20) and served.ask("/health", method="GET").status == 200
        released.set()
    assert answer.result().usage == (2, 2)


@both_ways
def test_client_that_goes_while_its_prompt_is_tokenized_is_not_served(served, slow_steps, held_tokenizer, stream):
    begun, released = held_tokenizer
    leave(served, COMPLETIONS, stream, when=begun.is_set)
    time.sleep(0.2)  # until the server knows
    released.set()
    assert served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=2)).usage == (2, 2)
    assert [served.processor("gone").input_ids] not in slow_steps


@both_ways
def test_bytes_of_an_unfinished_character_are_sent(served, stream):
    """The model's next two tokens are the first two bytes of a character of three."""
    begun = served.processor("\u20ac").input_ids[:2]

    def say(module, args, options, output):
        output.logits[:] = -1.0
        output.logits[..., begun[int(options["input_ids"][0, -1] == begun[0])]] = 1.0

    hook = served.model.register_forward_hook(say, with_kwargs=True)
    answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=2, temperature=0, stream=stream))
    hook.remove()
    assert text_of(answer) == served.processor.decode(begun) != "" and answer.usage == (2, 2)


@both_ways
def test_more_requests_than_may_wait_are_rejected(served, one_at_a_time, slow_steps, stream):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(served.ask, COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=20))
        wait_until(lambda: slow_steps)
        second = pool.submit(served.ask, COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=20))
        wait_until(lambda: one_at_a_time.waiting)
        answer = served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", stream=stream))
    assert answer.status == 429 and answer.error == "1 requests wait already; try again later."
    assert first.result().usage == second.result().usage == (2, 20)
    assert served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", stream=stream, max_tokens=2)).usage == (2, 2)


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
def test_clients_at_the_same_time_get_what_each_gets_alone(served, stream, caplog):
    whole = text_of(served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", **WAYS["greedy"])))
    ways = WAYS | {"stop": WAYS["stop"] | {"stop": next(c for c in whole[3:] if c.isascii())}}
    bodies = [asking(COMPLETIONS, "hi" * (1 + i % 3), stream=stream, **way) for i, way in enumerate([*ways.values()] * 3)]
    expected = [text_of(served.ask(COMPLETIONS, body | {"stream": False})) for body in bodies]
    batches = []
    with served.before_each_step(lambda tokens: (batches.append(len(tokens)), time.sleep(0.01))):
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(lambda body: text_of(served.ask(COMPLETIONS, body)), bodies))
    assert together == expected and max(batches) > 3
    assert len(set(expected)) > 5
    assert "CB: False" not in caplog.text  # what transformers (not 5.18) logs of each request


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
@pytest.mark.parametrize(
    "text, message, temperature", [("a!", "logits are not finite", 1), ("a?", "out of 'memory' / at 0x7f", 0)]
)
def test_failure_reaches_its_own_client_alone(served, failing_model, path, stream, text, message, temperature):
    good = asking(COMPLETIONS, "hi", max_tokens=30, temperature=0)
    alone = served.ask(COMPLETIONS, good).events[0]["choices"]
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(served.ask, COMPLETIONS, good) for _ in range(2)]
        body = asking(path, text, stream=stream, temperature=temperature, generation_config='{"do_sample": true}')
        answer = served.ask(path, body)
    assert answer.status == (200 if stream else 500) and message in answer.error
    assert [other.result().events[0]["choices"] for other in others] == [alone, alone]


# Requests that are generated alone: beams, compiled steps, and models of other classes -------------------------------


@pytest.fixture(scope="module")
def served_gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=1.0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    with serving(force_model=str(folder)) as (running, port):
        (loaded,) = running._model_manager.loaded_models.values()
        yield Served(port, folder, loaded.model, loaded.processor)


@both_ways
def test_models_of_other_classes_answer_one_at_a_time(served_gpt2, stream):
    tokens = served_gpt2.processor("hi", return_tensors="pt").input_ids
    expected = served_gpt2.model.generate(tokens, max_new_tokens=9, do_sample=False)[0, tokens.shape[1] :]
    greedy = served_gpt2.ask(COMPLETIONS, asking(COMPLETIONS, "hi", stream=stream, temperature=0, max_tokens=9))
    assert text_of(greedy) == served_gpt2.processor.decode(expected, skip_special_tokens=True)
    assert greedy.usage == (tokens.shape[1], len(expected))
    sampled = [served_gpt2.ask(COMPLETIONS, asking(COMPLETIONS, "hi", stream=stream, **SAMPLED, seed=i)) for i in (1, 1, 2)]
    assert text_of(sampled[0]) == text_of(sampled[1]) != text_of(sampled[2])


@both_ways
def test_generation_alone_ends_when_the_client_has_gone(served_gpt2, stream):
    steps = []
    with served_gpt2.before_each_step(lambda tokens: (steps.append(tokens), time.sleep(0.02))):
        leave(served_gpt2, COMPLETIONS, stream, when=lambda: len(steps) >= 3)
        begun = len(steps)
        assert served_gpt2.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1)).usage[1] == 1
    assert len(steps) <= begun + 1 + 5, "The generation continued."


@both_ways
def test_failure_alone_reaches_its_client(served_gpt2, stream):
    def fail(module, args, output):
        output.logits[:] = float("nan")

    hook = served_gpt2.model.register_forward_hook(fail)
    answer = served_gpt2.ask(COMPLETIONS, asking(COMPLETIONS, "hi", stream=stream))
    hook.remove()
    assert answer.status == (200 if stream else 500) and "logits are not finite" in answer.error


# The prefix cache -----------------------------------------------------------------------------------------------------


def cached_tokens(answer: Answer) -> int:
    last = answer.events[-1]
    usage = last.get("usage") or last["response"]["usage"]
    return (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]


@everywhere
@both_ways
def test_cached_tokens_of_a_prompt_are_reported(served, path, stream):
    text = f"{path} {stream} is asked"
    options = {"stream": stream, "temperature": 0, LIMIT[path]: 3}
    first, second = (served.ask(path, asking(path, text, **options)) for _ in range(2))
    tokens = len(served.processor(text).input_ids)
    assert first.usage == second.usage == (tokens, 3)
    assert cached_tokens(first) < tokens - 5 and cached_tokens(second) == tokens - 1


def test_many_clients_some_of_whom_disconnect_get_what_each_gets_alone(served):
    """Prompts with common prefixes, whose states are stored, found and continued by all at once."""
    served.ask(COMPLETIONS, asking(COMPLETIONS, "hi", max_tokens=1))  # makes the scheduler
    scheduler = getattr(served.model, MANAGER_NAME).scheduler
    bodies = [
        asking(COMPLETIONS, "shared " * (1 + i % 3) + "abcdefg"[i % 7], stream=i % 3 == 0, **[*WAYS.values()][i % 4])
        for i in range(40)
    ]
    scheduler.prefix_cache.max_bytes, size = 0, scheduler.prefix_cache.max_bytes
    scheduler.prefix_cache.clear()
    expected = [text_of(served.ask(COMPLETIONS, body | {"stream": False})) for body in bodies]
    scheduler.prefix_cache.max_bytes = size

    def ask(i: int) -> str | None:
        if i % 5 == 4:  # disconnects
            begun = time.monotonic()
            leave(served, COMPLETIONS, bodies[i].get("stream"), when=lambda: time.monotonic() > begun + 0.02 * (i % 7))
            return None
        return text_of(served.ask(COMPLETIONS, bodies[i]))

    with served.before_each_step(lambda tokens: time.sleep(0.002)), ThreadPoolExecutor(40) as pool:
        for _ in range(2):
            texts = list(pool.map(ask, range(40)))
            assert texts == [None if i % 5 == 4 else text for i, text in enumerate(expected)]
    assert len(set(expected)) > 15 and len(scheduler.prefix_cache) > 20


@pytest.fixture(scope="module")
def served_prefix(folder, tmp_path_factory):
    """A server with a text that it has read, and the text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text, file = "a manual of forty bytes, read in advance", tmp_path_factory.mktemp("prefix") / "manual.safetensors"
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    save_cache(prefill_cache(model, input_ids), file, model=model, input_ids=input_ids)
    with serving(force_model=str(folder), prefix_files={"manual": str(file)}, prefix_cache_bytes=0) as (running, port):
        (loaded,) = running._model_manager.loaded_models.values()
        yield Served(port, folder, loaded.model, loaded.processor), text


@everywhere
@both_ways
def test_a_prefix_is_named_or_begins_the_prompt(served, served_prefix, path, stream):
    with_prefix, text = served_prefix
    options = {"temperature": 0, LIMIT[path]: 8}
    alone = served.ask(path, asking(path, text + " asked", **options))
    for body in (asking(path, text + " asked"), asking(path, " asked", prefix="manual")):
        answer = with_prefix.ask(path, body | options | {"stream": stream})
        assert answer.usage == alone.usage and cached_tokens(answer) == 40
        if not stream:
            assert answer.events[0].get("choices") == alone.events[0].get("choices")
    beams = asking(path, " asked", prefix="manual", stream=False, generation_config='{"num_beams": 2, "max_new_tokens": 4}')
    assert with_prefix.ask(path, beams).usage == (46, 4)
    unknown = with_prefix.ask(path, asking(path, "x", prefix="none", stream=stream))
    assert unknown.status == 400 and unknown.error == "There is no prefix 'none' here; there are: manual."


def test_wrong_prefix_options(folder, tmp_path, capsys):
    other = language_model(max_position_embeddings=None)
    file, tokens = tmp_path / "other.safetensors", torch.ones(1, 5, dtype=torch.long)
    save_cache(prefill_cache(other, tokens), file, model=other, input_ids=tokens)
    for arguments, message in (
        (["--prefix", f"x={file}"], "--prefix needs a MODEL"),
        ([str(folder), "--prefix", f"x={file}"], "was written with other weights"),
        ([str(folder), "--prefix", f"x={tmp_path / 'none'}"], "There is no cache file"),
        ([str(folder), "--prefix", str(file)], "--prefix needs NAME=FILE"),
        ([str(folder), "--prefix-cache-bytes", "-1"], "--prefix-cache-bytes must be at least 0"),
    ):
        assert main(["serve", *arguments]) == 1
        assert message in capsys.readouterr().err
