"""Publishing and loading where things go wrong: killed clients, failing servers, broken connections, hostile content.

Whatever happens, a repository is at its old commit or at a complete new one, and doing it again completes it.
"""

import itertools
import os
import queue
import signal

import pytest
import torch
from hub_clients import CARD, Clients, contents, language_folder
from safetensors.torch import load, save

from tost_hf.model.base_tost import CODE_FILES


pytestmark = pytest.mark.slow

# the client waits a second and more between its attempts
IMPATIENT = "import time; time.sleep = lambda seconds: None\n"
COMMAND = IMPATIENT + "raise SystemExit(tost_hf.cli.main(argv))"
STEPS = {"preupload": "POST /preupload/", "batch": "POST /objects/batch", "put": "PUT /objects/", "commit": "POST /commit/"}


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    with Clients(hub, tmp_path_factory.mktemp("clients")) as forks:
        yield forks


class Case:
    """A repository with one version of a model, and a folder with the next, whose weights the Hub has never seen."""

    numbers = itertools.count(1)

    def __init__(self, hub, clients, folder):
        number = next(self.numbers)
        self.hub, self.clients, self.repo_id = hub, clients, f"tost/case-{number}"
        self.old = contents(language_folder(folder / "old", max_shard_size="60KB"))
        hub.create(self.repo_id, self.old)
        self.folder = language_folder(folder / "new", seed=number, max_shard_size="40KB")
        (self.folder / "README.md").write_text(CARD + "The next version.\n")
        self.first_request = len(hub.requests)

    def start(self):
        return self.clients.start(COMMAND, "publish", self.folder, self.repo_id, token=self.hub.token("writer"))

    def publish(self):
        return self.clients.wait(self.start())

    def is_old(self) -> bool:
        return self.hub.files(self.repo_id) == self.old

    def uploads(self) -> list[str]:
        """The objects that the storage took, once for each time."""
        done = [request for request in self.hub.requests[self.first_request :] if request.status == 200]
        return [request.path for request in done if request.method == "PUT"]

    def check_complete(self) -> None:
        """As without a fault: the folder's files and the remote code, and no object sent twice."""
        assert len(self.uploads()) == len(set(self.uploads())) >= 3
        files, expected = self.hub.files(self.repo_id), contents(self.folder)
        assert files.keys() == expected.keys() | set(CODE_FILES["tost"])
        assert {name for name, data in expected.items() if files[name] != data} == {"config.json"}  # which gets an auto_map


@pytest.fixture
def case(hub, clients, tmp_path):
    return Case(hub, clients, tmp_path)


def fault(hub, step: str, **how):
    method, path = STEPS[step].split()
    return hub.fail(method, path, **how)


@pytest.mark.parametrize("amid", [True, False], ids=["amid-request", "before-answer"])
@pytest.mark.parametrize("point", range(10))
def test_a_killed_client(hub, case, point, amid):
    """SIGKILL at each request: while it is being sent, of which the server makes nothing; or when the server has all of it."""
    pids = queue.SimpleQueue()

    def kill():
        os.kill(pids.get(timeout=60), signal.SIGKILL)

    head = hub.head(case.repo_id)
    with hub.fail(".*", "", skip=point, times=1, cut="request" if amid else None, action=kill) as killing:
        client = case.start()
        pids.put(client.pid)
        assert case.clients.wait(client).status == -signal.SIGKILL
        hub.settle()
    assert killing.hits == 1, "fewer requests than that"
    if "/commit/" in hub.requests[-1].path and not amid:
        assert hub.commits(case.repo_id)[1] == head
    else:
        assert hub.head(case.repo_id) == head and case.is_old()
    case.publish().check()
    assert hub.commits(case.repo_id)[1] == head
    case.check_complete()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", [{"status": 503}, {"status": 403}, {"cut": "request"}], ids=["503", "403", "cut"])
def test_a_server_that_fails(hub, case, step, how):
    head = hub.head(case.repo_id)
    with fault(hub, step, skip=int(step == "put"), **how) as failing:  # of several objects the first arrives
        done = case.publish()
    assert failing.hits >= 1
    assert done.status == 1 and done.output.count("tost-hf: error: ") == 1 and "Traceback" not in done.output, done.output
    assert hub.head(case.repo_id) == head and case.is_old()
    case.publish().check()
    assert hub.commits(case.repo_id)[1] == head
    case.check_complete()


def test_a_commit_whose_answer_is_lost(hub, case):
    with fault(hub, "commit", cut="answer"):
        assert case.publish().status == 1
    head = hub.head(case.repo_id)
    case.check_complete()
    case.publish().check()
    assert hub.head(case.repo_id) == head


def test_overtaken_while_uploading(hub, case):
    """Somebody else commits between the comparison and the commit: the comparison is made again."""

    def overtake():
        hub.commit(case.repo_id, {"results.json": b"{}", "README.md": CARD.encode() + b"Changed meanwhile."})

    with fault(hub, "commit", times=1, action=overtake):
        case.publish().check()
    assert [request.status for request in hub.requested("POST", f"{case.repo_id}/commit/")] == [412, 200]
    files = hub.files(case.repo_id)
    assert files["results.json"] == b"{}" and files["README.md"] == contents(case.folder)["README.md"]
    hub.commit(case.repo_id, {"results.json": None})
    case.check_complete()


# Loading -------------------------------------------------------------------------------------------------------------------

LOAD = IMPATIENT + "transformers.AutoModelForCausalLM.from_pretrained(argv[0], cache_dir=argv[1])"


def test_a_truncated_download(hub, clients, case, tmp_path):
    """Is an error, leaves nothing in the cache that passes for the file, and is completed by the next attempt."""
    with hub.fail("GET", "/objects/", cut="body"):
        failed = clients.run(LOAD, case.repo_id, tmp_path / "cache")
        assert failed.status == 1 and "Error" in failed.output
        assert clients.run(COMMAND, "verify", case.repo_id).status == 1
    assert not list(tmp_path.glob("cache/**/snapshots/**/*.safetensors"))
    clients.run(LOAD, case.repo_id, tmp_path / "cache").check()
    clients.run(COMMAND, "verify", case.repo_id).check()


def damage(data: bytes) -> bytes:
    """The same weights, but for one bit of one number."""
    weights = load(data)
    weights[min(weights)].view(-1).view(torch.int32)[0] ^= 1
    return save(weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model-00002-of-00004.safetensors", damage),
        ("model-00002-of-00004.safetensors", lambda data: data[:-100]),
        ("config.json", lambda data: data.replace(b"1e-05", b"1e-06")),
        ("modeling_tost.py", lambda data: data.replace(b"self", b"selv", 1)),
        ("README.md", lambda data: data + b"More."),
    ],
    ids=["weights", "truncated-weights", "config", "code", "card"],
)
def test_a_file_that_was_tampered_with(hub, clients, case, name, change):
    """The bytes served are not those the repository lists: `tost-hf verify` says which file."""
    case.publish().check()
    original = hub.files(case.repo_id)[name]
    assert change(original) != original
    hub.tamper(case.repo_id, name, change(original))
    try:
        done = clients.run(COMMAND, "verify", case.repo_id)
    finally:
        hub.tampered.clear()
    assert done.status == 1 and "Traceback" not in done.output
    assert name in done.output or "Consistency check failed" in done.output


def strays(*folders) -> list:
    return [path for folder in folders for path in folder.rglob("*evil*")]


SNAPSHOT = "import huggingface_hub; huggingface_hub.snapshot_download(argv[0], cache_dir=argv[1])"


@pytest.mark.parametrize(
    "name", ["../../evil.txt", "../../../../../evil.txt", "{absolute}/evil.txt", "a/../../../../evil.txt"]
)
def test_names_that_lead_out_of_the_cache(hub, clients, case, tmp_path, name):
    """A listing with such a name is rejected; nothing is written beside the cache."""
    hub.commit(case.repo_id, {name.format(absolute=tmp_path): b"evil"})
    home = tmp_path / "deep" / "enough" / "cache"
    rejected = clients.run(SNAPSHOT, case.repo_id, home)
    assert rejected.status == 1 and "evil.txt" in rejected.output
    rejected = clients.run(COMMAND, "verify", case.repo_id)
    assert rejected.status == 1 and "Traceback" not in rejected.output, rejected.output
    clients.run(LOAD, case.repo_id, home).check()  # asks for none but the model's files
    assert strays(tmp_path, clients.folder) == []
