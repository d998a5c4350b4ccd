# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The records of results/*.csv: their origin, writing and reading, and their Markdown tables.

A record is one metric of one case: its origin (date, machine, versions, script, command), the case's columns, the metric and
its value. Speeds also have the minimum and the maximum of the rounds of which the value is the median. `script` is the name of
the benchmark with `.py`.
"""

import argparse
import csv
import datetime
import fcntl
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


def machine(device: torch.device | str = "cpu") -> str:
    """Name of the GPU, or of the CPU and its number of compute threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    threads = torch.get_num_threads()
    return f"{next(names, platform.machine())}, {threads} thread{'s' * (threads > 1)}"


def versions() -> str:
    """Of this package with its commit (`-dirty` with uncommitted changes), and of what it runs on."""
    command = "git describe --always --dirty --exclude='*'"
    commit = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "no commit"
    return (
        f"tost_hf {tost_hf.__version__} ({commit}), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def command_of(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """The command that repeats a run, with data by its placeholder (metavar)."""
    data = {action.option_strings[-1]: action.metavar for action in parser._actions if isinstance(action.metavar, str)}
    return shlex.join([*RUNNER.split(), *(data.get(before, word) for before, word in zip(["", *argv], argv))])


def origin(args: argparse.Namespace) -> dict[str, str]:
    """The columns that all records of a run share; `args` are those of the runner."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    place = machine(getattr(args, "device", "cpu"))
    return dict(zip(ORIGIN_COLUMNS, (now, place, versions(), f"{args.benchmark}.py", args.command)))


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
    """The records of a file; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def select(records: Iterable[Mapping[str, object]], **wanted) -> list[Mapping[str, object]]:
    """The records that have the wanted entries, compared as text; of a list or tuple, any of them."""
    entries = {key: list(map(str, x)) if isinstance(x, list | tuple) else [str(x)] for key, x in wanted.items()}
    return [record for record in records if all(str(record[key]) in entry for key, entry in entries.items())]


# Text -----------------------------------------------------------------------------------------------------------------


def plus_minus(values: Sequence[float], form: str = ".1f") -> str:
    """ "mean ± standard deviation"; of one value the mean alone."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    first, *others = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|" for cells in (head, *lines))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def markdown_table(records: Sequence[Mapping[str, object]]) -> str:
    """Of the records of one run: a row for each case, by the columns in which cases differ, and a column for each metric.

    A speed is shown as its median and its range.
    """
    columns = [name for name in records[0] if name not in (*ORIGIN_COLUMNS, *VALUE_COLUMNS)]
    columns = [name for name in columns if len({str(record[name]) for record in records}) > 1]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        values = [str(record[name]) for name in ("value", "low", "high") if name in record]
        shown = values[0] if len(set(values)) == 1 else f"{values[0]} ({values[1]} to {values[2]})"
        rows.setdefault(tuple(str(record[name]) for name in columns), {})[str(record["metric"])] = shown
    metrics = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    lines = [[*case, *(row.get(metric, "") for metric in metrics)] for case, row in rows.items()]
    first = records[0]
    where = f"{first['command']}, {first['date']}, on {first['machine']}, {first['versions']}"
    return f"{markdown([*columns, *metrics], lines)}\n\n{where}"
