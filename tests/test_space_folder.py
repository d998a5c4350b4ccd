"""The folder that `tost-hf space` writes: its libraries, rejected models, and publishing it as a Space."""

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
    """Writes a tarball with small placeholders for the package's files; returns the package with its hash."""
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
    """A folder of small tarballs that replace the libraries."""
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
    """A page of a small classifier that is not exported, which test_space.py covers."""
    folder = tmp_path_factory.mktemp("page")
    vision_folder(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "export_model", export_placeholder)
        return writing.write_space(folder / "model", folder / "page", npm=npm, title="Kinds: 10 <of them>")


@pytest.fixture
def registry(npm, tmp_path, monkeypatch):
    """The folder of a local npm registry, with each package's description and tarball."""
    root = tmp_path / "registry"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=root))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for package in (writing.RUNTIME, writing.TOKENIZERS):
        (root / package.tarball).parent.mkdir(exist_ok=True)
        shutil.copyfile(npm / package.tarball, root / package.tarball)
        description = {"name": package.name, "version": package.version, "dist": {"tarball": f"{address}/{package.tarball}"}}
        (root / package.name).parent.mkdir(exist_ok=True)
        (root / package.name).write_text(json.dumps({"name": package.name, "versions": {package.version: description}}))
    (tmp_path / "npmrc").write_text(f"registry={address}/\ncache={tmp_path / 'cache'}\n")
    for name in [name for name in os.environ if name.lower().startswith("npm_config_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield root
    server.shutdown()
    server.server_close()


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


def save_encoder(folder):
    randomize(tost_hf.ToSTForMaskedLM(small_config(is_causal=False))).save_pretrained(folder)


def save_without_tokenizer(folder):
    randomize(tost_hf.ToSTForCausalLM(small_config())).save_pretrained(folder)


def save_one_channel_classifier(folder):
    config = small_vision_config(num_channels=1)
    randomize(tost_hf.ToSTForImageClassification(config)).save_pretrained(folder)


def save_with_unsupported_resampling(folder):
    vision_folder(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resample": 0}))


@pytest.mark.parametrize(
    "save_model, options, words",
    [
        (save_encoder, (), "is a ToSTForMaskedLM; the page runs ToSTForCausalLM and ToSTForImageClassification"),
        (save_without_tokenizer, (), "has no tokenizer, which the page needs"),
        (save_one_channel_classifier, (), "RGB"),
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


def test_publishing_a_space(hub, page, tmp_path):
    """In one commit, with the metadata that the Hub requires; unchanged files are not uploaded again."""
    token = hub.token
    assert "\n# Kinds: 10 <of them>\n" in (page / "README.md").read_text()
    with Clients(hub, tmp_path) as clients:
        assert "a Space" in clients.command("publish", "--space", page, "tost/page", token=token).check().output
        assert hub.files("spaces/tost/page") == contents(page)
        repository = json.loads(hub.find_requests("POST", "/api/repos/create")[-1].body)
        assert (repository["type"], repository["sdk"]) == ("space", "static")
        result = clients.command("publish", "--space", page, "tost/page", "--tag", "v1", token=token).check()
        assert "has all of it already" in result.output
        with hub.fail("POST", "/commit/", status=500):
            assert clients.command("publish", "--space", page, "tost/broken", token=token).status == 1
        assert hub.files("spaces/tost/broken") == {}
