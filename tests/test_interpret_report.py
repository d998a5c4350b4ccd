"""The report of `inspect`: what pictures and page show, what is escaped, and which files may be replaced."""

import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import needs_auto_processor, randomize, small_vision_config, tiny_vision_model
from tokenizers import processors
from transformers import ByT5Tokenizer

import tost_hf
from tost_hf import interpret
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor
from tost_hf.interpret import colors, inputs, pages, plots


Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """The contents of a page; fails at tags that do not match."""

    def __init__(self, html):
        super().__init__()
        self.open, self.images, self.links, self.text, self.tags = [], [], [], "", set()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag not in ("img", "meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def assert_drawn(file) -> None:
    """The picture is 1,280 pixels wide and not blank."""
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=float)
    assert pixels.shape[1] == 1280 and 80 < pixels.shape[0] < 4000
    assert pixels.std() > 5


def check_folder(written, out):
    """The page parses and shows pictures that exist, each described; nothing else was written."""
    index = out / "index.html"
    assert written[0] == index and sorted(written) == sorted(path for path in out.iterdir() if path.name != "mine.txt")
    page = Page(index.read_text())
    assert len(page.images) >= 4
    for image in page.images:
        assert len(image["alt"]) > 30
        assert_drawn(out / image["src"])
    assert all((out / link).exists() for link in page.links)
    assert set(page.links) >= {image["src"] for image in page.images}
    return page


@pytest.fixture
def photo(tmp_path):
    picture = (np.indices((50, 70)).sum(0)[..., None] * [2, 1, 0.5]).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_image_report(photo, tmp_path):
    model = tiny_vision_model(id2label={0: "a <b> cat"}, num_labels=1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("stays")
    written = interpret.inspect_model(model, None, photo, out, layers=[3, 1])
    page = check_folder(written, out)
    assert "a <b> cat (100.0%)" in page.text and "b" not in page.tags
    assert "16 x 16" in page.text and "4 x 4" in page.text
    assert (out / "mine.txt").read_text() == "stays"
    names = {path.name for path in written}
    assert names >= {"memberships.png", "strongest_heads.png", "class_attention.png", "entropy.png", "compression.png"}
    terms = interpret.compression_terms(
        interpret.trace_model(model, pixel_values=inputs.load_image(model, None, photo, None)[0])
    )
    assert f"{terms.variational[0, 2]:.2f}" in page.text and f"{terms.coding_rate[0, 0]:.2f}" in page.text
    assert interpret.inspect_model(model, None, photo, out)[0] == written[0]  # replaces the earlier report


def test_one_head_and_one_layer_of_a_backbone(tmp_path, photo):
    """Without other heads to overlap with, and without class attention."""
    config = small_vision_config(num_attention_heads=1, num_hidden_layers=1)
    written = interpret.inspect_model(randomize(tost_hf.ToSTBackbone(config)).eval(), None, photo, tmp_path / "out")
    page = check_folder(written, tmp_path / "out")
    assert "nan" in page.text and "class_attention.png" not in page.links


def test_every_layer_and_head_of_a_photograph(tmp_path):
    """Of a real photograph, each patch at its place."""
    sample = pytest.importorskip("sklearn.datasets").load_sample_image("china.jpg")
    model = tiny_vision_model(num_hidden_layers=12)
    pixel_values, picture, _ = inputs.load_image(model, None, Image.fromarray(sample), 48)
    maps = interpret.membership_maps(interpret.trace_model(model, pixel_values=pixel_values))[0]
    figure = plots.plot_membership_maps(maps, picture, range(1, 13))
    panels = [axis for axis in figure.axes if len(axis.images) == 2]  # the photograph in grey, and a map
    assert len(panels) == 12 * 4
    for panel, shares in zip(panels, maps.flatten(0, 1)):
        grey, drawn = panel.images
        assert list(grey.get_extent()) == [-0.5, 71.5, 47.5, -0.5] == list(drawn.get_extent())
        assert grey.get_array().shape == (48, 72)
        np.testing.assert_array_equal(drawn.get_array(), shares)
    for figure in (
        plots.plot_strongest_heads(maps, picture, range(1, 13)),
        plots.plot_entropy_maps(maps.sum(1), 4, range(1, 13)),
    ):
        figure.draw_without_rendering()
        assert min(axis.get_window_extent().width for axis in figure.axes if axis.images) > 150  # pixels


def test_images_of_any_size(photo):
    """Shorter side 33 asked for: 33 x 46.2 pixels, rounded to multiples of 4."""
    model = tiny_vision_model()
    pixel_values, picture, _ = inputs.load_image(model, None, photo, 33)
    assert pixel_values.shape == (1, 3, 32, 48) and picture.shape == (32, 48, 3)
    original = np.asarray(Image.open(photo).convert("RGB").resize((48, 32), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(picture.numpy(), original, atol=0.01)
    odd = make_image_processor(18)
    assert inputs.load_image(model, odd, photo, None)[0].shape == (1, 3, 16, 16)
    grey = Image.open(photo).convert("LA")
    assert inputs.load_image(model, None, grey, None)[0].shape == (1, 3, 16, 16)
    pixel_values, picture, _ = inputs.load_image(tiny_vision_model(num_channels=1), None, photo, None)
    assert pixel_values.shape == (1, 1, 16, 16) and picture.shape == (16, 16, 3)
    with pytest.raises(ValueError, match="at least one patch"):
        inputs.load_image(model, None, photo, 3)


def test_text_report(text_model, tokenizer, tmp_path):
    """Of a file, whose markup is escaped and which is truncated with a warning."""
    file, hostile = tmp_path / "text.txt", "<script>alert('heads')</script> of $the$ model & é日\n\n\tshare "
    file.write_text(hostile + "the heads of the model " * 30)
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match="tokens; the model has 64 positions, so the text was truncated"):
        written = interpret.inspect_model(text_model, tokenizer, str(file), out)
    page = check_folder(written, out)
    assert {path.name for path in written} >= {"memberships.png", "entropy.png"}
    assert "script" not in page.tags and "<script" not in (out / "index.html").read_text()
    assert page.text.count("<script>alert('heads')</script>") == 2  # a section for each layer
    assert "日" in page.text and "so the text was truncated" in page.text and str(file) in page.text


@pytest.mark.parametrize("forgetting", ["head", "token"])
def test_report_of_a_hybrid_with_decay(forgetting, tokenizer, tmp_path):
    config = tost_hf.ToSTConfig.from_preset(
        "tost-hybrid-base",
        vocab_size=300,
        hidden_size=48,
        num_hidden_layers=4,
        forgetting=forgetting,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = randomize(tost_hf.ToSTForCausalLM(config)).eval()
    text, out = "What was it that we forgot?", tmp_path / "out"
    page = check_folder(interpret.inspect_model(model, tokenizer, text, out), out)
    assert "forgetting.png" in page.links and "Attention layers1, " in page.text and "3 layers of 12 heads" in page.text
    half_lives = interpret.half_life(interpret.trace_model(model, input_ids=inputs.tokenize(tokenizer, text)[0]))[0]
    for layer in half_lives:
        assert f"{layer.min():.1f}{layer.max():.1f}" in page.text


def test_half_lives_of_all_heads_are_beside_their_factors():
    half_lives = torch.arange(24.0).reshape(2, 12) + 2
    figure = plots.plot_forget_factors(0.5 ** (1 / half_lives)[..., None].expand(-1, -1, 5), half_lives, [1, 3])
    labels = [[tick.get_text() for tick in axis.child_axes[0].get_yticklabels()] for axis in figure.axes[:2]]
    assert labels == [[str(tokens) for tokens in range(2, 14)], [str(tokens) for tokens in range(14, 26)]]
    assert [axis.images[0].get_array().shape for axis in figure.axes[:2]] == [(12, 5)] * 2


def test_token_pieces_make_the_text(tokenizer):
    text = "the é日 heads\n of  🙂the text"
    ids, pieces = inputs.tokenize(tokenizer, text)
    assert "".join(pieces) == text and ids.shape == (1, len(pieces)) and "" in pieces
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<end> $A <end>", special_tokens=[("<end>", 0)])
    assert inputs.tokenize(tokenizer, text)[1] == ["<end>", *pieces, "<end>"]
    ids, pieces = inputs.tokenize(ByT5Tokenizer(), "heads of")  # a tokenizer without offsets
    assert pieces == [*"heads of", "</s>"] and ids.shape == (1, 9)


def test_strongest_heads_are_coloured():
    membership = torch.tensor([[0.9, 0.3, 0.2], [0.05, 0.4, 0.2], [0.05, 0.3, 0.6]])
    html = pages.index_page([], [], [["layer"]], pages.color_text(["aa", "bb", "<script>'"], membership[None], [1]))
    shares = 80, round(15 + 65 * (0.4 - 1 / 3) / (0.9 - 1 / 3))  # % of the head's colour
    assert f"--head:{colors.COLORS[0]};--share:{shares[0]}%' title='token 0, head 1: 0.900'>aa</span>" in html
    assert f"--head:{colors.COLORS[1]};--share:{shares[1]}%' title='token 1, head 2: 0.400'>bb</span>" in html
    assert "head 3: 0.600'>&lt;script&gt;&#39;</span>" in html
    assert Page(html).text.count("<script>'") == 1


def test_heads_past_the_eighth_are_marked(tmp_path):
    assert len({colors.head_style(head) for head in range(24)}) == 24
    text = pages.color_text(list("abcdefghi"), torch.eye(9)[None], [1])  # token i belongs to head i
    assert [span["mark"] for span in text.layers[0]["tokens"]] == [0] * 8 + [1]
    plots.plot_strongest_heads(torch.eye(12).view(1, 12, 3, 4), torch.rand(16, 24, 3), [1]).savefig(tmp_path / "hatched.png")
    assert_drawn(tmp_path / "hatched.png")


def test_compression_of_many_images_has_a_band(images):
    terms = interpret.compression_terms(interpret.trace_model(tiny_vision_model(), pixel_values=images))
    axis = plots.plot_compression({"tokens": terms}).axes[0]
    assert len(axis.collections) == 2
    np.testing.assert_allclose(axis.lines[0].get_ydata(), terms.variational.mean(0))


@needs_auto_processor
def test_inspect_path(photo, text_model, tokenizer, tmp_path):
    """The processor beside the model, or a named one; none of a published folder's model code runs, trusted or not."""
    tiny_vision_model().save_pretrained(tmp_path / "vision")
    make_image_processor(24).save_pretrained(tmp_path / "vision")
    page = check_folder(interpret.inspect_path(str(tmp_path / "vision"), str(photo), tmp_path / "one"), tmp_path / "one")
    assert "24 x 24, as the model sees them" in page.text and "Predicted class" in page.text
    text_model.save_pretrained(tmp_path / "text", with_code=True)
    for file in (tmp_path / "text").glob("*.py"):
        file.write_text("raise SystemExit")
    missing = r"The tokenizer of .* cannot be loaded; name the one that the model uses \(--processor\)"
    with pytest.raises(ValueError, match=missing):
        interpret.inspect_path(tmp_path / "text", "the heads", tmp_path / "two", trust_remote_code=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    written = interpret.inspect_path(tmp_path / "text", "the heads", tmp_path / "two", processor=tmp_path / "tokenizer")
    check_folder(written, tmp_path / "two")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"max_position_embeddings": 2**31 - 1}, "lacks .*denom_bias"),
        ({"hidden_size": 64}, r"model.embed_tokens.weight has shape \(300, 32\)"),
        ({"model_type": "unheard"}, "config.json is not the configuration of a model"),
        ({"model_type": "gpt2"}, "holds a model of type 'gpt2', not a ToST model"),
    ],
)
def test_damaged_configurations(fields, message, tokenizer, tmp_path):
    """One of them asks for positions that are not in the file, and which would be allocated."""
    config = tost_hf.ToSTConfig(vocab_size=300, hidden_size=32, num_attention_heads=4, max_position_embeddings=None)
    tost_hf.ToSTForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | fields))
    with pytest.raises(ValueError, match=message) as caught:
        interpret.inspect_path(tmp_path, "the heads", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_invalid_inputs(text_model, tokenizer, photo, tmp_path):
    model, out = tiny_vision_model(), tmp_path / "out"
    (tmp_path / "fake.png").write_text("no image")
    huge, two_means, nan = (make_image_processor(side) for side in (10**6, 16, 16))
    two_means.image_mean, nan.image_std = [0.5, 0.5], [math.nan] * 3
    cases = [
        (model, None, tmp_path / "fake.png", {}, "fake.png is not an image"),
        (model, None, "some text", {}, "a vision model takes an image file"),
        (text_model, tokenizer, "  \n", {}, "The text is empty"),
        (text_model, tokenizer, photo, {}, "is not UTF-8 text"),
        (text_model, tokenizer, tmp_path / "none.txt", {}, "There is no file"),
        (text_model, tokenizer, "none.txt", {}, "There is no file 'none.txt'"),
        (text_model, None, "the heads", {}, "needs its tokenizer"),
        (text_model, ByT5Tokenizer(), "<extra_id_0><extra_id_99>", {}, "belongs to another model: .* has 300 tokens"),
        (text_model, tokenizer, "the heads", {"image_size": 32}, "image_size is for images"),
        (model, None, photo, {"layers": [4]}, "There is no layer 4"),
        (model, None, photo, {"layers": []}, "layers is empty"),
        (model, None, photo, {"image_size": 100_000}, "size .*140000}; a side may have up to 8,192 pixels"),
        (model, huge, photo, {}, "size .*1000000}; a side may have up to 8,192 pixels"),
        (model, two_means, photo, {}, "The image processor cannot prepare .*photo.png; its settings may be wrong"),
        (model, nan, photo, {}, "The model's memberships are NaN"),
    ]
    for inspected, helper, given, options, message in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            interpret.inspect_model(inspected, helper, given, out, **options)
    model.classifier.bias.data[0] = torch.inf  # which no membership depends on
    with pytest.raises(ValueError, match=r"damaged: classifier.bias has NaN or infinite values"):
        interpret.inspect_model(model, None, photo, out)
    assert not out.exists()


def test_only_files_of_an_earlier_report_are_replaced(photo, tmp_path, monkeypatch):
    """No other page, no page behind a link, no picture without a page, and no folder."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, file: file.write_bytes(b"drawn"))
    model, name = tiny_vision_model(num_hidden_layers=1), "class_attention.png"
    foreign, linked, picture, out = (tmp_path / folder for folder in ("foreign", "linked", "picture", "out"))
    for folder in (foreign, linked, picture):
        folder.mkdir()
    (foreign / "index.html").write_text("<p>mine</p>")
    (linked / "index.html").symlink_to(tmp_path / "nowhere")
    (picture / name).write_text("mine")
    written = interpret.inspect_model(model, None, photo, out)
    (out / name).unlink()
    (out / name).mkdir()
    for folder, message in (
        (foreign, "contains index.html, not written by this command"),
        (linked, "contains index.html, not written by this command"),
        (picture, f"{picture} contains {name}, not written by this command; name another folder"),
        (out, f"{name} is a folder, and a file is written there"),
        (photo, "is a file; name a folder"),
    ):
        with pytest.raises(FileExistsError, match=message):
            interpret.inspect_model(model, None, photo, folder)
    assert (foreign / "index.html").read_text() == "<p>mine</p>" and (picture / name).read_text() == "mine"
    assert not (tmp_path / "nowhere").exists() and all(len(list(x.iterdir())) == 1 for x in (foreign, linked, picture))
    (out / name).rmdir()
    assert interpret.inspect_model(model, None, photo, out) == written


TRAP = """
open({marker!r}, "w")
from transformers import ByT5Tokenizer, ViTImageProcessorPil
class Processor(ViTImageProcessorPil): pass
class Tokenizer(ByT5Tokenizer): pass
"""
REMOTE_CODE = {  # of each file, its name, the field that names a class, and its auto_map
    "tokenizer": ("tokenizer_config.json", {"tokenizer_class": "Tokenizer"}, {"AutoTokenizer": ["trap.Tokenizer", None]}),
    "image processor": (
        "preprocessor_config.json",
        {"image_processor_type": "Processor"},
        {"AutoImageProcessor": "trap.Processor"},
    ),
}


@needs_auto_processor
@pytest.mark.parametrize("what", REMOTE_CODE)
def test_remote_code_runs_only_if_trusted(what, text_model, photo, tmp_path, capsys, monkeypatch):
    """Whatever a prompt would be answered with."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, marker = tmp_path / "trap", tmp_path / "ran"
    model = tiny_vision_model() if what == "image processor" else text_model
    model.save_pretrained(folder)
    (folder / "trap.py").write_text(TRAP.format(marker=str(marker)))
    name, fields, auto_map = REMOTE_CODE[what]
    (folder / name).write_text(json.dumps(fields | {"auto_map": auto_map}))
    given = str(photo) if what == "image processor" else "the heads"
    command = ["inspect", str(folder), given, "--out", str(tmp_path / "out")]
    assert main(command) == 1 and not marker.exists()
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"tost-hf: error: The {what} of {folder} is remote code, which was not run; if you have read it and trust it, pass "
        "trust_remote_code=True (--trust-remote-code)."
    )
    assert main([*command, "--trust-remote-code"]) == 0
    assert marker.exists() and (tmp_path / "out/index.html").exists()


def test_a_failure_while_drawing_leaves_nothing(photo, tmp_path, monkeypatch):
    def savefig(figure, file):
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    with pytest.raises(OSError, match="disk full"):
        interpret.inspect_model(tiny_vision_model(num_hidden_layers=1), None, photo, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [photo]


@pytest.mark.parametrize("module", ["matplotlib", "PIL"])
def test_missing_packages_are_named(module, photo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}, which is missing: pip install 'tost-hf\[vision\]'"):
        interpret.inspect_model(tiny_vision_model(), None, Path(photo), tmp_path / "out")
