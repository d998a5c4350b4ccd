"""The records and what is cited of them: every table, plot and number stands as `make results` would write it."""

import argparse
import csv
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))

import records  # noqa: E402
import run  # noqa: E402
import tables  # noqa: E402

from tost_hf.hub.cards import preset_card  # noqa: E402


TEXT = "\n".join(path.read_text() for path in sorted(BENCHMARKS.glob("*.md")))
ALLOWED = {  # numbers in the page's own words, and what they are
    "6.25": "chance of one in 16 symbols",
    "96": "tokens of a text to copy in",
    "16": "symbols to copy; pixels of a patch",
    "1,024": "tokens: trained length, rows of a published table of positions, the operator's length",
    "256": "how many times the trained length is read; width and tokens in training",
    "32": "pairs to recall",
    "64": "pairs to recall; channels of a head",
    "100": "tokens: the position up to which a new token is no faster",
    "8,192": "tokens from which on the exponent is taken",
    "400": "epochs in the paper",
    "384": "width in the paper's figure",
    "224": "pixels of an image",
    "12": "heads",
    "8": "heads in the paper's figure",
    "4": "sequences of a batch; layers in training",
    "5": "layers that give ToST GPT-2's parameters in training",
    "1": "sequences of a batch; the formula of the distance from uniform",
    "3.20": "published by the authors",
    "2.84": "published by the authors",
    "2.88": "published by the authors",
    "91.2": "published by the authors",
    "85.2": "published by the authors",
    "87.4": "published by the authors",
    "80.6": "published by the authors",
}


@pytest.fixture(scope="module")
def measured():
    return records.Records()


# Records --------------------------------------------------------------------------------------------------------------


def test_every_record_says_where_it_comes_from(measured):
    for name, found in measured.files.items():
        assert tuple(found[0])[: len(records.ORIGIN_COLUMNS)] == records.ORIGIN_COLUMNS
        for record in found:
            assert all(record[column] for column in (*records.ORIGIN_COLUMNS, "metric", "value")), name
            assert record["script"].removesuffix(".py") in run.BENCHMARKS


def test_commands_of_records_run_today(measured):
    """Their arguments are those of a benchmark."""
    for command in {records.repeat_command(record) for found in measured.files.values() for record in found}:
        assert command.startswith(f"{records.RUNNER} ")
        name, *arguments = shlex.split(command.removeprefix(records.RUNNER))
        run.make_parser(name, run.load_benchmark(name)).parse_args(arguments)


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        ("python examples/benchmarks/decode.py", "decode"),
        ("python examples/benchmarks/decode.py --models 'ToST head' --batch 2", "decode --models 'ToST head' --batch 2"),
        ("python examples/benchmarks/run.py decode --batch 2", "decode --batch 2"),
        ("python examples/benchmarks/run.py decode", "decode"),
    ],
)
def test_repeat_command(recorded, today):
    assert records.repeat_command({"script": "decode.py", "command": recorded}) == f"{records.RUNNER} {today}"


def test_records_are_appended(tmp_path):
    path = tmp_path / "new" / "x.csv"
    records.append_records(path, [{"a": 1, "b": "x, y"}])
    records.append_records(path, [{"a": 2, "b": "z"}, {"a": 3, "b": ""}])
    assert path.read_text() == 'a,b\n1,"x, y"\n2,z\n3,\n'
    with pytest.raises(ValueError, match="move it away"):
        records.append_records(path, [{"a": 1, "c": 2}])
    assert [x.name for x in path.parent.iterdir()] == ["x.csv"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], ""),
        (["--text", "/secret/place", "--name", "a b", "--steps", "7"], " --steps 7 --text TEXT_FOLDER --name 'a b'"),
        (["--steps", "5", "--results", "elsewhere"], ""),
        (["--compile", "--verbose"], " --compile --verbose"),
        (["--no-compile"], " --no-compile"),
        (["--shape", "1", "2", "--shape", "3", "4", "--form", "causal"], " --form causal --shape 1 2 --shape 3 4"),
    ],
)
def test_the_command_names_what_differs_from_the_defaults(arguments, command):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--results")
    parser.add_argument("--text", metavar="TEXT_FOLDER")
    parser.add_argument("--name", default="text")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--form", nargs="+", default=("causal", "bidirectional"))
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("B", "T"))
    args = parser.parse_args(arguments)
    assert records.command_of(parser, args, "recall") == f"{records.RUNNER} recall{command}"


def test_numbers_over_seeds():
    assert records.plus_minus([10, 20, 60]) == "30.0 ± 26.5" and records.plus_minus([0.25], ".2f") == "0.25"
    assert RECORDS.spread("results", model="A", T=8) == pytest.approx((1.625, 1.448, 1.802), abs=1e-3)
    assert records.markdown(["a", ""], [["1", "2"], ["", "3"]]) == "| a | |\n|---|---|\n| 1 | 2 |\n| | 3 |"


# Tables ---------------------------------------------------------------------------------------------------------------


class SomeRecords(records.Records):
    """Records of a test: (model, T, metric) to values, one for each seed, or to the median and range of a speed."""

    def __init__(self, found: dict):
        origin = {
            "script": "op.py",
            "command": "python op.py --repeats 3",
            "machine": "a machine",
            "versions": "torch 2.13.0",
            "width": "64",
            "layers": "6",
        }
        self.files = {"results": [], "speed": []}
        for (model, length, metric), values in found.items():
            case = origin | {"model": model, "T": str(length), "metric": metric, "steps": "400"}
            if isinstance(values, list):
                self.files["results"] += [case | {"value": str(x), "seed": str(seed)} for seed, x in enumerate(values)]
            else:
                self.files["speed"].append(case | dict(zip(("value", "low", "high"), map(str, values))))


RECORDS = SomeRecords(
    {
        ("A", 8, "step 1, loss"): [1.5, 1.75],
        ("A", 16, "step 1, loss"): [1.25, 1.25],
        ("B", 8, "step 1, loss"): [0.5, 0.5],
        ("A", 8, "ms"): (1.234, 1, 2),
        ("A", 8, "GPT-2 / this"): (2, 1.5, 2.5),
    }
)
TABLE = {
    "head": "model | step",
    "cell": {"metric": "step {_step}, loss", "show": "mean .2f"},
    "rows": [{"title": "{model} | {_step}", "model": {"A": "ours", "B": "theirs", "C": "nobody's"}, "_step": 1}],
    "columns": [{"title": "{T:,} tokens", "T": [8, 16]}],
}


def test_a_sparse_table_leaves_empty_what_was_not_measured():
    expected = ["| model | step | 8 tokens | 16 tokens |", "|---|---|---|---|"]
    expected += ["| ours | 1 | 1.62 ± 0.18 | 1.25 ± 0.00 |", "| theirs | 1 | 0.50 ± 0.00 | |"]
    assert tables.make_body(TABLE | {"sparse": True}, RECORDS).splitlines() == expected
    with pytest.raises(LookupError, match=r"no record with .*'T': 16, 'model': 'B'"):
        tables.make_body(TABLE, RECORDS)
    whole = tables.make_table(TABLE | {"sparse": True, "settings": True}, RECORDS)
    assert (
        whole.startswith("Width 64, 6 layers, 400 steps, 2 seeds.\n\n| model")
        and "```bash\npython examples/benchmarks/run.py op --repeats 3\n```" in whole
    )


@pytest.mark.parametrize(
    ("show", "metric", "text"),
    [("ms", "ms", "1.23 ms"), ("range", "GPT-2 / this", "2.00 (1.50 to 2.50)"), ("{0:.1f} x", "ms", "1.2 x")],
)
def test_formats_of_speeds(show, metric, text):
    cell = {"file": "speed", "model": "A", "metric": metric, "show": show, "after": " (GPT-2)"}
    assert tables.make_number(cell, RECORDS) == text + " (GPT-2)"
    row = {"cells": ["as it is", cell]}
    assert tables.make_body({"rows": [row]}, RECORDS).endswith(f"| as it is | {text} (GPT-2) |")


def test_lines_of_plots():
    panel = {"xlabel": "T", "ylabel": "loss", "x": ["T", "(\\d+)"], "above": 0.6, "where": {"metric": "step 1, loss"}}
    (found,) = tables.make_panels([panel | {"lines": [{"title": "{model}", "model": ["A", "B"]}]}], RECORDS)
    assert found.lines["A"][16] == (1.25, 1.25, 1.25) and list(found.lines["A"]) == [8, 16] and not found.lines["B"]


# What is cited --------------------------------------------------------------------------------------------------------


def test_pages_are_up_to_date(measured):
    for path, text in tables.pages(measured).items():
        assert path.read_text() == text, f"{path} is not what its records say: run `make results`"


@pytest.mark.parametrize("name", tables.PLOTS)
def test_plots_are_up_to_date(measured, name):
    picture = (records.RESULTS / f"{name}.png").read_bytes()
    assert tables.fingerprint(tables.PLOTS[name](measured)).encode() in picture, "run `make results`"
    assert f"results/{name}.png" in TEXT


def test_cards_cite_the_figures():
    for name, figures in json.loads(tables.CARD_FIGURES.read_text()).items():
        card = preset_card(name)
        assert figures["table"] in card.text and figures["command"] in card.text


def test_every_table_and_figure_is_cited():
    cited = {(match["kind"], match["name"]) for path in tables.PAGES for match in tables.MARKED.finditer(path.read_text())}
    assert {kind for kind, _ in cited} == set(tables.KINDS)
    spare = {(kind, name) for kind, made in tables.KINDS.items() for name in made} - cited
    assert not spare, "cited nowhere: cite it or remove it"


@pytest.mark.parametrize("name", ["decode", "results"])
def test_a_number_without_its_records_is_an_error(tmp_path, name):
    """Whichever file of records is cut short."""
    folder = shutil.copytree(records.RESULTS, tmp_path / "results")
    head, *lines = (folder / f"{name}.csv").read_text().splitlines(keepends=True)
    (folder / f"{name}.csv").write_text("".join([head, *lines[:3]]))
    with pytest.raises(LookupError, match=f"results/{name}.csv has no record with"):
        tables.pages(records.Records(folder))


def test_another_value_changes_the_page(tmp_path):
    folder = shutil.copytree(records.RESULTS, tmp_path / "results")
    with open(folder / "decode.csv", newline="") as file:
        found = list(csv.DictReader(file))
    found[0]["value"] = "99.9"
    (folder / "decode.csv").unlink()
    records.append_records(folder / "decode.csv", found)
    changed = {path for path, text in tables.pages(records.Records(folder)).items() if path.read_text() != text}
    assert {BENCHMARKS / "speed.md", tables.CARD_FIGURES} <= changed


def test_two_records_of_one_case_are_not_cited(tmp_path):
    folder = shutil.copytree(records.RESULTS, tmp_path / "results")
    for name in ("decode", "results"):
        first = records.read_records(folder / f"{name}.csv")[0]
        records.append_records(folder / f"{name}.csv", [first])
    measured = records.Records(folder)
    with pytest.raises(LookupError, match="has 2 records"):
        tables.KINDS["results"]["decode"](measured)
    with pytest.raises(LookupError, match="cite one, or one for each seed"):
        tables.KINDS["results"]["copying"](measured)


def test_a_name_that_does_not_exist_is_an_error(measured):
    with pytest.raises(LookupError, match="no 'speed of light' among the figure"):
        tables.fill("<!-- figure: speed of light -->1<!-- end -->", measured)


def test_numbers_in_the_text_are_allowed_ones():
    """Everything else stands between marks, in a command, or in a name (GPT-2, float32)."""
    words = tables.MARKED.sub("", TEXT)
    words = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", words, flags=re.DOTALL)
    found = set(re.findall(r"(?<![\w.,-])\d[\d.,]*\d|(?<![\w.,-])\d(?!\w)", words))
    assert found == set(ALLOWED)
