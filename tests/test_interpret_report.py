"""The report of `inspect`: the contents of its page and pictures, and which files it may overwrite."""

import html
import itertools
import re
import sys

import numpy as np
import pytest
import torch
from conftest import randomize, small_vision_config, tiny_vision_model

import tost_hf
from tost_hf import interpret
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor
from tost_hf.interpret import plots
from tost_hf.interpret.report import load_image


Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def assert_not_blank(file) -> None:
    """The picture is 1,280 pixels wide and not blank."""
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=float)
    assert pixels.shape[1] == 1280 and 80 < pixels.shape[0] < 4000
    assert pixels.std() > 5


def check_report(files, folder):
    """Checks for a page and the pictures that it shows, none of them blank; returns the page's HTML."""
    assert files[0] == folder / "index.html" and sorted(files) == sorted(folder.iterdir())
    page = files[0].read_text()
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    pictures = re.findall("<img src='(.*?)'", page)
    assert len(pictures) >= 4 and {path.name for path in files[1:]} == set(pictures)
    for name in pictures:
        assert_not_blank(folder / name)
    return page


@pytest.fixture
def photo(tmp_path):
    picture = (np.indices((50, 70)).sum(0)[..., None] * [2, 1, 0.5]).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_image_report(photo, tmp_path):
    model, out = tiny_vision_model(id2label={0: "a <b> cat"}, num_labels=1), tmp_path / "out"
    files = interpret.inspect_model(model, None, photo, out, layers=[2, 0])
    page = check_report(files, out)
    assert "a &lt;b&gt; cat (100.0%)" in page and "16 x 16" in page
    assert "4 x 4, too few" in page and "--image-size 128 " in page
    assert {"class_attention.png", "compression.png"} <= {path.name for path in files}
    terms = interpret.compression_terms(interpret.trace_model(model, pixel_values=load_image(model, None, photo)[0]))
    assert f"{terms.variational[0, 2]:.2f}" in page and f"{terms.coding_rate[0, 0]:.2f}" in page
    assert interpret.inspect_model(model, None, photo, out)[0] == files[0]  # replaces the earlier report
    for file in files:
        file.write_text("mine")
        with pytest.raises(FileExistsError, match=file.name):
            interpret.inspect_model(model, None, photo, out)
        file.unlink()


def test_one_head_and_one_layer_of_a_backbone(tmp_path, photo):
    """Without other heads to overlap with, and without class attention."""
    config = small_vision_config(num_attention_heads=1, num_hidden_layers=1)
    files = interpret.inspect_model(randomize(tost_hf.ToSTBackbone(config)).eval(), None, photo, tmp_path / "out")
    page = check_report(files, tmp_path / "out")
    assert "<td>-</td>" in page and "class_attention.png" not in page


@pytest.mark.parametrize("decay_type", ["none", "token"])
def test_text_report(decay_type, tokenizer, tmp_path):
    """A hybrid inspects a string and a file, of which it shows the first tokens."""
    config = tost_hf.ToSTConfig.from_preset(
        "tost-hybrid-base",
        **{"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 4, "decay_type": decay_type},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        max_position_embeddings=64,
    )
    model, out = randomize(tost_hf.ToSTForCausalLM(config)).eval(), tmp_path / "out"
    page = check_report(interpret.inspect_model(model, tokenizer, "What was it that we forgot?", out), out)
    assert ("decay.png" in page) == (decay_type != "none") and "3 TSSA layers of 12 heads" in page
    assert "layers 3: softmax attention" in page and re.findall(r"<summary>(.*?)<", page) == ["Layer 0", "Layer 1", "Layer 2"]
    (tmp_path / "text.txt").write_text(text := "the heads of the model " * 30)
    total = len(tokenizer(text).input_ids)
    for options, shown in (({}, 64), ({"max_tokens": 9}, 9)):  # the model's positions end at 64
        page = interpret.inspect_model(model, tokenizer, tmp_path / "text.txt", out, **options)[0].read_text()
        assert f"the first {shown} of {total}<" in page and page.count('title="token ') == 3 * shown


def test_colors_of_a_text(text_model, tokenizer, tmp_path):
    """A span for each token, with its strongest head; together they are the text, characters of several tokens too."""
    text = "Grüße <b> of\n the ✓ heads"
    trace = interpret.trace_model(text_model, **tokenizer(text, return_tensors="pt"))
    page = interpret.inspect_model(text_model, tokenizer, text, tmp_path / "out")[0].read_text()
    for layer, section in enumerate(re.findall(r"<details.*?</details>", page, re.DOTALL)):
        spans = re.findall(
            r'<span class="head(\d)" style="--strength: ([\d.]+)" title="(.*?)">(.*?)</span>', section, re.DOTALL
        )
        assert "".join(html.unescape(piece) for *_, piece in spans) == text
        memberships = trace.memberships[0, layer]
        assert [int(head) for head, *_ in spans] == memberships.argmax(0).tolist()
        assert [title for _, _, title, _ in spans] == [
            f"token {i}: head {head}, {values[head]:.2f}"
            for i, (head, values) in enumerate(zip(memberships.argmax(0), memberships.T))
        ]
        assert max(float(strength) for _, strength, *_ in spans) == 1


def test_labels_of_a_long_text_do_not_overlap():
    starts = [0, *(2**i for i in range(17))]
    buckets = interpret.EntropyByPosition(starts, torch.rand(12, len(starts)))
    figure = plots.plot_entropy_by_position(buckets, 12, range(12))
    figure.draw_without_rendering()
    extents = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(extents))


@pytest.mark.parametrize(
    "kind, source, options, message",
    [
        ("text", "photo.png", {}, "'photo.png' is not a text in UTF-8; this model reads texts"),
        ("text", "nosuch.txt", {}, "There is no file 'nosuch.txt'"),
        ("text", "no/such", {}, "There is no file 'no/such'"),
        ("text", "", {}, "is empty"),
        ("text", "the heads", {"image_size": 32}, "image_size is for images"),
        ("text", "the heads", {"max_tokens": 0}, "at least 1"),
        ("image", "nosuch.jpg", {}, "There is no file 'nosuch.jpg'; this model reads images"),
        ("image", "a cat on a mat", {}, "There is no file 'a cat on a mat'; this model reads images"),
        ("image", "model/config.json", {}, "is not an image; this model reads images"),
        ("image", "photo.png", {"max_tokens": 9}, "max_tokens is for texts"),
    ],
)
def test_input_is_checked_before_the_weights_are_loaded(
    kind, source, options, message, photo, text_model, tmp_path, monkeypatch
):
    model = text_model if kind == "text" else tiny_vision_model()
    model.config.save_pretrained(tmp_path / "model")  # without weights
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        interpret.inspect_path("model", source, "out", **options)


def test_inspect_path(photo, text_model, tokenizer, tmp_path):
    """Uses the processor in the model's folder or a named one; never runs the folder's code, trusted or not."""
    tiny_vision_model().save_pretrained(tmp_path / "vision")
    make_image_processor(24).save_pretrained(tmp_path / "vision")
    page = check_report(interpret.inspect_path(tmp_path / "vision", photo, tmp_path / "one"), tmp_path / "one")
    assert "24 x 24, as the model sees them" in page and "Predicted class" in page
    text_model.save_pretrained(tmp_path / "text", with_code=True)
    for file in (tmp_path / "text").glob("*.py"):
        file.write_text("raise SystemExit")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["inspect", str(tmp_path / "text"), "the heads", "--out", str(tmp_path / "two")]
    assert main([*command, "--processor", str(tmp_path / "tokenizer"), "--trust-remote-code"]) == 0
    assert (tmp_path / "two/index.html").exists()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("[]")
    assert main([*command, "--processor", str(tmp_path / "tokenizer")]) == 1


def test_images_of_any_size(photo):
    """A shorter side of 33 means 33 x 46.2 pixels, rounded to multiples of 4."""
    model = tiny_vision_model()
    pixel_values, picture = load_image(model, None, photo, 33)
    assert pixel_values.shape == (1, 3, 32, 48) and picture.shape == (32, 48, 3)
    expected = np.asarray(Image.open(photo).convert("RGB").resize((48, 32), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(picture.numpy(), expected, atol=0.01)
    assert load_image(model, make_image_processor(18), photo)[0].shape == (1, 3, 16, 16)
    pixel_values, picture = load_image(tiny_vision_model(num_channels=1), None, photo)
    assert pixel_values.shape == (1, 1, 16, 16) and picture.shape == (16, 16, 3)


def test_invalid_inputs(text_model, tokenizer, photo, tmp_path, monkeypatch):
    model, out = tiny_vision_model(), tmp_path / "out"
    cases = [
        (text_model, None, "the heads", {}, "tokenizer"),
        (text_model, tokenizer, photo, {}, "this model reads texts"),
        (text_model, tokenizer, Image.open(photo), {}, "reads texts"),
        (model, None, photo, {"layers": [3]}, "There is no TSSA layer 3"),
        (model, None, photo, {"layers": []}, "layers"),
    ]
    for inspected_model, processor, source, options, message in cases:
        with pytest.raises(ValueError, match=message):
            interpret.inspect_model(inspected_model, processor, source, out, **options)
    for module in ("matplotlib", "PIL"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=module):
            interpret.inspect_model(model, None, photo, out)
        monkeypatch.undo()
    assert not out.exists()


def test_every_layer_and_head_of_a_photograph(tmp_path):
    """Each map is drawn over the photograph, with every patch at its position."""
    photograph = pytest.importorskip("sklearn.datasets").load_sample_image("china.jpg")
    model = tiny_vision_model(num_hidden_layers=3)
    pixel_values, picture = load_image(model, None, Image.fromarray(photograph), 48)
    maps = interpret.membership_maps(interpret.trace_model(model, pixel_values=pixel_values))[0]
    figure = plots.plot_membership_maps(maps, picture, range(3))
    panels = [axis for axis in figure.axes if len(axis.images) == 2]  # the photograph in gray and a map
    assert len(panels) == 3 * 4
    for panel, membership in zip(panels, maps.flatten(0, 1)):
        background, overlay = panel.images
        assert list(background.get_extent()) == [-0.5, 71.5, 47.5, -0.5] == list(overlay.get_extent())
        assert background.get_array().shape == (48, 72)
        np.testing.assert_array_equal(overlay.get_array(), membership)


def test_compression_plot_shows_the_mean_of_images(images):
    terms = interpret.compression_terms(interpret.trace_model(tiny_vision_model(), pixel_values=images))
    axis = plots.plot_compression({"tokens": terms}, range(3)).axes[0]
    np.testing.assert_allclose(axis.lines[0].get_ydata(), terms.variational.mean(0))


def test_failed_plot_leaves_no_files(photo, tmp_path, monkeypatch):
    def savefig(figure, file):
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    with pytest.raises(OSError, match="disk full"):
        interpret.inspect_model(tiny_vision_model(num_hidden_layers=1), None, photo, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [photo]
