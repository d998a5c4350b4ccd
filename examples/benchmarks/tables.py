# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writes every table, plot and number that the pages cite from the records of results/*.csv. `make results` runs it.

    python examples/benchmarks/tables.py

cited.toml describes them. Tables replace what stands between `<!-- results: NAME -->` and `<!-- end -->` on the pages,
single numbers what stands between `<!-- figure: NAME -->` and `<!-- end -->`, or between the same marks as Jinja comments
(`{# figure: NAME #}`, `{# end #}`) in the template of model cards; the speed tables of the cards go to hub/figures.json and
the plots beside the records. A name without records is an error.

A table has `rows` and `columns`; a cell is selected by the entries of both. An entry may be

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

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import plan
from records import RESULTS, ROOT, Records, Spread, describe_origin, markdown, plus_minus, repeat_command, where

from tost_hf.files import staged_file


PAGES = (
    ROOT / "README.md",
    *sorted(Path(__file__).parent.glob("*.md")),
    ROOT / "examples/accelerate/README.md",
    ROOT / "src/tost_hf/hub/card_template.md",
)
CARD_FIGURES = ROOT / "src/tost_hf/hub/figures.json"
MARKED = re.compile(
    r"(?P<open><!--|\{#) (?P<kind>results|figure): (?P<name>[^>#]+?) (?P<close>-->|#\}).*?(?P=open) end (?P=close)", re.DOTALL
)
CITED = tomllib.loads(Path(__file__).with_name("cited.toml").read_text(encoding="utf-8"))


# Cells ----------------------------------------------------------------------------------------------------------------

DESCRIBED = ("show", "file", "after")  # of a cell: keys that select no records
FORMATS = {
    "percent": "mean .1f%",
    "ms": "three digits ms",
    "range": "{0:.2f} ({1:.2f} to {2:.2f})",
    "MiB": "{0:,.0f} MiB",
    "bytes": "{0:,.0f} bytes",
}


def unique(records: Iterable[Mapping[str, str]], column: str) -> list[str]:
    return list(dict.fromkeys(record[column] for record in records))


def show(how: str, records: Records, file: str, case: Mapping[str, object]) -> str:
    """The text of a cell.

    Raises:
        LookupError: there are no such records, or several of one case.
    """
    how = FORMATS.get(how, how)
    if how in COMPUTED:
        return COMPUTED[how](records, file, case)
    kind, _, form = how.partition(" ")
    if kind == "entry":
        (entry,) = unique(records.find(file, **case), form)
        return f"{int(entry):,}"
    if kind in ("mean", "first"):
        scale = 100 if form.endswith("%") else 1
        text = plus_minus([scale * value for value in records.values(file, **case)], form.rstrip("%"))
        return text if kind == "mean" else text.partition(" ")[0]
    spread = records.spread(file, **case)
    if spread.value == math.inf:
        return "fails"
    if kind == "three":  # significant digits, at least, and a unit
        return f"{spread.value:,.{max(0, 2 - math.floor(math.log10(abs(spread.value))))}f} {form.partition(' ')[2]}"
    return how.format(*spread)


def older_token_gains(records: Records, file: str, case: Mapping) -> list[float]:
    """By how much each seed's loss grows without the tokens before the last 1,024, in 0.0001 nats."""
    whole, recent = (records.values(file, **case, metric=x) for x in ("loss", "loss_with_state_reset"))
    return [1e4 * (b - a) for a, b in zip(whole, recent)]


def max_older_token_gain(records: Records, file: str, case: Mapping) -> str:
    """Of all seeds and ranges of positions, rounded up."""
    tasks = unique(records.find(file, **case), "task")
    most = max(abs(x) for task in tasks for x in older_token_gains(records, file, {**case, "task": task}))
    return f"{math.ceil(most) / 1e4:.4f}"


def saved(records: Records, file: str, case: Mapping) -> str:
    return "yes" if all(record["saved"].startswith("yes") for record in records.find(file, **case)) else "no"


def failures(records: Records, file: str) -> list[str]:
    return [x for x in unique(records.find(file), "outcome") if not x.startswith("works")]


def outcome(records: Records, file: str, case: Mapping) -> str:
    """Of an export: whether it works, or which of the listed failures it is."""
    (found,) = unique(records.find(file, **case), "outcome")
    if found.startswith("works"):
        return "works" if found == "works" else "works, cast"
    return f"fails ({1 + failures(records, file).index(found)})"


COMPUTED = {
    "older token gain": lambda *case: plus_minus(gains) if any(gains := older_token_gains(*case)) else "0",
    "max older token gain": max_older_token_gain,
    "saved": saved,
    "outcome": outcome,
}


# Rows, columns, tables ------------------------------------------------------------------------------------------------


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
    """Merged entries, the later ones first, with the text of those that begin with an underscore filled in."""
    merged = {name: x for entry in entries for name, x in entry.items()}
    texts = {name: x for name, x in merged.items() if name.startswith("_")}
    filled = {name: x.format(**texts) if isinstance(x, str) and "{_" in x else x for name, x in merged.items()}
    return {name: x for name, x in filled.items() if name not in (*texts, *DESCRIBED)}


def make_cell(table: Mapping, records: Records, *entries: Mapping) -> str:
    shared = table.get("where", {}), table.get("cell", {})
    last = {name: x for entry in (table, *shared, *entries) for name, x in entry.items()}
    file, case = last.get("file", "results"), resolve(*shared, *entries)
    if table.get("sparse") and not records.has(file, **case):
        return ""
    return show(last["show"], records, file, case) + last.get("after", "")


def make_number(cell: Mapping, records: Records) -> str:
    """A cell outside of tables."""
    return make_cell({}, records, cell)


def make_body(table: Mapping, records: Records) -> str:
    """The table alone."""
    columns = [column for entry in table.get("columns", []) for column in expand(entry)]
    lines = []
    for row in table["rows"]:
        if "cells" in row:
            lines.append([x if isinstance(x, str) else make_cell(table, records, x) for x in row["cells"]])
            continue
        for title, entries in expand(row):
            cells = [make_cell(table, records, column, entries) for _, column in columns]
            if any(cells):
                lines.append([*title.split(" | "), *cells])
    head = [*table.get("head", "").split(" | "), *(title for title, _ in columns)]
    return markdown(head, lines)


def make_table(table: Mapping, records: Records) -> str:
    """The table, with the settings and commands of its records around it."""
    parts = [make_body(table, records)]
    file = table.get("file", "results")
    if table.get("causes"):
        parts.append("\n".join(f"{number}. `{found}`" for number, found in enumerate(failures(records, file), 1)))
    if table.get("commands", True):
        sources = records.find(file, **(table.get("source") or table.get("where", {})))
        parts = [settings(sources), *parts] if table.get("settings") else parts
        parts.append(describe_origin(sources))
    return "\n\n".join(parts)


def settings(records: Sequence[Mapping[str, str]]) -> str:
    """Sizes and steps that records share, in words."""

    def values(column):
        *others, last = (f"{x:,}" for x in sorted({int(record[column]) for record in records} - {0}))
        return f"{', '.join(others)} or {last}" if others else last

    seeds = len({record["seed"] for record in records})
    return f"Width {values('width')}, {values('layers')} layers, {values('steps')} steps, {seeds} seed{'s' * (seeds > 1)}."


# Plots ----------------------------------------------------------------------------------------------------------------

MARKERS = ("o", "s", "^", "D", "v", "P")  # lines can be told apart without colours


class Panel(NamedTuple):
    """The content of one pair of axes: name of a line to its points, each a size and the spread measured there."""

    lines: Mapping[str, Mapping[float, Spread]]
    xlabel: str
    ylabel: str
    xscale: str = "log"
    yscale: str = "log"


def make_panels(panels: Sequence[Mapping], records: Records) -> list[Panel]:
    """Of each panel its labels, scales and lines; `x` is the column, and the pattern in it whose number is the position."""
    return [
        Panel(
            {title: make_line(panel, records, entries) for line in panel["lines"] for title, entries in expand(line)},
            *(panel[name] for name in ("xlabel", "ylabel")),
            *(panel.get(name, "log") for name in ("xscale", "yscale")),
        )
        for panel in panels
    ]


def make_line(panel: Mapping, records: Records, entries: Mapping) -> dict:
    selected = resolve(panel.get("where", {}), entries)
    column, pattern = (text.format(**entries) for text in panel["x"])
    file, points = panel.get("file", "results"), {}
    for entry in unique(records.find(file, **selected), column):
        if position := re.fullmatch(pattern, entry):
            case = {**selected, column: entry}
            if min(records.values(file, **case)) > panel.get("above", -math.inf):
                points[int(position[1].replace(",", ""))] = records.spread(file, **case)
    return dict(sorted(points.items()))


def fingerprint(panels: Iterable[Panel]) -> str:
    """Of what a plot shows; stored in the picture, to tell whether it is up to date."""
    return "rows " + hashlib.sha256(repr(panels).encode()).hexdigest()[:16]


def plot(path: Path, panels: Sequence[Panel]) -> None:
    """Lines with the range as error bars, one picture beside the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (6 if len(panels) == 1 else 5 * len(panels), 4)
    figure, all_axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(all_axes[0], panels):
        for marker, (label, points) in zip(itertools.cycle(MARKERS), panel.lines.items()):
            values = list(points.values())
            errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
            axes.errorbar(
                list(points), [v.value for v in values], yerr=errors, marker=marker, markersize=4, capsize=2, label=label
            )
        axes.set(xscale=panel.xscale, yscale=panel.yscale, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    with staged_file(path) as staged:
        figure.savefig(staged, format="png", dpi=120, metadata={"Description": fingerprint(panels)})
    plt.close(figure)
    print(f"wrote {path}")


# Pages ----------------------------------------------------------------------------------------------------------------

KINDS = {
    "results": {name: partial(make_table, table) for name, table in CITED["tables"].items()} | plan.TABLES,
    "figure": {name: partial(make_number, cell) for name, cell in CITED["figures"].items()},
}
PLOTS = {name: partial(make_panels, panels) for name, panels in CITED["plots"].items()}


def fill(text: str, records: Records) -> str:
    """The text with everything that is marked in it written again.

    Raises:
        LookupError: there is no table or figure of a name, or records of one are missing.
    """

    def replace(match: re.Match) -> str:
        kind, name = match["kind"], match["name"]
        if name not in KINDS[kind]:
            raise LookupError(f"There is no {name!r} among the {kind} of cited.toml: {', '.join(KINDS[kind])}.")
        content = KINDS[kind][name](records)
        content = f"\n{content}\n" if kind == "results" else content
        opened, closed = match["open"], match["close"]
        return f"{opened} {kind}: {name} {closed}{content}{opened} end {closed}"

    return MARKED.sub(replace, text)


def card_figures(records: Records) -> str:
    """The content of figures.json: name of a size to text, table and command of its card's section on cost."""
    figures = {}
    for name, card in CITED["cards"].items():
        table = CITED["tables"][card["table"]]
        sources = records.find(table["file"], **(table.get("source") or table["where"]))
        (command,) = dict.fromkeys(map(repeat_command, sources))
        (dtype,) = unique(sources, "dtype")
        processor, _, software = where(sources).partition(", ")
        text = (
            f"{card['text']}, measured by the authors of `tost_hf` on two cores of an {processor} (CPU only, {dtype}, eager; "
            f"{software}), with random weights, batch 1:"
        )
        figures[name] = {"text": text, "table": make_body(table | {"rows": card["rows"]}, records), "command": command}
    return json.dumps(figures, indent=2, ensure_ascii=False) + "\n"


def pages(records: Records) -> dict[Path, str]:
    """The content of every file that cites results."""
    return {path: fill(path.read_text(), records) for path in PAGES} | {CARD_FIGURES: card_figures(records)}


def main() -> None:
    records = Records(RESULTS)
    for path, text in pages(records).items():
        if not path.exists() or path.read_text() != text:
            with staged_file(path) as staged:
                staged.write_text(text)
            print(f"wrote {path}")
    for name, make in PLOTS.items():
        path, panels = RESULTS / f"{name}.png", make(records)
        if not path.exists() or fingerprint(panels).encode() not in path.read_bytes():
            plot(path, panels)


if __name__ == "__main__":
    main()
