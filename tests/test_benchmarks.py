"""The speed benchmarks: their statistics, and that each runs to its end and writes records.

No speed is asserted, so that the tests do not depend on the machine.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
import torch
from byte_models import byte_tokenizer
from datasets import ClassLabel, Dataset, Features, Image, Value
from image_runs import NAMES, digit_pictures, tiny_vision_model
from transformers import Mamba2Config, ViTConfig, ViTForImageClassification, pipeline


BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))  # permanently: processes that the benchmarks start inherit it

import compare  # noqa: E402
import decode  # noqa: E402
import op  # noqa: E402
import registry  # noqa: E402
import resolution  # noqa: E402
import run as runner  # noqa: E402
import scaling  # noqa: E402
import timing  # noqa: E402
import train_lm  # noqa: E402
from records import ORIGIN_COLUMNS, RESULTS, VALUE_COLUMNS, markdown_table, read_records, select  # noqa: E402

from tost_hf import ToSTConfig, ToSTForSequenceClassification  # noqa: E402
from tost_hf.cache_files import state_bytes  # noqa: E402
from tost_hf.image_processing import make_image_processor  # noqa: E402


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def shrink_benchmarks(monkeypatch):
    """Reduces the sizes that are constants of the benchmarks."""
    monkeypatch.setattr(op, "CPU_SHAPES", [(2, 40, 3, 8)])
    monkeypatch.setitem(decode.SIZES, "base", {"vocab_size": 512, "width": 768, "layers": (1, 1)})
    monkeypatch.setattr(resolution, "LAYERS", 1)


def read_checked_records(folder, name):
    """Reads the records of a benchmark and checks the columns that every CSV has."""
    records = read_records(folder / f"{name}.csv")
    assert tuple(records[0])[:5] == ORIGIN_COLUMNS and tuple(records[0])[-4:] == VALUE_COLUMNS
    for record in records:
        assert record["script"] == f"{name}.py" and record["date"] and record["machine"] and "torch" in record["versions"]
        assert record["command"].startswith(f"python examples/benchmarks/run.py {name}")
        assert float(record["low"]) <= float(record["value"]) <= float(record["high"])
    return records


def run(name, tmp_path, *args):
    """Runs two rounds of a benchmark on the CPU and returns its records."""
    runner.main([name, "--device", "cpu", "--repeats", "2", "--results", str(tmp_path), *map(str, args)])
    return read_checked_records(tmp_path, name)


def test_every_benchmark_has_a_description():
    for name in registry.BENCHMARKS:
        assert runner.make_parser(name, registry.load_benchmark(name)).description


def record_value(file, **case):
    """The last value of a case with the default backend and prefix cache; the mean if it has seeds."""
    records = select(read_records(RESULTS / f"{file}.csv"), **case)
    records = [x for x in records if x["command"].startswith("python ") and "--no_prefix_cache" not in x["command"]]
    return statistics.mean({record.get("seed"): float(record["value"]) for record in records}.values())


def test_table_of_the_readme_equals_records():
    decoding = {"file": "decode", "batch": 1, "dtype": "float32", "cache": "dynamic"}
    small, base = {"ToST": {"layers": 7}, "GPT-2": {"layers": 6}}, {"ToST": {"layers": 12}, "GPT-2": {"layers": 12}}
    trained = {"file": "results", "script": "compare_lm.py", "task": "tiny Shakespeare", "steps": 2000, "metric": "loss"}
    recall = {"file": "results", "script": "recall.py", "task": "16 pairs", "steps": 6000, "metric": "accuracy"}
    vllm = {"file": "vllm", "prompt": 1000, "clients": 32, "metric": "tokens/s"}
    image = {"file": "resolution", "metric": "ms"}
    review = {"file": "text_classification", "metric": "ms"}
    rows = [
        (base, decoding | {"position": 1000, "metric": "cache bytes"}),
        (small, decoding | {"position": 1000, "metric": "ms a step"}),
        (("ToST conv token", "GPT-2"), vllm),
        (("ToST", "ViT"), image | {"pixels": 1024}),
        (("ToST", "BERT"), review | {"tokens": 3000}),
        (("ToST hybrid", "GPT-2 conv"), trained),
        (small, decoding | {"position": 10, "metric": "ms a step"}),
        (("ToST", "ViT"), image | {"pixels": 96}),
        (("ToST", "BERT"), review | {"tokens": 200}),
        (("ToST", "GPT-2"), trained),
        (("ToST hybrid", "Mamba-2"), trained),
        (("ToST", "GPT-2"), recall),
    ]
    table = re.search(r"^(\|.*\n)+", (BENCHMARKS.parents[1] / "README.md").read_text(), re.MULTILINE)[0].splitlines()[2:]
    for line, (models, case) in zip(table, rows, strict=True):
        title, *cells = line.strip("| ").split(" | ")
        for cell, model in zip(cells, models, strict=True):
            sizes = models[model] if isinstance(models, dict) else {}
            value = record_value(**case, **sizes, model=model) * (100 if title.endswith("%") else 1)
            number = cell.partition(" (")[0]
            assert number == f"{value:,.{len(number.partition('.')[2])}f}", line


# Statistics -----------------------------------------------------------------------------------------------------------


def test_spread_and_ratio():
    assert timing.spread([3, 1, 8]) == (3, 1, 8)
    assert timing.spread([4, 1, 2, 9]) * 2 == (6, 2, 18)
    assert timing.ratio([2, 9, 4], [1, 3, 4]) == (2, 1, 3)  # of the ratios per round; the ratio of the medians would be 4 / 3


def test_table_of_records():
    """One row per case, with the columns that differ; values with their range."""
    origin = dict.fromkeys(ORIGIN_COLUMNS, "x")
    cases = [("ToST", 16, "ms", "1", "1", "1"), ("ToST", 32, "ms", "4", "3", "5"), ("ToST", 32, "MiB", "7", "7", "7")]
    names = ("model", "T", *VALUE_COLUMNS)
    lines = markdown_table([origin | dict(zip(names, case)) for case in cases]).splitlines()
    assert lines[:4] == ["| T | ms | MiB |", "|---|---|---|", "| 16 | 1 | |", "| 32 | 4 (3 to 5) | 7 |"]


def test_runs_are_interleaved(monkeypatch):
    """Warm-up is not counted, and a short run is repeated as often as fits into a round; the durations are scripted."""
    order, durations = [], {"short": iter([9, 0.05, 1, 2, 3, 5]), "long": iter([9, 0.3, 7, 8])}
    monkeypatch.setattr(timing, "seconds_on_cpu", lambda run: run())

    runs = {name: lambda name=name: next(durations[name]) for name in durations}
    seconds = timing.measure(runs, 2, warm_up=2, reset=order.append)
    assert order == ["short", "long"] * 2 + ["short", "short", "long"] * 2
    assert seconds == {"short": [1.5, 4], "long": [7, 8]}


def test_peak_memory():
    """64 MiB are counted although as much was freed before and not returned to the system; earlier memory is not counted."""

    def allocate():
        return [torch.ones(2**14) for _ in range(2**10)]

    blocks = allocate()
    last_block = blocks[-1]  # the end of the heap, so that memory freed before it stays with the process
    del blocks
    assert 63 < timing.peak_bytes(allocate) / 2**20 < 72  # the kernel counts pages in batches
    assert last_block.sum() == 2**14


# Two commits ----------------------------------------------------------------------------------------------------------


def test_workloads_of_a_commit(monkeypatch, capsys):
    sizes = {"device": "cpu", "batch": 2, "tokens": 8, "width": 64, "layers": 1}
    names = list(compare.make_workloads(**sizes))
    monkeypatch.setattr(sys, "stdin", StringIO("".join(f"{name}\n" for name in names)))
    compare.serve_workloads(sizes)
    first_line, *answers = capsys.readouterr().out.splitlines()
    assert json.loads(first_line) == [compare.tost_hf.__file__, names] and answers == [""] * len(names)


@pytest.mark.parametrize(("times", "status"), [([8, 2, 4], 1), ([8, 1, 4], 0), ([5, 1.8, 2.2], 0), ([0.1, 1, 1.1], 1)])
def test_comparison_of_commits(capsys, times, status):
    """The median of the ratios per round and the ratio of the fastest rounds must agree, whichever commit is slower."""
    seconds = {("step", compare.WORKING_TREE): times, ("step", "main"): [5, 1, 2]}
    seconds |= {("other", commit): [1, 1, 1] for _, commit in seconds}
    assert compare.report(seconds, "main") == status
    assert capsys.readouterr().out.count("slower") == status


@pytest.mark.slow
def test_compare(monkeypatch, capfd):
    """Each commit's package is imported from its own folder; the temporary worktree is removed, on errors, too."""
    git = ["git", "-C", str(compare.ROOT), "worktree", "list"]
    if shutil.which("git") is None or subprocess.run(git, capture_output=True).returncode:
        pytest.skip("no git repository")
    worktrees = subprocess.check_output(git)
    monkeypatch.setattr(compare, "MAX_RATIO", float("inf"))
    args = ["HEAD", "--device", "cpu", "--repeats", "1", "--batch", "1", "--tokens", "8", "--width", "64", "--layers", "1"]
    assert compare.main(args) == 0
    assert capfd.readouterr().out.count(" step |") == 2
    monkeypatch.setattr(compare, "CommitProcess", None)
    with pytest.raises(TypeError):
        compare.main(args)
    assert subprocess.check_output(git) == worktrees


# The operator ---------------------------------------------------------------------------------------------------------


def test_op(tmp_path, capsys):
    records = run("op", tmp_path, "--variants", "triton", "numba", "reference", "sdpa")
    measured = {(x["variant"], x["form"], x["pass"]) for x in records if x["metric"] == "ms"}
    assert measured == set(product(("numba", "reference", "sdpa"), ("causal", "bidirectional"), registry.PASSES))
    ratios = [record for record in records if record["variant"] == "reference" and record["metric"] == "reference / this"]
    assert {record["value"] for record in ratios} == {"1"}
    assert capsys.readouterr().out.count("triton: not available here") == 2


@pytest.mark.slow
def test_memory_of_the_operator(tmp_path):
    records = run("op", tmp_path, "--memory", "--shape", 1, 65536, 4, 64, "--variants", "numba", "reference")
    peaks = {(x["variant"], x["pass"]): float(x["value"]) for x in records if x["metric"] == "peak / bytes of w"}
    for pass_name, count in zip(registry.PASSES, (1, 2)):  # the output, its input's gradient; the reference stores more
        assert count <= peaks["numba", pass_name] < count + 1 < peaks["reference", pass_name]


@pytest.mark.slow
def test_first_use(tmp_path, monkeypatch):
    monkeypatch.setattr(op, "PASSES", ("forward",))
    seconds = {(x["form"], x["metric"]): float(x["value"]) for x in run("first_use", tmp_path)}
    for form in ("causal", "bidirectional"):
        assert seconds[form, "s, filled cache"] < seconds[form, "s, empty cache"]


@pytest.mark.slow
@needs_compiler
def test_options_relative_to_plain(tmp_path):
    records = run("options", tmp_path)
    ratios = {(x["what"], x["option"], x["code"], x["pass"]) for x in records if x["metric"] == "this / plain"}
    kinds = {("operator", kind) for kind in ("none", "head", "token")} | {("layer", "none"), ("layer", "convolution of 4")}
    assert ratios == {(*kind, *x) for kind, x in product(kinds, product(("eager", "compiled"), registry.PASSES))}


# Models ---------------------------------------------------------------------------------------------------------------


def test_accuracy_of_text_classifiers(tmp_path):
    """Of a model that answers always the same, by length, and of TF-IDF, which learns the words of two classes."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    texts = [f"{('bad', 'good')[i % 2]} film " + "that we saw " * (40 * (i % 3)) for i in range(30)]
    dataset = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(30)]}, features)
    for split in ("train", "test"):
        dataset.to_parquet(tmp_path / f"data/{split}.parquet")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 320, "pad_token_id": 0}
    model = ToSTForSequenceClassification(ToSTConfig(**sizes, id2label={0: "neg", 1: "pos"}, max_position_embeddings=512))
    model.score.weight.data.zero_()
    model.save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    folder = tmp_path / "model"
    records = run("text_classification", tmp_path, "--dataset", tmp_path / "data", "--model", folder, "--classifiers", folder)
    accuracy = {(x["model"], x["tokens"]): float(x["value"]) for x in records if x["metric"] == "accuracy"}
    counts = {x["tokens"]: int(x["value"]) for x in records if x["metric"] == "texts"}
    assert counts == {"all": 30, "up to 200": 10, "401 to 1,000": 20}
    assert accuracy["model", "all"] == accuracy["model", "up to 200"] == 0.5 and accuracy["TF-IDF", "all"] == 1


def test_text_classification(tmp_path):
    config = ToSTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64, is_causal=False)
    ToSTForSequenceClassification(config).save_pretrained(tmp_path / "model")
    records = run("text_classification", tmp_path, "--model", tmp_path / "model", "--lengths", 8, 600)
    metrics = {(record["model"], record["tokens"], record["metric"]) for record in records}
    models = ("ToST", "BERT", *(f"BERT, first {cut} tokens" for cut in (128, 256, 512)))
    assert metrics == set(product(models, ("8", "600"), ("ms", "this / ToST", "peak MiB")))


@pytest.mark.parametrize("static", [False, True])
def test_decode(tmp_path, static):
    flags = ["--static", "--steps", "2"] if static else []
    records = run("decode", tmp_path, "--positions", 5, 9, "--batch", 1, 3, *flags)
    sizes = {
        (record["model"], record["batch"], record["position"]): float(record["value"])
        for record in records
        if record["metric"] == "cache bytes"
    }
    assert len(sizes) == 8
    for (name, batch, position), size in sizes.items():
        slots = int(position) + (2 if static else 0)
        # ToST: three sums, two of them in float64
        expected = 4 * int(batch) * (3 * 768 + 2 * 12 if name == "ToST" else 2 * 768 * slots)
        assert size == expected, (name, batch, position)
    assert {record["cache"] for record in records} == {"static" if static else "dynamic"}
    assert {"ms a step", "tokens/s", "GPT-2 / this"} <= {record["metric"] for record in records}


def test_decode_of_a_folder(tmp_path):
    """The cache of a model with a sliding window has the size that `state_bytes` says, at any position beyond the window."""
    options = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 4, "conv_kernel": 3}
    options |= {"position_embedding_type": "none", "num_hidden_layers": 2}
    config = ToSTConfig(hidden_size=32, num_attention_heads=4, vocab_size=64, **options)
    config.save_pretrained(tmp_path / "model")
    options = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "vocab_size": 64}
    Mamba2Config(**options, num_hidden_layers=1, conv_kernel=4, chunk_size=8).save_pretrained(tmp_path / "mamba2")
    folders = tmp_path / "model", tmp_path / "mamba2"
    records = run("decode", tmp_path, "--models", "--folders", *folders, "--positions", 9, 2000)
    sizes = {(x["model"], x["position"]): float(x["value"]) for x in records if x["metric"] == "cache bytes"}
    # of Mamba-2: its convolution's inputs and its recurrent state
    expected = {"model": state_bytes(config).in_memory, "mamba2": 4 * ((64 + 2 * 8) * 4 + 64 * 8)}
    assert sizes == {(name, position): size for name, size in expected.items() for position in ("9", "2000")}


@pytest.mark.slow
def test_resolution(tmp_path):
    records = run("resolution", tmp_path, "--sizes", 32, 64)
    assert {(record["model"], record["pixels"], record["tokens"]) for record in records} == {
        (name, *size) for name in ("ToST", "ViT") for size in (("32", "4"), ("64", "16"))
    }
    assert all(float(record["value"]) > 0 for record in records)


def test_training_on_images(tmp_path):
    records = run("resolution", tmp_path, "--training", "--preset", "tiny", "--sizes", 32, "--repeats", 1)
    metrics = ("training images/s", "ViT / this", "matrix products %", "convolutions %")
    expected = {(f"{name}-tiny", metric) for name in ("ToST", "XCA", "softmax", "ViT") for metric in metrics}
    assert {(x["model"], x["metric"]) for x in records} == expected | {("ToST-tiny", "TSSA %")}
    assert all(float(x["value"]) > 0 for x in records)
    assert all(float(x["value"]) < 100 for x in records if x["metric"].endswith(" %"))


def test_trained_classifiers_at_other_sizes(tmp_path):
    """Their accuracy is that of their pipelines with images of the size, whatever the order of their classes."""
    pictures = digit_pictures(30)
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    examples = {"image": [picture for picture, _ in pictures], "label": [number for _, number in pictures]}
    Dataset.from_dict(examples, features=features).to_parquet(tmp_path / "digits.parquet")
    names = NAMES[::-1]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model = tiny_vision_model(**labels)
    model.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, **labels)).save_pretrained(tmp_path / "vit")
    folders = ["--folders", tmp_path / "model", tmp_path / "vit", "--photographs", tmp_path / "digits.parquet"]
    records = run("resolution", tmp_path, *folders, "--sizes", 16, 24, "--repeats", 1)
    cases = {(x["model"], x["pixels"], x["tokens"]) for x in records}
    assert cases == {(name, *size) for name in ("model", "vit") for size in (("16", "16"), ("24", "36"))}
    accuracies = {(x["model"], x["pixels"]): float(x["value"]) for x in records if x["metric"] == "accuracy"}
    for side in (16, 24):
        classify = pipeline("image-classification", model=model.eval(), image_processor=make_image_processor(side))
        guesses = [guess[0]["label"] for guess in classify([picture for picture, _ in pictures])]
        is_correct = [guess == NAMES[number] for guess, (_, number) in zip(guesses, pictures)]
        assert accuracies["model", str(side)] == pytest.approx(statistics.mean(is_correct))


@pytest.mark.slow
def test_scaling(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "SLOPE_FROM", 32)
    records = run("scaling", tmp_path, "--tokens", 16, 32, 64, "--softmax_limit", 32)
    cases = {
        name: {(x["kind"], int(x["tokens"])) for x in records if x["metric"] == name} for name in ("ms", "softmax / ToST")
    }
    assert cases["softmax / ToST"] == {("softmax", 16), ("softmax", 32)}
    assert cases["ms"] == cases["softmax / ToST"] | {("ToST", 16), ("ToST", 32), ("ToST", 64)}
    assert len([record for record in records if record["metric"] == "peak MiB"]) == 5
    assert [record["kind"] for record in records if record["metric"] == "exponent"] == ["ToST"]


def test_train_lm(tmp_path, capsys):
    records = run("train_lm", tmp_path, "--size", "toy", "--lengths", 32, 16, "--tokens", 64)
    assert list(dict.fromkeys(record["T"] for record in records)) == ["32", "16"]  # in the order given
    assert {(record["model"], record["T"], record["batch"], record["sizes"]) for record in records} == {
        (name, *length, f"equal {equal}")
        for name in train_lm.MODELS
        for length in (("16", "4"), ("32", "2"))
        for equal in ("width", "parameters")
    }
    assert "not available" not in capsys.readouterr().out
