"""Publishing and loading with the real huggingface_hub client and the `tost-hf` command, against a local Hub server."""

import os
import re
import signal
from functools import partial

import pytest
from hub_clients import CARD, Clients, contents, equal_outputs, language_folder, language_model, vision_folder
from hub_server import HubError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return language_folder(tmp_path_factory.mktemp("model"), with_code=True)


@pytest.fixture(scope="module")
def expected_outputs(clients, folder):
    """The outputs of the model in `folder`."""
    return clients.load(folder)


@pytest.fixture(scope="module")
def published_revisions(hub, clients, folder):
    """Folder and commit of both revisions of tost/tiny: `folder`, published with the tag v1, then another model."""
    clients.publish(folder, "tost/tiny", "--tag", "v1")
    first_commit = hub.head("tost/tiny")
    second_folder = language_folder(folder.with_name("later"), seed=1)
    clients.publish(second_folder, "tost/tiny")
    return {"v1": (folder, first_commit), "main": (second_folder, hub.head("tost/tiny"))}


def test_one_commit_per_publication(hub, published_revisions):
    source, head = published_revisions["v1"]
    assert hub.files("tost/tiny", "v1") == contents(source)
    assert hub.commits("tost/tiny", head)[0] == head and len(hub.commits("tost/tiny", head)) == 2  # and the initial commit


def test_published_models_load(hub, clients, folder, published_revisions, expected_outputs):
    """The latest revision, a tag, a commit, a branch and a pull request load their respective weights."""
    main_folder, head = published_revisions["main"]
    clients.publish(folder, "tost/tiny", "--revision", "dev")
    assert "/tost/tiny/discussions/1" in clients.publish(folder, "tost/tiny", "--create-pr").output
    assert hub.commits("tost/tiny", "dev")[1] == hub.commits("tost/tiny", "refs/pr/1")[1] == hub.head("tost/tiny") == head
    latest_outputs = clients.load("tost/tiny")
    assert equal_outputs(latest_outputs, clients.load(main_folder)) and not equal_outputs(latest_outputs, expected_outputs)
    for revision in ("v1", published_revisions["v1"][1], "dev", "refs/pr/1"):
        assert equal_outputs(clients.load("tost/tiny", revision=revision), expected_outputs)
    result = clients.load("tost/tiny", revision="v2")
    assert result.status == 1 and "v2" in result.output and "OSError" in result.output


def test_sharded_weights(hub, clients, folder, expected_outputs, tmp_path):
    clients.publish(language_folder(tmp_path / "shards", max_shard_size="40KB"), "tost/shards")
    shard_names = [name for name in hub.files("tost/shards") if name.endswith(".safetensors")]
    assert len(shard_names) >= 3 and "model.safetensors.index.json" in hub.files("tost/shards")
    assert equal_outputs(clients.load("tost/shards"), expected_outputs)

    # unsharded weights replace the shards in one commit
    head = hub.head("tost/shards")
    clients.publish(folder, "tost/shards")
    assert hub.commits("tost/shards")[1] == head
    assert hub.files("tost/shards") == contents(folder)
    assert equal_outputs(clients.load("tost/shards"), expected_outputs)


def test_tags_are_not_moved(hub, clients, published_revisions, folder):
    result = clients.command("publish", folder, "tost/tiny", "--tag", "v1", token=hub.token)
    assert result.status == 1 and "already" in result.output
    with hub.fail("POST", "/tag/", 403):
        result = clients.command("publish", folder, "tost/untagged", "--tag", "v1", token=hub.token)
    assert result.status == 1 and "is published, without its tag" in result.output
    clients.publish(folder, "tost/untagged", "--tag", "v1")
    assert len(hub.commits("tost/untagged", "v1")) == 2
    assert [hub.head("tost/tiny", name) for name in ("v1", "main")] == [published_revisions[n][1] for n in ("v1", "main")]


def test_only_changes_are_uploaded(hub, clients, tmp_path):
    """No object is uploaded twice, no commit is made without a change, and other files of the repository stay."""
    folder = language_folder(tmp_path / "model", with_code=True)
    other_files = {"last-checkpoint/model.safetensors": b"theirs", "results.json": b"{}"}
    other_files[".gitignore"] = b"training_args.bin\n"
    old_files = dict.fromkeys(("model-00001-of-00002.safetensors", "chat_template.jinja", "adapter_config.json"), b"old")
    hub.create("tost/again", other_files | old_files | {".gitignore": b"model.safetensors\nREADME.md\n"})
    clients.publish(folder, "tost/again")
    assert hub.files("tost/again") == contents(folder) | other_files
    head, num_requests = hub.head("tost/again"), len(hub.requests)
    assert f"/commit/{head}" in clients.publish(folder, "tost/again").output
    assert hub.head("tost/again") == head
    (folder / "README.md").write_text(CARD + "\nMore words.\n")
    clients.publish(folder, "tost/again")
    assert hub.commits("tost/again")[1] == head and hub.files("tost/again")["README.md"].endswith(b"More words.\n")
    assert not any(request.method == "PUT" for request in hub.requests[num_requests:])


def test_private_repository(hub, clients, folder, expected_outputs):
    clients.publish(folder, "tost/private", "--private")
    assert hub.repositories["tost/private"].private
    hub.create("tost/public")
    result = clients.command("publish", folder, "tost/public", "--private", token=hub.token)
    assert result.status == 1 and "exists and is public" in result.output and hub.files("tost/public") == {}
    assert equal_outputs(clients.load("tost/private", token=hub.token), expected_outputs)
    assert clients.load("tost/private").status == 1
    clients.command("verify", "tost/private", token=hub.token).check()


# of a folder that is sent as it is; the client sleeps for seconds between its retries
UPLOAD = """
import shutil, time
time.sleep = lambda seconds: None
tost_hf.hub.publishing.prepare_upload = lambda folder, output, *args, **options: shutil.copytree(folder, output)
raise SystemExit(tost_hf.cli.main(argv))
"""


@pytest.mark.parametrize("is_new", [True, False], ids=["new-repository", "old-repository"])
def test_failing_server(hub, clients, tmp_path, monkeypatch, is_new):
    """At each request in turn: an error; an old repository is as it was, a new one or a new branch does not exist."""
    name, old_files = f"tost/fails-{is_new}", {} if is_new else {"config.json": b"{}"}
    head = None if is_new else hub.create(name, old_files)
    folder = language_folder(tmp_path, seed=50 + is_new)  # weights that the Hub does not have
    requests: list[str] = []  # those that were answered, and the one that fails

    def fail_at(number: int, request: str) -> None:
        if request not in requests:
            requests.append(request)
        if requests.index(request) == number and not request.startswith("DELETE"):  # also when the client repeats it
            raise HubError(503, "injected failure") if number % 2 else ConnectionAbortedError

    argv = ("publish", folder, name, "--revision", "dev")
    for number in range(30):
        requests.clear()
        monkeypatch.setattr(hub, "faults", [partial(fail_at, number)])
        result = clients.run(UPLOAD, *argv, token=hub.token)
        if result.status == 0:
            break
        assert result.output.count("tost-hf: error: ") == 1 and "Traceback" not in result.output, result.output
        if is_new:
            assert name not in hub.repositories, requests
        else:
            assert hub.repositories[name].refs == {"refs/heads/main": head}, requests
        assert ("deleted again" in result.output) == any(request.startswith("DELETE") for request in requests)
    assert number > 7 and any("/commit/" in request for request in requests), requests
    assert hub.files(name, "dev") == contents(folder) and hub.files(name) == old_files

    hub.faults.clear()
    with hub.fail("POST", "/commit/", 403), hub.fail("DELETE", "", 403):
        result = clients.run(UPLOAD, "publish", folder, f"{name}-2", token=hub.token)
    assert result.status == 1 and "repository that was created for it is still there" in result.output, result.output


@pytest.mark.parametrize("is_new", [True, False], ids=["new-repository", "old-repository"])
def test_killed_publication(hub, clients, tmp_path, monkeypatch, is_new):
    """At five moments: an old repository is as it was, a new one is empty; so is the folder as it was."""
    name, old_files = f"tost/killed-{is_new}", {} if is_new else {"config.json": b"{}"}
    head = None if is_new else hub.create(name, old_files)
    folder = language_folder(tmp_path, seed=60 + is_new, with_code=True)
    before, argv = contents(folder), ("publish", folder, name, "--tag", "v1")

    def kill_at(moment: str, request: str) -> None:
        if re.search(moment, request):
            os.kill(client.pid, signal.SIGKILL)
            raise ConnectionAbortedError

    for moment in (f"GET /api/models/{name}", "/preupload/", "/objects/batch", "PUT /objects/", "/commit/"):
        monkeypatch.setattr(hub, "faults", [partial(kill_at, moment)])
        client = clients.start("raise SystemExit(tost_hf.cli.main(argv))", *argv, token=hub.token)
        assert clients.wait(client).status == -signal.SIGKILL
        assert contents(folder) == before
        if is_new:
            assert name not in hub.repositories or hub.files(name) == {}
        else:
            assert hub.repositories[name].refs == {"refs/heads/main": head}
    hub.faults.clear()
    clients.publish(*argv[1:])
    assert hub.files(name, "v1") == hub.files(name) == before


@pytest.mark.parametrize("token", [None, "hf_" + "0" * 34])
def test_missing_permissions(hub, clients, folder, token):
    result = clients.command("publish", folder, "tost/new", token=token)
    assert result.status == 1 and "tost-hf: error: " in result.output, result.output
    assert "Traceback" not in result.output and "tost/new" not in hub.repositories


CLASSIFY = """
from PIL import Image
picture = Image.linear_gradient("L")
actual, expected = (transformers.pipeline("image-classification", model=name)(picture) for name in argv)
assert actual == expected and len(actual) == 5, (actual, expected)
"""


def test_image_model(clients, tmp_path):
    clients.publish(vision_folder(tmp_path), "tost/images")
    clients.run(CLASSIFY, "tost/images", tmp_path).check()


def test_verify_and_info(clients, published_revisions):
    assert "FAILED" not in clients.command("verify", "tost/tiny").check().output
    output = clients.command("info", "tost/tiny").check().output
    assert "apache-2.0" in output and f"{language_model().num_parameters():,}" in output
    for command in ("verify", "info"):
        failure = clients.command(command, "tost/nowhere")
        assert failure.status == 1 and "tost/nowhere" in failure.output and "Traceback" not in failure.output


def test_verify_detects_a_corrupted_file(hub, clients, folder):
    """`tost-hf verify` names a file whose bytes differ from the repository's."""
    clients.publish(folder, "tost/corrupted")
    clients.command("verify", "tost/corrupted").check()
    snapshot = clients.folder / "home/hub/models--tost--corrupted/snapshots" / hub.head("tost/corrupted")
    (snapshot / "tokenizer.json").resolve().write_bytes(b"{}")
    result = clients.command("verify", "tost/corrupted")
    assert result.status == 1 and "tokenizer.json." in result.output, result.output


# argv: repository
FROM_PRETRAINED = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(argv[0])
AutoTokenizer.from_pretrained(argv[0])
"""
# as `tost-hf export`, `inspect` and `space` load it
RESOLVE = (
    FROM_PRETRAINED
    + """
from tost_hf.hub.loading import load_config, load_model, resolve_model_folder
folder = resolve_model_folder(argv[0])
loaded = load_model(folder, load_config(folder)).state_dict()
assert loaded.keys() == model.state_dict().keys() and all(x.equal(loaded[name]) for name, x in model.state_dict().items())
"""
)


@pytest.mark.slow
def test_offline_with_a_filled_cache(hub, clients, tmp_path):
    """What `from_pretrained` or `verify` downloaded by name is found by both of them, and by all commands."""
    folder = language_folder(tmp_path / "model")
    head = hub.create("tost/offline", contents(folder))
    hub.create("tost/verified", contents(folder))
    clients.command("info", "tost/offline").check()  # downloads the card, but no weights
    clients.run(FROM_PRETRAINED, "tost/offline").check()
    clients.command("verify", "tost/verified").check()
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(clients.folder / "home")}
    with Clients(hub, tmp_path, "import tost_hf.cli", **environment) as offline:
        num_requests = len(hub.requests)
        for name in ("tost/offline", "tost/verified"):
            offline.run(RESOLVE, name).check()
            assert "hashes    not compared" in offline.command("verify", name).check().output
        output = offline.command("info", "tost/offline").check().output
        size = (folder / "model.safetensors").stat().st_size
        assert f"tost/offline at {head}" in output and f"model.safetensors ({size:,} bytes)" in output
        failure = offline.command("verify", "tost/nowhere")
        assert failure.status == 1 and "could not be asked for 'tost/nowhere'" in failure.output
        assert len(hub.requests) == num_requests
