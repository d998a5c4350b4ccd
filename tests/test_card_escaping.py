"""Whatever stands in files and arguments, a card shows it as text: no markup, no code and no metadata comes of it."""

import ast
import json
from shutil import copytree

import pytest
import yaml
from card_folders import RESULT, code_blocks, write_json
from markdown_it import MarkdownIt

from tost_hf.hub.cards import write_card
from tost_hf.hub.markdown import escape, python_string
from tost_hf.hub.records import load_card


PARSER = MarkdownIt("commonmark").enable("table")
TEXTS = {
    "html": "<script>alert(1)</script>",
    "html comment": "<!-- tost_hf 01234567 -->",
    "open comment": "x <!-- y",
    "image": "![a](https://evil.example/a.png)",
    "link": "[a](https://evil.example) <https://evil.example> [a]: https://evil.example",
    "pipe": "a | b \\| c || d",
    "backslash": "a\\",
    "code": "`a` ``b` c",
    "fence": "x\n```\n# Not mine\n\n~~~\n<b>y</b>\n````\n",
    "heading": "x\n\n## Limitations\n\nNone at all.\n- [ ] *y*",
    "metadata": "x\n---\nlicense: mit\n---\n",
    "quotes": 'v1"); import os #',
    "more quotes": "v1'); import os; \"\"\" '''\n#",
    "template": "{{ 7 * 7 }}{% raw %}{# x #}",
    "emphasis": "*a* _b_ **c** __d__ ~~e~~ $f$",
    "entity": "&lt;b&gt; &amp;",
    "direction": "a\u202eb\u2066c\u200f\ufeff",
    "control": "a\x00b\x1b[31mc\x85d\u2028e",
    "yaml": "yes: [*a, &b !!python/object:os.system {}",
    "long": "a" * 5000 + " " + "`" * 300,
}


def shape(card):
    """What the Markdown of a card is made of, without its words: with a harmless text in it, it must be the same."""

    def parts(tokens):
        for token in tokens:
            yield token.type, token.tag, token.attrs if token.type in ("link_open", "image") else {}
            assert "html" not in token.type
            yield from parts([child for child in token.children or () if child.type not in ("text", "text_special")])

    return list(parts(PARSER.parse(card.text)))


def fill(trained, labelled, text):
    """The same text in all places of two folders that get into a card; returns the folders."""
    result = RESULT | dict.fromkeys(("dataset_name", "dataset_split", "metric_name", "protocol", "command", "date"), text)
    result |= dict.fromkeys(("dataset_type", "dataset_config", "metric_type", "task_type", "seed"), text)
    write_json(trained / "evaluation.json", {"results": [result]})
    write_json(trained / "eval_results.json", {"eval_loss": 1.5, f"eval_{text}": 2.5, f"eval_ema_{text}": 3.5})
    known = {"command": text, "dataset_name": "me/letters", "dataset_config_name": text, "model_name_or_path": text}
    write_json(trained / "run_arguments.json", known)
    config = json.loads((labelled / "config.json").read_text())
    config["id2label"]["0"], config["label2id"] = text, {text: 0, "dog": 1}
    write_json(labelled / "config.json", config)
    name = "x" + text.replace("/", "-").replace("\0", "-")[:200]
    return trained.rename(trained.with_name(name)), labelled


HARMLESS = []  # the cards with a harmless text, of the first test that needs them


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_is_escaped(trained_folder, labelled_folder, tmp_path, text):
    def write(inserted):
        copies = [copytree(folder, tmp_path / inserted[:1] / folder.name) for folder in (trained_folder, labelled_folder)]
        for folder in fill(*copies, inserted):
            yield load_card(write_card(folder, revision=inserted))

    harmless = HARMLESS or HARMLESS.extend(write("harmless")) or HARMLESS
    shown = list(write(text))
    for card, other in zip(shown, harmless):
        assert shape(card) == shape(other)
        found = yaml.safe_load(str(card).split("\n---\n")[0].removeprefix("---\n"))
        assert found.keys() == other.data.to_dict().keys() and "license" not in found
        for block, expected in zip(code_blocks(card), code_blocks(other), strict=True):
            calls = [node.func for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
            assert list(map(ast.unparse, calls)) == [
                ast.unparse(node.func) for node in ast.walk(ast.parse(expected)) if isinstance(node, ast.Call)
            ]
            assert f"revision={python_string(text)}" in block
    tokens = PARSER.parse(shown[0].text)
    commands = [token.content for token in tokens if token.type == "fence" and token.info == "bash"]
    assert [plain(command) for command in commands[:2]] == [plain(text)] * 2
    cells = [plain("".join(child.content for child in token.children)) for token in tokens if token.type == "inline"]
    assert cells.count(plain(text)) >= 5  # data set, split, metric, date, protocol, seed, a metric of training


def plain(text):
    """What is to be seen of a text: without line breaks and what is invisible."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


@pytest.mark.parametrize("text", [*TEXTS.values(), "\\\\_ \\&lt; &amp;lt; \\_a\\*", "http://a https://b www.c"])
def test_escaped_text_is_shown_as_it_is(text):
    (line,) = PARSER.parseInline(escape(text))
    assert plain("".join(token.content for token in line.children)) == plain(text)
