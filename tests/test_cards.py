"""Model cards: contents from the folder, existing cards are not overwritten, what is published, examples that run."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import small_vision_config
from hub_clients import contents, language_model, save_tokenizer
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open

import tost_hf
from tost_hf import cli
from tost_hf.cache_files import state_bytes
from tost_hf.hub.cards import build_card, complete_card, find_pictures, save_card
from tost_hf.image_processing import make_image_processor
from tost_hf.model.configuration_tost import PRESETS
from tost_hf.model.configuration_tost_vision import VISION_PRESETS


ROOT = Path(__file__).parents[1]
RESULT = {"task_type": "text-generation", "dataset_type": "me/letters", "dataset_name": "Letters", "dataset_split": "test"}
RESULT |= {"metric_type": "perplexity", "metric_name": "perplexity (sweep, stride 64)", "metric_value": 12.34567891}
FURTHER = {"protocol": "every token once | stride 64", "seed": 7, "date": "2026-11-21", "num_examples": 1234}
FURTHER |= {"command": "python examples/evaluate_lm.py --model me/tiny"}
RUN = {"dataset_name": "me/letters", "dataset_config_name": "small", "model_name_or_path": "me/parent"}
RECORDS = {
    "trainer_state.json": {"global_step": 4321, "train_batch_size": 6, "log_history": [{"eval_loss": 9.9, "step": 10}]},
    "train_results.json": {"train_runtime": 3725.4, "train_samples": 8765, "train_loss": 2.125, "epoch": 2.5},
    "eval_results.json": {
        **{"eval_ema_loss": 1.75, "eval_loss": 1.53125, "eval_accuracy": 0.4375, "perplexity": 4.625},
        **{"eval_samples": 2048, "eval_runtime": 77.7},
    },
    "evaluation.json": {"results": [RESULT | FURTHER]},
    "run_arguments.json": RUN | {"command": "python x.py --do_train --note 'a --b'"},
}


def write_json(path, content):
    path.write_text(json.dumps(content))


def section(card, title):
    return card.text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def code_blocks(card):
    return re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)


def metadata(card):
    """The metadata parsed from the card's text, as after saving and loading."""
    return ModelCard(str(card)).data.to_dict()


@pytest.fixture
def bare_folder(tmp_path):
    """A folder with a model only."""
    language_model().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def trained_folder(bare_folder):
    """A folder with a model, its source files, a tokenizer, and the records of training and evaluation."""
    language_model().save_pretrained(bare_folder, with_code=True)
    save_tokenizer(bare_folder)
    for name, content in RECORDS.items():
        write_json(bare_folder / name, content)
    return bare_folder


@pytest.fixture
def labeled_folder(tmp_path):
    config = small_vision_config(patch_size=2, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    tost_hf.ToSTForImageClassification(config).save_pretrained(tmp_path / "images", with_code=True)
    make_image_processor(config).save_pretrained(tmp_path / "images")
    return tmp_path / "images"


@pytest.mark.parametrize("preset", [*PRESETS, *(name for name in VISION_PRESETS if name.endswith("patch16"))])
def test_sizes_on_the_page_of_presets(preset):
    name = preset.removesuffix("-patch16")
    pattern = rf"\| {name} \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|(?: ([\d,]+) \|)?"
    sizes = re.findall(pattern, (ROOT / "examples/guides/models.md").read_text())
    if preset in PRESETS:
        config, model_class = tost_hf.ToSTConfig.from_preset(preset), tost_hf.ToSTForCausalLM
        state = state_bytes(config).saved
    else:
        config, state = tost_hf.ToSTVisionConfig.from_preset(preset, num_labels=1000), None
        model_class = tost_hf.ToSTForImageClassification
    with torch.device("meta"):
        count = model_class(config).num_parameters()
    expected = (config.num_hidden_layers, config.num_attention_heads, config.hidden_size, count, state)
    assert sizes == [tuple("" if x is None else f"{x:,}" for x in expected)]


# Contents from a folder -----------------------------------------------------------------------------------------------


def test_unknown_facts_are_omitted(bare_folder):
    card = build_card(bare_folder)
    tags = ["tost", "arxiv:2412.17810", "tssa"]
    assert metadata(card) == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    assert re.findall(r"^## (.*)", card.text, re.MULTILINE) == ["How to use", "Limitations", "License and citation"]
    assert "None" not in card.text


def test_metadata_and_model_index(trained_folder):
    (trained_folder / "curves.png").write_bytes(b"")
    card = build_card(trained_folder, repo_id="me/tiny", license="mit")
    data = metadata(card)
    assert data["license"] == "mit" and data["datasets"] == ["me/letters"] and data["base_model"] == ["me/parent"]
    assert data["metrics"] == ["perplexity", "loss", "accuracy"] and data["model-index"][0]["name"] == "tiny"
    result, *training_results = ModelCard(str(card)).data.eval_results
    assert result.metric_args == FURTHER and RESULT.items() <= vars(result).items()
    training_metrics = {(x.metric_type, x.metric_value, x.dataset_type, x.dataset_config) for x in training_results}
    values = {"loss": 1.53125, "accuracy": 0.4375, "perplexity": 4.625}
    assert training_metrics == {(*metric, "me/letters", "small") for metric in values.items()}
    training = section(card, "Training")
    assert "![Loss by step](curves.png)" in training and "python x.py \\\n    --do_train \\\n    --note 'a --b'\n" in training


def test_parameters_and_state_are_those_of_the_model(bare_folder, labeled_folder):
    for path in (bare_folder, labeled_folder):
        with safe_open(path / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if not re.search("running_|num_batches", name)]  # buffers
            count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        text = build_card(path).text
        assert f"| parameters | {count:,} |" in text and "| dtype | float32 |" in text
    model = language_model()
    cache = tost_hf.ToSTCache(model.config)
    model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    state_bytes = 4 * sum(x.numel() for layer in cache.layers for x in layer.state)
    assert f"| state | {state_bytes:,} bytes per sequence" in build_card(bare_folder).text


def test_vision_cards(labeled_folder, tmp_path):
    card = build_card(labeled_folder)
    assert card.data.pipeline_tag == "image-classification" and "| classes | 2: cat, dog |" in card.text
    assert "multiples of 2 pixels" in section(card, "Limitations") and "XCiT" in section(card, "License and citation")
    config = small_vision_config(num_hidden_layers=1, image_size=(8, 12), attention_type="xca")
    tost_hf.ToSTVisionModel(config).save_pretrained(tmp_path / "baseline")
    card = build_card(tmp_path / "baseline")
    assert card.data.pipeline_tag == "image-feature-extraction" and "tssa" not in card.data.tags
    assert "not ToST itself" in card.text and "8 x 12 pixels" in card.text
    run_blocks(card, "baseline", tmp_path / "baseline")


def test_evaluation_of_earlier_weights_is_not_reported(bare_folder):
    state = {"global_step": 20, "log_history": [{"eval_loss": 3.5, "step": 10}]}
    write_json(bare_folder / "trainer_state.json", state)
    assert "## Evaluation" not in build_card(bare_folder).text
    state["log_history"] += [{"eval_loss": 3.25, "step": 20}, {"train_runtime": 1.0, "step": 20}]
    write_json(bare_folder / "trainer_state.json", state)
    card = build_card(bare_folder)
    assert "| loss | 3.25 |" in section(card, "Evaluation") and "model-index" not in metadata(card)  # no data set is known


def test_local_names_are_not_ids_and_paths_are_shortened(trained_folder):
    command = {"command": "python x.py --data /home/me/photos"}
    run = command | {"dataset_name": "/home/me/photos", "model_name_or_path": "my-tost"}
    write_json(trained_folder / "run_arguments.json", run)
    write_json(trained_folder / "evaluation.json", {"results": [RESULT | command]})
    card = build_card(trained_folder)
    assert not {"datasets", "base_model"} & metadata(card).keys()
    assert "/home" not in str(card) and card.text.count("--data photos") == 2


def test_tables_of_results(bare_folder):
    """Protocols are listed below, cells are escaped, numbers that are not finite are left out."""
    first, other = RESULT | FURTHER, RESULT | {"dataset_name": "Digits", "metric_name": "a | b\nc"}
    results = [first, first | {"protocol": "two\nlines", "metric_name": None}, other, first | {"metric_value": math.nan}]
    write_json(bare_folder / "evaluation.json", {"results": results})
    write_json(bare_folder / "eval_results.json", {"eval_loss": math.inf})
    assert section(build_card(bare_folder), "Evaluation").partition("```")[0].strip().split("\n\n") == [
        "Letters, test:",
        "| metric | value | examples | protocol |\n|---|---|---|---|\n"
        "| perplexity (sweep, stride 64) | 12.3457 | 1,234 | 1 |\n| perplexity | 12.3457 | 1,234 | 2 |",
        "1. every token once | stride 64; seed 7; 2026-11-21\n2. two lines; seed 7; 2026-11-21",
        "Digits, test:",
        "| metric | value |\n|---|---|\n| a \\| b c | 12.3457 |",
    ]


DAMAGED_FILES = [  # name, and text or changed fields
    *((name, "[]") for name in [*RECORDS, "config.json"]),
    ("train_results.json", "[" * 100_000),
    ("config.json", {"id2label": ["cat", "dog"]}),
    ("config.json", {"quantization_config": "int8"}),
    ("trainer_state.json", {"log_history": [3]}),
    ("evaluation.json", {"results": [3]}),
    ("evaluation.json", {"results": [{"metric_value": 3}]}),
    ("evaluation.json", {"results": [RESULT | {"command": 3}]}),
    ("run_arguments.json", {"dataset_config_name": ["small"]}),
]


@pytest.mark.parametrize("name, content", DAMAGED_FILES, ids=lambda value: str(value)[:60])
def test_damaged_files(trained_folder, capsys, name, content):
    if name == "trainer_state.json":
        (trained_folder / "eval_results.json").unlink()  # or the log of trainer_state.json is not used
    if isinstance(content, dict):
        content = json.dumps(json.loads((trained_folder / name).read_text()) | content)
    (trained_folder / name).write_text(content)
    for command in ("card", "info") if name == "config.json" else ("card",):
        assert cli.main([command, str(trained_folder)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("tost-hf: error: ") and str(trained_folder / name) in error
    assert not (trained_folder / "README.md").exists()


# Existing cards -------------------------------------------------------------------------------------------------------


def test_existing_card_is_not_overwritten(bare_folder, capsys):
    path, content = bare_folder / "README.md", "---\nlicense: mit\n---\n# Mine\n"
    path.write_text(content)
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0"]) == 1
    assert "--overwrite" in capsys.readouterr().err and path.read_text() == content
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0", "--overwrite"]) == 0
    card = ModelCard.load(path)
    assert card.data.license == "apache-2.0" and "Mine" not in card.text


def test_published_card(bare_folder):
    """It must name a license, which a card does not have by default, and is for the repository; the folder's stays."""

    def publish_card(license: str | None = None) -> ModelCard:
        before = contents(bare_folder)
        card = ModelCard(complete_card(bare_folder, "me/other", license=license, revision="v1"))
        assert contents(bare_folder) == before
        return card

    with pytest.raises(ValueError, match="--license"):
        publish_card()
    loading = '"me/other", revision="v1", trust_remote_code=True'
    assert publish_card("mit").data.license == "mit" and loading in publish_card("mit").text
    for license in (None, "mit"):
        card = build_card(bare_folder, license=license)  # as a training script does, which adds a section and metadata
        card.text, card.data["datasets"] = f"{card.text.rstrip()}\n\n## Accuracy by class\n", ["me/data"]
        save_card(card, path := bare_folder / "README.md")
        card = publish_card("mit")
        assert card.data.license == "mit" and card.data["datasets"] == ["me/data"]
        assert card.text.endswith("## Accuracy by class\n") and loading in card.text and "\n# other\n" in card.text
    save_card(build_card(bare_folder, repo_id="me/other", revision="v0", license="mit"), path)
    assert publish_card().text.count('"me/other", revision="v1"') == 2 and "v0" not in publish_card().text
    path.write_text("---\nlibrary_name: transformers\n---\n# Mine\n")
    card = publish_card("mit")
    assert card.data.license == "mit" and card.text.strip() == "# Mine"
    with pytest.raises(ValueError, match="names no license"):
        publish_card()
    path.write_bytes(content := b"---\r\nlicense:   mit\r\n---\r\n\r\n# Mine\r\n")
    assert complete_card(bare_folder, "me/other").encode() == content
    with pytest.raises(ValueError, match="the license 'mit', not 'apache-2"):
        publish_card("apache-2.0")


def test_pictures_of_a_card():
    """As browsers show them; not those on the web, or within the card."""
    markdown = "![a](a.png) ![b c](<b c.png>) ![d](d%20e.PNG 'title') ![f](f.jpg?raw=true) [![g](x/g.svg)](https://h.i/j.png)"
    html = "<img width=9 src='k.gif'> <IMG alt='a' src = l.webp> ![m](https://n.o/p.png) ![q](data:image/png;base64,AA)"
    expected = ["a.png", "b c.png", "d e.PNG", "f.jpg", "x/g.svg", "k.gif", "l.webp"]
    assert find_pictures(f"{markdown}\n{html} ![r](config.json)") == expected


def test_dry_run(bare_folder, capsys):
    argv = ["publish", str(bare_folder), "me/other", "--dry-run", "--license", "mit"]
    before = contents(bare_folder)
    assert cli.main(argv) == 0 and contents(bare_folder) == before
    output = capsys.readouterr().out
    assert "# other\n" in output and "nothing was sent" in output
    assert f"{len(before['model.safetensors']):14,} bytes  model.safetensors\n" in output and "  tssa.py\n" in output


# Code blocks ----------------------------------------------------------------------------------------------------------


def run_blocks(card, repo_id, path):
    """Runs a card's Python blocks, each in a new namespace, on the folder in place of the repository."""
    for block in code_blocks(card):
        assert f'"{repo_id}"' in block
        exec(compile(block.replace(f'"{repo_id}"', repr(str(path))), "README.md", "exec"), {})


def test_examples_with_the_package(trained_folder, labeled_folder, tmp_path, monkeypatch, capsys):
    """The text card's example prints a text that starts with its prompt, the image card's a label."""
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").save("picture.jpg")
    for path, pattern in ((trained_folder, r"Once upon a time\S.*"), (labeled_folder, "cat|dog")):
        card = build_card(path, repo_id="me/tiny")
        assert len(code_blocks(card)) == 2
        run_blocks(card, "me/tiny", path)
        assert re.fullmatch(pattern, capsys.readouterr().out.strip(), re.DOTALL)


@pytest.mark.parametrize(
    ("name", "output"),
    [("ForSequenceClassification", "LABEL_[01]"), ("ForTokenClassification", ".*1, 16, 2]."), ("Model", ".*1, 16, 32].")],
)
def test_examples_of_other_models(tmp_path, capsys, name, output):
    language_model(model_class=getattr(tost_hf, f"ToST{name}"), is_causal=False, pad_token_id=0).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    run_blocks(build_card(tmp_path, repo_id="me/tiny"), "me/tiny", tmp_path)
    assert re.fullmatch(output, capsys.readouterr().out.strip())


@pytest.mark.slow
def test_code_blocks_without_the_package(trained_folder, labeled_folder, tmp_path):
    code = "import sys; sys.modules['tost_hf'] = None\n"
    for path in (trained_folder, labeled_folder):
        block = code_blocks(build_card(path, repo_id="me/tiny", revision="abc1234"))[1]
        assert 'revision="abc1234"' in block
        code += block.replace('"me/tiny"', repr(str(path)))
        code += "\nprint(type(model).__module__, type(model).__name__)\n"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    classes = re.findall(r"transformers_modules\.\S+ (ToST\w+)", completed.stdout)
    assert classes == ["ToSTForCausalLM", "ToSTForImageClassification"]
