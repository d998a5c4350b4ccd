"""The experiments: their synthetic data is right, and each script runs end to end at toy size and leaves rows and plots."""

import csv
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "research"))

import ablations
import compare_lm
import compare_vision
import experiments
import language_models
import locality
import long_context
import observations
import recall
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from rows import parse_arguments
from transformers import PreTrainedTokenizerFast

from tost_hf import CausalStatisticsCache


TOY = ["--steps", "2", "--seeds", "0", "1", "--learning_rates", "1e-3"]


COLUMNS = (
    *("date", "machine", "versions", "script", "command"),
    *("task", "model", "parameters", "width", "layers", "steps", "batch", "context", "seed", "metric", "value"),
)


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    assert tuple(rows[0]) == COLUMNS
    assert all(math.isfinite(float(row["value"])) for row in rows)
    return rows


def by_seed(rows: list[dict[str, str]], model: str, seed: str) -> list[dict[str, float]]:
    """The metrics of a run, one dictionary if there is one run."""
    metrics = [(row["metric"], float(row["value"])) for row in rows if (row["model"], row["seed"]) == (model, seed)]
    assert len(dict(metrics)) == len(metrics)
    return [dict(metrics)]


# Synthetic tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [1, 4, 20])
def test_recall_labels_are_what_looking_up_finds(pairs):
    batch = recall.make_recall_batch(np.random.default_rng(0), pairs, 50, vocab_size=64)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert len(tokens) == 4 * pairs
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < 32 for key in keys) and all(32 <= value < 64 for value in values)
        table = dict(zip(keys, values))
        asked = list(range(2 * pairs, 4 * pairs, 2))
        assert sorted(tokens[i] for i in asked) == sorted(keys)
        for i, label in enumerate(labels):  # a label belongs to the token before it
            assert label == (table[tokens[i - 1]] if i - 1 in asked else -100)


def test_recall_asks_in_any_order_and_refuses_too_many_pairs():
    batch = recall.make_recall_batch(np.random.default_rng(0), 2, 400, vocab_size=64)
    tokens = batch["input_ids"]
    in_order = (tokens[:, 4] == tokens[:, 0]).double().mean().item()
    assert 0.4 < in_order < 0.6
    with pytest.raises(ValueError, match="40 pairs need 40 keys"):
        recall.make_recall_batch(np.random.default_rng(0), 40, 1, vocab_size=64)


@pytest.mark.parametrize("distance", [0, 1, 5, 22])
def test_copy_labels(distance):
    batch = locality.make_locality_batch(np.random.default_rng(0), f"copy {distance}", 20, 24)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        for i in range(24):
            source = i - 1 - distance
            assert labels[i] == (tokens[source] if i > 0 and source >= 0 else -100)


def test_copy_refuses_a_distance_that_leaves_no_label():
    with pytest.raises(ValueError, match="'copy 23' needs sequences of more than 24 tokens, got 24"):
        locality.make_locality_batch(np.random.default_rng(0), "copy 23", 1, 24)


def test_majority_labels():
    batch = locality.make_locality_batch(np.random.default_rng(0), "majority", 20, 24)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        assert labels[0] == -100
        for i in range(1, 24):
            low = sum(token < locality.VOCAB_SIZE // 2 for token in tokens[:i])
            high = i - low
            assert labels[i] == (-100 if low == high else int(high > low))
    with pytest.raises(ValueError, match="no task 'xor'"):
        locality.make_locality_batch(np.random.default_rng(0), "xor", 1, 4)


def test_accuracy_is_of_the_label_one_place_later():
    class Copies(torch.nn.Module):
        """Predicts the current token."""

        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, locality.VOCAB_SIZE).float()})

    def batches(task):
        return experiments.Batches(lambda rng: locality.make_locality_batch(rng, task, 8, 64), 4, 0)

    assert experiments.label_accuracy(Copies(), batches("copy 0")) == 1
    assert experiments.label_accuracy(Copies(), batches("copy 1")) < 0.15


def test_batches_are_fresh_and_repeatable():
    def make(rng):
        return {"input_ids": torch.from_numpy(rng.integers(1000, size=8))}

    first, again, other = (experiments.Batches(make, 3, seed) for seed in (0, 0, 1))
    assert len(list(first)) == 3
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again))
    assert len({tuple(batch["input_ids"].tolist()) for data in (first, other) for batch in data}) == 6


# What the experiments share -------------------------------------------------------------------------------------------


def test_the_best_learning_rate_of_the_first_seed_serves_the_others():
    runs = []

    def run(seed, rate):
        runs.append((seed, rate))
        return f"model {seed}, {rate}", {"loss": {0.1: 3.0, 0.2: 2.0, 0.4: math.nan}[rate] + seed}

    found = experiments.over_seeds(run, [0, 1, 2], [0.4, 0.1, 0.2], lambda metrics: -metrics["loss"])
    assert runs == [(0, 0.4), (0, 0.1), (0, 0.2), (1, 0.2), (2, 0.2)]
    metrics = {seed: {"loss": 2.0 + seed, "learning_rate": 0.2} for seed in (0, 1, 2)}
    assert found == {seed: (f"model {seed}, 0.2", metrics[seed]) for seed in (0, 1, 2)}


def test_rows_are_added_and_means_printed(tmp_path, capsys):
    file = tmp_path / "deep" / "results.csv"
    parser = experiments.make_parser("", steps=5, learning_rates=(1e-3,))
    parser.add_argument("--text", metavar="TEXT_FOLDER")
    parser.add_argument("--name", default="text")
    args = parse_arguments(
        parser, ["--text", "/secret/place", "--name", "a b", "--steps", "7", "--results", str(file.parent)], recall.__file__
    )
    results = experiments.Results(args)
    model = language_models.make_language_model("ToST", vocab_size=10, width=16, layers=1, head_dim=8, context=4)
    for seed, value in enumerate((0.1, 0.2, 0.6)):
        results.add({"accuracy": value}, task="t", model="ToST", network=model, steps=7, batch=2, context=4, seed=seed)
        assert len(rows_of(file)) == seed + 1
    row = rows_of(file)[-1]
    assert row["command"] == "python examples/benchmarks/recall.py --steps 7 --text TEXT_FOLDER --name 'a b'"
    assert (row["script"], row["width"], row["layers"], row["value"]) == ("recall.py", "16", "1", "0.6")
    assert int(row["parameters"]) == model.num_parameters()
    results.print_means()
    assert f"| t | ToST | accuracy | 0.3 ± {statistics.stdev([0.1, 0.2, 0.6]):.4g} |" in capsys.readouterr().out
    assert list(file.parent.iterdir()) == [file]


# Language -------------------------------------------------------------------------------------------------------------


def write_text(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=4)) for _ in range(50)]
    (folder / "input.txt").write_text("\n".join(" ".join(rng.choice(words, size=8)) for _ in range(400)))
    return folder


def test_texts_are_split_encoded_and_cut(tmp_path):
    folder = write_text(tmp_path / "text")
    text = (folder / "input.txt").read_text()
    training, validation = compare_lm.load_texts(str(folder))
    assert "".join(training + validation).strip("\n") == text and len(validation[0]) == pytest.approx(len(text) / 10, abs=2)
    assert compare_lm.shorten(["abcdef", "ghijkl"], 6) == ["abc", "ghi"] and compare_lm.shorten(["ab"], None) == ["ab"]

    tokenizer = compare_lm.train_tokenizer(training, 300)
    tokens = compare_lm.encode(tokenizer, ["one two\nthree", "four"])
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == "one two\nthree<|endoftext|>four<|endoftext|>"
    blocks = compare_lm.cut(torch.arange(10), 4)
    assert [block["labels"].tolist() for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    parquet = tmp_path / "rows"
    parquet.mkdir()
    for split in ("train", "validation"):
        Dataset.from_dict({"text": [f"{split} one", f"{split} two"]}).to_parquet(parquet / f"{split}.parquet")
    assert compare_lm.load_texts(str(parquet)) == (["train one", "train two"], ["validation one", "validation two"])


def test_bigram_loss_counts_pairs():
    training = torch.tensor([0, 1, 0, 1, 0, 2])
    blocks = [{"input_ids": torch.tensor([0, 1])}, {"input_ids": torch.tensor([0, 2])}]
    # 0 is followed by 1 twice and by 2 once; smoothing 0 leaves the plain shares
    expected = -(math.log(2 / 3) + math.log(1 / 3)) / 2
    assert compare_lm.bigram_loss(training, blocks, 3, smoothing=0) == pytest.approx(expected, rel=1e-5)
    # every row of the smoothed table is a distribution
    total = sum(
        math.exp(-compare_lm.bigram_loss(training, [{"input_ids": torch.tensor([1, x])}], 3, smoothing=0.5)) for x in range(3)
    )
    assert total == pytest.approx(1, rel=1e-5)


def test_position_ranges_cover_the_text():
    assert long_context.position_ranges(8, first=2) == [(0, 2), (2, 4), (4, 8)]
    assert long_context.position_ranges(7, first=2) == [(0, 2), (2, 4), (4, 7)]
    assert long_context.position_ranges(3, first=8) == [(0, 3)]


def test_reading_in_pieces_is_one_pass(monkeypatch):
    monkeypatch.setattr(long_context, "PIECE", 8)
    monkeypatch.setattr(long_context, "position_ranges", lambda length, first: [(0, 16), (16, 40)])
    torch.manual_seed(0)
    model = language_models.make_language_model("ToST", vocab_size=20, width=32, layers=2, head_dim=8, context=None).eval()
    tokens = torch.randint(20, (41,))
    with torch.no_grad():
        outputs = model(tokens[None, :-1], output_memberships=True)
        losses = torch.nn.functional.cross_entropy(outputs.logits[0], tokens[1:], reduction="none")
        alone = torch.nn.functional.cross_entropy(model(tokens[None, 16:24]).logits[0], tokens[17:25], reduction="none")
    rows = long_context.read(model, tokens)
    assert [(row["start"], row["stop"]) for row in rows] == [(0, 16), (16, 40)]
    for row in rows:
        part = slice(row["start"], row["stop"])
        assert row["loss"] == pytest.approx(losses[part].mean().item(), rel=1e-5)
        entropy = torch.stack([torch.special.entr(m[0, :, part]).sum(0).mean() for m in outputs.memberships]) / math.log(4)
        assert row["entropy_shortfall"] == pytest.approx(1 - entropy.mean().item(), abs=1e-6)
        assert row["entropy_shortfall_highest_layer"] == pytest.approx(1 - entropy.min().item(), abs=1e-6)
    states = []
    for end in (16, 40):
        cache = CausalStatisticsCache(model.config)
        model(tokens[None, :end], past_key_values=cache)
        parts = [layer.sum_weighted_sq / layer.sum_membership[..., None] for layer in cache.layers]
        states.append(torch.cat([part.flatten() for part in parts]))
    assert rows[1]["moment_change"] == pytest.approx(((states[1] - states[0]).norm() / states[0].norm()).item(), rel=1e-4)
    assert "moment_change" not in rows[0] and rows[0]["moment_norm"] == pytest.approx(states[0].norm().item(), rel=1e-5)
    assert rows[1]["microseconds_a_token"] > 0 and rows[1]["peak_mebibytes"] >= 0
    assert rows[1]["cache_bytes"] == rows[0]["cache_bytes"] == 2 * (32 * 4 + (32 + 4) * 8)
    monkeypatch.setattr(long_context, "position_ranges", lambda length, first: [(16, 24)])
    assert long_context.read(model, tokens)[0]["loss_without_older_past"] == pytest.approx(alone.mean().item(), rel=1e-5)


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A CIFAR-10 of random pictures: 20 to train on, 6 to test, 2 classes."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
    splits = {}
    for split, count in (("train", 20), ("test", 6)):
        pictures = list(rng.integers(256, size=(count, 8, 8, 3), dtype=np.uint8))
        splits[split] = Dataset.from_dict({"img": pictures, "label": [i % 2 for i in range(count)]}, features=features)
    for split, rows in DatasetDict(splits).items():
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


def test_pictures_are_read_normalized_and_augmented(images):
    training, test = compare_vision.load_images(str(images), limit=4)
    assert training.pixels.shape == (20, 3, 8, 8) and training.pixels.dtype == torch.uint8 and len(test.labels) == 4
    assert training.names == ["cat", "dog"] and training.labels[:3].tolist() == [0, 1, 0]

    from tost_hf import make_image_processor

    processed = make_image_processor(8)(training.pixels[0], return_tensors="pt")["pixel_values"]
    plain = compare_vision.collate(training.examples(augmented=False)[:3])
    torch.testing.assert_close(plain["pixel_values"][:1], processed)
    assert plain["labels"].tolist() == [0, 1, 0]

    seen = set()
    padded = torch.nn.functional.pad(training.pixels[:1].float(), [4] * 4, mode="replicate")[0]
    windows = [padded[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
    windows = compare_vision.normalize(torch.stack(windows + [x.flip(-1) for x in windows]))
    for _ in range(200):
        view = compare_vision.collate(training.examples(augmented=True)[:1])["pixel_values"]
        distance = (windows - view).abs().amax((1, 2, 3))
        assert distance.min() < 1e-5
        seen.add(int(distance.argmin()))
    assert len(seen) > 80 and min(seen) < 81 <= max(seen)


# Whole scripts --------------------------------------------------------------------------------------------------------


def test_recall_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "TOKENS", 64)
    file = tmp_path / "results.csv"
    recall.main([*TOY, "--pairs", "2", "4", "--test_batches", "1", "--width", "32", "--results", str(file.parent)])
    rows = rows_of(file)
    assert len(rows) == 3 * 2 * 2 * 2  # models, seeds, numbers of pairs, metrics
    assert {row["task"] for row in rows} == {"2 pairs", "4 pairs"} and {row["model"] for row in rows} == {
        "ToST",
        "GPT-2",
        "Mamba-2",
    }
    assert {row["width"] for row in rows} == {"32"} and {row["seed"] for row in rows} == {"0", "1"}


def test_locality_runs(tmp_path):
    file = tmp_path / "results.csv"
    tasks = ["copy 1", "majority"]
    locality.main([*TOY, "--tasks", *tasks, "--width", "32", "--length", "16", "--batch", "2", "--results", str(file.parent)])
    rows = rows_of(file)
    assert len(rows) == 2 * 3 * 2 * 2
    assert [row["task"] for row in rows if row["model"] == "GPT-2" and row["seed"] == "0"] == 2 * [tasks[0]] + 2 * [tasks[1]]


@pytest.mark.slow
def test_compare_lm_in_two_processes(tmp_path):
    file, text = tmp_path / "results.csv", write_text(tmp_path / "text")
    arguments = ["--size", "toy", "--seeds", "0", "--learning_rates", "1e-3", "--models", "GPT-2", "ToST", "--jobs", "2"]
    compare_lm.main([*arguments, "--text", str(text), "--results", str(file.parent)])
    assert sorted(row["model"] for row in rows_of(file) if row["metric"] == "loss") == ["GPT-2", "ToST"]


def test_compare_lm_runs_and_goes_on(tmp_path, capsys):
    file, models = tmp_path / "results.csv", ["GPT-2", "ToST conv"]
    text = write_text(tmp_path / "text")
    arguments = ["--size", "toy", "--learning_rates", "1e-3", "1e-2", "--text", str(text), "--name", "tiny text"]
    arguments += ["--results", str(file.parent)]
    compare_lm.main([*arguments, "--seeds", "0", "--models", models[0]])
    before = file.read_text()
    compare_lm.main([*arguments, "--seeds", "0", "1", "--models", *models])
    assert file.read_text().startswith(before)
    rows = rows_of(file)
    losses = sorted((row["model"], row["layers"], row["seed"]) for row in rows if row["metric"] == "loss")
    assert losses == [(name, layers, seed) for name, layers in zip(models, "56") for seed in "01"]
    rates = [f"loss with learning rate {rate}" for rate in ("0.001", "0.01")]
    metrics = {"loss", "loss at step 1", "loss at step 2", "bigram_loss", "learning_rate", "tokens/s", *rates}
    assert {row["metric"] for row in rows if row["seed"] == "0"} == metrics
    for name in models:
        chosen, other = ({row["learning_rate"] for row in by_seed(rows, name, seed)} for seed in "01")
        (first,) = by_seed(rows, name, "0")
        assert chosen == other and first["loss"] == min(first[rate] for rate in rates) == first["loss at step 2"]
    assert all("TEXT_FOLDER" in row["command"] and str(tmp_path) not in row["command"] for row in rows)
    printed, measured_before = capsys.readouterr().out, file.read_text()
    compare_lm.main([*arguments, "--seeds", "0", "1", "--models", *models])
    assert file.read_text() == measured_before
    assert all(f"| tiny text | {name} | loss |" in printed for name in models) and "seed" not in capsys.readouterr().out


def test_long_context_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(long_context, "TRAINED_AT", 16)
    monkeypatch.setattr(long_context, "PIECE", 16)
    monkeypatch.setattr(long_context, "FIRST_RANGE", 8)
    file = tmp_path / "results.csv"
    size = ["--width", "32", "--layers", "1", "--length", "64"]
    long_context.main([*TOY, *size, "--text", str(write_text(tmp_path / "text")), "--results", str(file.parent)])
    rows = rows_of(file)
    assert {row["seed"] for row in rows} == {"0", "1"} and {row["steps"] for row in rows} == {"2"}
    assert {"loss", "loss_without_older_past", "entropy_shortfall", "cache_bytes"} <= {row["metric"] for row in rows}


def test_long_context_reads_with_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(long_context, "PIECE", 16)
    monkeypatch.setattr(long_context, "FIRST_RANGE", 16)
    file, folder = tmp_path / "results.csv", tmp_path / "model"
    text = write_text(tmp_path / "text")
    tokenizer = compare_lm.train_tokenizer([(text / "input.txt").read_text()], 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=compare_lm.END_OF_TEXT).save_pretrained(folder)

    def save(context):
        model = language_models.make_language_model("ToST", vocab_size=300, width=32, layers=1, head_dim=8, context=context)
        model.save_pretrained(folder)

    arguments = ["--text", str(text), "--model", str(folder), "--length", "64", "--results", str(file.parent)]
    save(context=None)
    long_context.main(arguments)
    rows = rows_of(file)
    assert [row["task"] for row in rows if row["metric"] == "loss"] == ["0 to 16", "16 to 32", "32 to 64"]
    assert {row["steps"] for row in rows} == {"0"} and {row["width"] for row in rows} == {"32"}
    assert str(tmp_path) not in file.read_text() and "MODEL_FOLDER" in file.read_text()
    save(context=64)
    with pytest.raises(SystemExit):
        long_context.main(arguments)
    assert "without positions" in capsys.readouterr().err


def test_compare_vision_runs(tmp_path, images):
    file = tmp_path / "results.csv"
    size = ["--width", "16", "--heads", "2", "--layers", "1", "--batch", "4", "--patch_size", "2"]
    compare_vision.main([*TOY, *size, "--images", str(images), "--results", str(file.parent)])
    rows = rows_of(file)
    assert len(rows) == 3 * 2 * 3 and {row["context"] for row in rows} == {"16"}
    assert {row["model"] for row in rows} == {"TSSA", "XCA", "softmax"}
    assert all("CIFAR10_FOLDER" in row["command"] and str(images) not in row["command"] for row in rows)


def test_observations_run(tmp_path, images, capsys):
    file, text = tmp_path / "results.csv", write_text(tmp_path / "text")
    size = ["--width", "16", "--heads", "2", "--layers", "2", "--batch", "4", "--patch_size", "2", "--test_images", "3"]
    data = ["--images", str(images), "--text", str(text), "--test_texts", "2"]
    observations.main([*TOY, *size, *data, "--results", str(file.parent)])
    rows = rows_of(file)
    value = {(row["task"], row["model"], row["seed"], row["metric"]): float(row["value"]) for row in rows}
    assert len(value) == len(rows)
    assert {(row["task"], row["context"]) for row in rows} == {("images", "16"), ("text", "256")}
    assert {key[:3] for key in value} == {(t, m, s) for t in ("images", "text") for m in observations.STATES for s in "01"}
    for (task, model, seed, metric), rate in value.items():
        if metric.startswith("coding rate"):
            assert rate <= value[task, model, seed, metric.replace("coding rate", "variational")] + 1e-6
    assert value["text", "untrained", "0", "distance from uniform, position 0 on, layer 1"] == pytest.approx(0, abs=1e-6)
    assert "| images | trained | mutual information, another image's, layer 2 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        observations.main([*TOY, *data, "--learning_rates", "1e-3", "3e-3"])


def test_ablations_run(tmp_path, images):
    file = tmp_path / "results.csv"
    size = ["--width", "64", "--head_dims", "16", "64", "--layers", "1", "--batch", "4", "--patch_size", "2"]
    ablations.main([*TOY, *size, "--images", str(images), "--results", str(file.parent)])
    models = list(dict.fromkeys(row["model"] for row in rows_of(file)))
    ablations_of_32 = [f"32 channels a head, {name}" for name in ("raw scores", "ISTA", "raw scores, ISTA")]
    assert models == ["16 channels a head", "64 channels a head", *ablations_of_32]
    with pytest.raises(SystemExit):
        ablations.main([*TOY, "--width", "48", "--images", str(images), "--results", str(file.parent)])
