"""The benchmarks that train: their synthetic data, and that each runs at toy size and writes records."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import run as runner  # isort: skip  (names the folders of the others)

import interactions
import language_models
import long_context
import synthetic
import training
from datasets import ClassLabel, Dataset, Features, Image
from records import ORIGIN_COLUMNS, read_records


COLUMNS = "task model parameters width layers steps batch context seed metric value".split()


def run(name: str, folder: Path, *args: str) -> list[dict[str, str]]:
    """Runs two steps of a benchmark and returns the records of the folder."""
    runner.main([name, "--steps", "2", *args, "--results", str(folder)])
    records = read_records(folder / "results.csv")
    assert list(records[0]) == [*ORIGIN_COLUMNS, *COLUMNS]
    assert all(math.isfinite(float(record["value"])) for record in records)
    return records


# Synthetic tasks ------------------------------------------------------------------------------------------------------


def test_recall_labels():
    pairs = 20
    batch = synthetic.make_recall_batch(np.random.default_rng(0), pairs, 50, vocab_size=64)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert len(tokens) == 4 * pairs
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < 32 for key in keys) and all(32 <= value < 64 for value in values)
        table, queries = dict(zip(keys, values)), range(2 * pairs, 4 * pairs, 2)
        assert sorted(tokens[i] for i in queries) == sorted(keys)
        # the label of the token before it
        assert labels == [table[tokens[i - 1]] if i - 1 in queries else -100 for i in range(4 * pairs)]


@pytest.mark.parametrize("task", ["copy 0", "copy 5", "majority"])
def test_locality_labels(task):
    batch = synthetic.make_locality_batch(np.random.default_rng(0), task, 20, 24)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert labels[0] == -100
        for i in range(1, 24):
            if task == "majority":
                lead = sum(1 if token >= synthetic.VOCAB_SIZE // 2 else -1 for token in tokens[:i])
                expected = int(lead > 0) if lead else -100
            else:
                source = i - 1 - int(task.removeprefix("copy "))
                expected = tokens[source] if source >= 0 else -100
            assert labels[i] == expected


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


# Long texts -----------------------------------------------------------------------------------------------------------


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
    loss = long_context.evaluate_sequence(model, tokens)[0]["loss_with_state_reset"]
    assert loss == pytest.approx(reset_losses.mean().item(), rel=1e-5)


# Whole benchmarks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """Folders: random words; random pictures in the format of CIFAR-10, 20 for training and 6 for testing of 2 classes."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=4)) for _ in range(50)]
    (folder / "text").mkdir()
    (folder / "text" / "input.txt").write_text("\n".join(" ".join(rng.choice(words, size=8)) for _ in range(400)))
    features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
    for split, count in (("train", 20), ("test", 6)):
        pictures = list(rng.integers(256, size=(count, 8, 8, 3), dtype=np.uint8))
        examples = {"img": pictures, "label": [i % 2 for i in range(count)]}
        Dataset.from_dict(examples, features=features).to_parquet(folder / "images" / f"{split}.parquet")
    return {name: str(folder / name) for name in ("images", "text")}


RUNS = {  # arguments of a benchmark at toy size, and the number of its records
    "ablations": ("--images images --head_dims 16 64", 15),
    "compare_vision": ("--images images", 9),
    "interactions": ("--images images --text text --test_texts 2", 18),
    "locality": ("--models ToST --tasks majority --length 16 --batch 2", 2),
    "long_context": ("--text text --length 64", 9),
    "observations": ("--images images --text text --test_images 3 --test_texts 2", 160),
    "recall": ("--pairs 2 4 --models ToST Mamba-2", 8),
    "tightness": ("--images images --text text --test_images 3 --test_texts 2 --every 2", 34),
}


@pytest.mark.parametrize("name", RUNS)
def test_benchmark_runs(tmp_path, monkeypatch, data, name):
    small = {(synthetic, "TOKENS"): 64, (synthetic, "TEST_BATCHES"): 1, (interactions, "LOCAL_PERCENTAGES"): (50,)}
    small |= {(interactions, "WORD_WINDOWS"): (1, 4)}
    small |= {(long_context, constant): 16 for constant in ("TRAINING_LENGTH", "CHUNK", "FIRST_RANGE")}
    for (module, constant), value in small.items():
        monkeypatch.setattr(module, constant, value)
    arguments, count = RUNS[name]
    records = run(name, tmp_path, "--seeds", "0", "--learning_rates", "1e-3", *(data.get(x, x) for x in arguments.split()))
    assert len(records) == len({(x["task"], x["model"], x["metric"]) for x in records}) == count
    assert not any(folder in x["command"] for x in records for folder in data.values())


def test_learning_rate_is_chosen_and_nothing_is_measured_twice(tmp_path, data, capsys):
    file, arguments = tmp_path / "results.csv", ["--size", "toy", "--models", "GPT-2", "--text", data["text"]]
    arguments += ["--learning_rates", "1e-3", "1e-2"]
    run("compare_lm", tmp_path, *arguments, "--seeds", "0")
    first_records = file.read_text()
    records = run("compare_lm", tmp_path, *arguments, "--seeds", "0", "1")
    assert file.read_text().startswith(first_records)
    values = {(x["seed"], x["metric"]): float(x["value"]) for x in records}
    assert len(values) == len(records) and {x["seed"] for x in records} == {"0", "1"}
    losses = {rate: values["0", f"loss with learning rate {rate}"] for rate in (0.001, 0.01)}
    best_rate = min(losses, key=losses.get)
    assert values["0", "learning_rate"] == values["1", "learning_rate"] == best_rate
    assert losses[best_rate] == values["0", "loss"] == values["0", "loss at step 2"]
    capsys.readouterr()
    assert run("compare_lm", tmp_path, *arguments, "--seeds", "0", "1") == records
    assert "seed" not in capsys.readouterr().out
