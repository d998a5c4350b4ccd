# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The records of results/*.csv: their origin, writing and reading, and Markdown tables of them.

A record is one metric of one case: its origin (date, machine, versions, script, command), the case's columns, the metric and
its value. Speeds also have the minimum and the maximum of the rounds of which the value is the median. `script` is the name of
the benchmark with `.py`.
"""

import argparse
import csv
import datetime
import fcntl
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import tost_hf


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
RUNNER = "python examples/benchmarks/run.py"
ORIGIN_COLUMNS = ("date", "machine", "versions", "script", "command")
VALUE_COLUMNS = ("metric", "value", "low", "high")


class Spread(NamedTuple):
    """A value and its range: median, minimum and maximum of rounds, or mean -/+ standard deviation."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> "Spread":
        return Spread(*(x * factor for x in self))


# Origin ---------------------------------------------------------------------------------------------------------------


def get_machine(device: torch.device | str = "cpu") -> str:
    """Name of the GPU, or of the CPU and its number of compute threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    threads = torch.get_num_threads()
    return f"{next(names, platform.machine())}, {threads} thread{'s' * (threads > 1)}"


def get_versions() -> str:
    """Versions of this package, with its commit (`-dirty` with uncommitted changes), and of what it runs on."""
    command = "git describe --always --dirty --exclude='*'"
    commit = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "no commit"
    return (
        f"tost_hf {tost_hf.__version__} ({commit}), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def make_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """The command that repeats a run, with the placeholders (metavars) of data folders."""
    placeholders = {action.option_strings[-1]: action.metavar for action in parser._actions if isinstance(action.metavar, str)}
    backend = os.environ.get("TOST_HF_BACKEND")
    return (f"TOST_HF_BACKEND={backend} " if backend else "") + shlex.join(
        [*RUNNER.split(), *(placeholders.get(previous_word, word) for previous_word, word in zip(["", *argv], argv))]
    )


def make_origin(args: argparse.Namespace) -> dict[str, str]:
    """The columns that all records of a run share; `args` are the parsed arguments of run.py."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = get_machine(getattr(args, "device", "cpu"))
    return dict(zip(ORIGIN_COLUMNS, (now, machine, get_versions(), f"{args.benchmark}.py", args.command)))


# Reading and writing --------------------------------------------------------------------------------------------------


def append_records(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Appends records of equal columns, under a lock.

    Raises:
        ValueError: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        header = next(csv.reader(file), None)
        writer = csv.DictWriter(file, header or list(records[0]), lineterminator="\n")
        if header is None:
            writer.writeheader()
        writer.writerows(records)


def read_records(path: Path) -> list[dict[str, str]]:
    """The records of a file, none if it does not exist."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def select(records: Iterable[Mapping[str, object]], **columns) -> list[Mapping[str, object]]:
    """The records whose columns have these values, compared as strings; a list or tuple allows several values."""
    allowed_values = {key: list(map(str, x)) if isinstance(x, list | tuple) else [str(x)] for key, x in columns.items()}
    return [record for record in records if all(str(record[key]) in values for key, values in allowed_values.items())]


# Tables ---------------------------------------------------------------------------------------------------------------


def format_mean(values: Sequence[float], format_spec: str = ".1f") -> str:
    """Mean ± standard deviation; the mean alone for one value."""
    mean = f"{statistics.mean(values):{format_spec}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{format_spec}}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    header_line, *lines = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|" for cells in (header, *rows))
    return "\n".join([header_line, "|" + "---|" * len(header), *lines])


def markdown_table(records: Sequence[Mapping[str, object]]) -> str:
    """A table of the records of one run: a row per case, with the columns in which cases differ, and a column per metric.

    A speed is shown as its median and range.
    """
    columns = [name for name in records[0] if name not in (*ORIGIN_COLUMNS, *VALUE_COLUMNS)]
    columns = [name for name in columns if len({str(record[name]) for record in records}) > 1]
    cells_by_case: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        values = [str(record[name]) for name in ("value", "low", "high") if name in record]
        cell = values[0] if len(set(values)) == 1 else f"{values[0]} ({values[1]} to {values[2]})"
        cells_by_case.setdefault(tuple(str(record[name]) for name in columns), {})[str(record["metric"])] = cell
    metrics = list(dict.fromkeys(metric for cells in cells_by_case.values() for metric in cells))
    rows = [[*case, *(cells.get(metric, "") for metric in metrics)] for case, cells in cells_by_case.items()]
    first_record = records[0]
    origin = f"{first_record['command']}, {first_record['date']}, on {first_record['machine']}, {first_record['versions']}"
    return f"{format_table([*columns, *metrics], rows)}\n\n{origin}"
