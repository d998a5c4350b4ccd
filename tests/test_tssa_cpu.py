"""The numba kernels against the float64 reference."""

import copy
import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernel_cases import FORMS, WIDE, KernelTests, padding_mask, relative_rms

from tost_hf import tssa, tssa_step
from tost_hf.model import tssa_cpu
from tost_hf.model.layers_tost import ShortConvolution, TokenStatisticsSelfAttention
from tost_hf.model.tssa_reference import sequence_starts, state_dtypes, zero_state


class TestKernels(KernelTests):
    backend, device = "numba", "cpu"

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("H, p, T", [(3, 5, 1), (1, 8, 31), (12, 16, 32), (3, 40, 33), (2, 7, 150)])
    def test_sizes(self, form, H, p, T):
        self.check(self.make_form(form, 2, T, H, p), causal=form != "bidirectional")

    @pytest.mark.parametrize("causal, decay", [(True, False), (True, True), (False, False)])
    def test_operators_pass_opcheck(self, causal, decay):
        """Schemas, fake tensors and autograd, with padding, and without gradients."""
        w, temp, bias, *state, log_decay = self.make(2, 70, 3, 4, decay=WIDE).values()
        state = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(state, state_dtypes(w))]
        inputs = [w, temp, bias, None, padding_mask(70), log_decay if decay else None, *state]
        inputs = inputs if causal else [w, temp, None, None, padding_mask(70), None, None, None, None]
        torch.library.opcheck(tssa_cpu._forward.operator, (*inputs, causal, True))
        inputs = [x if x is None else x.detach() for x in inputs]
        torch.library.opcheck(tssa_cpu._forward.operator, (*inputs, causal, False))

    def test_no_grad_saves_nothing_for_backward(self):
        w, temp, *_ = (x.detach() for x in self.make(2, 70, 3, 4).values())
        with_grad, without_grad = (tssa_cpu._forward(w, temp, *[None] * 7, True, needs_grad) for needs_grad in (True, False))
        torch.testing.assert_close(with_grad[:5], without_grad[:5], rtol=0, atol=0)
        assert all(x.numel() for x in with_grad[5:]) and not any(x.numel() for x in without_grad[5:])


def make_convolution(conv_kernel, dtype, packed, masked, has_state):
    """A convolution, and its inputs with few real tokens in the first sequence."""
    convolution = ShortConvolution(24, conv_kernel).to(dtype)
    torch.nn.init.normal_(convolution.weight)
    mask, seq_idx = torch.rand(3, 20) > 0.3, torch.randint(0, 3, (3, 20)).sort(1)[0]
    mask[0, 1:] = False
    x, state = torch.randn(3, 20, 24).to(dtype), torch.randn(3, conv_kernel - 1, 24).to(dtype)
    return convolution, x, mask if masked else None, seq_idx if packed else None, state if has_state else None


@pytest.mark.parametrize("masked, packed, has_state", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("conv_kernel, dtype", [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_convolution(conv_kernel, dtype, masked, packed, has_state):
    """Outputs, the last inputs, and all gradients equal those of float64, in PyTorch."""
    convolution, x, mask, seq_idx, state = make_convolution(conv_kernel, dtype, packed, masked, has_state)
    results = []
    for module in (convolution, copy.deepcopy(convolution).double()):
        leaves = [t.detach().to(module.weight.dtype).requires_grad_() for t in (x, state) if t is not None]
        output, final_state = module(leaves[0], mask, seq_idx, *leaves[1:])
        output = output if mask is None else output.masked_fill(~mask[..., None], 0)
        torch.manual_seed(1)
        grads = [torch.randn(y.shape).to(dtype).to(y.dtype) for y in (output, final_state)]
        leaves.append(module.weight)
        input_grads = torch.autograd.grad((output, final_state), leaves, grads, allow_unused=True)
        input_grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(input_grads, leaves)]
        results.append([output, final_state, *input_grads])
    for actual, expected in zip(*results):
        assert not expected.numel() or relative_rms(actual, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


def test_derivatives_of_a_layer():
    """A gradient penalty and a forward-mode tangent through convolution, decay and TSSA, as those of float64 in PyTorch."""
    layer = TokenStatisticsSelfAttention(24, 3, causal=True, decay_type="token", conv_kernel=3)
    for param in layer.parameters():
        torch.nn.init.normal_(param, 0.5, 0.3)
    x, tangent, mask = torch.randn(2, 9, 24), torch.randn(2, 9, 24), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    results = []
    for module in (layer, copy.deepcopy(layer).double()):
        hidden_states = x.to(module.in_proj.weight.dtype).requires_grad_()
        (grad,) = torch.autograd.grad(module(hidden_states, mask)[0].square().sum(), hidden_states, create_graph=True)
        penalty_grads = torch.autograd.grad(grad.square().sum(), list(module.parameters()))
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(hidden_states.detach(), tangent.to(hidden_states.dtype))
            output_tangent = torch.autograd.forward_ad.unpack_dual(module(dual, mask)[0]).tangent
        results.append((grad, *penalty_grads, output_tangent[mask]))
    assert all(relative_rms(actual, expected) < 1e-4 for actual, expected in zip(*results))


def test_convolution_passes_opcheck():
    convolution, x, mask, seq_idx, state = make_convolution(3, torch.float32, True, True, True)
    inputs = x.requires_grad_(), convolution.weight, mask, sequence_starts(seq_idx).cumsum(1), state.requires_grad_()
    torch.library.opcheck(tssa_cpu.convolve.operator, inputs)
    torch.library.opcheck(tssa_cpu.convolve.operator, (*(x.detach() for x in inputs[:2]), None, None, None))


# Threads and processes ----------------------------------------------------------------------------------------------


def run_threaded(w):
    """Output and gradient of tokens that are enough for several threads."""
    w = w.clone().requires_grad_()
    output = tssa(w, torch.ones(w.shape[2]), backend="numba").output
    return output, *torch.autograd.grad(output.square().sum(), w)


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(number)


def test_several_threads(threads):
    """Of this process's kernels, and callers: Python threads call them at once."""
    w = torch.randn(5, 150, 8, 64)
    assert w.numel() > tssa_cpu.MIN_THREADED_WORK
    results = [run_threaded(w)]
    with ThreadPoolExecutor(4) as executor:
        results += executor.map(run_threaded, [w] * 8)
    torch.set_num_threads(1)
    expected = run_threaded(w)
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, expected))


def test_thread_after_the_pool(threads, monkeypatch):
    """When the main thread has ended, the pool is shut down, and other threads may still compute."""
    w, pool = torch.randn(5, 150, 8, 64), ThreadPoolExecutor()
    expected = run_threaded(w)
    pool.shutdown()
    monkeypatch.setattr(tssa_cpu, "_pool", lambda: pool)
    assert all(map(torch.equal, run_threaded(w), expected))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_after_use(threads):
    w = torch.randn(5, 150, 8, 64)
    expected = run_threaded(w)[0].detach()
    child = multiprocessing.get_context("fork").Process(target=exit_if_equal, args=(w, expected), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def exit_if_equal(w, expected):
    with torch.no_grad():
        output = tssa(w, torch.ones(w.shape[2]), backend="numba").output
    sys.exit(not np.array_equal(output.numpy(), expected.numpy()))  # torch's own threads do not survive a fork


# Numbers ------------------------------------------------------------------------------------------------------------


def test_bfloat16_rounds_to_nearest_and_keeps_nan():
    w = torch.randn(1, 1, 1, 4096)
    w[..., :3] = torch.tensor([float("nan"), 0.0, 1e-30])
    output = tssa(w.bfloat16(), torch.ones(1), backend="numba").output
    expected = tssa(w.bfloat16().float(), torch.ones(1), backend="torch").output
    assert output.isnan().all() and expected.isnan().all()
    w[..., 0] = 1
    output = tssa(w.bfloat16(), torch.ones(1), backend="numba").output
    expected = tssa(w.bfloat16().double(), torch.ones(1).double(), backend="torch").output.bfloat16()
    assert (output == expected).float().mean() > 0.99  # a double rounding may differ


@pytest.mark.parametrize("log_decay", [float("-inf"), -69.0, -1e-9])
@torch.no_grad()
def test_decays_of_many_tokens(log_decay):
    """Decays of 0, 1e-30 and 1 - 1e-9 of 20,000 tokens."""
    w, decay = torch.randn(1, 20_000, 2, 4), torch.tensor([log_decay, 0.0])
    actual = tssa(w, torch.ones(2), log_decay=decay)
    expected = tssa(w.double(), torch.ones(2).double(), log_decay=decay.double())
    assert relative_rms(actual.output, expected.output) < 1e-6
    for x, y in zip(actual.final_state, expected.final_state):
        assert relative_rms(x, y) < 1e-6


@pytest.mark.parametrize("position", [-1, 30])
def test_positions_out_of_range(position):
    positions = torch.full((1, 5), position)
    with pytest.raises(IndexError, match="position"):
        tssa(torch.randn(1, 5, 3, 8), torch.ones(3), torch.zeros(30, 3), positions=positions)
    state = zero_state(torch.empty(2, 1, 3, 8))
    with pytest.raises(IndexError, match="position"):
        options = {"positions": torch.tensor([0, position]), "initial_state": state, "in_place": True}
        tssa_step(torch.randn(2, 3, 8), torch.ones(3), torch.zeros(30, 3), **options)
    assert not any(x.any() for x in state)  # as before, in the first sequence, too
