# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Writes every table, plot and number that this repository cites from the records of results/*.csv. `make results` runs it.

    python examples/benchmarks/tables.py

cited.toml describes the tables. They replace what stands between `<!-- results: NAME -->` (a table) or `<!-- figure: NAME -->`
(a number) and `<!-- end -->` in README.md, in the README beside this file and in that of ../accelerate, and between the same
marks as Jinja comments (`{# figure: NAME #}`, `{# end #}`) in the template of model cards; the speed tables of the cards go to
hub/figures.json and the plots beside the records. Only what was measured can be cited: a name without records is an error.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import plan
from rows import RESULTS, ROOT, Measured, Panel, plot, where
from table_builder import make_body, make_number, make_panels, make_table, unique

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


CITED = tomllib.loads(Path(__file__).with_name("cited.toml").read_text(encoding="utf-8"))
KINDS = {
    "results": {name: partial(make_table, table) for name, table in CITED["tables"].items()} | plan.TABLES,
    "figure": {name: partial(make_number, cell) for name, cell in CITED["figures"].items()},
}
PLOTS = {name: partial(make_panels, panels) for name, panels in CITED["plots"].items()}


def fill(text: str, measured: Measured) -> str:
    """The text with everything that is marked in it written again.

    Raises:
        LookupError: there is no table or figure of a name, or records of one are missing.
    """

    def replace(match: re.Match) -> str:
        kind, name = match["kind"], match["name"]
        if name not in KINDS[kind]:
            raise LookupError(f"There is no {name!r} among the {kind} of cited.toml: {', '.join(KINDS[kind])}.")
        content = KINDS[kind][name](measured)
        content = f"\n{content}\n" if kind == "results" else content
        opened, closed = match["open"], match["close"]
        return f"{opened} {kind}: {name} {closed}{content}{opened} end {closed}"

    return MARKED.sub(replace, text)


def card_figures(measured: Measured) -> str:
    """The content of figures.json: name of a size to text, table and command of its card's section on cost."""

    def entry(what: str, name: str, rows: list, source: dict):
        table = CITED["tables"][name]
        records = measured.find(name, **source)
        (command,), (dtype,) = (unique(records, column) for column in ("command", "dtype"))
        processor, _, software = where(records).partition(", ")
        text = (
            f"{what}, measured by the authors of `tost_hf` on two cores of an {processor} (CPU only, {dtype}, eager; "
            f"{software}), with random weights, batch 1:"
        )
        return {"text": text, "table": make_body(table | {"rows": rows}, measured), "command": command}

    decode, resolution = CITED["tables"]["decode"], CITED["tables"]["resolution"]
    rows = resolution["rows"][0]
    sides = [side for side in rows["pixels"] if side != 512]
    figures = {
        "tost-base": entry(
            "A new token, beside transformers' GPT-2 of equal width", "decode", decode["rows"][:1], decode["where"]
        ),
        "tost-vision-small-patch16": entry(
            "An image, beside ViT-small with PyTorch's scaled dot product attention",
            "resolution",
            [rows | {"pixels": sides}],
            resolution["source"],
        ),
    }
    return json.dumps(figures, indent=2, ensure_ascii=False) + "\n"


def pages(measured: Measured) -> dict[Path, str]:
    """The content of every file that cites results."""
    return {path: fill(path.read_text(), measured) for path in PAGES} | {CARD_FIGURES: card_figures(measured)}


def fingerprint(panels: Iterable[Panel]) -> str:
    """Of what a plot shows; kept inside the picture, to tell whether it shows the records as they are."""
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
