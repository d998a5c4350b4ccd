"""The page of `tost-hf app`, asked by Gradio's client and in Chromium, and the Space that `tost-hf space` writes."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from byte_models import byte_tokenizer, make_model
from conftest import randomize, small_config, small_vision_config
from hub_clients import contents, image_folder, image_pipeline, language_folder, save_picture, vision_folder
from transformers import pipeline

import tost_hf
from tost_hf import interpret
from tost_hf.app import launch_app
from tost_hf.cli import main
from tost_hf.image_processing import make_image_processor, open_image
from tost_hf.interpret import plots
from tost_hf.model.configuration_tost import FULL_ATTENTION, SLIDING_ATTENTION, TSSA


gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed (the extra `app`)")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (the extra `app`)")
AppError, Client, handle_file = gradio_client.exceptions.AppError, gradio_client.Client, gradio_client.handle_file

TEXT = "Grüße, 2 ✓ <b>\n tokens"


@contextmanager
def open_app(folder):
    """Opens the page of a model; yields it."""
    page = launch_app(folder, prevent_thread_lock=True, quiet=True)
    try:
        yield page
    finally:
        page.close()


def connect(page) -> Client:
    return Client(page.local_url, verbose=False)


def save_text_model(folder, **changes):
    """Saves a byte-level language model without a limit of positions; returns it and its tokenizer."""
    model, tokenizer = make_model(**({"position_embedding_type": "none", "decay_type": "token"} | changes)), byte_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return model, tokenizer


# Images -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processor_file, mode, changes",
    [
        ("preprocessor_config.json", "RGB", {}),
        ("processor_config.json", "L", {}),
        (None, "RGB", {}),
        (None, "RGB", {"num_channels": 1}),
        ("preprocessor_config.json", "RGB", {"problem_type": "multi_label_classification"}),
        ("preprocessor_config.json", "RGB", {"problem_type": "regression", "id2label": {0: "LABEL_0"}}),
        ("preprocessor_config.json", "RGB", {"id2label": {0: "one"}}),
        ("preprocessor_config.json", "RGB", {"attention_type": "xca"}),
    ],
)
def test_scores_are_those_of_the_pipeline(tmp_path, processor_file, mode, changes):
    model, processor = image_folder(tmp_path / "model", processor_file, **changes)
    picture = save_picture(tmp_path / "picture.png", mode)
    expected = image_pipeline(model, processor)(picture)
    with open_app(tmp_path / "model") as page:
        result = connect(page).predict(handle_file(picture), api_name="/classify")
        if changes.get("problem_type") == "regression":
            assert result["label"] == f"LABEL_0: {expected[0]['score']:.4g}"
            return
        scores = {entry["label"]: entry["confidence"] for entry in result["confidences"]}
        assert scores == pytest.approx({entry["label"]: entry["score"] for entry in expected}, rel=1e-4)
        assert any(fn.api_name == "look" for fn in page.fns.values()) == ("attention_type" not in changes)


def test_maps_of_an_image(tmp_path, monkeypatch):
    """Of the chosen layer and size, on one scale; errors are messages."""
    drawn, plot = {}, plots.plot_membership_maps

    def record(maps, picture, layers, **options):
        drawn[maps.shape, *layers] = maps[0], options.get("limit")
        return plot(maps, picture, layers, **options)

    monkeypatch.setattr(plots, "plot_membership_maps", record)
    folder = vision_folder(tmp_path / "model")
    path = save_picture(tmp_path / "picture.png")
    picture = handle_file(path)
    Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    with open_app(folder) as page:
        client = connect(page)
        notes, figures = {}, {}
        for layer, enlarge in ((0, False), (1, False), (1, True)):
            notes[layer, enlarge], *figures[layer, enlarge] = client.predict(picture, layer, enlarge, api_name="/look")
        assert notes[0, False] == "Layer 0, of 16 x 16 pixels in 8 x 8 patches"
        assert notes[1, True] == "Layer 1, of 86 x 64 pixels in 43 x 32 patches"
        pictures = [json.dumps(figure) for figure in figures.values()]
        assert len(set(pictures)) == 3 and all(len(figure) == 4 for figure in figures.values())
        model = tost_hf.ToSTForImageClassification.from_pretrained(folder).eval()
        pixel_values = make_image_processor(model.config)(open_image(path), return_tensors="pt").pixel_values
        maps = interpret.membership_maps(interpret.trace_model(model, pixel_values=pixel_values))[0]
        for layer in (0, 1):
            shown, limit = drawn[(1, *maps.shape[1:]), layer]
            assert torch.allclose(shown, maps[layer]) and limit == pytest.approx(max(2 / len(shown), float(maps.max())))
        with pytest.raises(AppError, match="more than 8 bits per channel"):
            client.predict(handle_file(str(tmp_path / "deep.png")), api_name="/classify")
        (tmp_path / "text.png").write_text("no image")
        with pytest.raises(AppError, match="cannot identify image file"):
            client.predict(handle_file(str(tmp_path / "text.png")), api_name="/classify")


def test_a_backbone_shows_its_maps(tmp_path):
    randomize(tost_hf.ToSTBackbone(small_vision_config())).save_pretrained(tmp_path / "model")
    picture = handle_file(save_picture(tmp_path / "picture.png"))
    with open_app(tmp_path / "model") as page:
        note, *figures = connect(page).predict(picture, 1, False, api_name="/look")
    assert note.startswith("Layer 1") and len(figures) == 3


# Texts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_types", [[TSSA, TSSA], [FULL_ATTENTION, TSSA], [SLIDING_ATTENTION, TSSA]])
def test_text_is_that_of_the_pipeline(tmp_path, monkeypatch, layer_types):
    """Also where generation_config.json has several end tokens; the state stays as large as it is."""
    model, tokenizer = save_text_model(tmp_path, layer_types=layer_types, sliding_window=3)
    write = pipeline("text-generation", model, tokenizer=tokenizer)
    longest = write(TEXT, max_new_tokens=40, do_sample=False, min_new_tokens=40)[0]["generated_text"]
    last = model.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = [0, last]
    model.generation_config.save_pretrained(tmp_path)
    write = pipeline("text-generation", model, tokenizer=tokenizer)  # with those
    expected = write(TEXT, max_new_tokens=40, do_sample=False)[0]["generated_text"]
    assert expected != longest
    monkeypatch.setattr(tost_hf.app, "UPDATE_SECONDS", 0)
    with open_app(tmp_path) as page:
        job = connect(page).submit(TEXT, 0, 40, api_name="/write")
        assert job.result()[0] == expected
        assert all(expected.startswith(partial.rstrip("\ufffd")) for partial, _ in job.outputs()) and len(job.outputs()) > 2
        monkeypatch.setattr(tost_hf.app, "UPDATE_SECONDS", 1000)
        rarely = connect(page).submit(TEXT, 0, 40, api_name="/write")
        assert rarely.result()[0] == expected and len(rarely.outputs()) == 2  # the first token and all of them
        states = {re.search(r"State of the TSSA layers: ([\d,]+) bytes", line)[1] for _, line in job.outputs()}
        assert len(states) == 1
        growing = {match[1] for _, line in job.outputs() if (match := re.search(r"softmax attention: ([\d,]+)", line))}
        assert (len(growing) > 1) == (FULL_ATTENTION in layer_types)
        assert all(("of 2 tokens at most" in line) == (SLIDING_ATTENTION in layer_types) for _, line in job.outputs())
        empty = connect(page).predict("", 0, 5, api_name="/write")[0]  # from the bos token on, as in the pipeline
        assert empty == write("", max_new_tokens=5, do_sample=False)[0]["generated_text"]


def test_colors_of_a_text(tmp_path):
    """A span for each token, with its strongest head; together they are the text, characters of several tokens too."""
    model, tokenizer = save_text_model(tmp_path)
    trace = interpret.trace_model(model, **tokenizer(TEXT, return_tensors="pt"))
    with open_app(tmp_path) as page:
        for layer in (0, 1):
            colored, *figures = connect(page).predict(TEXT, layer, api_name="/look")
            spans = re.findall(r'<span style="([^"]*)" title="head (\d): ([\d.]+)">(.*?)</span>', colored, re.DOTALL)
            assert "".join(html.unescape(piece) for *_, piece in spans) == TEXT
            assert not any("<" in piece for *_, piece in spans)
            memberships = trace.memberships[0, layer]
            assert [int(head) for _, head, *_ in spans] == memberships.argmax(0).tolist()
            assert [float(value) for _, _, value, _ in spans] == pytest.approx(memberships.amax(0).tolist(), abs=0.006)
            assert len(figures) == 2  # compression and decay


def test_positions_and_stopping(tmp_path, monkeypatch):
    """A text ends at the last position table, longer prompts are rejected, and a stopped one makes way for the next."""
    save_text_model(
        tmp_path / "short", position_embedding_type="learned", decay_type="none", eos_token_id=None, bos_token_id=None
    )
    with open_app(tmp_path / "short") as page:
        client = connect(page)
        assert "31 tokens read" in client.predict("a" * 20, 0, 99, api_name="/write")[1]
        with pytest.raises(AppError, match="`bos_token_id` has to be defined"):
            client.predict("", 0, 9, api_name="/write")
        with pytest.raises(AppError, match=r"has 32 tokens; the model has positions for 32\. Shorten it"):
            client.predict("a" * 32, 0, 99, api_name="/write")
    save_text_model(tmp_path / "long", eos_token_id=None)
    caches = []
    monkeypatch.setattr(tost_hf.app, "ToSTCache", lambda config: caches.append(tost_hf.ToSTCache(config)) or caches[-1])
    with open_app(tmp_path / "long") as page:
        client = connect(page)
        job = client.submit("a", 1, 1000, api_name="/write")
        while len(job.outputs()) < 5:
            time.sleep(0.01)
        job.cancel()
        assert client.predict("a", 0, 3, api_name="/write")[1].startswith("3 tokens read")
    assert [cache.get_seq_length() for cache in caches][1:] == [3] and caches[0].get_seq_length() < 900


@pytest.mark.slow
def test_several_users(tmp_path):
    """At once they get what each gets alone, although the model's hooks record one computation at a time."""
    save_text_model(tmp_path)
    prompts = [f"{i} times" for i in range(6)]

    def ask(prompt: str) -> tuple:
        client = connect(page)
        text, _ = client.predict(prompt, 0, 30, api_name="/write")
        return text, client.predict(text, 1, api_name="/look")[0]

    with open_app(tmp_path) as page:
        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(ask, prompts)) == alone


@pytest.mark.parametrize(
    "class_name, endpoints",
    [("ToSTForSequenceClassification", {"classify", "look"}), ("ToSTForMaskedLM", {"look"}), ("ToSTModel", {"look"})],
)
def test_classifiers_and_encoders(tmp_path, class_name, endpoints):
    config = small_config(vocab_size=257, is_causal=False, num_labels=3)
    config.problem_type = "multi_label_classification"
    model = randomize(getattr(tost_hf, class_name)(config)).eval()
    for part in (model, byte_tokenizer()):
        part.save_pretrained(tmp_path)
    with open_app(tmp_path) as page:
        assert {fn.api_name for fn in page.fns.values() if fn.api_visibility == "public"} == endpoints
        if "classify" in endpoints:
            result = connect(page).predict(TEXT, api_name="/classify")["confidences"]
            expected = pipeline("text-classification", model, tokenizer=byte_tokenizer())(TEXT, top_k=3)
            assert [entry["confidence"] for entry in result] == pytest.approx([x["score"] for x in expected], rel=1e-4)
        assert "head" in connect(page).predict(TEXT, 1, api_name="/look")[0]


# Spaces -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "save_model, words",
    [
        (lambda folder: tost_hf.ToSTForCausalLM(small_config()).save_pretrained(folder), "has no tokenizer"),
        (lambda folder: None, "There is no model folder"),
    ],
)
def test_rejected_models(tmp_path, capsys, save_model, words):
    """By both commands, with one line, and no files are written."""
    save_model(tmp_path / "model")
    paths = sorted(tmp_path.iterdir())
    for command in (["app"], ["space", str(tmp_path / "space")]):
        capsys.readouterr()
        assert main([command[0], str(tmp_path / "model"), *command[1:]]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert words in error and error.startswith("tost-hf: error: ")
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.slow
def test_a_space_runs_without_the_package(tmp_path):
    """With the packages of requirements.txt; the title and the first prompt are shown."""
    folder = language_folder(tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: mit\nwidget:\n- text: import os\n- text: second\n---\n")
    assert main(["space", str(folder), str(tmp_path / "space"), "--title", "A <page>: 1"]) == 0
    names = {line.split(">")[0].split("<")[0] for line in (tmp_path / "space/requirements.txt").read_text().splitlines()}
    assert names >= {"torch", "transformers", "gradio", "matplotlib", "pillow", "numba"} and "tost-hf" not in names
    command = [sys.executable, "-u", "-s", "app.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, cwd=tmp_path / "space", stdout=subprocess.PIPE, text=True, env=environment) as app:
        try:
            address = next(filter(None, (re.search(r"http://127[\d.:]+", line) for line in app.stdout)))[0]
            client = Client(address, verbose=False)
            shown = [component["props"].get("value") for component in client.config["components"]]
            assert client.config["title"] == "A <page>: 1" and "import os" in shown
            assert client.predict("import os", 0, 3, api_name="/write")[0].startswith("import os")
        finally:
            app.terminate()


def test_publishing_a_space(hub, clients, tmp_path):
    """All of it, with the metadata that the Hub requires; a failed upload leaves nothing."""
    vision_folder(tmp_path / "model")
    assert main(["space", str(tmp_path / "model"), str(tmp_path / "space"), "--title", "Kinds: 10 <of them>"]) == 0
    assert "\n# Kinds: 10 <of them>\n" in (tmp_path / "space/README.md").read_text()
    clients.publish("--space", tmp_path / "space", "tost/page")
    assert hub.files("spaces/tost/page") == contents(tmp_path / "space")
    repository = json.loads([request for request in hub.requests if request.path == "/api/repos/create"][-1].body)
    assert (repository["type"], repository["sdk"]) == ("space", "gradio")
    assert f"/commit/{hub.head('spaces/tost/page')}" in clients.publish("--space", tmp_path / "space", "tost/page").output
    with hub.fail("POST", "/commit/", status=500):
        assert clients.command("publish", "--space", tmp_path / "space", "tost/broken", token=hub.token).status == 1
    assert "spaces/tost/broken" not in hub.repositories


def test_space_of_a_repository(hub, clients, tmp_path):
    """It loads the repository; the name and the license are the card's."""
    clients.publish(language_folder(tmp_path / "model"), "tost/words", "--tag", "v1")
    command = ["space", "tost/words", tmp_path / "space", "--revision", "v1"]
    clients.command(*command, token=hub.token).check()
    assert "launch_app('tost/words', title='tost/words', revision='v1')" in (tmp_path / "space/app.py").read_text()
    metadata = (tmp_path / "space/README.md").read_text().split("---")[1]
    assert "license: apache-2.0" in metadata and "- tost/words" in metadata and not (tmp_path / "space/model").exists()


def test_what_is_not_published_as_a_space(tmp_path, capsys):
    def publish(*options) -> str:
        assert main(["publish", "--space", str(tmp_path / "space"), "me/space", "--dry-run", *options]) == 1
        return capsys.readouterr().err

    (tmp_path / "space/tost_hf").mkdir(parents=True)
    assert "is not a page that `tost-hf space` wrote" in publish()
    for name in ("app.py", "requirements.txt", "README.md", "tost_hf/app.py"):
        (tmp_path / "space" / name).write_text("")
    assert "--tag" in publish("--tag", "v1")
    (tmp_path / "space/.env").write_text("hf_" + 34 * "x")
    assert "token of the Hub" in publish()
    (tmp_path / "space/.env").unlink()
    (tmp_path / "space/data").symlink_to(tmp_path)
    assert "data is a link" in publish()


# In a browser -----------------------------------------------------------------------------------------------------------


@pytest.fixture
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


class Browser:
    """A page in Chromium."""

    def __init__(self, driver, page):
        self.driver, self.address = driver, page.local_url
        driver.get(self.address)
        self.wait(lambda: "Token Statistics Transformer" in self.text)

    @property
    def text(self) -> str:
        return self.driver.find_element("tag name", "body").text

    def find(self, xpath: str, number: int = 1) -> list:
        """At least so many elements, once Gradio has drawn them: it loads the code of each kind of component by itself."""
        self.wait(lambda: len(self.driver.find_elements("xpath", xpath)) >= number)
        return self.driver.find_elements("xpath", xpath)

    def wait(self, condition) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60, ignored_exceptions=[Exception]).until(lambda _: condition())

    def figures(self) -> list[str]:
        return [image.get_attribute("src") for image in self.find("//*[contains(@class, 'matplotlib')]//img", 0)]

    def check(self) -> None:
        """Nothing is wider than a phone, light and dark differ, no other host is asked, and no error is logged."""
        for _ in range(2):  # one event may start another; a page left while it waits for one logs an error
            self.wait(lambda: not self.driver.find_elements("css selector", "[data-testid=status-tracker]:not(.hide)"))
            time.sleep(0.5)
        colors = set()
        for scheme in ("light", "dark"):
            self.check_requests()
            feature = {"name": "prefers-color-scheme", "value": scheme}
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            self.driver.refresh()
            for width in (1280, 400):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
                self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                self.wait(lambda: "Token Statistics Transformer" in self.text)
                assert self.driver.execute_script("return document.documentElement.scrollWidth") <= width
            style = "return getComputedStyle(document.body).backgroundColor"
            colors.add(self.driver.execute_script(style))
        assert len(colors) == 2
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.check_requests()
        assert not [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def check_requests(self) -> None:
        requests = self.driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert requests and all(name.startswith((self.address, "data:", "blob:")) for name in requests)


@pytest.mark.slow
def test_images_in_a_browser(tmp_path, driver):
    """A picture in, its class out; another layer changes the maps, not the class attention; an error is a message."""
    folder = vision_folder(tmp_path / "model")
    picture = save_picture(tmp_path / "picture.png")
    [best] = pipeline("image-classification", str(folder))(picture, top_k=1)
    with open_app(folder) as page:
        browser = Browser(driver, page)
        browser.find("//input[@type='file']")[0].send_keys(picture)
        browser.wait(lambda: f"{best['label']}\n{best['score']:.0%}" in browser.text and len(browser.figures()) == 4)
        before = browser.figures()
        browser.find("//label[normalize-space()='0']")[0].click()
        browser.wait(lambda: "Layer 0, of 16 x 16" in browser.text and browser.figures()[0] != before[0])
        assert browser.figures()[3] == before[3]
        browser.check()
        Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
        browser.find("//input[@type='file']")[0].send_keys(str(tmp_path / "deep.png"))
        browser.wait(lambda: "more than 8 bits per channel" in browser.text)


@pytest.mark.slow
def test_texts_in_a_browser(tmp_path, driver):
    """Text is streamed, stopped and continued, and another layer chosen."""
    save_text_model(tmp_path, eos_token_id=None, num_hidden_layers=64)  # slow enough to be stopped
    with open_app(tmp_path) as page:
        browser = Browser(driver, page)
        prompt, shown = browser.find("//textarea", 2)[:2]
        browser.find("//button[normalize-space()='Write']")[0].click()
        browser.wait(lambda: "115 tokens read" in browser.text and browser.figures())
        assert shown.get_attribute("value").startswith("Once upon a time")
        before = browser.find("//div[@class='tokens']", 2)[1].get_attribute("innerHTML")
        browser.find("//label[normalize-space()='0']")[0].click()
        browser.wait(lambda: browser.find("//div[@class='tokens']", 2)[1].get_attribute("innerHTML") != before)
        prompt.clear()
        prompt.send_keys("Stop me")
        number = browser.find("//input[@type='number']", 2)[1]
        number.clear()
        number.send_keys("1000\t")
        browser.find("//button[normalize-space()='Write']")[0].click()
        browser.wait(lambda: shown.get_attribute("value").startswith("Stop me"))
        browser.find("//button[normalize-space()='Stop']")[0].click()
        time.sleep(1)
        assert int(re.search(r"([\d,]+) tokens read", browser.text)[1].replace(",", "")) < 1000
        text = shown.get_attribute("value")
        number.clear()
        number.send_keys("5\t")
        browser.find("//button[normalize-space()='Continue']")[0].click()
        browser.wait(lambda: len(shown.get_attribute("value")) > len(text) and shown.get_attribute("value").startswith(text))
        browser.check()
