# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Time of each Triton kernel on a GPU, forward and backward, measured by PyTorch's profiler.

    python examples/benchmarks/run.py kernel_times

`x copy` is a kernel's time divided by that of copying as many bytes as the kernel must read and write (w, the gradient and the
output, each once) as part of a large copy. The copy is interleaved with the kernels.
"""

import math
from collections import defaultdict

import torch
from registry import OPERATORS, benchmark, make_grad, make_run
from timing import FLUSH_BYTES, Report, attempt, dtype_name, ratio, spread


NUM_TENSORS = {  # of w's size, that a kernel must read or write
    "chunk_state_kernel": 1,
    "chunk_fwd_membership_kernel": 1,
    "chunk_fwd_output_kernel": 2,
    "chunk_bwd_state_kernel": 2,
    "chunk_bwd_score_kernel": 2,
    "chunk_bwd_input_kernel": 3,
}
KERNELS = (*NUM_TENSORS, "state_passing_kernel")
SHAPES = {  # B, T, H, p
    "causal": [(8, 1024, 12, 64), (8, 8192, 12, 64), (1, 131072, 12, 64)],
    "bidirectional": [(64, 196, 12, 64), (8, 4096, 12, 64)],
}
COPY_BYTES = 2**30


def profile(run) -> dict[str, float]:
    """Seconds on the GPU, by name of the kernel or copy."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total * 1e-6 for event in profiler.key_averages()}


def time_kernels(shape, causal: bool, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Seconds per round of each kernel, and of copying as many bytes as w has, each from a flushed cache."""
    operator = OPERATORS["triton"]
    inputs = operator.make_inputs(shape, causal, dtype, "cuda")
    step = make_run(operator.make(causal), inputs, make_grad(shape, dtype, "cuda"), "forward + backward")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target, flush = torch.empty_like(source), torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    step()  # compiles
    seconds = defaultdict(list)
    for _ in range(repeats):
        flush.zero_()
        for name, kernel_seconds in profile(step).items():
            if name in KERNELS:
                seconds[name].append(kernel_seconds)
        flush.zero_()
        copy_seconds = sum(profile(lambda: target.copy_(source)).values())
        seconds["copy"].append(copy_seconds * math.prod(shape) * dtype.itemsize / COPY_BYTES)
    return seconds


@benchmark("kernel_times", __doc__, dtype=True)
def main(args, report: Report) -> int:
    if args.device == "cpu":
        print("The kernels need a GPU.")
        return 1
    for form, shapes in SHAPES.items():
        for shape in shapes:
            seconds = attempt(f"{form} {shape}", time_kernels, shape, form == "causal", args.dtype, args.repeats) or {}
            case = {"form": form, **dict(zip("BTHp", shape)), "dtype": dtype_name(args.dtype)}
            w_copy_times = seconds.pop("copy", [])
            for name, times in seconds.items():
                copy_times = [x * NUM_TENSORS[name] for x in w_copy_times] if name in NUM_TENSORS else None
                metrics = {"ms": spread(times) * 1e3, "x copy": ratio(times, copy_times) if copy_times else None}
                report.add({"kernel": name.removesuffix("_kernel")} | case, metrics)
    return 0
