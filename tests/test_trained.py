"""The trained models of model_cards/trained, as they would be on the Hub: they load, work, and evaluate as their cards say."""

import json
import re
from pathlib import Path

import pytest
import torch
from image_runs import load_processor
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

import tost_hf  # noqa: F401  registers the models with the Auto classes


ROOT = Path(__file__).parents[1]
TRAINED = ROOT / "model_cards/trained"
BOOKS, PHOTOS = TRAINED / "tost-books-3m", TRAINED / "tost-cifar10-1m"
ALICE_LOSS = 4.4060  # nats per token
# what the model says, right or wrong: frogs are its best class, cats its worst; a rocket is none of its classes
CLASSES = {"cat": ("frog", 0.657), "rocket": ("ship", 0.565)}


def evaluation(folder: Path) -> dict[str, float]:
    results = json.loads((folder / "evaluation.json").read_text())["results"]
    return {result["metric_name"]: result["metric_value"] for result in results}


@pytest.mark.parametrize("folder", [BOOKS, PHOTOS], ids=lambda folder: folder.name)
def test_files_of_the_trained_models(folder):
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= 6_000_000
    with safe_open(weights, "pt") as file:
        stored = {file.get_slice(name).get_dtype() for name in file.keys()}
    assert "BF16" in stored
    card = (folder / "README.md").read_text()
    for name, value in evaluation(folder).items():
        assert name in card and f"{value:.6g}"[:6] in card
    assert not list(folder.rglob("*.bin")) and not list(folder.rglob("*.pt"))


def test_the_language_model_continues_a_text():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BOOKS, dtype=torch.float32), AutoTokenizer.from_pretrained(BOOKS)
    prompt = "It was a dark night, and"
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert text.startswith(prompt) and len(text.split()) > len(prompt.split()) + 5

    # the opening of Alice in Wonderland, in none of the books that the model was trained and evaluated on
    input_ids = tokenizer((Path(__file__).parent / "fixtures/alice.txt").read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids, labels=input_ids).loss)
    assert loss == pytest.approx(ALICE_LOSS, abs=0.005)
    results = evaluation(BOOKS)
    held_out = results["Loss, nats per token (sweep, context 256, stride 128)"]
    assert abs(loss - held_out) < 0.5 and held_out < results["Baseline: loss of bigrams, nats per token"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_classifier_classifies_photographs(name):
    model, processor = AutoModelForImageClassification.from_pretrained(PHOTOS, dtype=torch.float32), load_processor(PHOTOS)
    with Image.open(ROOT / f"examples/photos/{name}.jpg") as image, torch.no_grad():
        probabilities = model(**processor(image, return_tensors="pt")).logits[0].softmax(-1)
    label, probability = CLASSES[name]
    assert model.config.id2label[int(probabilities.argmax())] == label
    assert float(probabilities.max()) == pytest.approx(probability, abs=0.01)


def test_the_classifier_is_evaluated_beside_the_most_frequent_class():
    results = evaluation(PHOTOS)
    assert results["Accuracy (top-1)"] > 5 * results["Baseline: accuracy of the most frequent class"]


def test_the_example_of_the_page(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (TRAINED / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    text, label = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert text.startswith("It was a dark night, and") and label == CLASSES["cat"][0]
