"""Model cards: what they say comes from the folder, one that exists stays, and the committed ones are current."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from card_folders import RESULT, code_blocks, headings, metadata, section, write_json
from conftest import auto_processor_missing, small_config, small_vision_config
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tost_hf
from tost_hf import cli
from tost_hf.hub.cards import PRESET_CARDS, build_card, preset_card, write_card
from tost_hf.model.configuration_tost_vision import VISION_PRESETS


ROOT = Path(__file__).parents[1]
SPEC = ROOT.parent / "shared/spec/results_and_recipes.md"
# The cards of the paper's sizes ---------------------------------------------------------------------------------------


def test_committed_cards_are_what_the_command_writes(tmp_path):
    assert cli.main(["card", "--presets", str(tmp_path / "new")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_text() for path in (ROOT / "model_cards").glob("*.md")}
    assert written.keys() == {f"{name}.md" for name in PRESET_CARDS}


@pytest.mark.parametrize("name", PRESET_CARDS)
def test_preset_cards(name):
    card = ModelCard.load(ROOT / f"model_cards/{name}.md")
    data = card.data.to_dict()
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == ("image-classification" if "vision" in name else "text-generation")
    assert not {"model-index", "datasets", "base_model", "metrics"} & set(data)
    assert "No weights come with it" in card.text
    assert "Evaluation" not in headings(card)
    assert ("Published by the authors" in headings(card)) == (
        name in ("tost-base", "tost-medium", "tost-large", *VISION_PRESETS)
    )
    assert not re.search(r"[0-9a-f]{40}|hf_\w{16}|more information needed", card.text, re.IGNORECASE)
    namespace = {}
    with torch.device("meta"):
        for block in code_blocks(card):
            exec(compile(block, name, "exec"), namespace)
    parameters = f"{namespace['model'].num_parameters():,}"
    assert f"| parameters | {parameters} |" in card.text
    assert parameters in (ROOT / ("examples/guides/vision.md" if "vision" in name else "README.md")).read_text()
    assert f"--config_name {name} " in section(card, "Training")


def test_other_presets_and_unknown_ones():
    large = preset_card("tost-vision-large-patch8")
    assert "| parameters | 160,123,432 |" in large.text
    assert "Published by the authors" not in headings(large)  # the paper has no such size
    with pytest.raises(ValueError, match=r"'tost-huge'.*tost-base"):
        preset_card("tost-huge")


def test_published_results():
    if not SPEC.is_file():
        pytest.skip("the published results are not beside the repository")
    spec = SPEC.read_text()
    written = "".join(preset_card(name).text for name in PRESET_CARDS)
    published = re.findall(r"^## Published.*?(?=^## )", written, re.MULTILINE | re.DOTALL)
    lines = {line for text in published for line in text.splitlines() if line.startswith("|") and "---" not in line}
    assert len(lines) == 13
    for line in lines - {"| model | parameters | OpenWebText | LAMBADA | WikiText | PTB | average |"}:
        assert line.replace("| parameters | 5.8M", "| parameters (reported) | 5.8M") in spec, line
    for result in ("3.20", "2.84", "2.88", "59.90", "59.25", "84.03", "77.9", "79.8", "80.5", "71,481,064", "68.1M"):
        assert result in spec and result in written, result


# Filled from a folder -------------------------------------------------------------------------------------------------


def test_unknown_facts_are_omitted(bare_folder):
    card = build_card(bare_folder)
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tost", "arxiv:2412.17810", "tssa"],
    }
    assert headings(card) == [
        "Architecture",
        "How to use",
        "Intended use",
        "Limitations",
        "Speed and memory",
        "Licence",
        "Citation",
    ]
    assert "trust_remote_code" not in card.text and "holds no source files" in card.text
    assert "licence of the weights" not in card.text
    assert "None" not in card.text and "run.py decode" not in card.text  # measured on another size


def test_metadata_and_model_index(trained_folder):
    data = metadata(build_card(trained_folder, repo_id="me/tiny", license="mit"))
    assert data["license"] == "mit" and data["datasets"] == ["me/letters"] and data["base_model"] == ["me/parent"]
    assert data["metrics"] == ["perplexity", "loss", "accuracy"]
    results = ModelCard(str(build_card(trained_folder, repo_id="me/tiny"))).data.eval_results
    assert data["model-index"][0]["name"] == "tiny"
    first = results[0]
    for key in ("task_type", "dataset_type", "dataset_name", "dataset_split", "metric_type", "metric_name", "metric_value"):
        assert getattr(first, key) == RESULT[key]
    assert {key: first.metric_args[key] for key in ("protocol", "command", "seed", "date", "num_examples")} == {
        key: RESULT[key] for key in ("protocol", "command", "seed", "date", "num_examples")
    }
    in_training = {(r.metric_type, r.metric_value, r.dataset_type, r.dataset_config) for r in results[1:]}
    assert in_training == {
        (m, v, "me/letters", "small") for m, v in (("loss", 1.53125), ("accuracy", 0.4375), ("perplexity", 4.625))
    }


def test_tables_hold_the_inputs(trained_folder):
    card = build_card(trained_folder, repo_id="me/tiny")
    evaluation = section(card, "Evaluation")
    record = "| Letters | test | perplexity (sweep, stride 64) | 12.3457 | 1,234 | 7 | 2026-11-21 |"
    assert rf"{record} every token once \| stride 64 |" in evaluation
    assert f"```bash\n{RESULT['command']}\n```" in evaluation
    assert "(2,048 examples)" in evaluation and "9.9" not in evaluation and "77.7" not in evaluation
    for record in ("| loss | 1.53125 |", "| accuracy | 0.4375 |", "| perplexity | 4.625 |"):
        assert record in evaluation
    training = section(card, "Training")
    assert "```bash\npython examples/run_clm.py --do_train\n```" in training
    for record in (
        "| optimizer steps | 4,321 |",
        "| epochs | 2.5 |",
        "| training examples | 8,765 |",
        "| examples per device and micro-batch | 6 |",
        "| mean training loss | 2.125 |",
        "| time (h:min:s) | 1:02:05 |",
    ):
        assert record in training
    assert "Fine-tuned from [me/parent]" in training and "[me/letters](https://huggingface.co/datasets/me/letters)" in training


def test_empty_columns_are_left_out(bare_folder):
    bare = {key: RESULT[key] for key in ("task_type", "dataset_type", "dataset_name", "metric_type", "metric_value")}
    write_json(bare_folder / "evaluation.json", {"results": [bare]})
    table = section(build_card(bare_folder), "Evaluation")
    assert "| dataset | metric | value |\n|---|---|---|\n| Letters | perplexity | 12.3457 |" in table
    assert "```" not in table


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_parameters_are_those_in_the_file(bare_folder, labelled_folder, kind):
    path = {"language": bare_folder, "vision": labelled_folder}[kind]
    with safe_open(path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if not re.search("running_|num_batches", name)]  # buffers
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    card = build_card(path)
    assert f"| parameters | {count:,} |" in card.text and "| stored as | float32 |" in card.text
    weights = {name: x.bfloat16() if "norm" in name else x for name, x in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert "| stored as | float32 and bfloat16 |" in build_card(path).text


def test_state_size_is_the_caches(tiny_model, bare_folder):
    cache = tost_hf.ToSTCache(tiny_model.config)
    tiny_model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    saved = 4 * sum(x.numel() for layer in cache.layers for x in layer.state)
    cost = section(build_card(bare_folder), "Speed and memory")
    assert f"{saved:,} bytes per sequence" in cost
    assert f"{sum(layer.nbytes for layer in cache.layers):,} bytes in all" in cost


@pytest.mark.parametrize(
    ("model_class", "auto_class", "tag"),
    [
        ("ToSTModel", "AutoModel", "feature-extraction"),
        ("ToSTForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
    ],
)
def test_other_language_models(tiny_config, tmp_path, model_class, auto_class, tag):
    getattr(tost_hf, model_class)(tiny_config).save_pretrained(tmp_path)
    card = build_card(tmp_path)
    assert card.data.pipeline_tag == tag and f"{auto_class}.from_pretrained" in card.text
    assert "Speed and memory" not in headings(card)
    run_blocks(card, tmp_path.name, tmp_path)


def test_vision_cards(labelled_folder, tmp_path):
    card = build_card(labelled_folder)
    assert card.data.pipeline_tag == "image-classification" and "| classes | 2: cat, dog |" in card.text
    assert "multiples of 2 pixels" in section(card, "Limitations") and "XCiT" in section(card, "Licence")
    config = small_vision_config(num_hidden_layers=1, image_size=(8, 12), attention_type="xca")
    tost_hf.ToSTVisionModel(config).save_pretrained(tmp_path / "baseline")
    card = build_card(tmp_path / "baseline")
    assert card.data.pipeline_tag == "image-feature-extraction" and "tssa" not in card.data.tags
    assert "not ToST itself" in card.text and "subspace" not in card.text and "8 x 12 pixels" in card.text
    run_blocks(card, "baseline", tmp_path / "baseline")


@pytest.mark.parametrize("positions", [None, 64])
def test_positions_of_hybrids(tmp_path, positions):
    types = ["tost_causal_statistics", "full_attention", "full_attention"]
    config = small_config(max_position_embeddings=positions, num_hidden_layers=3, layer_types=types)
    tost_hf.ToSTForCausalLM(config).save_pretrained(tmp_path)
    card = build_card(tmp_path)
    assert "| layers with attention to all tokens | 2, 3 |\n| key-value heads | 4 |" in card.text
    assert "2 of its 3 layers are attention layers" in card.text
    assert ("| positions | no limit |" in card.text) == ("rotary positions | theta" in card.text) == (positions is None)
    assert ("no table of positions" in section(card, "Limitations")) == (positions is None)


def test_an_evaluation_of_earlier_weights_is_not_reported(bare_folder):
    state = {"global_step": 20, "log_history": [{"eval_loss": 3.5, "step": 10}]}
    write_json(bare_folder / "trainer_state.json", state)
    assert "Evaluation" not in headings(build_card(bare_folder))
    state["log_history"] += [{"eval_loss": 3.25, "eval_ema_accuracy": 0.75, "step": 20}, {"train_runtime": 1.0, "step": 20}]
    write_json(bare_folder / "trainer_state.json", state)
    evaluation = section(build_card(bare_folder), "Evaluation")
    assert "| loss | 3.25 |" in evaluation and "| accuracy of the EMA weights (folder ema) | 0.75 |" in evaluation
    assert "model-index" not in metadata(build_card(bare_folder))  # nothing says on which data


def test_local_names_are_not_ids(trained_folder):
    write_json(trained_folder / "run_arguments.json", {"dataset_name": "/data/photos", "model_name_or_path": "my-tost"})
    data = metadata(build_card(trained_folder))
    assert "datasets" not in data and "base_model" not in data
    assert {result["dataset"]["type"] for result in data["model-index"][0]["results"]} == {"me/letters"}  # evaluation.json's


# Written once --------------------------------------------------------------------------------------------------------------


def test_licence_is_given_by_a_person(bare_folder):
    assert write_card(bare_folder) == bare_folder / "README.md"
    assert ModelCard.load(bare_folder / "README.md").data.license is None
    card = ModelCard.load(write_card(bare_folder, license="mit", overwrite=True))
    assert card.data.license == "mit" and "licence of the weights is `mit`" in card.text
    assert [path.name for path in bare_folder.glob("*README*")] == ["README.md"]  # no temporary file is left


BY_HAND = b"""\xef\xbb\xbf---\r
license: mit
tags: [mine]  # a comment
---
# Mine

    docker run --rm -t my/image

token=os.environ["HF_TOKEN"]
<!-- tost_hf: generated by `tost-hf card`; write above or below, where it stays -->
No second comment follows.
"""


def test_a_card_that_exists_stays(bare_folder, capsys):
    path = bare_folder / "README.md"
    path.write_bytes(BY_HAND)
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0"]) == 1
    assert "README.md exists: edit it by hand, or replace it" in capsys.readouterr().err and path.read_bytes() == BY_HAND
    assert cli.main(["publish", str(bare_folder), "me/tiny", "--card", "--dry-run"]) == 0
    assert "README.md, which stays as it is" in capsys.readouterr().out and path.read_bytes() == BY_HAND
    assert cli.main(["card", str(bare_folder), "--license", "apache-2.0", "--overwrite"]) == 0
    card = ModelCard.load(path)
    assert card.data.license == "apache-2.0" and card.data.tags == ["tost", "arxiv:2412.17810", "tssa"]
    assert card.text.startswith("\n# tiny\n\nA language model") and "Mine" not in card.text


def test_publish_writes_a_card_where_there_is_none(bare_folder, capsys):
    publish = ["publish", str(bare_folder), "me/other", "--tag", "v1", "--dry-run"]
    assert cli.main([*publish, "--license", "mit"]) == 1 and "--card writes" in capsys.readouterr().err
    assert cli.main([*publish, "--card", "--license", "mit"]) == 0
    card = ModelCard.load(bare_folder / "README.md")
    assert card.data.license == "mit" and '("me/other", trust_remote_code=True, revision="v1")' in card.text


def test_advice_for_a_card_that_cannot_be_published(bare_folder, capsys):
    path = write_card(bare_folder)
    assert cli.main(["publish", str(bare_folder), "me/tiny", "--dry-run"]) == 1
    advice = capsys.readouterr().err
    assert "add the line `license: apache-2.0`" in advice and f"`tost-hf card {bare_folder} --license apache-2.0 --o" in advice
    path.write_text(path.read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1))
    assert cli.main(["publish", str(bare_folder), "me/tiny", "--dry-run"]) == 0


# The code in it -------------------------------------------------------------------------------------------------------


def run_blocks(card, repo_id, path):
    """Runs a card's Python blocks, each in a new namespace, on the folder in place of the repository."""
    for block in code_blocks(card):
        if not (auto_processor_missing and "AutoImageProcessor" in block):
            assert f'"{repo_id}"' in block
            exec(compile(block.replace(f'"{repo_id}"', repr(str(path))), "README.md", "exec"), {})


def test_code_blocks_with_the_package(trained_folder, labelled_folder):
    for path in (trained_folder, labelled_folder):
        card = build_card(path, repo_id="me/tiny")
        assert len(code_blocks(card)) == 2
        run_blocks(card, "me/tiny", path)


@pytest.mark.slow
def test_code_blocks_without_the_package(trained_folder, labelled_folder, tmp_path):
    code = "import sys; sys.modules['tost_hf'] = None\n"
    for path, revision in ((trained_folder, None), (labelled_folder, "abc1234")):
        card = build_card(path, repo_id="me/tiny", revision=revision)
        with_package, without = code_blocks(card)
        assert ('revision="abc1234")' in with_package and 'revision="abc1234")' in without) == (revision is not None)
        code += without.replace('"me/tiny"', repr(str(path)))
        code += "\nprint(type(model).__module__, type(model).__name__)\n"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"transformers_modules\.\S+ (ToST\w+)", done.stdout) == ["ToSTForCausalLM", "ToSTForImageClassification"]


def test_code_that_publishing_adds(bare_folder):
    """`tost-hf publish` sends the source files with a folder that has none."""
    assert "trust_remote_code=True" in build_card(bare_folder, with_code=True).text


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", '{"model_type": "gpt2", "architectures": ["GPT2Model"]}', "not a ToST model"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", "weights", "truncated or damaged"),
        ("evaluation.json", '{"results": [3]}', "must be a list of objects"),
        (
            "evaluation.json",
            json.dumps({"results": [RESULT | {"metric_value": "good"}]}),
            "'metric_value' of a result must be a number, got 'good'",
        ),
        (
            "evaluation.json",
            json.dumps({"results": [RESULT | {"dataset_type": None}]}),
            "'dataset_type' of a result must be a text, got None",
        ),
    ],
)
def test_errors(bare_folder, name, content, message):
    (bare_folder / name).unlink(missing_ok=True)
    if content is not None:
        (bare_folder / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        write_card(bare_folder)
