"""Pictures and pages: what they show, what they escape, and which files they may replace."""

import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import needs_auto_processor, randomize, tiny_vision_model
from tokenizers import processors
from transformers import ByT5Tokenizer

import tost_hf
from tost_hf import interpret
from tost_hf.cli import main
from tost_hf.interpret import colors, inputs, pages, plots


Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """Collects what a page holds, and refuses tags that do not match."""

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


def check_folder(written, out):
    """The page parses, shows pictures that exist and are not blank, each 1,280 wide and described; nothing is left over."""
    index = out / "index.html"
    assert written[0] == index and sorted(written) == sorted(path for path in out.iterdir() if path.name != "mine.txt")
    page = Page(index.read_text())
    assert len(page.images) >= 4
    for image in page.images:
        assert len(image["alt"]) > 30
        picture = np.asarray(Image.open(out / image["src"]).convert("RGB"), dtype=float)
        assert picture.shape[1] == 1280 and 80 < picture.shape[0] < 4000
        assert picture.std() > 5
    assert all((out / link).exists() for link in page.links)
    assert set(page.links) >= {image["src"] for image in page.images}
    return page


@pytest.fixture
def photo(tmp_path):
    picture = (np.indices((50, 70)).sum(0)[..., None] * [2, 1, 0.5]).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_inspect_an_image(photo, tmp_path):
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
    assert interpret.inspect_model(model, None, photo, out)[0] == written[0]  # again, over the old one


def test_images_of_any_size(photo):
    """Shorter side 33 asked for: 33 x 46.2 pixels, to the nearest multiples of 4."""
    model = tiny_vision_model()
    pixel_values, picture, _ = inputs.load_image(model, None, photo, 33)
    assert pixel_values.shape == (1, 3, 32, 48) and picture.shape == (32, 48, 3)
    original = np.asarray(Image.open(photo).convert("RGB").resize((48, 32), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(picture.numpy(), original, atol=0.01)
    odd = tost_hf.make_image_processor(18)
    assert inputs.load_image(model, odd, photo, None)[0].shape == (1, 3, 16, 16)
    grey = Image.open(photo).convert("LA")
    assert inputs.load_image(model, None, grey, None)[0].shape == (1, 3, 16, 16)
    with pytest.raises(ValueError, match="at least one patch"):
        inputs.load_image(model, None, photo, 3)


def test_inspect_a_text(text_model, tokenizer, tmp_path):
    text = "the <script>alert('heads')</script> of $the$ model & é日\n\n\tshare"
    out = tmp_path / "out"
    written = interpret.inspect_model(text_model, tokenizer, text, out)
    check_folder(written, out)
    assert {path.name for path in written} >= {"memberships.png", "entropy.png"}
    html = (out / "index.html").read_text()
    page = Page(html)
    assert "script" not in page.tags and "<script" not in html
    assert page.text.count("<script>alert('heads')</script>") == 2  # a section for each layer
    assert "日" in page.text


@pytest.mark.parametrize("forgetting", ["head", "token"])
def test_inspect_a_hybrid_that_forgets(forgetting, tokenizer, tmp_path):
    config = tost_hf.ToSTConfig.from_preset(
        "tost-hybrid-base",
        vocab_size=300,
        hidden_size=48,
        num_hidden_layers=4,
        forgetting=forgetting,
        bos_token_id=None,
        eos_token_id=None,
    )
    randomize(tost_hf.ToSTForCausalLM(config)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    page = check_folder(interpret.inspect_path(tmp_path / "model", "What was it that we forgot?", out), out)
    assert "forgetting.png" in page.links and "Attention layers1, " in page.text and "3 layers of 12 heads" in page.text
    model = tost_hf.ToSTForCausalLM.from_pretrained(tmp_path / "model")
    ids, _ = inputs.tokenize(tokenizer, "What was it that we forgot?")
    halves = interpret.half_life(interpret.trace_model(model, input_ids=ids))[0]
    for of_layer in halves:
        assert f"{of_layer.min():.1f}{of_layer.max():.1f}" in page.text


def test_half_lives_of_all_heads_are_beside_their_factors():
    halves = torch.arange(24.0).reshape(2, 12) + 2
    figure = plots.plot_forget_factors(0.5 ** (1 / halves)[..., None].expand(-1, -1, 5), halves, [1, 3])
    labels = [[tick.get_text() for tick in axis.child_axes[0].get_yticklabels()] for axis in figure.axes[:2]]
    assert labels == [[str(tokens) for tokens in range(2, 14)], [str(tokens) for tokens in range(14, 26)]]
    assert [axis.images[0].get_array().shape for axis in figure.axes[:2]] == [(12, 5)] * 2


def test_inspect_a_text_file_cut_with_a_warning(text_model, tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the heads of the model " * 30)
    with pytest.warns(UserWarning, match="tokens; the model has positions for 64, so the rest was cut off"):
        written = interpret.inspect_model(text_model, tokenizer, str(file), tmp_path / "out", layers=[1])
    page = check_folder(written, tmp_path / "out")
    assert "so the rest was cut off" in page.text and str(file) in page.text


def test_token_pieces_make_the_text(tokenizer):
    text = "the é日 heads\n of  🙂the text"
    ids, pieces = inputs.tokenize(tokenizer, text)
    assert "".join(pieces) == text and ids.shape == (1, len(pieces)) and "" in pieces
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<end> $A <end>", special_tokens=[("<end>", 0)])
    assert inputs.tokenize(tokenizer, text)[1] == ["<end>", *pieces, "<end>"]


def test_token_pieces_of_a_tokenizer_without_offsets():
    ids, pieces = inputs.tokenize(ByT5Tokenizer(), "heads of")
    assert pieces == [*"heads of", "</s>"] and ids.shape == (1, 9)


def test_strongest_heads_are_coloured():
    membership = torch.tensor([[0.9, 0.3, 0.2], [0.05, 0.4, 0.2], [0.05, 0.3, 0.6]])
    html = pages.colored_text(["aa", "bb", "cc"], membership[None], [1])
    for token, head, share in (("aa", 1, "0.900"), ("bb", 2, "0.400"), ("cc", 3, "0.600")):
        assert f"head {head}: {share}'>{token}</span>" in html
    full = colors.tint(colors.COLORS[0], 1.0)
    assert f"background:{full}' title='token 0" in html
    hostile = pages.colored_text(["<script>'", "b", "c"], membership[None], [1])
    assert "<script" not in hostile and Page(hostile).text.count("<script>'") == 1
    pale = colors.tint(colors.COLORS[1], (0.4 - 1 / 3) / (0.9 - 1 / 3))
    assert f"background:{pale}' title='token 1" in html


def test_heads_past_the_eighth_are_marked(tmp_path):
    styles = {colors.head_style(head) for head in range(24)}
    assert len(styles) == 24
    html = pages.colored_text(list("abcdefghi"), torch.eye(9)[None], [1])  # token i belongs to head i
    assert "border-bottom:1px solid #333' title='token 8" in html
    assert not any(f"border-bottom:1px solid #333' title='token {i}" in html for i in range(8))
    maps = torch.rand(2, 16, 4, 6).softmax(1)
    picture = torch.rand(16, 24, 3)
    for figure in (
        plots.plot_membership_maps(maps, picture, [1, 2]),
        plots.plot_strongest_heads(maps, picture, [1, 2]),
    ):
        figure.savefig(tmp_path / "picture.png")
        assert np.asarray(Image.open(tmp_path / "picture.png")).std() > 5


def test_compression_of_many_images_has_a_band(images):
    terms = interpret.compression_terms(interpret.trace_model(tiny_vision_model(), pixel_values=images))
    axis = plots.plot_compression({"tokens": terms}).axes[0]
    assert len(axis.collections) == 2
    np.testing.assert_allclose(axis.lines[0].get_ydata(), terms.variational.mean(0))


def test_one_head_and_one_layer(tmp_path, photo):
    written = interpret.inspect_model(
        tiny_vision_model(num_attention_heads=1, num_hidden_layers=1), None, photo, tmp_path / "out"
    )
    assert "nan" in Page(written[0].read_text()).text  # no other head to overlap with


@needs_auto_processor
def test_inspect_path(photo, text_model, tokenizer, tmp_path):
    model = tiny_vision_model()
    model.save_pretrained(tmp_path / "vision")
    tost_hf.make_image_processor(24).save_pretrained(tmp_path / "vision")
    written = interpret.inspect_path(str(tmp_path / "vision"), str(photo), tmp_path / "one")
    page = check_folder(written, tmp_path / "one")
    assert "24 x 24, as the model sees them" in page.text and "Predicted class" in page.text
    text_model.save_pretrained(tmp_path / "text")
    with pytest.raises(
        ValueError, match=r"The tokenizer of .* cannot be loaded; name the one that the model uses \(--processor\)"
    ):
        interpret.inspect_path(tmp_path / "text", "the heads", tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    written = interpret.inspect_path(tmp_path / "text", "the heads", tmp_path / "two", processor=tmp_path / "tokenizer")
    check_folder(written, tmp_path / "two")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' expected int, got NoneType"),
        ({"max_position_embeddings": 2**31 - 1}, r"asks for at least \d[\d,]+ bytes of weights; this machine has"),
        ({"hidden_size": 64}, "The model of .* cannot be loaded"),
        ({"model_type": "gpt2"}, "holds a model of type 'gpt2', not a ToST model"),
        ({"model_type": "unheard"}, "The configuration of .* cannot be loaded"),
    ],
)
def test_configurations_that_do_not_fit(fields, message, tokenizer, tmp_path):
    """One of them asks for positions that its file does not hold, and which would be allocated."""
    config = tost_hf.ToSTConfig(vocab_size=300, hidden_size=32, num_attention_heads=4, max_position_embeddings=None)
    tost_hf.ToSTForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | fields))
    with pytest.raises(ValueError, match=message) as caught:
        interpret.inspect_path(tmp_path, "the heads", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_inputs_that_are_none(text_model, tokenizer, photo, tmp_path):
    model, out = tiny_vision_model(), tmp_path / "out"
    (tmp_path / "fake.png").write_text("no image")
    cases = [
        (model, None, tmp_path / "fake.png", ValueError, "fake.png is not an image"),
        (model, None, "a literal text", FileNotFoundError, "a vision model takes an image file"),
        (text_model, tokenizer, "  \n", ValueError, "The text is empty"),
        (text_model, tokenizer, photo, ValueError, "is not UTF-8 text"),
        (text_model, tokenizer, tmp_path / "none.txt", FileNotFoundError, "There is no file"),
        (text_model, tokenizer, "none.txt", FileNotFoundError, "There is no file 'none.txt'"),
        (text_model, None, "the heads", ValueError, "needs its tokenizer"),
    ]
    for inspected, helper, given, error, message in cases:
        with pytest.raises(error, match=message):
            interpret.inspect_model(inspected, helper, given, out)
    with pytest.raises(ValueError, match="There is no layer 4"):
        interpret.inspect_model(model, None, photo, out, layers=[4])
    with pytest.raises(ValueError, match=r"The tokenizer belongs to another model: .* has 300 tokens"):
        interpret.inspect_model(text_model, ByT5Tokenizer(), "<extra_id_0><extra_id_99>", out)
    with pytest.raises(ValueError, match="image_size is for images"):
        interpret.inspect_model(text_model, tokenizer, "the heads", out, image_size=32)
    with pytest.raises(ValueError, match="With image_size 100000 a side has 140,000 pixels; the most is 8,192"):
        interpret.inspect_model(model, None, photo, out, image_size=100_000)
    huge = tost_hf.make_image_processor(10**6)
    with pytest.raises(ValueError, match=r"size of the image processor is .*; its sides may have up to 8,192 pixels"):
        interpret.inspect_model(model, huge, photo, out)
    odd = tost_hf.make_image_processor(16)
    odd.image_mean = [0.5, 0.5]
    with pytest.raises(ValueError, match=r"The image processor cannot prepare .*photo.png; its settings may be wrong"):
        interpret.inspect_model(model, odd, photo, out)
    torch.nn.init.constant_(model.tost.layers[0].attention.temp, torch.nan)
    with pytest.raises(ValueError, match=r"damaged: tost.layers.0.attention.temp holds NaN or infinite numbers"):
        interpret.inspect_model(model, None, photo, out)
    model.tost.layers[0].attention.temp.data.fill_(1)
    model.classifier.bias.data[0] = torch.inf  # no membership shows it
    with pytest.raises(ValueError, match=r"damaged: classifier.bias holds NaN or infinite numbers"):
        interpret.inspect_model(model, None, photo, out)
    model.classifier.bias.data.zero_()
    odd = tost_hf.make_image_processor(16)
    odd.image_std = [math.nan] * 3
    with pytest.raises(ValueError, match="The model's memberships are NaN"):
        interpret.inspect_model(model, odd, photo, out)
    with pytest.raises(ValueError, match="layers is empty"):
        interpret.inspect_model(model, None, photo, out, layers=[])
    assert not out.exists()


def test_a_strangers_page_is_not_overwritten(photo, tmp_path):
    (tmp_path / "index.html").write_text("<p>mine</p>")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="is not a page of this command"):
        interpret.inspect_model(tiny_vision_model(), None, photo, tmp_path)
    with pytest.raises(FileExistsError, match="is a file; name a folder"):
        interpret.inspect_model(tiny_vision_model(), None, photo, photo)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "index.html").read_text() == "<p>mine</p>"


def test_own_pictures_are_not_overwritten(photo, tmp_path):
    """Not in a folder without a page of ours, nor in one whose page does not name them; what the page names is replaced."""
    model, out, name = tiny_vision_model(), tmp_path / "out", "class_attention.png"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{out} holds {name}, which this command did not write; name another folder"):
        interpret.inspect_model(model, None, photo, out)
    assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == "mine"
    (out / name).rename(tmp_path / "mine")
    written = interpret.inspect_model(model, None, photo, out)
    page = (out / "index.html").read_text()
    (out / "index.html").write_text(page.replace(name, "other.png"))
    with pytest.raises(FileExistsError, match=f"holds {name}, which"):
        interpret.inspect_model(model, None, photo, out)
    (out / "index.html").write_text(page)
    assert interpret.inspect_model(model, None, photo, out) == written
    (out / name).unlink()
    (out / name).mkdir()
    with pytest.raises(FileExistsError, match=f"holds {name}, which"):
        interpret.inspect_model(model, None, photo, out)


def test_a_page_that_leads_elsewhere_is_not_followed(photo, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/index.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="is not a page of this command"):
        interpret.inspect_model(tiny_vision_model(), None, photo, tmp_path / "out")
    assert not (tmp_path / "nowhere").exists()


TRAP = """
open({marker!r}, "w")
from transformers import ByT5Tokenizer, PreTrainedConfig, ViTImageProcessorPil
class Config(PreTrainedConfig): model_type = "trap"
class Processor(ViTImageProcessorPil): pass
class Tokenizer(ByT5Tokenizer): pass
"""


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder whose code leaves a file behind when it runs, and a prompt that would answer yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "trap.py").write_text(TRAP.format(marker=str(tmp_path / "ran")))
    return folder


def write_trap(folder, what):
    """Makes code of the configuration, the tokenizer or the image processor."""
    if what == "configuration":
        fields = {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Config", "AutoModel": "trap.Model"}}
        (folder / "config.json").write_text(json.dumps(fields))
    elif what == "tokenizer":
        fields = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["trap.Tokenizer", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    else:
        fields = {"image_processor_type": "Processor", "auto_map": {"AutoImageProcessor": "trap.Processor"}}
        (folder / "preprocessor_config.json").write_text(json.dumps(fields))


@needs_auto_processor
@pytest.mark.parametrize("what", ["configuration", "tokenizer", "image processor"])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_flag_alone_decides_about_code(what, trusted, trap, text_model, photo, tmp_path, capsys):
    model = tiny_vision_model() if what == "image processor" else text_model
    model.save_pretrained(trap)
    write_trap(trap, what)
    given = str(photo) if what == "image processor" else "the heads"
    flags = ["--trust-remote-code"] if trusted else []
    status = main(["inspect", str(trap), given, "--out", str(tmp_path / "out"), *flags])
    error = capsys.readouterr().err.splitlines()[-1:]
    assert (tmp_path / "ran").exists() == trusted
    if trusted and what != "configuration":
        assert status == 0 and (tmp_path / "out/index.html").exists()
    elif not trusted:
        assert status == 1 and error == [
            f"tost-hf: error: The {what} of {trap} is code, which is not run; if you have read it and trust it, pass "
            "trust_remote_code=True (--trust-remote-code)."
        ]


@needs_auto_processor
def test_code_that_a_published_model_carries_is_never_run(text_model, tokenizer, tmp_path, monkeypatch):
    """The model is this package's, whatever its folder carries and whatever is trusted."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    text_model.save_pretrained(tmp_path / "model", with_code=True)
    tokenizer.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.py"):
        file.write_text("raise SystemExit")
    for trusted in (False, True):
        interpret.inspect_path(tmp_path / "model", "the heads", tmp_path / "out", trust_remote_code=trusted)


def test_a_failure_while_drawing_leaves_nothing(photo, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        interpret.inspect_model(tiny_vision_model(), None, photo, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("module", ["matplotlib", "PIL"])
def test_missing_extras_are_named(module, photo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}, which is missing: pip install 'tost-hf\[vision\]'"):
        interpret.inspect_model(tiny_vision_model(), None, Path(photo), tmp_path / "out")
