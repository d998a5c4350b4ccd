"""Refreshing a card: what a person wrote stays, what a program wrote is renewed."""

import re

import pytest
from card_folders import RESULT, headings, section, write_json
from huggingface_hub import ModelCard, ModelCardData
from transformers.modelcard import TrainingSummary

import tost_hf


pytest.importorskip("jinja2")

from tost_hf.hub.cards import build_card, write_card


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
    text = card.text.replace("To continue text,", "To write poems,")  # within a generated section
    text = text.replace("\n## Limits\n", "\n## Thanks\n\nTo all.\n\n```\n## not a heading\n```\n\n## Limits\n")
    text = re.sub(r"\n## Citation\n.*", "\n## Contact\n\nMe.\n", text, flags=re.DOTALL)
    text = text.replace("| optimizer steps |", "| steps of AdamW |")
    card.text = text
    card.save(path)
    (trained_folder / "run_arguments.json").unlink()

    for _ in range(2):
        card = ModelCard.load(write_card(trained_folder))
    data = card.data.to_dict()
    assert data["license"] == "other" and data["license_name"] == "my-own" and data["license_link"] == "LICENSE"
    assert data["language"] == "en" and data["co2_eq_emissions"] == {"emissions": 3} and data["library_name"] == "tost_hf"
    assert data["datasets"] == ["me/by-hand"] and data["base_model"] == "me/other"
    assert data["tags"] == ["mine", "tost", "arxiv:2412.17810", "tssa"]
    titles = headings(card)
    assert titles.index("Thanks") == titles.index("Intended use") + 1 and "To write poems," in section(card, "Intended use")
    assert (
        "To all.\n\n```\n## not a heading\n```\n\n## Limits\n" in card.text
        and card.text.count("Me.") == 1
        and "| steps of AdamW |" in card.text
    )
    assert sorted(set(titles)) == sorted(titles)
    assert titles[-1] == "Citation" or titles[-2] == "Citation"  # deleted by the person, so written again


def test_a_card_all_written_by_hand(bare_folder):
    (bare_folder / "README.md").write_text(
        "\ufeff---\nlicense: mit\n---\n# My model\n\nMy words.\n\n## Limits\n\nNone known.\n\n"
        "## Notes\n\nOne.\n\n## Notes\n\nTwo.\n",
        encoding="utf-8",
        newline="\r\n",
    )
    for _ in range(2):
        card = ModelCard.load(write_card(bare_folder))
    assert card.text.strip().startswith("# My model\n\nMy words.") and card.data.license == "mit"
    assert section(card, "Limits").strip() == "None known."
    assert card.text.index("One.") < card.text.index("Two.") < card.text.index("## Cost")
    assert "## Architecture" in card.text and card.text.count("# My model") == 1


def test_words_of_a_form_in_a_persons_text_stay(bare_folder):
    text = "# Model Card for Ada\n\nMore information needed about Ada is in the paper.  \nSecond line.\n\n\n\nThird."
    (bare_folder / "README.md").write_text(f"---\nlicense: mit\n---\n\n{text}\n")
    assert build_card(bare_folder).text.startswith(f"\n{text}\n\n## Architecture")


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


def trainer_draft(**options):
    summary = TrainingSummary(
        "tiny",
        tags=["generated_from_trainer"],
        tasks="text-generation",
        hyperparameters={"learning_rate": 0.0006, "seed": 42},
        eval_results={"Loss": 1.5, "Accuracy": 0.75},
        eval_lines=[{"Training Loss": 2.0, "Epoch": 1, "Step": 10, "Validation Loss": 1.5}],
        **options,
    )
    return summary.to_model_card()


def test_trainers_draft_is_replaced(bare_folder):
    (bare_folder / "README.md").write_text(
        trainer_draft(finetuned_from="me/parent", dataset_tags=["me/letters"], dataset=["Letters"])
    )
    for _ in range(2):
        card = ModelCard.load(write_card(bare_folder))
        assert not re.search("more information needed|automatically", card.text, re.IGNORECASE)
        assert "### Training hyperparameters\n\n- learning_rate: 0.0006\n- seed: 42\n" in section(card, "Training")
        assert card.data.datasets == ["me/letters"] and card.data.base_model in ("me/parent", ["me/parent"])
        assert [result.metric_value for result in card.data.eval_results] == [0.75]
        assert "generated_from_trainer" in card.data.tags and "tost" in card.data.tags
    assert not {"Model description", "Training procedure", "Intended uses & limitations"} & set(headings(card))


def test_what_was_filled_into_a_draft_stays(bare_folder):
    draft = trainer_draft(finetuned_from="/home/me/parent", dataset_tags=["imagefolder"], dataset=["imagefolder"])
    assert "type: imagefolder" in draft
    filled_in = draft.replace("## Model description\n\nMore information needed", "## Model description\n\nIt is mine.")
    assert filled_in != draft
    (bare_folder / "README.md").write_text(filled_in)
    card = ModelCard.load(write_card(bare_folder))
    assert section(card, "Model description").strip() == "It is mine."
    assert not {"base_model", "datasets", "model-index"} & set(card.data.to_dict())  # names of this machine


def test_the_pushed_form_is_replaced(bare_folder):
    form = str(ModelCard.from_template(ModelCardData(library_name="transformers"))).replace("---\n", "---\nlanguage: en\n", 1)
    (bare_folder / "README.md").write_text(form)
    card = ModelCard.load(write_card(bare_folder))
    assert "More Information Needed" not in card.text and card.data.language == "en"
    assert headings(card) == headings(build_card(bare_folder)) and "Model Details" not in headings(card)

    (bare_folder / "README.md").write_text(
        form.replace("- **Developed by:** [More Information Needed]", "- **Developed by:** Me")
    )
    card = ModelCard.load(write_card(bare_folder))
    assert "**Developed by:** Me" in section(card, "Model Details") and "More Information Needed" not in card.text

    (bare_folder / "README.md").write_text("---\ntags: [tost]\n---\n\nA ToSTForCausalLM, pushed without a model card.\n")
    assert "pushed without" not in build_card(bare_folder).text
