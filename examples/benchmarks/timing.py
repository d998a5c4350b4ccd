# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark here shares: interleaved timing and a header that says where the figures come from."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
import transformers


def print_header() -> None:
    """Machine, versions and commit, for whoever reads the table later."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__)
    ).stdout.strip()
    print(
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, commit {commit or 'unknown'}"
    )


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


def interleaved_medians(
    runs: Mapping[object, Callable[[], Callable[[], object]]], repeats: int, warm_up: int = 3
) -> dict[object, float]:
    """Median seconds of each run.

    The runs take turns, so that whatever else the machine does falls on all alike. Each is a function that prepares and
    returns the function to time.
    """
    seconds = {name: [] for name in runs}
    for repeat in range(warm_up + repeats):
        for name, prepare in runs.items():
            run = prepare()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if repeat >= warm_up:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}
