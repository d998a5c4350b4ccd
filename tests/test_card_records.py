"""Damaged files beside the weights: a sentence, or a card without what cannot be read. Never a traceback, never a hang."""

import json

import pytest
from card_folders import RESULT, metadata, write_json


pytest.importorskip("jinja2")

from tost_hf.hub.cards import build_card


VALUES = (None, True, 3, -1.5, 1e308, float("nan"), float("-inf"), 10**400, "x", "", [], {}, [[]], [None], {"a": {}}, "\ud800")
FILES = {
    "evaluation.json": {"results": [RESULT]},
    "trainer_state.json": {
        "global_step": 20,
        "epoch": 2.5,
        "train_batch_size": 6,
        "log_history": [{"eval_loss": 3.5, "step": 20}],
    },
    "all_results.json": {"train_runtime": 3725.4, "train_samples": 8765, "train_loss": 2.125, "epoch": 2.5},
    "eval_results.json": {"eval_loss": 1.5, "eval_ema_loss": 1.5, "perplexity": 4.5, "eval_samples": 2048},
    "run_arguments.json": {
        "command": "python x.py",
        "dataset_name": "me/letters",
        "dataset_config_name": "small",
        "model_name_or_path": "me/parent",
    },
    "config.json": None,  # the folder's own
}


def places(content, path=()):
    """The paths to every value in a JSON content, the content itself included."""
    yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


@pytest.mark.parametrize("kind", ["language", "vision"])
@pytest.mark.parametrize("name", FILES)
def test_any_value_anywhere(trained_folder, labelled_folder, name, kind):
    folder = {"language": trained_folder, "vision": labelled_folder}[kind]
    if name == "trainer_state.json":  # the others come first
        for other in ("eval_results.json", "all_results.json"):
            (folder / other).unlink(missing_ok=True)
    sound = FILES[name] or json.loads((folder / name).read_text())
    for *path, last in filter(None, places(sound)):
        for value in VALUES:
            content = json.loads(json.dumps(sound))
            parent = content
            for key in path:
                parent = parent[key]
            parent[last] = value
            write_json(folder / name, content)
            try:
                card = build_card(folder)
            except ValueError as error:
                assert name in str(error), (path, last, value, error)
            else:
                assert metadata(card)["library_name"] == "transformers"
                assert not {"nan", "inf", "-inf", ".nan", "-.inf"} & set(str(card).replace("|", " ").split()), (path, last)
