"""The choice of the backend of TSSA by argument, environment variable, device and dtype."""

import re
import runpy
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from kernel_cases import load_again, padding_mask
from test_tssa import make
from transformers.dynamic_module_utils import get_imports

from tost_hf import TokenStatisticsSelfAttention, ToSTCache, ToSTConfig, TSSAState, tssa, tssa_step
from tost_hf.model import tssa_cpu
from tost_hf.model.tssa import _find_kernels, _warn_of_fallback


def count_warnings(warnings, text):
    """Of a test's own warnings: collecting the garbage of earlier tests can warn of files that those left open."""
    return sum(text in str(warning.message) for warning in warnings)


@pytest.fixture
def fake_kernels(monkeypatch):
    """A fake tssa_triton.py that computes with PyTorch and records its calls."""
    fake = types.ModuleType("tost_hf.model.tssa_triton")
    fake.calls, fake.problem = [], None

    def run(w, temp, bias, mask, log_decay, state, causal):
        fake.calls.append("tssa")
        options = {"mask": mask, "initial_state": state, "log_decay": log_decay}
        out = tssa(w, temp, bias, causal=causal, backend="torch", **options)
        return out.output, out.membership.transpose(1, 2), out.final_state

    def run_step(w, temp, bias, mask, log_decay, *state):
        fake.calls.append("step")
        out = tssa_step(w, temp, bias, initial_state=TSSAState(*state), mask=mask, log_decay=log_decay, backend="torch")
        for old, new in zip(state, out.final_state):
            old.copy_(new)
        return out.output, out.membership

    fake.tssa_triton, fake.tssa_step_triton = run, run_step
    fake.find_problem = lambda *args: fake.problem  # that of the kernels is tested in test_triton_check.py
    monkeypatch.setitem(sys.modules, "tost_hf.model.tssa_triton", fake)
    monkeypatch.delenv("TOST_HF_BACKEND", raising=False)
    return fake


@torch.no_grad()
def test_backend_by_argument_and_environment(fake_kernels, monkeypatch):
    w, temp, bias = make(dtype=torch.float32)
    mask = padding_mask(70)
    expected = tssa(w, temp, bias, mask=mask, backend="torch")
    state = TSSAState(*(x.clone() for x in expected.final_state))
    expected_step = tssa_step(w[:, 0], temp, bias[0], mask=mask[:, 0], initial_state=state, backend="torch")
    tssa(w, temp, bias, mask=mask)
    assert fake_kernels.calls == []  # auto is numba on the CPU
    torch.testing.assert_close(tssa(w, temp, bias, mask=mask, backend="triton"), expected)
    torch.testing.assert_close(tssa(w, temp, causal=False, backend="triton"), tssa(w, temp, causal=False, backend="torch"))
    actual_step = tssa_step(w[:, 0], temp, bias[0], mask=mask[:, 0], initial_state=state, backend="triton")
    torch.testing.assert_close(actual_step, expected_step)
    torch.testing.assert_close(state, expected.final_state, rtol=0, atol=0)  # the caller's state is not modified
    assert fake_kernels.calls == ["tssa", "tssa", "step"]

    monkeypatch.setenv("TOST_HF_BACKEND", "triton")
    tssa(w, temp, bias)
    tssa_step(w[:, 0], temp, bias[0])
    assert len(fake_kernels.calls) == 5
    tssa(w, temp, bias, backend="torch")  # the argument takes precedence
    tssa(w, temp, bias, backend="auto")
    assert len(fake_kernels.calls) == 5


def test_backend_of_the_layer(fake_kernels):
    layer = TokenStatisticsSelfAttention(32, 4, causal=True, layer_idx=0, backend="triton")
    cache = ToSTCache(ToSTConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=32))
    with torch.no_grad():
        layer(torch.randn(2, 5, 32), past_key_values=cache)
        layer(torch.randn(2, 1, 32), past_key_values=cache)
    assert fake_kernels.calls == ["tssa", "step"]
    layer(torch.randn(2, 1, 32), past_key_values=cache)[0].sum().backward()  # the step kernel has no gradient
    assert fake_kernels.calls == ["tssa", "step", "tssa"] and layer.temp.grad is not None


def test_unavailable_backends(fake_kernels, monkeypatch):
    w, temp, bias = make(dtype=torch.float32)
    with pytest.raises(ValueError, match="cuda"):
        tssa(w, temp, bias, backend="cuda")
    cuda, shape = torch.device("cuda"), (3, 5, "causal", False, False)
    assert _find_kernels("auto", cuda, torch.float64, *shape) is None
    assert _find_kernels("auto", cuda, torch.float32, *shape) == "triton"
    fake_kernels.problem = "Triton is not installed"
    with pytest.raises(ValueError, match="Triton"):
        tssa_step(w[:, 0], temp, backend="triton")
    _warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match="Triton"):
        assert _find_kernels("auto", cuda, torch.float32, *shape) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once per process
        assert _find_kernels("auto", cuda, torch.float32, *shape) is None
        _warn_of_fallback.cache_clear()
        assert _find_kernels("torch", cuda, torch.float32, *shape) is None
    monkeypatch.setenv("TOST_HF_BACKEND", "fast")
    with pytest.raises(ValueError, match="fast"):
        tssa(w, temp, bias)


def test_without_numba(monkeypatch):
    """The reference runs, with one warning that names what to install."""
    w, temp, _ = make(dtype=torch.float32)
    monkeypatch.delenv("TOST_HF_BACKEND", raising=False)
    monkeypatch.setattr(tssa_cpu, "numba", None)
    monkeypatch.setattr(tssa_cpu, "_import_error", ImportError("No module named 'numba'"), raising=False)
    _warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match=r"No module named 'numba'.*pip install numba") as warnings:
        outputs = [tssa(w, temp), tssa(w, temp), tssa(w, temp, causal=False)]
        tssa_step(w[:, 0], temp)
    assert count_warnings(warnings, "No module named 'numba'") == 1
    assert torch.equal(outputs[0].output, tssa(w, temp, backend="torch").output)
    with pytest.raises(ValueError, match="numba"):
        tssa(w, temp, backend="numba")
    with pytest.raises(ValueError, match=r"torch\.float64"):
        monkeypatch.undo()
        tssa(w.double(), temp.double(), backend="numba")


def test_without_compilation(monkeypatch):
    """With NUMBA_DISABLE_JIT numba would run the kernels as Python, which it cannot."""
    w, temp, _ = make(dtype=torch.float32)
    monkeypatch.delenv("TOST_HF_BACKEND", raising=False)
    monkeypatch.setattr(tssa_cpu.numba.config, "DISABLE_JIT", 1)
    _warn_of_fallback.cache_clear()
    with pytest.warns(UserWarning, match="NUMBA_DISABLE_JIT is set"):
        output = tssa(w, temp).output
    assert torch.equal(output, tssa(w, temp, backend="torch").output)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT is set"):
        tssa(w, temp, backend="numba")


def cut(file):
    file.write_bytes(file.read_bytes()[:50])


@pytest.fixture
def compile_squares(tmp_path, monkeypatch):
    """Compiles two functions of one argument, as at the start of a process; returns those and the folder of their cache."""
    (tmp_path / "squares.py").write_text("def square(x):\n    return x * x\n\ndef cube(x):\n    return x * x * x\n")
    functions = runpy.run_path(str(tmp_path / "squares.py"))

    def compile_again():
        monkeypatch.setattr(tssa_cpu._Cache, "has_warned", False)
        square, cube = (tssa_cpu._jit(functions[name]) for name in ("square", "cube"))
        return square, cube, Path(square.stats.cache_path)

    return compile_again


@pytest.mark.parametrize("files", ["*.nbi", "*.nbc", "*.nb?"])
@pytest.mark.parametrize("damage", [cut, lambda file: file.write_bytes(b"garbage\n"), lambda file: file.write_bytes(b"")])
def test_damaged_cache_of_numba(compile_squares, files, damage):
    """Functions are compiled, with one warning that names the folder."""
    square, cube, folder = compile_squares()
    assert square(3) + cube(2) == 17 and len(list(folder.glob("*.nb?"))) == 4
    for file in folder.glob(files):
        damage(file)
    square, cube, _ = compile_squares()
    with pytest.warns(UserWarning, match=re.escape(f"numba's cache in {folder} cannot be used")) as warnings:
        assert square(3) + cube(2) == 17
    assert count_warnings(warnings, "numba's cache") == 1


def test_cache_of_numba_on_a_full_disk(compile_squares):
    resource = pytest.importorskip("resource")
    square, cube, folder = compile_squares()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.warns(UserWarning, match=re.escape(str(folder))) as warnings:
            assert square(3) + cube(2) == 17
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert count_warnings(warnings, "numba's cache") == 1


def test_loads_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    module = load_again("without_numba", "tssa_cpu")
    assert "numba cannot be imported" in module.find_problem(torch.device("cpu"), torch.float32)
    assert not {"numba", "llvmlite"} & set(get_imports(tssa_cpu.__file__))  # else transformers would require them
    assert "from .tssa import" not in Path(tssa_cpu.__file__).read_text()  # tssa.py imports this file
