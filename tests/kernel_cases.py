"""Inputs for the Triton kernels, and the tolerance of their results against the float64 reference, for test_triton.py.

A sum of n numbers that is rounded at each step has an error of about eps sqrt(n) times their magnitude, even where they
cancel. So a result may differ from the float64 reference by `SLACK` eps sqrt(tokens) times the sum of two terms: its RMS, and
its change, in units of eps, when all inputs are perturbed by eps. Results stored in 16 bits are rounded once more.
"""

import math

import torch

from tost_hf import TSSAState, tssa
from tost_hf.model import tssa_triton
from tost_hf.model.tssa_reference import reset_at_starts, select_bias


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


def run_kernels(leaves, mask=None, seq_idx=None, causal=True, positions=None, module=tssa_triton):
    """The output, the membership (B, T, H) and, in the causal form, the three sums after the last token."""
    state = [leaves[name] for name in TSSAState._fields if name in leaves]
    w, temp, bias, log_decay = (leaves.get(name) for name in ("w", "temp", "bias", "log_decay"))
    bias = select_bias(bias, positions, torch.float32)
    if log_decay is not None and mask is not None:
        log_decay = log_decay.masked_fill(~mask.bool().unsqueeze(-1), 0)
    if seq_idx is not None:
        log_decay = reset_at_starts(log_decay, seq_idx, torch.float32)
    state = TSSAState(*state) if state else None
    output, membership, final = module.tssa_triton(w, temp, bias, mask, log_decay, state, causal)
    return output, membership, *(final or ())


def run_reference(leaves, mask=None, seq_idx=None, causal=True, positions=None, softmax=None):
    """As `run_kernels`, computed by the reference in the leaves' dtype, optionally with another `softmax`."""
    state = [leaves[name] for name in TSSAState._fields if name in leaves]
    w, temp, bias, log_decay = (leaves.get(name) for name in ("w", "temp", "bias", "log_decay"))
    options = {"causal": causal, "mask": mask, "seq_idx": seq_idx, "positions": positions, "log_decay": log_decay}
    options["initial_state"] = TSSAState(*state) if state else None
    result = tssa(w, temp, bias, backend="torch", softmax=softmax, **options)
    return result.output, result.membership.transpose(1, 2), *(result.final_state or ())


def perturb(x: torch.Tensor) -> torch.Tensor:
    """Adds relative noise of about eps to every number."""
    return x * (1 + torch.finfo(torch.float32).eps * torch.randn(x.shape, device=x.device, dtype=torch.float64))


def perturbed_softmax(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """As `softmax_over_heads`. Perturbs the numerator only: otherwise gradients that cancel would appear exact."""
    logits = score * temp
    membership = (perturb(logits) - logits.logsumexp(-1, keepdim=True)).exp()
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


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
    """A scan along the first axis, vectorised over the others; the interpreter's works element by element."""
    outputs, as_arrays = [x.handle.data.copy() for x in inputs], "_scan_combine_log" not in self.combine_fn.fn.__name__
    for i in range(1, len(outputs[0])):
        pair = [x[j] for j in (i - 1, i) for x in outputs]
        if not as_arrays:  # it calls Triton functions, beyond sums and products
            pair = [self.to_tensor(x, y.dtype) for x, y in zip(pair, [*inputs, *inputs])]
        for x, combined in zip(outputs, self.combine_fn.fn(*pair)):
            x[i] = combined if as_arrays else combined.handle.data.reshape(x[i].shape)
    return [self.to_tensor(x, y.dtype) for x, y in zip(outputs, inputs)]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def compute_errors(actual, leaves, grads=(), **case) -> dict[str, tuple[float, float]]:
    """For each result its error and its tolerance, as RMS.

    Args:
        actual: the outputs of the kernels and, with `grads`, the gradients of the `leaves`. `case` are the other arguments of
            `run_reference`.
        grads: gradients of the outputs.
    """
    results = []
    for softmax in (None, *[perturbed_softmax] * PERTURBED_RUNS):
        convert = torch.Tensor.double if softmax is None else perturb
        inputs = {name: convert(x.detach().double()).requires_grad_(bool(grads)) for name, x in leaves.items()}
        outputs = list(run_reference(inputs, softmax=softmax, **case))[: len(grads) or len(actual)]
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
