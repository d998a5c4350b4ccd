"""The folder that `tost-hf space` writes, publishing it as a Space, and its page in Chromium, compared with the model."""

import base64
import functools
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from hub_clients import contents, language_folder, save_tokenizer, vision_folder

import tost_hf
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor
from tost_hf.model.configuration_tost import FULL_ATTENTION, TSSA
from tost_hf.space import packages, write_space, writing


Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
for module in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(module, reason=f"{module} is not installed")


class RequestHandler(SimpleHTTPRequestHandler):
    """Serves a folder with the content types that browsers need."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *args) -> None: ...


@contextmanager
def serve(folder):
    """Serves a folder on loopback; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(RequestHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# The folder -----------------------------------------------------------------------------------------------------------


def pack(package: packages.Package, folder) -> packages.Package:
    """Writes a tarball with small placeholders for the package's files; returns the package with its hash."""
    with tarfile.open(folder / package.tarball, "w:gz") as archive:
        for member in package.files:
            content = f"// {member}\n".encode()
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    digest = hashlib.sha512((folder / package.tarball).read_bytes()).digest()
    return package._replace(integrity=f"sha512-{base64.b64encode(digest).decode()}")


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """A folder of small tarballs that replace the libraries."""
    (tmp_path / "npm").mkdir()
    for name in ("RUNTIME", "TOKENIZERS"):
        monkeypatch.setattr(writing, name, pack(getattr(packages, name), tmp_path / "npm"))
    return tmp_path / "npm"


@pytest.fixture
def registry(npm, tmp_path, monkeypatch):
    """A local npm registry, with each package's description and tarball."""
    with serve(root := tmp_path / "registry") as address:
        for package in (writing.RUNTIME, writing.TOKENIZERS):
            (root / package.tarball).parent.mkdir(exist_ok=True)
            shutil.copyfile(npm / package.tarball, root / package.tarball)
            dist = {"tarball": f"{address}/{package.tarball}"}
            description = {"name": package.name, "version": package.version, "dist": dist}
            (root / package.name).parent.mkdir(exist_ok=True)
            (root / package.name).write_text(json.dumps({"name": package.name, "versions": {package.version: description}}))
        (tmp_path / "npmrc").write_text(f"registry={address}/\ncache={tmp_path / 'cache'}\n")
        for name in [name for name in os.environ if name.lower().startswith("npm_config_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_fetches_the_libraries(registry, tmp_path, monkeypatch):
    """With the user's npm settings, and a second time offline from npm's cache; missing or changed packages raise errors."""
    libraries = (writing.RUNTIME, writing.TOKENIZERS)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        packages.unpack(libraries, tmp_path / folder)
        assert (tmp_path / folder / "tokenizers.min.mjs").read_text() == "// package/dist/tokenizers.min.mjs\n"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"No matching version.*npm pack onnxruntime-web@9\.0\.0`, and name .* --npm"):
        packages.unpack([writing.RUNTIME._replace(version="9.0.0")], tmp_path)
    with pytest.raises(ValueError, match=r"its hash is sha512-.* not sha512-else"):
        packages.unpack([writing.RUNTIME._replace(integrity="sha512-else")], tmp_path)


def saver(model_class, config):
    return lambda folder: model_class(config).save_pretrained(folder)


def save_with_unsupported_resampling(folder):
    vision_folder(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resample": 0}))


@pytest.mark.parametrize(
    "save_model, options, words",
    [
        (
            saver(tost_hf.ToSTForMaskedLM, small_config(is_causal=False)),
            (),
            "is a ToSTForMaskedLM; the page runs ToSTForCausalLM and ToSTForImageClassification",
        ),
        (saver(tost_hf.ToSTForCausalLM, small_config()), (), "has no tokenizer, which the page needs"),
        (saver(tost_hf.ToSTForImageClassification, small_vision_config(num_channels=1)), (), "RGB"),
        (save_with_unsupported_resampling, (), "does not implement"),
        (vision_folder, ("--dtype", "int3"), "not in 'int3'"),
        (vision_folder, ("--npm", "."), "has no onnxruntime-web"),
        (language_folder, ("--tokenizer", "./nowhere"), "The tokenizer of ./nowhere cannot be loaded"),
        (lambda folder: None, (), "There is no model folder"),
    ],
)
def test_rejected_models(tmp_path, capsys, npm, save_model, options, words):
    """The error message is one line, and no files are written."""
    save_model(tmp_path / "model")
    paths_before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    arguments = ["space", tmp_path / "model", tmp_path / "page", "--npm", npm, *options]
    assert main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert words in error and error.startswith("tost-hf: error: ") and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == paths_before


def export_placeholder(source, folder, **options):
    folder.mkdir()
    for name in ("model.onnx", "export.json"):
        (folder / name).write_text("{}")


def test_first_prompt(tmp_path):
    """That of the model card's first example, if it has any."""
    folder = language_folder(tmp_path)
    assert writing._find_prompt(folder) == "Once upon a time"
    (folder / "README.md").write_text("---\nlicense: mit\nwidget:\n- text: import os\n- text: second\n---\n")
    assert writing._find_prompt(folder) == "import os"


def test_publishing_a_space(hub, clients, npm, tmp_path, monkeypatch):
    """In one commit, with the metadata that the Hub requires; unchanged files are not uploaded again."""
    monkeypatch.setattr(writing, "export_model", export_placeholder)
    page = write_space(vision_folder(tmp_path / "model"), tmp_path / "page", npm=npm, title="Kinds: 10 <of them>")
    assert "\n# Kinds: 10 <of them>\n" in (page / "README.md").read_text()
    clients.publish("--space", page, "tost/page")
    assert hub.files("spaces/tost/page") == contents(page)
    repository = json.loads([request for request in hub.requests if request.path == "/api/repos/create"][-1].body)
    assert (repository["type"], repository["sdk"]) == ("space", "static")
    head = hub.head("spaces/tost/page")
    assert f"/commit/{head}" in clients.publish("--space", page, "tost/page", "--tag", "v1").output
    with hub.fail("POST", "/commit/", status=500):
        assert clients.command("publish", "--space", page, "tost/broken", token=hub.token).status == 1
    assert "spaces/tost/broken" not in hub.repositories


# The page in a browser ------------------------------------------------------------------------------------------------

PROMPT = "Grüße, 2 ✓ tokens"
CONTROL, ENTER, ARROW_RIGHT = "\ue009", "\ue007", "\ue014"  # WebDriver's codes of keys


class Page:
    """A Space's page, opened in a browser."""

    def __init__(self, driver):
        self.driver = driver
        self.wait(lambda: not self["status"].startswith("Loading"))

    def __getitem__(self, name: str) -> str:
        return self.find(name).text

    def find(self, name: str):
        return self.driver.find_element("id", name)

    def wait(self, condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self["status"]
            time.sleep(0.02)

    def fill_in(self, name: str, value: str) -> None:
        self.find(name).clear()
        self.find(name).send_keys(value)

    def generate(self, button: str, tokens: int) -> None:
        """Clicks a button that generates this many tokens greedily, and waits for them."""
        self.fill_in("count", str(tokens))
        self.fill_in("temperature", "0")
        self.find(button).click()
        self.wait(lambda: self["status"] != "Generating …" and self.find("write").is_enabled())

    def ids(self) -> list[int]:
        return self.driver.execute_script("return [...document.querySelectorAll('#text span')].map(x => +x.dataset.id)")

    def check_layout(self, folder) -> None:
        """Saves screenshots, light, dark and of a phone; fails if the page is too wide or a control has no label."""
        colors = {}
        for name, scheme, width in (("light", "light", 1000), ("dark", "dark", 1000), ("phone", "light", 360)):
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            feature = {"name": "prefers-color-scheme", "value": scheme}
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            assert self.driver.save_screenshot(str(folder / f"{name}.png"))
            assert self.driver.execute_script("return document.documentElement.scrollWidth") <= width
            colors[name] = self.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colors["light"] == colors["phone"] != colors["dark"]
        unlabeled = "return [...document.querySelectorAll('input, textarea, select')].filter(x => !x.labels.length).length"
        assert self.driver.execute_script(unlabeled) == 0
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def open_page(driver, folder):
    """Serves a Space and opens its page; fails if the browser logs an error."""
    with serve(folder) as address:
        driver.get(f"{address}/")
        yield Page(driver)
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def driver():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, service = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and service):
        pytest.skip("Chromium and its driver are not installed (`make browser` installs them)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Skips the tests if npm's cache lacks the JavaScript libraries."""
    try:
        packages.unpack((packages.RUNTIME, packages.TOKENIZERS), tmp_path_factory.mktemp("vendor"))
    except OSError as error:
        pytest.skip(f"{error} (`make browser` fetches them)")


def save_language_model(folder, **fields):
    """Saves a language model without an end-of-text token; returns it."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "bos_token_id": 0, "eos_token_id": None}
    model = randomize(tost_hf.ToSTForCausalLM(small_config(**(sizes | fields)))).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def parse_percents(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"([\d.]+)\s%", text)]


def generate_greedily(model, prompt: list[int], count: int) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()


def check_second_token(page, model, ids, letter):
    """Selects it with arrow keys: its memberships in the last layer are the model's."""
    page.find("text").send_keys(ARROW_RIGHT, ARROW_RIGHT)
    with torch.no_grad():
        expected = model.model(torch.tensor([ids]), output_memberships=True).memberships[-1][0, :, 1]
    assert page["token"].startswith(f"Token 2, “{letter}”: strongest head {int(expected.argmax())} of layer 1")
    assert parse_percents(page["memberships"]) == pytest.approx((100 * expected).tolist(), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first_layer, count, state_at_length",
    [
        (TSSA, 490, lambda length: "1.06 KB, constant"),
        (FULL_ATTENTION, 20, lambda length: f"{(528 + 512 * length) / 1000:.1f} KB, growing"),
    ],
    ids=["linear", "hybrid"],
)
def test_text_generation(tmp_path, driver, libraries, first_layer, count, state_at_length):
    """Greedy tokens equal the model's; the state grows only by keys and values of attention layers."""
    layer_types = [first_layer, TSSA]
    model = save_language_model(tmp_path / "model", position_embedding_type="none", layer_types=layer_types)
    with open_page(driver, write_space(tmp_path / "model", tmp_path / "page", title="A page")) as page:
        assert driver.title == page["title"] == "A page"
        assert page.find("prompt").get_attribute("value") == "Once upon a time"
        page.fill_in("prompt", PROMPT)
        for button, tokens in (("write", 10), ("more", count)):
            page.generate(button, tokens)
            ids = page.ids()
            assert page["state"] == state_at_length(len(ids))
            assert ("528 bytes in the TSSA layers are constant" in page["growth"]) == (first_layer == FULL_ATTENTION)
            assert page["tokens"] == str(len(ids)) and float(page["speed"]) > 0
        num_new = 10 + count
        assert len(ids) == len(PROMPT.encode()) + num_new and ids == generate_greedily(model, ids[:-num_new], num_new)
        assert page["text"].startswith(PROMPT)
        check_second_token(page, model, ids, "r")
        page.check_layout(tmp_path)


@pytest.mark.slow
def test_keyboard_and_last_position(tmp_path, driver, libraries):
    """Ctrl+Enter generates, generation stops at the last position, and a longer prompt is rejected."""
    model = save_language_model(tmp_path / "model", max_position_embeddings=24, conv_kernel=3)
    with open_page(driver, write_space(tmp_path / "model", tmp_path / "page")) as page:
        page.fill_in("count", "100")
        page.fill_in("temperature", "0")
        page.fill_in("prompt", "two")
        page.find("prompt").send_keys(CONTROL, ENTER)
        page.wait(lambda: page["status"].endswith("That is the model's last position (24)."))
        ids = page.ids()
        assert len(ids) == 24 and ids[:23] == generate_greedily(model, ids[:3], 20)
        check_second_token(page, model, ids, "w")
        page.fill_in("prompt", "a text that is longer than all the positions")
        page.find("write").click()
        page.wait(lambda: page["status"].endswith("Shorten it."))


@pytest.mark.slow
@pytest.mark.parametrize(
    "crop, patch_size, map_size, shapes", [("center", 4, 128, [(16, 16), (50, 37)]), ("squash", 2, 16, [(21, 64)])]
)
def test_image_classification(tmp_path, driver, libraries, crop, patch_size, map_size, shapes):
    """Images of any shape: classes and memberships equal those of the model; maps of few patches are of larger images."""
    labels = {i: f"kind <{i}>" for i in range(6)}
    config = small_vision_config(num_labels=6, id2label=labels, patch_size=patch_size)
    model = randomize(tost_hf.ToSTForImageClassification(config)).eval()
    processor = make_image_processor(model.config, crop=crop)
    for saved in (model, processor):
        saved.save_pretrained(tmp_path / "model")
    with open_page(driver, write_space(tmp_path / "model", tmp_path / "page")) as page:
        for i, shape in enumerate(shapes):
            picture = Image.fromarray(torch.randint(256, (*shape, 3), dtype=torch.uint8).numpy())
            picture.save(tmp_path / f"{i}.png")
            with torch.no_grad():
                expected = model(**processor(picture, return_tensors="pt"))
                inputs = make_image_processor(map_size, crop=crop)(picture, return_tensors="pt")
                memberships = model(**inputs, output_memberships=True).memberships[0][0]
            probabilities, classes = expected.logits[0].softmax(-1).sort(descending=True)
            page.find("file").send_keys(str(tmp_path / f"{i}.png"))
            page.wait(lambda status=f"{i}.png: {labels[int(classes[0])]}": page["status"] == status)
            items = [item.text.split("\n") for item in page.find("classes").find_elements("tag name", "li")]
            assert [item[0] for item in items] == [labels[int(i)] for i in classes[:5]]
            percents = parse_percents("\n".join(item[1] for item in items))
            assert percents == pytest.approx((100 * probabilities[:5]).tolist(), abs=0.2)
            _, *captions = page.driver.find_elements("tag name", "figcaption")  # the first is of the image
            for head, (caption, membership) in enumerate(zip(captions, memberships, strict=True)):
                extremes = [100 * float(membership.min()), 100 * float(membership.max())]
                assert caption.text.startswith(f"Head {head}: ")
                assert parse_percents(caption.text) == pytest.approx(extremes, abs=0.5)
            assert ("of the image at 128 " in page["membership"]) == (map_size == 128)
        page.find("samples").find_element("css selector", "[alt=rocket]").click()
        page.wait(lambda: page["status"].startswith("rocket.jpg: kind"))
        page.check_layout(tmp_path)
