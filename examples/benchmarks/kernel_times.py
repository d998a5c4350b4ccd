# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels one by one: whether they are right and how long each takes.

    python examples/benchmarks/run.py kernel_times --smoke   # masks, packing, states, steps, dtypes, against float64
    python examples/benchmarks/run.py kernel_times           # time of every kernel, forward and backward

`x copy` is a kernel's time over that of a large copy of as many bytes as the kernel must read and write: w, the gradient, the
output, each once. It takes turns with the kernels.
Without a GPU the kernels run in Triton's interpreter, to see that everything here runs; its times mean nothing.
"""

import time
from collections import defaultdict

import kernel_cases
import torch
from registry import benchmark
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
SMOKE_SHAPES = {"cuda": (2, 130, 3, 16), "cpu": (2, 5, 2, 8)}
SMOKE = [  # dtype, form, what is special
    ("bfloat16", "causal", "nothing"),
    ("bfloat16", "bidirectional", "mask"),
    ("float16", "causal", "packed"),
    ("float32", "causal", "state"),
    ("float32", "bidirectional", "packed"),
    ("bfloat16", "decay", "mask"),
    ("bfloat16", "step", "mask"),
]


# Right or wrong -------------------------------------------------------------------------------------------------------


def make_leaves(shape, dtype: torch.dtype, form: str, device: str, state: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"causal": form != "bidirectional", "state": state, "positions": shape[1]}
    return kernel_cases.make(*shape, dtype, **sizes, decay=(1e-3, 1.0) if form == "decay" else None, device=device)


def case_arguments(leaves, form: str, mask=None, seq_idx=None) -> dict[str, object]:
    B, T = leaves["w"].shape[:2]
    positions = None if form == "bidirectional" else torch.arange(T, device=leaves["w"].device).expand(B, T)
    return {"mask": mask, "seq_idx": seq_idx, "causal": form != "bidirectional", "positions": positions}


def run(leaves, case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The output of the kernels and the gradient of every leaf; the output's own gradient."""
    output = kernel_cases.run_kernels(leaves, **case)[0]
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)], [grad]


def run_steps(leaves, mask):
    """The output of tokens that come one by one."""
    B, T, H, p = leaves["w"].shape
    sums = [torch.zeros(size, device=mask.device) for size in ((B, H, p), (B, H, p), (B, H))]
    steps = []
    with torch.no_grad():
        for t in range(T):
            now = leaves["w"][:, t], leaves["temp"], leaves["bias"][t].expand(B, H), mask[:, t], None
            steps.append(tssa_triton.tssa_step_triton(*now, *sums)[0])
    return [torch.stack(steps, 1)]


def smoke_case(dtype: str, form: str, special: str, device: str) -> tuple[float, list[str]]:
    """How much of what it may be off the output or a gradient is off, at most, and the names of those that are wrong."""
    shape = SMOKE_SHAPES[device]
    B, T = shape[:2]
    leaves = make_leaves(shape, getattr(torch, dtype), form, device, special == "state")
    mask = seq_idx = None
    if special == "mask":
        mask = torch.ones(B, T, dtype=torch.bool, device=device)
        mask[0, : T // 3] = mask[1, T - T // 4 :] = False
    if special == "packed":
        seq_idx = (torch.arange(T, device=device) >= T // 3).long().expand(B, T).contiguous()
    case = case_arguments(leaves, form, mask, seq_idx)
    got, grads = (run_steps(leaves, mask), []) if form == "step" else run(leaves, case)
    found = kernel_cases.errors(got, leaves, grads, **case)
    return max(error / allowed for error, allowed in found.values()), list(kernel_cases.wrong(found))


def smoke(device: str) -> int:
    """Prints each case as it comes, and what failed; the number of failures."""
    wrong, start = 0, time.perf_counter()
    for dtype, form, special in SMOKE:
        found = attempt(f"{form}, {special}, {dtype}", smoke_case, dtype, form, special, device)
        wrong += found is None or bool(found[1])
        if found is not None:
            verdict = f"WRONG: {', '.join(found[1])}" if found[1] else "right"
            took = f"{time.perf_counter() - start:5.1f} s"
            print(f"{took}  {form}, {special}, {dtype}: {verdict}, off by {found[0]:.2f} of what it may be", flush=True)
    return wrong


# How long -------------------------------------------------------------------------------------------------------------


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
    leaves = make_leaves(shape, dtype, form, device)
    case = case_arguments(leaves, form)
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)
    seconds = defaultdict(list)
    with Clock(device) as clock:
        for round_ in range(repeats + 1):  # the first compiles
            for what in (lambda: run(leaves, case), lambda: clock.time("copy", lambda: target.copy_(source))):
                flush.zero_()
                if device == "cuda":
                    torch.cuda._sleep(AHEAD_CYCLES)
                what()
                found = clock.read()
                if round_:
                    for name, x in found.items():
                        seconds[name].append(x)
    seconds["copy"] = [x * leaves["w"].nbytes / source.nbytes for x in seconds["copy"]]
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


def add_arguments(parser) -> None:
    parser.add_argument("--smoke", action="store_true", help="whether they are correct, in seconds, and nothing else")


def environment(args) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if args.device == "cpu" else {}


@benchmark("kernel_times", __doc__, add_arguments, environment=environment)
def main(args, report: Report) -> int:
    if not tssa_triton.is_available():
        print("Triton is not installed: there are no kernels to run.")
        return 1
    if args.device == "cpu":
        kernel_cases.patch_interpreter_for_speed()
    if args.smoke:
        return int(smoke(args.device) > 0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    report_times(args, SHAPES if args.device == "cuda" else TOY_SHAPES, dtype, report)
    return 0
