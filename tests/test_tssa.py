"""The reference implementation against the definition of TSSA, and the operator on top of it."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import make_seq_idx, padding_mask, relative_rms

from tost_hf import TSSAState, tssa, tssa_step
from tost_hf.model import tssa_reference


F64 = {"rtol": 1e-10, "atol": 1e-12}


def make(B=2, T=70, H=3, p=5, dtype=torch.float64, zeros=0):
    """w (B, T, H, p), temp, bias (T, H); `zeros` zero tokens, two tiny ones and a zero channel test the epsilon clamps."""
    w = torch.randn(B, T, H, p, dtype=dtype)
    if zeros:
        w[:, :zeros] = 0
        w[:, zeros : zeros + 2] *= 1e-7
        w[:, :, 0, 0] = 0
    temp = torch.rand(H, dtype=dtype) * 3 + 0.5
    bias = torch.randn(T, H, dtype=dtype) * 0.3
    return [x.requires_grad_() for x in (w, temp, bias)]


def make_log_decay(kind, B=2, T=70, H=3):
    """log_decay per head, position or token ("strong": decays from 1 to 1e-43, and 0), or None."""
    if kind is None:
        return None
    log_decay = -torch.rand({"head": (H,), "position": (T, H)}.get(kind, (B, T, H)), dtype=torch.float64)
    if kind == "strong":
        log_decay = log_decay * 100 * (torch.rand(B, T, H) < 0.3)
        log_decay[0, T // 2] = float("-inf")
    return log_decay.requires_grad_()


def tssa_traced(*args, is_exporting=True, **kwargs):
    """The code path of torch.export and, with `is_exporting=False`, of compilers, whose backward autograd derives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        patch.setattr(torch.compiler, "is_exporting", lambda: is_exporting)
        return tssa(*args, **kwargs, backend="torch")


@pytest.fixture(params=["eager", "compiled", "exported"])
def op(request):
    return {"eager": tssa, "compiled": functools.partial(tssa_traced, is_exporting=False), "exported": tssa_traced}[
        request.param
    ]


def tssa_by_definition(w, temp, bias, mask, causal, log_decay=None):
    """Output and membership of one sequence w (T, H, p), token by token and head by head; `mask` (T,) is False for padding."""
    T, H, p = w.shape
    output, membership = torch.zeros_like(w), w.new_zeros(T, H)
    decay = w.new_ones(T, H) if log_decay is None else log_decay.exp().where(mask[:, None], 1)

    def weight(i, t):
        """The weight of token i at token t, (H, 1): the product of the decays after i."""
        return decay[i + 1 : t + 1].prod(0)[:, None]

    for t in range(T):
        if not mask[t]:
            continue
        past = [i for i in range(t + 1 if causal else T) if mask[i]]
        squares = sum(weight(i, t) * w[i] ** 2 for i in past).clamp_min(1e-12 if causal else 1e-24)
        score = [temp[h] * ((w[t, h] ** 2 / squares[h]).sum() + (p * bias[t, h] if causal else 0)) for h in range(H)]
        membership[t] = torch.stack(score).softmax(0)
    for t in range(T):
        past = range(t + 1 if causal else T)
        for h in range(H):
            moment = sum(weight(i, t)[h] * membership[i, h] * w[i, h] ** 2 for i in past if mask[i]) if mask[t] else 0
            count = sum(weight(i, t)[h] * membership[i, h] for i in past)
            output[t, h] = -membership[t, h] * w[t, h] / (1 + moment / (count + 1e-8))
    return output, membership


@pytest.mark.parametrize("causal, with_decay", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("zeros", [0, 3])
def test_reference_equals_the_definition(causal, with_decay, zeros):
    """With padding on both sides, and with packed sequences, each of which is computed separately."""
    w, temp, bias = (x.detach() for x in make(T=17, zeros=zeros))
    decay = -torch.rand(2, 17, 3, dtype=torch.float64) if with_decay else None
    mask, seq_idx = padding_mask(17), torch.arange(17).div(7, rounding_mode="floor").expand(2, 17)
    if causal:
        token_decay = decay.masked_fill(~mask[..., None], 0) if with_decay else None
        log_decay = tssa_reference.reset_at_starts(token_decay, seq_idx, w.dtype)
        output, membership, _ = tssa_reference.causal(w, temp, bias, ~mask, log_decay=log_decay)
    else:
        output, membership = tssa_reference.bidirectional(w, temp, ~mask, seq_idx)
    for element in range(2):
        for tokens in (slice(0, 7), slice(7, 14), slice(14, 17)):
            index = (element, tokens)
            sequence_decay = decay[index] if with_decay else None
            expected = tssa_by_definition(w[index], temp, bias[tokens], mask[index], causal, sequence_decay)
            torch.testing.assert_close((output[index], membership[index]), expected, **F64)


@pytest.mark.parametrize(
    "kind, masked, packed, zeros",
    [
        (None, False, False, 3),
        (None, True, True, 0),
        (None, True, False, 3),
        ("head", False, True, 0),
        ("position", True, False, 0),
        ("token", True, True, 3),
        ("strong", False, True, 3),
        ("strong", False, False, 0),
    ],
)
def test_causal_gradients_equal_the_reference(op, kind, masked, packed, zeros):
    """Output, membership, final state, and the gradients of all inputs and of the initial state."""
    w, temp, bias = make(zeros=zeros)
    decay, mask = make_log_decay(kind), padding_mask(70) if masked else torch.ones(2, 70, dtype=torch.bool)
    seq_idx = torch.stack([torch.arange(70) // 23, torch.arange(70) // 40]) if packed else None
    state = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 5), (2, 3, 5), (2, 3))]
    inputs = [x for x in (w, temp, bias, decay, *state) if x is not None]
    out = op(w, temp, bias, initial_state=TSSAState(*state), log_decay=decay, mask=mask, seq_idx=seq_idx)
    token_decay = None if decay is None else decay.expand(2, 70, 3).masked_fill(~mask[..., None], 0)
    if packed:
        token_decay = tssa_reference.reset_at_starts(token_decay, seq_idx, w.dtype)
    output, membership, final = tssa_reference.causal(w, temp, bias, ~mask, TSSAState(*state), token_decay)
    actual, expected = (out.output, out.membership, *out.final_state), (output, membership.transpose(1, 2), *final)
    torch.testing.assert_close(actual, expected, **F64)
    grads = [torch.randn_like(x) for x in expected]
    actual, expected = (torch.autograd.grad(x, inputs, grads) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_equal_separate_sequences(op, causal):
    """Batch elements with different boundaries, one-token sequences, and padding inside."""
    elements = [(5, 1, 44, 20), (33, 36, 1)]
    w, temp, _ = make(T=70, H=3)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, 2:4] = mask[0, 40] = mask[1, :3] = mask[1, 69] = False
    seq_idx, bias = make_seq_idx(elements), torch.randn(2, 70, 3, dtype=torch.float64) if causal else None
    out = op(w, temp, bias, causal=causal, mask=mask, seq_idx=seq_idx)
    grad = torch.autograd.grad(out.output.square().sum(), w)[0]
    for element, lengths in enumerate(elements):
        start = 0
        for length in lengths:
            index = (slice(element, element + 1), slice(start, start + length))
            separate = tssa(w[index], temp, None if bias is None else bias[index], causal=causal, mask=mask[index])
            torch.testing.assert_close(out.output[index], separate.output, **F64)
            torch.testing.assert_close(out.membership[element, :, index[1]], separate.membership[0], **F64)
            torch.testing.assert_close(grad[index], torch.autograd.grad(separate.output.square().sum(), w)[0][index], **F64)
            start += length
        if causal:  # the final state is that of the last sequence
            torch.testing.assert_close([x[element] for x in out.final_state], [x[0] for x in separate.final_state], **F64)


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize(
    "causal, value", [(True, float("nan")), (True, float("inf")), (False, float("nan")), (False, float("inf"))]
)
def test_infinities_and_nan_stay_within_their_packed_sequence(causal, value, backend):
    """Outputs, gradients and the final state of the others are those of the same sequences on their own."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    lengths, start = (5, 30, 20, 15), 5  # the second is poisoned
    w = torch.randn(1, 70, 3, 5)
    w[0, start + 9, 1, 2] = value
    out = tssa(w.requires_grad_(), torch.ones(3), causal=causal, seq_idx=make_seq_idx([lengths]), backend=backend)
    (grad,) = torch.autograd.grad(out.output.square().sum(), w)
    assert not out.output[:, start : start + 30].isfinite().all()
    for sequence in (slice(0, 5), slice(35, 55), slice(55, 70)):
        separate = tssa(w[:, sequence].double(), torch.ones(3), causal=causal)
        expected_grad = torch.autograd.grad(separate.output.square().sum(), w)[0][:, sequence]
        torch.testing.assert_close(out.output[:, sequence].double(), separate.output, **tolerance)
        torch.testing.assert_close(out.membership[..., sequence].double(), separate.membership, **tolerance)
        torch.testing.assert_close(grad[:, sequence], expected_grad, **tolerance)
    if causal:
        for actual, expected in zip(out.final_state, separate.final_state):
            torch.testing.assert_close(actual.double(), expected.double(), **tolerance)


@pytest.mark.parametrize("kind, lengths", [(None, (40, 30)), (None, (1, 69)), ("position", (1, 2, 67)), ("position", (69, 1))])
def test_chunked_prefill(op, kind, lengths):
    w, temp, bias = make()
    decay = make_log_decay(kind)
    full = tssa(w, temp, bias, log_decay=decay)
    decays = [None] * len(lengths) if decay is None else decay.split(lengths, 0)
    state, outputs = None, []
    for x, b, d in zip(w.split(lengths, 1), bias.split(lengths, 0), decays):
        output, _, state = op(x, temp, b, initial_state=state, log_decay=d)
        outputs.append(output)
    torch.testing.assert_close((torch.cat(outputs, 1), state), (full.output, full.final_state), **F64)


def test_in_place_step_rejects_unsuitable_states():
    state = TSSAState(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).double(), torch.zeros(2, 3).double())
    w, temp = torch.randn(2, 3, 4), torch.ones(3)
    assert all(x is y for x, y in zip(tssa_step(w, temp, initial_state=state, in_place=True).final_state, state))
    float32 = state._replace(sum_membership=torch.zeros(2, 3))
    expanded = TSSAState(*(x[:1].expand_as(x) for x in state))  # one prompt, two continuations
    for tokens, initial_state in ((w, float32), (w, expanded), (w.clone().requires_grad_(), state)):
        with pytest.raises(ValueError, match="in place"):
            tssa_step(tokens, temp, initial_state=initial_state, in_place=True)


@pytest.mark.parametrize("kind", [None, "head", "token"])
def test_steps_equal_the_sequence(kind):
    w, temp, bias = make()
    if kind == "token":  # so that a step has one of each sequence as well
        bias = torch.stack([bias, bias.flip(0)])
    mask, decay = padding_mask(70), make_log_decay(kind)
    full = tssa(w, temp, bias, mask=mask, log_decay=decay)
    state, outputs = None, []
    for t in range(70):
        log_decay = decay[:, t] if kind == "token" else decay
        output, membership, state = tssa_step(
            w[:, t], temp, bias[..., t, :], mask=mask[:, t], initial_state=state, log_decay=log_decay
        )
        outputs.append(output)
        torch.testing.assert_close(membership, full.membership[..., t], **F64)
    steps, inputs = torch.stack(outputs, 1), [w, temp, *([] if decay is None else [decay])]
    torch.testing.assert_close((steps, state), (full.output, full.final_state), **F64)
    actual, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (steps, full.output))
    torch.testing.assert_close(actual, expected, **F64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("form", ["causal", "decay", "bidirectional"])
def test_low_precision_has_float32_statistics(op, dtype, tolerance, form):
    """Relative RMS error against float64 with the same rounded inputs, over 1,500 tokens; with bf16 sums it would be 30 %."""
    w, temp, bias = make(1, 1500, 4, 8)
    w = w.detach().to(dtype).requires_grad_()
    options = {"causal": form != "bidirectional", "bias": None if form == "bidirectional" else bias.float()}
    if form == "decay":  # half-lives from one token to a thousand
        options["log_decay"] = -torch.tensor([0.7, 0.1, 0.01, 0.0007])
    out = op(w, temp.float(), **options)
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    expected = tssa(w.double(), temp.float().double(), **options)
    assert out.output.dtype == dtype
    assert out.membership.dtype == torch.float32
    assert [x.dtype for x in out.final_state or ()] in ([], [torch.float32, torch.float64, torch.float64])
    assert relative_rms(out.output, expected.output) < tolerance
    g = torch.randn_like(w)
    (grad,), (expected_grad,) = torch.autograd.grad(out.output, w, g), torch.autograd.grad(expected.output, w, g.double())
    assert relative_rms(grad, expected_grad) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("log_decay, first", [(-18.0, 1000.0), (-13.0, 1.0), (-1e-4, 1.0)])
def test_decay_of_steps_equals_float64(log_decay, first, in_place):
    """Also what strong decay leaves of large sums."""
    w, temp = torch.randn(2, 4, 3, 8), torch.ones(3)
    w[:, 0] *= first
    decay, states = torch.full((2, 3), log_decay), [None, None]
    for token in w.unbind(1):
        for i, dtype in enumerate((torch.float32, torch.float64)):
            options = {"log_decay": decay.to(dtype), "in_place": in_place and states[i] is not None}
            result = tssa_step(token.to(dtype), temp.to(dtype), initial_state=states[i], **options)
            states[i] = result.final_state
    for actual, expected in zip(*states):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=0)


def test_many_steps_of_weak_decay_do_not_drift():
    """5,000 decoding steps with decays near 1; with decays rounded to float32 the error would be 1e-4."""
    w, log_decay = torch.randn(5000, 1, 2, 4), torch.tensor([-1e-4, -3e-5])
    expected = tssa(w.transpose(0, 1).double(), torch.ones(2).double(), log_decay=log_decay.double()).final_state
    state = None
    for x in w:
        state = tssa_step(x, torch.ones(2), initial_state=state, log_decay=log_decay).final_state
    assert all(relative_rms(x, y) < 1e-5 for x, y in zip(state, expected))


@pytest.mark.parametrize("form", ["causal", "decay", "bidirectional"])
def test_padding_may_contain_nan(op, form):
    """NaN in the padding, whose decays are ignored: outputs, states and gradients equal those without padding."""
    w, temp, bias = make(B=1)
    mask = torch.ones(70, dtype=torch.bool)
    mask[0:9] = mask[30:47] = mask[60:] = False
    poisoned = w.detach().masked_fill(~mask[:, None, None], float("nan")).requires_grad_()
    token_inputs = {} if form == "bidirectional" else {"bias": bias}
    token_inputs |= {"log_decay": make_log_decay("position")} if form == "decay" else {}
    padded = op(poisoned, temp, mask=mask[None], causal=form != "bidirectional", **token_inputs)
    unpadded = op(w[:, mask], temp, causal=form != "bidirectional", **{name: x[mask] for name, x in token_inputs.items()})
    assert (padded.output[:, ~mask] == 0).all()
    torch.testing.assert_close((padded.output[:, mask], padded.final_state), (unpadded.output, unpadded.final_state), **F64)
    actual, expected = (
        torch.autograd.grad(out.output.square().sum(), (x, temp, *token_inputs.values()))
        for out, x in ((padded, poisoned), (unpadded, w))
    )
    torch.testing.assert_close(actual, expected, **F64)


@pytest.mark.parametrize("with_decay", [False, True])
def test_nan_does_not_propagate_across_the_batch(with_decay):
    """The other sequence begins with zeros, so that its sums are clamped to epsilon for several chunks."""
    w = torch.randn(2, 600, 3, 4)
    w[0, :550], w[1, 0] = 0, torch.nan
    w.requires_grad_()
    out = tssa(w, torch.ones(3), log_decay=-torch.rand(2, 600, 3) if with_decay else None)
    (grad,) = torch.autograd.grad(out.output[0].square().sum(), w)
    for x in (out.output[0], out.membership[0], grad[0], *(x[0] for x in out.final_state)):
        assert x.isfinite().all()


MEASURE_PEAK = """
import torch
from tost_hf import tssa


def kilobytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


w, temp, bias = torch.randn(1, 32768, 12, 64), torch.ones(12), torch.zeros(32768, 12)
with torch.no_grad():
    tssa(w[:, :200], temp, bias[:200])  # allocates what the first call allocates once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    baseline = kilobytes("VmRSS")
    out = tssa(w, temp, bias)
    print((kilobytes("VmHWM") - baseline) * 1024 - out.output.nbytes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_peak_memory_of_a_long_forward():
    """At 32,768 tokens, whose input has 100 MB, at most 64 MB beyond input and output, by Linux's high-water mark."""
    result = subprocess.run([sys.executable, "-c", MEASURE_PEAK], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 64e6


@torch.no_grad()
def test_fifty_thousand_tokens():
    """Prefill and the steps after it; with float32 sums the error would be 1e-4."""
    T, steps = 50_000, 500
    w, temp = torch.randn(1, T, 3, 4), torch.ones(3)
    expected = tssa(w.double(), temp.double()).output[:, -steps:]
    state, outputs = tssa(w[:, :-steps], temp).final_state, []
    for x in w[:, -steps:].unbind(1):
        output, _, state = tssa_step(x, temp, initial_state=state)
        outputs.append(output)
    for output in (tssa(w, temp).output[:, -steps:], torch.stack(outputs, 1)):
        assert relative_rms(output, expected) < 1e-6


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w": torch.randn(2, 8, 12)}, "shape"),
        ({"w": torch.ones(2, 8, 3, 4, dtype=torch.long)}, "floating-point"),
        ({"temp": torch.ones(4)}, "temp"),
        ({"bias": torch.zeros(3, 8)}, "bias"),
        ({"mask": torch.ones(2, 7)}, "mask"),
        ({"mask": torch.tensor([[0.0, float("-inf")] * 4] * 2)}, "mask"),
        ({"seq_idx": torch.ones(1, 8, dtype=torch.long)}, "seq_idx"),
        ({"seq_idx": torch.full((2, 8), float("nan"))}, "seq_idx"),
        ({"bias": torch.zeros(9, 3), "positions": torch.ones(2, 8, dtype=torch.bool)}, "positions"),
        ({"bias": torch.zeros(9, 3), "positions": torch.ones(2, 8, dtype=torch.uint8)}, "positions"),
        ({"causal": False, "bias": torch.zeros(8, 3)}, "causal form"),
        ({"initial_state": TSSAState(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(1, 3))}, "initial_state"),
        ({"log_decay": torch.zeros(3, 8)}, "shapes"),
        ({"log_decay": torch.zeros(3), "causal": False}, "causal form"),
    ],
)
def test_bad_input(change, message):
    arguments = {"w": torch.randn(2, 8, 3, 4), "temp": torch.ones(3)} | change
    with pytest.raises(ValueError, match=message):
        tssa(**arguments)
