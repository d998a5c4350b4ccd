"""The speed benchmarks: their statistics, and that each runs to its end and writes records.

No speed is asserted, so that the tests do not depend on the machine.
"""

import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from image_runs import NAMES, digit_pictures, tiny_vision_model
from transformers import ViTConfig, ViTForImageClassification, pipeline


BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))  # permanently: processes that the benchmarks start inherit it

import compare  # noqa: E402
import decode  # noqa: E402
import op  # noqa: E402
import registry  # noqa: E402
import resolution  # noqa: E402
import run as runner  # noqa: E402
import scaling  # noqa: E402
import test_experiments  # noqa: E402
import text_classification  # noqa: E402
import timing  # noqa: E402
from records import ORIGIN_COLUMNS, RESULTS, VALUE_COLUMNS, read_records, select  # noqa: E402

from tost_hf import ToSTConfig, ToSTForSequenceClassification  # noqa: E402
from tost_hf.cache_files import state_bytes  # noqa: E402
from tost_hf.image_processing import make_image_processor  # noqa: E402


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")


def run(name: str, folder: Path, *args) -> list[dict[str, str]]:
    """Runs a benchmark on the CPU and returns its records."""
    runner.main([name, "--device", "cpu", "--repeats", "2", "--results", str(folder), *map(str, args)])
    records = read_records(folder / f"{name}.csv")
    assert tuple(records[0])[:5] == ORIGIN_COLUMNS and tuple(records[0])[-4:] == VALUE_COLUMNS
    for record in records:
        assert record["script"] == f"{name}.py" and record["date"] and record["machine"] and "torch" in record["versions"]
        assert record["command"].startswith(f"python examples/benchmarks/run.py {name}")
        assert float(record["low"]) <= float(record["value"]) <= float(record["high"])
    return records


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
        (("ToST conv token", "GPT-2 conv"), trained),
        (small, decoding | {"position": 10, "metric": "ms a step"}),
        (("ToST", "ViT"), image | {"pixels": 96}),
        (("ToST", "BERT"), review | {"tokens": 200}),
        (("ToST", "GPT-2"), trained),
        (("ToST conv token", "Mamba-2"), trained),
        (("ToST conv token", "ToST conv, no statistics"), trained),
        (("tost-imdb-2m", "TF-IDF"), review | {"tokens": "all", "metric": "accuracy"}),
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


def test_ratio_is_of_the_rounds():
    assert timing.spread([4, 1, 2, 9]) * 2 == (6, 2, 18)
    assert timing.ratio([2, 9, 4], [1, 3, 4]) == (2, 1, 3)  # the ratio of the medians would be 4 / 3


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


def test_classes_of_texts_are_in_their_order():
    """Texts are classified from the longest to the shortest."""
    texts = ["A wonderful film, a joy to watch.", "The worst film ever. " * 9, "Boring and bad.", "Great, I loved it. " * 3]
    assert list(text_classification.predict(str(text_classification.MODEL), texts)[0]) == ["pos", "neg", "neg", "pos"]


# Whole benchmarks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """Labeled texts, and a small classifier of texts."""
    text = {"text": ["bad film", "good film"] * 9, "label": [0, 1] * 9}
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    for split in ("train", "test"):
        Dataset.from_dict(text, features).to_parquet(tmp_path / f"texts/{split}.parquet")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    ToSTForSequenceClassification(ToSTConfig(**sizes, is_causal=False)).save_pretrained(tmp_path / "classifier")
    return {name: tmp_path / name for name in ("texts", "classifier")}


RUNS = [  # a benchmark, its arguments at toy size, the number of its records, and whether it takes long
    ("op", "--variants triton numba reference sdpa", 24, False),  # triton is not available
    ("op", "--memory --shape 1 64 4 64 --variants numba", 4, True),
    ("options", "", 40, True),
    ("resolution", "--sizes 32 64", 12, True),
    ("resolution", "--sizes 32 --training --preset tiny", 17, False),
    ("scaling", "--tokens 16 32 64 --softmax_limit 32", 13, True),
    ("text_classification", "--model classifier --lengths 8 600", 30, True),
    ("text_classification", "--dataset texts", 8, False),
    ("train_lm", "--size toy --models ToST GPT-2 --lengths 32 --tokens 64", 20, False),
]
OTHERS = {"compare_lm", "decode", "exports", "lra", "memberships"}  # which other tests run, of exports its parts
OTHERS |= {"exported_state", "first_use", "kernel_times", "quantized", "vllm"}  # slow ones, or with a GPU or vLLM


def test_every_benchmark_is_tested():
    assert {name for name, *_ in RUNS} | test_experiments.RUNS.keys() | OTHERS == registry.BENCHMARKS.keys()
    for name in registry.BENCHMARKS:
        assert runner.make_parser(name, registry.load_benchmark(name)).description


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [pytest.param(*x[:3], marks=[pytest.mark.slow] * x[3], id=f"{x[0]} {x[1][:20]}") for x in RUNS],
)
def test_benchmark_runs(tmp_path, folders, monkeypatch, name, arguments, count):
    small = {(op, "CPU_SHAPES"): [(2, 40, 3, 8)], (resolution, "LAYERS"): 1, (scaling, "SLOPE_FROM"): 32}
    for (module, constant), value in small.items():
        monkeypatch.setattr(module, constant, value)
    if name == "options" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    records = run(name, tmp_path, *(folders.get(word, word) for word in arguments.split()))
    cases = [tuple(value for column, value in x.items() if column not in ("value", "low", "high")) for x in records]
    assert len(records) == len(set(cases)) == count


def test_workloads_of_two_commits():
    for run_workload in compare.make_workloads("cpu", batch=2, tokens=8, width=64, layers=1).values():
        run_workload()


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


@pytest.mark.parametrize("static", [False, True])
def test_decode(tmp_path, monkeypatch, static):
    """The sizes of caches, which are published; of a folder, that which `state_bytes` says."""
    monkeypatch.setitem(decode.SIZES, "base", {"vocab_size": 512, "width": 128, "layers": (1, 1)})
    options = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 4, "conv_kernel": 3}
    config = ToSTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **options)
    config.save_pretrained(tmp_path / "model")
    flags = ["--static", "--steps", "2"] if static else ["--folders", tmp_path / "model"]
    records = run("decode", tmp_path, "--positions", 5, 9, "--batch", 1, 3, *flags)
    sizes = {(x["model"], x["batch"], x["position"]): float(x["value"]) for x in records if x["metric"] == "cache bytes"}
    assert len(sizes) == (8 if static else 12)
    for (name, batch, position), size in sizes.items():
        slots = int(position) + (2 if static else 0)
        # ToST: three sums, two of them in float64
        expected = {"ToST": 4 * (3 * 128 + 2 * 2), "GPT-2": 4 * 2 * 128 * slots, "model": state_bytes(config).in_memory}
        assert size == int(batch) * expected[name], (name, batch, position)
