# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Time of each Triton kernel, forward and backward.

    python examples/benchmarks/run.py kernel_times

`x copy` is a kernel's time over that of a large copy of as many bytes as the kernel must read and write: w, the gradient, the
output, each once. It takes turns with the kernels.
Without a GPU the kernels run in Triton's interpreter, to see that everything here runs; its times mean nothing.
"""

import math
import time
from collections import defaultdict

import torch
from registry import OPERATORS, benchmark, make_grad
from timing import AHEAD_CYCLES, FLUSH_BYTES, Report, attempt, dtype_name, ratio, spread

from tost_hf.model import tssa_triton


TENSORS = {  # like w, that a kernel must read or write
    "chunk_state_kernel": 1,
    "chunk_fwd_membership_kernel": 1,
    "chunk_fwd_output_kernel": 2,
    "chunk_bwd_state_kernel": 2,
    "chunk_bwd_score_kernel": 2,
    "chunk_bwd_input_kernel": 3,
}
KERNELS = (*TENSORS, "state_passing_kernel")
SHAPES = {  # B, T, H, p
    "causal": [(8, 1024, 12, 64), (8, 8192, 12, 64), (1, 131072, 12, 64)],
    "bidirectional": [(64, 196, 12, 64), (8, 4096, 12, 64)],
}
TOY_SHAPES = {"causal": [(1, 5, 2, 8)], "bidirectional": [(1, 5, 2, 8)]}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**20}


def make_step(shape, form: str, dtype: torch.dtype, device: str):
    """A forward and backward pass of the operator through the kernels."""
    causal = form == "causal"
    inputs = OPERATORS["triton"].make_inputs(shape, causal, dtype, device)
    w, temp, bias = inputs if causal else (*inputs, None)
    grad = make_grad(shape, dtype, device)

    def step():
        output = tssa_triton.tssa_triton(w, temp, bias, None, None, None, None, causal)[0]
        torch.autograd.grad(output, inputs, grad)

    return step


class Clock:
    """Seconds of every kernel's launches since it was asked last, by name; while it lasts, it stands before the kernels."""

    def __init__(self, device: str):
        self.device, self.marks = device, []

    def __enter__(self):
        self.kernels = {name: getattr(tssa_triton, name) for name in KERNELS}
        for name, kernel in self.kernels.items():
            setattr(tssa_triton, name, Timed(kernel, self))
        return self

    def __exit__(self, *error):
        for name, kernel in self.kernels.items():
            setattr(tssa_triton, name, kernel)

    def mark(self):
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, name: str, launch) -> None:
        start = self.mark()
        launch()
        self.marks.append((name, start, self.mark()))

    def read(self) -> dict[str, float]:
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = defaultdict(float)
        for name, start, stop in self.marks:
            seconds[name] += stop - start if self.device == "cpu" else start.elapsed_time(stop) / 1e3
        self.marks.clear()
        return seconds


class Timed:
    def __init__(self, kernel, clock: Clock):
        self.kernel, self.fn, self.clock = kernel, kernel.fn, clock

    def __getitem__(self, grid):
        return lambda *args, **sizes: self.clock.time(self.fn.__name__, lambda: self.kernel[grid](*args, **sizes))


def time_kernels(shape, form: str, dtype: torch.dtype, repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each kernel, and of copying as many bytes as w has, in each round; the GPU's own, from an empty cache."""
    step = make_step(shape, form, dtype, device)
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)
    seconds = defaultdict(list)
    with Clock(device) as clock:
        for round_ in range(repeats + 1):  # the first compiles
            for what in (step, lambda: clock.time("copy", lambda: target.copy_(source))):
                flush.zero_()
                if device == "cuda":
                    torch.cuda._sleep(AHEAD_CYCLES)
                what()
                found = clock.read()
                if round_:
                    for name, x in found.items():
                        seconds[name].append(x)
    w_bytes = math.prod(shape) * dtype.itemsize
    seconds["copy"] = [x * w_bytes / source.nbytes for x in seconds["copy"]]
    return seconds


def report_times(args, shapes, dtype: torch.dtype, report: Report) -> None:
    for form, sizes in shapes.items():
        for shape in sizes:
            seconds = attempt(f"{form} {shape}", time_kernels, shape, form, dtype, args.repeats, args.device)
            if seconds is None:
                continue
            case = {"form": form, **dict(zip("BTHp", shape)), "dtype": dtype_name(dtype)}
            copy = seconds.pop("copy")
            for name, times in seconds.items():
                least = [x * TENSORS[name] for x in copy] if name in TENSORS else None
                metrics = {"ms": spread(times) * 1e3, "x copy": ratio(times, least) if least else None}
                report.add({"kernel": name.removesuffix("_kernel")} | case, metrics)


def environment(args) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if args.device == "cpu" else {}


@benchmark("kernel_times", __doc__, environment=environment)
def main(args, report: Report) -> int:
    if not tssa_triton.is_available():
        print("Triton is not installed: there are no kernels to run.")
        return 1
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    report_times(args, SHAPES if args.device == "cuda" else TOY_SHAPES, dtype, report)
    return 0
