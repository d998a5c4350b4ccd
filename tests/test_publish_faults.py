"""Publishing where things go wrong: killed clients, failing servers, lost connections.

Whatever happens, a repository is at its old commit or at a complete new one, and doing it again completes it.
"""

import itertools
import os
import queue
import signal

import pytest
from hub_clients import CARD, Clients, contents, language_folder

from tost_hf.model.base_tost import CODE_FILES


pytestmark = pytest.mark.slow

# the client waits a second and more between its attempts
COMMAND = "import time; time.sleep = lambda seconds: None\nraise SystemExit(tost_hf.cli.main(argv))"
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
        self.head = hub.create(self.repo_id, contents(language_folder(folder / "old", max_shard_size="60KB")))
        self.folder = language_folder(folder / "new", seed=number, max_shard_size="40KB")
        (self.folder / "README.md").write_text(CARD + "The next version.\n")
        self.first_request = len(hub.requests)

    def start(self):
        return self.clients.start(COMMAND, "publish", self.folder, self.repo_id, token=self.hub.token)

    def complete(self) -> None:
        """Publishes again: one commit with the folder's files and the remote code, and no object sent twice."""
        self.clients.wait(self.start()).check()
        assert self.hub.commits(self.repo_id)[1] == self.head
        done = [request for request in self.hub.requests[self.first_request :] if request.status == 200]
        uploads = [request.path for request in done if request.method == "PUT"]
        assert len(uploads) == len(set(uploads)) >= 3
        files, expected = self.hub.files(self.repo_id), contents(self.folder)
        assert files.keys() == expected.keys() | set(CODE_FILES["tost"])
        assert {name for name, data in expected.items() if files[name] != data} == {"config.json"}  # which gets an auto_map


@pytest.fixture
def case(hub, clients, tmp_path):
    return Case(hub, clients, tmp_path)


@pytest.mark.parametrize("point", (1, 3, 5, 7, 9))
def test_killed_client(hub, case, point):
    """SIGKILL at each request, before its answer."""
    pids = queue.SimpleQueue()

    def kill():
        os.kill(pids.get(timeout=60), signal.SIGKILL)

    with hub.fail(r"\w+", "", skip=point, times=1, action=kill) as killing:
        client = case.start()
        pids.put(client.pid)
        assert case.clients.wait(client).status == -signal.SIGKILL
        hub.settle()
    assert killing.hits == point + 1, "fewer requests than that"
    if "/commit/" not in hub.requests[-1].path:
        assert hub.head(case.repo_id) == case.head
    case.complete()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", [{"status": 503}, {"status": 403}, {}], ids=["503", "403", "lost"])
def test_failing_server(hub, case, step, how):
    method, path = STEPS[step].split()
    with hub.fail(method, path, skip=int(step == "put"), **how) as failing:  # of several objects the first arrives
        done = case.clients.wait(case.start())
    assert failing.hits >= 1
    assert done.status == 1 and done.output.count("tost-hf: error: ") == 1 and "Traceback" not in done.output, done.output
    assert hub.head(case.repo_id) == case.head
    case.complete()
