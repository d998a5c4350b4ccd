"""Inputs for the kernels, and the tolerance of their results against the float64 reference; tests of both backends of kernels.

A sum of n numbers that is rounded at each step has an error of about eps sqrt(n) times their magnitude, even where they
cancel. So a result may differ from the float64 reference by `SLACK` eps sqrt(tokens) times the sum of two terms: its RMS, and
its change, in units of eps, when all inputs are perturbed by eps. Results stored in 16 bits are rounded once more.
"""

import atexit
import importlib
import math
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from conftest import randomize, small_config

from tost_hf import ToSTForCausalLM, TSSAState, tssa, tssa_step
from tost_hf.model import tssa_reference
from tost_hf.model.tssa_reference import state_dtypes, zero_state


SLACK = 6  # rounding needs up to 3.1; omitting one of 8,194 tokens would need at least 23
PERTURBED_RUNS = 4  # their changes are averaged as RMS


def make(
    B: int,
    T: int,
    H: int,
    p: int,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    state: bool = True,
    bias_batch: int | None = None,
    positions: int | None = None,
    decay: tuple[float, float] | None = None,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """w, temp and, for the causal form, bias, initial state and log decays, as float32 leaves (w in dtype).

    The bias has `bias_batch` batch elements (default B) or, with `positions`, is a table of that many positions. `decay` is
    the range of -log_decay, in which the values are log-uniform.
    """
    leaves = {"w": torch.randn(B, T, H, p).to(dtype), "temp": torch.rand(H) * 3 + 0.5}
    if causal:
        batch = B if bias_batch is None else bias_batch
        leaves["bias"] = 0.3 * (torch.randn(batch, T, H) if positions is None else torch.randn(H, positions).t())
        if state:
            leaves |= {"sum_sq": torch.rand(B, H, p) + 0.5, "sum_weighted_sq": torch.rand(B, H, p)}
            leaves["sum_membership"] = torch.rand(B, H) + 0.5
        if decay is not None:
            leaves["log_decay"] = -decay[0] * (decay[1] / decay[0]) ** torch.rand(B, T, H)
    return {name: x.to(device).requires_grad_() for name, x in leaves.items()}


def run_operator(leaves, mask=None, seq_idx=None, causal=True, positions=None, softmax=None, backend="torch", operator=tssa):
    """The output, the membership (B, T, H) and, in the causal form, the three sums after the last token."""
    state = [leaves[name] for name in TSSAState._fields if name in leaves]
    w, temp, bias, log_decay = (leaves.get(name) for name in ("w", "temp", "bias", "log_decay"))
    options = {"causal": causal, "mask": mask, "seq_idx": seq_idx, "positions": positions, "log_decay": log_decay}
    options["initial_state"] = TSSAState(*state) if state else None
    result = operator(w, temp, bias, backend=backend, softmax=softmax, **options)
    return result.output, result.membership.transpose(1, 2), *(result.final_state or ())


def perturb(x: torch.Tensor) -> torch.Tensor:
    """Adds relative noise of about eps to every number."""
    return x * (1 + torch.finfo(torch.float32).eps * torch.randn(x.shape, device=x.device, dtype=torch.float64))


def perturbed_softmax(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """As `softmax_over_heads`. Perturbs the numerator only: otherwise gradients that cancel would appear exact."""
    logits = score * temp
    membership = (perturb(logits) - logits.logsumexp(-1, keepdim=True)).exp()
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def compute_errors(actual, leaves, grads=(), **case) -> dict[str, tuple[float, float]]:
    """For each result its error and its tolerance, as RMS.

    Args:
        actual: the outputs of the kernels and, with `grads`, the gradients of the `leaves`. `case` are the other arguments of
            `run_operator`.
        grads: gradients of the outputs.
    """
    results = []
    for softmax in (None, *[perturbed_softmax] * PERTURBED_RUNS):
        convert = torch.Tensor.double if softmax is None else perturb
        inputs = {name: convert(x.detach().double()).requires_grad_(bool(grads)) for name, x in leaves.items()}
        outputs = list(run_operator(inputs, softmax=softmax, **case))[: len(grads) or len(actual)]
        if grads:
            outputs += torch.autograd.grad(outputs, list(inputs.values()), [convert(x.double()) for x in grads])
        results.append([x.detach() for x in outputs])
    names = ["output", "membership", *TSSAState._fields][: len(grads) or len(actual)]
    names += [f"gradient of {name}" for name in leaves if grads]
    errors, scale, eps = {}, SLACK * math.sqrt(leaves["w"].shape[1]), torch.finfo(torch.float32).eps
    for name, x, expected, *perturbed in zip(names, actual, *results, strict=True):
        storage_eps = torch.finfo(x.dtype).eps if x.dtype in (torch.bfloat16, torch.float16) else 0.0
        sensitivity = rms(torch.stack([x_perturbed - expected for x_perturbed in perturbed]))
        errors[name] = rms(x.double() - expected), scale * (eps * rms(expected) + sensitivity) + storage_eps * rms(expected)
    return errors


def find_failures(errors: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The results whose error exceeds the tolerance or is NaN."""
    return {name: (error, tolerance) for name, (error, tolerance) in errors.items() if not error <= tolerance}


def load_again(package: str, module: str):
    """Imports a module from a copy of its folder in another package, as remote code is loaded beside the installed package."""
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        del sys.modules[name]
    folder = Path(tempfile.mkdtemp())  # numba's cached code is bound to the names of file and module
    atexit.register(shutil.rmtree, folder)
    for file in Path(tssa_reference.__file__).parent.glob("*.py"):
        shutil.copy(file, folder)
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"{package}.{module}")


def relative_rms(x, y):
    """RMS of the difference, relative to that of y; 0 if both are 0."""
    x, y = x.double(), y.double()
    error, scale = (x - y).square().mean().sqrt().item(), y.square().mean().sqrt().item()
    return 0.0 if error == scale == 0 else error / max(scale, 1e-300)


WIDE = (1e-5, 5.0)  # -log_decay, for decays from 0.99999 to 0.007
FORMS = ("causal", "bidirectional", "decay")


def padding_mask(T):
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : T // 3] = False  # left
    mask[1, T - T // 4 :] = False  # right
    mask[:, T // 2] = False  # inside
    return mask


def make_seq_idx(batch_lengths):
    """seq_idx (B, T) of sequences whose lengths are given by batch element."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in batch_lengths])


class KernelTests:
    """The tests of a backend of kernels on a device, on small sizes."""

    backend: str
    device: str

    def make(self, *shape, **options):
        return make(*shape, device=self.device, **options)

    def make_form(self, form, *shape, **options):
        return self.make(*shape, causal=form != "bidirectional", decay=WIDE if form == "decay" else None, **options)

    def run(self, leaves, mask=None, **case):
        return run_operator(leaves, mask, backend=self.backend, **case)

    def check(self, leaves, mask=None, seq_idx=None, causal=True, positions=None, poison=None):
        """Compares all outputs and the gradients of all inputs with the float64 reference."""
        mask, seq_idx, positions = (None if x is None else x.to(self.device) for x in (mask, seq_idx, positions))
        case = {"mask": mask, "seq_idx": seq_idx, "causal": causal, "positions": positions}
        inputs = dict(leaves)
        if poison is not None:
            for name in inputs.keys() & {"w", "log_decay"}:
                padding = ~mask.view(*mask.shape, *[1] * (inputs[name].ndim - 2))
                inputs[name] = inputs[name].detach().masked_fill(padding, poison).requires_grad_()
        actual = self.run(inputs, **case)
        assert [x.dtype for x in actual] == [leaves["w"].dtype, torch.float32, *state_dtypes(leaves["w"])][: len(actual)]
        grads = [torch.randn_like(x) for x in actual]
        output_grads = grads if poison is None else [grads[0].masked_fill(~mask[..., None, None], poison), *grads[1:]]
        actual = [*actual, *torch.autograd.grad(actual, list(inputs.values()), output_grads)]
        errors = compute_errors(actual, leaves, grads, **case)
        assert not find_failures(errors), errors

    def run_with_gradients(self, leaves, **case):
        outputs = self.run(leaves, **case)
        return *outputs, *torch.autograd.grad([x.float().square().sum() for x in outputs], list(leaves.values()))

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

    @pytest.mark.parametrize("form, dtype", list(zip(FORMS, (torch.bfloat16, torch.float16, torch.bfloat16))), ids=str)
    def test_low_precision(self, form, dtype):
        self.check(self.make_form(form, 2, 17, 3, 16, dtype=dtype), causal=form != "bidirectional")

    @pytest.mark.parametrize("form, poison", list(zip(FORMS, (float("nan"), float("inf"), float("nan")))))
    def test_padding(self, form, poison):
        self.check(self.make_form(form, 2, 30, 3, 8), padding_mask(30), causal=form != "bidirectional", poison=poison)

    @pytest.mark.parametrize("form, masked", [("causal", False), ("decay", True)])
    def test_packed_sequences(self, form, masked):
        """Boundaries differ by batch element; one-token sequences, a sequence of several chunks, a fully padded sequence."""
        seq_idx = make_seq_idx([(5, 1, 1, 70, 9), (33, 52, 1)])
        mask = torch.ones(2, 86, dtype=torch.bool)
        mask[0, 2:4] = mask[0, 5] = mask[0, 60] = mask[1, :3] = mask[1, 83:] = False
        self.check(self.make_form(form, 2, 86, 2, 8, state=masked), mask if masked else None, seq_idx)

    @pytest.mark.parametrize("form, value", [("causal", float("inf")), ("decay", float("nan"))])
    def test_infinities_and_nan_stay_within_their_packed_sequence(self, form, value):
        """Outputs, states and gradients of the others, in the same chunk and beyond, are those beside finite tokens."""
        seq_idx = make_seq_idx([(5, 40, 3, 70), (80, 38)]).to(self.device)
        is_other = seq_idx != torch.tensor([[1], [0]], device=self.device)
        leaves = self.make_form(form, 2, 118, 2, 8, state=False)
        results = []
        for number in (0.5, value):
            w = leaves["w"].detach().clone()
            w[0, 20, 1, 2] = w[1, 70, 0, 5] = number
            inputs = {name: x for name, x in (leaves | {"w": w.requires_grad_()}).items() if name != "temp"}
            outputs = self.run(inputs | {"temp": leaves["temp"]}, seq_idx=seq_idx)
            grads = torch.autograd.grad([x.float().square().sum() for x in outputs], list(inputs.values()))
            results.append([*(x[is_other] for x in (*outputs[:2], *grads)), *outputs[2:]])
        assert not outputs[0].isfinite().all()
        assert all(torch.equal(x, y) for x, y in zip(*results))

    @pytest.mark.parametrize("causal", [True, False])
    def test_clamped_sums(self, causal):
        """Zero tokens, a zero channel, and tokens and a channel below epsilon: no gradient passes an active clamp."""
        leaves = self.make(1, 20, 2, 8, causal=causal, state=False)
        with torch.no_grad():
            w = leaves["w"]
            w[:, :3] = 0
            w[:, 3:5] *= 1e-7
            w[..., 0, 0] = 0
            w[..., 1, 1] *= 1e-8 if causal else 1e-14
        self.check(leaves, causal=causal)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("magnitude", [1e-15, 1e-11, 1e-9, 1e9, 1e12, 1e15])
    def test_channels_of_any_magnitude(self, form, magnitude):
        """Squares and reciprocals of sums of squares have to stay in float32's range, in every channel's gradient."""
        leaves = self.make_form(form, 1, 9, 3, 8, state=False)
        leaves["w"].data[..., :2] *= magnitude
        causal = form != "bidirectional"
        results = []
        for run, dtype in ((self.run, torch.float32), (run_operator, torch.float64)):
            inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
            output, membership = run(inputs, causal=causal)[:2]
            loss = output.sum() + (membership * torch.linspace(-1, 1, 3, device=self.device, dtype=dtype)).sum()
            results.append([output, torch.autograd.grad(loss, inputs["w"])[0]])
        for actual, expected in zip(*results):
            errors, scales = (x.double().square().mean((0, 1)).sqrt() for x in (actual - expected, expected))
            assert (errors <= 1e-5 * scales).all(), errors / scales

    @pytest.mark.parametrize("form, B, T", [("causal", 0, 5), ("bidirectional", 2, 0), ("decay", 2, 0)])
    def test_no_tokens(self, form, B, T):
        causal, leaves = form != "bidirectional", self.make_form(form, B, T, 3, 8)
        outputs = self.run(leaves, torch.ones(B, T, dtype=torch.bool, device=self.device), causal=causal)
        assert outputs[0].shape == (B, T, 3, 8)
        assert outputs[1].shape == (B, T, 3)
        grads = torch.autograd.grad([x.sum() for x in outputs], list(leaves.values()), allow_unused=True)
        assert all(x.shape == y.shape for x, y in zip(grads, leaves.values()))
        assert (grads[1] == 0).all()
        if causal:  # the state and its gradient are unchanged
            assert all(torch.equal(x, leaves[name]) for x, name in zip(outputs[2:], TSSAState._fields))
            assert all((x == 1).all() for x in grads[3:6])

    def test_shared_bias_and_strided_tokens(self):
        leaves = self.make(2, 20, 3, 8, bias_batch=1)
        strided = leaves["w"].detach().transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()
        self.check(leaves | {"w": strided.requires_grad_()})

    def test_negative_bit(self):
        """Of each input and of the output's gradient: the numbers are those with the opposite sign of what is stored."""
        leaves = {name: x.detach() for name, x in self.make(1, 9, 2, 8, decay=WIDE).items()}
        results = []
        for convert in (torch.clone, lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag):
            inputs = {name: convert(x).requires_grad_() for name, x in leaves.items()}
            assert inputs["temp"].is_neg() == bool(results)
            output = self.run(inputs)[0]
            results.append((output, *torch.autograd.grad(output, list(inputs.values()), convert(leaves["w"]))))
        assert all(torch.equal(x, y) for x, y in zip(*results))

    @pytest.mark.parametrize("shared", [True, False])
    def test_bias_by_position(self, shared):
        """The bias has gradients for all positions, including those without tokens; those of padding are -1 on the left."""
        mask = None if shared else padding_mask(20)
        positions = torch.arange(3, 23).expand(2, 20) if shared else mask.long().cumsum(-1) - 1
        self.check(self.make(2, 20, 3, 8, positions=30), mask, positions=positions)

    @pytest.mark.parametrize("decay", [(1e-5, 1.1e-5), (80.0, 100.0)], ids=str)
    def test_weak_and_strong_decay(self, decay):
        self.check(self.make(1, 70, 3, 8, decay=decay))

    def test_decay_of_zero_and_one(self):
        leaves = self.make(1, 70, 3, 8, decay=WIDE)
        with torch.no_grad():
            leaves["log_decay"][:, ::7] = 0
            leaves["log_decay"][:, ::32] = float("-inf")  # also at the boundary of a chunk
        self.check(leaves)

    def test_gradient_of_strong_decay_has_no_cancellation(self):
        """The decayed sum is too small to be recovered from the sum after the token by subtracting the token."""
        leaves = self.make(1, 40, 2, 8, decay=(14.0, 16.0))
        reference = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        actual, expected = (
            torch.autograd.grad(run(x)[0].square().sum(), x["log_decay"])[0]
            for run, x in ((self.run, leaves), (run_operator, reference))
        )
        assert relative_rms(actual, expected) < 1e-3  # with the subtraction it is at least 0.1

    @pytest.mark.parametrize("decay, quantity", [(None, 3), ((1e-3, 1e-1), 4)])
    def test_loss_of_the_final_state(self, decay, quantity):
        leaves = self.make(1, 67, 2, 8, decay=decay)
        reference = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        actual = torch.autograd.grad(self.run(leaves)[quantity].square().sum(), list(leaves.values()))
        loss = run_operator(reference)[quantity].square().sum()
        expected = torch.autograd.grad(loss, list(reference.values()), allow_unused=True)
        assert all(relative_rms(x, torch.zeros_like(x) if y is None else y) < 1e-5 for x, y in zip(actual, expected))

    @pytest.mark.parametrize("form", FORMS)
    def test_determinism_bit_for_bit(self, form):
        leaves = self.make_form(form, 2, 10, 3, 8, dtype=torch.bfloat16)
        runs = [self.run_with_gradients(leaves, causal=form != "bidirectional") for _ in range(2)]
        assert all(torch.equal(x, y) for x, y in zip(*runs))

    @pytest.mark.parametrize("decay", [None, WIDE])
    def test_outputs_do_not_depend_on_later_tokens_bit_for_bit(self, decay):
        leaves = self.make(1, 75, 2, 8, decay=decay)
        expected = self.run(leaves)[:2]
        for stop in (1, 31, 33, 64, 74):
            prefix = {name: x[:, :stop] if name in ("w", "bias", "log_decay") else x for name, x in leaves.items()}
            assert all(torch.equal(x, y[:, :stop]) for x, y in zip(self.run(prefix), expected))
        changed = leaves["w"].detach().clone()
        changed[:, 41:] = float("nan")
        assert all(torch.equal(x[:, :41], y[:, :41]) for x, y in zip(self.run(leaves | {"w": changed})[:2], expected))

    @pytest.mark.parametrize("H, p, by_position, in_place", [(3, 8, False, False), (3, 40, True, True), (1, 8, False, True)])
    @torch.no_grad()
    def test_steps_equal_the_sequence(self, H, p, by_position, in_place):
        """With padding and a decay per head; the state is updated in place or, by default, not modified."""
        w, temp, bias = self.make(2, 6, H, p, state=False, positions=14 if by_position else None).values()
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]], device=self.device)
        positions = torch.arange(6, device=self.device) + torch.tensor([[0], [4]], device=self.device) if by_position else None
        options = {"log_decay": torch.tensor([-0.3, -0.01, -1.0], device=self.device)[:H]}
        inputs = w.double(), temp.double(), bias.double()
        expected = tssa(*inputs, positions=positions, mask=mask, backend="torch", **options)
        state = zero_state(w)
        for t in range(6):
            options |= {"positions": positions[:, t]} if by_position else {}
            step_bias, before = bias if by_position else bias[:, t], [x.clone() for x in state]
            options |= {"mask": mask[:, t], "initial_state": state, "backend": self.backend, "in_place": in_place}
            output, membership, final_state = tssa_step(w[:, t], temp, step_bias, **options)
            assert all(x is y if in_place else torch.equal(x, z) for x, y, z in zip(state, final_state, before))
            torch.testing.assert_close(output.double(), expected.output[:, t], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(membership.double(), expected.membership[..., t], atol=1e-6, rtol=1e-5)
            state = final_state
        assert [x.dtype for x in state] == [torch.float32, torch.float64, torch.float64]
        torch.testing.assert_close([x.double() for x in state], list(expected.final_state), atol=1e-6, rtol=1e-6)

    def test_checkpointing_and_autocast(self):
        layer = torch.nn.Linear(16, 16).to(self.device)
        temp = torch.ones(2, device=self.device, requires_grad=True)

        def run(x):
            return tssa(layer(x).view(1, 20, 2, 8), temp, backend=self.backend).output

        x = torch.randn(1, 20, 16, device=self.device)
        grads = []
        for call in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
            with torch.autocast(self.device, torch.bfloat16):
                output = call(x)
            assert output.dtype == torch.bfloat16
            grads.append(torch.autograd.grad(output.float().square().sum(), (layer.weight, temp)))
        assert all(torch.equal(a, b) for a, b in zip(*grads))

    def test_model_with_the_backend_environment_variable(self, monkeypatch):
        """Loss, gradients and generated tokens."""
        model = randomize(ToSTForCausalLM(small_config())).eval().to(self.device)
        tokens = torch.randint(2, 97, (2, 5), device=self.device)
        mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=self.device)
        runs = []
        for backend in (self.backend, "torch"):
            monkeypatch.setenv("TOST_HF_BACKEND", backend)
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
            generated = model.generate(tokens, attention_mask=mask, max_new_tokens=2, do_sample=False)
            runs.append((loss, *torch.autograd.grad(loss, list(model.parameters())), generated))
        torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)

    def test_remote_code_beside_the_installed_package(self):
        """Each copy registers operators of its own; loading a copy again replaces only those."""
        leaves = self.make(1, 9, 2, 8)
        expected = self.run(leaves)
        for name in ["transformers_modules.org.model_hyphen_x"] * 2:
            other = load_again(name, "tssa")
            assert sys.modules[f"{name}.tssa_reference"].OPERATOR_NAMESPACE != tssa_reference.OPERATOR_NAMESPACE
            outputs = run_operator(leaves, backend=self.backend, operator=other.tssa)
            assert all(torch.equal(x, y) for x, y in zip(expected, outputs))
        assert all(torch.equal(x, y) for x, y in zip(expected, self.run(leaves)))

    @pytest.mark.parametrize("form", FORMS)
    def test_second_derivatives(self, form):
        """A gradient penalty, to which every input contributes through every output; the bias depends on w, too."""
        leaves, causal, mask = self.make_form(form, 2, 20, 2, 8), form != "bidirectional", padding_mask(20).to(self.device)
        results = []
        for run, dtype in ((self.run, torch.float32), (run_operator, torch.float64)):
            inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
            operands = inputs | ({"bias": inputs["bias"] + 0.1 * inputs["w"].sum(-1)} if causal else {})
            outputs = run(operands, mask, causal=causal)
            grads = torch.autograd.grad([x.square().sum() for x in outputs], list(inputs.values()), create_graph=True)
            penalty = sum(x.square().sum() for x in grads)
            results.append((*grads, *torch.autograd.grad(penalty, list(inputs.values()))))
        assert all(relative_rms(actual, expected) < 1e-5 for actual, expected in zip(*results))

    @pytest.mark.parametrize("form", ["causal", "bidirectional", "step"])
    def test_forward_mode(self, form):
        """The tangent equals a difference quotient in float64."""
        w, temp = torch.randn(1, 6, 2, 8, device=self.device), torch.ones(2, device=self.device)
        tangent = torch.randn_like(w)

        def run(w, backend):
            if form == "step":
                return tssa_step(w[:, 0], temp.to(w.dtype), backend=backend).output
            return tssa(w, temp.to(w.dtype), causal=form == "causal", backend=backend).output

        with torch.autograd.forward_ad.dual_level():
            output = run(torch.autograd.forward_ad.make_dual(w, tangent), self.backend)
            actual = torch.autograd.forward_ad.unpack_dual(output).tangent
        ahead, behind = (run(w.double() + step * tangent.double(), "torch") for step in (1e-5, -1e-5))
        assert relative_rms(actual, (ahead - behind) / 2e-5) < 1e-4
