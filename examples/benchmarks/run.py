# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Runs a benchmark: prints its results and appends its records to results/*.csv.

    python examples/benchmarks/run.py decode
    python examples/benchmarks/run.py decode --help
    python examples/benchmarks/run.py recall --models ToST GPT-2 --steps 1200

registry.py lists the benchmarks and says how to add one.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


HERE = Path(__file__).resolve().parent
sys.path += map(str, (HERE, HERE.parent, HERE.parent / "research", HERE.parent / "research" / "lra"))

from records import RESULTS, make_command  # noqa: E402
from registry import BENCHMARKS, Benchmark, load_benchmark  # noqa: E402
from timing import Report  # noqa: E402


def make_parser(name: str, benchmark: Benchmark) -> argparse.ArgumentParser:
    """The parser of a benchmark: the shared arguments and the benchmark's."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"run.py {name}", description=benchmark.description, formatter_class=formatter)
    if benchmark.trains:
        parser.add_argument("--steps", type=int, default=benchmark.steps, help="optimizer steps of a run")
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run for each")
        rates = "tried with the first seed; the best one is used for the others"
        parser.add_argument("--learning_rates", type=float, nargs="+", default=list(benchmark.learning_rates), help=rates)
    else:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
        rounds = "rounds, of which the median, minimum and maximum are reported"
        parser.add_argument("--repeats", type=int, default=benchmark.repeats, help=rounds)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of the CSV that records are appended to"
    )
    if benchmark.dtype:
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    benchmark.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, may_restart: bool = False) -> int:
    """Runs the benchmark named by `argv` and returns its exit status.

    Args:
        argv: the benchmark's name and its arguments; default: `sys.argv`.
        may_restart: whether this process may be replaced by one with the environment that the benchmark needs.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    name_parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    name_parser.add_argument("benchmark", choices=BENCHMARKS)
    name = name_parser.parse_args(argv[:1]).benchmark
    benchmark = load_benchmark(name)
    parser = make_parser(name, benchmark)
    args = parser.parse_args(argv[1:])
    args.benchmark, args.command = name, make_command(parser, argv)
    if may_restart and not benchmark.environment.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | benchmark.environment)
    if benchmark.dtype:
        args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    if benchmark.trains:
        from training import Results  # needs the [train] extra

        return benchmark.run(args, Results(args, benchmark.file)) or 0
    report = Report(args)
    print(f"{report.origin['machine']}, {report.origin['versions']}", flush=True)
    status = benchmark.run(args, report) or 0
    report.print_table()
    return status


if __name__ == "__main__":
    sys.exit(main(may_restart=True))
