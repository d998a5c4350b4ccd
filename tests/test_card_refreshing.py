"""Writing a card again: what stands between the two markers is replaced, and everything else stays."""

import pytest
from card_folders import RESULT, headings, section, write_json
from huggingface_hub import ModelCard, ModelCardData

import tost_hf
from tost_hf.hub.cards import BEGIN, END, write_card


def test_licence_is_given_by_a_person(bare_folder):
    assert write_card(bare_folder) == bare_folder / "README.md"
    assert ModelCard.load(bare_folder / "README.md").data.license is None
    write_card(bare_folder, license="mit")
    write_card(bare_folder)
    card = ModelCard.load(bare_folder / "README.md")
    assert card.data.license == "mit" and "licence of the weights is `mit`" in card.text
    write_card(bare_folder, license="apache-2.0")
    assert ModelCard.load(bare_folder / "README.md").data.license == "apache-2.0"


def test_writing_again_changes_nothing(trained_folder):
    first = write_card(trained_folder, repo_id="me/tiny", license="mit").read_bytes()
    assert write_card(trained_folder, repo_id="me/tiny").read_bytes() == first
    assert b"\r" not in first and first.endswith(b"-->\n")
    assert [path.name for path in trained_folder.glob("*README*")] == ["README.md"]  # no temporary file is left


def test_generated_text_is_renewed(trained_folder):
    write_card(trained_folder)
    write_json(trained_folder / "evaluation.json", {"results": [RESULT | {"metric_value": 11.5}]})
    (trained_folder / "eval_results.json").unlink()
    (trained_folder / "all_results.json").unlink()
    card = ModelCard.load(write_card(trained_folder))
    assert "11.5" in section(card, "Evaluation") and "12.3457" not in card.text
    assert [result.metric_value for result in card.data.eval_results] == [11.5]
    (trained_folder / "evaluation.json").unlink()
    card = ModelCard.load(write_card(trained_folder))
    assert "Evaluation" not in headings(card) and "model-index" not in card.data.to_dict()


def test_what_a_person_wrote_stays(trained_folder):
    path = write_card(trained_folder)
    card = ModelCard.load(path)
    card.data.license, card.data.language, card.data.tags = "other", "en", ["mine", "tost"]
    card.data.license_name, card.data["license_link"], card.data["co2_eq_emissions"] = "my-own", "LICENSE", {"emissions": 3}
    card.data.datasets, card.data.base_model, card.data.library_name = ["me/by-hand"], "me/other", "tost_hf"
    card.text = card.text.replace("# tiny\n", "# My tiny model\n\nMine.\n") + "\n## Thanks\n\nTo all.\n"
    card.text = card.text.replace("To continue text,", "To write poems,")  # between the markers
    card.save(path)
    (trained_folder / "run_arguments.json").unlink()

    for _ in range(2):
        card = ModelCard.load(write_card(trained_folder))
    data = card.data.to_dict()
    assert data["license"] == "other" and data["license_name"] == "my-own" and data["license_link"] == "LICENSE"
    assert data["language"] == "en" and data["co2_eq_emissions"] == {"emissions": 3} and data["library_name"] == "tost_hf"
    assert data["datasets"] == ["me/by-hand"] and data["base_model"] == "me/other"
    assert data["tags"] == ["mine", "tost", "arxiv:2412.17810", "tssa"]
    assert card.text.strip().startswith(f"# My tiny model\n\nMine.\n\n{BEGIN}\n\nA language model")
    assert card.text.endswith(f"{END}\n\n## Thanks\n\nTo all.\n")
    assert "To continue text," in card.text and "poems" not in card.text


@pytest.mark.parametrize(
    "text",
    [
        "# My model\n\nMy words.\n\n## Limits\n\nNone known.",
        "## Training procedure\n\nIt has been generated automatically; More information needed",
        "```\n## not a heading\n```",
    ],
)
def test_text_without_markers_stays_above(bare_folder, text):
    (bare_folder / "README.md").write_text(f"\ufeff---\nlicense: mit\n---\n{text}\n", encoding="utf-8", newline="\r\n")
    for _ in range(2):
        card = ModelCard.load(write_card(bare_folder))
        assert card.text.startswith(f"\n{text}\n\n{BEGIN}\n\nA language model") and card.text.endswith(f"{END}\n")
        assert card.data.license == "mit"


def test_a_card_without_metadata(bare_folder):
    (bare_folder / "README.md").write_text("# Mine\n\nWords.\n")
    card = ModelCard.load(write_card(bare_folder))
    assert "Words." in card.text and card.data.pipeline_tag == "text-generation"


def test_results_of_others_stay(trained_folder):
    other = {
        "task": {"type": "text-generation"},
        "dataset": {"type": "lambada", "name": "LAMBADA"},
        "metrics": [{"type": "accuracy", "value": 0.25}],
    }
    data = ModelCardData(**{"model-index": [{"name": "x", "results": [other]}]})
    (trained_folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n# x\n")
    for _ in range(2):
        results = ModelCard.load(write_card(trained_folder)).data.eval_results
    assert [result.metric_value for result in results] == [12.34567891, 1.53125, 0.4375, 4.625, 0.25]


def test_the_pipeline_tag_follows_the_model(bare_folder, tiny_config):
    write_card(bare_folder)
    tost_hf.ToSTForSequenceClassification(tiny_config).save_pretrained(bare_folder)
    assert ModelCard.load(write_card(bare_folder)).data.pipeline_tag == "text-classification"
    card = ModelCard.load(bare_folder / "README.md")
    card.data.pipeline_tag = "zero-shot-classification"  # a person's choice
    card.save(bare_folder / "README.md")
    assert ModelCard.load(write_card(bare_folder)).data.pipeline_tag == "zero-shot-classification"
