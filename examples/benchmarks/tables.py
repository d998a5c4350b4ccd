# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Every table, plot and figure that this repository cites, made of the rows of results/*.csv. `make results` runs it.

    python examples/benchmarks/tables.py

Fills what stands between `<!-- results: NAME -->` (a table) or `<!-- figure: NAME -->` (a number) and `<!-- end -->` in
README.md, in the README beside this file and in that of ../accelerate, and between the same marks as Jinja comments
(`{# figure: NAME #}`, `{# end #}`) in the template of model cards; writes the speed tables of the cards (hub/figures.json);
draws the plots beside the rows. What the rows do not hold cannot be cited: a name without its rows is an error, but for the
tables of options, which say so. The tables of plan.py are computed and need no rows.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import plan
import tables_ability
import tables_checks
import tables_lra
import tables_options
import tables_speed
from rows import RESULTS, ROOT, Measured, Panel, plot

from tost_hf.files import staged_file


PAGES = (
    ROOT / "README.md",
    Path(__file__).with_name("README.md"),
    ROOT / "examples/accelerate/README.md",
    ROOT / "src/tost_hf/hub/card_template.md",
)
CARD_FIGURES = ROOT / "src/tost_hf/hub/figures.json"
MARKED = re.compile(
    r"(?P<open><!--|\{#) (?P<kind>results|figure): (?P<name>[^>#]+?) (?P<close>-->|#\}).*?(?P=open) end (?P=close)", re.DOTALL
)
KINDS = {
    "results": tables_ability.TABLES
    | tables_lra.TABLES
    | tables_checks.TABLES
    | tables_speed.TABLES
    | tables_options.TABLES
    | tables_options.IN_SHORT
    | plan.TABLES,
    "figure": tables_ability.FIGURES | tables_speed.FIGURES | tables_options.FIGURES,
}
PLOTS: dict[str, Callable[[Measured], list[Panel]]] = tables_ability.PLOTS | tables_checks.PLOTS | tables_speed.PLOTS


def fill(text: str, measured: Measured) -> str:
    """The text with everything that is marked in it written again.

    Raises:
        LookupError: there is no table or figure of a name, or rows of one are missing.
    """

    def replace(match: re.Match) -> str:
        kind, name = match["kind"], match["name"]
        if name not in KINDS[kind]:
            raise LookupError(f"There is no {name!r} among the {kind} of tables.py: {', '.join(KINDS[kind])}.")
        content = KINDS[kind][name](measured)
        content = f"\n{content}\n" if kind == "results" else content
        opened, closed = match["open"], match["close"]
        return f"{opened} {kind}: {name} {closed}{content}{opened} end {closed}"

    return MARKED.sub(replace, text)


def card_figures(measured: Measured) -> str:
    """The content of figures.json."""
    return json.dumps(tables_speed.for_cards(measured), indent=2, ensure_ascii=False) + "\n"


def pages(measured: Measured) -> dict[Path, str]:
    """Every file with cited figures, and what it is to hold."""
    return {path: fill(path.read_text(), measured) for path in PAGES} | {CARD_FIGURES: card_figures(measured)}


def fingerprint(panels: Iterable[Panel]) -> str:
    """By which a plot is known to show the rows as they are; it is kept inside the picture."""
    return "rows " + hashlib.sha256(repr(panels).encode()).hexdigest()[:16]


def main() -> None:
    measured = Measured(RESULTS)
    for path, text in pages(measured).items():
        if not path.exists() or path.read_text() != text:
            with staged_file(path) as staged:
                staged.write_text(text)
            print(f"wrote {path}")
    for name, make in PLOTS.items():
        path, panels = RESULTS / f"{name}.png", make(measured)
        note = fingerprint(panels)
        if not path.exists() or note.encode() not in path.read_bytes():
            plot(path, *panels, note=note)


if __name__ == "__main__":
    main()
