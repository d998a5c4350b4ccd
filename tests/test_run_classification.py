"""run_classification.py: texts, labels, the tokenizer, masked tokens, resuming, results; other models and other labels."""

import gzip
import json
import re
from functools import partial, wraps

import datasets
import pytest
import run_classification as script
import torch
import training_runs
from classification import TITLE, encode_labels, prepare_splits
from datasets import ClassLabel, Dataset, Features, Value
from packaging.version import Version
from safetensors.torch import load_file
from scripting import read_dataset
from scripts import command_line, losses
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerState, pipeline

from tost_hf import ToSTForSequenceClassification


NAMES = ["bad", "good"]
TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,layer_scale_init_value=1,max_position_embeddings=64"
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})


def reviews(count: int, offset: int = 0) -> dict[str, list]:
    """Sentences of different lengths whose sentiment is one word's."""
    texts, labels = [], []
    for i in range(offset, offset + count):
        word = (["dreadful", "boring"], ["lovely", "brilliant"])[i % 2][i // 2 % 2]
        texts.append(f"The film number {i} " + "that we saw on a rainy day " * (i % 3) + f"was {word}.")
        labels.append(i % 2)
    return {"text": texts, "label": labels}


@pytest.fixture(scope="session")
def review_folder(tmp_path_factory):
    """A folder of parquet files: 64 reviews to train on, 12 to test on, and a csv file of the latter with string labels."""
    folder = tmp_path_factory.mktemp("reviews")
    for split, count, offset in (("train", 64, 0), ("test", 12, 64)):
        Dataset.from_dict(reviews(count, offset), FEATURES).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture
def review_args(review_folder, tmp_path):
    """Arguments of a small run; keywords replace or add, None omits, True is a flag without a value."""

    def make(**changes) -> list[str]:
        values = {
            "config_name": "tost-base",
            "config_overrides": f"{TINY},is_causal=false",
            "tokenizer_vocab_size": 320,
            "dataset_name": review_folder,
            "cache_dir": tmp_path / "cache",
            "output_dir": tmp_path / "out",
            "per_device_train_batch_size": 8,
            "max_steps": 4,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": "true",
            "report_to": "none",
            "use_cpu": True,
            "do_train": True,
        }
        return command_line(values | changes)

    return make


def results(folder) -> dict[str, float]:
    content = json.loads((folder / "evaluation.json").read_text())["results"]
    return {result["metric_name"]: result["metric_value"] for result in content}


def test_training_evaluation_and_pipeline(tmp_path, review_args, capsys, caplog):
    """With the results of the stored weights: those of a pipeline, and those of another run that only evaluates."""
    script.main(review_args(max_steps=40, do_eval=True, do_predict=True, save_dtype="bfloat16"))
    out = tmp_path / "out"
    assert re.search(r"step 10 of 40: about \d+ s of training left", capsys.readouterr().out)
    assert re.search(r"Tokens of the 48 train texts: median \d+, 95 % up to \d+, at most \d+; all are read whole", caplog.text)
    assert losses(out)[-1] < losses(out)[0] / 2
    assert load_file(out / "model.safetensors")["score.weight"].dtype == torch.bfloat16
    test = reviews(12, 64)
    classify = pipeline("text-classification", model=str(out))
    assert classify.model.dtype == torch.float32
    guesses = [guess["label"] for guess in classify(test["text"])]
    accuracy = sum(guess == NAMES[label] for guess, label in zip(guesses, test["label"])) / 12
    assert results(out) == {"Accuracy": pytest.approx(accuracy), "Baseline: accuracy of the most frequent class": 0.5}
    card = (out / "README.md").read_text()
    assert card.count(TITLE) == 1 and "| bad | 6 |" in card and "| good | 6 |" in card
    for name in re.findall(r"\(([a-z_]+\.png)\)", card):
        assert (out / name).read_bytes().startswith(b"\x89PNG"), name
    assert json.loads((out / "eval_results.json").read_text())["eval_samples"] == 16

    changes = {"config_name": None, "config_overrides": None, "tokenizer_vocab_size": None, "do_train": None}
    changes |= {"model_name_or_path": out, "dtype": "float32", "output_dir": tmp_path / "again", "do_predict": True}
    script.main(review_args(**changes))
    assert results(tmp_path / "again") == results(out)
    run_arguments = (out / "run_arguments.json").read_text()
    script.main(review_args(**changes | {"output_dir": out}))
    assert (out / "run_arguments.json").read_text() == run_arguments  # of the training, with the card's command


def test_resumed_run_is_the_same(tmp_path, review_args):
    """It masks the same tokens of the same batches, in its first epoch and in the next."""
    options = {"token_masking": 0.3, "save_strategy": "steps", "save_steps": 15, "max_steps": 20}
    script.main(review_args(**options))
    script.main(review_args(**options, output_dir=tmp_path / "again", resume_from_checkpoint=tmp_path / "out/checkpoint-15"))
    for name, value in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "again/model.safetensors")[name]), name


def test_masked_tokens(tmp_path, review_args, monkeypatch):
    """In training about the given fraction of the tokens, none of the special ones; in evaluation none."""
    seen = {True: [], False: []}
    forward = ToSTForSequenceClassification.forward

    @wraps(forward)  # Trainer reads the names of its arguments
    def record(self, input_ids, **kwargs):
        seen[self.training].append(input_ids)
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(ToSTForSequenceClassification, "forward", record)
    script.main(review_args(token_masking=0.25, do_eval=True, max_steps=20))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    training = torch.cat([ids.flatten() for ids in seen[True]])
    masked, special = (
        (training == tokenizer.mask_token_id).sum(),
        torch.isin(training, torch.tensor(tokenizer.all_special_ids)),
    )
    assert masked / (len(training) - special.sum() + masked) == pytest.approx(0.25, abs=0.03)
    assert all((ids[:, 0] == tokenizer.cls_token_id).all() for ids in seen[True])
    assert not any((ids == tokenizer.mask_token_id).any() for ids in seen[False])


@pytest.mark.parametrize("model_type", ["bert", "tost"])
def test_files_and_other_models(tmp_path, review_args, model_type):
    """String labels of csv files, texts that are cut; evaluation keeps the order of the model's classes."""
    train, test = (reviews(count, offset) for count, offset in ((32, 0), (12, 64)))
    for name, content in (("train", train), ("test", test)):
        labels = [["good", "awful"][label] for label in content["label"]]
        Dataset.from_dict({"review": content["text"], "labels": labels}).to_csv(tmp_path / f"{name}.csv")
    overrides = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,max_position_embeddings=16"
    changes = {"dataset_name": None, "config_name": None, "model_type": model_type, "config_overrides": overrides}
    changes |= {"train_file": tmp_path / "train.csv", "text_column_name": "review", "max_steps": 2, "do_eval": True}
    script.main(review_args(**changes))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.model_type == model_type and model.config.id2label == {0: "awful", 1: "good"}

    model.config.id2label = {0: "good", 1: "awful"}
    model.save_pretrained(tmp_path / "out")
    changes = {"dataset_name": None, "config_name": None, "config_overrides": None, "tokenizer_vocab_size": None}
    changes |= {"model_name_or_path": tmp_path / "out", "output_dir": tmp_path / "again", "do_train": None}
    script.main(review_args(**changes, test_file=tmp_path / "test.csv", do_predict=True))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    is_correct = []
    for text, label in zip(test["text"], test["label"]):
        guess = model(**tokenizer(text, truncation=True, max_length=16, return_tensors="pt")).logits.argmax().item()
        is_correct.append(guess == label)
    assert results(tmp_path / "again")["Accuracy"] == pytest.approx(sum(is_correct) / 12)


def test_finetuning_of_a_language_model(tmp_path, review_args, text_model, tokenizer, caplog):
    """It gets a new head, and its tokenizer a token for padding."""
    for part in (text_model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    changes = {"config_name": None, "config_overrides": None, "tokenizer_vocab_size": None, "max_seq_length": 16}
    script.main(review_args(**changes, model_name_or_path=tmp_path / "model"))
    tuned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert list(tuned.config.id2label.values()) == NAMES and tuned.config.pad_token_id == tokenizer.eos_token_id
    assert "its score is replaced" in caplog.text
    assert re.search(r"of the 64 train texts: .*; \d+ are cut to 16, which drops \d+% of all tokens", caplog.text)
    embeddings = [model.get_input_embeddings().weight for model in (tuned, text_model)]
    torch.testing.assert_close(*embeddings, rtol=0, atol=0.1)  # of the language model, but for four steps


@pytest.mark.parametrize(
    "fraction, count, held_out", [(None, 4000, 200), (None, 1000, 100), (None, 40, 10), (None, 1, 0), (0.5, 40, 20)]
)
def test_held_out_texts(fraction, count, held_out):
    """By default 5 %, but at least a hundred and at most a quarter."""
    splits = {"train": Dataset.from_dict({"text": ["x"] * count, "label": ["a", "b"] * (count // 2) + ["a"] * (count % 2)})}
    arguments = script.DataTrainingArguments(dataset_name="x", train_val_split=fraction, class_names="a,b")
    names = ("train", "validation")
    prepare = partial(prepare_splits, splits, script.choose_columns, arguments, names, True, [], "Text", seed=0)
    if not held_out:
        with pytest.raises(ValueError):
            prepare()
        return
    parts, _ = prepare()
    assert [len(parts[name]) for name in names] == [count - held_out, held_out]


def test_estimate_of_the_time(monkeypatch, capsys):
    """From tokens, as the first batches are of the longest texts, and without the first step, which compiles."""
    callback, state = training_runs.TimeEstimateCallback(num_tokens=10_000), TrainerState(max_steps=200)
    clock = iter([0.0, 9.0])
    monkeypatch.setattr(training_runs.time, "monotonic", lambda: next(clock))
    callback.on_train_begin(None, state, None)
    for state.global_step in range(1, 31):
        state.epoch, state.num_input_tokens_seen = state.global_step / 100, 200 * state.global_step
        callback.on_step_end(None, state, None)
    # 200 tokens a second for 20,000 of two epochs, of which 2,000 were seen
    assert capsys.readouterr().out == "step 10 of 200: about 1 min 30 s of training left\n"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dataset_name": None}, "There are no texts to work on"),
        ({"label_column_name": "stars"}, "no column 'stars'; choose one of text, label"),
        ({"train_val_split": 1.5}, "train_val_split must be"),
        ({"max_seq_length": 65}, "over the model's maximum of 64 tokens"),
        ({"tokenizer_vocab_size": None}, "needs --tokenizer_name"),
        ({"tokenizer_name": "x"}, "without --tokenizer_name"),
        ({"token_masking": 2}, "token_masking must be from 0 to 1"),
        ({"dataset_name": None, "train_file": "x.html"}, "none of the kinds of files"),
        ({"do_predict": True, "max_predict_samples": 0}, "max_predict_samples must be at least 1"),
    ],
)
def test_errors(review_args, changes, message):
    with pytest.raises(ValueError, match=message):
        script.main(review_args(**changes))


def test_empty_texts_and_unknown_classes(tmp_path, review_args):
    script.main(review_args())
    content = reviews(4)
    Dataset.from_dict(content | {"text": ["fine", " ", "x", "y"]}).to_json(tmp_path / "empty.json")
    with pytest.raises(ValueError, match="Text 1 of the train split is empty"):
        script.main(review_args(dataset_name=None, train_file=tmp_path / "empty.json", class_names="bad,good"))
    Dataset.from_dict(content | {"label": ["no", "yes"] * 2}).to_json(tmp_path / "other.json")
    changes = {"config_name": None, "config_overrides": None, "tokenizer_vocab_size": None, "dataset_name": None}
    changes |= {"model_name_or_path": tmp_path / "out", "do_train": None, "do_predict": True}
    with pytest.raises(
        ValueError, match=r"Text 0 of the test split has the label 'no', which is none of the 2 classes bad, good"
    ):
        script.main(review_args(**changes, test_file=tmp_path / "other.json"))


# Labels --------------------------------------------------------------------------------------------------------------


def dataset(labels: list, feature=None) -> Dataset:
    features = None if feature is None else Features({"text": Value("string"), "label": feature})
    return Dataset.from_dict({"text": ["x"] * len(labels), "label": labels}, features)


@pytest.mark.parametrize(
    "labels",
    [
        dataset([2, 10, 2]),
        dataset([2.0, 10.0, 2.0]),
        dataset(["2", "10", "2"]),
        dataset([1, 0, 1], ClassLabel(names=["10", "2"])),
    ],
    ids=["numbers", "floats", "strings", "classes"],
)
@pytest.mark.parametrize("trains", [True, False])
def test_labels_are_names(labels, trains):
    """Of the model's classes when it is evaluated, in its order; of the data's when it is trained on others."""
    for model_names in (["x", "2", "1", "10"], ["2", "10"], ["10", "2"]):
        splits = {"train" if trains else "validation": labels}
        encoded, classes = encode_labels(splits, None, model_names, trains, "Text")
        assert classes == (["10", "2"] if trains and len(model_names) == 4 else model_names)
        [indices] = (split["label"][:] for split in encoded.values())
        assert [classes[index] for index in indices] == ["2", "10", "2"]


def test_names_of_numbers():
    """--class_names is of numbers, also as a csv file has them, and of any `ClassLabel`'s; strings may be names already."""
    for labels in (
        [2, 0, 1],
        [2.0, 0.0, 1.0],
        ["2", "0", "1"],
        ["c", "a", "1"],
        dataset([2, 0, 1], ClassLabel(names=[*NAMES, "x"])),
    ):
        labels = labels if isinstance(labels, Dataset) else dataset(labels)
        encoded, classes = encode_labels({"train": labels}, "a, b,c", ["c", "b", "a"], True, "Text")
        assert classes == ["c", "b", "a"] and encoded["train"]["label"][:] == [0, 2, 1]
    encoded, _ = encode_labels({"train": dataset([True, False])}, "a,b", [], True, "Text")
    assert encoded["train"]["label"][:] == [1, 0]
    encoded, _ = encode_labels({"train": dataset([1, 0])}, "1,0", [], True, "Text")
    assert encoded["train"]["label"][:] == [1, 0]


@pytest.mark.parametrize(
    "labels, class_names, message",
    [
        (["a", "b"], "a,a,b", "two classes are called 'a'"),
        (["a", "b"], "a,,b", "a class has an empty name"),
        (["a", ""], None, "Text 1 of the train split has no label"),
        (["a", None], None, "Text 1 of the train split has no label"),
        ([["a"], ["b"]], None, r"Text 0 of the train split has the label \['a'\]: it must be a name"),
        ([{"a": 1}, {"a": 2}], None, "Text 0 of the train split has the label {'a': 1}"),
        ([1.0, 1.5], None, "Text 1 of the train split has the label 1.5"),
        ([0, 3], "a,b", "the label '3', which is none of the 2 classes a, b"),
        (["1", "0"], "1,0", "'1' may be a name or a number"),
        (["a", "a"], None, "All examples are of one class, 'a'"),
    ],
)
def test_labels_that_are_no_names(labels, class_names, message):
    with pytest.raises(ValueError, match=message):
        encode_labels({"train": dataset(labels)}, class_names, [], True, "Text")


def test_evaluation_of_some_classes(tmp_path, review_args):
    """Named by numbers, or by what pandas reads as missing, in csv files; a text may be such a word."""
    names, changes = ["1", "2", "NA", "x"], {"dataset_name": None, "max_steps": 120}

    def write(file: str, count: int, offset: int, kept: list[str], words: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        texts = [*reviews(count, offset)["text"], *words]
        pairs = [(text, name) for text, name in zip(texts, names * len(texts)) if name in kept]
        texts, labels = zip(*pairs)
        Dataset.from_dict({"text": texts, "label": labels}).to_csv(tmp_path / file)
        return texts, labels

    write("train.csv", 64, 0, names)
    script.main(review_args(**changes, train_file=tmp_path / "train.csv"))
    classify = pipeline("text-classification", model=str(tmp_path / "out"))
    changes |= {"config_name": None, "config_overrides": None, "tokenizer_vocab_size": None, "do_train": None, "do_eval": True}
    for kept in (["1", "2"], ["NA"]):
        texts, labels = write(f"{kept[0]}.csv", 24, 64, kept, ("None", "5", "NA"))
        options = {"validation_file": tmp_path / f"{kept[0]}.csv", "output_dir": tmp_path / kept[0]}
        script.main(review_args(**changes | options, model_name_or_path=tmp_path / "out"))
        expected = sum(guess["label"] == label for guess, label in zip(classify(list(texts)), labels)) / len(texts)
        assert results(tmp_path / kept[0])["Accuracy"] == pytest.approx(expected) and expected > 0.5


def test_csv_files_are_read_as_written(tmp_path):
    content = 'text,label\nNA,01\n05,None\n"a, b",1.0\n,true\n'
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(content.encode()))
    records = [["NA", "01"], ["05", "None"], ["a, b", "1.0"], ["", "true"]]
    for options in ({"cache_dir": str(tmp_path / "cache")}, {"streaming": True}):
        examples = read_dataset("csv", data_files=str(tmp_path / "x.csv.gz"), split="train", **options)
        assert [list(example.values()) for example in examples] == records


NO_STRING = r"Text \d of the train split is no string but"
MIXED_TYPES = NO_STRING if Version(datasets.__version__) >= Version("5") else "changed from string to number"


@pytest.mark.parametrize(
    "texts, message", [(["a", 5], MIXED_TYPES), ([3, 5], NO_STRING), ([["a"], ["b"]], NO_STRING)], ids=str
)
def test_texts_that_are_no_strings(tmp_path, review_args, texts, message):
    records = [json.dumps({"text": text, "label": str(number)}) for number, text in enumerate(texts)]
    (tmp_path / "x.json").write_text("\n".join(records))
    with pytest.raises(ValueError, match=message):
        script.main(review_args(dataset_name=None, train_file=tmp_path / "x.json"))


def test_a_model_without_a_head_is_not_evaluated(tmp_path, review_args, text_model, tokenizer):
    for part in (text_model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    changes = {"config_name": None, "config_overrides": None, "tokenizer_vocab_size": None, "do_train": None, "do_eval": True}
    with pytest.raises(ValueError, match=r"lacks score\.weight, 1 in all, or has them in another shape: train it first"):
        script.main(review_args(**changes, model_name_or_path=tmp_path / "model", class_names="LABEL_0,LABEL_1"))
    changes |= {"config_name": "tost-base", "tokenizer_name": tmp_path / "model"}
    with pytest.raises(ValueError, match="There is no model to evaluate"):
        script.main(review_args(**changes))
