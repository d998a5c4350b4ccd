"""The eager engine of bidirectional TSSA: bit for bit the formulas' outputs, and their gradients in float64."""

import pytest
import torch

from tost_hf import tssa
from tost_hf.model import tssa_bidirectional, tssa_reference


B, T, H, P = 7, 53, 3, 8


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """So that a few rows make several groups."""
    monkeypatch.setattr(tssa_bidirectional, "GROUP_NUMBERS", 2 * T * H * P)


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(kind: str = "", dtype=torch.float64):
    """w, temp, mask and seq_idx of a kind of input: "padded", "packed", "floored", or several of them in one string."""
    w, temp, mask, seq_idx = torch.randn(B, T, H, P, dtype=dtype), torch.rand(H, dtype=dtype) * 3 + 0.5, None, None
    if "floored" in kind:
        w[:, :, 0, 0] = 0  # a channel without any norm, and others around the floor, 1e-24
        w[:, :, 1, 1] *= 1e-15
        w[:, :, 1, 2] *= 1e-12
        w[1] = 0
    if "padded" in kind:
        mask = torch.rand(B, T) > 0.3
        mask[2] = False
        w[~mask] = float("nan")
    if "packed" in kind:
        seq_idx = torch.arange(T) // torch.tensor([1, 2, 9, 20, 33, 52, 60])[:, None]
    return w.requires_grad_(), temp.requires_grad_(), mask, seq_idx


def formulas(w, temp, mask=None, seq_idx=None):
    return tssa_reference.bidirectional(w, temp, None if mask is None else ~mask, seq_idx)


def engine(w, temp, mask=None, seq_idx=None):
    output, membership, _ = tssa(w, temp, causal=False, mask=mask, seq_idx=seq_idx)
    return output, membership.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (7, 196, 6, 64), (2, 577, 3, 48), (1, 1025, 4, 33), (9, 65, 12, 16), (0, 5, 2, 4)]
)
@torch.no_grad()
def test_outputs_are_the_formulas_bit_for_bit(shape, threads, dtype):
    w, temp = torch.randn(shape).to(dtype), torch.rand(shape[2], dtype=torch.float64 if dtype == torch.float64 else None)
    for mask in (None, torch.rand(shape[:2]) > 0.3):
        x = w if mask is None else w.masked_fill(~mask[..., None, None], float("nan"))
        for got, expected in zip(engine(x, temp, mask), formulas(x, temp, mask), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


KINDS = ["", "padded", "packed", "floored", "padded packed", "padded packed floored"]


@pytest.mark.parametrize("used", ["output", "membership", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formulas(kind, used):
    w, temp, mask, seq_idx = make(kind)
    grads = [torch.randn(x.shape, dtype=w.dtype) for x in (w, w[..., 0])]
    poisoned = [x if mask is None else x.masked_fill(~mask.view(B, T, *[1] * (x.ndim - 2)), float("nan")) for x in grads]
    results = [function(w, temp, mask, seq_idx) for function in (engine, formulas)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-13)
    which = {"output": slice(0, 1), "membership": slice(1, 2), "both": slice(0, 2)}[used]
    got, expected = (torch.autograd.grad(x[which], (w, temp), g[which]) for x, g in zip(results, (poisoned, grads)))
    size = expected[0].abs().amax((0, 1)).clamp_min(1e-200)  # of a channel: near the floor many orders more than elsewhere
    torch.testing.assert_close(got[0] / size, expected[0] / size, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str)
def test_gradients_in_low_precision(dtype, tolerance):
    """Relative error against float64 of the same rounded inputs; a gradient is rounded once, at its end."""
    w, temp, mask, _ = make("padded")
    w, temp = (x.detach().requires_grad_() for x in (w.to(dtype), temp.float()))
    exact = [x.detach().double().requires_grad_() for x in (w, temp)]
    grad = torch.randn_like(w)
    got = torch.autograd.grad(engine(w, temp, mask)[0], (w, temp), grad)
    expected = torch.autograd.grad(formulas(*exact, mask)[0], exact, grad.double())
    for x, y, limit in zip(got, expected, (tolerance, 1e-5)):
        assert (x.double() - y).norm() < limit * y.norm()


def test_a_packed_sequence_is_the_sequence_alone_bit_for_bit():
    w, temp, mask, seq_idx = make("padded packed", torch.float32)
    output, membership = engine(w, temp, mask, seq_idx)
    grad = torch.autograd.grad(output.square().sum(), w)[0]
    for row in range(B):
        for tokens in (seq_idx[row] == number for number in seq_idx[row].unique()):
            x = w[row, tokens].detach()[None].requires_grad_()
            alone = engine(x, temp, mask[row, tokens][None])
            for got, expected in zip((output, membership), alone):
                assert torch.equal(got[row, tokens], expected[0])
            assert torch.equal(grad[row, tokens], torch.autograd.grad(alone[0].square().sum(), x)[0][0])


def test_second_derivatives_are_refused():
    w, temp, *_ = make()
    (grad,) = torch.autograd.grad(engine(w, temp)[0].square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_compilers_and_traces_see_the_formulas():
    w, temp, mask, _ = make("padded")
    w = w.detach().nan_to_num(0).requires_grad_()

    class Operator(torch.nn.Module):
        def forward(self, w, temp, mask):
            return engine(w, temp, mask)

    batch = {0: torch.export.Dim("batch", min=2)}
    exported = torch.export.export(Operator(), (w, temp, mask), dynamic_shapes=(batch, None, batch)).module()
    traced = torch.jit.trace(Operator(), (w, temp, mask))
    compiled = torch.compile(Operator(), backend="aot_eager", fullgraph=True)
    for program in (exported, traced, compiled):
        torch.testing.assert_close(program(w[:3], temp, mask[:3]), formulas(w[:3], temp, mask[:3]), rtol=0, atol=0)
