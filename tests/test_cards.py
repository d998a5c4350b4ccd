"""Model cards: contents from the folder, existing cards are not overwritten, the committed cards are current."""

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
from hub_clients import language_model, save_tokenizer
from huggingface_hub import ModelCard
from safetensors import safe_open

import tost_hf
from tost_hf import cli
from tost_hf.hub.cards import PRESET_CARDS, build_card, complete_card, preset_card, write_card
from tost_hf.hub.records import load_card
from tost_hf.image_processing import make_image_processor


ROOT = Path(__file__).parents[1]
RESULT = {
    "task_type": "text-generation",
    "dataset_type": "me/letters",
    "dataset_name": "Letters",
    "dataset_split": "test",
    "metric_type": "perplexity",
    "metric_name": "perplexity (sweep, stride 64)",
    "metric_value": 12.34567891,
    "protocol": "every token once | stride 64",
    "command": "python examples/evaluate_lm.py --model me/tiny",
    "seed": 7,
    "date": "2026-11-21",
    "num_examples": 1234,
}
RECORDS = {
    "trainer_state.json": {"global_step": 4321, "train_batch_size": 6, "log_history": [{"eval_loss": 9.9, "step": 10}]},
    "train_results.json": {"train_runtime": 3725.4, "train_samples": 8765, "train_loss": 2.125, "epoch": 2.5},
    "eval_results.json": {
        **{"eval_ema_loss": 1.75, "eval_loss": 1.53125, "eval_accuracy": 0.4375, "perplexity": 4.625},
        **{"eval_samples": 2048, "eval_runtime": 77.7},
    },
    "evaluation.json": {"results": [RESULT]},
    "run_arguments.json": {
        "command": "python examples/run_clm.py --do_train",
        "dataset_name": "me/letters",
        "dataset_config_name": "small",
        "model_name_or_path": "me/parent",
    },
}


def write_json(path, content):
    path.write_text(json.dumps(content))


def headings(card):
    return re.findall(r"^## (.*)", card.text, re.MULTILINE)


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


# The cards of the paper's sizes ---------------------------------------------------------------------------------------


def test_committed_cards_are_current(tmp_path):
    assert cli.main(["card", str(tmp_path / "new"), "--presets"]) == 0
    cards = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert cards == {path.name: path.read_text() for path in (ROOT / "model_cards").glob("*.md")}
    assert cards.keys() == {f"{name}.md" for name in PRESET_CARDS}
    assert all(len(text.splitlines()) <= 45 for text in cards.values())


def test_existing_preset_cards_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "tost-large.md").write_text("mine")
    assert cli.main(["card", str(tmp_path), "--presets"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("tost-large.md", "mine")]
    assert cli.main(["card", str(tmp_path), "--presets", "--overwrite"]) == 0


@pytest.mark.parametrize("name", PRESET_CARDS)
def test_preset_cards(name):
    card = preset_card(name)
    data = card.data.to_dict()
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == ("image-classification" if "vision" in name else "text-generation")
    assert not {"model-index", "datasets", "base_model", "metrics"} & set(data)
    assert "no weights come with it" in card.text and "Evaluation" not in headings(card)
    namespace = {}
    with torch.device("meta"):
        for block in code_blocks(card):
            exec(compile(block, name, "exec"), namespace)
    parameters = f"{namespace['model'].num_parameters():,}"
    assert f"| parameters | {parameters} |" in card.text
    assert parameters in (ROOT / f"examples/guides/{'vision' if 'vision' in name else 'options'}.md").read_text()
    assert f"--config_name {name}" in card.text


# Contents from a folder -----------------------------------------------------------------------------------------------


def test_unknown_facts_are_omitted(bare_folder):
    card = build_card(bare_folder)
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tost", "arxiv:2412.17810", "tssa"],
    }
    assert headings(card) == ["How to use", "Limitations", "License and citation"]
    assert "trust_remote_code" not in card.text and "contains no source files" in card.text
    assert "license of the weights" not in card.text and "None" not in card.text


def test_metadata_and_model_index(trained_folder):
    card = build_card(trained_folder, repo_id="me/tiny", license="mit")
    data = metadata(card)
    assert data["license"] == "mit" and data["datasets"] == ["me/letters"] and data["base_model"] == ["me/parent"]
    assert data["metrics"] == ["perplexity", "loss", "accuracy"]
    results = ModelCard(str(card)).data.eval_results
    assert data["model-index"][0]["name"] == "tiny"
    result = results[0]
    for key in ("task_type", "dataset_type", "dataset_name", "dataset_split", "metric_type", "metric_name", "metric_value"):
        assert getattr(result, key) == RESULT[key]
    assert result.metric_args == {key: RESULT[key] for key in ("protocol", "command", "seed", "date", "num_examples")}
    training_metrics = {(r.metric_type, r.metric_value, r.dataset_type, r.dataset_config) for r in results[1:]}
    assert training_metrics == {
        (m, v, "me/letters", "small") for m, v in (("loss", 1.53125), ("accuracy", 0.4375), ("perplexity", 4.625))
    }


def test_parameter_count_is_that_of_the_file(bare_folder, labeled_folder):
    for path in (bare_folder, labeled_folder):
        with safe_open(path / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if not re.search("running_|num_batches", name)]  # buffers
            count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        text = build_card(path).text
        assert f"| parameters | {count:,} |" in text and "| dtype | float32 |" in text


def test_state_size_is_that_of_the_cache(bare_folder):
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
    assert "Evaluation" not in headings(build_card(bare_folder))
    state["log_history"] += [{"eval_loss": 3.25, "step": 20}, {"train_runtime": 1.0, "step": 20}]
    write_json(bare_folder / "trainer_state.json", state)
    assert "| loss | 3.25 |" in section(build_card(bare_folder), "Evaluation")
    assert "model-index" not in metadata(build_card(bare_folder))  # the data set is unknown


def test_local_names_are_not_ids(trained_folder):
    write_json(trained_folder / "run_arguments.json", {"dataset_name": "/data/photos", "model_name_or_path": "my-tost"})
    data = metadata(build_card(trained_folder))
    assert "datasets" not in data and "base_model" not in data


def test_protocols_are_text_below_short_tables(bare_folder):
    other = RESULT | {"dataset_name": "Digits", "metric_name": "loss", "num_examples": None, "seed": None, "date": None}
    del other["protocol"]
    results = [RESULT, RESULT | {"metric_name": "loss"}, RESULT | {"protocol": "two\nlines", "metric_name": None}, other]
    write_json(bare_folder / "evaluation.json", {"results": results})
    evaluation = section(build_card(bare_folder), "Evaluation").partition("```")[0]
    assert evaluation.strip().split("\n\n") == [
        "Letters, test:",
        "| metric | value | examples | protocol |\n|---|---|---|---|\n"
        "| perplexity (sweep, stride 64) | 12.3457 | 1,234 | 1 |\n| loss | 12.3457 | 1,234 | 1 |\n"
        "| perplexity | 12.3457 | 1,234 | 2 |",
        "1. every token once | stride 64; seed 7; 2026-11-21\n2. two lines; seed 7; 2026-11-21",
        "Digits, test:",
        "| metric | value |\n|---|---|\n| loss | 12.3457 |",
    ]


def test_layers_are_counted_from_zero():
    assert "| layers | 12; full_attention in 3, 7, 11 (counted from 0) |" in preset_card("tost-hybrid-base").text


# Damaged records ------------------------------------------------------------------------------------------------------


def test_non_finite_numbers_are_omitted(bare_folder):
    write_json(bare_folder / "evaluation.json", {"results": [RESULT | {"metric_value": float("nan")}]})
    write_json(bare_folder / "eval_results.json", {"eval_loss": float("inf")})
    card = build_card(bare_folder)
    assert "## Evaluation" not in card.text and "model-index" not in metadata(card)


def test_table_cells_are_escaped(bare_folder):
    write_json(bare_folder / "evaluation.json", {"results": [RESULT | {"metric_name": "a | b\nc"}]})
    assert r"| a \| b c |" in section(build_card(bare_folder), "Evaluation")


DAMAGED_FILES = [  # name, and text or changed fields
    *((name, "[]") for name in [*RECORDS, "config.json"]),
    ("train_results.json", "[" * 100_000),
    ("config.json", {"id2label": ["cat", "dog"]}),
    ("config.json", {"dtype": "flaot32"}),
    ("config.json", {"architectures": 3}),
    ("config.json", {"model_type": ["tost"]}),
    ("config.json", {"auto_map": 3}),
    ("config.json", {"quantization_config": "int8"}),
    ("config.json", {"attn_implementation": 3}),
    ("trainer_state.json", {"log_history": [3]}),
    ("trainer_state.json", {"log_history": 3}),
    ("evaluation.json", {"results": 3}),
    ("evaluation.json", {"results": [3]}),
    ("evaluation.json", {"results": [{"metric_value": 3}]}),
    ("evaluation.json", {"results": [RESULT | {"command": 3}]}),
    ("evaluation.json", {"results": [{name: value for name, value in RESULT.items() if name != "metric_value"}]}),
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
        assert "JSON object" in error or content != "[]"
    assert not (trained_folder / "README.md").exists()


@pytest.mark.parametrize("text", ["license: [mit", "model-index: 5", "tags: 5", "1: 2", "license: caf\xe9"])
def test_invalid_metadata(bare_folder, capsys, text):
    path = bare_folder / "README.md"
    path.write_text(f"---\n{text}\n---\n\n# Mine\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"README\.md"):
        load_card(path)
    for command in (["info", bare_folder], ["publish", bare_folder, "me/tiny", "--dry-run"]):
        assert cli.main([str(word) for word in command]) == 1 and str(path) in capsys.readouterr().err


# Existing cards -------------------------------------------------------------------------------------------------------


def test_existing_card_is_not_overwritten(bare_folder, capsys):
    path = bare_folder / "README.md"
    path.write_text("---\nlicense: mit\n---\n# Mine\n")
    content = path.read_bytes()
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0"]) == 1
    assert "--overwrite" in capsys.readouterr().err and path.read_bytes() == content
    publish = ["publish", str(bare_folder), "me/tiny", "--dry-run", "--license"]
    assert cli.main([*publish, "apache-2.0"]) == 1 and "the license 'mit'" in capsys.readouterr().err
    assert cli.main([*publish, "mit"]) == 0 and path.read_bytes() == content
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0", "--overwrite"]) == 0
    card = ModelCard.load(path)
    assert card.data.license == "apache-2.0" and "Mine" not in card.text
    assert [path.name for path in bare_folder.glob("*README*")] == ["README.md"]  # no temporary file is left


def test_publish_completes_the_card(bare_folder, capsys):
    """It must name a license, which a card does not have by default; a dry run leaves the folder as it was."""
    publish = ["publish", str(bare_folder), "me/other", "--tag", "v1", "--dry-run"]
    assert cli.main(publish) == 1 and "--license" in capsys.readouterr().err
    assert cli.main([*publish, "--license", "mit"]) == 0 and "nothing was sent" in capsys.readouterr().out
    assert not (bare_folder / "README.md").exists()
    options = {"revision": "v1", "with_code": True}
    complete_card(bare_folder, "me/other", "mit", **options)
    card = ModelCard.load(bare_folder / "README.md")
    assert card.data.license == "mit" and '("me/other", revision="v1", trust_remote_code=True)' in card.text

    path = write_card(bare_folder, overwrite=True)  # as a training script does, which adds a section and metadata
    card = ModelCard.load(path)
    card.text, card.data["datasets"] = f"{card.text.rstrip()}\n\n## Accuracy by class\n", ["me/data"]
    card.save(path)
    content = path.read_bytes()
    assert cli.main(publish) == 1 and "--license" in capsys.readouterr().err
    assert cli.main([*publish, "--license", "apache-2.0"]) == 0 and path.read_bytes() == content
    complete_card(bare_folder, "me/other", "apache-2.0", **options)
    card = ModelCard.load(path)
    assert card.data.license == "apache-2.0" and card.data["datasets"] == ["me/data"]
    assert card.text.endswith("## Accuracy by class\n") and '("me/other", revision="v1", trust_remote_code=True)' in card.text
    path.write_text("---\nlibrary_name: transformers\n---\n# Mine\n")
    complete_card(bare_folder, "me/other", "mit")
    assert ModelCard.load(path).data.license == "mit" and ModelCard.load(path).text.strip() == "# Mine"


# Code blocks ----------------------------------------------------------------------------------------------------------


def run_blocks(card, repo_id, path):
    """Runs a card's Python blocks, each in a new namespace, on the folder in place of the repository."""
    for block in code_blocks(card):
        assert f'"{repo_id}"' in block
        exec(compile(block.replace(f'"{repo_id}"', repr(str(path))), "README.md", "exec"), {})


def test_code_blocks_with_the_package(trained_folder, labeled_folder):
    for path in (trained_folder, labeled_folder):
        card = build_card(path, repo_id="me/tiny")
        assert len(code_blocks(card)) == 2
        run_blocks(card, "me/tiny", path)


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
    assert re.findall(r"transformers_modules\.\S+ (ToST\w+)", completed.stdout) == [
        "ToSTForCausalLM",
        "ToSTForImageClassification",
    ]
