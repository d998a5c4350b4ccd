# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The rows of results/*.csv, of which every table, plot and cited figure is made: where they come from, how they are written.

A row is one metric of one case: its origin (date, machine, versions, script, command), the case's columns, the metric and its
value. Speed rows also have the smallest and the largest of the rounds of which the value is the median.
"""

import argparse
import csv
import datetime
import fcntl
import io
import os
import platform
import re
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import tost_hf


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
ORIGIN_COLUMNS = ("date", "machine", "versions", "script", "command")
NOT_RECORDED = ("help", "results")  # arguments that change no figure
MARKERS = ("o", "s", "^", "D", "v", "P")  # lines are told apart without colours, too


class Spread(NamedTuple):
    """A value and the range it was found in: median, smallest and largest of rounds, or mean -/+ standard deviation."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> "Spread":
        return Spread(*(x * factor for x in self))


# Origin ---------------------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """What a program prints; nothing where it does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except FileNotFoundError:
        return ""


def machine(device: torch.device | str = "cpu") -> str:
    """Name of the GPU, or of the CPU and how many threads compute."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    threads = torch.get_num_threads()
    return f"{next(names, platform.processor() or platform.machine())}, {threads} thread{'s' * (threads > 1)}"


def versions() -> str:
    """Of this package with its commit (`-dirty` where files differ from it), and of what it runs on."""
    commit = output_of("git", "describe", "--always", "--dirty", "--exclude=*") or "no commit"
    return (
        f"tost_hf {tost_hf.__version__} ({commit}), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None, script: str) -> argparse.Namespace:
    """The parsed arguments, with the `script`'s name and the `command` that repeats the run.

    The command names the arguments that differ from their defaults, and data by its placeholder.
    """
    args = parser.parse_args(argv)
    parts = ["python", Path(script).resolve().relative_to(ROOT).as_posix()]
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or action.dest in NOT_RECORDED or value == action.default:
            continue
        if isinstance(action.metavar, str):  # only data has one
            parts += [action.option_strings[-1], action.metavar]
        elif isinstance(value, bool):
            parts.append(action.option_strings[0 if value else -1])
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            repeated = values if values and isinstance(values[0], (list, tuple)) else [values]
            for one in repeated:
                parts += [action.option_strings[-1], *map(str, one)]
    args.script, args.command = Path(script).name, shlex.join(parts)
    return args


def origin(args: argparse.Namespace, device: torch.device | str = "cpu") -> dict[str, str]:
    """The columns that every row of a run shares; `args` come from `parse_arguments`."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return dict(zip(ORIGIN_COLUMNS, (now, machine(device), versions(), args.script, args.command)))


# Reading and writing --------------------------------------------------------------------------------------------------


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Appends rows of equal columns; the file is written under a temporary name and moved. Processes take turns.

    Raises:
        ValueError: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        _append_rows(path, rows)
    finally:
        os.close(folder)


def _append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    columns = list(rows[0])
    text = path.read_text() if path.exists() else ""
    if text and text.splitlines()[0] != ",".join(columns):
        raise ValueError(f"{path} has other columns than {', '.join(columns)}: move it away.")
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    if not text:
        writer.writeheader()
    writer.writerows(rows)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text + buffer.getvalue())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def select(rows: Iterable[Mapping[str, object]], **wanted) -> list[Mapping[str, object]]:
    """The rows that have the wanted entries, compared as text; of a list or tuple, any of them."""
    entries = {key: list(map(str, x)) if isinstance(x, list | tuple) else [str(x)] for key, x in wanted.items()}
    return [row for row in rows if all(str(row[key]) in entry for key, entry in entries.items())]


class Measured:
    """The rows of a folder of results, {name of a file: its rows}; what is asked for and is not there is a LookupError."""

    def __init__(self, folder: Path = RESULTS):
        self.rows = {path.stem: read_rows(path) for path in sorted(folder.glob("*.csv"))}

    def has(self, file: str, **wanted) -> bool:
        return bool(select(self.rows.get(file, []), **wanted))

    def find(self, file: str, **wanted) -> list[dict[str, str]]:
        """The rows of a file that have the wanted entries, at least one."""
        found = select(self.rows.get(file, []), **wanted)
        if not found:
            raise LookupError(f"results/{file}.csv has no row with {wanted}; measure it, or do not cite it.")
        return found

    def one(self, file: str, **wanted) -> list[dict[str, str]]:
        """The rows of one metric and case: one alone, or one for each seed."""
        found = self.find(file, **wanted)
        if len({row.get("seed") for row in found}) < len(found):
            raise LookupError(f"results/{file}.csv has {len(found)} rows with {wanted}; cite one, or one for each seed.")
        return found

    def spread(self, file: str, **wanted) -> Spread:
        return spread_of(self.one(file, **wanted))

    def values(self, file: str, **wanted) -> list[float]:
        return [float(row["value"]) for row in self.one(file, **wanted)]


# Numbers, tables, plots -----------------------------------------------------------------------------------------------


def around_mean(values: Sequence[float]) -> Spread:
    """Mean -/+ standard deviation (of a sample)."""
    mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(mean, mean - deviation, mean + deviation)


def spread_of(rows: Sequence[Mapping[str, str]]) -> Spread:
    """Of the one speed row, or of the rows of an experiment's seeds."""
    if "low" in rows[0]:
        (row,) = rows
        return Spread(*(float(row[name]) for name in ("value", "low", "high")))
    return around_mean([float(row["value"]) for row in rows])


def plus_minus(values: Sequence[float], form: str = ".1f") -> str:
    """ "mean ± standard deviation"; the mean alone of one value, nothing of none."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    first, *others = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|" for cells in (head, *lines))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def script_path(name: str) -> str:
    """Where a script lies today; rows keep the command of the day they were measured."""
    (path,) = ROOT.glob(f"examples/**/{name}")
    return path.relative_to(ROOT).as_posix()


def repeat_command(row: Mapping[str, str]) -> str:
    """The command that measures a row again."""
    _, _, *arguments = row["command"].split(" ", 2)
    return " ".join(["python", script_path(row["script"]), *arguments])


def commands(rows: Iterable[Mapping[str, str]]) -> str:
    """The commands that measure the rows again, as a block of Markdown, and what they ran on."""
    rows = list(rows)
    lines = "\n".join(dict.fromkeys(map(repeat_command, rows)))
    return f"```bash\n{lines}\n```\n\nOn {where(rows)}."


def where(rows: Iterable[Mapping[str, str]]) -> str:
    """Machine and versions that rows were measured on."""
    rows = list(rows)
    machines = dict.fromkeys(row["machine"] for row in rows)
    found = (re.findall(r"(?:torch|transformers) [\d.]+\d", row["versions"]) for row in rows)
    return ", ".join([*machines, *dict.fromkeys(x for names in found for x in names)])


class Panel(NamedTuple):
    """What one pair of axes shows: name of a line to its points, each a size and the spread measured there."""

    lines: Mapping[str, Mapping[float, Spread]]
    xlabel: str
    ylabel: str
    xscale: str = "log"
    yscale: str = "log"


def plot(path: Path, *panels: Panel, note: str = "") -> None:
    """Lines with the range as error bars, a picture beside the other for each panel; `note` is kept in the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(6 if len(panels) == 1 else 5 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axes, panel in zip(all_axes[0], panels):
        for marker, (label, points) in zip(MARKERS * len(panel.lines), panel.lines.items()):
            x, y = sorted(points), [points[size] for size in sorted(points)]
            errors = [[v.value - v.low for v in y], [v.high - v.value for v in y]]
            axes.errorbar(x, [v.value for v in y], yerr=errors, marker=marker, markersize=4, capsize=2, label=label)
        axes.set(xscale=panel.xscale, yscale=panel.yscale, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120, metadata={"Description": note})
    plt.close(figure)
    os.replace(temporary, path)
    print(f"wrote {path}")
