# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels against the float64 reference, in Triton's interpreter or on a GPU.

The interpreter has to be selected before Triton is imported. So without a GPU, `test_kernels_in_the_interpreter` runs
`TestKernels` in a subprocess; `TRITON_INTERPRET=1 pytest tests/test_triton.py` does the same.
"""

import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import kernel_cases
import pytest
import torch
from conftest import randomize, small_config
from kernel_cases import run_kernels, run_reference
from transformers.dynamic_module_utils import get_imports

from tost_hf import ToSTForCausalLM, TSSAState, tssa, tssa_step
from tost_hf.model import tssa_triton
from tost_hf.model.tssa_reference import select_bias, state_dtypes


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_triton = pytest.mark.skipif(not tssa_triton.is_available(), reason="Triton is not installed")

if INTERPRETED and tssa_triton.is_available():
    kernel_cases.patch_interpreter_for_speed()


def load_again(package: str):
    """Imports the module a second time in another package, as remote code is loaded beside the installed package."""
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(Path(tssa_triton.__file__).parent)]
    return importlib.import_module(f"{package}.tssa_triton")


def relative_rms(x, y):
    """RMS of the difference, relative to that of y; 0 if both are 0."""
    x, y = x.double(), y.double()
    error, scale = (x - y).square().mean().sqrt().item(), y.square().mean().sqrt().item()
    return 0.0 if error == scale == 0 else error / max(scale, 1e-300)


make = functools.partial(kernel_cases.make, device=DEVICE)
WIDE = (1e-5, 5.0)  # -log_decay, for decays from 0.99999 to 0.007
FORMS = ("causal", "bidirectional", "decay")


def make_form(form, *shape, **options):
    return make(*shape, causal=form != "bidirectional", decay=WIDE if form == "decay" else None, **options)


def check(leaves, mask=None, seq_idx=None, causal=True, positions=None, poison=None):
    """Compares all outputs and the gradients of all inputs with the float64 reference."""
    mask, seq_idx, positions = (None if x is None else x.to(DEVICE) for x in (mask, seq_idx, positions))
    case = {"mask": mask, "seq_idx": seq_idx, "causal": causal, "positions": positions}
    inputs = dict(leaves)
    if poison is not None:
        for name in inputs.keys() & {"w", "log_decay"}:
            padding = ~mask.view(*mask.shape, *[1] * (inputs[name].ndim - 2))
            inputs[name] = inputs[name].detach().masked_fill(padding, poison).requires_grad_()
    actual = run_kernels(inputs, **case)
    assert [x.dtype for x in actual] == [leaves["w"].dtype, torch.float32, *state_dtypes(leaves["w"])][: len(actual)]
    grads = [torch.randn_like(x) for x in actual]
    output_grads = grads if poison is None else [grads[0].masked_fill(~mask[..., None, None], poison), *grads[1:]]
    actual = [*actual, *torch.autograd.grad(actual, list(inputs.values()), output_grads)]
    errors = kernel_cases.compute_errors(actual, leaves, grads, **case)
    assert not kernel_cases.find_failures(errors), errors


def padding_mask(T):
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : T // 3] = False  # left
    mask[1, T - T // 4 :] = False  # right
    mask[:, T // 2] = False  # inside
    return mask


def make_seq_idx(batch_lengths):
    """seq_idx (B, T) of sequences whose lengths are given by batch element."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in batch_lengths])


def run_with_gradients(leaves, **case):
    outputs = run_kernels(leaves, **case)
    return *outputs, *torch.autograd.grad([x.float().square().sum() for x in outputs], list(leaves.values()))


SIZES = [  # H and p that are no powers of two, two heads per program, incomplete tiles and chunks
    *(("causal", *size) for size in ((20, 8, 1), (3, 40, 64), (3, 128, 9))),
    *(("bidirectional", *size) for size in ((8, 48, 15), (1, 8, 65))),
    *(("decay", *size) for size in ((1, 40, 65), (12, 64, 5))),
]
GRID = list(itertools.product(FORMS, (1, 3, 8, 12, 20), (8, 16, 40, 48, 64, 128), (1, 15, 63, 64, 65, 1000, 4097)))
SIZES = [pytest.param(*size, marks=pytest.mark.slow) for size in GRID] if ON_GPU else SIZES


@needs_triton
class TestKernels:
    __test__ = INTERPRETED or ON_GPU

    @pytest.fixture(autouse=True)
    def poisoned_buffers(self, monkeypatch):
        """Fills new tensors with NaN, so that elements that a kernel does not write are detected."""

        def fill_with_nan(create):
            def wrapped(*args, **kwargs):
                x = create(*args, **kwargs)
                return x.fill_(float("nan")) if x.is_floating_point() else x

            return wrapped

        monkeypatch.setattr(torch, "empty", fill_with_nan(torch.empty))
        monkeypatch.setattr(torch, "empty_like", fill_with_nan(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "new_empty", fill_with_nan(torch.Tensor.new_empty))

    @pytest.mark.parametrize("form, H, p, T", SIZES)
    def test_sizes(self, form, H, p, T):
        check(make_form(form, 2, T, H, p), causal=form != "bidirectional")

    @pytest.mark.parametrize("form, dtype", list(zip(FORMS, (torch.bfloat16, torch.float16, torch.bfloat16))), ids=str)
    def test_low_precision(self, form, dtype):
        check(make_form(form, 2, 17, 3, 16, dtype=dtype), causal=form != "bidirectional")

    @pytest.mark.parametrize("form, poison", list(zip(FORMS, (float("nan"), float("inf"), float("nan")))))
    def test_padding(self, form, poison):
        check(make_form(form, 2, 30, 3, 8), padding_mask(30), causal=form != "bidirectional", poison=poison)

    @pytest.mark.parametrize("form, masked", [("causal", False), ("decay", True)])
    def test_packed_sequences(self, form, masked):
        """Boundaries differ by batch element; one-token sequences, a sequence of several chunks, a fully padded sequence."""
        seq_idx = make_seq_idx([(5, 1, 1, 70, 9), (33, 52, 1)])
        mask = torch.ones(2, 86, dtype=torch.bool)
        mask[0, 2:4] = mask[0, 5] = mask[0, 60] = mask[1, :3] = mask[1, 83:] = False
        check(make_form(form, 2, 86, 2, 8, state=masked), mask if masked else None, seq_idx)

    @pytest.mark.parametrize("decay", [None, (1e-5, 1.1e-5)], ids=str)
    def test_scan_of_several_blocks_of_chunks(self, decay, monkeypatch):
        monkeypatch.setattr(tssa_triton, "SCAN_CHUNKS", 2)
        check(make(1, 2 * 64 + 5, 1, 8, decay=decay))

    @pytest.mark.parametrize("causal", [True, False])
    def test_clamped_sums(self, causal):
        """Zero tokens, a zero channel, and tokens and a channel below epsilon: no gradient passes an active clamp."""
        leaves = make(1, 20, 2, 8, causal=causal, state=False)
        with torch.no_grad():
            w = leaves["w"]
            w[:, :3] = 0
            w[:, 3:5] *= 1e-7
            w[..., 0, 0] = 0
            w[..., 1, 1] *= 1e-8 if causal else 1e-14
        check(leaves, causal=causal)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("magnitude", [1e-15, 1e-11, 1e-9, 1e9, 1e12, 1e15])
    def test_channels_of_any_magnitude(self, form, magnitude):
        """Squares and reciprocals of sums of squares have to stay in float32's range, in every channel's gradient."""
        leaves = make_form(form, 1, 9, 3, 8, state=False)
        leaves["w"].data[..., :2] *= magnitude
        causal = form != "bidirectional"
        results = []
        for run, dtype in ((run_kernels, torch.float32), (run_reference, torch.float64)):
            inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
            output, membership = run(inputs, causal=causal)[:2]
            loss = output.sum() + (membership * torch.linspace(-1, 1, 3, device=DEVICE, dtype=dtype)).sum()
            results.append([output, torch.autograd.grad(loss, inputs["w"])[0]])
        for actual, expected in zip(*results):
            errors, scales = (x.double().square().mean((0, 1)).sqrt() for x in (actual - expected, expected))
            assert (errors <= 1e-5 * scales).all(), errors / scales

    @pytest.mark.parametrize("form, B, T", [("causal", 0, 5), ("bidirectional", 2, 0), ("decay", 2, 0)])
    def test_no_tokens(self, form, B, T):
        causal, leaves = form != "bidirectional", make_form(form, B, T, 3, 8)
        outputs = run_kernels(leaves, torch.ones(B, T, dtype=torch.bool, device=DEVICE), causal=causal)
        assert outputs[0].shape == (B, T, 3, 8)
        assert outputs[1].shape == (B, T, 3)
        grads = torch.autograd.grad([x.sum() for x in outputs], list(leaves.values()), allow_unused=True)
        assert all(x.shape == y.shape for x, y in zip(grads, leaves.values()))
        assert (grads[1] == 0).all()
        if causal:  # the state and its gradient are unchanged
            assert all(torch.equal(x, leaves[name]) for x, name in zip(outputs[2:], TSSAState._fields))
            assert all((x == 1).all() for x in grads[3:6])

    def test_shared_bias_and_strided_tokens(self):
        leaves = make(2, 20, 3, 8, bias_batch=1)
        strided = leaves["w"].detach().transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()
        check(leaves | {"w": strided.requires_grad_()})

    @pytest.mark.parametrize("shared", [True, False])
    def test_bias_by_position(self, shared):
        """The bias has gradients for all positions, including those without tokens."""
        mask = None if shared else padding_mask(20)
        positions = torch.arange(3, 23).expand(2, 20) if shared else (mask.long().cumsum(-1) - 1).clamp_min(0)
        check(make(2, 20, 3, 8, positions=30), mask, positions=positions)

    @pytest.mark.parametrize("decay", [(1e-5, 1.1e-5), (80.0, 100.0)], ids=str)
    def test_weak_and_strong_decay(self, decay):
        check(make(1, 70, 3, 8, decay=decay))

    def test_decay_of_zero_and_one(self):
        leaves = make(1, 70, 3, 8, decay=WIDE)
        with torch.no_grad():
            leaves["log_decay"][:, ::7] = 0
            leaves["log_decay"][:, ::32] = float("-inf")  # also at the boundary of a chunk
        check(leaves)

    def test_gradient_of_strong_decay_has_no_cancellation(self):
        """The decayed sum is too small to be recovered from the sum after the token by subtracting the token."""
        leaves = make(1, 40, 2, 8, decay=(14.0, 16.0))
        reference = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        actual, expected = (
            torch.autograd.grad(run(x)[0].square().sum(), x["log_decay"])[0]
            for run, x in ((run_kernels, leaves), (run_reference, reference))
        )
        assert relative_rms(actual, expected) < 1e-3  # with the subtraction it is at least 0.1

    @pytest.mark.parametrize("decay, quantity", [(None, 3), ((1e-3, 1e-1), 4)])
    def test_loss_of_the_final_state(self, decay, quantity):
        leaves = make(1, 67, 2, 8, decay=decay)
        reference = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        actual = torch.autograd.grad(run_kernels(leaves)[quantity].square().sum(), list(leaves.values()))
        loss = run_reference(reference)[quantity].square().sum()
        expected = torch.autograd.grad(loss, list(reference.values()), allow_unused=True)
        for x, y in zip(actual, expected):
            assert relative_rms(x, torch.zeros_like(x) if y is None else y) < 1e-5

    @pytest.mark.parametrize("form", FORMS)
    def test_determinism_bit_for_bit(self, form):
        leaves = make_form(form, 2, 10, 3, 8, dtype=torch.bfloat16)
        runs = [run_with_gradients(leaves, causal=form != "bidirectional") for _ in range(2)]
        assert all(torch.equal(x, y) for x, y in zip(*runs))

    @pytest.mark.parametrize("decay", [None, WIDE])
    def test_outputs_do_not_depend_on_later_tokens_bit_for_bit(self, decay):
        leaves = make(1, 75, 2, 8, decay=decay)
        expected = run_kernels(leaves)[:2]
        for stop in (1, 31, 33, 64, 74):
            prefix = {name: x[:, :stop] if name in ("w", "bias", "log_decay") else x for name, x in leaves.items()}
            assert all(torch.equal(x, y[:, :stop]) for x, y in zip(run_kernels(prefix), expected))

    @pytest.mark.parametrize(
        "H, p, bias_batch, decay_batch, wide",
        [(1, 8, 1, None, False), (3, 40, 2, 2, False), (3, 8, None, 1, True), (3, 8, "positions", None, True)],
    )
    def test_steps_equal_the_sequence_and_update_in_place(self, H, p, bias_batch, decay_batch, wide):
        T, by_position = 10, bias_batch == "positions"
        options = {"positions": 14} if by_position else {"bias_batch": bias_batch or 1}
        leaves = {k: x.detach() for k, x in make(2, T, H, p, decay=decay_batch and WIDE, **options).items()}
        positions = (torch.arange(T, device=DEVICE) + torch.tensor([[0], [4]], device=DEVICE)) if by_position else None
        if bias_batch is None:
            del leaves["bias"]
        if decay_batch is not None:
            leaves["log_decay"] = leaves["log_decay"][:decay_batch].expand(2, -1, -1)
        mask = padding_mask(T).to(DEVICE) if bias_batch == 2 else None
        output, membership, *final = run_kernels(leaves, mask, positions=positions)
        dtypes = [torch.float64 if wide and name != "sum_sq" else torch.float32 for name in TSSAState._fields]
        state = [leaves[name].to(dtype, copy=True) for name, dtype in zip(TSSAState._fields, dtypes)]
        data_ptrs = [x.data_ptr() for x in state]
        for t in range(T):
            inputs = leaves | {name: leaves[name][:, t] for name in leaves.keys() & {"w", "log_decay"}}
            if "bias" in leaves and not by_position:
                inputs["bias"] = leaves["bias"][:, t]
            if decay_batch is not None:
                inputs["log_decay"] = inputs["log_decay"][:decay_batch]
            step_mask, step_positions = (None if x is None else x[:, t] for x in (mask, positions))
            bias, decay = select_bias(inputs.get("bias"), step_positions, torch.float32), inputs.get("log_decay")
            bias, decay = (None if x is None else x.expand(2, H) for x in (bias, decay))
            step = tssa_triton.tssa_step_triton(inputs["w"], inputs["temp"], bias, step_mask, decay, *state)
            torch.testing.assert_close(list(step), [output[:, t], membership[:, t]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([x.to(y.dtype) for x, y in zip(state, final)], final, rtol=1e-5, atol=1e-6)
        assert data_ptrs == [x.data_ptr() for x in state]

    def test_decay_close_to_1_is_not_rounded_at_each_step(self):
        log_decay = torch.tensor([-1e-5, -1e-4, -0.03], device=DEVICE)
        state = [torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, device=DEVICE)]
        w, temp, mask = torch.zeros(1, 3, 8, device=DEVICE), torch.ones(3, device=DEVICE), torch.ones(1, device=DEVICE)
        for _ in range(200):
            tssa_triton.tssa_step_triton(w, temp, None, mask, log_decay[None], *state)
        expected = (200 * log_decay.double()).exp()
        torch.testing.assert_close(state[0][0, :, 0].double(), expected, rtol=3e-6, atol=0)

    def test_unsupported_gradients_raise(self):
        """Steps have no backward, and the backward has no second derivatives."""
        leaves = make(1, 5, 2, 8)
        state = [leaves[name].detach().clone() for name in TSSAState._fields]
        out, _ = tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, None, *state)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            out.sum().backward()
        (grad,) = torch.autograd.grad(run_kernels(leaves)[0].square().sum(), leaves["w"], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            grad.sum().backward()

    def test_tssa_step_stores_float64_sums(self):
        """With one decay per head; the state that is passed in is not changed."""
        leaves = make(2, 6, 3, 8)
        w, temp, bias = (leaves[name].detach() for name in ("w", "temp", "bias"))
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]], device=DEVICE)
        state, decay = None, torch.tensor([-0.3, -0.01, -1.0], device=DEVICE)
        expected = tssa(w.double(), temp.double(), bias.double(), mask=mask, log_decay=decay, backend="torch")
        for t in range(6):
            state_before = None if state is None else [x.clone() for x in state]
            step = tssa_step(w[:, t], temp, bias[:, t], state, mask=mask[:, t], log_decay=decay, backend="triton")
            assert state_before is None or all(torch.equal(x, y) for x, y in zip(state_before, state))
            torch.testing.assert_close(step.output.double(), expected.output[:, t], atol=1e-6, rtol=1e-5)
            state = step.final_state
        assert [x.dtype for x in state] == [torch.float32, torch.float64, torch.float64]
        for x, y in zip(state, expected.final_state):
            torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-6)

    def test_step_rejects_noncontiguous_sums(self):
        leaves = {k: x.detach() for k, x in make(1, 1, 2, 8).items()}
        state = [leaves[name] for name in TSSAState._fields]
        noncontiguous = state[0].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match="must be contiguous"):
            tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, None, noncontiguous, *state[1:])

    def test_operators_pass_opcheck(self):
        """Schema, fake kernels and autograd registration."""
        leaves = make(2, 3, 2, 8, decay=WIDE)
        mask = padding_mask(3).to(DEVICE)
        w, temp, bias, *state, decay = leaves.values()
        initial = torch.rand(2, 2 * 16 + 2, device=DEVICE, requires_grad=True)
        torch.library.opcheck(tssa_triton._forward, (w, temp, bias, mask, decay, initial, True))
        torch.library.opcheck(tssa_triton._forward, (w, temp, *[None] * 4, False))
        step = [x.detach() for x in (w[:, 0], temp, bias[:, 0], mask[:, 0], decay[:, 0], *state)]
        torch.library.opcheck(tssa_triton.tssa_step_triton, tuple(step))

    def test_checkpointing_and_autocast(self):
        layer = torch.nn.Linear(16, 16).to(DEVICE)
        temp = torch.ones(2, device=DEVICE, requires_grad=True)

        def run(x):
            return tssa_triton.tssa_triton(layer(x).view(1, 20, 2, 8), temp, None, None, None, None, True)[0]

        x = torch.randn(1, 20, 16, device=DEVICE)
        grads = []
        for call in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
            with torch.autocast(DEVICE, torch.bfloat16):
                output = call(x)
            assert output.dtype == torch.bfloat16
            grads.append(torch.autograd.grad(output.float().square().sum(), (layer.weight, temp)))
        assert all(torch.equal(a, b) for a, b in zip(*grads))

    def test_model_with_the_backend_environment_variable(self, monkeypatch):
        """Loss, gradients and generated tokens."""
        model = randomize(ToSTForCausalLM(small_config())).eval().to(DEVICE)
        tokens = torch.randint(2, 97, (2, 5), device=DEVICE)
        mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=DEVICE)
        runs = []
        for backend in ("triton", "torch"):
            monkeypatch.setenv("TOST_HF_BACKEND", backend)
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
            generated = model.generate(tokens, attention_mask=mask, max_new_tokens=2, do_sample=False)
            runs.append((loss, *torch.autograd.grad(loss, list(model.parameters())), generated))
        torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)

    def test_remote_code_beside_the_installed_package(self):
        """Each copy registers operators of its own; loading a copy again replaces only those."""
        leaves = make(1, 9, 2, 8)
        expected = run_kernels(leaves)
        for name in ("transformers_modules.org.model_hyphen_x", "tssa_kernel", "tssa_kernel"):
            other = load_again(name)
            assert other._forward._qualname != tssa_triton._forward._qualname
            assert all(torch.equal(x, y) for x, y in zip(expected, run_kernels(leaves, module=other)))
        assert all(torch.equal(x, y) for x, y in zip(expected, run_kernels(leaves)))


@needs_triton
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="TestKernels runs in this process")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "TestKernels"]
    command += [str(Path(__file__).with_name(name)) for name in ("test_triton.py", "test_triton_check.py")]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout)


def test_loads_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    module = load_again("without_triton")
    assert not module.is_available()
    assert "Triton is not installed" in module.find_unsupported(torch.float32, "cuda")
    assert "triton" not in get_imports(tssa_triton.__file__)  # else transformers would require it for remote code
    assert "from .tssa import" not in Path(tssa_triton.__file__).read_text()  # tssa.py imports this file


@needs_triton
def test_unsupported_devices_and_dtypes():
    assert (tssa_triton.find_unsupported(torch.float32, DEVICE) is None) is (INTERPRETED or ON_GPU)
    assert "do not support torch.float64 tokens" in tssa_triton.find_unsupported(torch.float64, DEVICE)
