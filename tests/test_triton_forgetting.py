# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels with sums that forget, `log_decay`; run as test_triton.py runs its own."""

import pytest
import torch
from test_triton import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    SIZES,
    check,
    make,
    needs_triton,
    packed,
    padding_mask,
    relative_rms,
    run_exact,
    run_kernels,
)

from tost_hf import tssa, tssa_step
from tost_hf.model import tssa_triton


ANY = (1e-5, 5.0)  # factors from 0.99999 down to 0.007
STATE = ("sum_sq", "sum_weighted_sq", "sum_membership")


@needs_triton
class TestKernelsThatForget:
    __test__ = INTERPRETED or ON_GPU

    @pytest.mark.parametrize("H, p, T", SIZES[::8] if ON_GPU else SIZES[::2])
    def test_sizes(self, H, p, T):
        check(make(2, T, H, p, decay=ANY))

    @pytest.mark.parametrize("decay", [(1e-5, 1.1e-5), (1e-3, 1e-2), (4.5, 4.7), (80.0, 100.0)], ids=str)
    def test_weak_and_strong(self, decay):
        check(make(2, 70, 3, 16, decay=decay))

    def test_factors_of_zero_and_one(self):
        leaves = make(2, 70, 3, 16, decay=ANY)
        with torch.no_grad():
            leaves["log_decay"][:, ::7] = 0
            leaves["log_decay"][:, ::32] = float("-inf")  # at the border of a chunk as well
        check(leaves)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_low_precision(self, dtype):
        check(make(2, 65, 3, 16, dtype, decay=ANY))

    @pytest.mark.parametrize("inside, poison", [(False, float("nan")), (True, float("inf"))])
    def test_padding(self, inside, poison):
        """Which neither adds nor forgets, whatever factors stand there."""
        mask = padding_mask(150)
        if inside:
            mask[0] = True
            mask[0, 30:50] = mask[0, 60:130] = False
        check(make(2, 150, 3, 16, decay=ANY), mask, poison=poison)

    @pytest.mark.parametrize("state, masked", [(False, True), (True, False)])
    def test_packed_rows(self, masked, state):
        """Other borders in each row, one-token sequences, a sequence of several chunks, a fully padded sequence."""
        mask = torch.ones(2, 100, dtype=torch.bool)
        mask[0, 2:4] = mask[0, 5] = mask[0, 60] = mask[1, :3] = mask[1, 97:] = False
        leaves = make(2, 100, 2, 40, state=state, decay=ANY)
        check(leaves, mask if masked else None, packed([(5, 1, 1, 84, 9), (33, 66, 1)]))

    @pytest.mark.parametrize("decay", [ANY, (1e-5, 1.1e-5)], ids=str)
    def test_more_chunks_than_a_block_of_the_scan(self, decay):
        check(make(1, 16 * 64 + 17, 1, 128, decay=decay))

    @pytest.mark.parametrize("B, T", [(0, 5), (2, 0)])
    def test_no_tokens(self, B, T):
        leaves = make(B, T, 3, 8, decay=ANY)
        out = run_kernels(leaves)
        grads = torch.autograd.grad([x.sum() for x in out], list(leaves.values()))
        assert all(x.shape == y.shape for x, y in zip(grads, leaves.values()))
        assert all(torch.equal(x, leaves[name]) for x, name in zip(out[2:], STATE))

    def test_loss_on_the_state_alone(self):
        leaves = make(1, 70, 2, 8, decay=(1e-3, 1e-1))
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        for quantity in (2, 3, 4):
            got = torch.autograd.grad(run_kernels(leaves)[quantity].square().sum(), list(leaves.values()))
            want = torch.autograd.grad(run_exact(exact)[quantity].square().sum(), list(exact.values()), allow_unused=True)
            for x, y in zip(got, want):
                assert relative_rms(x, torch.zeros_like(x) if y is None else y) < 1e-5

    def test_a_gradient_that_a_difference_would_lose(self):
        """Sums that all but forgot: what is left of them is too small to be seen in the sum after the token."""
        leaves = make(1, 40, 2, 8, decay=(14.0, 16.0))
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        got, want = (
            torch.autograd.grad(run(x)[0].square().sum(), x["log_decay"])[0]
            for run, x in ((run_kernels, leaves), (run_exact, exact))
        )
        assert relative_rms(got, want) < 1e-3  # a difference is off by a tenth and more

    def test_two_runs_are_equal_bit_for_bit(self):
        leaves = make(2, 70, 3, 16, torch.bfloat16, decay=ANY)
        runs = []
        for _ in range(2):
            out = run_kernels(leaves)
            runs.append((*out, *torch.autograd.grad([x.float().square().sum() for x in out], list(leaves.values()))))
        assert all(torch.equal(x, y) for x, y in zip(*runs))

    def test_outputs_do_not_depend_on_later_tokens_bit_for_bit(self):
        leaves = make(1, 75, 2, 40, decay=ANY)
        whole = run_kernels(leaves)[:2]
        for stop in (1, 31, 32, 33, 64, 74):
            prefix = {name: x[:, :stop] if name in ("w", "bias", "log_decay") else x for name, x in leaves.items()}
            assert all(torch.equal(x, y[:, :stop]) for x, y in zip(run_kernels(prefix), whole))

    @pytest.mark.parametrize("rows, wide", [(1, True), (2, False)])
    def test_steps_are_the_whole(self, rows, wide):
        leaves = {name: x.detach() for name, x in make(2, 20, 3, 40, decay=ANY).items()}
        leaves["log_decay"] = leaves["log_decay"][:rows].expand(2, -1, -1)
        mask = padding_mask(20).to(DEVICE)
        output, membership, *final = run_kernels(leaves, mask)
        state = [leaves[name].to(torch.float64 if wide and name != "sum_sq" else torch.float32, copy=True) for name in STATE]
        for t in range(20):
            bias, decay = leaves["bias"][:, t], leaves["log_decay"][:rows, t]
            o, m = tssa_triton.tssa_step_triton(leaves["w"][:, t], leaves["temp"], bias, mask[:, t], *state, decay)
            torch.testing.assert_close([o, m], [output[:, t], membership[:, t]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([x.to(y.dtype) for x, y in zip(state, final)], final, rtol=1e-5, atol=1e-6)

    def test_a_factor_close_to_1_is_not_rounded_at_each_step(self):
        log_decay = torch.tensor([-1e-5, -1e-4, -0.03], device=DEVICE)
        state = [torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, device=DEVICE)]
        w, temp, mask = torch.zeros(1, 3, 8, device=DEVICE), torch.ones(3, device=DEVICE), torch.ones(1, device=DEVICE)
        for _ in range(600):
            tssa_triton.tssa_step_triton(w, temp, None, mask, *state, log_decay[None])
        expected = (600 * log_decay.double()).exp()
        torch.testing.assert_close(state[0][0, :, 0].double(), expected, rtol=3e-6, atol=0)

    def test_compiles_whole(self):
        torch._dynamo.reset()
        leaves = make(2, 20, 2, 8, decay=ANY)
        seq_idx = packed([(5, 15), (19, 1)]).to(DEVICE)
        mask = padding_mask(20).to(DEVICE)

        def run(leaves):
            return run_kernels(leaves, mask, seq_idx)

        outs = [run(leaves), torch.compile(run, backend="aot_eager", fullgraph=True)(leaves)]
        grads = [torch.autograd.grad([x.square().sum() for x in out], list(leaves.values())) for out in outs]
        assert all(torch.equal(x, y) for x, y in zip(*outs))
        assert all(torch.equal(x, y) for x, y in zip(*grads))

    def test_operators_keep_their_contracts(self):
        leaves = make(2, 12, 2, 8, decay=ANY)
        mask = padding_mask(12).to(DEVICE)
        w, temp, bias, *rest = leaves.values()
        for seq_idx in (None, packed([(5, 7), (11, 1)]).to(DEVICE)):
            torch.library.opcheck(tssa_triton._forward, (w, temp, bias.flatten(0, 1), None, mask, seq_idx, *rest, True))
        w, bias, state, decay = w[:, 0].detach(), bias[:, 0].detach(), [x.detach() for x in rest[:3]], rest[3][:, 0].detach()
        torch.library.opcheck(tssa_triton._step, (w, temp.detach(), bias, None, mask[:, 0], *state, decay))

    def test_the_operator_takes_factors_of_a_head(self):
        """As `tssa` and `tssa_step` call the kernels, with one factor per head, whose gradient is the sum of the tokens'."""
        leaves = make(2, 40, 3, 8, state=False)
        w, temp, bias = leaves.values()
        decay = torch.tensor([-0.3, -0.01, -1.0], device=DEVICE, requires_grad=True)
        mask = padding_mask(40).to(DEVICE)
        got, want = (
            tssa(w.to(dtype), temp, bias, mask=mask, log_decay=decay, backend=backend)
            for backend, dtype in (("triton", torch.float32), ("reference", torch.float64))
        )
        assert relative_rms(got.output, want.output) < 1e-5
        grads = [torch.autograd.grad(x.output.square().sum(), decay)[0] for x in (got, want)]
        assert relative_rms(*grads) < 1e-5
        with torch.no_grad():
            steps = [tssa_step(w[:, 0], temp, bias[:, 0], None, log_decay=decay, backend=b) for b in ("triton", "reference")]
            steps = [tssa_step(w[:, 1], temp, bias[:, 1], x.final_state, log_decay=decay, backend="triton") for x in steps]
        torch.testing.assert_close(steps[0].output, steps[1].output, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(steps[0].final_state, steps[1].final_state, rtol=1e-6, atol=1e-6)
