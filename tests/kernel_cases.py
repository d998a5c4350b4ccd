"""Inputs for the Triton kernels, and the tolerance of their results against the float64 reference, for test_triton.py.

A sum of n numbers that is rounded at each step is off by about eps sqrt(n) times their size, where results cancel as well. So
a result may differ from the float64 reference by `SLACK` eps sqrt(tokens) times the sum of two sizes: its own, and how much
it moves, in multiples of eps, where every number that goes in moves by eps. What is stored in 16 bits is rounded once more.
"""

import math

import torch

from tost_hf import TSSAState, tssa
from tost_hf.model import tssa_triton
from tost_hf.model.tssa_reference import bias_of_tokens, reset_at_starts


SLACK = 6  # rounding alone takes up to 3.1; one of 8,194 tokens that is left out, 23 and more
PERTURBED_RUNS = 4  # of which the root mean square is taken


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

    The bias has `bias_batch` batch elements, else B, or is one of `positions` positions. `decay` gives the weakest and the
    strongest -log of a factor; those of the tokens are spread evenly in log between them.
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
    bias = bias_of_tokens(bias, positions, torch.float32)
    if log_decay is not None and mask is not None:
        log_decay = log_decay.masked_fill(~mask.bool().unsqueeze(-1), 0)
    if seq_idx is not None:
        log_decay = reset_at_starts(log_decay, seq_idx, torch.float32)
    state = TSSAState(*state) if state else None
    output, membership, final = module.tssa_triton(w, temp, bias, mask, log_decay, state, causal)
    return output, membership, *(final or ())


def run_exact(leaves, mask=None, seq_idx=None, causal=True, positions=None, softmax=None):
    """As `run_kernels`, by the reference in the leaves' dtype, with another `softmax` if given."""
    state = [leaves[name] for name in TSSAState._fields if name in leaves]
    w, temp, bias, log_decay = (leaves.get(name) for name in ("w", "temp", "bias", "log_decay"))
    given = {"causal": causal, "mask": mask, "seq_idx": seq_idx, "positions": positions, "log_decay": log_decay}
    given["initial_state"] = TSSAState(*state) if state else None
    out = tssa(w, temp, bias, backend="torch", softmax=softmax, **given)
    return out.output, out.membership.transpose(1, 2), *(out.final_state or ())


def perturb(x: torch.Tensor) -> torch.Tensor:
    """Every number off by about eps."""
    return x * (1 + torch.finfo(torch.float32).eps * torch.randn(x.shape, device=x.device, dtype=torch.float64))


def perturbed_softmax(score: torch.Tensor, temp: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """As `membership_of`. Logits move apart from their sum: else gradients that cancel there would seem to be exact."""
    logits = score * temp
    membership = (perturb(logits) - logits.logsumexp(-1, keepdim=True)).exp()
    return membership if padding is None else membership.masked_fill(padding.unsqueeze(-1), 0)


def patch_interpreter_for_speed() -> None:
    """Replaces what Triton's interpreter spends most of its time on; once per process that was started with it."""
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton patches its language again at each call of a device function: here, once
    for kernel in (tssa_triton.chunk_fwd_output_kernel, tl.sum):
        interpreter._patch_lang(kernel.fn)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.ScanOps.generic_scan = _scan_first_axis


def _scan_first_axis(self, inputs):
    """A vectorised scan over the first axis; the interpreter's is elementwise."""
    outputs, as_arrays = [x.handle.data.copy() for x in inputs], "_scan_combine_log" not in self.combine_fn.fn.__name__
    for i in range(1, len(outputs[0])):
        pair = [x[j] for j in (i - 1, i) for x in outputs]
        if not as_arrays:  # a function of Triton's, not of sums and products alone
            pair = [self.to_tensor(x, y.dtype) for x, y in zip(pair, [*inputs, *inputs])]
        for x, joined in zip(outputs, self.combine_fn.fn(*pair)):
            x[i] = joined if as_arrays else joined.handle.data.reshape(x[i].shape)
    return [self.to_tensor(x, y.dtype) for x, y in zip(outputs, inputs)]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def errors(got, leaves, grads=(), **case) -> dict[str, tuple[float, float]]:
    """By name of a result, how far it is off and how far it may be, as RMS.

    Args:
        got: what the kernels compute of the `leaves` and of `case`, the other arguments of `run_exact`: their outputs and,
            with `grads`, the gradients of the leaves.
        grads: those of the outputs.
    """
    results = []
    for softmax in (None, *[perturbed_softmax] * PERTURBED_RUNS):
        change = torch.Tensor.double if softmax is None else perturb
        exact = {name: change(x.detach().double()).requires_grad_(bool(grads)) for name, x in leaves.items()}
        out = list(run_exact(exact, softmax=softmax, **case))[: len(grads) or len(got)]
        if grads:
            out += torch.autograd.grad(out, list(exact.values()), [change(x.double()) for x in grads])
        results.append([x.detach() for x in out])
    names = ["output", "membership", *TSSAState._fields][: len(grads) or len(got)]
    names += [f"gradient of {name}" for name in leaves if grads]
    found, noise, eps = {}, SLACK * math.sqrt(leaves["w"].shape[1]), torch.finfo(torch.float32).eps
    for name, x, wanted, *others in zip(names, got, *results, strict=True):
        stored = torch.finfo(x.dtype).eps if x.dtype in (torch.bfloat16, torch.float16) else 0.0
        moves = rms(torch.stack([other - wanted for other in others]))
        found[name] = rms(x.double() - wanted), noise * (eps * rms(wanted) + moves) + stored * rms(wanted)
    return found


def wrong(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The results that are off by more than they may, and those that are no numbers."""
    return {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
