# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What small models learned, as tables, figures and plots: results/results.csv, the rows of the experiments."""

import math

from rows import Measured, Panel, around_mean, commands, markdown, plus_minus


MODELS = ("ToST", "GPT-2", "Mamba-2")
COPY_TASKS = ("copy 1", "copy 4", "copy 16", "copy 64", "majority")
RECALL = {  # steps to what is said of them
    "1200": ("texts of 4 and 8 pairs, 1,200 steps, the better of two learning rates", (4, 8)),
    "6000": ("4 to 16 pairs, 6,000 steps", (4, 8, 16)),
    "600": ("4 to 64 pairs, 600 steps", (4, 8, 16, 32, 64)),
}
PAIRS = (4, 8, 16, 32, 64)
COPY_STEPS = 300
LANGUAGE_STEPS = 400
IMAGE_STEPS = 300
PUBLISHED_FREE = "ToST, no positions"  # as published, but for the positions
LANGUAGE = ("tiny Shakespeare", "books")
LAYERS = (1, 2, 3, 4)
POSITIONS = (1, 8, 32, 128)
RESOLUTION = 1e-9  # of a distance from uniform: the membership is float32


def percent(values: list[float]) -> str:
    return plus_minus([100 * x for x in values])


def accuracy(measured: Measured, **wanted) -> str:
    return percent(measured.seeds(metric="accuracy", **wanted))


def only(measured: Measured, column: str, **wanted) -> str:
    """The one entry that all the wanted rows have in a column."""
    (value,) = {row[column] for row in measured.find("results", **wanted)}
    return value


def parameters(measured: Measured, **wanted) -> str:
    return f"{int(only(measured, 'parameters', **wanted)):,}"


def settings(rows: list[dict[str, str]]) -> str:
    """Sizes and steps that rows share, in words."""

    def values(column):
        *others, last = (f"{x:,}" for x in sorted({int(row[column]) for row in rows} - {0}))
        return f"{', '.join(others)} or {last}" if others else last

    seeds = len({row["seed"] for row in rows})
    return f"Width {values('width')}, {values('layers')} layers, {values('steps')} steps, {seeds} seed{'s' * (seeds > 1)}."


def with_source(measured: Measured, table: str, models: tuple[str, ...] = (), **wanted) -> str:
    """A table between its settings and its commands, of all models or of some."""
    rows = [row for row in measured.find("results", **wanted) if not models or row["model"] in models]
    return f"{settings(rows)}\n\n{table}\n\n{commands(rows)}"


# Copying and recalling ------------------------------------------------------------------------------------------------


def copying(measured: Measured) -> str:
    lines = []
    for model in MODELS:
        case = {"script": "locality.py", "context": 96, "steps": COPY_STEPS, "model": model}
        cells = [accuracy(measured, task=task, **case) for task in COPY_TASKS]
        lines.append([model, parameters(measured, **case), *cells])
    table = markdown(["accuracy, %", "parameters", *COPY_TASKS], lines)
    return with_source(measured, table, MODELS, script="locality.py", context=96, steps=COPY_STEPS)


def short_copying(measured: Measured) -> str:
    case = {"script": "locality.py", "context": 8, "model": "ToST", "task": "copy 1"}
    table = markdown(["accuracy, %", "copy 1, sequences of 8 tokens"], [["ToST", accuracy(measured, **case)]])
    return with_source(measured, table, **case)


def recall(measured: Measured) -> str:
    lines = [["knowing only which values occurred", *(f"{100 / n:.3g}" for n in PAIRS)]]
    for steps, (title, pairs) in RECALL.items():
        lines.append([f"*{title}*", *[""] * len(PAIRS)])
        rows = measured.find("results", script="recall.py", steps=steps)
        for model in ("GPT-2", "Mamba-2", "ToST"):
            if any(row["model"] == model for row in rows):
                case = {"script": "recall.py", "steps": steps, "model": model}
                cells = [accuracy(measured, task=f"{n} pairs", **case) for n in pairs]
                lines.append([model, *cells, *[""] * (len(PAIRS) - len(pairs))])
    table = markdown(["accuracy, %", *(f"{n} pairs" for n in PAIRS)], lines)
    return with_source(measured, table, MODELS, script="recall.py")


# Language -------------------------------------------------------------------------------------------------------------


def language(measured: Measured) -> str:
    def losses(model, metric="loss"):
        return [
            plus_minus(
                measured.seeds(script="compare_lm.py", steps=LANGUAGE_STEPS, task=task, model=model, metric=metric), ".3f"
            )
            for task in LANGUAGE
        ]

    counted = [cell.partition(" ")[0] for cell in losses("GPT-2", "bigram_loss")]  # the same at every seed
    lines = [["counts of byte pairs", "", *counted]]
    for model in ("GPT-2", "ToST", "ToST, deeper"):
        case = {"script": "compare_lm.py", "steps": LANGUAGE_STEPS, "model": model}
        name = f"{model.partition(',')[0]}, {only(measured, 'layers', **case)} layers"
        lines.append([name, parameters(measured, **case), *losses(model)])
    table = markdown(["nats per byte", "parameters", *LANGUAGE], lines)
    return with_source(measured, table, script="compare_lm.py", steps=LANGUAGE_STEPS)


# Long texts -----------------------------------------------------------------------------------------------------------


def position_ranges(measured: Measured) -> list[str]:
    rows = measured.find("results", script="long_context.py", model=PUBLISHED_FREE, metric="loss")
    return list(dict.fromkeys(row["task"] for row in rows))


def at_positions(measured: Measured, task: str, metric: str) -> list[float]:
    return measured.seeds(script="long_context.py", model=PUBLISHED_FREE, task=task, metric=metric)


def older_past(measured: Measured, task: str) -> list[float]:
    """By how much each seed's loss grows when what is older than the last 1,024 tokens is thrown away."""
    kept, thrown = (at_positions(measured, task, metric) for metric in ("loss", "loss_without_older_past"))
    return [b - a for a, b in zip(kept, thrown)]


def long_texts(measured: Measured) -> str:
    lines = []
    for task in position_ranges(measured):
        gains = [1e4 * x for x in older_past(measured, task)]
        distance = around_mean(at_positions(measured, task, "entropy_shortfall")).value
        lines.append(
            [
                task,
                plus_minus(at_positions(measured, task, "loss"), ".3f"),
                plus_minus(gains) if any(gains) else "0",
                f"{distance:.0e}" if distance > RESOLUTION else f"below {RESOLUTION:.0e}",
            ]
        )
    head = [
        "positions",
        "nats per token",
        "more without the older past, 0.0001 nats",
        "distance of Pi from uniform",
    ]
    return with_source(measured, markdown(head, lines), (PUBLISHED_FREE,), script="long_context.py")


def most_of_the_older_past(measured: Measured) -> str:
    """Of all seeds and ranges, rounded up."""
    most = max(abs(x) for task in position_ranges(measured) for x in older_past(measured, task))
    return f"{math.ceil(1e4 * most) / 1e4:.4f}"


def plot_long_texts(measured: Measured) -> list[Panel]:
    def line(metric, tasks):
        return {
            int(task.rpartition(" ")[2].replace(",", "")): around_mean(at_positions(measured, task, metric)) for task in tasks
        }

    tasks = position_ranges(measured)
    names = {"loss": "whole past", "loss_without_older_past": "last 1,024 tokens at most"}
    losses = {label: line(metric, tasks) for metric, label in names.items()}
    seen = [task for task in tasks if min(at_positions(measured, task, "entropy_shortfall")) > RESOLUTION]
    names = {"entropy_shortfall": "mean of the layers", "entropy_shortfall_highest_layer": "highest layer"}
    distances = {label: line(metric, seen) for metric, label in names.items()}
    end = "end of the range of positions (tokens)"
    return [
        Panel(losses, end, "loss (nats per token)", yscale="linear"),
        Panel(distances, end, "1 - entropy of the membership / ln(heads)"),
    ]


# Images and observations ----------------------------------------------------------------------------------------------


def images(measured: Measured) -> str:
    cases = [("compare_vision.py", "TSSA", "TSSA, 32 channels per head")]
    cases += [("compare_vision.py", name, name) for name in ("XCA", "softmax")]
    cases += [("ablations.py", f"{n} channels a head", f"TSSA, {n} channels per head") for n in (16, 64, 128)]
    ablations = ("raw scores", "ISTA", "raw scores, ISTA")
    cases += [("ablations.py", f"32 channels a head, {x}", f"TSSA, 32 channels per head, {x}") for x in ablations]
    lines = []
    for script, model, name in cases:
        case = {"script": script, "model": model, "steps": IMAGE_STEPS}
        lines.append([name, parameters(measured, **case), accuracy(measured, **case)])
    table = markdown(["trunk or head", "parameters", "accuracy, %"], lines)
    rows = [
        row for x in ("compare_vision.py", "ablations.py") for row in measured.find("results", script=x, steps=IMAGE_STEPS)
    ]
    return f"{settings(rows)}\n\n{table}\n\n{commands(rows)}"


def by_layer(measured: Measured, task: str, quantities: dict[str, str], form: str) -> list[list[str]]:
    lines = []
    for metric, name in quantities.items():
        for state in ("untrained", "trained"):
            case = {"script": "observations.py", "task": task, "model": state}
            cells = [plus_minus(measured.seeds(metric=f"{metric}, layer {i}", **case), form) for i in LAYERS]
            lines.append([name, state, *cells])
    return lines


def observed_compression(measured: Measured) -> str:
    lines = []
    for task, title in (("images", "CIFAR-10"), ("text", "Shakespeare")):
        quantities = {
            f"{quantity}, unit {unit}": f"{title}, {name}, {unit} at unit norm"
            for unit in ("tokens", "channels")
            for quantity, name in (("variational", "compression term"), ("coding rate", "coding rate"))
        }
        lines += by_layer(measured, task, quantities, ".1f")
    table = markdown(["nats", "", *(f"layer {i}" for i in LAYERS)], lines)
    return with_source(measured, table, script="observations.py")


def observed_groups(measured: Measured) -> str:
    names = {"own": "the image's own memberships", "another image's": "another image's", "shuffled": "shuffled"}
    quantities = {f"mutual information, {metric}": name for metric, name in names.items()}
    lines = by_layer(measured, "images", quantities, ".3f")
    return markdown(["adjusted mutual information", "", *(f"layer {i}" for i in LAYERS)], lines)


def observed_flattening(measured: Measured) -> str:
    quantities = {f"distance from uniform, position {x} on": f"from position {x} on" for x in POSITIONS}
    lines = by_layer(measured, "text", quantities, ".4f")
    return markdown(["distance from uniform", "", *(f"layer {i}" for i in LAYERS)], lines)


# Figures --------------------------------------------------------------------------------------------------------------


def figure(metric: str = "accuracy", **wanted):
    """A figure over seeds: accuracies in %, losses in nats."""

    def text(measured: Measured) -> str:
        values = measured.seeds(metric=metric, **wanted)
        return percent(values) if metric == "accuracy" else plus_minus(values, ".3f")

    return text


TABLES = {
    "copying": copying,
    "short copying": short_copying,
    "recall": recall,
    "language": language,
    "long texts": long_texts,
    "images": images,
    "observed compression": observed_compression,
    "observed groups": observed_groups,
    "observed flattening": observed_flattening,
}
FIGURES = {
    **{
        f"copy 1, {name}": figure(script="locality.py", context=96, steps=COPY_STEPS, task="copy 1", model=name)
        for name in ("ToST", "GPT-2")
    },
    **{f"16 pairs, {name}": figure(script="recall.py", steps=6000, task="16 pairs", model=name) for name in ("ToST", "GPT-2")},
    **{
        f"tiny Shakespeare, {name}": figure(
            "loss", script="compare_lm.py", steps=LANGUAGE_STEPS, task="tiny Shakespeare", model=name
        )
        for name in ("ToST", "GPT-2")
    },
    "older past": most_of_the_older_past,
}
PLOTS = {"long_context": plot_long_texts}
