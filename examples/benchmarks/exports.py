# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Exports: which models transformers' exporters export to which formats (`exports`), and the drift of a float32
recurrent state (`exported_state`). Both need `pip install -e ".[export]"`, the first also openvino and executorch for their
formats.
"""

import copy
import importlib.util
import json
import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from language_models import find_cache_name, make_language_model
from records import read_records, select
from registry import benchmark
from timing import Report
from transformers import DynamicCache, StaticCache, ViTConfig, ViTForImageClassification

import tost_hf
from tost_hf.export import export_model
from tost_hf.export.runtime import LanguageModel, load
from tost_hf.files import EXPORT_DESCRIPTION


EXPORTS = """Which models transformers' exporters export to which formats: ToST beside GPT-2, Mamba-2 and ViT.

Small models with random weights. Each is exported with a sample of two sequences, one of which begins with padding, and run on
the sample and, if its dimensions are dynamic, on inputs of other shapes. `difference` is the largest difference of the logits
at real tokens, relative to the model's logits. transformers' exporters cast the float64 sums of a ToST cache to float32 in the
sample, so the cache of the inputs is cast as well (`tost-hf export` has a float32 state). OpenVINO's programs are exported
with `stateful=False`, because the exporters' runner expects the cache among the outputs. Each case runs in a separate process
with a timeout of ten minutes. Cases that have records are not run again.
"""
FORMATS = {  # the exporter, its configuration, and the package it needs
    "torch": ("DynamoExporter", "DynamoConfig", "torch"),
    "onnx": ("OnnxExporter", "OnnxConfig", "onnxruntime"),
    "openvino": ("OpenVINOExporter", "OpenVINOConfig", "openvino"),
    "executorch": ("ExecutorchExporter", "ExecutorchConfig", "executorch"),
}
LANGUAGE_MODELS = ("ToST", "ToST conv token", "ToST hybrid", "GPT-2", "Mamba-2")
VISION_MODELS = ("ToST vision", "ViT")


class Case(NamedTuple):
    """Inputs of a language model: the kind of cache, and the shapes (cached tokens, tokens), the sample's first."""

    cache: str
    shapes: list[tuple[int, int]]


CASES = {
    "prompt": Case("none", [(0, 8), (0, 13)]),
    "prompt, fixed shape": Case("none", [(0, 8)]),
    "one token": Case("dynamic", [(6, 1), (9, 1)]),
    "one token, static cache": Case("static", [(6, 1)]),
    "several tokens": Case("dynamic", [(6, 4), (9, 3)]),
    "several tokens, static cache": Case("static", [(6, 4)]),
}
IMAGE_CASES = {"image": (2, 3), "image, fixed shape": (2,)}  # batch sizes
OPTIONS = {"openvino": {"stateful": False}}
VOCAB_SIZE, MAX_TOKENS = 97, 64
TOLERANCE = 3e-2  # relative to the logits: OpenVINO computes in bfloat16 on CPUs that have it
TIMEOUT_SECONDS = 600


def language_inputs(model, cache: str, batch: int, cached: int, tokens: int) -> dict:
    attention_mask = torch.ones(batch, cached + tokens, dtype=torch.long)
    attention_mask[-1, :2] = 0
    input_ids = torch.randint(1, VOCAB_SIZE, (batch, cached + tokens), generator=torch.Generator().manual_seed(tokens))
    inputs = {"input_ids": input_ids[:, cached:], "attention_mask": attention_mask, "use_cache": cache != "none"}
    if cache != "none":
        name = find_cache_name(model)
        inputs[name] = DynamicCache(config=model.config)
        if cache == "static":
            inputs[name] = StaticCache(config=model.config, max_cache_len=MAX_TOKENS)
        model(**inputs | {"input_ids": input_ids[:, :cached], "attention_mask": attention_mask[:, :cached]})
    return inputs


def make_case(name: str, case: str):
    """A model and its inputs, the sample first."""
    torch.manual_seed(0)
    if name in VISION_MODELS:
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        if name == "ViT":
            model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=64)).eval()
        else:
            model = tost_hf.ToSTForImageClassification(tost_hf.ToSTVisionConfig(**sizes)).eval()
        return model, [{"pixel_values": torch.randn(batch, 3, 32, 32)} for batch in IMAGE_CASES[case]]
    sizes = {"vocab_size": VOCAB_SIZE, "width": 32, "layers": 2, "head_dim": 8, "context": MAX_TOKENS}
    model = make_language_model(name, **sizes).eval()
    cache, shapes = CASES[case]
    return model, [language_inputs(model, cache, batch, *shape) for batch, shape in zip((2, 3), shapes)]


@torch.no_grad()
def try_case(format_name: str, name: str, case: str) -> tuple[str, float]:
    """The outcome and the largest difference."""
    exporter_class, config_class, package = FORMATS[format_name]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed", float("inf")
    exporters = importlib.import_module("transformers.exporters")
    model, inputs = make_case(name, case)
    stage, outcome, max_difference = "export", "works", 0.0
    try:
        options = getattr(exporters, config_class)(dynamic=len(inputs) > 1, **OPTIONS.get(format_name, {}))
        program = getattr(exporters, exporter_class)().export(model, copy.deepcopy(inputs[0]), options)
        for label, sample in zip(("the sample", "other shapes"), inputs):
            stage, expected = label, model(**copy.deepcopy(sample)).logits
            if any(map(cast_sums, sample.values())):
                outcome = "works, sums cast to float32"
            output = program(**{key: x for key, x in sample.items() if key != "use_cache"})
            logits = torch.as_tensor(output["logits"] if isinstance(output, dict) else output.logits)
            real_tokens = sample["attention_mask"][:, -expected.shape[1] :].bool() if "attention_mask" in sample else ...
            max_difference = max(max_difference, ((logits - expected)[real_tokens].abs().max() / expected.abs().max()).item())
    except Exception as error:  # of any type; it is the recorded outcome
        return f"{stage}: {summarize_error(error)}", float("inf")
    return (outcome if max_difference < TOLERANCE else "differs"), max_difference


def cast_sums(cache) -> bool:
    """Casts the float64 sums of a ToST cache to float32, as the exporters do with the sample; whether there are any."""
    layers = [layer for layer in getattr(cache, "layers", []) if hasattr(layer, "sum_sq")]
    for layer in layers:
        layer.sum_weighted_sq, layer.sum_membership = layer.sum_weighted_sq.float(), layer.sum_membership.float()
    return bool(layers)


def summarize_error(error: Exception) -> str:
    """The most informative line of an error, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    informative = [line for line in lines if re.search(r"[Ee]xpected|not support|Unsupported|must|cannot|Error|fail", line)]
    return re.sub(r"\s+", " ", (informative or lines)[0])[:140]


def try_in_process(*case: str) -> tuple[str, float]:
    """`try_case` in a process that may crash or hang."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(try_case, case).get(TIMEOUT_SECONDS)
        except multiprocessing.TimeoutError:
            return f"crashed, or did not end within {TIMEOUT_SECONDS} s", float("inf")


def add_arguments(parser) -> None:
    models = (*LANGUAGE_MODELS, *VISION_MODELS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))


@benchmark("exports", EXPORTS, add_arguments, repeats=1)
def run_exports(args, report: Report) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    existing_records = read_records(report.path)
    for format_name in args.formats:
        for name in args.models:
            for case in IMAGE_CASES if name in VISION_MODELS else CASES:
                columns = {"model": name, "format": format_name, "case": case}
                if not select(existing_records, **columns):
                    outcome, difference = try_in_process(format_name, name, case)
                    report.add(columns | {"outcome": outcome}, {"difference": difference})


# Drift of the recurrent state -----------------------------------------------------------------------------------------

EXPORTED_STATE = """The drift of a float32 recurrent state: an ONNX program that reads a long sequence token by token, beside
the model.

Small models with random weights, random tokens. The program's state is float32 after every token; the model, whose sums are
float64, reads the same sequence in chunks of 1,000 tokens. `difference` is the largest difference of the logits at the 100
tokens before each position, in standard deviations of the model's logits.
"""
POSITIONS = (100, 1_000, 10_000, 100_000)
COMPARED_TOKENS, CHUNK = 100, 1_000


@torch.no_grad()
def measure_drift(name: str) -> dict[int, float]:
    """The difference at each position."""
    torch.manual_seed(0)
    model = make_language_model(name, vocab_size=VOCAB_SIZE, width=64, layers=2, head_dim=16, context=None).eval()
    input_ids = torch.randint(VOCAB_SIZE, (1, max(POSITIONS)))
    cache = tost_hf.ToSTCache(model.config)
    expected = torch.cat([model(chunk, past_key_values=cache).logits for chunk in input_ids.split(CHUNK, 1)], 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model"), Path(folder, "onnx")
        model.save_pretrained(source)
        export_model(source, target)
        description = json.loads((target / EXPORT_DESCRIPTION).read_text(encoding="utf-8"))
        exported = LanguageModel(load(target, description), description)
        actual = torch.cat([torch.from_numpy(exported.forward(token.numpy())[0]) for token in input_ids.split(1, 1)])
    differences = (actual - expected).abs().amax(-1) / expected.std()
    return {n: differences[n - COMPARED_TOKENS : n].max().item() for n in POSITIONS}


@benchmark("exported_state", EXPORTED_STATE, repeats=1)
def run_exported_state(args, report: Report) -> None:
    for name in ("ToST", "ToST token"):
        for position, difference in measure_drift(name).items():
            report.add({"model": name, "position": position}, {"difference": difference})
