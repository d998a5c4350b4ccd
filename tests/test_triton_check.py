# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The self-check of the Triton kernels, with correct and with faulty kernels. Run as test_triton.py."""

import importlib
import re
import warnings

import pytest
import torch
from test_triton import DEVICE, INTERPRETED, ON_GPU, needs_triton
from torch.utils.checkpoint import checkpoint

from tost_hf.model import tssa_reference, tssa_triton


operator = importlib.import_module("tost_hf.model.tssa")


class WrongKernel:
    """A kernel that scales one of its outputs by 1.2."""

    def __init__(self, kernel, name):
        self.kernel, self.fn, self.index = kernel, kernel.fn, kernel.arg_names.index(name)

    def __getitem__(self, grid):
        def launch(*args, **sizes):
            self.kernel[grid](*args, **sizes)
            args[self.index].mul_(1.2)

        return launch


class UncompilableKernel:
    def fn(self):
        """The launcher reads its name."""

    def __getitem__(self, grid):
        raise RuntimeError("ptxas died")


def make_tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@needs_triton
class TestKernelsAreChecked:
    __test__ = INTERPRETED or ON_GPU

    @pytest.fixture(autouse=True)
    def clear_results(self, monkeypatch):
        monkeypatch.setattr(tssa_triton, "_check_results", {})
        monkeypatch.delenv("TOST_HF_BACKEND", raising=False)
        operator._warn_of_fallback.cache_clear()

    @pytest.mark.parametrize(
        "form, decay, dtype",
        [
            ("bidirectional", False, torch.bfloat16),
            ("causal", True, torch.float32),
            ("step", True, torch.bfloat16),
        ],
        ids=str,
    )
    def test_correct_kernels_pass(self, form, decay, dtype):
        w = make_tokens(1, 3, 8, dtype=dtype)
        rng_state = torch.random.get_rng_state()
        with torch.inference_mode():
            assert tssa_triton.find_problem(w.device, dtype, 3, 8, form, decay, form != "step") is None
        assert torch.equal(torch.random.get_rng_state(), rng_state)

    @pytest.mark.parametrize(
        "kernel, argument, form, gradients, result",
        [
            ("chunk_fwd_output_kernel", "output", "causal", False, "output by"),
            ("chunk_bwd_input_kernel", "dw", "causal", True, "gradient of w by"),
            ("chunk_bwd_score_kernel", "dtemp", "bidirectional", True, "gradient of temp by"),
            ("step_kernel", "output", "step", False, "output by"),
        ],
    )
    def test_wrong_kernels_are_detected(self, kernel, argument, form, gradients, result, monkeypatch):
        monkeypatch.setattr(tssa_triton, kernel, WrongKernel(getattr(tssa_triton, kernel), argument))
        problem = tssa_triton.find_problem(make_tokens(0).device, torch.float32, 3, 8, form, gradients=gradients)
        assert re.search(rf"{result}.*Please report.*heads 3, head_dim 8, torch\.float32", problem)

    def test_falls_back_with_one_warning_or_raises(self, monkeypatch):
        monkeypatch.setattr(tssa_triton, "chunk_fwd_output_kernel", UncompilableKernel())
        w, temp = make_tokens(1, 5, 2, 8), torch.ones(2, device=DEVICE)
        with pytest.raises(ValueError, match="ptxas died"):
            operator.tssa(w, temp, backend="triton")
        monkeypatch.setitem(operator.KERNELS, "cpu", "triton")  # which "auto" selects on a GPU
        with pytest.warns(UserWarning, match="ptxas died"):
            first = operator.tssa(w, temp)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = operator.tssa(w, temp)
        assert torch.equal(first.output, operator.tssa(w, temp, backend="torch").output if ON_GPU else second.output)
        monkeypatch.setenv("TOST_HF_BACKEND", "triton")
        with pytest.raises(ValueError, match="ptxas died"):
            operator.tssa(w, temp)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_check_within_activation_checkpointing(self, autocast):
        """The check's tensors are not saved: the recomputation, which does not check again, would find too few."""
        w = make_tokens(1, 5, 2, 8).requires_grad_()
        temp = torch.ones(2, device=DEVICE)

        def run(w):
            return operator.tssa(w * 2, temp, backend="triton").output

        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            output = checkpoint(run, w, use_reentrant=False)
        assert len(tssa_triton._check_results) == 1
        actual, expected = (torch.autograd.grad(x.sum(), w)[0] for x in (output, run(w)))
        assert torch.equal(actual, expected)

    def test_lost_context(self, monkeypatch):
        """The reference cannot run on the device, either."""
        monkeypatch.setattr(tssa_triton, "chunk_fwd_output_kernel", UncompilableKernel())
        monkeypatch.setattr(tssa_triton, "_is_context_lost", lambda device: True)
        monkeypatch.setitem(operator.KERNELS, "cpu", "triton")
        with pytest.raises(RuntimeError, match=r"ptxas died.*restart it"):
            operator.tssa(make_tokens(1, 5, 2, 8), torch.ones(2, device=DEVICE))

    def test_checks_once_for_each_kind_of_tokens(self, monkeypatch):
        checks, run_check = [], tssa_triton._run_check
        monkeypatch.setattr(tssa_triton, "_run_check", lambda *key: checks.append(key) or run_check(*key))
        w, temp = make_tokens(1, 5, 2, 8), torch.ones(2, device=DEVICE)

        def run(w):
            return operator.tssa(w, temp, backend="triton").output

        run(w)
        run(make_tokens(2, 9, 2, 8))
        assert len(checks) == 1
        run(w.clone().requires_grad_())  # the backward kernels as well
        run(make_tokens(2, 9, 4, 8).to(torch.bfloat16)[:, :, :2])
        assert [(key[1], *key[-3:]) for key in checks] == [
            (torch.float32, "causal", False, False),
            (torch.float32, "causal", False, True),
            (torch.bfloat16, "causal", False, False),
        ]

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_check_of_a_run_that_is_compiled_from_its_first_step(self, dynamic, monkeypatch):
        """It runs while the compiler traces; the program then contains the kernels or, if they are wrong, the reference."""
        w, temp = make_tokens(1, 5, 2, 8).requires_grad_(), torch.ones(2, device=DEVICE)
        monkeypatch.setitem(operator.KERNELS, "cpu", "triton")  # which "auto" selects on a GPU
        compiled = torch.compile(lambda w: operator.tssa(w, temp).output, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        kernel = tssa_triton.chunk_bwd_input_kernel
        monkeypatch.setattr(tssa_triton, "chunk_bwd_input_kernel", WrongKernel(kernel, "dw"))
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="gradient of w by"):
            actual = compiled(w)
        expected = tssa_reference.causal(w, temp)[0]
        actual, expected = (torch.autograd.grad(x.square().sum(), w)[0] for x in (actual, expected))
        torch.testing.assert_close(actual, expected)
        monkeypatch.setattr(tssa_triton, "chunk_bwd_input_kernel", kernel)
        tssa_triton._check_results.clear()
        torch._dynamo.reset()
        outputs = compiled(w), operator.tssa(w, temp, backend="triton").output
        assert torch.equal(*outputs)
        assert len(tssa_triton._check_results) == 1
        assert torch.equal(*(torch.autograd.grad(x.square().sum(), w)[0] for x in outputs))
