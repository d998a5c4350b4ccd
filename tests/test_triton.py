"""The Triton kernels against the float64 operator, in Triton's interpreter or on a GPU.

The interpreter must be chosen before Triton is imported. So without a GPU, `TestKernels` runs in a process of its own, which
`test_kernels_in_the_interpreter` starts; `TRITON_INTERPRET=1 pytest tests/test_triton.py` does the same by hand.
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

import pytest
import torch
from transformers.dynamic_module_utils import get_imports

from tost_hf import TSSAState, tssa, tssa_step
from tost_hf.model import tssa_triton
from tost_hf.model.tssa_state import state_dtypes


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import kernel_cases
from kernel_cases import run_exact, run_kernels


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_triton = pytest.mark.skipif(not tssa_triton.is_available(), reason="Triton is not installed")

if INTERPRETED and tssa_triton.is_available():
    kernel_cases.quicken_interpreter()


def load_again(package: str):
    """The module a second time, as remote code loads it: in another package, beside the installed one."""
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(Path(tssa_triton.__file__).parent)]
    return importlib.import_module(f"{package}.tssa_triton")


def relative_rms(x, y):
    """0 where both are 0."""
    x, y = x.double(), y.double()
    error, size = (x - y).square().mean().sqrt().item(), y.square().mean().sqrt().item()
    return 0.0 if error == size == 0 else error / max(size, 1e-300)


make = functools.partial(kernel_cases.make, device=DEVICE)


def check(leaves, mask=None, seq_idx=None, causal=True, positions=None, poison=None):
    """Every output and every gradient, through every output, against the float64 formulas."""
    mask, seq_idx, positions = (None if x is None else x.to(DEVICE) for x in (mask, seq_idx, positions))
    case = {"mask": mask, "seq_idx": seq_idx, "causal": causal, "positions": positions}
    given = dict(leaves)
    if poison is not None:
        for name in given.keys() & {"w", "log_decay"}:
            padding = ~mask.view(*mask.shape, *[1] * (given[name].ndim - 2))
            given[name] = given[name].detach().masked_fill(padding, poison).requires_grad_()
    got = run_kernels(given, **case)
    assert [x.dtype for x in got] == [leaves["w"].dtype, torch.float32, *state_dtypes(leaves["w"])][: len(got)]
    grads = [torch.randn_like(x) for x in got]
    passed = grads if poison is None else [grads[0].masked_fill(~mask[..., None, None], poison), *grads[1:]]
    got = [*got, *torch.autograd.grad(got, list(given.values()), passed)]
    found = kernel_cases.errors(got, leaves, grads, **case)
    assert not kernel_cases.wrong(found), found


def padding_mask(T):
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : T // 3] = False  # left
    mask[1, T - T // 4 :] = False  # right
    return mask


def packed(rows):
    return torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows])


SIZES = [(1, 8, 65), (20, 8, 1), (3, 16, 64), (1, 40, 63), (8, 48, 15), (12, 64, 33), (3, 128, 15)]
GRID = list(itertools.product((1, 3, 8, 12, 20), (8, 16, 40, 48, 64, 128), (1, 15, 63, 64, 65, 1000, 4097)))
SIZES = [pytest.param(*size, marks=pytest.mark.slow) for size in GRID] if ON_GPU else SIZES


@needs_triton
class TestKernels:
    __test__ = INTERPRETED or ON_GPU

    @pytest.fixture(autouse=True)
    def poisoned_buffers(self, monkeypatch):
        """A number that a kernel fails to write is NaN, not what an earlier tensor left there."""

        def poisoned(create):
            def wrapped(*args, **kwargs):
                x = create(*args, **kwargs)
                return x.fill_(float("nan")) if x.is_floating_point() else x

            return wrapped

        monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
        monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("H, p, T", SIZES)
    def test_sizes(self, H, p, T, causal):
        check(make(2, T, H, p, causal=causal), causal=causal)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_low_precision(self, dtype, causal):
        check(make(2, 65, 3, 16, dtype, causal), causal=causal)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_padding_on_both_sides(self, causal, poison):
        check(make(2, 70, 3, 16, causal=causal), padding_mask(70), causal=causal, poison=poison)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("masked", [False, True])
    def test_packed_rows(self, causal, masked):
        """Other borders in each row, one-token sequences, a sequence of several chunks, a fully padded sequence."""
        seq_idx = packed([(5, 1, 1, 84, 9), (33, 66, 1)])
        mask = torch.ones(2, 100, dtype=torch.bool)
        mask[0, 2:4] = mask[0, 5] = mask[0, 60] = mask[1, :3] = mask[1, 97:] = False
        check(make(2, 100, 2, 40, causal=causal), mask if masked else None, seq_idx, causal)

    @pytest.mark.parametrize("causal", [True, False])
    def test_packed_rows_are_the_sequences_alone(self, causal):
        """To the last bit in the interpreter, where a sequence alone is not another kernel."""
        close = {"rtol": 0, "atol": 0} if INTERPRETED else {"rtol": 1e-5, "atol": 1e-6}
        leaves = make(1, 75, 2, 40, causal=causal, state=False)
        out = run_kernels(leaves, seq_idx=packed([(5, 1, 69)]).to(DEVICE), causal=causal)
        for start, stop in ((0, 5), (5, 6), (6, 75)):
            alone = {name: x if name == "temp" else x[:, start:stop] for name, x in leaves.items()}
            alone = run_kernels(alone, causal=causal)
            torch.testing.assert_close([x[:, start:stop] for x in out[:2]], list(alone[:2]), **close)
        torch.testing.assert_close(out[2:], alone[2:], **close)

    @pytest.mark.parametrize("causal, decay", [(True, None), (True, (1e-3, 1.0)), (False, None)])
    def test_nan_and_inf_stay_in_their_packed_sequence(self, causal, decay):
        """And behind the token itself in the causal form: outputs and gradients elsewhere keep their last bit."""
        leaves = make(2, 90, 2, 8, causal=causal, decay=decay)
        seq_idx = packed([(5, 70, 15), (33, 1, 56)]).to(DEVICE)
        affected = torch.zeros(2, 90, dtype=torch.bool, device=DEVICE)
        affected[0, 5:75] = affected[1, 33] = True
        later = affected & ((torch.arange(90, device=DEVICE) >= 50) | (not causal))
        later[1, 33] = True
        w = leaves["w"].detach().clone()
        w[0, 50], w[1, 33] = float("nan"), float("inf")
        runs = []
        for given in (leaves, leaves | {"w": w.requires_grad_()}):
            out = run_kernels(given, seq_idx=seq_idx, causal=causal)
            wanted = [x for name, x in given.items() if name != "temp"]
            grads = torch.autograd.grad(out[0], wanted, torch.ones_like(out[0]), allow_unused=True)
            runs.append((out[:2], (*out[2:], *grads)))
        for x, y in zip(*(outputs for outputs, _ in runs)):
            assert torch.equal(x[~later], y[~later])
            assert not y[later].isfinite().all()
        for x, y in zip(*(others for _, others in runs)):
            is_of_tokens = x.shape[:2] == (2, 90)
            assert torch.equal(x[~affected], y[~affected]) if is_of_tokens else torch.equal(x, y)

    def test_packing_is_read_once_and_again_after_a_change(self, monkeypatch):
        calls, layout = [], tssa_triton._packed_layout
        monkeypatch.setattr(tssa_triton, "_packed_layout", lambda *args: calls.append(1) or layout(*args))
        leaves = make(1, 9, 1, 8)
        seq_idx = packed([(4, 5)]).to(DEVICE)
        first = run_kernels(leaves, seq_idx=seq_idx)
        first[0].sum().backward()
        run_kernels(leaves, seq_idx=seq_idx)
        assert len(calls) == 1
        seq_idx[0, 4] = 0
        assert not torch.equal(run_kernels(leaves, seq_idx=seq_idx)[0], first[0])
        assert len(calls) == 2
        with torch.inference_mode():  # no trace of changes there
            other = seq_idx.clone()
            run_kernels(leaves, seq_idx=other)
            run_kernels(leaves, seq_idx=other)
        assert len(calls) == 4

    @pytest.mark.parametrize("tile, warps", [(2, 1), (8, 4)])
    def test_sizes_of_another_gpu(self, tile, warps, monkeypatch):
        name = torch.cuda.get_device_name() if ON_GPU else "cpu"
        kernels = ("totals", "membership", "output", "moment_grad", "score_grad", "input_grad")
        sizes = {f"_{kernel}_kernel": tssa_triton.Sizes(tile, warps) for kernel in kernels}
        monkeypatch.setitem(tssa_triton.TUNED, name, sizes)
        check(make(1, 21, 3, 16))

    def test_more_chunks_than_a_block_of_the_scan(self):
        check(make(1, 16 * 64 + 17, 1, 128))

    @pytest.mark.parametrize("causal", [True, False])
    def test_floors(self, causal):
        """Zero tokens, tokens and a channel too small to count, a zero channel: no gradient passes an active floor."""
        leaves = make(1, 40, 2, 8, causal=causal, state=False)
        with torch.no_grad():
            w = leaves["w"]
            w[:, :3] = 0
            w[:, 3:5] *= 1e-7
            w[..., 0, 0] = 0
            w[..., 1, 1] *= 1e-8 if causal else 1e-14
        check(leaves, causal=causal)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("B, T", [(0, 5), (2, 0)])
    def test_no_tokens(self, causal, B, T):
        leaves = make(B, T, 3, 8, causal=causal)
        out = run_kernels(leaves, torch.ones(B, T, dtype=torch.bool, device=DEVICE), causal=causal)
        assert out[0].shape == (B, T, 3, 8)
        assert out[1].shape == (B, T, 3)
        grads = torch.autograd.grad([x.sum() for x in out], list(leaves.values()), allow_unused=True)
        assert all(x.shape == y.shape for x, y in zip(grads, leaves.values()))
        assert (grads[1] == 0).all()
        if causal:  # the state passes through, and so does its gradient
            assert all(torch.equal(x, leaves[name]) for x, name in zip(out[2:], list(leaves)[3:]))
            assert all((x == 1).all() for x in grads[3:])

    def test_shared_bias_and_strided_tokens(self):
        leaves = make(2, 20, 3, 8, bias_rows=1)
        strided = leaves["w"].detach().transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()
        check(leaves | {"w": strided.requires_grad_()})

    @pytest.mark.parametrize("kind", ["shared", "padded", "packed"])
    def test_bias_by_position(self, kind):
        """Read where a token's position is, with a gradient for every position, those that no token has as well."""
        leaves, mask, seq_idx = make(2, 70, 3, 16, positions=90), None, None
        positions = torch.arange(10, 80).expand(2, 70)
        if kind == "padded":
            mask = padding_mask(70)
            positions = (mask.long().cumsum(-1) - 1).clamp_min(0).int()
        elif kind == "packed":
            seq_idx = packed([(5, 1, 64), (33, 37)])
            positions = torch.cat([torch.arange(n) for n in (5, 1, 64, 33, 37)]).view(2, 70)
        check(leaves, mask, seq_idx, positions=positions)

    def test_tokens_are_sorted_by_position_once(self, monkeypatch):
        calls, sort = [], tssa_triton._tokens_by_row
        monkeypatch.setattr(tssa_triton, "_tokens_by_row", lambda *args: calls.append(1) or sort(*args))
        leaves = make(2, 9, 2, 8, positions=9)
        positions, mask = torch.arange(9, device=DEVICE).expand(2, 9), padding_mask(9).to(DEVICE)

        def backward(mask):
            return torch.autograd.grad(run_kernels(leaves, mask, positions=positions)[0].square().sum(), leaves["bias"])[0]

        first = backward(mask)
        assert torch.equal(backward(mask), first)
        assert len(calls) == 1
        mask[1] = True
        assert not torch.equal(backward(mask), first)
        backward(mask.clone())
        assert len(calls) == 3

    def test_positions_without_a_row_are_no_numbers(self):
        leaves = {name: x.detach() for name, x in make(1, 5, 2, 8, positions=4).items()}
        positions = torch.tensor([[0, 3, 4, -1, 2]], device=DEVICE)
        membership = run_kernels(leaves, positions=positions)[1]
        assert membership.isnan().any(-1).tolist() == [[False, False, True, True, False]]
        state = [leaves[name] for name in TSSAState._fields]
        for t in range(5):
            step = [x.clone() for x in state]
            now = leaves["w"][:, t], leaves["temp"], leaves["bias"], None, *step, None, positions[:, t]
            assert tssa_triton.tssa_step_triton(*now)[1].isnan().any().item() is (t in (2, 3))

    def test_loss_on_the_state_alone(self):
        leaves = make(1, 20, 2, 8)
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        got = torch.autograd.grad(run_kernels(leaves)[3].square().sum(), list(leaves.values()))
        want = torch.autograd.grad(run_exact(exact)[3].square().sum(), list(exact.values()), allow_unused=True)
        for x, y in zip(got, want):
            assert relative_rms(x, torch.zeros_like(x) if y is None else y) < 1e-5

    @pytest.mark.parametrize("causal", [True, False])
    def test_two_runs_are_equal_bit_for_bit(self, causal):
        leaves = make(2, 70, 3, 16, torch.bfloat16, causal)
        runs = []
        for _ in range(2):
            out = run_kernels(leaves, causal=causal)
            runs.append((*out, *torch.autograd.grad([x.float().square().sum() for x in out], list(leaves.values()))))
        assert all(torch.equal(x, y) for x, y in zip(*runs))

    def test_outputs_do_not_depend_on_later_tokens_bit_for_bit(self):
        leaves = make(1, 75, 2, 40)
        whole = run_kernels(leaves)[:2]
        for stop in (1, 31, 32, 33, 64, 74):
            prefix = {name: x[:, :stop] if name in ("w", "bias") else x for name, x in leaves.items()}
            assert all(torch.equal(x, y[:, :stop]) for x, y in zip(run_kernels(prefix), whole))

    @pytest.mark.parametrize("H, p", [(1, 8), (3, 40)])
    @pytest.mark.parametrize("bias_rows", [1, 2, None])
    def test_steps_are_the_whole_and_update_in_place(self, H, p, bias_rows):
        leaves = {k: x.detach() for k, x in make(2, 10, H, p, bias_rows=bias_rows or 2).items()}
        if bias_rows is None:
            del leaves["bias"]
        mask = padding_mask(10).to(DEVICE) if bias_rows == 2 else None
        output, membership, *final = run_kernels(leaves, mask)
        state = [leaves[name].to(x.dtype, copy=True) for name, x in zip(TSSAState._fields, final)]
        places = [x.data_ptr() for x in state]
        for t in range(10):
            bias, step_mask = (None if x is None else x[:, t] for x in (leaves.get("bias"), mask))
            o, m = tssa_triton.tssa_step_triton(leaves["w"][:, t], leaves["temp"], bias, step_mask, *state)
            torch.testing.assert_close([o, m], [output[:, t], membership[:, t]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-6)
        assert places == [x.data_ptr() for x in state]

    def test_no_gradient_is_silently_lost(self):
        """A step, and second derivatives, refuse the backward they do not have."""
        leaves = make(1, 5, 2, 8)
        state = [leaves[name].detach().clone() for name in ("sum_sq", "sum_weighted_sq", "sum_membership")]
        out, _ = tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, *state)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            out.sum().backward()
        (grad,) = torch.autograd.grad(run_kernels(leaves)[0].square().sum(), leaves["w"], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            grad.sum().backward()

    def test_steps_of_the_operator_keep_float64_sums(self):
        """As `tssa_step` calls it: two of the sums are float64, and the ones that are passed in stay as they are."""
        leaves = make(2, 6, 3, 8)
        w, temp, bias = (leaves[name].detach() for name in ("w", "temp", "bias"))
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]], device=DEVICE)
        state = None
        expected = tssa(w.double(), temp.double(), bias.double(), mask=mask, backend="reference")
        for t in range(6):
            before = None if state is None else [x.clone() for x in state]
            step = tssa_step(w[:, t], temp, bias[:, t], state, mask=mask[:, t], backend="triton")
            assert before is None or all(torch.equal(x, y) for x, y in zip(before, state))
            torch.testing.assert_close(step.output.double(), expected.output[:, t], atol=1e-6, rtol=1e-5)
            state = step.final_state
        assert [x.dtype for x in state] == [torch.float32, torch.float64, torch.float64]
        for got, wanted in zip(state, expected.final_state):
            torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-6)

    def test_temp_may_be_a_view(self):
        """A column of a table, and one number for all heads."""
        leaves = {k: x.detach() for k, x in make(1, 9, 4, 8).items()}
        for temp in (torch.rand(4, 3, device=DEVICE)[:, 1], torch.full((1,), 0.7, device=DEVICE).expand(4)):
            got = tssa_triton.tssa_triton(leaves["w"], temp, None, None, None, None, True)[0]
            wanted = tssa_triton.tssa_triton(leaves["w"], temp.clone().contiguous(), None, None, None, None, True)[0]
            assert torch.equal(got, wanted)
            state = [leaves[name].clone() for name in ("sum_sq", "sum_weighted_sq", "sum_membership")]
            other = [x.clone() for x in state]
            got = tssa_triton.tssa_step_triton(leaves["w"][:, 0], temp, None, None, *state)[0]
            assert torch.equal(got, tssa_triton.tssa_step_triton(leaves["w"][:, 0], temp.contiguous(), None, None, *other)[0])

    def test_step_refuses_sums_it_cannot_update(self):
        leaves = {k: x.detach() for k, x in make(1, 1, 2, 8).items()}
        state = [leaves[name] for name in ("sum_sq", "sum_weighted_sq", "sum_membership")]
        for wrong in (state[0].half(), state[0].transpose(1, 2).contiguous().transpose(1, 2)):
            with pytest.raises(ValueError, match="float64 and contiguous"):
                tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, wrong, *state[1:])

    @pytest.mark.parametrize("causal, is_packed", [(True, True), (False, False)])
    def test_compiles_whole(self, causal, is_packed):
        torch._dynamo.reset()
        leaves = make(2, 20, 2, 8, causal=causal)
        seq_idx = packed([(5, 15), (19, 1)]).to(DEVICE) if is_packed else None
        mask = padding_mask(20).to(DEVICE)

        def run(leaves):
            return run_kernels(leaves, mask, seq_idx, causal)

        outs = [run(leaves), torch.compile(run, backend="aot_eager", fullgraph=True)(leaves)]
        grads = [torch.autograd.grad([x.square().sum() for x in out], list(leaves.values())) for out in outs]
        assert all(torch.equal(x, y) for x, y in zip(*outs))
        assert all(torch.equal(x, y) for x, y in zip(*grads))

    def test_step_compiles_whole(self):
        torch._dynamo.reset()
        leaves = {k: x.detach() for k, x in make(2, 1, 2, 8).items()}
        states = [[leaves[n].clone() for n in ("sum_sq", "sum_weighted_sq", "sum_membership")] for _ in range(2)]

        def step(state):
            return tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], leaves["bias"][:, 0], None, *state)

        outs = [step(states[0]), torch.compile(step, backend="aot_eager", fullgraph=True)(states[1])]
        assert all(torch.equal(x, y) for x, y in zip((*outs[0], *states[0]), (*outs[1], *states[1])))

    def test_exports_with_any_number_of_tokens(self):
        class Layer(torch.nn.Module):
            def forward(self, w, temp):
                return tssa_triton.tssa_triton(w, temp, None, None, None, None, True)[0]

        w, temp = (x.detach() for x in make(1, 20, 2, 8, state=False).values() if x.ndim != 3)
        program = torch.export.export(Layer(), (w, temp), dynamic_shapes=({1: torch.export.Dim("T", min=2)}, None))
        longer = torch.randn(1, 70, 2, 8, device=DEVICE)
        assert torch.equal(program.module()(longer, temp), Layer()(longer, temp))

    def test_operators_keep_their_contracts(self):
        """Schema, fake kernels and autograd registration, as torch checks them."""
        leaves = make(2, 12, 2, 8)
        mask = padding_mask(12).to(DEVICE)
        for seq_idx in (None, packed([(5, 7), (11, 1)]).to(DEVICE)):
            w, temp, bias, *state = leaves.values()
            args = (w, temp, bias.flatten(0, 1), None, mask, seq_idx, *state, None, True)
            torch.library.opcheck(tssa_triton._forward, args)
        torch.library.opcheck(tssa_triton._forward, (leaves["w"], leaves["temp"], *[None] * 8, False))

    def test_checkpointing_and_autocast(self):
        layer = torch.nn.Linear(16, 16).to(DEVICE)
        temp = torch.ones(2, device=DEVICE, requires_grad=True)

        def run(x):
            return tssa_triton.tssa_triton(layer(x).view(1, 20, 2, 8), temp, None, None, None, None, True)[0]

        x = torch.randn(1, 20, 16, device=DEVICE)
        grads = []
        for call in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
            with torch.autocast(DEVICE, torch.bfloat16):
                out = call(x)
            assert out.dtype == torch.bfloat16
            grads.append(torch.autograd.grad(out.float().square().sum(), (layer.weight, temp)))
        assert all(torch.equal(a, b) for a, b in zip(*grads))

    def test_remote_code_beside_the_installed_package(self):
        """Each copy has its own operators; loading one again replaces only its own."""
        leaves = make(1, 9, 2, 8)
        out = run_kernels(leaves)
        for name in ("transformers_modules.org.model_hyphen_x", "tssa_kernel", "tssa_kernel"):
            other = load_again(name)
            assert other._forward._qualname != tssa_triton._forward._qualname
            assert all(torch.equal(x, y) for x, y in zip(out, run_kernels(leaves, module=other)))
        assert all(torch.equal(x, y) for x, y in zip(out, run_kernels(leaves)))


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="TestKernels runs in this process")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "TestKernels"]
    command += [str(Path(__file__).with_name(f"test_triton{part}.py")) for part in ("", "_forgetting", "_check")]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


class Counted:
    """Stands before a kernel, notes that it would be launched, and launches nothing."""

    def __init__(self, kernel, launched):
        self.fn, self.launched = kernel.fn, launched

    def __getitem__(self, grid):
        return lambda *args, **sizes: self.launched.append(self.fn.__name__)


@needs_triton
def test_launches_of_a_training_step(monkeypatch):
    """Six kernels backward, five forward, and nothing around them: no copies, casts, sums or look-ups by PyTorch."""
    launched = []
    for name in [name for name in dir(tssa_triton) if name.endswith("_kernel")]:
        monkeypatch.setattr(tssa_triton, name, Counted(getattr(tssa_triton, name), launched))
    w, temp = torch.zeros(2, 70, 3, 16, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, requires_grad=True)
    table = torch.zeros(3, 90, 1, requires_grad=True)  # as a layer has it
    positions = torch.arange(70).expand(2, 70)
    grad, ops = torch.zeros(2, 70, 3, 16, dtype=torch.bfloat16), set()
    for _ in range(2):  # the first finds what layers share
        launched.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            bias = table.squeeze(-1).t()
            out = tssa_triton.tssa_triton(w, temp, bias, None, None, None, True, None, positions)
            found = torch.autograd.grad(out[0], (w, temp, table), grad)
        ops = {event.name for event in profile.events()}
    assert [x.shape for x in found] == [w.shape, temp.shape, table.shape]
    assert len(launched) == 11
    assert launched.count("_scan_kernel") == 4
    assert not ops & {f"aten::{name}" for name in ("copy_", "sum", "mul_", "mul", "index_select", "zero_", "fill_", "sort")}
    assert "aten::empty_like" in ops


def test_loads_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    module = load_again("without_triton")
    assert not module.is_available()
    assert not module.supports(torch.zeros(1))
    assert "triton" not in get_imports(tssa_triton.__file__)  # transformers asks nobody to install it
    assert "from .tssa import" not in Path(tssa_triton.__file__).read_text()  # tssa.py imports this file


@needs_triton
def test_what_is_supported():
    assert tssa_triton.supports(torch.zeros(1, device=DEVICE)) is (INTERPRETED or ON_GPU)
    assert not tssa_triton.supports(torch.zeros(1, device=DEVICE, dtype=torch.float64))
