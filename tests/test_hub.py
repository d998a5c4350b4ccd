"""Publishing and loading, by the real huggingface_hub client and the `tost-hf` command, against a Hub on loopback."""

import json

import pytest
import torch
from conftest import needs_auto_processor
from hub_clients import CARD, Clients, contents, language_folder, language_model, vision_folder

import tost_hf


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    with Clients(hub, tmp_path_factory.mktemp("clients")) as forks:
        yield forks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def computed(clients, folder):
    """What the model in `folder` computes."""
    return clients.load(folder)


@pytest.fixture(scope="module")
def published(hub, clients, folder):
    """tost/tiny, published from `folder` with the tag v1, then from another one."""
    clients.command("publish", folder, "tost/tiny", "--tag", "v1", token=hub.token).check()
    first = hub.head("tost/tiny")
    later = language_folder(folder.with_name("later"), seed=1)
    clients.command("publish", later, "tost/tiny", token=hub.token).check()
    return {"v1": (folder, first), "main": (later, hub.head("tost/tiny"))}


def same(left: dict, right: dict) -> bool:
    """Equal to the last bit; fails with the client's output if it could not load."""
    assert isinstance(left, dict), left.output
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_one_commit_per_publication(hub, published):
    source, head = published["v1"]
    files, expected = hub.files("tost/tiny", "v1"), contents(source)
    code = {name for name in files if name.endswith(".py")}
    assert code == set(tost_hf.model.base_tost.CODE_FILES["tost"])
    assert files.keys() - code == expected.keys()
    assert all(files[name] == expected[name] for name in expected.keys() - {"config.json"})
    config = json.loads(files["config.json"])
    assert config.pop("auto_map")["AutoModelForCausalLM"] == "modeling_tost.ToSTForCausalLM"
    assert config == json.loads(expected["config.json"])
    assert hub.commits("tost/tiny", head)[0] == head and len(hub.commits("tost/tiny", head)) == 2  # the server's first one
    assert "auto_map" not in json.loads((source / "config.json").read_text()), "publishing changed the folder"


def test_published_models_load(hub, clients, folder, published, computed):
    """The newest, under a tag, by a hash and on a branch, each with its own weights."""
    later = clients.load(published["main"][0])
    assert not same(later, computed)
    assert same(clients.load("tost/tiny"), later)
    for revision in ("v1", published["v1"][1]):
        assert same(clients.load("tost/tiny", revision=revision), computed)
    head = hub.head("tost/tiny")
    clients.command("publish", folder, "tost/tiny", "--revision", "dev", token=hub.token).check()
    assert hub.head("tost/tiny") == head != hub.head("tost/tiny", "dev")
    assert same(clients.load("tost/tiny", revision="dev"), computed)
    missing = clients.load("tost/tiny", revision="v2")
    assert missing.status == 1 and "v2" in missing.output and "OSError" in missing.output


def test_sharded_weights(hub, clients, folder, computed, tmp_path):
    shards = language_folder(tmp_path / "shards", max_shard_size="40KB")
    clients.command("publish", shards, "tost/shards", token=hub.token).check()
    names = [name for name in hub.files("tost/shards") if name.endswith(".safetensors")]
    assert len(names) >= 3 and "model.safetensors.index.json" in hub.files("tost/shards")
    assert same(clients.load("tost/shards"), computed)

    # whole weights take the shards' place within one commit
    head = hub.head("tost/shards")
    clients.command("publish", folder, "tost/shards", "--without-code", token=hub.token).check()
    assert hub.commits("tost/shards")[1] == head
    assert hub.files("tost/shards") == contents(folder)
    assert same(clients.load("tost/shards"), computed)


def test_a_dry_run_sends_nothing(hub, clients, folder):
    before = len(hub.requests)
    done = clients.command("publish", folder, "tost/dry", "--dry-run", token=hub.token).check()
    assert len(hub.requests) == before
    assert all(name in done.output for name in contents(folder)) and "nothing was sent" in done.output


def test_tags_are_not_moved(hub, clients, published, folder):
    head = hub.head("tost/tiny")
    rejected = clients.command("publish", folder, "tost/tiny", "--tag", "v1", token=hub.token)
    assert rejected.status == 1 and "already" in rejected.output
    assert hub.head("tost/tiny") == head and hub.head("tost/tiny", "v1") == published["v1"][1]


def test_what_changed_is_sent(hub, clients, tmp_path):
    """And nothing else: not the same objects again, and no commit without a change. Files of others stay."""
    folder = language_folder(tmp_path / "model")
    others = {"adapter_model.safetensors": b"theirs", "results.json": b"{}"}
    hub.create("tost/again", others | {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}"})
    clients.command("publish", folder, "tost/again", "--without-code", token=hub.token).check()
    assert hub.files("tost/again") == contents(folder) | others
    head, before = hub.head("tost/again"), len(hub.requests)
    assert "all of it already" in clients.command("publish", folder, "tost/again", "--without-code", token=hub.token).output
    assert hub.head("tost/again") == head
    (folder / "README.md").write_text(CARD + "\nMore words.\n")
    clients.command("publish", folder, "tost/again", "--without-code", token=hub.token).check()
    assert hub.commits("tost/again")[1] == head and hub.files("tost/again")["README.md"].endswith(b"More words.\n")
    assert not any(request.method == "PUT" for request in hub.requests[before:])


def test_a_private_repository(hub, clients, folder, computed):
    clients.command("publish", folder, "tost/private", "--private", token=hub.token).check()
    assert hub.repositories["tost/private"].private
    assert same(clients.load("tost/private", token=hub.token), computed)
    assert clients.load("tost/private").status == 1
    clients.command("verify", "tost/private", token=hub.token).check()


def test_a_pull_request(hub, clients, published, folder, computed):
    head = hub.head("tost/tiny")
    done = clients.command("publish", folder, "tost/tiny", "--create-pr", token=hub.token).check()
    assert "/tost/tiny/discussions/1" in done.output
    assert hub.head("tost/tiny") == head == hub.commits("tost/tiny", "refs/pr/1")[1]
    assert same(clients.load("tost/tiny", revision="refs/pr/1"), computed)


# the client waits a second and more between its attempts
IMPATIENT = "import time; time.sleep = lambda seconds: None\nraise SystemExit(tost_hf.cli.main(argv))"


@pytest.mark.parametrize("path, status", [("/preupload/", 0), ("/objects/", 0), ("/commit/", 503)])
def test_failing_server(hub, clients, tmp_path, path, status):
    """An error message, and the repository is as it was; doing it again completes it."""
    name = f"tost/fails-{path.strip('/')}"
    head = hub.create(name, {"config.json": b"{}"})
    folder = language_folder(tmp_path, seed=len(hub.repositories))  # weights that the Hub does not have
    with hub.fail("(POST|PUT)", path, status):
        done = clients.run(IMPATIENT, "publish", folder, name, "--without-code", token=hub.token)
    assert done.status == 1 and done.output.count("tost-hf: error: ") == 1 and "Traceback" not in done.output, done.output
    assert hub.head(name) == head
    clients.command("publish", folder, name, "--without-code", token=hub.token).check()
    assert hub.commits(name)[1] == head and hub.files(name) == contents(folder)


@pytest.mark.parametrize("token", [None, "hf_" + "0" * 34])
def test_missing_permissions(hub, clients, folder, token):
    rejected = clients.command("publish", folder, "tost/new", token=token)
    assert rejected.status == 1 and "tost-hf: error: " in rejected.output, rejected.output
    assert "Traceback" not in rejected.output and "tost/new" not in hub.repositories


@needs_auto_processor
def test_an_image_model(hub, clients, tmp_path):
    folder = vision_folder(tmp_path)
    clients.command("publish", folder, "tost/images", token=hub.token).check()
    assert same(
        clients.load("tost/images", "AutoModelForImageClassification"), clients.load(folder, "AutoModelForImageClassification")
    )
    classify = """
from PIL import Image
picture = Image.linear_gradient("L")
left, right = (transformers.pipeline("image-classification", model=name)(picture) for name in argv)
assert left == right and len(left) == 5, (left, right)
"""
    clients.run(classify, "tost/images", folder).check()


def test_verify_and_info(clients, published):
    for source in ("tost/tiny", published["v1"][0]):
        done = clients.command("verify", source)
        assert done.status == 0 and "FAILED" not in done.output, done.output
        done = clients.command("info", source)
        assert done.status == 0 and f"{language_model().num_parameters():,}" in done.output and "apache-2.0" in done.output
    for command in ("verify", "info"):
        rejected = clients.command(command, "tost/nowhere")
        assert rejected.status == 1 and "tost/nowhere" in rejected.output and "Traceback" not in rejected.output


def test_file_with_other_bytes(clients, published):
    """Bytes that are not those the repository lists: `tost-hf verify` says which file."""
    clients.command("verify", "tost/tiny").check()
    (path,) = (clients.folder / f"home/hub/models--tost--tiny/snapshots/{published['main'][1]}").glob("tokenizer.json")
    path.resolve().write_bytes(path.read_bytes() + b" ")
    done = clients.command("verify", "tost/tiny")
    assert done.status == 1 and "tokenizer.json." in done.output, done.output
