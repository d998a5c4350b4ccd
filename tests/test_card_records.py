"""Damaged files beside the weights, and texts that mean something in Markdown: an error message, or a card without harm."""

import json

import pytest
from card_folders import RECORDS, RESULT, metadata, section, write_json

from tost_hf import cli
from tost_hf.hub import build_card, write_card
from tost_hf.hub.records import load_card


@pytest.mark.parametrize("name", [*RECORDS, "config.json"])
@pytest.mark.parametrize("content", [b"", b'{"command": "\xff"}', b"[]"], ids=["empty", "not UTF-8", "a list"])
def test_damaged_files(trained_folder, capsys, name, content):
    (trained_folder / name).write_bytes(content)
    assert cli.main(["card", str(trained_folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tost-hf: error: ") and name in error and "JSON" in error
    assert not (trained_folder / "README.md").exists()


def test_incomplete_results(bare_folder):
    write_json(bare_folder / "evaluation.json", {"results": [{"metric_type": "loss"}]})
    with pytest.raises(ValueError, match="lacks"):
        build_card(bare_folder)


def test_numbers_that_are_not_finite(bare_folder):
    write_json(bare_folder / "evaluation.json", {"results": [RESULT | {"metric_value": float("nan")}]})
    write_json(bare_folder / "eval_results.json", {"eval_loss": float("inf")})
    card = build_card(bare_folder)
    assert "## Evaluation" not in card.text and "model-index" not in metadata(card)


def test_texts_in_tables(bare_folder):
    write_json(bare_folder / "evaluation.json", {"results": [RESULT | {"protocol": "a | b\nc"}]})
    assert r"| a \| b c |" in section(build_card(bare_folder), "Evaluation")


@pytest.mark.parametrize("metadata", ["license: [mit", "- a\n- b", "model-index: 5"])
def test_invalid_metadata(bare_folder, capsys, metadata):
    path = bare_folder / "README.md"
    path.write_text(f"---\n{metadata}\n---\n\n# Mine\n")
    with pytest.raises(ValueError, match="metadata"):
        load_card(path)
    assert cli.main(["info", str(bare_folder)]) == 1 and "metadata" in capsys.readouterr().err
    assert path.read_text().startswith(f"---\n{metadata}")


@pytest.mark.parametrize("options", [{"repo_id": "bad id!"}, {"repo_id": ""}])
def test_invalid_arguments(bare_folder, options):
    with pytest.raises(ValueError, match="Repo id"):
        write_card(bare_folder, **options)
    assert not (bare_folder / "README.md").exists() and json.loads((bare_folder / "config.json").read_text())
