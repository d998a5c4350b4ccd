"""The trained models of model_cards/trained: files, generation, classification, and the results on their cards."""

import json
import re
from pathlib import Path

import pytest
import torch
from image_runs import load_processor
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer, pipeline

import tost_hf  # noqa: F401  registers the models with the Auto classes


ROOT = Path(__file__).parents[1]
TRAINED = ROOT / "model_cards/trained"
BOOKS, REVIEWS = TRAINED / "tost-books-3m", TRAINED / "tost-imdb-2m"
CIFAR, PHOTOGRAPHS = TRAINED / "tost-cifar10-3m", TRAINED / "tost-photos-3m"
ALICE_LOSS = 3.7349  # nats per token


def read_evaluation(folder: Path) -> dict[str, float]:
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    return {result["metric_name"]: result["metric_value"] for result in results}


@pytest.mark.parametrize("folder", [BOOKS, CIFAR, PHOTOGRAPHS, REVIEWS], ids=lambda folder: folder.name)
def test_files_of_the_trained_models(folder):
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= 6_000_000
    with safe_open(weights, "pt") as file:
        stored = {file.get_slice(name).get_dtype() for name in file.keys()}
    assert "BF16" in stored
    card = (folder / "README.md").read_text()
    for name, value in read_evaluation(folder).items():
        assert name in card and f"{value:.6g}"[:6] in card
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32" and config.get("use_cache", True)
    assert not list(folder.rglob("*.bin")) and not list(folder.rglob("*.pt"))


def test_results_of_the_readme():
    """Those in the table of the models are those of their evaluations, rounded."""
    pattern = r"\| \[{}\].*\| ([\d.]+) (?:nats per token|% of [\d,]+ (?:test|validation) \w+) \|"
    metrics = {BOOKS: "Loss, nats per token (sweep, context 512, stride 256)", REVIEWS: "Accuracy"}
    metrics |= dict.fromkeys((CIFAR, PHOTOGRAPHS), "Accuracy (top-1)")
    for folder, metric in metrics.items():
        [value] = re.findall(pattern.format(folder.name), (TRAINED.parent / "README.md").read_text())
        scale, resolution = (1, 0.01) if folder == BOOKS else (100, 0.1)
        assert float(value) == pytest.approx(scale * read_evaluation(folder)[metric], abs=0.51 * resolution)


def test_language_model_generates_and_has_the_recorded_loss():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BOOKS), AutoTokenizer.from_pretrained(BOOKS)
    prompt = "It was a dark night, and"
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert text.startswith(prompt) and len(text.split()) > len(prompt.split()) + 5

    # the beginning of Alice in Wonderland, which the model was neither trained nor evaluated on
    input_ids = tokenizer((Path(__file__).parent / "fixtures/alice.txt").read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids, labels=input_ids).loss)
    assert loss == pytest.approx(ALICE_LOSS, abs=0.005)
    results = read_evaluation(BOOKS)
    test_loss = results["Loss, nats per token (sweep, context 512, stride 256)"]
    assert abs(loss - test_loss) < 0.5 and test_loss < results["Baseline: loss of bigrams, nats per token"]


def test_prompts_of_a_batch_are_continued_as_alone():
    """By a pipeline, which pads them: the tokenizer has a token for that, and the configurations have its id."""
    write = pipeline("text-generation", model=str(BOOKS))
    ids = (write.tokenizer.pad_token_id, write.model.config.pad_token_id, write.model.generation_config.pad_token_id)
    assert ids == (0, 0, 0)
    prompts = ["It was a dark night, and", "The", "She told the old man that he should not go there any more, because"]
    options = {"do_sample": False, "max_new_tokens": 20}
    assert write(prompts, batch_size=3, **options) == [write(prompt, **options) for prompt in prompts]


def test_three_best_classes_of_the_readme():
    model, processor = AutoModelForImageClassification.from_pretrained(CIFAR), load_processor(CIFAR)
    table = (TRAINED.parent / "README.md").read_text().partition("| photograph | three best classes |")[2].partition("\n\n")[0]
    rows = re.findall(r"\| (\w+) \| (\w+) (\d+) %, (\w+) (\d+) %, (\w+) (\d+) % \|", table)
    assert {row[0] for row in rows} == {file.stem for file in (ROOT / "examples/photos").glob("*.jpg")}
    for name, *expected in rows:
        with Image.open(ROOT / f"examples/photos/{name}.jpg") as image, torch.no_grad():
            values, labels = model(**processor(image, return_tensors="pt")).logits[0].softmax(-1).topk(3)
        assert [model.config.id2label[label] for label in labels.tolist()] == expected[::2]
        assert values.tolist() == pytest.approx([int(percent) / 100 for percent in expected[1::2]], abs=0.01)
    for folder in (CIFAR, PHOTOGRAPHS):
        results = read_evaluation(folder)
        assert results["Accuracy (top-1)"] > 8 * results["Baseline: accuracy of the most frequent class"]


def test_sentences_of_the_readme():
    """Their given and their predicted sentiment, and that reviews of any length have the same sentiment in a padded batch."""
    classify = pipeline("text-classification", model=str(REVIEWS))
    rows = re.findall(r"\| (.+) \| (pos|neg) \| (pos|neg) (\d+) % \|", (TRAINED.parent / "README.md").read_text())
    assert len(rows) == 12 and all(given == predicted for _, given, predicted, _ in rows[:6])  # the other six are hard
    sentences = [row[0] for row in rows]
    for (_, _, label, percent), result in zip(rows, classify(sentences)):
        assert (result["label"], result["score"]) == (label, pytest.approx(int(percent) / 100, abs=0.01))
    texts = [sentences[0], " ".join(sentences[:1] * 300)]  # of 2,000 tokens
    alone, batched = classify(texts, batch_size=1), classify(texts, batch_size=2)
    for one, other in zip(alone, batched):
        assert one["label"] == other["label"] == "pos" and one["score"] == pytest.approx(other["score"], abs=1e-5)
    assert read_evaluation(REVIEWS)["Accuracy"] > 0.85


def test_example_of_the_readme(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (TRAINED.parent / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    text, sentiment, label = capsys.readouterr().out.strip().rsplit("\n", 2)
    assert text.startswith("It was a dark night, and") and (sentiment, label) == ("pos", "cat")
