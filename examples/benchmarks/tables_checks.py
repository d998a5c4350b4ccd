# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Three checks of what the paper says of TSSA, as tables and plots: local against global, the bound, memberships from afar."""

import re

from rows import Measured, Panel, around_mean, markdown, plus_minus
from tables_ability import LAYERS, PUBLISHED_FREE, with_source


DIAL = "interactions.py"
BOUND = "tightness.py"
SYNTHETIC = re.compile(r"synthetic, (\d+) % local")


def shares(measured: Measured) -> dict[int, str]:
    """Settings of the dial in %, in order, to the names of their tasks."""
    tasks = {row["task"] for row in measured.find("results", script=DIAL)}
    return dict(sorted((int(found[1]), task) for task in tasks if (found := SYNTHETIC.fullmatch(task))))


def windows(measured: Measured, task: str) -> dict[int, str]:
    """Sizes of windows, in order, to the names of their metrics."""
    metrics = {row["metric"] for row in measured.find("results", script=DIAL, task=task)}
    return dict(sorted((int(metric.rpartition(" ")[2]), metric) for metric in metrics if "window" in metric))


def synthetic(measured: Measured) -> str:
    tasks = shares(measured)
    names = {("GPT-2", "known"): "knowing all but the draw", ("GPT-2", "loss"): "GPT-2", ("ToST", "loss"): "ToST"}
    lines = [
        [name, *(plus_minus(measured.seeds(script=DIAL, task=x, model=model, metric=metric), ".3f") for x in tasks.values())]
        for (model, metric), name in names.items()
    ]
    table = markdown(["nats per token", *(f"{share} % local" for share in tasks)], lines)
    return with_source(measured, table, script=DIAL)


def text(measured: Measured) -> str:
    return shuffled(measured, "text", ("GPT-2", "ToST"), ["nats per byte", "windows of {} words"], 1, ".2f")


def images(measured: Measured) -> str:
    return shuffled(measured, "images", ("softmax", "ToST"), ["accuracy, %", "squares of {0} x {0} patches"], 100, ".1f")


def shuffled(measured: Measured, task: str, models: tuple[str, ...], titles: list[str], scale: float, form: str) -> str:
    """Models by sizes of the windows; `titles` are those of the quantity and of a size."""
    found = windows(measured, task)

    def cell(model, metric):
        return plus_minus([scale * x for x in measured.seeds(script=DIAL, task=task, model=model, metric=metric)], form)

    head = [titles[0], *("in place" if size == 1 else titles[1].format(size) for size in found)]
    return markdown(head, [[model, *(cell(model, metric) for metric in found.values())] for model in models])


def plot_interactions(measured: Measured) -> list[Panel]:
    def line(points, **case):
        return {x: around_mean(measured.seeds(script=DIAL, **(case | found))) for x, found in points.items()}

    dial = {share: {"task": task} for share, task in shares(measured).items()}
    known = line(dial, model="GPT-2", metric="known")
    panels = [
        Panel(
            {"knowing all but the draw": known} | {x: line(dial, model=x, metric="loss") for x in ("GPT-2", "ToST")},
            "tokens that follow from the one two before (%)",
            "synthetic: loss (nats per token)",
            "linear",
            "linear",
        )
    ]
    for task, models, label in (
        ("text", ("GPT-2", "ToST"), "text: loss (nats per byte)"),
        ("images", ("softmax", "ToST"), "images: accuracy"),
    ):
        points = {size: {"metric": metric} for size, metric in windows(measured, task).items()}
        lines = {x: line(points, task=task, model=x) for x in models}
        panels.append(
            Panel(lines, f"window of the shuffled {'words' if task == 'text' else 'patches'}", label, "log", "linear")
        )
    return panels


def steps_watched(measured: Measured, task: str) -> list[int]:
    metrics = {row["metric"] for row in measured.find("results", script=BOUND, task=task)}
    return sorted({int(x.partition(",")[0].removeprefix("step ")) for x in metrics if x.startswith("step ")})


def ratio(measured: Measured, task: str, step: int, layer: int) -> list[float]:
    return measured.seeds(script=BOUND, task=task, metric=f"step {step}, unit tokens, layer {layer}")


def tightness(measured: Measured) -> str:
    lines = []
    for task, title in (("images", "CIFAR-10"), ("text", "Shakespeare")):
        steps = steps_watched(measured, task)
        for step in (steps[0], steps[len(steps) // 2], steps[-1]):
            cells = (plus_minus(ratio(measured, task, step, layer), ".2f") for layer in LAYERS)
            lines.append([title, f"{step:,}", *cells])
    table = markdown(["compression term over coding rate", "steps", *(f"layer {i}" for i in LAYERS)], lines)
    return with_source(measured, table, script=BOUND)


def plot_tightness(measured: Measured) -> list[Panel]:
    panels = []
    for task, title in (("images", "CIFAR-10"), ("text", "Shakespeare")):
        steps = steps_watched(measured, task)
        lines = {f"layer {i}": {step: around_mean(ratio(measured, task, step, i)) for step in steps} for i in LAYERS}
        panels.append(Panel(lines, "step", f"{title}: compression term / coding rate", "linear", "linear"))
    return panels


def plot_memberships(measured: Measured) -> list[Panel]:
    """Distance from uniform with and without forgetting, in the ranges that all have read."""
    names = {PUBLISHED_FREE: "nothing forgotten", "ToST token, no positions": "forgetting per token"}
    lines = {}
    for model, name in names.items():
        found = measured.find("results", script="long_context.py", model=model, metric="entropy_shortfall")
        tasks = dict.fromkeys(row["task"] for row in found)
        values = {x: measured.seeds(script="long_context.py", model=model, task=x, metric="entropy_shortfall") for x in tasks}
        ends = {int(x.rpartition(" ")[2].replace(",", "")): around_mean(y) for x, y in values.items() if min(y) > 1e-9}
        lines[name] = ends
    return [Panel(lines, "end of the range of positions (tokens)", "1 - entropy of the membership / ln(heads)")]


TABLES = {
    "local and global, synthetic": synthetic,
    "local and global, text": text,
    "local and global, images": images,
    "tightness": tightness,
}
PLOTS = {"interactions": plot_interactions, "tightness": plot_tightness, "memberships": plot_memberships}
