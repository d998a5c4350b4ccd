"""A Hub on loopback for the real huggingface_hub client: models and Spaces, private ones, branches, tags, pull requests, LFS,
.gitignore, and injected faults. Everything is in memory; processes use it with `hub.environment(home, hub.token)`."""

import base64
import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest


LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".onnx")
Tree = dict[str, bytes]


class HubError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str = "", **body: str):
        self.status, self.body = status, {"error": message} | body
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, tuple[Tree, list[str]]] = field(default_factory=dict)  # by hash: files, own and earlier hashes
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, tree: Tree, parent: str | None = None) -> str:
        self.refs[ref] = secrets.token_hex(20)
        self.commits[self.refs[ref]] = (tree, [self.refs[ref], *(self.commits[parent][1] if parent else [])])
        return self.refs[ref]

    def resolve(self, revision: str) -> str:
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        if revision not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return revision

    def tree(self, revision: str) -> Tree:
        return self.commits[self.resolve(revision)][0]


def describe(path: str, data: bytes) -> dict:
    """A file's entry in listings: its size, git object id, and LFS object if it has one."""
    sha256, oid = hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    lfs = {"lfs": {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 130}}
    is_lfs = bool(data) and path.endswith(LFS_SUFFIXES)
    return {"oid": oid, "blobId": oid, "size": len(data), "etag": sha256 if is_lfs else oid} | (lfs if is_lfs else {})


class Hub:
    """The server. Names are those of models ("tost/mine") or "spaces/tost/mine"."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS objects by their SHA-256
        self.requests: list[SimpleNamespace] = []  # each with method, path, body, status
        self.faults: list[Callable[[str], None]] = []
        self.token = f"hf_{secrets.token_hex(17)}"  # of the only user, who has all permissions
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Request,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home: str | os.PathLike, token: str | None = None, **variables: str) -> dict[str, str]:
        """The environment of a process that uses this Hub and no other, with HF_HOME at `home`."""
        inherited = {name: x for name, x in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        switches = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK", "OMP_NUM_THREADS")
        loopback = {"HF_ENDPOINT": self.url, "NO_PROXY": "127.0.0.1,localhost", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
        user = {"HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""} | ({"HF_TOKEN": token} if token else {})
        return inherited | loopback | user | dict.fromkeys(switches, "1") | variables

    def create(self, name: str, files: Tree | None = None, private: bool = False) -> str:
        """Creates a repository and returns its head. Its first commit adds .gitattributes, as on the real Hub."""
        self.repositories[name] = Repository(private)
        self.repositories[name].commit("refs/heads/main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.commit(name, files) if files else self.head(name)

    def commit(self, name: str, files: Tree) -> str:
        """Commits files to main without any checks and returns the commit."""
        self.objects |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        repository = self.repositories[name]
        return repository.commit("refs/heads/main", repository.tree("main") | files, self.head(name))

    def head(self, name: str, revision: str = "main") -> str:
        return self.repositories[name].resolve(revision)

    def files(self, name: str, revision: str = "main") -> Tree:
        """All files except the initial .gitattributes."""
        return {path: data for path, data in self.repositories[name].tree(revision).items() if path != ".gitattributes"}

    def commits(self, name: str, revision: str = "main") -> list[str]:
        """Commit hashes, newest first; the last is the initial commit of the server."""
        return self.repositories[name].commits[self.head(name, revision)][1]

    @contextmanager
    def fail(self, method: str, path: str, status: int = 0):
        """While active, requests of a method to a path (regular expressions) get this status, or no response if it is 0."""

        def raise_fault(request: str) -> None:
            if re.fullmatch(f"{method} .*{path}.*", request):
                raise HubError(status, "injected failure") if status else ConnectionAbortedError

        self.faults.append(raise_fault)
        try:
            yield
        finally:
            self.faults.pop()


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    """A Hub; each test uses other repositories."""
    server_hub = Hub()
    threading.Thread(target=server_hub.server.serve_forever, args=(0.05,), daemon=True).start()
    yield server_hub
    server_hub.server.shutdown()
    server_hub.server.server_close()


API = r"/api/(?:models/)?(?P<name>(?:spaces/)?[^/]+/[^/]+)"
PAGE = r"/(?P<name>(?:spaces/)?[^/]+/[^/]+?)"
ROUTES = {  # by the method of Request that handles them
    "create_repository": r"POST /api/repos/create",
    "delete_repository": r"DELETE /api/repos/delete",
    "delete_branch": rf"DELETE {API}/branch/(?P<branch>[^/]+)",
    "info": rf"GET {API}(?:/revision/(?P<revision>[^/]+))?",
    "list_tree": rf"GET {API}/tree/(?P<revision>[^/]+)",
    "resolve": rf"(?:GET|HEAD) {PAGE}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
    "validate_yaml": r"POST /api/validate-yaml",
    "preupload": rf"POST {API}/preupload/(?P<revision>[^/]+)",
    "lfs_batch": rf"POST {PAGE}\.git/info/lfs/objects/batch",
    "store_object": r"PUT /objects/(?P<sha256>.+)",
    "commit": rf"POST {API}/commit/(?P<revision>[^/]+)",
    "set_ref": rf"POST {API}/(?P<kind>tag|branch)/(?P<revision>[^/]+)",
}


class Request(BaseHTTPRequestHandler):
    """One connection of a client. Handlers return the content of the response, bytes or JSON, or raise HubError."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # sends headers and body together
    hub: Hub

    def log_message(self, *args) -> None: ...

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.response_headers: dict[str, str] = {}
        self.hub.requests.append(SimpleNamespace(method=self.command, path=self.path, body=self.body))
        try:
            for fault in self.hub.faults:
                fault(f"{self.command} {self.path}")
            status, content = 200, self.dispatch()
        except HubError as error:
            status, content, self.response_headers = error.status, error.body, error.headers
        except ConnectionError:
            self.close_connection = True
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | self.response_headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def dispatch(self) -> bytes | dict | list:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_change = self.command in ("POST", "DELETE") and "validate-yaml" not in self.path
        if token not in ("", self.hub.token) or (is_change and not token):
            raise HubError(401, "Invalid credentials in Authorization header")
        request = f"{self.command} {urlsplit(self.path).path}"
        matches = ((name, re.fullmatch(pattern, request)) for name, pattern in ROUTES.items())
        handler, match = next(((name, match) for name, match in matches if match), (None, None))
        if match is None:
            raise HubError(404, f"No such route: {request}", "EntryNotFound")
        values = {key: value and unquote(value) for key, value in match.groupdict().items()}
        if "name" in values:
            repository = values["repository"] = self.hub.repositories.get(values["name"])
            if repository is None or (repository.private and not token):
                raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        return getattr(self, handler)(**values)

    @property
    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def read_name(self) -> tuple[str, str]:
        """The requested repository's name and its key."""
        name = f"{self.json['organization']}/{self.json['name']}"
        return name, f"spaces/{name}" if self.json.get("type") == "space" else name

    def delete_repository(self):
        del self.hub.repositories[self.read_name()[1]]
        return {}

    def delete_branch(self, name: str, repository: Repository, branch: str):
        del repository.refs[f"refs/heads/{branch}"]
        return {}

    def create_repository(self):
        name, key = self.read_name()
        url = f"{self.hub.url}/{key}"
        if key in self.hub.repositories:
            raise HubError(409, "You already created this repo", url=url)
        self.hub.create(key, private=self.json.get("visibility") == "private" or bool(self.json.get("private")))
        return {"url": url, "id": name, "name": name}

    def info(self, name: str, repository: Repository, revision: str | None):
        head = repository.resolve(revision or "main")
        siblings = [{"rfilename": path} | describe(path, data) for path, data in repository.tree(head).items()]
        return {"id": name.removeprefix("spaces/"), "sha": head, "private": repository.private, "siblings": siblings}

    def list_tree(self, name: str, repository: Repository, revision: str):
        return [{"type": "file", "path": path} | describe(path, data) for path, data in repository.tree(revision).items()]

    def resolve(self, name: str, repository: Repository, revision: str, path: str):
        data = repository.tree(revision).get(path)
        if data is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        self.response_headers = {"X-Repo-Commit": repository.resolve(revision), "ETag": f'"{describe(path, data)["etag"]}"'}
        return data

    def validate_yaml(self):
        return {"errors": [], "warnings": []}

    def preupload(self, name: str, repository: Repository, revision: str):
        tree = repository.tree(revision)
        ignored_names = self.json.get("gitIgnore", tree.get(".gitignore", b"").decode()).split()
        files = []
        for path in (file["path"] for file in self.json["files"]):
            mode, ignore = "lfs" if path.endswith(LFS_SUFFIXES) else "regular", path.rpartition("/")[2] in ignored_names
            oid = describe(path, tree[path])["etag"] if path in tree else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, "oid": oid})
        return {"files": files}

    def lfs_batch(self, name: str, repository: Repository):
        objects = self.json["objects"]
        for lfs_object in objects:
            if lfs_object["oid"] not in self.hub.objects:
                lfs_object["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{lfs_object['oid']}", "header": {}}}
        return {"transfer": "basic", "objects": objects}

    def store_object(self, sha256: str):
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise HubError(400, "The object differs from its SHA-256")
        self.hub.objects[sha256] = self.body
        return {}

    def commit(self, name: str, repository: Repository, revision: str):
        _, *operations = (json.loads(line) for line in self.body.splitlines() if line.strip())
        parent = repository.resolve(revision)
        tree = dict(repository.tree(parent))
        for operation in operations:
            value, path = operation["value"], operation["value"]["path"]
            if operation["key"] == "deletedFile":
                del tree[path]
            else:
                tree[path] = base64.b64decode(value["content"]) if "content" in value else self.hub.objects[value["oid"]]
        ref, answer, page = f"refs/heads/{revision}", {}, f"{self.hub.url}/{name}"
        if "create_pr=1" in self.path:
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.refs)
            ref, answer = f"refs/pr/{number}", {"pullRequestUrl": f"{page}/discussions/{number}"}
        commit = repository.commit(ref, tree, parent)
        return {"success": True, "commitOid": commit, "commitUrl": f"{page}/commit/{commit}", "hookOutput": ""} | answer

    def set_ref(self, name: str, repository: Repository, kind: str, revision: str):
        ref = f"refs/tags/{self.json['tag']}" if kind == "tag" else f"refs/heads/{revision}"
        if ref in repository.refs:
            raise HubError(409, "Reference already exists")
        repository.refs[ref] = repository.resolve(revision if kind == "tag" else "main")
        return {}
