# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What ToST's options beyond the paper change, as tables. Rows may still be missing: their cells are empty."""

from language_models import MODELS, OPTIONS
from rows import Measured, commands, markdown, plus_minus, select
from tables_ability import COPY_STEPS, COPY_TASKS, LANGUAGE, LANGUAGE_STEPS, PUBLISHED_FREE, figure, percent, settings
from tables_speed import OP_PASSES, OPTION_POSITIONS, with_options, with_range


PENDING = "*Not measured yet.*"
STEPS = 2000
EARLY = 400
LONGER_COPY_STEPS = (1500, 5000)
RECALL_STEPS = 6000
PAIRS = (4, 8, 16)
ORDER = (*(name for name in MODELS if name not in OPTIONS), *OPTIONS)
SHORT = {  # columns of the top README
    "ToST": "ToST as published",
    "ToST conv token": "conv token",
    "ToST conv, no statistics": "the same without statistics",
    "ToST hybrid": "hybrid",
    "GPT-2": "GPT-2",
    "Mamba-2": "Mamba-2",
}


class Cases:
    """The rows of some cases of the experiments; what is not there is empty."""

    def __init__(self, measured: Measured, **wanted):
        self.rows = select(measured.rows["results"], **wanted)

    def seeds(self, **wanted) -> list[float]:
        return [float(row["value"]) for row in select(self.rows, **wanted)]

    def models(self) -> list[str]:
        """The models that have rows, GPT-2 and the like first."""
        there = {row["model"] for row in self.rows}
        return [name for name in ORDER if name in there]

    def steps(self, model: str) -> list[str]:
        return list(dict.fromkeys(row["steps"] for row in select(self.rows, model=model)))

    def parameters(self, model: str) -> str:
        return f"{int(select(self.rows, model=model)[0]['parameters']):,}"

    def page(self, head: list[str], lines: list[list[str]]) -> str:
        """The table between its settings and its commands."""
        return f"{settings(self.rows)}\n\n{markdown(head, lines)}\n\n{commands(self.rows)}"


def language(measured: Measured) -> str:
    cases = Cases(measured, script="compare_lm.py", steps=STEPS)
    if not cases.rows:
        return PENDING
    texts = [task for task in LANGUAGE if cases.seeds(task=task)]
    metrics = {f"loss at step {EARLY}": f"{EARLY} steps", "loss": f"{STEPS:,} steps"}
    counted = [cases.seeds(task=task, metric="bigram_loss")[:1] for task in texts]  # the same in every run
    lines = [["counts of byte pairs", "", "", *(cell for x in counted for cell in ("", plus_minus(x, ".3f")))]]
    for model in cases.models():
        speed = plus_minus(cases.seeds(model=model, task=texts[0], metric="tokens/s"), ",.0f")
        losses = [
            plus_minus(cases.seeds(model=model, task=task, metric=metric), ".3f") for task in texts for metric in metrics
        ]
        lines.append([model, cases.parameters(model), speed, *losses])
    columns = [f"{task}, {name}" for task in texts for name in metrics.values()]
    return cases.page(["nats per byte", "parameters", "tokens/s in training", *columns], lines)


def copying(measured: Measured) -> str:
    cases = Cases(measured, script="locality.py", context=96)
    cases.rows = [row for row in cases.rows if int(row["steps"]) in LONGER_COPY_STEPS]
    return accuracies(cases, COPY_TASKS)


def recall(measured: Measured) -> str:
    cases = Cases(measured, script="recall.py", steps=RECALL_STEPS)
    return accuracies(cases, tuple(f"{pairs} pairs" for pairs in PAIRS))


def accuracies(cases: Cases, tasks: tuple[str, ...]) -> str:
    """Models by tasks; pending until a model with an option has rows."""
    if not any(OPTIONS.get(model) for model in cases.models()):
        return PENDING
    lines = []
    for model in cases.models():
        for steps in cases.steps(model):
            cells = (percent(cases.seeds(model=model, task=task, steps=steps, metric="accuracy")) for task in tasks)
            lines.append([model, cases.parameters(model), f"{int(steps):,}", *cells])
    return cases.page(["accuracy, %", "parameters", "steps", *tasks], lines)


def long_texts(measured: Measured) -> str:
    """Only the ranges of positions that the variants have read."""
    cases = Cases(measured, script="long_context.py")
    names = {f"{name}, no positions": name for name in OPTIONS}
    there = [model for model in names if cases.seeds(model=model)]
    variants = [model for model in there if model != PUBLISHED_FREE]
    if not variants:
        return PENDING
    tasks = dict.fromkeys(row["task"] for row in select(cases.rows, metric="loss", model=variants[0]))
    cases.rows = [row for row in cases.rows if row["task"] in tasks]
    columns = {"loss": ("nats per token", ".3f"), "entropy_shortfall": ("distance of Pi from uniform", ".0e")}
    lines = [
        [
            task,
            *(
                plus_minus(cases.seeds(model=x, task=task, metric=name), form)
                for name, (_, form) in columns.items()
                for x in there
            ),
        ]
        for task in tasks
    ]
    head = [f"{title}, {names[x]}" for title, _ in columns.values() for x in there]
    return cases.page(["positions", *head], lines)


def decode(measured: Measured) -> str:
    rows = with_options(measured)
    if not rows:
        return PENDING

    def cell(model, position, metric, form):
        found = select(rows, model=model, position=position, metric=metric)
        return form.format(float(found[0]["value"])) if found else ""

    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        times = [cell(model, position, "ms a step", "{:.1f} ms") for position in OPTION_POSITIONS]
        sizes = [cell(model, position, "cache bytes", "{:,.0f} bytes") for position in OPTION_POSITIONS]
        lines.append([model, *times, *sizes])
    head = [f"{what} {position:,}" for what in ("position", "cache at") for position in OPTION_POSITIONS]
    return f"{markdown(['', *head], lines)}\n\n{commands(rows)}"


def in_short(measured: Measured) -> str:
    """What small ToSTs do worse and better than GPT-2s, as published and with the options, for the top README."""
    copying, recalling = {"script": "locality.py", "context": 96, "steps": COPY_STEPS}, {"script": "recall.py"}
    accuracies = {
        "copying the token before": copying | {"task": "copy 1"},
        "copying the token 16 before": copying | {"task": "copy 16"},
        "recalling one of 4 pairs": recalling | {"task": "4 pairs", "steps": RECALL_STEPS},
        "recalling one of 16 pairs": recalling | {"task": "16 pairs", "steps": RECALL_STEPS},
    }
    lines = []
    for title, case in accuracies.items():
        cases = Cases(measured, metric="accuracy", **case)
        values = (percent(cases.seeds(model=model)) for model in SHORT)
        lines.append([f"{title}, accuracy", *(f"{value} %" if value else "" for value in values)])
    for task in LANGUAGE:
        for steps, equal in ((LANGUAGE_STEPS, "width"), (STEPS, "parameters")):
            cases = Cases(measured, script="compare_lm.py", steps=steps, metric="loss", task=task)
            values = (plus_minus(cases.seeds(model=model), ".3f") for model in SHORT)
            lines.append([f"{task}, {steps:,} steps, equal {equal}, nats per byte", *values])
    return markdown(["small models", *SHORT.values()], lines)


IN_SHORT = {"worse": in_short}


def cost(measured: Measured) -> str:
    rows = measured.rows.get("options", [])
    if not rows:
        return PENDING
    names = {"head": "the operator, forgetting per head", "token": "the operator, forgetting per token"}
    lines = []
    for option in dict.fromkeys(row["option"] for row in rows if row["option"] != "none"):
        cells = []
        for code in ("eager", "compiled"):
            for which in OP_PASSES:
                case = {"option": option, "code": code, "pass": which}
                cells.append(with_range(measured.spread("options", metric="this / plain", **case)))
        lines.append([names.get(option, f"an attention layer, {option}"), *cells])
    head = [f"{code}, {which}" for code in ("eager", "compiled") for which in OP_PASSES]
    return f"{markdown(['times the plain time', *head], lines)}\n\n{commands(rows)}"


TABLES = {
    "options, language": language,
    "options, copying": copying,
    "options, recall": recall,
    "options, long texts": long_texts,
    "options, decode": decode,
    "options, cost": cost,
}
LONGER = {"script": "compare_lm.py", "steps": STEPS, "task": "tiny Shakespeare", "metric": "loss"}
FIGURES = {
    "copy 1, conv token": figure(script="locality.py", context=96, steps=COPY_STEPS, task="copy 1", model="ToST conv token"),
    "16 pairs, hybrid": figure(script="recall.py", steps=RECALL_STEPS, task="16 pairs", model="ToST hybrid"),
    "tiny Shakespeare, conv token": figure(**LONGER, model="ToST conv token"),
    "tiny Shakespeare, no statistics": figure(**LONGER, model="ToST conv, no statistics"),
    "tiny Shakespeare, GPT-2 longer": figure(**LONGER, model="GPT-2"),
}
