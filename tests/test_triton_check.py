# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The self-check of the Triton kernels: correct ones, and stand-ins that are wrong. Run as test_triton.py."""

import importlib
import warnings

import pytest
import torch
from test_triton import DEVICE, INTERPRETED, ON_GPU, needs_triton

from tost_hf.model import tssa_triton


operator = importlib.import_module("tost_hf.model.tssa")


class OffByAFifth:
    """A kernel that makes one of its tensors too large."""

    def __init__(self, kernel, name):
        self.kernel, self.fn, self.place = kernel, kernel.fn, kernel.arg_names.index(name)

    def __getitem__(self, grid):
        def launch(*args, **sizes):
            self.kernel[grid](*args, **sizes)
            args[self.place].mul_(1.2)

        return launch


class FailsToCompile:
    def fn(self):
        """Whose name the launcher reads."""

    def __getitem__(self, grid):
        raise RuntimeError("ptxas died")


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@needs_triton
class TestKernelsAreChecked:
    __test__ = INTERPRETED or ON_GPU

    @pytest.fixture(autouse=True)
    def no_results(self, monkeypatch):
        monkeypatch.setattr(tssa_triton, "_problems", {})
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
    def test_right_kernels_pass(self, form, decay, dtype):
        w = tokens(1, 3, 8, dtype=dtype)
        before = torch.random.get_rng_state()
        with torch.inference_mode():
            assert tssa_triton.kernel_problem(w, form, decay=decay, gradients=form != "step") is None
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize(
        "kernel, name, form, gradients, named",
        [
            ("chunk_fwd_output_kernel", "output", "causal", False, "output by"),
            ("chunk_bwd_input_kernel", "dw", "causal", True, "gradient of w by"),
            ("chunk_bwd_score_kernel", "dtemp", "bidirectional", True, "gradient of temp by"),
            ("step_kernel", "output", "step", False, "output by"),
        ],
    )
    def test_a_wrong_kernel_is_found(self, kernel, name, form, gradients, named, monkeypatch):
        monkeypatch.setattr(tssa_triton, kernel, OffByAFifth(getattr(tssa_triton, kernel), name))
        problem = tssa_triton.kernel_problem(tokens(1, 3, 8), form, gradients=gradients)
        assert named in problem
        assert "Please report" in problem
        assert "heads 3, head_dim 8, torch.float32" in problem

    def test_falls_back_with_one_warning_or_raises(self, monkeypatch):
        monkeypatch.setattr(tssa_triton, "chunk_fwd_output_kernel", FailsToCompile())
        w, temp = tokens(1, 5, 2, 8), torch.ones(2, device=DEVICE)
        with pytest.raises(RuntimeError, match="ptxas died"):
            operator.tssa(w, temp, backend="triton")
        monkeypatch.setattr(operator, "_choose_backend", lambda *args: "triton")  # as "auto" chooses on a GPU
        with pytest.warns(UserWarning, match="ptxas died"):
            got = operator.tssa(w, temp)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = operator.tssa(w, temp)
        assert torch.equal(got.output, operator.tssa(w, temp, backend="torch").output if ON_GPU else again.output)
        monkeypatch.setenv("TOST_HF_BACKEND", "triton")
        with pytest.raises(RuntimeError, match="ptxas died"):
            operator.tssa(w, temp)

    def test_checks_once_and_never_while_a_compiler_traces(self, monkeypatch):
        checks, find = [], tssa_triton._find_problem
        monkeypatch.setattr(tssa_triton, "_find_problem", lambda *key: checks.append(key) or find(*key))
        w, temp = tokens(1, 5, 2, 8), torch.ones(2, device=DEVICE)

        def run(w):
            return operator.tssa(w, temp, backend="triton").output

        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(w)
        assert checks == []
        assert torch.equal(run(w), compiled)
        run(tokens(2, 9, 2, 8))
        assert len(checks) == 1
        run(w.clone().requires_grad_())  # the backward kernels as well
        run(tokens(2, 9, 4, 8).to(torch.bfloat16)[:, :, :2])
        assert [(key[1], *key[-3:]) for key in checks] == [
            (torch.float32, "causal", False, False),
            (torch.float32, "causal", False, True),
            (torch.bfloat16, "causal", False, False),
        ]
