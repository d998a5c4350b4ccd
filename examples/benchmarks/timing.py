# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Shared by the speed benchmarks: interleaved timing on CPU and GPU, its statistics, peak memory, the report.

A time is the median of several rounds, with the minimum and the maximum. The compared runs are interleaved within a round, and
a ratio is computed per round, so that other load on the machine affects all runs equally.
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from records import VALUE_COLUMNS, Spread, append_records, make_origin, markdown_table


FLUSH_BYTES = 2**28  # more than the last-level cache of any GPU
SLEEP_CYCLES = 20_000_000  # about 10 ms on a GPU
ROUND_SECONDS = 0.1
MAX_CALLS = 20


# Statistics -----------------------------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The ratio per round."""
    return spread(a / b for a, b in zip(numerators, denominators, strict=True))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of growth: least-squares slope of log y over log x. 1 is linear, 2 quadratic."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


# Time -----------------------------------------------------------------------------------------------------------------


def seconds_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(device: torch.device, exclude_launch: bool = False) -> Callable[[Callable[[], object]], float]:
    """A clock of CUDA events that empties the GPU's cache before each run.

    With `exclude_launch` the GPU then sleeps for about 10 ms, in which the host queues the run (some hundred launches): the
    result is the GPU's own time. Without it a short run takes as long as the host needs to launch it.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(run):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        if exclude_launch:
            torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1e3

    return seconds


def measure(
    runs: Mapping[object, Callable[[], object]],
    repeats: int,
    *,
    device: torch.device | str = "cpu",
    warm_up: int = 3,
    exclude_launch: bool = False,
    reset: Callable[[object], object] = lambda name: None,
) -> dict[object, list[float]]:
    """Seconds of each run in each of `repeats` rounds, after `warm_up` rounds (at least 1) that are discarded.

    A round's time is the median of as many calls as fit into a tenth of a second, from 1 to 20.

    Args:
        runs: the functions to time, by name.
        exclude_launch: on a GPU, whether to exclude the host's time to launch kernels (`cuda_clock`).
        reset: called with a run's name before each of its calls, untimed.
    """
    device = torch.device(device)
    clock = cuda_clock(device, exclude_launch) if device.type == "cuda" else seconds_on_cpu

    def time_once(name) -> float:
        reset(name)
        return clock(runs[name])

    for _ in range(warm_up):
        calls = {name: min(max(round(ROUND_SECONDS / time_once(name)), 1), MAX_CALLS) for name in runs}
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name in runs:
            seconds[name].append(statistics.median(time_once(name) for _ in range(calls[name])))
    return seconds


KEEP_FREED_MEMORY = {  # environment variables with which glibc does not return freed memory
    # by default it returns tensors over 32 MB to the kernel, so that large sizes would mostly measure page faults
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**30),
}


# Memory ---------------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak memory during `run` beyond the memory in use before: allocated on the GPU, or resident on the CPU (Linux)."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        initial = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - initial
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is reused would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the resident memory
    initial = _resident_kilobytes("VmRSS")
    run()
    return (_resident_kilobytes("VmHWM") - initial) * 1024


def _resident_kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def run_in_new_process(function: Callable, *args):
    """The result of a module's function, run in a new process without `KEEP_FREED_MEMORY`."""
    removed_variables = {name: os.environ.pop(name) for name in KEEP_FREED_MEMORY if name in os.environ}
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    finally:
        os.environ.update(removed_variables)


# Report ---------------------------------------------------------------------------------------------------------------


class Report:
    """The records of a speed benchmark: each case is printed and appended to `<results>/<benchmark>.csv` as it comes."""

    def __init__(self, args: argparse.Namespace):
        self.path, self.origin = args.results / f"{args.benchmark}.csv", make_origin(args)
        self.records: list[dict] = []

    def add(self, case: Mapping[str, object], metrics: Mapping[str, Spread | float | None]) -> None:
        """Adds the metrics of a case, None if not measured; all cases of a benchmark have the same columns."""
        spreads = {name: x if isinstance(x, Spread) else Spread(x, x, x) for name, x in metrics.items() if x is not None}
        label = ", ".join(x if isinstance(x, str) else f"{name} {x:,}" for name, x in case.items())
        print(f"{label}: " + ", ".join(f"{name} {format_spread(x)}" for name, x in spreads.items()), flush=True)
        values = {name: [f"{value:.6g}" for value in x] for name, x in spreads.items()}
        records = [{**self.origin, **case, **dict(zip(VALUE_COLUMNS, (name, *x)))} for name, x in values.items()]
        append_records(self.path, records)
        self.records += records

    def print_table(self) -> None:
        """Prints the records of this run as a Markdown table."""
        if self.records:
            print(f"\n{markdown_table(self.records)}")


def format_spread(values: Spread) -> str:
    """Median and range, three digits each."""
    value, low, high = (f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:.3g}" for x in values)
    return value if low == high else f"{value} ({low}..{high})"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attempt(label: str, run: Callable, *args):
    """The result of `run`, or None and a printed line if it fails, so that the other variants are still measured."""
    try:
        return run(*args)
    except Exception as error:  # of any type
        print(f"{label}: not available here ({describe_error(error)})", flush=True)
        return None


def describe_error(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
