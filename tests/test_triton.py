# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels against the float64 reference, in Triton's interpreter or on a GPU.

The interpreter has to be selected before Triton is imported. So without a GPU, `test_kernels_in_the_interpreter` runs
`TestKernels` in a subprocess; `TRITON_INTERPRET=1 pytest tests/test_triton.py` does the same.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import FORMS, WIDE, KernelTests, load_again, make, padding_mask
from transformers.dynamic_module_utils import get_imports

from tost_hf import TSSAState
from tost_hf.model import tssa_triton


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_triton = pytest.mark.skipif(tssa_triton.triton is None, reason="Triton is not installed")


def patch_interpreter_for_speed() -> None:
    """Replaces the slowest functions of Triton's interpreter; to be called once in a process that runs it."""
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton patches its language at each call of a device function; once is enough
    for kernel in (tssa_triton.chunk_fwd_output_kernel, tl.sum):
        interpreter._patch_lang(kernel.fn)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.ScanOps.generic_scan = _scan_first_axis


def _scan_first_axis(self, inputs):
    """A scan along the first axis, vectorized over the others; the interpreter's works element by element."""
    outputs, as_arrays = [x.handle.data.copy() for x in inputs], "_scan_combine" not in self.combine_fn.fn.__name__
    for i in range(1, len(outputs[0])):
        pair = [x[j] for j in (i - 1, i) for x in outputs]
        if not as_arrays:  # it calls Triton functions, beyond sums and products
            pair = [self.to_tensor(x, y.dtype) for x, y in zip(pair, [*inputs, *inputs])]
        for x, combined in zip(outputs, self.combine_fn.fn(*pair)):
            x[i] = combined if as_arrays else combined.handle.data.reshape(x[i].shape)
    return [self.to_tensor(x, y.dtype) for x, y in zip(outputs, inputs)]


if INTERPRETED and tssa_triton.triton is not None:
    patch_interpreter_for_speed()


SIZES = [  # H and p that are no powers of two, two heads per program, incomplete tiles and chunks
    *(("causal", *size) for size in ((20, 8, 1), (3, 40, 64), (3, 128, 9))),
    *(("bidirectional", *size) for size in ((8, 48, 15), (1, 8, 65))),
    *(("decay", *size) for size in ((1, 40, 65), (12, 64, 5))),
]
GRID = list(itertools.product(FORMS, (1, 3, 8, 12, 20), (8, 16, 40, 48, 64, 128), (1, 15, 63, 64, 65, 1000, 4097)))
SIZES = [pytest.param(*size, marks=pytest.mark.slow) for size in GRID] if ON_GPU else SIZES


@needs_triton
class TestKernels(KernelTests):
    __test__ = INTERPRETED or ON_GPU
    backend, device = "triton", DEVICE

    @pytest.fixture(autouse=True)
    def no_self_check(self, monkeypatch):
        monkeypatch.setattr(tssa_triton, "_run_check", lambda *args: None)
        monkeypatch.setattr(tssa_triton, "_check_results", {})

    @pytest.mark.parametrize("form, H, p, T", SIZES)
    def test_sizes(self, form, H, p, T):
        self.check(self.make_form(form, 2, T, H, p), causal=form != "bidirectional")

    @pytest.mark.parametrize("decay", [None, (1e-5, 1.1e-5)], ids=str)
    def test_scan_of_several_blocks_of_chunks(self, decay, monkeypatch):
        monkeypatch.setattr(tssa_triton, "SCAN_CHUNKS", 2)
        self.check(self.make(1, 2 * 64 + 5, 1, 8, decay=decay))

    def test_decay_close_to_1_is_not_rounded_at_each_step(self):
        log_decay = torch.tensor([-1e-5, -1e-4, -0.03], device=DEVICE)
        state = [torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, 8, device=DEVICE), torch.ones(1, 3, device=DEVICE)]
        w, temp, mask = torch.zeros(1, 3, 8, device=DEVICE), torch.ones(3, device=DEVICE), torch.ones(1, device=DEVICE)
        for _ in range(200):
            tssa_triton.tssa_step_triton(w, temp, None, mask, log_decay[None], *state)
        expected = (200 * log_decay.double()).exp()
        torch.testing.assert_close(state[0][0, :, 0].double(), expected, rtol=3e-6, atol=0)

    def test_steps_have_no_backward(self):
        leaves = self.make(1, 5, 2, 8)
        state = [leaves[name].detach().clone() for name in TSSAState._fields]
        out, _ = tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, None, *state)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            out.sum().backward()

    def test_step_rejects_noncontiguous_sums(self):
        leaves = {k: x.detach() for k, x in self.make(1, 1, 2, 8).items()}
        state = [leaves[name] for name in TSSAState._fields]
        noncontiguous = state[0].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match="must be contiguous"):
            tssa_triton.tssa_step_triton(leaves["w"][:, 0], leaves["temp"], None, None, None, noncontiguous, *state[1:])

    def test_operators_pass_opcheck(self):
        """Schema, fake kernels and autograd registration."""
        leaves = self.make(2, 3, 2, 8, decay=WIDE)
        mask = padding_mask(3).to(DEVICE)
        w, temp, bias, *state, decay = leaves.values()
        initial = torch.rand(2, 2 * 16 + 2, device=DEVICE, requires_grad=True)
        torch.library.opcheck(tssa_triton._forward, (w, temp, bias, mask, decay, initial, True))
        torch.library.opcheck(tssa_triton._forward, (w, temp, *[None] * 4, False))
        step = [x.detach() for x in (w[:, 0], temp, bias[:, 0], mask[:, 0], decay[:, 0], *state)]
        torch.library.opcheck(tssa_triton.tssa_step_triton, tuple(step))


FAST = "test_padding and (decay or bidirectional) or test_low_precision and causal"


@needs_triton
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="TestKernels runs in this process")
@pytest.mark.parametrize("tests", [FAST, pytest.param("TestKernels", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(tests):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"TestKernels and ({tests})"]
    command += [str(Path(__file__).with_name(name)) for name in ("test_triton.py", "test_triton_check.py")]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout)


class CompiledForGPU:
    """Compiles a kernel for an NVIDIA GPU of compute capability 9.0, which need not be there, in place of launching it."""

    def __init__(self, kernel, compiled: list[str]):
        self.kernel, self.fn, self.compiled = kernel, kernel.fn, compiled

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, num_warps=4, **sizes):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        values = dict(zip(self.kernel.arg_names, args)) | sizes
        constants = {p.name for p in self.kernel.params if p.is_constexpr} | {name for name, x in values.items() if x is None}
        signature = {name: "constexpr" if name in constants else mangle_type(values[name]) for name in self.kernel.arg_names}
        constexprs = {(i,): values[name] for i, name in enumerate(self.kernel.arg_names) if name in constants}
        source = ASTSource(self.kernel, signature, constexprs, {})
        tssa_triton.triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        self.compiled.append(self.fn.__name__)


@needs_triton
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the interpreter compiles nothing; on a GPU the kernels run")
@pytest.mark.parametrize("with_options", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu(with_options, monkeypatch, tmp_path):
    """The bidirectional form without optional arguments, the causal form with all of them, and the step."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names, compiled = [name for name in vars(tssa_triton) if name.endswith("_kernel")], []
    for name in names:
        monkeypatch.setattr(tssa_triton, name, CompiledForGPU(getattr(tssa_triton, name), compiled))
    w, temp, bias, *state, log_decay = (x.detach() for x in make(2, 70, 3, 8, torch.bfloat16, decay=WIDE).values())
    mask, initial = padding_mask(70), torch.rand(2, 2 * 3 * 8 + 3)
    options = [bias, mask, log_decay, initial] if with_options else [None] * 4
    _, membership, final_state, carries = tssa_triton._forward(w, temp, *options, with_options)
    grads = w, *((membership, final_state) if with_options else (None, None))
    tssa_triton._backward(*grads, w, temp, *options, membership, carries, with_options, with_options)
    step_options = [x[:, 0] if with_options else x for x in options[:3]]
    tssa_triton.tssa_step_triton(w[:, 0], temp, *step_options, *state)
    assert sorted(set(compiled)) == sorted(names)


def test_loads_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    module = load_again("without_triton", "tssa_triton")
    assert "Triton is not installed" in module.find_problem(torch.device("cuda"), torch.float32, 3, 8, "causal")
    assert "triton" not in get_imports(tssa_triton.__file__)  # else transformers would require it for remote code
    assert "from .tssa import" not in Path(tssa_triton.__file__).read_text()  # tssa.py imports this file


@needs_triton
def test_unsupported_devices_and_dtypes():
    for dtype in (torch.float64,) if INTERPRETED or ON_GPU else (torch.float64, torch.float32):
        assert f"do not support {dtype} tokens" in tssa_triton.find_problem(torch.device(DEVICE), dtype, 3, 8, "causal")
