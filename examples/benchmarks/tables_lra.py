# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Long Range Arena in small, as a table: results/lra.csv, the rows of lra.py."""

from rows import Measured, commands, markdown, plus_minus, select


MODELS = {"tost": "ToST", "softmax": "softmax attention", "linear": "linear attention"}
ORDER = ("listops", "text", "retrieval", "image", "pathfinder")


def shortened(measured: Measured) -> str:
    """Accuracy by task and model, beside that of the most frequent class; cells without rows are empty."""
    rows = measured.find("lra", script="lra.py")
    lines = []
    for task in ORDER:
        there = select(rows, task=task)
        if not there:
            continue

        def cell(metric, there=there, **wanted):
            return plus_minus([100 * float(row["value"]) for row in select(there, metric=metric, **wanted)])

        (tokens,), (steps,) = ({row[name] for row in there} for name in ("context", "steps"))
        chance = cell("chance").partition(" ")[0]  # of the same test rows in every run
        lines.append([task, tokens, steps, chance, *(cell("accuracy", model=model) for model in MODELS)])
    found = {name: select(rows, model=model) for model, name in MODELS.items()}
    sizes = [f"{name} {int(own[0]['parameters']):,}" for name, own in found.items() if own]
    head = ["accuracy, %", "tokens", "steps", "most frequent class", *MODELS.values()]
    seeds = len({row["seed"] for row in rows})
    settings = (
        f"Width {rows[0]['width']}, {rows[0]['layers']} layers, batches of {rows[0]['batch']}, {seeds} seeds; parameters in "
        f"{rows[0]['task']}: {', '.join(sizes)}."
    )
    return f"{settings}\n\n{markdown(head, lines)}\n\n{commands(rows)}"


TABLES = {"long range arena": shortened}
