"""The operator, with and without decay, against the reference implementation in float64, and that against the definition."""

import os
import subprocess
import sys

import pytest
import torch

from tost_hf import TSSAState, tssa, tssa_step
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


def make_decay(kind, B=2, T=70, H=3):
    """log_decay per head, per position, per token, with decays from 1 down to 1e-43 and to 0, or None."""
    if kind is None:
        return None
    decay = -torch.rand({"head": (H,), "position": (T, H)}.get(kind, (B, T, H)), dtype=torch.float64)
    if kind == "strong":
        decay = decay * 100 * (torch.rand(B, T, H) < 0.3)
        decay[0, T // 2] = float("-inf")
    return decay.requires_grad_()


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
    decay = w.new_ones(T, H) if log_decay is None else log_decay.exp().where(real[:, None], 1)

    def left(i, t):
        """What is left at token t of token i, (H, 1)."""
        return decay[i + 1 : t + 1].prod(0)[:, None]

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


@pytest.mark.parametrize("T, H, p", [(1, 1, 4), (8, 12, 8), (63, 3, 5), (64, 12, 8), (65, 1, 4), (150, 3, 5)])
def test_causal_forward(op, T, H, p):
    w, temp, bias = make(T=T, H=H, p=p)
    out = op(w, temp, bias)
    expected, membership, final = tssa_reference.causal(w, temp, bias)
    torch.testing.assert_close(out.output, expected, **F64)
    torch.testing.assert_close(out.membership, membership.transpose(1, 2), **F64)
    torch.testing.assert_close(out.final_state, final, **F64)


@pytest.mark.parametrize(
    "kind, masked, packed, dead, normalize_scores",
    [
        (None, False, False, 3, True),
        (None, True, True, 0, True),
        (None, True, False, 3, False),
        ("head", False, True, 0, False),
        ("position", True, False, 0, True),
        ("token", True, True, 3, True),
        ("token", True, True, 0, False),
        ("strong", False, True, 3, True),
        ("strong", False, False, 0, True),
    ],
)
def test_causal_gradients_equal_the_reference(op, kind, masked, packed, dead, normalize_scores):
    """Output, membership, final state, and the gradients of all inputs and of the initial state."""
    w, temp, bias = make(dead=dead)
    decay, mask = make_decay(kind), padding_mask(70) if masked else torch.ones(2, 70, dtype=torch.bool)
    seq_idx = torch.stack([torch.arange(70) // 23, torch.arange(70) // 40]) if packed else None
    state = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 5), (2, 3, 5), (2, 3))]
    inputs = [x for x in (w, temp, bias, decay, *state) if x is not None]
    options = {"mask": mask, "seq_idx": seq_idx, "normalize_scores": normalize_scores}
    out = op(w, temp, bias, initial_state=TSSAState(*state), log_decay=decay, **options)
    at_tokens = None if decay is None else decay.expand(2, 70, 3).masked_fill(~mask[..., None], 0)
    if packed:
        at_tokens = tssa_reference.reset_at_starts(at_tokens, seq_idx, w.dtype)
    options = {"state": TSSAState(*state), "log_decay": at_tokens, "normalize_scores": normalize_scores}
    output, membership, final = tssa_reference.causal(w, temp, bias, ~mask, **options)
    got, wanted = (out.output, out.membership, *out.final_state), (output, membership.transpose(1, 2), *final)
    torch.testing.assert_close(got, wanted, **F64)
    grads = [torch.randn_like(x) for x in wanted]
    got, wanted = (torch.autograd.grad(x, inputs, grads) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind, chunk", [("token", 16), ("strong", 256)])
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
def test_packed_sequences_equal_the_sequences_alone(op, causal):
    """Batch elements with different borders, one-token sequences, and padding inside."""
    elements = [(5, 1, 44, 20), (33, 36, 1)]
    w, temp, _ = make(T=70, H=3)
    mask = torch.ones(2, 70, dtype=torch.bool)
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


@pytest.mark.parametrize("kind, pieces", [(None, (40, 30)), (None, (1, 69)), ("position", (1, 2, 67)), ("position", (69, 1))])
def test_state_carries_over(op, kind, pieces):
    w, temp, bias = make()
    decay = make_decay(kind)
    whole = tssa(w, temp, bias, log_decay=decay)
    decays = [None] * len(pieces) if decay is None else decay.split(pieces, 0)
    state, outputs = None, []
    for x, b, d in zip(w.split(pieces, 1), bias.split(pieces, 0), decays):
        out = op(x, temp, b, initial_state=state, log_decay=d)
        state = out.final_state
        outputs.append(out.output)
    torch.testing.assert_close((torch.cat(outputs, 1), state), (whole.output, whole.final_state), **F64)


def test_a_state_that_cannot_be_updated_in_place_is_rejected():
    state = TSSAState(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).double(), torch.zeros(2, 3).double())
    w, temp = torch.randn(2, 3, 4), torch.ones(3)
    assert all(x is y for x, y in zip(tssa_step(w, temp, None, state, in_place=True).final_state, state))
    float32 = state._replace(sum_membership=torch.zeros(2, 3))
    for tokens, before in ((w, float32), (w.requires_grad_(), state)):
        with pytest.raises(ValueError, match="in place"):
            tssa_step(tokens, temp, None, before, in_place=True)


@pytest.mark.parametrize("kind", [None, "head", "token"])
def test_steps_are_the_whole(kind):
    w, temp, bias = make()
    mask, decay = padding_mask(70), make_decay(kind)
    whole = tssa(w, temp, bias, mask=mask, log_decay=decay)
    state, outputs = None, []
    for t in range(70):
        log_decay = decay[:, t] if kind == "token" else decay
        out = tssa_step(w[:, t], temp, bias[t], state, mask=mask[:, t], log_decay=log_decay)
        state = out.final_state
        outputs.append(out.output)
        torch.testing.assert_close(out.membership, whole.membership[..., t], **F64)
    steps, inputs = torch.stack(outputs, 1), [w, temp, *([] if decay is None else [decay])]
    torch.testing.assert_close((steps, state), (whole.output, whole.final_state), **F64)
    got, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (steps, whole.output))
    torch.testing.assert_close(got, wanted, **F64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("form", ["causal", "decay", "bidirectional"])
def test_low_precision_keeps_float32_statistics(op, dtype, tolerance, form):
    """Relative RMS error against float64 of the same rounded inputs, over 1,500 tokens: sums in bf16 would be off by 30 %."""
    w, temp, bias = make(1, 1500, 4, 8)
    w = w.detach().to(dtype).requires_grad_()
    options = {"causal": form != "bidirectional", "denom_bias": None if form == "bidirectional" else bias.float()}
    if form == "decay":  # half-lives from one token to a thousand
        options["log_decay"] = -torch.tensor([0.7, 0.1, 0.01, 0.0007])
    out = op(w, temp.float(), **options)
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    exact = tssa(w.double(), temp.float().double(), **options)
    assert out.output.dtype == dtype
    assert out.membership.dtype == torch.float32
    assert [x.dtype for x in out.final_state or ()] in ([], [torch.float32, torch.float64, torch.float64])

    def error(x, y):
        return ((x.double() - y).square().mean() / y.square().mean()).sqrt()

    assert error(out.output, exact.output) < tolerance
    g = torch.randn_like(w)
    got, want = torch.autograd.grad(out.output, w, g), torch.autograd.grad(exact.output, w, g.double())
    assert error(got[0], want[0].double()) < tolerance


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


@pytest.mark.parametrize("form", ["causal", "decay", "bidirectional"])
def test_padding_may_hold_anything(op, form):
    """Poisoned padding, the decay there too: outputs, states and gradients are those of the tokens alone."""
    w, temp, bias = make(B=1)
    real = torch.ones(70, dtype=torch.bool)
    real[0:9] = real[30:47] = real[60:] = False
    poisoned = w.detach().masked_fill(~real[:, None, None], float("nan")).requires_grad_()
    by_token = {} if form == "bidirectional" else {"denom_bias": bias}
    by_token |= {"log_decay": make_decay("position")} if form == "decay" else {}
    padded = op(poisoned, temp, mask=real[None], causal=form != "bidirectional", **by_token)
    alone = op(w[:, real], temp, causal=form != "bidirectional", **{name: x[real] for name, x in by_token.items()})
    assert (padded.output[:, ~real] == 0).all()
    torch.testing.assert_close((padded.output[:, real], padded.final_state), (alone.output, alone.final_state), **F64)
    got, wanted = (
        torch.autograd.grad(out.output.square().sum(), (x, temp, *by_token.values()))
        for out, x in ((padded, poisoned), (alone, w))
    )
    torch.testing.assert_close(got, wanted, **F64)


@pytest.mark.parametrize("decayed", [False, True])
def test_nan_does_not_propagate_across_the_batch(decayed, monkeypatch):
    """Not even to a sequence of zeros, whose sums are clamped to epsilon through several chunks."""
    monkeypatch.setattr(tssa_chunked, "CHUNK_NUMBERS", 2 * 32 * 12)
    w = torch.randn(2, 600, 3, 4)
    w[0, :550], w[1, 0] = 0, torch.nan
    w.requires_grad_()
    out = tssa(w, torch.ones(3), log_decay=-torch.rand(2, 600, 3) if decayed else None)
    (grad,) = torch.autograd.grad(out.output[0].square().sum(), w)
    for x in (out.output[0], out.membership[0], grad[0], *(x[0] for x in out.final_state)):
        assert x.isfinite().all()


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


MEASURE_PEAK = """
import torch
from tost_hf import tssa


def kilobytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


w, temp, bias = torch.randn(1, 32768, 12, 64), torch.ones(12), torch.zeros(32768, 12)
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
    """At 32,768 tokens of 100 MB, the input and the output and 64 MB at most; the kernel's own high-water mark."""
    out = subprocess.run([sys.executable, "-c", MEASURE_PEAK], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 64e6


@torch.no_grad()
def test_fifty_thousand_tokens():
    """Prefill, and the steps after it: sums in float32 would be off by 1e-4."""
    T, steps = 50_000, 500
    w, temp = torch.randn(1, T, 3, 4), torch.ones(3)
    exact = tssa(w.double(), temp.double()).output[:, -steps:]
    state, outputs = tssa(w[:, :-steps], temp).final_state, []
    for x in w[:, -steps:].unbind(1):
        out = tssa_step(x, temp, None, state)
        state = out.final_state
        outputs.append(out.output)
    for output in (tssa(w, temp).output[:, -steps:], torch.stack(outputs, 1)):
        assert (output.double() - exact).norm() < 1e-6 * exact.norm()


# Bad input ----------------------------------------------------------------------------------------------------------


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
        ({"log_decay": torch.zeros(3, 8)}, "shapes"),
        ({"log_decay": torch.tensor([0.0, 0.5, 0.0])}, "at most 0"),
        ({"log_decay": torch.zeros(3), "causal": False}, "causal form"),
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
