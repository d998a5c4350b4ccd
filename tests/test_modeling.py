"""Text models: sizes, cache, recorded outputs, losses, positions. test_options.py tests padding, packing and caching."""

import copy
import logging

import pytest
import torch
from conftest import randomize, small_config
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from tost_hf import ToSTCache, ToSTConfig, ToSTForCausalLM, ToSTForSequenceClassification
from tost_hf.model import inputs_tost
from tost_hf.model.configuration_tost import FULL_ATTENTION, PRESETS, TSSA


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOST_PLUS = {"decay_type": "token", "conv_kernel": 4, "position_embedding_type": "none"}
HYBRID = {"layer_types": [TSSA, FULL_ATTENTION]}


def random_ids(*shape):
    return torch.randint(2, 97, shape)


@pytest.mark.parametrize(
    "name, count",
    list(zip(PRESETS, (110_384_016, 304_711_040, 656_447_440, 109_597_728, 303_761_152, 113_099_736), strict=True)),
)
def test_preset_parameter_counts(name, count):
    with torch.device("meta"):
        model = ToSTForCausalLM(ToSTConfig.from_preset(name))
    assert model.num_parameters() == sum(p.numel() for p in model.parameters()) == count


# Cache and continuation ----------------------------------------------------------------------------------------------


def test_cache_has_constant_size(tiny_model):
    assert tiny_model(random_ids(1, 4), use_cache=False).past_key_values is None
    out = tiny_model(random_ids(3, 100))
    layer = out.past_key_values.layers[0]
    assert layer.sum_sq.shape == layer.sum_weighted_sq.shape == (3, 4, 8)
    assert layer.sum_membership.shape == (3, 4)
    assert layer.nbytes == 3 * 4 * (4 * 8 + 8 * 8 + 8)  # float32, and float64


def test_bf16_statistics_stay_float32_and_decoding_stays_exact():
    """After 500 single-token steps the bf16 logits are as close to float64 as those of one bf16 forward pass."""
    config = small_config(max_position_embeddings=512)
    model = randomize(ToSTForCausalLM(config)).eval().to(torch.bfloat16)
    float64_model = copy.deepcopy(model).double()
    tokens = random_ids(2, 501)
    with torch.no_grad():
        prefill_logits, expected = model(tokens).logits, float64_model(tokens).logits
        cache, step_logits = None, []
        for t in range(501):
            out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            step_logits.append(out.logits)
    for layer in cache.layers:
        assert [x.dtype for x in layer.state] == [torch.float32, torch.float64, torch.float64]

    def rms_error(logits):
        tail = slice(400, None)
        return (logits[:, tail].double() - expected[:, tail]).square().mean().sqrt()

    assert rms_error(torch.cat(step_logits, 1)) < 1.1 * rms_error(prefill_logits)


@pytest.mark.parametrize("inputs", [[], ["attention_mask", "position_ids"]], ids=" and ".join)
@pytest.mark.parametrize("options", [{}, TOST_PLUS, HYBRID], ids=str)
def test_no_synchronization(options, inputs):
    """Training and decoding read no tensor values: on the meta device, reading one raises an error."""
    model = ToSTForCausalLM(small_config(**options)).to("meta")
    batch = {name: torch.ones(2, 9, dtype=torch.long, device="meta") for name in ("input_ids", *inputs)}
    # transformers reads the padding mask of softmax attention, except in one-token steps with a static cache
    safe_batch = {name: x for name, x in batch.items() if options is not HYBRID or name != "attention_mask"}
    model.train()(**safe_batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    model.eval()
    for cache, step_batch in (
        (ToSTCache(model.config), safe_batch),
        (StaticCache(config=model.config, max_cache_len=12), batch),
    ):
        with torch.no_grad():
            model(**{name: x[:, :8] for name, x in safe_batch.items()}, past_key_values=cache)
            model(
                **{name: x if name == "attention_mask" else x[:, 8:] for name, x in step_batch.items()}, past_key_values=cache
            )


@pytest.mark.parametrize("options", [{}, TOST_PLUS, HYBRID, {"is_causal": False}], ids=["text", "plus", "hybrid", "encoder"])
def test_packed_sequences_are_found_by_reading_one_flag(options, monkeypatch):
    """And none in a decoding step, where reading it would synchronize a device."""
    config, embeds, reads = small_config(**options), torch.zeros(2, 9, 32), []
    names = ("attention_mask", "past_key_values", "seq_idx", "cu_seq_lens_q")
    arguments = dict.fromkeys(names) | {"use_cache": config.is_causal}
    monkeypatch.setattr(inputs_tost, "create_causal_mask_mapping", lambda *args: {})
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: reads.append(x) or bool(x.item()))
    for positions, seq_idx in (
        (torch.arange(9), None),
        (torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])),
    ):
        reads.clear()
        inputs = inputs_tost.resolve_inputs(config, embeds, position_ids=positions.expand(2, 9), **arguments)
        assert len(reads) == 1
        assert inputs.seq_idx is seq_idx is None or torch.equal(inputs.seq_idx, seq_idx.expand(2, 9))
        cache = inputs.past_key_values
        assert (cache is not None) == (config.is_causal and seq_idx is None)
        if cache is not None:
            step = arguments | {"position_ids": torch.tensor([[9]]), "past_key_values": cache}
            inputs_tost.resolve_inputs(config, embeds[:, :1], **step)
            assert len(reads) == 1


def per_sample_gradients(model, tokens):
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, tokens):
        options = {"labels": tokens[None], "use_cache": False}
        return torch.func.functional_call(model, parameters, (tokens[None],), options).loss

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)


@pytest.mark.parametrize("options", [{}, TOST_PLUS], ids=["text", "plus"])
def test_per_sample_gradients_by_torch_func(options):
    model, tokens = randomize(ToSTForCausalLM(small_config(tie_word_embeddings=False, **options))), random_ids(3, 9)
    model.double()
    gradients = per_sample_gradients(model, tokens)
    for i, sample in enumerate(tokens):
        model.zero_grad()
        model(sample[None], labels=sample[None]).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)


def test_packing_without_reads(monkeypatch):
    """Logits and cache are the same where position_ids are not read, as in compiled programs."""
    model, tokens = randomize(ToSTForCausalLM(small_config(**TOST_PLUS))).eval(), random_ids(2, 9)
    for positions in (torch.arange(9), torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])):
        expected = model(tokens, position_ids=positions.expand(2, 9))
        with monkeypatch.context() as patch:
            patch.setattr(inputs_tost, "_has_values", lambda x: False)
            outputs = model(tokens, position_ids=positions.expand(2, 9))
        torch.testing.assert_close(outputs.logits, expected.logits)
        assert outputs.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["published", "hybrid"])
def test_static_decoding_without_reads(options, padded, monkeypatch):
    """Logits are the same without reading masks and lengths, as in compiled programs."""
    model = randomize(ToSTForCausalLM(small_config(**options))).eval()
    tokens = random_ids(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4 if padded else 0]])).long()
    caches = [StaticCache(config=model.config, max_cache_len=12) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(tokens[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        expected = model(tokens[:, 8:], attention_mask=mask, past_key_values=caches[0]).logits
        monkeypatch.setattr(inputs_tost, "_has_values", lambda x: False)
        logits = model(tokens[:, 8:], attention_mask=mask, past_key_values=caches[1]).logits
    torch.testing.assert_close(logits, expected)


def test_flattening_collator(tiny_model):
    features = [{"input_ids": random_ids(n).tolist()} for n in (4, 9, 2)]
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True)(features)
    logits = tiny_model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
    expected = [tiny_model(torch.tensor([f["input_ids"]])).logits[0] for f in features]
    torch.testing.assert_close(logits, torch.cat(expected), **CLOSE)


# Recorded outputs ----------------------------------------------------------------------------------------------------


def test_memberships_and_hidden_states(tiny_model, caplog):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    out = tiny_model(random_ids(2, 9), attention_mask=mask, output_memberships=True, output_hidden_states=True)
    assert len(out.memberships) == 3 and len(out.hidden_states) == 4
    for membership in out.memberships:
        assert membership.shape == (2, 4, 9) and membership.dtype == torch.float32
        torch.testing.assert_close(membership.sum(1), mask.float())
    assert tiny_model(random_ids(1, 3)).memberships is None
    logging.Logger.warning_once.cache_clear()  # transformers adds the method
    for _ in range(2):
        assert not tiny_model(random_ids(1, 3), output_attentions=True).attentions
    assert caplog.text.count("output_attentions=True returns no weights") == 1
    step = tiny_model(random_ids(2, 1), past_key_values=out.past_key_values, output_memberships=True)
    assert step.memberships[0].shape == (2, 4, 1)


def test_inputs_embeds_and_logits_to_keep(tiny_model):
    tokens = random_ids(2, 9)
    expected = tiny_model(tokens).logits
    embeds = tiny_model.get_input_embeddings()(tokens)
    torch.testing.assert_close(tiny_model(inputs_embeds=embeds).logits, expected)
    assert torch.equal(tiny_model(tokens, return_dict=False)[0], expected)
    torch.testing.assert_close(tiny_model(tokens, logits_to_keep=2).logits, expected[:, -2:])
    torch.testing.assert_close(tiny_model(tokens, logits_to_keep=torch.tensor([0, 5])).logits, expected[:, [0, 5]])


def test_loss_and_num_items_in_batch(tiny_model):
    tokens = random_ids(2, 9)
    labels = tokens.clone()
    labels[0, 3] = -100
    out = tiny_model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(tiny_model(tokens, labels=labels, num_items_in_batch=30).loss, expected * 15 / 30)


def test_dropout_acts_in_training_only(tiny_config):
    tiny_config.hidden_dropout = tiny_config.attention_dropout = tiny_config.embedding_dropout = 0.3
    model = randomize(ToSTForCausalLM(tiny_config))
    tokens = random_ids(1, 8)
    assert not torch.equal(model.train()(tokens).logits, model(tokens).logits)
    assert torch.equal(model.eval()(tokens).logits, model(tokens).logits)


def test_sequence_classification(tiny_config):
    """Pools the last token that is not padding, found by the mask (test_encoder.py) or the pad token."""
    tiny_config.num_labels = 3
    model = randomize(ToSTForSequenceClassification(tiny_config)).eval()
    tokens, mask = random_ids(3, 8), torch.ones(3, 8, dtype=torch.long)
    tokens[0, :3] = mask[0, :3] = 0
    tokens[1, 5:] = mask[1, 5:] = 0
    labels = torch.tensor([0, 2, 1])
    out = model(tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    torch.testing.assert_close(model(tokens[1:]).logits, out.logits[1:], **CLOSE)  # right padding, found by the pad token
    embeds = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, out.logits, **CLOSE)
    assert model(tokens, attention_mask=mask, output_memberships=True).memberships[0].shape == (3, 4, 8)


# Positions -----------------------------------------------------------------------------------------------------------


def test_positions_beyond_the_tables_are_rejected(tiny_model):
    message = r"Position 128 .* hold 128 .*resize_position_embeddings.*position_embedding_type='none'"
    with pytest.raises(IndexError, match=message):
        tiny_model(random_ids(1, 129))
    out = tiny_model(random_ids(1, 128))
    with pytest.raises(IndexError, match=message):
        tiny_model(random_ids(1, 1), past_key_values=out.past_key_values)
    with pytest.raises(IndexError, match=message):
        tiny_model.generate(random_ids(1, 125), max_new_tokens=10)
    for positions in ([[-1, 0]], [[127, 128]]):
        with pytest.raises(IndexError, match="out of range"):  # torch's own error
            tiny_model(random_ids(1, 2), position_ids=torch.tensor(positions))
    mask = (torch.arange(140) >= 12).long()[None]
    assert tiny_model(random_ids(1, 140), attention_mask=mask).logits.isfinite().all()  # 128 real tokens


def test_model_without_positions_has_no_tables_and_no_limit(tiny_config):
    tiny_config.position_embedding_type = "none"
    model = randomize(ToSTForCausalLM(tiny_config)).eval()
    assert not any("position" in name or "denom_bias" in name for name, _ in model.named_parameters())
    assert model(random_ids(1, 3000)).logits.isfinite().all()
    assert model.generate(random_ids(1, 200), max_new_tokens=5).shape == (1, 205)


# Bad input ---------------------------------------------------------------------------------------------------------------


def make_cache(**changes):
    config = small_config(**({"num_hidden_layers": 3} | changes))
    return ToSTForCausalLM(config).model(random_ids(1, 3)).past_key_values


def make_key_value_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    return cache


def make_inputs(batch: int, length: int, **fields):
    """Random tokens of this shape and other inputs, with lists converted to tensors."""
    fields = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in fields.items()}
    return {"input_ids": random_ids(batch, length)} | fields


def make_next_inputs(length: int, **fields):
    """Inputs that follow a cache of three tokens."""
    return make_inputs(1, length, past_key_values=make_cache(), **fields)


HYBRID_TYPES = [FULL_ATTENTION, *HYBRID["layer_types"]]
SEQ_IDX = torch.tensor([[0, 0, 1, 1]])


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        (lambda: {}, ValueError, "exactly one"),
        (lambda: make_inputs(1, 3, inputs_embeds=torch.zeros(1, 3, 32)), ValueError, "exactly one"),
        (lambda: {"input_ids": torch.tensor([[3, 97]])}, IndexError, "between 0 and 96"),
        (lambda: {"input_ids": random_ids(1, 3).bool()}, ValueError, "integers.* got torch.bool"),
        (lambda: {"input_ids": random_ids(3)}, ValueError, r"shape \(batch, tokens\)"),
        (lambda: make_inputs(0, 3), ValueError, "empty"),
        (lambda: {"inputs_embeds": torch.zeros(1, 3, 31)}, ValueError, "inputs_embeds must have shape"),
        (lambda: make_inputs(2, 3, attention_mask=torch.ones(2, 4)), ValueError, r"must have shape \(2, 3\)"),
        (lambda: make_inputs(1, 3, attention_mask=torch.ones(1, 1, 3, 3)), ValueError, "no token-by-token"),
        (lambda: make_inputs(1, 3, position_ids=torch.arange(4)[None]), ValueError, "position_ids must be"),
        (lambda: make_inputs(1, 3, position_ids=torch.rand(1, 3)), ValueError, "must be integers"),
        (lambda: make_inputs(1, 3, past_key_values=((1, 2),)), TypeError, "must be a transformers Cache"),
        (lambda: make_inputs(1, 3, past_key_values=make_key_value_cache()), ValueError, "another kind of model"),
        (lambda: make_inputs(1, 3, past_key_values=make_cache(num_hidden_layers=2)), ValueError, "2 layers"),
        (lambda: make_inputs(1, 3, past_key_values=make_cache(num_attention_heads=8)), ValueError, "heads"),
        (lambda: make_inputs(1, 3, past_key_values=make_cache(conv_kernel=4)), ValueError, "3 inputs of a convolution"),
        (lambda: make_inputs(1, 3, past_key_values=make_cache(layer_types=HYBRID_TYPES)), ValueError, "layers are"),
        (lambda: make_inputs(2, 3, past_key_values=make_cache()), ValueError, "holds 1 sequences"),
        (lambda: make_next_inputs(3, attention_mask=torch.ones(1, 3)), ValueError, "covers the cached tokens"),
        (lambda: make_next_inputs(4, position_ids=[[0, 1, 0, 1]]), ValueError, "cannot be combined with a cache"),
        (lambda: make_next_inputs(4, seq_idx=SEQ_IDX), ValueError, "cannot be combined with a cache"),
        (lambda: make_inputs(2, 4, cu_seq_lens_q=[0, 2, 4]), ValueError, "batch of size 1"),
        (lambda: make_inputs(1, 4, cu_seq_lens_q=[[0, 2, 4]]), ValueError, "cu_seq_lens_q must be"),
        (lambda: make_inputs(1, 4, seq_idx=[[0, 0, 1]]), ValueError, "seq_idx must be"),
        (lambda: make_inputs(1, 4, seq_idx=torch.full((1, 4), float("nan"))), ValueError, "must be integers"),
    ],
)
def test_bad_model_input(tiny_model, inputs, error, message):
    with pytest.raises(error, match=message):
        tiny_model(**inputs())


@torch.no_grad()
def test_sequence_numbers_take_precedence_over_positions(tiny_model):
    """Positions then only select rows of the tables, as for sequences that begin later than at 0."""
    tokens, positions = random_ids(1, 6), torch.tensor([[4, 5, 6, 0, 1, 2]])
    parts = [tiny_model(tokens[:, x], position_ids=positions[:, x]).logits for x in (slice(3), slice(3, 6))]
    for packing in {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])}, {"cu_seq_lens_q": torch.tensor([0, 3, 6])}:
        out = tiny_model(tokens, position_ids=positions, **packing)
        torch.testing.assert_close(out.logits, torch.cat(parts, 1))
    whole = tiny_model(tokens, position_ids=positions, seq_idx=torch.zeros_like(tokens)).logits
    assert not torch.allclose(whole[:, 3:], parts[1], rtol=1e-3)
