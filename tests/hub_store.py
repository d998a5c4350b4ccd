"""What a Hub for tests keeps: repositories with commits, branches and tags, their files, and the rules for model cards.

Contents lie under their SHA-256 in `objects`, commits under their ids; what a repository is lies in one file, replaced in one
step under its lock, so that a commit is there entirely or not at all.
"""

import base64
import hashlib
import json
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml


LFS_SUFFIXES = tuple(".safetensors .bin .pt .pth .ckpt .pkl .npy .npz .h5 .onnx .gguf .parquet .gz".split())
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
LICENSES = set(
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsl-1.0 cc cc-by-2.0 "
    "cc-by-3.0 cc-by-4.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 "
    "cc0-1.0 creativeml-openrail-m ecl-2.0 epl-2.0 eupl-1.2 gemma gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 llama2 "
    "llama3 llama3.1 llama3.2 llama3.3 llama4 mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail osl-3.0 other pddl unknown "
    "unlicense wtfpl zlib".split()
)
PIPELINE_TAGS = set(
    "any-to-any audio-classification automatic-speech-recognition depth-estimation feature-extraction fill-mask "
    "image-classification image-feature-extraction image-segmentation image-text-to-text image-to-image image-to-text "
    "mask-generation multiple-choice object-detection other question-answering reinforcement-learning robotics "
    "sentence-similarity summarization tabular-classification tabular-regression text-classification text-generation "
    "text-ranking text-to-image text-to-speech text-to-video time-series-forecasting token-classification translation "
    "unconditional-image-generation video-classification visual-question-answering zero-shot-classification "
    "zero-shot-image-classification".split()
)
SPACE_SDKS = ("gradio", "docker", "static")
SPACE_COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")


class HubError(Exception):
    """An answer that is no success: its status, sentence, X-Error-Code and further headers."""

    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None, **headers: str):
        self.status, self.body = status, body or {"error": message}
        self.headers = headers | {"X-Error-Message": " ".join(message.split())} | ({"X-Error-Code": code} if code else {})


@dataclass
class Entry:
    """A file of a commit. `oid` is git's id of what git keeps: the content, or the pointer to an LFS object."""

    sha256: str
    size: int
    oid: str
    lfs: bool

    @classmethod
    def of(cls, sha256: str, data: bytes | None, size: int) -> "Entry":
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        kept = pointer if data is None else data
        return cls(sha256, size, hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest(), lfs=data is None)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    def listed(self, path: str) -> dict:
        lfs = {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 100 + len(str(self.size))}} if self.lfs else {}
        return {"type": "file", "path": path, "oid": self.oid, "size": self.size} | lfs


@dataclass
class Commit:
    tree: dict[str, Entry]
    parent: str | None
    title: str
    description: str
    author: str
    date: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Commit":
        values = json.loads(data)
        return cls(**values | {"tree": {path: Entry(**entry) for path, entry in values["tree"].items()}})


class Repository:
    """A folder with commits/ID.json and state.json: visibility, refs, pull requests. Change it under `lock` only."""

    def __init__(self, store: "Store", kind: str, name: str):
        self.store, self.kind, self.name = store, kind, name
        self.folder = store.root / "repositories" / kind / name
        with store.lock:
            self.lock = store.locks[kind, name]

    @property
    def exists(self) -> bool:
        return (self.folder / "state.json").exists()

    @property
    def state(self) -> dict:
        return json.loads((self.folder / "state.json").read_bytes())

    def set(self, **changes) -> None:
        write(self.folder / "state.json", json.dumps(self.state | changes).encode())

    def create(self, author: str, private: bool = False, gated: bool = False) -> None:
        tree = {".gitattributes": self.store.regular(GIT_ATTRIBUTES)}
        first = self.keep(Commit(tree, None, "initial commit", "", author, now()))
        state = {"private": private, "gated": gated, "pull_requests": [], "created": now()}
        write(self.folder / "state.json", json.dumps(state | {"refs": {"refs/heads/main": first}}).encode())

    def read(self, commit_id: str) -> Commit:
        return Commit.from_json((self.folder / "commits" / f"{commit_id}.json").read_bytes())

    def keep(self, commit: Commit) -> str:
        commit_id = hashlib.sha1(commit.to_json() + secrets.token_bytes(8)).hexdigest()
        write(self.folder / "commits" / f"{commit_id}.json", commit.to_json())
        return commit_id

    def commit(self, ref: str, commit: Commit) -> str:
        commit_id = self.keep(commit)
        self.set(refs=self.state["refs"] | {ref: commit_id})
        return commit_id

    def resolve(self, revision: str) -> str:
        refs = self.state["refs"]
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in refs:
                return refs[ref]
        found = list((self.folder / "commits").glob(revision + "*")) if re.fullmatch("[0-9a-f]{7,40}", revision) else []
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0].stem

    def history(self, revision: str) -> Iterator[tuple[str, Commit]]:
        commit_id = self.resolve(revision)
        while commit_id:
            commit = self.read(commit_id)
            yield commit_id, commit
            commit_id = commit.parent

    def open_pull_request(self, title: str, author: str) -> int:
        state = self.state
        number = len(state["pull_requests"]) + 1
        request = {"num": number, "title": title, "author": author, "createdAt": now(), "status": "draft"}
        refs = state["refs"] | {f"refs/pr/{number}": self.resolve("main")}
        self.set(pull_requests=[*state["pull_requests"], request], refs=refs)
        return number


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def write(path: Path, data: bytes) -> None:
    """Puts a file in its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(data)
    temporary.replace(path)


def card_data(readme: bytes) -> dict:
    """The YAML at the head of a model card; {} where there is none."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", readme.decode(), re.DOTALL)
    return (yaml.safe_load(block[1]) or {}) if block else {}


def card_errors(readme: bytes, kind: str = "model") -> list[str]:
    """What is wrong in a model card's YAML, with the strictness of the real Hub's form."""
    try:
        data = card_data(readme)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return [f"invalid YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata must be an object"]

    def strings(value) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))

    if kind == "space":
        colors = [name for name in ("colorFrom", "colorTo") if data.get(name) not in SPACE_COLORS]
        errors = [f'"{name}" must be one of {SPACE_COLORS}' for name in colors]
        errors += [] if data.get("sdk") in SPACE_SDKS else [f'"sdk" must be one of {SPACE_SDKS}']
        errors += [f'"{name}" is required' for name in ("title", "emoji") if not data.get(name)]
        return errors + ([] if len(data.get("short_description", "")) <= 60 else ['"short_description" is too long'])
    names = ("tags", "language", "datasets", "metrics", "base_model", "license")
    errors = [f'"{name}" must be a string or an array of strings' for name in names if not strings(data.get(name, ""))]
    errors += ['"tags" must be an array'] if isinstance(data.get("tags"), str) else []
    if errors:
        return errors
    licenses, languages = (
        [value] if isinstance(value := data.get(key, []), str) else value for key in ("license", "language")
    )
    errors += [f'"license" must be one of the known ones, not "{name}"' for name in licenses if name not in LICENSES]
    errors += ['"license: other" needs "license_name"'] if "other" in licenses and not data.get("license_name") else []
    errors += [f'"{x}" is no language code' for x in languages if not re.fullmatch(r"[a-z]{2,3}(-\w+)?|code|multilingual", x)]
    if data.get("pipeline_tag", "other") not in PIPELINE_TAGS:
        errors.append(f'"pipeline_tag" must be one of the known ones, not "{data["pipeline_tag"]}"')
    if not isinstance(data.get("library_name", ""), str):
        errors.append('"library_name" must be a string')
    return errors


@dataclass(repr=False)
class Store:
    """All repositories. Names are models' ("tost/mine"), or "datasets/tost/mine", "spaces/tost/mine"."""

    root: Path
    lfs_threshold: int = 10_000_000  # bytes; a larger file goes to LFS whatever its name

    def __post_init__(self):
        self.locks = defaultdict(threading.RLock)
        self.lock = threading.Lock()

    def repository(self, name: str) -> Repository:
        kind, _, rest = name.partition("/")
        return Repository(self, kind, rest) if kind in ("datasets", "spaces") else Repository(self, "models", name)

    def create(self, name: str, files: dict[str, bytes] | None = None, private: bool = False, gated: bool = False) -> str:
        """Makes a repository; returns its head."""
        self.repository(name).create("tost", private, gated)
        return self.commit(name, files) if files else self.head(name)

    def commit(self, name: str, files: dict[str, bytes | None], revision: str = "main") -> str:
        """Commits files past all checks of paths and contents (None deletes one); returns the commit."""
        repository = self.repository(name)
        with repository.lock:
            parent = repository.resolve(revision)
            changed = {path: self.entry(path, data) for path, data in files.items() if data is not None}
            tree = {path: entry for path, entry in repository.read(parent).tree.items() if path not in files} | changed
            return repository.commit(f"refs/heads/{revision}", Commit(tree, parent, "direct", "", "tost", now()))

    def head(self, name: str, revision: str = "main") -> str:
        return self.repository(name).resolve(revision)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """All files, but for the .gitattributes every repository begins with."""
        repository = self.repository(name)
        tree = repository.read(repository.resolve(revision)).tree
        return {path: self.object(entry.sha256).read_bytes() for path, entry in tree.items() if path != ".gitattributes"}

    def commits(self, name: str, revision: str = "main") -> list[str]:
        """Ids, the newest first; the last is the server's initial one."""
        return [commit_id for commit_id, _ in self.repository(name).history(revision)]

    def refs(self, name: str) -> dict[str, str]:
        return self.repository(name).state["refs"]

    def object(self, sha256: str) -> Path:
        return self.root / "objects" / sha256

    def store(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        write(self.object(sha256), data)
        return sha256

    def regular(self, data: bytes) -> Entry:
        return Entry.of(self.store(data), data, len(data))

    def is_lfs(self, path: str, size: int) -> bool:
        return size > 0 and (path.endswith(LFS_SUFFIXES) or size > self.lfs_threshold)

    def entry(self, path: str, data: bytes) -> Entry:
        return Entry.of(self.store(data), None, len(data)) if self.is_lfs(path, len(data)) else self.regular(data)

    def changed(self, tree: dict[str, Entry], operations: list[dict]) -> dict[str, Entry]:
        """The tree of a commit, made of its parent's and of what the client sent."""
        tree = dict(tree)
        for operation in operations:
            value, path = operation["value"], operation["value"]["path"]
            if path.startswith("/") or {"..", ""} & set(path.rstrip("/").split("/")):
                raise HubError(400, f"Invalid path: {path}")
            match operation["key"]:
                case "file":
                    content = base64.b64decode(value["content"])
                    if path == "README.md" and card_errors(content):
                        raise HubError(400, "Invalid metadata in README.md: " + "; ".join(card_errors(content)))
                    if self.is_lfs(path, len(content)):
                        raise HubError(400, f"{path} must be uploaded to LFS")
                    tree[path] = self.regular(content)
                case "lfsFile":
                    if not self.object(value["oid"]).exists():
                        raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
                    tree[path] = Entry.of(value["oid"], None, self.object(value["oid"]).stat().st_size)
                case "deletedFile":
                    if tree.pop(path, None) is None:
                        raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
                case other:
                    raise HubError(400, f"Unknown operation: {other}")
        return tree

    def parsed(self, commit: Commit, path: str, parse: Callable[[bytes], dict]) -> dict:
        try:
            return parse(self.object(commit.tree[path].sha256).read_bytes())
        except (KeyError, ValueError, yaml.YAMLError):  # not there, or not readable
            return {}
