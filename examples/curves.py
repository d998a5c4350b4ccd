# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""The training curves of a run."""

from pathlib import Path

from matplotlib.figure import Figure

from tost_hf.files import staged_file


def plot_curves(log_history: list[dict], file: Path) -> None:
    """Plots the training loss, and loss and accuracy on held-out examples, over the steps.

    Args:
        log_history: of a `TrainerState`.
        file: the PNG file to write.
    """
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, accuracy = figure.subplots(1, 2)
    curves = ((losses, "loss", "training"), (losses, "eval_loss", "held out"), (accuracy, "eval_accuracy", "held out"))
    for axis, name, label in curves:
        points = [(entry["step"], float(entry[name])) for entry in log_history if name in entry]
        if points:
            axis.plot(*zip(*points), marker="o", markersize=3, label=label)
        axis.set(xlabel="step", ylabel="loss, nats" if axis is losses else "accuracy")
        axis.grid(alpha=0.3)
    losses.legend()
    with staged_file(file) as staged:
        figure.savefig(staged, format="png", dpi=80)
