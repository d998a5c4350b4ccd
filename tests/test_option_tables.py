"""The tables of ToST's options: of whatever rows there are, with nothing made up for those that are not."""

import sys
from pathlib import Path

import pytest


sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import rows
import tables_options


ORIGIN = {"machine": "a machine, 1 thread", "versions": "torch 2.13.0", "width": "64", "layers": "6", "parameters": "1234"}


def results_row(script: str, model: str, task: str, steps: int, context: int, metric: str, value: float, seed: int = 0):
    case = {"script": script, "model": model, "task": task, "steps": str(steps), "context": str(context)}
    command = f"python examples/benchmarks/{script} --models {model}"
    return ORIGIN | case | {"command": command, "metric": metric, "value": str(value), "seed": str(seed)}


def decode_row(model: str, position: int, metric: str, value: float, models: str = " --models x"):
    command = f"python examples/benchmarks/decode.py{models}"
    return ORIGIN | {"model": model, "position": str(position), "metric": metric, "value": str(value), "command": command}


def cost_row(code: str, which: str, value: float):
    case = {"option": "head", "code": code, "pass": which, "metric": "this / plain"}
    spread = {"value": str(value), "low": str(value - 0.1), "high": str(value + 0.1)}
    return ORIGIN | case | spread | {"command": "python examples/benchmarks/options.py"}


LANGUAGE = ("compare_lm.py", "ToST conv", "tiny Shakespeare", 2000, 128)
CASES = {
    "options, language": (
        [
            results_row(*LANGUAGE, "loss", 1.5),
            results_row(*LANGUAGE, "loss", 1.7, seed=1),
            results_row(*LANGUAGE, "bigram_loss", 2.48),
            results_row(*LANGUAGE, "bigram_loss", 2.48, seed=1),
            results_row("compare_lm.py", "GPT-2", "books", 2000, 128, "loss at step 400", 2.25),
        ],
        ["| ToST conv | 1,234 | | | 1.600 ± 0.141 | | |", "| GPT-2 | 1,234 | | | | 2.250 | |"],
    ),
    "options, copying": (
        [
            results_row("locality.py", "ToST conv", "copy 1", 1500, 96, "accuracy", 0.995),
            results_row("locality.py", "ToST conv", "copy 1", 5000, 96, "accuracy", 0.999),
        ],
        ["| ToST conv | 1,234 | 1,500 | 99.5 | | | | |", "| ToST conv | 1,234 | 5,000 | 99.9 | | | | |"],
    ),
    "options, recall": (
        [results_row("recall.py", "ToST token", "8 pairs", 6000, 32, "accuracy", 0.5)],
        ["| ToST token | 1,234 | 6,000 | | 50.0 | |"],
    ),
    "options, long texts": (
        [
            results_row("long_context.py", "ToST, no positions", "0 to 64", 400, 1024, "loss", 4.5),
            results_row("long_context.py", "ToST, no positions", "64 to 128", 400, 1024, "loss", 4.25),
            results_row("long_context.py", "ToST token, no positions", "0 to 64", 400, 1024, "entropy_shortfall", 0.002),
            results_row("long_context.py", "ToST token, no positions", "0 to 64", 400, 1024, "loss", 4.125),
        ],
        ["| positions | nats per token, ToST | nats per token, ToST token |", "| 0 to 64 | 4.500 | 4.125 | | 2e-03 |"],
    ),
    "options, cost": (
        [
            cost_row(code, which, 1.1 + 0.1 * i)
            for i, (code, which) in enumerate(
                (code, which) for code in ("eager", "compiled") for which in ("forward", "forward + backward")
            )
        ],
        ["per head | 1.10 (1.00 to 1.20) | 1.20 (1.10 to 1.30) | 1.30 (1.20 to 1.40) | 1.40 (1.30 to 1.50) |"],
    ),
    "options, decode": (
        [decode_row("ToST token", 10, "ms a step", 12.34), decode_row("ToST token", 10_000, "cache bytes", 74_304)],
        ["| ToST token | 12.3 ms | | | 74,304 bytes |"],
    ),
}


class Rows(rows.Measured):
    """Rows of a test."""

    def __init__(self, **found):
        self.rows = {"results": [], "decode": [], "options": []} | found


@pytest.mark.parametrize("name", tables_options.TABLES)
def test_a_table_shows_the_rows_there_are(name):
    found, lines = CASES[name]
    file = {"options, decode": "decode", "options, cost": "options"}.get(name, "results")
    measured = Rows(**{file: found})
    table = tables_options.TABLES[name](measured)
    assert all(line in table for line in lines), table
    assert all(row["command"] in table for row in found)


@pytest.mark.parametrize("name", tables_options.TABLES)
def test_without_rows_of_options_it_says_so(name):
    published = [
        results_row("compare_lm.py", "ToST", "books", 400, 128, "loss", 2.5),
        results_row("locality.py", "ToST", "copy 1", 1500, 96, "accuracy", 0.06),
        results_row("recall.py", "ToST", "8 pairs", 6000, 32, "accuracy", 0.1),
        results_row("long_context.py", "ToST, no positions", "0 to 64", 400, 1024, "loss", 4.5),
    ]
    assert (
        tables_options.TABLES[name](Rows(results=published, decode=[decode_row("ToST", 10, "ms a step", 1, models="")]))
        == "*Not measured yet.*"
    )


def test_in_short_leaves_empty_what_was_not_measured():
    found = [
        results_row("locality.py", "ToST hybrid", "copy 1", 300, 96, "accuracy", 0.995),
        results_row("compare_lm.py", "ToST conv token", "books", 2000, 128, "loss", 1.5),
    ]
    table = tables_options.in_short(Rows(results=found))
    assert "| copying the token before, accuracy | | | | 99.5 % | |" in table
    assert "| books, 2,000 steps, equal parameters, nats per byte | | 1.500 | | | |" in table
