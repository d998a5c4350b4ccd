"""A Hub on loopback for the real huggingface_hub client: models and Spaces, users, private repositories, branches, tags,
pull requests, LFS, and faults on demand. All of it is in memory.

    with Hub() as hub:
        subprocess.run([...], env=hub.environment(home, hub.token("writer")))
        assert hub.files("tost/mine")["config.json"] == ...
        with hub.fail("POST", "/commit/", status=500):
            ...

As on the real one, large or binary files go to a second origin (`hub.storage_url`), which refuses every token. Not here: Xet,
multipart uploads, ranges, paging, datasets, listings of folders, and routes that no test reaches.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml


LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".onnx", ".gz")
LICENSES = ("apache-2.0", "mit", "gpl-3.0", "cc-by-4.0", "other")
PIPELINE_TAGS = (
    "feature-extraction fill-mask image-classification image-feature-extraction question-answering text-classification "
    "text-generation token-classification zero-shot-classification"
).split()
SPACE_COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")


# What it keeps -----------------------------------------------------------------------------------------------------------


class HubError(Exception):
    """An answer that is no success: its status, message, X-Error-Code and further headers."""

    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None, **headers: str):
        self.status, self.body = status, body or {"error": message}
        self.headers = headers | {"X-Error-Message": " ".join(message.split())} | ({"X-Error-Code": code} if code else {})


@dataclass
class Entry:
    """A file of a commit. `oid` is git's id of what git stores: the content, or the pointer to an LFS object."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()
        stored = pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    @property
    def listing(self) -> dict:
        """Its size, and its LFS object if it is one."""
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": len(self.data), "pointerSize": 130}
        return {"size": len(self.data)} | ({"lfs": lfs} if self.lfs else {})


@dataclass
class Commit:
    tree: dict[str, Entry]
    parent: str | None
    title: str


@dataclass
class Repository:
    kind: str  # "models" or "spaces"
    name: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pull_requests: int = 0

    def commit(self, ref: str, tree: dict[str, Entry], parent: str | None, title: str) -> str:
        commit_id = secrets.token_hex(20)
        self.commits[commit_id] = Commit(tree, parent, title)
        self.refs[ref] = commit_id
        return commit_id

    def resolve(self, revision: str) -> str:
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        if revision not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return revision

    def tree(self, revision: str) -> dict[str, Entry]:
        return self.commits[self.resolve(revision)].tree

    def history(self, revision: str) -> list[str]:
        """The ids of its commits, the newest first."""
        ids: list[str] = []
        parent: str | None = self.resolve(revision)
        while parent:
            ids.append(parent)
            parent = self.commits[parent].parent
        return ids


def is_lfs(path: str, size: int) -> bool:
    return size > 0 and path.endswith(LFS_SUFFIXES)


def card_data(readme: bytes) -> dict:
    """The YAML at the head of a model card; {} where there is none."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", readme.decode(), re.DOTALL)
    return (yaml.safe_load(block[1]) or {}) if block else {}


def card_errors(readme: bytes, kind: str = "model") -> list[str]:
    """What is wrong in the metadata of a card, as the real Hub checks it."""
    try:
        data = card_data(readme)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return [f"invalid YAML: {error}"]
    if kind == "space":
        colors = [data.get(name) in SPACE_COLORS for name in ("colorFrom", "colorTo")]
        valid = data.get("sdk") == "static" and data.get("title") and data.get("emoji") and all(colors)
        return [] if valid and len(data.get("short_description", "")) <= 60 else ["not the metadata of a static Space"]
    allowed = {"license": LICENSES, "pipeline_tag": PIPELINE_TAGS}
    errors = [
        f'"{name}" must not be {data[name]!r}' for name, values in allowed.items() if data.get(name, values[0]) not in values
    ]
    return errors + ([] if isinstance(data.get("tags", []), list) else ['"tags" must be an array'])


# The server as a test sees it ----------------------------------------------------------------------------------------------


@dataclass
class LoggedRequest:
    method: str
    path: str  # with its query
    user: str | None  # None without a token
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    status: int = 0  # 0: not answered
    ended: bool = False


@dataclass(eq=False)
class Fault:
    """Hits requests of a method (a regular expression) to a path (likewise): the `skip` first pass, then `times` are hit."""

    method: str
    path: str
    skip: int = 0
    times: int | None = None  # None: all that follow
    status: int | None = None  # answer with this error instead of doing anything
    lost: bool = False  # close the connection instead of doing anything
    delay: float = 0.0  # seconds before doing anything
    action: Callable[[], None] | None = None  # called before doing anything
    hits: int = 0
    seen: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        self.seen += 1
        hit = self.seen > self.skip and (self.times is None or self.hits < self.times)
        self.hits += hit
        return hit


class Hub:
    """The server, running inside `with`. Names are models' ("tost/mine"), or "spaces/tost/mine"."""

    def __init__(self):
        self.lock = threading.RLock()  # held by whoever reads or changes repositories
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # of LFS, by their SHA-256
        self.requests: list[LoggedRequest] = []  # in the order of their arrival
        self.faults: list[Fault] = []
        self.secret = secrets.token_hex(16)
        # by their tokens; "writer" and "reader" belong to the organization tost, "stranger" does not
        self.users = {f"hf_{secrets.token_hex(17)}": name for name in ("writer", "reader", "stranger")}
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Request,), {"hub": self})) for _ in range(2)]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)

    def __enter__(self) -> "Hub":
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def token(self, name: str) -> str:
        """The access token of "writer", "reader" or "stranger"."""
        return next(token for token, user in self.users.items() if user == name)

    def environment(self, home: str | os.PathLike, token: str | None = None, **more: str) -> dict[str, str]:
        """The environment of a process that uses this Hub and no other, with HF_HOME at `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        ours = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return kept | ours | ({"HF_TOKEN": token} if token else {}) | more

    def create(self, name: str, files: dict[str, bytes] | None = None, private: bool = False) -> str:
        """Makes a repository; returns its head. Like every one it begins with a commit of its .gitattributes."""
        kind = "spaces" if name.startswith("spaces/") else "models"
        repository = Repository(kind, name.removeprefix("spaces/"), private)
        repository.commit(
            "refs/heads/main", {".gitattributes": Entry(b"*.safetensors filter=lfs\n", False)}, None, "initial commit"
        )
        self.repositories[name] = repository
        return self.commit(name, files) if files else self.head(name)

    def commit(self, name: str, files: dict[str, bytes | None]) -> str:
        """Commits files to main past all checks of paths and contents (None deletes one); returns the commit."""
        with self.lock:
            repository = self.repositories[name]
            tree = {path: entry for path, entry in repository.tree("main").items() if path not in files}
            tree |= {path: Entry(data, is_lfs(path, len(data))) for path, data in files.items() if data is not None}
            self.objects |= {entry.sha256: entry.data for entry in tree.values() if entry.lfs}
            return repository.commit("refs/heads/main", tree, repository.resolve("main"), "direct")

    def head(self, name: str, revision: str = "main") -> str:
        return self.repositories[name].resolve(revision)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """All files, but for the .gitattributes every repository begins with."""
        tree = self.repositories[name].tree(revision)
        return {path: entry.data for path, entry in tree.items() if path != ".gitattributes"}

    def commits(self, name: str, revision: str = "main") -> list[str]:
        """Ids, the newest first; the last is the server's initial one."""
        return self.repositories[name].history(revision)

    @contextmanager
    def fail(self, method: str, path: str, **fault) -> Iterator[Fault]:
        """While open, requests suffer a `Fault`; its `hits` counts them."""
        armed = Fault(method, path, **fault)
        self.faults.append(armed)
        try:
            yield armed
        finally:
            self.faults.remove(armed)

    def requested(self, method: str, path: str) -> list[LoggedRequest]:
        """The requests so far of a method to a path (regular expressions)."""
        return [request for request in self.requests if re.fullmatch(method, request.method) and re.search(path, request.path)]

    def settle(self) -> None:
        """Waits until no request is being handled: a client that was killed leaves some behind."""
        deadline = time.monotonic() + 30
        while not all(request.ended for request in self.requests):
            assert time.monotonic() < deadline, "a request does not end"
            time.sleep(0.005)

    def storage(self, sha256: str) -> str:
        """The address of an object on the storage's origin, as good as a permission to read and write it."""
        return f"{self.storage_url}/objects/{sha256}?signature={self.secret}"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A Hub for the tests of one file; each test uses other repositories."""
    with Hub() as server:
        yield server


# The server as a client sees it --------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, re.Pattern, str | None, Callable]] = []
API = r"/api/(?P<kind>models|spaces)/(?P<name>[^/]+(?:/[^/]+)??)"
PAGE = r"/(?:(?P<kind>spaces)/)?(?P<name>[^/]+(?:/[^/]+)??)"


def route(methods: str, path: str, needs: str | None = None):
    """The handler of a request. A path with a repository says what its user needs: to "see" or "write" it."""

    def add(function):
        ROUTES.append((methods, re.compile(path), needs, function))
        return function

    return add


class Request(BaseHTTPRequestHandler):
    """One connection of a client. `self.reply` answers it, HubError answers it otherwise."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body leave together
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def handle_any(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = self.hub.users.get(token)
        self.known = self.user is not None or not token
        self.log = LoggedRequest(self.command, self.path, self.user, dict(self.headers))
        with self.hub.lock:
            self.hub.requests.append(self.log)
            struck = [fault for fault in self.hub.faults if fault.strikes(self.command, self.path)]
        self.fault = struck[0] if struck else Fault("", "")
        try:
            with suppress(ConnectionError):  # the client went away
                self.handle_sound_or_faulty()
        finally:
            self.log.ended = True

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def handle_sound_or_faulty(self) -> None:
        assert "Transfer-Encoding" not in self.headers, "chunked bodies are not implemented"
        self.log.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.fault.delay)
        if self.fault.action:
            self.fault.action()
        if self.fault.lost:
            self.close_connection = True
            return
        try:
            if self.fault.status:
                raise HubError(self.fault.status, "injected failure")
            self.dispatch()
        except HubError as error:
            self.reply(error.body, error.status, **error.headers)

    def reply(self, answer=None, status: int = 200, data: bytes | None = None, **headers: str) -> None:
        """Sends JSON, or the `data` given."""
        if data is None:
            headers = {"Content-Type": "application/json; charset=utf-8"} | headers
            data = b"" if answer is None else json.dumps(answer).encode()
        self.log.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def json(self) -> dict:
        return json.loads(self.log.body or b"{}")

    def query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def asks(self, name: str) -> bool:
        return self.query(name).lower() in ("1", "true")

    def dispatch(self) -> None:
        path = urlsplit(self.path).path
        if self.server is self.hub.servers[1]:
            return self.storage(path)
        if not self.known:
            raise HubError(401, "Invalid credentials in Authorization header")
        for methods, pattern, needs, handler in ROUTES:
            match = pattern.fullmatch(path)
            if match and self.command in methods.split():
                values = {key: value and unquote(value) for key, value in match.groupdict().items()}
                with self.hub.lock:
                    if needs:
                        values = {"repository": self.open(values.pop("kind"), values.pop("name"), needs)} | values
                    return handler(self, **values)
        raise HubError(404, f"No such route: {self.command} {path}")

    def open(self, kind: str | None, name: str, needs: str) -> Repository:
        """A repository, if the user may know of it; else the real Hub's answers."""
        repository = self.hub.repositories.get(f"spaces/{name}" if kind == "spaces" else name)
        namespace = name.split("/")[0]
        if repository is None or (repository.private and not self.belongs_to(namespace)):
            if self.user:
                raise HubError(404, "Repository not found", "RepoNotFound")
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        proposes = self.user and (self.asks("create_pr") or "/refs%2Fpr%2F" in self.path)  # everyone may open a pull request
        if needs == "write" and not proposes and not self.may_write(namespace):
            self.forbid()
        return repository

    def belongs_to(self, namespace: str) -> bool:
        return bool(self.user) and (namespace == self.user or (namespace == "tost" and self.user != "stranger"))

    def may_write(self, namespace: str) -> bool:
        return self.belongs_to(namespace) and self.user != "reader"

    def page(self, repository: Repository) -> str:
        """The address of a repository."""
        return f"{self.hub.url}/{'spaces/' if repository.kind == 'spaces' else ''}{repository.name}"

    def forbid(self) -> None:
        if self.user:
            raise HubError(403, "You don't have the required permissions to perform this action")
        raise HubError(401, "Invalid username or password.", "RepoNotFound")

    # The repositories and what is there

    @route("POST", "/api/repos/create")
    def create_repository(self):
        namespace = self.json.get("organization") or self.user or ""
        if not self.may_write(namespace):
            self.forbid()
        name = f"{namespace}/{self.json['name']}"
        key = f"spaces/{name}" if self.json.get("type") == "space" else name
        if key != name and self.json.get("sdk") != "static":
            raise HubError(400, "a Space needs an sdk")
        if key in self.hub.repositories:
            taken = "You already created this repo"
            raise HubError(409, taken, body={"error": taken, "url": self.page(self.hub.repositories[key])})
        self.hub.create(key, private=self.json.get("visibility") == "private" or bool(self.json.get("private")))
        self.reply({"url": self.page(self.hub.repositories[key]), "id": name, "name": name})

    @route("GET", API + "(?:/revision/(?P<revision>[^/]+))?", needs="see")
    def info(self, repository: Repository, revision: str | None):
        head = repository.resolve(revision or "main")
        tree = repository.commits[head].tree
        with suppress(ValueError, yaml.YAMLError):
            card = card_data(tree["README.md"].data) if "README.md" in tree else {}
        siblings = [
            {"rfilename": path} | ({"blobId": entry.oid} | entry.listing if self.asks("blobs") else {})
            for path, entry in tree.items()
        ]
        self.reply(
            {
                "id": repository.name,
                "sha": head,
                "private": repository.private,
                "gated": False,
                "tags": card.get("tags") or [],
                "pipeline_tag": card.get("pipeline_tag"),
                "library_name": card.get("library_name", "transformers"),
                "cardData": card or None,
                "siblings": siblings,
            }
        )

    @route("GET", API + "/tree/(?P<revision>[^/]+)(?P<folder>/.+)?", needs="see")
    def list_tree(self, repository: Repository, revision: str, folder: str | None):
        tree = sorted(repository.tree(revision).items())
        if folder:  # transformers looks for one of chat templates
            raise HubError(404, f'{folder} does not exist on "{revision}"', "EntryNotFound")
        self.reply([{"type": "file", "path": path, "oid": entry.oid} | entry.listing for path, entry in tree])

    @route("GET HEAD", PAGE + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)", needs="see")
    def resolve(self, repository: Repository, revision: str, path: str):
        head = repository.resolve(revision)
        entry = repository.commits[head].tree.get(path)
        if entry is None:
            raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=head)
        headers = {"X_Repo_Commit": head, "ETag": f'"{entry.etag}"'}
        if entry.lfs:
            linked = {"X_Linked_ETag": f'"{entry.etag}"', "X_Linked_Size": str(len(entry.data))}
            return self.reply(status=302, Location=self.hub.storage(entry.sha256), **headers, **linked)
        self.reply(data=entry.data, **headers)

    # Changes

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        errors = card_errors(self.json["content"].encode(), self.json.get("repoType", "model"))
        self.reply({"errors": [{"message": message} for message in errors], "warnings": []}, 400 if errors else 200)

    @route("POST", API + "/preupload/(?P<revision>[^/]+)", needs="write")
    def preupload(self, repository: Repository, revision: str):
        tree = repository.tree(revision)
        answers = []
        for file in self.json["files"]:
            mode = "lfs" if is_lfs(file["path"], file["size"]) else "regular"
            known = {"oid": tree[file["path"]].etag} if file["path"] in tree else {}
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False} | known)
        self.reply({"files": answers})

    @route("POST", PAGE + r"\.git/info/lfs/objects/batch", needs="see")
    def lfs_batch(self, repository: Repository):
        if not self.user:
            self.forbid()
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in self.json["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self.hub.objects:
                wanted["actions"] = {"upload": {"href": self.hub.storage(wanted["oid"]), "header": {}}}
        self.reply({"transfer": "basic", "objects": objects})

    def storage(self, path: str) -> None:
        """The origin of the LFS objects: GET or PUT /objects/SHA256?signature=..."""
        sha256 = path.removeprefix("/objects/")
        if "Authorization" in self.headers:
            raise HubError(400, "a token was sent to the storage")
        if self.query("signature") != self.hub.secret:
            raise HubError(403, "bad signature")
        if self.command != "PUT":
            return self.reply(data=self.hub.objects[sha256], ETag=f'"{sha256}"')
        if hashlib.sha256(self.log.body).hexdigest() != sha256:
            raise HubError(400, "the content is not what its name says")
        self.hub.objects[sha256] = self.log.body
        self.reply({})

    @route("POST", API + "/commit/(?P<revision>[^/]+)", needs="write")
    def commit(self, repository: Repository, revision: str):
        header, *operations = (json.loads(line) for line in self.log.body.splitlines() if line.strip())
        message, answer = header["value"], {}
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        parent = repository.refs.get(ref)
        if parent is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if not parent.startswith(message.get("parentCommit") or ""):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        old = repository.commits[parent].tree
        tree = self.changed(old, operations)
        commit = parent
        if self.asks("create_pr"):
            repository.pull_requests += 1
            ref = f"refs/pr/{repository.pull_requests}"
            answer = {"pullRequestUrl": f"{self.page(repository)}/discussions/{repository.pull_requests}"}
        if tree != old:
            commit = repository.commit(ref, tree, parent, message["summary"])
        url = f"{self.page(repository)}/commit/{commit}"
        self.reply({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""} | answer)

    def changed(self, tree: dict[str, Entry], operations: list[dict]) -> dict[str, Entry]:
        """The tree of a commit, made of its parent's and of what the client sent."""
        tree = dict(tree)
        for operation in operations:
            value, path = operation["value"], operation["value"]["path"]
            match operation["key"]:
                case "file":
                    content = base64.b64decode(value["content"])
                    if path == "README.md" and card_errors(content):
                        raise HubError(400, "Invalid metadata in README.md: " + "; ".join(card_errors(content)))
                    if is_lfs(path, len(content)):
                        raise HubError(400, f"{path} must be uploaded to LFS")
                    tree[path] = Entry(content, False)
                case "lfsFile":
                    if value["oid"] not in self.hub.objects:
                        raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
                    tree[path] = Entry(self.hub.objects[value["oid"]], True)
                case "deletedFile":
                    if tree.pop(path, None) is None:
                        raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
                case other:
                    raise HubError(400, f"Unknown operation: {other}")
        return tree

    @route("POST", API + "/(?P<what>tag|branch)/(?P<revision>[^/]+)", needs="write")
    def set_ref(self, repository: Repository, what: str, revision: str):
        ref = f"refs/tags/{self.json['tag']}" if what == "tag" else f"refs/heads/{revision}"
        if ref in repository.refs:
            raise HubError(409, "Reference already exists")
        repository.refs[ref] = repository.resolve(revision if what == "tag" else self.json.get("startingPoint") or "main")
        self.reply({})
