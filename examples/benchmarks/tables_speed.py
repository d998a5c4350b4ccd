# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""What ToST costs, as tables, figures and plots: the other files of results/, the rows of the speed benchmarks."""

import itertools
import math

from rows import Measured, Panel, Spread, commands, markdown, select, where


OP_SHAPE = {"B": 4, "T": 1024}
LONG_SHAPE = {"B": 1, "T": 131072}
SHORT_LENGTHS = (16, 32, 64, 128, 256)
OP_PASSES = ("forward", "forward + backward")
TRAINING_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
DECODE = {"command": "python examples/benchmarks/decode.py"}  # not that of options
BATCHES = (1, 8, 32)
BATCH_RUNS = {  # how decoding in batches was measured, and the positions of each
    "float32, eager": ({"dtype": "float32", "code": "eager"}, (64, 512)),
    "bfloat16, eager": ({"dtype": "bfloat16", "code": "eager"}, (64, 512)),
    "float32, compiled": ({"dtype": "float32", "code": "compiled"}, (64,)),
}
CLIENTS = (1, 8, 32)
DECODE_POSITIONS = (10, 100, 1000)
OPTION_POSITIONS = (10, 10_000)
SIDES = (224, 448, 512, 896, 1024, 2048)
CARD_SIDES = tuple(side for side in SIDES if side != 512)
SCALING_LENGTHS = (100, 1024, 4096, 8192, 131072)


def digits(x: float, unit: str = "") -> str:
    """At least three digits, and a unit."""
    decimals = max(0, 2 - math.floor(math.log10(abs(x))))
    return f"{x:,.{decimals}f}{unit and ' ' + unit}"


def ms(x: Spread) -> str:
    return digits(x.value, "ms")


def with_range(x: Spread) -> str:
    return f"{x.value:.2f} ({x.low:.2f} to {x.high:.2f})"


def with_source(measured: Measured, table: str, name: str, **wanted) -> str:
    return f"{table}\n\n{commands(measured.find(name, **wanted))}"


# A new token ----------------------------------------------------------------------------------------------------------


def with_options(measured: Measured) -> list[dict[str, str]]:
    """The rows of decode.py of models with options."""
    return [row for row in measured.rows["decode"] if "--models" in row["command"]]


def decode_lines(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the time of a step at each position, and the memory at the last."""
    last = DECODE_POSITIONS[-1]
    head = ["", *(f"position {x:,}" for x in DECODE_POSITIONS), f"cache at {last:,}"]
    head.append(f"forward over {last:,} tokens, memory beyond the model")
    lines = []
    for model in ("ToST", "GPT-2"):
        steps = [measured.spread("decode", **DECODE, model=model, position=x, metric="ms a step") for x in DECODE_POSITIONS]
        cache = measured.spread("decode", **DECODE, model=model, position=last, metric="cache bytes").value
        peak = measured.spread("decode", **DECODE, model=model, position=last, metric="forward peak MiB").value
        lines.append([model, *map(ms, steps), f"{cache:,.0f} bytes", f"{peak:.0f} MiB"])
    return head, lines


def decode(measured: Measured) -> str:
    head, lines = decode_lines(measured)
    gains = [measured.spread("decode", **DECODE, model="ToST", position=x, metric="GPT-2 / this") for x in DECODE_POSITIONS]
    lines.append(["GPT-2 / ToST", *map(with_range, gains), "", ""])
    return with_source(measured, markdown(head, lines), "decode", **DECODE)


def decode_batches(measured: Measured) -> str:
    """Steps of several rows, beside GPT-2's."""
    rows = [row for row in measured.rows["decode"] if "--batch 1 8 32" in row["command"]]
    lines = []
    for label, (run, positions) in BATCH_RUNS.items():
        for batch in BATCHES:
            found = {
                (model, x, metric): Spread(*(float(row[name]) for name in ("value", "low", "high")))
                for model in ("ToST", "GPT-2")
                for x in positions
                for metric in ("ms a step", "GPT-2 / this")
                for row in select(rows, **run, batch=batch, model=model, position=x, metric=metric)
            }
            gains = [with_range(found["ToST", x, "GPT-2 / this"]) for x in positions]
            steps = [ms(found[model, 64, "ms a step"]) for model in ("ToST", "GPT-2")]
            lines.append([label, str(batch), *steps, *gains, *[""] * (2 - len(gains))])
    head = ["", "batch", "ToST, at 64", "GPT-2, at 64", "GPT-2 / ToST, at 64", "GPT-2 / ToST, at 512"]
    return f"{markdown(head, lines)}\n\n{commands(rows)}"


# Quantised models -------------------------------------------------------------------------------------------------------


def quantised(measured: Measured) -> str:
    """Losses and bytes of trained models, and the time of a token; empty where a method fails, or was not measured."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in measured.find("quantised")):

        def cell(model, metric, form, method=method):
            rows = select(measured.rows["quantised"], method=method, model=model, metric=metric)
            if not rows:
                return ""
            return form.format(float(rows[0]["value"])) if float(rows[0]["value"]) < math.inf else "fails"

        kept = [row for row in measured.find("quantised", method=method, metric="loss") if not row["saved"].startswith("yes")]
        lines.append(
            [
                method,
                cell("tost-demo", "loss", "{:.4f}"),
                cell("tost-digits", "loss", "{:.4f}"),
                "no" if kept else "yes",
                cell("tost-demo", "saved MiB", "{:.1f}"),
                cell("tost-base", "ms a token", "{:.1f} ms"),
                cell("tost-base", "float32 / this", "{:.2f}"),
            ]
        )
    head = [
        "",
        "loss on texts",
        "loss on images",
        "saved and read again",
        "MiB saved",
        "a token of tost-base",
        "float32 / this",
    ]
    return with_source(measured, markdown(head, lines), "quantised")


# Exports ----------------------------------------------------------------------------------------------------------------


def exports(measured: Measured) -> str:
    """What transformers' exporters make of each model, by format; what fails is numbered, and its causes listed below."""
    rows = measured.find("exports")
    formats = list(dict.fromkeys(row["format"] for row in rows))
    causes: dict[str, int] = {}

    def cell(outcome: str) -> str:
        if outcome.startswith("works"):
            return "works" if outcome == "works" else "works, cast"
        return f"fails ({causes.setdefault(outcome, len(causes) + 1)})"

    lines = []
    for model, case in dict.fromkeys((row["model"], row["case"]) for row in rows):
        found = {row["format"]: row["outcome"] for row in rows if (row["model"], row["case"]) == (model, case)}
        lines.append([model, case, *(cell(found[kind]) if kind in found else "" for kind in formats)])
    listed = "\n".join(f"{number}. `{outcome}`" for outcome, number in causes.items())
    return f"{markdown(['', 'inputs', *formats], lines)}\n\n{listed}\n\n{commands(rows)}"


def exported_state(measured: Measured) -> str:
    """How far a float32 state drifts, by position in a text."""
    rows = measured.find("exported_state")
    models, positions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "position"))

    def cell(model: str, position: str) -> str:
        return f"{measured.spread('exported_state', model=model, position=position).value:.1e}"

    lines = [[model, *(cell(model, position) for position in positions)] for model in models]
    head = ["", *(f"at token {int(position):,}" for position in positions)]
    return with_source(measured, markdown(head, lines), "exported_state")


# The kernels of a GPU ---------------------------------------------------------------------------------------------------


def kernel_costs(measured: Measured) -> str:
    """Instructions, bytes and registers of every kernel, and the sums of forward and backward."""
    found = measured.find("kernel_costs")
    targets, names = (list(dict.fromkeys(row[x] for row in found)) for x in ("target", "kernel"))
    rows = {name.removeprefix("chunk_").replace("_", " "): [name] for name in names}
    rows |= {"forward": [x for x in names if "bwd" not in x], "backward": [x for x in names if "bwd" in x]}

    def cell(group, target: str, metric: str) -> str:
        if metric == "registers" and len(group) > 1:
            return ""
        cost = sum(measured.spread("kernel_costs", kernel=x, target=target, metric=metric).value for x in group)
        return f"{cost:.{0 if metric == 'registers' else 1}f}"

    columns = [(target, metric) for metric in ("instructions", "bytes", "registers") for target in targets]
    lines = [[label, *(cell(group, *column) for column in columns)] for label, group in rows.items()]
    head = ["", *(f"{target}, {metric}" for target, metric in columns)]
    return with_source(measured, markdown(head, lines), "kernel_costs")


# Many clients ---------------------------------------------------------------------------------------------------------


def serving(measured: Measured) -> str:
    lines = []
    for dtype, clients in itertools.product(("float32", "bfloat16"), CLIENTS):
        case = {"dtype": dtype, "clients": clients}
        rate = measured.spread("serving", **case, metric="tokens/s")
        gain = measured.spread("serving", **case, metric="this / 1 client")
        lines.append([dtype, str(clients), f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})", with_range(gain)])
    table = markdown(["", "clients at once", "tokens/s, all together", "times those of one"], lines)
    return with_source(measured, table, "serving")


# The operator ---------------------------------------------------------------------------------------------------------


def operator(measured: Measured) -> str:
    head = ["", "literal", "ours", "literal / ours", "ours, compiled", "literal / compiled", "literal, compiled"]
    lines = []
    for form in ("causal", "bidirectional"):
        for which in OP_PASSES:
            case = OP_SHAPE | {"form": form, "pass": which}

            def time(variant, metric="ms", case=case):
                return measured.spread("op", variant=variant, metric=metric, **case)

            cells = [ms(time("literal"))]
            for variant in ("eager", "compiled"):
                cells += [ms(time(variant)), with_range(time(variant, "literal / this"))]
            lines.append([f"{form}, {which}", *cells, ms(time("literal compiled")), ms(time("sdpa"))])
    return with_source(measured, markdown([*head, "attention (SDPA)"], lines), "op", metric="ms", **OP_SHAPE)


def operator_memory(measured: Measured) -> str:
    lines = []
    for variant, name in (("eager", "ours"), ("literal", "literal")):
        case = LONG_SHAPE | {"variant": variant}
        peak = measured.spread("op", metric="peak MiB", **case).value
        lines.append([name, f"{peak:,.0f} MiB", f"{measured.spread('op', metric='peak / bytes of w', **case).value:.2f}"])
    head = [f"forward over {LONG_SHAPE['T']:,} tokens", "memory beyond the input, output included", "times the input's"]
    return with_source(measured, markdown(head, lines), "op", **LONG_SHAPE)


def short_texts(measured: Measured) -> str:
    lines = []
    for which in OP_PASSES:
        for variant, name in (("eager", "ours"), ("sdpa", "attention (SDPA)")):
            case = {"B": 4, "form": "causal", "pass": which, "variant": variant, "metric": "ms"}
            lines.append([f"{which}, {name}", *(ms(measured.spread("op", T=x, **case)) for x in SHORT_LENGTHS)])
    table = markdown(["", *(f"{x} tokens" for x in SHORT_LENGTHS)], lines)
    return with_source(measured, table, "op", T=SHORT_LENGTHS[0])


# Training -------------------------------------------------------------------------------------------------------------


def training_spread(measured: Measured, model: str, length: int, equal: str, metric: str) -> Spread:
    return measured.spread("train_lm", model=model, T=length, sizes=f"equal {equal}", code="eager", metric=metric)


def training(measured: Measured) -> str:
    def speed(model, length, equal):
        return f"{training_spread(measured, model, length, equal, 'tokens/s').value:,.0f}"

    def gain(length, equal):
        return with_range(training_spread(measured, "ToST", length, equal, "GPT-2 / this"))

    lines = []
    for length in TRAINING_LENGTHS:
        ours = [cell for equal in ("width", "parameters") for cell in (speed("ToST", length, equal), gain(length, equal))]
        has_mamba = any(row["model"] == "Mamba-2" for row in measured.find("train_lm", T=length))
        lines.append([f"{length:,}", speed("GPT-2", length, "width"), *ours])
        lines[-1].append(speed("Mamba-2", length, "width") if has_mamba else "")
    head = ["tokens of a text", "GPT-2", "ToST, equal width", "", "ToST, equal parameters", "", "Mamba-2, equal width"]
    return with_source(measured, markdown(head, lines), "train_lm", code="eager")


def plot_training(measured: Measured) -> list[Panel]:
    lines = {
        f"ToST, equal {equal}": {n: training_spread(measured, "ToST", n, equal, "tokens/s") for n in TRAINING_LENGTHS}
        for equal in ("width", "parameters")
    }
    lines["GPT-2"] = {n: training_spread(measured, "GPT-2", n, "width", "tokens/s") for n in TRAINING_LENGTHS}
    return [Panel(lines, "tokens of a text", "training, tokens per second", yscale="linear")]


# The paper's figure ---------------------------------------------------------------------------------------------------


def scaling_times(measured: Measured, kind: str) -> dict[int, Spread]:
    rows = measured.find("scaling", kind=kind, metric="ms")
    return {int(row["tokens"]): measured.spread("scaling", kind=kind, metric="ms", tokens=row["tokens"]) for row in rows}


def scaling(measured: Measured) -> str:
    lines = []
    for kind, name in (("ToST", "TSSA"), ("softmax", "attention (SDPA)")):
        times = scaling_times(measured, kind)
        lines.append([name, *(f"{times[n].value:,.0f} ms" if n in times else "" for n in SCALING_LENGTHS)])
    table = markdown(["tokens", *(f"{n:,}" for n in SCALING_LENGTHS)], lines)
    return with_source(measured, table, "scaling")


def scaling_exponent(measured: Measured) -> str:
    return with_range(measured.spread("scaling", kind="ToST", metric="exponent"))


def plot_scaling(measured: Measured) -> list[Panel]:
    lines = {name: scaling_times(measured, kind) for name, kind in (("TSSA", "ToST"), ("attention (SDPA)", "softmax"))}
    return [Panel(lines, "tokens", "ms, 12 attention layers")]


# Images ---------------------------------------------------------------------------------------------------------------


def resolution_table(measured: Measured, sides: tuple[int, ...]) -> str:
    def found(model, side, metric):
        return measured.spread("resolution", model=model, pixels=side, metric=metric)

    lines = []
    for side in sides:
        patches = int(measured.find("resolution", model="ToST", pixels=side)[0]["tokens"])
        times = [ms(found(model, side, "ms")) for model in ("ToST", "ViT")]
        peaks = [f"{found(model, side, 'peak MiB').value:.0f} MiB" for model in ("ToST", "ViT")]
        lines.append([f"{side:,}", f"{patches:,}", *times, f"{found('ToST', side, 'ViT / this').value:.2f}", *peaks])
    head = ["pixels", "patches", "ToST", "ViT", "ViT / ToST", "memory beyond the model, ToST", "ViT"]
    return markdown(head, lines)


def resolution(measured: Measured) -> str:
    return with_source(measured, resolution_table(measured, SIDES), "resolution", metric="ms")


def image_training(measured: Measured) -> str:
    """Before and after the bidirectional form had an engine of its own on CPUs."""

    def found(model, metric="training images/s"):
        return measured.spread("resolution", model=model, pixels=224, metric=metric)

    before, after = (f"{found(model).value:.1f} images/s" for model in ("formulas", "ToST"))
    line = ["steps of training, 224 pixels, batch 8", before, after, with_range(found("ToST", "formulas / this"))]
    table = markdown(["", "with the plain formulas", "with the engine", "plain formulas / engine, time"], [line])
    return with_source(measured, table, "resolution", metric="training images/s")


def resolution_growth(measured: Measured) -> str:
    """Quotients of medians at four times the patches."""

    def time(model, side):
        return measured.spread("resolution", model=model, pixels=side, metric="ms").value

    pairs = [(side, 2 * side) for side in SIDES if 2 * side in SIDES]
    head = ["time at four times the patches / time", *(f"{a:,} to {b:,} pixels" for a, b in pairs)]
    return markdown(head, [[name, *(f"{time(name, b) / time(name, a):.1f}" for a, b in pairs)] for name in ("ToST", "ViT")])


# In short -------------------------------------------------------------------------------------------------------------


def short_inputs(measured: Measured) -> str:
    """Where ToST is not faster, or hardly, for the top README."""

    def step(model):
        return ms(measured.spread("decode", **DECODE, model=model, position=10, metric="ms a step"))

    def op(variant):
        case = {"B": 4, "T": 16, "form": "causal", "pass": "forward", "metric": "ms"}
        return ms(measured.spread("op", variant=variant, **case))

    def speed(model):
        return f"{training_spread(measured, model, 128, 'parameters', 'tokens/s').value:,.0f} tokens/s"

    def peak(model):
        return f"{measured.spread('resolution', model=model, pixels=224, metric='peak MiB').value:.0f} MiB"

    lines = [
        ["the operator, forward, 16 tokens", op("eager"), f"{op('sdpa')} (attention)"],
        ["a new token at position 10", step("ToST"), f"{step('GPT-2')} (GPT-2)"],
        ["training, 128 tokens, equal parameters", speed("ToST"), f"{speed('GPT-2')} (GPT-2)"],
        ["an image of 224 pixels, memory beyond the model", peak("ToST"), f"{peak('ViT')} (ViT)"],
    ]
    return markdown(["short inputs, on a CPU", "ToST", "beside"], lines)


def long_inputs(measured: Measured) -> str:
    """What ToST gains, for the top README."""
    case = OP_SHAPE | {"variant": "eager", "form": "causal", "pass": "forward + backward", "metric": "literal / this"}
    token = measured.spread("decode", **DECODE, model="ToST", position=1000, metric="GPT-2 / this")
    width, parameters = (training_spread(measured, "ToST", 2048, x, "GPT-2 / this") for x in ("width", "parameters"))
    image = measured.spread("resolution", model="ToST", pixels=1024, metric="ViT / this")
    lines = [
        ["a new token at position 1,000", "GPT-2", with_range(token)],
        ["training, 2,048 tokens, equal width", "GPT-2", with_range(width)],
        ["training, 2,048 tokens, equal parameters", "GPT-2", with_range(parameters)],
        ["an image of 1,024 pixels", "ViT", with_range(image)],
        ["the operator with its backward pass, 1,024 tokens", "the plain formulas", with_range(measured.spread("op", **case))],
    ]
    return markdown(["on a CPU", "beside", "which takes so many times as long"], lines)


# Model cards ----------------------------------------------------------------------------------------------------------


def for_cards(measured: Measured) -> dict[str, dict[str, str]]:
    """Name of a size to text, table and command of its card's section on cost."""

    def entry(what: str, table: str, name: str, **wanted):
        rows = measured.find(name, **wanted)
        (command,) = {row["command"] for row in rows}
        (dtype,) = {row["dtype"] for row in rows}
        processor, _, software = where(rows).partition(", ")
        text = (
            f"{what}, measured by the authors of `tost_hf` on two cores of an {processor} (CPU only, {dtype}, eager; "
            f"{software}), with random weights, batch 1:"
        )
        return {"text": text, "table": table, "command": command}

    beside_gpt2 = "A new token, beside transformers' GPT-2 of equal width"
    beside_vit = "An image, beside ViT-small with PyTorch's scaled dot product attention"
    return {
        "tost-base": entry(beside_gpt2, markdown(*decode_lines(measured)), "decode", **DECODE),
        "tost-vision-small-patch16": entry(beside_vit, resolution_table(measured, CARD_SIDES), "resolution", metric="ms"),
    }


TABLES = {
    "short inputs": short_inputs,
    "long inputs": long_inputs,
    "decode": decode,
    "decode in batches": decode_batches,
    "serving": serving,
    "quantised": quantised,
    "exports": exports,
    "exported state": exported_state,
    "kernel costs": kernel_costs,
    "operator": operator,
    "operator memory": operator_memory,
    "short texts": short_texts,
    "training": training,
    "scaling": scaling,
    "resolution": resolution,
    "resolution growth": resolution_growth,
    "image training": image_training,
}
FIGURES = {"scaling exponent": scaling_exponent}
PLOTS = {"training": plot_training, "scaling": plot_scaling}
