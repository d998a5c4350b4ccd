# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Exports: which models transformers' exporters write in which format (`exports`), and the drift of a float32 state
(`exported_state`). Both need `pip install "tost-hf[export]"`, the first also openvino and executorch for their formats.
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
from language_models import make_language_model
from records import read_records, select
from registry import benchmark
from timing import Report
from transformers import DynamicCache, StaticCache, ViTConfig, ViTForImageClassification

import tost_hf
from tost_hf.export import export_model
from tost_hf.export.runtime import LanguageModel, load
from tost_hf.files import EXPORT_DESCRIPTION


EXPORTS = """Which models transformers' exporters write in which format: ToST beside GPT-2, Mamba-2 and ViT.

Small models of random weights. Each is exported from a sample of two sequences, one of which begins with padding, and run
on the sample and, where its dimensions are dynamic, on inputs of other shapes; the difference is the largest of the logits
at real tokens, relative to the model's own. transformers' exporters cast the float64 sums of a ToST cache to float32 in the
sample, so that those of a given cache must be cast as well (`tost-hf export` has a float32 state). OpenVINO's programs are
made with `stateful=False`, since the exporters' own runner expects the cache among the outputs. Each case is a separate
process, ended after ten minutes. Cases that have records are not run again.
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
    """Inputs of a language model: the kind of cache, and (cached tokens, tokens) of the sample and of other shapes."""

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
IMAGES = {"image": (2, 3), "image, fixed shape": (2,)}  # batches
OPTIONS = {"openvino": {"stateful": False}}
VOCABULARY, MAX_TOKENS = 97, 64
ALLOWED = 3e-2  # of the logits' size: OpenVINO computes in bfloat16 on CPUs that have it
SECONDS = 600


def language_inputs(model, cache: str, batch: int, cached: int, tokens: int) -> dict:
    mask = torch.ones(batch, cached + tokens, dtype=torch.long)
    mask[-1, :2] = 0
    ids = torch.randint(1, VOCABULARY, (batch, cached + tokens), generator=torch.Generator().manual_seed(tokens))
    given = {"input_ids": ids[:, cached:], "attention_mask": mask, "use_cache": cache != "none"}
    if cache != "none":
        past = DynamicCache(config=model.config)
        if cache == "static":
            past = StaticCache(config=model.config, max_cache_len=MAX_TOKENS)
        model(ids[:, :cached], attention_mask=mask[:, :cached], past_key_values=past, use_cache=True)
        given["past_key_values"] = past
    return given


def make_case(name: str, case: str):
    """A model, and its inputs: the sample, and others."""
    torch.manual_seed(0)
    if name in VISION_MODELS:
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        if name == "ViT":
            model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=64)).eval()
        else:
            model = tost_hf.ToSTForImageClassification(tost_hf.ToSTVisionConfig(**sizes)).eval()
        return model, [{"pixel_values": torch.randn(batch, 3, 32, 32)} for batch in IMAGES[case]]
    sizes = {"vocab_size": VOCABULARY, "width": 32, "layers": 2, "head_dim": 8, "context": MAX_TOKENS}
    model = make_language_model(name, **sizes).eval()
    cache, shapes = CASES[case]
    return model, [language_inputs(model, cache, batch, *shape) for batch, shape in zip((2, 3), shapes)]


@torch.no_grad()
def try_case(kind: str, name: str, case: str) -> tuple[str, float]:
    """The outcome, and the largest difference."""
    exporter, config, package = FORMATS[kind]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed", float("inf")
    exporters = importlib.import_module("transformers.exporters")
    model, inputs = make_case(name, case)
    stage, note, worst = "export", "works", 0.0
    try:
        options = getattr(exporters, config)(dynamic=len(inputs) > 1, **OPTIONS.get(kind, {}))
        program = getattr(exporters, exporter)().export(model, copy.deepcopy(inputs[0]), options)
        for shapes, given in zip(("the sample", "other shapes"), inputs):
            stage, expected = shapes, model(**copy.deepcopy(given)).logits
            if cast_sums(given.get("past_key_values")):
                note = "works, sums cast to float32"
            found = program(**{key: x for key, x in given.items() if key != "use_cache"})
            logits = torch.as_tensor(found["logits"] if isinstance(found, dict) else found.logits)
            real = given["attention_mask"][:, -expected.shape[1] :].bool() if "attention_mask" in given else ...
            worst = max(worst, ((logits - expected)[real].abs().max() / expected.abs().max()).item())
    except Exception as error:  # whatever a library raises is what the record is to say
        return f"{stage}: {reason(error)}", float("inf")
    return (note if worst < ALLOWED else "differs"), worst


def cast_sums(cache) -> bool:
    """Makes the float64 sums of a ToST cache float32, as the exporters do with the sample; whether there were any."""
    layers = [layer for layer in getattr(cache, "layers", []) if hasattr(layer, "sum_sq")]
    for layer in layers:
        layer.sum_weighted_sq, layer.sum_membership = layer.sum_weighted_sq.float(), layer.sum_membership.float()
    return bool(layers)


def reason(error: Exception) -> str:
    """The most informative line of an error, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    telling = [line for line in lines if re.search(r"[Ee]xpected|not support|Unsupported|must|cannot|Error|fail", line)]
    return re.sub(r"\s+", " ", (telling or lines)[0])[:140]


def try_in_process(*case: str) -> tuple[str, float]:
    """`try_case` in a process that may crash or hang."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(try_case, case).get(SECONDS)
        except multiprocessing.TimeoutError:
            return f"crashed, or did not end within {SECONDS} s", float("inf")


def add_arguments(parser) -> None:
    models = (*LANGUAGE_MODELS, *VISION_MODELS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))


@benchmark("exports", EXPORTS, add_arguments, repeats=1)
def run_exports(args, report: Report) -> None:
    torch.set_num_threads(1)  # threads do not survive the fork of a process
    done = read_records(report.path)
    for kind in args.formats:
        for name in args.models:
            for case in IMAGES if name in VISION_MODELS else CASES:
                columns = {"model": name, "format": kind, "case": case}
                if not select(done, **columns):
                    outcome, difference = try_in_process(kind, name, case)
                    report.add(columns | {"outcome": outcome}, {"difference": difference})


# Drift of the state ---------------------------------------------------------------------------------------------------

EXPORTED_STATE = """How far a float32 state drifts: an ONNX program that reads a long text token by token, beside the model.

Small models of random weights and random tokens. The program's state is float32 after every token; the model, whose sums are
float64, reads the same text in chunks of 1,000. The difference is the largest of the logits at the 100 tokens before each
position, in standard deviations of the model's.
"""
POSITIONS = (100, 1_000, 10_000, 100_000)
COMPARED, CHUNK = 100, 1_000


@torch.no_grad()
def find_drift(name: str) -> dict[int, float]:
    """Difference at each position."""
    torch.manual_seed(0)
    model = make_language_model(name, vocab_size=VOCABULARY, width=64, layers=2, head_dim=16, context=None).eval()
    ids = torch.randint(VOCABULARY, (1, max(POSITIONS)))
    cache = tost_hf.ToSTCache(model.config)
    expected = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(CHUNK, 1)], 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model"), Path(folder, "onnx")
        model.save_pretrained(source)
        export_model(source, target)
        facts = json.loads((target / EXPORT_DESCRIPTION).read_text(encoding="utf-8"))
        exported = LanguageModel(load(target, facts), facts)
        found = torch.cat([torch.from_numpy(exported.forward(token.numpy())[0]) for token in ids.split(1, 1)])
    errors = (found - expected).abs().amax(-1) / expected.std()
    return {n: errors[n - COMPARED : n].max().item() for n in POSITIONS}


@benchmark("exported_state", EXPORTED_STATE, repeats=1)
def run_exported_state(args, report: Report) -> None:
    for name in ("ToST", "ToST token"):
        for position, difference in find_drift(name).items():
            report.add({"model": name, "position": position}, {"difference": difference})
