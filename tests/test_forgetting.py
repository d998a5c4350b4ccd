"""Decay (`log_decay`): every backend against the reference implementation in float64, whole and split sequences."""

import pytest
import torch
from test_tssa import F64, compiled, make, padding_mask, short_chunks, traced  # noqa: F401 (a fixture)

from tost_hf import TSSAState, tssa, tssa_step
from tost_hf.model import tssa_chunked, tssa_reference


@pytest.fixture(params=["eager", "compiled", "traced"])
def op(request):
    return {"eager": tssa, "compiled": compiled(tssa), "traced": traced}[request.param]


def make_decay(kind, B=2, T=70, H=3, dtype=torch.float64):
    """log_decay per head, per position, per token, or with decays from 1 down to 1e-43 and to 0."""
    decay = -torch.rand({"head": (H,), "position": (T, H)}.get(kind, (B, T, H)), dtype=dtype)
    if kind == "strong":
        decay = decay * 100 * (torch.rand(B, T, H) < 0.3)
        decay[0, T // 2] = float("-inf")
    return decay.requires_grad_()


@pytest.mark.parametrize("kind, masked", [("head", False), ("position", True), ("token", True), ("strong", False)])
@pytest.mark.parametrize("packed, dead, normalize_scores", [(False, 0, True), (True, 3, True), (True, 0, False)])
def test_results_and_gradients_equal_the_reference(op, kind, masked, packed, dead, normalize_scores):
    """Output, membership, final state, and the gradients of all inputs and of the initial state."""
    w, temp, bias = make(dead=dead)
    decay, mask = make_decay(kind), padding_mask(70) if masked else torch.ones(2, 70, dtype=torch.bool)
    seq_idx = torch.stack([torch.arange(70) // 23, torch.arange(70) // 40]) if packed else None
    state = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 5), (2, 3, 5), (2, 3))]
    inputs = (w, temp, bias, decay, *state)
    options = {"mask": mask, "seq_idx": seq_idx, "normalize_scores": normalize_scores}
    out = op(w, temp, bias, initial_state=TSSAState(*state), log_decay=decay, **options)
    at_tokens = decay.expand(2, 70, 3).masked_fill(~mask[..., None], 0)
    if packed:
        at_tokens = tssa_reference.reset_at_starts(at_tokens, seq_idx, w.dtype)
    options = {"state": TSSAState(*state), "log_decay": at_tokens, "normalize_scores": normalize_scores}
    output, membership, final = tssa_reference.causal(w, temp, bias, ~mask, **options)
    got, wanted = (out.output, out.membership, *out.final_state), (output, membership.transpose(1, 2), *final)
    torch.testing.assert_close(got, wanted, **F64)
    grads = [torch.randn_like(x) for x in wanted]
    got, wanted = (torch.autograd.grad(x, inputs, grads) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["token", "strong"])
@pytest.mark.parametrize("chunk", [16, 256])
def test_chunks_of_one_and_of_many_blocks(monkeypatch, kind, chunk):
    """With a shorter one at the end, and two backwards."""
    monkeypatch.setattr(tssa_chunked, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(tssa_chunked, "CHUNK_NUMBERS", chunk * 16)
    T = 2 * chunk + 21
    w, temp, bias = make(T=T)
    decay = make_decay(kind, T=T)
    out = tssa(w, temp, bias, log_decay=decay)
    output, membership, final = tssa_reference.causal(w, temp, bias, log_decay=decay)
    got, wanted = (out.output, out.membership, *out.final_state), (output, membership.transpose(1, 2), *final)
    torch.testing.assert_close(got, wanted, **F64)
    grads, inputs = [torch.randn_like(x) for x in wanted], (w, temp, bias, decay)
    first, second = (torch.autograd.grad(got, inputs, grads, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, torch.autograd.grad(wanted, inputs, grads), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-14)


def test_no_grad_saves_nothing_for_backward(monkeypatch):
    real, kept = tssa_chunked._forward, []

    def spy(*arguments):
        result = real(*arguments)
        kept.append(result[-1])
        return result

    monkeypatch.setattr(tssa_chunked, "_forward", spy)
    inputs, decay = make(), make_decay("token")
    outputs = [tssa(*inputs, log_decay=decay).output]
    with torch.no_grad():
        outputs.append(tssa(*inputs, log_decay=decay).output)
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    with_gradient, without = kept
    assert with_gradient.score.numel() and with_gradient.sums.sum_sq.numel()
    assert not without.score.numel() and not without.sums.sum_sq.numel()


@pytest.mark.parametrize("masked, packed", [(False, False), (True, True)])
def test_gradcheck(op, masked, packed):
    w, temp, bias = make(2, 36, 2, 2)
    state = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in ((2, 2, 2), (2, 2, 2), (2, 2))]
    decay = make_decay("token", T=36, H=2)
    mask = padding_mask(36) if masked else None
    seq_idx = torch.arange(36).div(13, rounding_mode="floor").expand(2, 36) if packed else None

    def fn(w, temp, bias, decay, *state):
        out = op(w, temp, bias, mask=mask, seq_idx=seq_idx, initial_state=TSSAState(*state), log_decay=decay)
        return out.output, out.membership, *out.final_state

    with torch.no_grad():
        decay -= 1e-3  # finite differences stay at most 0
    assert torch.autograd.gradcheck(fn, (w, temp, bias, decay, *state), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_decay_of_one_is_the_published_form(op, dtype):
    w, temp, bias = make(dtype=dtype)
    mask = padding_mask(70)
    plain, decayed = (op(w, temp, bias, mask=mask, log_decay=x) for x in (None, torch.zeros(3)))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    got, wanted = ((out.output, out.final_state) for out in (decayed, plain))
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_decay_of_zero_starts_a_new_sequence(op):
    """What follows does not depend on what came before."""
    w, temp, bias = (x.detach() for x in make())
    decay = make_decay("position").detach()
    decay[33] = float("-inf")
    out = op(w, temp, bias, log_decay=decay)
    alone = op(w[:, 33:], temp, bias[33:], log_decay=decay[33:])
    torch.testing.assert_close((out.output[:, 33:], out.final_state), (alone.output, alone.final_state), **F64)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_is_ignored(op, side):
    """Poisoned padding, the decay there too: outputs, states and gradients are those of the tokens alone."""
    w, temp, bias = make(B=1)
    decay = make_decay("position")
    real = torch.ones(70, dtype=torch.bool)
    real[{"left": slice(0, 9), "right": slice(60, 70), "inside": slice(30, 47)}[side]] = False
    poisoned = w.detach().masked_fill(~real[:, None, None], float("nan")).requires_grad_()
    padded = op(poisoned, temp, bias, mask=real[None], log_decay=decay)
    alone = op(w[:, real], temp, bias[real], log_decay=decay[real])
    torch.testing.assert_close((padded.output[:, real], padded.final_state), (alone.output, alone.final_state), **F64)
    got = torch.autograd.grad(padded.output.square().sum(), (poisoned, decay))
    wanted = torch.autograd.grad(alone.output.square().sum(), (w, decay))
    torch.testing.assert_close(got, wanted, **F64)
    assert (got[1][~real] == 0).all()


@pytest.mark.parametrize("forgetting", [False, True])
def test_nan_does_not_propagate_across_the_batch(forgetting, monkeypatch):
    """Not even to a sequence of zeros, whose sums are clamped to epsilon through several chunks."""
    monkeypatch.setattr(tssa_chunked, "CHUNK_NUMBERS", 2 * 32 * 12)
    w = torch.randn(2, 600, 3, 4)
    w[0, :550], w[1, 0] = 0, torch.nan
    w.requires_grad_()
    out = tssa(w, torch.ones(3), log_decay=-torch.rand(2, 600, 3) if forgetting else None)
    (grad,) = torch.autograd.grad(out.output[0].square().sum(), w)
    for x in (out.output[0], out.membership[0], grad[0], *(x[0] for x in out.final_state)):
        assert x.isfinite().all()


@pytest.mark.parametrize("chunks", [(40, 30), (1, 2, 67), (69, 1)])
def test_the_state_carries_over(op, chunks):
    w, temp, bias = make()
    decay = make_decay("position")
    whole = tssa(w, temp, bias, log_decay=decay)
    state, outputs = None, []
    for x, b, d in zip(w.split(chunks, 1), bias.split(chunks, 0), decay.split(chunks, 0)):
        out = op(x, temp, b, initial_state=state, log_decay=d)
        state = out.final_state
        outputs.append(out.output)
    torch.testing.assert_close((torch.cat(outputs, 1), state), (whole.output, whole.final_state), **F64)


@pytest.mark.parametrize("kind", ["head", "token"])
def test_decoding_equals_the_full_forward(kind):
    w, temp, bias = make()
    mask, decay = padding_mask(70), make_decay(kind)
    whole = tssa(w, temp, bias, mask=mask, log_decay=decay)
    state, outputs = None, []
    for t in range(70):
        out = tssa_step(w[:, t], temp, bias[t], state, mask=mask[:, t], log_decay=decay if kind == "head" else decay[:, t])
        state = out.final_state
        outputs.append(out.output)
    steps = torch.stack(outputs, 1)
    torch.testing.assert_close((steps, state), (whole.output, whole.final_state), **F64)
    got, wanted = (torch.autograd.grad(x.square().sum(), (w, decay)) for x in (steps, whole.output))
    torch.testing.assert_close(got, wanted, **F64)


def test_float32_is_close_to_float64_over_many_tokens(op):
    """Decays from a half-life of one token to a thousand, over 1,500 tokens."""
    w, temp, bias = make(1, 1500, 4, 8, dtype=torch.float32)
    decay = -torch.tensor([0.7, 0.1, 0.01, 0.0007], requires_grad=True)
    inputs = (w, temp, bias, decay)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    out = op(*inputs[:3], log_decay=decay).output
    exact = tssa_reference.causal(*exact_inputs[:3], log_decay=exact_inputs[3].expand(1, 1500, 4))[0]
    g = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, inputs, g))
    wanted = (exact, *torch.autograd.grad(exact, exact_inputs, g.double()))
    for x, y in zip(got, wanted):
        assert (x - y).norm() < 1e-5 * y.norm()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"log_decay": torch.zeros(4)}, "shapes"),
        ({"log_decay": torch.zeros(3, 8)}, r"\(3,\), \(8, 3\), \(2, 8, 3\)"),
        ({"log_decay": torch.tensor([0.0, 0.5, 0.0])}, "at most 0"),
        ({"log_decay": torch.zeros(3), "causal": False}, "causal form"),
    ],
)
def test_bad_decay(change, message):
    with pytest.raises(ValueError, match=message):
        tssa(**{"w": torch.randn(2, 8, 3, 4), "temp": torch.ones(3)} | change)


def test_bad_decay_of_a_step():
    with pytest.raises(ValueError, match="shapes"):
        tssa_step(torch.randn(2, 3, 4), torch.ones(3), None, None, log_decay=torch.zeros(2, 1))


@torch.no_grad()
def test_many_steps_of_weak_decay_do_not_drift():
    """5,000 decoding steps with decays near 1: sums would be off by 1e-4 if each decay were rounded to float32 first."""
    w, log_decay = torch.randn(5000, 1, 2, 4), torch.tensor([-1e-4, -3e-5])
    exact = tssa(w.transpose(0, 1).double(), torch.ones(2).double(), log_decay=log_decay.double()).final_state
    state = None
    for x in w:
        state = tssa_step(x, torch.ones(2), None, state, log_decay=log_decay).final_state
    for got, wanted in zip(state, exact):
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
