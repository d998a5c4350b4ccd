# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""All that needs a GPU, in one call: the kernels' tests, then the speed of operator, decoding, training, length and images.

    python examples/benchmarks/gpu.py

Needs torch, transformers and pytest; the package is taken from the repository's `src`. Records go to the CSV files of the
benchmarks, in $OUT where that is set; each benchmark prints its table. One that fails or exceeds its time does not end the
others.
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
TESTS = "-m pytest -q -m '' --maxfail 5 tests/test_triton.py tests/test_triton_check.py"
PARTS = (  # from the cheapest answer to the most expensive: arguments of run.py
    "kernel_times",
    "op --shape 8 8192 12 64 --form causal",
    "decode --batch 64 1 --positions 1024",
    "train_lm --models ToST GPT-2 --equal width --lengths 16384 1024 4096",
    "scaling --tokens 8192 16384 32768 65536 131072",
    "resolution --sizes 224 448 896 1024 2048",
)


def run(arguments: list[str], seconds: float) -> bool:
    """Whether a process of Python ends well within its time."""
    print(f"\n===== {shlex.join(arguments)}", flush=True)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"Stopped after {seconds:.0f} s; what it has recorded is kept.", flush=True)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="for everything")
    end = time.monotonic() + 60 * parser.parse_args().minutes
    results = Path(os.environ.get("OUT", HERE / "results")).resolve()
    commands = [shlex.split(TESTS)]
    commands += [[str(HERE / "run.py"), *shlex.split(part), "--results", str(results)] for part in PARTS]
    succeeded = [run(command, (end - time.monotonic()) / (len(commands) - i) * 1.5) for i, command in enumerate(commands)]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
