"""A Hub on loopback for the real huggingface_hub client: models, datasets and spaces, users, private and gated repositories,
branches, tags, pull requests, LFS, and faults on demand.

    with Hub(folder) as hub:
        subprocess.run([...], env=hub.environment(home, hub.token("writer")))
        assert hub.files("tost/mine")["config.json"] == ...
        with hub.fail("POST", "/commit/", status=500):
            ...

As on the real one, large or binary files go to a second origin (`hub.storage_url`), which refuses every token. What it
keeps is in `hub_store`. Not here: Xet, multipart uploads, paging, and routes that no test reaches.
"""

import hashlib
import hmac
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
from hub_store import SPACE_SDKS, Commit, HubError, Repository, Store, card_data, card_errors, now


# The server as a test sees it ------------------------------------------------------------------------------------------------


@dataclass
class User:
    name: str
    organizations: tuple[str, ...] = ()
    role: str = "write"

    def belongs_to(self, namespace: str) -> bool:
        return namespace in (self.name, *self.organizations)


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
    cut: str | None = None  # close the connection: "request" amid its body, "answer" after doing it, "body" amid the answer's
    delay: float = 0.0  # seconds before doing anything
    action: Callable[[], None] | None = None  # called before doing anything; amid the body with cut="request"
    hits: int = 0
    seen: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        self.seen += 1
        hit = self.seen > self.skip and (self.times is None or self.hits < self.times)
        self.hits += hit
        return hit


@dataclass(repr=False)
class Hub(Store):
    """The server, running inside `with`."""

    aliases: dict[str, str] = field(default_factory=dict)  # canonical names: {"tost-base": "tost/tost-base"}
    requests: list[LoggedRequest] = field(default_factory=list)  # in the order of their arrival

    def __post_init__(self):
        super().__post_init__()
        self.faults: list[Fault] = []
        self.tampered: dict[str, bytes] = {}
        self.secret = secrets.token_bytes(16)
        # "writer" and "reader" belong to the organization tost, "stranger" does not
        users = (User("writer", ("tost",)), User("reader", ("tost",), "read"), User("stranger"))
        self.users = {f"hf_{secrets.token_hex(17)}": user for user in users}
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
        return next(token for token, user in self.users.items() if user.name == name)

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

    @contextmanager
    def fail(self, method: str, path: str, **fault) -> Iterator[Fault]:
        """While open, requests suffer a `Fault`; its `hits` counts them."""
        armed = Fault(method, path, **fault)
        self.faults.append(armed)
        try:
            yield armed
        finally:
            self.faults.remove(armed)

    def tamper(self, name: str, path: str, data: bytes) -> None:
        """From now on serves these bytes as the file (and every file of its content), though it is listed as before."""
        repository = self.repository(name)
        self.tampered[repository.read(repository.resolve("main")).tree[path].sha256] = data

    def requested(self, method: str, path: str) -> list[LoggedRequest]:
        """The requests so far of a method to a path (regular expressions)."""
        return [request for request in self.requests if re.fullmatch(method, request.method) and re.search(path, request.path)]

    def settle(self) -> None:
        """Waits until no request is being handled: a client that was killed leaves some behind."""
        deadline = time.monotonic() + 30
        while not all(request.ended for request in self.requests):
            assert time.monotonic() < deadline, "a request does not end"
            time.sleep(0.005)

    def signature(self, sha256: str) -> str:
        return hmac.new(self.secret, sha256.encode(), "sha256").hexdigest()

    def storage(self, sha256: str) -> str:
        """The address of an object on the storage's origin, as good as a permission to read and write it."""
        return f"{self.storage_url}/objects/{sha256}?signature={self.signature(sha256)}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    """A Hub for the tests of one file; each test uses repositories of its own."""
    with Hub(tmp_path_factory.mktemp("hub")) as server:
        yield server


# The server as a client sees it ----------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, re.Pattern, str | None, Callable]] = []
API = r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+(?:/[^/]+)??)"
PAGE = r"/(?:(?P<kind>datasets|spaces)/)?(?P<name>[^/]+(?:/[^/]+)??)"


def route(methods: str, path: str, needs: str | None = None):
    """The handler of a request. A path with a repository says what its user needs: to "see", "read" or "write" it."""

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
        self.log = LoggedRequest(self.command, self.path, self.user and self.user.name, dict(self.headers))
        with self.hub.lock:
            self.hub.requests.append(self.log)
            struck = [fault for fault in self.hub.faults if fault.strikes(self.command, self.path)]
        self.fault = struck[0] if struck else Fault("", "")
        try:
            with suppress(ConnectionError):  # the client went away
                self.handle_sound_or_faulty()
        finally:
            self.log.ended = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def handle_sound_or_faulty(self) -> None:
        self.log.body = self.receive()
        if self.fault.cut == "request":
            self.close_connection = True
            return
        time.sleep(self.fault.delay)
        if self.fault.action:
            self.fault.action()
        try:
            if self.fault.status:
                raise HubError(self.fault.status, "injected failure")
            self.dispatch()
        except HubError as error:
            self.reply(error.body, error.status, **error.headers)

    def receive(self) -> bytes:
        """The body; with cut="request" half of it, on which a connection ends."""
        assert "Transfer-Encoding" not in self.headers, "chunked bodies are not implemented"
        size = int(self.headers.get("Content-Length", 0))
        wanted = size // 2 if self.fault.cut == "request" else size
        body = self.rfile.read(wanted)
        if self.fault.cut == "request" and self.fault.action:
            self.fault.action()
        if len(body) < wanted:
            raise ConnectionError("the client went away")
        return body

    def reply(self, answer=None, status: int = 200, data: bytes | None = None, **headers: str) -> None:
        """Sends JSON, or the `data` given."""
        if data is None:
            headers = {"Content-Type": "application/json; charset=utf-8"} | headers
            data = b"" if answer is None else json.dumps(answer).encode()
        if self.fault.cut == "answer":
            self.close_connection = True
            return
        self.log.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.fault.cut == "body":
            self.close_connection = True
            data = data[: len(data) // 2]
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
                if needs:
                    values = {"repository": self.open(values.pop("kind") or "models", values.pop("name"), needs)} | values
                return handler(self, **values)
        raise HubError(404, f"No such route: {self.command} {path}")

    def open(self, kind: str, name: str, needs: str) -> Repository:
        """A repository, if the user may know of it; else the real Hub's answers."""
        if name in self.hub.aliases:
            raise HubError(307, "moved", Location=self.path.replace(f"/{name}", f"/{self.hub.aliases[name]}", 1))
        repository = Repository(self.hub, kind, name)
        member = bool(self.user) and self.user.belongs_to(name.split("/")[0])
        if ".." in name.split("/") or not repository.exists or (repository.state["private"] and not member):
            if self.user:
                raise HubError(404, "Repository not found", "RepoNotFound")
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if needs == "read" and repository.state["gated"] and not member:
            raise HubError(403 if self.user else 401, f"Access to model {name} is restricted.", "GatedRepo")
        proposes = self.user and (self.asks("create_pr") or "/refs%2Fpr%2F" in self.path)  # everyone may open a pull request
        if needs == "write" and not proposes and not (member and self.user.role == "write"):
            self.forbid()
        return repository

    def page(self, repository: Repository) -> str:
        """The address of a repository."""
        kind = "" if repository.kind == "models" else f"{repository.kind}/"
        return f"{self.hub.url}/{kind}{repository.name}"

    def forbid(self) -> None:
        if self.user:
            raise HubError(403, "You don't have the required permissions to perform this action")
        raise HubError(401, "Invalid username or password.", "RepoNotFound")

    # The account and the repositories

    @route("POST", "/api/repos/create")
    def create_repository(self):
        namespace = self.json.get("organization") or (self.user.name if self.user else "")
        if not (self.user and self.user.belongs_to(namespace) and self.user.role == "write"):
            self.forbid()
        repository = Repository(self.hub, self.json.get("type", "model") + "s", f"{namespace}/{self.json['name']}")
        if repository.kind == "spaces" and self.json.get("sdk") not in SPACE_SDKS:
            raise HubError(400, "a Space needs an sdk")
        with repository.lock:
            if repository.exists:
                taken = "You already created this repo"
                raise HubError(409, taken, body={"error": taken, "url": self.page(repository)})
            private = self.json.get("visibility") == "private" or bool(self.json.get("private"))
            repository.create(self.user.name, private)
        self.reply({"url": self.page(repository), "id": repository.name, "name": repository.name, "private": private})

    # What is there

    @route("GET", API + "(?:/revision/(?P<revision>[^/]+))?", needs="see")
    def info(self, repository: Repository, revision: str | None):
        head = repository.resolve(revision or "main")
        commit, state = repository.read(head), repository.state
        card = self.hub.parsed(commit, "README.md", card_data)
        config = self.hub.parsed(commit, "config.json", json.loads)
        siblings = [{"rfilename": path} for path in commit.tree]
        if self.asks("blobs"):
            for sibling, entry in zip(siblings, commit.tree.values()):
                sibling |= {"size": entry.size, "blobId": entry.oid}
                sibling |= {"lfs": {"sha256": entry.sha256, "size": entry.size, "pointerSize": 130}} if entry.lfs else {}
        library = card.get("library_name") or ("transformers" if "model_type" in config else None)
        self.reply(
            {
                "id": repository.name,
                "author": repository.name.split("/")[0],
                "sha": head,
                "private": state["private"],
                "gated": "auto" if state["gated"] else False,
                "createdAt": state["created"],
                "lastModified": commit.date,
                "tags": [tag for tag in (library, config.get("model_type"), *(card.get("tags") or [])) if tag],
                "pipeline_tag": card.get("pipeline_tag"),
                "library_name": library,
                "cardData": card or None,
                "config": {key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config},
                "siblings": siblings,
            }
        )

    @route("GET", API + "/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", needs="see")
    def tree(self, repository: Repository, revision: str, folder: str | None):
        prefix = f"{folder}/" if folder else ""
        listing, folders = [], set()
        for path, entry in sorted(repository.read(repository.resolve(revision)).tree.items()):
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            depth = len(parts) if self.asks("recursive") else min(2, len(parts))
            folders |= {prefix + "/".join(parts[:i]) for i in range(1, depth)}
            if depth == len(parts):
                listing.append(entry.listed(path))
        listing += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        if folder and not listing:
            raise HubError(404, f'{folder} does not exist on "{revision}"', "EntryNotFound")
        self.reply(listing)

    @route("GET HEAD", PAGE + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)", needs="read")
    def resolve(self, repository: Repository, revision: str, path: str):
        head = repository.resolve(revision)
        entry = repository.read(head).tree.get(path)
        if entry is None:
            raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=head)
        headers = {"X_Repo_Commit": head, "ETag": f'"{entry.etag}"'}
        if entry.lfs:
            linked = {"X_Linked_ETag": f'"{entry.etag}"', "X_Linked_Size": str(entry.size)}
            return self.reply(status=302, Location=self.hub.storage(entry.sha256), **headers, **linked)
        self.send_file(entry.sha256, **headers)

    def send_file(self, sha256: str, **headers: str) -> None:
        data = self.hub.tampered.get(sha256) or self.hub.object(sha256).read_bytes()
        headers |= {"Content_Type": "application/octet-stream", "Accept_Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.reply(data=data, **headers)
        first = int(asked[1]) if asked[1] else max(len(data) - int(asked[2]), 0)
        last = min(int(asked[2]), len(data) - 1) if asked[1] and asked[2] else len(data) - 1
        if first >= len(data):
            raise HubError(416, "Range Not Satisfiable", Content_Range=f"bytes */{len(data)}")
        self.reply(data=data[first : last + 1], status=206, Content_Range=f"bytes {first}-{last}/{len(data)}", **headers)

    # Changes

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        readme = self.json["content"].encode()
        errors = [{"message": message} for message in card_errors(readme, self.json.get("repoType", "model"))]
        missing = "empty or missing yaml metadata in repo card"
        warnings = [] if errors or card_data(readme) else [{"message": missing}]
        self.reply({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    @route("POST", API + "/preupload/(?P<revision>[^/]+)", needs="write")
    def preupload(self, repository: Repository, revision: str):
        tree = repository.read(repository.resolve(revision)).tree
        answers = []
        for file in self.json["files"]:
            mode = "lfs" if self.hub.is_lfs(file["path"], file["size"]) else "regular"
            known = {"oid": tree[file["path"]].etag} if file["path"] in tree else {}
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False} | known)
        self.reply({"files": answers})

    @route("POST", PAGE + r"\.git/info/lfs/objects/batch", needs="see")
    def lfs_batch(self, repository: Repository):
        if not self.user:
            self.forbid()
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in self.json["objects"]]
        for wanted in objects:
            if not self.hub.object(wanted["oid"]).exists():
                wanted["actions"] = {"upload": {"href": self.hub.storage(wanted["oid"]), "header": {}}}
        self.reply({"transfer": "basic", "objects": objects})

    def storage(self, path: str) -> None:
        """The origin of the LFS objects: GET or PUT /objects/SHA256?signature=..."""
        sha256 = path.removeprefix("/objects/")
        if "Authorization" in self.headers:
            raise HubError(400, "a token was sent to the storage")
        if not hmac.compare_digest(self.query("signature"), self.hub.signature(sha256)):
            raise HubError(403, "bad signature")
        if self.command != "PUT":
            return self.send_file(sha256, ETag=f'"{sha256}"')
        if hashlib.sha256(self.log.body).hexdigest() != sha256:
            raise HubError(400, "the content is not what its name says")
        self.hub.store(self.log.body)
        self.reply({})

    @route("POST", API + "/commit/(?P<revision>[^/]+)", needs="write")
    def commit(self, repository: Repository, revision: str):
        header, *operations = (json.loads(line) for line in self.log.body.splitlines() if line.strip())
        message, answer = header["value"], {}
        with repository.lock:
            ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
            parent = repository.state["refs"].get(ref)
            if parent is None:
                raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            if not parent.startswith(message.get("parentCommit") or ""):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            old = repository.read(parent).tree
            tree = self.hub.changed(old, operations)
            commit = parent
            if self.asks("create_pr"):
                number = repository.open_pull_request(message["summary"], self.user.name)
                ref, answer = f"refs/pr/{number}", {"pullRequestUrl": f"{self.page(repository)}/discussions/{number}"}
            if tree != old:
                words = message["summary"], message.get("description", "")
                commit = repository.commit(ref, Commit(tree, parent, *words, self.user.name, now()))
        url = f"{self.page(repository)}/commit/{commit}"
        self.reply({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""} | answer)

    @route("POST", API + "/(?P<what>tag|branch)/(?P<revision>[^/]+)", needs="write")
    def set_ref(self, repository: Repository, what: str, revision: str):
        ref = f"refs/tags/{self.json['tag']}" if what == "tag" else f"refs/heads/{revision}"
        with repository.lock:
            refs = repository.state["refs"]
            if ref in refs:
                raise HubError(409, "Reference already exists")
            refs[ref] = repository.resolve(revision if what == "tag" else self.json.get("startingPoint") or "main")
            repository.set(refs=refs)
        self.reply({})

    @route("POST", API + r"/discussions/(?P<number>\d+)/merge", needs="write")
    def merge(self, repository: Repository, number: str):
        """Takes the pull request's tree; one whose base is no longer the head is refused."""
        with repository.lock:
            state, head = repository.state, repository.resolve("main")
            if head not in [commit for commit, _ in repository.history(f"refs/pr/{number}")]:
                raise HubError(409, "The pull request has conflicts")
            request = state["pull_requests"][int(number) - 1]
            tree = repository.read(repository.resolve(f"refs/pr/{number}")).tree
            commit = Commit(tree, head, f"{request['title']} (#{number})", "", self.user.name, now())
            merged = repository.commit("refs/heads/main", commit)
            request |= {"status": "merged", "mergeCommitId": merged}
            repository.set(pull_requests=state["pull_requests"])
        self.reply({})
