"""`tost-hf inspect`: its pictures and its table, the color scales, and which files it may overwrite."""

import itertools
import sys

import numpy as np
import pytest
import torch
from conftest import randomize, small_vision_config, tiny_vision_model

import tost_hf
from tost_hf import interpret
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor, open_image
from tost_hf.interpret import plots
from tost_hf.interpret.inspection import prepare_image


Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def assert_not_blank(file) -> None:
    """The picture is 1,280 pixels wide and not blank."""
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=float)
    assert pixels.shape[1] == 1280 and 80 < pixels.shape[0] < 4000
    assert pixels.std() > 5


def check_files(files, folder) -> str:
    """Checks for a table and several pictures, none of them blank; returns the table."""
    assert files[0] == folder / "layers.md" and sorted(files) == sorted(folder.iterdir()) and len(files) >= 5
    for file in files[1:]:
        assert_not_blank(file)
    return files[0].read_text()


@pytest.fixture
def photo(tmp_path):
    picture = (np.indices((50, 70)).sum(0)[..., None] * [2, 1, 0.5]).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_image(photo, tmp_path):
    model, out = tiny_vision_model(), tmp_path / "out"
    files = interpret.inspect_model(model, None, photo, out, layers=[2, 0])
    table = check_files(files, out)
    assert "16 x 16 pixels" in table and "4 x 4 patches, too few" in table and "--image-size 128 " in table
    assert {"class_attention.png", "compression.png"} <= {path.name for path in files}
    pixel_values = prepare_image(model, None, open_image(photo))[0]
    terms = interpret.compression_terms(interpret.trace_model(model, pixel_values=pixel_values))
    assert f"{terms.variational[0, 2]:.2f}" in table and f"{terms.coding_rate[0, 0]:.2f}" in table
    with pytest.raises(FileExistsError, match="--overwrite"):
        interpret.inspect_model(model, None, photo, out)
    assert interpret.inspect_model(model, None, photo, out, overwrite=True) == files


def test_one_head_and_one_layer_of_a_backbone(tmp_path, photo):
    """Without other heads to overlap with, and without class attention."""
    config = small_vision_config(num_attention_heads=1, num_hidden_layers=1)
    files = interpret.inspect_model(randomize(tost_hf.ToSTBackbone(config)).eval(), None, photo, tmp_path / "out")
    assert " - |" in check_files(files, tmp_path / "out") and tmp_path / "out/class_attention.png" not in files


def test_text(tokenizer, tmp_path):
    """A hybrid inspects a string and a file, of which it shows the first tokens."""
    config = tost_hf.ToSTConfig.from_preset(
        "tost-hybrid-base",
        **{"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 4, "decay_type": "token"},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        max_position_embeddings=64,
    )
    model, out = randomize(tost_hf.ToSTForCausalLM(config)).eval(), tmp_path / "out"
    files = interpret.inspect_model(model, tokenizer, "What was it that we forgot?", out)
    table = check_files(files, out)
    assert out / "decay.png" in files and "3 TSSA layers of 12 heads" in table
    assert "layers 3 (softmax attention)" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[-3:]] == ["0", "1", "2"]
    (tmp_path / "text.txt").write_text(text := "the heads of the model " * 30)
    total = len(tokenizer(text).input_ids)
    for options, shown in (({}, 64), ({"max_tokens": 9}, 9)):  # the model's positions end at 64
        files = interpret.inspect_model(model, tokenizer, tmp_path / "text.txt", out, overwrite=True, **options)
        assert f"the first {shown} of {total} tokens" in files[0].read_text()


def test_color_scales_do_not_stretch_small_differences():
    """From 0 to at least twice the uniform membership, which is marked, in all layers; pale where a head barely leads."""
    nearly_uniform = torch.full((2, 4, 3, 3), 0.25)
    nearly_uniform[:, 0] += 0.005
    one_strong = nearly_uniform.clone()
    one_strong[1, 2, 0, 0] = 0.9
    for maps, limit in ((nearly_uniform, 0.5), (one_strong, 0.9)):
        panels = plots.plot_membership_maps(maps, torch.zeros(9, 9, 3), range(2))
        strips = plots.plot_membership_tokens(maps.flatten(2), range(2))
        for figure, images_of_an_axis, count in ((panels, 2, 8), (strips, 1, 2)):  # maps lie over the picture
            scales = [axis.images[-1].get_clim() for axis in figure.axes if len(axis.images) == images_of_an_axis]
            assert [scale for scale in scales if scale == (0, pytest.approx(limit))] == scales[-count:]
            labels = [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
            assert labels.count("0.25\nuniform") == 2
    lead, strongest = plots.strongest_heads(one_strong[1])
    assert lead[0, 0] == 1 and strongest[0, 0] == 2 and lead[1, 1] == pytest.approx(0.02)
    figure = plots.plot_strongest_heads(one_strong, torch.zeros(9, 9, 3), range(2))
    opacities = [image.get_alpha() for axis in figure.axes for image in axis.images if np.ndim(image.get_alpha())]
    assert opacities[1][0, 0] == pytest.approx(0.85) and opacities[1][1, 1] < 0.1
    entropy = torch.full((1, 3, 3), 1.38)
    assert plots.plot_entropy_maps(entropy, 4, [0]).axes[0].images[0].get_clim()[0] == 0


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
        ("image", "notes.json", {}, "is not an image; this model reads images"),
        ("image", "photo.png", {"max_tokens": 9}, "max_tokens is for texts"),
    ],
)
def test_rejected_inputs(kind, source, options, message, photo, text_model, tokenizer, tmp_path, monkeypatch):
    model, processor = (text_model, tokenizer) if kind == "text" else (tiny_vision_model(), None)
    (tmp_path / "notes.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        interpret.inspect_model(model, processor, source, "out", **options)


def test_inspect_path(photo, text_model, tokenizer, tmp_path, capsys):
    """Uses the processor in the model's folder or a named one; never runs the folder's code, trusted or not."""
    tiny_vision_model().save_pretrained(tmp_path / "vision")
    make_image_processor(24).save_pretrained(tmp_path / "vision")
    table = check_files(interpret.inspect_path(tmp_path / "vision", photo, tmp_path / "one"), tmp_path / "one")
    assert "24 x 24 pixels, as the model sees them" in table
    text_model.save_pretrained(tmp_path / "text", with_code=True)
    for file in (tmp_path / "text").glob("*.py"):
        file.write_text("raise SystemExit")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["inspect", str(tmp_path / "text"), "the heads", "--out", str(tmp_path / "two")]
    assert main([*command, "--processor", str(tmp_path / "tokenizer"), "--trust-remote-code"]) == 0
    assert (tmp_path / "two/layers.md").read_text() in capsys.readouterr().out
    assert not (tmp_path / "two/decay.png").exists()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("[]")
    assert main([*command, "--processor", str(tmp_path / "tokenizer")]) == 1


def test_images_of_any_size(photo):
    """A shorter side of 33 means 33 x 46.2 pixels, rounded to multiples of 4."""
    model, image = tiny_vision_model(), open_image(photo)
    pixel_values, picture = prepare_image(model, None, image, 33)
    assert pixel_values.shape == (1, 3, 32, 48) and picture.shape == (32, 48, 3)
    expected = np.asarray(Image.open(photo).convert("RGB").resize((48, 32), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(picture.numpy(), expected, atol=0.01)
    assert prepare_image(model, make_image_processor(18), image)[0].shape == (1, 3, 16, 16)
    pixel_values, picture = prepare_image(tiny_vision_model(num_channels=1), None, image)
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
    pixel_values, picture = prepare_image(model, None, Image.fromarray(photograph), 48)
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
