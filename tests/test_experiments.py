"""The benchmarks that train: their synthetic data, and that each runs at toy size and writes records."""

import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import run as runner  # isort: skip  (names the folders of the others)

import compare_vision
import language_models
import long_context
import synthetic
import training
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from records import ORIGIN_COLUMNS, read_records


TOY = ["--steps", "2", "--seeds", "0", "1", "--learning_rates", "1e-3"]


COLUMNS = "task model parameters width layers steps batch context seed metric value".split()


def read_checked_records(folder: Path) -> list[dict[str, str]]:
    records = read_records(folder / "results.csv")
    assert list(records[0]) == [*ORIGIN_COLUMNS, *COLUMNS]
    assert all(math.isfinite(float(record["value"])) for record in records)
    return records


def run(name: str, folder: Path, *args: str) -> list[dict[str, str]]:
    """Runs a benchmark and returns the records of the folder."""
    runner.main([name, *args, "--results", str(folder)])
    return read_checked_records(folder)


def get_metrics(records: list[dict[str, str]], model: str, seed: str) -> dict[str, float]:
    """The metrics of a model trained with one seed."""
    metrics = [(x["metric"], float(x["value"])) for x in records if (x["model"], x["seed"]) == (model, seed)]
    assert len(dict(metrics)) == len(metrics)
    return dict(metrics)


# Synthetic tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [1, 4, 20])
def test_recall_labels(pairs):
    batch = synthetic.make_recall_batch(np.random.default_rng(0), pairs, 50, vocab_size=64)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert len(tokens) == 4 * pairs
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < 32 for key in keys) and all(32 <= value < 64 for value in values)
        table = dict(zip(keys, values))
        query_positions = list(range(2 * pairs, 4 * pairs, 2))
        assert sorted(tokens[i] for i in query_positions) == sorted(keys)
        for i, label in enumerate(labels):  # the label of the token before it
            assert label == (table[tokens[i - 1]] if i - 1 in query_positions else -100)


@pytest.mark.parametrize("distance", [0, 1, 5, 22])
def test_copy_labels(distance):
    batch = synthetic.make_locality_batch(np.random.default_rng(0), f"copy {distance}", 20, 24)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        for i in range(24):
            source = i - 1 - distance
            assert labels[i] == (tokens[source] if i > 0 and source >= 0 else -100)


def test_majority_labels():
    batch = synthetic.make_locality_batch(np.random.default_rng(0), "majority", 20, 24)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert labels[0] == -100
        for i in range(1, 24):
            low = sum(token < synthetic.VOCAB_SIZE // 2 for token in tokens[:i])
            high = i - low
            assert labels[i] == (-100 if low == high else int(high > low))


def test_label_accuracy_is_of_the_next_token():
    class CopyModel(torch.nn.Module):
        """Predicts the current token."""

        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, synthetic.VOCAB_SIZE).float()})

    def make_batches(task):
        return training.Batches(lambda rng: synthetic.make_locality_batch(rng, task, 8, 64), 4, 0)

    assert training.label_accuracy(CopyModel(), make_batches("copy 0")) == 1
    assert training.label_accuracy(CopyModel(), make_batches("copy 1")) < 0.15


# Training with several seeds ------------------------------------------------------------------------------------------


def test_other_seeds_use_the_best_learning_rate_of_the_first():
    runs = []

    def run(seed, rate):
        runs.append((seed, rate))
        return f"model {seed}, {rate}", {"loss": {0.1: 3.0, 0.2: 2.0, 0.4: 5.0}[rate] + seed}

    results = training.run_seeds(run, [0, 1, 2], [0.4, 0.1, 0.2], lambda metrics: -metrics["loss"], "a label")
    assert runs == [(0, 0.4), (0, 0.1), (0, 0.2), (1, 0.2), (2, 0.2)]
    metrics = {seed: {"loss": 2.0 + seed, "learning_rate": 0.2} for seed in (0, 1, 2)}
    assert results == {seed: (f"model {seed}, 0.2", metrics[seed]) for seed in (0, 1, 2)}


# Language -------------------------------------------------------------------------------------------------------------


def write_text(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=4)) for _ in range(50)]
    (folder / "input.txt").write_text("\n".join(" ".join(rng.choice(words, size=8)) for _ in range(400)))
    return folder


def test_reading_in_chunks_equals_one_pass(monkeypatch):
    monkeypatch.setattr(long_context, "CHUNK", 8)
    monkeypatch.setattr(long_context, "position_ranges", lambda length, first: [(0, 16), (16, 40)])
    torch.manual_seed(0)
    model = language_models.make_language_model("ToST", vocab_size=20, width=32, layers=2, head_dim=8, context=None).eval()
    tokens = torch.randint(20, (41,))
    with torch.no_grad():
        outputs = model(tokens[None, :-1], output_memberships=True)
        losses = torch.nn.functional.cross_entropy(outputs.logits[0], tokens[1:], reduction="none")
        reset_losses = torch.nn.functional.cross_entropy(model(tokens[None, 16:24]).logits[0], tokens[17:25], reduction="none")
    ranges = long_context.evaluate_sequence(model, tokens)
    assert [(metrics["start"], metrics["stop"]) for metrics in ranges] == [(0, 16), (16, 40)]
    for metrics in ranges:
        span = slice(metrics["start"], metrics["stop"])
        assert metrics["loss"] == pytest.approx(losses[span].mean().item(), rel=1e-5)
        entropy = torch.stack([torch.special.entr(m[0, :, span]).sum(0).mean() for m in outputs.memberships]) / math.log(4)
        assert metrics["entropy_shortfall"] == pytest.approx(1 - entropy.mean().item(), abs=1e-6)
    monkeypatch.setattr(long_context, "position_ranges", lambda length, first: [(16, 24)])
    assert long_context.evaluate_sequence(model, tokens)[0]["loss_with_state_reset"] == pytest.approx(
        reset_losses.mean().item(), rel=1e-5
    )


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Random pictures in the format of CIFAR-10: 20 for training, 6 for testing, 2 classes."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
    splits = {}
    for split, count in (("train", 20), ("test", 6)):
        pictures = list(rng.integers(256, size=(count, 8, 8, 3), dtype=np.uint8))
        splits[split] = Dataset.from_dict({"img": pictures, "label": [i % 2 for i in range(count)]}, features=features)
    for split, dataset in DatasetDict(splits).items():
        dataset.to_parquet(folder / f"{split}.parquet")
    return folder


def test_pictures_are_read_normalized_and_augmented(images):
    training, test = compare_vision.load_images(str(images), limit=4)
    assert training.pixels.shape == (20, 3, 8, 8) and training.pixels.dtype == torch.uint8 and len(test.labels) == 4
    assert training.names == ["cat", "dog"] and training.labels[:3].tolist() == [0, 1, 0]

    from tost_hf.image_processing import make_image_processor

    expected = make_image_processor(8)(training.pixels[0], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(compare_vision.normalize(training.pixels[:1]), expected)
    assert compare_vision.collate(training.examples()[:3])["labels"].tolist() == [0, 1, 0]

    window_indices = set()
    padded = torch.nn.functional.pad(training.pixels[:1].float(), [4] * 4, mode="replicate")[0]
    windows = [padded[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
    windows = compare_vision.normalize(torch.stack(windows + [x.flip(-1) for x in windows]))
    for _ in range(200):
        augmented = compare_vision.collate(training.examples()[:1])["pixel_values"]
        distance = (windows - augmented).abs().amax((1, 2, 3))
        assert distance.min() < 1e-5
        window_indices.add(int(distance.argmin()))
    assert len(window_indices) > 80 and min(window_indices) < 81 <= max(window_indices)


# Whole benchmarks -----------------------------------------------------------------------------------------------------


def test_recall_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "TOKENS", 64)
    monkeypatch.setattr(synthetic, "TEST_BATCHES", 1)
    records = run("recall", tmp_path, *TOY, "--pairs", "2", "4")
    assert len(records) == 3 * 2 * 2 * 2  # models, seeds, numbers of pairs, metrics
    assert {(x["task"], x["model"], x["seed"], x["width"]) for x in records} == {
        (task, name, seed, "64") for task in ("2 pairs", "4 pairs") for name in ("ToST", "GPT-2", "Mamba-2") for seed in "01"
    }
    assert records[0]["command"].startswith("python examples/benchmarks/run.py recall --steps 2 --seeds 0 1")
    assert {(x["layers"], int(x["parameters"])) for x in records if x["model"] == "GPT-2"} == {("2", 117_504)}


def test_locality_runs(tmp_path):
    tasks = ["copy 1", "majority"]
    sizes = ["--length", "16", "--batch", "2"]
    records = run("locality", tmp_path, *TOY, "--seeds", "0", "--tasks", *tasks, *sizes)
    assert len(records) == 2 * 3 * 2  # tasks, models, metrics
    assert [x["task"] for x in records if x["model"] == "GPT-2" and x["seed"] == "0"] == 2 * [tasks[0]] + 2 * [tasks[1]]


def test_compare_lm_runs_and_resumes(tmp_path, capsys):
    file, models = tmp_path / "results.csv", ["GPT-2", "ToST conv"]
    text_args = ["--text", str(write_text(tmp_path / "text")), "--name", "tiny text"]
    arguments = ["--size", "toy", "--learning_rates", "1e-3", "1e-2", *text_args]
    run("compare_lm", tmp_path, *arguments, "--seeds", "0", "--models", models[0])
    first_records = file.read_text()
    records = run("compare_lm", tmp_path, *arguments, "--seeds", "0", "1", "--models", *models)
    assert file.read_text().startswith(first_records)
    losses = sorted((x["model"], x["layers"], x["seed"]) for x in records if x["metric"] == "loss")
    assert losses == [(name, layers, seed) for name, layers in zip(models, "56") for seed in "01"]
    rates = [f"loss with learning rate {rate}" for rate in ("0.001", "0.01")]
    metrics = {"loss", "loss at step 1", "loss at step 2", "bigram_loss", "learning_rate", "tokens/s", *rates}
    assert {x["metric"] for x in records if x["seed"] == "0"} == metrics
    for name in models:
        first, second = (get_metrics(records, name, seed) for seed in "01")
        assert first["learning_rate"] == second["learning_rate"]
        assert first["loss"] == min(first[rate] for rate in rates) == first["loss at step 2"]
    assert all("TEXT_FOLDER" in x["command"] and str(tmp_path) not in x["command"] for x in records)
    capsys.readouterr()
    assert run("compare_lm", tmp_path, *arguments, "--seeds", "0", "1", "--models", *models) == records
    output = capsys.readouterr().out
    assert all(f"| tiny text | {name} | loss |" in output for name in models) and "seed" not in output


def test_long_context_runs(tmp_path, monkeypatch):
    for name, size in {"TRAINING_LENGTH": 16, "CHUNK": 16, "FIRST_RANGE": 8}.items():
        monkeypatch.setattr(long_context, name, size)
    text_args = ["--text", str(write_text(tmp_path / "text")), "--length", "64"]
    records = run("long_context", tmp_path, *TOY, *text_args)
    assert {(x["seed"], x["steps"], x["width"]) for x in records} == {("0", "2", "96"), ("1", "2", "96")}
    assert {"loss", "loss_with_state_reset", "entropy_shortfall"} <= {x["metric"] for x in records}


def test_compare_vision_and_ablations_run(tmp_path, images):
    data = ["--images", str(images)]
    records = run("compare_vision", tmp_path, *TOY, "--seeds", "0", *data)
    assert len(records) == 3 * 3 and {x["context"] for x in records} == {"4"}
    assert {x["model"] for x in records} == {"TSSA", "XCA", "softmax"}
    assert all("CIFAR10_FOLDER" in x["command"] and str(images) not in x["command"] for x in records)
    records = run("ablations", tmp_path / "ablations", *TOY, "--seeds", "0", *data, "--head_dims", "16", "64")
    ablations_of_32 = [f"32 channels a head, {name}" for name in ("unnormalized scores", "ISTA", "unnormalized scores, ISTA")]
    models = list(dict.fromkeys(x["model"] for x in records))
    assert models == ["16 channels a head", "64 channels a head", *ablations_of_32]


def test_observations_run(tmp_path, images, capsys):
    data = ["--images", str(images), "--text", str(write_text(tmp_path / "text")), "--test_texts", "2"]
    records = run("observations", tmp_path, *TOY, "--test_images", "3", *data)
    values = {(x["task"], x["model"], x["seed"], x["metric"]): float(x["value"]) for x in records}
    assert len(values) == len(records)
    assert {(x["task"], x["context"]) for x in records} == {("images", "4"), ("text", "256")}
    assert {key[:3] for key in values} == set(product(("images", "text"), ("untrained", "trained"), "01"))
    for (task, model, seed, metric), value in values.items():
        if metric.startswith("coding rate"):
            assert value <= values[task, model, seed, metric.replace("coding rate", "variational")] + 1e-6
    assert values["text", "untrained", "0", "distance from uniform, position 0 on, layer 0"] == pytest.approx(0, abs=1e-6)
    assert "| images | trained | mutual information, another image's, layer 2 |" in capsys.readouterr().out
