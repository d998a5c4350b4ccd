"""The folder that `tost-hf space` writes: its libraries, what it rejects, and how it becomes a Space of the Hub."""

import base64
import functools
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
from conftest import randomize, small_config, small_vision_config
from hub_clients import Clients, contents, language_folder, vision_folder

import tost_hf
from tost_hf.cli import main
from tost_hf.space import packages, writing


for module in ("onnx", "onnxscript", "onnxruntime", "PIL"):
    pytest.importorskip(module, reason=f"{module} is not installed")


def pack(package: packages.Package, folder) -> packages.Package:
    """A tarball with the package's files, each of a few bytes; the package with its hash."""
    with tarfile.open(folder / package.tarball, "w:gz") as archive:
        for member in package.files:
            content = f"// {member}\n".encode()
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    digest = hashlib.sha512((folder / package.tarball).read_bytes()).digest()
    return package._replace(integrity=f"sha512-{base64.b64encode(digest).decode()}")


@pytest.fixture(scope="module")
def npm(tmp_path_factory):
    """A folder of small tarballs in place of the libraries."""
    folder = tmp_path_factory.mktemp("npm")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNTIME", "TOKENIZERS"):
            patch.setattr(writing, name, pack(getattr(packages, name), folder))
        yield folder


def export_placeholder(source, folder, **options):
    folder.mkdir()
    for name in ("model.onnx", "export.json"):
        (folder / name).write_text("{}")


@pytest.fixture(scope="module")
def page(npm, tmp_path_factory):
    """A page of a small classifier, which is not exported: the tests in a browser do that."""
    folder = tmp_path_factory.mktemp("page")
    vision_folder(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "export_model", export_placeholder)
        return writing.write_space(folder / "model", folder / "page", npm=npm, title="Kinds: 10 <of them>")


@pytest.fixture
def registry(npm, tmp_path, monkeypatch):
    """The folder of an npm registry on loopback: each package's description and tarball."""
    served = tmp_path / "registry"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=served))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for package in (writing.RUNTIME, writing.TOKENIZERS):
        (served / package.tarball).parent.mkdir(exist_ok=True)
        shutil.copyfile(npm / package.tarball, served / package.tarball)
        description = {"name": package.name, "version": package.version, "dist": {"tarball": f"{address}/{package.tarball}"}}
        (served / package.name).parent.mkdir(exist_ok=True)
        (served / package.name).write_text(json.dumps({"name": package.name, "versions": {package.version: description}}))
    (tmp_path / "npmrc").write_text(f"registry={address}/\ncache={tmp_path / 'cache'}\n")
    for name in [name for name in os.environ if name.lower().startswith("npm_config_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield served
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_fetches_the_libraries(registry, tmp_path, monkeypatch):
    """With the user's settings, and a second time offline from its cache; missing or changed packages are errors."""
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


def encoder(folder):
    randomize(tost_hf.ToSTForMaskedLM(small_config(is_causal=False))).save_pretrained(folder)


def without_tokenizer(folder):
    randomize(tost_hf.ToSTForCausalLM(small_config())).save_pretrained(folder)


def grey_images(folder):
    config = small_vision_config(num_channels=1)
    randomize(tost_hf.ToSTForImageClassification(config)).save_pretrained(folder)


def odd_processor(folder):
    vision_folder(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resample": 0}))


@pytest.mark.parametrize(
    "make, options, words",
    [
        (encoder, (), "is a ToSTForMaskedLM; the page runs ToSTForCausalLM and ToSTForImageClassification"),
        (without_tokenizer, (), "has no tokenizer, which the page needs"),
        (grey_images, (), "RGB"),
        (odd_processor, (), "does not implement"),
        (vision_folder, ("--dtype", "int3"), "not in 'int3'"),
        (vision_folder, ("--npm", "."), "has no onnxruntime-web"),
        (language_folder, ("--tokenizer", "./nowhere"), "The tokenizer of ./nowhere cannot be loaded"),
        (lambda folder: None, (), "There is no model folder"),
    ],
)
def test_rejected_models(tmp_path, capsys, npm, make, options, words):
    """With an error message of one line, and without any files."""
    make(tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    arguments = ["space", tmp_path / "model", tmp_path / "page", "--npm", npm, *options]
    assert main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert words in error and error.startswith("tost-hf: error: ") and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_space_is_published(hub, page, tmp_path):
    """In one commit, with the metadata that the Hub requires; unchanged files are not sent again."""
    token = hub.token
    assert "\n# Kinds: 10 <of them>\n" in (page / "README.md").read_text()
    with Clients(hub, tmp_path) as clients:
        assert "a Space" in clients.command("publish", "--space", page, "tost/page", token=token).check().output
        assert hub.files("spaces/tost/page") == contents(page)
        created = json.loads(hub.requested("POST", "/api/repos/create")[-1].body)
        assert (created["type"], created["sdk"]) == ("space", "static")
        again = clients.command("publish", "--space", page, "tost/page", "--tag", "v1", token=token).check()
        assert "has all of it already" in again.output
        with hub.fail("POST", "/commit/", status=500):
            assert clients.command("publish", "--space", page, "tost/broken", token=token).status == 1
        assert hub.files("spaces/tost/broken") == {}
