# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Runs everything that needs a GPU: the kernels' tests, then the benchmarks of operator, decoding, training and images.

    python examples/benchmarks/gpu.py

Needs torch, transformers, pytest and pytest-xdist; the package is imported from the repository's `src`. Records are appended
to the CSV files of the benchmarks, or of $OUT if that is set; each benchmark prints its table. A benchmark that fails or times
out does not stop the others.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# each worker compiles kernels
TESTS = "-m pytest -q -m '' -n auto --maxfail 5 tests/test_triton.py tests/test_triton_check.py"
BENCHMARKS = (  # arguments of run.py, the cheapest first
    "kernel_times",
    "op --shape 8 8192 12 64 --form causal",
    "decode --batch 64 1 --positions 1024",
    "train_lm --models ToST GPT-2 --equal width --lengths 16384 1024 4096",
    "scaling --tokens 8192 16384 32768 65536 131072",
    "resolution --sizes 224 448 896 1024 2048",
)


def run(arguments: list[str], seconds: float) -> bool:
    """Runs Python with these arguments; whether it succeeds in time."""
    print(f"\n===== {shlex.join(arguments)}", flush=True)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"Stopped after {seconds:.0f} s; its records so far are saved.", flush=True)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="time limit for everything")
    deadline = time.monotonic() + 60 * parser.parse_args().minutes
    results = Path(os.environ.get("OUT", HERE / "results")).resolve()
    commands = [shlex.split(TESTS)]
    commands += [[str(HERE / "run.py"), *shlex.split(arguments), "--results", str(results)] for arguments in BENCHMARKS]
    succeeded = [run(command, (deadline - time.monotonic()) / (len(commands) - i) * 1.5) for i, command in enumerate(commands)]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
