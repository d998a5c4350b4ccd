# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What every speed benchmark here shares: interleaved timing on CPU and GPU, its statistics, memory, what it prints.

A figure is the median of several rounds, given with the smallest and the largest. What is compared takes turns within a
round, and a ratio is taken round by round, so that whatever else the machine does falls on all alike.
"""

import argparse
import ctypes
import importlib.metadata
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rows import RESULTS, Spread, append_rows, machine, origin, output_of, parse_arguments, versions


FLUSH_BYTES = 2**28  # more than the last-level cache of any GPU
AHEAD_CYCLES = 20_000_000  # about 10 ms on a GPU
ROUND_SECONDS = 0.1
MAX_CALLS = 20
VALUE_COLUMNS = ("metric", "value", "low", "high")


# Statistics -----------------------------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The quotient of each round."""
    return spread(a / b for a, b in zip(numerators, denominators, strict=True))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of growth: least-squares slope of log y over log x. 1 is linear, 2 quadratic."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def crossover(ratios: Mapping[int, float]) -> int | None:
    """The first size from which on every measured ratio (rival's time / ToST's) is above 1; None if there is none."""
    found = None
    for size in sorted(ratios, reverse=True):
        if not ratios[size] > 1:
            break
        found = size
    return found


def describe_crossover(ratios: Mapping[int, float], rival: str, unit: str) -> str:
    found = crossover(ratios)
    measured = ", ".join(f"{size:,}" for size in sorted(ratios))
    if found is None:
        return f"ToST is faster than {rival} at no length from which on it stays so (measured: {measured} {unit})."
    return f"ToST is faster than {rival} from {found:,} {unit} on (measured: {measured})."


# Time -----------------------------------------------------------------------------------------------------------------


def seconds_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(device: torch.device, ahead: bool = False) -> Callable[[Callable[[], object]], float]:
    """A clock of CUDA events that empties the GPU's cache before each run.

    With `ahead` the GPU then waits for some 10 ms, in which the host queues the run (some hundred launches): the figure is the
    GPU's own time. Without it a short run takes as long as the host needs to launch it.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(run):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1e3

    return seconds


def measure(
    runs: Mapping[object, Callable[[], Callable[[], object]]],
    repeats: int,
    *,
    device: torch.device | str = "cpu",
    warm_up: int = 3,
    ahead: bool = False,
) -> dict[object, list[float]]:
    """Seconds of each run in each of `repeats` rounds, after `warm_up` (at least 1) rounds that do not count.

    Each run is a function that prepares and returns the function to time. A round's figure is the median of as many calls as
    fit into a tenth of a second, from 1 to 20. On a GPU `ahead` leaves out the host's time to launch (`cuda_clock`).
    """
    device = torch.device(device)
    clock = cuda_clock(device, ahead) if device.type == "cuda" else seconds_on_cpu
    for _ in range(warm_up):
        calls = {name: min(max(round(ROUND_SECONDS / clock(prepare())), 1), MAX_CALLS) for name, prepare in runs.items()}
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, prepare in runs.items():
            seconds[name].append(statistics.median(clock(prepare()) for _ in range(calls[name])))
    return seconds


KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**30),
}


def restart_keeping_freed_memory() -> None:
    """Starts the script again with a C library (glibc) that keeps memory once freed.

    By default it gives tensors over 32 MB back to the kernel, and large sizes would mostly measure the page faults of getting
    them again.
    """
    if not KEEP_FREED_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_FREED_MEMORY)


# Memory ---------------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak memory during `run` beyond what is held before it: allocated on the GPU, or resident on the CPU (Linux)."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed earlier must not be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the kernel's high-water mark back to what is resident now
    before = _resident_kilobytes("VmRSS")
    run()
    return (_resident_kilobytes("VmHWM") - before) * 1024


def _resident_kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_own_process(function: Callable, *args):
    """The result of a module's function, run in a fresh process with an ordinary C library."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    kept = {name: os.environ.pop(name) for name in KEEP_FREED_MEMORY if name in os.environ}
    process.start()
    os.environ.update(kept)
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        raise RuntimeError(f"The process that ran {function.__name__} ended without a result.") from None
    finally:
        process.join()
    return result


def _send_result(sender, function, args) -> None:
    sender.send(function(*args))


# Where figures come from and go to ------------------------------------------------------------------------------------


def print_header(device: torch.device | str = "cpu") -> None:
    """Machine, versions and commit, for whoever reads the table later."""
    where = f"{machine(device)} of {os.cpu_count()} cores"
    if torch.device(device).type == "cuda":
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        where = f"{machine(device)}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    print(f"{where}; {versions()}, triton {triton}", flush=True)


class Report:
    """The tables of one script: each case is printed, and its metrics are appended to `<results>/<script>.csv`, as it comes.

    A case's first `labels` columns name the row; the others stand above the table.
    """

    def __init__(self, args: argparse.Namespace, labels: int = 1):
        self.path = (args.results / args.script).with_suffix(".csv")
        self.origin = origin(args, args.device)
        self.labels = labels
        self.heading = None

    def add(self, case: Mapping[str, object], metrics: Mapping[str, Spread | float | None]) -> None:
        """One case (its columns are the same throughout a script) and what was measured of it; None where nothing was."""
        columns = list(case.items())
        label = " ".join(digits(x) if isinstance(x, int) else x for _, x in columns[: self.labels])
        others = columns[self.labels :]
        heading = ", ".join(x if isinstance(x, str) else f"{name} {x:,}" for name, x in others)
        if (heading, list(metrics)) != self.heading:
            self.heading = (heading, list(metrics))
            print(f"\n{heading}\n{'':20}" + "".join(f"{name:>27}" for name in metrics))
        print(f"{label:20}" + "".join(f"{describe(x):>27}" for x in metrics.values()), flush=True)
        rows = []
        for name, x in metrics.items():
            if x is not None:
                values = x if isinstance(x, Spread) else (x, x, x)
                rows.append({**self.origin, **case, **dict(zip(VALUE_COLUMNS, (name, *(f"{v:.6g}" for v in values))))})
        append_rows(self.path, rows)


def describe(x: Spread | float | None) -> str:
    """Median and range, three digits each."""
    if x is None:
        return "-"
    if not isinstance(x, Spread):
        return digits(x)
    return f"{digits(x.value)} ({digits(x.low)}..{digits(x.high)})"


def digits(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:.3g}"


# Command lines --------------------------------------------------------------------------------------------------------


def arguments(doc: str, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with what all scripts take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds; a figure is their median (smallest..largest)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV that rows are appended to")
    return parser


def dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 on a CPU unless given")


def choose_dtype(args: argparse.Namespace) -> torch.dtype:
    return getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def benchmark(
    doc: str,
    script: str,
    run: Callable[[argparse.Namespace, Report], int | None],
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    dtype: bool = False,
    labels: int = 1,
    repeats: int = 5,
) -> Callable[[Sequence[str] | None], int]:
    """The main function of a script: it parses a command line, prints what it runs on, and measures.

    Args:
        doc, script: the script's `__doc__` and `__file__`.
        run: measures; takes the arguments and the report, and returns an exit status, or None for 0.
        add_arguments: adds the script's own arguments to the parser.
        dtype: whether there is an argument `--dtype`, which `run` then gets as torch's dtype.
        labels, repeats: as for `Report` and `arguments`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        parser = arguments(doc, repeats)
        if dtype:
            dtype_argument(parser)
        add_arguments(parser)
        args = parse_arguments(parser, argv, script)
        if dtype:
            args.dtype = choose_dtype(args)
        print_header(args.device)
        return run(args, Report(args, labels)) or 0

    return main


def attempt(label: str, run: Callable, *args):
    """The result of `run`, or None and a printed line where it fails: one rival that cannot run does not end a table."""
    try:
        return run(*args)
    except Exception as error:  # whatever a rival raises
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        print(f"{label}: not available here ({type(error).__name__}: {reason})", flush=True)
        return None
