"""The prefix cache: texts equal those without it, its bytes are bounded, and no wrong state is ever used."""

import random

import pytest
import torch
from conftest import randomize, small_config
from test_batching import VARIANTS, Journal

from tost_hf import ToSTForCausalLM
from tost_hf.serving.batch_states import concat_states, empty_state, select_states, state_tensors
from tost_hf.serving.prefix_cache import NODE_BYTES, PrefixCache, encode_tokens, model_fingerprint


LONG = {"max_position_embeddings": 2048}


def make_model(**options) -> ToSTForCausalLM:
    return randomize(ToSTForCausalLM(small_config(**options))).eval()


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def any_model(request):
    return make_model(**(LONG | request.param))


@pytest.fixture
def model():
    return make_model(**LONG)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(97) for _ in range(count)]


@pytest.fixture
def processed(model):
    """Token counts of the forward passes, padding included."""
    counts: list[int] = []
    model.register_forward_pre_hook(lambda _, args, inputs: counts.append(inputs["input_ids"].numel()), with_kwargs=True)
    return counts


# The tree ---------------------------------------------------------------------------------------------------------------


def test_tree_finds_the_longest_stored_prefix_of_random_texts(model):
    """Against a list of all that was stored; few distinct tokens, so that edges split and merge."""
    draw, state = random.Random(0), empty_state(model)
    nbytes = sum(x.nbytes for x in state_tensors(state))
    cache, stored = PrefixCache(40 * (nbytes + NODE_BYTES)), {}
    for _ in range(3000):
        text = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 12)))
        found = cache.find(encode_tokens(list(text)))
        prefixes = [x for x in stored if text[: len(x)] == x]
        longest = max(prefixes, key=len, default=())
        assert found.length == len(longest) and found.state is stored.get(longest)
        shared = [next((i for i, (a, b) in enumerate(zip(x, text)) if a != b), min(len(x), len(text))) for x in stored]
        assert found.shared_length == max(shared, default=0)
        if longest in stored:
            stored[longest] = stored.pop(longest)  # the most recently used is the last
        new = stored.pop(text, None) or empty_state(model)
        stored[text] = new
        cache.store(encode_tokens(list(text)), new, cache.version)
        while len(stored) > len(cache):
            stored.pop(next(iter(stored)))
        assert cache.nbytes <= cache.max_bytes
    assert 10 < len(cache) < 80
    while cache._evictable:
        cache._evict(cache._evictable.popitem(last=False)[0])
    assert cache.nbytes == 0 and not cache._root.children


def test_ten_thousand_prefixes_in_bounded_bytes(model):
    """The most recent are there, the oldest evicted, and the memory that is counted is all there is."""
    template = empty_state(model)
    nbytes = sum(x.nbytes for x in state_tensors(template))
    cache = PrefixCache(2**21)
    for i in range(10_000):
        state = concat_states(model.config, [template], 0)
        cache.store(encode_tokens([i % 97, i // 97, *range(20)]), state, cache.version)
    assert cache.nbytes <= 2**21 and len(cache) == pytest.approx(2**21 / (nbytes + 88 + 1.1 * NODE_BYTES), rel=0.15)
    found = [cache.find(encode_tokens([i % 97, i // 97, *range(20)])).length for i in range(10_000)]
    assert found == [0] * (10_000 - len(cache)) + [22] * len(cache)
    nodes, waiting = 0, [cache._root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        nodes += 1
    assert nodes < 2 * len(cache)


def test_state_larger_than_the_cache_evicts_nothing(model):
    state = empty_state(model)
    cache = PrefixCache(sum(x.nbytes for x in state_tensors(state)) + 3 * NODE_BYTES)
    cache.store(encode_tokens([1]), state, cache.version)
    cache.store(encode_tokens([2] * 10_000), state, cache.version)
    assert len(cache) == 1 and cache.find(encode_tokens([1])).length == 1
    with pytest.raises(ValueError, match="at least 0 bytes"):
        PrefixCache(-1)


def test_hash_collisions_are_no_equality():
    """Texts are compared token by token: one differing token anywhere ends the prefix."""
    model, cache, text = make_model(), PrefixCache(2**20), tokens_of(50)
    cache.store(encode_tokens(text), empty_state(model), cache.version)
    for i in range(50):
        changed = [*text[:i], (text[i] + 1) % 97, *text[i + 1 :]]
        assert cache.find(encode_tokens(changed)) == (0, None, i)


def test_states_that_are_not_finite_or_stale_are_not_stored(model):
    cache, state = PrefixCache(2**20), empty_state(model)
    cache.store(encode_tokens([1]), state, cache.version - 1)
    state.layers[0].sum_sq[0, 0, 0] = float("nan")
    cache.store(encode_tokens([1]), state, cache.version)
    assert len(cache) == cache.nbytes == 0


# States -----------------------------------------------------------------------------------------------------------------


def test_states_of_a_batch_are_copies(any_model):
    """Of each sequence exactly its own, whatever padding the batch has; no memory is shared."""
    states = []
    for length in (3, 7, 30):
        cache = empty_state(any_model)
        any_model(torch.tensor([tokens_of(length, length)]), past_key_values=cache)
        states.append(cache)
    batch = concat_states(any_model.config, states, 30)
    single = concat_states(any_model.config, states[:1], 3)
    for i, (length, state) in enumerate(zip((3, 7, 30), states)):
        taken = select_states(any_model.config, batch, [i], length)
        assert taken.get_seq_length() == length
        for x, y in zip(state_tensors(taken), state_tensors(state), strict=True):
            assert torch.equal(x, y)
    for copy in (batch, single, select_states(any_model.config, batch, [2], 30)):
        before = [x.clone() for x in state_tensors(copy)]
        for x in state_tensors(states[0]) + state_tensors(states[2]) + (state_tensors(batch) if copy is not batch else []):
            x.add_(1)
        assert all(torch.equal(x, y) for x, y in zip(state_tensors(copy), before))


# The scheduler ----------------------------------------------------------------------------------------------------------


def run_chats(model, prefix_cache_bytes: int, chats: int = 5, turns: int = 4, **options) -> tuple[list, list[int]]:
    """Each turn's prompt is all that was said before and a new question: the answers, and the cached tokens of the prompts."""
    journal = Journal(model, max_batch_tokens=128, prefix_cache_bytes=prefix_cache_bytes)
    texts = [tokens_of(100 + i, i % 2) for i in range(chats)]  # two system prompts
    answers, cached = [], []
    for turn in range(turns):
        for i, text in enumerate(texts):
            text += tokens_of(10, 100 * turn + i)
            journal.add(f"{turn} {i}", list(text), seed=100 * turn + i, max_new_tokens=8, **options)
        journal.finish()
        for i, text in enumerate(texts):
            last = journal.outputs[f"{turn} {i}"][-1]
            assert last.error is None
            answers.append(last.generated_tokens)
            cached.append(last.num_cached_tokens)
            text += last.generated_tokens
    return answers, cached


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
def test_chats_have_the_same_texts_with_and_without_the_cache(any_model, do_sample):
    if any_model.config.max_position_embeddings == 128:
        any_model = make_model(**(VARIANTS["hybrid with learned positions"] | LONG))
    off, none = run_chats(any_model, 0, do_sample=do_sample)
    on, cached = run_chats(any_model, 2**24, do_sample=do_sample)
    assert on == off and not any(none)
    # a turn continues from the last answer's state, which has all but its last token
    assert cached[5:] == [100 + i + 18 * turn - 1 for turn in (1, 2, 3) for i in range(5)]


def test_alone_and_from_a_chunk_border_it_is_exact_to_the_bit(model):
    """The same chunks are computed from the same states, with the cache or without."""
    prompts = [tokens_of(260) + tokens_of(n, seed=n) for n in (80, 90)]
    logits = {}
    for prefix_cache_bytes in (0, 2**24):
        journal = Journal(model, max_batch_tokens=128, prefix_cache_bytes=prefix_cache_bytes)
        seen = logits[prefix_cache_bytes] = []
        hook = model.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.logits))
        for i, prompt in enumerate(prompts):
            journal.add(str(i), prompt, max_new_tokens=3, do_sample=False)
            journal.finish()
        hook.remove()
    without, with_cache = logits.values()
    assert len(with_cache) < len(without)
    assert all(torch.equal(x, y) for x, y in zip(without[-3:], with_cache[-3:]))


def test_second_question_reads_the_rest_of_a_chunk_and_the_third_nothing_of_the_prefix(model, processed):
    journal, system = Journal(model), tokens_of(1000)
    for i, expected in enumerate(([512, 256, 128, 64, 32, 27, 1], [8, 19, 1], [19, 1])):
        journal.add(str(i), [*system, i, *tokens_of(19, seed=i)], max_new_tokens=1)
        journal.finish()
        assert processed == expected, i
        assert journal.outputs[str(i)][-1].num_cached_tokens == (0, 992, 1000)[i]
        processed.clear()


def test_large_states_of_a_hybrid_do_not_evict_each_other():
    """Of a long prompt the last border is stored, from which the next question and the next turn continue."""
    model = make_model(**(LONG | VARIANTS["hybrid with learned positions"]))
    state = concat_states(model.config, [empty_state(model)], 1000)
    journal = Journal(model, prefix_cache_bytes=3 * sum(x.nbytes for x in state_tensors(state)))
    for i in range(3):
        journal.add(str(i), [*tokens_of(1000), i, *tokens_of(19, seed=i)], max_new_tokens=4)
        journal.finish()
    assert [outputs[-1].num_cached_tokens for outputs in journal.outputs.values()] == [0, 992, 992]


def test_common_prefix_of_prompts_that_arrive_together_is_computed_once(model, processed):
    system = tokens_of(1024)
    outputs = model.generate_batch([[*system, i, 5, 6] for i in range(20)], max_new_tokens=1)
    assert sum(processed) < 1024 + 20 * 2 + 20 + 1
    assert sum(output.num_cached_tokens for output in outputs.values()) == 19 * 1024


CHANGES = {
    "a weight, in place": lambda model: model.lm_head.weight.data.mul_(1.5),
    "temp": lambda model: model.model.layers[0].self_attn.temp.data.fill_(3.0),
    "one number of a table": lambda model: model.model.embed_tokens.weight.detach()[3].add_(1.0),
    "loaded weights": lambda model: model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}),
    "dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_uses_no_old_state(model, change):
    prompt = tokens_of(200)
    journal = Journal(model)
    journal.add("first", prompt, max_new_tokens=5, do_sample=False)
    journal.finish()
    journal.add("during", prompt[:100], max_new_tokens=5, do_sample=False)
    journal.scheduler.step()
    with torch.no_grad():
        change(model)
    if model.dtype == torch.float32:  # else what is half computed fails, as without the cache
        journal.finish()
    else:
        journal.scheduler.fail_all(RuntimeError("dtype"))
    for name in ("again", "and again"):
        journal.add(name, prompt, max_new_tokens=5, do_sample=False)
        journal.finish()
    again, repeated = (journal.outputs[name][-1] for name in ("again", "and again"))
    fresh = Journal(model, prefix_cache_bytes=0)
    fresh.add("fresh", prompt, max_new_tokens=5, do_sample=False)
    fresh.finish()
    assert again.generated_tokens == repeated.generated_tokens == fresh.text("fresh")
    assert again.num_cached_tokens == 0 and repeated.num_cached_tokens == 199


def test_a_state_computed_across_a_change_is_not_stored(model):
    """A request that began before the change and ends after another began has a state of both models."""
    journal = Journal(model)
    journal.add("old", tokens_of(100), max_new_tokens=30, do_sample=False)
    journal.scheduler.step()
    model.model.norm.weight.data.mul_(2.0)
    journal.add("new", tokens_of(100, seed=1), max_new_tokens=1, do_sample=False)
    journal.finish()
    text = tokens_of(100) + journal.text("old")
    assert journal.scheduler.prefix_cache.find(encode_tokens(text)).length == 0
    assert journal.scheduler.prefix_cache.find(encode_tokens(tokens_of(100, seed=1))).length == 100


def test_adapters_have_separate_states(model):
    peft = pytest.importorskip("peft", "0.20")  # the lowest version that `add_adapter` of transformers accepts
    config = peft.LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False)
    model.add_adapter(config, "one")
    model.add_adapter(config, "two")
    prints = []
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        prints.append(model_fingerprint(model))
    model.disable_adapters()
    prints.append(model_fingerprint(model))
    assert len(set(prints)) == 3
    model.enable_adapters()
    model.set_adapter("two")
    assert model_fingerprint(model) == prints[1]


def test_requests_that_fail_store_nothing_wrong():
    """NaN comes with a token: what follows it is not stored, and others' texts stay as they are."""
    model = make_model(tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[96] = float("nan")
    good = [token % 96 for token in tokens_of(80)]
    journal = Journal(model)
    for name, prompt in {"bad": [*good[:70], 96, 5], "good": good}.items():
        journal.add(name, prompt, max_new_tokens=4, do_sample=False)
        journal.finish()
    assert "not finite" in journal.outputs["bad"][-1].error
    assert journal.outputs["good"][-1].error is None and journal.outputs["good"][-1].num_cached_tokens == 64
    found = journal.scheduler.prefix_cache.find(encode_tokens([*good[:70], 96, 5]))
    assert found.length <= 70


def test_pinned_states_are_never_evicted(model):
    state = empty_state(model)
    cache = PrefixCache(2**15)
    cache.store(encode_tokens([7, 8, 9]), state, cache.version)
    cache.store(encode_tokens([7, 8, 9]), state, cache.version, pinned=True)
    for i in range(100):
        cache.store(encode_tokens([i, i]), empty_state(model), cache.version)
    assert cache.find(encode_tokens([7, 8, 9, 1])).length == 3 and len(cache) < 20
    cache.clear()
    assert cache.find(encode_tokens([7, 8, 9, 1])).length == 0 and not len(cache)
