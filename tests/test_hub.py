"""Publishing and loading, by the real huggingface_hub client and the `tost-hf` command, against a Hub on loopback."""

import json
import re

import pytest
import torch
from conftest import needs_auto_processor
from hub_clients import CARD, Clients, contents, language_folder, language_model, leaks, vision_folder
from huggingface_hub import get_session

import tost_hf
from tost_hf.hub.connection import TIME_LIMIT, hub_calls
from tost_hf.hub.publishing import publish


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
    clients.command("publish", folder, "tost/tiny", "--tag", "v1", token=hub.token("writer")).check()
    first = hub.head("tost/tiny")
    later = language_folder(folder.with_name("later"), seed=1)
    clients.command("publish", later, "tost/tiny", token=hub.token("writer")).check()
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
    clients.command("publish", folder, "tost/tiny", "--revision", "dev", token=hub.token("writer")).check()
    assert hub.head("tost/tiny") == head != hub.head("tost/tiny", "dev")
    assert same(clients.load("tost/tiny", revision="dev"), computed)
    missing = clients.load("tost/tiny", revision="v2")
    assert missing.status == 1 and "v2" in missing.output and "OSError" in missing.output


def test_sharded_weights(hub, clients, folder, computed, tmp_path):
    shards = language_folder(tmp_path / "shards", max_shard_size="40KB")
    clients.command("publish", shards, "tost/shards", token=hub.token("writer")).check()
    names = [name for name in hub.files("tost/shards") if name.endswith(".safetensors")]
    assert len(names) >= 3 and "model.safetensors.index.json" in hub.files("tost/shards")
    assert same(clients.load("tost/shards"), computed)

    # whole weights take the shards' place within one commit
    head = hub.head("tost/shards")
    clients.command("publish", folder, "tost/shards", "--without-code", token=hub.token("writer")).check()
    assert hub.commits("tost/shards")[1] == head
    assert hub.files("tost/shards") == contents(folder)
    assert same(clients.load("tost/shards"), computed)


def test_a_private_repository(hub, clients, folder, computed):
    clients.command("publish", folder, "tost/private", "--private", token=hub.token("writer")).check()
    assert hub.repositories["tost/private"].private
    assert same(clients.load("tost/private", token=hub.token("reader")), computed)
    assert same(clients.load("tost/private", environment={"HF_TOKEN": hub.token("reader")}), computed)
    rejected = clients.load("tost/private", token=hub.token("stranger"))
    assert rejected.status == 1 and "OSError" in rejected.output and "tost/private" in rejected.output
    assert hub.token("stranger") not in rejected.output
    clients.command("verify", "tost/private", token=hub.token("reader")).check()


def test_a_pull_request(hub, clients, published, tmp_path):
    """Proposed by somebody who may not write."""
    proposal = language_folder(tmp_path / "proposal", seed=2)
    head = hub.head("tost/tiny")
    done = clients.command("publish", proposal, "tost/tiny", "--create-pr", token=hub.token("stranger")).check()
    assert re.search(r"/tost/tiny/discussions/\d+", done.output)
    assert hub.head("tost/tiny") == head == hub.commits("tost/tiny", "refs/pr/1")[1]
    assert same(clients.load("tost/tiny", revision="refs/pr/1"), clients.load(proposal))


def test_commit_of_somebody_else_meanwhile(hub, clients, tmp_path):
    """Between the comparison and the commit: the comparison is made again."""
    folder = language_folder(tmp_path / "model")
    hub.create("tost/busy", {"README.md": b"old"})

    def overtake():
        hub.commit("tost/busy", {"results.json": b"{}", "README.md": CARD.encode() + b"Changed meanwhile."})

    with hub.fail("POST", "/commit/", times=1, action=overtake):
        clients.command("publish", folder, "tost/busy", "--without-code", token=hub.token("writer")).check()
    assert [request.status for request in hub.requested("POST", "tost/busy/commit/")] == [412, 200]
    assert hub.files("tost/busy") == contents(folder) | {"results.json": b"{}"}


def test_a_dry_run_sends_nothing(hub, clients, folder):
    before = len(hub.requests)
    done = clients.command("publish", folder, "tost/dry", "--dry-run", token=hub.token("writer")).check()
    assert len(hub.requests) == before
    assert all(name in done.output for name in contents(folder)) and "nothing was sent" in done.output


def test_incremental_upload(hub, clients, tmp_path):
    folder = language_folder(tmp_path / "model")
    token = hub.token("writer")
    clients.command("publish", folder, "tost/again", token=token).check()
    hub.commit("tost/again", {"results.json": b"{}"})  # somebody else's file
    head, before = hub.head("tost/again"), len(hub.requests)
    clients.command("publish", folder, "tost/again", token=token).check()
    assert hub.head("tost/again") == head
    assert not any(request.method == "PUT" for request in hub.requests[before:])

    (folder / "README.md").write_text(CARD + "\nMore words.\n")
    before = len(hub.requests)
    clients.command("publish", folder, "tost/again", token=token).check()
    assert hub.commits("tost/again")[1] == head
    assert not any(request.method == "PUT" for request in hub.requests[before:])
    files = hub.files("tost/again")
    assert files["README.md"].endswith(b"More words.\n") and files["results.json"] == b"{}"


def test_tags_are_not_moved(hub, clients, published, tmp_path):
    assert hub.repositories["tost/tiny"].refs["refs/tags/v1"] == published["v1"][1]
    head = hub.head("tost/tiny")
    rejected = clients.command(
        "publish", language_folder(tmp_path, seed=3), "tost/tiny", "--tag", "v1", token=hub.token("writer")
    )
    assert rejected.status == 1 and "v1" in rejected.output
    assert hub.head("tost/tiny") == head and hub.head("tost/tiny", "v1") == published["v1"][1]


def test_tag_race(hub, clients, tmp_path):
    """The command fails and says where the version is; again, it is rejected before anything is sent."""
    folder = language_folder(tmp_path / "model")
    hub.create("tost/raced", {"config.json": b"{}"})
    theirs = hub.head("tost/raced")

    def overtake():
        hub.repositories["tost/raced"].refs["refs/tags/v1"] = theirs

    with hub.fail("POST", "/tag/", times=1, action=overtake):
        done = clients.command("publish", folder, "tost/raced", "--tag", "v1", token=hub.token("writer"))
    head = hub.head("tost/raced")
    assert done.status == 1 and head in done.output and theirs in done.output and "visible" in done.output, done.output
    assert hub.repositories["tost/raced"].refs["refs/tags/v1"] == theirs != head
    again = clients.command("publish", folder, "tost/raced", "--tag", "v1", token=hub.token("writer"))
    assert again.status == 1 and "already has 'v1'" in again.output and hub.head("tost/raced") == head


def test_only_tagging_fails(hub, clients, tmp_path):
    """Publishing again sets the tag alone, and once more changes nothing, as after an answer that was lost."""
    folder = language_folder(tmp_path / "model")
    command = ("publish", folder, "tost/untagged", "--tag", "v1")
    with hub.fail("POST", "/tag/", status=403):
        done = clients.command(*command, token=hub.token("writer"))
    head = hub.head("tost/untagged")
    assert done.status == 1 and f"is visible in tost/untagged as {head}" in done.output, done.output
    for _ in range(2):
        clients.command(*command, token=hub.token("writer")).check()
        assert hub.head("tost/untagged") == head == hub.repositories["tost/untagged"].refs["refs/tags/v1"]


def test_unrelated_files_are_kept(hub, clients, tmp_path):
    """Weights of an earlier version are replaced; what is merely named like them is somebody else's."""
    others = {"adapter_model.safetensors": b"theirs", "notes.safetensors.txt": b"theirs", "model_old.safetensors": b"theirs"}
    hub.create("tost/mixed", others | {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}"})
    folder = language_folder(tmp_path / "model")
    clients.command("publish", folder, "tost/mixed", "--without-code", token=hub.token("writer")).check()
    assert hub.files("tost/mixed") == contents(folder) | others


SHORT_TIMEOUT = """
import time; time.sleep = lambda seconds: None
import tost_hf.hub.connection
tost_hf.hub.connection.TIME_LIMIT = 0.3
raise SystemExit(tost_hf.cli.main(argv))
"""


@pytest.mark.parametrize("step", ["repos/create", "blobs=", "preupload", "commit/"])
def test_server_timeout(hub, clients, tmp_path, step):
    """Ends with an error message, and the repository is as it was."""
    folder, name = language_folder(tmp_path / "model"), f"tost/slow-{step.strip('/=').replace('/', '-')}"
    head = hub.create(name, {"config.json": b"{}"})
    with hub.fail(".*", step, delay=3.0, status=503):
        for command in (["publish", folder, name], *([["verify", name], ["info", name]] if step == "blobs=" else [])):
            done = clients.run(SHORT_TIMEOUT, *command, token=hub.token("writer"))
            assert done.status == 1 and "tost-hf: error: The Hub could not be reached, timed out" in done.output, done.output
            assert "Traceback" not in done.output
    hub.settle()
    assert hub.head(name) == head


def test_time_limits_that_overlap():
    """As of a push in the background and the main thread: the time limit ends with the last of them."""
    session = get_session()
    before = session.timeout
    assert before.read != TIME_LIMIT
    first, second = hub_calls(), hub_calls()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert session.timeout.read == TIME_LIMIT
    second.__exit__(None, None, None)
    assert session.timeout == before


def test_missing_permissions(hub, clients, folder, published):
    head = hub.head("tost/tiny")
    reader, stranger = hub.token("reader"), hub.token("stranger")
    for token, name in (
        (reader, "tost/tiny"),
        (reader, "tost/new"),
        (stranger, "tost/tiny"),
        ("hf_" + "0" * 34, "tost/tiny"),
        (None, "tost/new"),
    ):
        rejected = clients.command("publish", folder, name, token=token)
        assert rejected.status == 1 and rejected.output.startswith("tost-hf: error: "), rejected.output
        assert "Traceback" not in rejected.output and not (token and token in rejected.output)
    assert hub.head("tost/tiny") == head and "tost/new" not in hub.repositories


def test_card_rejected_by_the_hub(hub, clients, tmp_path):
    """A licence that the Hub does not know is found before anything is uploaded."""
    folder = language_folder(tmp_path)
    (folder / "README.md").write_text(CARD.replace("apache-2.0", "my-own"))
    rejected = clients.command("publish", folder, "tost/licence", token=hub.token("writer"))
    assert rejected.status == 1 and "license" in rejected.output and "Traceback" not in rejected.output
    assert not hub.requested("PUT|POST", "tost/licence.*(objects|preupload|commit)")


def test_generated_cards_are_valid(hub, clients, tmp_path):
    pytest.importorskip("jinja2")
    for folder, tag in ((language_folder(tmp_path / "l"), "text-generation"), (vision_folder(tmp_path / "v"), "image-class")):
        (folder / "README.md").unlink()
        options = ("--card", "--license", "apache-2.0")
        clients.command("publish", folder, f"tost/card-{tag}", *options, token=hub.token("writer")).check()
        assert f"pipeline_tag: {tag}" in hub.files(f"tost/card-{tag}")["README.md"].decode()


@needs_auto_processor
def test_an_image_model(hub, clients, tmp_path):
    folder = vision_folder(tmp_path)
    clients.command("publish", folder, "tost/images", token=hub.token("writer")).check()
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


@pytest.mark.parametrize("name", ["model.safetensors", "modeling_tost.py", "README.md"])
def test_file_with_other_bytes(clients, published, name):
    """Bytes that are not those the repository lists: `tost-hf verify` says which file."""
    clients.command("verify", "tost/tiny").check()
    (path,) = (clients.folder / f"home/hub/models--tost--tiny/snapshots/{published['main'][1]}").glob(name)
    blob, original = path.resolve(), path.read_bytes()
    for damaged in (original[:-1], original[:-1] + bytes([original[-1] ^ 1])):
        blob.write_bytes(damaged)
        done = clients.command("verify", "tost/tiny")
        assert done.status == 1 and f"{name} is not the file that the repository lists" in done.output, done.output
    blob.write_bytes(original)


def test_training_by_products_are_excluded(tmp_path):
    folder = language_folder(tmp_path / "model")
    expected = publish(folder, "tost/dry", dry_run=True).uploaded
    for name in ("training_args.bin", "checkpoint-10/optimizer.pt", "runs/events", ".git/config", "__pycache__/a.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x80\x04")
    assert publish(folder, "tost/dry", dry_run=True).uploaded == expected


TALKATIVE = """
import huggingface_hub
huggingface_hub.constants.HF_DEBUG = True
huggingface_hub.logging.set_verbosity_debug()
transformers.logging.set_verbosity_debug()
raise SystemExit(tost_hf.cli.main(argv))
"""


def test_no_token_leaks(hub, clients, folder):
    """Neither into what is printed, though debugging is on, nor into commits, cards, addresses or to the storage."""
    token = hub.token("writer")
    done = clients.run(TALKATIVE, "publish", folder, "tost/secret", "--private", token=token).check()
    assert "authorization" in done.output.lower(), "debugging was not on"
    clients.run(TALKATIVE, "verify", "tost/secret", token=token).check()
    for fault in ({"status": 500}, {"lost": True}):
        with hub.fail("POST", "/commit/", **fault):
            assert clients.run(TALKATIVE, "publish", folder, "tost/secret-2", token=token).status == 1
    assert leaks(hub, folder, clients.folder) == []
