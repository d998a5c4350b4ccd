"""The operator against the reference implementation in float64, and that against the definition."""

import os
import subprocess
import sys

import pytest
import torch

from tost_hf import (
    TokenStatisticsSelfAttention,
    ToSTCache,
    ToSTConfig,
    TSSAState,
    tssa,
    tssa_step,
)
from tost_hf.model import tssa_chunked, tssa_reference


F64 = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that small inputs have several chunks and several groups of batch elements."""
    monkeypatch.setattr(tssa_chunked, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(tssa_chunked, "CHUNK_NUMBERS", 32 * 16)


def make(B=2, T=70, H=3, p=5, dtype=torch.float64, dead=0):
    """w (B, T, H, p), temp, bias (T, H); `dead` zero tokens, two tiny ones, a dead channel exercise the epsilon clamps."""
    w = torch.randn(B, T, H, p, dtype=dtype)
    if dead:
        w[:, :dead] = 0
        w[:, dead : dead + 2] *= 1e-7
        w[:, :, 0, 0] = 0
    temp = torch.rand(H, dtype=dtype) * 3 + 0.5
    bias = torch.randn(T, H, dtype=dtype) * 0.3
    return [x.requires_grad_() for x in (w, temp, bias)]


def padding_mask(T):
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : T // 3] = False  # left
    mask[1, -(T // 4) :] = False  # right
    return mask


def compiled(fn):
    """The path that compilers see, with AOT autograd; no code generation."""
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def traced(*args, **kwargs):
    """The path that torch.export and compilers for other devices see, its backward derived."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        patch.setattr(torch.compiler, "is_exporting", lambda: True)
        return tssa(*args, **kwargs)


@pytest.fixture(params=["eager", "compiled", "traced"])
def op(request):
    return {"eager": tssa, "compiled": compiled(tssa), "traced": traced}[request.param]


def by_definition(w, temp, bias, real, causal, log_decay=None):
    """Output and membership of one sequence w (T, H, p), token by token and head by head; `real` (T,) marks its tokens."""
    T, H, p = w.shape
    output, membership = torch.zeros_like(w), w.new_zeros(T, H)
    gamma = w.new_ones(T, H) if log_decay is None else log_decay.exp().where(real[:, None], 1)

    def left(i, t):
        """What is left at token t of token i, (H, 1)."""
        return gamma[i + 1 : t + 1].prod(0)[:, None]

    for t in range(T):
        if not real[t]:
            continue
        past = [i for i in range(t + 1 if causal else T) if real[i]]
        squares = sum(left(i, t) * w[i] ** 2 for i in past).clamp_min(1e-12 if causal else 1e-24)
        score = [temp[h] * ((w[t, h] ** 2 / squares[h]).sum() + (p * bias[t, h] if causal else 0)) for h in range(H)]
        membership[t] = torch.stack(score).softmax(0)
    for t in range(T):
        past = range(t + 1 if causal else T)
        for h in range(H):
            moment = sum(left(i, t)[h] * membership[i, h] * w[i, h] ** 2 for i in past if real[i]) if real[t] else 0
            count = sum(left(i, t)[h] * membership[i, h] for i in past)
            output[t, h] = -membership[t, h] * w[t, h] / (1 + moment / (count + 1e-8))
    return output, membership


@pytest.mark.parametrize("causal, decayed", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("dead", [0, 3])
def test_reference_equals_the_definition(causal, decayed, dead):
    """With padding on both sides, and with packed sequences, each of which is computed alone."""
    w, temp, bias = (x.detach() for x in make(T=17, dead=dead))
    decay = -torch.rand(2, 17, 3, dtype=torch.float64) if decayed else None
    mask, seq_idx = padding_mask(17), torch.arange(17).div(7, rounding_mode="floor").expand(2, 17)
    if causal:
        decay_at_tokens = decay.masked_fill(~mask[..., None], 0) if decayed else None
        log_decay = tssa_reference.reset_at_starts(decay_at_tokens, seq_idx, w.dtype)
        output, membership, _ = tssa_reference.causal(w, temp, bias, ~mask, log_decay=log_decay)
    else:
        output, membership = tssa_reference.bidirectional(w, temp, ~mask, seq_idx)
    for element in range(2):
        for part in (slice(0, 7), slice(7, 14), slice(14, 17)):
            decay_of_part = decay[element, part] if decayed else None
            expected = by_definition(w[element, part], temp, bias[part], mask[element, part], causal, decay_of_part)
            torch.testing.assert_close((output[element, part], membership[element, part]), expected, **F64)


@pytest.mark.parametrize("T", [1, 8, 63, 64, 65, 150])
@pytest.mark.parametrize("H, p", [(1, 4), (3, 5), (12, 8)])
def test_causal_forward(op, T, H, p):
    w, temp, bias = make(T=T, H=H, p=p)
    out = op(w, temp, bias)
    expected, membership, final = tssa_reference.causal(w, temp, bias)
    torch.testing.assert_close(out.output, expected, **F64)
    torch.testing.assert_close(out.membership, membership.transpose(1, 2), **F64)
    torch.testing.assert_close(out.final_state, final, **F64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dead, normalize_scores", [(0, True), (3, True), (3, False)])
def test_causal_gradients_equal_the_reference(op, masked, dead, normalize_scores):
    w, temp, bias = make(dead=dead)
    mask = padding_mask(70) if masked else None
    g = torch.randn_like(w)
    output = op(w, temp, bias, mask=mask, normalize_scores=normalize_scores).output
    padding = None if mask is None else ~mask
    expected = tssa_reference.causal(w, temp, bias, padding, normalize_scores=normalize_scores)[0]
    torch.testing.assert_close(output, expected, **F64)
    got, expected = (torch.autograd.grad(x, (w, temp, bias), g) for x in (output, expected))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dead", [0, 3])
def test_bidirectional(op, masked, dead):
    w, temp, _ = make(dead=dead)
    mask = padding_mask(70) if masked else None
    out = op(w, temp, causal=False, mask=mask)
    expected, membership = tssa_reference.bidirectional(w, temp, None if mask is None else ~mask)
    torch.testing.assert_close(out.output, expected, **F64)
    torch.testing.assert_close(out.membership, membership.transpose(1, 2), **F64)
    assert out.final_state is None
    g = torch.randn_like(w)
    got = torch.autograd.grad(out.output, (w, temp), g)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (w, temp), g), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(causal, masked, packed):
    """Finite differences, of the output, the membership and the final state, for every input and the initial state."""
    B, T, H, p = 2, 36, 2, 2
    w, temp, bias = make(B, T, H, p)
    mask = padding_mask(T) if masked else None
    seq_idx = torch.arange(T).div(13, rounding_mode="floor").expand(B, T) if packed else None
    if not causal:

        def fn(w, temp):
            return tssa(w, temp, causal=False, mask=mask, seq_idx=seq_idx)[:2]

        assert torch.autograd.gradcheck(fn, (w, temp), fast_mode=True)
        return
    state = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in ((B, H, p), (B, H, p), (B, H))]

    def fn(w, temp, bias, *state):
        out = tssa(w, temp, bias, mask=mask, seq_idx=seq_idx, initial_state=TSSAState(*state))
        return out.output, out.membership, *out.final_state

    assert torch.autograd.gradcheck(fn, (w, temp, bias, *state), fast_mode=True)
    torch.testing.assert_close(  # the compiled path has the same gradients
        torch.autograd.grad([x.square().sum() for x in compiled(fn)(w, temp, bias, *state)], (w, temp, bias, *state)),
        torch.autograd.grad([x.square().sum() for x in fn(w, temp, bias, *state)], (w, temp, bias, *state)),
        **F64,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_equal_the_sequences_alone(op, causal, masked):
    """Batch elements with different borders, one-token sequences, and padding inside."""
    elements = [(5, 1, 44, 20), (33, 36, 1)]
    w, temp, _ = make(T=70, H=3)
    mask = torch.ones(2, 70, dtype=torch.bool)
    if masked:
        mask[0, 2:4] = mask[0, 40] = mask[1, :3] = mask[1, 69] = False
    seq_idx = torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in elements])
    bias = torch.randn(2, 70, 3, dtype=torch.float64) if causal else None
    out = op(w, temp, bias, causal=causal, mask=mask, seq_idx=seq_idx)
    grad = torch.autograd.grad(out.output.square().sum(), w)[0]
    for element, lengths in enumerate(elements):
        start = 0
        for length in lengths:
            part = (slice(element, element + 1), slice(start, start + length))
            alone = tssa(w[part], temp, None if bias is None else bias[part], causal=causal, mask=mask[part])
            torch.testing.assert_close(out.output[part], alone.output, **F64)
            torch.testing.assert_close(out.membership[element, :, part[1]], alone.membership[0], **F64)
            torch.testing.assert_close(grad[part], torch.autograd.grad(alone.output.square().sum(), w)[0][part], **F64)
            start += length
        if causal:  # the state left over is the last sequence's
            torch.testing.assert_close([x[element] for x in out.final_state], [x[0] for x in alone.final_state], **F64)


@pytest.mark.parametrize("pieces", [(40, 30), (1, 2, 67), (69, 1)])
def test_state_carries_over(op, pieces):
    w, temp, bias = make()
    whole = tssa(w, temp, bias)
    state, outputs = None, []
    for x, b in zip(w.split(pieces, 1), bias.split(pieces, 0)):
        out = op(x, temp, b, initial_state=state)
        state = out.final_state
        outputs.append(out.output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output, **F64)
    torch.testing.assert_close(state, whole.final_state, **F64)


def test_a_state_that_cannot_be_updated_in_place_is_rejected():
    state = TSSAState(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).double(), torch.zeros(2, 3).double())
    w, temp = torch.randn(2, 3, 4), torch.ones(3)
    assert all(x is y for x, y in zip(tssa_step(w, temp, None, state, in_place=True).final_state, state))
    float32 = state._replace(sum_membership=torch.zeros(2, 3))
    for tokens, before in ((w, float32), (w.requires_grad_(), state)):
        with pytest.raises(ValueError, match="in place"):
            tssa_step(tokens, temp, None, before, in_place=True)


def test_steps_are_the_whole():
    w, temp, bias = make()
    mask = padding_mask(70)
    whole = tssa(w, temp, bias, mask=mask)
    state = None
    for t in range(70):
        out = tssa_step(w[:, t], temp, bias[t], state, mask=mask[:, t])
        state = out.final_state
        torch.testing.assert_close(out.output, whole.output[:, t], **F64)
        torch.testing.assert_close(out.membership, whole.membership[..., t], **F64)
    torch.testing.assert_close(state, whole.final_state, **F64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_low_precision_keeps_float32_statistics(op, dtype, tolerance, causal):
    """Relative RMS error against float64 of the same rounded inputs, over 1,500 tokens: sums in bf16 would be off by 30 %."""
    w, temp, bias = make(1, 1500, 4, 8)
    w = w.detach().to(dtype).requires_grad_()
    bias = bias.to(torch.float32) if causal else None
    out = op(w, temp.float(), bias, causal=causal)
    exact = tssa(w.double(), temp.float().double(), None if bias is None else bias.double(), causal=causal)
    assert out.output.dtype == dtype
    assert out.membership.dtype == torch.float32
    assert [x.dtype for x in out.final_state or ()] in ([], [torch.float32, torch.float64, torch.float64])

    def error(x, y):
        return ((x.double() - y).square().mean() / y.square().mean()).sqrt()

    assert error(out.output, exact.output) < tolerance
    g = torch.randn_like(w)
    got, want = torch.autograd.grad(out.output, w, g), torch.autograd.grad(exact.output, w, g.double())
    assert error(got[0], want[0].double()) < tolerance


def test_padding_may_hold_anything(op):
    """Poisoned padding leaves no trace, in outputs, states and gradients."""
    w, temp, bias = make()
    mask = padding_mask(70)
    poisoned = w.detach().masked_fill(~mask[..., None, None], float("nan")).requires_grad_()
    for causal in (True, False):
        kwargs = {"causal": causal, "mask": mask}
        clean, dirty = (op(x, temp, bias if causal else None, **kwargs) for x in (w, poisoned))
        torch.testing.assert_close(clean, dirty, rtol=0, atol=0)
        assert (dirty.output[~mask] == 0).all()
        grads = [torch.autograd.grad(o.output.square().sum(), x)[0] for o, x in ((clean, w), (dirty, poisoned))]
        torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_prefix_invariance_and_determinism_bit_for_bit():
    w, temp, bias = make(dtype=torch.float32)
    g = torch.randn_like(w)
    first, second = (tssa(w, temp, bias) for _ in range(2))
    assert torch.equal(first.output, second.output)
    grads = [torch.autograd.grad(out.output, (w, temp, bias), g) for out in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    for future in (7.0, float("inf"), float("nan")):
        changed = w.detach().clone()
        changed[:, 41:] = future
        assert torch.equal(tssa(changed, temp, bias).output[:, :41], first.output[:, :41])
    for T in (1, 9, 41, 64, 69):
        assert torch.equal(tssa(w[:, :T], temp, bias[:T]).output, first.output[:, :T])
    big, _, _ = make(B=40, H=12, p=64, dtype=torch.float32)  # more elements than are computed together
    with torch.no_grad():
        alone = tssa(big[33:34], torch.ones(12)).output
        assert torch.equal(tssa(big, torch.ones(12)).output[33:34], alone)


def test_many_batch_elements_with_different_packing():
    """Batch elements computed in several groups, packed and padded: the gradients are those of each element alone."""
    B, T, H, p = 9, 70, 12, 64
    w, temp, bias = make(B, T, H, p)
    seq_idx = (torch.arange(T) // torch.arange(11, 11 + B)[:, None]).long()
    mask = torch.rand(B, T) > 0.1
    g = torch.randn_like(w)
    got = torch.autograd.grad(tssa(w, temp, bias, mask=mask, seq_idx=seq_idx).output, (w, temp, bias), g)
    elements = [slice(element, element + 1) for element in range(B)]
    alone = [
        torch.autograd.grad(tssa(w[r], temp, bias, mask=mask[r], seq_idx=seq_idx[r]).output, (w, temp, bias), g[r])
        for r in elements
    ]
    torch.testing.assert_close(got, [sum(parts) for parts in zip(*alone)], **F64)


MEASURE_PEAK = """
import torch
from tost_hf import tssa


def kilobytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


w, temp, bias = torch.randn(1, 131072, 12, 64), torch.ones(12), torch.zeros(131072, 12)
with torch.no_grad():
    tssa(w[:, :200], temp, bias[:200])  # what the first call allocates once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the high-water mark back
    before = kilobytes("VmRSS")
    out = tssa(w, temp, bias)
    print((kilobytes("VmHWM") - before) * 1024 - out.output.nbytes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_peak_memory_of_a_long_forward():
    """At 131,072 tokens, the input and the output and 64 MB at most; the kernel's own high-water mark."""
    out = subprocess.run([sys.executable, "-c", MEASURE_PEAK], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 64e6


@pytest.mark.slow
@torch.no_grad()
def test_a_million_tokens():
    """Prefill, and the last steps of a decoding through the cache: sums in float32 would be off by 1e-3."""
    T, steps = 1_000_000, 20_000
    w, temp = torch.randn(1, T, 3, 4), torch.ones(3)
    exact = tssa(w.double(), temp.double()).output

    def error(x, y):
        return (x.double() - y).norm() / y.norm()

    start = T - steps
    prefill = tssa(w, temp)
    assert error(prefill.output, exact) < 1e-6
    assert error(prefill.output[:, -1000:], exact[:, -1000:]) < 1e-6
    config = ToSTConfig(num_hidden_layers=1, num_attention_heads=3, hidden_size=12)
    layer = ToSTCache(config).layers[0]
    before = tssa(w[:, :start], temp)
    layer.update_state(before.final_state, w[:, :start], before.membership)
    outputs = []
    for x in w[:, start:].unbind(1):
        out = tssa_step(x, temp, None, layer.state)
        layer.update_state(out.final_state, x.unsqueeze(1), out.membership.unsqueeze(-1))
        outputs.append(out.output)
    assert error(torch.stack(outputs[-1000:], 1), exact[:, -1000:]) < 1e-6
    assert layer.sum_membership.dtype == torch.float64


# Bad input, and the layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w": torch.randn(2, 8, 12)}, "shape"),
        ({"w": torch.ones(2, 8, 3, 4, dtype=torch.long)}, "floating-point"),
        ({"temp": torch.ones(4)}, "temp"),
        ({"denom_bias": torch.zeros(3, 8)}, "denom_bias"),
        ({"mask": torch.ones(2, 7)}, "mask"),
        ({"mask": torch.tensor([[0.0, float("-inf")] * 4] * 2)}, "mask"),
        ({"mask": torch.full((2, 8), 2)}, "mask"),
        ({"seq_idx": torch.ones(1, 8, dtype=torch.long)}, "seq_idx"),
        ({"seq_idx": torch.full((2, 8), float("nan"))}, "seq_idx"),
        ({"denom_bias": torch.zeros(9, 3), "positions": torch.ones(2, 8, dtype=torch.bool)}, "positions"),
        ({"denom_bias": torch.zeros(9, 3), "positions": torch.ones(2, 8, dtype=torch.uint8)}, "positions"),
        ({"causal": False, "denom_bias": torch.zeros(8, 3)}, "causal form"),
        ({"initial_state": TSSAState(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(1, 3))}, "initial_state"),
    ],
)
def test_bad_input(change, message):
    arguments = {"w": torch.randn(2, 8, 3, 4), "temp": torch.ones(3)} | change
    with pytest.raises(ValueError, match=message):
        tssa(**arguments)


def test_second_derivatives_are_rejected():
    w, temp, bias = make(T=4)
    (grad,) = torch.autograd.grad(tssa(w, temp, bias).output.square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_layer_keeps_its_own_parameters_in_float32(cast):
    layer = TokenStatisticsSelfAttention(32, 4, causal=True, layer_idx=0, max_position_embeddings=16)
    temp = torch.rand(4, 1)
    layer.temp.data.copy_(temp)
    layer = cast(layer)
    assert layer.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
    assert layer.temp.dtype == layer.denom_bias.dtype == torch.float32
    assert torch.equal(layer.temp.data, temp)  # not rounded on the way
    assert layer.double().temp.dtype == torch.float64


def test_layer_dropout_acts_in_training_only():
    layer = TokenStatisticsSelfAttention(32, 4, causal=False, attention_dropout=0.5, hidden_dropout=0.5)
    x = torch.randn(2, 9, 32)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
