"""Damaged files beside the weights: an error message, or a card without what cannot be read; no traceback, and no hang."""

import json
import time

import pytest
from card_folders import RECORDS, metadata, write_json

from tost_hf import cli
from tost_hf.hub.cards import build_card
from tost_hf.hub.records import load_card


VALUES = (None, True, -1.5, float("nan"), 10**400, "x", [], {"a": {}}, "\ud800")
FILES = (*RECORDS, "config.json")


def places(content, path=()):
    """The paths to every value in a JSON content, the content itself included."""
    yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


@pytest.mark.parametrize(("name", "kind"), [*((name, "language") for name in FILES), ("config.json", "vision")])
def test_invalid_values(trained_folder, labelled_folder, name, kind):
    folder = {"language": trained_folder, "vision": labelled_folder}[kind]
    if name == "trainer_state.json":  # the others come first
        for other in ("eval_results.json", "all_results.json"):
            (folder / other).unlink(missing_ok=True)
    sound = json.loads((folder / name).read_text())
    for number, (*path, last) in enumerate(filter(None, places(sound))):
        for value in VALUES[number % 3 :: 3]:
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


DEEP = 100_000
DAMAGED = {
    "empty": (b"", "not valid JSON"),
    "not UTF-8": (b'{"command": "\xff"}', "not valid JSON"),
    "half a character": (b'{"command": "\\ud800"}', "not valid JSON"),
    "deep": (b"[" * DEEP + b"]" * DEEP, "not valid JSON"),
    "a list": (b"[]", "must hold a JSON object, got a list"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(trained_folder, capsys, content, message):
    (trained_folder / "eval_results.json").unlink()  # it comes before all_results.json
    for name in FILES:
        path = trained_folder / name
        sound = path.read_bytes() if path.exists() else b"{}"
        path.write_bytes(content)
        started = time.monotonic()
        assert cli.main(["card", str(trained_folder)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("tost-hf: error: ") and name in error and message in error and time.monotonic() - started < 5
        assert not (trained_folder / "README.md").exists()
        path.write_bytes(sound)


ALIASES = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
CARDS = {  # metadata, and what is said of it; None if it is right
    "aliases of aliases": (f"a0: &a0 [x, y]\n{ALIASES}", "it has aliases"),
    "a list in itself": ("a: &a [*a]", "it has aliases"),
    "deep": ("a: " + "[" * DEEP + "]" * DEEP, "cannot be read"),
    "many": ("a:\n" + f"- {'b' * 997}\n" * 101, "larger than"),
    "an object": ("a: !!python/object/apply:os.system ['touch /tmp/owned']", "cannot be read"),
    "no mapping": ("- a\n- b", "cannot be read"),
    "a method's name": ("to_dict: 5", "is not a name that metadata can have"),
    "self": ("self: 5", "cannot be read"),
    "tags by name": ("tags: {a: b}", None),  # huggingface_hub takes the names
    "a number of tags": ("tags: 5", "cannot be read"),
    "datasets": ("datasets: [{a: b}]", "'datasets' must be"),
    "base model": ("base_model: {a: b}", "'base_model' must be"),
    "pipeline": ("pipeline_tag: [a]", "'pipeline_tag' must be a text"),
    "licence": ("license: {mit: yes}", "'license' must be"),
    "results": ("model-index: 5", "cannot be read"),
    "results of results": ("model-index:\n- name: x\n  results: [{task: 5}]", "cannot be read"),
    "not closed": ("a: [b", "cannot be read"),
    "two licences": ("license: [mit, apache-2.0]", None),
    "Norwegian": ("language: no", None),
    "odd results": (
        "model-index:\n- name: x\n  results:\n  - task: {type: [a]}\n    dataset: {type: {b: c}, name: 5}\n"
        "    metrics: [{type: [d], value: {e: .nan}}]",
        "cannot be read",
    ),
}


@pytest.mark.parametrize(("content", "message"), CARDS.values(), ids=CARDS)
def test_invalid_metadata(bare_folder, capsys, content, message):
    path = bare_folder / "README.md"
    path.write_text(f"---\n{content}\n---\n\n# Mine\n")
    before, started = path.read_bytes(), time.monotonic()
    status = cli.main(["info", str(bare_folder)])
    error = capsys.readouterr().err
    assert time.monotonic() - started < 5
    assert status == (message is not None) and path.read_bytes() == before
    if message is not None:
        assert error.startswith("tost-hf: error: The metadata at the top of ") and message in error
        assert error.count("\n") == 1
        assert cli.main(["verify", str(bare_folder)]) == 1 and message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"---\nlicense: mit\n", "that ends the metadata is missing"),
        (b"\xff\xfe", "cannot be read"),
        (b"x" * (2**22 + 1), "larger than"),
    ],
)
def test_unreadable_cards(bare_folder, content, message):
    (bare_folder / "README.md").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_card(bare_folder / "README.md")


ARGUMENTS = [
    (["--repo-id", "bad id!"], "bad id!"),
    (["--repo-id", ""], "Repo id must"),
    (["--license", "mit\n---\nevil: 1"], "no licence's identifier"),
    (["--license", ""], "no licence's identifier"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_invalid_arguments(bare_folder, capsys, arguments, message):
    assert cli.main(["card", str(bare_folder), *arguments]) == 1
    assert message in capsys.readouterr().err and not (bare_folder / "README.md").exists()
