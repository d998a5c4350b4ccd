"""The page that `tost-hf space` writes, run in Chromium from a local server and compared with the model."""

import functools
import re
import shutil
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import randomize, small_config, small_vision_config
from hub_clients import save_tokenizer

import tost_hf
from tost_hf.image_processing import make_image_processor
from tost_hf.model.configuration_tost import CAUSAL_STATISTICS, FULL_ATTENTION
from tost_hf.space import write_space
from tost_hf.space.packages import RUNTIME, TOKENIZERS, unpack


Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
Keys = webdriver.Keys
for module in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(module, reason=f"{module} is not installed")

pytestmark = pytest.mark.slow  # each test exports a model and runs a browser

PROMPT = "Grüße, 2 ✓ tokens"


class PageRequestHandler(SimpleHTTPRequestHandler):
    """Serves a folder with the content types that browsers need."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *args) -> None:
        pass


class Page:
    """A Space's page, served on loopback and opened in a browser."""

    def __init__(self, driver, folder):
        self.driver, self.folder = driver, folder
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(PageRequestHandler, directory=folder))
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> "Page":
        self.driver.get(f"http://127.0.0.1:{self.server.server_port}/")
        self.wait(lambda: not self["status"].startswith("Loading"))
        return self

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()

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
        colours = {}
        for name, scheme, width in (("light", "light", 1000), ("dark", "dark", 1000), ("phone", "light", 360)):
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            feature = {"name": "prefers-color-scheme", "value": scheme}
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            assert self.driver.save_screenshot(str(folder / f"{name}.png"))
            assert self.driver.execute_script("return document.documentElement.scrollWidth") <= width
            colours[name] = self.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colours["light"] == colours["phone"] != colours["dark"]
        unlabelled = "return [...document.querySelectorAll('input, textarea, select')].filter(x => !x.labels.length).length"
        assert self.driver.execute_script(unlabelled) == 0
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def errors(self) -> list:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def driver():
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
        unpack((RUNTIME, TOKENIZERS), tmp_path_factory.mktemp("vendor"))
    except OSError as error:
        pytest.skip(f"{error} (`make browser` fetches them)")


def language_folder(folder, **fields):
    """Saves a language model without an end-of-text token; returns it."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "bos_token_id": 0, "eos_token_id": None}
    model = randomize(tost_hf.ToSTForCausalLM(small_config(**(sizes | fields)))).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder and its model."""
    folder = tmp_path_factory.mktemp("classifier")
    config = small_vision_config(num_labels=6, id2label={i: f"kind <{i}>" for i in range(6)})
    model = randomize(tost_hf.ToSTForImageClassification(config)).eval()
    model.save_pretrained(folder)
    return folder, model


def parse_percents(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"([\d.]+)\s%", text)]


def generate_greedily(model, prompt: list[int], count: int) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()


def test_text_generation(tmp_path, driver, libraries):
    """500 greedy tokens equal the model's, and the state has as many bytes after them as after 10."""
    model = language_folder(tmp_path / "model", max_position_embeddings=None)
    prompt = list(PROMPT.encode())
    with Page(driver, write_space(tmp_path / "model", tmp_path / "page", title="A page")) as page:
        assert driver.title == page["title"] == "A page"
        page.fill_in("prompt", PROMPT)
        page.generate("write", 10)
        state_bytes, ids = page["state"], page.ids()
        page.generate("more", 490)
        assert page["state"] == state_bytes == "1,056 bytes"
        assert page["tokens"] == str(len(page.ids())) and float(page["speed"]) > 0
        assert page.ids()[: len(ids)] == ids and page.ids() == generate_greedily(model, ids[: len(ids) - 10], 500)
        assert page["text"].startswith(PROMPT) and len(ids) == len(prompt) + 10
        page.check_layout(tmp_path)
        assert not page.errors()


def test_text_generation_of_a_hybrid(tmp_path, driver, libraries):
    """Greedy tokens equal the model's, and the state grows by the keys and values of each token."""
    layers = [FULL_ATTENTION, CAUSAL_STATISTICS]
    model = language_folder(tmp_path / "model", max_position_embeddings=None, layer_types=layers)
    with Page(driver, write_space(tmp_path / "model", tmp_path / "page")) as page:
        page.fill_in("prompt", PROMPT)
        for button, count in (("write", 10), ("more", 20)):
            page.generate(button, count)
            assert page["state"] == f"{528 + 512 * len(page.ids()):,} bytes"
        ids = page.ids()
        assert len(ids) == len(PROMPT.encode()) + 30 and ids == generate_greedily(model, ids[:-30], 30)
        page.find("text").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        with torch.no_grad():
            expected = model.model(torch.tensor([ids]), output_memberships=True).memberships[0][0, :, 1]
        assert page["token"].startswith(f"Token 2, “r”: strongest head {int(expected.argmax()) + 1} of layer 2")
        assert parse_percents(page["memberships"]) == pytest.approx((100 * expected).tolist(), abs=0.1)
        assert not page.errors()


def test_keyboard_and_last_position(tmp_path, driver, libraries):
    """Ctrl+Enter generates, arrow keys select a token and show its memberships, generation stops at the last position."""
    model = language_folder(tmp_path / "model", max_position_embeddings=24, conv_kernel=3)
    with Page(driver, write_space(tmp_path / "model", tmp_path / "page")) as page:
        page.fill_in("count", "100")
        page.fill_in("temperature", "0")
        page.fill_in("prompt", "two")
        page.find("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        page.wait(lambda: page["status"].endswith("That is the model's last position (24)."))
        ids = page.ids()
        assert len(ids) == 24 and ids[:23] == generate_greedily(model, ids[:3], 20)
        page.find("text").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        with torch.no_grad():
            expected = model.model(torch.tensor([ids]), output_memberships=True).memberships[-1][0, :, 1]
        assert page["token"].startswith(f"Token 2, “w”: strongest head {int(expected.argmax()) + 1} of layer 2")
        assert parse_percents(page["memberships"]) == pytest.approx((100 * expected).tolist(), abs=0.1)
        page.fill_in("prompt", "a text that is longer than all the positions")
        page.find("write").click()
        page.wait(lambda: page["status"].endswith("Shorten it."))
        assert not page.errors()


@pytest.mark.parametrize(
    "crop, shapes",
    [("center", [(16, 16), (50, 37)]), pytest.param("squash", [(21, 64)], marks=pytest.mark.slow)],
)
def test_image_classification(tmp_path, driver, libraries, crop, shapes, classifier):
    """Images of any shape: classes and memberships equal those of the model."""
    folder, model = classifier
    labels = model.config.id2label
    processor = make_image_processor(model.config, crop=crop)
    processor.save_pretrained(folder)
    with Page(driver, write_space(folder, tmp_path / "page")) as page:
        for i, shape in enumerate(shapes):
            picture = Image.fromarray(torch.randint(256, (*shape, 3), dtype=torch.uint8).numpy())
            picture.save(tmp_path / f"{i}.png")
            with torch.no_grad():
                expected = model(**processor(picture, return_tensors="pt"), output_memberships=True)
            probabilities, classes = expected.logits[0].softmax(-1).sort(descending=True)
            page.find("file").send_keys(str(tmp_path / f"{i}.png"))
            page.wait(lambda status=f"{i}.png: {labels[int(classes[0])]}": page["status"] == status)
            items = [item.text.split("\n") for item in page.find("classes").find_elements("tag name", "li")]
            assert [item[0] for item in items] == [labels[int(i)] for i in classes[:5]]
            assert parse_percents("\n".join(item[1] for item in items)) == pytest.approx(
                (100 * probabilities[:5]).tolist(), abs=0.2
            )
            captions = page.driver.find_elements("tag name", "figcaption")
            for caption, head in zip(captions, expected.memberships[-1][0], strict=True):
                assert parse_percents(caption.text) == pytest.approx(
                    [100 * float(head.min()), 100 * float(head.max())], abs=0.5
                )
        page.check_layout(tmp_path)
        assert not page.errors()
