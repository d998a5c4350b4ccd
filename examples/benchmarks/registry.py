# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The benchmarks that run.py runs, and the operators that they compare; the models are in language_models.py.

To add a benchmark, write a function of the parsed arguments and the report, register it with `@benchmark` in a module in this
folder or ../research, and add its name and module to `BENCHMARKS`:

    @benchmark("prefill", __doc__)
    def run(args, report):
        seconds = measure({"ToST": step}, args.repeats, device=args.device)  # timing.py: interleaved rounds
        report.add({"model": "ToST", "layers": 12}, {"ms": spread(seconds["ToST"]) * 1e3})

Its records are appended to results/prefill.csv with the command, date, machine and versions, and printed as a Markdown table
for a page. To compare another operator, add it to `OPERATORS`.
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from tost_hf import tssa
from tost_hf.model import tssa_reference
from tost_hf.model.layers_tost import initial_decay_bias


# Benchmarks -----------------------------------------------------------------------------------------------------------

BENCHMARKS = {  # name to the module that registers it
    "ablations": "compare_vision",
    "compare_lm": "compare_lm",
    "compare_vision": "compare_vision",
    "decode": "decode",
    "exported_state": "exports",
    "exports": "exports",
    "first_use": "op",
    "interactions": "interactions",
    "kernel_times": "kernel_times",
    "locality": "synthetic",
    "long_context": "long_context",
    "lra": "lra",
    "memberships": "memberships",
    "observations": "observations",
    "op": "op",
    "options": "op",
    "quantized": "quantized",
    "recall": "synthetic",
    "resolution": "resolution",
    "scaling": "scaling",
    "text_classification": "text_classification",
    "tightness": "observations",
    "train_lm": "train_lm",
    "vllm": "engine",
}


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    Args:
        run: runs the benchmark; returns an exit status, or None for 0.
        description: for `--help`.
        add_arguments: adds the benchmark's arguments to the parser.
        trains: whether it trains models (arguments --steps, --seeds, --learning_rates) or times them (--device, --repeats).
        steps, learning_rates, repeats: defaults of these arguments.
        dtype: whether there is an option `--dtype`, which `run` receives as a torch dtype.
        file: name of the CSV file of a benchmark that trains.
        environment: variables that must be set when the process starts.
    """

    run: Callable[[argparse.Namespace, Any], int | None]
    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], object]
    trains: bool = False
    steps: int | None = None
    learning_rates: Sequence[float] = ()
    repeats: int = 5
    dtype: bool = False
    file: str = "results"
    environment: dict[str, str] = field(default_factory=dict)


_REGISTRY: dict[str, Benchmark] = {}


def benchmark(name: str, description: str | None, add_arguments: Callable = lambda parser: None, **fields):
    """Registers `run(args, report)` with a `timing.Report`, or with a `training.Results` if it `trains`.

    `fields` are those of `Benchmark`.
    """

    def register(run):
        _REGISTRY[name] = Benchmark(run, description, add_arguments, **fields)
        return run

    return register


def load_benchmark(name: str) -> Benchmark:
    importlib.import_module(BENCHMARKS[name])
    return _REGISTRY[name]


# Operators ------------------------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[..., torch.Tensor]] = {  # functions of randn, the shape (B, T, H, p) and the dtype
    "tokens": lambda randn, shape, dtype: randn(*shape).to(dtype),
    "temp": lambda randn, shape, _: 1 + 0.2 * randn(shape[2]),
    "denom_bias": lambda randn, shape, _: 0.1 * randn(*shape[1:3]),
    "head_decay": lambda randn, shape, _: F.logsigmoid(initial_decay_bias(shape[2])),  # as in a new model
    "token_decay": lambda randn, shape, _: F.logsigmoid(initial_decay_bias(shape[2]) + 0.5 * randn(*shape[:3])),
}


@dataclass(frozen=True)
class Operator:
    """An operator, and the kinds of its inputs (see `INPUTS`).

    Args:
        function: of the inputs and `causal`.
        is_tssa: whether it computes TSSA; its bidirectional form has no denom_bias.
        compiled: whether it is run by `torch.compile`.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...] = ("tokens", "temp", "denom_bias")
    is_tssa: bool = True
    compiled: bool = False

    def make(self, causal: bool) -> Callable[..., torch.Tensor]:
        """The operator as a function of its inputs."""

        def run(*inputs):
            return self.function(*inputs, causal=causal)

        return torch.compile(run, dynamic=False) if self.compiled else run

    def make_inputs(self, shape, causal: bool, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Differentiable inputs for tokens (B, T, H, p), the same at every call."""
        generator = torch.Generator().manual_seed(0)
        kinds = self.inputs if causal or not self.is_tssa else self.inputs[:2]
        tensors = (INPUTS[kind](lambda *size: torch.randn(size, generator=generator), shape, dtype) for kind in kinds)
        return [x.to(device).requires_grad_() for x in tensors]


def make_tssa(backend: str) -> Callable:
    def op(w, temp, denom_bias=None, log_decay=None, causal=True):
        return tssa(w, temp, denom_bias, log_decay=log_decay, causal=causal, backend=backend).output

    return op


def reference(w, temp, denom_bias=None, causal=True):
    """The reference implementation, with autograd's backward."""
    return tssa_reference.causal(w, temp, denom_bias)[0] if causal else tssa_reference.bidirectional(w, temp)[0]


def attention(q, k, v, causal=True):
    """Softmax attention on (B, T, H, p)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


OPERATORS = {
    "triton": Operator(make_tssa("triton")),
    "numba": Operator(make_tssa("numba")),
    "reference": Operator(reference),
    "reference compiled": Operator(reference, compiled=True),
    "sdpa": Operator(attention, ("tokens", "tokens", "tokens"), is_tssa=False),
    "copy": Operator(lambda w, causal: w.clone(), ("tokens",), is_tssa=False),
}
DECAY_OPERATORS = {  # value of `decay_type` to the operator with this decay
    "none": Operator(make_tssa("auto")),
    "head": Operator(make_tssa("auto"), ("tokens", "temp", "denom_bias", "head_decay")),
    "token": Operator(make_tssa("auto"), ("tokens", "temp", "denom_bias", "token_decay")),
}
PASSES = ("forward", "forward + backward")


def make_grad(shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A random gradient of the output."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def make_run(op: Callable, inputs, grad, pass_name: str) -> Callable[[], object]:
    """One of `PASSES` of an operator, to be timed."""

    def forward():
        with torch.no_grad():
            op(*inputs)

    return forward if pass_name == "forward" else lambda: torch.autograd.grad(op(*inputs), inputs, grad)
