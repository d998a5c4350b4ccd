# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Makes the tables, numbers and plots that cited.toml describes of the records of results/*.csv.

A table has `rows` and `columns`; what a cell shows is selected by the entries of both. An entry may be

- a number or text: the records that have it in the column of that name;
- a list: one row or column for each of its values, whose title is filled in with the value, as "{T} tokens";
- a table {value = title}: likewise, with another text for each value in the title.

Entries whose name begins with an underscore select nothing: they fill in the text of others, as "step {_step}" does. A title
"a | b" fills two cells. `cells` are a row as it is: texts, and tables that describe one cell each.

`show` is how a cell is written, and `after` what follows it: one of `FORMATS`; "mean .3f", mean ± standard deviation over the
seeds; "first .3f", the mean alone; "entry NAME", what all records have in a column; one of `COMPUTED`; or a format of a
speed's median, minimum and maximum, "{0:.1f} ({1:.1f} to {2:.1f})". `file` is the file of records, `where` selects the
table's records and `cell` is what all cells share. `source` selects the records whose commands are listed (default: as
`where`), unless `commands` is false; `settings` says whether sizes and steps are written above. In a `sparse` table cells
without records are empty, and rows without any are left out; elsewhere a missing record is an error.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from rows import Measured, Panel, commands, markdown, plus_minus, spread_of


DESCRIBED = ("show", "file", "after")  # of a cell: keys that select no records
FORMATS = {
    "percent": "mean .1f%",
    "ms": "three digits ms",
    "range": "{0:.2f} ({1:.2f} to {2:.2f})",
    "MiB": "{0:,.0f} MiB",
    "bytes": "{0:,.0f} bytes",
}
UNIFORM = 1e-9  # the least distance of a float32 membership from uniform that can be told


# Cells ----------------------------------------------------------------------------------------------------------------


def show(how: str, measured: Measured, file: str, where: Mapping[str, object]) -> str:
    """The text of a cell.

    Raises:
        LookupError: there are no such records, or several of one case.
    """
    how = FORMATS.get(how, how)
    if how in COMPUTED:
        return COMPUTED[how](measured, file, where)
    kind, _, form = how.partition(" ")
    if kind == "entry":
        (entry,) = {record[form] for record in measured.find(file, **where)}
        return f"{int(entry):,}"
    records = measured.one(file, **where)
    if kind in ("mean", "first"):
        scale = 100 if form.endswith("%") else 1
        text = plus_minus([scale * float(record["value"]) for record in records], form.rstrip("%"))
        return text if kind == "mean" else text.partition(" ")[0]
    if kind == "three":  # significant digits, at least, and a unit
        value = spread_of(records).value
        return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f} {form.partition(' ')[2]}"
    return how.format(*spread_of(records))


def forgetting(measured: Measured, file: str, where: Mapping) -> list[float]:
    """By how much each seed's loss grows without the tokens before the last 1,024, in 0.0001 nats."""
    kept, dropped = (measured.values(file, **where, metric=x) for x in ("loss", "loss_without_older_past"))
    return [1e4 * (b - a) for a, b in zip(kept, dropped)]


def most_of_forgetting(measured: Measured, file: str, where: Mapping) -> str:
    """Of all seeds and ranges of positions, rounded up."""
    tasks = unique(measured.find(file, **where), "task")
    most = max(abs(x) for task in tasks for x in forgetting(measured, file, {**where, "task": task}))
    return f"{math.ceil(most) / 1e4:.4f}"


def distance(measured: Measured, file: str, where: Mapping) -> str:
    text = show("first .0e", measured, file, where)
    return text if float(text) > UNIFORM else f"below {UNIFORM:.0e}"


def growth(measured: Measured, file: str, where: Mapping) -> str:
    """The quotient of medians at four times the patches."""
    later = {**where, "pixels": 2 * int(where["pixels"])}
    return f"{measured.spread(file, **later).value / measured.spread(file, **where).value:.1f}"


def saved(measured: Measured, file: str, where: Mapping) -> str:
    return "yes" if all(row["saved"].startswith("yes") for row in measured.find(file, **where)) else "no"


def total(measured: Measured, file: str, where: Mapping) -> str:
    """The sum over kernels; registers are not added up."""
    records = measured.find(file, **where)
    registers = where["metric"] == "registers"
    if registers and len(records) > 1:
        return ""
    return f"{sum(float(record['value']) for record in records):.{0 if registers else 1}f}"


def failures(measured: Measured, file: str) -> list[str]:
    return [x for x in unique(measured.find(file), "outcome") if not x.startswith("works")]


def outcome(measured: Measured, file: str, where: Mapping) -> str:
    """Of an export: whether it works, or which of the listed failures it is."""
    (found,) = unique(measured.find(file, **where), "outcome")
    if found.startswith("works"):
        return "works" if found == "works" else "works, cast"
    return f"fails ({1 + failures(measured, file).index(found)})"


def finite(form: str):
    def text(measured: Measured, file: str, where: Mapping) -> str:
        value = measured.spread(file, **where).value
        return form.format(value) if value < math.inf else "fails"

    return text


COMPUTED = {
    "forgetting": lambda *case: plus_minus(gains) if any(gains := forgetting(*case)) else "0",
    "most of forgetting": most_of_forgetting,
    "distance": distance,
    "growth": growth,
    "saved": saved,
    "total": total,
    "outcome": outcome,
    "loss or failure": finite("{:.4f}"),
}


# Rows, columns, tables ------------------------------------------------------------------------------------------------


def unique(records: Sequence[Mapping[str, str]], column: str) -> list[str]:
    return list(dict.fromkeys(record[column] for record in records))


def expand(entry: Mapping) -> Iterator[tuple[str, dict]]:
    """The title and the entries of each row or column that one description stands for."""
    names = [name for name in entry if name != "title"]
    choices = []
    for name in names:
        x = entry[name]
        choices.append(list(x.items()) if isinstance(x, dict) else [(v, v) for v in (x if isinstance(x, list) else [x])])
    for chosen in itertools.product(*choices):
        titles = {name: title for name, (_, title) in zip(names, chosen)}
        yield entry.get("title", "").format(**titles), {name: value for name, (value, _) in zip(names, chosen)}


def resolve(*entries: Mapping) -> dict:
    """Entries taken together, the later ones first, with the text of those that begin with an underscore filled in."""
    merged = {name: x for entry in entries for name, x in entry.items()}
    texts = {name: x for name, x in merged.items() if name.startswith("_")}
    filled = {
        name: x.format(**texts) if isinstance(x, str) and "{_" in x else x for name, x in merged.items() if name not in texts
    }
    return {name: x for name, x in filled.items() if name not in DESCRIBED}


def make_cell(table: Mapping, measured: Measured, *entries: Mapping) -> str:
    shared = table.get("where", {}), table.get("cell", {})
    last = {name: x for entry in (table, *shared, *entries) for name, x in entry.items()}
    file, where = last.get("file", "results"), resolve(*shared, *entries)
    try:
        return show(last["show"], measured, file, where) + last.get("after", "")
    except LookupError:
        if table.get("sparse") and not measured.has(file, **where):
            return ""
        raise


def make_number(cell: Mapping, measured: Measured) -> str:
    """A cell outside of tables."""
    return make_cell({}, measured, cell)


def make_body(table: Mapping, measured: Measured) -> str:
    """The table alone."""
    columns = [column for entry in table.get("columns", []) for column in expand(entry)]
    lines = []
    for row in table["rows"]:
        if "cells" in row:
            lines.append([x if isinstance(x, str) else make_cell(table, measured, x) for x in row["cells"]])
            continue
        for title, entries in expand(row):
            cells = [make_cell(table, measured, column, entries) for _, column in columns]
            if any(cells):
                lines.append([*title.split(" | "), *cells])
    head = [*table.get("head", "").split(" | "), *(title for title, _ in columns)]
    return markdown(head, lines)


def make_table(table: Mapping, measured: Measured) -> str:
    """The table, with the settings and commands of its records around it."""
    parts = [make_body(table, measured)]
    file = table.get("file", "results")
    if table.get("causes"):
        parts.append("\n".join(f"{number}. `{found}`" for number, found in enumerate(failures(measured, file), 1)))
    if table.get("commands", True):
        records = measured.find(file, **(table.get("source") or table.get("where", {})))
        parts = [settings(records), *parts] if table.get("settings") else parts
        parts.append(commands(records))
    return "\n\n".join(parts)


def settings(records: Sequence[Mapping[str, str]]) -> str:
    """Sizes and steps that records share, in words."""

    def values(column):
        *others, last = (f"{x:,}" for x in sorted({int(record[column]) for record in records} - {0}))
        return f"{', '.join(others)} or {last}" if others else last

    seeds = len({record["seed"] for record in records})
    return f"Width {values('width')}, {values('layers')} layers, {values('steps')} steps, {seeds} seed{'s' * (seeds > 1)}."


# Plots ----------------------------------------------------------------------------------------------------------------


def make_panels(panels: Sequence[Mapping], measured: Measured) -> list[Panel]:
    """Of each panel its labels, scales and lines; `x` is the column, and the pattern in it, in which a number is the place."""
    return [
        Panel(
            {title: make_line(panel, measured, entries) for line in panel["lines"] for title, entries in expand(line)},
            panel["xlabel"],
            panel["ylabel"],
            panel.get("xscale", "log"),
            panel.get("yscale", "log"),
        )
        for panel in panels
    ]


def make_line(panel: Mapping, measured: Measured, entries: Mapping) -> dict:
    where = resolve(panel.get("where", {}), entries)
    column, pattern = (text.format(**entries) for text in panel["x"])
    file, points = panel.get("file", "results"), {}
    for entry in unique(measured.find(file, **where), column):
        if place := re.fullmatch(pattern, entry):
            case = {**where, column: entry}
            if min(measured.values(file, **case)) > panel.get("above", -math.inf):
                points[int(place[1].replace(",", ""))] = measured.spread(file, **case)
    return dict(sorted(points.items()))
