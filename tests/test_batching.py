"""Continuous batching: what comes out equals each text generated alone, whoever joins, leaves or fails meanwhile."""

import inspect
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from conftest import randomize, small_config
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, GenerationMixin

from tost_hf import ToSTForCausalLM
from tost_hf.serving.requests import prepare_request
from tost_hf.serving.scheduler import BatchScheduler, TooManyRequests


LAYERS = ["tost_causal_statistics", "full_attention", "sliding_attention"]
HYBRID = {"layer_types": LAYERS, "num_hidden_layers": 3, "sliding_window": 8}
VARIANTS = {
    "learned positions": {},
    "position-free": {"max_position_embeddings": None},
    "decay and convolution": {"max_position_embeddings": None, "forgetting": "token", "conv_kernel": 4},
    "hybrid": HYBRID | {"max_position_embeddings": None, "conv_kernel": 3},
    "hybrid with learned positions": HYBRID,
}
LENGTHS = (1, 2, 3, 5, 9, 20, 40, 41)
GREEDY = {"max_new_tokens": 12, "do_sample": False}
FEW = ContinuousBatchingConfig(max_requests_per_batch=5, max_batch_tokens=7)  # requests wait, chunked prefill


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def any_model(request):
    return randomize(ToSTForCausalLM(small_config(**request.param))).eval()


@pytest.fixture
def model():
    return randomize(ToSTForCausalLM(small_config())).eval()


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(97) for _ in range(draw.choice(LENGTHS))] for _ in range(count)]


def alone(model, prompt, seed: int = 0, **options) -> list[int]:
    """What `generate` writes after the prompt."""
    torch.manual_seed(seed)
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def written(outputs) -> list[list[int]]:
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("config", [None, FEW], ids=["all at once", "few at a time"])
def test_greedy_texts_equal_those_alone(any_model, config):
    prompts = some_prompts(12)
    outputs = any_model.generate_batch(prompts, GenerationConfig(**GREEDY), config, record_timestamps=True)
    assert written(outputs) == [alone(any_model, prompt, **GREEDY) for prompt in prompts]
    for i, (name, output) in enumerate(outputs.items()):
        assert (name, output.request_id, output.prompt_ids) == (f"req_{i}", name, prompts[i])
        assert output.is_finished() and output.error is None and output.timestamps == sorted(output.timestamps)
        assert len(output.timestamps) == len(output.generated_tokens)


class Journal:
    """Drives a scheduler step by step; keeps what each request's outputs were."""

    def __init__(self, model, prefix_cache_bytes: int = 2**28, **options):
        self.scheduler = BatchScheduler(model, ContinuousBatchingConfig(**options), prefix_cache_bytes)
        self.model, self.outputs = model, {}

    def add(self, name: str, prompt, seed: int = 0, **options) -> None:
        self.outputs[name] = []
        request = prepare_request(self.model, prompt, name, self.outputs[name].append, seed=seed, streaming=True, **options)
        self.scheduler.submit(request)

    def finish(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

    def text(self, name: str) -> list[int]:
        return self.outputs[name][-1].generated_tokens


@pytest.mark.parametrize("seed", range(2))
def test_requests_join_leave_and_are_cancelled_at_random_times(any_model, seed):
    draw, prompts = random.Random(seed), some_prompts(14, seed)
    lengths = [draw.choice((1, 2, 7, 15)) for _ in prompts]
    journal = Journal(any_model, max_requests_per_batch=draw.choice((3, 6, 32)), max_batch_tokens=draw.choice((1, 6, 64)))
    cancelled, waiting = set(), list(range(len(prompts)))
    while waiting or journal.scheduler.busy:
        for _ in range(min(draw.choice((0, 0, 1, 4)), len(waiting))):
            i = waiting.pop(0)
            journal.add(str(i), prompts[i], max_new_tokens=lengths[i], do_sample=False)
        if draw.random() < 0.1 and len(waiting) < len(prompts):
            name = str(draw.randrange(len(prompts) - len(waiting)))
            if not journal.outputs[name] or not journal.outputs[name][-1].is_finished():
                journal.scheduler.cancel(name)
                cancelled.add(name)
        journal.scheduler.step()
    for i, prompt in enumerate(prompts):
        expected = alone(any_model, prompt, max_new_tokens=lengths[i], do_sample=False)
        outputs = journal.outputs[str(i)]
        last = outputs[-1]
        assert sum(output.is_finished() for output in outputs) == 1 and last.is_finished()
        assert last.error == ("The request was cancelled." if str(i) in cancelled else None)
        assert last.generated_tokens == expected[: len(last.generated_tokens) if str(i) in cancelled else None]
        steps = outputs[: len(last.generated_tokens)]
        assert [output.generated_tokens for output in steps] == [expected[: n + 1] for n in range(len(steps))]
    assert not journal.scheduler.running and journal.scheduler.cache is None


SAMPLING = {
    "plain": {},
    "nucleus": {"top_p": 0.8, "top_k": 0},
    "all of them": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "repetitions cost": {"repetition_penalty": 1.4, "temperature": 1.5},
    "not soon": {"min_new_tokens": 6, "eos_token_id": list(range(0, 97, 2))},
    "no pairs twice": {"no_repeat_ngram_size": 2, "do_sample": False},
    "greedy": {"do_sample": False},
}


def test_each_request_has_its_own_options_and_seed(model):
    """The same tokens as `generate` draws after torch.manual_seed, whatever else is in the batch."""
    journal, prompts = Journal(model), some_prompts(3 * len(SAMPLING))
    options = [{"do_sample": True, "max_new_tokens": 10} | fields for fields in [*SAMPLING.values()] * 3]
    for i, (prompt, fields) in enumerate(zip(prompts, options)):
        journal.add(str(i), prompt, seed=i, **fields)
    journal.finish()
    for i, (prompt, fields) in enumerate(zip(prompts, options)):
        assert journal.text(str(i)) == alone(model, prompt, seed=i, **fields)


def test_answers_to_one_prompt_differ_and_are_reproducible(model):
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8}
    outputs = []
    for config in (None, None, FEW):
        torch.manual_seed(3)
        outputs.append(model.generate_batch([[5, 6], [7]], GenerationConfig(**options), config))
    assert written(outputs[0]) == written(outputs[1]) == written(outputs[2])
    assert list(outputs[0]) == [f"req_{i}{end}" for i in range(2) for end in ("__child#0", "__child#1", "")]
    assert len({tuple(text) for text in written(outputs[0])}) == 6
    seeded = [model.generate_batch([[5]], continuous_batching_config=ContinuousBatchingConfig(seed=4)) for _ in range(2)]
    assert written(seeded[0]) == written(seeded[1])


def test_equal_prompts_are_computed_once(model):
    batches = []
    model.register_forward_pre_hook(lambda _, args, inputs: batches.append(len(inputs["input_ids"])), with_kwargs=True)
    model.generate_batch([[5, 6, 7]] * 8 + [[7, 8]], max_new_tokens=3)
    assert batches == [2, 9, 9, 9]


def test_logarithms_of_probabilities(model):
    config = ContinuousBatchingConfig(return_logprobs=True)
    for fields in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5, "top_k": 0}):
        (output,) = model.generate_batch([[5, 6]], GenerationConfig(max_new_tokens=5, **fields), config).values()
        logits = model(torch.tensor([[5, 6, *output.generated_tokens]])).logits[0, 1:-1] / fields.get("temperature", 1)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.generated_tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected.detach(), rtol=1e-4, atol=1e-4)


def test_stop_strings_and_end_tokens(text_model, tokenizer):
    prompts = [tokenizer(text).input_ids for text in ("the heads", "of", "share the tokens of")]
    free = [alone(text_model, prompt, max_new_tokens=30, do_sample=False) for prompt in prompts]
    stops = [next(c for c in tokenizer.decode(text[2:]) if c.isascii()) for text in free]
    journal = Journal(text_model)
    for i, prompt in enumerate(prompts):
        options = {"max_new_tokens": 30, "do_sample": False, "stop_strings": stops[i]}
        journal.add(f"stop {i}", prompt, tokenizer=tokenizer, **options)
        journal.add(f"end {i}", prompt, max_new_tokens=30, do_sample=False, eos_token_id=free[i][7])
    journal.finish()
    for i, prompt in enumerate(prompts):
        options = {"max_new_tokens": 30, "do_sample": False, "stop_strings": stops[i], "tokenizer": tokenizer}
        assert journal.text(f"stop {i}") == alone(text_model, prompt, **options)
        assert journal.text(f"end {i}") == free[i][: free[i].index(free[i][7]) + 1]
        assert len(journal.text(f"stop {i}")) < 30


WRONG = {
    "empty": ([], {}, "The prompt is empty"),
    "unknown token": ([5, 97], {}, "The prompt has token 97; the model knows 97 tokens"),
    "negative token": ([-1], {}, "The prompt has token -1"),
    "all positions": ([5] * 128, {}, "The prompt has 128 tokens; there are 128 positions"),
    "shorter than the prompt": ([5] * 9, {"max_length": 9}, "At least 1 token must be generated"),
    "beams": ([5], {"num_beams": 2}, "Generation by beam_search is not possible here, only by greedy_search, sample"),
    "cold": ([5], {"max_new_tokens": 2, "do_sample": True, "temperature": 1e-4}, "temperature must be at least"),
    "guidance": ([5], {"guidance_scale": 2.0}, "runs the model twice per token"),
    "no such option": ([5], {"colour": "red"}, "no options of generation: colour"),
    "fraction": ([1.5], {}, "sequence of token ids, which are integers"),
    "text": ("abc", {}, "sequence of token ids"),
    "number": (5, {}, "sequence of token ids"),
    "configuration of text": ([5], {"generation_config": "x"}, "generation_config must be a GenerationConfig, got 'x'"),
    "stop strings without a tokenizer": ([5], {"stop_strings": "a"}, "tokenizer"),
}


@pytest.mark.parametrize("prompt, options, message", WRONG.values(), ids=WRONG)
def test_wrong_requests_are_rejected_before_anything_is_computed(model, prompt, options, message):
    model.register_forward_pre_hook(lambda *args: pytest.fail("The model was run."))
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[5], prompt], **options)
    with model.continuous_batching_context_manager() as manager, pytest.raises(ValueError, match=message):
        manager.add_request(prompt, **options)


@pytest.mark.parametrize("name", ["max_requests_per_batch", "max_batch_tokens", "max_queue_size"])
def test_limits_that_let_nothing_be_computed_are_rejected(model, name):
    config = ContinuousBatchingConfig(**{name: -1})
    for batch in (model.generate_batch, lambda inputs, **options: model.init_continuous_batching(**options)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            batch([[5]], continuous_batching_config=config)


def test_answers_end_at_the_last_position(model):
    (output,) = model.generate_batch([[5] * 125], max_new_tokens=50).values()
    assert len(output.generated_tokens) == 3 and output.error is None


@pytest.fixture
def fails_at(model):
    """The model raises where it reads token 96, and its logits are NaN for sequences with token 95."""

    def fail(module, args, inputs, output):
        if (inputs["input_ids"] == 96).any():
            raise RuntimeError("out of memory")
        output.logits[(inputs["input_ids"] == 95).any(1)] = float("nan")

    model.register_forward_hook(fail, with_kwargs=True)


@pytest.mark.parametrize("config", [None, FEW], ids=["all at once", "few at a time"])
@pytest.mark.parametrize("top_k", [1, 50], ids=["greedy", "sampled"])
def test_a_request_that_fails_harms_no_other(model, fails_at, config, top_k):
    good = [prompt for prompt in some_prompts(12) if not {95, 96} & set(prompt)]
    options = {"max_new_tokens": 3, "do_sample": top_k > 1, "top_k": top_k}
    config = ContinuousBatchingConfig(seed=1) if config is None else replace(config, seed=1)
    expected = written(model.generate_batch([*good[:6], [5], [5], *good[6:]], None, config, **options))
    expected = expected[:6] + expected[8:]
    bad = [[5, 96], [6, 95]]
    outputs = list(model.generate_batch([*good[:6], *bad, *good[6:]], None, config, **options).values())
    raised, infinite = outputs[6:8]
    assert raised.error == "RuntimeError: out of memory" and "logits are not finite" in infinite.error
    assert [output.generated_tokens for output in outputs[:6] + outputs[8:]] == expected
    assert not any(output.error for output in outputs[:6] + outputs[8:])


def test_a_token_that_fails_when_it_was_generated_harms_no_other(model):
    """A pass over many fails; each is retried alone from what it has."""
    prompts = [prompt for prompt in some_prompts(12) if len(prompt) < 20]
    expected = [alone(model, prompt, max_new_tokens=8, do_sample=True, seed=i) for i, prompt in enumerate(prompts)]
    fatal = expected[0][3]

    def fail(module, args, inputs):
        if inputs["input_ids"].shape[1] == 1 and fatal in inputs["input_ids"]:
            raise RuntimeError("no" if len(inputs["input_ids"]) > 1 else "of this one")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    journal = Journal(model)
    for i, prompt in enumerate(prompts):
        journal.add(str(i), prompt, seed=i, max_new_tokens=8, do_sample=True)
    journal.finish()
    last = [outputs[-1] for outputs in journal.outputs.values()]
    assert last[0].error == "RuntimeError: of this one" and last[0].generated_tokens == expected[0][:4]
    whole = [i for i in range(1, len(prompts)) if fatal not in expected[i]]
    assert len(whole) > 3 and all(last[i].generated_tokens == expected[i] for i in whole)


def test_a_model_that_always_fails_ends_every_request(model):
    def fail(*args):
        raise RuntimeError("no")

    model.register_forward_pre_hook(fail)
    outputs = model.generate_batch([[5], [6, 7], [8]])
    assert [output.error for output in outputs.values()] == ["RuntimeError: no"] * 3


def test_as_many_wait_as_may(model):
    journal = Journal(model, max_requests_per_batch=2, max_queue_size=3)
    for i in range(5):
        journal.add(str(i), [i], max_new_tokens=3)
    with pytest.raises(TooManyRequests, match="3 requests wait already"):
        journal.add("one more", [9])
    journal.finish()
    journal.add("later", [9], max_new_tokens=3, do_sample=False)
    journal.finish()
    assert journal.text("later") == alone(model, [9], max_new_tokens=3, do_sample=False)


# The manager -----------------------------------------------------------------------------------------------------------


def test_manager_takes_requests_at_any_time(model):
    prompts = some_prompts(8)
    with model.continuous_batching_context_manager(GenerationConfig(**GREEDY)) as manager:
        first = manager.add_requests(prompts[:4])
        assert {manager.get_result(timeout=30).request_id for _ in first} == set(first)
        names = manager.add_requests(prompts[4:])
        streamed = manager.add_request(prompts[0], streaming=True)
        lengths = [len(output.generated_tokens) for output in manager.request_id_iter(streamed)]
        assert lengths == list(range(1, 13))
        texts = {name: manager.get_result(name, timeout=30).generated_tokens for name in names}
        assert manager.get_result(timeout=0.01) is None
    assert [texts[name] for name in names] == [alone(model, prompt, **GREEDY) for prompt in prompts[4:]]
    assert not manager.is_running() and manager.get_result() is None


def test_manager_cancels_and_stops(model):
    manager = model.init_continuous_batching()
    manager.start()
    model.register_forward_pre_hook(lambda *args: time.sleep(0.01))
    long = {"max_new_tokens": 100, "streaming": True}
    outputs = {name: manager.request_id_iter(manager.add_request([5], name, **long)) for name in ("a", "b")}
    assert all(next(of).error is None for of in outputs.values())
    manager.cancel_request("a")
    assert list(outputs["a"])[-1].error == "The request was cancelled."
    assert next(outputs["b"]).error is None
    manager.stop(hard_stop=True, timeout=30)
    assert list(outputs["b"])[-1].error == "The request was cancelled."
    assert not manager.is_running()
    manager.start()
    assert manager.get_result(manager.add_request([5], max_new_tokens=2), timeout=30).error is None
    manager.stop()


def test_manager_has_a_thread_only_while_it_computes(model):
    before = threading.active_count()
    manager = model.init_continuous_batching()
    manager.start()
    for _ in range(3):
        assert manager.get_result(manager.add_request([5], max_new_tokens=2), timeout=30).error is None
        assert manager.get_result() is None  # waits until nothing is computed
        assert manager.is_running() and threading.active_count() <= before + 1  # which is about to end
    manager.stop()
    assert not manager.is_running()


def test_listener_that_fails_ends_its_own_request_alone(model):
    def fail(output):
        raise RuntimeError("gone")

    steps = []
    model.register_forward_pre_hook(lambda *args: steps.append(1))
    with model.continuous_batching_context_manager() as manager:
        manager.add_request([5], max_new_tokens=100, streaming=True, on_output=fail)
        assert manager.get_result(manager.add_request([6], max_new_tokens=5), timeout=30).error is None
    assert len(steps) < 20


def test_remote_code_says_where_batching_is(model, tmp_path):
    """The scheduler is not published with the weights; transformers' own would fail in the middle of a forward pass."""
    model.save_pretrained(tmp_path, with_code=True)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"tost"', '"own_tost"'))
    source = tmp_path / "configuration_tost.py"
    source.write_text(source.read_text().replace('model_type = "tost"', 'model_type = "own_tost"'))
    own = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert not isinstance(own, ToSTForCausalLM)
    with pytest.raises(ImportError, match="install tost-hf, `import tost_hf`"):
        own.generate_batch(some_prompts(4), **GREEDY)
    with pytest.raises(ImportError, match="install tost-hf"), own.continuous_batching_context_manager():
        pass


def test_methods_are_those_of_transformers(model):
    for name in ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch"):
        assert inspect.signature(getattr(ToSTForCausalLM, name)) == inspect.signature(getattr(GenerationMixin, name))
    tokens = torch.tensor([[5, 6], [7, 8]])
    paged = model.generate(tokens, cache_implementation="paged", **GREEDY)
    assert torch.equal(paged[0], model.generate(tokens, **GREEDY))
