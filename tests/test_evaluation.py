"""The evaluation scripts: data sources, results files, commands, agreement with lm-evaluation-harness."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import evaluate_lm
import evaluation
import pytest
import scoring
import torch
from byte_models import EOS, byte_tokenizer, make_args, make_gpt2, make_model
from conftest import small_vision_config
from datasets import Dataset
from scripts import environment
from transformers import PreTrainedTokenizerFast


ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "evaluation"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


# Data -----------------------------------------------------------------------------------------------------------------


def test_files_and_folders(tmp_path):
    args = make_args(cache_dir=str(tmp_path / "cache"))
    (tmp_path / "lines.txt").write_text("one\n\nthree\n", encoding="utf-8")
    source = evaluation.load_source(str(tmp_path / "lines.txt"), args, sample_by="line")
    assert (source.examples["text"][:], source.name, source.split) == (["one", "", "three"], "lines.txt", None)
    source = evaluation.load_source(str(tmp_path / "lines.txt"), args, sample_by="document")
    assert source.examples["text"][:] == ["one\n\nthree\n"]

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "pages.jsonl").write_text('{"page": "one"}\n')
    assert evaluation.load_source(str(folder), args).split is None  # not "train", as datasets names it
    for split in ("test", "train"):  # a split that is named keeps its name
        (folder / "pages.jsonl").rename(folder / f"{split}.jsonl")
        assert evaluation.load_source(str(folder), args).split == split
        (folder / f"{split}.jsonl").rename(folder / "pages.jsonl")
    (folder / "pages.jsonl").unlink()
    for split in ("train", "validation"):
        Dataset.from_dict({"page": [f"{split} {number}" for number in range(3)]}).to_parquet(folder / f"{split}.parquet")
    source = evaluation.load_source(str(folder), args)
    assert (source.examples["page"][0], source.name, source.split) == ("validation 0", "folder", "validation")
    args.dataset_split, args.max_examples = "train", 2
    source = evaluation.load_source(str(folder), args)
    assert source.examples["page"][:] == ["train 0", "train 1"]
    args.dataset_split = "test"
    with pytest.raises(ValueError, match="--dataset_split"):
        evaluation.load_source(str(folder), args)
    with pytest.raises(FileNotFoundError, match=r"no file or folder 'absent\.txt'"):
        evaluation.load_source("absent.txt", args)


def test_model_of_images(tmp_path):
    small_vision_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"No ModelForCausalLM can be loaded from .*: it is configured by ToSTVisionConfig$"):
        evaluate_lm.main(["--model", str(tmp_path), "--tasks", "text", "--datasets", "text=absent.txt"])


def test_text_column():
    examples = Dataset.from_dict({"number": [1], "sentence": ["s"], "title": ["t"]})
    assert evaluate_lm.select_texts(examples, None) == ["s"]  # the column name of Penn Treebank
    assert evaluate_lm.select_texts(examples, "title") == ["t"]
    assert evaluate_lm.select_texts(examples.select_columns("title"), None) == ["t"]
    with pytest.raises(ValueError, match="--text_column_name"):
        evaluate_lm.select_texts(examples, "body")


def test_task_without_default_data():
    with pytest.raises(ValueError, match="--datasets"):
        evaluate_lm.LMEvaluationArguments(model="m", tasks=["ptb"])


# Results --------------------------------------------------------------------------------------------------------------


def make_results(source=None, **values):
    source = source or evaluation.Source(Dataset.from_dict({"text": ["x"]}), "set", "config", "test")
    measurements = [evaluation.Measurement("accuracy", name, value, 5, "how") for name, value in values.items()]
    return evaluation.make_results("text-generation", "Set", source, measurements, "python x.py", seed=3)


def test_results_are_merged(tmp_path):
    file = tmp_path / "new" / "evaluation.json"
    evaluation.write_results(file, make_results(a=0.25, b=0.5))
    second, first = json.loads(file.read_text())["results"][::-1]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", first.pop("date"))
    assert first == {
        "task_type": "text-generation",
        "dataset_type": "set",
        "dataset_name": "Set",
        "dataset_config": "config",
        "dataset_split": "test",
        "metric_type": "accuracy",
        "metric_name": "a",
        "metric_value": 0.25,
        "protocol": "how",
        "num_examples": 5,
        "seed": 3,
        "command": "python x.py",
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "mine"}))
    other_split = evaluation.Source(Dataset.from_dict({"text": ["x"]}), "set", "config", "validation")
    evaluation.write_results(file, make_results(a=0.75, c=1.0) + make_results(other_split, b=0.1))
    content = json.loads(file.read_text())
    metrics = [(result["metric_name"], result["dataset_split"], result["metric_value"]) for result in content["results"]]
    assert metrics == [("b", "test", 0.5), ("a", "test", 0.75), ("c", "test", 1.0), ("b", "validation", 0.1)]
    assert content["results"][0] == second and content["note"] == "mine"
    assert [path.name for path in file.parent.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize("content", ["[", "[]", '{"results": 3}', '{"results": [{"metric_value": 1}]}', '{"hidden_size": 8}'])
def test_other_files_are_not_overwritten(tmp_path, content):
    file = tmp_path / "evaluation.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"evaluation\.json"):
        evaluation.write_results(file, make_results(a=0.5))
    assert file.read_text() == content


def test_non_finite_results_are_omitted(caplog):
    assert [result["metric_name"] for result in make_results(a=math.inf, b=math.nan, c=1.0)] == ["c"]
    assert "a on Set is inf" in caplog.text and "b on Set is nan" in caplog.text


# The commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_model, make_gpt2])
def test_evaluate_lm(tmp_path, tokenizer, make, capsys):
    folder = tmp_path / "model"
    make().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "lines.txt").write_text("no it was n't <unk> but N years ago\n" * 9, encoding="utf-8")
    sources = {"ptb": tmp_path / "lines.txt", "cbt_ne": FIXTURES / "cbt.txt", "lambada": FIXTURES / "texts.jsonl"}
    texts = [json.loads(line)["text"] for line in (FIXTURES / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    sources["lambada"] = tmp_path / "passages.jsonl"
    sources["lambada"].write_text("".join(json.dumps({"text": text + " end"}) + "\n" for text in texts))
    command = ["--model", folder, "--tasks", *sources, "--datasets", *(f"{task}={file}" for task, file in sources.items())]
    command += ["--protocols", "sweep", "windows", "documents", "--num_windows", 8, "--max_examples", 3, "--device", "cpu"]
    command = [str(argument) for argument in [*command, "--cache_dir", tmp_path / "cache"]]
    evaluate_lm.main(command)
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    assert len(results) == 3 * 4 + 1 + 3 * 4 + 2
    by_name = {(result["dataset_name"], result["metric_name"]): result for result in results}
    sweep = by_name["Penn Treebank (lines.txt)", "Loss, nats per token (sweep, context 32, stride 16, first 3 examples)"]
    texts = ["no it was n't <unk> but N years ago"] * 3
    ids = tokenizer(EOS + "".join(text + EOS for text in texts))["input_ids"]
    total_loss, num_tokens = scoring.sweep(make(), [torch.tensor(ids)], 32, 16, 1)
    if make is make_model:  # GPT-2's weights are random each time
        assert sweep["metric_value"] == pytest.approx(total_loss / num_tokens, rel=1e-5)
    assert (sweep["num_examples"], sweep["seed"], sweep["dataset_type"]) == (3, 0, "lines.txt")
    assert sweep["command"].startswith("python examples/evaluate_lm.py --model ") and "float32" in sweep["protocol"]
    assert ("LAMBADA (passages.jsonl)", "Accuracy (exact last word, context 32, first 3 examples)") in by_name
    assert ("LAMBADA (passages.jsonl)", "Accuracy (lenient last word, context 32, first 3 examples)") in by_name
    cbt = by_name["Children's Book Test, named entities (cbt.txt)", "Accuracy (whole passage, context 32, first 3 examples)"]
    assert cbt["num_examples"] == 2
    printed = re.escape(sweep["metric_name"]) + f" +{sweep['metric_value']:.4f} +3\n"
    assert re.search(printed, capsys.readouterr().out)

    evaluate_lm.main(command)
    repeated_results = json.loads((folder / "evaluation.json").read_text())["results"]
    assert [result["metric_value"] for result in repeated_results] == [result["metric_value"] for result in results]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed")
def test_lm_evaluation_harness_agrees(tmp_path, tokenizer):
    """The command of evaluate_lm.py's docstring on a local task, against `documents` with the context as its stride."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    code = "import tost_hf; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    documented = re.search(r'python -c "(.*?)"', evaluate_lm.__doc__)[1]
    assert code == documented
    command = [sys.executable, "-c", code, "run", "--model", "hf", "--model_args", f"pretrained={folder},dtype=float32"]
    command += ["--tasks", "tost_texts", "--include_path", FIXTURES, "--device", "cpu", "--batch_size", "3"]
    command += ["--output_path", tmp_path / "harness.json"]
    variables = environment(tmp_path) | {"DISABLE_MULTIPROC": "1"}  # computes the standard errors in one process
    completed = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr[-3000:]
    (file,) = tmp_path.glob("harness*.json")
    expected = json.loads(file.read_text())["results"]["tost_texts"]

    command = ["--model", folder, "--tasks", "text", "--datasets", f"text={FIXTURES / 'texts.jsonl'}"]
    command += ["--protocols", "documents", "--stride", 32, "--device", "cpu", "--cache_dir", tmp_path / "cache"]
    evaluate_lm.main([str(argument) for argument in command])
    results = {result["metric_type"]: result for result in json.loads((folder / "evaluation.json").read_text())["results"]}
    assert "(documents, context 32, stride 32)" in results["bits_per_byte"]["metric_name"]
    assert results["bits_per_byte"]["metric_value"] == pytest.approx(expected["bits_per_byte,none"], rel=1e-5)
    assert 2 ** results["bits_per_byte"]["metric_value"] == pytest.approx(expected["byte_perplexity,none"], rel=1e-4)
    assert results["word_perplexity"]["metric_value"] == pytest.approx(expected["word_perplexity,none"], rel=1e-4)
