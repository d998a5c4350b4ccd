# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels are looked at before they are trusted: on each device, for each shape of a token and dtype, once.

A few tokens go through the kernels and, in float64, through the formulas. What differs by more than the dtype rounds, or does
not compile, is described by a sentence, and nobody computes with it.
"""

import torch

from .tssa_reference import bidirectional, causal, zero_state


TOKENS = 70  # more than one chunk, and not a whole number of tiles
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative RMS; rounding alone is a tenth of it

_problems: dict[tuple, str | None] = {}  # what was found, for the life of the process


def kernel_problem(w: torch.Tensor, form: str, *, forgets: bool = False, gradients: bool = False) -> str | None:
    """What is wrong with the kernels for tokens like `w` (..., H, p), as the end of a sentence.

    Args:
        w: the tokens; only their device, dtype, H and p count.
        form: "bidirectional", "causal", or "step" for the step of one token.
        forgets: whether the sums forget (`log_decay`).
        gradients: whether the backward kernels are looked at as well.

    Returns:
        None where nothing is wrong, and where nobody can look: while a compiler traces, while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or type(w) is not torch.Tensor:
        return None
    key = (w.device, w.dtype, *w.shape[-2:], form, forgets, gradients)
    if key not in _problems:
        if w.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _problems[key] = _find_problem(*key)
    return _problems[key]


def _find_problem(device, dtype, H, p, form, forgets, gradients) -> str | None:
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast(device.type, enabled=False):
            errors = _errors(_tokens(device, dtype, H, p, form, forgets, gradients), form, gradients)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, a driver or a launch: whatever it raises, the formulas still run
        found = f"failed with {type(error).__name__}: {str(error)[:500]}"
    else:
        wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error < TOLERANCES[dtype]]
        if not wrong:
            return None
        found = f"differ from the formulas ({', '.join(wrong)})"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"on {place} the Triton kernels {found}. Please report this sentence to the authors of tost_hf (heads {H}, "
        f"head_dim {p}, {dtype}, {form}{', forgetting' * forgets}{', gradients' * gradients}, torch {torch.__version__})"
    )


def _tokens(device, dtype, H, p, form, forgets, gradients) -> dict[str, torch.Tensor]:
    """Random w (1, TOKENS, H, p), temp and, for the causal forms, bias and log decays. Nobody's random state moves."""
    draw = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(*shape, generator=draw)

    tokens = {"w": torch.randn(1, TOKENS, H, p, generator=draw).to(dtype), "temp": rand(H) + 0.5}
    if form != "bidirectional":
        tokens["bias"] = 0.3 * rand(1, TOKENS, H)
        if forgets:
            tokens["log_decay"] = -0.5 * rand(1, TOKENS, H)
    return {name: x.to(device).requires_grad_(gradients) for name, x in tokens.items()}


def _errors(tokens: dict[str, torch.Tensor], form: str, gradients: bool) -> dict[str, float]:
    """Relative RMS errors of what the kernels compute, by name."""
    exact = {name: x.detach().double().requires_grad_(gradients) for name, x in tokens.items()}
    got = _steps(tokens) if form == "step" else _whole(tokens, form)
    if form == "bidirectional":
        wanted = bidirectional(exact["w"], exact["temp"])
    else:
        wanted = causal(exact["w"], exact["temp"], exact["bias"], log_decay=exact.get("log_decay"))[:2]
    pairs = {name: (x, y[:, : x.shape[1]]) for name, x, y in zip(("output", "membership"), got, wanted)}
    if gradients:
        of_kernels, of_formulas = (
            torch.autograd.grad([x.double().square().sum() for x in out], list(leaves.values()))
            for out, leaves in ((got, tokens), (wanted, exact))
        )
        pairs |= {f"gradient of {name}": pair for name, pair in zip(tokens, zip(of_kernels, of_formulas))}
    return {name: _relative_error(*pair) for name, pair in pairs.items()}


def _whole(tokens: dict[str, torch.Tensor], form: str) -> tuple[torch.Tensor, torch.Tensor]:
    from .tssa_triton import tssa_triton

    bias, decay = tokens.get("bias"), tokens.get("log_decay")
    return tssa_triton(tokens["w"], tokens["temp"], bias, None, None, None, form == "causal", decay)[:2]


def _steps(tokens: dict[str, torch.Tensor], count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and membership of the first tokens, one by one."""
    from .tssa_triton import tssa_step_triton

    state, steps = zero_state(tokens["w"]), []
    for t in range(count):
        decay = tokens["log_decay"][:, t] if "log_decay" in tokens else None
        steps.append(tssa_step_triton(tokens["w"][:, t], tokens["temp"], tokens["bias"][:, t], None, *state, decay))
    output, membership = (torch.stack(x, 1) for x in zip(*steps))
    return output, membership


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).square().mean() / wanted.square().mean()).sqrt().item()
